"""One pass over all values of all pairs, in threads, which finds out how each stored tensor follows from its original.

The steps for a weight, of which the first that explains every code is taken:

    1. both sides have the same values
    2. a deterministic recipe gives the stored values
    3. each code is the nearest level, in one of the arithmetics that its dtypes allow
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from math import inf
from typing import NamedTuple

from quanterr.errors import CheckpointError, Interrupted
from quanterr.formats import Weight
from quanterr.formats.reading import Reader
from quanterr.kernel.doubts import list_doubtful
from quanterr.kernel.levels import Levels
from quanterr.kernel.library import Kernel
from quanterr.lazy_torch import Tensor, torch
from quanterr.origin.copies import CopyTest
from quanterr.origin.nearest import FLOAT32, FREE_CODES_PER_MOVED, Arithmetic, check_codes, list_arithmetics, pick
from quanterr.origin.places import Places
from quanterr.origin.same_bytes import have_same_bytes, is_same_function
from quanterr.pairing.model import Pair
from quanterr.recipes.quantized_file import QuantizedFile
from quanterr.samples.reading import Buffers, PairReader
from quanterr.tensors.chunks import CPU_CHUNK, Chunk, Cut
from quanterr.tensors.pool import map_in_threads
from quanterr.util.platform import usable_cores

# If a recipe gives all values except at most one in this many, the weight was made by the recipe and changed
# afterwards. A program that computes in bfloat16 differs from the recipe in at least one of 700 values of 4 bits.
VALUES_PER_EXCEPTION = 2000
NESTED_SCALES = "nested_absmax"
# bitsandbytes does not always take the nearest entry of the table by which it quantizes scales: in two of 2,048 groups
# it took the next one, 16 % and 26 % away. The limit is relative.
MAX_SCALE_DIFFERENCE = 0.3
# The search by an arithmetic ends early if at least one code in this many, in at least every second row, is not the
# nearest: then a method such as GPTQ moved the codes, or they are another original's.
CODES_PER_MOVED = 100
NO_PLACES = Places()


class Trace(NamedTuple):
    """How the values of a stored tensor follow from its original."""

    is_copy: bool = False  # the original's bits, or their cast
    recipe: str = ""  # gives all values, or nearly all
    unlike: Places = NO_PLACES  # values that the recipe does not give
    has_same_codes: bool = False  # all codes are the recipe's, whatever the scales
    has_codes_of_recipe: bool = False  # the same, and nested scales differ from its by at most MAX_SCALE_DIFFERENCE
    arithmetic: str = ""  # the arithmetic in which every code is the nearest
    is_fine: bool = False  # that arithmetic is float32: only ties leave a choice
    free: int = 0  # codes for which another level would have done as well
    off: Places = NO_PLACES  # codes that no arithmetic makes the nearest, or numbers that are not the original's
    moved: Places = NO_PLACES  # codes that are not the nearest in float32
    reason: str = ""  # why codes cannot be compared with levels

    @property
    def is_nearest(self) -> bool:
        """True if every code is the nearest; in a coarse arithmetic, only if no recipe gives other codes."""
        return bool(self.arithmetic) and (self.is_fine or not self.recipe or self.has_same_codes)

    @property
    def is_exact(self) -> bool:
        """True if the recipe gives every value."""
        return bool(self.recipe) and not self.unlike.n


def trace_pairs(
    pairs: Sequence[Pair],
    equal: Collection[int],
    requantized: Mapping[str, Weight],
    kernel: Kernel | None,
    stop: threading.Event,
    on_wait: Callable[[], None],
) -> AbstractContextManager[Iterator[Trace]]:
    """Yield the traces of all pairs, in their order.

    Args:
        pairs: the pairs.
        equal: the numbers of pairs with equal values on both sides.
        requantized: the weights as deterministic recipes quantize them, by the names of pairs.
        kernel: decodes the weights; if it is None, torch decodes them.
        stop: ends the pass when it is set.
        on_wait: is called ten times per second.

    In place of a trace, Interrupted is raised if the pass was stopped.
    """
    cpu = torch.device("cpu")

    def trace(number: int, buffers: Buffers) -> Trace:
        tracer = _Tracer(pairs[number], PairReader(buffers, pairs[number], 0), stop)
        return tracer.trace(number in equal, requantized.get(pairs[number].name))

    buffers = [Buffers(cpu, CPU_CHUNK, 1, kernel) for _ in range(usable_cores())]
    return map_in_threads(trace, range(len(pairs)), buffers, on_wait=on_wait)


class _Tracer:
    """Traces the values of one pair."""

    def __init__(self, pair: Pair, reader: PairReader, stop: threading.Event) -> None:
        self._pair, self._reader, self._weight, self._stop = pair, reader, pair.quantized, stop
        self._coded = pair.quantized.unrotated

    def trace(self, is_equal: bool, requantized: Weight | None) -> Trace:
        if not self._weight.has_codes:
            return self._trace_copy()
        if is_equal:
            return Trace(is_copy=True)
        trace = Trace()
        if requantized is not None and requantized.shape == self._weight.shape:
            trace = self._trace_recipe(requantized)
        return trace if trace.is_exact else self._trace_codes(trace)

    def _trace_recipe(self, requantized: Weight) -> Trace:
        """Return how the weight differs from that of a recipe; an empty trace if another recipe made it."""
        recipe = requantized.codes.file.recipe.name if isinstance(requantized.codes.file, QuantizedFile) else ""
        try:
            if is_same_function(requantized.dequantize, self._weight.dequantize, self._check_stop):
                return Trace(recipe=recipe)
            unlike, farthest = self._compare(requantized, self._weight.n // VALUES_PER_EXCEPTION)
            has_codes = unlike.n > 0 and have_same_bytes(requantized.codes, self._weight.codes, self._check_stop)
            if has_codes:
                unlike, farthest = self._compare(requantized, self._weight.n)
        except CheckpointError:  # the original holds NaN or infinity, which no recipe quantizes
            return Trace()
        if unlike.n * VALUES_PER_EXCEPTION > self._weight.n and not has_codes:
            return Trace()
        is_near = farthest <= MAX_SCALE_DIFFERENCE and NESTED_SCALES in self._weight.parts
        return Trace(recipe=recipe, unlike=unlike, has_same_codes=has_codes, has_codes_of_recipe=has_codes and is_near)

    def _chunks(self, weight: Weight) -> Iterator[Chunk]:
        """Yield chunks of whole rows."""
        rows, cols = weight.matrix
        for chunk in Cut(rows, cols, max(CPU_CHUNK, cols)) if weight.n else ():
            self._check_stop()
            yield chunk

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Interrupted("stopped")

    def _trace_copy(self) -> Trace:
        test, off = CopyTest(self._pair), Places()
        for chunk in self._chunks(self._weight):
            off.add(chunk, test.find_differences(*self._reader.read_values(chunk)).nonzero())
        return Trace(is_copy=not off.n, off=off)

    def _compare(self, other: Weight, max_unlike: int) -> tuple[Places, float]:
        """Return the values that differ from those of another weight, and the largest relative difference.

        The comparison ends with the chunk in which more than ``max_unlike`` values differ.
        """
        reader, unlike, farthest = Reader(), Places(), 0.0
        for chunk in self._chunks(other):
            x, y = reader.read_both((other, self._weight), chunk)
            if torch.equal(x.view(torch.int32), y.view(torch.int32)):
                continue
            differ = x.view(torch.int32) != y.view(torch.int32)
            unlike.add(chunk, differ.nonzero())
            farthest = max(farthest, float(((y - x).abs() / x.abs())[differ].nan_to_num(nan=inf).amax()))
            if unlike.n > max_unlike:
                break
        return unlike, farthest

    def _trace_codes(self, trace: Trace) -> Trace:
        """Return the trace with the result of comparing each code with the nearest level."""
        if self._coded.levels is None or self._coded.shape != self._weight.shape:
            return trace._replace(reason="its codes stand for several elements each, or no level is theirs alone")
        counts: list[Places] = []
        for arithmetic in list_arithmetics(self._pair):
            checked = self._check_codes(self._coded.levels, arithmetic, is_first=not counts)
            if checked is None:
                return trace._replace(reason="its scales are unknown")
            off, free, is_whole = checked
            if not is_whole:
                continue
            counts.append(off)
            is_fine = arithmetic.margin == FLOAT32.margin
            if not off.n and (is_fine or counts[0].n * FREE_CODES_PER_MOVED >= free):
                return trace._replace(arithmetic=arithmetic.name, is_fine=is_fine, free=free)
        return trace._replace(off=min((off for off in counts if off.n), key=lambda off: off.n), moved=counts[0])

    def _check_codes(self, levels: Levels, arithmetic: Arithmetic, is_first: bool) -> tuple[Places, int, bool] | None:
        """Return the codes that an arithmetic does not explain, how many are free, and whether all were looked at.

        Return None if scales are unknown. The kernel picks the few codes that need a closer look. The first arithmetic
        always looks at all codes.
        """
        off, free, buffers = Places(), 0, self._reader.buffers
        for chunk in self._chunks(self._coded):
            _, x, y, scales = self._reader.read_group([chunk])
            if scales is None:
                return None
            x = arithmetic.load(x)
            places = None
            if buffers.kernel is not None:
                out = buffers.computed.buffer("doubtful", (x.numel(),), torch.int64)
                margins = arithmetic.margin, arithmetic.absolute
                places = list_doubtful(buffers.kernel, levels, x.contiguous(), y.contiguous(), scales, *margins, out)
                if not len(places):
                    continue
                x, y, scales = pick(x, y, scales, places)
            codes = check_codes(levels, x, y, scales, arithmetic)
            at = codes.off.nonzero()
            steps = codes.steps[codes.off]
            free += int(codes.free.sum())
            off.add(chunk, at if places is None else _split(places[at[:, 1]], chunk), steps)
            if not is_first and off.n * CODES_PER_MOVED > self._weight.n and off.rows * 2 > chunk.stop_row:
                return off, free, False
        return off, free, True


def _split(places: Tensor, chunk: Chunk) -> Tensor:
    """Return the rows and columns of places in a chunk, (n, 2)."""
    cols = chunk.shape[1]
    return torch.stack([places // cols, places % cols], 1)
