"""The minimum error with the stored scales of a weight, from its sample and from conspicuous rows and cells."""

from collections.abc import Sequence
from functools import lru_cache, partial

from msgspec.structs import replace

from quanterr.formats import Weight
from quanterr.lazy_torch import Tensor
from quanterr.metrics.attainable import Attainable, BadRegion
from quanterr.metrics.sums import Sums
from quanterr.samples.codes import Sampler
from quanterr.samples.conspicuous_rows import (
    find_blocks,
    find_conspicuous_cells,
    find_conspicuous_rows,
    find_run_maxima,
    spans_rows,
)
from quanterr.samples.native import PlainSample, can_measure_values, prepare_values
from quanterr.samples.nearest import accept_stored, find_nearest, measure_rounding
from quanterr.samples.reading import Group, PairReader
from quanterr.samples.rows import MAX_ROW_COLUMNS, list_rows, sample_blocks, sample_chunks
from quanterr.samples.scales import ScaleSampler, find_run_steps, has_row_scales
from quanterr.tensors.chunks import Chunk, split_chunks

MAX_INSPECTED_ROWS = 2  # number of worst rows whose scale blocks are inspected
STACK_ELEMENTS = 1 << 17  # number of elements of a sample that are processed at once


class SampleMeasurer:
    """Measures the sample of a pair whose ``sums`` are known."""

    def __init__(self, reader: PairReader, sums: Sums) -> None:
        """Use ``reader`` to read the sample, and rows and cells beyond it."""
        self._reader, self._sums, self._buffers = reader, sums, reader.buffers
        self._pair, self._weight = reader.pair, reader.pair.quantized
        self._coded = self._weight.unrotated  # has a code for each element
        self._may_stack = has_row_scales(self._coded) and not (self._weight.rotated or self._weight.matrix_rows)

    def measure(self, plain: PlainSample | None) -> Attainable | None:
        """Return the minimum error with the stored scales; None if the nearest codes cannot be found.

        ``plain`` is the kernel's measurement of the sample, if any. If it has no result, torch measures the sample.
        """
        attainable = self._finish_plain(plain) if plain else None
        return attainable or self._measure_closely(plain is not None)

    def _finish_plain(self, plain: PlainSample) -> Attainable | None:
        """Return the kernel's result for the sample, conspicuous rows and cells included; None if there is none."""
        attainable, weight = plain.summarize(self._sums), self._weight
        if attainable is None or (attainable.rounding is None and self._pair.importance):
            return None  # the kernel does not weight errors by importance
        if attainable.n == self._sums.n or weight.rotated:
            return attainable
        conspicuous = self._find_conspicuous(attainable)
        if not any(conspicuous):
            return attainable
        of_scales = self._make_block_sampler() if spans_rows(weight) else self._make_scale_sampler()
        of_scales.one_zero = plain.one_zero
        parts, beside = self._inspect(attainable, conspicuous, of_scales)
        return of_scales.result(replace(attainable, parts=parts), beside)

    def _measure_closely(self, is_doubtful: bool) -> Attainable | None:
        weight = self._coded
        if weight.levels is None or weight.shape != self._weight.shape:
            return None
        chunks = _list_sampled(weight.shape, self._buffers.size)
        whole = None if is_doubtful else self._read_whole_sample(chunks)
        plain = None if whole is None else self._measure_values(whole)
        attainable = self._finish_plain(plain) if plain else None
        if attainable is not None:
            return attainable
        attainable, of_scales = self._find_nearest(chunks, whole)
        if spans_rows(weight):
            of_scales = self._make_block_sampler()
            for chunk in _list_sampled_blocks(self._weight):
                self._add_blocks(chunk, of_scales)
        if attainable.n == self._sums.n or self._weight.rotated or weight.matrix[1] > MAX_ROW_COLUMNS:
            return of_scales.result(attainable, None)
        parts, beside = self._inspect(attainable, self._find_conspicuous(attainable), of_scales)
        return of_scales.result(replace(attainable, parts=(*attainable.parts, *parts)), beside)

    def _read_whole_sample(self, chunks: Sequence[Chunk]) -> Group | None:
        """Read all sampled rows; None if the kernel cannot measure a sample from its values."""
        weight = self._coded
        if self._buffers.kernel is None or self._pair.original.needs_float64 or not can_measure_values(weight):
            return None
        return self._reader.read_group(chunks) if chunks[0].shape[1] == weight.matrix[1] else None

    def _measure_values(self, sample: Group) -> PlainSample | None:
        """Let the kernel measure a sample from its values; None if it cannot."""
        (chunks, x, y, scales), weight, kernel = sample, self._coded, self._buffers.kernel
        prepared = None if scales is None else prepare_values(weight, len(x), scales)
        if kernel is None or prepared is None:
            return None
        plain, of_groups = prepared
        if self._weight.rotated and not plain.struct.per_row:
            return None  # the largest magnitude after the rotation is unknown
        near = find_near_scales(weight, self._sums, list_rows(chunks))
        if near is None and weight.scale_steps:
            return None
        largest = 0.0 if self._weight.rotated else self._sums.x_max
        values = x.contiguous(), y.contiguous()
        plain.measure_values(kernel, values, of_groups, largest, near, self._buffers.computed)
        return plain

    def _find_nearest(self, chunks: Sequence[Chunk], whole: Group | None) -> tuple[Attainable, ScaleSampler]:
        """Find the nearest codes of a sample and the loss of its scales; ``whole`` is the sample, if already read."""
        quick = _group_chunks(chunks, min(self._buffers.size, STACK_ELEMENTS))
        first = whole if whole and len(quick) == 1 else self._reader.read_group(quick[0])
        nearest = self._sample(quick, first, closely=False)
        if nearest is None:
            kept = first if len(quick) == 1 else None  # reading further groups has overwritten the buffers
            nearest = self._sample(self._group(chunks), kept, closely=True)
        assert nearest is not None  # noqa: S101
        return nearest

    def _sample(
        self, groups: Sequence[list[Chunk]], first: Group | None, closely: bool
    ) -> tuple[Attainable, ScaleSampler] | None:
        """Sample groups of rows; None if a code may not be the nearest, unless ``closely`` is set.

        ``first`` is the first group, if it has been read.
        """
        sampler = Sampler(None if self._weight.rotated else self._pair.importance, self._buffers.kernel)
        of_scales = self._make_scale_sampler()
        for together in groups:
            group = first if first and first.chunks == together else self._reader.read_group(together)
            if not self._add(group, sampler, None if spans_rows(self._coded) else of_scales, closely):
                return None
        return sampler.result(), of_scales

    def _group(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        """Group chunks that can be measured together."""
        if not self._may_stack:
            return [[chunk] for chunk in chunks]
        return _group_chunks(chunks, min(self._buffers.size, STACK_ELEMENTS))

    def _add(self, group: Group, codes: Sampler | None, of_scales: ScaleSampler | None, closely: bool) -> bool:
        """Add a group of rows, with their nearest codes, to the given samplers.

        If no error is larger than half a step, the stored codes are the nearest. Other groups are added only with
        ``closely``; without, the result is False.
        """
        (chunks, x, y, scales), levels = group, self._coded.levels
        if scales is None or levels is None:
            return closely
        if closely:
            rounding, nearest = None, find_nearest(levels, x, y, scales)
            e, stored, at_once = nearest.values - x, y, chunks[0].n if len(chunks) > 1 else None
        else:
            e, nearest, stored, at_once = y - x, accept_stored(y), None, None
            rounding = measure_rounding(levels, x, e, scales, self._buffers.computed)
            if rounding is None:
                return False
        if codes is not None:
            codes.add(chunks, x, y, nearest, rounding)
        if of_scales is not None:
            of_scales.add(list_rows(chunks), chunks[0].col, x, e, scales, stored, at_once)
        return True

    def _make_scale_sampler(self) -> ScaleSampler:
        """Make the sampler of a weight's scales, or of the scales of its rotated columns."""
        weight, is_rotated = self._coded, self._weight.rotated
        largest, runs = (None, None) if is_rotated else (self._sums.x_max, find_run_maxima(weight, self._sums))
        return ScaleSampler(weight, largest, partial(self._find_smallest_units, weight), runs)

    def _make_block_sampler(self) -> ScaleSampler:
        """Make the sampler of scales of blocks of rows, which are read apart from the sampled rows."""
        return ScaleSampler(self._weight, None, partial(self._find_smallest_units, self._weight))

    def _find_smallest_units(self, weight: Weight, row: int) -> Tensor | None:
        """Return the factors of a row's codes with the smallest scale that can be stored, (1, c); None if unknown."""
        return weight.smallest_units(Chunk(row, row + 1, 0, weight.matrix[1]), self._buffers.smallest)

    def _add_blocks(self, chunk: Chunk, to: ScaleSampler) -> None:
        scales = self._weight.scaling(chunk, self._buffers.ends)
        if scales:
            to.add(range(chunk.row, chunk.stop_row), chunk.col, self._reader.read_block(chunk), None, scales)

    def _find_conspicuous(self, sample: Attainable) -> tuple[list[int], list[Chunk]]:
        """Return the rows and cells of the weight to inspect beyond its sample."""
        weight, sums = self._weight, self._sums
        chunks = _list_sampled_blocks(weight) if spans_rows(weight) else sample_chunks(weight.shape)
        return find_conspicuous_rows(sums, sample), find_conspicuous_cells(weight, sums, chunks)

    def _inspect(
        self, sample: Attainable, conspicuous: tuple[list[int], list[Chunk]], of_sample: ScaleSampler
    ) -> tuple[tuple[BadRegion, ...], ScaleSampler]:
        """Inspect conspicuous rows and cells; return bad regions outside the sample, and a sampler of their scales."""
        weight, (worst, cells) = self._weight, conspicuous
        of_scales = of_sample.make_companion()
        sampler, chunks = Sampler(kernel=self._buffers.kernel), sample_chunks(weight.shape)
        rows, in_blocks = set(worst), spans_rows(weight)
        if in_blocks and of_scales.has_floats:
            cells = cells + find_blocks(weight, worst[:MAX_INSPECTED_ROWS])
        for cell in cells:
            if in_blocks:
                self._add_blocks(cell, of_scales)
            else:
                rows.add(cell.row)
        known = {row for chunk in chunks for row in range(chunk.row, chunk.stop_row)}
        to = of_scales if of_scales.has_row_scales or (of_scales.has_floats and not in_blocks) else None
        again = rows & known if to else ()  # only one of several sampled rows was used for scales
        for numbers, codes in ((rows - known, sampler), (again, None)):
            each = [Chunk(row, row + 1, 0, weight.matrix[1]) for row in sorted(numbers)]
            for together in self._group(each):
                self._add(self._reader.read_group(together), codes, to, closely=True)
        return sampler.find_bad_regions(sample), of_scales


def find_near_scales(weight: Weight, sums: Sums, rows: Sequence[int]) -> Tensor | None:
    """Return by how much the scale of each group may differ from a good one, (r, groups across) float32.

    None if scales are not multiples of a step, or the step is unknown.
    """
    if not (weight.scale_steps and weight.scale_steps.of_largest and weight.block_size):
        return None
    runs = find_run_maxima(weight, sums)
    across = range(weight.matrix[1] // weight.block_size[1])
    return None if runs is None else find_run_steps(weight, runs, rows, across).contiguous()


def _group_chunks(chunks: Sequence[Chunk], size: int) -> list[list[Chunk]]:
    """Group consecutive chunks of the same columns, up to ``size`` elements, to process them together."""
    stacks: list[list[Chunk]] = []
    left = 0  # elements for which the last group has room
    for chunk in chunks:
        n = chunk.n
        if stacks and stacks[-1][0][2:] == chunk[2:] and n <= left:
            stacks[-1].append(chunk)
        else:
            stacks.append([chunk])
            left = size
        left -= n
    return stacks


@lru_cache(maxsize=64)  # cached, as many weights have the same shapes
def _list_sampled(shape: tuple[int, ...], size: int) -> Sequence[Chunk]:
    """Return the chunks of a weight's sample, of at most ``size`` elements each."""
    return tuple(split_chunks(sample_chunks(shape), size))


def _list_sampled_blocks(weight: Weight) -> list[Chunk]:
    return sample_blocks(weight.shape, weight.block_size or (1, 1))
