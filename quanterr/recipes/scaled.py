"""Codes times a scale for each tensor, row, column or block: ``fp8_row``, ``int8_block128``.

    X.weight          F8_E4M3 or I8       (rows, cols)
    X.weight_scale    F32                 () for a tensor, (rows, 1) for rows, (1, cols) for columns,
                                (⌈rows/high⌉, ⌈cols/wide⌉) for blocks

    scale = max |x| / 448 for FP8, / 127 for INT8; 1 where every x is zero

A value is code · scale. ComfyUI, ModelOpt and torchao's float8 store weights in this way. Values are rounded to
nearest, ties to even.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from quanterr.kernel.levels import E4M3, make_float_codes
from quanterr.kernel.rounding import Codes, find_codes, make_integers
from quanterr.lazy_torch import Tensor, torch
from quanterr.recipes.base import Encoder, Piece, Source, StoredTensor
from quanterr.recipes.calibration import Calibrator


class CodeType(NamedTuple):
    """The type of numbers that weights are rounded to."""

    dtype: torch.dtype
    stored: str  # the dtype's name in a safetensors header
    highest: float
    codes: Codes

    def round(self, x: Tensor) -> Tensor:
        """Round ``x``, in units of a code, to the nearest codes; overwrites ``x``."""
        return self.codes.round(x).view(self.dtype)


def _round_to_e4m3(x: Tensor) -> Tensor:
    return x.clamp_(-E4M3.highest, E4M3.highest).to(torch.float8_e4m3fn).view(torch.uint8)


FP8 = CodeType(torch.float8_e4m3fn, "F8_E4M3", E4M3.highest, make_float_codes(E4M3, _round_to_e4m3, sign=7))
INT8 = CodeType(torch.int8, "I8", 127.0, make_integers(-127, 127))


@dataclass(frozen=True)
class ScaledEncoder(Encoder):
    """An encoder with a scale for each block of ``edges`` (rows, columns); 0 means all rows or columns."""

    codes: CodeType
    edges: tuple[int, int]
    calibrator: Calibrator

    @property
    def config(self) -> Mapping[str, object]:
        """The edges of blocks, as DeepSeek and similar FP8 checkpoints declare them."""
        return {"weight_block_size": list(self.edges)} if all(self.edges) else {}

    @property
    def is_local(self) -> bool:
        """False if a scale is shared by all rows."""
        return self.edges[0] > 0

    def list_tensors(self, source: Source) -> tuple[StoredTensor, ...]:
        """List codes and scales."""
        high, wide = self.edges[0] or source.rows, self.edges[1] or source.cols
        shape = () if self.edges == (0, 0) else (-(-source.rows // high), -(-source.cols // wide))
        return (
            StoredTensor("{weight}", self.codes.stored, (source.rows, source.cols)),
            StoredTensor("{weight}_scale", "F32", shape),
        )

    def joint_rows(self, source: Source) -> int:
        """Return the number of rows in a block."""
        return self.edges[0] or 1

    def _cut(self, x: Tensor, wide: int) -> Tensor:
        """Cut rows into blocks, (a, high, b, wide), padded with zeros."""
        rows, cols = x.shape
        high = self.edges[0] or rows
        a, b = -(-rows // high), -(-cols // wide)
        if (a * high, b * wide) != (rows, cols):
            x = torch.nn.functional.pad(x, (0, b * wide - cols, 0, a * high - rows))
        return x.view(a, high, b, wide)

    def measure(self, piece: Piece, importance: Tensor | None = None) -> Tensor:
        """Return the calibrator's largest magnitude of each block, (a, b)."""
        x, wide = piece.rows, self.edges[1] or piece.rows.shape[1]
        if self.calibrator.takes_largest and wide > 1 and x.shape[1] % wide == 0:
            return self._cut(piece.find_magnitudes(wide).view(len(x), -1), 1).amax((1, 3))
        blocks = self._cut(x, wide)
        if importance is not None:
            _, _, b, wide = blocks.shape
            importance = torch.nn.functional.pad(importance, (0, b * wide - len(importance))).view(1, 1, b, wide)
        return self.calibrator.find_ends(blocks, self.codes.highest, lambda v: self.codes.round(v).float(), importance)

    def settle(self, measured: Tensor, source: Source) -> tuple[Tensor, ...]:
        """Return the scales."""
        if self.edges == (0, 0):
            measured = self.calibrator.merge_pieces(measured).view(1, 1)
        elif not self.edges[0]:
            measured = measured.amax(0, keepdim=True)
        scale = measured / self.codes.highest
        return (scale.masked_fill_(scale == 0, 1),)

    def encode(
        self, x: Tensor, first: int, settled: tuple[Tensor, ...], out: Tensor, importance: Tensor | None = None
    ) -> None:
        """Write x / scale, rounded to codes."""
        scale, high = settled[0], self.edges[0]
        if high:
            scale = scale[first // high : -(-(first + len(x)) // high)].repeat_interleave(high, 0)[: len(x)]
        find_codes(x, scale, self.codes.codes, self.edges[1] or x.shape[1], out=out.view(x.shape))
