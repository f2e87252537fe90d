"""The formats that a runtime loads in a checkpoint."""

from collections.abc import Collection
from fnmatch import fnmatchcase

from quanterr.advice.quantizers import UNQUANTIZED

# Runtime → formats that different layers of a checkpoint may have. A format that is missing here allows no others.
LOADED_TOGETHER = {
    "llama.cpp": ("gguf_*",),
    "MLX": ("mlx_*",),
    "vLLM, by config groups of compressed-tensors": (
        *("ct_pack", "ct_int", "ct_nvfp4", "ct_mxfp4", "ct_mxfp6"),
        *("fp8_tensor", "fp8_row", "fp8_block", "int8_tensor", "int8_row", "mxfp8"),
    ),
    "vLLM and TensorRT-LLM, by ModelOpt's MIXED_PRECISION": (
        *("fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "nvfp4", "nvfp4_experts", "modelopt_int4"),
    ),
    "ComfyUI, by the label of each layer": (
        *("fp8_tensor", "fp8_row", "fp8_block", "int8_tensor", "int8_row", "int8_block", "int8_convrot"),
        *("mxfp8", "nvfp4", "svdquant_w4a4", "awq_w4a16", "asym_w4a8_int8", "convrot_w4a4", "int4_tensorwise"),
    ),
    "torchao": ("torchao_*",),
    "optimum-quanto": ("quanto_*",),
    "Nunchaku": ("nunchaku_*",),
}


def load_together(formats: Collection[str]) -> bool:
    """Return whether some runtime loads a checkpoint whose layers have these formats."""
    quantized = set(formats).difference(UNQUANTIZED)  # every runtime also loads unquantized layers
    return len(quantized) < 2 or any(
        all(any(fnmatchcase(one, pattern) for pattern in patterns) for one in quantized)
        for patterns in LOADED_TOGETHER.values()
    )
