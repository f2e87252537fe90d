"""What norms, biases and other plain tensors of one dimension show; those that differ much are read again.

Valid quantizers cast them, store norms less one, divide them by positive factors that weights take up (AWQ,
SmoothQuant), fuse norms into what follows, which leaves ones, or correct biases for the error of their weights:
those may end anywhere, as a real key projection whose bias matters little did at 5.6 times its norm. None of that
takes their values away or reorders them; nothing but a correction turns their sign or multiplies them by one number.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf, isfinite, sqrt
from typing import NamedTuple

from torch import Tensor

from quanterr.findings.codes import finding
from quanterr.findings.factors import meaning
from quanterr.findings.layers import WeightSummary
from quanterr.findings.repairs import BETTER, Sample, snr_db
from quanterr.findings.samples import first_rows, one_thread, sample_of
from quanterr.findings.sums import UNRELATED
from quanterr.metrics.sums import ratio
from quanterr.pairing.model import Pair
from quanterr.pairing.names import FED_BY_NORM, canonicalize
from quanterr.pairing.sampling import Workspaces, on_cpu
from quanterr.report.base import Finding
from quanterr.roles import role_of
from quanterr.tensors.casts import CastTest, Copy
from quanterr.tensors.workspace import Workspace
from quanterr.util.text import count, display, listed

CAST_DB = 40.0  # any cast of norms and biases to 16 bits reaches it
CHANGED_DB = 20.0  # below it a change is worth a warning
FEW = 8  # elements: of fewer each is looked at
TINY = 2.0**-24  # the smallest F16 number: a cast makes zeros of what is below
CAST = 2.0**-8  # relative, of BF16
REORDERED = 0.9  # of a correlation: below it the order differs
ONE_NUMBER = 0.05  # of 1, of a factor
EXACT_FACTOR_DB = 25.0  # that one factor must reach
SHIFTED = 0.02  # of a shift: by so much its elements scatter
LENGTHS = 0.1, 10.0  # of a norm ratio: what factors of smoothing leave
FLIPPED = 0.2  # of the energy, whose sign differs: factors of smoothing turn none
TWICE = 2.0
# Times what the error of a weight makes of typical inputs: a correction makes up for their mean, which is no larger.
# Files of convert_to_quant have 0.02 to 0.14.
LITTLE = 1.0
SAME_DB = 30.0  # another tensor's values
MOST_SOUGHT = 8  # vectors whose values are looked for in others
MOST_OTHERS = 512


def of_vectors(
    seen: Sequence[WeightSummary], folded: Collection[str], corrected: Collection[str], pairs: Sequence[Pair]
) -> Iterator[Finding]:
    """What those that differ show.

    ``folded`` are modules that took up scales, ``corrected`` biases of quantized weights: both are expected to change.
    """
    changed, sought = [], 0
    shifts: dict[str, _Shift] = {}
    weights = {pair.name: pair for pair in pairs if corrected}
    vectors = {canonicalize(pair.name): pair for pair in pairs if corrected and is_vector(pair)}
    with one_thread(), on_cpu() as workspaces:
        for one in seen:
            beside = weights.get(one.pair.name.removesuffix("bias") + "weight")
            is_corrected = one.pair.name in corrected and one.copy == Copy.CHANGED and beside is not None
            if not is_vector(one.pair) or one.offset or (not is_corrected and _is_near(one)):
                continue
            sample = sample_of(one.pair, workspaces)
            if not bool(sample.x.any()):  # given by sums
                continue
            may_scale = one.pair.name.rpartition(".")[0] in folded
            may_differ = may_scale or one.pair.name in corrected
            found = _lost(one.pair, sample) or _reordered(one.pair, sample)
            if not found and sample.x.numel() >= FEW:
                found = None if may_differ else _one_factor(one.pair, sample)
                if not found and sought < MOST_SOUGHT and _much(sample):
                    sought += 1
                    found = _another(one.pair, sample, pairs, workspaces[0])
                found = found or (None if may_differ else _unrelated(one.pair, sample))
            if found:
                yield found
            elif is_corrected and beside and not may_scale:
                shifts[one.pair.name] = _shift(sample, beside, vectors, workspaces)
            elif not may_scale and _much(sample):
                changed.append(one.pair.name)
    if shifts:
        yield _corrected(shifts)
    if changed:
        message = (
            f"{count(len(changed), 'norm, bias or other 1-D tensor', 'norms, biases or other 1-D tensors')} changed "
            f"more than a cast explains: {listed(changed, 3)}; biases were corrected, scales folded, or values lost"
        )
        remedy = "find out whether the quantizer folds scales into them (AWQ, SmoothQuant) or corrects biases"
        yield finding("implausible_error", "warning", None, message, remedy, layers=changed)


def copy_once_shifted(one: WeightSummary) -> Copy | None:
    """What a norm is of the original's once what is added to all its elements is undone; of others what is known."""
    if not one.offset or one.copy is None:
        return one.copy
    with one_thread(), on_cpu() as workspaces:
        x, y = (values.float() for values in sample_of(one.pair, workspaces))
    found = []
    for a, b in ((x + one.offset, y), (x, y - one.offset)):  # whichever side has lost digits by it
        forth, back = (CastTest(*dtypes, computed=True) for dtypes in _dtypes(one.pair))
        forth.add(a, b)
        back.add(b, a)
        found += [forth.result, back.result]
    return Copy.SAME if Copy.SAME in found else Copy.CHANGED


def _dtypes(pair: Pair) -> tuple[tuple[str, str], tuple[str, str]]:
    """Dtypes of both sides, and the reverse."""
    x, y = pair.original.codes.dtype, pair.quantized.codes.dtype
    return (x, y), (y, x)


def _is_near(one: WeightSummary) -> bool:
    return one.figures is not None and one.figures.snr_db > CAST_DB


_Vectors = Mapping[tuple[str, str], Pair]  # plain tensors of one dimension by canonical path and kind


class _Shift(NamedTuple):
    """What the change of a bias does to outputs."""

    rows: float  # the largest in norms of the rows of its weight: in outputs of inputs of size one
    share: float  # of what the error of the weight does to typical inputs, all outputs together


def _shift(sample: Sample, weight: Pair, vectors: _Vectors, workspaces: Workspaces) -> _Shift:
    x, y = sample_of(weight, workspaces)
    changes = (sample.y - sample.x).flatten()[: len(x)]
    if not len(changes):
        return _Shift(0.0, 0.0)
    norms = x.norm(dim=1)[: len(changes)]
    error = float((y - x).norm()) / sqrt(x.shape[1]) * _input_norm(weight, vectors, workspaces[0])
    of_rows = float((changes.abs() / norms).nan_to_num(0.0, 0.0, inf).max())
    return _Shift(of_rows, ratio(float(changes.norm()), error))


def _input_norm(weight: Pair, vectors: _Vectors, workspace: Workspace) -> float:
    """The norm of typical inputs: that of the norm's weight before it; of inputs of size one where there is none."""
    path, _ = canonicalize(weight.name)
    for norms, fed in FED_BY_NORM:
        before = re.fullmatch(rf"((?:.*\.)?)(?:{fed})", path)
        names = [before[1] + norm for norm in norms.split("|")] if before else []
        norm = next((vectors[name, ""] for name in names if (name, "") in vectors), None)
        if norm:
            factors = first_rows(norm.original, workspace)
            return float(max(factors.norm(), (1 + factors).norm() if bool((factors < 0).any()) else 0.0))
    return sqrt(weight.original.matrix[1])


def _corrected(shifts: Mapping[str, _Shift]) -> Finding:
    """What was done to biases of quantized weights; how much of it may matter."""
    names = sorted(shifts, key=lambda name: -shifts[name].share)
    worst, most = shifts[names[0]].share, max(shift.rows for shift in shifts.values())
    message = (
        f"{count(len(names), 'bias', 'biases')} of quantized weights were corrected: {listed(names, 3)}; outputs shift "
        f"by {most:.2g} of the norm of their row at most, by {worst:.2g} times what the error of the weight does to "
        "typical inputs"
    )
    little = worst <= LITTLE
    remedy = None if little else "check what the model puts out: corrections of the error of a weight are smaller"
    level = "info" if little else "warning"
    return finding("bias_corrected", level, None, message, remedy, layers=names, shift=most, share=worst)


def is_vector(pair: Pair) -> bool:
    """A plain tensor of one dimension, or of none."""
    return len(pair.original.shape) < 2 and pair.quantized.encoding == "floats"


def _much(sample: Sample) -> bool:
    """Whether values changed by more than a cast or a correction does."""
    x, y = sample
    if x.numel() >= FEW:
        return not snr_db(x, y - x) >= CHANGED_DB
    kept = x != 0
    ratios = y[kept] / x[kept]
    return bool(((ratios < 1 / TWICE) | (ratios > TWICE)).any())


def _implausible_error(pair: Pair, sample: Sample, description: str, **evidence: object) -> Finding:
    before = snr_db(sample.x, sample.y - sample.x)
    message = f"{display(pair.name)}: {description}"
    remedy = "no known quantizer does this: check what wrote this tensor"
    return finding("implausible_error", "error", pair.name, message, remedy, snr_db=before, **evidence)


def _lost(pair: Pair, sample: Sample) -> Finding | None:
    """Zeros where the original has values, and more of them than half."""
    x, y = sample
    lost = (x != 0) & (y == 0)
    n, of = int(lost.sum()), int((x != 0).sum())
    if 2 * n <= of or not _much(sample) or (of < FEW and n < of) or float(x[lost].abs().max()) < TINY:
        return None
    description = "all its values are zero" if n == of else f"{n:,} of its {of:,} values are zero"
    return _implausible_error(pair, sample, f"{description}; the original's are not", zeros=n)


def _reordered(pair: Pair, sample: Sample) -> Finding | None:
    """The same values in another order."""
    x, y = sample
    if x.numel() < FEW or x.numel() < pair.original.n or _correlation(x, y) > REORDERED:
        return None
    x_sorted, y_sorted = x.flatten().sort().values, y.flatten().sort().values
    before, after = snr_db(x, y - x), snr_db(x_sorted, y_sorted - x_sorted)
    if bool(((y_sorted - x_sorted).abs() > CAST * x_sorted.abs()).any()) or not after - before > BETTER:
        return None
    message = f"{display(pair.name)}: {before:.1f} dB; its values are the original's, permuted"
    remedy = "look for a permutation that only one side undoes"
    return finding("permuted", "error", pair.name, message, remedy, snr_db=before, snr_db_repaired=after)


def _one_factor(pair: Pair, sample: Sample) -> Finding | None:
    """All values times one number; ones are what is left where a norm was fused into what follows."""
    x, y = sample
    both = float((x * y).sum())
    if not both or bool((y == 1).all()):
        return None
    factor = float(y.square().sum()) / both
    before, after = snr_db(x, y - x), snr_db(x, y / factor - x, 1)
    if not after > EXACT_FACTOR_DB or after - before < BETTER or abs(factor - 1) < ONE_NUMBER:
        return None
    message = f"{display(pair.name)}: {before:.1f} dB; it is the original times {factor:.4g}{meaning(factor, None)}"
    remedy = "check what multiplied it: nothing should"
    evidence = {"snr_db": before, "snr_db_repaired": after, "found": f"{factor:.4g}"}
    return finding("scale_factor", "error", pair.name, message, remedy, **evidence)


def _another(pair: Pair, sample: Sample, pairs: Sequence[Pair], workspace: Workspace) -> Finding | None:
    """The tensor of the original whose values these are, among those of one shape."""
    before = snr_db(sample.x, sample.y - sample.x)
    others = [one for one in pairs if one.original.shape == pair.original.shape and one.name != pair.name]
    for other in others[:MOST_OTHERS]:
        x = first_rows(other.original, workspace)
        after = snr_db(x, sample.y - x)
        if after > max(SAME_DB, before + BETTER):
            message = f"{display(pair.name)}: its values are those of {display(other.name)} of the original"
            remedy = "find out where the layers were swapped"
            return finding("swapped_weight", "error", pair.name, message, remedy, weight=other.name, snr_db=after)
    return None


def _unrelated(pair: Pair, sample: Sample) -> Finding | None:
    """Values that have nothing to do with the original's, as no positive factors make them."""
    x, y = sample
    both, ratio = float(x.norm() * y.norm()), float(y.norm() / x.norm())
    if not isfinite(both * ratio):
        return _implausible_error(pair, sample, "its values are too large for their error to be measured")
    cosine = float((x * y).sum()) / both if both else 0.0
    flipped = float(x[x * y < 0].square().sum() / x.square().sum())
    if cosine >= UNRELATED and LENGTHS[0] <= ratio <= LENGTHS[1] and flipped <= FLIPPED:
        return None
    lost_by_cast = not bool(y.any())  # what is no error in _lost
    if lost_by_cast or bool((y == 1).all()) or (role_of(pair.name) == "norm" and _of_another_convention(x, y)):
        return None
    description = f"norm {ratio:.4g} times the original's, cosine {cosine:.4f}: another tensor, or damaged"
    return _implausible_error(pair, sample, description, norm_ratio=ratio, cosine_similarity=cosine)


def _of_another_convention(x: Tensor, y: Tensor) -> bool:
    """A norm that is stored less a number, or stored less one and may have been divided by positive factors."""
    e = y - x
    shift = abs(float(e.mean()))
    shifted = shift <= 1 and float(e.std()) < SHIFTED * shift
    return shifted or (bool((x < 0).any()) and bool(((1 + x > 0) & (1 + y > 0)).all()))


def _correlation(x: Tensor, y: Tensor) -> float:
    x, y = x - x.mean(), y - y.mean()
    both = float(x.norm() * y.norm())
    return float((x * y).sum()) / both if both else 0.0
