"""Decoding and all sums of a chunk in one pass on an accelerator, by a kernel in Triton's language (triton_sums.py).

specification.py defines the sums and interpreter.py the values. Codes that follow each other by rows, or that
``read_codes`` puts in this order, are decoded by the kernel; the values of other layouts come from the interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from math import isclose
from typing import Any, NamedTuple

from quanterr.kernel.decoder import Decoder, ElementType
from quanterr.kernel.interpreter import DTYPES, count_ends, decoder_of, read_codes, widen
from quanterr.kernel.native_sums import Operand
from quanterr.kernel.specification import SUMS_ALONE, SumOptions, add_matrices, add_rows, are_whole, exact_sums
from quanterr.lazy_torch import Tensor, torch
from quanterr.metrics import OUTLIER, RELATIVE_OUTLIER
from quanterr.metrics.histogram import BINS, LAST_BIN, Histogram
from quanterr.metrics.peaks import WINDOW
from quanterr.metrics.sums import Sums, as_float, exact
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.devices import own_stream
from quanterr.util.text import display
from quanterr.util.waiting import notices

TILE = 1024  # elements that a program of the kernel holds in registers
WARPS = 8  # warps of a program: with four, each thread would need more than 128 registers
EVERY_COLUMN = 1 << 30  # width of a block that spans whole rows: no row is longer
COMPILED_FOR = ("cuda", "xpu")  # types of devices for which Triton compiles; ROCm's are called cuda
# What the kernel finds for each row of a tile, in its order: first sums, then maxima, then a minimum.
COUNTS = ["n", "nonfinite_original", "nonfinite_quantized", "x_nonzero", "zero_reference", "zeroed"]
COUNTS += ["outliers", "relative_outliers"]
ELEMENT_SUMS = ["x", "y", "e", "x_abs", "e_abs", "y_sq", "xy", "relative", "weighted_x_sq", "weighted_e_sq"]
SUMS = ["x_sq", "e_sq", "xe", *COUNTS, *ELEMENT_SUMS]
MAXIMA = ["e_max", "relative_max", "x_max", "cast_max", "y_max"]
NAMES = [*SUMS, *MAXIMA, "e_min"]

_launching = threading.Lock()  # Triton compiles a kernel at its first launch, for all threads
_checking = threading.Lock()

See = Callable[[Tensor, Tensor], None]  # takes x and y, (r, c), before they are overwritten


class Codes(NamedTuple):
    """One side of a chunk, as the kernel reads it; see :class:`Decoder`."""

    stored: Tensor  # (r, bytes) uint8 with a table, else (r, c) of a floating dtype
    table: Tensor | None = None  # (256, codes in a byte) float32
    zero: Tensor | None = None  # (1 or r, blocks) float32
    scale: Tensor | None = None
    shift: Tensor | None = None
    group: int = EVERY_COLUMN  # columns of a block
    factor: float | None = None


def sum_fused(
    operands: tuple[Operand, Operand], chunk: Chunk, outlier: float, wanted: SumOptions, see: See | None = None
) -> Sums:
    """Compute the sums of a chunk of a pair whose values are float32; ``see``, if not None, receives the values."""
    if see is not None:
        x, y = (_read_values(operand, chunk) for operand in operands)
        see(x[0].stored, y[0].stored)
    else:
        x, y = (_read_codes(operand, chunk) or _read_values(operand, chunk) for operand in operands)
    sums = sum_codes(x[0], y[0], chunk, operands[0].weight.matrix[1], outlier, wanted)
    sums.saturated = sum(int(saturated) for _, saturated in (x, y) if saturated is not None)
    return sums


def _read_values(operand: Operand, chunk: Chunk) -> tuple[Codes, Tensor | None]:
    """Return the values of a chunk, and the number of its saturated codes, if the format counts them."""
    values = operand.dequantize(chunk)
    return Codes(values.weight.contiguous()), values.saturated


def _read_codes(operand: Operand, chunk: Chunk) -> tuple[Codes, Tensor | None] | None:
    """Return what the kernel needs to decode a chunk, and the number of its saturated codes; None if it cannot."""
    decoder, workspace = decoder_of(operand.weight.dequantize), operand.workspace
    if decoder is None or operand.again or not _is_covered(decoder):
        return None
    outer = widen(decoder, chunk)
    if outer.col != chunk.col:
        return None
    stored = read_codes(decoder, outer, workspace)
    saturated = count_ends(stored[:, : chunk.shape[1]], decoder.ends) if decoder.ends else None
    table = _make_table(decoder)
    if table is None:
        stored = stored.view(getattr(torch, DTYPES[decoder.element]))  # type: ignore[index]  # it has a type, or levels
    elif stored.stride(1) != 1:
        stored = stored.contiguous()
    numbers = [
        None if of_blocks is None else of_blocks(outer, workspace).to(torch.float32, copy=True)  # buffers are reused
        for of_blocks in (decoder.zero, decoder.scale, decoder.shift)
    ]
    width = max((each.shape[1] for each in numbers if each is not None), default=1)
    zero, scale, shift = (None if each is None else each.expand(-1, width).contiguous() for each in numbers)
    group = EVERY_COLUMN if width == 1 else decoder.group or 1
    factor = decoder.factor if isinstance(decoder.factor, float) else None
    table = None if table is None else table.to(stored.device)
    return Codes(stored, table, zero, scale, shift, group, factor), saturated


def _is_covered(decoder: Decoder) -> bool:
    """Return whether the kernel can decode the codes that ``read_codes`` returns."""
    others = decoder.read, decoder.blocks, decoder.columns
    return not decoder.rotation and all(other is None for other in others)


def _make_table(decoder: Decoder) -> Tensor | None:
    """Return what the codes in each byte stand for; None for codes that are floating-point numbers of several bytes."""
    if decoder.element in (ElementType.I8, ElementType.E4M3):
        dtype = getattr(torch, DTYPES[decoder.element])
        return torch.arange(256, dtype=torch.uint8).view(dtype).float().view(256, 1)
    return decoder.make_table()


def sum_codes(
    x: Codes, y: Codes, chunk: Chunk, cols: int, outlier: float, wanted: SumOptions = SUMS_ALONE, tile: int = TILE
) -> Sums:
    """Compute the sums of a chunk of a weight of ``cols`` columns; see :func:`exact_sums`."""
    peaks = _make_peaks(x.stored.device, chunk) if wanted.cells and are_whole([chunk], cols) else None
    numbers, histogram = _launch(x, y, chunk, outlier, wanted, peaks, tile)
    of_rows = torch.cat([numbers[: len(SUMS)].sum(2), numbers[len(SUMS) : -1].amax(2), numbers[-1:].amin(2)])
    totals = torch.cat([of_rows[: len(SUMS)].sum(1), of_rows[len(SUMS) : -1].amax(1), of_rows[-1:].amin(1)])
    rows = of_rows[[NAMES.index(name) for name in ("x_sq", "e_sq", "e_max", "xe", "y_max")]]
    on_host = torch.cat([totals, rows.view(-1)]).cpu()
    total, rows = dict(zip(NAMES, on_host.tolist(), strict=False)), on_host[len(NAMES) :].view(5, -1)
    rows[4] = (rows[4] == 0).double()
    sums = Sums(elements=chunk.n, histogram=_make_histogram(histogram.cpu()) if total["n"] else None)
    for name in COUNTS:
        setattr(sums, name, int(total[name]))
    for name in ("x_sq", "e_sq", *ELEMENT_SUMS):
        setattr(sums, name, exact(total[name]))
    for name in ("e_max", "e_min", "relative_max", "x_max"):
        setattr(sums, name, total[name])
    if wanted.normal:
        sums.cast_max = total["cast_max"]
    if wanted.cells and peaks is not None:
        sums.peaks = [wanted.cells.reduce(peaks, chunk.row)]
    add_rows(sums, [chunk], cols, rows)
    if wanted.matrix_rows:
        add_matrices(sums, [chunk], wanted.matrix_rows, rows)
    return sums


def _make_peaks(device: torch.device, chunk: Chunk) -> Tensor:
    rows, cols = chunk.shape
    return torch.empty((2, rows, -(-cols // WINDOW)), dtype=torch.float32, device=device)


def _make_histogram(counts: Tensor) -> Histogram:
    """Make a histogram of the counts of all bins, (BINS,) int32 on the CPU."""
    last = int(counts.nonzero()[-1])
    first = int(counts[1:].ne(0).to(torch.uint8).argmax()) + 1
    return Histogram(int(counts[0]), counts[first : last + 1].long(), first)


def _launch(
    x: Codes, y: Codes, chunk: Chunk, outlier: float, wanted: SumOptions, peaks: Tensor | None, tile: int
) -> tuple[Tensor, Tensor]:
    """Run the kernel; return its numbers (names, r, tiles across) float64 and the counts of the histogram's bins."""
    from quanterr.kernel.triton_sums import sum_tile

    (rows, cols), device = chunk.shape, x.stored.device
    width = min(max(1 << (cols - 1).bit_length(), WINDOW), tile)
    down, across = -(-rows // (tile // width)), -(-cols // width)
    numbers = torch.zeros((len(NAMES), rows, across), dtype=torch.float64, device=device)
    histogram = torch.zeros(BINS, dtype=torch.int32, device=device)
    limits = torch.tensor([outlier, RELATIVE_OUTLIER, wanted.normal or 1.0], dtype=torch.float64, device=device)
    importance = None
    if wanted.importance is not None:
        importance = wanted.importance(chunk).to(device, torch.float32).contiguous()
    with _launching:
        sum_tile[down, across](
            **_list_arguments("x", x),
            **_list_arguments("y", y),
            importance=importance,
            importance_stride=_find_stride(importance),
            limits=limits,
            numbers=numbers,
            histogram=histogram,
            x_peaks=None if peaks is None else peaks[0],
            e_peaks=None if peaks is None else peaks[1],
            rows=rows,
            cols=cols,
            ROWS=tile // width,
            COLS=width,
            WINDOW=WINDOW,
            LAST=LAST_BIN,
            num_warps=WARPS,
            enable_fp_fusion=False,  # each operation rounds
        )
    return numbers, histogram


def _list_arguments(side: str, codes: Codes) -> dict[str, Any]:
    """Return the kernel's arguments for one side."""
    is_bfloat16 = codes.stored.dtype == torch.bfloat16
    stored = codes.stored.view(torch.int16) if is_bfloat16 else codes.stored
    arguments = codes._asdict() | {"codes": stored, "stride": stored.stride(0)}
    del arguments["stored"]
    for name in ("zero", "scale", "shift"):
        arguments[f"{name}_stride"] = _find_stride(getattr(codes, name))
    per_byte = 1 if codes.table is None else codes.table.shape[1]
    constants = {f"{side.upper()}_PER_BYTE": per_byte, f"{side.upper()}_IS_BFLOAT16": is_bfloat16}
    return {f"{side}_{name}": value for name, value in arguments.items()} | constants


def _find_stride(numbers: Tensor | None) -> int:
    """Return the distance between the numbers of two rows; 0 if all rows share theirs."""
    return 0 if numbers is None or len(numbers) == 1 else numbers.stride(0)


def can_fuse(device: torch.device) -> bool:
    """Return whether Triton's kernel runs on a device and computes what the specification says; if not, say why."""
    with _checking:
        return _check_kernel(device)


@cache
def _check_kernel(device: torch.device) -> bool:
    if device.type not in COMPILED_FOR or find_spec("triton") is None:
        return False
    codes = torch.arange(300, dtype=torch.uint8).view(3, 100)
    scale = torch.tensor([[0.1], [0.3], [0.7]])
    x = torch.linspace(-30, 90, 300).view(3, 100).bfloat16()
    table = torch.arange(256.0).view(256, 1) - 100
    chunk = Chunk(0, 3, 0, 100)
    expected = exact_sums(lambda _: (x.float(), table[codes.int(), 0] * scale), [chunk], 100, OUTLIER)
    try:
        with own_stream(device):  # which makes it this thread's device: the kernel runs on that
            sides = Codes(x.to(device)), Codes(codes.to(device), table.to(device), scale=scale.to(device))
            sums = sum_codes(*sides, chunk, 100, OUTLIER)
        is_close = isclose(as_float(sums.e_sq), as_float(expected.e_sq), rel_tol=1e-9)
        reason = "" if is_close and sums.histogram == expected.histogram else "its sums are wrong"
    except Exception as error:  # a compiler that is missing, a device that Triton does not know
        reason = str(error)
    if reason:
        notices.warning("%s: torch computes the sums, as Triton's kernel fails: %s", device, display(reason))
    return not reason
