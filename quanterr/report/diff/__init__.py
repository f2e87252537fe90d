"""Diffs of two results of one kind: model, views and outputs.

To add an output, write a module with ``write(diff, file)`` and add a row here.
"""

from quanterr.report import Output

OUTPUTS: tuple[Output, ...] = (
    Output("json", ".json", "all that changed, for jq", "quanterr.report.as_json"),
    Output("csv", ".csv", "a line per change, for spreadsheets and pandas", "quanterr.report.as_csv"),
    Output("html", ".html", "one page: what changed, of reports a map and all layers", "quanterr.report.page"),
    Output("md", ".md", "a section for a comment or a model card", "quanterr.report.card"),
)
