"""Subjects and metrics of a report for rules, and the reasons why rules cannot judge it.

Rules use the names of the fields of Layer and Aggregate.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Self

from quanterr.documents.comparison.aggregate import Aggregate
from quanterr.documents.comparison.layer import Layer
from quanterr.documents.comparison.model import Report
from quanterr.documents.comparison.origin import CLASSES, OriginClass, compute_share
from quanterr.documents.comparison.same_original import (
    OTHER_ORIGINAL,
    find_other_layers,
    find_other_original,
    find_other_settings,
)
from quanterr.documents.gate_results import Reason, list_damage, list_reasons, list_waived
from quanterr.documents.subjects import Item, Subject, Vocabulary, list_own_reasons, read_number
from quanterr.errors import UsageError
from quanterr.metrics.scores import list_numbers
from quanterr.util.text import display

LAYER_METRICS, MODEL_METRICS = list_numbers(Layer), list_numbers(Aggregate)
NEEDS = {name: metric.needs for name, metric in LAYER_METRICS.items() if metric.needs}
FILES = {"importance": "importance matrix", "sensitivity": "sensitivity"}
# Findings about a layer that explain its error.
EXPLAINING = (
    *("excess_error", "excess_rows", "excess_columns", "excess_blocks", "scale_loss", "clipped", "saturated"),
    *("scale_factor", "transposed", "permuted", "zero_points", "swapped_weight", "biased_error", "bad_rows"),
    *("implausible_error", "below_usual", "group_outlier"),
)
NOT_QUANTIZED = ("identical", "swapped_sides")  # findings that make rules meaningless


class ReportMetric(NamedTuple):
    """A metric of the report itself."""

    summary: str
    of: Callable[[Report], float | None]


def _make_count(key: str) -> Callable[[Report], float]:
    return lambda report: float(len(getattr(report, key)))


def _make_finding_count(severity: str) -> Callable[[Report], float]:
    return lambda report: float(sum(finding.severity == severity for finding in report.findings))


def _make_share(origin_class: OriginClass) -> Callable[[Report], float | None]:
    return lambda report: compute_share(report.origin, origin_class)


SHARES: Mapping[OriginClass, str] = {origin_class: f"share({origin_class})" for origin_class in CLASSES}
OF_CLASS = "share of the bytes that tensors of class `{}` have, 0 to 1; needs `--every-code`"
REPORT_METRICS: dict[str, ReportMetric] = {
    "original_compared_fraction": ReportMetric(
        "share of the original's selected bytes that were compared, 0 to 1",
        lambda report: report.coverage.original_compared_fraction,
    ),
    "quantized_compared_fraction": ReportMetric(
        "share of the quantized side's selected bytes that were compared, 0 to 1",
        lambda report: report.coverage.quantized_compared_fraction,
    ),
    "layers": ReportMetric("number of weights that differ", _make_count("layers")),
    "lossless": ReportMetric("number of tensors that are identical on both sides", _make_count("lossless")),
    "other_changes": ReportMetric(
        "number of norms, biases and other 1-D tensors that differ", _make_count("other_changes")
    ),
    "not_compared": ReportMetric("number of selected tensors that were not compared", _make_count("not_compared")),
    **{
        SHARES[origin_class]: ReportMetric(OF_CLASS.format(origin_class), _make_share(origin_class))
        for origin_class in CLASSES
    },
    "findings.error": ReportMetric("number of findings of severity error", _make_finding_count("error")),
    "findings.warning": ReportMetric("number of findings of severity warning", _make_finding_count("warning")),
    "findings.info": ReportMetric("number of findings of severity info", _make_finding_count("info")),
}


VOCABULARY = Vocabulary(
    "report",
    dict.fromkeys(LAYER_METRICS, "layer"),
    REPORT_METRICS,
    "snr_db >= 30",
    "delta(snr_db) >= -0.5",
    MODEL_METRICS,
    loads=True,
)

# The metrics of two equal tensors.
EQUAL_LAYER = {name: metric.equal for name, metric in LAYER_METRICS.items() if metric.equal is not None}
EQUAL_MODEL = {name: metric.equal for name, metric in MODEL_METRICS.items() if metric.equal is not None}


def _pick_perfect(equal: Mapping[str, float], report: Report) -> Mapping[str, float]:
    """Return only the metrics that the report has; weighted ones need its importance matrix or sensitivity."""
    has = {name: getattr(report.settings, setting) for name, setting in NEEDS.items()}
    return {name: value for name, value in equal.items() if has.get(name, True)}


class ReportValues(Subject):
    """The subject of a report; its items include tensors that were not compared."""

    def __init__(self, report: Report) -> None:
        """Create the subject from a report whose layers have the metrics of the rules."""
        items = _make_items(report)
        damaged = {finding.layer for finding in report.findings if finding.severity == "error"}
        troubles = [Reason(f.message, "finding") for f in report.findings if f.severity == "error" and f.layer is None]
        troubles += [
            Reason(f"{display(item.name)}: {item.trouble}", "finding" if item.name in damaged else "result")
            for item in items
            if item.trouble
        ]
        warnings = [finding for finding in report.findings if finding.severity == "warning"]
        super().__init__(
            VOCABULARY,
            items,
            {name: metric.of(report) for name, metric in REPORT_METRICS.items()},
            trouble=next((reason.text for reason in troubles), None),
            unreliable=_find_unreliable(report, troubles),
            unquantized=[Reason(finding.message, "finding") for finding in warnings if finding.code in NOT_QUANTIZED],
            complete=report.complete,
            patterns=report.selection.patterns,
            damage=list_damage(report),
            loading=report.loading,
            waived=list_waived(report),
        )
        self.report = report
        self._warnings = warnings

    def find_cause(self, metric: str, item: str | None) -> str | None:
        """Return the first warning that explains an error of a layer; for the whole, of any layer."""
        if metric == "findings.warning" and self._warnings:
            return self._warnings[0].message
        if metric not in {**EQUAL_LAYER, **EQUAL_MODEL}:  # such as a size, which no fault explains
            return None
        known = [finding for finding in self._warnings if finding.code in EXPLAINING and item in (None, finding.layer)]
        return (known[0].message if item is None else known[0].statement) if known else None

    def list_items(self, metric: str) -> list[Item]:
        """Return all items: each has every metric."""
        return self.items

    def get_model_metric(self, metric: str) -> float | None:
        """Return an aggregate value; the perfect value if no layer differs, None without layers."""
        if not self.report.layers:
            return _pick_perfect(EQUAL_MODEL, self.report).get(metric) if self.report.lossless else None
        return read_number(self.report.aggregate, self.report.aggregate.nonfinite, metric)

    def check_usable(self) -> None:
        """Check that the report as a whole can serve as a baseline; damage to single layers is accepted.

        Raises:
            UsageError: the report is incomplete, or inconclusive for a reason beyond single layers.
        """
        whole = [f for f in self.report.findings if f.severity == "error" and f.layer is None]
        if not self.complete:
            why = "its run was interrupted"
        elif self.unreliable and (whole or not any(item.trouble for item in self.items)):
            why = f"it is inconclusive: {display((whole[0].message if whole else self.unreliable[0].text), 2000)}"
        else:
            return
        raise UsageError(f"the baseline is not reliable: {why}; compare again, or give another report")

    def check_baseline(
        self, baseline: Self, metrics: Collection[str], any_original: bool = False, among: Sequence[str] = ()
    ) -> str | None:
        """Check that a baseline is comparable in these metrics; return how its original differs, None if it does not.

        Raises:
            UsageError: the baseline is not reliable, the weighting of a metric differs, or the original differs; with
                ``any_original``, only the names and sizes of the original's layers must be equal.
        """
        baseline.check_usable()
        other = find_other_original(baseline.report, self.report)
        is_of_all = bool(among) and not baseline.patterns and list(among) == list(self.patterns)
        why = find_other_settings(baseline.report, self.report, any_selection=is_of_all)
        if other and any_original:
            why = why or find_other_layers(baseline.report, self.report)
        elif other:
            why = f"{OTHER_ORIGINAL}: {other}; --baseline-original any compares with it nevertheless"
        for setting in sorted({NEEDS[metric] for metric in metrics if metric in NEEDS}) if why is None else ():
            why = why or _find_other_file(setting, baseline.report, self.report)
        if why:
            raise UsageError(f"the baseline does not apply to this report: {why}")
        return other


def list_subjects(report: Report) -> list[Subject]:
    """Return the report as the only subject."""
    return [ReportValues(report)]


def _find_other_file(setting: str, old: Report, new: Report) -> str | None:
    """Return how a setting's file differs, judged by its name only: folders may differ between machines."""
    paths = (getattr(report.settings, setting) for report in (old, new))
    before, after = (display(path.replace("\\", "/").rpartition("/")[2]) if path else "none" for path in paths)
    return (
        f"it has another {FILES[setting]}: {before} in the baseline, {after} in this report"
        if before != after
        else None
    )


def _make_items(report: Report) -> list[Item]:
    trouble = {row.layer_name: f"not compared: {row.reason}" for row in reversed(report.not_compared)}
    for finding in reversed(report.findings):
        if finding.severity == "error" and finding.layer is not None:
            trouble[finding.layer] = finding.statement
    perfect = _pick_perfect(EQUAL_LAYER, report)
    items = []
    for list_name in ("layers", "other_changes", "lossless"):
        for row in getattr(report, list_name):
            nonfinite = None if getattr(row, "finite", True) else "has elements that are NaN or infinite"
            items.append(Item(row.layer_name, list_name, row, trouble.pop(row.layer_name, None) or nonfinite, perfect))
    return items + [Item(name, "not_compared", None, why, perfect) for name, why in trouble.items()]


def _find_unreliable(report: Report, troubles: list[Reason]) -> list[Reason]:
    """Return why the verdict can only be inconclusive, by the content too, as the stored verdict may be edited."""
    if report.verdict == "inconclusive":
        if reasons := list_own_reasons(report) or troubles:
            return reasons
        if all(reason.by != "rules" for reason in list_reasons(report)):
            return [Reason("the report is inconclusive without a reason", "result")]
    if not report.complete:
        return [Reason("the run was interrupted", "result")]
    if troubles:
        return troubles
    anything = report.layers or report.lossless or report.other_changes
    return [] if anything else [Reason("nothing was compared", "result")]
