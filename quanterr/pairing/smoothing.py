"""Scales that a quantizer moved from one weight into another, inferred from the tensors and undone.

AWQ, SmoothQuant and their kin divide a norm (or the rows of the weight before) by s and multiply the columns
of the weights behind it by s: the model is the same, each weight is not.

    norm → weights      s is the ratio of the two norms, exact for all weights behind it. Their error with and without s
                        decides, all of them together
    weight → weight     s is fitted to the rows of the first, and the columns of the second decide. Where each row of v
                        feeds the heads of a group, s is repeated over them

Both may meet in one weight (up_proj, v_proj). Columns are therefore judged by what no factor of a row can mend, and
undone first.

Reference: Lin et al., AWQ (2023); Xiao et al., SmoothQuant (2022); casper-hansen/AutoAWQ@88e4c76b
awq/quantize/scale.py; vllm-project/llm-compressor@0.14 modifiers/awq/mappings.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import log10, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.formats import Weight
from quanterr.pairing.names import FED_BY_NORM, FED_BY_WEIGHT, canonical
from quanterr.pairing.plan import Folded, Pair
from quanterr.pairing.sampling import (
    Workspaces,
    error_beside_factor,
    error_beside_row_factors,
    relative_error,
    sampled_row_factors,
)
from quanterr.pairing.views import scaled
from quanterr.tensors.chunks import CPU_CHUNK, Chunk, Cut

CAST = 0.01  # a norm that was only cast changes by less
EXACTLY = 1.003  # times that the factors of a norm must bring weights nearer, all of them together: nothing is fitted
NEARER = 1.02  # times that fitted factors must bring the next weight nearer
CLEARLY = 1 / 0.7  # times nearer without them: a weight that lacks the factors of the others
LENGTH = 0.5  # of what a length is off by: a factor explains it
LEAST = 1e-30  # of an error
AGREEING = 0.5  # of a correlation: by chance that of 64 factors is 0.125
DOUBTS, SCATTER = 4.0, 0.02  # from the median of rows' factors: standard errors, and beyond; of less no fold is sought
HEADS = (128, 64, 256, 96, 80, 32, 16)  # rows of a head

Places = Mapping[tuple[str, str], int]  # path and kind, as names.canonical gives them → number of the pair


def undo_smoothing(pairs: Sequence[Pair], workspaces: Workspaces) -> tuple[list[Pair], list[Folded]]:
    """The pairs, those whose scales were folded away with that undone, and what was undone."""
    undone = list(pairs)
    places = {canonical(pair.name): number for number, pair in enumerate(pairs)}
    found = [*_out_of_norms(undone, places, workspaces), *_out_of_weights(undone, places, workspaces)]
    return undone, [_measured(one, pairs, undone, places, workspaces) for one in found]


def _measured(
    found: Folded, before: Sequence[Pair], after: Sequence[Pair], places: Places, workspaces: Workspaces
) -> Folded:
    """The same with the error of the worst of its weights, as stored and with all factors undone."""
    errors = {}
    for name in found.names:
        number = places[canonical(name)]
        stored, undone = (
            relative_error(pairs[number].original, pairs[number].quantized, workspaces) for pairs in (before, after)
        )
        errors[name] = stored, undone
    worst = max(errors, key=lambda name: errors[name])
    return replace(found, worst=worst, before_db=_db(errors[worst][0]), after_db=_db(errors[worst][1]))


def _out_of_norms(pairs: list[Pair], places: Places, workspaces: Workspaces) -> Iterator[Folded]:
    changed = {}  # (block, pattern of what the norm feeds) → the norm, its factors
    for (path, kind), number in places.items():
        if kind or len(pairs[number].original.shape) != 1 or not pairs[number].original.n:
            continue
        block, _, word = path.rpartition(".")
        for norms, fed in FED_BY_NORM:
            if re.fullmatch(norms, word) and (factors := _norm_factors(pairs[number], workspaces)):
                changed[block, fed] = pairs[number].name, factors
    behind: dict[tuple[str, str], list[int]] = {}
    blocks = {block for block, _ in changed}
    for (path, kind), number in places.items():
        words = path.split(".")
        for block in {".".join(words[:n]) for n in range(1, len(words))} & blocks if not kind else ():
            for _, fed in FED_BY_NORM:
                if re.fullmatch(fed, path.removeprefix(block + ".")):
                    behind.setdefault((block, fed), []).append(number)
    for place, (name, candidates) in changed.items():
        yield from _undone(pairs, name, behind.get(place, []), candidates, places, workspaces)


def _norm_factors(norm: Pair, workspaces: Workspaces) -> list[Tensor] | None:
    """norm_q / norm, and the same of norms that are stored less one; None where it was not changed."""
    whole = Chunk(0, 1, 0, norm.original.n)
    x = norm.original.dequantize(whole, workspaces[0]).weight[0].float()
    y = norm.quantized.dequantize(whole, workspaces[1]).weight[0].float()
    ratio = torch.where((x == 0) & (y == 0), 1.0, y / x)
    if bool(((ratio - 1).abs() <= CAST).all()):
        return None
    found = [factors for factors in (ratio, (1 + y) / (1 + x)) if _are_factors(factors)]
    return found or None


def _are_factors(factors: Tensor) -> bool:
    return bool((factors.isfinite() & (factors > 0)).all())


def _undone(
    pairs: list[Pair],
    source: str,
    numbers: Sequence[int],
    candidates: Sequence[Tensor],
    places: Places,
    workspaces: Workspaces,
) -> Iterator[Folded]:
    """Undo the factors in the columns of what a norm feeds, if all of that together comes nearer by it."""
    stored = {number: pairs[number].quantized for number in numbers}
    before = {n: error_beside_row_factors(pairs[n].original, weight, workspaces) for n, weight in stored.items()}
    for factors in candidates:
        columns = {n: scaled(w, factors, 1) for n, w in stored.items() if w.matrix[1] == len(factors)}
        after = {n: error_beside_row_factors(pairs[n].original, weight, workspaces) for n, weight in columns.items()}
        having = [n for n in columns if after[n] < CLEARLY * before[n]]
        if not having:
            continue
        gained = _pooled(before, having) / max(_pooled(after, having), LEAST)
        of_length = gained * NEARER > 1 and abs(float(factors.median()) - 1) > CAST
        if gained < EXACTLY and not (of_length and _is_nearer(pairs, columns, workspaces)):
            continue
        for n in having:
            pairs[n] = replace(pairs[n], quantized=_with_evidence(columns[n], source))
        without = tuple(pairs[n].name for n in columns if n not in having)
        found = Folded(source, tuple(pairs[n].name for n in having), without=without)
        yield _with_bias(found, pairs, places, factors, workspaces)
        return


def _is_nearer(pairs: Sequence[Pair], undone: Mapping[int, Weight], workspaces: Workspaces) -> bool:
    """Whether factors that are nearly one number, which those of rows would take up, give a weight its length again."""
    for n, weight in undone.items():
        stored, mended = (
            sampled_row_factors(pairs[n].original, one, workspaces)[0].median() for one in (pairs[n].quantized, weight)
        )
        if float((mended - 1).abs()) < LENGTH * float((stored - 1).abs()):
            return True
    return False


def _pooled(errors: Mapping[int, float], numbers: Sequence[int]) -> float:
    return sqrt(sum(errors[number] ** 2 for number in numbers))


def _out_of_weights(pairs: list[Pair], places: Places, workspaces: Workspaces) -> Iterator[Folded]:
    for path, kind in places:
        block, _, word = path.rpartition(".")
        following = [places.get((f"{block}.{other}", "")) for other in FED_BY_WEIGHT.get(word, ()) if not kind]
        behind = next((number for number in following if number is not None), None)
        if behind is None:
            continue
        number = places[path, kind]
        if _have_row_factors(pairs[number], workspaces):
            yield from _undone_between(pairs, number, behind, places, workspaces)


def _undone_between(
    pairs: list[Pair], number: int, behind: int, places: Places, workspaces: Workspaces
) -> Iterator[Folded]:
    """Undo factors of the rows of one weight there, and in the columns of the next, if these come nearer by it."""
    first, second = pairs[number], pairs[behind]
    rows, cols = first.original.matrix[0], second.original.matrix[1]
    fitted = _fitted(first, 1, workspaces)
    before = error_beside_factor(second.original, second.quantized, workspaces)  # codes of 2 bits are too small
    errors = {}
    for head in _heads(rows, cols):
        columns = scaled(second.quantized, _repeated(fitted.factors, head), 1)
        errors[head] = error_beside_factor(second.original, columns, workspaces)
    best = min(errors, key=lambda head: errors[head], default=None)
    if best is None or not errors[best] * NEARER <= before:
        return
    of_columns = _fitted(second, 0, workspaces)
    if not _agree(fitted, of_columns, best):
        return
    factors = _together(fitted, of_columns, best)
    columns = scaled(second.quantized, _repeated(factors, best), 1)
    pairs[number] = replace(first, quantized=_with_evidence(scaled(first.quantized, 1 / factors, 0), second.name))
    pairs[behind] = replace(second, quantized=_with_evidence(columns, first.name))
    yield _with_bias(Folded(first.name, (first.name, second.name)), pairs, places, factors, workspaces)


def _with_bias(found: Folded, pairs: list[Pair], places: Places, factors: Tensor, workspaces: Workspaces) -> Folded:
    """A fold with the bias of its source, which has the factors as well: undone there, or told where it lacks them."""
    number = places.get((canonical(found.source)[0], ".bias"))
    if number is None or pairs[number].original.n != len(factors):
        return found
    bias = pairs[number]
    undone = scaled(bias.quantized, 1 / factors, 1)
    before, after = (relative_error(bias.original, weight, workspaces) for weight in (bias.quantized, undone))
    if after < before:
        pairs[number] = replace(bias, quantized=_with_evidence(undone, found.source))
        return replace(found, names=(*found.names, bias.name))
    return replace(found, bias=bias.name) if after > CLEARLY * before + CAST else found


class Fitted(NamedTuple):
    """Factors of rows or columns, float64, and how certain each is: the inverse of its relative variance."""

    factors: Tensor
    certainty: Tensor


class Head(NamedTuple):
    """How the last ``n`` rows of a weight feed columns of the next: ``rows`` of a head those of ``repeats`` heads."""

    n: int
    rows: int
    repeats: int


def _heads(rows: int, cols: int) -> Iterator[Head]:
    """How so many rows may feed so many columns: all of them; as v of q, k and v, or up of gate and up; by groups."""
    for n in dict.fromkeys((rows, (rows - cols) // 2 if rows > cols else rows, cols)):
        if n == cols and n <= rows:
            yield Head(n, n, 1)
        elif 0 < n <= rows and cols % n == 0:
            yield from (Head(n, size, cols // n) for size in HEADS if n % size == 0)


def _repeated(factors: Tensor, head: Head) -> Tensor:
    """Factors of rows, as those of the columns that they feed."""
    return factors[-head.n :].view(-1, 1, head.rows).expand(-1, head.repeats, -1).reshape(-1)


def _agree(of_rows: Fitted, of_columns: Fitted, head: Head) -> bool:
    """Whether rows and the columns behind them tell of the same factors, and not each of its own rounding."""
    columns = -of_columns.factors.view(-1, head.repeats, head.rows).log().mean(1).view(-1)
    both = torch.stack((of_rows.factors[-head.n :].log(), columns))
    return float(both.corrcoef()[0, 1].nan_to_num(0.0)) > AGREEING


def _together(of_rows: Fitted, of_columns: Fitted, head: Head) -> Tensor:
    """The factors that rows and the columns behind them show together, each as certain as it is; columns have 1 / s.

    Rows that feed no column have none: 1.
    """
    shape = -1, head.repeats, head.rows
    factors, certainty = (values.view(shape) for values in of_columns)
    weighted = -(factors.log() * certainty).nan_to_num(0.0, 0.0, 0.0).sum(1).view(-1)
    own, own_certainty = (values[-head.n :] for values in of_rows)
    shown = ((own.log() * own_certainty + weighted) / (own_certainty + certainty.sum(1).view(-1))).exp()
    found = torch.ones_like(of_rows.factors)
    found[-head.n :] = torch.where(shown.isfinite() & (shown > 0), shown, own)
    return found


def _have_row_factors(pair: Pair, workspaces: Workspaces) -> bool:
    """Whether a few rows scatter around the original's by more than rounding explains."""
    factors, doubt = sampled_row_factors(pair.original, pair.quantized, workspaces)
    if not len(factors) or not _are_factors(factors):
        return False
    return float((factors / factors.median() - 1).abs().max()) > DOUBTS * doubt + SCATTER


def _fitted(pair: Pair, dim: int, workspaces: Workspaces) -> Fitted:
    """The factors of rows (``dim`` 1 is summed up) or columns (0) that bring the original nearest."""
    n, of = pair.original.matrix[1 - dim], pair.original.matrix[dim]
    xx, xy, yy = torch.zeros(3, n, dtype=torch.float64)
    for chunk in Cut(*pair.original.matrix, CPU_CHUNK):
        x = pair.original.dequantize(chunk, workspaces[0]).weight.double()
        y = pair.quantized.dequantize(chunk, workspaces[1]).weight.double()
        own = slice(chunk.row, chunk.stop_row) if dim else slice(chunk.col, chunk.stop_col)
        for sums, product in ((xx, x * x), (xy, x * y), (yy, y * y)):
            sums[own] += product.sum(dim)
    factors = xy / xx
    certain = of * xy * xy / (xx * yy - xy * xy).clamp_(1e-12 * xx * yy)
    known = factors.isfinite() & (factors > 0)
    return Fitted(torch.where(known, factors, 1.0), torch.where(known, certain, 0.0))


def _with_evidence(weight: Weight, source: str) -> Weight:
    return replace(weight, evidence=(*weight.evidence, f"scales folded into {source} were undone"))


def _db(error: float) -> float:
    return -20 * log10(error) if error else 400.0
