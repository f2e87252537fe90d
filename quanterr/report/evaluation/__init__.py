"""The evaluation of candidates on a text: model, views and outputs.

To add an output, write a module with ``write(evaluation, file)`` and add a row here.
"""

from quanterr.report import Output

SCHEMA = "quanterr.evaluation"

OUTPUTS: tuple[Output, ...] = (
    Output("json", ".json", "everything, as strict JSON, for jq and for gate", "quanterr.report.as_json"),
    Output("jsonl", ".jsonl", "the same as JSON Lines: the whole, then a weight per line", f"{__name__}.as_jsonl"),
    Output("csv", ".csv", "a line per candidate, block and weight", "quanterr.report.as_csv"),
    Output("html", ".html", "one page: numbers, blocks, map, all weights", "quanterr.report.page"),
    Output("md", ".md", "a section for a model card", "quanterr.report.card"),
    Output("junit", ".xml", "JUnit XML, as CI systems show it", "quanterr.report.as_junit"),
)
