"""The kernel of fused_sums.py, in Triton's language: it decodes and sums a tile of elements while it is in registers.

Triton compiles it for the accelerator at its first use. With TRITON_INTERPRET=1, Triton's interpreter runs the same
source on the CPU. Numbers that must be float64 come in tensors, as Triton passes floats as float32.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _take_numbers(numbers, row, block, stride, inside):
    """Return the number of each element's block."""
    return tl.load(numbers + row * stride + block, mask=inside, other=0.0)


@triton.jit
def _load_values(
    codes,
    table,
    zero,
    scale,
    shift,
    factor,
    stride,
    zero_stride,
    scale_stride,
    shift_stride,
    group,
    row,
    col,
    inside,
    PER_BYTE: tl.constexpr,
    IS_BFLOAT16: tl.constexpr,
):
    """Return the values of a tile, float32: ((level - zero) · scale + shift) · factor, each operation rounded.

    Without a table, codes are floating-point numbers.
    """
    if IS_BFLOAT16:  # move the bits: the interpreter's own conversion makes subnormals zero
        bits = tl.load(codes + row * stride + col, mask=inside, other=0).to(tl.int32) << 16
        values = bits.to(tl.float32, bitcast=True)
    elif table is None:
        values = tl.load(codes + row * stride + col, mask=inside, other=0.0).to(tl.float32)
    else:
        byte = tl.load(codes + row * stride + col // PER_BYTE, mask=inside, other=0).to(tl.int32)
        values = tl.load(table + byte * PER_BYTE + col % PER_BYTE, mask=inside, other=0.0)
    block = col // group
    if zero is not None:
        values = values - _take_numbers(zero, row, block, zero_stride, inside)
    if scale is not None:
        values = values * _take_numbers(scale, row, block, scale_stride, inside)
    if shift is not None:
        values = values + _take_numbers(shift, row, block, shift_stride, inside)
    if factor is not None:
        values = values * factor
    return values


@triton.jit
def _count(condition):
    return tl.sum(condition.to(tl.int32), 1).to(tl.float64)


@triton.jit
def _store_peaks(peaks, magnitudes, row, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, WINDOW: tl.constexpr):
    """Store the largest magnitude of each window of columns."""
    largest = tl.max(tl.reshape(magnitudes.to(tl.float32), (ROWS, COLS // WINDOW, WINDOW)), 2)
    windows = tl.cdiv(cols, WINDOW)
    window = tl.program_id(1) * (COLS // WINDOW) + tl.arange(0, COLS // WINDOW)[None, :]
    tl.store(peaks + row * windows + window, largest, mask=(row < rows) & (window < windows))


@triton.jit
def sum_tile(
    x_codes,
    x_table,
    x_zero,
    x_scale,
    x_shift,
    x_factor,
    x_stride,
    x_zero_stride,
    x_scale_stride,
    x_shift_stride,
    x_group,
    y_codes,
    y_table,
    y_zero,
    y_scale,
    y_shift,
    y_factor,
    y_stride,
    y_zero_stride,
    y_scale_stride,
    y_shift_stride,
    y_group,
    importance,
    importance_stride,
    limits,
    numbers,
    histogram,
    x_peaks,
    e_peaks,
    rows,
    cols,
    X_PER_BYTE: tl.constexpr,
    X_IS_BFLOAT16: tl.constexpr,
    Y_PER_BYTE: tl.constexpr,
    Y_IS_BFLOAT16: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WINDOW: tl.constexpr,
    LAST: tl.constexpr,
):
    """Sum a tile of ROWS x COLS elements; ``numbers`` gets those of fused_sums.NAMES for each row of the tile."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (col < cols)
    x = _load_values(
        x_codes,
        x_table,
        x_zero,
        x_scale,
        x_shift,
        x_factor,
        x_stride,
        x_zero_stride,
        x_scale_stride,
        x_shift_stride,
        x_group,
        row,
        col,
        inside,
        X_PER_BYTE,
        X_IS_BFLOAT16,
    )
    y = _load_values(
        y_codes,
        y_table,
        y_zero,
        y_scale,
        y_shift,
        y_factor,
        y_stride,
        y_zero_stride,
        y_scale_stride,
        y_shift_stride,
        y_group,
        row,
        col,
        inside,
        Y_PER_BYTE,
        Y_IS_BFLOAT16,
    )
    finite_x, finite_y = tl.abs(x) < float("inf"), tl.abs(y) < float("inf")
    both = inside & finite_x & finite_y
    x, y = tl.where(both, x, 0.0).to(tl.float64), tl.where(both, y, 0.0).to(tl.float64)
    e = y - x
    x_abs, e_abs = tl.abs(x), tl.abs(e)
    nonzero = x != 0
    relative = tl.where(nonzero, e_abs / tl.where(nonzero, x_abs, 1.0), 0.0)
    outlier, relative_outlier, normal = tl.load(limits), tl.load(limits + 1), tl.load(limits + 2)

    bits = e_abs.to(tl.float32).to(tl.int32, bitcast=True)
    bins = tl.minimum((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, LAST)  # the bits of the nearest bfloat16
    tl.atomic_add(histogram + bins, 1, mask=both)
    if x_peaks is not None:
        _store_peaks(x_peaks, x_abs, row, rows, cols, ROWS, COLS, WINDOW)
        _store_peaks(e_peaks, e_abs, row, rows, cols, ROWS, COLS, WINDOW)

    row_in_tile = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    stored = row_in_tile < rows
    across = tl.num_programs(1).to(tl.int64)
    step = across * rows
    out = numbers + row_in_tile * across + tl.program_id(1)
    tl.store(out, tl.sum(x * x, 1), mask=stored)
    tl.store(out + step, tl.sum(e * e, 1), mask=stored)
    tl.store(out + 2 * step, tl.sum(x * e, 1), mask=stored)
    tl.store(out + 3 * step, _count(both), mask=stored)
    tl.store(out + 4 * step, _count(inside & (finite_x == 0)), mask=stored)
    tl.store(out + 5 * step, _count(inside & (finite_y == 0)), mask=stored)
    tl.store(out + 6 * step, _count(nonzero), mask=stored)
    tl.store(out + 7 * step, _count((x == 0) & (y != 0)), mask=stored)
    tl.store(out + 8 * step, _count(nonzero & (y == 0)), mask=stored)
    tl.store(out + 9 * step, _count(e_abs > outlier), mask=stored)
    tl.store(out + 10 * step, _count(e_abs > relative_outlier * x_abs), mask=stored)
    tl.store(out + 11 * step, tl.sum(x, 1), mask=stored)
    tl.store(out + 12 * step, tl.sum(y, 1), mask=stored)
    tl.store(out + 13 * step, tl.sum(e, 1), mask=stored)
    tl.store(out + 14 * step, tl.sum(x_abs, 1), mask=stored)
    tl.store(out + 15 * step, tl.sum(e_abs, 1), mask=stored)
    tl.store(out + 16 * step, tl.sum(y * y, 1), mask=stored)
    tl.store(out + 17 * step, tl.sum(x * y, 1), mask=stored)
    tl.store(out + 18 * step, tl.sum(relative, 1), mask=stored)
    if importance is not None:
        weights = _take_numbers(importance, row, col, importance_stride, inside).to(tl.float64)
        tl.store(out + 19 * step, tl.sum(x * x * weights, 1), mask=stored)
        tl.store(out + 20 * step, tl.sum(e * e * weights, 1), mask=stored)
    tl.store(out + 21 * step, tl.max(e_abs, 1), mask=stored)
    tl.store(out + 22 * step, tl.max(relative, 1), mask=stored)
    tl.store(out + 23 * step, tl.max(x_abs, 1), mask=stored)
    tl.store(out + 24 * step, tl.max(e_abs / tl.maximum(x_abs, normal), 1), mask=stored)
    tl.store(out + 25 * step, tl.max(tl.abs(y), 1), mask=stored)
    tl.store(out + 26 * step, tl.min(tl.where(both, e_abs, float("inf")), 1), mask=stored)
