"""The formulas of a report's metrics, computed from sums. This module needs no torch.

``Layer`` and ``Aggregate`` (documents/comparison) declare which of them a report has, under which name. x is the
original, y the quantized weight, e = y - x, and n the number of elements that are finite on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, fsum, inf, isfinite, isnan, log10, nan, sqrt
from typing import TypeVar

from quanterr.metrics.attainable import Attainable
from quanterr.metrics.sums import RowSums, Sums, as_float, ratio

METRICS_VERSION = 1  # incremented when the meaning of an existing metric changes

OUTLIER = 0.01  # an element with a larger |e| is an outlier, by default
RELATIVE_OUTLIER = 0.01  # an element with a larger |e| / |x| is a relative outlier

NONFINITE = {"nan": nan, "+inf": inf, "-inf": -inf}  # names in a report's ``nonfinite`` field → values

NO_SPREAD = 1e-12  # with a variance below this share of the energy, the tensor is constant apart from rounding

MIN_EXACT, MAX_EXACT = 2.0**-126, 255 * 2.0**120  # bfloat16 has eight significant bits in this range

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
    """Values of single layers, from which statistics over layers are computed."""

    mean_absolute_error: list[float] = field(default_factory=list)
    relative_error: list[float] = field(default_factory=list)
    snr_db: list[float] = field(default_factory=list)
    excess_db: list[float] = field(default_factory=list)  # only layers with an excess
    predicted_kld: list[float] = field(default_factory=list)  # only layers with a sensitivity; so in the next list
    predicted_output_error: list[float] = field(default_factory=list)

    def add(self, values: Mapping[str, float | None]) -> None:
        """Add the values of a layer by name, except None. Undefined values are NaN, which makes the statistics NaN."""
        for name, value in values.items():
            if value is not None:
                getattr(self, name).append(value)

    def sort(self) -> None:
        """Sort the values of each kind."""
        for name in self.__slots__:
            getattr(self, name).sort()

    def extend(self, other: LayerValues) -> None:
        """Add all layers of another group."""
        for name in self.__slots__:
            getattr(self, name).extend(getattr(other, name))


Fields = dict[str, float | int | None]  # the value of a metric that has several named numbers
Value = float | int | Fields | list[Fields] | None
Named = TypeVar("Named")  # the class of a value that has several named numbers


@lru_cache(maxsize=1 << 12)
def share(value: float) -> float:
    """Return a cached equal number, which saves memory if many layers have the same few numbers, as small weights do.

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

    Weights do not reach it: their values are not distributed as those of a sine, and with a shared scale the SNR is 4
    to 12 dB lower.
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


def mean_error(m: Measurement) -> float:
    return ratio(as_float(m.sums.e), m.sums.n)


def mean_relative_error(m: Measurement) -> float:
    return ratio(as_float(m.sums.relative), m.sums.x_nonzero)


def zero_reference_elements(m: Measurement) -> int:
    return m.sums.zero_reference


def snr_db(m: Measurement) -> float:
    """Return Σx² / Σe² in dB; NaN if an element is not finite, as a ratio of energies is then meaningless."""
    if m.sums.nonfinite:
        return nan
    return decibels(ratio(m.sums.x_sq, m.sums.e_sq))


def nmse(m: Measurement) -> float:
    return ratio(m.sums.e_sq, m.sums.x_sq)


def weighted_nmse(m: Measurement) -> float | None:
    """Return Σ a·e² / Σ a·x²; None without an importance matrix."""
    return ratio(m.sums.weighted_e_sq, m.sums.weighted_x_sq) if m.sums.weighted_x_sq else None


def weighted_error_norm(m: Measurement) -> float | None:
    """Return √(Σ a·e²); None without an importance matrix."""
    return sqrt(as_float(m.sums.weighted_e_sq)) if m.sums.weighted_x_sq else None


def weighted_snr_db(m: Measurement) -> float | None:
    """Return the weighted NMSE in dB; None without an importance matrix."""
    return decibels(ratio(m.sums.weighted_x_sq, m.sums.weighted_e_sq)) if m.sums.weighted_x_sq else None


def relative_l2_error(m: Measurement) -> float:
    return sqrt(nmse(m))


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
    """Return product / norms, clamped to [-1, 1], as rounding may exceed these; NaN if undefined."""
    value = ratio(product, norms)
    return value if isnan(value) else min(max(value, -1.0), 1.0)


def original_norm(m: Measurement) -> float:
    return sqrt(as_float(m.sums.x_sq))


def quantized_norm(m: Measurement) -> float:
    return sqrt(as_float(m.sums.y_sq))


def error_norm(m: Measurement) -> float:
    return sqrt(as_float(m.sums.e_sq))


def percentiles(make: Callable[..., Named], m: Measurement) -> Named:
    """Return the result of ``make`` for the percentiles of |e| over elements, by name; unknown ones are None."""
    n, histogram = m.sums.n, m.sums.histogram
    if not n or histogram is None:
        return make(**dict.fromkeys(PERCENTILES))
    values = histogram.values_at(find_ranks(n))
    if values[0] >= MIN_EXACT and values[-1] < MAX_EXACT:
        return make(**dict(zip(PERCENTILES, values, strict=True)))
    exact = [
        value if _is_known(value, m.sums) else None for value in values
    ]  # values out of range or zero, which are rare
    return make(**dict(zip(PERCENTILES, exact, strict=True)))


@lru_cache
def find_ranks(n: int) -> tuple[int, ...]:
    """Return the rank, from 1, of each percentile of ``n`` elements."""
    return tuple(max(ceil(q * n), 1) for q in PERCENTILES.values())


def _is_known(value: float, sums: Sums) -> bool:
    """Return whether a value from a histogram is accurate to 0.4 %, unlike those of the first bins and the last one."""
    if value < MIN_EXACT:
        return value == 0 and sums.e_min == 0
    return value < MAX_EXACT or sums.e_max <= MAX_EXACT


def worst_rows(make: Callable[[int, float | None, float], Named], m: Measurement) -> tuple[Named, ...]:
    """Return the results of ``make`` for number, SNR and largest error of the worst rows, the worst first."""
    return _list_rows(make, m.sums.worst_rows)


def experts(make: Callable[[int, float | None, float], Named], m: Measurement) -> tuple[Named, ...]:
    """Return the results of ``make`` for number, SNR and largest error of each matrix of a stack."""
    return _list_rows(make, sorted(m.sums.matrices.items()))


def _list_rows(
    make: Callable[[int, float | None, float], Named], sums: Iterable[tuple[int, RowSums]]
) -> tuple[Named, ...]:
    return tuple(
        make(n, finite(decibels(ratio(row_sums.x_sq, row_sums.e_sq))), share(row_sums.e_max)) for n, row_sums in sums
    )


def max_absolute_error(m: Measurement) -> float:
    return share(m.sums.e_max) if m.sums.n else nan


def min_absolute_error(m: Measurement) -> float:
    return share(m.sums.e_min) if m.sums.n else nan


def root_mean_squared_error(m: Measurement) -> float:
    return sqrt(mean_squared_error(m))


def bits_per_weight(m: Measurement) -> float:
    return share(ratio(m.stored_bits, m.sums.elements))


def percent(part: int, n: int) -> float:
    return share(100 * ratio(part, n)) if part or not n else 0.0


def outlier_pct(m: Measurement) -> float:
    return percent(m.sums.outliers, m.sums.n)


def relative_outlier_pct(m: Measurement) -> float:
    return percent(m.sums.relative_outliers, m.sums.n)


def zeroed_pct(m: Measurement) -> float:
    return percent(m.sums.zeroed, m.sums.n)


def saturated_pct(m: Measurement) -> float | None:
    """Return the share of codes at the end of their range; None for formats without such codes."""
    return percent(m.sums.saturated, m.sums.n) if m.counts_saturated else None


def effective_bits(m: Measurement) -> float:
    return (snr_db(m) - 1.76) / 6.02


def theoretical_sqnr_db(m: Measurement) -> float | None:
    """Return the SNR of a full-scale sine; None for codes that are not uniform."""
    return theoretical_sqnr(m.uniform_bits) if m.uniform_bits else None


def attainable_snr_db(m: Measurement) -> float | None:
    """Return the SNR of a whole weight without the excess error of its sampled rows; None if either is unknown."""
    sample, whole = m.attainable, snr_db(m)
    return None if sample is None or isnan(whole) else whole + sample.excess_db


def format_snr_db(m: Measurement) -> float | None:
    """Return the attainable SNR without the loss from scales; None if that is unknown."""
    attainable, loss = attainable_snr_db(m), scale_loss_db(m)
    return None if attainable is None or loss is None else attainable + loss


def excess_db(m: Measurement) -> float | None:
    """Return the loss of the stored codes in a sample; None without a sample."""
    return m.attainable.excess_db if m.attainable else None


def scale_loss_db(m: Measurement) -> float | None:
    return m.attainable.scale_loss_db if m.attainable else None


def avoidable_db(m: Measurement) -> float | None:
    return m.attainable.avoidable_db if m.attainable else None


def off_code_pct(m: Measurement) -> float | None:
    return percent(m.attainable.off, m.attainable.n - m.attainable.clipped) if m.attainable else None


def clipped_pct(m: Measurement) -> float | None:
    return percent(m.attainable.clipped, m.attainable.n) if m.attainable else None


def finite(value: float) -> float | None:
    """Return the value as a report stores it: None if it is not finite."""
    return value if isfinite(value) else None


def predicted_kld(m: Measurement) -> float | None:
    return _predict_cost(m, "predicted_kld")


def predicted_output_error(m: Measurement) -> float | None:
    return _predict_cost(m, "predicted_output_error")


def _predict_cost(m: Measurement, name: str) -> float | None:
    """Return the cost that a sensitivity predicts for a weight; None unless this cost is the metric ``name``."""
    return None if m.alpha is None or m.predicts != name else m.alpha * nmse(m)


def sum_predicted_kld(m: Measurement) -> float | None:
    """Return the sum of a predicted cost over the layers of a group; None if no layer has one."""
    return fsum(m.layers.predicted_kld) if m.layers and m.layers.predicted_kld else None


def sum_predicted_output_error(m: Measurement) -> float | None:
    """Return the sum of a predicted cost over the layers of a group; None if no layer has one."""
    return fsum(m.layers.predicted_output_error) if m.layers and m.layers.predicted_output_error else None


def compression_ratio(m: Measurement) -> float:
    return ratio(m.original_bits, m.stored_bits)


def _aggregate_layers(
    pick: Callable[[LayerValues], list[float]], statistic: Callable[[list[float]], float]
) -> Callable[[Measurement], float]:
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


def relative_error_percentiles(make: Callable[..., Named], m: Measurement) -> Named:
    """Return the result of ``make`` for the percentiles over layers, by name; undefined ones are None."""
    values = m.layers.relative_error if m.layers else []
    ordered = [] if any(map(isnan, values)) else sorted(values)
    return make(**{key: quantile(ordered, q) if ordered else None for key, q in LAYER_PERCENTILES.items()})


median_absolute_error = _aggregate_layers(lambda layers: layers.mean_absolute_error, median)
median_relative_error = _aggregate_layers(lambda layers: layers.relative_error, median)
mean_layer_snr_db = _aggregate_layers(lambda layers: layers.snr_db, mean)
worst_layer_snr_db = _aggregate_layers(lambda layers: layers.snr_db, min)


def worst_layer_excess_db(m: Measurement) -> float | None:
    """Return the highest excess of a layer; None if none has one."""
    return max(m.layers.excess_db) if m.layers and m.layers.excess_db else None
