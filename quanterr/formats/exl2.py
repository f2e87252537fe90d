"""EXL2: groups of columns in 2 to 8 bits each, with 4-bit scales.

    q_weight       i32         (packed, rows): codes of the weight's columns one after the other; for each row a
                               little-endian stream of bits
    q_groups       i16         (2 · groups,): bits of a group, and its first row in q_weight
    q_scale        i32         (groups, rows / 8), eight 4-bit codes per word, low bits first
    q_scale_max    f16         (groups,)
    q_invperm      i16, i32    (cols,): position of a column of the weight in q_weight

    scale = (q_scale + 1)^2 * (q_scale_max / 256)                                                       exact
    weight[r, c] = (code - 2^(bits - 1)) * scale, for row r and the column stored at q_invperm[c]        rounded

A chunk's rows are columns of q_weight, so all of q_weight stays in memory. The CUDA kernels multiply in half
precision: their result differs by about 1e-3.

Reference: turboderp-org/exllamav2@da07facd exllamav2/exllamav2_ext/cuda/pack_tensor.cu, q_matrix.cu,
quant/qdq_util.cuh.
"""

from functools import partial
from typing import NamedTuple

from quanterr.formats.base import Chunk, Format, FormatMismatch, Parts, PartSpec, Values, Weight, Workspace
from quanterr.formats.shared.config_checks import check_permutation, check_quant_method, read_integers
from quanterr.formats.shared.padding import crop
from quanterr.lazy_torch import Tensor, torch
from quanterr.util.text import count

BITS = frozenset({2, 3, 4, 5, 6, 8})
WORD = 32
NEEDS = {
    "codes": PartSpec(("{module}.q_weight",), frozenset({"I32"})),
    "groups": PartSpec(("{module}.q_groups",), frozenset({"I16"})),
    "scale": PartSpec(("{module}.q_scale",), frozenset({"I32"})),
    "scale_max": PartSpec(("{module}.q_scale_max",), frozenset({"F16"})),
    "order": PartSpec(("{module}.q_invperm",), frozenset({"I16", "I32"})),
}


class BitGroup(NamedTuple):
    """Consecutive columns whose codes have the same number of bits."""

    bits: int
    first: int  # first row in q_weight
    cols: int


def fit(parts: Parts) -> Weight:
    """Return the weight, whose columns are the columns of all groups."""
    codes, order = parts["codes"], parts["order"]
    if len(codes.shape) != 2:
        raise FormatMismatch(f"EXL2 codes are (packed, rows), not {codes}")
    groups = _read_groups(parts)
    rows, cols = codes.shape[1], sum(group.cols for group in groups)
    if order.shape != (cols,):
        raise FormatMismatch(
            f"{order} should have one number for each of the {cols} columns in the groups of {parts['groups']}"
        )
    check_permutation(order, [number & 0xFFFF for number in read_integers(order)])
    if rows % 8 or parts["scale"].shape != (len(groups), rows // 8):
        raise FormatMismatch(f"its scale {parts['scale']} should be {[len(groups), -(-rows // 8)]}, for {codes}")
    if parts["scale_max"].shape != (len(groups),):
        raise FormatMismatch(f"{parts['scale_max']} should have one number for each of {len(groups)} groups")
    bits = sorted({group.bits for group in groups})
    return parts.weight(
        (rows, cols),
        partial(dequantize, parts, groups),
        code_bits=bits[0] if len(bits) == 1 else None,
        evidence=(f"EXL2, {count(len(groups), 'group')} of {', '.join(map(str, bits))} bits",),
        warnings=check_quant_method(parts, "exl2"),
    )


def _read_groups(parts: Parts) -> tuple[BitGroup, ...]:
    entry, packed = parts["groups"], parts.codes.shape[0]
    if entry.n % 2 or not 0 < entry.n <= 2 * packed:
        raise FormatMismatch(f"{entry} should hold pairs, bits and the first row of a group of {parts.codes}")
    numbers = [number & 0xFFFF for number in read_integers(entry)]
    firsts, groups = numbers[1::2], []
    if firsts[0] != 0:
        raise FormatMismatch(f"{entry}: no group starts at the first row of {parts.codes}")
    for bits, first, stop in zip(numbers[::2], firsts, [*firsts[1:], packed], strict=True):
        if bits not in BITS or stop <= first or (stop - first) * WORD % bits:
            raise FormatMismatch(
                f"{entry} declares an impossible group: {bits} bits in rows {first} to {stop} of {parts.codes}"
            )
        groups.append(BitGroup(bits, first, (stop - first) * WORD // bits))
    return tuple(groups)


def dequantize(parts: Parts, groups: tuple[BitGroup, ...], chunk: Chunk, workspace: Workspace) -> Values:
    """Return (code - 2^(bits - 1)) · scale, (r, c)."""
    r = chunk.stop_row - chunk.row
    table = workspace.cache("places", parts["order"], 0, lambda: _compute_places(parts, groups, workspace))
    word, following, group = table[0], table[1], table[7]
    shift, mask, rest_shift, rest_mask, half = table[2:7].unsqueeze(2)
    shape = (len(word), r)
    stored = workspace.read_whole("codes", parts.codes)[:, chunk.row : chunk.stop_row]
    words = workspace.buffer("words", tuple(stored.shape), torch.int32).copy_(stored)
    codes = torch.index_select(words, 0, word, out=workspace.buffer("low", shape, torch.int32))
    codes >>= shift
    codes &= mask
    rest = torch.index_select(words, 0, following, out=workspace.buffer("rest", shape, torch.int32))
    rest <<= rest_shift
    codes |= rest.bitwise_and_(rest_mask)
    codes -= half
    scale = workspace.buffer("scale of column", shape, torch.float32)
    torch.index_select(_read_scales(parts, chunk, workspace), 0, group, out=scale)
    columns = workspace.buffer("columns", shape, torch.float32).copy_(codes).mul_(scale)
    values = workspace.output((r, len(word))).copy_(columns.t())
    return Values(crop(values, chunk, workspace))


def _read_scales(parts: Parts, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return the scales of a chunk's rows, (groups, r) float32."""
    first, stop = chunk.row // 8, -(-chunk.stop_row // 8)
    words = workspace.read_whole("scale", parts["scale"])[:, first:stop]
    nibbles = words.unsqueeze(2) >> torch.arange(0, WORD, 4, dtype=torch.int32, device=words.device) & 15
    codes = nibbles.flatten(1)[:, chunk.row - 8 * first : chunk.stop_row - 8 * first]
    largest = workspace.read_whole("scale_max", parts["scale_max"]).float() / 256
    return (codes + 1).square().float() * largest.unsqueeze(1)


def _compute_places(parts: Parts, groups: tuple[BitGroup, ...], workspace: Workspace) -> Tensor:
    """Compute the places of each column's codes, for columns in the weight's order: (8, cols) int32.

    The rows are: the word with the low bits of the code, the word with the remaining bits, the shift and the mask of
    the low bits, the shift and the mask of the remaining bits, 2^(bits - 1), and the group.
    """
    counts = torch.tensor([group.cols for group in groups])
    bits = torch.tensor([group.bits for group in groups]).repeat_interleave(counts)
    number = torch.arange(len(groups)).repeat_interleave(counts)
    start = torch.cat([torch.arange(group.cols) * group.bits + group.first * WORD for group in groups])
    low = torch.minimum(bits, WORD - start % WORD)  # bits in the first word
    following = torch.minimum(start // WORD + 1, torch.tensor(parts.codes.shape[0] - 1))
    rest_mask = ((1 << bits) - 1) & ~((1 << low) - 1)
    fields = (start // WORD, following, start % WORD, (1 << low) - 1, low, rest_mask, 1 << (bits - 1), number)
    order = workspace.read_whole("order", parts["order"]).long() & 0xFFFF
    return torch.stack(fields).to(torch.int32).to(order.device)[:, order].contiguous()


FORMATS = (Format("exl2", NEEDS, fit),)
