"""Codes of 4 bits that follow each other in order, across the ends of a weight's rows."""

from quanterr.checkpoints import Entry
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace


def read_flat_codes(entry: Entry, cols: int, high_first: bool, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read the codes of whole rows, or of a part of a row, of a weight of ``cols`` columns: (r, c) uint8."""
    first = chunk.row * cols + chunk.col
    begin, end = first // 2, -(-(first + chunk.n) // 2)
    stored = workspace.read_bytes("codes", entry, begin, (end - begin, 1))
    shifts = torch.tensor([4, 0] if high_first else [0, 4], dtype=torch.uint8, device=stored.device)
    codes = (stored >> shifts & 15).view(-1)
    return codes[first - 2 * begin : first - 2 * begin + chunk.n].view(chunk.shape)
