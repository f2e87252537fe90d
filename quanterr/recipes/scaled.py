"""Codes times one scale for each tensor, row, column or block: ``fp8_row``, ``int8_block128``.

    X.weight          F8_E4M3 or I8       (rows, cols)
    X.weight_scale    F32                 () for a tensor, (rows, 1) for rows, (1, cols) for columns,
                                (⌈rows/high⌉, ⌈cols/wide⌉) for blocks

    scale = max |x| / 448 for FP8, / 127 for INT8; 1 where every x is zero
    x     ≈ code · scale

The same as ComfyUI, ModelOpt and torchao's float8 store. Rounding is to nearest, to even at a tie.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quanterr.recipes.base import Scheme, Source, Stored, bytes_of
from quanterr.recipes.calibration import Calibrator


class Codes(NamedTuple):
    """The numbers that a weight is rounded to."""

    dtype: torch.dtype
    stored: str  # the dtype's name in a safetensors header
    most: float

    def rounded(self, x: Tensor) -> Tensor:
        """The nearest codes to ``x`` in units of a code, which is overwritten."""
        x.clamp_(-self.most, self.most)
        if not self.dtype.is_floating_point:
            x.round_()  # to even at a tie, as the cast to FP8 does
        return x.to(self.dtype)


FP8 = Codes(torch.float8_e4m3fn, "F8_E4M3", 448.0)
INT8 = Codes(torch.int8, "I8", 127.0)


@dataclass(frozen=True)
class Scaled(Scheme):
    """A scale for each ``edges`` (rows, columns) of a weight; 0 is all of them."""

    codes: Codes
    edges: tuple[int, int]
    calibrator: Calibrator

    @property
    def config(self) -> Mapping[str, object]:
        """The edges of blocks, as FP8 checkpoints of DeepSeek's kind say them."""
        return {"weight_block_size": list(self.edges)} if all(self.edges) else {}

    @property
    def is_local(self) -> bool:
        """Not with a scale for all rows."""
        return self.edges[0] > 0

    def stored(self, source: Source) -> tuple[Stored, ...]:
        """Codes and scales."""
        high, wide = self._blocks(source)
        shape = () if self.edges == (0, 0) else (-(-source.rows // high), -(-source.cols // wide))
        return (
            Stored("{weight}", self.codes.stored, (source.rows, source.cols)),
            Stored("{weight}_scale", "F32", shape),
        )

    def together(self, source: Source) -> int:
        """The rows of a block."""
        return self.edges[0] or 1

    def _blocks(self, source: Source) -> tuple[int, int]:
        return self.edges[0] or source.rows, self.edges[1] or source.cols

    def _cut(self, x: Tensor) -> Tensor:
        """Rows as blocks, (a, high, b, wide); what is missing in the last ones is zero."""
        rows, cols = x.shape
        high, wide = self.edges[0] or rows, self.edges[1] or cols
        a, b = -(-rows // high), -(-cols // wide)
        if (a * high, b * wide) != (rows, cols):
            x = pad(x, (0, b * wide - cols, 0, a * high - rows))
        return x.view(a, high, b, wide)

    def measure(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        """What the calibrator takes for the largest |x| of each block, (a, b)."""
        blocks = self._cut(x)
        if importance is not None:
            _, _, b, wide = blocks.shape
            importance = pad(importance, (0, b * wide - len(importance))).view(1, 1, b, wide)
        return self.calibrator.ends(blocks, self.codes.most, lambda v: self.codes.rounded(v).float(), importance)

    def settle(self, measured: Tensor, source: Source) -> tuple[Tensor, ...]:
        """The scales."""
        if self.edges == (0, 0):
            measured = self.calibrator.over_pieces(measured).view(1, 1)
        elif not self.edges[0]:
            measured = measured.amax(0, keepdim=True)
        scale = measured / self.codes.most
        return (scale.masked_fill_(scale == 0, 1),)

    def _scale_of(self, rows: int, first: int, scale: Tensor) -> Tensor:
        high = self.edges[0]
        if not high:
            return scale.view(1, 1, -1, 1)
        return scale[first // high : -(-(first + rows) // high)].view(-1, 1, scale.shape[1], 1)

    def encode(self, x: Tensor, first: int, settled: tuple[Tensor, ...], importance: Tensor | None = None) -> Tensor:
        """x / scale, rounded."""
        scale = self._scale_of(len(x), first, settled[0])
        codes = self.codes.rounded(self._cut(x) / scale)
        return bytes_of(codes.flatten(2).flatten(0, 1)[: len(x), : x.shape[1]])
