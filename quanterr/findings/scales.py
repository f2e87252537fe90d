"""Losses from scales that do not suit the values, which no choice of codes avoids."""

from collections.abc import Iterator
from math import isfinite, log2

from quanterr.documents.base import Finding
from quanterr.findings.checks import RESULT, WEIGHT, check
from quanterr.findings.code_samples import ROWS_PER_RUN
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import MeasuredWeight
from quanterr.findings.error_figures import find_bits
from quanterr.findings.excess import MAX_LISTED_PLACES, compare_whole_with_sample, underflows
from quanterr.findings.limits import (
    ALIGNED_COSINE,
    BIT_DB,
    DOUBLE_DB,
    FACTOR_TOLERANCE,
    FINE_DB,
    MAJOR_SHARE,
    MAX_METHOD_LOSS_DB,
    MIN_VALUES,
    MINOR_SHARE,
    MISMATCH_FACTOR,
    NEAR_DB,
    SEARCHED_DB,
    SLIGHT_DB,
    SMALL_DB,
)
from quanterr.findings.methods import Method
from quanterr.formats.reading import Reader
from quanterr.kernel.levels import Levels
from quanterr.lazy_torch import Tensor, torch
from quanterr.metrics.attainable import Attainable, BadRegion, level
from quanterr.metrics.sums import Sums, as_float
from quanterr.pairing.model import Pair, WeightResult
from quanterr.samples.good_scales import MAX_SEARCHED_LEVELS, ScaleGroups
from quanterr.samples.scales import LEVELS_OF_BYTE, get_clipping_limit
from quanterr.tensors.chunks import Chunk
from quanterr.util.text import count, display

# In correct files, stored scales lose -5 to 0.6 dB compared with good ones if they are rounded or searched absolute
# maxima, and 1.8 if they are products of coarse scales (asymmetric 6-bit codes in ComfyUI). For codes with few levels,
# good scales are searched down to 0.7 of the largest value. An absolute maximum then loses up to 3.1, in correct files
# up to 1.8; with four levels or fewer up to 3.4.
# Median of stored / good scale above which all scales are too wide, as no method leaves the ends of the range unused.
# Correct files have up to 1.143 (8/7, symmetric 4 bits by their largest value), with losses up to 1.5 dB; scales that
# are 1.3 times too wide lose 1.3 (NF4, real weights) to 2.9.
WIDE_RATIO = 1.2
# AutoRound learns the range of each group in steps that sum up to half of a range, as their size falls from 1 / steps
# to 0 (auto-round 0.16.1, sign_round/quantizer.py). Symmetric codes reach 8/7 further on one side than on the other.
MIN_LEARNED_RATIO = 0.5 * 7 / 8 - FACTOR_TOLERANCE
EXPONENT_DTYPES = frozenset({"U8", "F8_E8M0"})  # dtypes of scales that are stored as exponents
REMEDY = "derive scales from the original: for each group its largest absolute value divided by the largest code"


@check("scale_loss", "zero_points", "underflow", needs=RESULT, of=WEIGHT)
def check_scales(weight: MeasuredWeight) -> Iterator[Finding]:
    """Report scales that are too large or too small, for a whole weight or for some of its groups."""
    pair, done, method, _ = weight
    attainable = done.attainable
    if attainable is None or attainable.n < MIN_VALUES or level(attainable.x_sq, attainable.e_sq) > FINE_DB:
        return
    severity, loss = _rate_scales(pair, done, attainable), attainable.scale_loss_db
    if severity == "error" and _is_shifted(attainable):
        yield _report_shift(pair, attainable)
        return
    parts = {part.kind: part for part in attainable.parts}
    if severity in (None, "info") and "underflow" in parts and not underflows(pair, done.sums):
        yield _report_underflow(pair, attainable, parts["underflow"])
    if severity in (None, "info") and "group" in parts:
        yield _report_groups(pair, done, parts["group"], method)
    elif severity:
        part, is_near = parts.get("group"), 1 / MISMATCH_FACTOR < attainable.scale_ratio < MISMATCH_FACTOR
        more = compare_whole_with_sample(done, attainable)
        whole = _describe_scales(pair, attainable.scale_ratio, attainable.snr_db)
        what = (
            f"{_describe_place(part)}: {_describe_scales(pair, part.factor, part.snr_db)}"
            if part and is_near
            else whole
        )
        yield make_finding(
            "scale_loss",
            severity,
            pair.name,
            f"{display(pair.name)}: {what}: its scales overall allow {attainable.snr_db + more:.1f} dB, good ones "
            f"{attainable.snr_db + more + (loss or 0.0):.1f} dB",
            REMEDY,
            scale_loss_db=loss,
            attainable_snr_db=attainable.snr_db,
            format_snr_db=attainable.format_snr_db,
            scale_ratio=attainable.scale_ratio,
        )


@check("zero_points", needs=RESULT, of=WEIGHT)
def check_zero_points(measured: MeasuredWeight) -> Iterator[Finding]:
    """Report zero points that are all the same although scales were made for other ones, so that values are clipped.

    The scales were made for other zero points if the configuration declares asymmetric codes, or if they follow the
    ranges of groups.
    """
    pair, done, _, scheme = measured
    attainable, weight = done.attainable, pair.quantized.unrotated
    if attainable is None or pair.quantized.rotated or (scheme is not None and scheme.is_symmetric):
        return
    if not attainable.clipped or attainable.scale_ratio >= 1 - FACTOR_TOLERANCE:
        return
    rows, cols = weight.matrix
    chunk = Chunk(0, min(ROWS_PER_RUN, rows), 0, cols)
    scales = Reader().read_scaling(weight, chunk)
    if scales is None or not _are_zero_points_equal(*scales):
        return
    is_declared = scheme is not None and scheme.is_symmetric is False
    loses = is_declared and (attainable.scale_loss_db or 0.0) > SLIGHT_DB
    if not loses and not _follow_ranges(pair, chunk, scales[0]):
        return
    share = 100 * attainable.clipped / attainable.n
    why = "each scale was made for the range of its group"
    if is_declared and scheme is not None:
        why = f"{display(scheme.key)} declares codes that are not symmetric"
    yield make_finding(
        "zero_points",
        "warning",
        pair.name,
        f"{display(pair.name)}: all its zero points are the same, though {why}, and {share:.2g} % of the original's "
        f"values are beyond the range of their scales: they allow {attainable.snr_db:.1f} dB, and "
        f"{level(attainable.x_sq, attainable.rounding_sq):.1f} dB without clipping",
        "quantize this layer again; if the error returns, the quantizer writes wrong zero points",
        clipped_pct=share,
        attainable_snr_db=attainable.snr_db,
        format_snr_db=attainable.format_snr_db,
    )


def _are_zero_points_equal(unit: Tensor, shift: Tensor | None) -> bool:
    """Return True if there are zero points and all are the same number."""
    if shift is None:
        return False
    points = (shift / unit)[unit != 0]
    return points.numel() >= MIN_VALUES and float((points - points.median()).abs().max()) < 1 - ALIGNED_COSINE


def _follow_ranges(pair: Pair, chunk: Chunk, unit: Tensor) -> bool:
    """Return True if scales are in proportion to the ranges of groups, rather than to their largest magnitudes.

    Scales for codes around a common zero point are in proportion to magnitudes, even if they clip some of them.
    """
    block = pair.quantized.unrotated.block_size
    if block is None or block[0] != 1 or unit.shape[1] % block[1]:
        return False
    x = Reader().read(pair.original, chunk).float()
    groups, codes = ScaleGroups(*block), (x / unit).nan_to_num(0.0, 0.0, 0.0)
    low, high = groups.min(codes).clamp(max=0.0), groups.max(codes).clamp(min=0.0)
    used = high > low
    if int(used.sum()) < MIN_VALUES:
        return False
    sizes = (size[used].log() for size in (high - low, torch.maximum(high, -low)))
    of_ranges, of_magnitudes = (float((size - size.median()).abs().median()) for size in sizes)
    return of_ranges < of_magnitudes / 2


def has_good_scales(pair: Pair, done: WeightResult) -> bool:
    """Return True if good scales would gain no more than usual, or if the gain was not measured."""
    return done.attainable is None or _rate_scales(pair, done, done.attainable) in (None, "info")


def _rate_scales(pair: Pair, done: WeightResult, attainable: Attainable) -> str | None:
    """Return the severity of the loss from scales, or None if the loss is usual."""
    loss, levels = attainable.scale_loss_db, pair.quantized.levels
    if loss is None or _suits_importance(done.sums, attainable):
        return None
    if loss <= MAX_METHOD_LOSS_DB and _has_wrong_range(pair, attainable, loss):
        return "warning"
    if loss <= SEARCHED_DB:
        return None
    loss -= NEAR_DB if levels and levels.number <= MAX_SEARCHED_LEVELS else 0.0
    if loss > MAX_METHOD_LOSS_DB:
        return "error"
    if _is_due_to_zero_points(attainable.scale_ratio, attainable.snr_db) and loss > SEARCHED_DB:
        return "info"
    return "warning" if loss > DOUBLE_DB + SLIGHT_DB else "info" if loss > SEARCHED_DB else None


def _suits_importance(sums: Sums, attainable: Attainable) -> bool:
    """Return True if the SNR weighted by a given importance is about that of good scales without importance."""
    if not sums.weighted_x_sq or (good := attainable.format_snr_db) is None:
        return False
    return level(as_float(sums.weighted_x_sq), as_float(sums.weighted_e_sq)) >= good - SEARCHED_DB


def _has_wrong_range(pair: Pair, attainable: Attainable, loss: float) -> bool:
    """Return True if scales leave the ends of the range of codes unused, or clip 8-bit floats."""
    levels, scale = pair.quantized.levels, pair.quantized.parts.get("scale")
    are_exponents = (scale is not None and scale.dtype in EXPONENT_DTYPES) or "mxfp" in pair.quantized.format
    if attainable.scale_ratio > (2 + FACTOR_TOLERANCE if are_exponents else WIDE_RATIO):
        return loss > SMALL_DB
    return (
        levels is not None
        and levels.mantissa > 0
        and not are_exponents
        and _clips_bytes(levels, attainable.scale_ratio)
    )


def _is_due_to_zero_points(ratio: float, snr_db: float) -> bool:
    """Return True if scales of this ratio and SNR are right, so that only other zero points reduce the loss."""
    return abs(ratio - 1) < FACTOR_TOLERANCE and snr_db > 0


def _is_shifted(attainable: Attainable) -> bool:
    """Return True if scales are right, but zero points leave many values beyond the range of codes."""
    return abs(attainable.scale_ratio - 1) < FACTOR_TOLERANCE and attainable.clipped > MAJOR_SHARE * attainable.n


def _report_shift(pair: Pair, attainable: Attainable) -> Finding:
    """Report zero points that are out of the range of codes."""
    share = 100 * attainable.clipped / attainable.n
    return make_finding(
        "zero_points",
        "error",
        pair.name,
        f"{display(pair.name)}: {share:.3g} % of its codes are at the end of their range, with values beyond it: its "
        f"zero points are out of the range of codes; they allow {attainable.snr_db:.1f} dB, good ones with the same "
        f"scales {attainable.format_snr_db:.1f} dB",
        "check the convention: zero points of unsigned codes (0 to 15) may be stored for signed ones (-8 to 7)",
        clipped_pct=share,
        attainable_snr_db=attainable.snr_db,
        format_snr_db=attainable.format_snr_db,
    )


def _describe_scales(pair: Pair, ratio: float, snr_db: float) -> str:
    """Describe scales that are ``ratio`` times the right ones and allow ``snr_db``."""
    if _is_due_to_zero_points(ratio, snr_db):
        return "scales are right, but other zero points would leave less error"
    if not ratio:
        return "scales are zero: all values are lost"
    if ratio < 1:
        return f"scales are {ratio:.2g} x what the values need: larger values are clipped"
    weight = pair.quantized.unrotated
    bits, uniform = find_bits(pair), weight.levels is not None and not (weight.levels.mantissa or weight.levels.table)
    used = max(round(bits - log2(ratio)), 0) if uniform and isfinite(ratio) else bits
    what = f"codes use {used} of {bits} bits: " if used < bits else ""
    return f"{what}scales are {ratio:.3g} x what the values need"


def _report_groups(pair: Pair, done: WeightResult, part: BadRegion, method: Method) -> Finding:
    """Report groups whose scales are wrong."""
    attainable = done.attainable
    # A search by importance gives up 0.04 of the groups of Q3_K if one column of 32 is 1,000 times as important.
    are_few = attainable is not None and part.is_scattered and part.number * part.size <= MINOR_SHARE * attainable.n
    suits_importance = attainable is not None and _suits_importance(done.sums, attainable)
    is_narrow = 0 < part.factor < 1 or (not part.factor and pair.quantized.scale_steps is not None)
    lost, given_up = part.attainable_db - part.snr_db, method.by_importance and is_narrow and are_few
    is_updated = 1 / method.max_factor < part.factor < method.max_factor
    is_bad = (
        lost > (MAX_METHOD_LOSS_DB if is_updated else BIT_DB)
        or not part.factor
        or _clips_bytes(pair.quantized.unrotated.levels, part.factor)
    )
    is_learned = method.may_learn_ranges and are_few and MIN_LEARNED_RATIO < part.factor < 1
    is_excused = given_up or is_learned or suits_importance or _is_due_to_zero_points(part.factor, part.snr_db)
    why = "; a search by importance may cause this in single groups" if given_up and is_bad else ""
    return make_finding(
        "scale_loss",
        "warning" if is_bad and not is_excused else "info",
        pair.name,
        f"{display(pair.name)}: {_describe_place(part)}: {_describe_scales(pair, part.factor, part.snr_db)}: "
        f"they allow {part.snr_db:.1f} dB, good ones {part.attainable_db:.1f} dB{why}",
        REMEDY,
        **_make_evidence(part),
        worst_format_snr_db=part.attainable_db,
        scale_ratio=part.factor,
    )


def _clips_bytes(levels: Levels | None, ratio: float) -> bool:
    """Return True if scales of 8-bit codes, ``ratio`` times good ones, clip the largest value."""
    return (
        levels is not None
        and levels.number >= LEVELS_OF_BYTE
        and 0 < ratio < 1
        and ratio * get_clipping_limit(levels) < 1
    )


def _report_underflow(pair: Pair, attainable: Attainable, part: BadRegion) -> Finding:
    """Report groups whose scales become zero or coarse next to far larger ones; an info if they are few."""
    are_many = part.number * part.size > MINOR_SHARE * attainable.n
    return make_finding(
        "underflow",
        "warning" if are_many else "info",
        pair.name,
        f"{display(pair.name)}: {_describe_place(part)}: next to the largest values, theirs are too small for the "
        f"scales of {pair.quantized.format}: they become zeros, or a few coarse values ({part.snr_db:.1f} dB at worst)",
        "leave this layer in higher precision if these values matter, or use a format whose scales have a wider range",
        **_make_evidence(part),
    )


def _describe_place(part: BadRegion) -> str:
    """Describe how many groups there are and where the worst is."""
    row, col = part.worst
    columns = f", columns from {col}" if col >= 0 else ""
    return f"{count(part.number, 'group')} of {part.size}, the worst at row {row}{columns}"


def _make_evidence(part: BadRegion) -> dict[str, object]:
    """Return the places and the worst SNR of groups, for the report."""
    places = [list(place) for place in part.places[:MAX_LISTED_PLACES]]
    return {"places": places, "number": part.number, "worst_snr_db": part.snr_db}
