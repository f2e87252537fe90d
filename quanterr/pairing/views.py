"""Views: weights made of other weights, such as a range of rows, a stack, a transpose or a reordering.

Each view is a Weight that cuts, stacks or transposes dequantized values chunk by chunk and stores nothing. Views can
be nested, so fused, split and stacked projections need no further code.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import prod

import torch
from msgspec.structs import replace
from torch import Tensor

from quanterr.checkpoints import Entry
from quanterr.formats import SEVERAL, Values, Weight
from quanterr.pairing.converters.numbers import ElementChange
from quanterr.pairing.converters.orders import Order
from quanterr.tensors.chunks import Chunk, as_matrix
from quanterr.tensors.workspace import TORCH_DTYPES, Workspace

Dequantize = Callable[[Chunk, Workspace], Values]


def is_view(weight: Weight) -> bool:
    """Return whether the values of a weight are read through a view that moves or changes them."""
    return isinstance(weight.dequantize, partial) and weight.dequantize.func.__module__ == __name__


def take_rows(weight: Weight, first: int, shape: tuple[int, ...]) -> Weight:
    """Return rows of a weight's matrix, from ``first`` on, as a weight of this shape; of a 1-D weight, elements."""
    if first == 0 and prod(shape) == prod(weight.shape):
        return reshape_weight(weight, shape)
    share = prod(shape) / max(prod(weight.shape), 1)
    return _view_readings(weight, lambda one: _make_view(one, shape, partial(_dequantize_rows, one, first), share))


def _dequantize_rows(weight: Weight, first: int, chunk: Chunk, workspace: Workspace) -> Values:
    axis = 1 if len(weight.shape) == 1 else 0
    begin, end = (chunk.col, chunk.stop_col) if axis else (chunk.row, chunk.stop_row)
    return weight.dequantize(_shift_chunk(chunk, axis, begin + first, end + first), workspace)


def reshape_weight(weight: Weight, shape: tuple[int, ...]) -> Weight:
    """Return the same elements, in the same order, under another shape."""
    if shape == weight.shape:
        return weight
    if as_matrix(shape) != weight.matrix:
        return _view_readings(
            weight, lambda one: _make_view(one, shape, partial(_dequantize_flat, one, as_matrix(shape)))
        )
    return _view_readings(
        weight,
        lambda one: replace(
            _make_view(one, shape, one.dequantize), rotated=one.rotated, branch=one.branch, unit=one.unit
        ),
    )


def _dequantize_flat(weight: Weight, matrix: tuple[int, int], chunk: Chunk, workspace: Workspace) -> Values:
    """Read all elements, which are few, and cut the chunk from them as rows of another length."""
    rows, cols = weight.matrix
    whole = weight.dequantize(Chunk(0, rows, 0, cols), workspace).weight.reshape(matrix)
    return Values(whole[chunk.row : chunk.stop_row, chunk.col : chunk.stop_col])


def stack_weights(weights: Sequence[Weight], shape: tuple[int, ...]) -> Weight:
    """Stack weights with rows of equal length; 1-D weights are joined end to end."""
    if len(weights) == 1:
        return reshape_weight(weights[0], shape)
    others = zip(*(weight.alternatives for weight in weights), strict=False)
    return _stack_reading(weights, shape).with_alternatives(
        _stack_reading(alternatives, shape) for alternatives in others
    )


def _stack_reading(weights: Sequence[Weight], shape: tuple[int, ...]) -> Weight:
    axis = 1 if len(shape) == 1 else 0
    starts = [0]
    for weight in weights:
        starts.append(starts[-1] + weight.matrix[axis])
    first = weights[0]
    formats = {weight.format for weight in weights}
    return replace(
        first,
        format=first.format if len(formats) == 1 else SEVERAL.join(sorted(formats)),
        shape=shape,
        parts={f"{n}.{role}": entry for n, weight in enumerate(weights) for role, entry in weight.parts.items()},
        dequantize=partial(_dequantize_stack, weights, starts, axis),
        needs_float64=any(weight.needs_float64 for weight in weights),
        computed=any(weight.computed for weight in weights),
        scale=None,
        levels=first.levels if all(weight.levels == first.levels for weight in weights) else None,
        coded=tuple(entry for weight in weights for entry in weight.coded or (weight.codes,)),
        unit=None,
        rotated=None,
        branch=None,
        evidence=tuple(dict.fromkeys(evidence for weight in weights for evidence in weight.evidence)),
        warnings=tuple(dict.fromkeys(evidence for weight in weights for evidence in weight.warnings)),
        alternatives=(),
        byte_share=sum(weight.nbytes for weight in weights) / max(sum(weight.stored_bytes for weight in weights), 1),
    )


def _dequantize_stack(
    weights: Sequence[Weight], starts: Sequence[int], axis: int, chunk: Chunk, workspace: Workspace
) -> Values:
    begin, end = (chunk.row, chunk.stop_row) if axis == 0 else (chunk.col, chunk.stop_col)
    inside = [n for n in range(len(weights)) if starts[n] < end and starts[n + 1] > begin]
    if len(inside) == 1:
        n = inside[0]
        return weights[n].dequantize(_shift_chunk(chunk, axis, begin - starts[n], end - starts[n]), workspace)
    dtype = torch.float64 if any(weight.needs_float64 for weight in weights) else torch.float32
    whole = workspace.buffer("stacked", chunk.shape, dtype)
    counts = []
    for n in inside:
        left, right = max(begin, starts[n]), min(end, starts[n + 1])
        values = weights[n].dequantize(_shift_chunk(chunk, axis, left - starts[n], right - starts[n]), workspace)
        whole.narrow(axis, left - begin, right - left).copy_(values.weight)
        counts.append(values.saturated)
    counted = [count for count in counts if count is not None]
    return Values(whole, torch.stack(counted).sum() if len(counted) == len(counts) else None)


def _shift_chunk(chunk: Chunk, axis: int, begin: int, end: int) -> Chunk:
    """Return the chunk with other rows (axis 0) or columns (axis 1)."""
    return chunk._replace(row=begin, stop_row=end) if axis == 0 else chunk._replace(col=begin, stop_col=end)


def join_columns(weights: Sequence[Weight], shape: tuple[int, ...]) -> Weight:
    """Join matrices with equally many rows side by side."""
    starts = [0]
    for weight in weights:
        starts.append(starts[-1] + weight.matrix[1])
    return replace(stack_weights(weights, shape), dequantize=partial(_dequantize_joined, weights, starts))


def _dequantize_joined(weights: Sequence[Weight], starts: Sequence[int], chunk: Chunk, workspace: Workspace) -> Values:
    whole = workspace.buffer("side_by_side", chunk.shape, torch.float32)
    for weight, start, stop in zip(weights, starts, starts[1:], strict=False):
        left, right = max(chunk.col, start), min(chunk.stop_col, stop)
        if left < right:
            own = chunk._replace(col=left - start, stop_col=right - start)
            whole[:, left - chunk.col : right - chunk.col] = weight.dequantize(own, workspace).weight
    return Values(whole)


def add_weights(weights: Sequence[Weight]) -> Weight:
    """Add weights of one shape in float32, in order, as the biases of a layer split by columns are added."""
    return replace(
        _stack_reading(weights, weights[0].shape),
        dequantize=partial(_dequantize_sum, weights),
        levels=None,
        computed=True,
    )


def _dequantize_sum(weights: Sequence[Weight], chunk: Chunk, workspace: Workspace) -> Values:
    whole = workspace.buffer("added", chunk.shape, torch.float32).zero_()
    for weight in weights:
        whole.add_(weight.dequantize(chunk, workspace).weight)
    return Values(whole)


def reorder(weight: Weight, order: Order) -> Weight:
    """Return the weight with its stored rows, columns, or the elements of a vector, in the order."""
    axis = 1 if order.columns or len(weight.shape) == 1 else 0
    blocks = torch.tensor(order.blocks)
    return _view_readings(
        weight, lambda one: _make_view(one, one.shape, partial(_dequantize_reordered, one, blocks, order.unit, axis))
    )


GAP = 8  # largest distance of wanted rows that are read together


def _dequantize_reordered(
    weight: Weight, blocks: Tensor, unit: int, axis: int, chunk: Chunk, workspace: Workspace
) -> Values:
    """Read the rows of a chunk where they are stored, in as few pieces as their distances allow."""
    begin, end = (chunk.col, chunk.stop_col) if axis else (chunk.row, chunk.stop_row)
    wanted, run = torch.arange(begin, end), len(blocks) * unit
    stored, places = (wanted // run * run + blocks[wanted % run // unit] * unit + wanted % unit).sort()
    dtype = torch.float64 if weight.needs_float64 else torch.float32
    out = workspace.buffer(f"reordered {run} {unit}", chunk.shape, dtype)  # orders may be nested
    ends = torch.nonzero(stored.diff() > GAP)[:, 0] + 1
    for first, last in pairwise([0, *ends.tolist(), len(stored)]):
        top = int(stored[first])
        values = weight.dequantize(_shift_chunk(chunk, axis, top, int(stored[last - 1]) + 1), workspace).weight
        if values.shape[axis] > last - first:
            values = values.index_select(axis, (stored[first:last] - top).to(values.device))
        out.index_copy_(axis, places[first:last].to(values.device), values.to(dtype))
    return Values(out)


def transpose_weight(weight: Weight) -> Weight:
    """Transpose a dense weight [in, out] to [out, in], or [experts, in, out] to [experts, out, in].

    The stored values of one expert at a time are held in memory, as columns cannot be read alone.
    """
    *stack, rows, cols = weight.shape
    shape = (*stack, cols, rows)
    is_kernel = as_matrix(shape)[0] == stack[0] if stack else False
    return _make_view(
        weight,
        shape,
        partial(_dequantize_transposed_kernels if is_kernel else _dequantize_transposed, weight.codes, rows, cols),
    )


def _dequantize_transposed_kernels(entry: Entry, rows: int, cols: int, chunk: Chunk, workspace: Workspace) -> Values:
    """Swap the inputs and kernel positions of each output of a convolution, which is one row of the matrix."""
    n = chunk.shape[0]
    stored = workspace.read("kernels", entry, chunk.row * rows * cols, (n, rows * cols))
    turned = stored.view(n, rows, cols).transpose(1, 2).reshape(n, -1)[:, chunk.col : chunk.stop_col]
    return Values(workspace.output(chunk.shape, _choose_float_dtype(entry)).copy_(turned))


def _dequantize_transposed(entry: Entry, rows: int, cols: int, chunk: Chunk, workspace: Workspace) -> Values:
    values = workspace.output(chunk.shape, _choose_float_dtype(entry))
    for expert in range(chunk.row // cols, (chunk.stop_row - 1) // cols + 1):
        top = expert * cols
        begin, end = max(chunk.row, top), min(chunk.stop_row, top + cols)
        stored = workspace.read_cached("transposed", entry, expert * rows * cols, (rows, cols))
        values[begin - chunk.row : end - chunk.row] = stored[chunk.col : chunk.stop_col, begin - top : end - top].t()
    return Values(values)


def _choose_float_dtype(entry: Entry) -> torch.dtype:
    return torch.float64 if TORCH_DTYPES[entry.dtype] is torch.float64 else torch.float32


def transpose_stack(weight: Weight) -> Weight:
    """Transpose each matrix of a stack, (n, rows, cols) to (n, cols, rows); each chunk dequantizes whole matrices."""
    n, rows, cols = weight.shape
    return _view_readings(
        weight, lambda one: _make_view(one, (n, cols, rows), partial(_dequantize_transposed_stack, one, rows, cols))
    )


def _dequantize_transposed_stack(weight: Weight, rows: int, cols: int, chunk: Chunk, workspace: Workspace) -> Values:
    out = workspace.buffer("flipped", chunk.shape, torch.float32)
    for number in range(chunk.row // cols, (chunk.stop_row - 1) // cols + 1):
        top = number * cols
        begin, end = max(chunk.row, top), min(chunk.stop_row, top + cols)
        matrix = weight.dequantize(Chunk(number * rows, (number + 1) * rows, 0, cols), workspace).weight
        out[begin - chunk.row : end - chunk.row] = matrix[chunk.col : chunk.stop_col, begin - top : end - top].t()
    return Values(out)


def move_inputs(weight: Weight, shape: tuple[int, ...]) -> Weight:
    """Return a kernel stored [out, …, in] as [out, in, …], which is ``shape``."""
    return _view_readings(weight, lambda one: _make_view(one, shape, partial(_dequantize_kernels, one, shape)))


def _dequantize_kernels(weight: Weight, shape: tuple[int, ...], chunk: Chunk, workspace: Workspace) -> Values:
    """Read the kernels of all outputs in the chunk, and swap inputs and positions of each."""
    outputs, inputs = shape[:2]
    rows, cols = as_matrix(shape)[0] // outputs, as_matrix(shape)[1]
    first, last = chunk.row // rows, (chunk.stop_row - 1) // rows + 1
    height, width = weight.matrix[0] // outputs, weight.matrix[1]
    stored = weight.dequantize(Chunk(first * height, last * height, 0, width), workspace).weight
    turned = stored.reshape(last - first, -1, inputs).transpose(1, 2).reshape(-1, cols)
    return Values(turned[chunk.row - first * rows : chunk.stop_row - first * rows, chunk.col : chunk.stop_col])


def move_outputs(weight: Weight, shape: tuple[int, ...]) -> Weight:
    """Return the kernel of a transposed convolution, stored [out, …, in], as [in, out, …], which is ``shape``."""
    return _view_readings(weight, lambda one: _make_view(one, shape, partial(_dequantize_upsampling, one, shape)))


def _dequantize_upsampling(weight: Weight, shape: tuple[int, ...], chunk: Chunk, workspace: Workspace) -> Values:
    """Read the whole kernel, as each output holds elements of all rows of the chunk."""
    inputs, outputs = shape[:2]
    rows, cols = as_matrix(shape)
    stored = weight.dequantize(Chunk(0, weight.matrix[0], 0, weight.matrix[1]), workspace).weight
    turned = stored.reshape(outputs, -1, inputs).permute(2, 0, 1)
    first, last = chunk.row // (rows // inputs), (chunk.stop_row - 1) // (rows // inputs) + 1
    wanted = turned[first:last].reshape(-1, cols)
    row = first * (rows // inputs)
    return Values(wanted[chunk.row - row : chunk.stop_row - row, chunk.col : chunk.stop_col])


def map_elements(weight: Weight, change: ElementChange) -> Weight:
    """Return the weight with a converter's change of each element, in float32."""
    return _view_readings(
        weight, lambda one: replace(_make_computed_view(one, partial(_dequantize_changed, one, change)), levels=None)
    )


def _dequantize_changed(weight: Weight, change: ElementChange, chunk: Chunk, workspace: Workspace) -> Values:
    return Values(change.apply(weight.dequantize(chunk, workspace).weight))


def scale_weight(weight: Weight, factors: Tensor, axis: int) -> Weight:
    """Multiply the rows (axis 0) or columns (axis 1) of a matrix by one float32 factor each."""
    return _view_readings(weight, lambda one: _make_computed_view(one, partial(_dequantize_scaled, one, factors, axis)))


def _dequantize_scaled(weight: Weight, factors: Tensor, axis: int, chunk: Chunk, workspace: Workspace) -> Values:
    values = weight.dequantize(chunk, workspace).weight
    own = factors[chunk.row : chunk.stop_row, None] if axis == 0 else factors[chunk.col : chunk.stop_col]
    return Values(values.mul_(own.to(values.device)))


def _view_readings(weight: Weight, view: Callable[[Weight], Weight]) -> Weight:
    """Apply a view to a weight and to each of its alternative readings."""
    return view(weight).with_alternatives(map(view, weight.alternatives))


def _make_computed_view(weight: Weight, dequantize: Dequantize) -> Weight:
    """Make a view whose values are computed from the stored ones, not copied."""
    return replace(_make_view(weight, weight.shape, dequantize), computed=True)


def _make_view(weight: Weight, shape: tuple[int, ...], dequantize: Dequantize, share: float = 1.0) -> Weight:
    return replace(
        weight,
        shape=shape,
        dequantize=dequantize,
        byte_share=weight.byte_share * share,
        scale=weight.scale if share == 1.0 or (weight.scale and weight.scale.n == 1) else None,
        unit=None,
        rotated=None,
        branch=None,
        alternatives=(),
    )
