"""The plan: a recipe for each layer of an original, as data with a schema version."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, FiniteFloat

from quanterr.report.base import Number, RunInfo, Score
from quanterr.report.document import Document
from quanterr.report.model import Selection
from quanterr.report.same_original import Marks

SCHEMA = "quanterr.plan"
# 1.1 adds weighted squared error; 1.2 fields that identify the original; 1.3 measured; 1.4 predicted output error
SCHEMA_VERSION = "1.4"
Measure = Literal["squared error", "weighted squared error", "predicted KLD", "predicted output error"]
ORIGINAL = "original"  # recipe of a layer that stays unquantized


@dataclass(slots=True)
class PlannedLayer:
    """The planned recipe of a layer."""

    layer_name: str
    display_name: str
    recipe: Annotated[str, Field(description="see `quanterr formats --recipes`; original: the layer stays as it is")]
    format: Annotated[str, Field(description="format, as in a report")]
    elements: int
    bytes: int
    bits_per_weight: FiniteFloat
    snr_db: Annotated[Number, Field(description="exact SNR after quantization [dB]; null if unchanged")]
    cost: Annotated[FiniteFloat, Field(description="the layer's part of the plan's cost, in units of measure")]
    original_norm: Annotated[Number, Field(description="identifies the original")] = None
    original_fingerprint: Annotated[str | None, Field(description="identifies the original, as in a report")] = None


@dataclass(slots=True)
class Uniform:
    """One recipe for all layers that it supports."""

    recipe: str
    bytes: int
    cost: FiniteFloat
    fits: Annotated[bool, Field(description="true if it keeps the plan's limit of bytes or cost")]


@dataclass(slots=True)
class Point:
    """The least cost at a size."""

    bytes: int
    cost: FiniteFloat


@dataclass(slots=True)
class Measurement:
    """The measured effect of a plan, quantized on the fly and run beside the original."""

    kld: Annotated[FiniteFloat, Field(description="mean KL divergence [nat]")]
    kld_se: Annotated[FiniteFloat, Field(description="standard error over predictions or chunks, the larger [nat]")]
    ppl_ratio: FiniteFloat
    source: Annotated[str, Field(description="path of the text")]
    sha256: Annotated[str, Field(description="SHA-256 of the token ids")]
    context: Annotated[int, Field(description="tokens per chunk")]
    chunks: int


class Plan(Document):
    """A recipe for each layer, with the least cost within a budget.

    ``cost`` is a sum over layers in units of ``measure``; no plan with these recipes and groups costs less than
    ``bound``.
    """

    VIEW: ClassVar[str] = "quanterr.report.plan.view"
    ITEMS: ClassVar[Mapping[str, str]] = {"layers": "layer"}

    schema_: str = Field(SCHEMA, alias="schema")
    schema_version: str = SCHEMA_VERSION
    original: str = Field(description="path of the original")
    original_bytes: int
    architecture: str = Field(description="architecture in llama.cpp's terms, which determines its tensor names")
    selection: Selection
    goal: str = Field(description="the option that set the goal")
    measure: Measure
    notes: list[str] = Field(description="caveats about the plan")
    recipes: list[str]
    bytes: Annotated[int, Score("size", "lower", "bytes of all tensors, planned or not", "B")]
    bits_per_weight: Annotated[FiniteFloat, Score("bits per weight", "lower", "bits per weight of the planned layers")]
    cost: Annotated[FiniteFloat, Score("cost", "lower", "sum over the layers, in units of `measure`")]
    bound: FiniteFloat = Field(description="lower bound on the cost of any plan")
    snr_db: Annotated[
        Number, Score("predicted SNR", "higher", "SNR over the planned layers [dB]; null if nothing changes", "dB")
    ]
    least_bytes: int = Field(description="smallest size that these recipes can reach")
    unplanned_bytes: int = Field(description="bytes of tensors that are not planned: norms, embeddings, heads")
    layers: list[PlannedLayer] = Field(description="layers in the original's order")
    uniform: list[Uniform] = Field(description="single recipes for all layers, the smallest first")
    curve: list[Point] = Field(description="least cost by size, the smallest first")
    knee: Point | None = Field(description="point from which further bytes gain less")
    measured: Measurement | None = Field(None, description="measured effect; null without --verify")
    run: RunInfo

    @property
    def marks(self) -> dict[str, Marks]:
        """Properties that identify the original, by layer."""
        return {layer.layer_name: Marks(layer.original_norm, layer.original_fingerprint) for layer in self.layers}

    @property
    def measured_kld(self) -> float | None:
        """The measured KL divergence [nat]; None without a measurement."""
        return None if self.measured is None else self.measured.kld
