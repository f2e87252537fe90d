"""Two reports of one original, or two evaluations of one text: what changed, and how that is shown.

To add an output: write its file with ``write(diff, file)``, add its row here.
"""

from quanterr.report import Output

OUTPUTS: tuple[Output, ...] = (
    Output("json", ".json", "all that changed, for jq", "quanterr.report.diff.as_json"),
    Output("html", ".html", "one page: maps of both and of the change, all layers", "quanterr.report.diff.as_html"),
)
OF_EVALUATIONS = OUTPUTS[:1]
