"""The layers of a report: weights with their metrics. To add a metric, add a field with its score to :class:`Layer`.

Tools define some metrics differently: the formula of each field is the definition used here. x is the original, y the
quantized weight, e = y - x, and n the number of elements that are finite on both sides.
"""

from functools import partial
from math import inf
from typing import Annotated, NamedTuple

from quanterr import metrics
from quanterr.documents.base import Model
from quanterr.metrics.scores import Count, Number, Score, collect_scores, doc, score

# Parts of layers hold tuples so that layers can share equal ones.


class WorstRow(Model):
    """An output row of a weight."""

    row: int
    snr_db: Number
    max_absolute_error: float


class Expert(Model):
    """One matrix of a stack of experts."""

    expert: Annotated[int, doc("index in the stack, from 0")]
    snr_db: Number
    max_absolute_error: float


class WorstElement(Model):
    """The element with the largest absolute error."""

    index: Annotated[tuple[int, ...], doc("row and column in the weight as a matrix, from 0")]
    x: float
    y: float


class ElementPercentiles(Model):
    """Percentiles over elements."""

    p50: Annotated[Number, doc("50 %")]
    p75: Annotated[Number, doc("75 %")]
    p90: Annotated[Number, doc("90 %")]
    p95: Annotated[Number, doc("95 %")]
    p99: Annotated[Number, doc("99 %")]
    p99_9: Annotated[Number, doc("99.9 %")]


class _Weight(Model, kw_only=True):
    layer_name: Annotated[str, doc("name in the original")]
    display_name: Annotated[str, doc("layer_name with unprintable characters escaped")]
    role: str
    block: Annotated[str | None, doc("the model block that contains the layer, such as layers.12")]
    format: Annotated[str, doc("see `quanterr formats`")]
    original_format: str
    comfy_format: Annotated[str | None, doc("format named by a ComfyUI label")]
    original_dtype: str
    quantized_dtype: str
    tensor_shape: tuple[int, ...]
    tensor_elements: Count
    original_fingerprint: Annotated[str | None, doc("CRC-32 of some stored bytes: identifies the original")] = None
    original_bytes: Annotated[Count | None, doc("bytes of all its parts in the original; null up to schema 1.7")] = None
    quantized_bytes: Annotated[Count | None, doc("bytes of all its quantized parts; null up to schema 1.7")] = None


class LosslessLayer(_Weight, kw_only=True):
    """A weight with equal values on both sides; excluded from all averages."""

    bits_per_weight: Number
    original_norm: Annotated[Number, doc("identifies the original")] = None


class Layer(_Weight, kw_only=True):
    """A weight whose values differ. x is the original, y the quantized weight, e = y - x."""

    block_size: Annotated[tuple[int, ...] | None, doc("(rows, columns) that share a scale")]
    scale_factor: Annotated[Number, doc("the scale, or the mean of several scales")]
    scale_min: Number
    scale_max: Number
    scale_count: int
    exact: bool
    finite: Annotated[bool, doc("true if neither side has NaN or infinity")]
    nonfinite_original_elements: int
    nonfinite_quantized_elements: int
    worst_element: WorstElement | None
    evidence: Annotated[tuple[str, ...], doc("evidence for the detected format")]
    nonfinite: Annotated[dict[str, str], doc("nan, +inf or -inf, by metric; these metrics are null")]
    mean_absolute_error: Annotated[
        Number, score("mean |e|", "lower", "Σ|e| / n", of=metrics.mean_absolute_error, equal=0, column=9)
    ]
    relative_error: Annotated[
        Number,
        score(
            "relative",
            "lower",
            "Σ|e| / Σ|x|, not the mean of |e|/|x|",
            "share",
            of=metrics.relative_error,
            equal=0,
            column=3,
        ),
    ]
    max_absolute_error: Annotated[
        Number, score("max |e|", "lower", "max |e|", of=metrics.max_absolute_error, equal=0, column=5)
    ]
    min_absolute_error: Annotated[Number, score("min |e|", "lower", "min |e|", of=metrics.min_absolute_error, equal=0)]
    std_absolute_error: Annotated[
        Number, score("std |e|", "lower", "√(Σe²/n - (Σ|e|/n)²), population", of=metrics.std_absolute_error, equal=0)
    ]
    mean_squared_error: Annotated[Number, score("mean e²", "lower", "Σe² / n", of=metrics.mean_squared_error, equal=0)]
    root_mean_squared_error: Annotated[
        Number, score("rms e", "lower", "√(Σe² / n)", of=metrics.root_mean_squared_error, equal=0)
    ]
    mean_error: Annotated[Number, score("mean e", "", "Σe / n (bias)", of=metrics.mean_error, equal=0)]
    max_relative_error: Annotated[
        Number, score("max |e|/|x|", "lower", "max |e|/|x| over x ≠ 0", of=metrics.max_relative_error, equal=0)
    ]
    mean_relative_error: Annotated[
        Number,
        score(
            "mean |e|/|x|",
            "lower",
            "Σ(|e|/|x|) / count, over x ≠ 0; dominated by weights near zero",
            of=metrics.mean_relative_error,
            equal=0,
        ),
    ]
    zero_reference_elements: Annotated[
        Count,
        score(
            "zeros changed",
            "lower",
            "number of elements with x = 0 and y ≠ 0",
            of=metrics.zero_reference_elements,
            equal=0,
        ),
    ]
    snr_db: Annotated[
        Number,
        score(
            "SNR",
            "higher",
            "10·log10(Σx² / Σe²), the same as 20·log10(‖x‖ / ‖e‖)",
            "dB",
            of=metrics.snr_db,
            equal=inf,
            column=0,
        ),
    ]
    nmse: Annotated[Number, score("NMSE", "lower", "Σe² / Σx²", of=metrics.nmse, equal=0)]
    weighted_nmse: Annotated[
        Number,
        score(
            "weighted NMSE",
            "lower",
            "Σ a·e² / Σ a·x², a the mean square of the column's activation; null without an importance matrix",
            of=metrics.weighted_nmse,
            equal=0,
            needs="importance",
        ),
    ]
    weighted_error_norm: Annotated[
        Number,
        score(
            "weighted ‖e‖",
            "lower",
            "√(Σ a·e²): the error of the output if inputs are uncorrelated; null without an importance matrix",
            of=metrics.weighted_error_norm,
            equal=0,
            needs="importance",
        ),
    ]
    weighted_snr_db: Annotated[
        Number,
        score(
            "weighted SNR",
            "higher",
            "-10·log10(weighted_nmse)",
            "dB",
            of=metrics.weighted_snr_db,
            equal=inf,
            needs="importance",
        ),
    ]
    relative_l2_error: Annotated[
        Number,
        score("‖e‖/‖x‖", "lower", "√(Σe² / Σx²) = ‖e‖ / ‖x‖", of=metrics.relative_l2_error, equal=0),
    ]
    cosine_similarity: Annotated[
        Number, score("cosine", "higher", "Σxy / (‖x‖·‖y‖), in [-1, 1]", of=metrics.cosine_similarity, equal=1)
    ]
    pearson_correlation: Annotated[
        Number,
        score(
            "correlation",
            "higher",
            "cosine of x - mean(x) and y - mean(y), in [-1, 1]",
            of=metrics.pearson_correlation,
            equal=1,
        ),
    ]
    original_norm: Annotated[Number, score("‖x‖", "", "‖x‖ = √Σx²", of=metrics.original_norm)]
    quantized_norm: Annotated[Number, score("‖y‖", "", "‖y‖ = √Σy²", of=metrics.quantized_norm)]
    error_norm: Annotated[Number, score("‖e‖", "lower", "‖e‖ = √Σe²", of=metrics.error_norm, equal=0)]
    absolute_error_percentiles: Annotated[
        ElementPercentiles,
        score(
            "|e|",
            "lower",
            "|e| that this share of the elements does not exceed, within 0.5 %",
            of=partial(metrics.percentiles, ElementPercentiles),
            equal=0,
        ),
    ]
    outlier_pct: Annotated[
        Number,
        score(
            "outliers",
            "lower",
            "share of elements with |e| above settings.outlier_threshold",
            "%",
            of=metrics.outlier_pct,
            equal=0,
        ),
    ]
    relative_outlier_pct: Annotated[
        Number,
        score(
            "relative outliers",
            "lower",
            "share of elements with |e| > 1 % of |x|",
            "%",
            of=metrics.relative_outlier_pct,
            equal=0,
        ),
    ]
    worst_rows: Annotated[
        tuple[WorstRow, ...],
        score(
            "worst rows",
            "",
            "the output rows with the lowest SNR, the worst first",
            of=partial(metrics.worst_rows, WorstRow),
        ),
    ]
    experts: Annotated[
        tuple[Expert, ...],
        score(
            "experts",
            "",
            "the matrices of a stack, one by one; empty for a single matrix",
            of=partial(metrics.experts, Expert),
        ),
    ]
    zeroed_pct: Annotated[
        Number,
        score(
            "zeroed",
            "lower",
            "share of elements with x ≠ 0 and y = 0",
            "%",
            of=metrics.zeroed_pct,
            equal=0,
        ),
    ]
    saturated_pct: Annotated[
        Number,
        score(
            "saturated",
            "lower",
            "share of codes at the end of their range (±448, ±57344, ±127, -128); null for formats without a scale",
            "%",
            of=metrics.saturated_pct,
        ),
    ]
    bits_per_weight: Annotated[
        Number,
        score("bits/w", "lower", "stored bits of all parts / elements", "bit", of=metrics.bits_per_weight, column=6),
    ]
    theoretical_sqnr_db: Annotated[
        Number,
        score(
            "sine",
            "",
            "6.02·bits + 1.76: a full-scale sine in uniform integer codes; null for other codes",
            "dB",
            of=metrics.theoretical_sqnr_db,
        ),
    ]
    attainable_snr_db: Annotated[
        Number,
        score(
            "attainable",
            "higher",
            "snr_db + excess_db: the SNR of the nearest codes with the stored scales; null if the nearest codes are "
            "unknown",
            "dB",
            of=metrics.attainable_snr_db,
            equal=inf,
        ),
    ] = None
    excess_db: Annotated[
        Number,
        score(
            "excess",
            "lower",
            "10·log10(Σe² / Σe*²) over a sample of rows, e* the error of the nearest codes with the stored scales; 0 "
            "for plain rounding",
            "dB",
            of=metrics.excess_db,
            equal=0,
            column=1,
        ),
    ] = None
    format_snr_db: Annotated[
        Number,
        score(
            "format SNR",
            "higher",
            "attainable_snr_db + scale_loss_db: the SNR of the nearest codes with good scales, which the format can "
            "reach; null if scales or groups are unknown",
            "dB",
            of=metrics.format_snr_db,
            equal=inf,
        ),
    ] = None
    scale_loss_db: Annotated[
        Number,
        score(
            "scale loss",
            "lower",
            "gain in SNR of good scales, made from the largest values of sampled groups, over the stored scales, with "
            "the nearest codes of each; 0 if the stored scales are better",
            "dB",
            of=metrics.scale_loss_db,
            equal=0,
        ),
    ] = None
    avoidable_db: Annotated[
        Number,
        score(
            "avoidable",
            "lower",
            "scale_loss_db + excess_db: format_snr_db - the actual SNR of the sample",
            "dB",
            of=metrics.avoidable_db,
            equal=0,
        ),
    ] = None
    off_code_pct: Annotated[
        Number,
        score(
            "off codes",
            "lower",
            "share of sampled elements, not clipped, whose code is 2 or more steps from the nearest one",
            "%",
            of=metrics.off_code_pct,
            equal=0,
        ),
    ] = None
    clipped_pct: Annotated[
        Number,
        score(
            "clipped",
            "lower",
            "share of sampled elements beyond the range of their scale by more than half a step",
            "%",
            of=metrics.clipped_pct,
            equal=0,
        ),
    ] = None
    predicted_kld: Annotated[
        Number,
        score(
            "predicted KLD",
            "lower",
            "alpha · nmse: the KLD predicted for the error of this weight alone; null without a sensitivity for it",
            "nat",
            of=metrics.predicted_kld,
            equal=0,
            needs="sensitivity",
        ),
    ] = None
    predicted_output_error: Annotated[
        Number,
        score(
            "predicted output error",
            "lower",
            "alpha · nmse: the error of a denoiser's output, ‖y - x‖² / ‖x‖², predicted for the error of this weight "
            "alone; null without a sensitivity of recorded calls for it",
            "share",
            of=metrics.predicted_output_error,
            equal=0,
            needs="sensitivity",
        ),
    ] = None
    effective_bits: Annotated[
        Number, score("effective bits", "higher", "(snr_db - 1.76) / 6.02", "bit", of=metrics.effective_bits, equal=inf)
    ]

    @property
    def squared_error(self) -> float | None:
        """Σe²; None if undefined."""
        return None if self.error_norm is None else self.error_norm**2


# For reports up to schema 1.7: bits of an element in the original, by its dtype; other dtypes count as 16-bit floats.
WIDE_BITS = {"torch.float64": 64, "torch.float32": 32}
USUAL_BITS = 16


class StoredSizes(NamedTuple):
    """The bytes of a weight on both sides, scales and other parts included."""

    original: int
    quantized: int


def find_sizes(layer: Layer | LosslessLayer) -> StoredSizes:
    """Return the bytes of a weight; in older reports they follow from its bits per weight and the original's dtype."""
    if layer.original_bytes is not None and layer.quantized_bytes is not None:
        return StoredSizes(layer.original_bytes, layer.quantized_bytes)
    n, bits = layer.tensor_elements, WIDE_BITS.get(layer.original_dtype, USUAL_BITS)
    return StoredSizes(n * bits // 8, round((layer.bits_per_weight or 0) * n / 8))


METRICS: tuple[Score, ...] = tuple(collect_scores(Layer).values())
