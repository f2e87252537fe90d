"""The metrics of a report, one row each, computed from sums. This module needs no torch.

To add a metric, write a function of :class:`Measurement` and a row of METRICS; for groups and the whole model, also a
row of AGGREGATES. The report's schema, `quanterr schema` and the README's table follow from the rows.

Tools define some metrics differently: the formula of each row is the definition used here. x is the original, y the
quantized weight, e = y - x, and n the number of elements that are finite on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, fsum, inf, isfinite, isnan, log10, nan, sqrt
from typing import NamedTuple

from quanterr.metrics.attainable import Attainable
from quanterr.metrics.sums import RowSums, Sums, as_float, ratio

METRICS_VERSION = 1  # raised when the meaning of an existing metric changes

OUTLIER = 0.01  # an element with a larger |e| is an outlier, by default
RELATIVE_OUTLIER = 0.01  # an element with a larger |e| / |x| is a relative outlier

NONFINITE = {"nan": nan, "+inf": inf, "-inf": -inf}  # names in a report's ``nonfinite`` field → values

NO_SPREAD = 1e-12  # a variance below this share of the energy is rounding: the tensor is constant

LEAST, MOST = 2.0**-126, 255 * 2.0**120  # bfloat16 has eight significant bits in this range

PERCENTILES = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}
LAYER_PERCENTILES = {key: q for key, q in PERCENTILES.items() if key != "p99_9"}


PREDICTED = ("predicted_kld", "predicted_output_error")  # costs that a sensitivity predicts


@dataclass(slots=True)
class Measurement:
    """The measured data of a compared weight, or of a group of weights."""

    sums: Sums
    stored_bits: int = 0  # stored bits of all parts of the quantized side
    original_bits: int = 0
    uniform_bits: int | None = None  # bits of a uniform integer code; None for other codes
    counts_saturated: bool = False  # whether the format has codes that can saturate
    attainable: Attainable | None = None  # error of the nearest codes on a sample
    alpha: float | None = None  # sensitivity: the predicted cost of the weight is alpha · nmse
    predicts: str = "predicted_kld"  # the cost of PREDICTED that alpha predicts
    layers: LayerValues | None = None  # per-layer values of a group; None for a single weight


@dataclass(slots=True)
class LayerValues:
    """Values of single layers, one per layer, for statistics over layers."""

    mean_absolute_error: list[float] = field(default_factory=list)
    relative_error: list[float] = field(default_factory=list)
    snr_db: list[float] = field(default_factory=list)
    excess_db: list[float] = field(default_factory=list)  # only layers with an excess
    # Predicted costs by metric, only for layers with a sensitivity.
    predicted: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PREDICTED})

    def add(self, mean_absolute_error: float | None, relative_error: float | None, snr_db: float | None) -> None:
        """Add one layer. An undefined value (None) becomes NaN and makes statistics over layers undefined."""
        self.mean_absolute_error.append(nan if mean_absolute_error is None else mean_absolute_error)
        self.relative_error.append(nan if relative_error is None else relative_error)
        self.snr_db.append(nan if snr_db is None else snr_db)

    def sort(self) -> None:
        """Sort the values of each kind, as statistics do: groups that take them over are then sorted quickly."""
        single = self.mean_absolute_error, self.relative_error, self.snr_db, self.excess_db
        for values in (*single, *self.predicted.values()):
            values.sort()

    def extend(self, other: LayerValues) -> None:
        """Add all layers of another group."""
        self.mean_absolute_error += other.mean_absolute_error
        self.relative_error += other.relative_error
        self.snr_db += other.snr_db
        self.excess_db += other.excess_db
        for name, values in other.predicted.items():
            self.predicted[name] += values


Fields = dict[str, float | int | None]  # the value of a metric that has several named numbers
Value = float | int | Fields | list[Fields] | None


class Metric(NamedTuple):
    """The declaration of one metric: name, unit, direction, formula and the function that computes it."""

    name: str
    unit: str
    better: str  # "lower", "higher", or "" if neither
    formula: str
    of: Callable[[Measurement], Value]
    kind: str = "number"  # "count", "percentiles", "rows", "experts"
    later: bool = False  # whether it was added after report schema 1.1


@lru_cache(maxsize=1 << 12)
def share(value: float) -> float:
    """Return an equal number that layers share, to save memory: for numbers of which small weights have few values.

    ``value`` must not be -0.0, which equals 0.0.
    """
    return value


def decibels(power_ratio: float) -> float:
    """Return 10·log10 of a ratio of powers; minus infinity for 0."""
    return (
        10 * log10(power_ratio) if power_ratio > 0 and isfinite(power_ratio) else power_ratio if power_ratio else -inf
    )


def theoretical_sqnr(bits: float) -> float:
    """Return the SNR in dB of a full-scale sine in uniform codes of ``bits`` bits: 6.02·bits + 1.76.

    This is not a target for weights: they are not a sine, and with a shared scale they are 4 to 12 dB lower.
    """
    return share(6.02 * bits + 1.76)


def mean_absolute_error(m: Measurement) -> float:
    return ratio(as_float(m.sums.e_abs), m.sums.n)


def relative_error(m: Measurement) -> float:
    return ratio(m.sums.e_abs, m.sums.x_abs)


def std_absolute_error(m: Measurement) -> float:
    n, s = m.sums.n, m.sums
    if not n:
        return nan
    mean = as_float(s.e_abs) / n
    return sqrt(max(as_float(s.e_sq) / n - mean * mean, 0.0))


def max_relative_error(m: Measurement) -> float:
    return share(m.sums.relative_max) if m.sums.x_nonzero else nan


def mean_squared_error(m: Measurement) -> float:
    return ratio(as_float(m.sums.e_sq), m.sums.n)


def snr_db(m: Measurement) -> float:
    """Return Σx² / Σe² in dB; NaN if any element is not finite, as no ratio of energies is meaningful then."""
    if m.sums.nonfinite:
        return nan
    return decibels(ratio(m.sums.x_sq, m.sums.e_sq))


def weighted_nmse(m: Measurement) -> float | None:
    """Return Σ a·e² / Σ a·x²; None without an importance matrix."""
    return ratio(m.sums.weighted_e_sq, m.sums.weighted_x_sq) if m.sums.weighted_x_sq else None


def weighted_error_norm(m: Measurement) -> float | None:
    """Return √(Σ a·e²); None without an importance matrix."""
    return sqrt(as_float(m.sums.weighted_e_sq)) if m.sums.weighted_x_sq else None


def cosine_similarity(m: Measurement) -> float:
    s = m.sums
    norms = sqrt(as_float(s.x_sq)) * sqrt(as_float(s.y_sq))
    return _correlation(as_float(s.xy), norms)


def pearson_correlation(m: Measurement) -> float:
    s = m.sums
    if not s.n:
        return nan
    x, y = as_float(s.x), as_float(s.y)
    covariance = as_float(s.xy) - x * y / s.n
    variance_x = as_float(s.x_sq) - x * x / s.n
    variance_y = as_float(s.y_sq) - y * y / s.n
    if variance_x <= NO_SPREAD * as_float(s.x_sq) or variance_y <= NO_SPREAD * as_float(s.y_sq):
        return nan
    return _correlation(covariance, sqrt(variance_x) * sqrt(variance_y))


def _correlation(product: float, norms: float) -> float:
    """Return product / norms, clamped to [-1, 1] as rounding may exceed it; NaN if undefined."""
    value = ratio(product, norms)
    return value if isnan(value) else min(max(value, -1.0), 1.0)


def original_norm(m: Measurement) -> float:
    return sqrt(as_float(m.sums.x_sq))


def percentiles(m: Measurement) -> Fields:
    n, histogram = m.sums.n, m.sums.histogram
    if not n or histogram is None:
        return dict.fromkeys(PERCENTILES)
    values = histogram.values_at(find_ranks(n))
    if values[0] >= LEAST and values[-1] < MOST:
        return dict(zip(PERCENTILES, values, strict=True))
    exact = [value if _is_known(value, m.sums) else None for value in values]  # rare: values out of range, or zero
    return dict(zip(PERCENTILES, exact, strict=True))


@lru_cache
def find_ranks(n: int) -> tuple[int, ...]:
    """Return the rank, from 1, of each percentile of ``n`` elements."""
    return tuple(max(ceil(q * n), 1) for q in PERCENTILES.values())


def _is_known(value: float, sums: Sums) -> bool:
    """Return whether a histogram value is accurate to 0.4 %: the first bins are coarse, and the last is open."""
    if value < LEAST:
        return value == 0 and sums.e_min == 0
    return value < MOST or sums.e_max <= MOST


def worst_row_values(m: Measurement) -> list[Fields]:
    return _list_values("row", m.sums.worst_rows)


def expert_values(m: Measurement) -> list[Fields]:
    return _list_values("expert", sorted(m.sums.matrices.items()))


def _list_values(what: str, sums: Iterable[tuple[int, RowSums]]) -> list[Fields]:
    return [
        {
            what: number,
            "snr_db": finite(decibels(ratio(own.x_sq, own.e_sq))),
            "max_absolute_error": share(own.e_max),
        }
        for number, own in sums
    ]


def percent(part: int, n: int) -> float:
    return share(100 * ratio(part, n)) if part or not n else 0.0


def effective_bits(m: Measurement) -> float:
    return (snr_db(m) - 1.76) / 6.02


def finite(value: float) -> float | None:
    """Return the value as a report stores it: None if it is not finite."""
    return value if isfinite(value) else None


def _predict(measured: Measurement, name: str) -> float | None:
    """Return the cost that a sensitivity predicts for a weight; None unless this cost is the metric ``name``."""
    if measured.alpha is None or measured.predicts != name:
        return None
    return measured.alpha * ratio(measured.sums.e_sq, measured.sums.x_sq)


def _add_predicted(measured: Measurement, name: str) -> float | None:
    """Return the sum of a predicted cost over the layers of a group; None if no layer has a predicted cost."""
    values = measured.layers.predicted[name] if measured.layers else []
    return fsum(values) if values else None


METRICS: tuple[Metric, ...] = (
    Metric("mean_absolute_error", "", "lower", "Σ|e| / n", mean_absolute_error),
    Metric("relative_error", "", "lower", "Σ|e| / Σ|x|, not the mean of |e|/|x|", relative_error),
    Metric("max_absolute_error", "", "lower", "max |e|", lambda m: share(m.sums.e_max) if m.sums.n else nan),
    Metric("min_absolute_error", "", "lower", "min |e|", lambda m: share(m.sums.e_min) if m.sums.n else nan),
    Metric("std_absolute_error", "", "lower", "√(Σe²/n - (Σ|e|/n)²), population", std_absolute_error),
    Metric("mean_squared_error", "", "lower", "Σe² / n", mean_squared_error),
    Metric("root_mean_squared_error", "", "lower", "√(Σe² / n)", lambda m: sqrt(mean_squared_error(m))),
    Metric("mean_error", "", "", "Σe / n (bias)", lambda m: ratio(as_float(m.sums.e), m.sums.n)),
    Metric("max_relative_error", "", "lower", "max |e|/|x| over x ≠ 0", max_relative_error),
    Metric(
        "mean_relative_error",
        "",
        "lower",
        "Σ(|e|/|x|) / count, over x ≠ 0; dominated by weights near zero",
        lambda m: ratio(as_float(m.sums.relative), m.sums.x_nonzero),
    ),
    Metric(
        "zero_reference_elements",
        "",
        "lower",
        "number of elements with x = 0 and y ≠ 0",
        lambda m: m.sums.zero_reference,
        "count",
    ),
    Metric("snr_db", "dB", "higher", "10·log10(Σx² / Σe²), the same as 20·log10(‖x‖ / ‖e‖)", snr_db),
    Metric("nmse", "", "lower", "Σe² / Σx²", lambda m: ratio(m.sums.e_sq, m.sums.x_sq)),
    Metric(
        "weighted_nmse",
        "",
        "lower",
        "Σ a·e² / Σ a·x², a the mean square of the column's activation; null without an importance matrix",
        weighted_nmse,
    ),
    Metric(
        "weighted_error_norm",
        "",
        "lower",
        "√(Σ a·e²): the error of the output if inputs are uncorrelated; null without an importance matrix",
        weighted_error_norm,
    ),
    Metric(
        "weighted_snr_db",
        "dB",
        "higher",
        "-10·log10(weighted_nmse)",
        lambda m: decibels(ratio(m.sums.weighted_x_sq, m.sums.weighted_e_sq)) if m.sums.weighted_x_sq else None,
    ),
    Metric(
        "relative_l2_error",
        "",
        "lower",
        "√(Σe² / Σx²) = ‖e‖ / ‖x‖",
        lambda m: sqrt(ratio(m.sums.e_sq, m.sums.x_sq)),
    ),
    Metric("cosine_similarity", "", "higher", "Σxy / (‖x‖·‖y‖), in [-1, 1]", cosine_similarity),
    Metric(
        "pearson_correlation",
        "",
        "higher",
        "cosine of x - mean(x) and y - mean(y), in [-1, 1]",
        pearson_correlation,
    ),
    Metric("original_norm", "", "", "‖x‖ = √Σx²", original_norm),
    Metric("quantized_norm", "", "", "‖y‖ = √Σy²", lambda m: sqrt(as_float(m.sums.y_sq))),
    Metric("error_norm", "", "lower", "‖e‖ = √Σe²", lambda m: sqrt(as_float(m.sums.e_sq))),
    Metric(
        "absolute_error_percentiles",
        "",
        "lower",
        "|e| that this share of the elements does not exceed, within 0.5 %",
        percentiles,
        "percentiles",
    ),
    Metric(
        "outlier_pct",
        "%",
        "lower",
        "share of elements with |e| above settings.outlier_threshold",
        lambda m: percent(m.sums.outliers, m.sums.n),
    ),
    Metric(
        "relative_outlier_pct",
        "%",
        "lower",
        "share of elements with |e| > 1 % of |x|",
        lambda m: percent(m.sums.relative_outliers, m.sums.n),
    ),
    Metric("worst_rows", "", "", "the output rows with the lowest SNR, the worst first", worst_row_values, "rows"),
    Metric(
        "experts", "", "", "the matrices of a stack, one by one; empty for a single matrix", expert_values, "experts"
    ),
    Metric(
        "zeroed_pct",
        "%",
        "lower",
        "share of elements with x ≠ 0 and y = 0",
        lambda m: percent(m.sums.zeroed, m.sums.n),
    ),
    Metric(
        "saturated_pct",
        "%",
        "lower",
        "share of codes at the end of their range (±448, ±57344, ±127, -128); null for formats without a scale",
        lambda m: percent(m.sums.saturated, m.sums.n) if m.counts_saturated else None,
    ),
    Metric(
        "bits_per_weight",
        "bit",
        "lower",
        "stored bits of all parts / elements",
        lambda m: share(ratio(m.stored_bits, m.sums.elements)),
    ),
    Metric(
        "theoretical_sqnr_db",
        "dB",
        "",
        "6.02·bits + 1.76: a full-scale sine in uniform integer codes; null for other codes",
        lambda m: theoretical_sqnr(m.uniform_bits) if m.uniform_bits else None,
    ),
    Metric(
        "attainable_snr_db",
        "dB",
        "higher",
        "10·log10(Σx² / Σe*²) over a sample of rows, e* the error of the nearest codes with the stored scales; null "
        "if the nearest codes are unknown",
        lambda m: m.attainable.snr_db if m.attainable else None,
        later=True,
    ),
    Metric(
        "excess_db",
        "dB",
        "lower",
        "attainable_snr_db - the actual SNR of the same rows; 0 for plain rounding",
        lambda m: m.attainable.excess_db if m.attainable else None,
        later=True,
    ),
    Metric(
        "format_snr_db",
        "dB",
        "higher",
        "attainable_snr_db + scale_loss_db: the SNR of the nearest codes with good scales, which the format can "
        "reach; null if scales or groups are unknown",
        lambda m: m.attainable.format_snr_db if m.attainable else None,
        later=True,
    ),
    Metric(
        "scale_loss_db",
        "dB",
        "lower",
        "gain in SNR of good scales, made from the largest values of sampled groups, over the stored scales, with the "
        "nearest codes of each; 0 if the stored scales are better",
        lambda m: m.attainable.scale_loss_db if m.attainable else None,
        later=True,
    ),
    Metric(
        "avoidable_db",
        "dB",
        "lower",
        "scale_loss_db + excess_db: format_snr_db - the actual SNR of the sample",
        lambda m: m.attainable.avoidable_db if m.attainable else None,
        later=True,
    ),
    Metric(
        "off_code_pct",
        "%",
        "lower",
        "share of sampled elements, not clipped, whose code is 2 or more steps from the nearest one",
        lambda m: percent(m.attainable.off, m.attainable.n - m.attainable.clipped) if m.attainable else None,
        later=True,
    ),
    Metric(
        "clipped_pct",
        "%",
        "lower",
        "share of sampled elements beyond the range of their scale by more than half a step",
        lambda m: percent(m.attainable.clipped, m.attainable.n) if m.attainable else None,
        later=True,
    ),
    Metric(
        "predicted_kld",
        "nat",
        "lower",
        "alpha · nmse: the KLD predicted for the error of this weight alone; null without a sensitivity for it",
        lambda m: _predict(m, "predicted_kld"),
        later=True,
    ),
    Metric(
        "predicted_output_error",
        "",
        "lower",
        "alpha · nmse: the error of a denoiser's output, ‖y - x‖² / ‖x‖², predicted for the error of this weight "
        "alone; null without a sensitivity of recorded calls for it",
        lambda m: _predict(m, "predicted_output_error"),
        later=True,
    ),
    Metric("effective_bits", "bit", "higher", "(snr_db - 1.76) / 6.02", effective_bits),
)


def aggregate_layers(
    pick: Callable[[LayerValues], list[float]], statistic: Callable[[list[float]], float]
) -> Callable[[Measurement], Value]:
    """Make a metric function that applies a statistic to per-layer values; NaN if any value is NaN."""

    def of(m: Measurement) -> float:
        values = pick(m.layers) if m.layers else []
        return statistic(values) if values and not any(map(isnan, values)) else nan

    return of


def median(values: list[float]) -> float:
    return quantile(sorted(values), 0.5)


def mean(values: list[float]) -> float:
    return sum(sorted(values)) / len(values)  # sorted, so that the order of layers does not change the rounding


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the q-quantile of sorted values by linear interpolation, numpy's default."""
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def relative_error_percentiles(m: Measurement) -> Fields:
    values = m.layers.relative_error if m.layers else []
    ordered = [] if any(map(isnan, values)) else sorted(values)
    return {key: quantile(ordered, q) if ordered else None for key, q in LAYER_PERCENTILES.items()}


def _find_row(name: str) -> Metric:
    return next(metric for metric in METRICS if metric.name == name)


AGGREGATES: tuple[Metric, ...] = (
    _find_row("mean_absolute_error")._replace(formula="Σ|e| / n over all elements"),
    Metric(
        "median_absolute_error",
        "",
        "lower",
        "median over layers of their mean_absolute_error",
        aggregate_layers(lambda v: v.mean_absolute_error, median),
    ),
    _find_row("max_absolute_error")._replace(
        formula="max |e| over all elements: the true maximum, not the maximum of layer means"
    ),
    _find_row("mean_squared_error"),
    _find_row("root_mean_squared_error"),
    Metric(
        "mean_relative_error",
        "",
        "lower",
        "Σ|e| / Σ|x| over all elements, not the mean over layers",
        relative_error,
    ),
    Metric(
        "median_relative_error",
        "",
        "lower",
        "median over layers of their relative_error",
        aggregate_layers(lambda v: v.relative_error, median),
    ),
    _find_row("max_relative_error")._replace(formula="max |e|/|x| over all elements with x ≠ 0"),
    Metric(
        "relative_error_percentiles",
        "",
        "lower",
        "percentiles over layers of their relative_error, linear between the nearest",
        relative_error_percentiles,
        "layer_percentiles",
    ),
    Metric(
        "overall_snr_db",
        "dB",
        "higher",
        "10·log10(ΣΣx² / ΣΣe²) over the layers that differ: energies are pooled, lossless tensors left out",
        snr_db,
    ),
    Metric(
        "mean_layer_snr_db",
        "dB",
        "higher",
        "mean over layers of their snr_db",
        aggregate_layers(lambda v: v.snr_db, mean),
    ),
    Metric("worst_layer_snr_db", "dB", "higher", "lowest snr_db of a layer", aggregate_layers(lambda v: v.snr_db, min)),
    _find_row("attainable_snr_db")._replace(
        formula="energies pooled over the layers that have one, the error of each reduced by its excess_db"
    ),
    _find_row("excess_db")._replace(formula="attainable_snr_db - the SNR of the same layers"),
    _find_row("format_snr_db")._replace(formula="as attainable_snr_db, each error also reduced by its scale_loss_db"),
    _find_row("scale_loss_db")._replace(formula="format_snr_db - attainable_snr_db"),
    _find_row("avoidable_db")._replace(formula="scale_loss_db + excess_db"),
    Metric(
        "worst_layer_excess_db",
        "dB",
        "lower",
        "highest excess_db of a layer; null if none has one",
        lambda m: max(m.layers.excess_db) if m.layers and m.layers.excess_db else None,
        later=True,
    ),
    _find_row("nmse"),
    _find_row("weighted_nmse"),
    _find_row("weighted_snr_db"),
    _find_row("cosine_similarity"),
    _find_row("absolute_error_percentiles")._replace(formula="as for a layer, over all elements"),
    _find_row("predicted_kld")._replace(
        formula="Σ over the layers with a sensitivity; too low beyond about 0.1; null if none has one",
        of=lambda m: _add_predicted(m, "predicted_kld"),
    ),
    _find_row("predicted_output_error")._replace(
        formula="Σ over the layers with a sensitivity of recorded calls; null if none has one",
        of=lambda m: _add_predicted(m, "predicted_output_error"),
    ),
    _find_row("bits_per_weight")._replace(formula="stored bits of all parts / elements, over the layers that differ"),
    Metric(
        "compression_ratio",
        "",
        "higher",
        "stored bits of the original / stored bits of the quantized, over the layers that differ",
        lambda m: ratio(m.original_bits, m.stored_bits),
    ),
)


def compute_metrics(rows: Sequence[Metric], measured: Measurement) -> tuple[dict[str, Value], dict[str, str]]:
    """Compute the metrics ``rows``; return values by name, and ``+inf``, ``-inf`` or ``nan`` for each null one."""
    values = {row.name: row.of(measured) for row in rows}
    nonfinite = {
        name: "nan" if value != value else "+inf" if value > 0 else "-inf"
        for name, value in values.items()
        if isinstance(value, float) and not isfinite(value)
    }
    return values | dict.fromkeys(nonfinite), nonfinite
