"""The ranking of candidates for one original: data with a schema version, made from their reports."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar, Literal

from pydantic import Field, FiniteFloat

from quanterr.report.base import Finding, Number, RunInfo, Score
from quanterr.report.document import Document
from quanterr.report.gate_results import Gate
from quanterr.report.model import Selection
from quanterr.util.strict_json import JsonObject

SCHEMA = "quanterr.ranking"
# 1.1 adds gates, kept, weighted_snr_db, predicted_kld, the verdict fail; 1.2 gains; 1.3 studies, tokens_per_second;
# 1.4 sample, snr_db_margin, columns of studies; 1.5 a checksum; 1.6 predicted_output_error
SCHEMA_VERSION = "1.6"


Margin = Annotated[
    Number,
    Field(description="half-width of the 95 % interval of an estimate by sweep --sample [dB]; null: not an estimate"),
]


@dataclass(slots=True)
class WorstLayer:
    """The layer of a candidate with the lowest SNR."""

    layer_name: str
    display_name: str
    snr_db: Number


@dataclass(slots=True)
class Candidate:
    """A candidate. Fields that compare candidates are null if it is not ranked."""

    name: Annotated[str, Field(description="shortest end of the path that is unique")]
    path: str
    verdict: Annotated[Literal["pass", "fail", "inconclusive"], Field(description="verdict of the comparison")]
    reasons: list[str]
    rank: Annotated[int | None, Field(description="1 has the least error; null: not ranked, see not_ranked")]
    not_ranked: str | None
    on_front: Annotated[bool, Field(description="true if no other candidate has as little error in as few bytes")]
    behind: Annotated[
        str | None, Field(description="a candidate that is no worse in bytes and error, and better in one")
    ]
    bytes: Annotated[int | None, Score("size", "lower", "bytes of tensors common to all ranked candidates", "B")]
    bits_per_weight: Annotated[Number, Score("bits per weight", "lower", "bits per weight of these tensors [bit]")]
    squared_error: Annotated[Number, Field(description="Σe² over the layers; identical layers count as 0")]
    snr_db: Annotated[Number, Score("SNR", "higher", "Σx² / Σe² over the layers; null where either is 0 [dB]", "dB")]
    best_layers: Annotated[int, Field(description="number of layers in which this candidate has the least error")]
    checkpoint_bytes: Annotated[int, Field(description="bytes of all tensors of the candidate")]
    overall_snr_db: Annotated[Number, Field(description="SNR over the candidate's own differing layers [dB]")]
    weighted_snr_db: Annotated[
        Number, Score("weighted SNR", "higher", "as in a report [dB]; null without --importance", "dB")
    ]
    predicted_kld: Annotated[
        Number,
        Score("predicted KLD", "lower", "Σ alpha · NMSE over the layers [nat]; null without --sensitivity", "nat"),
    ]
    excess_db: Annotated[
        Number, Score("avoidable error", "lower", "avoidable loss under the stored scales, as in a report [dB]", "dB")
    ]
    worst_layer: WorstLayer | None
    formats: Annotated[dict[str, int], Field(description="number of differing layers by format")]
    findings: list[Finding]
    gates: list[Gate]
    tokens_per_second: Annotated[
        Number, Score("max. tokens/s", "higher", "upper bound by memory bandwidth, with sweep --hardware")
    ] = None
    snr_db_margin: Margin = None
    predicted_output_error: Annotated[
        Number,
        Score(
            "predicted output error",
            "lower",
            "Σ alpha · NMSE over the layers; null without a --sensitivity of recorded calls",
            "%",
        ),
    ] = None


@dataclass(slots=True)
class Choice:
    """A layer as stored by one candidate."""

    candidate: str
    format: str
    bytes: int
    squared_error: FiniteFloat
    snr_db: Annotated[Number, Field(description="null if identical, or if the original is zero [dB]")]
    snr_db_margin: Margin = None


@dataclass(slots=True)
class RankedLayer:
    """A layer that differs in at least one ranked candidate."""

    layer_name: str
    display_name: str
    tensor_elements: int
    best: Annotated[str, Field(description="candidate with the least error; of equals, the smallest")]
    choices: list[Choice]


@dataclass(slots=True)
class Swap:
    """The effect of storing a layer as another candidate or the original does; less error or size is negative."""

    layer_name: str
    display_name: str
    take_from: Annotated[str | None, Field(description="the candidate to take the layer from; null: the original")]
    format: str
    bytes_change: int
    squared_error_change: FiniteFloat


@dataclass(slots=True)
class Swaps:
    """The layers of a candidate that gain most per byte when swapped, and the effect of all swaps together."""

    candidate: str
    layers: list[Swap]
    bytes_change: int
    bytes: int
    squared_error_change: FiniteFloat
    snr_db: Annotated[Number, Field(description="after all swaps; null without any error")]


@dataclass(slots=True)
class Gain:
    """The gain of a choice: two recipes that differ only in it."""

    what: Annotated[str, Field(description="bits, finer scales, zero points, calibration, scales quantized again")]
    instead_of: str
    candidate: str
    snr_gain_db: FiniteFloat
    bytes_change: int


@dataclass(slots=True)
class Changed:
    """The effect of a change of a recipe on its error."""

    percent: FiniteFloat
    gain_db: Annotated[
        Number,
        Field(description="change of SNR, negative for more error [dB]; null: no error, or scales stored as codes"),
    ]


@dataclass(slots=True)
class Study:
    """Effects of outliers and of scales on a recipe's error, on a sample of each weight's rows."""

    candidate: str
    outliers: Annotated[list[Changed], Field(description="effect of keeping the largest elements, `percent` of all")]
    scales: Annotated[list[Changed], Field(description="effect of deriving scales from values larger by `percent`")]
    columns: Annotated[
        list[Changed],
        Field(description="effect of keeping the most important columns, `percent` of all; empty without --importance"),
    ] = field(default_factory=list)


class Ranking(Document):
    """Several candidates for one original, side by side.

    Errors cover the same layers for all: those that differ in at least one ranked candidate. An inconclusive candidate
    is not ranked and does not affect the others.
    """

    VIEW: ClassVar[str] = "quanterr.report.ranking.view"
    ITEMS: ClassVar[Mapping[str, str]] = {"layers": "layer"}

    schema_: str = Field(SCHEMA, alias="schema")
    schema_version: str = SCHEMA_VERSION
    verdict: Literal["pass", "fail", "inconclusive"] = Field(
        description="inconclusive if a candidate is not ranked; fail if a gate of a candidate does not hold"
    )
    reasons: list[str]
    complete: bool = Field(description="false if the run was interrupted")
    gated: bool = Field(False, description="true if gates were set; without gates, pass means compared, not approved")
    original: str = Field(description="path of the original")
    original_bytes: int
    selection: Selection
    tensors: int = Field(description="number of tensors common to all ranked candidates")
    elements: int = Field(description="number of elements of these tensors")
    candidates: list[Candidate] = Field(description="the least error first; candidates without a rank last")
    front: list[str] = Field(description="Pareto-optimal candidates in error and bytes, the smallest first")
    swaps: list[Swaps] = Field(description="swaps for Pareto-optimal candidates")
    kept: list[Swaps] = Field(
        description="layers to leave as in the original: for each ranked candidate within the budget; without one, "
        "for the first candidate, if a few layers make most of its error"
    )
    gains: list[Gain] = Field(description="gains between recipes that differ in one respect")
    studies: list[Study] = Field([], description="studies of recipes, only with sweep --study")
    sample: Number = Field(None, description="share of rows that were read, 0 to 1; null: all")
    layers: list[RankedLayer] = Field(description="in natural order of names: layers.2 before layers.10")
    run: RunInfo

    @property
    def gates(self) -> list[Gate]:
        """The gates of all candidates."""
        return [gate for candidate in self.candidates for gate in candidate.gates]

    def _frame_rows(self) -> Iterator[JsonObject]:
        plain = [field.name for field in fields(Candidate) if field.name not in ("reasons", "formats", "findings")]
        for candidate in self.candidates:
            worst = candidate.worst_layer and candidate.worst_layer.layer_name
            yield {name: getattr(candidate, name) for name in plain} | {"worst_layer": worst}
