"""One-byte block scales, stored in rows or in the tiles that NVIDIA's matrix units read.

    linear    (rows, cols), in order
    tiled     (rows rounded up to 128, cols rounded up to 4) in tiles of 128 × 4, row by row of tiles;
              within a tile the scale of (r, c) is byte (r % 32) · 16 + (r // 32) · 4 + c; padding is 0

A stack of experts stores one such matrix after the other.

Reference: NVIDIA cuBLAS documentation, "1D block scaling factors layout"; Comfy-Org/comfy-kitchen@7d86acf
comfy_kitchen/float_utils.py to_blocked; pytorch/ao@36027d82 torchao/prototype/mx_formats/utils.py.
"""

from dataclasses import dataclass

from quanterr.checkpoints import Entry
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.workspace import Workspace

TILE_ROWS, TILE_COLS = 128, 4


@dataclass(frozen=True, slots=True)
class BlockScales:
    """One-byte scales: ``experts`` matrices of ``rows`` × ``cols`` (1 expert: the whole weight)."""

    entry: Entry
    rows: int
    cols: int
    experts: int
    tiled: bool

    def read(self, row: int, stop_row: int, workspace: Workspace) -> Tensor:
        """Read the bytes of rows ``row:stop_row`` of the stack, (r, cols)."""
        if not self.tiled:
            return workspace.read("scale", self.entry, row * self.cols, (stop_row - row, self.cols))
        first, last = row // self.rows, (stop_row - 1) // self.rows
        if first == last:
            return self._read_tiles(first, row - first * self.rows, stop_row - first * self.rows, workspace)
        pieces = []
        for expert in range(first, last + 1):
            top = expert * self.rows
            begin, end = max(row, top) - top, min(stop_row, top + self.rows) - top
            pieces.append(self._read_tiles(expert, begin, end, workspace).clone())
        return torch.cat(pieces)

    def _read_tiles(self, expert: int, row: int, stop_row: int, workspace: Workspace) -> Tensor:
        """Read rows of one expert from tiled storage."""
        across, down = _round_up(self.cols, TILE_COLS) // TILE_COLS, _round_up(self.rows, TILE_ROWS) // TILE_ROWS
        top, bottom = row // TILE_ROWS, -(-stop_row // TILE_ROWS)
        tile = TILE_ROWS * TILE_COLS
        first = (expert * down + top) * across * tile
        stored = workspace.read("scale", self.entry, first, (bottom - top, across, 32, 4, 4))
        matrix = stored.permute(0, 3, 2, 1, 4).reshape((bottom - top) * TILE_ROWS, across * TILE_COLS)
        return matrix[row - top * TILE_ROWS : stop_row - top * TILE_ROWS, : self.cols]


def fit_block_scales(entry: Entry, rows: int, cols: int, experts: int) -> tuple[BlockScales, ...]:
    """Return the layouts that the shape of the scales allows: both, one or none; linear first."""
    shapes = {False: (rows, cols), True: (_round_up(rows, TILE_ROWS), _round_up(cols, TILE_COLS))}
    stored = entry.shape[-2:] if len(entry.shape) >= 2 else ()
    fits = entry.n == experts * (stored[0] * stored[1] if stored else 0)
    return tuple(
        BlockScales(entry, rows, cols, experts, tiled) for tiled, shape in shapes.items() if fits and stored == shape
    )


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
