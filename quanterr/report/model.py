"""The report: plain data with a schema version. Everything that renders or judges it sees nothing else.

The fields of a layer and of an aggregate that are metrics are made from the rows of METRICS and AGGREGATES.
History of ``schema_version``: 1.0, the first; 1.1 renames eight findings (finding_codes.FORMER_NAMES), whose former
names are still read; 1.2 adds the metrics that are ``later``, null in what is read of earlier ones.
"""

import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from importlib import import_module
from typing import IO, TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt

from quanterr.metrics import AGGREGATES, LAYER_PERCENTILES, METRICS, PERCENTILES, Metric
from quanterr.report import COLUMNS, LISTS, MANY_LAYERS, SCHEMA, checksum, notebook
from quanterr.report.base import Finding, Model, RunInfo, Tool, dumps
from quanterr.report.document import DRAFT, Document
from quanterr.report.gate_results import Gate
from quanterr.util.strict_json import JsonFields, JsonObject

# 1.3 adds predicted_kld and settings.sensitivity; 1.4 weighted_error_norm; 1.5 what scales lose, fingerprints
SCHEMA_VERSION = "1.6"
# Whatever there is one of for each layer is a dataclass with slots, a third of a model's size, and holds tuples:
# those that many layers have in common are one object.


@dataclass(slots=True)
class WorstRow:
    """An output row."""

    row: int
    snr_db: FiniteFloat | None
    max_absolute_error: FiniteFloat


@dataclass(slots=True)
class Expert:
    """One matrix of a stack."""

    expert: Annotated[int, Field(description="its place in the stack")]
    snr_db: FiniteFloat | None
    max_absolute_error: FiniteFloat


@dataclass(slots=True)
class WorstElement:
    """The element with the largest |e|."""

    index: Annotated[tuple[int, ...], Field(description="row and column of the weight as a matrix")]
    x: FiniteFloat
    y: FiniteFloat


def _percentiles(name: str, keys: Mapping[str, float], doc: str) -> type[object]:
    kinds = [(key, Annotated[FiniteFloat | None, Field(description=f"{100 * q:g} %")]) for key, q in keys.items()]
    return make_dataclass(name, kinds, slots=True, namespace={"__doc__": doc, "__module__": __name__})


ElementPercentiles = _percentiles("ElementPercentiles", PERCENTILES, "Over elements.")
LayerPercentiles = _percentiles("LayerPercentiles", LAYER_PERCENTILES, "Over layers.")

KINDS: dict[str, Any] = {
    "number": FiniteFloat | None,
    "count": NonNegativeInt,
    "percentiles": ElementPercentiles,
    "layer_percentiles": LayerPercentiles,
    "rows": tuple[WorstRow, ...],
    "experts": tuple[Expert, ...],
}


def _with_metrics(base: type[object], name: str, rows: tuple[Metric, ...]) -> type[object]:
    """The base with a field for each metric."""
    kinds = [(row.name, _annotated(row), *([field(default=None)] if row.later else [])) for row in rows]
    namespace = {"__doc__": base.__doc__, "__module__": __name__}
    return make_dataclass(name, kinds, bases=(base,), slots=True, kw_only=True, namespace=namespace)


def _annotated(row: Metric) -> Any:
    return Annotated[KINDS[row.kind], Field(description=row.formula + (f" [{row.unit}]" if row.unit else ""))]


def from_values(rows: tuple[Metric, ...], values: JsonFields) -> JsonObject:
    """Values of metrics as the fields of a report hold them."""
    made = dict(values)
    for row in rows:
        if row.kind in ("percentiles", "layer_percentiles"):
            made[row.name] = KINDS[row.kind](**made[row.name])
        elif row.kind == "rows":
            made[row.name] = tuple(WorstRow(**fields) for fields in made[row.name])
        elif row.kind == "experts":
            made[row.name] = tuple(Expert(**fields) for fields in made[row.name])
    return made


@dataclass(slots=True)
class _Weight:
    layer_name: Annotated[str, Field(description="name in the original")]
    display_name: Annotated[str, Field(description="the same with everything unprintable escaped")]
    role: str
    block: Annotated[str | None, Field(description="the block of the model it is in, such as layers.12")]
    format: Annotated[str, Field(description="see `quanterr formats`")]
    original_format: str
    comfy_format: Annotated[str | None, Field(description="format that a ComfyUI label names")]
    original_dtype: str
    quantized_dtype: str
    tensor_shape: tuple[int, ...]
    tensor_elements: int
    original_fingerprint: Annotated[
        str | None, Field(description="CRC-32 of some stored bytes: identifies the original")
    ] = field(default=None, kw_only=True)


@dataclass(slots=True)
class LosslessLayer(_Weight):
    """A weight whose values are the same on both sides; in no average."""

    bits_per_weight: FiniteFloat | None
    original_norm: Annotated[FiniteFloat | None, Field(description="identifies the original")] = None


@dataclass(slots=True)
class _Layer(_Weight):
    """A weight that differs. x is the original, y the quantized weight, e = y - x."""

    block_size: Annotated[tuple[int, ...] | None, Field(description="(rows, columns) that share a scale")]
    scale_factor: Annotated[FiniteFloat | None, Field(description="the scale, or the mean of several")]
    scale_min: FiniteFloat | None
    scale_max: FiniteFloat | None
    scale_count: int
    exact: bool
    finite: Annotated[bool, Field(description="no NaN and no infinity on either side")]
    nonfinite_original_elements: int
    nonfinite_quantized_elements: int
    worst_element: WorstElement | None
    evidence: Annotated[tuple[str, ...], Field(description="the evidence for the format")]
    nonfinite: Annotated[dict[str, str], Field(description="metrics that are null because they are nan, +inf or -inf")]


@dataclass(slots=True)
class _Aggregate:
    """Over all layers that differ, or over a group of them."""

    total_layers: int
    total_elements: int
    original_bytes: int
    quantized_bytes: int
    nonfinite: dict[str, str]


if TYPE_CHECKING:

    class Layer(_Layer):
        """A weight that differs: the fields of its base, and one for each row of METRICS."""

        def __init__(self, **fields: object) -> None: ...  # noqa: D107
        def __getattr__(self, name: str) -> Any: ...

    class Aggregate(_Aggregate):
        """Several layers: the fields of its base, and one for each row of AGGREGATES."""

        def __init__(self, **fields: object) -> None: ...  # noqa: D107
        def __getattr__(self, name: str) -> Any: ...
else:
    Layer = _with_metrics(_Layer, "Layer", METRICS)
    Aggregate = _with_metrics(_Aggregate, "Aggregate", AGGREGATES)


class StoredFile(Model):
    """One file of a checkpoint."""

    name: str
    bytes: int


class Side(Model):
    """One checkpoint."""

    path: str
    revision: str | None = Field(description="commit, for a model from the Hugging Face cache")
    files: list[StoredFile]
    tensors: int
    bytes: int
    prefix: str = Field(description="taken from its names before they were matched")
    notes: list[str]


class BucketSize(Model):
    """How much is in a bucket."""

    tensors: int
    elements: int
    bytes: int


class Coverage(Model):
    """Where every entry of both checkpoints ended."""

    original: dict[str, BucketSize]
    quantized: dict[str, BucketSize]
    original_compared_fraction: FiniteFloat | None = Field(description="of the selected bytes of the original")
    quantized_compared_fraction: FiniteFloat | None = Field(description="of the selected bytes of the quantized side")


class NotCompared(Model):
    """Tensors that are not compared although they were selected."""

    layer_name: str
    display_name: str
    side: Literal["original", "quantized"]
    bucket: str
    reason: str
    elements: int
    bytes: int


class FormatNote(Model):
    """A format that occurs."""

    summary: str
    usual_snr_db: list[int] | None = Field(description="SNR of whole models in it, from … to …: a guide, no limit")


class Selection(Model):
    """What was compared of all."""

    patterns: list[str]


class Settings(Model):
    """What changes the numbers."""

    outlier_threshold: FiniteFloat
    importance: str | None = Field(None, description="the importance matrix of weighted_nmse and weighted_snr_db")
    sensitivity: str | None = Field(None, description="the file of predicted_kld")
    calibration: str | None = Field(None, description="by what was measured predicted_kld is corrected")
    metrics_version: int = Field(1, description="numbers of one metric in two versions do not compare")


class Report(Document):
    """Everything that is known of how far a quantized checkpoint is from its original.

    ``verdict`` is ``pass`` only if everything selected was compared, nothing is wrong and all gates
    hold; ``inconclusive`` if the comparison itself cannot be relied on, as ``reasons`` say. Weight
    error is not task accuracy.
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
    tool: Tool
    verdict: Literal["pass", "fail", "inconclusive"]
    reasons: list[str]
    complete: bool = Field(description="false when the run was interrupted")
    original: Side
    quantized: Side
    selection: Selection
    settings: Settings
    formats: dict[str, FormatNote] = Field(description="of the quantized side")
    coverage: Coverage
    findings: list[Finding]
    gates: list[Gate] = Field(description="the gates, judged")
    gated: bool = Field(False, description="whether limits were set: what passes without was compared, not approved")
    aggregate: Aggregate
    groups: dict[str, dict[str, Aggregate]] = Field(description="by role, format and block")
    layers: list[Layer] = Field(description="weights that differ, in the order of the original")
    other_changes: list[Layer] = Field(description="norms, biases and other 1-D tensors that differ")
    lossless: list[LosslessLayer]
    not_compared: list[NotCompared]
    run: RunInfo

    def to_pandas(self) -> notebook.Frame:
        """A pandas.DataFrame with a row per tensor, compared or not, and the columns of the CSV output.

        Raises:
            UsageError: pandas is not installed.
        """
        return notebook.frame(import_module(self.ROWS).frame_rows(self))

    def write_json(self, file: IO[str]) -> None:
        """Strict, ASCII JSON, a layer per line; written piece by piece."""
        for piece in self._json_pieces():
            file.write(piece)

    def to_json(self) -> str:
        """The same as a string."""
        return "".join(self._json_pieces())

    def _json_pieces(self) -> Iterator[str]:
        crc, separator = 0, "{\n"
        for name, info in type(self).model_fields.items():
            if name == "run":
                counts = f'{separator}"records": {dumps({key: len(getattr(self, key)) for key in LISTS})}'
                crc = zlib.crc32(counts.encode("ascii"), crc)
                yield counts
                yield f'{separator}"checksum": "{crc:08x}"'
            if name == "layers" and len(self.layers) >= MANY_LAYERS:
                own = (f'\n  "{key}": {dumps(values)}' for key, values in columns_of(self.layers).items())
                columns = f'{separator}"layer_columns": {{{",".join(own)}\n}}'
                crc = zlib.crc32(columns.encode("ascii"), crc)
                yield columns
            for piece in _pieces(f"{separator}{dumps(info.alias or name)}: ", getattr(self, name)):
                crc = zlib.crc32(piece.encode("ascii"), crc)
                yield piece
            separator = ",\n"
        yield "\n}\n"


def columns_of(layers: list[Layer], names: Collection[str] = COLUMNS) -> dict[str, list[object]]:
    """Some of their values by name, in the order of the layers."""
    return {name: [getattr(layer, name, None) for layer in layers] for name in names}


def _pieces(start: str, value: object) -> Iterator[str]:
    yield start
    if isinstance(value, list) and value and not isinstance(value[0], str):
        for n, item in enumerate(value):
            yield f"{',' if n else '['}\n  {dumps(item)}"
        yield "\n]"
    else:
        yield dumps(value)


def json_schema() -> JsonObject:
    """The JSON Schema (2020-12) of the report."""
    schema = Report.model_json_schema(by_alias=True, mode="serialization")
    count = {"type": "integer", "minimum": 0}
    schema["properties"]["records"] = {
        "type": "object",
        "description": "The number of items in each list: reveals a report that lost some",
        "properties": dict.fromkeys(LISTS, count),
        "required": list(LISTS),
    }
    schema["required"].append("records")
    layer = schema["$defs"]["Layer"]["properties"]
    schema["properties"]["layer_columns"] = {
        "type": "object",
        "description": f"Values of layers, in their order, again by column; of {MANY_LAYERS:,} layers and more",
        "properties": {name: {"type": "array", "items": layer[name]} for name in COLUMNS},
        "required": list(COLUMNS),
    }
    schema["properties"]["checksum"] = checksum.SCHEMA
    return {"$schema": DRAFT} | schema
