"""Which recipe each layer should have under a budget, and how that is shown and handed to quantizers.

To add an export: a function in exports.py, and its row in EXPORTS.
"""

from quanterr.report import Output

OUTPUTS: tuple[Output, ...] = (
    Output("json", ".json", "everything, as strict JSON, for compare --plan", "quanterr.report.plan.as_json"),
)
