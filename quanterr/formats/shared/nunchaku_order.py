"""The storage order of Nunchaku's tensors, in which the threads of a warp load them for a matrix instruction.

Rows and columns of a weight are padded to multiples of 128. The index of a stored number, in mixed-radix digits, the
slowest first:

    codes     32-bit words of eight codes, the first in the lowest bits: (t, k, a 8, b 8, c 4, d 2, e 2)
              row 128 t + 16 a + 8 d + b, columns 64 k + 32 e + 8 c and on
    scales    of 16 bits, also smoothing factors, channel scales and biases: (t, g, a 8, b 4, c 2, d 2)
              row 128 t + 16 a + 8 c + 2 b + d, group g
    scales    of 8 bits: (t, k, a 8, b 4, c 4, d 4)
              row 128 t + 32 c + 8 b + a, group 4 k + d
    branch    (c, r, a 8, b 4, d 2, e 2, f 2)
              down[16 r + 8 d + a, 16 c + 8 e + 2 b + f]        (rank, columns)
              up  [16 c + 8 d + a, 16 r + 8 e + 2 b + f]        (rows, rank)

Reference: mit-han-lab/deepcompressor@69f3473 deepcompressor/backend/nunchaku/utils.py, NunchakuWeightPacker.
"""

from quanterr.checkpoints import Entry
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.workspace import Workspace

TILE = 128  # rows of a tile


def find_tiles(row: int, stop_row: int) -> tuple[int, int]:
    """Return the first tile that holds any of the rows, and the tile after the last such tile."""
    return row // TILE, -(-stop_row // TILE)


def read_tiles(key: str, entry: Entry, top: int, bottom: int, width: int, workspace: Workspace) -> Tensor:
    """Read the elements of tiles ``top:bottom``, flat; each row has ``width`` elements."""
    return workspace.read(key, entry, top * TILE * width, ((bottom - top) * TILE * width,))


def order_codes(stored: Tensor, workspace: Workspace) -> Tensor:
    """Reorder codes of whole tiles, (rows, bytes) int8, to row-major order, the first column in the low nibble."""
    rows, width = stored.shape
    tiles, across = rows // TILE, width // 32
    words = stored.view(torch.int32).view(tiles, across, 8, 8, 4, 2, 2)
    ordered = workspace.buffer("ordered", (tiles, 8, 2, 8, across, 2, 4), torch.int32)
    return ordered.copy_(words.permute(0, 2, 5, 3, 1, 6, 4)).view(torch.int8).view(rows, width)


def order_scales(stored: Tensor, groups: int = 1) -> Tensor:
    """Reorder 16-bit numbers of whole tiles, flat, to (rows, groups)."""
    return stored.reshape(-1, groups, 8, 4, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, groups)


def order_small_scales(stored: Tensor, groups: int) -> Tensor:
    """Reorder 8-bit numbers of whole tiles, flat, to (rows, groups)."""
    return stored.view(-1, groups // 4, 8, 4, 4, 4).permute(0, 4, 3, 2, 1, 5).reshape(-1, groups)


def order_down(stored: Tensor) -> Tensor:
    """Reorder a stored (columns, rank) matrix to (rank, columns)."""
    cols, rank = stored.shape
    return stored.view(cols // 16, rank // 16, 8, 4, 2, 2, 2).permute(1, 4, 2, 0, 5, 3, 6).reshape(rank, cols)


def order_up(stored: Tensor) -> Tensor:
    """Reorder a stored (rows, rank) matrix to row-major (rows, rank)."""
    rows, rank = stored.shape
    return stored.view(rows // 16, rank // 16, 8, 4, 2, 2, 2).permute(0, 4, 2, 1, 5, 3, 6).reshape(rows, rank)
