"""Scales that a quantizer moved from one weight into another, told from the tensors and undone.

AWQ, SmoothQuant and their kin divide a norm (or the rows of the weight before) by s and multiply the columns
of the weights behind it by s: the model is the same, each weight is not. With s read off the two norms,

    W_q ≈ W · diag(s)    and    W_q · diag(norm_q / norm)  is what belongs beside W

Done only where that brings the weights much closer on a sample; the factors and both errors are told.

Reference: Lin et al., AWQ (2023); Xiao et al., SmoothQuant (2022); casper-hansen/AutoAWQ
awq/quantize/scale.py.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log10

import torch
from torch import Tensor

from quanterr.formats import Weight
from quanterr.pairing.names import FED_BY_NORM, FED_BY_WEIGHT, canonical
from quanterr.pairing.plan import Pair
from quanterr.pairing.sampling import SUSPICIOUS, Workspaces, on_cpu, relative_error
from quanterr.pairing.views import scaled
from quanterr.tensors.chunks import CPU_CHUNK, Chunk, Cut
from quanterr.tensors.workspace import Workspace

MUCH = 0.7  # of the error before: above it nothing is undone
CAST = 0.01  # a norm that was only cast changes by less


@dataclass(frozen=True, slots=True)
class Folded:
    """Factors that moved from weights into what comes before them."""

    source: str  # name of the norm or weight that took them up
    names: tuple[str, ...]  # of the weights
    before_db: float  # SNR on a sample, the worst of them, as stored
    after_db: float  # the same with the factors undone
    without: tuple[str, ...] = ()  # names of weights that should have the factors as well, and clearly do not


def undo_smoothing(pairs: list[Pair]) -> list[Folded]:
    """Replace, in place, the quantized weights whose scales were folded away, by what they stand for."""
    places = {canonical(pair.name): number for number, pair in enumerate(pairs)}
    with on_cpu() as workspaces:
        return [*_out_of_norms(pairs, places, workspaces), *_out_of_weights(pairs, places, workspaces)]


def _out_of_norms(pairs: list[Pair], places: dict[tuple[str, str], int], workspaces: Workspaces) -> Iterator[Folded]:
    changed = {}  # (block, pattern of what the norm feeds) → the norm, its factors
    for (path, kind), number in places.items():
        block, _, word = path.rpartition(".")
        for norms, fed in FED_BY_NORM:
            if not kind and re.fullmatch(norms, word) and (factors := _norm_factors(pairs[number], workspaces)):
                changed[block, fed] = pairs[number].name, factors
    behind: dict[tuple[str, str], list[int]] = {}
    blocks = {block for block, _ in changed}
    for (path, kind), number in places.items():
        words = path.split(".")
        for block in {".".join(words[:n]) for n in range(1, len(words))} & blocks if not kind else ():
            for _, fed in FED_BY_NORM:
                if re.fullmatch(fed, path.removeprefix(block + ".")):
                    behind.setdefault((block, fed), []).append(number)
    for place, (name, factors) in changed.items():
        yield from _undone(pairs, name, behind.get(place, []), factors, workspaces)


def _norm_factors(norm: Pair, workspaces: Workspaces) -> list[Tensor] | None:
    """norm_q / norm, and the same of norms that are stored less one; None where it was not changed."""
    if len(norm.original.shape) != 1 or not norm.original.n:
        return None
    whole = Chunk(0, 1, 0, norm.original.n)
    x = norm.original.dequantize(whole, workspaces[0]).weight[0].float()
    y = norm.quantized.dequantize(whole, workspaces[1]).weight[0].float()
    ratio = y / x
    if bool(((ratio - 1).abs() <= CAST).all()):
        return None
    found = [factors for factors in (ratio, (1 + y) / (1 + x)) if bool((factors.isfinite() & (factors > 0)).all())]
    return found or None


def _undone(
    pairs: list[Pair], source: str, numbers: list[int], candidates: list[Tensor], workspaces: Workspaces
) -> Iterator[Folded]:
    """Undo the factors in the columns of those pairs that come closer by it."""
    names, without, before, after = [], [], 0.0, 0.0
    for number in numbers:
        pair = pairs[number]
        raw = relative_error(pair.original, pair.quantized, workspaces)
        mended = [
            scaled(pair.quantized, factors, 1) for factors in candidates if len(factors) == pair.quantized.matrix[1]
        ]
        errors = [relative_error(pair.original, weight, workspaces) for weight in mended]
        if mended and min(errors) < MUCH * raw:
            best = mended[errors.index(min(errors))]
            pairs[number] = replace(pair, quantized=_told(best, source))
            names.append(pair.name)
            before, after = max(before, raw), max(after, min(errors))
        elif mended and raw < MUCH * min(errors):
            without.append(pair.name)
    if names:
        yield Folded(source, tuple(names), _db(before), _db(after), tuple(without))


def _out_of_weights(pairs: list[Pair], places: dict[tuple[str, str], int], workspaces: Workspaces) -> Iterator[Folded]:
    for path, kind in places:
        for producer, consumer in FED_BY_WEIGHT:
            behind = places.get((path.removesuffix(producer) + consumer, ""))
            if kind or not path.endswith("." + producer) or behind is None:
                continue
            first, second = pairs[places[path, kind]], pairs[behind]
            if first.original.matrix[0] != second.original.matrix[1]:
                continue
            before = [relative_error(pair.original, pair.quantized, workspaces) for pair in (first, second)]
            if min(before) <= SUSPICIOUS:
                continue
            factors = _row_norms(first.quantized, workspaces[1]) / _row_norms(first.original, workspaces[0])
            if not bool((factors.isfinite() & (factors > 0)).all()):
                continue
            mended = scaled(first.quantized, 1 / factors, 0), scaled(second.quantized, factors, 1)
            after = [
                relative_error(pair.original, weight, workspaces)
                for pair, weight in zip((first, second), mended, strict=True)
            ]
            if all(new < MUCH * old for new, old in zip(after, before, strict=True)):
                pairs[places[path, kind]] = replace(first, quantized=_told(mended[0], second.name))
                pairs[behind] = replace(second, quantized=_told(mended[1], first.name))
                yield Folded(first.name, (first.name, second.name), _db(max(before)), _db(max(after)))


def _row_norms(weight: Weight, workspace: Workspace) -> Tensor:
    """Euclidean norms of the rows, (rows,) float32."""
    rows, cols = weight.matrix
    squares = torch.zeros(rows, dtype=torch.float64)
    for chunk in Cut(rows, cols, CPU_CHUNK):
        values = weight.dequantize(chunk, workspace).weight
        squares[chunk.row : chunk.stop_row] += (values * values).sum(1, dtype=torch.float64)
    return squares.sqrt().float()


def _told(weight: Weight, source: str) -> Weight:
    return replace(weight, evidence=(*weight.evidence, f"scales folded into {source} were undone"))


def _db(error: float) -> float:
    return -20 * log10(error) if error else 400.0
