"""Error beyond what a weight's stored scales allow, and error from values that the scales clip."""

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

KINDS = {"row": "excess_rows", "column": "excess_columns", "tile": "excess_blocks"}
MOST_NAMED = 6
# Tensors rounded after the codes. bitsandbytes' double quantization rounds the scale of a block to 8 bits of a code for
# 256 blocks: next to far larger ones, by up to 1/7 (real weights). SDNQ rounds the whole branch. MLX rounds minima
# to BF16, which moves 8-bit codes by up to half a step, and others by less.
NESTED, BRANCH, MINIMUM = "nested_absmax", "svd_up", "bias"
ZERO_POINTS = "zero_point", "offset", "zero"
OVERSHOOT = 0.15  # share of a value that may be clipped: scales of powers of two and ggml's signed 4 bits clip 12.5 %
EVEN = 1 / 12  # mean square of errors that are spread evenly over a step
NIBBLE, BYTE = 4, 8  # bits


def has_nearest_codes(pair: Pair, done: WeightResult, method: Method) -> bool:
    """Return True if a weight is about as good as its scales allow, so that no other codes would be better."""
    found = done.attainable
    if found is None or found.excess_db >= NEAR_DB or not _shows_all(pair, done, found):
        return False
    part = _choose_part(pair, found, method)
    return part is None or _rate_part(pair, found, part, method) == "info"


def has_usual_excess(pair: Pair, done: WeightResult, method: Method) -> bool:
    """Return True if codes are as near to the nearest as the method leaves them, however low the SNR is."""
    found = done.attainable
    if found is None or not _shows_all(pair, done, found):
        return False
    return found.weighted_excess_db <= method.max_loss_db


def is_repairable(pair: Pair, done: WeightResult) -> bool:
    """Return True if another quantizer could gain so much that something may be wrong with the weight."""
    found = done.attainable
    return found is None or found.avoidable_db >= DOUBLE_DB or not _shows_all(pair, done, found)


def _shows_all(pair: Pair, done: WeightResult, found: Attainable) -> bool:
    """Return True if the sample represents the whole weight and its scales are meaningful."""
    sums = done.sums
    if sums.nonfinite or not sums.y_sq:
        return False
    if (found.stored_sq is None and found.snr_db <= 0) or _clips(pair, found):
        return False  # worse than zeros: the scales themselves are wrong, or too coarse for a conclusion
    return found.represents(sums, NEAR_DB)


def rounds_one_way(done: WeightResult) -> bool:
    """Return True if values were always rounded to the same side, or towards zero.

    The rounded values are then too small, too large or biased.
    """
    found = done.attainable
    return found is not None and _classify_rounding(done, found) == ONE_WAY


def fits_signed_scales(done: WeightResult) -> bool:
    """Return True if the codes fit the signs of their scales, which AutoRound and ggml's Q4_0 may write negative."""
    found = done.attainable
    if found is None or found.excess_db >= MAX_METHOD_LOSS_DB or found.snr_db <= 0:
        return False
    return not any(part.factor < 0 for part in found.parts)


def is_better_than_rounding(pair: Pair, done: WeightResult) -> bool:
    """Return True if the errors are far below rounding errors: the original holds the values of the codes."""
    found, sums = done.attainable, done.sums
    if (
        found is None
        or found.rounding is None
        or sums.n < MIN_VALUES**2
        or pair.original.has_codes
        or not sums.x_nonzero
    ):
        return False
    if find_bits(pair) < NIBBLE:
        return False
    few_errors = found.rounding * sums.n / sums.x_nonzero < MAJOR_SHARE * EVEN
    return few_errors and found.snr_db > _best_db(pair)


def _best_db(pair: Pair) -> float:
    """Return an SNR in dB that rounding cannot reach.

    This holds for any values if codes have a mantissa, otherwise for values that fill the range of the codes evenly.
    """
    levels = pair.quantized.levels
    if levels and levels.mantissa:
        return BIT_DB * (levels.mantissa + 1) - 10 * log10(EVEN)
    return BIT_DB * find_bits(pair) + DOUBLE_DB


@check(
    *("excess_error", "excess_rows", "excess_columns", "excess_blocks", "clipped"),
    needs=RESULT,
    of=WEIGHT,
)
def check_excess(weight: MeasuredWeight) -> Iterator[Finding]:
    """Report a weight, or the worst of its parts, with more error than its scales allow, and values that they clip."""
    pair, done, method, _ = weight
    found = done.attainable
    if found is None or found.n < MIN_VALUES or level(found.x_sq, found.e_sq) > FINE_DB:
        return
    rounded = _classify_rounding(done, found)
    severity, part = _rate_weight(pair, found, method, rounded), _choose_part(pair, found, method)
    if part and severity in (None, "info"):
        yield _report_part(pair, found, part, method)
        for other in found.parts:  # rows elsewhere are another fault
            if other.kind == "row" and part.kind == "tile" and part.worst[0] not in {row for row, _ in other.places}:
                yield _report_part(pair, found, other, method)
    elif severity:
        yield _report_weight(pair, done, found, severity, part, rounded)
    if _clips(pair, found):
        yield _report_clipping(pair, found)


def _rate_weight(pair: Pair, found: Attainable, method: Method, rounded: str | None) -> str | None:
    """Return the severity of a weight that is worse than its scales allow; None if there is nothing to report."""
    excess = found.weighted_excess_db
    if found.excess_db <= SLIGHT_DB:
        return None
    if rounded == ONE_WAY and excess > ROUNDING.max_loss_db:
        return "warning"  # no method truncates
    if method.learns and rounded is None and excess > NEAR_DB:
        return "warning"  # a method that learns takes one of the two codes around each value
    if rounded == AT_RANDOM and not method.by_importance:
        is_declared = method.learns or method.compensates
        # Rounding at random costs 3 dB, either code 6. GPTQ costs more than 5 only with codes that are further away.
        least = ROUNDING.max_loss_db if is_declared else RANDOM_DB
        return "warning" if least <= excess <= MAX_METHOD_LOSS_DB else "info"
    if not method.is_nearest and excess <= method.max_loss_db:
        return "info"
    off = find_bits(pair) >= BYTE and _off_pct(found) > 100 * MINOR_SHARE
    undone = method.folded and not method.may_compensate  # factors of rows and columns cost 0.7 dB if they are inexact
    if excess > (ROUNDING.max_loss_db if off else MAX_METHOD_LOSS_DB):
        return "error" if rounded is None and not (method.learns or method.may_compensate) else "warning"
    return (
        "warning"
        if excess > (DOUBLE_DB if off or undone or _must_be_nearest(pair, found, method) else method.max_loss_db)
        else "info"
    )


def has_moved_codes(pair: Pair, done: WeightResult, method: Method) -> bool:
    """Return True if codes of 8 bits are two or more steps off, though nothing but scales was rounded after them."""
    found = done.attainable
    return found is not None and found.off > 0 and find_bits(pair) >= BYTE and _keeps_codes(pair, method)


def _must_be_nearest(pair: Pair, found: Attainable, method: Method) -> bool:
    """Return True for 8 bits if no method moved values, and at most scales were rounded after the codes."""
    return not method.may_compensate and _keeps_codes(pair, method) and found.snr_db > find_min_level(BYTE)


def _keeps_codes(pair: Pair, method: Method) -> bool:
    """Return True if values were neither scaled nor rotated, and no zero point, minimum or branch was rounded last."""
    after = (MINIMUM, BRANCH, NESTED, *ZERO_POINTS)
    moved = any(name.endswith(after) for name in pair.quantized.parts) or method.folded or method.by_importance
    return not (moved or pair.quantized.rotated)


NEARLY, AT_RANDOM, ONE_WAY = "", ": rounded at random", ": truncated, or always rounded up or down"
REMEDIES = {  # of weights that may be sound
    None: "compare with the checkpoint that was quantized: another revision or training step has other values",
    AT_RANDOM: "round to the nearest codes: rounding at random costs 3 dB",
}


def _classify_rounding(done: WeightResult, found: Attainable) -> str | None:
    """Return how values were rounded to one of the two codes around them; None if other codes occur."""
    sums = done.sums
    if found.beyond_sq > NEGLIGIBLE_SHARE * found.e_sq or not sums.e_sq or not sums.x_sq:
        return None
    if found.excess_db < DOUBLE_DB - SLIGHT_DB:
        return NEARLY
    of_factor = ratio(as_float(sums.xy - sums.x_sq), sqrt(as_float(sums.x_sq)) * sqrt(as_float(sums.e_sq))) ** 2
    of_mean = ratio(as_float(sums.e), sqrt(sums.n) * sqrt(as_float(sums.e_sq))) ** 2
    return AT_RANDOM if max(of_factor, of_mean) < MINOR_SHARE else ONE_WAY


def _off_pct(found: Attainable) -> float:
    """Return the percentage of codes that are two or more steps off, leaving out clipped values."""
    return 100 * found.off / max(found.n - found.clipped, 1)


def compare_whole_with_sample(done: WeightResult, found: Attainable) -> float:
    """Return by how many dB the SNR of the whole weight, which reports show, exceeds that of its sampled rows."""
    sums = done.sums
    return compute_ratio_db(sums.x_sq, sums.e_sq) - level(found.x_sq, found.e_sq) if sums.x_sq and sums.e_sq else 0.0


def _report_weight(
    pair: Pair, done: WeightResult, found: Attainable, severity: str, part: BadRegion | None, rounded: str | None
) -> Finding:
    """Report a weight with more error than its scales allow."""
    snr, off = level(found.x_sq, found.e_sq), _off_pct(found)
    more = compare_whole_with_sample(done, found)
    steps = f"{off:.3g} % of its codes are two or more steps off" if found.off else "each code is at most one step off"
    if rounded is not None:
        steps = f"each code is one of the two next to its value{rounded}"
    what = f"{snr + more:.1f} dB, where its stored scales allow {_describe_limit(found.snr_db + more)}"
    if snr == -inf:
        what = "its values are not zero, but the original's are"
    message = f"{display(pair.name)}: {what}: {steps}"
    remedy = "compare codes, scales and their order with what the quantizer wrote"
    if severity != "error":
        remedy = REMEDIES.get(rounded, "check how values were rounded: truncation costs 6 dB")
    return make_finding(
        "excess_error",
        severity,
        pair.name,
        f"{message}; {_describe_part(part)}" if part else message,
        remedy,
        snr_db=snr,
        attainable_snr_db=found.snr_db,
        excess_db=found.excess_db,
        off_code_pct=off,
        **_evidence(part),
    )


def _report_part(pair: Pair, found: Attainable, part: BadRegion, method: Method) -> Finding:
    """Report rows, columns or a tile with more error than their scales allow."""
    return make_finding(
        KINDS[part.kind],
        _rate_part(pair, found, part, method),
        pair.name,
        f"{display(pair.name)}: {_describe_part(part)}",
        "compare these values with what the quantizer wrote",
        **_evidence(part),
    )


def _rate_part(pair: Pair, found: Attainable, part: BadRegion, method: Method) -> str:
    """Return ``warning`` for a large loss of a part, but ``info`` for a loss that the format or the method causes.

    The causes are: scales or a branch rounded after the codes; errors that accumulated in columns, if no factor
    explains them; undone factors, which are known only as well as codes of few bits show them, unless a norm has them:
    columns with another factor then mean that it is off; and values so small that their scale has few bits left.
    """
    of_codes = BIT_DB if found.excess_db > SLIGHT_DB or method.by_importance else ROUNDING.max_loss_db
    small = _lost_db(part) < (DOUBLE_DB if part.apart else of_codes)
    piled_up = method.compensates and part.kind == "column" and not isfinite(part.factor)
    given_up = method.by_importance and part.kind != "row" and part.is_scattered
    if method.by_norm and part.kind == "column" and isfinite(part.factor):
        return "warning" if found.excess_db > SLIGHT_DB or _lost_db(part) >= DOUBLE_DB else "info"
    # Factors are those of whole rows or columns: one that is inexact shows in a column, or as a row's factor.
    undone = method.folded and part.snr_db > BIT_DB and (part.kind == "column" or isfinite(part.factor))
    caused = piled_up or given_up or undone or _is_rounded_afterwards(pair, part)
    return "info" if small or caused or _is_limited_by_least_scale(pair, found, part) else "warning"


def _is_rounded_afterwards(pair: Pair, part: BadRegion) -> bool:
    """Return True if a scale, a minimum or a branch that is rounded after the codes explains the error of a part."""

    def has(role: str) -> bool:
        return any(name.endswith(role) for name in pair.quantized.parts)

    if has(NESTED):
        return part.kind == "tile" and 1 / MISMATCH_FACTOR < part.factor < MISMATCH_FACTOR
    if part.apart:
        return False
    # A scale and a minimum that are rounded to BF16 move codes of 8 bits by half a step each: 11.1 dB.
    return (has(BRANCH) and part.louder_db <= 2 * BIT_DB) or (
        has(MINIMUM) and find_bits(pair) >= BYTE and _lost_db(part) <= 2 * BIT_DB
    )


def _is_limited_by_least_scale(pair: Pair, found: Attainable, part: BadRegion) -> bool:
    """Return True if half of the smallest scale that can be stored explains the error of a part.

    Groups multiply a scale that they share by up to ``steps.scales``, and with it the error of half a smallest scale.
    IQ4_XS has the codes for the scale before it is rounded (ggml-quants.c of llama.cpp, quantize_row_iq4_nl_impl).
    """
    least, levels, steps = least_scale(pair), pair.quantized.levels, pair.quantized.scale_steps
    if not least or levels is None:
        return False
    largest = max(1.0, steps.scales / 2) if steps else 1.0
    squared_error = 10 ** (part.louder_db / 10) * found.e_sq / max(found.n, 1)
    return sqrt(squared_error) <= largest * least * (levels.highest - levels.lowest) / 2


def _lost_db(part: BadRegion) -> float:
    """Return the loss in dB of a part, including the loss from a scale that is too large only in this part."""
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


def _evidence(part: BadRegion | None) -> dict[str, object]:
    """Return the places and numbers of a part, for the report."""
    if part is None:
        return {}
    return {
        "places": [list(place) for place in part.places[:MOST_NAMED]],
        "number": part.number,
        "worst_snr_db": part.snr_db,
        "worst_attainable_snr_db": part.attainable_db,
        "factor": part.factor,
    }


def _choose_part(pair: Pair, found: Attainable, method: Method) -> BadRegion | None:
    """Return the rows, columns or tiles that describe the loss best, or None.

    Warnings come first, then rows or columns with a factor of their own, then the kind with the fewest elements. Parts
    that are lost because of their scales are left to the findings about scales, if there are any.
    """
    if not found.parts:
        return None
    of_scales = any(part.kind not in KINDS for part in found.parts)
    parts = [part for part in found.parts if part.kind in KINDS and not (of_scales and _has_no_better_codes(part))]

    rows = {row: one.snr_db for one in parts if one.kind == "row" for row, _ in one.places}
    # A tile as bad as its row belongs to a bad row.
    parts = [part for part in parts if part.kind != "tile" or part.snr_db < rows.get(part.worst[0], inf)]

    def order(part: BadRegion) -> tuple[bool, bool, int]:
        small = _rate_part(pair, found, part, method) == "info"
        return small, part.kind == "tile" or not part.apart, part.number * part.size

    return min(parts, key=order, default=None)


def _has_no_better_codes(part: BadRegion) -> bool:
    """Return True if other codes would gain less than SLIGHT_DB."""
    return part.attainable_db - part.snr_db < SLIGHT_DB


def _name_part(part: BadRegion) -> str:
    """Name the rows, columns or tiles of a part; neighbours become a range."""
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
    words = [str(a) if a == b else f"{a} to {b}" for a, b in runs[:MOST_NAMED]]
    more = ", …" if len(runs) > MOST_NAMED or part.number > len(numbers) else ""
    return f"{count(part.number, f'sampled {part.kind}')} ({', '.join(words)}{more})"


def _clips(pair: Pair, found: Attainable) -> bool:
    """Return True if clipping costs more than any quantizer accepts, and larger scales would gain.

    The scales with the least error clip the tail, and the clipped values may make most of the remaining error. If the
    share of values beyond t falls as t^-k, clipping costs 10·log10(1 + 2 / (k - 2)) dB.
    """
    few = found.clipped <= MIN_PEERS and found.n < pair.quantized.n
    if not found.clipped or few or found.snr_db > FINE_DB:
        return False
    levels = pair.quantized.levels
    fine = find_bits(pair) >= BYTE and not (levels and levels.mantissa)
    if not fine and found.clipped_sq <= allowed_overshoot(levels) ** 2 * found.clipped_x_sq:
        return False
    limit = SMALL_DB if fine else NEAR_DB
    gained = found.clipping_db
    # Scales that are steps of a shared one may not be able to grow: values beside one of 1e4 then become zeros.
    if found.scale_loss_db is not None and (gained < BIT_DB or pair.quantized.scale_steps):
        gained = min(gained, found.scale_loss_db)
    return gained > (2 * BIT_DB if _clips_by_design(pair) else limit)


def allowed_overshoot(levels: Levels | None) -> float:
    """Return the share of a value that may lie outside the range.

    OCP's rule for scales that are powers of two rounds the exponent down, and so clips values between the largest of
    the small floats and the next power of two.
    """
    if levels is None or not levels.mantissa:
        return OVERSHOOT
    return max(OVERSHOOT, 1 + NEGLIGIBLE_SHARE - levels.highest / 2.0 ** ceil(log2(levels.highest)))


def _clips_by_design(pair: Pair) -> bool:
    """Return True for ternary and 1-bit codes, which stand for the mean rather than for the largest value."""
    levels = pair.quantized.levels
    return levels is not None and not levels.table and not levels.mantissa and levels.highest - levels.lowest <= 2


def _report_clipping(pair: Pair, found: Attainable) -> Finding:
    """Report values outside the range of their scales."""
    share = 100 * found.clipped / found.n
    without = level(found.x_sq, found.rounding_sq)
    return make_finding(
        "clipped",
        "warning",
        pair.name,
        f"{display(pair.name)}: {share:.2g} % of the original's values are beyond the range of their scales: "
        f"{found.snr_db:.1f} dB at best, {_describe_limit(without)} without clipping",
        "use larger scales, or smaller groups; scales of zero lose all values",
        clipped_pct=share,
        attainable_snr_db=found.snr_db,
        without_clipping_db=without,
    )


def least_scale(pair: Pair) -> float:
    """Return the smallest scale that the format, or the dtype of its scales, can store; 0 if unknown."""
    if pair.quantized.scale and pair.quantized.scale.dtype == "F16":
        return SUBNORMAL
    return min((row.least_scale for row in find_rows(pair.quantized.format)), default=0.0)


def underflows(pair: Pair, sums: Sums) -> bool:
    """Return True if the original's values are too small for the format's scales, which are float16 in GGUF."""
    least, levels = least_scale(pair), pair.quantized.levels
    if not least or not sums.n or not sums.x_sq:
        return False
    return sqrt(as_float(sums.x_sq) / sums.n) < least * (levels.highest - levels.lowest if levels else 1)
