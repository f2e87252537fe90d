"""Helpers that several outputs of a report share: coverage in one line, the worst layers."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from quanterr.documents.comparison.layer import Expert, Layer
from quanterr.documents.comparison.model import Report
from quanterr.outputs.formatting import format_db
from quanterr.selection.roles import Position, place_of
from quanterr.util.text import count, display

# Bucket → words that follow its number of tensors.
BUCKETS = {
    "compared": "compared",
    "lossless": "identical",
    "non_finite": "compared, not finite",
    "consumed": "scales and other parts",
    "error": "not comparable",
    "unsupported": "unsupported",
    "shape_mismatch": "of another shape",
    "only_in_original": "only in original",
    "only_in_quantized": "only in quantized",
    "not_reached": "not reached",
    "filtered_out": "not selected",
}
COVERED = ("compared", "lossless", "non_finite")  # buckets of weights whose values were read

SORTS = {
    "snr": ("snr_db", "SNR", False),
    "mae": ("mean_absolute_error", "mean |e|", True),
    "relative": ("relative_error", "relative error", True),
    "max": ("max_absolute_error", "max |e|", True),
}


def describe_comparison(report: Report) -> str:
    """Return the conclusion of a pass without gates: ``SNR 27.04 dB; no limits set``."""
    level = f"SNR {format_db(report.aggregate.overall_snr_db, ' dB')}" if report.layers else "no layer differs"
    return f"{level}; no limits set"


def describe_coverage(report: Report) -> str:
    """Return in one line how much of the original was compared, and what happened to the rest."""
    coverage = report.coverage.original
    n = {bucket: amount.tensors for bucket, amount in coverage.items()}
    compared = sum(n.get(bucket, 0) for bucket in COVERED)
    weights = sum(n.values()) - n.get("filtered_out", 0) - n.get("consumed", 0)
    fraction = report.coverage.original_compared_fraction
    share = "" if fraction is None else f" ({100 * fraction:.4g} % of bytes)"
    parts = [f"{compared:,} of {count(weights, 'original tensor')} compared{share}"]
    parts.append(f"{len(report.lossless):,} of them identical")
    left = ("only_in_original", "shape_mismatch", "unsupported", "error", "not_reached", "filtered_out")
    parts += [f"{n[bucket]:,} {BUCKETS[bucket]}" for bucket in left if bucket in n]
    if "only_in_quantized" in report.coverage.quantized:
        parts.append(f"{report.coverage.quantized['only_in_quantized'].tensors:,} only in quantized")
    parts += [f"prefix {display(s.prefix)} stripped" for s in (report.original, report.quantized) if s.prefix]
    return "; ".join(parts)


def find_worst_expert(experts: Sequence[Expert]) -> Expert:
    """Return the expert with the lowest SNR; an undefined SNR is the lowest."""
    return min(experts, key=lambda expert: -float("inf") if expert.snr_db is None else expert.snr_db)


class WorstLayerRow(NamedTuple):
    """One of the worst layers; ``stands_for`` describes the experts that it represents, and is empty without any."""

    layer: Layer
    stands_for: str


def pick_worst_layers(layers: Sequence[Layer], top: int, sort_by: str = "snr") -> list[WorstLayerRow]:
    """Return the ``top`` worst layers; for the experts of one module, only the worst."""
    keys: dict[str, tuple[Position, str] | None] = {}  # the module of a single expert; None for other layers
    for layer in layers:
        place = place_of(layer.layer_name) if layer.role == "experts" else None
        keys[layer.layer_name] = (place, layer.format) if place and "*" in place.module else None
    n_experts = Counter(keys.values())
    rows: list[WorstLayerRow] = []
    seen = set()
    for layer in sort_layers(layers, sort_by):
        key = keys[layer.layer_name]
        if key in seen:
            continue
        stands_for = ""
        if len(layer.experts) > 1:
            worst = find_worst_expert(layer.experts)
            stands_for = f"{len(layer.experts)} experts, the worst {worst.expert}: {format_db(worst.snr_db, ' dB')}"
        elif key and n_experts[key] > 1:
            seen.add(key)
            stands_for = f"{n_experts[key]} experts, the worst"
        rows.append(WorstLayerRow(layer, stands_for))
        if len(rows) == top:
            break
    return rows


def sort_layers(layers: Sequence[Layer], sort_by: str = "snr") -> list[Layer]:
    """Return the layers, the worst first; an undefined value is the worst."""
    key, _, descending = SORTS[sort_by]

    def badness(layer: Layer) -> float:
        value = getattr(layer, key)
        return -float("inf") if value is None else -value if descending else value

    return sorted(layers, key=badness)
