"""Several candidates for one original: data with a schema version, made from their reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar, Literal

from pydantic import Field, FiniteFloat

from quanterr.report import notebook
from quanterr.report.base import Finding, RunInfo, Score, Tool
from quanterr.report.document import Document
from quanterr.report.gate_results import Gate
from quanterr.report.model import Selection

SCHEMA = "quanterr.ranking"
# 1.1 adds gates, kept, weighted_snr_db, predicted_kld, the verdict fail; 1.2 gains; 1.3 studies, tokens_per_second;
# 1.4 sample, snr_db_margin, columns of studies
SCHEMA_VERSION = "1.5"  # 1.5 adds a checksum


Margin = Annotated[
    FiniteFloat | None,
    Field(description="of sweep --sample: 95 of 100 samples are no further from all rows [dB]; null: no estimate"),
]


@dataclass(slots=True)
class WorstLayer:
    """The layer with the lowest SNR of a candidate."""

    layer_name: str
    display_name: str
    snr_db: FiniteFloat | None


@dataclass(slots=True)
class Candidate:
    """One candidate. What is null of a candidate that is not ranked would not belong beside the others."""

    name: Annotated[str, Field(description="the end of its path, as far as it distinguishes it")]
    path: str
    verdict: Annotated[Literal["pass", "fail", "inconclusive"], Field(description="as compare's")]
    reasons: list[str]
    rank: Annotated[int | None, Field(description="1 has the least error; null: not ranked, as not_ranked says")]
    not_ranked: str | None
    on_front: Annotated[bool, Field(description="no other has as little error in as few bytes")]
    behind: Annotated[str | None, Field(description="no larger, no more error, and less of one of them")]
    bytes: Annotated[
        int | None, Field(description="of the tensors that all ranked candidates have"), Score("size", "lower", "B")
    ]
    bits_per_weight: Annotated[
        FiniteFloat | None, Field(description="of the same [bit]"), Score("bits per weight", "lower")
    ]
    squared_error: Annotated[FiniteFloat | None, Field(description="Σe² over the layers, 0 for identical ones")]
    snr_db: Annotated[
        FiniteFloat | None,
        Field(description="Σx² / Σe² over the layers; null where either is 0 [dB]"),
        Score("SNR", "higher", "dB"),
    ]
    best_layers: Annotated[int, Field(description="layers in which it has the least error")]
    checkpoint_bytes: Annotated[int, Field(description="of all its tensors")]
    overall_snr_db: Annotated[FiniteFloat | None, Field(description="as compare's: over its own layers that differ")]
    weighted_snr_db: Annotated[
        FiniteFloat | None,
        Field(description="as compare's: null without importance [dB]"),
        Score("weighted SNR", "higher", "dB"),
    ]
    predicted_kld: Annotated[
        FiniteFloat | None,
        Field(description="Σ alpha · NMSE over its layers; null without --sensitivity [nat]"),
        Score("predicted KLD", "lower", "nat"),
    ]
    excess_db: Annotated[
        FiniteFloat | None,
        Field(description="as compare's: beyond what its scales allow [dB]"),
        Score("avoidable error", "lower", "dB"),
    ]
    worst_layer: WorstLayer | None
    formats: Annotated[dict[str, int], Field(description="format → layers that differ")]
    findings: list[Finding]
    gates: list[Gate]
    tokens_per_second: Annotated[
        FiniteFloat | None,
        Field(description="that memory bandwidth allows at most, with sweep --hardware"),
        Score("tokens/s at most", "higher"),
    ] = None
    snr_db_margin: Margin = None


@dataclass(slots=True)
class Choice:
    """A layer as one candidate stores it."""

    candidate: str
    format: str
    bytes: int
    squared_error: FiniteFloat
    snr_db: Annotated[FiniteFloat | None, Field(description="null: the same as the original, or that is zeros")]
    snr_db_margin: Margin = None


@dataclass(slots=True)
class RankedLayer:
    """A layer that differs in at least one ranked candidate."""

    layer_name: str
    display_name: str
    tensor_elements: int
    best: Annotated[str, Field(description="the candidate with the least error, of equal ones the smallest")]
    choices: list[Choice]


@dataclass(slots=True)
class Swap:
    """A layer, stored as in another candidate. Less error is a negative change."""

    layer_name: str
    display_name: str
    take_from: Annotated[str | None, Field(description="the other candidate; null: the original")]
    format: str
    bytes_change: int
    squared_error_change: FiniteFloat


@dataclass(slots=True)
class Swaps:
    """The few layers of a candidate that would gain most for their bytes, and what comes of all of them."""

    candidate: str
    layers: list[Swap]
    bytes_change: int
    bytes: int
    squared_error_change: FiniteFloat
    snr_db: Annotated[FiniteFloat | None, Field(description="with all of them swapped; null without any error")]


@dataclass(slots=True)
class Gain:
    """What a choice buys: two recipes that differ in it alone."""

    what: Annotated[str, Field(description="bits, finer scales, zero points, calibration, scales quantized again")]
    instead_of: str
    candidate: str
    snr_gain_db: FiniteFloat
    bytes_change: int


@dataclass(slots=True)
class Changed:
    """What a change of a recipe does to its error."""

    percent: FiniteFloat
    gain_db: Annotated[
        FiniteFloat | None, Field(description="negative: more error; null: no error, or scales among the codes [dB]")
    ]


@dataclass(slots=True)
class Study:
    """What outliers cost a recipe, and how much its error depends on its scales; of a sample of rows of each weight."""

    candidate: str
    outliers: Annotated[list[Changed], Field(description="that share of the largest elements stays as it is")]
    scales: Annotated[list[Changed], Field(description="what scales are made of is larger or smaller by that")]
    columns: Annotated[
        list[Changed],
        Field(description="that share of the columns with the largest importance stays; empty without --importance"),
    ] = field(default_factory=list)


class Ranking(Document):
    """Several candidates for one original, next to each other.

    Error is compared over the same layers for all: those that differ in at least one of the ranked
    candidates. A candidate that is inconclusive is not ranked and changes nothing for the others.
    """

    VIEW: ClassVar[str] = "quanterr.report.ranking.view"
    ITEMS: ClassVar[Mapping[str, str]] = {"layers": "layer"}

    schema_: str = Field(SCHEMA, alias="schema")
    schema_version: str = SCHEMA_VERSION
    tool: Tool
    verdict: Literal["pass", "fail", "inconclusive"] = Field(
        description="inconclusive if a candidate is not ranked; fail if one does not hold its gates"
    )
    reasons: list[str]
    complete: bool = Field(description="false when the run was interrupted")
    gated: bool = Field(False, description="whether limits were set: what passes without was compared, not approved")
    original: str = Field(description="path")
    original_bytes: int
    selection: Selection
    tensors: int = Field(description="that all ranked candidates have")
    elements: int = Field(description="of these")
    candidates: list[Candidate] = Field(description="the least error first; at the end those that are not ranked")
    front: list[str] = Field(description="candidates that no other beats in error and bytes, the smallest first")
    swaps: list[Swaps] = Field(description="of candidates on the front")
    kept: list[Swaps] = Field(
        description="layers to leave as in the original: within the budget that was given, of each ranked candidate; "
        "without one, of the first, if a few make most of its error"
    )
    gains: list[Gain] = Field(description="of recipes that differ in one respect, of sweep and rank --against")
    studies: list[Study] = Field([], description="of recipes, with sweep --study")
    sample: FiniteFloat | None = Field(None, description="the share of rows that was read; null: all")
    layers: list[RankedLayer] = Field(description="by their names, layers.2 before layers.10")
    run: RunInfo

    @property
    def gates(self) -> list[Gate]:
        """Those of all candidates."""
        return [gate for candidate in self.candidates for gate in candidate.gates]

    def to_pandas(self) -> notebook.Frame:
        """A pandas.DataFrame with a row per candidate.

        Raises:
            UsageError: pandas is not installed.
        """
        plain = [field.name for field in fields(Candidate) if field.name not in ("reasons", "formats", "findings")]
        rows = ({name: getattr(candidate, name) for name in plain} for candidate in self.candidates)
        return notebook.frame(
            row | {"worst_layer": row["worst_layer"] and row["worst_layer"].layer_name} for row in rows
        )
