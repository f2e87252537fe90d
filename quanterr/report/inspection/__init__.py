"""What one checkpoint stores, and how that is shown."""

from quanterr.report import Output

SCHEMA = "quanterr.inspection"
OUTPUTS: tuple[Output, ...] = (
    Output("json", ".json", "everything, as strict JSON, for jq", "quanterr.report.as_json"),
    Output("jsonl", ".jsonl", "the inspection, then a weight per line", "quanterr.report.as_jsonl"),
    Output("csv", ".csv", "a line per weight, for spreadsheets and pandas", "quanterr.report.as_csv"),
    Output("html", ".html", "one page: formats, map, all weights; works offline", "quanterr.report.page"),
    Output("md", ".md", "a section for a model card", "quanterr.report.card"),
    Output("junit", ".xml", "JUnit XML, as CI systems show it", "quanterr.report.as_junit"),
)
