"""What is wrong or suspicious, told from headers, scales and sums: a sentence and what to do."""

from collections.abc import Iterator
from math import sqrt

from quanterr.metrics import Measured, cosine_similarity, snr_db
from quanterr.metrics.sums import Sums
from quanterr.pairing import Pair, Plan
from quanterr.report.model import Finding
from quanterr.text import count, display, listed
from quanterr.worker import Finished

# Right readings are above the first, wrong ones below the second (rel. error 0.35 and 0.7).
DOUBTFUL_DB = 9.0
BROKEN_DB = 3.0
# With fewer bits an element right readings may be as low as 2 dB; to store zeros would give 0 dB.
LOW_BITS = 3
LOW_BITS_DB = 0.0
ONLY_LENGTH = 0.99  # of a cosine: what is wrong is the scale and nothing else
SAME_DIRECTION = 0.9  # of a cosine: only the length differs
UNRELATED = 0.3


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
    """A weight that lies further off than any right one: read wrong, or broken."""
    measured = Measured(sums)
    snr = snr_db(measured)
    low = 8 * pair.quantized.nbytes < LOW_BITS * sums.elements
    doubtful, hopeless = (LOW_BITS_DB, LOW_BITS_DB) if low else (DOUBTFUL_DB, BROKEN_DB)
    if not sums.x_sq or not snr < doubtful or len(pair.original.shape) < 2:
        return
    ratio = sqrt(sums.y_sq / sums.x_sq)
    cosine = cosine_similarity(measured) if ratio else 0.0
    broken = snr < hopeless or abs(cosine) > ONLY_LENGTH
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
    if abs(cosine) < UNRELATED:
        return "rows in another order, or another tensor"
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
