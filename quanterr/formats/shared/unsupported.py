"""Layouts that are known and not read, given by the names of their tensors or by config.json: each with the reason.

Asked when no format fits, so that a report says what a file is and what to do, and not only what it lacks.
"""

from collections.abc import Mapping
from typing import NamedTuple

from quanterr.checkpoints import Entry
from quanterr.util.strict_json import JsonFields

SETTINGS = ("quant_method", "quant_algo", "checkpoint_format", "format")  # of config.json, that name a layout
DEQUANTIZE = "let its own library write the dequantized model, and compare that"


class Refusal(NamedTuple):
    """A layout: names that all are stored in its modules, or what config.json calls it, and why it is not read."""

    name: str
    stored: frozenset[str]
    called: frozenset[str]
    reason: str
    nonzero: str | None = None  # a tensor that is not zero in this layout, and is zero or absent in the supported one


def _row(name: str, stored: str, called: str, reason: str, nonzero: str | None = None) -> Refusal:
    return Refusal(name, frozenset(stored.split()), frozenset(called.split()), reason, nonzero)


REFUSALS = (
    _row(
        "HIGGS",
        "weight scales tables tables2",
        "higgs",
        "its codes are ordered for one GPU model; load it there with transformers and compare what "
        "model.dequantize() saves",
    ),
    _row(
        "FP-Quant",
        "qweight scales forward_hadamard_matrix",
        "fp_quant",
        f"its weights are rotated by a stored matrix; {DEQUANTIZE}",
    ),
    _row(
        "FP-Quant",
        "dqweight forward_hadamard_matrix",
        "",
        f"its weights are still rotated by a stored matrix; {DEQUANTIZE}",
    ),
    _row("SDNQ", "weight scale scale_2", "", f"its scales are quantized as well; {DEQUANTIZE}"),
    _row("SINQ", "W_q scale2", "sinq", f"it has row scales and column scales; {DEQUANTIZE}"),
    _row(
        "FourOverSix",
        "quantized_weight_values quantized_weight_scale_factors",
        "fouroversix",
        f"its E2M1 codes have two kinds of blocks, with separately ordered scales; {DEQUANTIZE}",
    ),
    _row(
        "QQQ",
        "B s_channel",
        "qqq",
        f"its codes are in the order of Marlin kernels, with scales of scales; {DEQUANTIZE}",
    ),
    _row(
        "ParoQuant",
        "theta pairs channel_scales",
        "paroquant",
        f"pairs of its channels are rotated at run time; {DEQUANTIZE}",
    ),
    _row(
        "QTIP",
        "trellis SU SV",
        "qtip",
        f"its trellis has several codes, and which one is not stored; {DEQUANTIZE}",
    ),
    _row(
        "BitBLAS",
        "",
        "bitblas",
        "its codes are ordered for one GPU kernel; compare the GPTQ or AWQ checkpoint it was made from",
    ),
    _row("DeepSpeedFP", "", "deepspeedfp", f"its codes are ordered for DeepSpeed's kernels; {DEQUANTIZE}"),
    _row(
        "bitsandbytes INT8 in tiles",
        "weight SCB weight_format",
        "",
        "its weight_format is not 0 (row major), but an order of old GPU kernels; load it with transformers and "
        "bitsandbytes, and save it again",
        "weight_format",
    ),
    _row(
        "NVFP4_SVD",
        "weight svdquant_lora_a svdquant_lora_b",
        "nvfp4_svd",
        f"a layer is its codes and a low-rank product; {DEQUANTIZE}",
    ),
)


def refused(stored: Mapping[str, Entry], config: JsonFields) -> str | None:
    """Why tensors with these names in one module are not read; None where no known layout has them.

    ``config`` are the settings of config.json. Names are reported before settings: those are of all modules.
    """
    settings = {value.lower() for name in SETTINGS if isinstance(value := config.get(name), str)}
    for by_name in (True, False):
        for row in REFUSALS:
            found = row.stored and row.stored <= stored.keys() if by_name else row.called & settings
            if found and (row.nonzero is None or any(stored[row.nonzero].read())):
                return f"stored as {row.name}, which is not supported: {row.reason}"
    return None
