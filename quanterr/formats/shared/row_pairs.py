"""Signed 4-bit codes, two rows in a byte: the common part of ModelOpt's INT4 and ModelSlim's W4A8.

codes    u8 or i8    (rows / 2, cols), or (experts, rows / 2, cols): the even row in the low nibble
"""

from quanterr.checkpoints import Entry
from quanterr.formats.base import Chunk, Decoder, Native, Order, Workspace
from quanterr.formats.shared import element_types
from quanterr.kernel.decoder import OfBlocks, SharedBytes
from quanterr.lazy_torch import Tensor, torch


def read_row_pairs(codes: Entry, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read the codes of a chunk, (r, c) float32."""
    cols = codes.shape[-1]
    top, bottom, c = chunk.row // 2, -(-chunk.stop_row // 2), chunk.shape[1]
    rows = bottom - top
    stored = workspace.read("codes", codes, top * cols + chunk.col, (rows, c if rows == 1 else cols))
    nibbles = workspace.buffer("nibbles", (rows, c), torch.int8)
    values = workspace.output((rows, 2, c))
    signed = stored.view(torch.int8)
    values[:, 0].copy_(torch.bitwise_left_shift(signed, 4, out=nibbles).bitwise_right_shift_(4))
    values[:, 1].copy_(torch.bitwise_right_shift(signed, 4, out=nibbles))
    return values.view(2 * rows, c)[chunk.row - 2 * top : chunk.stop_row - 2 * top]


def read_pairs_of_rows(codes: Entry, scale: OfBlocks, group: int, zero: OfBlocks | None = None) -> Native:
    """Return the function that decodes pairs of rows; see :class:`Decoder`."""
    return Native(
        Decoder(
            codes,
            codes.shape[-1],
            levels=element_types.INT4,
            scale=scale,
            zero=zero,
            group=group,
            order=Order.SHARED_BYTES,
            shared=SharedBytes(1, (0, 4), 4),
        )
    )
