"""A worker: the computation of pairs chunk by chunk, in one thread."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from quanterr.checkpoints import Entry
from quanterr.checkpoints.fingerprints import compute_fingerprint
from quanterr.formats import Values, Weight
from quanterr.formats.shared.scale_grid import iterate_scales
from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.kernel.library import Kernel
from quanterr.kernel.native_sums import NativeSums, Operand, Task
from quanterr.kernel.specification import SumOptions, exact_sums
from quanterr.kernel.torch_sums import fast_sums
from quanterr.metrics.sums import Sums
from quanterr.pairing.model import ComparedWeight, LargestError, Pair
from quanterr.samples.conspicuous import make_cell_grid
from quanterr.samples.keeping import SampleKeeper
from quanterr.samples.measuring import SampleMeasurer
from quanterr.samples.reading import Buffers, PairReader
from quanterr.samples.small import MOST_KEPT
from quanterr.tensors.casts import CastTest, Copy, find_narrowest, least_normal, rounds_to_nearest
from quanterr.tensors.chunks import Chunk, Cut
from quanterr.tensors.devices import own_stream
from quanterr.tensors.workspace import OUTPUT, Workspace

LoadOriginal = Callable[[Chunk], torch.Tensor]  # chunk → x, (r, c), which may be overwritten


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
        """Start without buffers; ``size`` is the chunk size in elements, and ``kernel`` is None for torch's.

        With ``samples``, the error that scales allow is estimated from a sample of rows.
        """
        self.outlier, self._candidates, self._compiled, self._samples = outlier, candidates, kernel, samples
        self._begun: tuple[list[Pair], Callable[[], list[Sums]]] | None = None  # and how to get their sums
        self.start_over(device, size)

    def start_over(self, device: torch.device, size: int) -> None:
        """Drop all buffers and continue on ``device`` with chunks of ``size`` elements."""
        self.wait()
        self.device, self.size = device, size
        self._buffers = Buffers(device, size, self._candidates, self._compiled)
        self._keeper = SampleKeeper(self._buffers, self._samples)
        kernel = self._buffers.kernel
        self._native = NativeSums(kernel, self.outlier) if kernel else None
        self._copies = Workspace(device)
        self._sides: torch.Tensor | None = None  # x and y, (2, bytes)
        self._ahead = Workspace(device), Workspace(device)  # one for each side, for small weights that are begun
        self._known: dict[int, Sums] = {}  # by the pair's id

    def begin(self, pairs: Iterable[Pair]) -> None:
        """Start to compare the small weights among ``pairs`` with the kernel.

        Meanwhile, the caller can finish the weights of the previous call.
        """
        self._buffers.small.turn()
        if self._native is None:
            return
        tasks: list[tuple[Pair, Task]] = []
        for pair in pairs:
            task = self._prepare(self._native, pair) if pair.original.n <= min(MOST_KEPT, self.size) else None
            if task:
                tasks.append((pair, task))
        if tasks:
            self._begun = [pair for pair, _ in tasks], self._native.start([task for _, task in tasks])

    def _prepare(self, native: NativeSums, pair: Pair) -> Task | None:
        """Prepare a small weight for the kernel; None if it must be compared by itself."""
        if pair.original.needs_float64 or pair.quantized.needs_float64 or not pair.original.n:
            return None
        x, y = self._ahead
        operands = Operand(pair.original, x, fingerprinted=_get_only_entry(pair)), Operand(pair.quantized, y)
        return native.prepare_whole(operands, _make_options(pair), lambda: self._keeper.keep_small(pair))

    def wait(self) -> None:
        """Wait for the weights that were begun: until then, the kernel uses the buffers."""
        if self._begun:
            (pairs, wait), self._begun = self._begun, None
            for pair, sums in zip(pairs, wait(), strict=False):  # none if a file is cut: each weight then reports it
                self._keeper.measure(pair, sums)
                self._known[id(pair)] = sums

    def stream(self) -> AbstractContextManager[object]:
        """Return a context with a new stream of the device; an empty one on the CPU."""
        return own_stream(self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        shared = 0 if self._sides is None else self._sides.numel()
        shared += self._native.nbytes if self._native else 0
        return shared + self._buffers.nbytes + sum(each.nbytes for each in (self._copies, *self._ahead))

    def _share_output(self) -> None:
        """Make both sides dequantize into one buffer, so that x and y are adjacent for the kernel."""
        self._sides = torch.empty((2, self.size * torch.float32.itemsize), dtype=torch.uint8, device=self.device)
        self._buffers.original.lend(OUTPUT, self._sides[0])
        self._copies.lend("copy", self._sides[0])
        for workspace in self._buffers.quantized:
            workspace.lend(OUTPUT, self._sides[1])

    def sum_chunks(self, pairs: Sequence[Pair], chunks: Sequence[Chunk]) -> list[Sums]:
        """Compute the sums of a few chunks of each pair; the pairs share one weight of the original."""
        self.wait()
        if self._sides is None:
            self._share_output()
        load = self._make_loader(pairs[0].original) if len(pairs) == 1 else self._make_shared_loader(pairs[0].original)
        return [self._sum_pair(pair, chunks, load, place) for place, pair in enumerate(pairs)]

    def _make_loader(self, original: Weight) -> LoadOriginal:
        return lambda chunk: original.dequantize(chunk, self._buffers.original).weight

    def _make_shared_loader(self, original: Weight) -> LoadOriginal:
        """Make a loader that dequantizes each chunk once and returns copies later, as callers overwrite the values."""
        kept: dict[Chunk, torch.Tensor] = {}

        def load(chunk: Chunk) -> torch.Tensor:
            if chunk in kept:
                values = kept[chunk]
                return self._copies.buffer("copy", tuple(values.shape), values.dtype).copy_(values)
            values = original.dequantize(chunk, self._buffers.original).weight
            kept[chunk] = self._copies.buffer(f"{len(kept)}", tuple(values.shape), values.dtype).copy_(values)
            return values

        return load

    def _sum_pair(self, pair: Pair, chunks: Sequence[Chunk], load_original: LoadOriginal, place: int) -> Sums:
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
        kept = self._keeper.keep_small(pair) if is_small else self._keeper.keep_sample(pair, chunks, place)
        sums = self._native.sums(self._make_operands(pair, load_original, place), chunks, _make_options(pair), kept)
        if sums is None:
            self._keeper.drop(pair, place)
        else:
            self._keeper.measure(pair, sums)
        return sums

    def _make_operands(self, pair: Pair, load_original: LoadOriginal, place: int) -> tuple[Operand, Operand]:
        return (
            Operand(
                pair.original,
                self._buffers.original,
                lambda chunk: Values(load_original(chunk)),
                self._candidates > 1,
                _get_only_entry(pair),
            ),
            Operand(pair.quantized, self._buffers.quantized[place]),
        )

    def _sum_with_torch(self, pair: Pair, chunks: Sequence[Chunk], load_original: LoadOriginal, place: int) -> Sums:
        saturated: dict[Chunk, torch.Tensor] = {}  # by chunk, as a chunk may be loaded more than once

        def load(chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            x = load_original(chunk)
            y, at_end, zeros = pair.quantized.dequantize(chunk, self._buffers.quantized[place])
            if at_end is not None:
                saturated[chunk] = at_end
            if _keeps_values(pair, chunk):
                self._buffers.small.keep_copies(pair, x, y)
            return x, y, zeros

        matrix, sums, wanted = pair.original.matrix, None, _make_options(pair)
        if not pair.original.needs_float64 and not pair.quantized.needs_float64:
            sums = fast_sums(load, chunks, matrix, self._buffers.computed, self.outlier, wanted)
        if sums is None:
            sums = exact_sums(load, chunks, matrix[1], self.outlier, wanted)
        if saturated:
            sums.saturated = int(torch.stack(list(saturated.values())).sum())
        return sums

    def finish(self, number: int, pair: Pair, sums: Sums, place: int = 0) -> ComparedWeight:
        """Complete the result of a pair from its sums; ``place`` is the index of the pair in its task."""
        reader, plain = PairReader(self._buffers, pair, place), self._keeper.take(pair)
        scales = plain.scales if plain else None
        if scales is None:
            scales = _summarize_scales(pair.quantized, self._buffers.quantized[place])
        attainable = None
        if self._samples and not sums.exact:
            attainable = SampleMeasurer(reader, sums).measure(plain)
        worst = self._find_worst(reader, sums)
        sums.peaks = []  # large, and no longer needed
        copy = self._check_copy(reader, sums)
        fingerprint = compute_fingerprint(pair.original_codes, sums.sampled)
        return ComparedWeight(number, sums, scales, worst, attainable, copy, fingerprint)

    def _check_copy(self, reader: PairReader, sums: Sums) -> Copy | None:
        """Return how far an unquantized tensor is a copy of the original; read it again if the sums do not tell."""
        pair = reader.pair
        if not _is_copy(pair):
            return None
        x, y = _find_dtypes(pair)
        largest = sums.cast_max if least_normal(x, y) else sums.relative_max
        if sums.exact or (not sums.zero_reference and rounds_to_nearest(x, y, largest)):
            return Copy.SAME
        test = CastTest(x, y, pair.original.computed or pair.quantized.computed)
        for chunk in Cut(*pair.original.matrix, self.size):
            test.add(*reader.read_values(chunk))
            if test.result == Copy.CHANGED:
                break
        return test.result

    def _find_worst(self, reader: PairReader, sums: Sums) -> LargestError | None:
        """Return the element with the largest |e|; its row is read again if only that is known."""
        if sums.worst is None or sums.worst.values is not None:
            return _get_largest_error(sums)
        _, row, col, _ = sums.worst
        kept = self._buffers.small.values(reader.pair)
        if kept is not None:
            x, y = (side[row : row + 1] for side in kept)
        else:
            chunk = Chunk(row, row + 1, col, min(col + self.size, reader.pair.original.matrix[1]))
            x, y = reader.read_values(chunk)
        x, y = x.double(), y.double()
        at = int((y - x).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().argmax())
        return LargestError(row, col + at, float(x[0, at]), float(y[0, at]))


def _get_largest_error(sums: Sums) -> LargestError | None:
    """Return the element with the largest |e|; None if there is no error, or only its row is known."""
    worst = sums.worst
    return None if worst is None or worst.values is None else LargestError(worst.row, worst.col, *worst.values)


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
