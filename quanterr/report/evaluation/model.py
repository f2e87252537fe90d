"""The evaluation of candidates on a text: data with a schema version."""

from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar, Literal

from pydantic import Field, FiniteFloat

from quanterr.report import notebook
from quanterr.report.base import Finding, RunInfo, Score, Tool, scores_of
from quanterr.report.document import Document
from quanterr.report.evaluation import SCHEMA
from quanterr.report.gate_results import Gate
from quanterr.util.text import display

# 1.1 adds a checksum, findings, what the text is like; 1.2 activations, kv, outputs; 1.3 kld_chunks, kld_p99_se;
# 1.4 reference, texts
SCHEMA_VERSION = "1.4"

Number = FiniteFloat | None


@dataclass(slots=True)
class Tokens:
    """What both models read."""

    source: Annotated[str, Field(description="path of the text or of the token ids")]
    sha256: Annotated[str, Field(description="of the token ids: only evaluations of the same tokens compare")]
    context: Annotated[int, Field(description="tokens of a chunk")]
    chunks: int
    scored: Annotated[int, Field(description="predictions that were scored, 0 of an encoder")]
    distinct: Annotated[int | None, Field(description="tokens that occur")] = None
    commonest: Annotated[Number, Field(description="share of the token that occurs most often")] = None
    unknown: Annotated[Number, Field(description="share of tokens that the tokenizer does not know")] = None
    repeated: Annotated[int | None, Field(description="chunks that are the same as earlier ones")] = None
    tokenizer: Annotated[str | None, Field(description="SHA-256 of what tokenizer.json makes of a text")] = None


@dataclass(slots=True)
class NamedTokens:
    """One of several texts."""

    name: str
    tokens: Tokens


@dataclass(slots=True)
class Scores:
    """Predictions, as llama.cpp's perplexity defines these numbers. ``_se`` is a standard error."""

    tokens: int
    chunks: int
    ppl_original: Annotated[FiniteFloat, Field(description="perplexity of the original: exp of the mean of -ln p")]
    ppl_original_se: FiniteFloat
    ppl: Annotated[FiniteFloat, Score("PPL", "lower", column=2), Field(description="perplexity of the candidate")]
    ppl_se: FiniteFloat
    ppl_ratio: Annotated[FiniteFloat, Score("PPL ratio", "lower", column=3), Field(description="ppl / ppl_original")]
    ln_ppl_ratio: FiniteFloat
    ln_ppl_ratio_se: Annotated[FiniteFloat, Field(description="the covariance of both counted")]
    ln_ppl_ratio_chunk_se: Annotated[Number, Field(description="from the means of chunks")]
    kld_mean: Annotated[
        FiniteFloat,
        Score("KLD", "lower", "nat", column=0),
        Field(description="mean of KL(original || candidate) over the predictions [nat]"),
    ]
    kld_mean_se: FiniteFloat
    kld_mean_chunk_se: Number
    kld_median: FiniteFloat
    kld_p90: FiniteFloat
    kld_p95: FiniteFloat
    kld_p99: Annotated[FiniteFloat, Score("KLD 99 %", "lower", "nat", column=1)]
    kld_p99_9: FiniteFloat
    kld_max: Annotated[FiniteFloat, Score("largest KLD", "lower", "nat")]
    top1: Annotated[
        FiniteFloat,
        Score("same top token", "higher", "%", column=4),
        Field(description="share of predictions with the same most probable token"),
    ]
    top1_se: FiniteFloat
    top5_overlap: Annotated[
        FiniteFloat,
        Score("top 5 in common", "higher", "%"),
        Field(description="mean share of the five most probable tokens in common"),
    ]
    delta_p_mean: Annotated[FiniteFloat, Field(description="mean change of the probability of the token that came")]
    delta_p_mean_se: FiniteFloat
    delta_p_rms: Annotated[FiniteFloat, Score("Δp rms", "lower", "%", column=5)]
    delta_p_rms_se: FiniteFloat
    confident_flips: Annotated[
        FiniteFloat,
        Score("confident flips", "lower", "%", column=6),
        Field(description="share of predictions that flip although the original had more than 50 %"),
    ]
    kld_chunks: Annotated[list[FiniteFloat], Field(description="mean divergence of each chunk [nat]")] = field(
        default_factory=list
    )
    kld_p99_se: Annotated[Number, Field(description="from chunks drawn again; null of fewer than eight")] = None

    @property
    def kld_error(self) -> float:
        """The standard error of the mean divergence [nat], the larger of those over predictions and over chunks."""
        return max(self.kld_mean_se, self.kld_mean_chunk_se or 0.0)


@dataclass(slots=True)
class TextScores:
    """The predictions of one of several texts."""

    name: str
    scores: Scores

    @property
    def text_kld_mean(self) -> float:
        """Mean divergence on this text [nat], for rules."""
        return self.scores.kld_mean

    @property
    def text_ppl_ratio(self) -> float:
        """Ratio of perplexities on this text, for rules."""
        return self.scores.ppl_ratio

    @property
    def text_top1(self) -> float:
        """Share of predictions on this text with the same most probable token, for rules."""
        return self.scores.top1


OF_TEXTS = ("text_kld_mean", "text_ppl_ratio", "text_top1")


@dataclass(slots=True)
class Embeddings:
    """Embeddings of chunks: means of the last hidden states over their tokens."""

    chunks: int
    cosine_mean: Annotated[
        Number,
        Score("cosine", "higher", column=0),
        Field(description="mean cosine of the embeddings of both"),
    ]
    cosine_min: Annotated[Number, Score("least cosine", "higher", column=1)]
    rank_correlation: Annotated[
        Number,
        Score("rank correlation", "higher", column=2),
        Field(description="Spearman's, of the cosines between all pairs of chunks"),
    ]
    relative_error: Annotated[
        Number,
        Score("relative error", "lower", column=3),
        Field(description="‖y - x‖ / ‖x‖ of the last hidden states"),
    ]


@dataclass(slots=True)
class StepError:
    """The error of calls of one step."""

    step: int
    output_error: Number
    calls: int


@dataclass(slots=True)
class Outputs:
    """How far the outputs of recorded calls are apart, both sides given the same."""

    output_error: Annotated[
        Number, Score("output error", "lower", "%", column=0), Field(description="mean over calls of ‖y - x‖² / ‖x‖²")
    ]
    output_error_se: Annotated[Number, Field(description="standard error over groups; null of one alone")]
    output_snr_db: Annotated[
        Number,
        Score("output SNR", "higher", "dB", column=1),
        Field(description="-10·log10 of that; null: no error [dB]"),
    ]
    output_cosine: Annotated[Number, Score("cosine", "higher", column=3), Field(description="mean over calls")]
    output_error_worst: Annotated[Number, Score("worst call", "lower", "%", column=2), Field(description="of any call")]
    worst_call: Annotated[str, Field(description="its name in the file")]
    calls: int
    groups: int
    steps: Annotated[list[StepError], Field(description="by step, where calls say theirs")]


@dataclass(slots=True)
class Task:
    """Questions with choices, answered by log-likelihood."""

    name: str
    questions: int
    accuracy_original: FiniteFloat
    accuracy: Annotated[FiniteFloat, Score("accuracy", "higher", "%")]
    retention: Annotated[Number, Field(description="accuracy / accuracy_original; null: that is 0")]
    agreement: Annotated[
        FiniteFloat,
        Score("agreement", "higher", "%"),
        Field(description="share of questions that both answer alike"),
    ]
    mcnemar_p: Annotated[FiniteFloat, Field(description="exact, two-sided: that the accuracy changed is chance")]


OF_TASKS = ("accuracy", "retention", "agreement")


@dataclass(slots=True)
class BlockError:
    """How far the hidden states behind a unit are from the original's."""

    name: str
    relative_error: Annotated[Number, Field(description="‖y - x‖ / ‖x‖ over all tokens; null: not finite")]
    cosine: Number
    worst_token: int
    worst_token_error: Number


@dataclass(slots=True)
class WeightError:
    """What the error of a weight makes of the inputs that it really has."""

    layer_name: Annotated[str, Field(description="name in the original, or in the model where several make it up")]
    display_name: str
    block: Annotated[str, Field(description="the unit of the model that it is in")]
    output_error: Annotated[Number, Field(description="‖X Eᵀ‖² / ‖X Wᵀ‖² with the original's inputs X")]
    share_of_block: Annotated[Number, Field(description="of Σ ‖X Eᵀ‖² of its block")]
    inputs: Annotated[int, Field(description="rows of X")]
    predicted_kld: Annotated[Number, Field(description="what its error alone is predicted to cost [nat]")]


@dataclass(slots=True)
class Missing:
    """A tensor that the candidate lacks; the original's was taken."""

    layer_name: str
    display_name: str
    reason: str


@dataclass(slots=True)
class Evaluated:
    """A candidate."""

    name: str
    path: str
    verdict: Literal["pass", "fail", "inconclusive"]
    reasons: list[str]
    bytes: int
    scores: Annotated[Scores | None, Field(description="null of an encoder, and where logits are not finite")]
    predicted_kld: Annotated[
        Number,
        Score("predicted KLD", "lower", "nat", column=7),
        Field(description="Σ over the weights, from --sensitivity; too low beyond about 0.1 nat [nat]"),
    ]
    embeddings: Annotated[Embeddings | None, Field(description="null of a model that predicts tokens")]
    tasks: list[Task]
    not_finite: Annotated[str | None, Field(description="the first unit whose output is not finite")]
    blocks: list[BlockError]
    weights: Annotated[list[WeightError], Field(description="matrices, the largest output error first")]
    missing: list[Missing]
    gates: list[Gate]
    findings: Annotated[list[Finding], Field(description="what it says of its model otherwise than the original")] = (
        field(default_factory=list)
    )
    activations: Annotated[dict[str, int], Field(description="scheme by which inputs were rounded → weights")] = field(
        default_factory=dict
    )
    kv: Annotated[str | None, Field(description="scheme by which keys and values were rounded; null: none")] = None
    outputs: Annotated[Outputs | None, Field(description="of recorded calls; null of a model that reads tokens")] = None
    texts: Annotated[list[TextScores], Field(description="of several; ``scores`` are of all predictions")] = field(
        default_factory=list
    )

    def value(self, metric: str) -> float | None:
        """A number of its scores or embeddings, predicted_kld, the least of its tasks; None where it has none."""
        if metric == "predicted_kld":
            return self.predicted_kld
        if metric in OF_TASKS:
            values = [getattr(task, metric) for task in self.tasks]
            return None if None in values or not values else min(values)
        for part in (self.scores, self.embeddings, self.outputs):
            if part is not None and metric in part.__dataclass_fields__:
                found: float | None = getattr(part, metric)
                return found
        return None

    def error(self, metric: str) -> float | None:
        """The standard error of a number; the larger one where there is another from the means of chunks."""
        if metric == "ppl_ratio":
            ratio, error = self.value(metric), self.error("ln_ppl_ratio")
            return None if ratio is None or error is None else ratio * error
        errors = (self.value(f"{metric}{suffix}") for suffix in ("_se", "_chunk_se"))
        return max((error for error in errors if error is not None), default=None)


class Evaluation(Document):
    """Are quantized models still good? Candidates against their original on the same tokens, in one runtime.

    Weights are dequantized; activations, keys and values are rounded as each candidate's ``activations`` and ``kv``
    say. ``verdict`` is ``inconclusive`` if any candidate is.
    """

    VIEW: ClassVar[str] = "quanterr.report.evaluation.view"

    schema_: str = Field(SCHEMA, alias="schema")
    schema_version: str = SCHEMA_VERSION
    tool: Tool
    verdict: Literal["pass", "fail", "inconclusive"]
    reasons: list[str]
    original: str = Field(description="path")
    original_bytes: int
    model: str = Field(description="class of transformers")
    kind: Literal["causal", "sequence to sequence", "encoder", "calls"]
    dtype: str = Field(description="in which both sides compute")
    tokens: Tokens
    candidates: list[Evaluated]
    texts: list[NamedTokens] = Field([], description="each of several texts; empty of one, which ``tokens`` says")
    reference: str | None = Field(
        None, description="folder of what was kept of the original; null: the original itself was run"
    )
    gated: bool = Field(False, description="whether limits were set: what passes without was compared, not approved")
    run: RunInfo

    @property
    def gates(self) -> list[Gate]:
        """Those of all candidates."""
        return [gate for candidate in self.candidates for gate in candidate.gates]

    def __repr__(self) -> str:
        names = ", ".join(display(candidate.name) for candidate in self.candidates)
        return f"<quanterr.Evaluation {self.verdict}: {names}; {display(self.original)}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        shown = ("kld_mean", "ppl_ratio", "top1") if self.kind != "encoder" else ("cosine_mean", "rank_correlation")
        rows = [
            (candidate.name, *(_short(candidate.value(metric)) for metric in shown)) for candidate in self.candidates
        ]
        return notebook.table(f"{self.verdict}: {'; '.join(self.reasons[:3])}", ("candidate", *shown), rows, 1)

    def to_pandas(self) -> notebook.Frame:
        """A pandas.DataFrame with a row per weight of each candidate.

        Raises:
            UsageError: pandas is not installed.
        """
        names = [field.name for field in fields(WeightError)]
        return notebook.frame(
            {"candidate": candidate.name} | {name: getattr(weight, name) for name in names}
            for candidate in self.candidates
            for weight in candidate.weights
        )


def difference(old: Evaluation, new: Evaluation) -> str | None:
    """Why numbers of two evaluations do not belong together: cut or computed otherwise; None where they do."""
    for what, before, after in (
        ("text", old.tokens.sha256, new.tokens.sha256),
        ("context", old.tokens.context, new.tokens.context),
        ("number of chunks", old.tokens.chunks, new.tokens.chunks),
        ("dtype", old.dtype, new.dtype),
        ("rounding of activations, keys or values", _rounded(old), _rounded(new)),
    ):
        if before != after:
            return f"another {what}: only evaluations of the same text and settings compare"
    return None


def _rounded(evaluation: Evaluation) -> set[str]:
    """The schemes by which a runtime was emulated."""
    of_cache = {f"kv {candidate.kv}" for candidate in evaluation.candidates if candidate.kv}
    return of_cache.union(*(candidate.activations for candidate in evaluation.candidates))


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


# Numbers that gates may ask for: those of scores and embeddings but counts, and the least of the tasks.
COUNTS = ("tokens", "chunks", "kld_chunks")
METRICS = (
    *(f.name for kind in (Scores, Embeddings) for f in fields(kind) if f.name not in COUNTS),
    *("output_snr_db", "output_cosine", "output_error_worst"),  # output_error is that of weights
    "predicted_kld",
    *OF_TASKS,
)


OF_PREDICTIONS = scores_of(Scores)
OF_EMBEDDINGS, OF_OUTPUTS = scores_of(Embeddings), scores_of(Outputs)
SCORES = OF_PREDICTIONS | scores_of(Evaluated) | OF_EMBEDDINGS | OF_OUTPUTS | scores_of(Task)
