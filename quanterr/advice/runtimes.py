"""The formats that a runtime loads in a checkpoint."""

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from quanterr.advice.quantizers import UNQUANTIZED

# What a runtime loads by one way to declare codes; the rules of findings/runtimes take them from here.
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
# Runtime → formats that different layers of a checkpoint may have. A format that is missing here allows no others.
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
    """Return whether some runtime loads a checkpoint whose layers have these formats."""
    quantized = set(formats).difference(UNQUANTIZED)  # every runtime also loads unquantized layers
    return len(quantized) < 2 or any(
        all(any(fnmatchcase(one, pattern) for pattern in patterns) for one in quantized)
        for patterns in LOADED_TOGETHER.values()
    )
