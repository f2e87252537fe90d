"""What rules see of a report: numbers by name, and what makes them unfit to be judged.

The names are those of the report. Which there are comes from the rows of METRICS and AGGREGATES.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf, isinf
from typing import Any, NamedTuple

from quanterr.metrics import (
    AGGREGATES,
    LAYER_PERCENTILES,
    METRICS,
    NONFINITE,
    PERCENTILES,
    LayerValues,
    Measured,
    Metric,
    evaluate,
)
from quanterr.metrics.attainable import Attainable
from quanterr.metrics.sums import Sums, exact
from quanterr.report.reading import Extract
from quanterr.util.text import display

PERCENTILE_KEYS = {"percentiles": PERCENTILES, "layer_percentiles": LAYER_PERCENTILES}


def _names(rows: tuple[Metric, ...]) -> dict[str, Metric]:
    """The numbers that rows give: ``snr_db``, ``absolute_error_percentiles.p99``."""
    found = {}
    for row in rows:
        if row.kind in ("number", "count"):
            found[row.name] = row
        for key in PERCENTILE_KEYS.get(row.kind, ()):
            found[f"{row.name}.{key}"] = row
    return found


LAYER_METRICS = _names(METRICS)
MODEL_METRICS = _names(AGGREGATES)
# Metric → the setting without which it is undefined.
NEEDS = {
    **dict.fromkeys(("weighted_nmse", "weighted_error_norm", "weighted_snr_db"), "importance"),
    "predicted_kld": "sensitivity",
}


class ReportMetric(NamedTuple):
    """A number of the report itself."""

    summary: str
    of: Callable[[Extract], float | None]


def _length(key: str) -> Callable[[Extract], float]:
    return lambda report: float(len(report[key]))


def _findings(severity: str) -> Callable[[Extract], float]:
    return lambda report: float(sum(found["severity"] == severity for found in report["findings"]))


REPORT_METRICS: dict[str, ReportMetric] = {
    "original_compared_fraction": ReportMetric(
        "share of the selected bytes of the original that were compared, 0 to 1",
        lambda report: report["coverage"]["original_compared_fraction"],
    ),
    "quantized_compared_fraction": ReportMetric(
        "the same of the quantized side", lambda report: report["coverage"]["quantized_compared_fraction"]
    ),
    "layers": ReportMetric("number of weights that differ", _length("layers")),
    "lossless": ReportMetric("number of tensors that are the same on both sides", _length("lossless")),
    "other_changes": ReportMetric(
        "number of norms, biases and other 1-D tensors that differ", _length("other_changes")
    ),
    "not_compared": ReportMetric("number of tensors that were selected and not compared", _length("not_compared")),
    "findings.error": ReportMetric("number of findings of that severity", _findings("error")),
    "findings.warning": ReportMetric("number of findings of that severity", _findings("warning")),
    "findings.info": ReportMetric("number of findings of that severity", _findings("info")),
}


EQUAL = Attainable(n=4, x_sq=1.0, e_sq=0.0, best_sq=0.0, stored_sq=0.0)


def _of_equal_tensors(rows: tuple[Metric, ...]) -> dict[str, float]:
    """What a metric is where both sides are the same: 0, 1 or infinite; what depends on the tensor is left out."""
    first, second = (
        _numbers(
            rows, Measured(_equal(a), attainable=EQUAL, alpha=a, layers=LayerValues([0.0], [0.0], [inf], [], [0.0]))
        )
        for a in (1.0, 2.0)
    )
    return {name: value for name, value in first.items() if value == second.get(name)}


def _equal(a: float) -> Sums:
    """The sums of a tensor and itself; its norm and its spread are whole numbers, so that nothing is rounded."""
    x = (a, a, 7 * a, 7 * a)
    total, energy = sum(map(exact, x)), sum(exact(value * value) for value in x)
    of_both = Sums(n=4, x_nonzero=4, x=total, y=total, x_abs=total, x_sq=energy, y_sq=energy, xy=energy, e_min=0.0)
    return replace(of_both, weighted_x_sq=energy)


def _numbers(rows: tuple[Metric, ...], measured: Measured) -> dict[str, float]:
    values, nonfinite = evaluate(rows, measured)
    found = {name: number(values, nonfinite, name) for name in _names(rows)}
    percentiles = {name: 0.0 for name, row in _names(rows).items() if row.kind in PERCENTILE_KEYS}  # every |e| is 0
    return {name: value for name, value in found.items() if value is not None} | percentiles


NOT_JUDGED = "not judged: "  # begins the reason of a comparison whose rules or baseline were wrong: others may judge it
INFINITE = {name: value for name, value in NONFINITE.items() if isinf(value)}


def number(values: Mapping[str, Any], nonfinite: Mapping[str, str], name: str) -> float | None:
    """The value of that name; infinite where the report says so, None where it is undefined."""
    key, _, percentile = name.partition(".")
    value: float | None = values[key][percentile] if percentile else values[key]
    return INFINITE.get(nonfinite.get(key, "")) if value is None else value


EQUAL_LAYER = _of_equal_tensors(METRICS)
EQUAL_MODEL = _of_equal_tensors(AGGREGATES)


def _perfect(equal: Mapping[str, float], report: Extract) -> Mapping[str, float]:
    """Those that the report has: nothing is weighted without an importance matrix."""
    settings = report["settings"]
    return {name: value for name, value in equal.items() if name not in NEEDS or settings.get(NEEDS[name])}


class Weight(NamedTuple):
    """A tensor of the report. ``trouble`` says why no rule about it can hold."""

    name: str
    kind: str  # layers, other_changes, lossless, not_compared: where the report has it
    values: Mapping[str, Any]
    trouble: str | None
    perfect: Mapping[str, float]  # what the numbers are of a tensor that is the same on both sides

    def number(self, metric: str) -> float | None:
        """Its value, None where it is undefined. Of a tensor that is the same on both sides the perfect one."""
        if self.kind in ("layers", "other_changes"):
            return number(self.values, self.values["nonfinite"], metric)
        return self.perfect.get(metric, self.values.get(metric)) if self.kind == "lossless" else None


class Values:
    """All that rules see of one report.

    ``weights`` are its tensors, those that were not compared as well. ``trouble`` says why no rule about the
    whole model can hold, ``unreliable`` why the comparison itself cannot be relied on; both may be empty.
    """

    def __init__(self, report: Extract) -> None:
        """Take them from an extract."""
        self.report = report
        self.weights = _weights(report)
        troubles = [f["message"] for f in report["findings"] if f["severity"] == "error" and f["layer"] is None]
        troubles += [f"{display(weight.name)}: {weight.trouble}" for weight in self.weights if weight.trouble]
        self.trouble = next(iter(troubles), None)
        self.unreliable = _unreliable(report, troubles)

    def of_model(self, metric: str) -> float | None:
        """A value of the aggregate; where no layer differs the perfect one, where there is none at all None."""
        if not self.report["layers"]:
            return _perfect(EQUAL_MODEL, self.report).get(metric) if self.report["lossless"] else None
        return number(self.report["aggregate"], self.report["aggregate"]["nonfinite"], metric)

    def of_report(self, metric: str) -> float | None:
        """A value of the report itself."""
        return REPORT_METRICS[metric].of(self.report)


def _weights(report: Extract) -> list[Weight]:
    trouble = {row["layer_name"]: f"not compared: {row['reason']}" for row in reversed(report["not_compared"])}
    for found in reversed(report["findings"]):
        if found["severity"] == "error" and found["layer"] is not None:
            trouble[found["layer"]] = found["message"].removeprefix(f"{display(found['layer'])}: ")
    perfect = _perfect(EQUAL_LAYER, report)
    weights = [
        Weight(row["layer_name"], kind, row, trouble.pop(row["layer_name"], None) or _nonfinite(row), perfect)
        for kind in ("layers", "other_changes", "lossless")
        for row in report[kind]
    ]
    return weights + [Weight(name, "not_compared", {}, why, perfect) for name, why in trouble.items()]


def _nonfinite(row: Mapping[str, Any]) -> str | None:
    return None if row.get("finite", True) else "has elements that are NaN or infinite"


def _unreliable(report: Extract, troubles: list[str]) -> list[str]:
    """Why the verdict can only be inconclusive; not taken from the stored verdict alone, which may have been edited."""
    of_gates = {gate["message"] for gate in report["gates"]}
    if report["verdict"] == "inconclusive":
        words = [reason for reason in report["reasons"] if reason not in of_gates]
        of_result = [reason for reason in words if not reason.startswith(NOT_JUDGED)]
        if of_result or troubles or not words:
            return of_result or troubles or ["the report says inconclusive without a reason"]
    if not report["complete"]:
        return ["the run was interrupted"]
    if troubles:
        return troubles
    return [] if report["layers"] or report["lossless"] or report["other_changes"] else ["nothing was compared"]
