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
from typing import NamedTuple

from quanterr.checkpoints import Entry
from quanterr.formats.base import Chunk, Dequantize, Format, FormatMismatch, Parts, PartSpec, Values, Weight, Workspace
from quanterr.formats.shared.awq_gemm import read_gemm
from quanterr.formats.shared.bit_packing import Packing
from quanterr.formats.shared.column_groups import ColumnBlocks
from quanterr.formats.shared.config_checks import read_integers
from quanterr.formats.shared.element_types import list_integers
from quanterr.formats.shared.gptq_awq_common import FLOATS, SCALE, WORDS
from quanterr.formats.shared.padding import Padded, fit_unpadded
from quanterr.lazy_torch import Tensor, torch

PACKING = Packing("interleaved", 4)
AT_ONCE = 1 << 16  # elements that are turned together, which stay in the cache
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
    padded = fit_unpadded(parts, (rows, cols), size)
    return parts.weight(
        (rows, cols),
        partial(dequantize, parts, coded, padded),
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


def dequantize(parts: Parts, coded: Dequantize, padded: Padded, chunk: Chunk, workspace: Workspace) -> Values:
    """Return the values with the rotations undone, (r, c)."""
    return padded.dequantize(chunk, workspace, partial(_dequantize_blocks, parts, coded))


def _dequantize_blocks(parts: Parts, coded: Dequantize, chunk: Chunk, workspace: Workspace) -> Values:
    values = coded(chunk, workspace).weight
    turns = _find_turns(parts, chunk, workspace)
    factors = workspace.read_whole("channel_scales", parts["channel_scales"]).view(-1, 1).double()
    rows, size = chunk.shape[0], parts.codes.shape[0] // parts["scale"].shape[0]
    step = max(1, AT_ONCE // (rows * size)) * size
    for left in range(0, chunk.shape[1], step):
        part = values[:, left : left + step]
        turned = _turn_back(part, turns, left, workspace)
        part.copy_(turned.mul_(factors[chunk.col + left : chunk.col + left + part.shape[1]]).t())
    return Values(values)


class Turns(NamedTuple):
    """The rotations from the last to the first: the places of each pair's columns at that point, and the angles.

    Each rotation writes the first columns of all pairs of a block, then the second; ``home`` finds each column again.
    """

    places: list[tuple[Tensor, Tensor]]  # (blocks, pairs of a block) each
    angles: list[tuple[Tensor, Tensor]]  # cosines and sines, the same shape, float64
    home: Tensor  # (blocks, columns of a block)


def _find_turns(parts: Parts, chunk: Chunk, workspace: Workspace) -> Turns:
    cols, size = parts.codes.shape[0], parts.codes.shape[0] // parts["scale"].shape[0]
    theta, pairs = (workspace.read_whole(role, parts[role]) for role in ("theta", "pairs"))
    angles = theta.view(-1, cols // 2)[:, chunk.col // 2 : chunk.stop_col // 2].double().flip(0)
    pairs = pairs.view(-1, cols)[:, chunk.col : chunk.stop_col].long().flip(0).view(len(angles), -1, size // 2, 2)
    where = torch.arange(size, device=workspace.device).expand(pairs.shape[1], -1)
    places = []
    for one, other in zip(pairs[..., 0], pairs[..., 1], strict=True):
        places.append((where.gather(1, one), where.gather(1, other)))
        where = torch.cat([one, other], 1).argsort(1)
    halves = angles.view(len(angles), -1, size // 2)
    return Turns(places, list(zip(halves.cos(), halves.sin(), strict=True)), where)


def _turn_back(values: Tensor, turns: Turns, left: int, workspace: Workspace) -> Tensor:
    """Return blocks of columns from ``left`` on, (r, c), with all pairs turned back: (c, r) float64.

    Columns are rows here, so that each is moved as a whole.
    """
    shape, size = (values.shape[1], values.shape[0]), turns.home.shape[1]
    held, made, one, other, product = (
        workspace.buffer(name, (shape[0] // halved, shape[1]), torch.float64)
        for name, halved in (("held", 1), ("made", 1), ("one", 2), ("other", 2), ("product", 2))
    )
    held.copy_(values.t())
    blocks = slice(left // size, (left + shape[0]) // size)
    first = torch.arange(0, shape[0], size, device=workspace.device).unsqueeze(1)
    for places, angles in zip(turns.places, turns.angles, strict=True):
        for place, taken in zip(places, (one, other), strict=True):
            torch.index_select(held, 0, (place[blocks] + first).view(-1), out=taken)
        cos, sin = (factor[blocks].reshape(-1, 1) for factor in angles)
        firsts, seconds = made.view(-1, 2, size // 2, shape[1]).unbind(1)
        torch.mul(other, sin, out=product)
        torch.sub(torch.mul(one, cos, out=held[: len(one)]), product, out=product)
        firsts.copy_(product.view(firsts.shape))
        one.mul_(sin).add_(other.mul_(cos))
        seconds.copy_(one.view(seconds.shape))
        held, made = made, held
    return torch.index_select(held, 0, (turns.home[blocks] + first).view(-1), out=made)


FORMATS = (Format("paroquant", NEEDS, fit, summary="ParoQuant: 4-bit integers of columns that were rotated in pairs"),)
