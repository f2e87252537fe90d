"""The formats that a runtime can load together in a checkpoint."""

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from quanterr.advice.quantizers import UNQUANTIZED

# The formats that a runtime loads for a way to declare codes; the rules of findings/runtimes use them, too.
OF_COMPRESSED_TENSORS = frozenset(  # vLLM
    [
        "ct_pack",
        "ct_int",
        "ct_nvfp4",
        "ct_mxfp4",
        "fp8_tensor",
        "fp8_row",
        "fp8_block",
        "int8_tensor",
        "int8_row",
        "mxfp8",
    ]
)
OF_MODELOPT = frozenset(["fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "nvfp4", "nvfp4_experts"])  # vLLM
OF_COMFYUI = frozenset(
    [
        "fp8_tensor",
        "fp8_row",
        "fp8_block",
        "int8_tensor",
        "int8_row",
        "int8_block",
        "int8_convrot",
        "mxfp8",
        "nvfp4",
        "svdquant_w4a4",
        "awq_w4a16",
        "asym_w4a8_int8",
        "convrot_w4a4",
        "int4_tensorwise",
    ]
)
# Runtime → formats that layers of one checkpoint may have. A format that is missing here cannot be mixed with others.
LOADED_TOGETHER: Mapping[str, Collection[str]] = {
    "llama.cpp": ("gguf_*",),
    "MLX": ("mlx_*",),
    "vLLM, by config groups of compressed-tensors": OF_COMPRESSED_TENSORS,
    "vLLM and TensorRT-LLM, by ModelOpt's MIXED_PRECISION": OF_MODELOPT | {"modelopt_int4"},
    "ComfyUI, by the label of each layer": OF_COMFYUI,
    "torchao": ("torchao_*",),
    "optimum-quanto": ("quanto_*",),
    "Nunchaku": ("nunchaku_*",),
}


def load_together(formats: Collection[str]) -> bool:
    """Return whether any runtime loads a checkpoint whose layers have these formats."""
    quantized = set(formats).difference(UNQUANTIZED)  # every runtime also loads unquantized layers
    return len(quantized) < 2 or any(
        all(any(fnmatchcase(quantized_format, pattern) for pattern in patterns) for quantized_format in quantized)
        for patterns in LOADED_TOGETHER.values()
    )
