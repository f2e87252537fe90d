"""Files with correct numbers that a runtime refuses or misreads: rules as data, each found in the runtime's code."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from quanterr.checkpoints import Entry
from quanterr.documents.base import Finding
from quanterr.findings.checks import DECLARED, QUANTIZED, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Contents
from quanterr.util.text import count, listed


class Rule(NamedTuple):
    """Tensors that a runtime refuses or misreads; empty conditions are always met."""

    runtime: str  # with its version
    place: str  # the place in its code
    expects: str
    fails: str  # what it does with other tensors
    name: re.Pattern[str]  # of the tensor, from the module's name on
    dtypes: frozenset[str] = frozenset()
    dimensions: int | None = None
    method: str = ""  # quant_method that config.json declares
    beside: Mapping[
        str, frozenset[str]
    ] = {}  # ending of the name of another tensor of the module → its dtypes; {}: any


FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})
RULES = (
    Rule(
        "vLLM (at 0045689bdb23)",
        "vllm/model_executor/parameter.py: _ColumnvLLMParameter.load_column_parallel_weight and BasevLLMParameter."
        "_assert_and_load want equal shapes; fp8_utils.py, create_fp8_scale_parameter, and "
        "schemes/compressed_tensors_w8a8_int8.py make it (rows, 1)",
        "scales of channels as [rows, 1], not [rows]",
        "refuses the file with an AssertionError",
        re.compile(r"\.weight_scale$"),
        dimensions=1,
        method="compressed-tensors",
        beside={".weight": FLOAT8 | {"I8"}},
    ),
    Rule(
        "ComfyUI with comfy-kitchen 0.2.0",
        "comfy_kitchen/backends/eager/__init__.py and triton/__init__.py: FunctionConstraints of "
        "dequantize_per_tensor_fp8; from 0.2.1 on, TensorCoreFP8Layout.Params converts the scale",
        "scales of FP8 weights as F32",
        "refuses them with NoCapableBackendError; from 0.2.1 on, it converts them",
        re.compile(r"\.weight_scale$"),
        dtypes=frozenset({"BF16", "F16"}),
        beside={".weight": FLOAT8, ".comfy_quant": frozenset()},
    ),
    Rule(
        "transformers 5.24.0",
        "quantizers/quantizer_compressed_tensors.py: CompressedTensorsHfQuantizer.serialized_names; "
        "integrations/compressed_tensors.py: CompressedTensorsDequantize",
        "codes of each expert as weight_packed of a module of its own",
        "does not map them to the experts, which keep random values",
        re.compile(r"\.experts\.(?:gate_up_proj|down_proj)_packed$"),
        method="compressed-tensors",
    ),
    Rule(
        "vLLM (at 0045689bdb23)",
        "vllm/model_executor/layers/quantization/modelopt.py: ModelOptFp8LinearMethod.create_weights; the names are in "
        "NVIDIA/TensorRT-LLM docs/source/architecture/checkpoint.md",
        "scales as weight_scale, not under TensorRT-LLM's name weights_scaling_factor",
        "does not find them; TensorRT-LLM reads them",
        re.compile(r"\.weights_scaling_factor$"),
        beside={".weight": FLOAT8},
    ),
    Rule(
        "ComfyUI (at 617048a59f17) and diffusers 0.42.1",
        "comfy/ldm/lumina/model.py: NextDiT.__init__; models/transformers/transformer_z_image.py: "
        "ZImageTransformer2DModel.__init__; both load with equal shapes only",
        "pad tokens as [1, D], not [D]",
        "refuse the file: size mismatch",
        re.compile(r"(?:^|\.)(?:x|cap|siglip)_pad_token$"),
        dimensions=1,
    ),
)


@check("unloadable", needs=DECLARED, of=QUANTIZED)
def check_runtimes(contents: Contents) -> Iterator[Finding]:
    """Report tensors that a runtime refuses or misreads, although their numbers are right, in one finding per rule."""
    entries, method = contents.checkpoint.entries, contents.labels.method
    for rule in (rule for rule in RULES if rule.method in ("", method)):
        if found := [entry for entry in entries.values() if _is_met(rule, entry, entries)]:
            yield _report(rule, found)


def _is_met(rule: Rule, entry: Entry, entries: Mapping[str, Entry]) -> bool:
    match = rule.name.search(entry.name)
    if match is None or (rule.dtypes and entry.dtype not in rule.dtypes):
        return False
    if rule.dimensions is not None and (len(entry.shape) != rule.dimensions or entry.n < 2):
        return False
    module = entry.name[: match.start()]
    others = ((entries.get(module + ending), dtypes) for ending, dtypes in rule.beside.items())
    return all(other is not None and (not dtypes or other.dtype in dtypes) for other, dtypes in others)


def _report(rule: Rule, found: list[Entry]) -> Finding:
    message = (
        f"{rule.runtime} expects {rule.expects}, and {rule.fails}: {count(len(found), 'tensor')}: "
        f"{listed([f'{entry.name} ({entry.dtype} {list(entry.shape)})' for entry in found], 3)}"
    )
    remedy = "store them as expected if this runtime is to load the file"
    names = [entry.name for entry in found]
    return make_finding("unloadable", "warning", None, message, remedy, tensors=names, place=rule.place)
