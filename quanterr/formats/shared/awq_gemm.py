"""Codes of AWQ's gemm layout, whose columns are packed: common to AWQ, ParoQuant and Quark; see formats/awq.py."""

from quanterr.formats.base import Decoder, Order, Parts
from quanterr.formats.shared.column_groups import ColumnBlocks
from quanterr.kernel.grid import Grid
from quanterr.kernel.packing import CodePacking


def read_gemm(
    parts: Parts,
    cols: int,
    blocks: ColumnBlocks,
    packing: CodePacking,
    levels: tuple[float, ...],
    zero_levels: tuple[float, ...] = (),
) -> Decoder:
    """Return the decoder of the weight: (level - zero point) · scale.

    The kernel reads codes of 4 bits, if rows are whole words. ``zero_levels`` are the values of zero points' codes,
    if they are signed.
    """
    zero_point, is_native = parts.get("zero_point"), packing.name == "interleaved" and parts["scale"].shape[1] % 8 == 0
    return Decoder(
        parts.codes,
        cols,
        levels=levels,
        scale=blocks.grid(parts["scale"], turned=True),
        zero=blocks.packed_grid(zero_point, packing, turned=True, levels=zero_levels) if zero_point else None,
        group=blocks.group,
        order=Order.AWQ_WORDS,
        read=None if is_native else Grid(parts.codes, cols, 1, turned=True, key="columns", packing=packing),
    )
