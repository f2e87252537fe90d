"""Findings about adapters, which hold only changes of a model."""

from collections.abc import Iterator

from quanterr.checkpoints import Checkpoint
from quanterr.checkpoints.adapters import ADVICE, describe_adapter
from quanterr.documents.base import Finding
from quanterr.findings.codes import make_finding


def check_adapter(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Report a checkpoint that is an adapter instead of a model."""
    if description := describe_adapter(checkpoint):
        yield make_finding("adapter", "warning", None, description, ADVICE)
