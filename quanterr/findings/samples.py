"""Diagnosis of the worst weights: the repair that corrects a sample shows the fault.

Only the first rows of a few doubtful weights are read again.
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
from quanterr.util.text import count, display, itemize

MAX_FAULTY_WEIGHTS = 8  # maximum number of weights with a finding to read again
MAX_LOW_WEIGHTS = 3  # maximum number of weights to read again that are only below the usual level
MAX_CANDIDATES = 64  # maximum number of other weights to compare a weight with


def diagnose(
    seen: Sequence[WeightSummary], doubtful: Collection[str | None], pairs: Sequence[Pair], reader: Reader
) -> Iterator[Finding]:
    """Report repairs that correct the worst of the doubtful weights.

    These are weights with a doubtful finding, weights that one factor improves, and weights below the usual level.

    Args:
        seen: the weights that differ.
        doubtful: names of weights with a doubtful finding.
        pairs: all pairs, among which swapped weights are searched.
        reader: reads the first rows of weights.
    """
    matrices = [
        (weight, weight.figures)
        for weight in seen
        if weight.figures and weight.figures.snr_db < FINE_DB and _is_repairable_shape(weight.pair)
    ]
    matrices.sort(key=lambda item: item[1].snr_db)
    wrong = [item for item in matrices if item[0].pair.name in doubtful or item[1].gains]
    low = [item for item in matrices if item[0].pair.name not in doubtful and item[1].low and not item[1].gains]
    chosen = [*wrong[:MAX_FAULTY_WEIGHTS], *low[:MAX_LOW_WEIGHTS]]
    factors = [abs(figures.factor) for _, figures in wrong if figures.gains]
    diagnoses: list[_Diagnosis] = []
    for weight, figures in sorted(chosen, key=lambda item: item[0].number):
        elsewhere = find_misplaced(weight.pair, reader) or _find_swapped(weight.pair, figures, pairs, reader)
        diagnosis = _Diagnosis(elsewhere) if elsewhere else _diagnose_weight(weight, figures, factors, reader)
        if diagnosis:
            diagnoses.append(diagnosis)
    unread = [weight.pair.name for weight, _ in wrong[MAX_FAULTY_WEIGHTS:]]
    yield from _merge_diagnoses(diagnoses, unread if len(diagnoses) >= len(chosen) else ())


class _Diagnosis(NamedTuple):
    """A finding about one weight."""

    finding: Finding
    cause: tuple[str, ...] = ()  # equal for weights with the same fault; empty if no others can share it


def _merge_diagnoses(diagnoses: Sequence[_Diagnosis], unread: Sequence[str]) -> Iterator[Finding]:
    """Merge findings that have one cause; if all have the same, it is assumed for ``unread`` doubtful weights, too."""
    by_cause: dict[tuple[str, ...], list[Finding]] = {}
    for diagnosis in diagnoses:
        by_cause.setdefault(
            (*diagnosis.cause, diagnosis.finding.severity) if diagnosis.cause else (str(diagnosis.finding.layer),), []
        ).append(diagnosis.finding)
    for findings in by_cause.values():
        names = [str(finding.layer) for finding in findings]
        if len(by_cause) == 1 and len(names) > 1:
            names += unread
        if len(names) == 1:
            yield findings[0]
            continue
        worst = min(findings, key=lambda finding: float(finding.evidence["snr_db"]))
        again = f", of which {len(findings)} were read again" if len(names) > len(findings) else ""
        message = f"{count(len(names), 'weight')}{again}; the worst: {worst.message}"
        evidence = {**worst.evidence, "layers": names, "worst": worst.layer}
        yield make_finding(worst.code, worst.severity, None, message, worst.remedy, **evidence)


def find_cast_codes(
    seen: Sequence[WeightSummary], doubtful: Collection[str | None], reader: Reader
) -> Iterator[Finding]:
    """Report doubtful weights whose plain numbers are codes that were cast without their scales."""
    weights_by_codes: dict[str, list[WeightSummary]] = {}
    for weight in seen:
        is_read_otherwise = weight.pair.contradiction is not None
        if weight.pair.name in doubtful and weight.pair.quantized.encoding == "floats" and not is_read_otherwise:
            codes = describe_codes(reader.read_first_rows(weight.pair.quantized, MIN_VALUES**2))
            if codes:
                weights_by_codes.setdefault(f"{codes} codes as {weight.pair.quantized.codes.dtype}", []).append(weight)
    for what, weights in weights_by_codes.items():
        names = [weight.pair.name for weight in weights]
        worst = min((weight.figures.snr_db for weight in weights if weight.figures), default=-inf)
        message = (
            f"{count(len(names), 'weight')} ({itemize(names, 3)}) hold {what} numbers, without their scales: the codes "
            f"were cast, not dequantized; the worst has {worst:.1f} dB"
        )
        remedy = "multiply codes by their scales before the cast (quanterr dequantize), or keep codes and scales"
        yield make_finding("codes_without_scale", "error", None, message, remedy, layers=names, snr_db=worst)


def drop_harmless_zero_scales(findings: Sequence[Finding], pairs: Mapping[str, Pair], reader: Reader) -> list[Finding]:
    """Drop findings about zero scales if the original is zero there too, as in pruned weights.

    Whole weights are read to decide.
    """
    suspects = {finding.layer for finding in findings if finding.code == "scale_zero"}
    harmless = {name for name, pair in pairs.items() if name in suspects and not _loses_to_zero_scales(pair, reader)}
    return [finding for finding in findings if finding.code != "scale_zero" or finding.layer not in harmless]


def drop_limited_rows(findings: Sequence[Finding], pairs: Mapping[str, Pair], reader: Reader) -> list[Finding]:
    """Drop findings about bad rows if these are as good as rounding to the scales that their groups need.

    The codes of a group with large values of both signs may not include zero, which shifts all small values.
    """
    return [
        finding
        for finding in findings
        if finding.code != "bad_rows"
        or not all(_is_limited(pairs[str(finding.layer)], row, reader) for row in finding.evidence["rows"])
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
    max_sq = float(torch.maximum(losses.worst_sq, losses.good_sq.amax(0)).sum())
    return level(float((y - x).double().square().sum()), max_sq) < SLIGHT_DB


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
    simplest = find_simplest_repair(read_sample(pair, reader), figures.bits) if is_doubtful and figures.gains else None
    return (figures.factor, figures.doubt) if simplest and simplest[0] is ONE_FACTOR else None


def _is_repairable_shape(pair: Pair) -> bool:
    """Return True for a matrix, and for a single row of codes."""
    return pair.original.matrix[0] > 1 or pair.quantized.encoding != "floats"


def _diagnose_weight(
    weight: WeightSummary, figures: Figures, factors: Sequence[float], reader: Reader
) -> _Diagnosis | None:
    """Report the simplest repair that corrects a sample of a weight; ``factors`` are those of all such weights."""
    pair, bits = weight.pair, figures.bits
    if bits < 2:
        return None
    sample = read_sample(pair, reader)
    levels = pair.quantized.levels
    has_zero = levels is None or not (levels.table or levels.mantissa)
    simplest = find_simplest_repair(
        sample, bits, -inf if weight.attainable_db is None else weight.attainable_db, has_zero
    )
    if simplest is None:
        partial_factor = _report_partial_factor(pair, figures)
        return _Diagnosis(partial_factor) if partial_factor else None
    repair, corrected = simplest
    if figures.is_peaked and repair.code == "scale_factor" and repair is not ONE_FACTOR:
        return None  # rounding of the largest value looks like a factor of its row or column
    explanation = (
        explain_factor(
            float(corrected.factors), weight.scales, factors, pair.quantized.encoding == "cast", figures.doubt
        )
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
    stored = torch.cat([chunk.flatten().double() for chunk in reader.iterate_scales(pair.quantized.scale)])
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
        "quantize this layer again; if the error returns, the quantizer writes wrong scales",
        snr_db=figures.snr_db,
        snr_db_repaired=figures.rescaled_db,
        found=f"{figures.factor:.4g}",
    )


def _find_swapped(pair: Pair, figures: Figures, pairs: Sequence[Pair], reader: Reader) -> Finding | None:
    """Report that the values match another weight of the same shape far better; experts may resemble each other."""
    if figures.cosine > 1 - FACTOR_TOLERANCE:
        return None
    shape = pair.original.shape
    others = [other for other in pairs if other.original.shape == shape and other.name != pair.name][:MAX_CANDIDATES]
    y = reader.read_first_rows(pair.quantized, FIRST_ROWS // 16)
    cosine_in_place = _compute_cosine(reader.read_first_rows(pair.original, FIRST_ROWS // 16), y) if others else 1.0
    for other in others:
        cosine = _compute_cosine(reader.read_first_rows(other.original, FIRST_ROWS // 16), y)
        if cosine > SAME_VECTOR_COSINE and 2 * (1 - cosine) < 1 - cosine_in_place:
            return make_finding(
                "swapped_weight",
                "error",
                pair.name,
                f"{display(pair.name)}: its values match {display(other.name)} of the original "
                f"(cosine {cosine:.4f} on a sample)",
                "convert or quantize the model again",
                weight=other.name,
                cosine_similarity=cosine,
            )
    return None


def _compute_cosine(x: Tensor, y: Tensor) -> float:
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
    scaling = reader.read_scaling(weight, chunk)
    return scaling.unit.double() if scaling else None
