"""``quanterr diff``: compare two stored results, without the models."""

from typing import Annotated

from quanterr.cli.display import Display, deliver
from quanterr.cli.options import AllBut, Reworded, argument, with_options
from quanterr.options import Option

OUTPUTS = Reworded(
    "outputs",
    "Write the differences here, in the format of the suffix (.json .csv .html .md); - is JSON on stdout.",
)


@with_options
def diff(
    old: Annotated[str, argument("OLD", "JSON of compare, rank, sweep, evaluate or plan.")],
    new: Annotated[str, argument("NEW", "A newer result of the same kind.")],
    show: Annotated[Display, AllBut(("sort_by", "no_plot", "allow_partial")), OUTPUTS],
    force: Annotated[bool, Option("Compare even if originals, selections or settings differ.")] = False,
) -> None:
    """Compare two stored results of the same original: list layers that are better, worse, new or missing.

    \b
    [bold]quanterr diff last-release.json report.json[/bold]
    [bold]quanterr diff old.json new.json --json | jq '.worse[] | .layer'[/bold]
    [bold]quanterr diff old.json new.json -o diff.html[/bold]
    [bold]quanterr diff old-evaluation.json new-evaluation.json[/bold]

    Both must be reports, rankings, evaluations, plans, inspections or comparisons of images. For evaluations on the
    same text, changes that exceed chance are marked.

    Exit status: 0 whatever changed (to fail on a change, use quanterr gate --baseline); 2 wrong usage, or results that
    cannot be compared; 3 one is unreadable.
    """
    from quanterr.differences.making import diff as compared
    from quanterr.outputs import DIFF_OUTPUTS

    to = show.targets([old, new], DIFF_OUTPUTS)
    deliver(compared(old, new, force), to, show)
