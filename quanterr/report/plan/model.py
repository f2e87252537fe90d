"""A plan: which recipe each layer of an original should have; data with a schema version."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Literal

from pydantic import Field, FiniteFloat

from quanterr.report import notebook
from quanterr.report.base import RunInfo, Score, Tool
from quanterr.report.document import Document
from quanterr.report.model import Selection

SCHEMA = "quanterr.plan"
SCHEMA_VERSION = "1.3"  # 1.1 adds weighted squared error; 1.2 what the original is known by; 1.3 measured
Measure = Literal["squared error", "weighted squared error", "predicted KLD"]
ORIGINAL = "original"  # in the place of a recipe: the layer stays as it is

Number = FiniteFloat | None


@dataclass(slots=True)
class PlannedLayer:
    """What a layer should be."""

    layer_name: str
    display_name: str
    recipe: Annotated[str, Field(description="see `quanterr formats --recipes`; original: it stays as it is")]
    format: Annotated[str, Field(description="as a report calls it; of the original's where it stays")]
    elements: int
    bytes: int
    bits_per_weight: FiniteFloat
    snr_db: Annotated[Number, Field(description="predicted, exactly: null where nothing changes [dB]")]
    cost: Annotated[FiniteFloat, Field(description="its share of the plan's cost, in its measure")]
    original_norm: Annotated[Number, Field(description="identifies the original")] = None
    original_fingerprint: Annotated[str | None, Field(description="the same, as a report has it")] = None


@dataclass(slots=True)
class Uniform:
    """One recipe for all layers that it can store."""

    recipe: str
    bytes: int
    cost: FiniteFloat
    fits: Annotated[bool, Field(description="within the limit that the plan keeps, of bytes or cost")]


@dataclass(slots=True)
class Point:
    """The least cost of a size."""

    bytes: int
    cost: FiniteFloat


@dataclass(slots=True)
class Measurement:
    """What a plan does to the model: it was quantized on the fly and run beside the original."""

    kld: Annotated[FiniteFloat, Field(description="mean divergence [nat]")]
    kld_se: Annotated[FiniteFloat, Field(description="its standard error, of predictions or chunks: the larger")]
    ppl_ratio: FiniteFloat
    source: Annotated[str, Field(description="the text")]
    sha256: Annotated[str, Field(description="of its token ids")]
    context: Annotated[int, Field(description="tokens of a chunk")]
    chunks: int


class Plan(Document):
    """The recipe of each layer that leaves the least cost within a budget.

    ``cost`` is the sum over the layers of what ``measure`` says. No plan of these recipes and groups costs less than
    ``bound``.
    """

    VIEW: ClassVar[str] = "quanterr.report.plan.view"
    ITEMS: ClassVar[Mapping[str, str]] = {"layers": "layer"}

    schema_: str = Field(SCHEMA, alias="schema")
    schema_version: str = SCHEMA_VERSION
    tool: Tool
    original: str = Field(description="path")
    original_bytes: int
    architecture: str = Field(description="as llama.cpp calls it, for its names of tensors")
    selection: Selection
    goal: str = Field(description="the option that asked for it")
    measure: Measure
    notes: list[str] = Field(description="what should be known before the plan is believed")
    recipes: list[str]
    bytes: Annotated[int, Score("size", "lower", "B")] = Field(description="of all tensors, planned or not")
    bits_per_weight: Annotated[FiniteFloat, Score("bits per weight", "lower")] = Field(
        description="of the planned layers"
    )
    cost: Annotated[FiniteFloat, Score("cost", "lower")]
    bound: FiniteFloat = Field(description="no plan costs less")
    snr_db: Annotated[Number, Score("predicted SNR", "higher", "dB")] = Field(
        description="of the planned layers together; null if nothing changes [dB]"
    )
    least_bytes: int = Field(description="the smallest size that these recipes reach")
    unplanned_bytes: int = Field(description="of tensors that stay: norms, embeddings, heads")
    layers: list[PlannedLayer] = Field(description="in the order of the original")
    uniform: list[Uniform] = Field(description="the smallest first")
    curve: list[Point] = Field(description="from the smallest size to the largest")
    knee: Point | None = Field(description="where more bytes begin to buy less")
    measured: Measurement | None = Field(None, description="null: predicted alone, without --verify")
    run: RunInfo

    @property
    def measured_kld(self) -> float | None:
        """The divergence that was measured [nat]; None where none was."""
        return None if self.measured is None else self.measured.kld

    def to_pandas(self) -> notebook.Frame:
        """A pandas.DataFrame with a row per layer.

        Raises:
            UsageError: pandas is not installed.
        """
        names = [field.name for field in fields(PlannedLayer)]
        return notebook.frame({name: getattr(layer, name) for name in names} for layer in self.layers)
