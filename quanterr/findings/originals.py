"""Originals that were not the input of the quantizer, as they are quantized themselves or are another model.

If the original is quantized, its values lie on a grid. If that grid is as coarse as the codes, the nearest codes have
little or no error, so that codes that were correctly made from the real original look wrong. Then only the difference
of the values is reported.

If tensors that no quantizer changes differ as well, the original is another checkpoint, and findings about single
weights mean nothing.
"""

from collections.abc import Iterable, Sequence

from quanterr.documents.base import Finding
from quanterr.findings.codes import make_finding
from quanterr.findings.conventions import format_range
from quanterr.findings.error_figures import find_bits, find_bits_of_weight
from quanterr.findings.explanations import LEVELS, REPAIRS, SAMPLED, list_weights
from quanterr.findings.layers import WeightSummary
from quanterr.findings.limits import MIN_PEERS, UNRELATED_COSINE
from quanterr.util.text import count, itemize

UNRELATED_SHARE = 0.9  # share of the quantized weights that are unrelated to the original if it is another model
GRID_CODES = (*SAMPLED, "saturated", "another_source")  # findings that compare with the nearest codes, or with scales
VALUE_CODES = (*GRID_CODES, *LEVELS, *REPAIRS, "biased_error", "bad_rows", "dead_rows", "norm_offset", "bias_corrected")


def restate_for_quantized_originals(findings: Sequence[Finding], seen: Iterable[WeightSummary]) -> list[Finding]:
    """Replace the apparent losses of codes and scales by one finding if the original is as coarse as the codes."""
    coarse = {weight.pair.name: weight for weight in seen if weight.figures and _is_coarse(weight)}
    vain = [
        finding
        for finding in findings
        if finding.code in GRID_CODES and list_weights(finding) and list_weights(finding) <= coarse.keys()
    ]
    names = set[str]().union(*map(list_weights, vain))
    if not vain or 2 * len(names) < len(coarse):  # most were quantized from this original: the losses are damage
        return list(findings)
    weights = [weight for name, weight in coarse.items() if name in names]
    layers, formats = (
        [weight.pair.name for weight in weights],
        itemize(sorted({weight.pair.original.format for weight in weights})),
    )
    levels = [weight.figures.snr_db for weight in weights if weight.figures]
    message = (
        "the original is itself quantized, and no finer than the quantized checkpoint: "
        f"{count(len(weights), 'weight')} in {formats}: {itemize(layers, 3)}; both differ by {format_range(levels)}: "
        "other values were quantized, or codes are damaged; what scales would allow, and codes lose, means nothing here"
    )
    remedy = "compare with the checkpoint from before any quantization"
    severity = min(vain, key=lambda finding: finding.rank).severity
    restated = make_finding("quantized_original", severity, None, message, remedy, layers=layers, snr_db=min(levels))
    return [restated, *(finding for finding in findings if finding not in vain)]


def restate_for_another_original(findings: Sequence[Finding], seen: Sequence[WeightSummary]) -> list[Finding]:
    """Replace the findings about single weights by one if the unquantized tensors show another original."""
    changed = next((finding for finding in findings if finding.code == "unquantized_changed"), None)
    repaired = set[str]().union(
        *(list_weights(finding) for finding in findings if finding.code in REPAIRS and finding.severity == "error")
    )
    coded = [
        weight
        for weight in seen
        if weight.figures and weight.pair.quantized.has_codes and weight.pair.name not in repaired
    ]
    unlike = [weight for weight in coded if weight.figures and abs(weight.figures.cosine) < UNRELATED_COSINE]
    nothing_alike = len(unlike) > max(MIN_PEERS, UNRELATED_SHARE * len(coded))
    if changed is None or not (changed.severity == "error" or nothing_alike):
        return list(findings)
    wrong = set[str]().union(*(list_weights(finding) for finding in findings if finding.code in VALUE_CODES))
    off = [weight for weight in coded if weight.pair.name in wrong]
    if not off:
        return list(findings)
    names = {weight.pair.name for weight in off} | list_weights(changed)
    message = (
        f"another original? {changed.message}; {len(off):,} of {count(len(coded), 'quantized weight')} differ by more "
        f"than rounding explains, too: {format_range([weight.figures.snr_db for weight in off if weight.figures])}"
    )
    remedy = "compare with the checkpoint that was quantized: the same model, training step and merge"
    evidence = {**changed.evidence, "layers": sorted(names)}
    restated = make_finding(changed.code, "error", None, message, remedy, **evidence)
    vain = [
        finding
        for finding in findings
        if finding.code in VALUE_CODES and list_weights(finding) and list_weights(finding) <= names - repaired
    ]
    return [restated, *(finding for finding in findings if finding is not changed and finding not in vain)]


def _is_coarse(weight: WeightSummary) -> bool:
    """Return True if the original has codes of as few bits as the quantized weight, or fewer."""
    pair = weight.pair
    return (
        pair.original.has_codes and pair.quantized.has_codes and find_bits_of_weight(pair.original) <= find_bits(pair)
    )
