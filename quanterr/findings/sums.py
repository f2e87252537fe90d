"""Findings from the scales and sums of one weight."""

from collections.abc import Iterator, Sequence
from math import inf, isfinite, log10, sqrt

from quanterr.documents.base import Finding
from quanterr.findings.checks import RESULT, WEIGHT, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import MeasuredWeight
from quanterr.findings.error_figures import (
    compute_norm_ratio,
    compute_ratio_db,
    find_bits,
    find_min_level,
    find_usual_range,
)
from quanterr.findings.excess import NIBBLE_BITS, find_allowed_overshoot, underflows
from quanterr.findings.limits import (
    ALIGNED_COSINE,
    BIT_DB,
    CHANCE_DEVIATIONS,
    DOUBLE_DB,
    FINE_DB,
    MAX_METHOD_LOSS_DB,
    MIN_VALUES,
    MINOR_SHARE,
    MISMATCH_FACTOR,
    NEGLIGIBLE_SHARE,
    UNRELATED_COSINE,
)
from quanterr.metrics import Measurement, cosine_similarity, snr_db
from quanterr.metrics.attainable import level
from quanterr.metrics.sums import KEPT_ROWS, RowSums, Sums, as_float
from quanterr.pairing.model import Pair, WeightResult
from quanterr.util.text import count, display

MAX_MEAN_SHARE = 0.3  # share of the squared error that comes from the mean error; rounding causes 1 / n
# Correct scales may lose a row whose energy is less than the mean by this factor, and may each saturate so many codes.
WEAK_ROW_FACTOR = 4


@check(
    *("nonfinite_original", "nonfinite_quantized", "scale_nonfinite", "scale_negative", "scale_zero", "underflow"),
    *("implausible_error", "below_usual", "saturated", "biased_error", "dead_rows", "bad_rows", "zero_original"),
    needs=RESULT,
    of=WEIGHT,
)
def check_weight(weight: MeasuredWeight) -> Iterator[Finding]:
    """Report faults that the scales and sums of one weight show."""
    pair, done, sums = weight.pair, weight.done, weight.done.sums
    if underflows(pair, sums) and not sums.nonfinite:
        yield _report_underflow(pair, level(as_float(sums.x_sq), as_float(sums.e_sq)))
    for side, n in (("original", sums.nonfinite_original), ("quantized", sums.nonfinite_quantized)):
        if n:
            yield make_finding(
                f"nonfinite_{side}",
                "error",
                pair.name,
                f"{display(pair.name)}: {n:,} of {sums.elements:,} elements of the {side} weight are NaN or infinite",
                "quantize this layer again, or find out where the original overflowed",
                elements=n,
            )
    if done.scales:
        yield from _check_scales(pair, done)
    yield from _check_plausibility(pair, sums)
    yield from _check_saturation(pair, done)
    yield from _check_bias(pair, sums)
    yield from _check_rows(pair, done)
    if sums.n and not sums.x_sq and sums.e_sq:
        yield make_finding(
            "zero_original",
            "warning",
            pair.name,
            f"{display(pair.name)}: the original is all zeros, the quantized weight is not",
        )


def _report_underflow(pair: Pair, snr_db: float) -> Finding:
    """Report a weight whose values are too small for its format; an error if most of its energy is lost."""
    message = (
        f"{display(pair.name)}: its values are too small for the scales of {pair.quantized.format}, which are float16: "
        f"they become zeros, or a few coarse values ({snr_db:.1f} dB)"
    )
    severity = "error" if snr_db < DOUBLE_DB else "warning"
    return make_finding("underflow", severity, pair.name, message, "leave this layer in higher precision")


def _check_plausibility(pair: Pair, sums: Sums) -> Iterator[Finding]:
    """Report a weight whose error is larger than quantization to its bits explains: misread, or broken."""
    if sums.nonfinite:  # reported already
        return
    if (sums.x_abs and not sums.x_sq) or (sums.e_abs and not sums.e_sq):
        message = (
            f"{display(pair.name)}: its values or errors are so small that their squares underflow: the error "
            "cannot be measured"
        )
        yield make_finding(
            "implausible_error", "error", pair.name, message, "look for values below 1e-150 on either side"
        )
        return
    if not sums.x_sq or not sums.e_sq or (len(pair.original.shape) < 2 and not pair.quantized.has_codes):
        return
    measured = Measurement(sums)
    bits = find_bits(pair)
    snr, ratio = snr_db(measured), compute_norm_ratio(sums)
    if snr == inf:
        return
    if not isfinite(snr):
        message = (
            f"{display(pair.name)}: its values as {pair.quantized.format} are too large for their error to be measured"
        )
        yield make_finding(
            "implausible_error", "error", pair.name, message, "look for values beyond 1e150 on either side"
        )
        return
    cosine = cosine_similarity(measured) if ratio else 0.0
    doubtful_db = min(BIT_DB * (bits - 2), 3 * DOUBLE_DB)  # rounding of normal weights to the nearest has far more
    only_length = abs(cosine) > 1 - NEGLIGIBLE_SHARE and snr < 3 * DOUBLE_DB
    if not (snr < doubtful_db or only_length or cosine < UNRELATED_COSINE):
        yield from _check_usual_level(pair, snr)
        return
    unrelated = cosine < UNRELATED_COSINE and (ratio > 0 or bits > 1)  # symmetric codes of one bit may all be zero
    broken = snr < doubtful_db - BIT_DB or only_length or unrelated
    yield make_finding(
        "implausible_error",
        "error" if broken else "warning",
        pair.name,
        f"{display(pair.name)}: {snr:.1f} dB as {pair.quantized.format}; norm {ratio:.4g} times the "
        f"original's, cosine {cosine:.4f}: {_diagnose(ratio, cosine)}",
        "quantize this layer again; if the error returns, the quantizer writes wrong codes or scales"
        if broken
        else None,
        snr_db=snr,
        norm_ratio=ratio,
        cosine_similarity=cosine,
    )


def _check_usual_level(pair: Pair, snr: float) -> Iterator[Finding]:
    """Report a weight far below the usual level of its format, if this level hardly depends on the weight."""
    usual = find_usual_range(pair.quantized.format)
    if usual and snr < usual[0] - MAX_METHOD_LOSS_DB and len(pair.original.shape) > 1:
        yield make_finding(
            "below_usual",
            "warning",
            pair.name,
            f"{display(pair.name)}: {snr:.1f} dB as {pair.quantized.format}; {usual[0]} to {usual[1]} dB is usual",
            "quantize it again, or leave it in higher precision",
            snr_db=snr,
            usual_snr_db=list(usual),
        )


def _diagnose(ratio: float, cosine: float) -> str:
    """Return the likely cause of an implausible norm ratio and cosine."""
    if not ratio:
        return "all its values are zero"
    if cosine > ALIGNED_COSINE and abs(ratio - cosine) > sqrt(1 - cosine * cosine):
        return f"the scale is wrong by a factor of about {ratio:.4g}"
    if cosine < -ALIGNED_COSINE:
        return "the sign is inverted"
    if abs(cosine) < UNRELATED_COSINE and 1 / MISMATCH_FACTOR < ratio < MISMATCH_FACTOR:
        return "rows or columns permuted, a rotation, or another tensor"
    if abs(cosine) < UNRELATED_COSINE:
        return "another tensor, or one decoded in a wrong way"
    return "large outliers, beside which other values become zeros, or a damaged layer"


def _check_scales(pair: Pair, done: WeightResult) -> Iterator[Finding]:
    """Report scales that are not finite, negative or zero."""
    scales = done.scales
    if scales is None:
        return
    name = pair.quantized.scale.name if pair.quantized.scale else ""
    for code, n, severity, what in (
        ("scale_nonfinite", scales.nonfinite, "error", "NaN or infinite"),
        ("scale_negative", scales.negative, "warning", "negative"),
        ("scale_zero", scales.zero, "warning", "zero"),
    ):
        if n:
            message = f"{display(pair.name)}: {n:,} of {scales.number:,} scales in {display(name)} are {what}"
            remedy = None if severity == "warning" else "quantize this layer again"
            yield make_finding(code, severity, pair.name, message, remedy, scales=n)


def _check_saturation(pair: Pair, done: WeightResult) -> Iterator[Finding]:
    """Report too many codes at the ends of their range, for formats that count them."""
    sums, scales = done.sums, done.scales
    if not scales or sums.n < MIN_VALUES or sums.saturated <= MINOR_SHARE * sums.n + WEAK_ROW_FACTOR * scales.number:
        return
    if _is_fine(sums):  # all nonzero ternary values are at an end of the range
        return
    share = 100 * sums.saturated / sums.n
    yield make_finding(
        "saturated",
        "warning",
        pair.name,
        f"{display(pair.name)}: {share:.3g} % of the codes are at the end of their range: larger values were clipped",
        "use larger scales, or smaller groups",
        saturated_pct=share,
    )


def _check_bias(pair: Pair, sums: Sums) -> Iterator[Finding]:
    """Report errors whose mean is not due to chance: wrong zero points, or rounding that always goes one way."""
    if not sums.e_sq or len(pair.original.shape) < 2 or not pair.quantized.has_codes:
        return
    mean, square = as_float(sums.e) / sums.n, as_float(sums.e_sq) / sums.n
    share = mean * mean / square if square else 0.0
    by_chance = CHANCE_DEVIATIONS**2 / sums.n  # the mean of independent errors has a standard error of their size / √n
    # Rounding an offset to float16 biases a constant weight, whose SNR is high.
    if not share > max(MAX_MEAN_SHARE, by_chance) or _is_fine(sums):
        return
    yield make_finding(
        "biased_error",
        "warning",
        pair.name,
        f"{display(pair.name)}: the error is biased: its mean {mean:.4g} makes up {share:.0%} of the squared "
        "error; the zero points are wrong, or rounding always goes one way",
        "quantize it again; if the bias returns, check the quantizer's zero points (some formats store them minus one) "
        "and its rounding",
        mean_error=mean,
        share=share,
    )


def _is_fine(sums: Sums) -> bool:
    """Return True if the SNR is so high that neither saturated codes nor a bias matter."""
    return level(as_float(sums.x_sq), as_float(sums.e_sq)) > FINE_DB


def _check_rows(pair: Pair, done: WeightResult) -> Iterator[Finding]:
    """Report rows that were lost, or are far worse than their weight, among the KEPT_ROWS worst rows."""
    rows, sums = pair.original.matrix[0], done.sums
    if rows < 2 or not sums.x_sq or not sums.e_sq or not pair.quantized.has_codes:
        return
    bits = find_bits(pair)
    below, below_level = (BIT_DB, DOUBLE_DB) if bits <= NIBBLE_BITS else (MAX_METHOD_LOSS_DB, 2 * BIT_DB)
    if _rows_share_scales(pair, done):
        below = MAX_METHOD_LOSS_DB + BIT_DB  # in real models outliers of other rows cost up to 12
    # The level of a row whose energy is in one clipped value.
    clipped_db = -20 * log10(find_allowed_overshoot(pair.quantized.levels))
    limit = min(compute_ratio_db(sums.x_sq, sums.e_sq) - below, find_min_level(bits) - below_level, clipped_db)
    worst = sums.worst_rows
    if not any(row.zeroed for _, row in worst) and _is_above(worst, limit):
        return
    strong = [(n, row) for n, row in worst if row.x_sq * rows * WEAK_ROW_FACTOR > sums.x_sq]
    dead = [n for n, row in strong if row.dead]
    bad = [
        n
        for n, row in strong
        if n not in dead and row.e_sq and bits > 1 and compute_ratio_db(row.x_sq, row.e_sq) < limit
    ]
    if dead and sums.y_sq:
        number, numbers = max(sums.dead_rows, len(dead)), ", ".join(map(str, dead))
        message = (
            f"{display(pair.name)}: {count(number, 'row')} of zeros that the original does not have: {numbers}"
            f"{', …' if number > len(dead) else ''}"
        )
        yield make_finding(
            "dead_rows", "warning", pair.name, message, "quantize this layer again", rows=dead, number=number
        )
    if bad:
        worst_db = compute_ratio_db(*next((row.x_sq, row.e_sq) for n, row in strong if n == bad[0]))
        at_least = "at least " if len(bad) == KEPT_ROWS else ""
        message = (
            f"{display(pair.name)}: {worst_db:.1f} dB in row {bad[0]}, {compute_ratio_db(sums.x_sq, sums.e_sq):.1f} dB "
            "overall: "
            f"{at_least}{count(len(bad), 'row')} with far more error than the rest ({', '.join(map(str, bad))})"
        )
        yield make_finding("bad_rows", "warning", pair.name, message, rows=bad, worst_row_snr_db=worst_db)


def _is_above(worst: Sequence[tuple[int, RowSums]], limit: float) -> bool:
    """Return True if no row, the worst first, has an SNR below a limit in dB."""
    return not worst or (worst[0][1].x_sq > 0 and compute_ratio_db(worst[0][1].x_sq, worst[0][1].e_sq) >= limit)


def _rows_share_scales(pair: Pair, done: WeightResult) -> bool:
    """Return True if several rows share a scale."""
    if pair.quantized.block_size:
        return pair.quantized.block_size[0] > 1
    return done.scales is not None and done.scales.number < pair.original.matrix[0]
