"""What rules see of a report: its layers and numbers by name, and what makes them unfit to be judged.

The names are those of the report. Which there are comes from the rows of METRICS and AGGREGATES.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Self

from quanterr.errors import UsageError
from quanterr.metrics import (
    AGGREGATES,
    LAYER_PERCENTILES,
    METRICS,
    PERCENTILES,
    LayerValues,
    Measurement,
    Metric,
    compute_metrics,
)
from quanterr.metrics.attainable import Attainable
from quanterr.metrics.sums import Sums, exact
from quanterr.report import NORM
from quanterr.report.gate_results import Verdict
from quanterr.report.reading import Extract, extract
from quanterr.report.same_original import difference
from quanterr.report.subjects import Item, Subject, Vocabulary, number, reasons_of_its_own
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import display

if TYPE_CHECKING:
    from quanterr.report.model import Report

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
NOT_JUDGED = "not judged: "  # begins the reason of a comparison whose rules or baseline were wrong: others may judge it
FILES = {"importance": "importance matrix", "sensitivity": "sensitivity"}
NOT_QUANTIZED = ("identical", "swapped_sides")  # findings: rules mean nothing for what they are found of


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


VOCABULARY = Vocabulary(
    "report",
    dict.fromkeys(LAYER_METRICS, "layer"),
    REPORT_METRICS,
    "snr_db >= 30",
    "delta(snr_db) >= -0.5",
    MODEL_METRICS,
)

EQUAL = Attainable(n=4, x_sq=1.0, e_sq=0.0, best_sq=0.0, stored_sq=0.0)


def _of_equal_tensors(rows: tuple[Metric, ...]) -> dict[str, float]:
    """What a metric is where both sides are the same: 0, 1 or infinite; what depends on the tensor is left out."""
    first, second = (
        _numbers(
            rows, Measurement(_equal(a), attainable=EQUAL, alpha=a, layers=LayerValues([0.0], [0.0], [inf], [], [0.0]))
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


def _numbers(rows: tuple[Metric, ...], measured: Measurement) -> dict[str, float]:
    values, nonfinite = compute_metrics(rows, measured)
    found = {name: number(values, nonfinite, name) for name in _names(rows)}
    percentiles = {name: 0.0 for name, row in _names(rows).items() if row.kind in PERCENTILE_KEYS}  # every |e| is 0
    return {name: value for name, value in found.items() if value is not None} | percentiles


EQUAL_LAYER = _of_equal_tensors(METRICS)
EQUAL_MODEL = _of_equal_tensors(AGGREGATES)


def _perfect(equal: Mapping[str, float], report: Extract) -> Mapping[str, float]:
    """Those that the report has: nothing is weighted without an importance matrix."""
    settings = report["settings"]
    return {name: value for name, value in equal.items() if name not in NEEDS or settings.get(NEEDS[name])}


class ReportValues(Subject):
    """All that rules see of one report: of its tensors those that were not compared as well."""

    def __init__(self, report: Extract) -> None:
        """Take them from an extract."""
        items = _items(report)
        troubles = [f["message"] for f in report["findings"] if f["severity"] == "error" and f["layer"] is None]
        troubles += [f"{display(item.name)}: {item.trouble}" for item in items if item.trouble]
        warnings = [found for found in report["findings"] if found["severity"] == "warning"]
        super().__init__(
            VOCABULARY,
            items,
            trouble=next(iter(troubles), None),
            unreliable=_unreliable(report, troubles),
            unquantized=[found["message"] for found in warnings if found["code"] in NOT_QUANTIZED],
            complete=report["complete"],
            patterns=report["selection"]["patterns"],
        )
        self.report = report

    def items_with(self, metric: str) -> list[Item]:
        """All of them: each has every metric."""
        return self.items

    def of_model(self, metric: str) -> float | None:
        """A value of the aggregate; where no layer differs the perfect one, where there is none at all None."""
        if not self.report["layers"]:
            return _perfect(EQUAL_MODEL, self.report).get(metric) if self.report["lossless"] else None
        return number(self.report["aggregate"], self.report["aggregate"]["nonfinite"], metric)

    def of_whole(self, metric: str) -> float | None:
        """A value of the report itself."""
        return REPORT_METRICS[metric].of(self.report)

    def check_usable(self) -> None:
        """Refuse a baseline that cannot be relied on as a whole; one whose layers alone cannot stays.

        Raises:
            UsageError: it is incomplete or inconclusive, and not for the sake of some layers.
        """
        whole = [f for f in self.report["findings"] if f["severity"] == "error" and f["layer"] is None]
        if not self.complete:
            why = "its run was interrupted"
        elif self.unreliable and (whole or not any(item.trouble for item in self.items)):
            why = f"it is inconclusive: {display((whole[0]['message'] if whole else self.unreliable[0]), 2000)}"
        else:
            return
        raise UsageError(f"the baseline is not reliable: {why}; compare again, or give another report")

    def check_baseline(self, baseline: Self, metrics: Collection[str]) -> None:
        """Refuse a baseline that says nothing about these metrics of this report.

        Raises:
            UsageError: as for :meth:`check_usable`, or it is of another original, or a metric is weighted otherwise.
        """
        baseline.check_usable()
        why = difference(baseline.report, self.report)
        for setting in sorted({NEEDS[metric] for metric in metrics if metric in NEEDS}) if why is None else ():
            why = why or _other_file(setting, baseline.report, self.report)
        if why:
            raise UsageError(f"the baseline does not apply to this report: {why}")


def subjects(report: "Report", metrics: Collection[str]) -> list[Subject]:
    """The report itself, with these metrics."""
    of_layers = {NORM} | (LAYER_METRICS.keys() & metrics)
    return [ReportValues(extract(report, of_layers, MODEL_METRICS.keys() & metrics))]


def with_verdicts(report: "Report", judged: Sequence[Subject], verdicts: Sequence[Verdict]) -> "Report":
    """The same, judged."""
    return report.model_copy(update=verdicts[0]._asdict() | {"gated": bool(verdicts[0].gates)})


def _other_file(setting: str, old: Extract, new: Extract) -> str | None:
    """Known by the file's name alone: its folder may be another on another machine."""
    paths = (report["settings"].get(setting) for report in (old, new))
    before, after = (display(path.replace("\\", "/").rpartition("/")[2]) if path else "none" for path in paths)
    return f"it has another {FILES[setting]}: {before} there, {after} here" if before != after else None


def _items(report: Extract) -> list[Item]:
    trouble = {row["layer_name"]: f"not compared: {row['reason']}" for row in reversed(report["not_compared"])}
    for found in reversed(report["findings"]):
        if found["severity"] == "error" and found["layer"] is not None:
            trouble[found["layer"]] = found["message"].removeprefix(f"{display(found['layer'])}: ")
    perfect = _perfect(EQUAL_LAYER, report)
    items = [
        Item(row["layer_name"], kind, row, trouble.pop(row["layer_name"], None) or _nonfinite(row), perfect)
        for kind in ("layers", "other_changes", "lossless")
        for row in report[kind]
    ]
    return items + [Item(name, "not_compared", {}, why, perfect) for name, why in trouble.items()]


def _nonfinite(row: JsonFields) -> str | None:
    return None if row.get("finite", True) else "has elements that are NaN or infinite"


def _unreliable(report: Extract, troubles: list[str]) -> list[str]:
    """Why the verdict can only be inconclusive; not taken from the stored verdict alone, which may have been edited."""
    if report["verdict"] == "inconclusive":
        of_gates = {gate["message"] for gate in report["gates"]}
        words = reasons_of_its_own(report["verdict"], report["reasons"], of_gates)
        of_result = [reason for reason in words if not reason.startswith(NOT_JUDGED)]
        if of_result or troubles or not words:
            return of_result or troubles or ["the report says inconclusive without a reason"]
    if not report["complete"]:
        return ["the run was interrupted"]
    if troubles:
        return troubles
    return [] if report["layers"] or report["lossless"] or report["other_changes"] else ["nothing was compared"]
