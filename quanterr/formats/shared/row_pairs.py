"""Signed 4-bit codes, two rows in a byte: the common part of ModelOpt's INT4 and ModelSlim's W4A8.

codes    u8 or i8    (rows / 2, cols), or (experts, rows / 2, cols): the even row in the low nibble
"""

from quanterr.checkpoints import Entry
from quanterr.formats.base import Decoder, Order
from quanterr.formats.shared import element_types
from quanterr.kernel.decoder import BlockNumbers, SharedBytes
from quanterr.kernel.grid import Grid


def read_pairs_of_rows(
    codes: Entry,
    scale: BlockNumbers,
    group: int,
    zero: BlockNumbers | None = None,
    levels: tuple[float, ...] = element_types.INT4,
    factor: Grid | None = None,
) -> Decoder:
    """Return the decoder of pairs of rows; see :class:`Decoder`."""
    return Decoder(
        codes,
        codes.shape[-1],
        levels=levels,
        scale=scale,
        zero=zero,
        group=group,
        order=Order.SHARED_BYTES,
        shared=SharedBytes(1, (0, 4), 4),
        factor=factor,
    )
