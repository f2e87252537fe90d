"""One-byte block scales, stored in rows or in the tiles that NVIDIA's matrix units read.

    linear    (rows, cols), in order
    tiled     (rows rounded up to 128, cols rounded up to 4) in tiles of 128 × 4, row by row of tiles;
              within a tile the scale of (r, c) is byte (r % 32) · 16 + (r // 32) · 4 + c; padding is 0

A stack of experts stores one such matrix after the other.

Reference: NVIDIA cuBLAS documentation, "1D block scaling factors layout"; Comfy-Org/comfy-kitchen@7d86acf
comfy_kitchen/float_utils.py to_blocked; pytorch/ao@36027d82 torchao/prototype/mx_formats/utils.py.
"""

from quanterr.checkpoints import Entry
from quanterr.kernel.grid import Grid
from quanterr.kernel.tiles import Tiles

TILE_ROWS, TILE_COLS = 128, 4
SWIZZLED_TILES = Tiles("R C a32 b4 c4", "Rba", "Cc")


def fit_block_scales(
    entry: Entry, rows: int, cols: int, experts: int, block: int, levels: tuple[float, ...]
) -> tuple[Grid, ...]:
    """Return the scales in the layouts that their shape allows: both, one or none; linear first.

    There are ``cols`` of them in each of ``rows`` rows of an expert, of ``block`` columns each.
    """
    stack_shape = _round_up(rows, TILE_ROWS), _round_up(cols, TILE_COLS)
    stored = entry.shape[-2:] if len(entry.shape) >= 2 else ()
    if not stored or entry.n != experts * stored[0] * stored[1]:
        return ()
    linear = Grid(entry, cols, block, levels=levels)
    tiled = Grid(entry, cols, block, levels=levels, tiles=SWIZZLED_TILES, stack_rows=rows, down=stack_shape[0])
    return tuple(grid for grid, shape in ((linear, (rows, cols)), (tiled, stack_shape)) if stored == shape)


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
