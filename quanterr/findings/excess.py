"""Errors larger than a weight's stored scales allow, and errors of values that the scales clip."""

from collections.abc import Iterator
from math import ceil, inf, isfinite, log2, log10, sqrt

from quanterr.documents.base import Finding
from quanterr.findings.checks import RESULT, WEIGHT, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import MeasuredWeight
from quanterr.findings.error_figures import compute_ratio_db, find_bits, find_min_level
from quanterr.findings.limits import (
    BIT_DB,
    DOUBLE_DB,
    FACTOR_TOLERANCE,
    FINE_DB,
    FLOAT32_TOLERANCE,
    MAJOR_SHARE,
    MAX_METHOD_LOSS_DB,
    MIN_PEERS,
    MIN_VALUES,
    MINOR_SHARE,
    MISMATCH_FACTOR,
    NEAR_DB,
    NEGLIGIBLE_SHARE,
    RANDOM_DB,
    SLIGHT_DB,
    SMALL_DB,
)
from quanterr.findings.methods import ROUNDING, Method
from quanterr.formats import find_rows
from quanterr.kernel.levels import SUBNORMAL, Levels
from quanterr.metrics.attainable import Attainable, BadRegion, level
from quanterr.metrics.sums import Sums, as_float, ratio
from quanterr.pairing.model import Pair, WeightResult
from quanterr.util.text import count, display

CODES_BY_REGION = {"row": "excess_rows", "column": "excess_columns", "tile": "excess_blocks"}
MAX_LISTED_PLACES = 6
# Parts that are rounded after the codes. bitsandbytes' double quantization rounds the scales of 256 blocks to 8-bit
# codes with a common scale, which changes small scales by up to 1/7 (real weights). SDNQ rounds the low-rank branch.
# MLX rounds minima to BF16, which moves 8-bit codes by up to half a step, and others by less.
NESTED, LOW_RANK, MINIMUM = "nested_absmax", "svd_up", "bias"
ZERO_POINTS = "zero_point", "offset", "zero"
MAX_OVERSHOOT = 0.15  # share of a value that may be clipped: power-of-two scales and ggml's signed 4 bits clip 12.5 %
EVEN_MEAN_SQUARE = 1 / 12  # mean square of errors that are spread evenly over a step
NIBBLE_BITS, BYTE_BITS = 4, 8


def has_nearest_codes(pair: Pair, done: WeightResult, method: Method) -> bool:
    """Return True if a weight is about as good as its scales allow, so that other codes would not be better."""
    attainable = done.attainable
    if attainable is None or attainable.excess_db >= NEAR_DB or not _is_representative(pair, done, attainable):
        return False
    part = _choose_part(pair, attainable, method)
    return part is None or _rate_part(pair, attainable, part, method) == "info"


def has_usual_excess(pair: Pair, done: WeightResult, method: Method) -> bool:
    """Return True if the loss compared with the nearest codes is usual for the method, however low the SNR is."""
    attainable = done.attainable
    if attainable is None or not _is_representative(pair, done, attainable):
        return False
    return attainable.weighted_excess_db <= method.max_loss_db


def is_repairable(pair: Pair, done: WeightResult) -> bool:
    """Return True if so much of the error is avoidable that the weight may be faulty."""
    attainable = done.attainable
    return attainable is None or attainable.avoidable_db >= DOUBLE_DB or not _is_representative(pair, done, attainable)


def _is_representative(pair: Pair, done: WeightResult, attainable: Attainable) -> bool:
    """Return True if the sample represents the whole weight and its scales are meaningful."""
    sums = done.sums
    if sums.nonfinite or not sums.y_sq:
        return False
    if (attainable.stored_sq is None and attainable.snr_db <= 0) or _clips(pair, attainable):
        return False  # zeros would be better, so the scales themselves are wrong, or too coarse for a conclusion
    return attainable.represents(sums, NEAR_DB)


def rounds_one_way(done: WeightResult) -> bool:
    """Return True if values were always rounded to the same side, or towards zero.

    The rounded values are then too small, too large or biased.
    """
    attainable = done.attainable
    return attainable is not None and _classify_rounding(done, attainable) == ONE_WAY


def fits_signed_scales(done: WeightResult) -> bool:
    """Return True if the codes fit the signs of their scales, which AutoRound and ggml's Q4_0 may write negative."""
    attainable = done.attainable
    if attainable is None or attainable.excess_db >= MAX_METHOD_LOSS_DB or attainable.snr_db <= 0:
        return False
    return not any(part.factor < 0 for part in attainable.parts)


def is_better_than_rounding(pair: Pair, done: WeightResult) -> bool:
    """Return True if the errors are far below rounding errors, because the original already holds values of codes."""
    attainable, sums = done.attainable, done.sums
    if (
        attainable is None
        or attainable.rounding is None
        or sums.n < MIN_VALUES**2
        or pair.original.has_codes
        or not sums.x_nonzero
    ):
        return False
    if find_bits(pair) < NIBBLE_BITS:
        return False
    has_few_errors = attainable.rounding * sums.n / sums.x_nonzero < MAJOR_SHARE * EVEN_MEAN_SQUARE
    return has_few_errors and attainable.snr_db > _find_best_db(pair)


def _find_best_db(pair: Pair) -> float:
    """Return an SNR in dB that rounding cannot reach.

    The bound holds for any values if codes have a mantissa, otherwise for values that are evenly distributed over the
    range of the codes.
    """
    levels = pair.quantized.levels
    if levels and levels.mantissa:
        return BIT_DB * (levels.mantissa + 1) - 10 * log10(EVEN_MEAN_SQUARE)
    return BIT_DB * find_bits(pair) + DOUBLE_DB


@check(
    *("excess_error", "excess_rows", "excess_columns", "excess_blocks", "clipped"),
    needs=RESULT,
    of=WEIGHT,
)
def check_excess(weight: MeasuredWeight) -> Iterator[Finding]:
    """Report a weight, or the worst of its parts, with more error than its scales allow, and clipped values."""
    pair, done, method, _ = weight
    attainable = done.attainable
    if attainable is None or attainable.n < MIN_VALUES or level(attainable.x_sq, attainable.e_sq) > FINE_DB:
        return
    rounded = _classify_rounding(done, attainable)
    severity, part = _rate_weight(pair, attainable, method, rounded), _choose_part(pair, attainable, method)
    if part and severity in (None, "info"):
        yield _report_part(pair, attainable, part, method)
        for other in attainable.parts:  # rows without such a tile have another fault
            if other.kind == "row" and part.kind == "tile" and part.worst[0] not in {row for row, _ in other.places}:
                yield _report_part(pair, attainable, other, method)
    elif severity:
        yield _report_weight(pair, done, attainable, severity, part, rounded)
    if _clips(pair, attainable):
        yield _report_clipping(pair, attainable)


def _rate_weight(pair: Pair, attainable: Attainable, method: Method, rounded: str | None) -> str | None:
    """Return the severity of a weight that is worse than its scales allow; None if the loss is slight."""
    excess = attainable.weighted_excess_db
    if attainable.excess_db <= SLIGHT_DB:
        return None
    if rounded == ONE_WAY and excess > ROUNDING.max_loss_db:
        return "warning"  # no method truncates
    if method.learns and rounded is None and excess > NEAR_DB:
        return "warning"  # a method that learns takes one of the two codes around each value
    if rounded == AT_RANDOM and not method.by_importance:
        is_declared = method.learns or method.compensates
        # Rounding at random costs 3 dB, an arbitrary choice between both codes 6. GPTQ costs more than 5 only if it
        # also chooses other codes.
        min_excess = ROUNDING.max_loss_db if is_declared else RANDOM_DB
        return "warning" if min_excess <= excess <= MAX_METHOD_LOSS_DB else "info"
    if not method.is_nearest and excess <= method.max_loss_db:
        return "info"
    are_far = find_bits(pair) >= BYTE_BITS and _compute_off_pct(attainable) > 100 * MINOR_SHARE
    is_folded = method.folded and not method.may_compensate  # inexact factors of rows and columns cost 0.7 dB
    if excess > (ROUNDING.max_loss_db if are_far else MAX_METHOD_LOSS_DB):
        return "error" if rounded is None and not (method.learns or method.may_compensate) else "warning"
    return (
        "warning"
        if excess
        > (DOUBLE_DB if are_far or is_folded or _must_be_nearest(pair, attainable, method) else method.max_loss_db)
        else "info"
    )


def has_moved_codes(pair: Pair, done: WeightResult, method: Method) -> bool:
    """Return True if 8-bit codes are two or more steps off, although only scales were rounded after them."""
    attainable = done.attainable
    return attainable is not None and attainable.off > 0 and find_bits(pair) >= BYTE_BITS and _keeps_codes(pair, method)


def _must_be_nearest(pair: Pair, attainable: Attainable, method: Method) -> bool:
    """Return True if 8-bit codes must be the nearest: values were not moved, and only scales rounded afterwards."""
    return not method.may_compensate and _keeps_codes(pair, method) and attainable.snr_db > find_min_level(BYTE_BITS)


def _keeps_codes(pair: Pair, method: Method) -> bool:
    """Return True if values were neither scaled nor rotated, and only scales may be rounded after the codes."""
    rounded_roles = (MINIMUM, LOW_RANK, NESTED, *ZERO_POINTS)
    are_moved = (
        any(name.endswith(rounded_roles) for name in pair.quantized.parts) or method.folded or method.by_importance
    )
    return not (are_moved or pair.quantized.rotated)


NEARLY, AT_RANDOM, ONE_WAY = "", ": rounded at random", ": truncated, or always rounded up or down"
REMEDIES_BY_ROUNDING = {  # remedies of warnings and infos
    None: "compare with the checkpoint that was quantized: another revision or training step has other values",
    AT_RANDOM: "round to the nearest codes, as rounding at random costs 3 dB",
}


def _classify_rounding(done: WeightResult, attainable: Attainable) -> str | None:
    """Return how values were rounded to one of the two codes around them; None if other codes occur."""
    sums = done.sums
    if attainable.beyond_sq > NEGLIGIBLE_SHARE * attainable.e_sq or not sums.e_sq or not sums.x_sq:
        return None
    if attainable.excess_db < DOUBLE_DB - SLIGHT_DB:
        return NEARLY
    of_factor = ratio(as_float(sums.xy - sums.x_sq), sqrt(as_float(sums.x_sq)) * sqrt(as_float(sums.e_sq))) ** 2
    of_mean = ratio(as_float(sums.e), sqrt(sums.n) * sqrt(as_float(sums.e_sq))) ** 2
    return AT_RANDOM if max(of_factor, of_mean) < MINOR_SHARE else ONE_WAY


def _compute_off_pct(attainable: Attainable) -> float:
    """Return the percentage of codes that are two or more steps off, without clipped values."""
    return 100 * attainable.off / max(attainable.n - attainable.clipped, 1)


def compare_whole_with_sample(done: WeightResult, attainable: Attainable) -> float:
    """Return by how many dB the SNR of the whole weight, which reports show, exceeds that of its sampled rows.

    The result is 0 if the weight is zero or exact.
    """
    sums = done.sums
    return (
        compute_ratio_db(sums.x_sq, sums.e_sq) - level(attainable.x_sq, attainable.e_sq)
        if sums.x_sq and sums.e_sq
        else 0.0
    )


def _report_weight(
    pair: Pair, done: WeightResult, attainable: Attainable, severity: str, part: BadRegion | None, rounded: str | None
) -> Finding:
    """Report a weight with more error than its scales allow."""
    snr, off = level(attainable.x_sq, attainable.e_sq), _compute_off_pct(attainable)
    more = compare_whole_with_sample(done, attainable)
    steps = (
        f"{off:.3g} % of its codes are two or more steps off" if attainable.off else "each code is at most one step off"
    )
    if rounded is not None:
        steps = f"each code is one of the two next to its value{rounded}"
    what = f"{snr + more:.1f} dB, where its stored scales allow {_describe_limit(attainable.snr_db + more)}"
    if snr == -inf:
        what = "its values are not zero, but the original's are"
    message = f"{display(pair.name)}: {what}: {steps}"
    remedy = "quantize this layer again; if the error returns, the quantizer writes wrong codes, or in a wrong order"
    if severity != "error":
        remedy = REMEDIES_BY_ROUNDING.get(rounded, "check how values were rounded: truncation costs 6 dB")
    return make_finding(
        "excess_error",
        severity,
        pair.name,
        f"{message}; {_describe_part(part)}" if part else message,
        remedy,
        snr_db=snr,
        attainable_snr_db=attainable.snr_db,
        excess_db=attainable.excess_db,
        off_code_pct=off,
        **_make_evidence(part),
    )


def _report_part(pair: Pair, attainable: Attainable, part: BadRegion, method: Method) -> Finding:
    """Report rows, columns or a tile with more error than their scales allow."""
    return make_finding(
        CODES_BY_REGION[part.kind],
        _rate_part(pair, attainable, part, method),
        pair.name,
        f"{display(pair.name)}: {_describe_part(part)}",
        "quantize this layer again; if the error returns, the quantizer writes wrong codes there",
        **_make_evidence(part),
    )


def _rate_part(pair: Pair, attainable: Attainable, part: BadRegion, method: Method) -> str:
    """Return ``warning`` for a large loss of a part, but ``info`` for a loss that the format or the method causes.

    These losses are caused by scales or a low-rank branch that are rounded after the codes, by errors that accumulated
    in columns, if no factor explains them, by inexactly undone factors, and by scales so small that rounding them loses
    digits. If a norm has the exact factors (``by_norm``), a column with another factor is a fault.
    """
    of_codes = BIT_DB if attainable.excess_db > SLIGHT_DB or method.by_importance else ROUNDING.max_loss_db
    is_small = _compute_lost_db(part) < (DOUBLE_DB if part.apart else of_codes)
    is_accumulated = method.compensates and part.kind == "column" and not isfinite(part.factor)
    is_given_up = method.by_importance and part.kind != "row" and part.is_scattered
    if method.by_norm and part.kind == "column" and isfinite(part.factor):
        return "warning" if attainable.excess_db > SLIGHT_DB or _compute_lost_db(part) >= DOUBLE_DB else "info"
    # Undone factors belong to whole rows or columns, so an inexact one causes errors of a column, or a row's factor.
    is_inexact = method.folded and part.snr_db > BIT_DB and (part.kind == "column" or isfinite(part.factor))
    is_caused = is_accumulated or is_given_up or is_inexact or _is_rounded_afterwards(pair, part)
    return "info" if is_small or is_caused or _is_limited_by_min_scale(pair, attainable, part) else "warning"


def _is_rounded_afterwards(pair: Pair, part: BadRegion) -> bool:
    """Return True if rounding of a scale, a minimum or a low-rank branch after the codes explains a part's error."""

    def has(role: str) -> bool:
        return any(name.endswith(role) for name in pair.quantized.parts)

    if has(NESTED):
        return part.kind == "tile" and 1 / MISMATCH_FACTOR < part.factor < MISMATCH_FACTOR
    if part.apart:
        return False
    # Rounding a scale and a minimum to BF16 moves 8-bit codes by half a step each, which costs 11.1 dB.
    return (has(LOW_RANK) and part.louder_db <= 2 * BIT_DB) or (
        has(MINIMUM) and find_bits(pair) >= BYTE_BITS and _compute_lost_db(part) <= 2 * BIT_DB
    )


def _is_limited_by_min_scale(pair: Pair, attainable: Attainable, part: BadRegion) -> bool:
    """Return True if half of the smallest scale that can be stored explains the error of a part.

    Groups multiply a shared scale by up to ``steps.scales``, and thereby also its rounding error, which is at most half
    of the smallest scale. IQ4_XS computes codes before it rounds this scale (ggml-quants.c of llama.cpp,
    quantize_row_iq4_nl_impl).
    """
    min_scale, levels, steps = find_min_scale(pair), pair.quantized.levels, pair.quantized.scale_steps
    if not min_scale or levels is None:
        return False
    largest = max(1.0, steps.scales / 2) if steps else 1.0
    squared_error = 10 ** (part.louder_db / 10) * attainable.e_sq / max(attainable.n, 1)
    return sqrt(squared_error) <= largest * min_scale * (levels.highest - levels.lowest) / 2


def _compute_lost_db(part: BadRegion) -> float:
    """Return the loss in dB of a part; if only this part has a scale that is too large, including that loss."""
    return part.attainable_db - part.snr_db + (20 * log10(part.factor) if part.apart and part.factor > 1 else 0.0)


def _describe_part(part: BadRegion) -> str:
    """Describe a part: its place, its SNR and what its scales allow."""
    if part.snr_db == -inf:
        return f"{_name_part(part)}: values that are not zero, where the original has only zeros"
    how = ""
    if isfinite(part.factor) and abs(part.factor - 1) > FACTOR_TOLERANCE:
        how = ", all zero" if abs(part.factor) < FLOAT32_TOLERANCE else f", {part.factor:.3g} times the original's"
    allowed = _describe_limit(part.attainable_db)
    return f"{_name_part(part)}: {part.snr_db:.1f} dB at worst{how}; their scales allow {allowed}"


def _describe_limit(snr_db: float) -> str:
    return "exact values" if snr_db == inf else f"{snr_db:.1f} dB"


def _make_evidence(part: BadRegion | None) -> dict[str, object]:
    """Return the places and numbers of a part, for the report."""
    if part is None:
        return {}
    return {
        "places": [list(place) for place in part.places[:MAX_LISTED_PLACES]],
        "number": part.number,
        "worst_snr_db": part.snr_db,
        "worst_attainable_snr_db": part.attainable_db,
        "factor": part.factor,
    }


def _choose_part(pair: Pair, attainable: Attainable, method: Method) -> BadRegion | None:
    """Return the rows, columns or tiles that describe the loss best, or None.

    Warnings come first, then rows or columns that differ from the rest by a factor, then parts with the smallest number
    of elements. If scales cause losses, parts without better codes are left to the findings about scales.
    """
    if not attainable.parts:
        return None
    of_scales = any(part.kind not in CODES_BY_REGION for part in attainable.parts)
    parts = [
        part
        for part in attainable.parts
        if part.kind in CODES_BY_REGION and not (of_scales and _has_no_better_codes(part))
    ]

    rows = {row: part.snr_db for part in parts if part.kind == "row" for row, _ in part.places}
    # A tile that is no worse than its row is reported with the row.
    parts = [part for part in parts if part.kind != "tile" or part.snr_db < rows.get(part.worst[0], inf)]

    def order(part: BadRegion) -> tuple[bool, bool, int]:
        is_info = _rate_part(pair, attainable, part, method) == "info"
        return is_info, part.kind == "tile" or not part.apart, part.number * part.size

    return min(parts, key=order, default=None)


def _has_no_better_codes(part: BadRegion) -> bool:
    """Return True if other codes would gain less than SLIGHT_DB."""
    return part.attainable_db - part.snr_db < SLIGHT_DB


def _name_part(part: BadRegion) -> str:
    """Name the rows, columns or tiles of a part; consecutive numbers become a range."""
    if part.kind == "tile":
        row, col = part.worst
        return f"{count(part.number, 'block')} of 64 columns, the worst at row {row}, columns {col} to {col + 63}"
    axis = 0 if part.kind == "row" else 1
    numbers = [place[axis] for place in part.places]
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(a) if a == b else f"{a} to {b}" for a, b in runs[:MAX_LISTED_PLACES]]
    more = ", …" if len(runs) > MAX_LISTED_PLACES or part.number > len(numbers) else ""
    return f"{count(part.number, f'sampled {part.kind}')} ({', '.join(words)}{more})"


def _clips(pair: Pair, attainable: Attainable) -> bool:
    """Return True if clipping costs more than any quantizer accepts, and larger scales reduce the error.

    Even the best scales clip the tail, and clipped values may cause most of the remaining error. If the share of values
    beyond t falls as t^-k, clipping costs 10·log10(1 + 2 / (k - 2)) dB.
    """
    are_few = attainable.clipped <= MIN_PEERS and attainable.n < pair.quantized.n
    if not attainable.clipped or are_few or attainable.snr_db > FINE_DB:
        return False
    levels = pair.quantized.levels
    is_fine = find_bits(pair) >= BYTE_BITS and not (levels and levels.mantissa)
    if not is_fine and attainable.clipped_sq <= find_allowed_overshoot(levels) ** 2 * attainable.clipped_x_sq:
        return False
    limit = SMALL_DB if is_fine else NEAR_DB
    gained = attainable.clipping_db
    # If scales are multiples of a shared scale, a larger one may make the values of other groups zero.
    if attainable.scale_loss_db is not None and (gained < BIT_DB or pair.quantized.scale_steps):
        gained = min(gained, attainable.scale_loss_db)
    return gained > (2 * BIT_DB if _clips_by_design(pair) else limit)


def find_allowed_overshoot(levels: Levels | None) -> float:
    """Return the share of a value that may lie outside the range.

    OCP's rule for scales that are powers of two rounds the exponent down, and so clips values between the largest of
    the small floats and the next power of two.
    """
    if levels is None or not levels.mantissa:
        return MAX_OVERSHOOT
    return max(MAX_OVERSHOOT, 1 + NEGLIGIBLE_SHARE - levels.highest / 2.0 ** ceil(log2(levels.highest)))


def _clips_by_design(pair: Pair) -> bool:
    """Return True for ternary and 1-bit codes, which stand for the mean rather than for the largest value."""
    levels = pair.quantized.levels
    return levels is not None and not levels.table and not levels.mantissa and levels.highest - levels.lowest <= 2


def _report_clipping(pair: Pair, attainable: Attainable) -> Finding:
    """Report values outside the range of their scales."""
    share = 100 * attainable.clipped / attainable.n
    without = level(attainable.x_sq, attainable.rounding_sq)
    return make_finding(
        "clipped",
        "warning",
        pair.name,
        f"{display(pair.name)}: {share:.2g} % of the original's values are beyond the range of their scales: "
        f"{attainable.snr_db:.1f} dB at best, {_describe_limit(without)} without clipping",
        "use larger scales, or smaller groups; scales of zero lose all values",
        clipped_pct=share,
        attainable_snr_db=attainable.snr_db,
        without_clipping_db=without,
    )


def find_min_scale(pair: Pair) -> float:
    """Return the smallest scale that the format, or the dtype of its scales, can store; 0 if unknown."""
    if pair.quantized.scale and pair.quantized.scale.dtype == "F16":
        return SUBNORMAL
    return min((row.min_scale for row in find_rows(pair.quantized.format)), default=0.0)


def underflows(pair: Pair, sums: Sums) -> bool:
    """Return True if the original's values are too small for the format's scales, which are float16 in GGUF."""
    min_scale, levels = find_min_scale(pair), pair.quantized.levels
    if not min_scale or not sums.n or not sums.x_sq:
        return False
    return sqrt(as_float(sums.x_sq) / sums.n) < min_scale * (levels.highest - levels.lowest if levels else 1)
