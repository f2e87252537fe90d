"""``quanterr diff``: two stored reports next to each other, without the models."""

import os
import sys
from typing import Annotated

import typer

from quanterr.cli.common import help_of
from quanterr.errors import ResourceError, Status
from quanterr.util import strict_json
from quanterr.util.text import no_command

HELP = help_of("""Compare two stored reports of the same original: which layers got better, worse, new or lost.

\b
[bold]quanterr diff last-release.json report.json[/bold]
[bold]quanterr diff old.json new.json --json | jq '.worse[] | .layer'[/bold]

Exit status: 0 whatever changed (quanterr gate --baseline judges); 2 wrong usage, or reports that do not
compare; 3 a report is unreadable.
""")


def diff(
    old: Annotated[str, typer.Argument(metavar="OLD", help="A report.json of compare.", show_default=False)],
    new: Annotated[str, typer.Argument(metavar="NEW", help="A newer report.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="All that changed, as JSON on stdout.")] = False,
    top_layers: Annotated[int, typer.Option("--top-layers", help="How many layers of each kind to show.", min=0)] = 10,
    force: Annotated[
        bool, typer.Option("--force", help="Compare reports of different originals, selections or settings.")
    ] = False,
) -> None:
    """Compare two stored reports."""
    import gc

    from quanterr.report.diff import AGGREGATES, METRICS, diff_lines
    from quanterr.report.diff import diff as compared
    from quanterr.report.reading import read_extract

    gc.disable()  # what is read is kept to the end, and the end is near
    reports = [read_extract(path, METRICS, AGGREGATES, verdict=True) for path in (old, new)]
    found = compared(reports[0], reports[1], (old, new), force)
    if as_json:
        _print(strict_json.dumps(found.to_dict(), indent=1))
    else:
        _print("\n".join(map(no_command, diff_lines(found, top_layers))))


def _print(text: str) -> None:
    """Here and not by typer, which exits with 1 when nobody reads on: that would say that a gate does not hold."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left cannot be flushed either
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(Status.BROKEN_PIPE) from error
        raise ResourceError(f"standard output: {error.strerror}") from error
