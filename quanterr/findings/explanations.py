"""The table of findings that explain other findings.

Collectors report everything that they see; findings that others explain are dropped here. A cause is a finding of some
minimum severity, or a fact about a weight that is not a finding. It explains findings about the same weights: a finding
about several weights is dropped only if the cause covers all. Rows apply from top to bottom, and a dropped finding no
longer explains others, so no row may explain a finding that an earlier row uses as a cause.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from quanterr.documents.base import SEVERITIES, Finding

# Facts about single weights.
UNDERFLOWS = "underflows"  # values below the smallest scale of the format
NEAR = "near"  # about the nearest codes that the scales allow, and scales that are about as good as good ones
USUAL = "usual"  # codes as far from the nearest as the method leaves them, and good scales
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
    least: str  # minimum severity of a finding that is a cause
    explained: tuple[str, ...]  # codes of findings
    most: str  # maximum severity of a finding that is explained
    reason: str


EXPLANATIONS = (
    Explanation(
        ("wrong_convention",),
        "error",
        (*REPAIRS, *LEVELS, *SAMPLED, "saturated", "biased_error", "bad_rows", "norm_offset", "unquantized_changed"),
        "error",
        "it is compared as it will be loaded, and another reading fits much better",
    ),
    Explanation(
        ("codes_without_scale",),
        "error",
        (*LEVELS, *REPAIRS, "bad_rows", "unquantized_changed"),
        "error",
        "the values are codes, so that what their errors look like means nothing",
    ),
    Explanation(
        (CORRECTED_SCALES,),
        "info",
        (*LEVELS, *SAMPLED, "saturated", "biased_error", "bad_rows"),
        "error",
        "one finding says how the scales are wrong, and what is left once they are corrected",
    ),
    Explanation(
        (UNDERFLOWS,),
        "info",
        (*LEVELS, *SAMPLED, "scale_negative", "scale_zero", "saturated", "biased_error", "bad_rows", "dead_rows"),
        "error",
        "values below the smallest scale become zeros or coarse in all rows, and no code is the nearest",
    ),
    Explanation(
        (NEAR,),
        "info",
        (*LOW, "saturated", "biased_error", "bad_rows", *REPAIRS),
        "error",
        "other codes would be no better with these scales, and other scales not much, however low the SNR is",
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
        "rounding always up or down shifts values by half a step: wrong zero points are off by whole steps",
    ),
    Explanation(
        REPAIRS,
        "error",
        (*SAMPLED, *LEVELS),
        "error",
        "the repaired weight is as it should be",
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
        "it names the columns that lower the SNR",
    ),
    Explanation(
        ("shared_scale",),
        "info",
        (*LEVELS, "bad_rows"),
        "warning",
        "its scale is as wide as the weight needs that it is fused into, which lowers the SNR",
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
        "both findings are about the same rows; this one states what their scales allow",
    ),
    Explanation(
        (*REPAIRS, *LEVELS, "zero_original"),
        "warning",
        ("unquantized_changed",),
        "warning",
        "these findings already say how each tensor differs",
    ),
)


def drop_explained(found: Sequence[Finding], facts: Facts) -> list[Finding]:
    """Return the findings that nothing explains, in their order.

    Args:
        found: all findings.
        facts: fact → names of the weights that have it.
    """
    kept = list(found)
    for row in EXPLANATIONS:
        weights = _weights_of_causes(row, kept, facts)
        kept = [one for one in kept if not _is_explained(one, row, weights)]
    return kept


def weights_of(one: Finding) -> set[str]:
    """Return the names of the weights that a finding is about."""
    return {name for name in (one.layer, *one.evidence.get("layers", ())) if name}


def _weights_of_causes(row: Explanation, found: Iterable[Finding], facts: Facts) -> set[str]:
    """Return the names of the weights for which a cause of the row holds."""
    weights = {name for cause in row.causes for name in facts.get(cause, ())}
    for one in found:
        if one.code in row.causes and one.rank <= SEVERITIES.index(row.least):
            weights |= weights_of(one)
    return weights


def _is_explained(one: Finding, row: Explanation, weights: set[str]) -> bool:
    """Return True if a row explains a finding: its causes hold for all ``weights`` that the finding is about."""
    if one.code not in row.explained or one.rank < SEVERITIES.index(row.most):
        return False
    about = weights_of(one)
    return bool(about) and about <= weights
