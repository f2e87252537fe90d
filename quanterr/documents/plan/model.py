"""The plan: a recipe for each layer of an original, as data with a schema version."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from quanterr.documents.base import Model, RunInfo
from quanterr.documents.comparison.model import Selection
from quanterr.documents.document import Document
from quanterr.metrics.scores import Number, doc, score

Measure = Literal["squared error", "weighted squared error", "predicted KLD", "predicted output error"]
ORIGINAL = "original"  # recipe of a layer that stays unquantized


class PlannedLayer(Model):
    """The planned recipe of a layer."""

    layer_name: str
    display_name: str
    recipe: Annotated[str, doc("see `quanterr formats --recipes`; original: the layer stays as it is")]
    format: Annotated[str, doc("format, as in a report")]
    elements: int
    bytes: int
    bits_per_weight: float
    snr_db: Annotated[Number, doc("exact SNR after quantization [dB]; null if unchanged")]
    cost: Annotated[float, doc("the layer's part of the plan's cost, in units of measure")]
    original_norm: Annotated[Number, doc("identifies the original")] = None
    original_fingerprint: Annotated[str | None, doc("identifies the original, as in a report")] = None
    usual_bytes: Annotated[int | None, doc("of an unquantized layer: bytes in the plan's most frequent recipe")] = None
    usual_cost: Annotated[Number, doc("of an unquantized layer: its cost in the plan's most frequent recipe")] = None


class Uniform(Model):
    """One recipe for all layers that it supports."""

    recipe: str
    bytes: int
    cost: float
    fits: Annotated[bool, doc("true if it is within the plan's limit of bytes or cost")]


class Point(Model):
    """The least cost at a size."""

    bytes: int
    cost: float


class Measurement(Model):
    """The measured effect of a plan, quantized on the fly and run together with the original."""

    kld: Annotated[float, doc("mean KL divergence [nat]")]
    kld_se: Annotated[float, doc("standard error over predictions or chunks, the larger [nat]")]
    ppl_ratio: float
    source: Annotated[str, doc("path of the text")]
    sha256: Annotated[str, doc("SHA-256 of the token ids")]
    context: Annotated[int, doc("tokens per chunk")]
    chunks: int


class Plan(Document, kw_only=True):
    """A recipe for each layer, with the least cost within a budget.

    ``cost`` is a sum over layers in units of ``measure``. No plan with these recipes and groups that is within the
    budget costs less than ``bound``.
    """

    ITEMS: ClassVar[Mapping[str, str]] = {"layers": "layer"}

    schema_: str = "quanterr.plan"
    # 1.1 adds weighted squared error; 1.2 fields that identify the original; 1.3 measured; 1.4 predicted output error;
    # 1.5 what unquantized layers cost and gain; 1.6 importance, minimizes
    schema_version: str = "1.6"
    original: Annotated[str, doc("path of the original")]
    original_bytes: int
    architecture: Annotated[str, doc("architecture in llama.cpp's terms, which determines its tensor names")]
    selection: Selection
    goal: Annotated[str, doc("the option that set the goal")]
    minimizes: Annotated[
        Literal["bytes", "cost"] | None, doc("what no other plan within the goal has less of; null: not stored")
    ] = None
    measure: Measure
    notes: Annotated[list[str], doc("caveats about the plan")]
    recipes: list[str]
    bytes: Annotated[int, score("size", "lower", "bytes of all tensors, planned or not", "B")]
    bits_per_weight: Annotated[float, score("bits/w", "lower", "bits per weight of the planned layers", "bit")]
    cost: Annotated[float, score("cost", "lower", "sum over the layers, in units of `measure`")]
    bound: Annotated[float, doc("lower bound on the cost within the budget; for a limit on the cost, the cost")]
    snr_db: Annotated[
        Number, score("predicted SNR", "higher", "SNR over the planned layers [dB]; null if nothing changes", "dB")
    ]
    least_bytes: Annotated[int, doc("smallest size that these recipes can reach")]
    unplanned_bytes: Annotated[int, doc("bytes of tensors that are not planned: norms, embeddings, heads")]
    layers: Annotated[list[PlannedLayer], doc("layers in the original's order")]
    uniform: Annotated[list[Uniform], doc("single recipes for all layers, the smallest first")]
    curve: Annotated[list[Point], doc("least cost by size, the smallest first")]
    knee: Annotated[Point | None, doc("point from which further bytes gain less")]
    measured: Annotated[Measurement | None, doc("measured effect; null without --measure")] = None
    importance: Annotated[str | None, doc("importance matrix that the plan assumes; null without --importance")] = None
    run: RunInfo

    @property
    def measured_kld(self) -> float | None:
        """The measured KL divergence [nat]; None if it was not measured."""
        return None if self.measured is None else self.measured.kld
