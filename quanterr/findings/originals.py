"""Originals that are not what was quantized: quantized themselves, or another model.

If the original is quantized, what scales allow depends on the grid of its values. Nearest codes of values that lie on
a grid as coarse as that of the codes have little error or none, so that codes that were made from the real original,
as they should be, look far off. What is left to say is how much the values differ.

If tensors that no quantizer changes differ as well, the original is another checkpoint. What is wrong with each weight
then means nothing.
"""

from collections.abc import Iterable, Sequence

from quanterr.documents.base import Finding
from quanterr.findings.codes import make_finding
from quanterr.findings.conventions import format_range
from quanterr.findings.error_figures import bits_of, bits_of_weight
from quanterr.findings.explanations import LEVELS, REPAIRS, SAMPLED, weights_of
from quanterr.findings.layers import WeightSummary
from quanterr.findings.limits import ALIGNED, PEERS, UNRELATED
from quanterr.util.text import count, listed

JUDGED = (*SAMPLED, "saturated", "another_source")  # findings from the nearest codes, or from scales
OF_VALUES = (*JUDGED, *LEVELS, *REPAIRS, "biased_error", "bad_rows", "dead_rows", "norm_offset", "bias_corrected")


def restate_for_quantized_originals(found: Sequence[Finding], seen: Iterable[WeightSummary]) -> list[Finding]:
    """Replace apparent losses by codes and scales by one finding if the original is as coarse as the codes."""
    coarse = {one.pair.name: one for one in seen if one.figures and _is_coarse(one)}
    vain = [one for one in found if one.code in JUDGED and weights_of(one) and weights_of(one) <= coarse.keys()]
    names = set[str]().union(*map(weights_of, vain))
    if not vain or 2 * len(names) < len(coarse):  # most were made from the original, so these are damaged
        return list(found)
    weights = [one for name, one in coarse.items() if name in names]
    layers, formats = [one.pair.name for one in weights], listed(sorted({one.pair.original.format for one in weights}))
    levels = [one.figures.snr_db for one in weights if one.figures]
    message = (
        "the original is itself quantized, and no finer than the quantized checkpoint: "
        f"{count(len(weights), 'weight')} in {formats}: {listed(layers, 3)}; both differ by {format_range(levels)}: "
        "other values were quantized, or codes are damaged; what scales would allow, and codes lose, means nothing here"
    )
    remedy = "compare with the checkpoint from before any quantization"
    severity = min(vain, key=lambda one: one.rank).severity
    restated = make_finding("quantized_original", severity, None, message, remedy, layers=layers, snr_db=min(levels))
    return [restated, *(one for one in found if one not in vain)]


def restate_for_another_original(found: Sequence[Finding], seen: Sequence[WeightSummary]) -> list[Finding]:
    """Replace what is wrong with each weight by one finding if the unquantized tensors show another original."""
    changed = next((one for one in found if one.code == "unquantized_changed"), None)
    repaired = set[str]().union(*(weights_of(one) for one in found if one.code in REPAIRS and one.severity == "error"))
    coded = [one for one in seen if one.figures and one.pair.quantized.has_codes and one.pair.name not in repaired]
    unlike = [one for one in coded if one.figures and abs(one.figures.cosine) < UNRELATED]
    nothing_alike = len(unlike) > max(PEERS, ALIGNED * len(coded))
    if changed is None or not (changed.severity == "error" or nothing_alike):
        return list(found)
    wrong = set[str]().union(*(weights_of(one) for one in found if one.code in OF_VALUES))
    off = [one for one in coded if one.pair.name in wrong]
    if not off:
        return list(found)
    names = {one.pair.name for one in off} | weights_of(changed)
    message = (
        f"another original? {changed.message}; {len(off):,} of {count(len(coded), 'quantized weight')} differ by more "
        f"than rounding explains, too: {format_range([one.figures.snr_db for one in off if one.figures])}"
    )
    remedy = "compare with the checkpoint that was quantized: the same model, training step and merge"
    evidence = {**changed.evidence, "layers": sorted(names)}
    restated = make_finding(changed.code, "error", None, message, remedy, **evidence)
    vain = [one for one in found if one.code in OF_VALUES and weights_of(one) and weights_of(one) <= names - repaired]
    return [restated, *(one for one in found if one is not changed and one not in vain)]


def _is_coarse(one: WeightSummary) -> bool:
    """Return True if the original has codes of as few bits as the quantized weight, or fewer."""
    pair = one.pair
    return pair.original.has_codes and pair.quantized.has_codes and bits_of_weight(pair.original) <= bits_of(pair)
