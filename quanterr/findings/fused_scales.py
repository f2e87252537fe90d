"""Weights that runtimes fuse into one although their global scales, or the static scales of their inputs, differ.

A runtime uses one scale for the fused weight: the largest number that is stored (vllm-project/vllm
model_executor/layers/quantization). So each part is right as stored, but the runtime scales it wrongly, by a factor of
up to 10 (vllm-project/vllm issues 47515 and 54974). Fused weights have the same inputs, so different ranges of inputs
mean that calibration has seen different inputs, or that the ranges were changed afterwards.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import log10

from quanterr.checkpoints import Entry
from quanterr.documents.base import Finding
from quanterr.findings.checks import LAST, RESULT, check
from quanterr.findings.codes import make_finding
from quanterr.findings.error_figures import EXACT_DB, Figures
from quanterr.findings.layers import AllWeights, WeightSummary
from quanterr.findings.limits import BIT_DB, FLOAT32_TOLERANCE
from quanterr.formats.reading import Reader
from quanterr.util.text import count, display, itemize

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
DIVISOR = "weight_global_scale"  # compressed-tensors divides by it; ModelOpt's weight_scale_2 multiplies


@check("sibling_scales", needs=RESULT, of=LAST)
def check_sibling_scales(weights: AllWeights) -> Iterator[Finding]:
    """Report the SNR of fused weights if all use the largest of their global scales."""
    groups = [
        (ratio, worst)
        for group in _group_siblings(weights.seen)
        if (spread := _measure_spread(group, weights.reader))
        for ratio, worst in [spread]
    ]
    if not groups:
        return
    largest, (name, stored, fused) = max(groups, key=lambda group: group[1][1] - group[1][2])
    names = [loss[0] for _, loss in groups]
    message = (
        f"runtimes fuse {count(len(groups), 'group')} of weights whose global scales differ: {itemize(names, 3)}; the "
        f"worst by a factor of {largest:.3g}: {display(name)} has {stored:.1f} dB as stored and {fused:.1f} dB as fused"
    )
    remedy = "quantize fused weights (q, k and v; gate and up; w1 and w3) with one shared global scale"
    # A loss above BIT_DB is a fault, as the different ranges of random weights cost up to 5 dB. Programs that write for
    # such runtimes (ModelOpt, llm-compressor) give fused weights one scale.
    severity = "warning" if stored - fused > BIT_DB else "info"
    yield make_finding(
        "sibling_scales", severity, None, message, remedy, ratio=largest, as_fused_db=fused, layers=names
    )


def _group_siblings(seen: Sequence[WeightSummary]) -> Iterator[list[WeightSummary]]:
    """Group the weights of one parent module that runtimes fuse."""
    scaled = {
        weight.pair.name: weight
        for weight in seen
        if _find_global_scale(weight) is not None and weight.figures is not None
    }
    return ([scaled[name] for name in names] for names in group_names(scaled))


def group_names(names: Iterable[str]) -> Iterator[list[str]]:
    """Group the names of the weights of one parent module that runtimes fuse."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name in names:
        parent, _, last = name.removesuffix(".weight").rpartition(".")
        fusion = next((n for n, fused in enumerate(FUSED) if last in fused), None)
        if fusion is not None:
            groups.setdefault((parent, fusion), []).append(name)
    return (group for group in groups.values() if len(group) > 1)


def _find_global_scale(weight: WeightSummary) -> Entry | None:
    """Return the global scale of a weight, or None."""
    entry = weight.pair.quantized.parts.get("global_scale")
    return entry if entry is not None and entry.n == 1 else None


def _measure_spread(group: Sequence[WeightSummary], reader: Reader) -> tuple[float, tuple[str, float, float]] | None:
    """Return the ratio of the largest to the smallest scale of a group, and the weight that loses most.

    The weight is given as name, dB as stored and dB as fused. None if the scales are equal.
    """
    scales = [reader.read_number(entry) for weight in group if (entry := _find_global_scale(weight))]
    if min(scales) <= 0 or max(scales) / min(scales) <= 1 + FLOAT32_TOLERANCE:
        return None
    largest, rows = max(scales), []
    for weight, scale in zip(group, scales, strict=True):
        entry, figures = _find_global_scale(weight), weight.figures
        if entry is None or figures is None:
            continue
        ratio = scale / largest if entry.name.endswith(DIVISOR) else largest / scale
        rows.append((weight.pair.name, figures.snr_db, _compute_scaled_db(figures, ratio)))
    return largest / min(scales), max(rows, key=lambda row: row[1] - row[2])


def _compute_scaled_db(figures: Figures, ratio: float) -> float:
    """Return the SNR in dB of a weight y that is multiplied by ρ, the ``ratio``.

    Σ(ρy - x)² / Σx² = cos² · ((ρf)² - 2ρf) + 1, where f = Σy² / Σxy.
    """
    scaled = ratio * figures.factor
    noise = figures.cosine**2 * (scaled**2 - 2 * scaled) + 1
    return min(-10 * log10(noise), EXACT_DB) if noise > 0 else EXACT_DB
