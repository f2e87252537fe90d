"""One pass over the values of a checkpoint: each weight is decoded once, chunk by chunk, by one thread per core.

Memory does not grow with the size of a weight: a thread holds a chunk, and three numbers for each row that it has read.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import inf
from typing import NamedTuple

from quanterr.findings.values import CodeValues, RowValues, ValueFindings
from quanterr.formats import Weight
from quanterr.formats.reading import Reader
from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.lazy_torch import Tensor, torch
from quanterr.pairing.model import Pair
from quanterr.tensors.chunks import CPU_CHUNK, Chunk, Cut
from quanterr.tensors.pool import map_in_threads
from quanterr.util.platform import usable_cores

CHUNKS_AT_ONCE = 32  # chunks that a thread reads before it asks for more
SAMPLE_ELEMENTS = 1 << 15  # elements of each of a few samples in which codes are counted
NONZERO_SCALE_BYTE = 0x3F  # bytes of a scale that is not zero, in every dtype of scales
SAFE_NORMS = 1e-12, 1e12  # norms of rows whose squares neither overflow nor underflow in float32


class _Task(NamedTuple):
    """Chunks of whole rows of weight ``number`` of the checkpoint."""

    number: int
    pair: Pair
    first: int
    stop: int

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks themselves."""
        return Cut(*self.pair.quantized.matrix, CPU_CHUNK)[self.first : self.stop]


class _Result(NamedTuple):
    """The results of a thread for the rows of a task; codes belong to the whole weight."""

    task: _Task
    rows: RowValues
    codes: CodeValues


def collect_values(pairs: Sequence[Pair]) -> ValueFindings:
    """Read all values of the weights of a checkpoint, each paired with itself, and collect findings about them.

    Raises:
        CheckpointError: a file cannot be read.
    """
    findings = ValueFindings()
    for results in _read_each(pairs):
        number, pair = results[0].task[:2]
        findings.add(number, pair, RowValues.join([result.rows for result in results]), results[0].codes)
    return findings


def _read_each(pairs: Sequence[Pair]) -> Iterator[list[_Result]]:
    """Read the weights in the order of the file; yield the results of all tasks of each."""
    numbers = [n for n, pair in enumerate(pairs) if pair.quantized.n and pair.quantized.encoding != "bits"]
    numbers.sort(key=lambda n: (str(pairs[n].quantized.codes.file.path), pairs[n].quantized.codes.offset))
    tasks = (_Task(n, pairs[n], *span) for n in numbers for span in _split(*pairs[n].quantized.matrix))
    with map_in_threads(_read, tasks, [Reader() for _ in range(usable_cores())]) as in_order:
        for _, results in groupby(in_order, key=lambda result: result.task.number):
            yield list(results)


def _split(rows: int, cols: int) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, stop) of a few chunks that begin and end with rows."""
    n, across = len(Cut(rows, cols, CPU_CHUNK)), -(-cols // CPU_CHUNK)
    step = -(-CHUNKS_AT_ONCE // across) * across
    for first in range(0, n, step):
        yield first, min(first + step, n)


def _read(task: _Task, reader: Reader) -> _Result:
    """Read the rows of a task; the task with a weight's first row also reads its scales."""
    weight, chunks = task.pair.quantized, task.chunks
    weight.will_need(chunks[0], chunks[-1])
    codes = _read_codes(weight, reader) if task.first == 0 else CodeValues()
    return _Result(task, _read_rows(weight, chunks, reader), codes)


def _read_rows(weight: Weight, chunks: Sequence[Chunk], reader: Reader) -> RowValues:
    first, n = chunks[0].row, chunks[-1].stop_row - chunks[0].row
    low, high, energy = (torch.full((n,), start, dtype=torch.float64) for start in (inf, -inf, 0.0))
    rows = RowValues(low, high, energy)
    for chunk in chunks:
        place = slice(chunk.row - first, chunk.stop_row - first)
        rows = _add_values(rows, place, reader.read(weight, chunk))
    return rows


def _add_values(rows: RowValues, place: slice, values: Tensor) -> RowValues:
    """Add the values of a chunk, (r, c), to the values of its rows; this changes ``rows`` in place."""
    low, high = values.amin(1), values.amax(1)  # NaN if any value is
    if not (low.isfinite().all() and high.isfinite().all()):
        finite = values.isfinite()
        rows = rows._replace(
            nonfinite=rows.nonfinite + values.numel() - int(finite.sum()),
            minus_infinite=rows.minus_infinite + int((values == -inf).sum()),
        )
        low, high = values.where(finite, inf).amin(1), values.where(finite, -inf).amax(1)
        values = values.where(finite, 0.0)
    torch.minimum(rows.low[place], low, out=rows.low[place])
    torch.maximum(rows.high[place], high, out=rows.high[place])
    rows.energy[place] += _square_norms(values)
    return rows


def _square_norms(values: Tensor) -> Tensor:
    """Return Σx² of each row as float64; it does not depend on which other rows are read with it."""
    norms: Tensor = torch.linalg.vector_norm(values, dim=1).double()
    odd = (norms < SAFE_NORMS[0]) | (norms > SAFE_NORMS[1])
    if bool(odd.any()):
        norms[odd] = torch.linalg.vector_norm(values[odd], dim=1, dtype=torch.float64)
    return norms.square_()


def _read_codes(weight: Weight, reader: Reader) -> CodeValues:
    scales, lost = None, 0
    if weight.scale is not None:
        scales = ScaleStatistics.compute(reader.iterate_scales(weight.scale))
        for chunk in Cut(*weight.matrix, CPU_CHUNK) if scales.zero else ():
            rescaled = reader.read_filled(weight, chunk, weight.scale, NONZERO_SCALE_BYTE)
            lost += int(((reader.read(weight, chunk) == 0) & (rescaled != 0)).sum())
    return CodeValues(scales, lost, _find_span(weight.unrotated, reader))


def _find_span(weight: Weight, reader: Reader) -> tuple[int, int, int] | None:
    """Return the smallest and largest sampled code, and the number of codes; None if unknown or if both are equal."""
    levels = weight.levels
    if levels is None or weight.matrix[1] > CPU_CHUNK:
        return None
    first, last = map(int, levels.numbers(torch.tensor([levels.lowest, levels.highest])).tolist())
    low, high = last, first
    for chunk in _sample(weight):
        scaling = reader.read_scaling(weight, chunk)
        if scaling is None:
            return None
        values = reader.read(weight, chunk)
        codes = (values if scaling.shift is None else values - scaling.shift) / scaling.unit
        numbers = levels.numbers(codes[codes.isfinite()].float())
        if numbers.numel():
            low, high = min(low, int(numbers.amin())), max(high, int(numbers.amax()))
    return (low, high, last - first + 1) if low < high else None


def _sample(weight: Weight) -> Iterable[Chunk]:
    """Return chunks at the beginning, in the middle and at the end of a weight."""
    rows, cols = weight.matrix
    height = min(max(SAMPLE_ELEMENTS // cols, 1), rows)
    for row in sorted({0, (rows - height) // 2, rows - height}):
        yield Chunk(row, row + height, 0, cols)
