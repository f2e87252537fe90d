"""ParoQuant: AWQ's integers of 4 bits, of columns that were rotated in pairs.

    qweight           i32               (cols, rows / 8), as in AWQ's gemm layout: awq.py
    qzeros            i32               (blocks, rows / 8)
    scales            f16, bf16, f32    (blocks, rows)
    theta             f16, bf16, f32    (rotations, cols / 2): angles
    pairs             i16               (rotations, cols): the columns of each pair, counted from their block's first
    channel_scales    f16, bf16, f32    (1, cols): factors of the layer's input

    coded[r, c] = (code[r, c] - zero_point[r, block of c]) * scales[block of c, r]           rounded
    from the last rotation to the first, each angle t turns its pair of columns i, j in float64:
        x[i], x[j] = x[i] * cos(t) - x[j] * sin(t), x[i] * sin(t) + x[j] * cos(t)
    weight[r, c] = x[r, c] * channel_scales[c]                                               rounded once

The layer multiplies its input by channel_scales and turns the pairs the other way, in the other order. Each column of a
block is in one pair of each rotation.

Reference: paroquant 0.1.16 (PyPI) paroquant/cli/convert.py; ModelCloud/GPTQModel@f4c327a1 gptqmodel/utils/paroquant.py
apply_paroquant_rotation_reference, nn_modules/qlinear/paroquant.py.
"""

from functools import partial

from quanterr.checkpoints import Entry
from quanterr.formats.base import Chunk, Decoder, Format, FormatMismatch, Parts, PartSpec, Values, Weight, Workspace
from quanterr.formats.shared.awq_gemm import read_gemm
from quanterr.formats.shared.column_groups import ColumnBlocks
from quanterr.formats.shared.config_checks import read_integers
from quanterr.formats.shared.element_types import list_integers
from quanterr.formats.shared.gptq_awq_common import FLOATS, SCALE, WORDS
from quanterr.kernel.interpreter import interpret
from quanterr.kernel.packing import CodePacking
from quanterr.lazy_torch import Tensor, torch

PACKING = CodePacking("interleaved", 4)
NEEDS = {
    "codes": PartSpec(("{module}.qweight",), WORDS),
    "scale": SCALE,
    "zero_point": PartSpec(("{module}.qzeros",), WORDS),
    "theta": PartSpec(("{module}.theta",), FLOATS),
    "pairs": PartSpec(("{module}.pairs",), frozenset({"I16"})),
    "channel_scales": PartSpec(("{module}.channel_scales",), FLOATS),
}


def fit(parts: Parts) -> Weight:
    """Return the weight.

    Raises:
        FormatMismatch: shapes do not fit, or a column of a block is in no pair or in two.
    """
    codes, scale, theta = parts.codes, parts["scale"], parts["theta"]
    if len(codes.shape) != 2 or len(scale.shape) != 2 or scale.shape[1] != 8 * codes.shape[1]:
        raise FormatMismatch(f"{scale} should have eight numbers in a row for each word in a row of {codes}")
    (cols, width), (blocks, rows) = codes.shape, scale.shape
    if not blocks or cols % (2 * blocks) or parts["zero_point"].shape != (blocks, width):
        raise FormatMismatch(f"{scale} and {parts['zero_point']} should have a row for each block of {cols} columns")
    rotations = theta.shape[0] if len(theta.shape) == 2 else 0
    for entry, n in (
        (theta, rotations * cols // 2),
        (parts["pairs"], rotations * cols),
        (parts["channel_scales"], cols),
    ):
        if entry.n != n:
            raise FormatMismatch(f"{entry} does not fit {cols} columns and {theta}")
    if not rotations:
        raise FormatMismatch(f"{theta} should have a row for each rotation")
    size = cols // blocks
    _check_pairs(parts["pairs"], size)
    coded = read_gemm(parts, cols, ColumnBlocks(blocks, size), PACKING, list_integers(4))
    return parts.weight(
        (rows, cols),
        partial(dequantize, parts, coded, size),
        block_size=(1, size),
        code_bits=4,
        uniform_bits=4,
        scale=scale,
        evidence=(f"4-bit codes {codes}, {rotations} rotations of pairs in blocks of {size} columns",),
    )


def _check_pairs(entry: Entry, size: int) -> None:
    pairs, every = read_integers(entry), list(range(size))
    if any(sorted(pairs[first : first + size]) != every for first in range(0, len(pairs), size)):
        raise FormatMismatch(f"{entry} should name each of {size} columns of a block once in each rotation")


def dequantize(parts: Parts, coded: Decoder, size: int, chunk: Chunk, workspace: Workspace) -> Values:
    """Return the values with the rotations undone, (r, c)."""
    values = interpret(coded, chunk._replace(col=0, stop_col=parts.codes.shape[0]), workspace).weight
    theta, pairs, factors = (workspace.read_whole(role, parts[role]) for role in ("theta", "pairs", "channel_scales"))
    unrotated = turn_back(values, theta, pairs, size) * factors.view(1, -1).double()
    return Values(unrotated[:, chunk.col : chunk.stop_col].float().contiguous())


def turn_back(values: Tensor, theta: Tensor, pairs: Tensor, size: int) -> Tensor:
    """Return whole rows, (r, cols) float32, with all pairs in blocks of ``size`` columns turned back, in float64."""
    columns = values.t().contiguous().double()  # transposed, as whole columns are moved
    angles, places = theta.view(-1, len(columns) // 2).double(), pairs.view(-1, len(columns)).long()
    places = places + torch.arange(len(columns), device=values.device) // size * size
    for angle, place in zip(angles.flip(0), places.flip(0), strict=True):
        cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
        firsts, seconds = columns.index_select(0, place[::2]), columns.index_select(0, place[1::2])
        columns.index_copy_(0, place[::2], firsts * cos - seconds * sin)
        columns.index_copy_(0, place[1::2], firsts * sin + seconds * cos)
    return columns.t()


FORMATS = (Format("paroquant", NEEDS, fit, summary="ParoQuant: 4-bit integers of columns that were rotated in pairs"),)
