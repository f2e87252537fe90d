"""Integers of MLX, with a scale and a bias for each group of columns: ``mlx_q4_g64``.

    X.weight    U32                   (rows, words): dense, the lowest bits first
    X.scales    the weight's dtype    (rows, groups)
    X.biases    the weight's dtype    (rows, groups)

    edge = the end of the group's range, min x or max x, that is farther from zero
    scale = (max x - min x) / (2^b - 1), at least 1e-7, negative where edge is max x
    steps = round(edge / scale): scale = edge / steps, bias = edge; but if steps = 0, scale stays and bias = 0
    code = round((x - bias) / scale) in [0, 2^b - 1]

So zero and the edge have exact codes, up to the rounding of scales.

Reference: ml-explore/mlx@v0.32.4 mlx/backend/cpu/quantized.cpp quantize.
"""

from dataclasses import dataclass

from quanterr.kernel.rounding import find_codes, make_integers
from quanterr.lazy_torch import Tensor, torch
from quanterr.recipes.base import FLOATS, Encoder, Piece, Source, StoredTensor, explain_partial_groups, find_extremes
from quanterr.tensors.packing import WORD, pack_words

MIN_SCALE = 1e-7


@dataclass(frozen=True)
class AffineEncoder(Encoder):
    """An encoder in which ``group`` columns share a scale and a bias."""

    bits: int
    group: int

    def explain_refusal(self, source: Source) -> str | None:
        """Explain why columns do not fill whole groups; None if they do."""
        return explain_partial_groups(source, self.group)

    def list_tensors(self, source: Source) -> tuple[StoredTensor, ...]:
        """List codes, scales and biases."""
        shape = (source.rows, source.cols // self.group)
        return (
            StoredTensor("{weight}", "U32", (source.rows, source.cols * self.bits // WORD)),
            StoredTensor("{module}.scales", source.dtype, shape),
            StoredTensor("{module}.biases", source.dtype, shape),
        )

    @property
    def _highest(self) -> int:
        return (1 << self.bits) - 1

    def measure(self, piece: Piece, importance: Tensor | None = None) -> Tensor:
        """Return the minimum and the maximum of each group, (r, groups, 2)."""
        return torch.stack(find_extremes(piece.rows.view(len(piece.rows), -1, self.group)), 2)

    def settle(self, measured: Tensor, source: Source) -> tuple[Tensor, ...]:
        """Return scales and biases as stored, then unrounded for ``encode``."""
        low, high = measured.unbind(2)
        is_low = low.abs() > high.abs()
        edge = torch.where(is_low, low, high)
        scale = ((high - low) / self._highest).clamp_(min=MIN_SCALE)
        scale = torch.where(is_low, scale, -scale)
        steps = (edge / scale).round_()
        scale = torch.where(steps == 0, scale, edge / steps)
        bias = edge.masked_fill(steps == 0, 0.0)
        dtype = FLOATS[source.dtype]
        return scale.to(dtype), bias.to(dtype), scale, bias

    def encode(
        self, x: Tensor, first: int, settled: tuple[Tensor, ...], out: Tensor, importance: Tensor | None = None
    ) -> None:
        """Write the packed codes of rows."""
        scale, bias = (each[first : first + len(x)] for each in settled[2:])
        codes = find_codes(x, scale, make_integers(0, self._highest), self.group, before=bias)
        out.view(len(x), -1).copy_(pack_words(codes, self.bits))
