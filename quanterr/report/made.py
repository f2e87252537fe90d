"""The section "How it was made" of a document's page."""

import shlex
from collections.abc import Sequence

from quanterr.report.document import Document
from quanterr.report.sections import PAGE, FactList, Section
from quanterr.util.text import count, size


def describe_run(document: Document, settings: Sequence[tuple[str, str]] = ()) -> Section:
    """Return a section with the command, program, settings, time and machine of the run that made a document."""
    run = document.run
    kernel = f", kernel {run.kernel}" if run.kernel else ""
    facts = [
        ("Command", shlex.join(run.command) if run.command else "from a library"),
        ("Made by", document.made_by),
        *settings,
        ("When", f"{run.started}, in {run.seconds:.1f} s, {size(run.read_bytes)} read"),
        ("Where", f"{run.device}, {count(run.threads, 'thread')}{kernel}"),
        ("With", f"torch {run.torch}, Python {run.python}"),
    ]
    return Section("run", "How it was made", [FactList(facts)], (PAGE,), is_open=False)
