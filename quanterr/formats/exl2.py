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

from functools import lru_cache, partial
from typing import NamedTuple

from quanterr.formats.base import Chunk, Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared.config_checks import check_permutation, check_quant_method, read_integers
from quanterr.formats.shared.custom import Custom, Stored
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
        Custom(parts.entries, partial(decode, groups)),
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


def decode(groups: tuple[BitGroup, ...], stored: Stored, chunk: Chunk) -> Tensor:
    """Return (code - 2^(bits - 1)) · scale of a chunk's rows, (r, cols)."""
    order, rows = stored["order"].long() & 0xFFFF, slice(chunk.row, chunk.stop_row)
    starts, bits, group = _place_columns(groups).to(order.device)[:, order]
    words, place, shift = stored["codes"][:, rows].contiguous(), starts // WORD, (starts % WORD).int().unsqueeze(1)
    low, high = (words.index_select(0, at.clamp(max=len(words) - 1)) for at in (place, place + 1))
    ones = (1 << bits).int().unsqueeze(1) - 1
    codes = (low >> shift & ~(-2 << 31 - shift) | high << 1 << 31 - shift) & ones  # (cols, r)
    nibbles = stored["scale"].unsqueeze(2) >> torch.arange(0, WORD, 4, dtype=torch.int32, device=order.device) & 15
    largest = stored["scale_max"].float() / 256
    scales = (nibbles.flatten(1)[:, rows] + 1).square().float() * largest.unsqueeze(1)  # (groups, r)
    columns: Tensor = (codes - (ones + 1) // 2).float() * scales.index_select(0, group)
    return columns.t()


@lru_cache(maxsize=2)  # chunks of a weight follow each other
def _place_columns(groups: tuple[BitGroup, ...]) -> Tensor:
    """Return the first bit of each stored column, the bits of its codes, and its group: (3, cols) int64."""
    counts = torch.tensor([group.cols for group in groups])
    starts = torch.cat([torch.arange(group.cols) * group.bits + group.first * WORD for group in groups])
    bits = torch.tensor([group.bits for group in groups]).repeat_interleave(counts)
    return torch.stack((starts, bits, torch.arange(len(groups)).repeat_interleave(counts)))


FORMATS = (Format("exl2", NEEDS, fit),)
