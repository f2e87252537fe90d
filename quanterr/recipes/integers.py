"""Integers of 2 to 8 bits with a scale for each group of columns: ``int4_g128``, ``int4_g64:asym``, ``int8_channel``.

    X.weight_packed        I32                   (rows, words): dense, the lowest bits first
    X.weight_scale         the weight's dtype    (rows, groups)
    X.weight_zero_point    I32                   (words of rows, groups), for asymmetric codes
    X.weight_shape         I64                   (2,)

    symmetric     scale = max |x| / ((2^b - 1) / 2); code = round(x / scale) in [-2^(b-1), 2^(b-1) - 1]
    asymmetric    scale = (max(x, 0) - min(x, 0)) / (2^b - 1); zero = round(-2^(b-1) - min(x, 0) / scale)
                  code = round(x / scale + zero)

This is compressed-tensors' pack-quantized. A scale of zero becomes the epsilon of its dtype.

Reference: vllm-project/compressed-tensors@0.20.0 quantization/utils/helpers.py calculate_qparams,
quantization/lifecycle/forward.py _quantize, compressors/pack_quantized/helpers.py pack_to_int32.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quanterr.kernel.enums import Packing
from quanterr.kernel.rounding import Codes, find_codes, make_integers
from quanterr.lazy_torch import Tensor, torch
from quanterr.recipes.base import (
    FLOATS,
    Encoder,
    Piece,
    Source,
    StoredTensor,
    explain_partial_groups,
    find_extremes,
)
from quanterr.recipes.calibration import RATIOS, Calibrator, weigh_errors
from quanterr.tensors.packing import WORD, pack_words


@dataclass(frozen=True)
class IntegerEncoder(Encoder):
    """An encoder in which ``group`` columns share a scale; 0 means a whole row."""

    bits: int
    group: int
    symmetric: bool
    calibrator: Calibrator

    @property
    def config(self) -> Mapping[str, object]:
        """The quantization_config that compressed-tensors writes."""
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "group" if self.group else "channel",
            "group_size": self.group or None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "version": "0.20.0",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }

    def explain_refusal(self, source: Source) -> str | None:
        """Explain why columns do not fill whole groups; None if they do."""
        return explain_partial_groups(source, self.group) if self.group else None

    def list_tensors(self, source: Source) -> tuple[StoredTensor, ...]:
        """List codes, scales, zero points and shape."""
        groups = source.cols // self.group if self.group else 1
        tensors = [
            StoredTensor("{weight}_packed", "I32", (source.rows, -(-source.cols * self.bits // WORD))),
            StoredTensor("{weight}_scale", source.dtype, (source.rows, groups)),
        ]
        if not self.symmetric:
            tensors.append(StoredTensor("{weight}_zero_point", "I32", (-(-source.rows * self.bits // WORD), groups)))
        return *tensors, StoredTensor("{weight}_shape", "I64", (2,))

    @property
    def _codes(self) -> Codes:
        return make_integers(self._low, self._high, -self._low)

    @property
    def _low(self) -> int:
        return -(1 << self.bits - 1)

    @property
    def _high(self) -> int:
        return (1 << self.bits - 1) - 1

    def measure(self, piece: Piece, importance: Tensor | None = None) -> Tensor:
        """Return the largest |x|, (r, groups), for symmetric codes; minima and maxima, (r, groups, 2), for others."""
        rows, cols = piece.rows.shape
        if self.symmetric and self.calibrator.takes_largest:
            return piece.find_magnitudes(self.group or cols).view(rows, -1)
        blocks = piece.rows.view(rows, 1, -1, self.group or cols)
        if importance is not None:
            importance = importance.view(1, 1, *blocks.shape[2:])
        if self.symmetric:
            half = (2**self.bits - 1) / 2
            return self.calibrator.find_ends(
                blocks, half, lambda v: v.round_().clamp_(self._low, self._high), importance
            )
        low, high = find_extremes(blocks[:, 0])
        if self.calibrator.searches or self.calibrator.percentile < 100:
            return self._shrink(blocks[:, 0], low.clamp_(max=0), high.clamp_(min=0), importance)
        return torch.stack([low.clamp_(max=0), high.clamp_(min=0)], 2)

    def _shrink(self, groups: Tensor, low: Tensor, high: Tensor, importance: Tensor | None) -> Tensor:
        """Return minima and maxima, times the ratio with the smallest squared error, or cut at the percentile."""
        if self.calibrator.percentile < 100:
            q = torch.tensor([1 - self.calibrator.percentile / 100, self.calibrator.percentile / 100])
            ends = torch.quantile(groups, q, dim=2)
            return torch.stack([ends[0].clamp(max=0), ends[1].clamp(min=0)], 2)
        best, min_error = torch.stack([low, high], 2), torch.full_like(low, torch.inf)
        for ratio in RATIOS:
            ends = torch.stack([low * ratio, high * ratio], 2)
            scale, zero = self._find_scale_and_zero(ends)
            codes = (groups / scale[..., None]).add_(zero[..., None]).round_().clamp_(self._low, self._high)
            error = codes.sub_(zero[..., None]).mul_(scale[..., None]).sub_(groups).square_()
            error = weigh_errors(error, None if importance is None else importance[0]).sum(2)
            better = error < min_error
            min_error = torch.where(better, error, min_error)
            best = torch.where(better[..., None], ends, best)
        return best

    def _find_scale_and_zero(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        low, high = ends[..., 0], ends[..., 1]
        scale = (high - low) / (2**self.bits - 1)
        zero = (self._low - low / scale).nan_to_num_(nan=float(self._low)).clamp_(self._low, self._high).round_()
        return _replace_zeros(scale), zero

    def constant_tensors(self, source: Source) -> Mapping[str, Tensor]:
        """Return the tensor with the weight's shape."""
        return {"{weight}_shape": torch.tensor([source.rows, source.cols])}

    def settle(self, measured: Tensor, source: Source) -> tuple[Tensor, ...]:
        """Return scales and, for asymmetric codes, zero points as stored, then unpacked for ``encode``."""
        dtype = FLOATS[source.dtype]
        if self.symmetric:
            return (_replace_zeros((measured / ((2**self.bits - 1) / 2)).to(dtype)),)
        scale, zero = self._find_scale_and_zero(measured)
        zero_points = pack_words((zero - self._low).to(torch.uint8).t().contiguous(), self.bits).view(torch.int32)
        return _replace_zeros(scale.to(dtype)), zero_points.t().contiguous(), zero

    def encode(
        self, x: Tensor, first: int, settled: tuple[Tensor, ...], out: Tensor, importance: Tensor | None = None
    ) -> None:
        """Write the packed codes of rows."""
        rows, group = slice(first, first + len(x)), self.group or x.shape[1]
        zero = None if self.symmetric else settled[2][rows]
        scale, words = settled[0][rows].float(), out.view(len(x), -1)
        if self.bits == 4 and x.shape[1] * self.bits % WORD == 0:
            find_codes(x, scale, self._codes, group, after=zero, packing=Packing.LOW_FIRST, out=words)
        else:
            words.copy_(pack_words(find_codes(x, scale, self._codes, group, after=zero), self.bits))


def _replace_zeros(scale: Tensor) -> Tensor:
    """Replace zeros by the epsilon of the dtype."""
    return scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)
