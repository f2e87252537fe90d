"""What a weight loses because its scales are not those that its values need, however well its codes fit them."""

from collections.abc import Iterator
from math import isfinite, log2

from quanterr.findings.codes import finding
from quanterr.findings.excess import FINE_DB, MANY, MOST_NAMED
from quanterr.findings.figures import bits_of
from quanterr.findings.methods import Method
from quanterr.metrics.attainable import Attainable, BadRegion, level
from quanterr.pairing.model import ComparedWeight, Pair
from quanterr.report.base import Finding
from quanterr.tensors.good_scales import FEW_LEVELS
from quanterr.util.text import count, display

# dB that stored scales lose beside good ones. Sound files of all families: -5 to 0.6, where absolute maxima were
# rounded or searched; 1.8 where scales are products of coarse ones (asymmetric codes of 6 bits in ComfyUI): 0.2 below
# what is noted and 1.7 below what is warned of. Of codes of few levels good scales are sought, down to 0.7 of the
# largest value: an absolute maximum loses up to 3.1 by that, 1.8 in sound files; of four levels or fewer 3.4.
NOTED_DB, WARNED_DB, BROKEN_DB = 2.0, 3.5, 9.0
MARGINS_DB = {4: 1.5, FEW_LEVELS: 1.1}  # levels, at most → by how much more is noted and warned of
PART_WARNED_DB = 6.0  # of groups, of which sound ones lose up to 4
UPDATED = 4.0  # stored / good scale, at most: of groups whose values made up for the errors of others before
SAME_RANGE = 0.02  # from 1 a ratio of scales: their zero points are others, which stay within the range of the values
FEWER = 0.8  # stored / good scale of most groups: it is others that are wrong
MANY_UNDERFLOW = 0.05  # of the elements of a sample
REMEDY = "make scales of the original's largest values: of each group the largest over the largest code"


def of_scales(pair: Pair, done: ComparedWeight, method: Method) -> Iterator[Finding]:
    """Scales that are too large or too small, of a whole weight or of some of its groups."""
    found = done.attainable
    if found is None or found.n < MANY or level(found.x_sq, found.e_sq) > FINE_DB:
        return
    severity, loss = _severity(pair, found), found.scale_loss_db
    parts = {part.kind: part for part in found.parts}
    if severity in (None, "info") and "underflow" in parts:
        yield _underflow(pair, found, parts["underflow"])
    if severity in (None, "info") and "group" in parts:
        yield _of_groups(pair, parts["group"], method)
    elif severity:
        part, some = parts.get("group"), FEWER < found.scale_ratio < 1 / FEWER
        whole = _words(pair, found.scale_ratio, found.snr_db)
        what = f"{_where(part)}: {_words(pair, part.factor, part.snr_db)}" if part and some else whole
        yield finding(
            "scale_loss",
            severity,
            pair.name,
            f"{display(pair.name)}: {what}: all its scales allow {found.snr_db:.1f} dB, good ones "
            f"{found.format_snr_db:.1f} dB",
            REMEDY,
            scale_loss_db=loss,
            attainable_snr_db=found.snr_db,
            format_snr_db=found.format_snr_db,
            scale_ratio=found.scale_ratio,
        )


def are_good(pair: Pair, done: ComparedWeight) -> bool:
    """Whether good scales would gain no more than is usual; of scales that are not judged as well."""
    return done.attainable is None or _severity(pair, done.attainable) in (None, "info")


def _severity(pair: Pair, found: Attainable) -> str | None:
    if found.scale_loss_db is None:
        return None
    levels = pair.quantized.levels
    margins = [margin for most, margin in MARGINS_DB.items() if levels and levels.number <= most]
    loss = found.scale_loss_db - max(margins, default=0.0)
    if loss > BROKEN_DB:
        return "error"
    if _is_of_zeros(found.scale_ratio, found.snr_db) and loss > NOTED_DB:
        return "info"
    return "warning" if loss > WARNED_DB else "info" if loss > NOTED_DB else None


def _is_of_zeros(ratio: float, snr_db: float) -> bool:
    """Whether scales of this ratio, which allow this SNR, are right: then zero points, or luck, make others better."""
    return abs(ratio - 1) < SAME_RANGE and snr_db > 0


def _words(pair: Pair, ratio: float, snr_db: float) -> str:
    """What is wrong with scales that are this many times the right ones, and allow this SNR."""
    if _is_of_zeros(ratio, snr_db):
        return "scales are right, but other zero points would leave less error"
    if not ratio:
        return "scales are zero: all values are lost"
    if ratio < 1:
        return f"scales are {ratio:.2g} x what the values need: what is larger is clipped"
    weight = pair.quantized.rotated.weight if pair.quantized.rotated else pair.quantized
    bits, uniform = bits_of(pair), weight.levels is not None and not (weight.levels.mantissa or weight.levels.table)
    used = max(round(bits - log2(ratio)), 0) if uniform and isfinite(ratio) else bits
    what = f"codes use {used} of {bits} bits: " if used < bits else ""
    return f"{what}scales are {ratio:.3g} x what the values need"


def _of_groups(pair: Pair, part: BadRegion, method: Method) -> Finding:
    lost = part.attainable_db - part.snr_db
    updated = method.compensates and 1 / UPDATED < part.factor < UPDATED
    warned = BROKEN_DB if updated else PART_WARNED_DB
    return finding(
        "scale_loss",
        "warning" if lost > warned and not _is_of_zeros(part.factor, part.snr_db) else "info",
        pair.name,
        f"{display(pair.name)}: {_where(part)}: {_words(pair, part.factor, part.snr_db)}: they allow "
        f"{part.snr_db:.1f} dB, good ones {part.attainable_db:.1f} dB",
        REMEDY,
        **_evidence(part),
        worst_format_snr_db=part.attainable_db,
        scale_ratio=part.factor,
    )


def _underflow(pair: Pair, found: Attainable, part: BadRegion) -> Finding:
    """Groups that are lost beside far larger ones: a few of them matter to nothing."""
    many = part.number * part.size > MANY_UNDERFLOW * found.n
    return finding(
        "underflow",
        "warning" if many else "info",
        pair.name,
        f"{display(pair.name)}: {_where(part)}: their values are too small for the scales of {pair.quantized.format} "
        f"beside the largest: they become zeros, or a few coarse values ({part.snr_db:.1f} dB at worst)",
        "leave this layer in higher precision where these values matter, or use a format with larger scales",
        **_evidence(part),
    )


def _where(part: BadRegion) -> str:
    row, col = part.worst
    columns = f", columns from {col}" if col >= 0 else ""
    return f"{count(part.number, 'group')} of {part.size}, the worst at row {row}{columns}"


def _evidence(part: BadRegion) -> dict[str, object]:
    places = [list(place) for place in part.places[:MOST_NAMED]]
    return {"places": places, "number": part.number, "worst_snr_db": part.snr_db}
