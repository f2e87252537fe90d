"""Several candidates for one original: made from their reports, and shown as compare's report is.

To add an output: write its file with ``write(ranking, file)``, add its row here.
"""

from quanterr.report import Output

_HERE = "quanterr.report.ranking"

OUTPUTS: tuple[Output, ...] = (
    Output("json", ".json", "everything, as strict JSON, for jq", f"{_HERE}.as_json"),
    Output("jsonl", ".jsonl", "the same as JSON Lines: the ranking, then a layer per line", f"{_HERE}.as_jsonl"),
    Output("csv", ".csv", "a line per layer and candidate, for spreadsheets and pandas", f"{_HERE}.as_csv"),
    Output("html", ".html", "one page: size and error, map, all layers; works offline", f"{_HERE}.as_html"),
    Output("md", ".md", "a section for a model card", f"{_HERE}.as_md"),
    Output("junit", ".xml", "JUnit XML, as CI systems show it", f"{_HERE}.as_junit"),
)
