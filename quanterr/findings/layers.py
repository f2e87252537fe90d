"""What all weights together show: one wrong factor in many, one far below its like, nothing lost at all."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import exp, inf, log
from statistics import median
from typing import NamedTuple

from quanterr.findings.codes import finding
from quanterr.findings.factors import meaning
from quanterr.findings.figures import Figures
from quanterr.formats import rows_of
from quanterr.formats.shared.scale_statistics import Scales
from quanterr.metrics.sums import Sums, as_float
from quanterr.pairing.model import Pair
from quanterr.pairing.names import canonicalize
from quanterr.report.base import Finding
from quanterr.roles import role_of
from quanterr.tensors.casts import Copy
from quanterr.util.text import count, display, listed

ALIKE = 0.02  # of the logarithm of two factors
ALONG = 0.9  # of a cosine: the direction is right
ENOUGH = 5  # weights of a group
LEAST_DB = 6.0  # below the median
SPREADS = 6.0  # median absolute deviations below the median
FEW_COPIED = 4  # unquantized tensors: of fewer, half is no proof of another checkpoint
OFFSET = 0.02  # of 1, and of the scatter of a norm's errors


class WeightSummary(NamedTuple):
    """A compared weight whose sides differ."""

    number: int
    pair: Pair
    figures: Figures | None
    scales: Scales | None
    offset: float | None  # of a norm: by how much all its elements differ
    zero: bool = False  # the quantized weight is
    near: bool = False  # about as good as its scales allow, and good scales would
    too_good: bool = False  # better than rounding can be
    attainable_db: float | None = None  # with its scales
    nearest: bool = False  # about as good as its scales allow
    copy: Copy | None = None  # of the original's, where neither side is quantized
    excess_db: float | None = None  # beyond what its scales allow


def offset_of(pair: Pair, sums: Sums) -> float | None:
    """1 or -1 where all elements of a norm differ by that; None otherwise."""
    if sums.n < 2 or not _is_norm(pair):
        return None
    mean, square = as_float(sums.e) / sums.n, as_float(sums.e_sq) / sums.n
    return round(mean) if abs(abs(mean) - 1) < OFFSET and square - mean * mean < OFFSET**2 else None


def common_factor(seen: Sequence[WeightSummary]) -> tuple[list[Finding], set[int]]:
    """The factor that many weights have in common, as one finding; the numbers of those weights."""
    gaining = [one for one in seen if one.figures and one.figures.gains and abs(one.figures.cosine) > ALONG]
    signs = {one.figures.factor > 0 for one in gaining if one.figures}
    if len(gaining) < 2 or len(signs) > 1:
        return [], set()
    logs = {one.number: log(abs(one.figures.factor)) for one in gaining if one.figures}
    middle = median(logs.values())
    alike = [one for one in gaining if abs(logs[one.number] - middle) < ALIKE]
    if len(alike) < max(2, len(gaining) / 2):
        return [], set()
    factor = exp(middle) * (1 if True in signs else -1)
    names = [one.pair.name for one in alike]
    after = min(one.figures.rescaled_db for one in alike if one.figures)
    before = min(one.figures.snr_db for one in alike if one.figures)
    scales = alike[0].scales if len({one.scales for one in alike}) == 1 else None
    message = (
        f"{count(len(names), 'weight')} are the original times {factor:.4g}: {listed(names, 3)}; "
        f"without that factor the worst has {after:.1f} instead of {before:.1f} dB{meaning(factor, scales)}"
    )
    remedy = "check how the scales are applied: omitted, applied twice, or inverted"
    found = finding(
        "scale_factor",
        severity(before, after),
        None,
        message,
        remedy,
        factor=factor,
        layers=names,
        snr_db=before,
        snr_db_repaired=after,
    )
    return [found], {one.number for one in alike}


def severity(before_db: float, after_db: float) -> str:
    """Severity of a repair: an error where most of the measured error is not rounding."""
    return "error" if after_db - before_db > LEAST_DB else "warning"


def group_outlier(seen: Iterable[WeightSummary]) -> Iterator[Finding]:
    """Weights far below the others of their format and role."""
    groups: dict[tuple[str, int, str], list[WeightSummary]] = {}
    for one in seen:
        if one.figures and len(one.pair.original.shape) > 1:
            key = one.pair.quantized.format, one.figures.bits, role_of(one.pair.name)
            groups.setdefault(key, []).append(one)
    for (name, _, role), group in groups.items():
        levels = [one.figures.snr_db for one in group if one.figures]
        if len(group) < ENOUGH:
            continue
        middle = median(levels)
        spread = median(abs(level - middle) for level in levels)
        limit = middle - max(LEAST_DB, SPREADS * spread)
        for one, level in zip(group, levels, strict=True):
            if level < limit:
                message = (
                    f"{display(one.pair.name)}: {level:.1f} dB, where the {len(group)} weights of {name} in "
                    f"{role} have a median of {middle:.1f} dB"
                )
                remedy = "quantize it again, or leave it in higher precision"
                yield finding(
                    "group_outlier", "warning", one.pair.name, message, remedy, snr_db=level, median_snr_db=middle
                )


def constant_scales(seen: Iterable[WeightSummary]) -> Iterator[Finding]:
    """Scales that are stored and scale nothing."""
    ones = [one for one in seen if one.scales and one.scales.number and one.scales.low == one.scales.high == 1]
    if ones:
        names = [one.pair.name for one in ones]
        message = f"every scale of {count(len(names), 'weight')} is 1: {listed(names, 3)}"
        remedy = "nothing if the weights were cast without scaling; otherwise the scales were dropped"
        yield finding("scale_constant", "info", None, message, remedy, layers=names)


def norm_offset(seen: Iterable[WeightSummary], pairs: Iterable[Pair]) -> Iterator[Finding]:
    """Norms that one side stores around 0 and the other around 1: by a convention, if all of their kind are so."""
    off = [one for one in seen if one.offset is not None]
    if not off:
        return
    like: dict[str, list[float | None]] = {}
    offsets = {one.pair.name: one.offset for one in off}
    for pair in pairs:
        if _is_norm(pair):
            like.setdefault(_kind(pair.name), []).append(offsets.get(pair.name))
    by_convention = {kind for kind, found in like.items() if len(set(found)) == 1 and found[0] is not None}
    if sum(len(like[kind]) for kind in by_convention) == 1 < len(like):
        by_convention.clear()  # a single norm, and others are not
    yield from _offsets([one for one in off if _kind(one.pair.name) in by_convention])
    for one in off:
        if _kind(one.pair.name) not in by_convention:
            description = f"the original's {_by_one(one)} throughout{', which leaves zeros' if one.zero else ''}"
            message = f"{display(one.pair.name)}: {description}, unlike other norms: no convention explains it"
            remedy = "check what wrote this tensor"
            yield finding("norm_offset", "error", one.pair.name, message, remedy, offset=one.offset)


def _is_norm(pair: Pair) -> bool:
    return len(pair.original.shape) == 1 and role_of(pair.name) == "norm" and not canonicalize(pair.name)[1]


def _kind(name: str) -> str:
    """What norms of all blocks have in common: their names without numbers."""
    return re.sub(r"\d+", "#", name)


def _by_one(one: WeightSummary) -> str:
    return f"{'plus' if (one.offset or 0) > 0 else 'minus'} 1"


def _offsets(off: Sequence[WeightSummary]) -> Iterator[Finding]:
    if not off:
        return
    names = [one.pair.name for one in off]
    message = (
        f"{count(len(names), 'norm')} of the quantized checkpoint are the original's {_by_one(off[0])} throughout: "
        f"{listed(names, 3)}"
    )
    if zeros := [one.pair.name for one in off if one.zero]:
        message += f"; all zero, where the original has ones: stored minus one, or lost: {listed(zeros, 3)}"
    remedy = (
        "some models compute (1 + weight) · x: check that the runtime of the quantized model expects what is stored"
    )
    yield finding("norm_offset", "warning", None, message, remedy, layers=names, offset=off[0].offset)


def identical(same: Sequence[Pair], whole: bool) -> Finding:
    """Nothing differs, and nothing is quantized: one checkpoint twice.

    ``whole``: all that was selected is compared, so that identical tensors mean an identical model.
    """
    message = "all compared tensors are identical; is this the quantized checkpoint?"
    remedy = "check that the second checkpoint is the quantized one"
    return finding("identical", "warning" if whole and all(map(_stored_alike, same)) else "info", None, message, remedy)


def unquantized_changed(
    seen: Sequence[WeightSummary],
    same: Iterable[Pair],
    explained: Collection[str],
    coded: bool,
) -> Iterator[Finding]:
    """Tensors that neither side quantizes, and that are no copies or casts: a quantizer leaves their values alone.

    ``explained`` are those whose change has a reason. Where something else is quantized (``coded``), many that differ
    show that the sides do not come from one checkpoint, unless all are vectors: norms may have taken up scales.
    """
    copies = [one for one in seen if one.copy and one.pair.name not in explained]
    yield from _coarse(copies)
    changed = [one for one in copies if one.copy == Copy.CHANGED and one.figures]
    if not changed:
        return
    of = len(copies) + sum(map(_unquantized, same))
    many = of >= FEW_COPIED and 2 * len(changed) >= of and any(len(one.pair.original.shape) > 1 for one in changed)
    worst = min(changed, key=lambda one: one.figures.snr_db if one.figures else inf)
    worst_db = worst.figures.snr_db if worst.figures else None
    names = [one.pair.name for one in changed]
    message = (
        f"{len(changed):,} of {count(of, 'tensor')} that both checkpoints store unquantized differ by more than a cast "
        f"explains: {listed(names, 3)}; the worst, {display(worst.pair.name)}, has {worst_db:.1f} dB"
    )
    remedy = "check that both checkpoints come from the same training step and the same merge"
    level = "error" if coded and many else "warning"
    yield finding("unquantized_changed", level, None, message, remedy, layers=names, tensors=of, snr_db=worst_db)


def _coarse(copies: Iterable[WeightSummary]) -> Iterator[Finding]:
    names = [one.pair.name for one in copies if one.copy == Copy.COARSE]
    if names:
        message = (
            f"{count(len(names), 'tensor')} cast to the neighbours of the nearest numbers: {listed(names, 3)}; "
            "truncated, or rounded at random"
        )
        remedy = "round to the nearest where you can: it halves the error"
        yield finding("cast_coarse", "info", None, message, remedy, layers=names)


def biases_beside_codes(pairs: Iterable[Pair]) -> set[str]:
    """Names of biases whose weight is stored in a format of which a quantizer corrects them for its error."""
    modules = {
        pair.name.removesuffix("weight")
        for pair in pairs
        if pair.quantized.has_codes and any(row.corrects_biases for row in rows_of(pair.quantized.format))
    }
    return {pair.name for pair in pairs if pair.name.endswith("bias") and pair.name.removesuffix("bias") in modules}


def _unquantized(pair: Pair) -> bool:
    """Whether both sides store numbers, so that a quantizer that leaves it alone casts it at most."""
    return pair.original.encoding == pair.quantized.encoding == "floats"


def _stored_alike(pair: Pair) -> bool:
    """Whether both sides use the same names and dtypes, as a copy of the original does."""
    x, y = ([(entry.name, entry.dtype) for entry in entries] for entries in pair.codes)
    return x == y
