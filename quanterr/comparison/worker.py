"""A worker: the buffers of one thread, and the computation of pairs chunk by chunk."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from quanterr.checkpoints import Entry
from quanterr.comparison.fingerprints import compute_fingerprint
from quanterr.comparison.native_sums import KeptRows, NativeSums, Operand, Task
from quanterr.comparison.small import MOST_KEPT, SmallWeights
from quanterr.formats import Values, Weight
from quanterr.formats.shared.scale_grid import iterate_scales
from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.kernel.decoding import find_decoder, read_into, read_values
from quanterr.kernel.levels import Scaling, find_nearest, measure_rounding
from quanterr.kernel.library import Kernel
from quanterr.kernel.torch_sums import SumOptions, exact_sums, fast_sums
from quanterr.metrics.attainable import Attainable, BadRegion
from quanterr.metrics.sums import Sums, as_float
from quanterr.pairing.model import ComparedWeight, LargestError, Pair
from quanterr.samples.codes import WIDEST, Sampler, list_rows, sample_blocks, sample_chunks
from quanterr.samples.conspicuous import (
    find_blocks,
    find_conspicuous_cells,
    find_conspicuous_rows,
    find_run_maxima,
    make_cell_grid,
    spans_rows,
)
from quanterr.samples.plain import PlainSample, can_measure_values, prepare_sample, summarize_plain
from quanterr.samples.scales import ScaleSampler, find_run_steps
from quanterr.tensors.casts import CastTest, Copy, find_narrowest, least_normal, rounds_to_nearest
from quanterr.tensors.chunks import Chunk, Cut, as_matrix, split_chunk
from quanterr.tensors.workspace import OUTPUT, FilledWorkspace, Workspace

LoadOriginal = Callable[[Chunk], torch.Tensor]  # chunk → x, (r, c), which may be overwritten
MOST_ROWS = 2  # conspicuous rows whose scale blocks are inspected, at most
STACK = 1 << 17  # elements of a sample processed at a time
MOST_SPANNED = 1 << 21  # elements in a span of rows whose scales are read at once, at most


class _Group(NamedTuple):
    """The rows of chunks of the same columns, (r, c) float32 or float64 each, and their scaling if there is one."""

    chunks: list[Chunk]
    x: torch.Tensor
    y: torch.Tensor
    scales: Scaling | None


class _Sample(NamedTuple):
    """The rows of a sample: their number, and where each row of the weight, (rows,) int64, and each chunk is in it."""

    n: int
    places: torch.Tensor
    first_rows: dict[Chunk, int]


class _KeptSample(NamedTuple):
    """The sampled rows of a pair that the kernel has kept, (2, n, c) float32, and the first row of each chunk."""

    pair: Pair
    first_rows: dict[Chunk, int]
    values: torch.Tensor


class Worker:
    """The buffers of one thread, and the computation of pairs with them."""

    def __init__(
        self,
        device: torch.device,
        size: int,
        outlier: float,
        candidates: int = 1,
        kernel: Kernel | None = None,
        samples: bool = True,
    ) -> None:
        """Start without buffers; ``size`` is the chunk size in elements, and ``kernel`` is None for torch's kernel.

        With ``samples``, the error that scales allow is estimated from a sample of rows.
        """
        self.outlier, self._candidates, self._compiled, self._samples = outlier, candidates, kernel, samples
        self._begun: tuple[list[int], Callable[[], list[Sums]]] | None = None  # ids of pairs, and how to get their sums
        self.start_over(device, size)

    def start_over(self, device: torch.device, size: int) -> None:
        """Drop all buffers and continue on ``device`` with chunks of ``size`` elements."""
        self.wait()
        self.device, self.size = device, size
        self._original, self._copies, self._kernel = (Workspace(device) for _ in range(3))
        self._quantized = [Workspace(device) for _ in range(self._candidates)]  # each may keep parts between ranges
        self._ends = FilledWorkspace(device), FilledWorkspace(device)
        on_cpu = self._compiled is not None and device.type == "cpu"
        self._native = NativeSums(self._compiled, self.outlier) if self._compiled and on_cpu else None
        self._kept_samples: dict[int, _KeptSample] = {}  # by the pair's index in its task
        self._sides: torch.Tensor | None = None  # x and y, (2, bytes)
        self._small = SmallWeights(self._kernel)
        self._ahead = Workspace(device), Workspace(device)  # one for each side, for small weights that are begun
        self._known: dict[int, Sums] = {}  # by the pair's id
        self._plain: dict[int, PlainSample] = {}  # by the pair's id: the sample that the kernel was asked to measure

    def begin(self, pairs: Iterable[Pair]) -> None:
        """Start to compare the small weights among ``pairs`` with the kernel.

        Meanwhile, the caller can finish the weights of the previous call.
        """
        self._small.turn()
        if self._native is None:
            return
        small = [pair for pair in pairs if pair.original.n <= min(MOST_KEPT, self.size)]
        tasks = {id(pair): task for pair in small if (task := self._prepare(self._native, pair))}
        if tasks:
            self._begun = list(tasks), self._native.start(list(tasks.values()))

    def _prepare(self, native: NativeSums, pair: Pair) -> Task | None:
        """Prepare a small weight for the kernel; None if it must be compared by itself."""
        if pair.original.needs_float64 or pair.quantized.needs_float64 or not pair.original.n:
            return None
        x, y = self._ahead
        operands = Operand(pair.original, x, fingerprinted=_get_only_entry(pair)), Operand(pair.quantized, y)
        return native.prepare_whole(operands, _make_options(pair), partial(self._keep_small, pair))

    def wait(self) -> None:
        """Wait for the weights that were begun: until then, the kernel uses the buffers."""
        if self._begun:
            (ids, wait), self._begun = self._begun, None
            self._known = dict(zip(ids, wait(), strict=False))  # empty if a file is cut: each weight then reports it

    def stream(self) -> AbstractContextManager[object]:
        """Return a context with a new CUDA stream; an empty one on the CPU."""
        if self.device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        shared = 0 if self._sides is None else self._sides.numel()
        shared += self._native.nbytes if self._native else 0
        return shared + sum(
            w.nbytes for w in (self._original, self._copies, self._kernel, *self._ahead, *self._ends, *self._quantized)
        )

    def _share_output(self) -> None:
        """Make both sides dequantize into one buffer, so that x and y are adjacent for the kernel."""
        self._sides = torch.empty((2, self.size * torch.float32.itemsize), dtype=torch.uint8, device=self.device)
        self._original.lend(OUTPUT, self._sides[0])
        self._copies.lend("copy", self._sides[0])
        for workspace in self._quantized:
            workspace.lend(OUTPUT, self._sides[1])

    def compare(self, pairs: Sequence[Pair], chunks: Sequence[Chunk]) -> list[Sums]:
        """Compute the sums of a few chunks of each pair; the pairs share one weight of the original."""
        self.wait()
        if self._sides is None:
            self._share_output()
        load = self._make_loader(pairs[0].original) if len(pairs) == 1 else self._make_shared_loader(pairs[0].original)
        return [self._compare(pair, chunks, load, place) for place, pair in enumerate(pairs)]

    def _make_loader(self, original: Weight) -> LoadOriginal:
        return lambda chunk: original.dequantize(chunk, self._original).weight

    def _make_shared_loader(self, original: Weight) -> LoadOriginal:
        """Make a loader that dequantizes each chunk once and returns copies later, as callers overwrite the values."""
        kept: dict[Chunk, torch.Tensor] = {}

        def load(chunk: Chunk) -> torch.Tensor:
            if chunk in kept:
                values = kept[chunk]
                return self._copies.buffer("copy", tuple(values.shape), values.dtype).copy_(values)
            values = original.dequantize(chunk, self._original).weight
            kept[chunk] = self._copies.buffer(f"{len(kept)}", tuple(values.shape), values.dtype).copy_(values)
            return values

        return load

    def _compare(self, pair: Pair, chunks: Sequence[Chunk], load_original: LoadOriginal, place: int) -> Sums:
        if not chunks:
            return Sums()
        if id(pair) in self._known:
            return self._known.pop(id(pair))
        if not pair.original.needs_float64 and not pair.quantized.needs_float64:
            sums = self._sum_natively(pair, chunks, load_original, place)
            if sums is not None:
                return sums
        return self._sum_with_torch(pair, chunks, load_original, place)

    def _sum_natively(
        self, pair: Pair, chunks: Sequence[Chunk], load_original: LoadOriginal, place: int
    ) -> Sums | None:
        if self._native is None:
            return None
        is_small = _keeps_values(pair, chunks[0])
        kept = self._keep_small(pair) if is_small else self._keep_sample(pair, chunks, place)
        sums = self._native.sums(self._make_operands(pair, load_original, place), chunks, _make_options(pair), kept)
        if sums is None:
            self._kept_samples.pop(place, None)
        return sums

    def _keep_sample(self, pair: Pair, chunks: Sequence[Chunk], place: int) -> KeptRows | None:
        """Return addresses for the kernel to write the rows of a sample to; None if they must be read again.

        The kernel must decode the whole weight at once.
        """
        self._kept_samples.pop(place, None)
        rows, cols = pair.original.matrix
        is_whole = (chunks[0].row, chunks[-1].stop_row, chunks[0].shape[1]) == (0, rows, cols)
        if not (self._samples and is_whole and pair.quantized.levels):
            return None
        sample, sides = _find_sample(pair.quantized.shape), (pair.original, pair.quantized)
        if sample is None or not all(find_decoder(side, chunks) for side in sides):
            return None
        values = self._kernel.buffer(f"sample {place}", (2, sample.n, cols), torch.float32)
        self._kept_samples[place] = _KeptSample(pair, sample.first_rows, values)
        plain, x = self._prepare_sample(pair, sample.n), values.data_ptr()
        return KeptRows((x, x + values.nbytes // 2), sample.places, plain)

    def _keep_small(self, pair: Pair) -> KeptRows:
        """Return addresses for the kernel to write a whole small pair to."""
        return KeptRows(self._small.keep(pair), sample=self._prepare_sample(pair, pair.original.matrix[0]))

    def _prepare_sample(self, pair: Pair, rows: int) -> PlainSample | None:
        """Prepare a sample for the kernel; None if the weight needs no sample, or the kernel cannot measure it."""
        sample = prepare_sample(pair.quantized, rows) if self._samples else None
        if sample is not None:
            self._plain[id(pair)] = sample
        return sample

    def _make_operands(self, pair: Pair, load_original: LoadOriginal, place: int) -> tuple[Operand, Operand]:
        return (
            Operand(
                pair.original,
                self._original,
                lambda chunk: Values(load_original(chunk)),
                self._candidates > 1,
                _get_only_entry(pair),
            ),
            Operand(pair.quantized, self._quantized[place]),
        )

    def _sum_with_torch(self, pair: Pair, chunks: Sequence[Chunk], load_original: LoadOriginal, place: int) -> Sums:
        saturated: dict[Chunk, torch.Tensor] = {}  # by chunk, as a chunk may be loaded more than once

        def load(chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            x = load_original(chunk)
            y, at_end, zeros = pair.quantized.dequantize(chunk, self._quantized[place])
            if at_end is not None:
                saturated[chunk] = at_end
            if _keeps_values(pair, chunk):
                self._small.keep_copies(pair, x, y)
            return x, y, zeros

        matrix, sums, wanted = pair.original.matrix, None, _make_options(pair)
        if not pair.original.needs_float64 and not pair.quantized.needs_float64:
            sums = fast_sums(load, chunks, matrix, self._kernel, self.outlier, wanted)
        if sums is None:
            sums = exact_sums(load, chunks, matrix[1], self.outlier, wanted)
        if saturated:
            sums.saturated = int(torch.stack(list(saturated.values())).sum())
        return sums

    def finish(self, number: int, pair: Pair, sums: Sums, place: int = 0) -> ComparedWeight:
        """Complete the result of a pair from its sums; ``place`` is the index of the pair in its task."""
        plain = self._plain.pop(id(pair), None)
        scales = plain.scales if plain else None
        if scales is None:
            scales = _summarize_scales(pair.quantized, self._quantized[place])
        attainable = None
        if self._samples and not sums.exact:
            attainable = self._take_plain_sample(pair, sums, plain, place)
            attainable = attainable or self._measure_attainable(pair, sums, plain is not None, place)
        worst = self._find_worst(pair, sums, place)
        sums.peaks = []  # large, and no longer needed
        copy = self._check_copy(pair, sums, place)
        fingerprint = compute_fingerprint(pair.original_codes, sums.sampled)
        return ComparedWeight(number, sums, scales, worst, attainable, copy, fingerprint)

    def _take_plain_sample(self, pair: Pair, sums: Sums, plain: PlainSample | None, place: int) -> Attainable | None:
        """Return the kernel's result for the sample, and what conspicuous rows and cells add; None without a result."""
        found = plain.summarize(sums) if plain else None
        if plain is None or found is None or (found.rounding is None and pair.importance):
            return None  # with importance: the kernel has not weighted errors by it
        weight = pair.quantized
        if found.n == sums.n or weight.rotated:
            return found
        conspicuous = _find_conspicuous(weight, sums, found)
        if not any(conspicuous):
            return found
        of_scales = ScaleSampler(weight, None) if spans_rows(weight) else self._make_scale_sampler(pair, sums)
        of_scales.one_zero = plain.one_zero
        parts, beside = self._inspect_conspicuous(pair, found, conspicuous, of_scales, place)
        return of_scales.result(found._replace(parts=parts), beside)

    def _check_copy(self, pair: Pair, sums: Sums, place: int) -> Copy | None:
        """Return how far an unquantized tensor is a copy of the original; read it again if the sums do not tell."""
        if not _is_copy(pair):
            return None
        x, y = _find_dtypes(pair)
        largest = sums.cast_max if least_normal(x, y) else sums.relative_max
        if sums.exact or (not sums.zero_reference and rounds_to_nearest(x, y, largest)):
            return Copy.SAME
        test = CastTest(x, y, pair.original.computed or pair.quantized.computed)
        for chunk in Cut(*pair.original.matrix, self.size):
            test.add(*self._read_values(pair, chunk, place))
            if test.result == Copy.CHANGED:
                break
        return test.result

    def _measure_attainable(self, pair: Pair, sums: Sums, is_doubtful: bool, place: int) -> Attainable | None:
        """Measure the error that the stored scales allow, on a sample; None if the nearest codes cannot be found.

        ``is_doubtful`` says that the kernel has measured the sample, and that it needs a closer look.
        """
        weight = pair.quantized.unrotated
        if weight.levels is None or weight.shape != pair.quantized.shape:
            return None
        chunks = _list_sampled(weight.shape, self.size)
        whole = None if is_doubtful else self._read_whole_sample(pair, chunks, place)
        if whole is not None:
            found = self._take_plain_sample(pair, sums, self._measure_values(pair, whole, sums), place)
            if found is not None:
                return found
        groups = _group_chunks(chunks, min(self.size, STACK))
        of_scales = self._make_scale_sampler(pair, sums)
        first = whole if whole is not None and len(groups) == 1 else self._read_group(pair, groups[0], place)
        found = self._sample_plain(pair, groups, first, sums, place, of_scales)
        if found is None:
            kept = first if len(groups) == 1 else None  # reading further groups has overwritten the buffers
            found, of_scales = self._sample_nearest(pair, chunks, kept, sums, place)
        if spans_rows(weight):
            of_scales = self._sample_scale_blocks(pair, place)
        if found.n == sums.n or pair.quantized.rotated or weight.matrix[1] > WIDEST:
            return of_scales.result(found, None)
        parts, beside = self._inspect_conspicuous(pair, found, _find_conspicuous(weight, sums, found), of_scales, place)
        return of_scales.result(found._replace(parts=(*found.parts, *parts)), beside)

    def _read_whole_sample(self, pair: Pair, chunks: Sequence[Chunk], place: int) -> "_Group | None":
        """Read all sampled rows; None if the kernel cannot measure a sample whose values are given."""
        weight = pair.quantized.unrotated
        if self._native is None or pair.original.needs_float64 or not can_measure_values(weight):
            return None
        return self._read_group(pair, chunks, place) if chunks[0].shape[1] == weight.matrix[1] else None

    def _measure_values(self, pair: Pair, sample: "_Group", sums: Sums) -> PlainSample | None:
        """Let the kernel measure a sample whose values are given; None if it cannot."""
        chunks, x, y, scales = sample
        if self._native is None or scales is None:
            return None
        weight, largest, near = pair.quantized.unrotated, sums.x_max, None
        if weight.scale_steps and weight.block_size:
            runs = find_run_maxima(weight, sums)
            if runs is None:
                return None
            near = find_run_steps(weight, runs, list_rows(chunks), range(x.shape[1] // weight.block_size[1]))
        return self._native.measure_sample(weight, x, y, scales, None if pair.quantized.rotated else largest, near)

    def _sample_nearest(
        self, pair: Pair, chunks: Sequence[Chunk], kept: "_Group | None", sums: Sums, place: int
    ) -> tuple[Attainable, ScaleSampler]:
        """Measure the nearest codes of a sample, and collect the loss of its scales; ``kept`` was read before."""
        weight = pair.quantized.unrotated
        sampler = Sampler(None if pair.quantized.rotated else pair.importance, self._compiled)
        of_scales = self._make_scale_sampler(pair, sums)
        for together in _group_chunks(chunks, self._count_stackable(pair, of_scales)):
            group = kept if kept and kept.chunks == together else self._read_group(pair, together, place)
            self._add_nearest(weight, group, sampler, None if spans_rows(weight) else of_scales)
        return sampler.result(), of_scales

    def _count_stackable(self, pair: Pair, of_scales: ScaleSampler) -> int:
        """Return how many elements of sampled chunks may be processed together; 0: each chunk separately."""
        weight = pair.quantized
        one_by_one = weight.rotated or weight.matrix_rows or pair.original.needs_float64 or weight.needs_float64
        return 0 if one_by_one or not of_scales.has_row_scales else min(self.size, STACK)

    def _add_nearest(
        self, weight: Weight, group: "_Group", codes: Sampler | None, of_scales: ScaleSampler | None
    ) -> None:
        """Find the codes nearest to a group of rows, and add them to the samplers that are given."""
        chunks, x, y, scales = group
        if scales is None or weight.levels is None:
            return
        found = find_nearest(weight.levels, x, y, scales)
        if codes is not None:
            codes.add(chunks, x, y, found)
        if of_scales is not None:
            of_scales.add(list_rows(chunks), chunks[0].col, x, found.values - x, scales, y, chunks[0].n)

    def _make_scale_sampler(self, pair: Pair, sums: Sums) -> ScaleSampler:
        """Make the sampler of a weight's scales, which are those of rotated columns if it has any."""
        weight, is_rotated = pair.quantized.unrotated, pair.quantized.rotated
        largest, runs = (None, None) if is_rotated else (sums.x_max, find_run_maxima(weight, sums))
        return ScaleSampler(weight, largest, partial(self._find_least_units, weight), runs)

    def _find_least_units(self, weight: Weight, row: int) -> torch.Tensor | None:
        """Return the factors of a row's codes with the least scale, (1, c); None if unknown."""
        return weight.least_units(Chunk(row, row + 1, 0, weight.matrix[1]), FilledWorkspace(self._ends[0].device))

    def _sample_scale_blocks(self, pair: Pair, place: int) -> ScaleSampler:
        """Sample the scales of a few whole blocks that span rows."""
        of_scales = ScaleSampler(pair.quantized, None)
        for chunk in _list_sampled_blocks(pair.quantized):
            self._add_blocks(pair, chunk, of_scales, place)
        return of_scales

    def _add_blocks(self, pair: Pair, chunk: Chunk, to: ScaleSampler, place: int) -> None:
        scales = pair.quantized.scaling(chunk, self._ends)
        if scales:
            x = self._kernel.buffer("values_x", chunk.shape, torch.float32)
            for rows in split_chunk(chunk._replace(col=0, stop_col=pair.original.matrix[1]), self.size):
                whole = self._kernel.buffer("whole_rows", rows.shape, torch.float32)
                self._read(pair, "x", rows, place, whole)
                x[rows.row - chunk.row : rows.stop_row - chunk.row] = whole[:, chunk.col : chunk.stop_col]
            to.add(range(chunk.row, chunk.stop_row), chunk.col, x, None, scales)

    def _inspect_conspicuous(
        self, pair: Pair, sample: Attainable, found: "_Conspicuous", of_sample: ScaleSampler, place: int
    ) -> tuple[tuple[BadRegion, ...], ScaleSampler]:
        """Inspect conspicuous rows and cells; return bad regions outside the sample, and a sampler of their scales."""
        weight, (worst, cells) = pair.quantized, found
        of_scales = of_sample.make_companion()
        sampler, chunks = Sampler(kernel=self._compiled), sample_chunks(weight.shape)
        rows, in_blocks = set(worst), spans_rows(weight)
        if in_blocks and of_scales.has_floats:
            cells = cells + find_blocks(weight, worst[:MOST_ROWS])
        for cell in cells:
            if in_blocks:
                self._add_blocks(pair, cell, of_scales, place)
            else:
                rows.add(cell.row)
        known = {row for chunk in chunks for row in range(chunk.row, chunk.stop_row)}
        to = of_scales if of_scales.has_row_scales or (of_scales.has_floats and not in_blocks) else None
        again = rows & known if to else ()  # the sample may have left out scales of its rows
        for numbers, codes in ((rows - known, sampler), (again, None)):
            each = [Chunk(row, row + 1, 0, weight.matrix[1]) for row in sorted(numbers)]
            for together in _group_chunks(each, self._count_stackable(pair, of_scales)):
                self._add_nearest(weight, self._read_group(pair, together, place), codes, to)
        return sampler.find_bad_regions(sample), of_scales

    def _sample_plain(
        self,
        pair: Pair,
        groups: Sequence[list[Chunk]],
        first: "_Group",
        sums: Sums,
        place: int,
        of_scales: ScaleSampler,
    ) -> Attainable | None:
        """Quickly measure a sample whose codes are all the nearest, the usual case; None if some may not be.

        ``first`` is the first of ``groups``, already read.
        """
        weight, n, x_sq, e_sq, steps = pair.quantized.unrotated, 0, 0.0, 0.0, 0.0
        for number, together in enumerate(groups):
            _, x, y, scales = self._read_group(pair, together, place) if number else first
            if weight.levels is None or scales is None:
                return None
            e = torch.sub(y, x, out=self._kernel.buffer("scratch", tuple(x.shape), torch.float32))
            mean = measure_rounding(weight.levels, x, e, scales, self._kernel)
            if mean is None:
                return None
            steps += mean * x.numel()
            if not spans_rows(weight):
                of_scales.add(list_rows(together), together[0].col, x, e, scales)
            if x.numel() == sums.n:
                n, x_sq, e_sq = sums.n, as_float(sums.x_sq), as_float(sums.e_sq)
            else:
                n, x_sq, e_sq = n + x.numel(), x_sq + self._sum_squares(x), e_sq + self._sum_squares(e)
        return summarize_plain(n, (x_sq, e_sq), steps)

    def _read_group(self, pair: Pair, chunks: Sequence[Chunk], place: int) -> "_Group":
        """Read both sides and the scaling of chunks of the same columns; valid until the next group is read.

        Of rotated columns, the original is rotated as well.
        """
        rotated, (x, y) = pair.quantized.rotated, self._read_sample(pair, chunks, place)
        if rotated:
            x = rotated.rotate(x.clone(), self._kernel)
            y = torch.cat([rotated.weight.dequantize(chunk, self._quantized[place]).weight.clone() for chunk in chunks])
        return _Group(list(chunks), x, y, self._read_scaling(pair.quantized.unrotated, chunks, place))

    def _read_sample(self, pair: Pair, chunks: Sequence[Chunk], place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both sides of chunks of the same columns, concatenated by rows, (r, c) float32."""
        kept = self._kept_samples.get(place)
        if kept is not None and kept.pair is pair and chunks[0] in kept.first_rows:
            first = kept.first_rows[chunks[0]]
            x, y = kept.values[:, first : first + sum(chunk.shape[0] for chunk in chunks)]
            return x, y
        if len(chunks) == 1:
            return self._read_values(pair, chunks[0], place)
        return self._read_stacked(pair, "x", chunks, place), self._read_stacked(pair, "y", chunks, place)

    def _read_stacked(self, pair: Pair, side: str, chunks: Sequence[Chunk], place: int) -> torch.Tensor:
        shape, row = (sum(chunk.shape[0] for chunk in chunks), chunks[0].shape[1]), 0
        values = self._kernel.buffer(f"sample_{side}", shape, torch.float32)
        for chunk in chunks:
            self._read(pair, side, chunk, place, values[row : row + chunk.shape[0]])
            row += chunk.shape[0]
        return values

    def _read_scaling(self, weight: Weight, chunks: Sequence[Chunk], place: int) -> Scaling | None:
        """Return the scaling of chunks, concatenated; None if the weight has none."""
        span = chunks[0]._replace(stop_row=chunks[-1].stop_row)
        if span.n <= MOST_SPANNED:
            rows = None if len(chunks) == 1 else torch.tensor(list_rows(chunks), device=self.device) - span.row
            units = weight.units(span, self._quantized[place], rows)
            if units is not None:
                return Scaling(units.clone())
        decode_values = partial(self._decode, weight)
        return _stack_scalings((weight.scaling(chunk, self._ends, decode_values) for chunk in chunks), chunks)

    def _sum_squares(self, values: torch.Tensor) -> float:
        """Return the sum of squares of (r, c) float32, added in float32 along rows and in float64 across rows."""
        squares = self._kernel.buffer("errors", tuple(values.shape), torch.float32)
        return float(torch.mul(values, values, out=squares).sum(1).double().sum())

    def _read_values(self, pair: Pair, chunk: Chunk, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both sides of a chunk, (r, c) float32, or float64 if needed; kept values are used if there are any."""
        kept = self._small.values(pair)
        if kept is not None and chunk.n == pair.original.n:
            return kept[0].float(), kept[1].float()
        if pair.original.needs_float64 or pair.quantized.needs_float64:
            x = pair.original.dequantize(chunk, self._original).weight
            return x, pair.quantized.dequantize(chunk, self._quantized[place]).weight
        x, y = (self._kernel.buffer(f"values_{side}", chunk.shape, torch.float32) for side in "xy")
        return self._read(pair, "x", chunk, place, x), self._read(pair, "y", chunk, place, y)

    def _decode(self, weight: Weight, chunk: Chunk, workspace: Workspace) -> torch.Tensor:
        """Return the values of a chunk, decoded by the kernel if it can."""
        return read_values(self._native.kernel if self._native else None, weight, chunk, workspace)

    def _read(self, pair: Pair, side: str, chunk: Chunk, place: int, out: torch.Tensor) -> torch.Tensor:
        """Read one side of a chunk of whole rows, or of a piece of a row, into ``out``, (r, c) float32."""
        weight, workspace = (pair.original, self._original) if side == "x" else (pair.quantized, self._quantized[place])
        return read_into(out, self._native.kernel if self._native else None, weight, chunk, workspace)

    def _find_worst(self, pair: Pair, sums: Sums, place: int) -> LargestError | None:
        """Return the element with the largest |e|; its row is read again if only that is known."""
        if sums.worst is None or sums.worst.values is not None:
            return _get_largest_error(sums)
        _, row, col, _ = sums.worst
        kept = self._small.values(pair)
        if kept is not None:
            x, y = (side[row : row + 1] for side in kept)
        else:
            chunk = Chunk(row, row + 1, col, min(col + self.size, pair.original.matrix[1]))
            x, y = self._read_values(pair, chunk, place)
        x, y = x.double(), y.double()
        at = int((y - x).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().argmax())
        return LargestError(row, col + at, float(x[0, at]), float(y[0, at]))


def _get_largest_error(sums: Sums) -> LargestError | None:
    """Return the element with the largest |e|; None if there is no error, or only its row is known."""
    worst = sums.worst
    return None if worst is None or worst.values is None else LargestError(worst.row, worst.col, *worst.values)


def _group_chunks(chunks: Sequence[Chunk], size: int) -> list[list[Chunk]]:
    """Group consecutive chunks of the same columns, up to ``size`` elements, to process them together."""
    stacks: list[list[Chunk]] = []
    for chunk in chunks:
        last = stacks[-1] if stacks else []
        alike = last and (last[0].col, last[0].stop_col) == (chunk.col, chunk.stop_col)
        if alike and sum(one.n for one in last) + chunk.n <= size:
            last.append(chunk)
        else:
            stacks.append([chunk])
    return stacks


def _stack_scalings(found: Iterable[Scaling | None], chunks: Sequence[Chunk]) -> Scaling | None:
    """Copy the scalings of chunks, which share buffers, as one for all rows; None if a chunk has none."""
    scales = [Scaling(one.unit.clone(), None if one.shift is None else one.shift.clone()) for one in found if one]
    if len(scales) < len(chunks):
        return None
    if len(chunks) == 1 or scales[0].unit.numel() == 1:
        return scales[0]
    units = [one.unit.expand(chunk.shape[0], -1) for one, chunk in zip(scales, chunks, strict=True)]
    shifts = [one.shift for one in scales if one.shift is not None]
    return Scaling(torch.cat(units), torch.cat(shifts) if shifts else None)


@lru_cache(maxsize=64)  # weights share their shapes
def _list_sampled(shape: tuple[int, ...], size: int) -> Sequence[Chunk]:
    """Return the chunks of a weight's sample, of at most ``size`` elements each."""
    return tuple(piece for chunk in sample_chunks(shape) for piece in split_chunk(chunk, size))


class _Conspicuous(NamedTuple):
    """Rows and cells of a weight that are to be inspected beyond its sample."""

    rows: list[int]
    cells: list[Chunk]


def _find_conspicuous(weight: Weight, sums: Sums, sample: Attainable) -> _Conspicuous:
    chunks = _list_sampled_blocks(weight) if spans_rows(weight) else sample_chunks(weight.shape)
    return _Conspicuous(find_conspicuous_rows(sums, sample), find_conspicuous_cells(weight, sums, chunks))


@lru_cache(maxsize=64)
def _find_sample(shape: tuple[int, ...]) -> _Sample | None:
    """Return the rows of a weight's sample; None if a chunk does not span all columns."""
    rows, cols = as_matrix(shape)
    chunks, first_rows, n = sample_chunks(shape), dict[Chunk, int](), 0
    places = torch.full((rows,), -1)
    for chunk in chunks:
        if chunk.shape[1] < cols:
            return None
        first_rows[chunk] = n
        places[chunk.row : chunk.stop_row] = torch.arange(n, n + chunk.shape[0])
        n += chunk.shape[0]
    return _Sample(n, places, first_rows)


def _list_sampled_blocks(weight: Weight) -> list[Chunk]:
    return sample_blocks(weight.shape, weight.block_size or (1, 1))


def _make_options(pair: Pair) -> SumOptions:
    x, y = _find_dtypes(pair) if _is_copy(pair) else ("", "")
    return SumOptions(pair.importance, pair.original.matrix_rows, make_cell_grid(pair.quantized), least_normal(x, y))


def _get_only_entry(pair: Pair) -> Entry | None:
    """Return the entry that holds the elements of the original; None if there are several."""
    entries = pair.original_codes
    return entries[0] if len(entries) == 1 else None


def _is_copy(pair: Pair) -> bool:
    """Return whether both sides store plain floats."""
    return pair.original.encoding == pair.quantized.encoding == "floats"


def _find_dtypes(pair: Pair) -> tuple[str, str]:
    """Return the narrowest dtype of the parts on each side of a pair of floats."""
    x, y = (find_narrowest({entry.dtype for entry in side.parts.values()}) for side in (pair.original, pair.quantized))
    return x, y


def _keeps_values(pair: Pair, chunk: Chunk) -> bool:
    """Return whether the chunk is a whole pair, small enough to keep its values."""
    return chunk.n == pair.original.n <= MOST_KEPT


def _summarize_scales(weight: Weight, workspace: Workspace) -> ScaleStatistics | None:
    if weight.scale is None:
        return None
    return ScaleStatistics.compute(iterate_scales(weight.scale, workspace))
