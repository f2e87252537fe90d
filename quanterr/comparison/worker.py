"""One worker: its buffers, and what it does with chunks of a pair."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple
from zlib import crc32

import torch

from quanterr.checkpoints import Entry
from quanterr.comparison.attainable import WIDEST, Sampler, sampled, sampled_blocks
from quanterr.comparison.conspicuous import (
    blocks_of,
    cells_of,
    conspicuous_cells,
    conspicuous_rows,
    largest_of_runs,
    spread_over_rows,
)
from quanterr.comparison.kernel import Wanted, exact_sums, fast_sums
from quanterr.comparison.native_sums import NativeSums, Operand
from quanterr.comparison.scale_sampling import ScaleSampler
from quanterr.formats import Values, Weight
from quanterr.formats.shared.scale_grid import iterate_scales
from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.metrics.attainable import Attainable, Part
from quanterr.metrics.sums import Sums, as_float
from quanterr.native import Kernel
from quanterr.pairing.plan import ComparedWeight, Element, Pair
from quanterr.tensors.casts import CastTest, Copy, find_narrowest, least_normal, rounds_to_nearest
from quanterr.tensors.chunks import Chunk, Cut, split_chunk
from quanterr.tensors.levels import Scaling, find_nearest, measure_rounding
from quanterr.tensors.workspace import OUTPUT, FilledWorkspace, Workspace

LoadOriginal = Callable[[Chunk], torch.Tensor]  # x of a chunk, (r, c), which may be overwritten
LEAST, MOST = 2.0**-80, 2.0**100  # between these energies squares in float32 are trusted
MOST_ROWS = 2  # of which blocks are looked at
STACK = 1 << 17  # elements of a sample that are looked at at once
IN_BLOCKS = 1 << 16  # elements of a sample of blocks that span rows, in a row of them
SAMPLED = 64  # bytes at a place of a tensor that are part of its fingerprint
MOST_KEPT = 1 << 14  # elements of a pair whose values are kept: to read its worst row again would cost more


class _Kept(NamedTuple):
    """Values of a small pair, (r, c) each, that the kernel cannot overwrite."""

    pair: Pair
    x: torch.Tensor
    y: torch.Tensor


class Worker:
    """One thread's buffers, and what it does with them."""

    def __init__(
        self, device: torch.device, size: int, outlier: float, candidates: int = 1, kernel: Kernel | None = None
    ) -> None:
        """Start without any buffer; ``size`` is that of the chunks, ``kernel`` None for torch's."""
        self.outlier, self._candidates, self._compiled = outlier, candidates, kernel
        self.start_over(device, size)

    def start_over(self, device: torch.device, size: int) -> None:
        """Go on there, with chunks of that size and without any buffer."""
        self.device, self.size = device, size
        self._original, self._copies, self._kernel = (Workspace(device) for _ in range(3))
        self._quantized = [Workspace(device) for _ in range(self._candidates)]  # each may hold parts from go to go
        self._ends = FilledWorkspace(device), FilledWorkspace(device)
        on_cpu = self._compiled is not None and device.type == "cpu"
        self._native = NativeSums(self._compiled, self.outlier) if self._compiled and on_cpu else None
        self._sides: torch.Tensor | None = None  # x and y, (2, bytes)
        self._kept: dict[int, _Kept] = {}  # by the place of the pair

    def stream(self) -> AbstractContextManager[object]:
        """Its own CUDA stream as a context; on the CPU nothing."""
        if self.device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        """Bytes of all its buffers."""
        shared = 0 if self._sides is None else self._sides.numel()
        shared += self._native.nbytes if self._native else 0
        return shared + sum(
            w.nbytes for w in (self._original, self._copies, self._kernel, *self._ends, *self._quantized)
        )

    def _share(self) -> None:
        """Let both sides dequantize to where the kernel has them beside each other."""
        self._sides = torch.empty((2, self.size * torch.float32.itemsize), dtype=torch.uint8, device=self.device)
        self._original.lend(OUTPUT, self._sides[0])
        self._copies.lend("copy", self._sides[0])
        for workspace in self._quantized:
            workspace.lend(OUTPUT, self._sides[1])

    def compare(self, pairs: Sequence[Pair], chunks: Sequence[Chunk]) -> list[Sums]:
        """Sums of a few chunks of each of the pairs, which have one weight of the original in common."""
        if self._sides is None:
            self._share()
        load = self._load(pairs[0].original) if len(pairs) == 1 else self._load_once(pairs[0].original)
        return [self._compare(pair, chunks, load, place) for place, pair in enumerate(pairs)]

    def _load(self, original: Weight) -> LoadOriginal:
        return lambda chunk: original.dequantize(chunk, self._original).weight

    def _load_once(self, original: Weight) -> LoadOriginal:
        """Reads and dequantizes a chunk when it is first asked for; later gives copies, which are overwritten too."""
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
        if not pair.original.needs_float64 and not pair.quantized.needs_float64:
            sums = self._native_sums(pair, chunks, load_original, place)
            if sums is not None:
                return sums
        return self._torch_sums(pair, chunks, load_original, place)

    def _native_sums(self, pair: Pair, chunks: Sequence[Chunk], load_original: LoadOriginal, place: int) -> Sums | None:
        if self._native is None:
            return None
        kept = self._keep(pair, place) if _is_kept(pair, chunks[0]) else None
        return self._native.sums(self._operands(pair, load_original, place), chunks, _wanted(pair), kept)

    def _operands(self, pair: Pair, load_original: LoadOriginal, place: int) -> tuple[Operand, Operand]:
        workspace = self._quantized[place]
        return (
            Operand(pair.original, self._original, lambda chunk: Values(load_original(chunk))),
            Operand(pair.quantized, workspace, lambda chunk: pair.quantized.dequantize(chunk, workspace)),
        )

    def _keep(self, pair: Pair, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the values of a small pair are kept."""
        x, y = (self._kernel.buffer(f"kept_{side}{place}", pair.original.matrix, torch.float32) for side in "xy")
        self._kept[place] = _Kept(pair, x, y)
        return x, y

    def _torch_sums(self, pair: Pair, chunks: Sequence[Chunk], load_original: LoadOriginal, place: int) -> Sums:
        saturated: dict[Chunk, torch.Tensor] = {}  # a chunk may be loaded more than once

        def load(chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            x = load_original(chunk)
            y, at_end, zeros = pair.quantized.dequantize(chunk, self._quantized[place])
            if at_end is not None:
                saturated[chunk] = at_end
            if _is_kept(pair, chunk):
                keys = f"kept_x{place}", f"kept_y{place}"
                buffers = (
                    self._kernel.buffer(key, tuple(v.shape), v.dtype) for key, v in zip(keys, (x, y), strict=True)
                )
                self._kept[place] = _Kept(pair, *(buffer.copy_(v) for buffer, v in zip(buffers, (x, y), strict=True)))
            return x, y, zeros

        matrix, sums, wanted = pair.original.matrix, None, _wanted(pair)
        if not pair.original.needs_float64 and not pair.quantized.needs_float64:
            sums = fast_sums(load, chunks, matrix, self._kernel, self.outlier, wanted)
        if sums is None:
            sums = exact_sums(load, chunks, matrix[1], self.outlier, wanted)
        if saturated:
            sums.saturated = int(torch.stack(list(saturated.values())).sum())
        return sums

    def finish(self, number: int, pair: Pair, sums: Sums, place: int = 0) -> ComparedWeight:
        """What is reported of a weight besides its sums; ``place`` is that of the pair among those of its original."""
        scales = _scales(pair.quantized, self._quantized[place])
        attainable = None if sums.exact else self._attainable(pair, sums, place)
        sums.peaks = []  # many, and nothing asks for them any more
        worst, copy = self._worst(pair, sums, place), self._copy(pair, sums, place)
        return ComparedWeight(number, sums, scales, worst, attainable, copy, _fingerprint(pair.codes[0]))

    def _copy(self, pair: Pair, sums: Sums, place: int) -> Copy | None:
        """Whether a tensor that neither side quantizes is the original's; read again where sums do not prove it."""
        if not _is_copy(pair):
            return None
        x, y = _dtypes(pair)
        largest = sums.cast_max if least_normal(x, y) else sums.relative_max
        if sums.exact or (not sums.zero_reference and rounds_to_nearest(x, y, largest)):
            return Copy.SAME
        test = CastTest(x, y, pair.original.computed or pair.quantized.computed)
        for chunk in Cut(*pair.original.matrix, self.size):
            test.add(*self._values(pair, chunk, place))
            if test.result == Copy.CHANGED:
                break
        return test.result

    def _attainable(self, pair: Pair, sums: Sums, place: int) -> Attainable | None:
        """What the stored scales allow, from a sample; None where the nearest code cannot be found."""
        rotated = pair.quantized.rotated
        weight = rotated.weight if rotated else pair.quantized
        if weight.levels is None or weight.shape != pair.quantized.shape:
            return None
        chunks = [piece for chunk in sampled(weight.shape) for piece in split_chunk(chunk, self.size)]
        of_scales = self._scale_sampler(weight, sums, bool(rotated))
        found = None if rotated else self._plain(pair, chunks, sums, place, of_scales)
        if found is None:
            found, of_scales = self._nearest(pair, chunks, sums, place)
        if spread_over_rows(weight):
            of_scales = self._blocks(pair, place)
        parts, beside = self._beside(pair, sums, found, of_scales.beside(), place)
        return of_scales.result(found._replace(parts=(*found.parts, *parts)), beside)

    def _nearest(self, pair: Pair, chunks: Sequence[Chunk], sums: Sums, place: int) -> tuple[Attainable, ScaleSampler]:
        """What the nearest codes of a sample come to, and what its scales lose."""
        rotated = pair.quantized.rotated
        weight = rotated.weight if rotated else pair.quantized
        sampler = Sampler(None if rotated else pair.importance)
        of_scales = self._scale_sampler(weight, sums, bool(rotated))
        for chunk in chunks:
            x, y = self._values(pair, chunk, place)
            if rotated:
                x = rotated.rotate(x.clone(), self._kernel)
                y = weight.dequantize(chunk, self._quantized[place]).weight
            self._add_nearest(weight, chunk, x, y, sampler, None if spread_over_rows(weight) else of_scales)
        return sampler.result(), of_scales

    def _add_nearest(
        self,
        weight: Weight,
        chunk: Chunk,
        x: torch.Tensor,
        y: torch.Tensor,
        codes: Sampler | None,
        of_scales: ScaleSampler | None,
    ) -> None:
        """Find the codes nearest to ``x``, (r, c), and take them in where they are asked for."""
        scales = weight.scaling(chunk, self._ends)
        if scales is None or weight.levels is None:
            return
        found = find_nearest(weight.levels, x, y, scales)
        if codes is not None:
            codes.add(chunk, x, y, found)
        if of_scales is not None:
            of_scales.add(range(chunk.row, chunk.stop_row), chunk.col, x, found.values - x, scales, y)

    def _scale_sampler(self, weight: Weight, sums: Sums, rotated: bool) -> ScaleSampler:
        """One for a weight, or for what its codes stand for where its columns are rotated."""
        largest, runs = (None, None) if rotated else (sums.x_max, largest_of_runs(weight, sums))
        return ScaleSampler(weight, largest, partial(self._least, weight), runs)

    def _least(self, weight: Weight, row: int) -> torch.Tensor | None:
        """What the least scale would multiply the codes of a row by, (1, c)."""
        return weight.least_units(Chunk(row, row + 1, 0, weight.matrix[1]), FilledWorkspace(self._ends[0].device))

    def _blocks(self, pair: Pair, place: int) -> ScaleSampler:
        """What the scales of whole blocks that span rows lose, of a few of them."""
        of_scales = ScaleSampler(pair.quantized, None)
        for chunk in _sampled_blocks(pair.quantized):
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

    def _beside(
        self, pair: Pair, sums: Sums, sample: Attainable, of_scales: ScaleSampler, place: int
    ) -> tuple[tuple[Part, ...], ScaleSampler | None]:
        """Of conspicuous rows and groups, those beside the sample worse than allowed; what the scales of all lose."""
        weight = pair.quantized
        if sample.n == sums.n or weight.rotated or weight.matrix[1] > WIDEST:
            return (), None
        sampler, chunks = Sampler(), sampled(weight.shape)
        rows, in_blocks = set(conspicuous_rows(sums, sample)), spread_over_rows(weight)
        cells = conspicuous_cells(weight, sums, _sampled_blocks(weight) if in_blocks else chunks)
        if in_blocks and of_scales.has_floats:
            cells += blocks_of(weight, conspicuous_rows(sums, sample)[:MOST_ROWS])
        for cell in cells:
            if in_blocks:
                self._add_blocks(pair, cell, of_scales, place)
            else:
                rows.add(cell.row)
        known = {row for chunk in chunks for row in range(chunk.row, chunk.stop_row)}
        to = of_scales if of_scales.rows_apart or (of_scales.has_floats and not in_blocks) else None
        for row in sorted(rows if to else rows - known):  # of sampled rows the scales of some were left out
            chunk = Chunk(row, row + 1, 0, weight.matrix[1])
            values = self._values(pair, chunk, place)
            self._add_nearest(weight, chunk, *values, None if row in known else sampler, to)
        return sampler.worse_parts(sample), of_scales

    def _plain(
        self, pair: Pair, chunks: Sequence[Chunk], sums: Sums, place: int, of_scales: ScaleSampler
    ) -> Attainable | None:
        """The same where each element of the sample is rounded to the nearest code; None where that is not sure."""
        weight, n, x_sq, e_sq, steps = pair.quantized, 0, 0.0, 0.0, 0.0
        for together in _stacks(chunks, min(self.size, STACK)):
            scales = self._scaling(weight, together, place)
            if weight.levels is None or scales is None:
                return None
            x, y = self._sample(pair, together, place)
            e = torch.sub(y, x, out=self._kernel.buffer("scratch", tuple(x.shape), torch.float32))
            mean = measure_rounding(weight.levels, x, e, scales, self._kernel)
            if mean is None:
                return None
            steps += mean * x.numel()
            if not spread_over_rows(weight):
                rows = [row for chunk in together for row in range(chunk.row, chunk.stop_row)]
                of_scales.add(rows, together[0].col, x, e, scales)
            if x.numel() == sums.n:
                n, x_sq, e_sq = sums.n, as_float(sums.x_sq), as_float(sums.e_sq)
            else:
                n, x_sq, e_sq = n + x.numel(), x_sq + self._energy(x), e_sq + self._energy(e)
        if not (LEAST <= x_sq <= MOST and e_sq <= MOST):
            return None
        return Attainable(n, x_sq, e_sq, e_sq, rounding=steps / n if n else None)

    def _sample(self, pair: Pair, chunks: Sequence[Chunk], place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both sides of chunks of the same columns, one below the other, (r, c) float32."""
        if len(chunks) == 1:
            return self._values(pair, chunks[0], place)
        return self._stacked(pair, "x", chunks, place), self._stacked(pair, "y", chunks, place)

    def _stacked(self, pair: Pair, side: str, chunks: Sequence[Chunk], place: int) -> torch.Tensor:
        shape, row = (sum(chunk.shape[0] for chunk in chunks), chunks[0].shape[1]), 0
        values = self._kernel.buffer(f"sample_{side}", shape, torch.float32)
        for chunk in chunks:
            self._read(pair, side, chunk, place, values[row : row + chunk.shape[0]])
            row += chunk.shape[0]
        return values

    def _scaling(self, weight: Weight, chunks: Sequence[Chunk], place: int) -> Scaling | None:
        """As of the weight; from what the workspace holds, where rows have one scale."""
        if weight.unit is None:
            found = (weight.scaling(chunk, self._ends) for chunk in chunks)
            scales = [
                Scaling(one.unit.clone(), None if one.shift is None else one.shift.clone()) for one in found if one
            ]
        else:
            scales = [Scaling(weight.unit(chunk, self._quantized[place]).clone()) for chunk in chunks]
        if len(scales) < len(chunks):
            return None
        if len(chunks) == 1 or scales[0].unit.numel() == 1:
            return scales[0]
        units = [one.unit.expand(chunk.shape[0], -1) for one, chunk in zip(scales, chunks, strict=True)]
        shifts = [one.shift for one in scales if one.shift is not None]
        return Scaling(torch.cat(units), torch.cat(shifts) if shifts else None)

    def _energy(self, values: torch.Tensor) -> float:
        """Σ of squares of (r, c) float32, in float64 over rows."""
        squares = self._kernel.buffer("errors", tuple(values.shape), torch.float32)
        return float(torch.mul(values, values, out=squares).sum(1).double().sum())

    def _values(self, pair: Pair, chunk: Chunk, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both sides of a chunk, (r, c) float32 or, where it takes that, float64; read again if need be."""
        kept = self._kept.get(place)
        if kept is not None and kept.pair is pair and chunk.n == pair.original.n:
            return kept.x.float(), kept.y.float()
        if pair.original.needs_float64 or pair.quantized.needs_float64:
            x = pair.original.dequantize(chunk, self._original).weight
            return x, pair.quantized.dequantize(chunk, self._quantized[place]).weight
        x, y = (self._kernel.buffer(f"values_{side}", chunk.shape, torch.float32) for side in "xy")
        return self._read(pair, "x", chunk, place, x), self._read(pair, "y", chunk, place, y)

    def _read(self, pair: Pair, side: str, chunk: Chunk, place: int, out: torch.Tensor) -> torch.Tensor:
        """One side of a chunk of whole rows or a piece of one into ``out``, (r, c) float32."""
        weight, workspace = (pair.original, self._original) if side == "x" else (pair.quantized, self._quantized[place])
        if self._native is None or not self._native.values(weight, workspace, chunk, out):
            out.copy_(weight.dequantize(chunk, workspace).weight)
        return out

    def _worst(self, pair: Pair, sums: Sums, place: int) -> Element | None:
        """From the row with the largest |e|, read again if need be: its place costs more to remember."""
        if sums.worst is None:
            return None
        _, row, col = sums.worst
        kept = self._kept.get(place)
        if kept is not None and kept.pair is pair:
            x, y = kept.x[row].double(), kept.y[row].double()
        else:
            chunk = Chunk(row, row + 1, col, min(col + self.size, pair.original.matrix[1]))
            x, y = (side[0].double() for side in self._values(pair, chunk, place))
        at = int((y - x).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().argmax())
        return Element(row, col + at, float(x[at]), float(y[at]))


def _stacks(chunks: Sequence[Chunk], size: int) -> list[list[Chunk]]:
    """Neighbours of the same columns together, up to ``size`` elements: what is looked at at once."""
    stacks: list[list[Chunk]] = []
    for chunk in chunks:
        last = stacks[-1] if stacks else []
        alike = last and (last[0].col, last[0].stop_col) == (chunk.col, chunk.stop_col)
        if alike and sum(one.n for one in last) + chunk.n <= size:
            last.append(chunk)
        else:
            stacks.append([chunk])
    return stacks


def _sampled_blocks(weight: Weight) -> list[Chunk]:
    return sampled_blocks(weight.shape, weight.block_size or (1, 1), IN_BLOCKS)


def _wanted(pair: Pair) -> Wanted:
    x, y = _dtypes(pair) if _is_copy(pair) else ("", "")
    return Wanted(pair.importance, pair.original.matrix_rows, cells_of(pair.quantized), least_normal(x, y))


def _is_copy(pair: Pair) -> bool:
    """Whether neither side is quantized."""
    return pair.original.encoding == pair.quantized.encoding == "floats"


def _dtypes(pair: Pair) -> tuple[str, str]:
    """Those of two sides of floats with the fewest digits."""
    x, y = (find_narrowest({entry.dtype for entry in side.parts.values()}) for side in (pair.original, pair.quantized))
    return x, y


def _is_kept(pair: Pair, chunk: Chunk) -> bool:
    """Whether a chunk is the whole of a pair that is so small that its values are kept."""
    return chunk.n == pair.original.n <= MOST_KEPT


def _fingerprint(entries: Iterable[Entry]) -> str:
    """Of bytes at the beginning, in the middle and at the end of each: other orders and signs have the same norm."""
    crc = 0
    for entry in entries:
        n = min(SAMPLED, entry.nbytes)
        for place in (0, (entry.nbytes - n) // 2, entry.nbytes - n):
            crc = crc32(entry.file.read(entry.offset + place, n), crc)
    return f"{crc:08x}"


def _scales(weight: Weight, workspace: Workspace) -> ScaleStatistics | None:
    if weight.scale is None:
        return None
    return ScaleStatistics.compute(iterate_scales(weight.scale, workspace))
