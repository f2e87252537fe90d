"""The tensor types of ggml: their ids in a GGUF file, and the layout of their blocks.

Reference: ggml-org/llama.cpp ggml/include/ggml.h (enum ggml_type) and ggml/src/ggml-common.h (block layouts); I2_S and
the ids from 133 on: ikawrakow/ik_llama.cpp, the same files, and ggml/src/ggml.c (row_meta_size, ggml_nbytes); 100 and
101: ciru-ai/ROCmFPX ggml/rocmfp4/rocmfp4.h.
"""

from math import prod
from typing import NamedTuple


class GgmlType(NamedTuple):
    """A tensor type. A row consists of whole blocks, without padding between them.

    ``head`` bytes precede the blocks of each row. If ``rows`` is not 1, that many rows are interleaved: first their
    heads, then the bytes of all first blocks, in an order that depends on the type, then those of all second blocks.
    """

    number: int  # id in a GGUF file
    name: str  # for a type without blocks, the name in a safetensors header
    elements: int = 1  # elements of a block, in one row
    n_bytes: int = 0  # bytes of a block; 0: the type has no blocks
    head: int = 0
    rows: int = 1
    tail: int = 0  # bytes after the last row

    @property
    def plain(self) -> str:
        """The type that stores the same numbers row by row."""
        return self.name.rpartition("_R")[0] if self.rows > 1 else self.name

    def count_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a tensor whose rows are whole blocks."""
        blocks = prod(shape) // self.elements * self.n_bytes
        return blocks + prod(shape[:-1]) * self.head + self.tail


_TYPES = (
    GgmlType(0, "F32"),
    GgmlType(1, "F16"),
    GgmlType(2, "Q4_0", 32, 18),
    GgmlType(3, "Q4_1", 32, 20),
    GgmlType(6, "Q5_0", 32, 22),
    GgmlType(7, "Q5_1", 32, 24),
    GgmlType(8, "Q8_0", 32, 34),
    GgmlType(10, "Q2_K", 256, 84),
    GgmlType(11, "Q3_K", 256, 110),
    GgmlType(12, "Q4_K", 256, 144),
    GgmlType(13, "Q5_K", 256, 176),
    GgmlType(14, "Q6_K", 256, 210),
    GgmlType(16, "IQ2_XXS", 256, 66),
    GgmlType(17, "IQ2_XS", 256, 74),
    GgmlType(18, "IQ3_XXS", 256, 98),
    GgmlType(19, "IQ1_S", 256, 50),
    GgmlType(20, "IQ4_NL", 32, 18),
    GgmlType(21, "IQ3_S", 256, 110),
    GgmlType(22, "IQ2_S", 256, 82),
    GgmlType(23, "IQ4_XS", 256, 136),
    GgmlType(24, "I8"),
    GgmlType(25, "I16"),
    GgmlType(26, "I32"),
    GgmlType(27, "I64"),
    GgmlType(28, "F64"),
    GgmlType(29, "IQ1_M", 256, 56),
    GgmlType(30, "BF16"),
    GgmlType(34, "TQ1_0", 256, 54),
    GgmlType(35, "TQ2_0", 256, 66),
    GgmlType(36, "I2_S", 128, 32, tail=32),
    GgmlType(39, "MXFP4", 32, 17),
    GgmlType(40, "NVFP4", 64, 36),
    GgmlType(41, "Q1_0", 128, 18),
    GgmlType(42, "Q2_0", 64, 18),
    GgmlType(100, "Q4_0_ROCMFP4", 32, 18),
    GgmlType(101, "Q4_0_ROCMFP4_FAST", 32, 17),
    GgmlType(133, "Q6_0", 32, 26),
    GgmlType(134, "IQ1_BN", 64, 13, head=2),
    GgmlType(135, "IQ2_BN", 64, 16, head=4),
    GgmlType(137, "IQ2_K", 256, 76),
    GgmlType(138, "IQ3_K", 256, 110),
    GgmlType(139, "IQ4_K", 256, 144),
    GgmlType(140, "IQ5_K", 256, 176),
    GgmlType(141, "IQ6_K", 256, 212),
    GgmlType(144, "IQ4_KS", 256, 136, head=4),
    GgmlType(145, "IQ2_KS", 256, 70, head=2),
    GgmlType(146, "IQ4_KSS", 256, 128, head=4),
    GgmlType(151, "Q8_KV", 32, 32, head=8),
    GgmlType(152, "IQ5_KS", 256, 168, head=4),
    GgmlType(142, "PQ2_0", 128, 34),
    GgmlType(143, "PTQ1_0", 128, 28),
    GgmlType(153, "IQ2_KT", 256, 68, head=4),
    GgmlType(154, "IQ3_KT", 256, 100, head=4),
    GgmlType(155, "IQ4_KT", 256, 128, head=4),
    GgmlType(156, "IQ3_KS", 256, 102, head=2),
    GgmlType(157, "IQ2_KL", 256, 86, head=2),
    GgmlType(158, "IQ1_KT", 256, 56, head=4),
    GgmlType(202, "Q4_0_R8", 32, 18, rows=8),
    GgmlType(206, "Q5_0_R4", 32, 22, rows=4),
    GgmlType(208, "Q8_0_R8", 32, 34, rows=8),
    GgmlType(210, "Q2_K_R4", 256, 84, rows=4),
    GgmlType(211, "Q3_K_R4", 256, 110, rows=4),
    GgmlType(212, "Q4_K_R4", 256, 144, rows=4),
    GgmlType(213, "Q5_K_R4", 256, 176, rows=4),
    GgmlType(214, "Q6_K_R4", 256, 210, rows=4),
    GgmlType(216, "IQ2_XXS_R4", 256, 66, rows=4),
    GgmlType(217, "IQ2_XS_R4", 256, 74, rows=4),
    GgmlType(218, "IQ3_XXS_R4", 256, 98, rows=4),
    GgmlType(219, "IQ1_S_R4", 32, 6, head=2, rows=4),
    GgmlType(220, "IQ4_NL_R4", 32, 18, rows=4),
    GgmlType(221, "IQ3_S_R4", 256, 110, rows=4),
    GgmlType(222, "IQ2_S_R4", 256, 82, rows=4),
    GgmlType(223, "IQ4_XS_R8", 256, 136, rows=8),
    GgmlType(229, "IQ1_M_R4", 32, 7, head=2, rows=4),
    GgmlType(233, "Q6_0_R4", 32, 26, rows=4),
    GgmlType(335, "IQ2_BN_R4", 64, 16, head=4, rows=4),
    GgmlType(337, "IQ2_K_R4", 256, 76, rows=4),
    GgmlType(338, "IQ3_K_R4", 256, 110, rows=4),
    GgmlType(339, "IQ4_K_R4", 256, 144, rows=4),
    GgmlType(340, "IQ5_K_R4", 256, 176, rows=4),
    GgmlType(344, "IQ4_KS_R4", 256, 136, head=4, rows=4),
    GgmlType(352, "IQ5_KS_R4", 256, 168, head=4, rows=4),
    GgmlType(353, "MXFP4_R8", 32, 17, rows=8),
    GgmlType(397, "Q8_K_R16", 256, 258, rows=16),
    GgmlType(398, "Q8_KV_R8", 32, 32, head=4, rows=8),
    GgmlType(399, "Q8_K_R8", 256, 258, rows=8),
)
TYPES = {row.number: row.name for row in _TYPES}
OF_NAME = {row.name: row for row in _TYPES if row.n_bytes}  # the types with blocks
# Name → (elements, bytes) of a block.
BLOCKS = {name: (row.elements, row.n_bytes) for name, row in OF_NAME.items()}

_BITNET = "microsoft/BitNet's fork of llama.cpp"  # in its ggml.h, new types have the ids of removed ones
_IK = "ik_llama.cpp"
_REMOVED = "which llama.cpp has removed; convert the model again"
_INPUTS = "which is only for activations"
# Ids of types that quanterr refuses to read → (name, reason).
REFUSED = {
    **{number: (name, _REMOVED) for number, name in {4: "Q4_2", 5: "Q4_3"}.items()},
    **{number: (name, _REMOVED) for number, name in {31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}.items()},
    **{
        number: (
            f"{fork} or {name}",
            f"{fork} in {_BITNET}, {name} in old files of llama.cpp, which has removed it; convert the model again",
        )
        for number, fork, name in ((37, "I8_S", "IQ4_NL_4_8"), (38, "TL1", "IQ4_NL_8_8"))
    },
    **{number: (name, _INPUTS) for number, name in {9: "Q8_1", 15: "Q8_K", 97: "Q8_0_X4", 98: "Q8_1_X4"}.items()},
    **{number: (name, _INPUTS) for number, name in {99: "Q8_2_X4", 136: "Q8_K64", 147: "Q8_K16"}.items()},
    **{number: (name, _INPUTS) for number, name in {148: "Q8_K32", 149: "Q8_KR8", 150: "Q8_K128"}.items()},
    **{
        number: (name, "of TurboQuant's forks of llama.cpp, which give different blocks this id; compare another file")
        for number, name in {44: "TQ3_1S", 45: "TQ3_1S or TQ4_1S", 46: "TQ3_4S"}.items()
    },
    230: ("BF16_R16", f"which {_IK} makes when it loads a model; convert the model without repacking"),
}
# Id → (name, reason) for tensors whose bytes do not fit the type above with this id.
IN_FORKS = {
    36: (
        "I2_S or IQ4_NL_4_4",
        f"I2_S in {_BITNET}, which the stored bytes do not fit, or IQ4_NL_4_4 in old files of llama.cpp, {_REMOVED}",
    ),
    **{
        number: (name, f"of old files of {_IK}: too few bytes for {fork}, which has this id in PrismML's fork")
        for number, fork, name in ((142, "PQ2_0", "IQ2_TN"), (143, "PTQ1_0", "IQ1_TN"))
    },
    39: ("TL2", f"as {_BITNET} may have it: too few bytes are stored for MXFP4, which has this id in llama.cpp"),
}

# Name → the scheme by which llama.cpp's CPU backend rounds the inputs of such a weight (its vec_dot_type). Q4_1 and
# Q5_1 have Q8_1: Q8_0 with the sum of each block in float16, which adds an error of up to 2^-11 of the sum.
# Reference: ggml-org/llama.cpp ggml/src/ggml-cpu/ggml-cpu.c, type_traits_cpu.
# For ik_llama.cpp's types: ggml/src/ggml.c, type_traits. Types without a scheme have inputs in blocks of other sizes,
# rotated inputs (PrismML's), or are computed on GPUs (ROCmFPX's).
_OTHER_INPUTS = frozenset(
    {"PQ2_0", "PTQ1_0", "I2_S", "Q8_KV", "Q8_KV_R8", "IQ1_BN", "IQ2_BN", "IQ2_BN_R4", "IQ1_S_R4", "IQ1_M_R4"}
    | {"Q4_0_ROCMFP4", "Q4_0_ROCMFP4_FAST"}
)
INPUT_SCHEMES = {
    name: "q8_k" if size == 256 and not name.endswith("_KT") else "q8_0"
    for name, (size, _) in BLOCKS.items()
    if name not in _OTHER_INPUTS
}


def lacks_leading_ones(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a stored shape is ``shape`` without leading ones.

    llama-quantize and stable-diffusion.cpp write shapes this way: ggml-org/llama.cpp ggml/src/ggml.c, ``ggml_n_dims``.
    """
    lost = len(shape) - len(stored)
    return lost > 0 and shape == (1,) * lost + stored
