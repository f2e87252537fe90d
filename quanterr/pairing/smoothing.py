"""Scales that a quantizer moved from one weight into another, inferred from the tensors and undone.

AWQ, SmoothQuant and their kin divide a norm (or the rows of the weight before) by s and multiply the columns
of the weights behind it by s: the model is the same, each weight is not. With s read off the two norms,

    W_q ≈ W · diag(s)    and    W_q · diag(norm_q / norm)  is what belongs beside W

Done only where that brings the weights much closer on a sample; the factors and both errors are reported.

Reference: Lin et al., AWQ (2023); Xiao et al., SmoothQuant (2022); casper-hansen/AutoAWQ@88e4c76b
awq/quantize/scale.py.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log10

import torch
from torch import Tensor

from quanterr.formats import Weight
from quanterr.pairing.names import FED_BY_NORM, FED_BY_WEIGHT, canonical
from quanterr.pairing.plan import Folded, Pair
from quanterr.pairing.sampling import SUSPICIOUS, Bar, Workspaces, nearest, relative_error
from quanterr.pairing.views import scaled
from quanterr.tensors.chunks import CPU_CHUNK, Chunk, Cut
from quanterr.tensors.workspace import Workspace

UNDONE = Bar(-1.0, 1 / 0.7)  # how much nearer a weight must come for its factors to be undone
CAST = 0.01  # a norm that was only cast changes by less


def undo_smoothing(pairs: Sequence[Pair], workspaces: Workspaces) -> tuple[list[Pair], list[Folded]]:
    """The pairs, those whose scales were folded away with that undone, and what was undone."""
    undone = list(pairs)
    places = {canonical(pair.name): number for number, pair in enumerate(pairs)}
    folded = [*_out_of_norms(undone, places, workspaces), *_out_of_weights(undone, places, workspaces)]
    return undone, folded


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
        scaled_back = [scaled(pair.quantized, f, 1) for f in candidates if len(f) == pair.quantized.matrix[1]]
        others = [(pair.original, weight) for weight in scaled_back]
        choice = nearest((pair.original, pair.quantized), others, UNDONE, workspaces)
        if choice.number is not None:
            pairs[number] = replace(pair, quantized=_with_evidence(scaled_back[choice.number], source))
            names.append(pair.name)
            before, after = max(before, choice.first), max(after, choice.least)
        elif others and UNDONE.is_met(choice.least, choice.first):
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
            if any(relative_error(pair.original, pair.quantized, workspaces) <= SUSPICIOUS for pair in (first, second)):
                continue
            factors = _row_norms(first.quantized, workspaces[1]) / _row_norms(first.original, workspaces[0])
            if not bool((factors.isfinite() & (factors > 0)).all()):
                continue
            scaled_back = scaled(first.quantized, 1 / factors, 0), scaled(second.quantized, factors, 1)
            choices = [
                nearest((pair.original, pair.quantized), [(pair.original, weight)], UNDONE, workspaces)
                for pair, weight in zip((first, second), scaled_back, strict=True)
            ]
            if all(choice.number is not None for choice in choices):
                pairs[places[path, kind]] = replace(first, quantized=_with_evidence(scaled_back[0], second.name))
                pairs[behind] = replace(second, quantized=_with_evidence(scaled_back[1], first.name))
                before, after = max(choice.first for choice in choices), max(choice.least for choice in choices)
                yield Folded(first.name, (first.name, second.name), _db(before), _db(after))


def _row_norms(weight: Weight, workspace: Workspace) -> Tensor:
    """Euclidean norms of the rows, (rows,) float32."""
    rows, cols = weight.matrix
    squares = torch.zeros(rows, dtype=torch.float64)
    for chunk in Cut(rows, cols, CPU_CHUNK):
        values = weight.dequantize(chunk, workspace).weight
        squares[chunk.row : chunk.stop_row] += (values * values).sum(1, dtype=torch.float64)
    return squares.sqrt().float()


def _with_evidence(weight: Weight, source: str) -> Weight:
    return replace(weight, evidence=(*weight.evidence, f"scales folded into {source} were undone"))


def _db(error: float) -> float:
    return -20 * log10(error) if error else 400.0
