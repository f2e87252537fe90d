"""Findings about adapters, which hold only changes of a model."""

from collections.abc import Iterator

from quanterr.checkpoints.adapters import ADVICE, describe_adapter
from quanterr.documents.base import Finding
from quanterr.findings.checks import ALONE, HEADERS, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Contents


@check("adapter", needs=HEADERS, of=ALONE)
def check_adapter(contents: Contents) -> Iterator[Finding]:
    """Report a checkpoint that is an adapter instead of a model."""
    if description := describe_adapter(contents.checkpoint):
        yield make_finding("adapter", "warning", None, description, ADVICE)
