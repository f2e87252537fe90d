"""Merging of findings that many weights share."""

from collections.abc import Sequence
from math import inf

from quanterr.documents.base import Finding
from quanterr.findings.codes import make_finding
from quanterr.findings.explanations import EXCESS
from quanterr.findings.limits import MIN_PEERS, MINOR_SHARE
from quanterr.util.text import count


def merge_excess(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings with the same EXCESS code and severity if more than MIN_PEERS weights have them; keep errors."""
    kept = list(findings)
    for code in EXCESS:
        for severity in ("warning", "info"):
            alike = [finding for finding in kept if (finding.code, finding.severity) == (code, severity)]
            if len(alike) > MIN_PEERS:
                kept = [finding for finding in kept if finding not in alike]
                kept.append(_merge(alike))
    return kept


def _rank_badness(finding: Finding) -> float:
    """Return a number that is larger for a worse finding of the same code; null evidence counts as infinite."""
    if "clipped_pct" in finding.evidence:
        return float(finding.evidence["clipped_pct"])
    if finding.code == "excess_error":
        excess = finding.evidence["excess_db"]
        return inf if excess is None else float(excess)
    snr = finding.evidence["worst_snr_db"]
    return inf if snr is None else -float(snr)


def _merge(alike: Sequence[Finding]) -> Finding:
    """Return one finding for several, with the message of the worst."""
    worst = max(alike, key=_rank_badness)
    return make_finding(
        worst.code,
        worst.severity,
        None,
        f"{count(len(alike), 'weight')}; the worst: {worst.message}",
        worst.remedy,
        layers=[finding.layer for finding in alike],
        worst=worst.layer,
    )


def merge_bad_rows(findings: Sequence[Finding], weights: int) -> list[Finding]:
    """Replace the warnings about bad rows by one info if many of the ``weights`` have such rows.

    If few weights have bad rows, these weights are broken. Bad rows in many weights come from outliers and too few
    scales.
    """
    bad = [finding for finding in findings if finding.code == "bad_rows"]
    if len(bad) <= max(MIN_PEERS, weights * MINOR_SHARE):
        return list(findings)
    worst = min(bad, key=lambda finding: finding.evidence["worst_row_snr_db"])
    message = (
        f"{len(bad)} of {count(weights, 'weight')} have rows with far more error than the others; the worst: "
        f"{worst.message}"
    )
    remedy = "outliers cause this where many weights share a scale: use finer scales or another method"
    names = [finding.layer for finding in bad]
    together = make_finding("bad_rows", "info", None, message, remedy, layers=names, worst=worst.layer)
    return [*(finding for finding in findings if finding.code != "bad_rows"), together]
