"""The report of a comparison: plain data with a schema version, the only input of renderers and gates.

Layers and aggregates have a field for each row of METRICS and AGGREGATES.

History of ``schema_version``: 1.1 renames eight findings (finding_codes.FORMER_NAMES; former names are still read);
1.2 adds the metrics marked ``later``, which are null in older reports.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt

from quanterr.metrics import AGGREGATES, LAYER_PERCENTILES, METRICS, PERCENTILES, Metric
from quanterr.report import COLUMNS, LISTS, MANY_LAYERS, SCHEMA
from quanterr.report.base import Finding, Model, Number, RunInfo
from quanterr.report.document import Document
from quanterr.report.gate_results import Gate
from quanterr.util.strict_json import JsonFields, JsonObject

# 1.3 adds predicted_kld and settings.sensitivity; 1.4 weighted_error_norm; 1.5 losses of scales, fingerprints;
# 1.7 predicted_output_error
SCHEMA_VERSION = "1.7"
# Per-layer parts are dataclasses with slots, a third of the size of pydantic models. They hold tuples so that layers
# can share equal ones.


@dataclass(slots=True)
class WorstRow:
    """An output row of a weight."""

    row: int
    snr_db: Number
    max_absolute_error: FiniteFloat


@dataclass(slots=True)
class Expert:
    """One matrix of a stack of experts."""

    expert: Annotated[int, Field(description="index in the stack, from 0")]
    snr_db: Number
    max_absolute_error: FiniteFloat


@dataclass(slots=True)
class WorstElement:
    """The element with the largest absolute error."""

    index: Annotated[tuple[int, ...], Field(description="row and column in the weight as a matrix, from 0")]
    x: FiniteFloat
    y: FiniteFloat


def _percentiles(name: str, keys: Mapping[str, float], doc: str) -> type[object]:
    kinds = [(key, Annotated[Number, Field(description=f"{100 * q:g} %")]) for key, q in keys.items()]
    return make_dataclass(name, kinds, slots=True, namespace={"__doc__": doc, "__module__": __name__})


ElementPercentiles = _percentiles("ElementPercentiles", PERCENTILES, "Over elements.")
LayerPercentiles = _percentiles("LayerPercentiles", LAYER_PERCENTILES, "Over layers.")

KINDS: dict[str, Any] = {
    "number": Number,
    "count": NonNegativeInt,
    "percentiles": ElementPercentiles,
    "layer_percentiles": LayerPercentiles,
    "rows": tuple[WorstRow, ...],
    "experts": tuple[Expert, ...],
}


def _extend_with_metrics(base: type[object], name: str, rows: tuple[Metric, ...]) -> type[object]:
    """Return a dataclass that extends ``base`` with a field for each metric."""
    kinds = [(row.name, _annotate_metric(row), *([field(default=None)] if row.later else [])) for row in rows]
    namespace = {"__doc__": base.__doc__, "__module__": __name__}
    return make_dataclass(name, kinds, bases=(base,), slots=True, kw_only=True, namespace=namespace)


def _annotate_metric(row: Metric) -> Any:
    return Annotated[KINDS[row.kind], Field(description=row.formula + (f" [{row.unit}]" if row.unit else ""))]


# Kinds of the metrics that are more than a number.
STRUCTURED = {row.name: row.kind for row in (*METRICS, *AGGREGATES) if row.kind not in ("number", "count")}


def convert_values(values: JsonFields) -> JsonObject:
    """Return metric values with percentiles, rows and experts converted to the report's classes."""
    made = dict(values)
    for name, kind in STRUCTURED.items():
        if name in made:
            found = made[name]
            if kind in ("rows", "experts"):
                made[name] = tuple([(WorstRow if kind == "rows" else Expert)(**fields) for fields in found])
            else:
                made[name] = KINDS[kind](**found)
    return made


@dataclass(slots=True)
class _Weight:
    layer_name: Annotated[str, Field(description="name in the original")]
    display_name: Annotated[str, Field(description="layer_name with unprintable characters escaped")]
    role: str
    block: Annotated[str | None, Field(description="the model block that contains the layer, such as layers.12")]
    format: Annotated[str, Field(description="see `quanterr formats`")]
    original_format: str
    comfy_format: Annotated[str | None, Field(description="format named by a ComfyUI label")]
    original_dtype: str
    quantized_dtype: str
    tensor_shape: tuple[int, ...]
    tensor_elements: int
    original_fingerprint: Annotated[
        str | None, Field(description="CRC-32 of some stored bytes: identifies the original")
    ] = field(default=None, kw_only=True)


@dataclass(slots=True)
class LosslessLayer(_Weight):
    """A weight with equal values on both sides; excluded from all averages."""

    bits_per_weight: Number
    original_norm: Annotated[Number, Field(description="identifies the original")] = None


@dataclass(slots=True)
class _Layer(_Weight):
    """A weight whose values differ. x is the original, y the quantized weight, e = y - x."""

    block_size: Annotated[tuple[int, ...] | None, Field(description="(rows, columns) that share a scale")]
    scale_factor: Annotated[Number, Field(description="the scale, or the mean of several scales")]
    scale_min: Number
    scale_max: Number
    scale_count: int
    exact: bool
    finite: Annotated[bool, Field(description="true if neither side has NaN or infinity")]
    nonfinite_original_elements: int
    nonfinite_quantized_elements: int
    worst_element: WorstElement | None
    evidence: Annotated[tuple[str, ...], Field(description="evidence for the detected format")]
    nonfinite: Annotated[dict[str, str], Field(description="nan, +inf or -inf, by metric; these metrics are null")]


@dataclass(slots=True)
class _Aggregate:
    """Sums and metrics over all layers that differ, or over a group of them."""

    total_layers: int
    total_elements: int
    original_bytes: int
    quantized_bytes: int
    nonfinite: dict[str, str]


if TYPE_CHECKING:

    class Layer(_Layer):
        """A weight whose values differ, with a field for each row of METRICS."""

        def __init__(self, **fields: object) -> None: ...  # noqa: D107
        def __getattr__(self, name: str) -> Any: ...

    class Aggregate(_Aggregate):
        """Several layers together, with a field for each row of AGGREGATES."""

        def __init__(self, **fields: object) -> None: ...  # noqa: D107
        def __getattr__(self, name: str) -> Any: ...
else:
    Layer = _extend_with_metrics(_Layer, "Layer", METRICS)
    Aggregate = _extend_with_metrics(_Aggregate, "Aggregate", AGGREGATES)


class StoredFile(Model):
    """One file of a checkpoint."""

    name: str
    bytes: int


class Side(Model):
    """One of the two compared checkpoints."""

    path: str
    revision: str | None = Field(description="commit of a model from the Hugging Face cache")
    files: list[StoredFile]
    tensors: int
    bytes: int
    prefix: str = Field(description="prefix stripped from tensor names before matching")
    notes: list[str]


class BucketSize(Model):
    """The size of a coverage bucket."""

    tensors: int
    elements: int
    bytes: int


class Coverage(Model):
    """The bucket of every tensor of both checkpoints."""

    original: dict[str, BucketSize]
    quantized: dict[str, BucketSize]
    original_compared_fraction: Number = Field(description="share of selected bytes compared, 0 to 1")
    quantized_compared_fraction: Number = Field(description="share of selected bytes compared, 0 to 1")


class NotCompared(Model):
    """A selected tensor that was not compared."""

    layer_name: str
    display_name: str
    side: Literal["original", "quantized"]
    bucket: str
    reason: str
    elements: int
    bytes: int


class FormatNote(Model):
    """A format that occurs in a checkpoint."""

    summary: str
    usual_snr_db: list[int] | None = Field(description="usual SNR of whole models, [from, to] in dB; not a limit")


class Selection(Model):
    """The selection of layers to compare."""

    patterns: list[str]


class Settings(Model):
    """Settings that affect the numbers."""

    outlier_threshold: FiniteFloat
    importance: str | None = Field(None, description="importance matrix used for weighted_nmse and weighted_snr_db")
    sensitivity: str | None = Field(
        None, description="sensitivity file used for predicted_kld or predicted_output_error"
    )
    calibration: str | None = Field(None, description="measurement that calibrates predictions")
    metrics_version: int = Field(1, description="metrics of different versions are not comparable")


class Report(Document):
    """The error of a quantized checkpoint against its original.

    ``verdict`` is ``pass`` only if everything selected was compared, no finding is an error and all gates hold;
    ``inconclusive`` if the comparison itself is unreliable, as ``reasons`` explain. Weight error is not task accuracy.
    """

    VIEW: ClassVar[str] = "quanterr.report.view"
    ROWS: ClassVar[str] = "quanterr.report.items"
    ITEMS: ClassVar[Mapping[str, str]] = {
        "layers": "layer",
        "other_changes": "other_change",
        "lossless": "lossless",
        "not_compared": "not_compared",
    }

    schema_: str = Field(SCHEMA, alias="schema")
    schema_version: str = SCHEMA_VERSION
    verdict: Literal["pass", "fail", "inconclusive"]
    reasons: list[str]
    complete: bool = Field(description="false if the run was interrupted")
    original: Side
    quantized: Side
    selection: Selection
    settings: Settings
    formats: dict[str, FormatNote] = Field(description="formats of the quantized side, by name")
    coverage: Coverage
    findings: list[Finding]
    gates: list[Gate] = Field(description="results of the gates")
    gated: bool = Field(False, description="true if gates were set; without gates, pass means compared, not approved")
    aggregate: Aggregate
    groups: dict[str, dict[str, Aggregate]] = Field(description="aggregates by role, format and block")
    layers: list[Layer] = Field(description="weights that differ, in the original's order")
    other_changes: list[Layer] = Field(description="norms, biases and other 1-D tensors that differ")
    lossless: list[LosslessLayer]
    not_compared: list[NotCompared]
    run: RunInfo

    def _frame_rows(self) -> Iterator[JsonObject]:
        return import_module(self.ROWS).frame_rows(self)  # type: ignore[no-any-return]

    def _stored_fields(self) -> Iterator[tuple[str, object]]:
        for name, value in super()._stored_fields():
            if name == "run":
                yield "records", {key: len(getattr(self, key)) for key in LISTS}
            if name == "layers" and len(self.layers) >= MANY_LAYERS:
                yield "layer_columns", collect_columns(self.layers)
            yield name, value

    @classmethod
    def json_schema(cls) -> JsonObject:
        """Return the JSON Schema (2020-12) of the report."""
        schema = super().json_schema()
        properties, count = schema["properties"], {"type": "integer", "minimum": 0}
        properties["records"] = {
            "type": "object",
            "description": "Number of items in each list; reveals truncated reports",
            "properties": dict.fromkeys(LISTS, count),
            "required": list(LISTS),
        }
        schema["required"].append("records")
        layer = schema["$defs"]["Layer"]["properties"]
        properties["layer_columns"] = {
            "type": "object",
            "description": f"Layer values repeated by column, in layer order; present from {MANY_LAYERS:,} layers on",
            "properties": {name: {"type": "array", "items": layer[name]} for name in COLUMNS},
            "required": list(COLUMNS),
        }
        return schema


def collect_columns(layers: list[Layer], names: Collection[str] = COLUMNS) -> dict[str, list[object]]:
    """Return the named values of layers by column, in the order of the layers."""
    return {name: [getattr(layer, name, None) for layer in layers] for name in names}
