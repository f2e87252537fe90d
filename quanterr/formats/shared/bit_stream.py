"""Codes of b bits that follow each other in a stream of bits, across the ends of bytes and words.

    code i    bits i·b … i·b + b - 1 of the stream, the least significant first
    bit j     bit j % 8 of byte j // 8; so little-endian words of any size hold the same stream

The codes are read in units of a few, which begin at the same places in every few bytes; a table holds what
the codes of each possible unit stand for. Three bytes hold two units of four 3-bit or two 6-bit codes, five
bytes four units of two 5-bit codes; codes of 1, 2, 4 and 8 bits have whole bytes as units.
"""

from functools import cache

import torch
from torch import Tensor

from quanterr.formats.shared import element_types
from quanterr.tensors.workspace import Workspace

UNIT_BITS = {1: 8, 2: 8, 3: 12, 4: 8, 5: 10, 6: 12, 7: 14, 8: 8}  # by the bits of a code
PERIODS = {8: (1, 1), 10: (5, 4), 12: (3, 2), 14: (7, 4)}  # by those of a unit: bytes, and units in them


@cache
def unit_table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """What the codes of a unit stand for, (units, codes) float32, given the values of the 2^b codes."""
    code_bits = len(values).bit_length() - 1
    n = UNIT_BITS[code_bits]
    shifts = torch.arange(0, n, code_bits)
    codes = (torch.arange(1 << n)[:, None] >> shifts) & (len(values) - 1)
    return torch.tensor(values)[codes].to(device)


def byte_table(code_bits: int, zero: int = 0) -> Tensor | None:
    """What the codes of a byte stand for, integers less ``zero``; None where codes cross the ends of bytes."""
    if 8 % code_bits:
        return None
    return unit_table(tuple(float(code - zero) for code in range(1 << code_bits)), torch.device("cpu"))


def integers(code_bits: int, device: torch.device) -> Tensor:
    """The table of codes that are integers from 0 on."""
    return unit_table(tuple(map(float, range(1 << code_bits))), device)


def unpack(stored: Tensor, table: Tensor, workspace: Workspace) -> Tensor:
    """The values of a stream's bytes, (r, w) uint8, by the :func:`unit_table` of its codes: (r, codes) float32.

    Rows are whole periods: a multiple of 3 bytes for 3 and 6 bits, of 5 for 5 bits, of 7 for 7 bits.
    """
    unit_bits = len(table).bit_length() - 1
    n_bytes, n_units = PERIODS[unit_bits]
    if n_bytes == 1:
        return element_types.unpack(stored, table, workspace)
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
    return element_types.look_up(units.view(stored.shape[0], -1), table, workspace)
