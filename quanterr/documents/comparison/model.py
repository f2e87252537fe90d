"""The report of a comparison: plain data with a schema version, the only input of renderers and gates.

History of ``schema_version``: 1.1 renames eight findings (finding_codes.FORMER_NAMES; former names are still read);
1.2 adds the metrics that may be missing.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from quanterr.documents.base import Finding, Model, RunInfo
from quanterr.documents.comparison import LISTS, SCHEMA
from quanterr.documents.comparison.aggregate import Aggregate
from quanterr.documents.comparison.layer import Layer, LosslessLayer
from quanterr.documents.comparison.origin import TensorOrigin
from quanterr.documents.document import Document
from quanterr.documents.gate_results import Gate, Givers, Word
from quanterr.documents.loading import Loading
from quanterr.metrics.scores import Count, Number, doc
from quanterr.util.strict_json import JsonObject


class StoredFile(Model):
    """One file of a checkpoint."""

    name: str
    bytes: int


class ComparedFile(StoredFile):
    """One file of a compared checkpoint."""

    sha256: Annotated[str | None, doc("only with --every-code: of the whole file")] = None


class Side(Model):
    """One of the two compared checkpoints."""

    path: str
    revision: Annotated[str | None, doc("commit of a model from the Hugging Face cache")]
    files: list[ComparedFile]
    tensors: Count
    bytes: Count
    prefix: Annotated[str, doc("prefix stripped from tensor names before matching")]
    notes: list[str]
    configs: Annotated[list[ComparedFile], doc("only with --every-code: configurations that say how to read it")] = []


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
    every_code: Annotated[bool, doc("true with --every-code: ``origin`` is filled")] = False
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
    # 1.7 predicted_output_error; 1.8 bytes of layers, loading, reasons_by; 1.9 origin, settings.every_code, sha256
    schema_version: str = "1.9"
    verdict: Word
    reasons: list[str]
    reasons_by: Givers = None
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
    loading: Annotated[list[Loading], doc("only with --for: each runtime that was asked for")] = []
    origin: Annotated[
        list[TensorOrigin], doc("only with --every-code: how each tensor's values relate to the original's")
    ] = []
    run: RunInfo

    def _iterate_frame_rows(self) -> Iterator[JsonObject]:
        return self.listing.frame_rows(self)  # type: ignore[no-any-return]

    def _iterate_stored_fields(self) -> Iterator[tuple[str, object]]:
        for name, value in super()._iterate_stored_fields():
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
