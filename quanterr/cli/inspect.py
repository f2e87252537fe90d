"""``quanterr inspect``: list a checkpoint's formats, sizes and problems."""

from dataclasses import replace
from typing import Annotated

import typer

from quanterr.cli.display import Display, deliver
from quanterr.cli.notices import announce, warn
from quanterr.cli.options import AllBut, argument, with_options
from quanterr.cli.process import command_line
from quanterr.errors import Status
from quanterr.options import InspectOptions
from quanterr.util.memory import require_memory_for_torch


@with_options
def inspect(
    checkpoint: Annotated[str, argument("CHECKPOINT", "A file, a folder, an index or org/name.")],
    options: InspectOptions,
    show: Annotated[Display, AllBut(("sort_by", "no_plot", "allow_partial", "top_layers"))],
) -> None:
    """List a checkpoint's formats, sizes, bits per weight and problems. Reads headers only, unless asked for more.

    Exit status: 0 no error was found; 2 wrong usage; 3 an input is unreadable; 4 a weight is in no readable format,
    another error was found, or a program named with --for refuses it, or may not load it as stored; 5 memory or disk.
    """
    from quanterr.findings.runtimes.judging import find_refusals
    from quanterr.inspection import inspect_checkpoint

    to = show.targets([checkpoint])
    announce([checkpoint], quiet=show.quiet or show.as_json)
    require_memory_for_torch()
    inspection = inspect_checkpoint(checkpoint, replace(options, command=command_line()))
    warn(inspection.findings)
    deliver(inspection, to, show)
    if inspection.problems or find_refusals(options.runtimes, inspection.loading):
        raise typer.Exit(Status.INCONCLUSIVE)
