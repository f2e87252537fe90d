"""The ranking of candidates for one original: data with a schema version, made from their reports."""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

from quanterr.documents.base import Finding, Model, RunInfo
from quanterr.documents.comparison.model import Selection
from quanterr.documents.document import Document
from quanterr.documents.gate_results import Gate, Givers, Word
from quanterr.documents.loading import Loading
from quanterr.metrics.scores import Number, doc, score
from quanterr.util.strict_json import JsonObject

Margin = Annotated[
    Number, doc("half-width of the 95 % interval of an estimate by sweep --sample [dB]; null: not an estimate")
]


class WorstLayer(Model):
    """The layer of a candidate with the lowest SNR."""

    layer_name: str
    display_name: str
    snr_db: Number


class Candidate(Model):
    """A candidate. Fields that compare candidates are null if it is not ranked."""

    name: Annotated[str, doc("shortest end of the path that is unique")]
    path: str
    verdict: Annotated[Word, doc("verdict of the comparison")]
    reasons: list[str]
    rank: Annotated[int | None, doc("1 has the least error; null: not ranked, see not_ranked")]
    not_ranked: str | None
    on_front: Annotated[bool, doc("true if no other candidate has as little error in as few bytes")]
    behind: Annotated[str | None, doc("a candidate that is no worse in bytes and error, and better in one")]
    bytes: Annotated[int | None, score("size", "lower", "bytes of tensors common to all ranked candidates", "B")]
    bits_per_weight: Annotated[Number, score("bits/w", "lower", "bits per weight of these tensors [bit]", "bit")]
    squared_error: Annotated[Number, doc("Σe² over the layers; identical layers count as 0")]
    snr_db: Annotated[Number, score("SNR", "higher", "Σx² / Σe² over the layers; null where either is 0 [dB]", "dB")]
    best_layers: Annotated[int, doc("number of layers in which this candidate has the lowest error")]
    checkpoint_bytes: Annotated[int, doc("bytes of all tensors of the candidate")]
    overall_snr_db: Annotated[Number, doc("SNR over the candidate's own differing layers [dB]")]
    weighted_snr_db: Annotated[
        Number, score("weighted SNR", "higher", "as in a report [dB]; null without --importance", "dB")
    ]
    predicted_kld: Annotated[
        Number,
        score("predicted KLD", "lower", "Σ alpha · NMSE over the layers [nat]; null without --sensitivity", "nat"),
    ]
    excess_db: Annotated[
        Number, score("excess", "lower", "loss of the stored codes against the nearest, as in a report [dB]", "dB")
    ]
    worst_layer: WorstLayer | None
    formats: Annotated[dict[str, int], doc("number of differing layers by format")]
    findings: list[Finding]
    gates: list[Gate]
    tokens_per_second: Annotated[
        Number, score("max. tokens/s", "higher", "upper bound by memory bandwidth, with sweep --hardware")
    ] = None
    snr_db_margin: Margin = None
    predicted_output_error: Annotated[
        Number,
        score(
            "predicted output error",
            "lower",
            "Σ alpha · NMSE over the layers; null without a --sensitivity of recorded calls",
            "share",
        ),
    ] = None
    kld_mean: Annotated[
        Number, score("KLD", "lower", "mean of KL(original || candidate) in the evaluation [nat]", "nat")
    ] = None
    kld_mean_se: Annotated[Number, doc("its standard error over predictions or chunks [nat]")] = None
    ppl: Annotated[Number, score("PPL", "lower", "perplexity in the evaluation")] = None
    ppl_se: Annotated[Number, doc("its standard error")] = None
    top1: Annotated[
        Number,
        score("same top token", "higher", "share of predictions with the same most probable token", "share"),
    ] = None
    top1_se: Annotated[Number, doc("its standard error")] = None
    output_error: Annotated[
        Number, score("output error", "lower", "relative squared error of the outputs of recorded calls", "share")
    ] = None
    output_error_se: Annotated[Number, doc("its standard error over groups of calls")] = None
    unreadable: Annotated[bool, doc("true if the checkpoint could not be read; not_ranked has the error")] = False
    reasons_by: Givers = None
    loading: Annotated[list[Loading], doc("whether programs load it, of those that --for names")] = []


class Choice(Model):
    """A layer as stored by one candidate."""

    candidate: str
    format: str
    bytes: int
    squared_error: float
    snr_db: Annotated[Number, doc("null if identical, or if the original is zero [dB]")]
    snr_db_margin: Margin = None


class RankedLayer(Model):
    """A layer that differs in at least one ranked candidate."""

    layer_name: str
    display_name: str
    tensor_elements: int
    best: Annotated[str, doc("candidate with the least error; of equals, the smallest")]
    choices: list[Choice]


class Swap(Model):
    """The effect of storing a layer as another candidate or the original does; less error or size is negative."""

    layer_name: str
    display_name: str
    take_from: Annotated[str | None, doc("the candidate to take the layer from; null: the original")]
    format: str
    bytes_change: int
    squared_error_change: float


class Swaps(Model):
    """The layers of a candidate that gain most per byte when swapped, and the effect of all swaps together."""

    candidate: str
    layers: list[Swap]
    bytes_change: int
    bytes: int
    squared_error_change: float
    snr_db: Annotated[Number, doc("after all swaps; null without any error")]


class Gain(Model):
    """The gain of a choice: two recipes that differ only in it."""

    what: Annotated[str, doc("bits, finer scales, zero points, calibration, scales quantized again")]
    instead_of: str
    candidate: str
    snr_gain_db: float
    bytes_change: int


class Changed(Model):
    """The effect of a change of a recipe on its error."""

    percent: float
    gain_db: Annotated[
        Number, doc("change of SNR, negative for more error [dB]; null: no error, or scales stored as codes")
    ]


class Study(Model):
    """Effects of outliers and of scales on a recipe's error, on a sample of each weight's rows."""

    candidate: str
    outliers: Annotated[list[Changed], doc("effect of keeping the largest elements, `percent` of all")]
    scales: Annotated[list[Changed], doc("effect of deriving scales from values larger by `percent`")]
    columns: Annotated[
        list[Changed], doc("effect of keeping the most important columns, `percent` of all; empty without --importance")
    ] = []


class Ranking(Document, kw_only=True):
    """Several candidates for one original, side by side.

    Errors cover the same layers for all: those that differ in at least one ranked candidate. An inconclusive candidate
    is not ranked and does not affect the others.
    """

    ITEMS: ClassVar[Mapping[str, str]] = {"layers": "layer"}

    schema_: str = "quanterr.ranking"
    # 1.1 adds gates, kept, weighted_snr_db, predicted_kld, the verdict fail; 1.2 gains; 1.3 studies, tokens_per_second;
    # 1.4 sample, snr_db_margin, columns of studies; 1.5 a checksum; 1.6 predicted_output_error;
    # 1.7 evaluation, its scores, unreadable, reasons_by,
    # loading
    schema_version: str = "1.7"
    verdict: Annotated[
        Word, doc("inconclusive if a candidate is not ranked; fail if a gate of a candidate does not hold")
    ]
    reasons: list[str]
    reasons_by: Givers = None
    complete: Annotated[bool, doc("false if the run was interrupted")]
    gated: Annotated[bool, doc("true if gates were set; without gates, pass means compared, not approved")] = False
    original: Annotated[str, doc("path of the original")]
    original_bytes: int
    selection: Selection
    tensors: Annotated[int, doc("number of tensors common to all ranked candidates")]
    elements: Annotated[int, doc("number of elements of these tensors")]
    candidates: Annotated[list[Candidate], doc("the least error first; candidates without a rank last")]
    front: Annotated[list[str], doc("Pareto-optimal candidates in error and bytes, the smallest first")]
    swaps: Annotated[list[Swaps], doc("swaps for Pareto-optimal candidates")]
    kept: Annotated[
        list[Swaps],
        doc(
            "layers to leave as in the original: for each ranked candidate within the budget; without one, "
            "for the first candidate, if a few layers make most of its error"
        ),
    ]
    gains: Annotated[list[Gain], doc("gains between recipes that differ in one respect")]
    studies: Annotated[list[Study], doc("studies of recipes, only with sweep --study")] = []
    sample: Annotated[Number, doc("share of rows that were read, 0 to 1; null: all")] = None
    evaluation: Annotated[str | None, doc("path of the evaluation whose scores the candidates have")] = None
    layers: Annotated[list[RankedLayer], doc("in natural order of names: layers.2 before layers.10")]
    run: RunInfo

    @property
    def ranked(self) -> list[Candidate]:
        """The candidates with a rank, the least error first."""
        return [candidate for candidate in self.candidates if candidate.rank is not None]

    @property
    def gates(self) -> list[Gate]:
        """The gates of all candidates."""
        return [gate for candidate in self.candidates for gate in candidate.gates]

    def _iterate_frame_rows(self) -> Iterator[JsonObject]:
        plain = [
            name
            for name in Candidate.__struct_fields__
            if name not in ("reasons", "reasons_by", "formats", "findings", "loading")
        ]
        for candidate in self.candidates:
            worst = candidate.worst_layer and candidate.worst_layer.layer_name
            yield {name: getattr(candidate, name) for name in plain} | {"worst_layer": worst}
