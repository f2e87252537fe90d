"""Diagnosis of the worst weights: the repair that corrects a sample shows the fault.

Valid weights are never read again; of a few doubtful weights, only the first rows are.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from quanterr.documents.base import Finding
from quanterr.findings.code_samples import read_code_sample
from quanterr.findings.codes import make_finding
from quanterr.findings.error_figures import EXACT_DB, Figures
from quanterr.findings.factors import explain_factor, explain_factors
from quanterr.findings.layers import WeightSummary, rate_repair
from quanterr.findings.limits import (
    FACTOR_TOLERANCE,
    FINE_DB,
    FLOAT32_TOLERANCE,
    MIN_VALUES,
    SAME_VECTOR_COSINE,
    SLIGHT_DB,
)
from quanterr.findings.misplaced import find_misplaced
from quanterr.findings.repairs import ONE_FACTOR, Correction, Sample, find_simplest_repair, measure_snr
from quanterr.findings.scale_faults import find_factor
from quanterr.formats import Weight
from quanterr.formats.reading import FIRST_ROWS, Reader
from quanterr.formats.shared.cast_codes import describe_codes
from quanterr.lazy_torch import Tensor, torch
from quanterr.metrics.attainable import level
from quanterr.pairing.model import Pair
from quanterr.samples.good_scales import find_groups, measure_losses
from quanterr.tensors.chunks import CPU_CHUNK, Chunk, Cut
from quanterr.util.text import count, display, listed

MOST_WRONG = 8  # most weights with a finding to read again
MOST_LOW = 3  # most weights to read again that are merely below the usual level
MOST_OTHERS = 64  # most other weights to compare a weight with


def diagnose(
    seen: Sequence[WeightSummary], doubtful: Collection[str | None], pairs: Sequence[Pair], reader: Reader
) -> Iterator[Finding]:
    """Report what corrects the worst of the doubtful weights.

    These are weights with a doubtful finding, weights that one factor improves, and weights below the usual level.

    Args:
        seen: the weights that differ.
        doubtful: names of weights with a doubtful finding.
        pairs: all pairs, among which swapped weights are searched.
        reader: reads the first rows of weights.
    """
    matrices = [
        (o, o.figures) for o in seen if o.figures and o.figures.snr_db < FINE_DB and _is_repairable_shape(o.pair)
    ]
    matrices.sort(key=lambda item: item[1].snr_db)
    wrong = [item for item in matrices if item[0].pair.name in doubtful or item[1].gains]
    low = [item for item in matrices if item[0].pair.name not in doubtful and item[1].low and not item[1].gains]
    chosen = [*wrong[:MOST_WRONG], *low[:MOST_LOW]]
    factors = [abs(figures.factor) for _, figures in wrong if figures.gains]
    diagnoses: list[_Diagnosis] = []
    for one, figures in sorted(chosen, key=lambda item: item[0].number):
        elsewhere = find_misplaced(one.pair, reader) or _find_swapped(one.pair, figures, pairs, reader)
        found = _Diagnosis(elsewhere) if elsewhere else _diagnose_weight(one, figures, factors, reader)
        if found:
            diagnoses.append(found)
    unread = [one.pair.name for one, _ in wrong[MOST_WRONG:]]
    yield from _merge_diagnoses(diagnoses, unread if len(diagnoses) >= len(chosen) else ())


class _Diagnosis(NamedTuple):
    """A finding about one weight."""

    finding: Finding
    cause: tuple[str, ...] = ()  # the same for weights that have the same fault; empty if weights have their own


def _merge_diagnoses(diagnoses: Sequence[_Diagnosis], unread: Sequence[str]) -> Iterator[Finding]:
    """Merge findings that have one cause; ``unread`` are doubtful weights that have it, too, if all others have it."""
    by_cause: dict[tuple[str, ...], list[Finding]] = {}
    for one in diagnoses:
        by_cause.setdefault((*one.cause, one.finding.severity) if one.cause else (str(one.finding.layer),), []).append(
            one.finding
        )
    for same in by_cause.values():
        names = [str(one.layer) for one in same]
        if len(by_cause) == 1 and len(names) > 1:
            names += unread
        if len(names) == 1:
            yield same[0]
            continue
        worst = min(same, key=lambda one: float(one.evidence["snr_db"]))
        again = f", of which {len(same)} were read again" if len(names) > len(same) else ""
        message = f"{count(len(names), 'weight')}{again}; the worst: {worst.message}"
        evidence = {**worst.evidence, "layers": names, "worst": worst.layer}
        yield make_finding(worst.code, worst.severity, None, message, worst.remedy, **evidence)


def find_cast_codes(
    seen: Sequence[WeightSummary], doubtful: Collection[str | None], reader: Reader
) -> Iterator[Finding]:
    """Report doubtful weights whose plain numbers are codes that were cast without their scales."""
    found: dict[str, list[WeightSummary]] = {}
    for weight in seen:
        is_read_otherwise = weight.pair.contradiction is not None
        if weight.pair.name in doubtful and weight.pair.quantized.encoding == "floats" and not is_read_otherwise:
            kind = describe_codes(reader.read_first_rows(weight.pair.quantized, MIN_VALUES**2))
            if kind:
                found.setdefault(f"{kind} codes as {weight.pair.quantized.codes.dtype}", []).append(weight)
    for what, same in found.items():
        names = [one.pair.name for one in same]
        worst = min((one.figures.snr_db for one in same if one.figures), default=-inf)
        message = (
            f"{count(len(names), 'weight')} ({listed(names, 3)}) hold {what} numbers, without their scales: the codes "
            f"were cast, not dequantized; the worst has {worst:.1f} dB"
        )
        remedy = "multiply codes by their scales before the cast (quanterr dequantize), or keep codes and scales"
        yield make_finding("codes_without_scale", "error", None, message, remedy, layers=names, snr_db=worst)


def drop_harmless_zero_scales(found: Sequence[Finding], pairs: Mapping[str, Pair], reader: Reader) -> list[Finding]:
    """Drop findings about zero scales if the original is zero there too, as in pruned weights.

    Whole weights are read to decide.
    """
    suspects = {one.layer for one in found if one.code == "scale_zero"}
    harmless = {name for name, pair in pairs.items() if name in suspects and not _loses_to_zero_scales(pair, reader)}
    return [one for one in found if one.code != "scale_zero" or one.layer not in harmless]


def drop_limited_rows(found: Sequence[Finding], pairs: Mapping[str, Pair], reader: Reader) -> list[Finding]:
    """Drop findings about bad rows if these are as good as rounding to the scales that their groups need.

    Groups with large values of both signs may have no code near zero, which then moves all other values.
    """
    return [
        one
        for one in found
        if one.code != "bad_rows"
        or not all(_is_limited(pairs[str(one.layer)], row, reader) for row in one.evidence["rows"])
    ]


def _is_limited(pair: Pair, row: int, reader: Reader) -> bool:
    """Return True if a row has no more error than half a step of good scales in each element."""
    weight = pair.quantized
    levels, block = weight.levels, weight.block_size
    if levels is None or weight.rotated or block is None or block[0] > 1:
        return False
    chunk = Chunk(row, row + 1, 0, weight.matrix[1])
    scales = reader.read_scaling(weight, chunk)
    groups = scales and find_groups(block, scales.unit)
    if scales is None or groups is None:
        return False
    x, y = (side.float() for side in reader.read_both((pair.original, weight), chunk))
    losses = measure_losses(levels, x, None, scales, groups, y=y)
    most_sq = float(torch.maximum(losses.worst_sq, losses.good_sq.amax(0)).sum())
    return level(float((y - x).double().square().sum()), most_sq) < SLIGHT_DB


def _loses_to_zero_scales(pair: Pair, reader: Reader) -> bool:
    """Return True if scales of zero lose values, or if that is unknown."""
    for chunk in Cut(*pair.original.matrix, CPU_CHUNK):
        scales = reader.read_scaling(pair.quantized, chunk)
        if scales is None:
            return True
        zero = scales.unit == 0
        if bool(zero.any()):
            x, y = reader.read_both((pair.original, pair.quantized), chunk)
            if bool((zero & ((y - x).abs() > x.abs() / 2)).any()):
                return True
    return False


def measure_factor(pair: Pair, figures: Figures, is_doubtful: bool, reader: Reader) -> tuple[float, float] | None:
    """Return the f of y = f · x, and its relative error, if a sample shows that one factor corrects a weight.

    Codes show the factor exactly if they are the nearest ones once it is undone. Otherwise, if the weight is worse than
    its scales allow (``is_doubtful``) and the factor removes much of the error, most rows must agree on it.
    """
    of_codes = read_code_sample(pair, reader)
    if of_codes and (fault := find_factor(of_codes)):
        return fault.low, FLOAT32_TOLERANCE
    found = find_simplest_repair(read_sample(pair, reader), figures.bits) if is_doubtful and figures.gains else None
    return (figures.factor, figures.doubt) if found and found[0] is ONE_FACTOR else None


def _is_repairable_shape(pair: Pair) -> bool:
    """Return True for a matrix, and for a single row of codes."""
    return pair.original.matrix[0] > 1 or pair.quantized.encoding != "floats"


def _diagnose_weight(
    one: WeightSummary, figures: Figures, factors: Sequence[float], reader: Reader
) -> _Diagnosis | None:
    """Report the simplest repair that corrects a sample of a weight; ``factors`` are those of all such weights."""
    pair, bits = one.pair, figures.bits
    if bits < 2:
        return None
    sample = read_sample(pair, reader)
    levels = pair.quantized.levels
    has_zero = levels is None or not (levels.table or levels.mantissa)
    found = find_simplest_repair(sample, bits, -inf if one.attainable_db is None else one.attainable_db, has_zero)
    if found is None:
        partial_factor = _report_partial_factor(pair, figures)
        return _Diagnosis(partial_factor) if partial_factor else None
    repair, corrected = found
    if figures.is_peaked and repair.code == "scale_factor" and repair is not ONE_FACTOR:
        return None  # the factor of the column, or row, that holds the largest value: rounding it has one
    explanation = (
        explain_factor(float(corrected.factors), one.scales, factors, pair.quantized.encoding == "cast", figures.doubt)
        if repair is ONE_FACTOR and corrected.factors is not None
        else _explain_scales(pair, corrected, reader)
    )
    description = repair.message.format(description=corrected.description) + explanation
    before = measure_snr(sample.x, sample.y - sample.x)
    finding = make_finding(
        repair.code,
        rate_repair(before, corrected.snr_db),
        pair.name,
        f"{display(pair.name)}: {figures.snr_db:.1f} dB as {pair.quantized.format}: {description}; "
        f"{'exact once corrected' if corrected.snr_db == EXACT_DB else f'{corrected.snr_db:.1f} dB once corrected'} on "
        "a sample",
        repair.remedy,
        snr_db=before,
        snr_db_repaired=corrected.snr_db,
        found=corrected.description,
    )
    return _Diagnosis(finding, (repair.code, repair.message, explanation))


def _explain_scales(pair: Pair, corrected: Correction, reader: Reader) -> str:
    """Explain the factors of a correction by the stored scales, if there is one scale per factor."""
    if corrected.factors is None or pair.quantized.scale is None or pair.quantized.scale.n != corrected.factors.numel():
        return ""
    stored = torch.cat([piece.flatten().double() for piece in reader.iterate_scales(pair.quantized.scale)])
    return explain_factors(corrected.factors.flatten(), stored)


def _report_partial_factor(pair: Pair, figures: Figures) -> Finding | None:
    """Report a factor that removes much of the error although rows do not agree on it."""
    if not figures.gains or figures.cosine < SAME_VECTOR_COSINE or figures.is_of_few:
        return None
    return make_finding(
        "scale_factor",
        "warning",
        pair.name,
        f"{display(pair.name)}: {figures.snr_db:.1f} dB as {pair.quantized.format}; its values are "
        f"{figures.factor:.4g} times the original's overall, {figures.rescaled_db:.1f} dB without that factor: "
        "some of its scales are wrong, or large values were clipped",
        "compare its scales with what the quantizer wrote",
        snr_db=figures.snr_db,
        snr_db_repaired=figures.rescaled_db,
        found=f"{figures.factor:.4g}",
    )


def _find_swapped(pair: Pair, figures: Figures, pairs: Sequence[Pair], reader: Reader) -> Finding | None:
    """Report that the values match another weight of the same shape far better: experts may be much alike."""
    if figures.cosine > 1 - FACTOR_TOLERANCE:
        return None
    shape = pair.original.shape
    others = [one for one in pairs if one.original.shape == shape and one.name != pair.name][:MOST_OTHERS]
    y = reader.read_first_rows(pair.quantized, FIRST_ROWS // 16)
    own = _cosine(reader.read_first_rows(pair.original, FIRST_ROWS // 16), y) if others else 1.0
    for other in others:
        cosine = _cosine(reader.read_first_rows(other.original, FIRST_ROWS // 16), y)
        if cosine > SAME_VECTOR_COSINE and 2 * (1 - cosine) < 1 - own:
            return make_finding(
                "swapped_weight",
                "error",
                pair.name,
                f"{display(pair.name)}: its values match {display(other.name)} of the original "
                f"(cosine {cosine:.4f} on a sample)",
                "find out where the layers were swapped",
                weight=other.name,
                cosine_similarity=cosine,
            )
    return None


def _cosine(x: Tensor, y: Tensor) -> float:
    """Return the cosine similarity of two tensors."""
    return float((x * y).sum() / (x.norm() * y.norm()))


def read_sample(pair: Pair, reader: Reader) -> Sample:
    """Return the first rows of a pair."""
    x, y = (reader.read_first_rows(side) for side in (pair.original, pair.quantized))
    finite = x.isfinite() & y.isfinite()
    return Sample(x.where(finite, 0.0), y.where(finite, 0.0), _read_unit(pair.quantized, len(x), reader))


def _read_unit(weight: Weight, rows: int, reader: Reader) -> Tensor | None:
    """Return the factors of the codes in the first rows of a weight, (r, c) float64; None if they are unknown."""
    if weight.rotated or weight.levels is None or weight.matrix[1] > FIRST_ROWS:
        return None
    chunk = Chunk(0, rows, 0, weight.matrix[1])
    found = reader.read_scaling(weight, chunk)
    return found.unit.double() if found else None
