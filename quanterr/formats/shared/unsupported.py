"""Known layouts that quanterr does not read, identified by tensor names or config.json, each with the reason.

These are consulted when no format fits, so that a report states what the file is and what to do, not only what is
missing.
"""

from collections.abc import Mapping
from typing import NamedTuple

from quanterr.checkpoints import Entry
from quanterr.util.strict_json import JsonFields

SETTINGS = ("quant_method", "quant_algo", "checkpoint_format", "format")  # keys of config.json that name a layout
TENSORRT_LLM_REASON = (
    "its codes are packed and ordered for TensorRT-LLM; let ModelOpt export the model in Hugging Face's layout "
    "(export_hf_checkpoint), and compare that"
)
REMEDY = "let the library that wrote it write the dequantized model, and compare that"


class Refusal(NamedTuple):
    """A layout that is not read: the tensor names in its modules, its names in config.json, and the reason."""

    name: str
    stored: frozenset[str]
    called: frozenset[str]
    reason: str
    nonzero: str | None = None  # tensor that is nonzero in this layout, but zero or absent in the supported one


def _make_row(name: str, stored: str, called: str, reason: str, nonzero: str | None = None) -> Refusal:
    return Refusal(name, frozenset(stored.split()), frozenset(called.split()), reason, nonzero)


REFUSALS = (
    _make_row("TensorRT-LLM's own checkpoint", "weight weights_scaling_factor", "", TENSORRT_LLM_REASON),
    _make_row("TensorRT-LLM's own checkpoint", "weight weights_block_scaling_factor", "", TENSORRT_LLM_REASON),
    _make_row("TensorRT-LLM's own checkpoint", "weight per_channel_scale", "", TENSORRT_LLM_REASON),
    _make_row(
        "HIGGS",
        "weight scales tables tables2",
        "higgs",
        "its codes are ordered for one GPU model; load it there with transformers and compare what "
        "model.dequantize() saves",
    ),
    _make_row(
        "FP-Quant",
        "qweight scales forward_hadamard_matrix",
        "fp_quant",
        f"its weights are rotated by a stored matrix; {REMEDY}",
    ),
    _make_row(
        "FP-Quant",
        "dqweight forward_hadamard_matrix",
        "",
        f"its weights are still rotated by a stored matrix; {REMEDY}",
    ),
    _make_row(
        "SDNQ with quantized scales",
        "weight scale scale_2",
        "",
        f"its scales are quantized as well; {REMEDY}",
    ),
    _make_row(
        "FourOverSix",
        "quantized_weight_values quantized_weight_scale_factors",
        "fouroversix",
        f"its E2M1 codes have two kinds of blocks, with separately ordered scales; {REMEDY}",
    ),
    _make_row(
        "ModelSlim with FlatQuant",
        "weight weight_scale left_trans right_trans",
        "",
        f"its columns are transformed by two matrices; {REMEDY}",
    ),
    _make_row(
        "ModelSlim with SVD",
        "weight weight_scale svd_lowrank_l1 svd_lowrank_l2",
        "",
        f"a layer is its codes and a low-rank product; {REMEDY}",
    ),
    _make_row(
        "QTIP",
        "trellis SU SV",
        "qtip",
        f"its trellis has several codes, and which one is not stored; {REMEDY}",
    ),
    _make_row(
        "BitBLAS",
        "",
        "bitblas",
        "its codes are ordered for one GPU kernel; compare the GPTQ or AWQ checkpoint it was made from",
    ),
    _make_row("DeepSpeedFP", "", "deepspeedfp", f"its codes are ordered for DeepSpeed's kernels; {REMEDY}"),
    _make_row(
        "bitsandbytes INT8 in tiles",
        "weight SCB weight_format",
        "",
        "its weight_format is not 0 (row major), but an order of old GPU kernels; load it with transformers and "
        "bitsandbytes, and save it again",
        "weight_format",
    ),
    _make_row(
        "NVFP4_SVD",
        "weight svdquant_lora_a svdquant_lora_b",
        "nvfp4_svd",
        f"a layer is its codes and a low-rank product; {REMEDY}",
    ),
)


def explain_unsupported(stored: Mapping[str, Entry], config: JsonFields) -> str | None:
    """Return why a module with these tensors is not read; None if no known layout matches.

    ``config`` holds the settings of config.json. Tensor names are checked first: settings apply to all modules.
    """
    settings = {value.lower() for name in SETTINGS if isinstance(value := config.get(name), str)}
    for by_name in (True, False):
        for row in REFUSALS:
            matches = row.stored and row.stored <= stored.keys() if by_name else row.called & settings
            if matches and (row.nonzero is None or any(stored[row.nonzero].read())):
                return f"stored as {row.name}, which is not supported: {row.reason}"
    return None
