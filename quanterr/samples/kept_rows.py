"""Samples whose rows the kernel keeps while it compares a weight, and measures directly afterwards."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from quanterr.kernel.decoding import find_decoder
from quanterr.kernel.native_sums import KeptRows
from quanterr.lazy_torch import Tensor, torch
from quanterr.metrics.sums import Sums
from quanterr.pairing.model import Pair
from quanterr.samples.measuring import find_near_scales
from quanterr.samples.native import PlainSample, prepare_sample
from quanterr.samples.reading import Buffers, KeptSample
from quanterr.samples.rows import list_rows, sample_chunks
from quanterr.tensors.chunks import Chunk, as_matrix


class _Sample(NamedTuple):
    """The rows of a sample, with the place in it of each row of the weight, (rows,) int64, and of each chunk."""

    rows: list[int]
    places: Tensor
    first_rows: dict[Chunk, int]


class SampleKeeper:
    """Lets the kernel keep the rows of samples, and measures them before buffers with their scales are used again."""

    def __init__(self, buffers: Buffers, samples: bool) -> None:
        """Without ``samples``, only the values of small weights are kept."""
        self._buffers, self._samples = buffers, samples
        # By the pair's id: the rows that the kernel keeps, their numbers, and the sample to measure on them, if any.
        self._waiting: dict[int, tuple[KeptRows, list[int], PlainSample | None]] = {}
        self._measured: dict[int, PlainSample] = {}

    def keep_small(self, pair: Pair) -> KeptRows | None:
        """Return addresses to which the kernel writes all values of a small pair; None without a kernel."""
        if self._buffers.kernel is None:
            return None
        return self._keep(pair, KeptRows(self._buffers.small.keep(pair)), list(range(pair.original.matrix[0])))

    def keep_sample(self, pair: Pair, chunks: Sequence[Chunk], place: int) -> KeptRows | None:
        """Return addresses to which the kernel writes the rows of a sample; None if they must be read again.

        They are kept only if the kernel decodes the whole weight at once. ``place`` is the pair's index in its task.
        """
        self._buffers.kept_samples.pop(place, None)
        rows, cols = pair.original.matrix
        is_whole = (chunks[0].row, chunks[-1].stop_row, chunks[0].shape[1]) == (0, rows, cols)
        if not (self._buffers.kernel and self._samples and is_whole and pair.quantized.levels):
            return None
        sample, sides = _find_sample(pair.quantized.shape), (pair.original, pair.quantized)
        if sample is None or not all(find_decoder(side, chunks) and not side.needs_float64 for side in sides):
            return None
        values = self._buffers.computed.buffer(f"sample {place}", (2, len(sample.rows), cols), torch.float32)
        self._buffers.kept_samples[place] = KeptSample(pair, sample.first_rows, values)
        x = values.data_ptr()
        return self._keep(pair, KeptRows((x, x + values.nbytes // 2), sample.places), sample.rows)

    def _keep(self, pair: Pair, kept: KeptRows, rows: list[int]) -> KeptRows:
        plain = prepare_sample(pair.quantized, len(rows)) if self._samples else None
        kept.blocks = plain.list_blocks() if plain else None
        self._waiting[id(pair)] = kept, rows, plain
        return kept

    def measure(self, pair: Pair, sums: Sums) -> None:
        """Measure the rows that were kept of a pair, after its sums are complete."""
        waiting, kernel = self._waiting.pop(id(pair), None), self._buffers.kernel
        if waiting is None or kernel is None:
            return
        kept, rows, plain = waiting
        if not kept.is_filled:  # a file could not be read to the end, or torch has computed the sums
            samples = self._buffers.kept_samples
            for place in [place for place, sample in samples.items() if sample.pair is pair]:
                del samples[place]
        elif plain is not None:
            near = find_near_scales(pair.quantized, sums, rows)
            if near is not None or not pair.quantized.scale_steps:
                plain.measure_kept(kernel, kept, pair.original.matrix, sums, near, self._buffers.computed)
            self._measured[id(pair)] = plain

    def take(self, pair: Pair) -> PlainSample | None:
        """Return the sample of a pair that the kernel was asked to measure; None if there is none."""
        return self._measured.pop(id(pair), None)


@lru_cache(maxsize=64)  # cached, as many weights have the same shapes
def _find_sample(shape: tuple[int, ...]) -> _Sample | None:
    """Return the rows of a weight's sample; None if a chunk does not span all columns."""
    rows, cols = as_matrix(shape)
    chunks = sample_chunks(shape)
    if any(chunk.stop_col - chunk.col < cols for chunk in chunks):
        return None
    numbers, places = list_rows(chunks), torch.full((rows,), -1)
    places[numbers] = torch.arange(len(numbers))
    return _Sample(numbers, places, {chunk: numbers.index(chunk.row) for chunk in chunks})
