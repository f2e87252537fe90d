"""``quanterr diff``: two stored results next to each other, without the models."""

from typing import Annotated

import typer

from quanterr.cli.common import Display, deliver, help_of
from quanterr.cli.options import But, with_options

HELP = help_of("""Compare two stored results of the same original: which layers got better, worse, new or lost.

\b
[bold]quanterr diff last-release.json report.json[/bold]
[bold]quanterr diff old.json new.json --json | jq '.worse[] | .layer'[/bold]
[bold]quanterr diff old.json new.json -o diff.html[/bold]
[bold]quanterr diff old-evaluation.json new-evaluation.json[/bold]

Two reports, rankings, evaluations or plans. Of evaluations of the same text it says which numbers changed by more
than chance.

Exit status: 0 whatever changed (quanterr gate --baseline judges); 2 wrong usage, or results that do not
compare; 3 one is unreadable.
""")


@with_options
def diff(
    old: Annotated[
        str,
        typer.Argument(metavar="OLD", help="JSON of compare, rank, sweep, evaluate or plan.", show_default=False),
    ],
    new: Annotated[str, typer.Argument(metavar="NEW", help="A newer one.", show_default=False)],
    show: Annotated[Display, But(("sort_by", "no_plot", "verbose", "allow_partial"))],
    force: Annotated[
        bool, typer.Option("--force", help="Compare results of different originals, selections or settings.")
    ] = False,
) -> None:
    """Compare two stored results."""
    from quanterr.report.diff.base import Difference
    from quanterr.report.diff.making import diff as compared

    to = show.targets([old, new], Difference.OUTPUTS)
    deliver(compared(old, new, force), to, show)
