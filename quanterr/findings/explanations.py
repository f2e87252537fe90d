"""Which finding explains which: one table. Collectors say all that they see; what is explained is dropped here.

A cause is a finding of some severity at least, or a fact about a weight that is none. It explains findings about the
same weights: a finding about several of them goes only if each is explained. Rows apply from top to bottom, and what is
gone explains nothing more: so no row may explain what an earlier one takes for a cause.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from quanterr.report.base import Finding

# Facts about single weights.
UNDERFLOWS = "underflows"  # its values are below the smallest scale of its format
NEAR = "near"  # its codes are about the nearest that its scales allow, and these about as good as good ones
USUAL = "usual"  # its codes are as far from the nearest as its method leaves them, and its scales are good
ONE_WAY = "one way"  # its values were truncated, or rounded always up or down
SIGNED = "signed"  # its codes go with the signs of its scales
FACTS = (UNDERFLOWS, NEAR, USUAL, ONE_WAY, SIGNED)
Facts = Mapping[str, Collection[str]]  # fact → names of weights

SEVERITIES = ("info", "warning", "error")
REPAIRS = ("scale_factor", "transposed", "permuted", "zero_points", "swapped_weight")
PARTS = ("excess_rows", "excess_columns", "excess_blocks")
EXCESS = ("excess_error", *PARTS, "clipped")
SAMPLED = (*EXCESS, "scale_loss")
LEVELS = ("implausible_error", "below_usual", "group_outlier")  # what a low SNR says


class Explanation(NamedTuple):
    """A row: what any of the causes explains."""

    causes: tuple[str, ...]  # facts, or codes of findings
    least: str  # severity of a finding from which on it is a cause
    explained: tuple[str, ...]  # codes
    most: str  # severity of a finding up to which it is explained
    reason: str


EXPLANATIONS = (
    Explanation(
        (UNDERFLOWS,),
        "info",
        (*LEVELS, *SAMPLED, "scale_negative", "scale_zero", "saturated", "biased_error", "bad_rows", "dead_rows"),
        "error",
        "values below the smallest scale become zeros or coarse, in all rows, and no code is the nearest",
    ),
    Explanation(
        (NEAR,),
        "info",
        (*LEVELS, "saturated", "biased_error", "bad_rows", *REPAIRS),
        "error",
        "no codes are better with these scales, nor other scales much better, however low the SNR is",
    ),
    Explanation(
        (USUAL,),
        "info",
        (*LEVELS, "bad_rows"),
        "error",
        "it is as good as its scales allow but for what its method costs, which is told as excess",
    ),
    Explanation(
        (SIGNED,),
        "info",
        ("scale_negative",),
        "error",
        "codes go with the signs of the scales: AutoRound and ggml's Q4_0 write negative ones",
    ),
    Explanation(
        (ONE_WAY,),
        "info",
        ("scale_factor", "biased_error"),
        "warning",
        "values that are truncated are smaller, or larger throughout: that is told as excess",
    ),
    Explanation(
        (ONE_WAY,),
        "info",
        ("zero_points",),
        "error",
        "the shift is half a step, which rounding up or down makes: wrong zero points are off by whole ones",
    ),
    Explanation(
        REPAIRS,
        "error",
        (*SAMPLED, "implausible_error", "group_outlier"),
        "error",
        "once it is repaired the weight is as it should be",
    ),
    Explanation(
        ("nonfinite_original", "nonfinite_quantized", "scale_nonfinite", "implausible_error"),
        "error",
        EXCESS,
        "error",
        "the weight is broken as a whole: what a sample of it shows says nothing more",
    ),
    Explanation(
        ("scale_loss",),
        "warning",
        (*LEVELS, "clipped", "saturated", "bad_rows"),
        "warning",
        "its scales are too large or too small: that is why the SNR is low, and values clipped",
    ),
    Explanation(
        ("excess_error",),
        "error",
        (*LEVELS, *PARTS, "clipped", "bad_rows"),
        "warning",
        "its codes are wrong: that is why the SNR is low, of the weight or of some rows",
    ),
    Explanation(
        ("excess_rows",),
        "info",
        ("bad_rows",),
        "error",
        "the same rows, with what their scales allow",
    ),
    Explanation(
        (*REPAIRS, *LEVELS, "zero_original"),
        "warning",
        ("unquantized_changed",),
        "warning",
        "that each of these tensors differs is said already, and how",
    ),
)


def drop_explained(found: Sequence[Finding], facts: Facts) -> list[Finding]:
    """The findings that nothing explains, in their order."""
    kept = list(found)
    for row in EXPLANATIONS:
        weights = _weights_of_causes(row, kept, facts)
        kept = [one for one in kept if not _is_explained(one, row, weights)]
    return kept


def subjects(one: Finding) -> set[str]:
    """Names of the weights that a finding is about."""
    return {name for name in (one.layer, *one.evidence.get("layers", ())) if name}


def _weights_of_causes(row: Explanation, found: Iterable[Finding], facts: Facts) -> set[str]:
    weights = {name for cause in row.causes for name in facts.get(cause, ())}
    for one in found:
        if one.code in row.causes and SEVERITIES.index(one.severity) >= SEVERITIES.index(row.least):
            weights |= subjects(one)
    return weights


def _is_explained(one: Finding, row: Explanation, weights: set[str]) -> bool:
    if one.code not in row.explained or SEVERITIES.index(one.severity) > SEVERITIES.index(row.most):
        return False
    about = subjects(one)
    return bool(about) and about <= weights
