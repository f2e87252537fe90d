"""Findings about all weights together: a common factor, outliers of a group, norms, unquantized tensors."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import inf, log
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from quanterr.documents.base import Finding
from quanterr.findings.checks import LAST, RESULT, WEIGHTS, check
from quanterr.findings.codes import make_finding
from quanterr.findings.error_figures import EXACT_DB, Figures
from quanterr.findings.explanations import NEAR, UNDERFLOWS
from quanterr.findings.factors import explain_factor
from quanterr.findings.limits import ALIGNED_COSINE, BIT_DB, CHANCE_DEVIATIONS, FACTOR_TOLERANCE, FINE_DB, MIN_PEERS
from quanterr.formats import find_rows
from quanterr.formats.reading import Reader
from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.metrics.sums import Sums, as_float
from quanterr.pairing.model import Pair, Pairing
from quanterr.pairing.names import canonicalize
from quanterr.selection.roles import role_of
from quanterr.tensors.casts import Copy
from quanterr.tensors.in_memory import is_dequantized
from quanterr.util.text import count, display, itemize


class WeightSummary(Struct, frozen=True, gc=False):  # no garbage collection: there are many
    """Facts about a compared weight whose sides differ, kept until the end of the run."""

    number: int
    pair: Pair
    figures: Figures | None
    scales: ScaleStatistics | None
    offset: float | None  # for a norm: the constant by which all its elements differ
    zero: bool = False  # all quantized values are zero
    facts: frozenset[str] = frozenset()  # keys of explanations.FACTS
    too_good: bool = False  # better than rounding can be
    attainable_db: float | None = None  # SNR of the nearest codes with the stored scales
    nearest: bool = False  # about as good as its scales allow
    copy: Copy | None = None  # kind of copy of the original, if neither side is quantized
    excess_db: float | None = None  # loss in dB compared with the nearest codes
    ones: bool = False  # a norm whose quantized values are all 1
    unlike_columns: tuple[int, ...] = ()  # columns that may hold the values of other columns
    moved: bool = False  # 8-bit codes are two or more steps from their values, which no rounding causes

    @property
    def near(self) -> bool:
        """True if it is about as good as its scales allow, and good scales would allow no more."""
        return NEAR in self.facts or UNDERFLOWS in self.facts


class AllWeights(NamedTuple):
    """All compared weights."""

    seen: Sequence[WeightSummary]  # weights whose two sides differ
    same: Sequence[Pair]  # weights whose two sides are identical
    pairing: Pairing
    reader: Reader


def detect_offset(pair: Pair, sums: Sums) -> float | None:
    """Return 1 or -1 if all elements of a norm differ by that constant, otherwise None."""
    if sums.n < 2 or not _is_norm(pair):
        return None
    mean, square = as_float(sums.e) / sums.n, as_float(sums.e_sq) / sums.n
    return round(mean) if abs(abs(mean) - 1) < FACTOR_TOLERANCE and square - mean * mean < FACTOR_TOLERANCE**2 else None


def is_norm_of_ones(pair: Pair, sums: Sums) -> bool:
    """Return True for a norm whose quantized values are all 1: it was merged into the weights that follow, or lost."""
    if not sums.n or not _is_norm(pair):
        return False
    return as_float(sums.x + sums.e) == as_float(sums.y_sq) == sums.n


def find_common_factor(seen: Sequence[WeightSummary]) -> list[WeightSummary]:
    """Return the weights that seem to differ from their originals by a common factor; empty if there is none."""
    scaled = [weight for weight in seen if weight.figures and not weight.ones and _is_multiple(weight.figures)]
    if len(scaled) < 2 or len({weight.figures.factor > 0 for weight in scaled if weight.figures}) > 1:
        return []
    logs = {weight.number: log(abs(weight.figures.factor)) for weight in scaled if weight.figures}
    middle = median(logs.values())
    tolerance = (
        FACTOR_TOLERANCE
        if any(weight.figures and weight.figures.gains for weight in scaled)
        else min(FACTOR_TOLERANCE, abs(middle))
    )
    agreeing = [weight for weight in scaled if abs(logs[weight.number] - middle) < tolerance]
    return agreeing if len(agreeing) >= max(2, len(scaled) / 2) else []


def _is_multiple(figures: Figures) -> bool:
    """Return True if a weight is about its original times a factor."""
    return (figures.gains or figures.is_scaled) and abs(figures.cosine) > ALIGNED_COSINE


def report_common_factor(
    scaled: Sequence[WeightSummary], seen: Iterable[WeightSummary], factor: float, doubt: float
) -> Finding:
    """Report a factor that many weights share; ``doubt`` is the relative error of the factor."""
    names = [weight.pair.name for weight in scaled]
    after = min(weight.figures.rescaled_db for weight in scaled if weight.figures)
    before = min(weight.figures.snr_db for weight in scaled if weight.figures)
    scales = scaled[0].scales if len({weight.scales for weight in scaled}) == 1 else None
    factors = [abs(weight.figures.factor) for weight in seen if weight.figures and _is_multiple(weight.figures)]
    is_cast = all(weight.pair.quantized.encoding == "cast" for weight in scaled)
    explained = explain_factor(factor, scales, factors, is_cast, doubt)
    gained = "all are exact" if after == EXACT_DB else f"the worst has {after:.1f} dB"
    message = (
        f"{count(len(names), 'weight')} are the original times {factor:.4g}: {itemize(names, 3)}; "
        f"without that factor {gained} instead of {before:.1f}{explained}"
    )
    remedy = "check how the scales are applied: omitted, applied twice, or inverted"
    return make_finding(
        "scale_factor",
        rate_repair(before, after),
        None,
        message,
        remedy,
        factor=factor,
        layers=names,
        snr_db=before,
        snr_db_repaired=after,
    )


def rate_repair(before_db: float, after_db: float) -> str:
    """Return the severity of a repair: an error if most of the measured error is not rounding."""
    return "error" if after_db - before_db > BIT_DB else "warning"


class GroupOutlier(NamedTuple):
    """A weight whose SNR is far below the median of its format and role."""

    weight: WeightSummary
    snr_db: float
    median_db: float
    peers: int  # weights of its format and role
    role: str


def find_group_outliers(seen: Iterable[WeightSummary]) -> list[GroupOutlier]:
    """Return the weights whose SNR is far below the median of their format and role."""
    groups: dict[tuple[str, int, str], list[WeightSummary]] = {}
    for weight in seen:
        if weight.figures and len(weight.pair.original.shape) > 1:
            key = weight.pair.quantized.format, weight.figures.bits, role_of(weight.pair.name)
            groups.setdefault(key, []).append(weight)
    outliers = []
    for (_, _, role), group in groups.items():
        levels = [weight.figures.snr_db for weight in group if weight.figures]
        if len(group) <= MIN_PEERS:
            continue
        middle = median(levels)
        spread = median(abs(level - middle) for level in levels)
        limit = min(middle - max(BIT_DB, CHANCE_DEVIATIONS * spread), FINE_DB)
        below = [(weight, level) for weight, level in zip(group, levels, strict=True) if level < limit]
        outliers += [GroupOutlier(weight, level, middle, len(group), role) for weight, level in below]
    return outliers


def report_group_outliers(outliers: Sequence[GroupOutlier], limited: Collection[str]) -> Iterator[Finding]:
    """Report the weights far below the median of their format and role.

    Args:
        outliers: these weights.
        limited: names of the weights whose codes are about the nearest, so that only another format helps.
    """
    for outlier in outliers:
        name = outlier.weight.pair.name
        if name not in limited:
            message = f"{display(name)}: {_describe_outlier(outlier)}"
            remedy = "quantize it again, or leave it in higher precision"
            levels = {"snr_db": outlier.snr_db, "median_snr_db": outlier.median_db}
            yield make_finding("group_outlier", "warning", name, message, remedy, **levels)
    # The error of a rotated weight depends on the rotation that undoes it, whatever the format of its codes.
    unrotated = [outlier for outlier in outliers if not outlier.weight.pair.quantized.rotated]
    limited_outliers = [outlier for outlier in unrotated if outlier.weight.pair.name in limited]
    if limited_outliers:
        worst, names = (
            min(limited_outliers, key=lambda outlier: outlier.snr_db - outlier.median_db),
            [outlier.weight.pair.name for outlier in limited_outliers],
        )
        message = (
            f"{count(len(names), 'weight')} far below others of the same format and role, although codes are about the "
            f"nearest that their scales allow: {itemize(names, 3)}; the worst: {display(worst.weight.pair.name)}: "
            f"{_describe_outlier(worst)}"
        )
        remedy = (
            "use a finer format for them, with smaller groups or more bits, or leave them in higher precision: to "
            "quantize them in the same way again would change nothing"
        )
        levels = {"snr_db": worst.snr_db, "median_snr_db": worst.median_db}
        yield make_finding("group_outlier", "info", None, message, remedy, layers=names, **levels)


def _describe_outlier(outlier: GroupOutlier) -> str:
    return (
        f"{outlier.snr_db:.1f} dB; the median of the {outlier.peers} weights of "
        f"{outlier.weight.pair.quantized.format} in {outlier.role} is {outlier.median_db:.1f} dB"
    )


@check("scale_constant", needs=RESULT, of=WEIGHTS)
def check_constant_scales(weights: AllWeights) -> Iterator[Finding]:
    """Report weights whose scales are all 1."""
    ones = [
        weight
        for weight in weights.seen
        if weight.scales and weight.scales.number and weight.scales.low == weight.scales.high == 1
    ]
    if ones:
        names = [weight.pair.name for weight in ones]
        message = f"every scale of {count(len(names), 'weight')} is 1: {itemize(names, 3)}"
        remedy = "nothing if the weights were cast without scaling; otherwise the scales were dropped"
        yield make_finding("scale_constant", "info", None, message, remedy, layers=names)


@check("norm_offset", needs=RESULT, of=WEIGHTS)
def check_norm_offsets(weights: AllWeights) -> Iterator[Finding]:
    """Report norms that one side stores around 0 and the other around 1.

    If the norm of the same name differs in this way in all blocks, a convention explains it (a warning); otherwise it
    is an error.
    """
    seen, pairs = weights.seen, weights.pairing.pairs
    shifted = [weight for weight in seen if weight.offset is not None]
    if not shifted:
        return
    offsets_by_family: dict[str, list[float | None]] = {}
    offsets = {weight.pair.name: weight.offset for weight in shifted}
    for pair in pairs:
        if _is_norm(pair):
            offsets_by_family.setdefault(_find_family(pair.name), []).append(offsets.get(pair.name))
    by_convention = {
        family
        for family, family_offsets in offsets_by_family.items()
        if len(set(family_offsets)) == 1 and family_offsets[0] is not None
    }
    if sum(len(offsets_by_family[family]) for family in by_convention) == 1 < len(offsets_by_family):
        by_convention.clear()  # one norm alone makes no convention
    yield from _report_offsets([weight for weight in shifted if _find_family(weight.pair.name) in by_convention])
    for weight in shifted:
        if _find_family(weight.pair.name) not in by_convention:
            zeros = ", which leaves zeros" if weight.zero else ""
            message = (
                f"{display(weight.pair.name)}: the original's {_describe_offset(weight)} throughout{zeros}, unlike "
                "other norms: no convention explains it"
            )
            remedy = "check the program that wrote this tensor"
            yield make_finding("norm_offset", "error", weight.pair.name, message, remedy, offset=weight.offset)


def _is_norm(pair: Pair) -> bool:
    """Return True for a one-dimensional norm weight."""
    return len(pair.original.shape) == 1 and role_of(pair.name) == "norm" and not canonicalize(pair.name)[1]


def _find_family(name: str) -> str:
    """Return a name without its numbers, which is the same for a norm in every block."""
    return re.sub(r"\d+", "#", name)


def _describe_offset(weight: WeightSummary) -> str:
    """Format an offset: ``plus 1`` or ``minus 1``."""
    return f"{'plus' if (weight.offset or 0) > 0 else 'minus'} 1"


def _report_offsets(shifted: Sequence[WeightSummary]) -> Iterator[Finding]:
    """Report norms whose offset follows a convention."""
    if not shifted:
        return
    names = [weight.pair.name for weight in shifted]
    message = (
        f"{count(len(names), 'norm')} of the quantized checkpoint are the original's {_describe_offset(shifted[0])} "
        f"throughout: {itemize(names, 3)}"
    )
    if zeros := [weight.pair.name for weight in shifted if weight.zero]:
        message += f"; all zero where the original has ones (stored minus one, or lost): {itemize(zeros, 3)}"
    remedy = (
        "some models compute (1 + weight) · x: check that the runtime of the quantized model expects what is stored"
    )
    yield make_finding("norm_offset", "warning", None, message, remedy, layers=names, offset=shifted[0].offset)


@check("unquantized_changed", "cast_coarse", needs=RESULT, of=LAST)
def check_unquantized(weights: AllWeights) -> Iterator[Finding]:
    """Report tensors that neither side quantizes and that are neither copies nor casts.

    A quantizer does not change the values of such tensors. If other weights are quantized and half of these tensors
    differ, the sides do not come from the same checkpoint, unless all are vectors: norms may have absorbed scales.
    """
    explained = _find_explained(weights.pairing)
    coded = any(pair.quantized.has_codes for pair in weights.pairing.pairs)
    copies = [weight for weight in weights.seen if weight.copy and weight.pair.name not in explained]
    yield from _report_coarse_casts(copies)
    changed = [weight for weight in copies if weight.copy == Copy.CHANGED and weight.figures]
    if not changed:
        return
    total = len(copies) + sum(map(_is_unquantized, weights.same))
    are_many = (
        total > MIN_PEERS
        and 2 * len(changed) >= total
        and any(len(weight.pair.original.shape) > 1 for weight in changed)
    )
    worst = min(changed, key=lambda weight: weight.figures.snr_db if weight.figures else inf)
    worst_db = worst.figures.snr_db if worst.figures else None
    names = [weight.pair.name for weight in changed]
    message = (
        f"{len(changed):,} of {count(total, 'tensor')} that both checkpoints store unquantized differ by more than a "
        f"cast explains: {itemize(names, 3)}; the worst, {display(worst.pair.name)}, has {worst_db:.1f} dB"
    )
    remedy = "check that both checkpoints come from the same training step and the same merge"
    level = "error" if coded and are_many else "warning"
    yield make_finding(
        "unquantized_changed", level, None, message, remedy, layers=names, tensors=total, snr_db=worst_db
    )


def _find_explained(pairing: Pairing) -> set[str]:
    """Return the names of weights whose change has a known reason: folded factors, corrected biases, decoded codes."""
    folded = {fold.source.rpartition(".")[0] for fold in pairing.folded}
    beside = {pair.name for pair in pairing.pairs if pair.name.rpartition(".")[0] in folded}
    decoded = {pair.name for pair in pairing.pairs if any(map(is_dequantized, pair.quantized_codes))}
    return find_corrected_biases(pairing.pairs).union(beside, decoded, *(fold.names for fold in pairing.folded))


def _report_coarse_casts(copies: Iterable[WeightSummary]) -> Iterator[Finding]:
    """Report tensors that were cast without rounding to the nearest value."""
    names = [weight.pair.name for weight in copies if weight.copy == Copy.COARSE]
    if names:
        message = (
            f"casts of {count(len(names), 'tensor')} did not round to the nearest value: {itemize(names, 3)}; "
            "they truncated, or rounded at random"
        )
        remedy = "round to the nearest value where you can: this halves the error"
        yield make_finding("cast_coarse", "info", None, message, remedy, layers=names)


def find_corrected_biases(pairs: Iterable[Pair]) -> set[str]:
    """Return the names of biases that quantizers may correct for the error of their weights."""
    modules = {
        pair.name.removesuffix("weight")
        for pair in pairs
        if pair.quantized.has_codes and any(row.corrects_biases for row in find_rows(pair.quantized.format))
    }
    return {pair.name for pair in pairs if pair.name.endswith("bias") and pair.name.removesuffix("bias") in modules}


def _is_unquantized(pair: Pair) -> bool:
    """Return True if both sides store plain floats, which a quantizer copies or casts."""
    return pair.original.encoding == pair.quantized.encoding == "floats"
