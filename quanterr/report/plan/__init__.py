"""Plans: a recipe for each layer under a budget; model, views and outputs.

To add an export, write a function in planning/exports.py and add its row to CONSUMERS.
"""

from quanterr.report import Output

OUTPUTS: tuple[Output, ...] = (
    Output("json", ".json", "everything, as strict JSON, for compare --plan", "quanterr.report.as_json"),
    Output("jsonl", ".jsonl", "the same as JSON Lines: the plan, then a layer per line", "quanterr.report.as_jsonl"),
    Output("csv", ".csv", "a line per layer, for spreadsheets and pandas", "quanterr.report.as_csv"),
    Output("html", ".html", "one page: costs, map, all layers; works offline", "quanterr.report.page"),
    Output("md", ".md", "a section for a model card", "quanterr.report.card"),
    Output("junit", ".xml", "JUnit XML, as CI systems show it", "quanterr.report.as_junit"),
)
