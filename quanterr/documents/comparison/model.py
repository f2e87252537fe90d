"""The report of a comparison: plain data with a schema version, the only input of renderers and gates.

Layers and aggregates have a field for each row of METRICS and AGGREGATES.

History of ``schema_version``: 1.1 renames eight findings (finding_codes.FORMER_NAMES; former names are still read);
1.2 adds the metrics marked ``later``, which are null in older reports.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Struct, defstruct

from quanterr.documents.base import Count, Finding, Model, Number, RunInfo, doc
from quanterr.documents.comparison import LISTS, SCHEMA
from quanterr.documents.document import Document
from quanterr.documents.gate_results import Gate, Word
from quanterr.metrics import AGGREGATES, LAYER_PERCENTILES, METRICS, PERCENTILES, Metric
from quanterr.util.strict_json import JsonFields, JsonObject

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


def _percentiles(name: str, keys: Mapping[str, float], about: str) -> type[Struct]:
    kinds = [(key, Annotated[Number, doc(f"{100 * q:g} %")]) for key, q in keys.items()]
    return defstruct(name, kinds, bases=(Model,), module=__name__, namespace={"__doc__": about})


ElementPercentiles = _percentiles("ElementPercentiles", PERCENTILES, "Over elements.")
LayerPercentiles = _percentiles("LayerPercentiles", LAYER_PERCENTILES, "Over layers.")

KINDS: dict[str, Any] = {
    "number": Number,
    "count": Count,
    "percentiles": ElementPercentiles,
    "layer_percentiles": LayerPercentiles,
    "rows": tuple[WorstRow, ...],
    "experts": tuple[Expert, ...],
}


def _extend_with_metrics(base: type[Struct], name: str, rows: tuple[Metric, ...]) -> type[Struct]:
    """Return a class that extends ``base`` with a field for each metric."""
    kinds: list[Any] = []
    for row in rows:
        about = row.formula + (f" [{row.unit}]" if row.unit else "")
        kinds.append((row.name, Annotated[KINDS[row.kind], doc(about)], *([None] if row.later else [])))
    return defstruct(name, kinds, bases=(base,), module=__name__, namespace={"__doc__": base.__doc__}, kw_only=True)


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


class LosslessLayer(_Weight, kw_only=True):
    """A weight with equal values on both sides; excluded from all averages."""

    bits_per_weight: Number
    original_norm: Annotated[Number, doc("identifies the original")] = None


class _Layer(_Weight, kw_only=True):
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


class _Aggregate(Model, kw_only=True):
    """Sums and metrics over all layers that differ, or over a group of them."""

    total_layers: Count
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
    revision: Annotated[str | None, doc("commit of a model from the Hugging Face cache")]
    files: list[StoredFile]
    tensors: Count
    bytes: Count
    prefix: Annotated[str, doc("prefix stripped from tensor names before matching")]
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
    original_compared_fraction: Annotated[Number, doc("share of selected bytes compared, 0 to 1")]
    quantized_compared_fraction: Annotated[Number, doc("share of selected bytes compared, 0 to 1")]


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
    usual_snr_db: Annotated[list[int] | None, doc("usual SNR of whole models, [from, to] in dB; not a limit")]


class Selection(Model):
    """The selection of layers to compare."""

    patterns: list[str]


class Settings(Model):
    """Settings that affect the numbers."""

    outlier_threshold: float
    importance: Annotated[str | None, doc("importance matrix used for weighted_nmse and weighted_snr_db")] = None
    sensitivity: Annotated[str | None, doc("sensitivity file used for predicted_kld or predicted_output_error")] = None
    calibration: Annotated[str | None, doc("measurement that calibrates predictions")] = None
    metrics_version: Annotated[Count, doc("metrics of different versions are not comparable")] = 1


class Report(Document, kw_only=True):
    """The error of a quantized checkpoint against its original.

    ``verdict`` is ``pass`` only if everything selected was compared, no finding is an error and all gates hold;
    ``inconclusive`` if the comparison itself is unreliable, as ``reasons`` explain. Weight error is not task accuracy.
    """

    ROWS: ClassVar[str] = "items"
    ITEMS: ClassVar[Mapping[str, str]] = {
        "layers": "layer",
        "other_changes": "other_change",
        "lossless": "lossless",
        "not_compared": "not_compared",
    }

    schema_: str = SCHEMA
    # 1.3 adds predicted_kld and settings.sensitivity; 1.4 weighted_error_norm; 1.5 losses of scales, fingerprints;
    # 1.7 predicted_output_error
    schema_version: str = "1.7"
    verdict: Word
    reasons: list[str]
    complete: Annotated[bool, doc("false if the run was interrupted")]
    original: Side
    quantized: Side
    selection: Selection
    settings: Settings
    formats: Annotated[dict[str, FormatNote], doc("formats of the quantized side, by name")]
    coverage: Coverage
    findings: list[Finding]
    gates: Annotated[list[Gate], doc("results of the gates")]
    gated: Annotated[bool, doc("true if gates were set; without gates, pass means compared, not approved")] = False
    aggregate: Aggregate
    groups: Annotated[dict[str, dict[str, Aggregate]], doc("aggregates by role, format and block")]
    layers: Annotated[list[Layer], doc("weights that differ, in the original's order")]
    other_changes: Annotated[list[Layer], doc("norms, biases and other 1-D tensors that differ")]
    lossless: list[LosslessLayer]
    not_compared: list[NotCompared]
    run: RunInfo

    def _frame_rows(self) -> Iterator[JsonObject]:
        return self.listing.frame_rows(self)  # type: ignore[no-any-return]

    def _stored_fields(self) -> Iterator[tuple[str, object]]:
        for name, value in super()._stored_fields():
            if name == "run":
                yield "records", {key: len(getattr(self, key)) for key in LISTS}
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
        return schema
