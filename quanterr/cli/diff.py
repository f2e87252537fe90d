"""``quanterr diff``: two stored reports next to each other, without the models."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from quanterr.cli.common import Display, help_of, printing
from quanterr.cli.options import But, with_options
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


@with_options
def diff(
    old: Annotated[
        str, typer.Argument(metavar="OLD", help="A report.json of compare, or an evaluation.", show_default=False)
    ],
    new: Annotated[str, typer.Argument(metavar="NEW", help="A newer report.", show_default=False)],
    show: Annotated[Display, But(("sort_by", "no_plot", "verbose", "allow_partial"))],
    force: Annotated[
        bool, typer.Option("--force", help="Compare reports of different originals, selections or settings.")
    ] = False,
) -> None:
    """Compare two stored reports."""

    from quanterr.report.diff import OF_EVALUATIONS, OUTPUTS
    from quanterr.report.documents import schema_of
    from quanterr.report.evaluation import SCHEMA as EVALUATION
    from quanterr.report.files import STDOUT, targets, write_output

    given = [*show.outputs, *([STDOUT] if show.as_json and STDOUT not in show.outputs else [])]
    are_evaluations = (
        schema_of(old) == EVALUATION or schema_of(new) == EVALUATION
    )  # of one alone, the other is told to be none
    outputs_of_them = OF_EVALUATIONS if are_evaluations else OUTPUTS
    to = targets(given, [old, new], no_clobber=show.no_clobber, outputs=outputs_of_them)
    colored, top = wanted(sys.stdout, show.colors), 0 if show.quiet else show.top_layers
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
