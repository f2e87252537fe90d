"""Several layers together: the whole model, or a group of a report."""

from functools import partial
from math import inf
from typing import Annotated, Any

from msgspec import Meta

from quanterr import metrics
from quanterr.documents.base import Model
from quanterr.documents.comparison.layer import ElementPercentiles, Layer
from quanterr.metrics.scores import Count, Number, Score, collect_scores, doc, note, score


class LayerPercentiles(Model):
    """Percentiles over layers."""

    p50: Annotated[Number, doc("50 %")]
    p75: Annotated[Number, doc("75 %")]
    p90: Annotated[Number, doc("90 %")]
    p95: Annotated[Number, doc("95 %")]
    p99: Annotated[Number, doc("99 %")]


def as_in_layers(name: str, **changes: Any) -> Meta:
    """Return the annotation of a number that is computed like a layer's, from the sums of all layers."""
    return note(collect_scores(Layer)[name]._replace(**({"column": None} | changes)))


class Aggregate(Model, kw_only=True):
    """Sums and metrics over all layers that differ, or over a group of them."""

    total_layers: Count
    total_elements: int
    original_bytes: int
    quantized_bytes: int
    nonfinite: dict[str, str]
    mean_absolute_error: Annotated[Number, as_in_layers("mean_absolute_error", formula="Σ|e| / n over all elements")]
    median_absolute_error: Annotated[
        Number,
        score(
            "median of mean |e|",
            "lower",
            "median over layers of their mean_absolute_error",
            of=metrics.median_absolute_error,
            equal=0,
        ),
    ]
    max_absolute_error: Annotated[
        Number,
        as_in_layers(
            "max_absolute_error",
            formula="max |e| over all elements: the true maximum, not the maximum of layer means",
            column=8,
        ),
    ]
    mean_squared_error: Annotated[Number, as_in_layers("mean_squared_error")]
    root_mean_squared_error: Annotated[Number, as_in_layers("root_mean_squared_error")]
    mean_relative_error: Annotated[
        Number,
        score(
            "relative",
            "lower",
            "Σ|e| / Σ|x| over all elements, not the mean over layers",
            "share",
            of=metrics.relative_error,
            equal=0,
            column=5,
        ),
    ]
    median_relative_error: Annotated[
        Number,
        score(
            "median relative error",
            "lower",
            "median over layers of their relative_error",
            "share",
            of=metrics.median_relative_error,
            equal=0,
        ),
    ]
    max_relative_error: Annotated[
        Number, as_in_layers("max_relative_error", formula="max |e|/|x| over all elements with x ≠ 0")
    ]
    relative_error_percentiles: Annotated[
        LayerPercentiles,
        score(
            "relative errors",
            "lower",
            "percentiles over layers of their relative_error, linear between the nearest",
            of=partial(metrics.relative_error_percentiles, LayerPercentiles),
            equal=0,
        ),
    ]
    overall_snr_db: Annotated[
        Number,
        score(
            "SNR",
            "higher",
            "10·log10(ΣΣx² / ΣΣe²) over the layers that differ: energies are pooled, lossless tensors left out",
            "dB",
            of=metrics.snr_db,
            equal=inf,
            column=0,
        ),
    ]
    mean_layer_snr_db: Annotated[
        Number,
        score(
            "mean SNR",
            "higher",
            "mean over layers of their snr_db",
            "dB",
            of=metrics.mean_layer_snr_db,
            equal=inf,
        ),
    ]
    worst_layer_snr_db: Annotated[
        Number,
        score(
            "worst layer",
            "higher",
            "lowest snr_db of a layer",
            "dB",
            of=metrics.worst_layer_snr_db,
            equal=inf,
            column=3,
        ),
    ]
    attainable_snr_db: Annotated[
        Number,
        as_in_layers(
            "attainable_snr_db",
            formula="energies pooled over the layers that have one, the error of each reduced by its excess_db",
            column=4,
        ),
    ] = None
    excess_db: Annotated[
        Number, as_in_layers("excess_db", formula="attainable_snr_db - the SNR of the same layers", column=1)
    ] = None
    format_snr_db: Annotated[
        Number,
        as_in_layers("format_snr_db", formula="as attainable_snr_db, each error also reduced by its scale_loss_db"),
    ] = None
    scale_loss_db: Annotated[Number, as_in_layers("scale_loss_db", formula="format_snr_db - attainable_snr_db")] = None
    avoidable_db: Annotated[Number, as_in_layers("avoidable_db", formula="scale_loss_db + excess_db")] = None
    worst_layer_excess_db: Annotated[
        Number,
        score(
            "worst excess",
            "lower",
            "highest excess_db of a layer; null if none has one",
            "dB",
            of=metrics.worst_layer_excess_db,
        ),
    ] = None
    nmse: Annotated[Number, as_in_layers("nmse")]
    weighted_nmse: Annotated[Number, as_in_layers("weighted_nmse")]
    weighted_snr_db: Annotated[Number, as_in_layers("weighted_snr_db")]
    cosine_similarity: Annotated[Number, as_in_layers("cosine_similarity")]
    absolute_error_percentiles: Annotated[
        ElementPercentiles, as_in_layers("absolute_error_percentiles", formula="as for a layer, over all elements")
    ]
    predicted_kld: Annotated[
        Number,
        as_in_layers(
            "predicted_kld",
            formula="Σ over the layers with a sensitivity; too low beyond about 0.1; null if none has one",
            of=metrics.sum_predicted_kld,
        ),
    ] = None
    predicted_output_error: Annotated[
        Number,
        as_in_layers(
            "predicted_output_error",
            formula="Σ over the layers with a sensitivity of recorded calls; null if none has one",
            of=metrics.sum_predicted_output_error,
        ),
    ] = None
    bits_per_weight: Annotated[
        Number,
        as_in_layers(
            "bits_per_weight", formula="stored bits of all parts / elements, over the layers that differ", column=7
        ),
    ]
    compression_ratio: Annotated[
        Number,
        score(
            "compression",
            "higher",
            "stored bits of the original / stored bits of the quantized, over the layers that differ",
            of=metrics.compression_ratio,
        ),
    ]


AGGREGATES: tuple[Score, ...] = tuple(collect_scores(Aggregate).values())
