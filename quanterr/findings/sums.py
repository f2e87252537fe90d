"""What the scales and sums of one weight show."""

from collections.abc import Iterator
from math import inf, isfinite, sqrt

from quanterr.findings.codes import finding
from quanterr.findings.excess import FINE_DB, underflows
from quanterr.findings.figures import bits_of, db, level_of, norm_ratio, usual_of
from quanterr.metrics import Measurement, cosine_similarity, snr_db
from quanterr.metrics.attainable import level
from quanterr.metrics.sums import Sums, as_float, worst_rows
from quanterr.pairing.model import ComparedWeight, Pair
from quanterr.report.base import Finding
from quanterr.util.text import count, display

# Bits of a code → SNR in dB: correct readings are above the first, incorrect ones below the second. Plain
# rounding of normal weights reaches 40 dB in 8 bits, 20 in 4, 13 in 3 and 7 in 2; outliers cost a few.
DOUBTFUL_DB = {1: -6.0, 2: 0.0, 3: 6.0}
BROKEN_DB = {1: -8.0, 2: -3.0, 3: 1.0}
USUALLY = 9.0, 3.0  # of more bits
ONLY_LENGTH = 0.99  # of a cosine: what is wrong is the scale and nothing else
SAME_DIRECTION = 0.9  # of a cosine: only the length differs
UNRELATED = 0.3
SAME_LENGTH = 0.8, 1.25  # of a norm ratio

USUAL_MARGIN_DB = 9.0  # below the usual level of a format; outliers cost up to 7.5, E5M2 is 6 below E4M3
MANY = 128  # elements: of fewer nothing is inferred from their distribution
SATURATED = 0.03, 4.0  # of the codes, and per scale: each block has its largest element there
BIASED = 0.3  # of the squared error, that the mean error makes; of rounding 1 / n
ROW_DB = 8.0  # a bad row is this far below its weight; the worst rows of valid weights with outliers were 7.6
ROW_DB_FEW = 6.0  # of at most 4 bits
ROW_DB_SHARED = 14.0  # where rows share scales: outliers of the others cost real models' rows up to 12
BELOW_LEVEL = 12.0  # dB, and by so much below what its bits usually reach: outliers of its own cost a row that
BELOW_LEVEL_FEW = 3.0
WEAK = 4  # a row with less energy than the mean by that factor may be lost by right scales


def of_weight(pair: Pair, done: ComparedWeight) -> Iterator[Finding]:
    """What one compared weight shows."""
    sums = done.sums
    if underflows(pair, sums) and not sums.nonfinite:
        yield _underflow(pair)
    for side, n in (("original", sums.nonfinite_original), ("quantized", sums.nonfinite_quantized)):
        if n:
            yield finding(
                f"nonfinite_{side}",
                "error",
                pair.name,
                f"{display(pair.name)}: {n:,} of {sums.elements:,} elements of the {side} weight are NaN or infinite",
                "quantize this layer again, or find out where the original overflowed",
                elements=n,
            )
    if done.scales:
        yield from _of_scales(pair, done)
    yield from _implausible_error(pair, sums)
    yield from _saturated(pair, done)
    yield from _biased_error(pair, sums)
    yield from _bad_rows(pair, done)
    if sums.n and not sums.x_sq and sums.e_sq:
        yield finding(
            "zero_original",
            "warning",
            pair.name,
            f"{display(pair.name)}: the original is all zeros, the quantized weight is not",
        )


def _underflow(pair: Pair) -> Finding:
    message = (
        f"{display(pair.name)}: its values are too small for the scales of {pair.quantized.format}, which are float16: "
        "they become zeros, or a few coarse values"
    )
    return finding("underflow", "warning", pair.name, message, "leave this layer in higher precision")


def _implausible_error(pair: Pair, sums: Sums) -> Iterator[Finding]:
    """A weight that is beyond any correct reading of its bit width: read wrong, or broken."""
    if sums.nonfinite:  # told already
        return
    if (sums.x_abs and not sums.x_sq) or (sums.e_abs and not sums.e_sq):
        message = (
            f"{display(pair.name)}: its values or errors are so small that their squares underflow: the error "
            "cannot be measured"
        )
        yield finding("implausible_error", "error", pair.name, message, "look for values below 1e-150 on either side")
        return
    if not sums.x_sq or not sums.e_sq or (len(pair.original.shape) < 2 and not pair.quantized.has_codes):
        return
    measured = Measurement(sums)
    bits = bits_of(pair)
    snr, ratio = snr_db(measured), norm_ratio(sums)
    if snr == inf:  # as near as numbers go
        return
    if not isfinite(snr):
        message = (
            f"{display(pair.name)}: its values as {pair.quantized.format} are too large for their error to be measured"
        )
        yield finding("implausible_error", "error", pair.name, message, "look for values beyond 1e150 on either side")
        return
    cosine = cosine_similarity(measured) if ratio else 0.0
    only_length = abs(cosine) > ONLY_LENGTH and snr < USUALLY[0]
    if not (snr < DOUBTFUL_DB.get(bits, USUALLY[0]) or only_length or cosine < UNRELATED):
        yield from _below_usual(pair, snr)
        return
    unrelated = cosine < UNRELATED and (ratio > 0 or bits > 1)  # symmetric codes of one bit may all be zero
    broken = snr < BROKEN_DB.get(bits, USUALLY[1]) or only_length or unrelated
    yield finding(
        "implausible_error",
        "error" if broken else "warning",
        pair.name,
        f"{display(pair.name)}: {snr:.1f} dB as {pair.quantized.format}; norm {ratio:.4g} times the "
        f"original's, cosine {cosine:.4f}: {_diagnosis(ratio, cosine)}",
        "compare the scale and the rows of this layer with what the quantizer wrote" if broken else None,
        snr_db=snr,
        norm_ratio=ratio,
        cosine_similarity=cosine,
    )


def _below_usual(pair: Pair, snr: float) -> Iterator[Finding]:
    """A weight in a format whose level hardly depends on the weight, and yet far below it."""
    usual = usual_of(pair.quantized.format)
    if usual and snr < usual[0] - USUAL_MARGIN_DB and len(pair.original.shape) > 1:
        yield finding(
            "below_usual",
            "warning",
            pair.name,
            f"{display(pair.name)}: {snr:.1f} dB as {pair.quantized.format}; {usual[0]} to {usual[1]} dB is usual",
            "quantize it again, or leave it in higher precision",
            snr_db=snr,
            usual_snr_db=list(usual),
        )


def _diagnosis(ratio: float, cosine: float) -> str:
    if not ratio:
        return "all its values are zero"
    if cosine > SAME_DIRECTION and abs(ratio - cosine) > sqrt(1 - cosine * cosine):
        return f"the scale is wrong by about that factor ({ratio:.4g})"
    if cosine < -SAME_DIRECTION:
        return "the sign is inverted"
    if abs(cosine) < UNRELATED and SAME_LENGTH[0] < ratio < SAME_LENGTH[1]:
        return "rows or columns permuted, a rotation, or another tensor"
    if abs(cosine) < UNRELATED:
        return "another tensor, or a wrong reading"
    return "outliers that one scale cannot represent, or a damaged layer"


def _of_scales(pair: Pair, done: ComparedWeight) -> Iterator[Finding]:
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
            yield finding(code, severity, pair.name, message, remedy, scales=n)


def _saturated(pair: Pair, done: ComparedWeight) -> Iterator[Finding]:
    """Codes at the end of their range; of those that a format counts."""
    sums, scales = done.sums, done.scales
    if not scales or sums.n < MANY or sums.saturated <= SATURATED[0] * sums.n + SATURATED[1] * scales.number:
        return
    if _is_fine(sums):  # ternary values are all at an end
        return
    share = 100 * sums.saturated / sums.n
    yield finding(
        "saturated",
        "warning",
        pair.name,
        f"{display(pair.name)}: {share:.3g} % of the codes are at the end of their range: larger values were clipped",
        "use a larger scale, or finer ones",
        saturated_pct=share,
    )


def _biased_error(pair: Pair, sums: Sums) -> Iterator[Finding]:
    """Errors whose mean is no accident: zero points that are off, or rounding that always goes one way."""
    if sums.n < MANY or not sums.e_sq or len(pair.original.shape) < 2 or not pair.quantized.has_codes:
        return
    mean, square = as_float(sums.e) / sums.n, as_float(sums.e_sq) / sums.n
    share = mean * mean / square if square else 0.0
    if not share > BIASED or _is_fine(sums):  # of values that are all alike, those of a shift in float16
        return
    yield finding(
        "biased_error",
        "warning",
        pair.name,
        f"{display(pair.name)}: the error is biased: its mean {mean:.4g} makes up {share:.0%} of the squared "
        "error; the zero points are wrong, or rounding always goes one way",
        "compare zero points (some formats store them minus one) and rounding with the quantizer's",
        mean_error=mean,
        share=share,
    )


def _is_fine(sums: Sums) -> bool:
    return level(as_float(sums.x_sq), as_float(sums.e_sq)) > FINE_DB


def _bad_rows(pair: Pair, done: ComparedWeight) -> Iterator[Finding]:
    """Rows that were lost, or came out far worse than their weight, of the few worst that are kept."""
    rows, sums = pair.original.matrix[0], done.sums
    if rows < 2 or not sums.x_sq or not sums.e_sq or not pair.quantized.has_codes:
        return
    strong = [(n, row) for n, row in worst_rows(sums.rows.items()) if row.x_sq * rows * WEAK > sums.x_sq]
    dead = [n for n, row in strong if row.dead]
    bits = bits_of(pair)
    below, below_level = (ROW_DB_FEW, BELOW_LEVEL_FEW) if bits <= 4 else (ROW_DB, BELOW_LEVEL)
    if _rows_share_scales(pair, done):
        below = ROW_DB_SHARED
    limit = min(db(sums.x_sq, sums.e_sq) - below, level_of(bits) - below_level)
    bad = [n for n, row in strong if n not in dead and row.e_sq and bits > 1 and db(row.x_sq, row.e_sq) < limit]
    if dead and sums.y_sq:
        number, numbers = max(sums.dead_rows, len(dead)), ", ".join(map(str, dead))
        message = (
            f"{display(pair.name)}: {count(number, 'row')} of zeros that the original does not have: {numbers}"
            f"{', …' if number > len(dead) else ''}"
        )
        yield finding("dead_rows", "warning", pair.name, message, "quantize this layer again", rows=dead, number=number)
    if bad:
        worst = db(*next((row.x_sq, row.e_sq) for n, row in strong if n == bad[0]))
        message = (
            f"{display(pair.name)}: {worst:.1f} dB in row {bad[0]}, {db(sums.x_sq, sums.e_sq):.1f} dB overall: "
            f"{count(len(bad), 'row')} with far more error than the rest ({', '.join(map(str, bad))})"
        )
        yield finding("bad_rows", "warning", pair.name, message, rows=bad, worst_row_snr_db=worst)


def _rows_share_scales(pair: Pair, done: ComparedWeight) -> bool:
    if pair.quantized.block_size:
        return pair.quantized.block_size[0] > 1
    return done.scales is not None and done.scales.number < pair.original.matrix[0]
