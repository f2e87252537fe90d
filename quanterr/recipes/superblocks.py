"""The K types of ggml: blocks of 256 elements, whose 8 or 16 parts have scales (and minima) of few bits each.

    gguf_q6_k    6-bit codes, parts of 16, 8-bit scales
    gguf_q5_k    5-bit codes, parts of 32, 6-bit scales and minima
    gguf_q4_k    4-bit codes, parts of 32, 6-bit scales and minima
    gguf_q3_k    3-bit codes, parts of 16, 6-bit scales
    gguf_q2_k    2-bit codes, parts of 16, 4-bit scales and minima

Scales are searched as in llama.cpp. If the importance of the columns is known, errors are weighted by it, as llama.cpp
does with an importance matrix.

Reference: ggml-org/llama.cpp@b7180 ggml/src/ggml-quants.c quantize_row_q…_K_ref, with importance
quantize_row_q…_K_impl.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.checkpoints.ggml_types import BLOCKS
from quanterr.recipes.base import view_bytes
from quanterr.recipes.searches import (
    FINE,
    LEAST,
    round_clamped,
    search_positive,
    search_symmetric,
    search_three_bits,
    search_with_minimum,
    weigh_by_importance,
)
from quanterr.tensors.packing import pack_runs
from quanterr.tensors.rounding import find_codes, make_integers


class _Field(NamedTuple):
    """Some bits of all codes of a block: ``bits`` from bit ``shift`` on, in bytes from ``at`` on; see pack_runs."""

    at: int
    bits: int
    shift: int = 0
    run: int = 32


# Fields of the codes, by type: formats/gguf_k.py describes them.
FIELDS = {
    "Q2_K": (_Field(16, 2),),
    "Q3_K": (_Field(0, 1, shift=2), _Field(32, 2)),
    "Q4_K": (_Field(16, 4),),
    "Q5_K": (_Field(16, 1, shift=4), _Field(48, 4)),
    "Q6_K": (_Field(0, 4, run=64), _Field(128, 2, shift=4)),
}


def _start_blocks(dtype: str, x: Tensor, ends: tuple[int, int], units: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Return blocks, (n, bytes) uint8, with the codes of (x + offsets) / units, of ``ends`` the first being 0.

    ``x`` are parts, (n, parts, elements); their scales are not in the blocks yet. A part whose unit is 0 or NaN is 0.
    """
    codes = find_codes(
        x.view(len(x), -1),
        torch.where(units.abs() > 0, units, torch.inf),
        make_integers(*ends, -ends[0]),
        x.shape[2],
        before=None if offsets is None else -offsets,
    )
    blocks = torch.empty(len(x), BLOCKS[dtype][1], dtype=torch.uint8)
    for at, bits, shift, run in FIELDS[dtype]:
        pack_runs(codes, bits, shift, run, out=blocks[:, at : at + codes.shape[1] * bits // 8])
    return blocks


def _to_half(numbers: Tensor) -> Tensor:
    """Round to float16, (n, 1)."""
    return numbers.to(torch.float16).view(-1, 1)


def _to_integers(numbers: Tensor, most: int, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a unit, (n, 1) float16, and nonnegative numbers as integers of that unit, (n, k), up to ``most``."""
    if weights is not None:
        unit, codes = search_positive(numbers, most, weights)
        return _to_half(unit), codes
    largest = numbers.amax(1, keepdim=True)
    inverse = torch.where(largest > 0, most / largest, 0.0)
    return _to_half(largest / most), round_clamped(numbers * inverse, 0, most)


def _encode_with_minimum(
    dtype: str, x: Tensor, found: tuple[Tensor, Tensor], ends: tuple[int, int], weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks with their codes; d and dmin, (n, 2) float16; scales and minima of parts as integers, (2, n, k).

    ``found`` are scales and minima; ``ends`` the largest codes, of elements and of these; ``weights`` of the parts,
    (n, k), are given if importance is known.
    """
    (d, own), (dmin, least) = (_to_integers(each, ends[1], weights) for each in found)
    blocks = _start_blocks(dtype, x, (0, ends[0]), d.float() * own, dmin.float() * least)
    return blocks, torch.cat([d, dmin], 1), torch.stack([own, least]).to(torch.uint8)


def _weigh_by_importance(x: Tensor, importance: Tensor, times: float) -> Tensor:
    """Return importance times the root of x² plus ``times`` the mean square of the block."""
    return weigh_by_importance(x, importance.view(x.shape), times * x.square().mean((1, 2), keepdim=True))


def _pack_six_bit_pairs(pairs: Tensor) -> Tensor:
    """Pack 8 scales and 8 minima of 6 bits, (2, n, 8), in 12 bytes."""
    own, least = pairs
    return torch.cat(
        [
            own[:, :4] | (own[:, 4:] >> 4) << 6,
            least[:, :4] | (least[:, 4:] >> 4) << 6,
            (own[:, 4:] & 15) | (least[:, 4:] & 15) << 4,
        ],
        1,
    )


def _quantize_pairs(dtype: str, x: Tensor, importance: Tensor | None, most: int, steps: Sequence[float]) -> Tensor:
    """Quantize to blocks of Q4_K or Q5_K."""
    x = x.view(-1, 8, 32)
    if importance is None:
        found, of_parts = search_with_minimum(x, most, steps), None
    else:
        weights = _weigh_by_importance(x, importance, 2.0)
        found, of_parts = search_with_minimum(x, most, FINE, weights), weights.sum(2)
    blocks, units, pairs = _encode_with_minimum(dtype, x, found, (most, 63), of_parts)
    blocks[:, :4], blocks[:, 4:16] = view_bytes(units), _pack_six_bit_pairs(pairs)
    return blocks


def q4_k(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q4_K, (n, 144) uint8."""
    return _quantize_pairs("Q4_K", x, importance, 15, [0.1 * n - 1 for n in range(21)])


def q5_k(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q5_K, (n, 176) uint8."""
    return _quantize_pairs("Q5_K", x, importance, 31, [0.1 * n - 0.5 for n in range(16)])


def q2_k(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q2_K, (n, 84) uint8."""
    x = x.view(-1, 16, 16)
    if importance is None:
        found, of_parts = search_with_minimum(x, 3, [0.1 * n - 0.5 for n in range(16)], absolute=True), None
    else:
        weights = _weigh_by_importance(x, importance, 1.0)
        found, of_parts = search_with_minimum(x, 3, FINE, weights), weights.sum(2)
    blocks, units, (own, least) = _encode_with_minimum("Q2_K", x, found, (3, 15), of_parts)
    blocks[:, :16], blocks[:, 80:] = own | least << 4, view_bytes(units)
    return blocks


def _to_signed_integers(scales: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return d, (n, 1) float16, and scales as integers from -most to most - 1, (n, 16)."""
    at = scales.abs().argmax(1, keepdim=True)
    largest = scales.gather(1, at)
    none = largest.abs() < LEAST
    inverse = -most / torch.where(none, 1.0, largest)
    own = torch.where(none, 0.0, round_clamped(scales * inverse, -most, most - 1))
    return _to_half(torch.where(none, 0.0, 1 / inverse)), own


def q6_k(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q6_K, (n, 210) uint8."""
    x = x.view(-1, 16, 16)
    scales = search_symmetric(x, 32, None if importance is None else importance.view(x.shape))
    d, own = _to_signed_integers(scales, 128)
    blocks = _start_blocks("Q6_K", x, (-32, 31), d.float() * own)
    blocks[:, 192:208], blocks[:, 208:] = view_bytes(own.to(torch.int8)), view_bytes(d)
    return blocks


def q3_k(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q3_K, (n, 110) uint8."""
    x = x.view(-1, 16, 16)
    if importance is None:
        d, own = _to_signed_integers(search_three_bits(x), 32)
    else:
        weights = _weigh_by_importance(x, importance, 2.0)
        scales = search_symmetric(x, 4, weights)
        own = torch.empty_like(scales)
        unit = search_symmetric(scales[:, None], 32, weights.sum(2)[:, None], own[:, None])
        d = _to_half(unit)
        own.masked_fill_(unit == 0, 0)
    blocks, stored = _start_blocks("Q3_K", x, (-4, 3), d.float() * own), (own + 32).to(torch.uint8)
    blocks[:, 96:104] = stored[:, :8] & 15 | (stored[:, 8:] & 15) << 4
    pack_runs(stored, 2, 4, 4, out=blocks[:, 104:108])
    blocks[:, 108:] = view_bytes(d)
    return blocks


K_TYPES = {"Q6_K": q6_k, "Q5_K": q5_k, "Q4_K": q4_k, "Q3_K": q3_k, "Q2_K": q2_k}
