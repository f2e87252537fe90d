"""What many weights show is said once."""

from collections.abc import Sequence
from math import inf

from quanterr.findings.codes import finding
from quanterr.findings.explanations import EXCESS
from quanterr.report.base import Finding
from quanterr.util.text import count

FEW = 3  # weights that are named one by one
FEW_BAD, SHARE_BAD = 2, 0.1  # weights with bad rows, and their share of all: more are no accident


def merge_excess(found: Sequence[Finding]) -> list[Finding]:
    """Findings; of those of one code of EXCESS, and not errors, one for more than a few weights."""
    kept = list(found)
    for code in EXCESS:
        for severity in ("warning", "info"):
            alike = [one for one in kept if (one.code, one.severity) == (code, severity)]
            if len(alike) > FEW:
                kept = [one for one in kept if one not in alike]
                kept.append(_merged(alike))
    return kept


def _badness(one: Finding) -> float:
    """Larger for a worse one of a code; what is null there is infinite."""
    if "clipped_pct" in one.evidence:
        return float(one.evidence["clipped_pct"])
    if one.code == "excess_error":
        excess = one.evidence["excess_db"]
        return inf if excess is None else float(excess)
    snr = one.evidence["worst_snr_db"]
    return inf if snr is None else -float(snr)


def _merged(alike: Sequence[Finding]) -> Finding:
    """With the message of the worst."""
    worst = max(alike, key=_badness)
    return finding(
        worst.code,
        worst.severity,
        None,
        f"{count(len(alike), 'weight')}, the worst is {worst.message}",
        worst.remedy,
        layers=[one.layer for one in alike],
        worst=worst.layer,
    )


def merge_bad_rows(found: Sequence[Finding], weights: int) -> list[Finding]:
    """Findings; where many of the ``weights`` have bad rows, an info in place of their warnings.

    One weight with a bad row is broken. Many are what outliers do to rows with few scales.
    """
    bad = [one for one in found if one.code == "bad_rows"]
    if len(bad) <= max(FEW_BAD, weights * SHARE_BAD):
        return list(found)
    worst = min(bad, key=lambda one: one.evidence["worst_row_snr_db"])
    message = (
        f"{len(bad)} of {count(weights, 'weight')} have rows with far more error than the rest; the worst: "
        f"{worst.message}"
    )
    remedy = "outliers cause this where many weights share a scale: use finer scales or another method"
    names = [one.layer for one in bad]
    together = finding("bad_rows", "info", None, message, remedy, layers=names, worst=worst.layer)
    return [*(one for one in found if one.code != "bad_rows"), together]
