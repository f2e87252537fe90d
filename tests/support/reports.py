"""Synthetic reports for tests, with the fields that rules and diffs read."""

from math import isfinite
from types import SimpleNamespace

from quanterr.documents.base import Finding
from quanterr.documents.comparison.values import LAYER_METRICS, MODEL_METRICS

SETTINGS = {"outlier_threshold": 0.01, "importance": None, "sensitivity": None, "every_code": False}
SETTINGS["metrics_version"] = 1


def row(name, snr_db, **more):
    """Return a layer with that SNR: None if undefined; the report's spelling of infinity if infinite."""
    fields = {"layer_name": name, "format": "fp8_tensor", "tensor_elements": 64, "finite": True, "nonfinite": {}}
    fields["original_fingerprint"] = None
    for metric in LAYER_METRICS:
        key, _, percentile = metric.partition(".")
        if percentile:
            fields.setdefault(key, {})[percentile] = 0.5
        else:
            fields[key] = 0.5
    fields |= {"original_norm": 1.0, "snr_db": snr_db} | more
    for key in ("snr_db", *more):
        value = fields[key]
        if isinstance(value, float) and not isfinite(value):
            fields[key] = None
            fields["nonfinite"][key] = "nan" if value != value else "+inf" if value > 0 else "-inf"
    if snr_db is None:
        fields["nonfinite"]["snr_db"] = "nan"
    return fields


def finding(layer, severity="error"):
    return {"code": "x", "severity": severity, "layer": layer, "message": f"{layer}: broken"}


def make(
    layers=None,
    *,
    rows=(),
    other=None,
    lossless=(),
    missing=(),
    findings=(),
    aggregate=None,
    overall=28.5,
    lossless_norm=None,
    settings=None,
    **more,
):
    """Return a report; ``layers`` and ``other`` map names to SNR."""
    rows = [row(name, snr) for name, snr in (layers or {}).items()] + list(rows)
    whole = {"total_layers": len(rows), "nonfinite": {}}
    for metric in MODEL_METRICS:
        key, _, percentile = metric.partition(".")
        if percentile:
            whole.setdefault(key, {})[percentile] = 0.5
        else:
            whole[key] = 0.5
    same = {"format": "dense", "tensor_elements": 64, "bits_per_weight": 16.0, "original_norm": lossless_norm}
    same["original_fingerprint"] = None
    fields = {
        "verdict": "pass",
        "reasons": [],
        "reasons_by": None,
        "complete": True,
        "original": {"tensors": 3, "bytes": 300},
        "quantized": {"bytes": 150},
        "selection": {"patterns": []},
        "settings": SETTINGS | (settings or {}),
        "coverage": {"original_compared_fraction": 0.75, "quantized_compared_fraction": 1.0},
        "findings": [Finding(**{"remedy": None, "evidence": {}} | finding) for finding in findings],
        "gates": [],
        "loading": [],
        "origin": [],
        "aggregate": whole | {"overall_snr_db": overall} | (aggregate or {}),
        "layers": rows,
        "other_changes": [row(name, snr) for name, snr in (other or {}).items()],
        "lossless": [{"layer_name": name} | same for name in lossless],
        "not_compared": [
            {"layer_name": name, "bucket": "only_in_original", "reason": "has no counterpart"} for name in missing
        ],
    }
    return _with_attributes(fields | more)


def _with_attributes(value, key=""):
    """Return the value with attributes instead of keys; mappings by metric keep their keys."""
    if isinstance(value, list):
        return [_with_attributes(item) for item in value]
    if not isinstance(value, dict) or key == "nonfinite":
        return value
    return SimpleNamespace(**{name: _with_attributes(field_value, name) for name, field_value in value.items()})
