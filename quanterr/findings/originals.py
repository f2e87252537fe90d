"""Originals that are themselves quantized: what scales allow then depends on the grid of the original's values.

Nearest codes of values that lie on a grid as coarse as that of the codes have little error or none, so that codes that
were made from the real original, as they should be, look far off. What is left to say is how much the values differ.
"""

from collections.abc import Iterable, Sequence

from quanterr.documents.base import Finding
from quanterr.findings.codes import make_finding
from quanterr.findings.explanations import SAMPLED, weights_of
from quanterr.findings.figures import bits_of, bits_of_weight
from quanterr.findings.headers import format_range
from quanterr.findings.layers import WeightSummary
from quanterr.util.text import count, listed

JUDGED = (*SAMPLED, "saturated", "another_source")  # findings from the nearest codes, or from scales


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


def _is_coarse(one: WeightSummary) -> bool:
    """Return True if the original has codes of as few bits as the quantized weight, or fewer."""
    pair = one.pair
    return pair.original.has_codes and pair.quantized.has_codes and bits_of_weight(pair.original) <= bits_of(pair)
