"""What one checkpoint stores: data with a schema version, inferred from headers alone."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar

from pydantic import Field

from quanterr.report import notebook
from quanterr.report.base import Finding, RunInfo, Score, Tool
from quanterr.report.document import Document
from quanterr.report.inspection import SCHEMA
from quanterr.report.model import StoredFile

SCHEMA_VERSION = "1.3"  # 1.1 adds decode; 1.2 activations and kv; 1.3 checksum and run
SCORES = {
    "bytes": Score("bytes", "lower", "B"),
    "bits_per_weight": Score("bits per weight", "lower"),
    "unread": Score("weights that are not read", "lower"),
}


@dataclass(slots=True)
class StoredWeight:
    """A weight and how it is stored."""

    name: str
    display_name: Annotated[str, Field(description="the same with everything unprintable escaped")]
    role: str
    block: Annotated[str | None, Field(description="the block of the model it is in, such as layers.12")]
    format: Annotated[str | None, Field(description="see `quanterr formats`; null: not read, as `reason` says")]
    dtype: Annotated[str, Field(description="of the codes, as the file calls it")]
    shape: list[int]
    elements: int
    bytes: Annotated[int, Field(description="of all its parts")]
    bits_per_weight: float | None
    code_bits: Annotated[int | None, Field(description="of one code, scales not included")]
    block_size: Annotated[list[int] | None, Field(description="(rows, columns) that share a scale")]
    scales: Annotated[int, Field(description="how many")]
    comfy_format: Annotated[str | None, Field(description="format that a ComfyUI label names")]
    evidence: Annotated[list[str], Field(description="the evidence for the format")]
    reason: Annotated[str | None, Field(description="why it is not read")]
    activations: Annotated[
        str | None,
        Field(description="scheme by which its inputs are rounded, as declared; `unknown`: none that evaluate has"),
    ] = None


@dataclass(slots=True)
class Tally:
    """Several weights together."""

    weights: int
    elements: int
    bytes: int
    bits_per_weight: float | None
    scales: int


@dataclass(slots=True)
class DecodeBound:
    """Tokens a second that memory bandwidth allows for one sequence: each reads all active weights once."""

    hardware: str
    gigabytes_per_second: float
    active_bytes: Annotated[int, Field(description="without embeddings that are looked up, and experts that rest")]
    tokens_per_second: Annotated[float, Field(description="no more; activations, cache and compute come on top")]
    experts: Annotated[str | None, Field(description="which share of the experts counts, and why; null: none")]


class Inspection(Document):
    """What one checkpoint stores, inferred from headers and labels alone."""

    VIEW: ClassVar[str] = "quanterr.report.inspection.view"
    ITEMS: ClassVar[Mapping[str, str]] = {"weights": "weight"}

    schema_: str = Field(SCHEMA, alias="schema")
    schema_version: str = SCHEMA_VERSION
    tool: Tool
    path: str
    kind: str
    files: list[StoredFile]
    tensors: int
    bytes: int
    architecture: str | None = Field(description="of the model, as a GGUF file or config.json declares")
    quant_method: str | None = Field(description="as config.json or its like says")
    total: Tally
    formats: dict[str, Tally] = Field(description="the largest first; `unread` is what no format claims")
    groups: dict[str, dict[str, Tally]] = Field(description="role → format")
    activations: dict[str, int] = Field({}, description="scheme by which inputs are rounded, as declared → weights")
    kv: str | None = Field(None, description="scheme by which keys and values are stored, as declared; null: none")
    decode: DecodeBound | None = Field(None, description="with --hardware")
    findings: list[Finding]
    weights: list[StoredWeight]
    run: RunInfo

    @property
    def bits_per_weight(self) -> float | None:
        """Bits per weight of all weights together, scales included; None without any."""
        return self.total.bits_per_weight

    @property
    def unread(self) -> int:
        """The number of weights that no format claims."""
        return sum(weight.reason is not None for weight in self.weights)

    def to_pandas(self) -> notebook.Frame:
        """Return a pandas.DataFrame with a row per weight.

        Raises:
            UsageError: pandas is not installed.
        """
        names = [field.name for field in fields(StoredWeight)]
        return notebook.frame({name: getattr(weight, name) for name in names} for weight in self.weights)
