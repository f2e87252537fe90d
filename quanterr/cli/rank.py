"""``quanterr rank``: several candidates for one original, in one pass over it."""

import gc
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from quanterr.cli.common import (
    AsJson,
    Color,
    Colors,
    Device,
    Display,
    Interrupt,
    Layers,
    Lenient,
    NoClobber,
    Original,
    Quiet,
    command_line,
    help_of,
    printing,
    require_memory,
    warn,
    watching,
)
from quanterr.errors import Status, UsageError
from quanterr.selection import CompareOptions
from quanterr.util.text import display

if TYPE_CHECKING:
    from quanterr.report.files import Target
    from quanterr.report.ranking import Ranking

HELP = help_of("""Compare several quantized checkpoints with one original and say which is best for its size.

\b
[bold]quanterr rank original.safetensors fp8.safetensors int8.safetensors[/bold]
[bold]quanterr rank original/ recipes/*.safetensors -l attn,mlp -o ranking.json[/bold]
[bold]quanterr rank org/name q4.gguf q5.gguf q6.gguf --json | jq '.front, .swaps'[/bold]

The original is read once, whatever the number of candidates. Error is compared over the same layers for
all. A candidate that compare would call inconclusive is named first and never ranked.

Exit status: 0 all candidates compared completely; 2 wrong usage; 3 an input is unreadable;
4 a candidate is inconclusive; 5 memory, device or disk; 70 a bug.
""")


def rank(
    original: Original,
    candidates: Annotated[
        list[str],
        typer.Argument(metavar="Q1 Q2 ...", help="The checkpoints to rank, two or more.", show_default=False),
    ],
    lenient: Lenient = False,
    layers: Layers = None,
    allow_partial: Annotated[
        bool,
        typer.Option(
            "--allow-partial",
            help="Exit 0 even if a candidate is inconclusive; it is still not ranked.",
            rich_help_panel="Selection",
        ),
    ] = False,
    as_json: AsJson = False,
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            "--output-report",
            "-o",
            help="Write the ranking as JSON (.json); - is stdout, the tables go to stderr. Repeatable.",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    no_clobber: NoClobber = False,
    top_layers: Annotated[
        int,
        typer.Option(
            "--top-layers",
            help="How many layers to show, by how much the choice matters.",
            min=0,
            rich_help_panel="Output",
        ),
    ] = 10,
    color: Colors = Color.AUTO,
    quiet: Quiet = False,
    device: Device = "auto",
) -> None:
    """Rank several candidates."""
    from quanterr.report.files import targets
    from quanterr.report.ranked import names_of, ranked

    gc.disable()  # a plan of many weights makes each of its rounds slow, and there are no cycles to find
    names = names_of(candidates)  # a mistake in them costs no run, nor the import of torch
    to = targets(outputs or [], [original, *candidates], no_clobber=no_clobber)
    for target in to:
        if target.output.suffix != ".json":
            raise UsageError(f"--output-report {display(str(target.path))}: a ranking is written as .json")
    with Interrupt() as interrupt:
        require_memory()
        from quanterr.comparison import compare_each

        with watching(quiet) as on_progress:
            options = CompareOptions(
                layers=layers or [],
                device=device,
                lenient=lenient,
                on_progress=on_progress,
                stop=interrupt.stop,
                command=command_line(),
            )
            ranking = ranked(names, compare_each(original, candidates, options))
        warn(found for candidate in ranking.candidates for found in candidate.findings)
        status = _status(ranking, allow_partial, interrupt.signal)
        _print(ranking, to, Display(top_layers, color, quiet, as_json=as_json), status)
    raise typer.Exit(status)


def _status(ranking: "Ranking", allow_partial: bool, signal: int | None) -> int:
    if signal is not None and not ranking.complete:
        return 128 + signal
    doubtful = ranking.verdict == "inconclusive" and not allow_partial
    return Status.INCONCLUSIVE if doubtful else Status.OK


def _print(ranking: "Ranking", to: "list[Target]", display: Display, status: int) -> None:
    """Files first: no reader that leaves the table early costs a ranking, and no full disk costs the table."""
    document = ranking.to_json()
    with printing():
        try:
            _write(document, [target for target in to if target.path is not None])
        finally:
            _show(ranking, document, any(target.path is None for target in to), display, status)
        _write(document, [target for target in to if target.path is None])


def _write(document: str, to: "list[Target]") -> None:
    from quanterr.report.files import write

    for target in to:
        write(target, lambda file: print(document, end="", file=file))


def _show(ranking: "Ranking", document: str, to_stdout: bool, display: Display, status: int) -> None:
    from quanterr.report.as_table import console
    from quanterr.report.ranking_table import brief, show

    if display.quiet:
        print(brief(ranking), file=sys.stderr)
    elif not display.as_json:
        stream = sys.stderr if to_stdout else sys.stdout
        show(ranking, console(stream, display.color), display.top_layers, status)
        stream.flush()
    if display.as_json and not to_stdout:
        sys.stdout.write(document)
        sys.stdout.flush()
