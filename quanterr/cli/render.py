"""``quanterr render``: write other outputs of a stored result."""

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from quanterr.cli.display import Display, guard_stdout
from quanterr.cli.next_steps import suggest_for_stored
from quanterr.cli.options import Only, argument, with_options
from quanterr.errors import UsageError
from quanterr.options import Option

if TYPE_CHECKING:
    from quanterr.documents.document import Document
    from quanterr.outputs.files import Target
    from quanterr.outputs.sections import View


@with_options
def render(
    stored: Annotated[str, argument("REPORT", "A JSON result written by -o FILE.json.")],
    show: Annotated[Display, Only(("outputs", "no_clobber", "quiet"))],
    to: Annotated[
        Literal["json", "jsonl", "csv", "html", "md", "junit", "svg", "png"] | None,
        Option(
            "json, jsonl, csv, html, md, junit; svg or png plot candidates. Default: chosen by the suffix of -o.",
            metavar="FORMAT",
        ),
    ] = None,
    document: Annotated[
        str | None,
        Option(
            "Write the Markdown section into this document, between the comments <!-- quanterr:begin --> and "
            "<!-- quanterr:end -->.",
            metavar="FILE",
            flags="--update",
        ),
    ] = None,
    evaluation: Annotated[
        str | None,
        Option(
            "An evaluation (JSON) of the same pair, to include in the page (-o report.html), or of the candidates of a "
            "ranking, to include in all outputs.",
            metavar="FILE",
        ),
    ] = None,
    append: Annotated[bool, Option("With --update: append to a document that lacks these comments.")] = False,
) -> None:
    """Write other outputs of a stored report, ranking, evaluation or plan, without the models.

    \b
    [bold]quanterr render report.json -o report.html -o report.csv[/bold]
    [bold]quanterr render report.json --to md >> model-card.md[/bold]
    [bold]quanterr render report.json --update README.md --append[/bold]
    [bold]quanterr render plan.json -o plan.html[/bold]

    Prints the stored verdict on stderr and exits with 0 whatever it is. To fail on it, use quanterr gate.
    """
    from quanterr.documents.evaluation.model import Evaluation
    from quanterr.documents.kinds import read_document
    from quanterr.documents.ranking.model import Ranking
    from quanterr.documents.ranking.scores import add_scores
    from quanterr.documents.reading import read_stored
    from quanterr.outputs import CANDIDATE_OUTPUTS
    from quanterr.outputs.files import STDOUT, check_targets, update_section, write_output

    outputs, by_name = list(show.outputs), {output.name: output for output in CANDIDATE_OUTPUTS}
    if not to and not outputs and not document:
        raise UsageError("nothing to write: give --to html, -o report.html or --update README.md")
    if append and not document:
        raise UsageError("--append belongs to --update README.md: give both")
    if to and len(outputs) > 1:
        raise UsageError("--to is for one output; give several by their suffixes: -o report.html -o report.csv")
    requested = outputs or ([STDOUT] if to else [])
    targeted = check_targets(requested, [stored], by_name.get(to or ""), show.no_clobber, CANDIDATE_OUTPUTS)
    content = read_document(stored)
    page = None
    if evaluation is not None and isinstance(content, Ranking):
        content = add_scores(content, read_stored(evaluation, Evaluation), evaluation)
    elif evaluation is not None:
        page = _view_with_evaluation(evaluation, content, targeted)
    with guard_stdout():
        if document:
            from quanterr.views.evaluation.front_matter import put_front_matter

            finish = partial(put_front_matter, evaluation=content) if isinstance(content, Evaluation) else None
            update_section(document, content, by_name["md"], append, finish)
        for target in targeted:
            more: dict[str, object] = {}
            if target.output.name == "html":
                more = {"view": page} if page else {"next_step": suggest_for_stored(content)}
            write_output(content, target, **more)
        print(content.brief(), file=sys.stderr)


def _view_with_evaluation(evaluation: str, report: "Document", to: "list[Target]") -> "View":
    """Return the view of a report that includes an evaluation of the same pair.

    Raises:
        UsageError: the document is not a report, or no output is a page.
    """
    from quanterr.documents.comparison.model import Report
    from quanterr.documents.evaluation.model import Evaluation
    from quanterr.documents.reading import read_stored
    from quanterr.outputs.page.rendering import TOP
    from quanterr.views.comparison.view import view

    if not isinstance(report, Report):
        raise UsageError("--evaluation: only rankings, and pages of a report of compare, can include one")
    if not any(target.output.name == "html" for target in to):
        raise UsageError("--evaluation: only a page can include one; give -o report.html")
    return view(report, TOP, evaluation=read_stored(evaluation, Evaluation))
