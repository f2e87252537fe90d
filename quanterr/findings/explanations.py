"""The table of findings that explain other findings.

Collectors report everything that they see; findings that others explain are dropped here. A cause is a finding of a
minimum severity, or a fact about a weight that is not a finding. It explains findings about the same weights: a finding
about several weights is dropped only if the cause holds for all of them. Rows apply from top to bottom, and a dropped
finding explains nothing, so no row may explain a finding that an earlier row uses as a cause.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from quanterr.documents.base import SEVERITIES, Finding

# Facts about single weights.
UNDERFLOWS = "underflows"  # values below the smallest scale of the format
NEAR = "near"  # nearly all codes are the nearest, and other scales would hardly be better
USUAL = "usual"  # scales are good, and codes are as far from the nearest as the method leaves them
ONE_WAY = "one way"  # values truncated, or always rounded up or down
SIGNED = "signed"  # codes that fit the signs of their scales
CORRECTED_SCALES = "corrected scales"  # a fault of its scales was found, and explains the weight's error
FACTS = (UNDERFLOWS, NEAR, USUAL, ONE_WAY, SIGNED, CORRECTED_SCALES)
Facts = Mapping[str, Collection[str]]  # fact → names of weights

REPAIRS = ("scale_factor", "transposed", "permuted", "zero_points", "swapped_weight")
PARTS = ("excess_rows", "excess_columns", "excess_blocks")
EXCESS = ("excess_error", *PARTS, "clipped")
SAMPLED = (*EXCESS, "scale_loss")
LOW = ("implausible_error", "below_usual")
LEVELS = (*LOW, "group_outlier")  # findings about a low SNR


class Explanation(NamedTuple):
    """A row of EXPLANATIONS: the findings that any of the causes explains."""

    causes: tuple[str, ...]  # facts, or codes of findings
    min_severity: str  # minimum severity of a finding that is a cause
    explained: tuple[str, ...]  # codes of findings
    max_severity: str  # maximum severity of a finding that is explained
    reason: str


EXPLANATIONS = (
    Explanation(
        ("wrong_convention",),
        "error",
        (*REPAIRS, *LEVELS, *SAMPLED, "saturated", "biased_error", "bad_rows", "norm_offset", "unquantized_changed"),
        "error",
        "the weight is compared as it will be loaded, and decoded in another way it fits much better",
    ),
    Explanation(
        ("codes_without_scale",),
        "error",
        (*LEVELS, *REPAIRS, "bad_rows", "unquantized_changed"),
        "error",
        "the values are codes, so their errors mean nothing",
    ),
    Explanation(
        (CORRECTED_SCALES,),
        "info",
        (*LEVELS, *SAMPLED, "saturated", "biased_error", "bad_rows"),
        "error",
        "that finding says how the scales are wrong, and which error remains after their correction",
    ),
    Explanation(
        (UNDERFLOWS,),
        "info",
        (*LEVELS, *SAMPLED, "scale_negative", "scale_zero", "saturated", "biased_error", "bad_rows", "dead_rows"),
        "error",
        "values below the smallest scale become zeros, or coarse, in all rows, so the nearest codes mean nothing",
    ),
    Explanation(
        (NEAR,),
        "info",
        (*LOW, "saturated", "biased_error", "bad_rows", *REPAIRS),
        "error",
        "neither other codes nor other scales would be much better, however low the SNR is",
    ),
    Explanation(
        (USUAL,),
        "info",
        (*LOW, "bad_rows"),
        "error",
        "the weight is as good as its scales allow, except for the cost of its method, which is reported as excess",
    ),
    Explanation(
        (SIGNED,),
        "info",
        ("scale_negative",),
        "error",
        "codes fit the signs of the scales: AutoRound and ggml's Q4_0 write negative scales",
    ),
    Explanation(
        (ONE_WAY,),
        "info",
        ("scale_factor", "biased_error"),
        "warning",
        "truncated values are smaller, or larger, throughout: that is reported as excess",
    ),
    Explanation(
        (ONE_WAY,),
        "info",
        ("zero_points",),
        "error",
        "rounding always up or down shifts values by half a step; wrong zero points shift them by whole steps",
    ),
    Explanation(
        REPAIRS,
        "error",
        (*SAMPLED, *LEVELS),
        "error",
        "the repair explains the error, as the repaired weight is correct",
    ),
    Explanation(
        ("nonfinite_original", "nonfinite_quantized", "scale_nonfinite", "implausible_error"),
        "error",
        EXCESS,
        "error",
        "the weight is broken as a whole, so a sample adds nothing",
    ),
    Explanation(
        ("implausible_error",),
        "error",
        ("scale_loss",),
        "warning",
        "the values have little in common, so that good scales mean nothing",
    ),
    Explanation(
        ("scale_loss",),
        "warning",
        (*LEVELS, "clipped", "saturated", "bad_rows"),
        "warning",
        "its scales are too large or too small, which lowers the SNR and clips values",
    ),
    Explanation(
        ("outlier_column",),
        "info",
        ("group_outlier",),
        "info",
        "the finding names the columns that lower the SNR",
    ),
    Explanation(
        ("shared_scale",),
        "info",
        (*LEVELS, "bad_rows"),
        "warning",
        "the fused weight needs the wide scale, which lowers the SNR of this part",
    ),
    Explanation(
        ("excess_error",),
        "error",
        (*LEVELS, *PARTS, "clipped", "bad_rows"),
        "warning",
        "its codes are wrong, which lowers the SNR of the weight or of some rows",
    ),
    Explanation(
        ("excess_rows",),
        "info",
        ("bad_rows",),
        "error",
        "both findings are about the same rows; excess_rows also states what their scales allow",
    ),
    Explanation(
        (*REPAIRS, *LEVELS, "zero_original"),
        "warning",
        ("unquantized_changed",),
        "warning",
        "these findings already say how each tensor differs",
    ),
)


def drop_explained(findings: Sequence[Finding], facts: Facts) -> list[Finding]:
    """Return the findings that nothing explains, in their order.

    Args:
        findings: all findings.
        facts: fact → names of the weights that have it.
    """
    kept = list(findings)
    for row in EXPLANATIONS:
        weights = _list_weights_of_causes(row, kept, facts)
        kept = [finding for finding in kept if not _is_explained(finding, row, weights)]
    return kept


def list_weights(finding: Finding) -> set[str]:
    """Return the names of the weights that a finding is about."""
    return {name for name in (finding.layer, *finding.evidence.get("layers", ())) if name}


def _list_weights_of_causes(row: Explanation, findings: Iterable[Finding], facts: Facts) -> set[str]:
    """Return the names of the weights for which a cause of the row holds."""
    weights = {name for cause in row.causes for name in facts.get(cause, ())}
    for finding in findings:
        if finding.code in row.causes and finding.rank <= SEVERITIES.index(row.min_severity):
            weights |= list_weights(finding)
    return weights


def _is_explained(finding: Finding, row: Explanation, weights: set[str]) -> bool:
    """Return True if a row explains a finding: its causes hold for all ``weights`` that the finding is about."""
    if finding.code not in row.explained or finding.rank < SEVERITIES.index(row.max_severity):
        return False
    about = list_weights(finding)
    return bool(about) and about <= weights
