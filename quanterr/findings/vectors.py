"""Findings about norms, biases and other unquantized 1-D tensors; tensors that differ much are read again.

Correct quantizers may cast such tensors, store norms minus one, divide by positive factors that weights absorb (AWQ,
SmoothQuant), fuse norms into the following layer, which leaves ones, or correct biases for the error of their weight.
A correction may be large: the bias of a real key projection, which matters little, changed by 5.6 times its norm. But
no quantizer loses or reorders the values, and only a correction changes their signs or multiplies them by one number.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf, isfinite, sqrt
from typing import NamedTuple

from quanterr.documents.base import Finding
from quanterr.findings.codes import make_finding
from quanterr.findings.error_figures import BF16_ERROR
from quanterr.findings.factors import explain_factor
from quanterr.findings.layers import WeightSummary
from quanterr.findings.limits import (
    ALIGNED_COSINE,
    CHANCE_DEVIATIONS,
    CHANGED_DB,
    FACTOR_TOLERANCE,
    MAJOR_SHARE,
    MIN_VALUES,
    UNRELATED_COSINE,
)
from quanterr.findings.repairs import MIN_GAIN_DB, Sample, measure_snr
from quanterr.findings.samples import read_sample
from quanterr.formats.reading import Reader
from quanterr.lazy_torch import Tensor
from quanterr.metrics.sums import ratio
from quanterr.pairing.model import Pair
from quanterr.pairing.names import FED_BY_NORM, canonicalize
from quanterr.selection.roles import role_of
from quanterr.tensors.casts import CastTest, Copy
from quanterr.util.text import count, display, itemize

CAST_DB = 40.0  # any cast of norms and biases to 16 bits reaches this SNR
FREQUENCY_SUFFIX = "inv_freq"  # frequencies of rotary positions, which configurations and layouts define
MIN_F16 = 2.0**-24  # the smallest F16 number: a cast turns smaller ones into zeros
MAX_NORM_RATIO = 10.0  # maximum ratio of norms that smoothing factors can cause
MAX_SEARCHES = 8  # maximum number of vectors to search for among the others
MAX_CANDIDATES = 512  # maximum number of vectors to compare each of these with


def check_vectors(
    seen: Sequence[WeightSummary],
    folded: Collection[str],
    corrected: Collection[str],
    pairs: Sequence[Pair],
    reader: Reader,
) -> Iterator[Finding]:
    """Report faults of the vectors that differ.

    Args:
        seen: the weights that differ.
        folded: modules that absorbed scales; their vectors are expected to change.
        corrected: names of biases of quantized weights, which are expected to change.
        pairs: all pairs.
        reader: reads vectors, and weights beside biases.
    """
    changed, ones, sought = [], [], 0
    shifts: dict[str, _BiasShift] = {}
    weights = {pair.name: pair for pair in pairs if corrected}
    vectors = {canonicalize(pair.name): pair for pair in pairs if corrected and is_vector(pair)}
    for weight in seen:
        weight_pair = weights.get(weight.pair.name.removesuffix("bias") + "weight")
        is_corrected = weight.pair.name in corrected and weight.copy == Copy.CHANGED and weight_pair is not None
        if not is_vector(weight.pair) or weight.offset or (not is_corrected and _is_near(weight)):
            continue
        sample = read_sample(weight.pair, reader)
        if not bool(sample.x.any()):  # check_weight reports an original of zeros
            continue
        may_scale = weight.pair.name.rpartition(".")[0] in folded
        may_differ = may_scale or weight.pair.name in corrected
        fault = _check_lost(weight.pair, sample) or _check_order(weight.pair, sample)
        if not fault and sample.x.numel() >= MIN_VALUES:
            fault = None if may_differ else _check_one_factor(weight.pair, sample)
            if not fault and sought < MAX_SEARCHES and _changed_much(sample):
                sought += 1
                fault = _find_swapped(weight.pair, sample, pairs, reader)
            fault = fault or (None if may_differ else _check_related(weight.pair, sample))
        if fault:
            yield fault
        elif is_corrected and weight_pair and not may_scale:
            shifts[weight.pair.name] = _measure_shift(sample, weight_pair, vectors, reader)
        elif not may_scale and weight.ones:
            ones.append(weight.pair.name)
        elif not may_scale and _changed_much(sample):
            changed.append(weight.pair.name)
    if shifts:
        yield _report_corrected(shifts)
    if ones:
        message = (
            f"{count(len(ones), 'norm')} {'is' if len(ones) == 1 else 'are'} 1 throughout, unlike the original's: "
            f"{itemize(ones, 3)}; they were merged into the weights that follow, or lost"
        )
        remedy = (
            "copy the norms from the original, unless they were merged into weights that this comparison leaves out"
        )
        yield make_finding("implausible_error", "warning", None, message, remedy, layers=ones)
    if computed := [name for name in changed if name.endswith(FREQUENCY_SUFFIX)]:
        changed = [name for name in changed if name not in computed]
        message = (
            f"{count(len(computed), 'tensor')} of rotary frequencies changed more than a cast explains: "
            f"{itemize(computed, 3)}; no quantizer changes them"
        )
        remedy = "compare rope_theta and rope_scaling of both config.json files, and store the original's frequencies"
        yield make_finding("implausible_error", "warning", None, message, remedy, layers=computed)
    if changed:
        message = (
            f"{count(len(changed), 'norm, bias or other 1-D tensor', 'norms, biases or other 1-D tensors')} changed "
            f"more than a cast explains: {itemize(changed, 3)}; biases were corrected, scales folded, or values lost"
        )
        remedy = "find out whether the quantizer folds scales into them (AWQ, SmoothQuant) or corrects biases"
        yield make_finding("implausible_error", "warning", None, message, remedy, layers=changed)


def classify_shifted_copy(weight: WeightSummary, reader: Reader) -> Copy | None:
    """Return how a norm was copied, after its constant offset is undone; for other weights, the known result."""
    if not weight.offset or weight.copy is None:
        return weight.copy
    x, y = (values.float() for values in read_sample(weight.pair, reader)[:2])
    results = []
    for a, b in ((x + weight.offset, y), (x, y - weight.offset)):  # either side may have lost digits
        forth, back = (CastTest(*dtypes, computed=True) for dtypes in _list_dtypes(weight.pair))
        forth.add(a, b)
        back.add(b, a)
        results += [forth.result, back.result]
    return Copy.SAME if Copy.SAME in results else Copy.CHANGED


def _list_dtypes(pair: Pair) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return the dtypes of both sides, and the same reversed."""
    x, y = pair.original.codes.dtype, pair.quantized.codes.dtype
    return (x, y), (y, x)


def _is_near(weight: WeightSummary) -> bool:
    """Return True if a cast explains the difference."""
    return weight.figures is not None and weight.figures.snr_db > CAST_DB


_Vectors = Mapping[tuple[str, str], Pair]  # (canonical path, suffix) → unquantized 1-D tensor


class _BiasShift(NamedTuple):
    """Effect of a changed bias on the outputs."""

    rows: float  # maximum of change / norm of the weight's row, which is the output for inputs of size one
    # Norm of the change, divided by the output error of the weight on typical inputs. A correction compensates for the
    # mean of this error, so it is at most 1. Files of convert_to_quant have 0.02 to 0.14.
    share: float
    unlike: str = ""  # why it cannot be a correction; empty if it may be one


def _measure_shift(sample: Sample, weight: Pair, vectors: _Vectors, reader: Reader) -> _BiasShift:
    """Return the effect of a changed bias on outputs.

    Args:
        sample: the bias.
        weight: the weight of the same module.
        vectors: the vectors, among which the norm before the weight is looked up.
        reader: reads the weight and the norm.
    """
    x, y = read_sample(weight, reader)[:2]
    bias = Sample(*(side.flatten()[: len(x)] for side in sample[:2]))
    changes = bias.y - bias.x
    if not len(changes):
        return _BiasShift(0.0, 0.0)
    norms, errors = x.norm(dim=1)[: len(changes)], (y - x).norm(dim=1)[: len(changes)]
    error = float((y - x).norm()) / sqrt(x.shape[1]) * _find_typical_input_norm(weight, vectors, reader)
    of_rows = float((changes.abs() / norms).nan_to_num(0.0, 0.0, inf).max())
    return _BiasShift(of_rows, ratio(float(changes.norm()), error), _contradict_correction(bias, errors))


def _contradict_correction(bias: Sample, errors: Tensor) -> str:
    """Return why a change cannot be a correction of a bias; empty if it may be one.

    A correction of row r is -E_r · m, where E_r is the error of the weight's row and m the mean input, which is unknown
    here. So a correction is not a multiple of the bias, makes no element zero, and is not far larger in one row than in
    others, relative to the rows' errors.

    Args:
        bias: the bias on both sides, (n,).
        errors: ‖E_r‖, (n,).
    """
    x, y = bias[:2]
    changes = y - x
    if bool(((x.abs() > MIN_F16) & (y == 0)).any()):
        return "elements became zero"
    if len(x) < MIN_VALUES:
        return ""
    if abs(float((changes * x).sum())) > ALIGNED_COSINE * float(changes.norm() * x.norm()):
        return f"it was multiplied by {float((x * y).sum() / x.square().sum()):.3g}"
    shares = ((changes.abs() - BF16_ERROR * x.abs()).clamp(min=0) / errors).nan_to_num(0.0, inf)
    are_far = shares > CHANCE_DEVIATIONS * shares.square().mean().sqrt()
    if bool(shares.isinf().any()) or bool(are_far.any()):
        return "rows with little error changed far more than the others"
    return ""


def _find_typical_input_norm(weight: Pair, vectors: _Vectors, reader: Reader) -> float:
    """Return the norm of typical inputs of a weight.

    It is the norm of the preceding normalization's weight; without one, inputs of size one are assumed.
    """
    path, _ = canonicalize(weight.name)
    for norms, fed in FED_BY_NORM:
        before = re.fullmatch(rf"((?:.*\.)?)(?:{fed})", path)
        names = [before[1] + norm for norm in norms.split("|")] if before else []
        norm = next((vectors[name, ""] for name in names if (name, "") in vectors), None)
        if norm:
            factors = reader.read_first_rows(norm.original)
            return float(max(factors.norm(), (1 + factors).norm() if bool((factors < 0).any()) else 0.0))
    return sqrt(weight.original.matrix[1])


def _report_corrected(shifts: Mapping[str, _BiasShift]) -> Finding:
    """Report corrected biases, and the size of the correction relative to the error that it corrects."""
    names = sorted(shifts, key=lambda name: -shifts[name].share)
    worst, max_shift = shifts[names[0]].share, max(shift.rows for shift in shifts.values())
    error = "the error that the weight causes on typical inputs"
    shift = f"by {worst:.2g} times {error}" if isfinite(worst) else "although the weights cause no error"
    message = (
        f"{count(len(names), 'bias', 'biases')} of quantized weights changed, as corrections do: {itemize(names, 3)}; "
        f"outputs shift {shift}"
    )
    is_small = worst <= 1
    remedy = None if is_small else "check the model's outputs: a correction is no larger than the error of its weight"
    if odd := {name: shift.unlike for name, shift in shifts.items() if shift.unlike}:
        name, is_small = next(iter(odd)), False
        message += f"; {count(len(odd), 'bias', 'biases')} changed unlike any correction: {display(name)}: {odd[name]}"
        remedy = "copy the biases from the original, unless the quantizer is known to correct them"
    level = "info" if is_small else "warning"
    return make_finding("bias_corrected", level, None, message, remedy, layers=names, shift=max_shift, share=worst)


def is_vector(pair: Pair) -> bool:
    """Return True for an unquantized tensor of one dimension or none."""
    return len(pair.original.shape) < 2 and pair.quantized.encoding == "floats"


def _changed_much(sample: Sample) -> bool:
    """Return True if values changed by more than a cast or a correction explains."""
    x, y = sample[:2]
    if x.numel() >= MIN_VALUES:
        return not measure_snr(x, y - x) >= CHANGED_DB
    kept = x != 0
    ratios = y[kept] / x[kept]
    return bool(((ratios < 1 / 2) | (ratios > 2)).any())


def _report_implausible(pair: Pair, sample: Sample, description: str, **evidence: object) -> Finding:
    """Return the finding that no known quantizer changes a tensor like this."""
    before = measure_snr(sample.x, sample.y - sample.x)
    message = f"{display(pair.name)}: {description}"
    remedy = "no known quantizer does this: check the program that wrote this tensor"
    return make_finding("implausible_error", "error", pair.name, message, remedy, snr_db=before, **evidence)


def _check_lost(pair: Pair, sample: Sample) -> Finding | None:
    """Report a tensor if more than half of its nonzero values became zero."""
    x, y = sample[:2]
    lost = (x != 0) & (y == 0)
    n, total = int(lost.sum()), int((x != 0).sum())
    if (
        2 * n <= total
        or not _changed_much(sample)
        or (total < MIN_VALUES and n < total)
        or float(x[lost].abs().max()) < MIN_F16
    ):
        return None
    description = "all its values are zero" if n == total else f"{n:,} of its {total:,} values are zero"
    return _report_implausible(pair, sample, f"{description}; the original's are not", zeros=n)


def _check_order(pair: Pair, sample: Sample) -> Finding | None:
    """Report values that are the original's in another order."""
    x, y = sample[:2]
    if x.numel() < MIN_VALUES or x.numel() < pair.original.n or _correlate(x, y) > ALIGNED_COSINE:
        return None
    x_sorted, y_sorted = x.flatten().sort().values, y.flatten().sort().values
    before, after = measure_snr(x, y - x), measure_snr(x_sorted, y_sorted - x_sorted)
    if bool(((y_sorted - x_sorted).abs() > BF16_ERROR * x_sorted.abs()).any()) or not after - before > MIN_GAIN_DB:
        return None
    message = f"{display(pair.name)}: {before:.1f} dB; its values are a permutation of the original's"
    remedy = "look for a permutation that only one side undoes"
    return make_finding("permuted", "error", pair.name, message, remedy, snr_db=before, snr_db_repaired=after)


def _check_one_factor(pair: Pair, sample: Sample) -> Finding | None:
    """Report values that are all multiplied by one number, unless all are 1, as in a norm fused into the next layer."""
    x, y = sample[:2]
    product = float((x * y).sum())
    if not product or bool((y == 1).all()):
        return None
    factor = float(y.square().sum()) / product
    before, after = measure_snr(x, y - x), measure_snr(x, y / factor - x, 1)
    if not after > CHANGED_DB or after - before < MIN_GAIN_DB or abs(factor - 1) < FACTOR_TOLERANCE:
        return None
    message = (
        f"{display(pair.name)}: {before:.1f} dB; it is the original times {factor:.4g}{explain_factor(factor, None)}"
    )
    remedy = "find out what multiplied this tensor: nothing should"
    evidence = {"snr_db": before, "snr_db_repaired": after, "found": f"{factor:.4g}"}
    return make_finding("scale_factor", "error", pair.name, message, remedy, **evidence)


def _find_swapped(pair: Pair, sample: Sample, pairs: Sequence[Pair], reader: Reader) -> Finding | None:
    """Report that the values match another tensor of the same shape."""
    before = measure_snr(sample.x, sample.y - sample.x)
    others = [
        candidate
        for candidate in pairs
        if candidate.original.shape == pair.original.shape and candidate.name != pair.name
    ]
    for other in others[:MAX_CANDIDATES]:
        x = reader.read_first_rows(other.original)
        after = measure_snr(x, sample.y - x)
        if after > max(CHANGED_DB, before + MIN_GAIN_DB):
            message = f"{display(pair.name)}: its values match {display(other.name)} of the original"
            remedy = "convert or quantize the model again"
            return make_finding("swapped_weight", "error", pair.name, message, remedy, weight=other.name, snr_db=after)
    return None


def _check_related(pair: Pair, sample: Sample) -> Finding | None:
    """Report values that are unrelated to the original's, so that positive factors do not explain them."""
    x, y = sample[:2]
    norms, ratio = float(x.norm() * y.norm()), float(y.norm() / x.norm())
    if not isfinite(norms * ratio):
        return _report_implausible(pair, sample, "its values are too large for their error to be measured")
    cosine = float((x * y).sum()) / norms if norms else 0.0
    flipped = float(x[x * y < 0].square().sum() / x.square().sum())
    if cosine >= UNRELATED_COSINE and 1 / MAX_NORM_RATIO <= ratio <= MAX_NORM_RATIO and flipped <= MAJOR_SHARE:
        return None
    lost_by_cast = not bool(y.any())  # _check_lost has accepted these zeros
    if lost_by_cast or bool((y == 1).all()) or (role_of(pair.name) == "norm" and _follows_other_convention(x, y)):
        return None
    description = f"norm {ratio:.4g} times the original's, cosine {cosine:.4f}: another tensor, or damaged"
    return _report_implausible(pair, sample, description, norm_ratio=ratio, cosine_similarity=cosine)


def _follows_other_convention(x: Tensor, y: Tensor) -> bool:
    """Return True for a norm stored minus a constant, or minus one and perhaps divided by positive factors."""
    e = y - x
    shift = abs(float(e.mean()))
    shifted = shift <= 1 and float(e.std()) < FACTOR_TOLERANCE * shift
    return shifted or (bool((x < 0).any()) and bool(((1 + x > 0) & (1 + y > 0)).all()))


def _correlate(x: Tensor, y: Tensor) -> float:
    """Return the correlation of two tensors; 0 if one is constant."""
    x, y = x - x.mean(), y - y.mean()
    norms = float(x.norm() * y.norm())
    return float((x * y).sum()) / norms if norms else 0.0
