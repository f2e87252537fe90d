"""The inspection of one checkpoint: data with a schema version, inferred from headers alone unless values are read."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from quanterr.documents.base import Finding, Model, RunInfo
from quanterr.documents.comparison.model import StoredFile
from quanterr.documents.document import Document
from quanterr.documents.loading import Loading
from quanterr.metrics.scores import Score, doc

SCORES = {
    "bytes": Score("bytes", "lower", "bytes of all tensors", "B"),
    "bits_per_weight": Score("bits/w", "lower", "bits per weight over all weights, scales included", "bit"),
    "unread": Score("weights that are not read", "lower", "weights that no format reads"),
}


NOT_READ = "not_read"  # the finding about a weight that no format reads


class StoredWeight(Model):
    """A weight and its storage."""

    name: str
    display_name: Annotated[str, doc("name with unprintable characters escaped")]
    role: str
    block: Annotated[str | None, doc("the model block that contains the weight, such as layers.12")]
    format: Annotated[str | None, doc("see `quanterr formats`; null: unsupported, see `reason`")]
    dtype: Annotated[str, doc("stored dtype of the codes, as named in the file")]
    shape: list[int]
    elements: int
    bytes: Annotated[int, doc("bytes of all parts")]
    bits_per_weight: float | None
    code_bits: Annotated[int | None, doc("bits per code, without scales")]
    block_size: Annotated[list[int] | None, doc("(rows, columns) that share a scale")]
    scales: Annotated[int, doc("number of scales")]
    comfy_format: Annotated[str | None, doc("format named by a ComfyUI label")]
    evidence: Annotated[list[str], doc("evidence for the detected format")]
    reason: Annotated[str | None, doc("why the weight cannot be read")]
    activations: Annotated[
        str | None, doc("declared rounding scheme of the inputs; `unknown`: not supported by evaluate")
    ] = None


class Tally(Model):
    """Totals over several weights."""

    weights: int
    elements: int
    bytes: int
    bits_per_weight: float | None
    scales: int


class DecodeBound(Model):
    """Upper bound on tokens per second by memory bandwidth: each token of one sequence reads all active weights."""

    hardware: str
    gigabytes_per_second: float
    active_bytes: Annotated[int, doc("without embedding tables and inactive experts")]
    tokens_per_second: Annotated[float, doc("an upper bound: activations, cache and compute are ignored")]
    experts: Annotated[str | None, doc("counted share of the experts, and why; null: no experts")]


class Inspection(Document, kw_only=True):
    """The formats, weights and findings of one checkpoint, from headers and labels, and from values if asked for."""

    ITEMS: ClassVar[Mapping[str, str]] = {"weights": "weight"}

    schema_: str = "quanterr.inspection"
    # 1.1 adds decode; 1.2 activations and kv; 1.3 checksum, run; 1.4 values, verified; 1.5 loading
    schema_version: str = "1.5"
    path: str
    kind: str
    files: list[StoredFile]
    tensors: int
    bytes: int
    architecture: Annotated[str | None, doc("model architecture declared by the GGUF file or config.json")]
    quant_method: Annotated[str | None, doc("quantization method declared by config.json or a similar file")]
    total: Tally
    formats: Annotated[dict[str, Tally], doc("by format, the largest first; `unread` has weights that no format reads")]
    groups: Annotated[dict[str, dict[str, Tally]], doc("by role, then format")]
    activations: Annotated[dict[str, int], doc("number of weights by declared rounding scheme of inputs")] = {}
    kv: Annotated[str | None, doc("declared storage scheme of keys and values; null: none")] = None
    decode: Annotated[DecodeBound | None, doc("only with --hardware")] = None
    values: Annotated[bool, doc("whether every value was read (--values)")] = False
    verified: Annotated[int, doc("files whose SHA-256 is the one that the hub states (--hub-checksums)")] = 0
    loading: Annotated[list[Loading], doc("only with --for: each runtime that was asked for")] = []
    findings: list[Finding]
    weights: list[StoredWeight]
    run: RunInfo

    @property
    def bits_per_weight(self) -> float | None:
        """Bits per weight over all weights, scales included; None if there are no weights."""
        return self.total.bits_per_weight

    @property
    def unread(self) -> int:
        """The number of weights that no format reads."""
        return sum(weight.reason is not None for weight in self.weights)

    @property
    def problems(self) -> list[str]:
        """The errors that make the inspection inconclusive: weights that are not read, and findings that are errors."""
        unread = [f"{weight.display_name}: {weight.reason}" for weight in self.weights if weight.reason is not None]
        return [
            *unread,
            *(finding.message for finding in self.findings if finding.severity == "error" and finding.code != NOT_READ),
        ]
