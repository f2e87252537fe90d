"""SDNQ: every kind of code of up to 8 bits, groups, matrix products, branches, rotations."""

from pathlib import Path

import torch
from common import loader, run
from sdnq import SDNQConfig
from sdnq.dequantizer import dequantize_sdnq_module
from torch import Tensor

INTEGERS = (
    "int8",
    "int7",
    "int6",
    "int5",
    "int4",
    "int3",
    "int2",
    "uint8",
    "uint6",
    "uint5",
    "uint4",
    "uint3",
    "uint2",
)
FLOATS = ("float8_e4m3fn", "float8_e5m2", "fp7", "fp6", "fp5", "fp4", "float6_e2m3fn", "float4_e2m2fnu")
SETTINGS = {name: {"weights_dtype": name} for name in (*INTEGERS, *FLOATS)} | {
    "int8 group": {"weights_dtype": "int8", "group_size": 32},
    "int8 matmul": {"weights_dtype": "int8", "use_quantized_matmul": True},
    "fp8 matmul": {"weights_dtype": "float8_e4m3fn", "use_quantized_matmul": True},
    "uint4 svd": {"weights_dtype": "uint4", "use_svd": True},
    "int4 hadamard": {"weights_dtype": "int4", "use_hadamard": True},
    "uint4 dynamic": {"weights_dtype": "uint4", "use_dynamic_quantization": True},
    "uint4 codebook": {"weights_dtype": "uint4", "use_codebook": True},
}


def quantize(model: Path, setting: dict, folder: Path) -> dict[str, Tensor]:
    """Quantize with transformers, in float32; return the values that SDNQ dequantizes."""
    config = SDNQConfig(minimum_allowed_numel=0, **setting)
    made = loader(model).from_pretrained(model, dtype=torch.float32, quantization_config=config)
    made.save_pretrained(folder)
    return {name: value for name, value in dequantize_sdnq_module(made).state_dict().items() if value.dim() > 1}


def declare(exclude: tuple[str, ...], other_bits: tuple[str, ...]) -> dict:
    """Return the setting that names weights to leave out, and weights for 8 bits instead of 4.

    SDNQ compares with whole names of weights or single words of them, and ignores whole names of modules.
    """
    return {
        "weights_dtype": "uint4",
        "group_size": 32,
        "modules_to_not_convert": [f"{name}.weight" for name in exclude],
        "modules_dtype_dict": {"int8": [f"{name}.weight" for name in other_bits]},
    }


if __name__ == "__main__":
    run("sdnq", SETTINGS, quantize, declare)
