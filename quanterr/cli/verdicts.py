"""The end of a judged run: its gates on stderr and on GitHub, and the exit status."""

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import typer

from quanterr.cli.display import Display, deliver
from quanterr.errors import UsageError
from quanterr.util.text import display, escape_commands

if TYPE_CHECKING:
    from quanterr.documents.document import Document
    from quanterr.documents.gate_results import HasGates
    from quanterr.outputs.files import Target


def report_verdict(
    judged: "HasGates", candidate: str | None = None, quiet: bool = False, colored: bool = False
) -> None:
    """Print the gates on stderr; on GitHub, also write the verdict into the job summary and annotations."""
    from quanterr.gates import github
    from quanterr.gates.as_text import format_gates

    if judged.gates and not quiet:
        of = [] if candidate is None else [escape_commands(f"{display(candidate)}:")]
        print("\n".join([*of, *format_gates(judged.gates, colored)]), file=sys.stderr)
    if not github.is_on_github():
        return
    for line in github.make_annotations(judged, candidate):
        print(line, file=sys.stderr)
    if problem := github.write_summary(judged, candidate):
        print(f"quanterr: {problem}", file=sys.stderr)


def finish(
    document: "Document", to: "list[Target]", show: Display, status: int, baseline: object, next_step: str = ""
) -> NoReturn:
    """Write and print a judged document, print the gates of its candidates, and exit with the status."""
    deliver(document, to, show, status, next_step)
    for candidate in getattr(document, "candidates", [document]):
        report_verdict(candidate, getattr(candidate, "name", None))
    summarize(document, baseline)
    raise typer.Exit(status)


def summarize(document: "Document", baseline: object = None) -> None:
    """On GitHub, add the document's numbers and the change since the baseline to the job summary."""
    from quanterr.gates import github

    if not github.has_summary():
        return
    from quanterr.differences.making import diff
    from quanterr.outputs.card import format_numbers

    change = ""
    with suppress(UsageError):  # an unrelated baseline: the gates have reported it
        if isinstance(baseline, str | os.PathLike):
            change = f"Since the baseline: {diff(baseline, document).view(0).conclusion}"
    if problem := github.write_numbers(format_numbers(document), change):
        print(f"quanterr: {problem}", file=sys.stderr)
