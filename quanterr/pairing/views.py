"""Views: weights whose values are those of other weights, such as a range of rows, a stack or a transpose.

Each view is a Weight that cuts, stacks or transposes dequantized values chunk by chunk, without storing them. Views can
be nested, so fused, split and stacked projections need no code of their own.

If a converter changed how the quantized checkpoint stores a weight, the original is compared through views, and
``undo_views`` brings the quantized weight into the original's layout. ``_INVERSES`` has the inverse of each view.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod

from msgspec.structs import replace

from quanterr.errors import FormatMismatch
from quanterr.formats import SEVERAL, Values, Weight
from quanterr.lazy_torch import Tensor, torch
from quanterr.pairing.converters.numbers import ElementChange, Undone
from quanterr.pairing.converters.orders import Order
from quanterr.tensors.chunks import Chunk, as_matrix
from quanterr.tensors.workspace import Workspace

Dequantize = Callable[[Chunk, Workspace], Values]


def is_view(weight: Weight) -> bool:
    """Return whether the values of a weight are read through a view that moves or changes them."""
    return isinstance(weight.dequantize, partial) and weight.dequantize.func.__module__ == __name__


def is_plain(weight: Weight) -> bool:
    """Return whether a weight's values are its stored floats, in order."""
    is_changed = weight.computed or is_view(weight)
    return weight.encoding == "floats" and weight.codes.shape == weight.shape and not is_changed


def take_rows(weight: Weight, first: int, shape: tuple[int, ...]) -> Weight:
    """Return rows of a weight's matrix, from ``first`` on, as a weight of this shape; of a 1-D weight, elements."""
    if first == 0 and prod(shape) == prod(weight.shape):
        return reshape_weight(weight, shape)
    share = prod(shape) / max(prod(weight.shape), 1)
    return _view_each(weight, lambda each: _make_view(each, shape, partial(_dequantize_rows, each, first), share))


def _dequantize_rows(weight: Weight, first: int, chunk: Chunk, workspace: Workspace) -> Values:
    axis = 1 if len(weight.shape) == 1 else 0
    begin, end = (chunk.col, chunk.stop_col) if axis else (chunk.row, chunk.stop_row)
    return weight.dequantize(_shift_chunk(chunk, axis, begin + first, end + first), workspace)


def find_whole(weight: Weight) -> Weight:
    """Return the weight of which a view shows some rows; the weight itself if it is no such view."""
    function = weight.dequantize
    whole: Weight = function.args[0] if isinstance(function, partial) and function.func is _dequantize_rows else weight
    return whole


def reshape_weight(weight: Weight, shape: tuple[int, ...]) -> Weight:
    """Return the same elements, in the same order, under another shape."""
    if shape == weight.shape:
        return weight
    if as_matrix(shape) != weight.matrix:
        return _view_each(
            weight, lambda each: _make_view(each, shape, partial(_dequantize_flat, each, as_matrix(shape)))
        )
    return _view_each(
        weight,
        lambda each: replace(
            _make_view(each, shape, each.dequantize),
            rotated=each.rotated,
            branch=each.branch,
            unit=each.unit,
        ),
    )


def _dequantize_flat(weight: Weight, matrix: tuple[int, int], chunk: Chunk, workspace: Workspace) -> Values:
    """Read all elements of a small weight, and cut the chunk from them as rows of another length."""
    rows, cols = weight.matrix
    whole = weight.dequantize(Chunk(0, rows, 0, cols), workspace).weight.reshape(matrix)
    return Values(whole[chunk.row : chunk.stop_row, chunk.col : chunk.stop_col])


def stack_weights(weights: Sequence[Weight], shape: tuple[int, ...]) -> Weight:
    """Stack weights with rows of equal length; 1-D weights are joined end to end."""
    if len(weights) == 1:
        return reshape_weight(weights[0], shape)
    others = zip(*(weight.alternatives for weight in weights), strict=False)
    return _stack_without_alternatives(weights, shape).with_alternatives(
        _stack_without_alternatives(alternatives, shape) for alternatives in others
    )


def _stack_without_alternatives(weights: Sequence[Weight], shape: tuple[int, ...]) -> Weight:
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
            part = chunk._replace(col=left - start, stop_col=right - start)
            whole[:, left - chunk.col : right - chunk.col] = weight.dequantize(part, workspace).weight
    return Values(whole)


def add_weights(weights: Sequence[Weight]) -> Weight:
    """Add weights of one shape in float32, in order, as the biases of a layer split by columns are added."""
    return replace(
        _stack_without_alternatives(weights, weights[0].shape),
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
    """Return the weight with its stored rows or columns, or the elements of a vector, put into ``order``."""
    axis = 1 if order.columns or len(weight.shape) == 1 else 0
    blocks = torch.tensor(order.blocks)
    buffer = f"reordered {_count_views(weight)}"
    return _view_each(
        weight,
        lambda each: _make_view(
            each, each.shape, partial(_dequantize_reordered, each, blocks, order.unit, axis, buffer)
        ),
    )


def _count_views(weight: Weight) -> int:
    """Return how many views of a weight are nested, as each needs its own buffer."""
    if not isinstance(weight.dequantize, partial) or not is_view(weight):
        return 0
    first = weight.dequantize.args[0]
    inner = first if isinstance(first, Sequence) else (first,)
    return 1 + max((_count_views(source) for source in inner if isinstance(source, Weight)), default=0)


MAX_ROW_GAP = 8  # wanted rows with at most so many other rows between them are read together


def _dequantize_reordered(
    weight: Weight, blocks: Tensor, unit: int, axis: int, buffer: str, chunk: Chunk, workspace: Workspace
) -> Values:
    """Read the rows of a chunk from where they are stored, with near rows in one piece."""
    begin, end = (chunk.col, chunk.stop_col) if axis else (chunk.row, chunk.stop_row)
    wanted, run = torch.arange(begin, end), len(blocks) * unit
    stored, places = (wanted // run * run + blocks[wanted % run // unit] * unit + wanted % unit).sort()
    dtype = torch.float64 if weight.needs_float64 else torch.float32
    out = workspace.buffer(buffer, chunk.shape, dtype)
    ends = torch.nonzero(stored.diff() > MAX_ROW_GAP)[:, 0] + 1
    for first, last in pairwise([0, *ends.tolist(), len(stored)]):
        top = int(stored[first])
        values = weight.dequantize(_shift_chunk(chunk, axis, top, int(stored[last - 1]) + 1), workspace).weight
        if values.shape[axis] > last - first:
            values = values.index_select(axis, (stored[first:last] - top).to(values.device))
        out.index_copy_(axis, places[first:last].to(values.device), values.to(dtype))
    return Values(out)


def transpose_weight(weight: Weight) -> Weight:
    """Transpose a weight [in, out] to [out, in], or each matrix of a stack, [n, in, out] to [n, out, in]."""
    *stack, rows, cols = weight.shape
    shape = (*stack, cols, rows)
    n = prod(stack)
    function: Callable[..., Values]
    if weight.matrix != (n * rows, cols) or as_matrix(shape) != (n * cols, rows):
        function = _dequantize_transposed_kernels
    elif is_plain(weight):
        function = _dequantize_transposed_floats
    else:
        function = _dequantize_transposed
    buffer = f"transposed {_count_views(weight)}"
    return _view_each(weight, lambda each: _make_view(each, shape, partial(function, each, rows, cols, buffer)))


def _dequantize_transposed_kernels(
    weight: Weight, rows: int, cols: int, _buffer: str, chunk: Chunk, workspace: Workspace
) -> Values:
    """Swap the inputs and positions of each output of a convolution, of which whole rows of the matrix are read."""
    n, shape = weight.shape[0], as_matrix((weight.shape[0], cols, rows))
    height, stored_height = shape[0] // n, weight.matrix[0] // n
    first, stop = chunk.row // height, -(-chunk.stop_row // height)
    whole = Chunk(first * stored_height, stop * stored_height, 0, weight.matrix[1])
    stored = weight.dequantize(whole, workspace).weight
    turned = stored.reshape(-1, rows, cols).transpose(1, 2).reshape(-1, shape[1])
    return Values(turned[chunk.row - first * height : chunk.stop_row - first * height, chunk.col : chunk.stop_col])


def _dequantize_transposed_floats(
    weight: Weight, rows: int, cols: int, buffer: str, chunk: Chunk, workspace: Workspace
) -> Values:
    """Transpose stored floats; each matrix is held in memory, as its columns cannot be read separately."""
    entry = weight.codes
    values = workspace.output(chunk.shape, torch.float64 if weight.needs_float64 else torch.float32)
    for expert in range(chunk.row // cols, (chunk.stop_row - 1) // cols + 1):
        top = expert * cols
        begin, end = max(chunk.row, top), min(chunk.stop_row, top + cols)
        stored = workspace.read_cached(buffer, entry, expert * rows * cols, (rows, cols))
        values[begin - chunk.row : end - chunk.row] = stored[chunk.col : chunk.stop_col, begin - top : end - top].t()
    return Values(values)


def _dequantize_transposed(
    weight: Weight, rows: int, cols: int, buffer: str, chunk: Chunk, workspace: Workspace
) -> Values:
    """Dequantize the rows of each matrix that become columns of the chunk."""
    out = workspace.buffer(buffer, chunk.shape, torch.float64 if weight.needs_float64 else torch.float32)
    for number in range(chunk.row // cols, (chunk.stop_row - 1) // cols + 1):
        top, first = number * cols, number * rows
        begin, end = max(chunk.row, top), min(chunk.stop_row, top + cols)
        stored = weight.dequantize(Chunk(first + chunk.col, first + chunk.stop_col, 0, cols), workspace).weight
        out[begin - chunk.row : end - chunk.row] = stored[:, begin - top : end - top].t()
    return Values(out)


def move_inputs(weight: Weight, shape: tuple[int, ...]) -> Weight:
    """Return a kernel stored [out, …, in] as [out, in, …], which is ``shape``."""
    return _view_each(weight, lambda each: _make_view(each, shape, partial(_dequantize_kernels, each, shape)))


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
    return _view_each(weight, lambda each: _make_view(each, shape, partial(_dequantize_upsampling, each, shape)))


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


def hold_values(weight: Weight, values: Tensor) -> Weight:
    """Return the weight with these values, which are in memory, in place of its stored ones."""
    return replace(_make_computed_view(weight, partial(_dequantize_held, values.view(weight.matrix))), levels=None)


def _dequantize_held(values: Tensor, chunk: Chunk, workspace: Workspace) -> Values:
    part = values[chunk.row : chunk.stop_row, chunk.col : chunk.stop_col]
    return Values(workspace.output(chunk.shape).copy_(part))  # a copy, as views change values in place


def map_elements(weight: Weight, change: ElementChange) -> Weight:
    """Return the weight with a converter's change of each element, in float32."""
    return _view_each(
        weight,
        lambda each: replace(_make_computed_view(each, partial(_dequantize_changed, each, change)), levels=None),
    )


def _dequantize_changed(weight: Weight, change: ElementChange, chunk: Chunk, workspace: Workspace) -> Values:
    return Values(change.apply(weight.dequantize(chunk, workspace).weight))


def scale_weight(weight: Weight, factors: Tensor, axis: int) -> Weight:
    """Multiply the rows (axis 0) or columns (axis 1) of a matrix by one float32 factor each."""
    return _view_each(weight, lambda each: _make_computed_view(each, partial(_dequantize_scaled, each, factors, axis)))


def _dequantize_scaled(weight: Weight, factors: Tensor, axis: int, chunk: Chunk, workspace: Workspace) -> Values:
    values = weight.dequantize(chunk, workspace).weight
    part = factors[chunk.row : chunk.stop_row, None] if axis == 0 else factors[chunk.col : chunk.stop_col]
    return Values(values.mul_(part.to(values.device)))


def undo_views(x: Weight, y: Weight) -> Weight:
    """Return ``y``, which has the layout of the view ``x``, in the layout of the stored weight behind that view.

    Raises:
        FormatMismatch: a view of ``x`` cannot be undone.
    """
    while isinstance(x.dequantize, partial) and is_view(x):
        undo, stored = _INVERSES.get(x.dequantize.func), x.dequantize.args[0]
        if undo is None:
            raise FormatMismatch("it was compared in a layout from which the original's cannot be restored")
        y = reshape_weight(undo(y, *x.dequantize.args), stored.shape)
        x = stored
    return y


def _undo_rows(y: Weight, whole: Weight, first: int) -> Weight:
    """Put rows, or the elements of a vector, back between the other ones of the whole weight."""
    axis = 1 if len(whole.shape) == 1 else 0
    n, stop = whole.matrix[axis], first + y.matrix[axis]
    others = [take_rows(whole, at, (to - at, *whole.shape[1:])) for at, to in ((0, first), (stop, n))]
    return stack_weights([weight for weight in (others[0], y, others[1]) if weight.n], whole.shape)


def _undo_order(y: Weight, _whole: Weight, blocks: Tensor, unit: int, axis: int, _buffer: str) -> Weight:
    return reorder(y, Order(tuple(blocks.argsort().tolist()), unit, axis == 1))


def _undo_transposition(y: Weight, whole: Weight, _rows: int, _cols: int, _buffer: str) -> Weight:
    return transpose_weight(reshape_weight(y, (*whole.shape[:-2], *whole.shape[:-3:-1])))


def _undo_moved_inputs(y: Weight, _whole: Weight, shape: tuple[int, ...]) -> Weight:
    return transpose_weight(reshape_weight(y, (*shape[:2], prod(shape[2:]))))


def _undo_moved_outputs(y: Weight, _whole: Weight, shape: tuple[int, ...]) -> Weight:
    return transpose_weight(reshape_weight(y, (shape[0], prod(shape[1:]))))


def _undo_factors(y: Weight, _whole: Weight, factors: Tensor, axis: int) -> Weight:
    if not bool((factors.isfinite() & (factors != 0)).all()):
        raise FormatMismatch("the converter multiplied it by factors of which some are zero, so it cannot be restored")
    return scale_weight(y, 1 / factors, axis)


_INVERSES: Mapping[object, Callable[..., Weight]] = {
    _dequantize_rows: _undo_rows,
    _dequantize_flat: lambda y, _whole, _matrix: y,
    _dequantize_reordered: _undo_order,
    _dequantize_transposed: _undo_transposition,
    _dequantize_transposed_floats: _undo_transposition,
    _dequantize_transposed_kernels: _undo_transposition,
    _dequantize_kernels: _undo_moved_inputs,
    _dequantize_upsampling: _undo_moved_outputs,
    _dequantize_changed: lambda y, _whole, change: map_elements(y, Undone(change)),
    _dequantize_scaled: _undo_factors,
}


def _view_each(weight: Weight, view: Callable[[Weight], Weight]) -> Weight:
    """Apply a view to a weight and to each of its alternatives."""
    return view(weight).with_alternatives(map(view, weight.alternatives))


def _make_computed_view(weight: Weight, dequantize: Dequantize) -> Weight:
    """Make a view that computes its values from the stored ones, instead of copying them."""
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
