"""Weights made of other weights: rows of one, several on top of each other, turned or put in order.

Every view is a Weight again: what is dequantized is cut, stacked or turned chunk by chunk, never stored.
A view of a view is one, so fused, split and stacked projections need no code of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from quanterr.checkpoints import Entry
from quanterr.formats import SEVERAL, Values, Weight
from quanterr.tensors.chunks import Chunk, as_matrix
from quanterr.tensors.workspace import TORCH_DTYPES, Workspace

Dequantize = Callable[[Chunk, Workspace], Values]


def rows_of(weight: Weight, first: int, shape: tuple[int, ...]) -> Weight:
    """Rows of a weight's matrix from ``first`` on, as a weight of that shape; of a 1-D weight its elements."""
    if first == 0 and prod(shape) == prod(weight.shape):
        return reshaped(weight, shape)
    share = prod(shape) / max(prod(weight.shape), 1)
    return _each(weight, lambda one: _view(one, shape, partial(_rows_of, one, first), share))


def _rows_of(weight: Weight, first: int, chunk: Chunk, workspace: Workspace) -> Values:
    axis = 1 if len(weight.shape) == 1 else 0
    begin, end = (chunk.col, chunk.stop_col) if axis else (chunk.row, chunk.stop_row)
    return weight.dequantize(_shifted(chunk, axis, begin + first, end + first), workspace)


def reshaped(weight: Weight, shape: tuple[int, ...]) -> Weight:
    """The same matrix under another shape."""
    if shape == weight.shape:
        return weight
    return _each(weight, lambda one: replace(_view(one, shape, one.dequantize), rotated=one.rotated, unit=one.unit))


def stacked(weights: Sequence[Weight], shape: tuple[int, ...]) -> Weight:
    """Several weights with rows of one length on top of each other; 1-D ones end to end."""
    if len(weights) == 1:
        return reshaped(weights[0], shape)
    others = zip(*(weight.alternatives for weight in weights), strict=False)
    return _stack(weights, shape).with_alternatives(_stack(alternatives, shape) for alternatives in others)


def _stack(weights: Sequence[Weight], shape: tuple[int, ...]) -> Weight:
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
        dequantize=partial(_stacked, weights, starts, axis),
        needs_float64=any(weight.needs_float64 for weight in weights),
        computed=any(weight.computed for weight in weights),
        scale=None,
        levels=first.levels if all(weight.levels == first.levels for weight in weights) else None,
        coded=tuple(entry for weight in weights for entry in weight.coded or (weight.codes,)),
        unit=None,
        rotated=None,
        evidence=tuple(dict.fromkeys(evidence for weight in weights for evidence in weight.evidence)),
        warnings=tuple(dict.fromkeys(evidence for weight in weights for evidence in weight.warnings)),
        alternatives=(),
        byte_share=sum(weight.nbytes for weight in weights) / max(sum(weight.stored_bytes for weight in weights), 1),
    )


def _stacked(weights: Sequence[Weight], starts: Sequence[int], axis: int, chunk: Chunk, workspace: Workspace) -> Values:
    begin, end = (chunk.row, chunk.stop_row) if axis == 0 else (chunk.col, chunk.stop_col)
    inside = [n for n in range(len(weights)) if starts[n] < end and starts[n + 1] > begin]
    if len(inside) == 1:
        n = inside[0]
        return weights[n].dequantize(_shifted(chunk, axis, begin - starts[n], end - starts[n]), workspace)
    dtype = torch.float64 if any(weight.needs_float64 for weight in weights) else torch.float32
    whole = workspace.buffer("stacked", chunk.shape, dtype)
    counts = []
    for n in inside:
        left, right = max(begin, starts[n]), min(end, starts[n + 1])
        values = weights[n].dequantize(_shifted(chunk, axis, left - starts[n], right - starts[n]), workspace)
        whole.narrow(axis, left - begin, right - left).copy_(values.weight)
        counts.append(values.saturated)
    counted = [count for count in counts if count is not None]
    return Values(whole, torch.stack(counted).sum() if len(counted) == len(counts) else None)


def _shifted(chunk: Chunk, axis: int, begin: int, end: int) -> Chunk:
    """The chunk with other rows (axis 0) or columns (axis 1)."""
    return chunk._replace(row=begin, stop_row=end) if axis == 0 else chunk._replace(col=begin, stop_col=end)


def side_by_side(weights: Sequence[Weight], shape: tuple[int, ...]) -> Weight:
    """Several matrices of the same rows, the columns of one after those of the other."""
    starts = [0]
    for weight in weights:
        starts.append(starts[-1] + weight.matrix[1])
    return replace(stacked(weights, shape), dequantize=partial(_side_by_side, weights, starts))


def _side_by_side(weights: Sequence[Weight], starts: Sequence[int], chunk: Chunk, workspace: Workspace) -> Values:
    whole = workspace.buffer("side_by_side", chunk.shape, torch.float32)
    for weight, start, stop in zip(weights, starts, starts[1:], strict=False):
        left, right = max(chunk.col, start), min(chunk.stop_col, stop)
        if left < right:
            own = chunk._replace(col=left - start, stop_col=right - start)
            whole[:, left - chunk.col : right - chunk.col] = weight.dequantize(own, workspace).weight
    return Values(whole)


def added(weights: Sequence[Weight]) -> Weight:
    """The sum of several weights of one shape, rounded to float32 at each: the biases of a layer split by columns."""
    return replace(_stack(weights, weights[0].shape), dequantize=partial(_added, weights), levels=None, computed=True)


def _added(weights: Sequence[Weight], chunk: Chunk, workspace: Workspace) -> Values:
    whole = workspace.buffer("added", chunk.shape, torch.float32).zero_()
    for weight in weights:
        whole.add_(weight.dequantize(chunk, workspace).weight)
    return Values(whole)


def reordered(weight: Weight, order: Sequence[int]) -> Weight:
    """Rows in another order: row i of each run of ``len(order)`` rows is row ``order[i]`` of that run.

    Of a 1-D weight its elements.
    """
    places = torch.tensor(order)
    return _each(weight, lambda one: _view(one, one.shape, partial(_reordered, one, places)))


def _reordered(weight: Weight, order: Tensor, chunk: Chunk, workspace: Workspace) -> Values:
    run, axis = len(order), 1 if len(weight.shape) == 1 else 0
    begin, end = (chunk.col, chunk.stop_col) if axis else (chunk.row, chunk.stop_row)
    top, bottom = begin // run * run, -(-end // run) * run
    source = chunk._replace(col=top, stop_col=bottom) if axis else chunk._replace(row=top, stop_row=bottom)
    values = weight.dequantize(source, workspace)
    places = torch.arange(begin, end)
    places = places // run * run - top + order[places % run]
    out = workspace.buffer("reordered", chunk.shape, values.weight.dtype)
    return Values(torch.index_select(values.weight, axis, places.to(values.weight.device), out=out))


def interleaved_halves(weight: Weight, run: int) -> Weight:
    """Rows of each run alternately from its first and its second half: 0, run/2, 1, run/2 + 1, …

    Of a 1-D weight its elements, of a stack of biases, (n, run), its columns.
    """
    axis = 1 if weight.shape[-1] == run and len(weight.shape) < 3 else 0
    return _each(weight, lambda one: _view(one, one.shape, partial(_interleaved_halves, one, run, axis)))


def _interleaved_halves(weight: Weight, run: int, axis: int, chunk: Chunk, workspace: Workspace) -> Values:
    begin, end = (chunk.row, chunk.stop_row) if axis == 0 else (chunk.col, chunk.stop_col)
    out = workspace.buffer("in_turn", chunk.shape, torch.float32)
    for top in range(begin // run * run, end, run):
        first, last = max(begin - top, 0), min(end - top, run)
        for half in (0, 1):
            left, right = (first - half + 1) // 2, (last - half + 1) // 2
            if left < right:
                source = top + half * run // 2
                values = weight.dequantize(_shifted(chunk, axis, source + left, source + right), workspace).weight
                place = slice(top + 2 * left + half - begin, top + 2 * right + half - begin - 1, 2)
                out[(place,) if axis == 0 else (slice(None), place)] = values
    return Values(out)


def unpaired(weight: Weight, heads: int) -> Weight:
    """Rows of each head, or elements of a 1-D weight, put back from pairs (0, d/2), (1, d/2 + 1), … to halves."""
    half = weight.shape[0] // heads // 2
    return reordered(weight, [2 * j + i for i in range(2) for j in range(half)])


def transposed(weight: Weight) -> Weight:
    """A dense weight [in, out] as [out, in], or [experts, in, out] as [experts, out, in].

    Its stored numbers are held, of one expert at a time: columns cannot be read alone.
    """
    *stack, rows, cols = weight.shape
    shape = (*stack, cols, rows)
    is_kernel = as_matrix(shape)[0] == stack[0] if stack else False
    return _view(weight, shape, partial(_kernels_transposed if is_kernel else _transposed, weight.codes, rows, cols))


def _kernels_transposed(entry: Entry, rows: int, cols: int, chunk: Chunk, workspace: Workspace) -> Values:
    """Of a convolution: the inputs and places of each output in the other order, in one row of the matrix."""
    n = chunk.shape[0]
    stored = workspace.read("kernels", entry, chunk.row * rows * cols, (n, rows * cols))
    turned = stored.view(n, rows, cols).transpose(1, 2).reshape(n, -1)[:, chunk.col : chunk.stop_col]
    return Values(workspace.output(chunk.shape, _wide_enough(entry)).copy_(turned))


def _transposed(entry: Entry, rows: int, cols: int, chunk: Chunk, workspace: Workspace) -> Values:
    values = workspace.output(chunk.shape, _wide_enough(entry))
    for expert in range(chunk.row // cols, (chunk.stop_row - 1) // cols + 1):
        top = expert * cols
        begin, end = max(chunk.row, top), min(chunk.stop_row, top + cols)
        stored = workspace.read_cached("transposed", entry, expert * rows * cols, (rows, cols))
        values[begin - chunk.row : end - chunk.row] = stored[chunk.col : chunk.stop_col, begin - top : end - top].t()
    return Values(values)


def _wide_enough(entry: Entry) -> torch.dtype:
    return torch.float64 if TORCH_DTYPES[entry.dtype] is torch.float64 else torch.float32


def flipped(weight: Weight) -> Weight:
    """Any stack of matrices, (n, rows, cols), as (n, cols, rows); a whole matrix is dequantized for any part of it."""
    n, rows, cols = weight.shape
    return _each(weight, lambda one: _view(one, (n, cols, rows), partial(_flipped, one, rows, cols)))


def _flipped(weight: Weight, rows: int, cols: int, chunk: Chunk, workspace: Workspace) -> Values:
    out = workspace.buffer("flipped", chunk.shape, torch.float32)
    for number in range(chunk.row // cols, (chunk.stop_row - 1) // cols + 1):
        top = number * cols
        begin, end = max(chunk.row, top), min(chunk.stop_row, top + cols)
        matrix = weight.dequantize(Chunk(number * rows, (number + 1) * rows, 0, cols), workspace).weight
        out[begin - chunk.row : end - chunk.row] = matrix[chunk.col : chunk.stop_col, begin - top : end - top].t()
    return Values(out)


def plus(weight: Weight, number: float) -> Weight:
    """Each element plus a number: norms that one side stores around zero and the other around one."""
    return _each(weight, lambda one: _computed(one, partial(_plus, one, number)))


def _plus(weight: Weight, number: float, chunk: Chunk, workspace: Workspace) -> Values:
    return Values(weight.dequantize(chunk, workspace).weight.add_(number))


def minus_exp(weight: Weight) -> Weight:
    """-exp of each element: what Mamba's A is of the A_log that is trained."""
    return _each(weight, lambda one: replace(_computed(one, partial(_minus_exp, one)), levels=None))


def _minus_exp(weight: Weight, chunk: Chunk, workspace: Workspace) -> Values:
    return Values(weight.dequantize(chunk, workspace).weight.exp_().neg_())


def scaled(weight: Weight, factors: Tensor, axis: int) -> Weight:
    """Rows (axis 0) or columns (axis 1) of a matrix times factors, float32, one for each."""
    return _each(weight, lambda one: _computed(one, partial(_scaled, one, factors, axis)))


def _scaled(weight: Weight, factors: Tensor, axis: int, chunk: Chunk, workspace: Workspace) -> Values:
    values = weight.dequantize(chunk, workspace).weight
    own = factors[chunk.row : chunk.stop_row, None] if axis == 0 else factors[chunk.col : chunk.stop_col]
    return Values(values.mul_(own.to(values.device)))


def _each(weight: Weight, view: Callable[[Weight], Weight]) -> Weight:
    """The view of a weight, with the same view of each of its readings."""
    return view(weight).with_alternatives(map(view, weight.alternatives))


def _computed(weight: Weight, dequantize: Dequantize) -> Weight:
    """A view whose values are made of the stored ones by arithmetic."""
    return replace(_view(weight, weight.shape, dequantize), computed=True)


def _view(weight: Weight, shape: tuple[int, ...], dequantize: Dequantize, share: float = 1.0) -> Weight:
    return replace(
        weight,
        shape=shape,
        dequantize=dequantize,
        byte_share=weight.byte_share * share,
        scale=weight.scale if share == 1.0 else None,
        unit=None,
        rotated=None,
        alternatives=(),
    )
