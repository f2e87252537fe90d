"""Rounding of numbers to codes, in units that groups of columns share, by the compiled kernel or by torch."""

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quanterr.kernel.enums import CodeKind, Packing
from quanterr.kernel.library import choose_kernel
from quanterr.kernel.structs import CodesStruct, NumbersStruct
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.packing import pack_halves, pack_pairs

HALVED_CODES = 32  # codes in a row that is packed by halves
MAGNITUDE_MASK = 0x7FFFFFFF  # bits of a float32 without its sign

Round = Callable[[Tensor], Tensor]  # float32 numbers in units of a code, which may be overwritten → uint8 codes


class Codes(NamedTuple):
    """A set of codes and the rule that rounds numbers to them, as a torch function and as data for the kernel."""

    round: Round
    kernel: CodesStruct
    read: tuple[Tensor, ...] = ()  # tensors that the kernel reads by address


def make_integers(low: int, high: int, first: int = 0) -> Codes:
    """Return codes for the integers from ``low`` to ``high``, ties to even, stored with ``first`` added."""
    return Codes(
        lambda x: x.round_().clamp_(low, high).add_(first).to(torch.int16).to(torch.uint8),
        CodesStruct(kind=CodeKind.INTEGERS, first=first, low=low, high=high),
    )


def make_truncated_integers(high: int) -> Codes:
    """Return codes for the integers from 0 to ``high``; the fraction of a number is dropped."""
    return Codes(lambda x: x.clamp_(0, high).to(torch.uint8), CodesStruct(kind=CodeKind.TRUNCATED, low=0, high=high))


def make_signed_bytes() -> Codes:
    """Return codes for numbers from -127 to 127, as integers: ties away from zero, infinities and NaN to 0."""

    def round_away(x: Tensor) -> Tensor:
        away = x.abs().floor()
        return (away + (2 * (x.abs() - away)).floor()).copysign(x).to(torch.int8).view(torch.uint8)

    return Codes(round_away, CodesStruct(kind=CodeKind.AWAY))


def make_table(codes: Sequence[int], bounds: Tensor, round_by_torch: Round) -> Codes:
    """Return codes from a table: ``codes[i]`` is for numbers above ``i`` of the ascending ``bounds``, float32."""
    ordered = torch.tensor(codes, dtype=torch.int32)
    changes = ordered[:-1] ^ ordered[1:]
    kernel = CodesStruct(kind=CodeKind.LISTED, first=codes[0], n_bounds=len(bounds))
    kernel.bounds, kernel.changes = bounds.data_ptr(), changes.data_ptr()
    return Codes(round_by_torch, kernel, (bounds, changes))


def make_counts(bounds: Tensor) -> Codes:
    """Return codes that count how many of the ``bounds``, up to 255 ascending float32 numbers, are below a number."""
    return make_table(range(len(bounds) + 1), bounds, lambda x: torch.bucketize(x, bounds).to(torch.uint8))


def find_codes(
    x: Tensor,
    units: Tensor,
    to: Codes,
    group: int,
    *,
    multiply: bool = False,
    before: Tensor | None = None,
    after: Tensor | None = None,
    packing: Packing = Packing.BYTES,
    out: Tensor | None = None,
) -> Tensor:
    """Return the codes of (x - before) / units + after, (r, c) float32, as uint8 (r, c), or packed (r, c / 2).

    ``group`` columns share a unit; the last group of a row may have fewer. ``units``, ``before`` and ``after`` are
    (1 or r, groups); with ``multiply``, numbers are multiplied by units. ``out`` receives the codes; its rows need not
    be contiguous.
    """
    kernel, (rows, cols) = choose_kernel().kernel, x.shape
    if kernel is None or group == 1 or not _can_pack(packing, group, cols):
        codes = _find_codes_in_torch(x, units, to, group, multiply, before, after)
        if packing != Packing.BYTES:
            codes = pack_halves(codes) if packing == Packing.HALVES else pack_pairs(codes, packing == Packing.LOW_FIRST)
        return codes if out is None else out.copy_(codes)
    if out is None:
        out = torch.empty(rows, cols if packing == Packing.BYTES else cols // 2, dtype=torch.uint8)
    shape = rows if len(units) > 1 else 1, -(-cols // group)
    x = x.float().contiguous()
    of_groups = [
        None if numbers is None else numbers.float().expand(shape).contiguous() for numbers in (units, before, after)
    ]
    addresses = [0 if numbers is None else numbers.data_ptr() for numbers in of_groups]
    step = shape[1] if shape[0] > 1 else 0
    place = packing, out.data_ptr(), out.stride(0)
    numbers = NumbersStruct(x.data_ptr(), rows, cols, group, *addresses, step, multiply, *place)
    kernel.library.quanterr_round(ctypes.byref(numbers), ctypes.byref(to.kernel))
    return out


def _can_pack(packing: Packing, group: int, cols: int) -> bool:
    """Return whether the kernel can pack codes: rows of HALVED_CODES codes, or two codes of one group in each byte."""
    if packing == Packing.HALVES:
        return group == cols == HALVED_CODES
    return packing == Packing.BYTES or (group % 2 == 0 and cols % 2 == 0)


def _find_codes_in_torch(
    x: Tensor, units: Tensor, to: Codes, group: int, multiply: bool, before: Tensor | None, after: Tensor | None
) -> Tensor:
    whole = x.shape[1] % group == 0
    shape = (len(x), -1, group) if whole else x.shape

    def spread(of_groups: Tensor) -> Tensor:
        return of_groups[..., None] if whole else of_groups.repeat_interleave(group, 1)[:, : x.shape[1]]

    steps = x.reshape(shape)
    if before is not None:
        steps = steps - spread(before)
    steps = steps * spread(units) if multiply else steps / spread(units)
    if after is not None:
        steps.add_(spread(after))
    return to.round(steps).view(x.shape)


def find_largest(x: Tensor) -> Tensor:
    """Return the number of largest magnitude in each row of ``x``, (n, k) float32, the first on a tie: (n, 1)."""
    kernel = choose_kernel().kernel
    if kernel is None:
        return x.gather(1, x.abs().argmax(1, keepdim=True))
    x, largest = x.float().contiguous(), torch.empty(len(x), 1)
    kernel.library.quanterr_find_largest(x.data_ptr(), *x.shape, largest.data_ptr())
    return largest


def find_magnitudes(x: Tensor, size: int) -> Tensor:
    """Return the largest |x| in each group of ``size`` consecutive float32 numbers, (n,); NaN if the group has one.

    The last group may have fewer numbers.
    """
    kernel, n = choose_kernel().kernel, x.numel()
    if kernel is not None:
        x, largest = x.contiguous(), torch.empty(-(-n // size))
        kernel.library.quanterr_find_magnitudes(x.data_ptr(), n, size, largest.data_ptr())
        return largest
    bits = x.reshape(-1).view(torch.int32) & MAGNITUDE_MASK  # torch finds the maximum of integers faster
    of_whole_groups, rest = bits[: n // size * size].view(-1, size).amax(1), bits[n // size * size :]
    return (torch.cat([of_whole_groups, rest.amax().view(1)]) if len(rest) else of_whole_groups).view(torch.float32)
