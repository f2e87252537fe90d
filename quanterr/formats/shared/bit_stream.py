"""Codes of b bits that follow one another in a stream of bits, across the boundaries of bytes and words.

    code i    bits i·b … i·b + b - 1 of the stream, the least significant first
    bit j     bit j % 8 of byte j // 8; so little-endian words of any size hold the same stream

Codes are read in units of several codes whose positions repeat every few bytes; a table maps each possible unit to
the values of its codes. Three bytes hold two units of four 3-bit or two 6-bit codes, five bytes four units of two
5-bit codes; the units of 1-, 2-, 4- and 8-bit codes are whole bytes.
"""

from __future__ import annotations

from functools import cache

from quanterr.formats.shared import element_types
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.workspace import Workspace

UNIT_BITS = {1: 8, 2: 8, 3: 12, 4: 8, 5: 10, 6: 12, 7: 14, 8: 8}  # by bits of a code
PERIODS = {8: (1, 1), 10: (5, 4), 12: (3, 2), 14: (7, 4)}  # by bits of a unit: (bytes, units) of a period


@cache
def unit_table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the values of the codes in each unit, (units, codes) float32, given the values of the 2^b codes."""
    code_bits = len(values).bit_length() - 1
    n = UNIT_BITS[code_bits]
    shifts = torch.arange(0, n, code_bits)
    codes = (torch.arange(1 << n)[:, None] >> shifts) & (len(values) - 1)
    return torch.tensor(values)[codes].to(device)


@cache
def byte_table(code_bits: int, zero: int = 0) -> Tensor | None:
    """Return the values of the codes in each byte, integers minus ``zero``; None if codes cross byte boundaries."""
    if 8 % code_bits:
        return None
    return unit_table(tuple(float(code - zero) for code in range(1 << code_bits)), torch.device("cpu"))


def integers(code_bits: int, device: torch.device) -> Tensor:
    """Return the unit table of codes that are the integers from 0 on."""
    return unit_table(tuple(map(float, range(1 << code_bits))), device)


def unpack(stored: Tensor, table: Tensor, workspace: Workspace) -> Tensor:
    """Decode a stream, (r, w) uint8, by the :func:`unit_table` of its codes: (r, codes) float32.

    Rows consist of whole periods: of 3 bytes for 3-bit and 6-bit codes, 5 bytes for 5-bit and 7 bytes for 7-bit codes.
    """
    unit_bits = len(table).bit_length() - 1
    n_bytes, n_units = PERIODS[unit_bits]
    if n_bytes == 1:
        return element_types.unpack(stored, table)
    periods = stored.numel() // n_bytes
    wide = workspace.buffer("wide", (n_bytes, periods), torch.int32).copy_(stored.view(periods, n_bytes).t())
    units = workspace.buffer("indices", (periods, n_units), torch.int32)
    unit, shifted = (workspace.buffer(key, (periods,), torch.int32) for key in ("unit", "shifted"))
    for number in range(n_units):
        first, begin = divmod(number * unit_bits, 8)
        torch.bitwise_right_shift(wide[first], begin, out=unit)
        for place in range(1, -(-(begin + unit_bits) // 8)):
            unit.bitwise_or_(torch.bitwise_left_shift(wide[first + place], 8 * place - begin, out=shifted))
        units[:, number] = unit.bitwise_and_(len(table) - 1)
    return element_types.look_up(units.view(stored.shape[0], -1), table)
