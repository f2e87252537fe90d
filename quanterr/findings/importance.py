"""Weights that the importance matrix, or the sensitivity, does not cover."""

from collections.abc import Iterator, Mapping, Sequence

from quanterr.documents.base import Finding
from quanterr.findings.checks import BOTH, HEADERS, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Comparison
from quanterr.findings.limits import MINOR_SHARE
from quanterr.pairing.model import Pairing
from quanterr.selection.roles import role_of
from quanterr.util.text import count, itemize

NOT_COLLECTED = ("embedding", "head")  # roles that llama-imatrix skips by default


@check("importance_unmatched", "importance_missing", "importance_uncovered", needs=HEADERS, of=BOTH)
def check_importance(comparison: Comparison) -> Iterator[Finding]:
    """Report the weights, and the experts of stacks, that the importance matrix does not cover."""
    covered = comparison.pairing.covered
    if covered is None:
        return
    missing = [weight.name for weight in covered if weight.uncovered is None]
    if len(missing) == len(covered):
        message = "the importance matrix names none of the compared weights"
        remedy = "pass the importance matrix that was made for this model"
        yield make_finding("importance_unmatched", "error", None, message, remedy)
    elif missing:
        yield _report_uncovered(comparison.pairing, missing)
    partly = [weight for weight in covered if weight.uncovered]
    if partly:
        n = sum(weight.uncovered or 0 for weight in partly)
        message = (
            f"no activations for {count(n, 'expert')}, whose inputs are weighted equally: "
            f"{itemize([weight.name for weight in partly], 3)}"
        )
        yield make_finding("importance_uncovered", "warning", None, message, experts=n)


def _report_uncovered(plan: Pairing, missing: Sequence[str]) -> Finding:
    """Report weights that the importance matrix lacks: a warning if many quantized ones are missing."""
    quantized = [pair for pair in plan.pairs if pair.quantized.has_codes and role_of(pair.name) not in NOT_COLLECTED]
    left = [pair for pair in quantized if pair.name in set(missing)]
    share = sum(pair.original.n for pair in left) / max(1, sum(pair.original.n for pair in quantized))
    if max(share, len(left) / max(1, len(quantized))) > MINOR_SHARE:
        message = (
            f"the importance matrix does not cover {len(left):,} of {count(len(quantized), 'quantized weight')}, "
            f"{share:.0%} of their elements: {itemize([pair.name for pair in left], 3)}"
        )
        remedy = "collect the matrix from the whole model: weighted numbers leave these weights out"
        return make_finding("importance_missing", "warning", None, message, remedy, weights=len(missing), share=share)
    message = f"the importance matrix does not cover {count(len(missing), 'weight')}: {itemize(list(missing), 3)}"
    return make_finding("importance_missing", "info", None, message, weights=len(missing), share=share)


@check("sensitivity_unmatched", "sensitivity_missing", needs=HEADERS, of=BOTH)
def check_sensitivity(comparison: Comparison) -> Iterator[Finding]:
    """Report the compared matrices that the sensitivity does not cover."""
    matrices = [pair.name for pair in comparison.pairing.pairs if len(pair.original.shape) > 1]
    yield from report_insensitive(matrices, comparison.alphas)


def report_insensitive(matrices: Sequence[str], alphas: Mapping[str, float] | None) -> Iterator[Finding]:
    """Report the compared matrices that the sensitivity (``alphas``, by name) does not cover."""
    missing = [name for name in matrices if name not in (alphas or {})]
    if alphas is None or not missing:
        return
    if len(missing) == len(matrices):
        message = "the sensitivity names none of the compared weights"
        remedy = "pass the file that evaluate --sensitivity-out wrote for this original"
        yield make_finding("sensitivity_unmatched", "error", None, message, remedy)
    else:
        message = f"the sensitivity does not cover {count(len(missing), 'weight')}: {itemize(missing, 3)}"
        yield make_finding("sensitivity_missing", "info", None, message, weights=len(missing))
