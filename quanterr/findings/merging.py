"""Merging of findings that many weights share."""

from collections.abc import Sequence
from math import inf

from quanterr.documents.base import Finding
from quanterr.findings.codes import make_finding
from quanterr.findings.explanations import EXCESS
from quanterr.findings.limits import FEW, PEERS
from quanterr.util.text import count


def merge_excess(found: Sequence[Finding]) -> list[Finding]:
    """Merge findings with the same EXCESS code and severity if more than a few weights have them; keep errors."""
    kept = list(found)
    for code in EXCESS:
        for severity in ("warning", "info"):
            alike = [one for one in kept if (one.code, one.severity) == (code, severity)]
            if len(alike) > PEERS:
                kept = [one for one in kept if one not in alike]
                kept.append(_merge(alike))
    return kept


def _rank_badness(one: Finding) -> float:
    """Return a number that is larger for a worse finding of the same code; null evidence counts as infinite."""
    if "clipped_pct" in one.evidence:
        return float(one.evidence["clipped_pct"])
    if one.code == "excess_error":
        excess = one.evidence["excess_db"]
        return inf if excess is None else float(excess)
    snr = one.evidence["worst_snr_db"]
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
        layers=[one.layer for one in alike],
        worst=worst.layer,
    )


def merge_bad_rows(found: Sequence[Finding], weights: int) -> list[Finding]:
    """Replace the warnings about bad rows by one info if many of the ``weights`` have such rows.

    A single weight with a bad row is broken. Bad rows in many weights come from outliers and too few scales.
    """
    bad = [one for one in found if one.code == "bad_rows"]
    if len(bad) <= max(PEERS, weights * FEW):
        return list(found)
    worst = min(bad, key=lambda one: one.evidence["worst_row_snr_db"])
    message = (
        f"{len(bad)} of {count(weights, 'weight')} have rows with far more error than the others; the worst: "
        f"{worst.message}"
    )
    remedy = "outliers cause this where many weights share a scale: use finer scales or another method"
    names = [one.layer for one in bad]
    together = make_finding("bad_rows", "info", None, message, remedy, layers=names, worst=worst.layer)
    return [*(one for one in found if one.code != "bad_rows"), together]
