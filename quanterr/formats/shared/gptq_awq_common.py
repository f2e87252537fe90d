"""Tensor names and configuration keys that GPTQ, AWQ and AutoRound share.

qweight, qzeros, scales, g_idx    the parts of X.weight are X.qweight, X.qzeros …
bits, w_bit                       config.json, quantize_config.json, quant_config.json
group_size, q_group_size          -1: a whole row
"""

from quanterr.checkpoints import Entry
from quanterr.formats.base import Parts, PartSpec
from quanterr.kernel.packing import CodePacking

FLOATS = frozenset({"F16", "BF16", "F32"})
WORDS = frozenset({"I32"})

SCALE = PartSpec(("{module}.scales",), FLOATS)
ORDER = PartSpec(("{module}.g_idx",), WORDS, optional=True)


def read_declared_bits(parts: Parts) -> int | None:
    """Return the bits of a code that the configuration declares for the weight."""
    scheme = parts.hints.declarations.of(parts.name)
    return scheme.bits if scheme else None


def read_declared_group_size(parts: Parts) -> int | None:
    """Return the number of columns in a block that the configuration declares for the weight; -1 means a whole row."""
    scheme = parts.hints.declarations.of(parts.name)
    return scheme.group_size if scheme else None


def find_gemm_bits(codes: Entry, scale: Entry) -> list[int]:
    """Return the numbers of bits per code with which the shapes fit AWQ's gemm layout, the likeliest first."""
    if len(codes.shape) != 2 or len(scale.shape) != 2:
        return []
    return [
        bits for bits in (4, 2, 3, 5, 6, 7, 8) if codes.shape[1] == CodePacking("dense", bits).count(scale.shape[1])
    ]


def is_gemv(parts: Parts) -> bool:
    """Return whether the shapes fit AWQ's gemv layout: a row of codes, of scales and of zero points for each output."""
    shapes = [parts[role].shape for role in ("codes", "scale", "zero_point")]
    if any(len(shape) != 2 for shape in shapes):
        return False
    codes, scale, zero_point = shapes
    return codes[0] == scale[0] == zero_point[0] and scale[1] == 8 * zero_point[1]
