"""What is wrong or suspicious, told from headers, scales and sums: a sentence and what to do."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf, isnan, sqrt
from typing import Any

from quanterr.folding import Folded
from quanterr.importance import Covered
from quanterr.metrics import Measured, cosine_similarity, snr_db
from quanterr.metrics.sums import Sums
from quanterr.metrics.sums import ratio as energy_ratio
from quanterr.pairing import Pair, Plan
from quanterr.report.model import Finding
from quanterr.text import count, display, listed
from quanterr.worker import Finished

# Bits of a code → SNR in dB: right readings are above the first, wrong ones below the second. Plain
# rounding of normal weights reaches 40 dB in 8 bits, 20 in 4, 13 in 3 and 7 in 2; outliers cost a few.
DOUBTFUL_DB = {1: -inf, 2: 0.0, 3: 6.0}
BROKEN_DB = {1: -inf, 2: -3.0, 3: 1.0}
USUALLY = 9.0, 3.0  # of more bits
ONLY_LENGTH = 0.99  # of a cosine: what is wrong is the scale and nothing else
SAME_DIRECTION = 0.9  # of a cosine: only the length differs
UNRELATED = 0.3
SAME_LENGTH = 0.8, 1.25  # of a norm ratio

FUSED_LOCATIONS = frozenset({"weight_input", "weight_output"})


def finding(
    code: str, severity: str, layer: str | None, message: str, remedy: str | None = None, **evidence: object
) -> Finding:
    """A finding."""
    return Finding.model_validate(
        {
            "code": code,
            "severity": severity,
            "layer": layer,
            "message": message,
            "remedy": remedy,
            "evidence": evidence,
        }
    )


def of_plan(plan: Plan) -> Iterator[Finding]:
    """What headers and labels show."""
    for side, labels in plan.labels.items():
        if labels.orphans:
            layers = listed(list(labels.orphans))
            message = f"the header of the {side} checkpoint labels layers that are not stored: {layers}"
            yield finding("label_without_layer", "warning", None, message)
        if rotated := _fused_rotations(labels.config):
            message = f"config.json of the {side} checkpoint tells of rotations fused into its weights: {rotated}"
            remedy = "compare before the transform is fused, or with the rotated original"
            yield finding("rotated_weights", "error", None, message, remedy)
    for name in plan.dummies:
        message = f"{display(name)} is not quantized, but a scale of 1 lies beside it; it was ignored"
        yield finding("dummy_scale", "warning", name, message)
    casts = [pair.name for pair in plan.pairs if pair.quantized.format == "fp8_cast"]
    if casts:
        message = f"FP8 without any scale, taken as a plain cast: {count(len(casts), 'tensor')}: {listed(casts, 3)}"
        remedy = "if the model was quantized with scales, they are missing from this file"
        yield finding("fp8_without_scale", "info", None, message, remedy)
    for pair in plan.pairs:
        for doubt in pair.original.doubts + pair.quantized.doubts:
            yield finding("layout_doubt", "warning", pair.name, f"{display(pair.name)}: {doubt}")


def _fused_rotations(config: Mapping[str, Any]) -> str:
    """Transforms of compressed-tensors that are part of the stored weights, in words."""
    told = []
    for name, group in _object(_object(config.get("transform_config")).get("config_groups")).items():
        applied = _object(group).get("apply")
        places = applied if isinstance(applied, list) else []
        if any(_object(place).get("location") in FUSED_LOCATIONS for place in places):
            told.append(f"{display(name)} ({display(str(group.get('type')))})")
    return ", ".join(told)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def of_folding(folded: Iterable[Folded]) -> Iterator[Finding]:
    """Scales that moved between weights: told with the error as stored, and with them undone."""
    for found in folded:
        yield finding(
            "folded_scales",
            "warning",
            found.source,
            f"scales of {listed(list(found.names), 4)} were folded into {display(found.source)}; they were compared "
            f"with that undone: {found.after_db:.1f} dB on a sample, {found.before_db:.1f} dB as stored",
            "nothing, if the quantizer does so (AWQ, SmoothQuant); the two must be used together",
            layers=list(found.names),
            snr_db_as_stored=found.before_db,
            snr_db=found.after_db,
        )


def of_importance(covered: Sequence[Covered] | None) -> Iterator[Finding]:
    """For which weights, and which matrices of stacks, nothing is known of their inputs."""
    if covered is None:
        return
    missing = [told.name for told in covered if told.uncovered is None]
    if len(missing) == len(covered):
        message = "the importance matrix names none of the compared weights"
        remedy = "give the one that was made for this model"
        yield finding("importance_of_nothing", "error", None, message, remedy)
    elif missing:
        message = f"no importance is known for {count(len(missing), 'weight')}: {listed(missing, 3)}"
        yield finding("importance_missing", "info", None, message, weights=len(missing))
    partly = [told for told in covered if told.uncovered]
    if partly:
        n = sum(told.uncovered or 0 for told in partly)
        message = f"{count(n, 'expert')} that no input ever reached count evenly: {listed([t.name for t in partly], 3)}"
        yield finding("importance_uncovered", "warning", None, message, experts=n)


def of_weight(pair: Pair, done: Finished) -> Iterator[Finding]:
    """What one compared weight shows."""
    shown, sums = display(pair.name), done.sums
    for side, n in (("original", sums.nonfinite_original), ("quantized", sums.nonfinite_quantized)):
        if n:
            yield finding(
                f"nonfinite_{side}",
                "error",
                pair.name,
                f"{shown}: {n:,} of {sums.elements:,} elements of the {side} weight are NaN or infinite",
                "quantize this layer again, or find out where the original overflowed",
                elements=n,
            )
    if done.scales:
        yield from _of_scales(pair, done)
    yield from _far_off(pair, sums)
    if sums.n and not sums.x_sq and sums.e_sq:
        yield finding(
            "zero_original",
            "warning",
            pair.name,
            f"{shown}: the original is all zeros, the quantized weight is not",
        )


def _far_off(pair: Pair, sums: Sums) -> Iterator[Finding]:
    """A weight that lies further off than any right one of as many bits: read wrong, or broken."""
    if not sums.x_sq or not sums.e_sq or len(pair.original.shape) < 2:
        return
    measured = Measured(sums)
    bits = pair.quantized.code_bits or 8 * pair.quantized.nbytes // sums.elements
    snr, ratio = snr_db(measured), sqrt(energy_ratio(sums.y_sq, sums.x_sq))
    if isnan(snr) or snr == inf:  # told elsewhere, or as near as numbers go
        return
    if snr == -inf or ratio == inf:
        message = f"{display(pair.name)}: its values as {pair.quantized.format} are too large for any ratio to tell"
        yield finding("far_off", "error", pair.name, message, "quantize this layer again")
        return
    cosine = cosine_similarity(measured) if ratio else 0.0
    only_length = abs(cosine) > ONLY_LENGTH and snr < USUALLY[0]
    if not (snr < DOUBTFUL_DB.get(bits, USUALLY[0]) or only_length or abs(cosine) < UNRELATED):
        return
    unrelated = abs(cosine) < UNRELATED and (ratio > 0 or bits > 1)  # symmetric codes of one bit may all be zero
    broken = snr < BROKEN_DB.get(bits, USUALLY[1]) or only_length or unrelated
    yield finding(
        "far_off",
        "error" if broken else "warning",
        pair.name,
        f"{display(pair.name)}: {snr:.1f} dB as {pair.quantized.format}; its norm is {ratio:.4g} times the "
        f"original's at a cosine of {cosine:.4f}: {_diagnosis(ratio, cosine)}",
        "compare the scale and the rows of this layer with what the quantizer wrote" if broken else None,
        snr_db=snr,
        norm_ratio=ratio,
        cosine_similarity=cosine,
    )


def _diagnosis(ratio: float, cosine: float) -> str:
    if not ratio:
        return "all its values are zero"
    if cosine > SAME_DIRECTION:
        return f"the scale is off by about that factor ({ratio:.4g})"
    if cosine < -SAME_DIRECTION:
        return "the sign is inverted"
    if abs(cosine) < UNRELATED and SAME_LENGTH[0] < ratio < SAME_LENGTH[1]:
        return "rows or columns in another order, rotated, or another tensor"
    if abs(cosine) < UNRELATED:
        return "another tensor, or read wrong"
    return "outliers that one scale cannot hold, or a broken layer"


def _of_scales(pair: Pair, done: Finished) -> Iterator[Finding]:
    scales = done.scales
    if scales is None:
        return
    name = display(pair.quantized.scale.name) if pair.quantized.scale else ""
    for code, n, severity, what in (
        ("scale_nonfinite", scales.nonfinite, "error", "NaN or infinite"),
        ("scale_negative", scales.negative, "warning", "negative"),
        ("scale_zero", scales.zero, "warning", "zero"),
    ):
        if n:
            message = f"{display(pair.name)}: {n:,} of {scales.number:,} scales in {name} are {what}"
            remedy = None if severity == "warning" else "quantize this layer again"
            yield finding(code, severity, pair.name, message, remedy, scales=n)
