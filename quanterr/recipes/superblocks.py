"""The K types of ggml: blocks of 256 elements with 8 or 16 parts, whose scales (and minima) are integers of few bits.

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

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from quanterr.checkpoints.ggml_types import OF_NAME, GgmlType
from quanterr.formats import gguf_k
from quanterr.formats.shared.ggml_fields import Block, describe, encode
from quanterr.kernel.library import choose_kernel
from quanterr.kernel.rounding import find_codes, make_integers
from quanterr.lazy_torch import Tensor, torch
from quanterr.recipes.searches import (
    MIN_MAGNITUDE,
    STEPS_WITH_MINIMUM,
    round_clamped,
    search_positive,
    search_symmetric,
    search_three_bits,
    search_with_minimum,
    weigh_by_importance,
)

# The scale of each block, (n, 1) float16, and the integers of its parts that it multiplies, (n, parts).
QuantizedScales = tuple[Tensor, Tensor]


class _Type(NamedTuple):
    """A K type, as formats/gguf_k.py describes its blocks."""

    ggml_type: GgmlType
    block: Block
    highest: int  # the integer that stands for the largest scale, and for the largest minimum

    @property
    def ends(self) -> tuple[int, int]:
        """The lowest and the highest code."""
        levels = self.block.numbers.levels
        return int(levels[0]), int(levels[-1])


Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = (
    _Type(OF_NAME[row.name], row.blocks[row.name], highest)
    for row, highest in zip(gguf_k.TYPES, (15, 32, 63, 63, 128), strict=True)
)


def _encode(to: _Type, x: Tensor, out: Tensor | None, scales: Tensor, minima: Tensor | None = None) -> Tensor:
    """Return blocks of parts, (n, parts, elements), with these scales and, if any, minima, (n, parts), in ``out``."""
    kernel = choose_kernel().kernel
    if kernel is None or not x.is_cpu:
        if minima is None:
            return _encode_with(to, x, out, _to_signed_integers(scales, to.highest))
        return _encode_with(to, x, out, _to_integers(scales, to.highest), _to_integers(minima, to.highest))
    blocks = torch.empty(len(x), to.ggml_type.n_bytes, dtype=torch.uint8) if out is None else out
    given = x.data_ptr(), scales.data_ptr(), None if minima is None else minima.data_ptr()
    described = ctypes.byref(describe(to.block, to.ggml_type))
    kernel.library.quanterr_encode_superblocks(*given, len(x), described, to.highest, blocks.data_ptr())
    return blocks


def _encode_with(to: _Type, x: Tensor, out: Tensor | None, *rounded: QuantizedScales) -> Tensor:
    """Return blocks of parts, (n, parts, elements), with these scales and any minima; parts without a scale are 0."""
    unit, *minima = (d.float() * integers for d, integers in rounded)
    unit = torch.where(unit.abs() > 0, unit, torch.inf)  # NaN becomes infinity, too
    codes = make_integers(*to.ends, -to.ends[0])
    flat, size = x.view(len(x), -1), x.shape[2]
    numbers = {"codes": find_codes(flat, unit, codes, size, before=-minima[0] if minima else None).to(torch.int32)}
    offset = to.block.numbers.offset
    for (d, integers), named, of_unit in zip(rounded, ("scales", "minima"), ("d", "d_minima"), strict=False):
        numbers[named] = integers.to(torch.int32) - (offset if named == "scales" else 0)
        numbers[of_unit] = d.view(torch.int16).to(torch.int32)
    blocks = encode(to.block, to.ggml_type, numbers)
    return blocks if out is None else out.copy_(blocks)


def _to_half(numbers: Tensor) -> Tensor:
    """Round to float16, (n, 1)."""
    return numbers.to(torch.float16).view(-1, 1)


def _to_integers(numbers: Tensor, highest: int) -> QuantizedScales:
    """Round nonnegative numbers to integers up to ``highest``."""
    largest = numbers.amax(1, keepdim=True)
    inverse = torch.where(largest > 0, highest / largest, 0.0)
    return _to_half(largest / highest), round_clamped(numbers * inverse, 0, highest).nan_to_num_()


def _to_signed_integers(scales: Tensor, highest: int) -> QuantizedScales:
    """Round scales to integers from -highest to highest - 1."""
    largest = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    none = largest.abs() < MIN_MAGNITUDE
    inverse = -highest / torch.where(none, 1.0, largest)
    integers = round_clamped(scales * inverse, -highest, highest - 1).nan_to_num_()
    return _to_half(torch.where(none, 0.0, 1 / inverse)), torch.where(none, 0.0, integers)


def _weigh(x: Tensor, importance: Tensor, times: float) -> Tensor:
    """Return importance · √(x² + ``times`` · the mean square of the block)."""
    return weigh_by_importance(x, importance.view(x.shape), times * x.square().mean((1, 2), keepdim=True))


def _encode_with_importance(to: _Type, x: Tensor, weights: Tensor, out: Tensor | None) -> Tensor:
    """Return blocks of a type with minima, searched for the smallest error weighted by ``weights``."""
    scales_and_minima = search_with_minimum(x, to.ends[1], STEPS_WITH_MINIMUM, weights)
    units, integers = zip(
        *(search_positive(each, to.highest, weights.sum(2)) for each in scales_and_minima), strict=True
    )
    return _encode_with(to, x, out, *zip(map(_to_half, units), integers, strict=True))


def _quantize_pairs(
    to: _Type, x: Tensor, importance: Tensor | None, out: Tensor | None, steps: Sequence[float]
) -> Tensor:
    """Quantize to blocks of Q4_K or Q5_K."""
    x = x.view(-1, 8, 32)
    if importance is not None:
        return _encode_with_importance(to, x, _weigh(x, importance, 2.0), out)
    return _encode(to, x, out, *search_with_minimum(x, to.ends[1], steps))


def q4_k(x: Tensor, importance: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q4_K, (n, 144) uint8, in ``out`` if given."""
    return _quantize_pairs(Q4_K, x, importance, out, [0.1 * n - 1 for n in range(21)])


def q5_k(x: Tensor, importance: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q5_K, (n, 176) uint8, in ``out`` if given."""
    return _quantize_pairs(Q5_K, x, importance, out, [0.1 * n - 0.5 for n in range(16)])


def q2_k(x: Tensor, importance: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q2_K, (n, 84) uint8, in ``out`` if given."""
    x = x.view(-1, 16, 16)
    if importance is not None:
        return _encode_with_importance(Q2_K, x, _weigh(x, importance, 1.0), out)
    return _encode(Q2_K, x, out, *search_with_minimum(x, 3, [0.1 * n - 0.5 for n in range(16)], absolute=True))


def q6_k(x: Tensor, importance: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q6_K, (n, 210) uint8, in ``out`` if given."""
    x = x.view(-1, 16, 16)
    return _encode(Q6_K, x, out, search_symmetric(x, 32, None if importance is None else importance.view(x.shape)))


def q3_k(x: Tensor, importance: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q3_K, (n, 110) uint8, in ``out`` if given."""
    x = x.view(-1, 16, 16)
    if importance is None:
        return _encode(Q3_K, x, out, search_three_bits(x))
    weights = _weigh(x, importance, 2.0)
    scales = search_symmetric(x, 4, weights)
    integers = torch.empty_like(scales)
    unit = search_symmetric(scales[:, None], 32, weights.sum(2)[:, None], integers[:, None])
    return _encode_with(Q3_K, x, out, (_to_half(unit), integers.masked_fill_(unit == 0, 0)))


K_TYPES = {"Q6_K": q6_k, "Q5_K": q5_k, "Q4_K": q4_k, "Q3_K": q3_k, "Q2_K": q2_k}
