"""Interleaved rows, as runtimes store the modulation layers of diffusion models.

    stored row j · parts + s    is row s · (rows / parts) + j of the weight

A layer that outputs a block's shift, scale and gate (3 parts, or 6) stores the rows of one channel next to each
other. Only a layer's name shows whether it does so.

Reference: mit-han-lab/deepcompressor@69f3473 backend/nunchaku/utils.py (adanorm_splits);
nunchaku-tech/nunchaku@3a3cc3d models/normalization.py and transformers/transformer_qwenimage.py;
Comfy-Org/comfy-quants@55f0a26 algorithms/awq_w4a16/qwen_modulation.py.
"""

from __future__ import annotations

from quanterr.checkpoints import Entry
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

# Ending of the module's name → number of parts: FLUX single and double blocks, Qwen-Image.
PARTS = {"norm.linear": 3, "norm1.linear": 6, "norm1_context.linear": 6, "img_mod.1": 6, "txt_mod.1": 6}


def count_parts_by_name(module: str) -> int:
    """Return the number of interleaved parts in a layer with this name; 1 if its rows are not interleaved."""
    return next((n for ending, n in PARTS.items() if module == ending or module.endswith("." + ending)), 1)


def find_stored_rows(row: int, stop_row: int, rows: int, parts: int, device: torch.device) -> Tensor:
    """Return the indices of the stored rows that hold ``row:stop_row`` of a weight's ``rows`` rows, (r,) int64."""
    positions = torch.arange(row, stop_row, device=device)
    rows_per_part = rows // parts
    return positions % rows_per_part * parts + positions // rows_per_part


def read_ordered_rows(
    key: str, entry: Entry, of_weight: tuple[int, int], group: int, chunk: Chunk, workspace: Workspace
) -> Tensor:
    """Read the numbers of a chunk's groups of columns, stored as (groups, rows), float32 (r, groups).

    ``of_weight`` has the weight's number of rows, and the number of parts that they interleave.
    """
    order = find_stored_rows(chunk.row, chunk.stop_row, *of_weight, workspace.device)
    return workspace.read_whole(key, entry)[chunk.col // group : -(-chunk.stop_col // group), order].t().float()
