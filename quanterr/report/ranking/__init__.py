"""Rankings of candidates for one original: model, views and outputs.

To add an output, write a module with ``write(ranking, file)`` and add a row here.
"""

from quanterr.report import Output

OUTPUTS: tuple[Output, ...] = (
    Output("json", ".json", "everything, as strict JSON, for jq", "quanterr.report.as_json"),
    Output("jsonl", ".jsonl", "the same as JSON Lines: the ranking, then a layer per line", "quanterr.report.as_jsonl"),
    Output("csv", ".csv", "a line per layer and candidate, for spreadsheets and pandas", "quanterr.report.as_csv"),
    Output("html", ".html", "one page: size and error, map, all layers; works offline", "quanterr.report.page"),
    Output("md", ".md", "a section for a model card", "quanterr.report.card"),
    Output("junit", ".xml", "JUnit XML, as CI systems show it", "quanterr.report.as_junit"),
)
