"""Scales that weights share because a runtime fuses these weights: q, k and v, gate and up, experts.

A runtime multiplies a fused weight by one scale, so quantizers give its parts one scale, for the largest of all values.
It is then too wide for the other parts, which is not a fault: a scale is right if it suits one of the parts.
"""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from quanterr.documents.base import Finding
from quanterr.findings.layers import WeightSummary
from quanterr.util.text import display


def excuse_shared_scales(found: Sequence[Finding], seen: Iterable[WeightSummary]) -> list[Finding]:
    """Return the findings, with the info shared_scale where a scale is as wide as a fused weight needs it."""
    wide = {one.layer for one in found if _is_wide(one)}
    if not wide:
        return list(found)
    sharing: dict[tuple[str, float], list[str]] = {}
    for one in seen:
        if one.scales and one.scales.number and one.scales.low == one.scales.high:
            sharing.setdefault((_parent_of(one.pair.name), one.scales.low), []).append(one.pair.name)
    fitting = {  # name of a weight whose scale is too wide → one of its group that needs the scale
        name: next(other for other in names if other not in wide)
        for names in sharing.values()
        if len(names) > 1 and not wide.issuperset(names)
        for name in names
        if name in wide
    }
    return [_excuse(one, fitting[one.layer]) if _is_wide(one) and one.layer in fitting else one for one in found]


def _is_wide(one: Finding) -> bool:
    """Return True for the finding that the scale of a whole weight is too wide."""
    return one.code == "scale_loss" and one.evidence.get("scale_ratio", 0.0) > 1 and "places" not in one.evidence


def _excuse(one: Finding, other: str) -> Finding:
    message = f"{one.message}; a runtime fuses it with {display(other)}, which needs this scale"
    return replace(one, code="shared_scale", severity="info", message=message, remedy=None)


def _parent_of(name: str) -> str:
    """Return the module that holds the module of a weight."""
    return name.removesuffix(".weight").rpartition(".")[0]
