"""A worker: the computation of pairs chunk by chunk, in one thread."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from quanterr.checkpoints import Entry
from quanterr.comparison.finishing import find_cast, finish_weight
from quanterr.formats import Values, Weight
from quanterr.kernel.library import Kernel
from quanterr.kernel.native_sums import Operand, Task
from quanterr.kernel.specification import SumOptions
from quanterr.kernel.summing import Summer
from quanterr.lazy_torch import torch
from quanterr.metrics.sums import Sums
from quanterr.pairing.model import Pair, WeightResult
from quanterr.samples.conspicuous_rows import make_cell_grid
from quanterr.samples.kept_rows import SampleKeeper
from quanterr.samples.reading import Buffers, PairReader
from quanterr.samples.small_weights import MAX_KEPT_ELEMENTS
from quanterr.tensors.casts import get_smallest_normal
from quanterr.tensors.chunks import CPU_CHUNK, Chunk
from quanterr.tensors.devices import own_stream
from quanterr.tensors.workspace import OUTPUT

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
        self._begun: tuple[list[Pair], Callable[[], list[Sums]]] | None = None  # pairs, waits for their sums
        self.start_over(device, size)

    def start_over(self, device: torch.device, size: int) -> None:
        """Drop all buffers and continue on ``device`` with chunks of ``size`` elements."""
        self.wait()
        self.device, self.size = device, size
        self._buffers = Buffers(device, size, self._candidates, self._compiled)
        self._finishing = self._buffers  # a sample would need hundreds of launches on an accelerator
        if device.type != "cpu" and self._compiled is not None:
            self._finishing = Buffers(torch.device("cpu"), CPU_CHUNK, self._candidates, self._compiled)
        self._keeper = SampleKeeper(self._buffers, self._samples)
        self._summer = Summer(self._buffers.kernel, self._buffers.computed, self.outlier)
        self._sides: torch.Tensor | None = None  # x and y, (2, bytes)
        self._known: dict[int, Sums] = {}  # by the pair's id

    def begin(self, pairs: Iterable[Pair]) -> None:
        """Start to compare the small weights among ``pairs`` with the kernel.

        Meanwhile, the caller can finish the weights of the previous call.
        """
        self._buffers.small.turn()
        begun: list[tuple[Pair, Task]] = []
        x, y = self._buffers.ahead
        for pair in pairs:
            if not 0 < pair.original.n <= min(MAX_KEPT_ELEMENTS, self.size):
                continue
            operands = Operand(pair.original, x, fingerprinted=_get_only_entry(pair)), Operand(pair.quantized, y)
            task = self._summer.prepare(operands, _make_options(pair), partial(self._keeper.keep_small, pair))
            if task:  # without a task, the pair is compared alone
                begun.append((pair, task))
        if begun:
            self._begun = [pair for pair, _ in begun], self._summer.start([task for _, task in begun])

    def wait(self) -> None:
        """Wait for the weights that were begun: until then, the kernel uses the buffers."""
        if self._begun:
            (pairs, wait), self._begun = self._begun, None
            # There are no sums if a file was truncated; then each weight is compared alone, and reports it.
            for pair, sums in zip(pairs, wait(), strict=False):
                self._keeper.measure(pair, sums)
                self._known[id(pair)] = sums

    def stream(self) -> AbstractContextManager[object]:
        """Return a context with a new stream of the device; an empty one on the CPU."""
        return own_stream(self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        shared = 0 if self._sides is None else self._sides.numel()
        buffers = {id(each): each for each in (self._buffers, self._finishing)}.values()
        return shared + self._summer.nbytes + sum(each.nbytes for each in buffers)

    def sum_chunks(self, pairs: Sequence[Pair], chunks: Sequence[Chunk]) -> list[Sums]:
        """Compute the sums of a few chunks of each pair; the pairs share one weight of the original."""
        self.wait()
        if self._sides is None:  # both sides dequantize into one buffer, so that x and y are adjacent for the kernel
            self._sides = torch.empty((2, self.size * torch.float32.itemsize), dtype=torch.uint8, device=self.device)
            self._buffers.original.lend(OUTPUT, self._sides[0])
            self._buffers.copies.lend("copy", self._sides[0])
            for workspace in self._buffers.quantized:
                workspace.lend(OUTPUT, self._sides[1])
        load = self._make_loader(pairs[0].original) if len(pairs) == 1 else self._make_shared_loader(pairs[0].original)
        return [self._sum_pair(pair, chunks, load, place) for place, pair in enumerate(pairs)]

    def _make_loader(self, original: Weight) -> LoadOriginal:
        return lambda chunk: original.dequantize(chunk, self._buffers.original).weight

    def _make_shared_loader(self, original: Weight) -> LoadOriginal:
        """Make a loader that dequantizes each chunk once and returns copies later, as callers overwrite the values."""
        kept, copies = dict[Chunk, torch.Tensor](), self._buffers.copies

        def load(chunk: Chunk) -> torch.Tensor:
            if chunk in kept:
                values = kept[chunk]
                return copies.buffer("copy", tuple(values.shape), values.dtype).copy_(values)
            values = original.dequantize(chunk, self._buffers.original).weight
            kept[chunk] = copies.buffer(f"{len(kept)}", tuple(values.shape), values.dtype).copy_(values)
            return values

        return load

    def _sum_pair(self, pair: Pair, chunks: Sequence[Chunk], load_original: LoadOriginal, place: int) -> Sums:
        if not chunks:
            return Sums()
        if id(pair) in self._known:
            return self._known.pop(id(pair))
        small = chunks[0].n == pair.original.n <= MAX_KEPT_ELEMENTS
        kept = self._keeper.keep_small(pair) if small else self._keeper.keep_sample(pair, chunks, place)
        see = partial(self._buffers.small.keep_copies, pair) if small and self._finishing is self._buffers else None
        operands = self._make_operands(pair, load_original, place)
        sums = self._summer.sum_pair(operands, chunks, _make_options(pair), kept, see)
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

    def finish(self, number: int, pair: Pair, sums: Sums, place: int = 0) -> WeightResult:
        """Complete the result of a pair from its sums; ``place`` is the index of the pair in its task.

        The compiled kernel, if there is one, examines its sample on the CPU, wherever the sums were computed.
        """
        reader = PairReader(self._finishing, pair, place)
        return finish_weight(number, reader, sums, self._keeper.take(pair), self._samples)


def _make_options(pair: Pair) -> SumOptions:
    cast = find_cast(pair)
    normal = get_smallest_normal(*cast) if cast else 0.0
    return SumOptions(pair.importance, pair.original.matrix_rows, make_cell_grid(pair.quantized), normal)


def _get_only_entry(pair: Pair) -> Entry | None:
    """Return the entry that holds the elements of the original; None if there are several."""
    entries = pair.original_codes
    return entries[0] if len(entries) == 1 else None
