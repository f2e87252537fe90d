"""The tensor types of ggml: their ids in a GGUF file, and the layout of their blocks.

Reference: ggml-org/llama.cpp ggml/include/ggml.h (enum ggml_type) and ggml/src/ggml-common.h (block layouts).
"""

# Id → name. Types without blocks have their name in a safetensors header.
TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
}

_BITNET = "microsoft/BitNet's fork of llama.cpp"  # its ggml/include/ggml.h has reused the ids of removed types
_REMOVED = "which llama.cpp has removed; convert the model again"
# Ids that no weight of llama.cpp has → (name, reason).
REFUSED = {
    **{number: (name, _REMOVED) for number, name in {4: "Q4_2", 5: "Q4_3"}.items()},
    **{number: (name, _REMOVED) for number, name in {31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}.items()},
    **{
        number: (
            f"{fork} or {name}",
            f"{fork} in {_BITNET}, {name} in old files of llama.cpp, which has removed it; convert the model again",
        )
        for number, fork, name in ((36, "I2_S", "IQ4_NL_4_4"), (37, "I8_S", "IQ4_NL_4_8"), (38, "TL1", "IQ4_NL_8_8"))
    },
    9: ("Q8_1", "which is only for activations"),
    15: ("Q8_K", "which is only for activations"),
}
# Id → (name, reason) if a tensor has too few bytes to be what llama.cpp has under this id.
IN_FORKS = {
    39: ("TL2", f"as {_BITNET} may have it: too few bytes are stored for MXFP4, which has this id in llama.cpp")
}

# Name → (elements, bytes) of a block. A row consists of whole blocks, without padding between them.
BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
    "Q1_0": (128, 18),
    "Q2_0": (64, 18),
}

# Name → the scheme by which llama.cpp's CPU backend rounds the inputs of such a weight (its vec_dot_type). For Q4_1 and
# Q5_1 that is Q8_1: Q8_0 with the sum of each block, whose rounding to float16 adds an error of up to 2^-11 of the sum.
# Reference: ggml-org/llama.cpp ggml/src/ggml-cpu/ggml-cpu.c, type_traits_cpu.
INPUT_SCHEMES = {name: "q8_k" if size == 256 else "q8_0" for name, (size, _) in BLOCKS.items()}


def lacks_leading_ones(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a stored shape is ``shape`` without leading ones.

    llama-quantize and stable-diffusion.cpp write shapes this way: ggml-org/llama.cpp ggml/src/ggml.c, ``ggml_n_dims``.
    """
    lost = len(shape) - len(stored)
    return lost > 0 and shape == (1,) * lost + stored
