"""Scales that weights share because a runtime fuses these weights: q, k and v, gate and up, experts.

A runtime multiplies a fused weight by one scale, so quantizers give its parts one scale, for the largest of all values.
It is then too wide for the other parts, which is not a fault: a scale is right if it suits one of the parts.
"""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from quanterr.documents.base import Finding
from quanterr.findings.layers import WeightSummary
from quanterr.util.text import display


def excuse_shared_scales(findings: Sequence[Finding], seen: Iterable[WeightSummary]) -> list[Finding]:
    """Return the findings; where another part of a fused weight needs the wide scale, the info shared_scale instead."""
    wide = {finding.layer for finding in findings if _is_wide(finding)}
    if not wide:
        return list(findings)
    sharing: dict[tuple[str, float], list[str]] = {}
    for weight in seen:
        if weight.scales and weight.scales.number and weight.scales.low == weight.scales.high:
            sharing.setdefault((_parent_of(weight.pair.name), weight.scales.low), []).append(weight.pair.name)
    fitting = {  # name of a weight whose scale is too wide → a weight of its group that needs this scale
        name: next(other for other in names if other not in wide)
        for names in sharing.values()
        if len(names) > 1 and not wide.issuperset(names)
        for name in names
        if name in wide
    }
    return [
        _excuse(finding, fitting[finding.layer]) if _is_wide(finding) and finding.layer in fitting else finding
        for finding in findings
    ]


def _is_wide(finding: Finding) -> bool:
    """Return True for the finding that the scale of a whole weight is too wide."""
    return (
        finding.code == "scale_loss"
        and finding.evidence.get("scale_ratio", 0.0) > 1
        and "places" not in finding.evidence
    )


def _excuse(finding: Finding, other: str) -> Finding:
    message = f"{finding.message}; a runtime fuses it with {display(other)}, which needs this scale"
    return replace(finding, code="shared_scale", severity="info", message=message, remedy=None)


def _parent_of(name: str) -> str:
    """Return the module that holds the module of a weight."""
    return name.removesuffix(".weight").rpartition(".")[0]
