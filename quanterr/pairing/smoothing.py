"""Detection and reversal of scales that a quantizer moved from one weight into another, from the tensors alone.

AWQ, SmoothQuant and similar methods divide a norm (or the rows of the preceding weight) by s, and multiply the columns
of the weights that follow by s. The model computes the same as before, but each of these weights has other values.

    norm → weights      s is the ratio of the two norms, which all weights that follow share. It is undone if that
                        reduces their pooled error
    weight → weight     s is fitted to the rows of the first weight, and undone if that reduces the error of the second.
                        If each row of v feeds all heads of a group, s is repeated over these heads

Both may affect the same weight (up_proj, v_proj). So column factors are undone first, and judged by the error that
remains after fitting row factors.

Reference: Lin et al., AWQ (2023); Xiao et al., SmoothQuant (2022); casper-hansen/AutoAWQ@88e4c76b
awq/quantize/scale.py; vllm-project/llm-compressor@0.14 modifiers/awq/mappings.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import log10, sqrt
from typing import NamedTuple

from msgspec.structs import replace

from quanterr.formats import Weight
from quanterr.formats.reading import Reader
from quanterr.lazy_torch import Tensor, torch
from quanterr.pairing.model import FoldedScales, KeyHeads, Pair
from quanterr.pairing.names import FED_BY_NORM, FED_BY_WEIGHT, canonicalize
from quanterr.pairing.sampling import (
    error_up_to_factor,
    error_up_to_row_factors,
    fit_row_factors,
    relative_error,
)
from quanterr.pairing.views import scale_weight
from quanterr.tensors.chunks import CPU_CHUNK, Chunk, Cut

CAST_TOLERANCE = 0.01  # a smaller relative change of a norm may come from a cast
MIN_NORM_GAIN = 1.003  # a norm's factors must divide the pooled error by this: little, as nothing is fitted
MIN_FITTED_GAIN = 1.02  # fitted factors must divide the error of the next weight by this
MIN_LOSS_WITHOUT = 1 / 0.7  # if undoing multiplies its error by this, a weight does not have the factors
MAX_REMAINING_DEVIATION = 0.5  # a factor explains a deviation of the length if less than this share remains
MIN_ERROR = 1e-30  # smaller errors are not divided by
MIN_CORRELATION = 0.5  # minimum for factors that agree; that of 64 random factors is about 0.125
# A fold is sought if a row factor is off the median by more than so many standard errors plus this scatter.
MIN_STANDARD_ERRORS, MIN_SCATTER = 4.0, 0.02
# A row and the columns that it feeds have different factors if the logarithms differ by the first of these, and by this
# many standard errors. Only rows and columns with this many times the energy of their errors count: if steps of codes
# are as wide as the values, they bias the fit.
MIN_LOG_DIFFERENCE, MIN_DIFFERENCE_ERRORS, MIN_SIGNAL_ENERGY = 0.2, 6.0, 4.0
HEADS = (128, 64, 256, 96, 80, 32, 16)  # common numbers of rows per head

OF_VALUES = ("v_proj", "qkv_proj")  # weights whose last rows compute the values of attention heads

Places = Mapping[tuple[str, str], int]  # what names.canonicalize returns for a name → index of the pair


def undo_smoothing(
    pairs: Sequence[Pair], reader: Reader, key_heads: KeyHeads | None = None
) -> tuple[list[Pair], list[FoldedScales]]:
    """Return the pairs with folded scales moved back, and a description of each fold that was undone.

    Each head of keys and values feeds neighbouring heads of queries, so the declared ``key_heads`` determine which
    columns have the factors of a row. If a file has another order, factors are undone in the declared one, as runtimes
    compute in that.
    """
    undone = list(pairs)
    places = {canonicalize(pair.name): number for number, pair in enumerate(pairs)}
    folds = [*_undo_norms(undone, places, reader), *_undo_weights(undone, places, key_heads, reader)]
    return undone, [_measure(fold, pairs, undone, places, reader) for fold in folds]


def _measure(
    fold: FoldedScales, before: Sequence[Pair], after: Sequence[Pair], places: Places, reader: Reader
) -> FoldedScales:
    """Add the SNR of the fold's worst weight, as stored and with all factors undone."""
    errors = {}
    for name in fold.names:
        number = places[canonicalize(name)]
        stored, undone = (
            relative_error(pairs[number].original, pairs[number].quantized, reader) for pairs in (before, after)
        )
        errors[name] = stored, undone
    worst = max(errors, key=lambda name: errors[name])
    return replace(fold, worst=worst, before_db=_to_decibels(errors[worst][0]), after_db=_to_decibels(errors[worst][1]))


def _undo_norms(pairs: list[Pair], places: Places, reader: Reader) -> Iterator[FoldedScales]:
    changed = {}  # (block, pattern of the weights that the norm feeds) → the norm's name, factors to try
    for (path, ending), number in places.items():
        if ending or len(pairs[number].original.shape) != 1 or not pairs[number].original.n:
            continue
        block, _, word = path.rpartition(".")
        for norms, fed in FED_BY_NORM:
            if re.fullmatch(norms, word) and (factors := _find_norm_factors(pairs[number], reader)):
                changed[block, fed] = pairs[number].name, factors
    if not changed:
        return
    behind: dict[tuple[str, str], list[int]] = {}
    blocks = {block for block, _ in changed}
    for (path, ending), number in places.items():
        words = path.split(".")
        for block in {".".join(words[:n]) for n in range(1, len(words))} & blocks if not ending else ():
            for _, fed in FED_BY_NORM:
                if re.fullmatch(fed, path.removeprefix(block + ".")):
                    behind.setdefault((block, fed), []).append(number)
    for place, (name, candidates) in changed.items():
        yield from _undo_columns(pairs, name, behind.get(place, []), candidates, places, reader)


def _find_norm_factors(norm: Pair, reader: Reader) -> list[Tensor] | None:
    """Return the ratios norm_q / norm, and (1 + norm_q) / (1 + norm) for norms that are stored minus 1, or None."""
    whole = Chunk(0, 1, 0, norm.original.n)
    x, y = (side[0].float() for side in reader.read_both((norm.original, norm.quantized), whole))
    ratio = torch.where((x == 0) & (y == 0), 1.0, y / x)
    if bool(((ratio - 1).abs() <= CAST_TOLERANCE).all()):
        return None
    candidates = [factors for factors in (ratio, (1 + y) / (1 + x)) if _are_factors(factors)]
    return candidates or None


def _are_factors(factors: Tensor) -> bool:
    return bool((factors.isfinite() & (factors > 0)).all())


def _undo_columns(
    pairs: list[Pair],
    source: str,
    numbers: Sequence[int],
    candidates: Sequence[Tensor],
    places: Places,
    reader: Reader,
) -> Iterator[FoldedScales]:
    """Undo the factors in the columns of the weights that a norm feeds, if that reduces their pooled error."""
    stored = {number: pairs[number].quantized for number in numbers}
    before = {n: error_up_to_row_factors(pairs[n].original, weight, reader) for n, weight in stored.items()}
    for factors in candidates:
        columns = {n: scale_weight(w, factors, 1) for n, w in stored.items() if w.matrix[1] == len(factors)}
        after = {n: error_up_to_row_factors(pairs[n].original, weight, reader) for n, weight in columns.items()}
        having = [n for n in columns if after[n] < MIN_LOSS_WITHOUT * before[n]]
        if not having:
            continue
        gained = _pool_errors(before, having) / max(_pool_errors(after, having), MIN_ERROR)
        of_length = gained * MIN_FITTED_GAIN > 1 and abs(float(factors.median()) - 1) > CAST_TOLERANCE
        if gained < MIN_NORM_GAIN and not (of_length and _is_nearer(pairs, columns, reader)):
            continue
        for n in having:
            pairs[n] = replace(pairs[n], quantized=_add_evidence(columns[n], source))
        without = tuple(pairs[n].name for n in columns if n not in having)
        fold = FoldedScales(source, tuple(pairs[n].name for n in having), without=without)
        yield _undo_bias(fold, pairs, places, factors, reader)
        return


def _is_nearer(pairs: Sequence[Pair], undone: Mapping[int, Weight], reader: Reader) -> bool:
    """Return whether a weight's norm is right once nearly constant factors are undone; row factors would hide them."""
    for n, weight in undone.items():
        stored, mended = (
            fit_row_factors(pairs[n].original, quantized, reader)[0].median()
            for quantized in (pairs[n].quantized, weight)
        )
        if float((mended - 1).abs()) < MAX_REMAINING_DEVIATION * float((stored - 1).abs()):
            return True
    return False


def _pool_errors(errors: Mapping[int, float], numbers: Sequence[int]) -> float:
    return sqrt(sum(errors[number] ** 2 for number in numbers))


def _undo_weights(
    pairs: list[Pair], places: Places, key_heads: KeyHeads | None, reader: Reader
) -> Iterator[FoldedScales]:
    for path, ending in places:
        block, _, word = path.rpartition(".")
        following = [places.get((f"{block}.{other}", "")) for other in FED_BY_WEIGHT.get(word, ()) if not ending]
        behind = next((number for number in following if number is not None), None)
        if behind is None:
            continue
        number = places[path, ending]
        if _have_row_factors(pairs[number], reader):
            heads = key_heads if word in OF_VALUES else None
            yield from _undo_between(pairs, number, behind, heads, places, reader)


def _undo_between(
    pairs: list[Pair], number: int, behind: int, heads: KeyHeads | None, places: Places, reader: Reader
) -> Iterator[FoldedScales]:
    """Undo factors in the rows of one weight and the columns of the next, if that reduces the next weight's error."""
    first, second = pairs[number], pairs[behind]
    rows, cols = first.original.matrix[0], second.original.matrix[1]
    fitted = _fit_factors(first, 1, reader)
    before = error_up_to_factor(second.original, second.quantized, reader)  # 2-bit codes shrink a weight
    errors, declared = {}, _find_declared_layout(heads, rows, cols)
    for head in dict.fromkeys((*([declared] if declared else []), *_list_head_layouts(rows, cols))):
        columns = scale_weight(second.quantized, _repeat_factors(fitted.factors, head), 1)
        errors[head] = error_up_to_factor(second.original, columns, reader)
    best = min(errors, key=lambda head: errors[head], default=None)
    if best is None or not errors[best] * MIN_FITTED_GAIN <= before:
        return
    of_columns = _fit_factors(second, 0, reader)
    if not _agree(fitted, of_columns, best):
        return
    is_misplaced = declared is not None and errors[best] * MIN_FITTED_GAIN <= errors[declared]
    factors = fitted.factors if is_misplaced else _combine_factors(fitted, of_columns, declared or best)
    best = declared or best
    columns = scale_weight(second.quantized, _repeat_factors(factors, best), 1)
    pairs[number] = replace(first, quantized=_add_evidence(scale_weight(first.quantized, 1 / factors, 0), second.name))
    pairs[behind] = replace(second, quantized=_add_evidence(columns, first.name))
    misplaced = second.name if is_misplaced else ""
    unlike = () if is_misplaced else tuple(_find_unlike(fitted, of_columns, best, (cols, second.original.matrix[0])))
    fold = FoldedScales(first.name, (first.name, second.name), misplaced=misplaced, unlike=unlike)
    yield _undo_bias(fold, pairs, places, factors, reader)


def _undo_bias(fold: FoldedScales, pairs: list[Pair], places: Places, factors: Tensor, reader: Reader) -> FoldedScales:
    """Undo the factors in the bias of the fold's source as well, or record that the bias lacks them."""
    number = places.get((canonicalize(fold.source)[0], ".bias"))
    if number is None or pairs[number].original.n != len(factors):
        return fold
    bias = pairs[number]
    undone = scale_weight(bias.quantized, 1 / factors, 1)
    before, after = (relative_error(bias.original, weight, reader) for weight in (bias.quantized, undone))
    if after < before:
        pairs[number] = replace(bias, quantized=_add_evidence(undone, fold.source))
        return replace(fold, names=(*fold.names, bias.name))
    return replace(fold, bias=bias.name) if after > MIN_LOSS_WITHOUT * before + CAST_TOLERANCE else fold


class FittedFactors(NamedTuple):
    """Fitted factors of rows or columns, float64, and the certainty of each: its inverse relative variance."""

    factors: Tensor
    certainty: Tensor


class HeadLayout(NamedTuple):
    """The way the last ``n`` rows of a weight feed the next: each head, of ``rows`` rows, feeds ``repeats`` heads."""

    n: int
    rows: int
    repeats: int


def _find_declared_layout(heads: KeyHeads | None, rows: int, cols: int) -> HeadLayout | None:
    """Return how rows of values feed the next weight, as declared; None if the weights do not fit the declaration."""
    n = heads.number * heads.size if heads else 0
    return HeadLayout(n, heads.size, cols // n) if heads and rows in (n, cols + 2 * n) and cols % n == 0 else None


def _list_head_layouts(rows: int, cols: int) -> Iterator[HeadLayout]:
    """Yield the ways in which the rows of a weight may feed the columns of the next.

    All rows may feed them, or only the rows of v in fused q, k and v, or of up in fused gate and up; each head may feed
    a group of heads.
    """
    for n in dict.fromkeys((rows, (rows - cols) // 2 if rows > cols else rows, cols)):
        if n == cols and n <= rows:
            yield HeadLayout(n, n, 1)
        elif 0 < n <= rows and cols % n == 0:
            yield from (HeadLayout(n, size, cols // n) for size in HEADS if n % size == 0)


def _repeat_factors(factors: Tensor, head: HeadLayout) -> Tensor:
    """Repeat the factors of rows for the columns that they feed."""
    return factors[-head.n :].view(-1, 1, head.rows).expand(-1, head.repeats, -1).reshape(-1)


def _agree(of_rows: FittedFactors, of_columns: FittedFactors, head: HeadLayout) -> bool:
    """Return whether the factors of rows correlate with the factors of the columns they feed, unlike mere rounding."""
    columns = -of_columns.factors.view(-1, head.repeats, head.rows).log().mean(1).view(-1)
    both = torch.stack((of_rows.factors[-head.n :].log(), columns))
    return float(both.corrcoef()[0, 1].nan_to_num(0.0)) > MIN_CORRELATION


def _find_unlike(
    of_rows: FittedFactors, of_columns: FittedFactors, head: HeadLayout, lengths: tuple[int, int]
) -> list[int]:
    """Return the rows whose factor differs from that of the columns they feed; ``lengths`` are of rows and columns.

    Rows and columns most of whose values are rounded to zero are left out, as their factors cannot be fitted.
    """
    factors, certainty = (values.view(-1, head.repeats, head.rows) for values in of_columns)
    row_factors, row_certainty = (values[-head.n :].view(-1, 1, head.rows) for values in of_rows)
    shown = (row_certainty > MIN_SIGNAL_ENERGY * lengths[0]) & (certainty > MIN_SIGNAL_ENERGY * lengths[1])
    if not bool(shown.any()):
        return []
    apart = row_factors.log() + factors.log()
    apart -= apart[shown].median()
    unlike = shown & (
        apart.abs() > MIN_LOG_DIFFERENCE + MIN_DIFFERENCE_ERRORS * (1 / row_certainty + 1 / certainty).sqrt()
    )
    rows: list[int] = (unlike.any(1).view(-1).nonzero()[:, 0] + len(of_rows.factors) - head.n).tolist()
    return rows


def _combine_factors(of_rows: FittedFactors, of_columns: FittedFactors, head: HeadLayout) -> Tensor:
    """Average the logarithms of the factors of rows and of the columns they feed, 1 / s, weighted by certainty.

    Rows that feed no column get the factor 1.
    """
    shape = -1, head.repeats, head.rows
    factors, certainty = (values.view(shape) for values in of_columns)
    weighted = -(factors.log() * certainty).nan_to_num(0.0, 0.0, 0.0).sum(1).view(-1)
    row_factors, row_certainty = (values[-head.n :] for values in of_rows)
    shown = ((row_factors.log() * row_certainty + weighted) / (row_certainty + certainty.sum(1).view(-1))).exp()
    combined = torch.ones_like(of_rows.factors)
    combined[-head.n :] = torch.where(shown.isfinite() & (shown > 0), shown, row_factors)
    return combined


def _have_row_factors(pair: Pair, reader: Reader) -> bool:
    """Return whether the row factors of a sample vary more than rounding explains."""
    factors, doubt = fit_row_factors(pair.original, pair.quantized, reader)
    if not len(factors) or not _are_factors(factors):
        return False
    return float((factors / factors.median() - 1).abs().max()) > MIN_STANDARD_ERRORS * doubt + MIN_SCATTER


def _fit_factors(pair: Pair, dim: int, reader: Reader) -> FittedFactors:
    """Fit the factors that map x to y, for rows (``dim`` 1, the summed dimension) or columns (``dim`` 0)."""
    n, of = pair.original.matrix[1 - dim], pair.original.matrix[dim]
    xx, xy, yy = torch.zeros(3, n, dtype=torch.float64)
    for chunk in Cut(*pair.original.matrix, CPU_CHUNK):
        x, y = (side.double() for side in reader.read_both((pair.original, pair.quantized), chunk))
        part = slice(chunk.row, chunk.stop_row) if dim else slice(chunk.col, chunk.stop_col)
        for sums, product in ((xx, x * x), (xy, x * y), (yy, y * y)):
            sums[part] += product.sum(dim)
    factors = xy / xx
    certain = of * xy * xy / (xx * yy - xy * xy).clamp_(1e-12 * xx * yy)
    known = factors.isfinite() & (factors > 0)
    return FittedFactors(torch.where(known, factors, 1.0), torch.where(known, certain, 0.0))


def _add_evidence(weight: Weight, source: str) -> Weight:
    return replace(weight, evidence=(*weight.evidence, f"scales folded into {source} were undone"))


def _to_decibels(error: float) -> float:
    return -20 * log10(error) if error else 400.0
