"""``quanterr diff``: two stored reports next to each other, without the models."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from quanterr.cli.common import Color, Colors, NoClobber, NoColor, color_of, help_of, printing
from quanterr.util.colors import wanted
from quanterr.util.text import no_command

if TYPE_CHECKING:
    from quanterr.report.diff.evaluations import EvaluationDiff
    from quanterr.report.diff.model import Diff

HELP = help_of("""Compare two stored reports of the same original: which layers got better, worse, new or lost.

\b
[bold]quanterr diff last-release.json report.json[/bold]
[bold]quanterr diff old.json new.json --json | jq '.worse[] | .layer'[/bold]
[bold]quanterr diff old.json new.json -o diff.html[/bold]
[bold]quanterr diff old-evaluation.json new-evaluation.json[/bold]

Of two evaluations of the same text: which numbers changed by more than chance, and which weights.

Exit status: 0 whatever changed (quanterr gate --baseline judges); 2 wrong usage, or reports that do not
compare; 3 a report is unreadable.
""")


def diff(
    old: Annotated[
        str, typer.Argument(metavar="OLD", help="A report.json of compare, or an evaluation.", show_default=False)
    ],
    new: Annotated[str, typer.Argument(metavar="NEW", help="A newer report.", show_default=False)],
    as_json: Annotated[
        bool, typer.Option("--json", help="All that changed, as JSON on stdout.", rich_help_panel="Output")
    ] = False,
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            "--output-report",
            "-o",
            metavar="FILE",
            help="Write what changed as a page (.html) or JSON (.json); - is JSON on stdout. Repeatable.",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    no_clobber: NoClobber = False,
    top_layers: Annotated[
        int,
        typer.Option(
            "--top-layers", metavar="N", help="How many layers of each kind to show.", min=0, rich_help_panel="Output"
        ),
    ] = 10,
    color: Colors = Color.AUTO,
    no_color: NoColor = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Counts only, no layers.", rich_help_panel="Output")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Compare reports of different originals, selections or settings.")
    ] = False,
) -> None:
    """Compare two stored reports."""
    import gc

    from quanterr.report.diff import OF_EVALUATIONS, OUTPUTS
    from quanterr.report.documents import schema_of
    from quanterr.report.evaluation import SCHEMA as EVALUATION
    from quanterr.report.files import STDOUT, targets, write_output

    gc.disable()  # what is read is kept to the end, and the end is near
    given = [*(outputs or []), *([STDOUT] if as_json and STDOUT not in (outputs or []) else [])]
    are_evaluations = (
        schema_of(old) == EVALUATION or schema_of(new) == EVALUATION
    )  # of one alone, the other is told to be none
    outputs_of_them = OF_EVALUATIONS if are_evaluations else OUTPUTS
    to = targets(given, [old, new], no_clobber=no_clobber, outputs=outputs_of_them)
    colored, top = wanted(sys.stdout, color_of(color, no_color)), 0 if quiet else top_layers
    found, lines = (_of_evaluations if are_evaluations else _of_reports)(old, new, force, top, colored)
    with printing():
        for target in to:
            write_output(found, target)
        if all(target.path is not None for target in to):
            print("\n".join(map(no_command, lines)), flush=True)


def _of_reports(old: str, new: str, force: bool, top: int, colored: bool) -> "tuple[Diff, Iterable[str]]":
    from quanterr.report.diff.as_text import diff_lines
    from quanterr.report.diff.making import diff as compared

    found = compared(old, new, force)
    return found, diff_lines(found, top, colored)


def _of_evaluations(old: str, new: str, force: bool, top: int, colored: bool) -> "tuple[EvaluationDiff, Iterable[str]]":
    from quanterr.report.diff.evaluations import diff_of_evaluations
    from quanterr.report.diff.evaluations_text import evaluation_lines

    found = diff_of_evaluations(old, new, force)
    return found, evaluation_lines(found, top, colored)
