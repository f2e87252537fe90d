"""Findings from the errors of compared weights, and about changes of other tensors."""

from collections.abc import Iterable, Iterator

from quanterr.documents.base import Finding
from quanterr.findings.checks import BOTH, HEADERS, RESULT, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Comparison
from quanterr.util.text import count, itemize

MAX_BLOCKS = 512  # only synthetic models have more; grouping by block would then take more space than the layers


@check(
    *("scale_factor", "zero_points", "permuted", "transposed", "swapped_weight", "codes_without_scale", "shared_scale"),
    *("another_source", "quantized_original", "group_outlier", "implausible_error", "excess_columns"),
    *("bias_corrected", "constant_weight", "repeated_weights"),
    needs=RESULT,
    of=BOTH,
)
def check_weights(comparison: Comparison) -> Iterable[Finding]:
    """Return the findings of a ``FindingCollector``: about single weights, from repairs, and about all together."""
    return comparison.weight_findings


@check("other_changes", needs=RESULT, of=BOTH)
def check_vectors(comparison: Comparison) -> Iterator[Finding]:
    """Report changed 1-D tensors, except corrected biases."""
    corrected = (finding for finding in comparison.weight_findings if finding.code == "bias_corrected")
    explained = {name for finding in corrected for name in finding.evidence["layers"]}
    if names := [name for name in comparison.changed_vectors if name not in explained]:
        what = count(len(names), "norm, bias or other 1-D tensor", "norms, biases or other 1-D tensors")
        message = f"{what} changed: {itemize(names, 3)}; see other_changes"
        yield make_finding("other_changes", "info", None, message, tensors=len(names))


@check("many_blocks", needs=HEADERS, of=BOTH)
def check_blocks(comparison: Comparison) -> Iterator[Finding]:
    """Report a model that has too many blocks to group its layers by block."""
    if not comparison.has_blocks:
        message = f"more than {MAX_BLOCKS} blocks: not grouped by block"
        yield make_finding("many_blocks", "info", None, message)
