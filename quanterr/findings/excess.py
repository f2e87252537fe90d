"""What a weight loses beyond what its stored scales allow, and what it loses because of them."""

from collections.abc import Iterator
from math import ceil, isfinite, log2, log10, sqrt

from quanterr.findings.codes import finding
from quanterr.findings.figures import bits_of
from quanterr.findings.methods import Method
from quanterr.formats import rows_of
from quanterr.metrics.attainable import Attainable, BadRegion, level
from quanterr.metrics.sums import Sums, as_float, ratio
from quanterr.pairing.model import ComparedWeight, Pair
from quanterr.report.base import Finding
from quanterr.tensors.levels import Levels
from quanterr.util.text import count, display

MANY = 16  # elements: of fewer nothing is inferred
NOTED_DB = 0.5  # dB above the nearest codes: more than scales that are rounded afterwards explain
# dB above the nearest codes. Plain rounding: 0 to 0.3 in all files of current quantizers, as scales that are rounded
# afterwards leave it; learned rounding of FP8 0.2; zero points that are rounded afterwards up to 2.0
# (compressed-tensors) and 3.8 (MLX, 8 bits). Rounding at random costs 3.0. GPTQ, which lets the error of one weight
# make up for that of another, 2.9 to 4.2 with inputs that are correlated as real ones are, 5.3 with columns in the
# order of their inputs. To truncate costs 6.0: a decibel of margin on either side.
USUAL_DB = 5.0
BROKEN_DB = 8.0  # no method that compensates errors goes so far
OFF_PCT, OFF_DB = 5.0, 3.0  # of codes of 8 bits; learned rounding moves 5.9 % of FP8 codes near zero, and costs 0.2 dB
# dB that clipping may cost: 0.2 in all fixtures of 8 bits; 1.2 of fewer (MXFP4 of Quark, AutoRound); codes of one bit
# and ternary ones clip by design, 8.2 in BitNet.
CLIPPING_8_BITS_DB, CLIPPING_DB, CLIPPING_BY_DESIGN_DB = 1.0, 1.5, 12.0
CLIPPING_OF_SEARCH_DB = 6.0  # that scales of the least error cost where k, as below, is 2.7
FEWEST_CLIPPED = 4  # values, of a sample of a weight: fewer may be there by chance
NEAR_DB = 1.5  # within which codes are as good as their scales allow
REPAIRABLE_DB = 3.0  # that another quantizer could win: of less nothing is to be repaired
NEIGHBOURS = 0.01  # of the squared error, that codes may make which are none of the two around a value
RANDOM_DB = 2.5  # above the nearest codes: 3.0 is what rounding at random costs, more of values far below a step
UNBIASED = 0.05  # of the squared error, that a mean error or a factor makes
KINDS = {"row": "excess_rows", "column": "excess_columns", "tile": "excess_blocks"}
MOST_NAMED = 6
# Parts that were rounded after the codes: scales of bitsandbytes' double quantization, SDNQ's branch, MLX's biases.
ROUNDED_AFTERWARDS = ("nested_absmax", "svd_up", "bias")
PART_DB = 6.0  # that a part loses: from here on it is a warning
# The same of a part that a factor explains which the other parts do not have: its scale is wrong.
SCALED_DB = 3.0
UNDONE_DB = 6.0  # SNR of a part whose factor is known to a half
LOUD_DB = 12.0  # above the mean square error of a weight
ZERO = 1e-3  # of a factor: all is lost
CLOSE = 0.02  # of a factor to 1: it says nothing

OVERSHOOT = 0.15  # of a value: powers of two as scales clip 12.5 %, and so do ggml's signed codes of 4 bits
FINE_DB = 60.0  # of SNR, at which nothing is worth a word
EXACT_DB = 50.0  # that nothing was lost by clipping
TOO_GOOD = 0.1  # of the mean square of errors that are spread evenly over a step, 1/12
FEWEST_BITS = 4  # of fewer, one column of outliers makes most of the energy exact
ENOUGH = 1024  # elements, of which so few errors are no accident


def has_nearest_codes(pair: Pair, done: ComparedWeight, method: Method) -> bool:
    """Whether a weight is about as good as its scales allow: no other codes would be better."""
    found = done.attainable
    if found is None or found.excess_db >= NEAR_DB or not _shows_all(pair, done, found):
        return False
    part = _told(pair, found, method)
    return part is None or _severity_of_part(pair, found, part, method) == "info"


def is_usual(pair: Pair, done: ComparedWeight, method: Method) -> bool:
    """Whether the codes are no farther from the nearest than its method leaves them, however low the SNR is."""
    found = done.attainable
    if found is None or not _shows_all(pair, done, found):
        return False
    return found.weighted_excess_db <= (BROKEN_DB if method.compensates else USUAL_DB)


def is_repairable(pair: Pair, done: ComparedWeight) -> bool:
    """Whether another quantizer could make it better by so much that something may be wrong with it."""
    found = done.attainable
    return found is None or found.avoidable_db >= REPAIRABLE_DB or not _shows_all(pair, done, found)


def _shows_all(pair: Pair, done: ComparedWeight, found: Attainable) -> bool:
    """Whether the sample says what there is to say: all is about as good as that, and its scales mean something."""
    sums = done.sums
    if sums.nonfinite or not sums.y_sq:
        return False
    if (found.stored_sq is None and found.snr_db <= 0) or _clips(pair, found):
        return False  # worse than zeros: the scales themselves are wrong, or too coarse to say anything
    whole = found.n == sums.n
    return whole or level(as_float(sums.x_sq), as_float(sums.e_sq)) > level(found.x_sq, found.e_sq) - NEAR_DB


def is_one_way(done: ComparedWeight) -> bool:
    """Whether values were rounded always to the same side, or to zero: what is left is smaller or larger, or biased."""
    found = done.attainable
    return found is not None and _rounding(done, found) == ONE_WAY


def allows_signs(done: ComparedWeight) -> bool:
    """Whether codes go with the signs of their scales: those of AutoRound and of ggml's Q4_0 may be negative."""
    found = done.attainable
    if found is None or found.excess_db >= BROKEN_DB or found.snr_db <= 0:
        return False
    return not any(part.factor < 0 for part in found.parts)


def is_too_good(pair: Pair, done: ComparedWeight) -> bool:
    """Whether the errors are far below those of rounding: the original holds what the codes stand for."""
    found, sums = done.attainable, done.sums
    if found is None or found.rounding is None or sums.n < ENOUGH or pair.original.has_codes or not sums.x_nonzero:
        return False
    if bits_of(pair) < FEWEST_BITS:
        return False
    few_errors = found.rounding * sums.n / sums.x_nonzero < TOO_GOOD / 12
    return few_errors and found.snr_db > _best_db(pair)


def _best_db(pair: Pair) -> float:
    """More than rounding can reach: of numbers that fill the range of the codes evenly, or of any with a mantissa."""
    levels = pair.quantized.levels
    if levels and levels.mantissa:
        return 6.02 * (levels.mantissa + 1) + 13.0
    return 6.02 * bits_of(pair) + 3.0


def of_attainable(pair: Pair, done: ComparedWeight, method: Method) -> Iterator[Finding]:
    """What a sample of one weight shows beside the nearest codes: one finding, and one of what its scales clip."""
    found = done.attainable
    if found is None or found.n < MANY or level(found.x_sq, found.e_sq) > FINE_DB:
        return
    rounded = _rounding(done, found)
    severity, part = _severity(pair, found, method, rounded), _told(pair, found, method)
    if part and severity in (None, "info"):
        yield _of_part(pair, found, part, method)
    elif severity:
        yield _of_weight(pair, found, severity, part, rounded)
    if _clips(pair, found):
        yield _clipping(pair, found)


def _severity(pair: Pair, found: Attainable, method: Method, rounded: str | None) -> str | None:
    """How bad it is that a weight is worse than its scales allow; None where nothing is to be said."""
    excess = found.weighted_excess_db
    if found.excess_db <= NOTED_DB:
        return None
    if rounded == AT_RANDOM or (method.compensates and excess <= BROKEN_DB):
        return "info"
    off = bits_of(pair) >= 8 and _off_pct(found) > OFF_PCT
    if excess > (USUAL_DB if off else BROKEN_DB):
        return "error" if rounded is None and not method.compensates else "warning"
    return "warning" if excess > (OFF_DB if off else USUAL_DB) else "info"


NEARLY, AT_RANDOM, ONE_WAY = "", ": rounded at random", ": truncated, or rounded always up or down"


def _rounding(done: ComparedWeight, found: Attainable) -> str | None:
    """How values were rounded to one of the two codes around them; None where codes are others."""
    sums = done.sums
    if found.beyond_sq > NEIGHBOURS * found.e_sq or not sums.e_sq or not sums.x_sq:
        return None
    if found.excess_db < RANDOM_DB:
        return NEARLY
    of_factor = ratio(as_float(sums.xy - sums.x_sq), sqrt(as_float(sums.x_sq)) * sqrt(as_float(sums.e_sq))) ** 2
    of_mean = ratio(as_float(sums.e), sqrt(sums.n) * sqrt(as_float(sums.e_sq))) ** 2
    return AT_RANDOM if max(of_factor, of_mean) < UNBIASED else ONE_WAY


def _off_pct(found: Attainable) -> float:
    return 100 * found.off / max(found.n - found.clipped, 1)


def _of_weight(pair: Pair, found: Attainable, severity: str, part: BadRegion | None, rounded: str | None) -> Finding:
    snr, off = level(found.x_sq, found.e_sq), _off_pct(found)
    steps = f"{off:.3g} % of its codes are two or more steps off" if found.off else "each code is a step off at most"
    if rounded is not None:
        steps = f"each code is one of the two around its value{rounded}"
    message = f"{display(pair.name)}: {snr:.1f} dB, where its stored scales allow {found.snr_db:.1f} dB: {steps}"
    remedy = "compare codes, scales and their order with what the quantizer wrote"
    if severity != "error":
        remedy = "check how it was rounded: to truncate in place of rounding costs 6 dB"
    return finding(
        "excess_error",
        severity,
        pair.name,
        f"{message}; {_described(part)}" if part else message,
        remedy,
        snr_db=snr,
        attainable_snr_db=found.snr_db,
        excess_db=found.excess_db,
        off_code_pct=off,
        **_evidence(part),
    )


def _of_part(pair: Pair, found: Attainable, part: BadRegion, method: Method) -> Finding:
    return finding(
        KINDS[part.kind],
        _severity_of_part(pair, found, part, method),
        pair.name,
        f"{display(pair.name)}: {_described(part)}",
        "compare them with what the quantizer wrote",
        **_evidence(part),
    )


def _severity_of_part(pair: Pair, found: Attainable, part: BadRegion, method: Method) -> str:
    """A warning from some size on, but for what a format or a method leaves in parts.

    That are scales or a branch that were rounded after the codes; columns in which errors were piled up, and no factor
    explains them; those of factors that were undone, which are known as well as codes of few bits show them; and what
    is so small that its scale has few bits left.
    """
    scaled = part.apart
    rounded = any(role.endswith(ROUNDED_AFTERWARDS) for role in pair.quantized.parts)
    afterwards = rounded and not scaled and part.louder_db <= LOUD_DB
    piled_up = method.compensates and part.kind == "column" and not isfinite(part.factor)
    undone = method.folded and part.snr_db > UNDONE_DB
    small = _lost_db(part) < (SCALED_DB if scaled else PART_DB)
    return "info" if small or afterwards or piled_up or undone or _is_of_least_scales(pair, found, part) else "warning"


def _is_of_least_scales(pair: Pair, found: Attainable, part: BadRegion) -> bool:
    """Whether an error is no larger than what half of the least scale that can be stored makes of the codes."""
    least, levels = least_scale(pair), pair.quantized.levels
    if not least or levels is None:
        return False
    squared_error = 10 ** (part.louder_db / 10) * found.e_sq / max(found.n, 1)
    return sqrt(squared_error) <= least * (levels.highest - levels.lowest) / 2


def _lost_db(part: BadRegion) -> float:
    """What codes lose, and a scale that is too large by a factor of its own."""
    return part.attainable_db - part.snr_db + (20 * log10(part.factor) if part.apart and part.factor > 1 else 0.0)


def _described(part: BadRegion) -> str:
    how = ""
    if isfinite(part.factor) and abs(part.factor - 1) > CLOSE:
        how = ", all zero" if abs(part.factor) < ZERO else f", {part.factor:.3g} times the original's"
    allowed = f"their scales allow {part.attainable_db:.1f} dB"
    return f"{_named(part)}: {part.snr_db:.1f} dB at worst{how}; {allowed}"


def _evidence(part: BadRegion | None) -> dict[str, object]:
    if part is None:
        return {}
    return {
        "places": [list(place) for place in part.places[:MOST_NAMED]],
        "number": part.number,
        "worst_snr_db": part.snr_db,
        "worst_attainable_snr_db": part.attainable_db,
        "factor": part.factor,
    }


def _told(pair: Pair, found: Attainable, method: Method) -> BadRegion | None:
    """Of rows, columns and tiles that stand out those that say it best: what is worth a warning, rows or columns of a
    factor of their own, or the kind with the fewest elements.

    Those that are lost with their scales are told of the scales, where these are known.
    """
    of_scales = any(part.kind not in KINDS for part in found.parts)
    parts = [part for part in found.parts if part.kind in KINDS and not (of_scales and _has_no_codes(part))]

    def order(part: BadRegion) -> tuple[bool, bool, int]:
        small = _severity_of_part(pair, found, part, method) == "info"
        return small, part.kind == "tile" or not part.apart, part.number * part.size

    return min(parts, key=order, default=None)


def _has_no_codes(part: BadRegion) -> bool:
    """Whether no codes would be better."""
    return part.attainable_db - part.snr_db < NOTED_DB


def _named(part: BadRegion) -> str:
    """The parts in words, neighbours as a range."""
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
    """Whether values beyond the range of their scales cost more than any quantizer accepts, and larger scales gain.

    The scales of the least error clip what is far out, and that may be most of the error that is left. Where the share
    of the values beyond t falls as t^-k, clipping costs 10·log10(1 + 2 / (k - 2)) dB of it.
    """
    few = found.clipped < FEWEST_CLIPPED and found.n < pair.quantized.n
    if not found.clipped or few or found.snr_db > EXACT_DB:
        return False
    levels = pair.quantized.levels
    fine = bits_of(pair) >= 8 and not (levels and levels.mantissa)
    if not fine and found.clipped_sq <= _overshoot(levels) ** 2 * found.clipped_x_sq:
        return False
    limit = CLIPPING_8_BITS_DB if fine else CLIPPING_DB
    gained = found.clipping_db
    if found.scale_loss_db is not None and gained < CLIPPING_OF_SEARCH_DB:
        gained = min(gained, found.scale_loss_db)
    return gained > (CLIPPING_BY_DESIGN_DB if _by_design(pair) else limit)


def _overshoot(levels: Levels | None) -> float:
    """By how much of themselves values may be beyond the range: the rule of OCP for powers of two as scales, the floor
    of the exponent, leaves out what is between the largest of small floats and the next power of two.
    """
    if levels is None or not levels.mantissa:
        return OVERSHOOT
    return max(OVERSHOOT, 1.01 - levels.highest / 2.0 ** ceil(log2(levels.highest)))


def _by_design(pair: Pair) -> bool:
    """Whether its codes are ternary or of one bit, and stand for the mean rather than for the largest value."""
    levels = pair.quantized.levels
    return levels is not None and not levels.table and not levels.mantissa and levels.highest - levels.lowest <= 2


def _clipping(pair: Pair, found: Attainable) -> Finding:
    share = 100 * found.clipped / found.n
    without = level(found.x_sq, found.rounding_sq)
    return finding(
        "clipped",
        "warning",
        pair.name,
        f"{display(pair.name)}: {share:.2g} % of the original's values are beyond the range of their scales, which "
        f"allow {found.snr_db:.1f} dB, {without:.1f} dB without them",
        "use larger scales, or finer ones; scales of zero lose all values",
        clipped_pct=share,
        attainable_snr_db=found.snr_db,
        without_clipping_db=without,
    )


def least_scale(pair: Pair) -> float:
    """The least that the format's scales can be, where that is known; 0 of others."""
    return min((row.least_scale for row in rows_of(pair.quantized.format)), default=0.0)


def underflows(pair: Pair, sums: Sums) -> bool:
    """Whether the original's values are too small for the scales of its format, which are float16 in GGUF."""
    least, levels = least_scale(pair), pair.quantized.levels
    if not sums.n or not sums.x_sq:
        return False
    return sqrt(as_float(sums.x_sq) / sums.n) < least * (levels.highest - levels.lowest if levels else 1)
