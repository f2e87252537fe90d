"""The evaluation of candidates on a text or recorded calls: data with a schema version."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import attrgetter
from typing import Annotated, Literal

from msgspec.structs import asdict

from quanterr.documents.base import Finding, Model, RunInfo, dumps
from quanterr.documents.document import Document
from quanterr.documents.gate_results import Gate, Givers, Word
from quanterr.metrics import PREDICTED
from quanterr.metrics.scores import Number, collect_scores, doc, score
from quanterr.util.strict_json import JsonObject


class Tokens(Model):
    """The tokens that all models read."""

    source: Annotated[str, doc("path of the text or of the token ids")]
    sha256: Annotated[str, doc("SHA-256 of the token ids, which comparable evaluations share")]
    context: Annotated[int, doc("tokens per chunk")]
    chunks: int
    scored: Annotated[int, doc("number of scored predictions; 0 for an encoder")]
    distinct: Annotated[int | None, doc("number of distinct tokens")] = None
    commonest: Annotated[Number, doc("share of the most frequent token, 0 to 1")] = None
    unknown: Annotated[Number, doc("share of unknown tokens, 0 to 1")] = None
    repeated: Annotated[int | None, doc("number of chunks that repeat an earlier one")] = None
    tokenizer: Annotated[str | None, doc("SHA-256 of tokenizer.json's output for a fixed text")] = None


class NamedTokens(Model):
    """One of several texts."""

    name: str
    tokens: Tokens


class Scores(Model):
    """Scores of predictions, defined as in llama.cpp's perplexity. ``_se`` is a standard error."""

    tokens: int
    chunks: int
    ppl_original: Annotated[float, doc("perplexity of the original: exp(mean of -ln p)")]
    ppl_original_se: Annotated[float, doc("standard error over predictions")]
    ppl: Annotated[float, score("PPL", "lower", "perplexity of the candidate", column=2)]
    ppl_se: Annotated[float, doc("standard error over predictions")]
    ppl_ratio: Annotated[float, score("PPL ratio", "lower", "ppl / ppl_original", column=3)]
    ln_ppl_ratio: Annotated[float, doc("logarithm of ppl_ratio")]
    ln_ppl_ratio_se: Annotated[float, doc("standard error that includes the covariance of both")]
    ln_ppl_ratio_chunk_se: Annotated[Number, doc("standard error from the means of chunks")]
    kld_mean: Annotated[
        float, score("KLD", "lower", "mean of KL(original || candidate) over the predictions [nat]", "nat", column=0)
    ]
    kld_mean_se: Annotated[float, doc("standard error over predictions [nat]")]
    kld_mean_chunk_se: Annotated[Number, doc("standard error from the means of chunks [nat]")]
    kld_median: Annotated[float, doc("divergence that half of the predictions do not exceed [nat]")]
    kld_p90: Annotated[float, doc("divergence that 90 % of the predictions do not exceed [nat]")]
    kld_p95: Annotated[float, doc("divergence that 95 % of the predictions do not exceed [nat]")]
    kld_p99: Annotated[
        float,
        score("KLD 99 %", "lower", "divergence that 99 % of the predictions do not exceed [nat]", "nat", column=1),
    ]
    kld_p99_9: Annotated[float, doc("divergence that 99.9 % of the predictions do not exceed [nat]")]
    kld_max: Annotated[float, score("largest KLD", "lower", "largest divergence of a prediction [nat]", "nat")]
    top1: Annotated[
        float,
        score("same top token", "higher", "share of predictions with the same most probable token", "share", column=4),
    ]
    top1_se: Annotated[float, doc("standard error over predictions")]
    top5_overlap: Annotated[
        float, score("top 5 in common", "higher", "mean share of the five most probable tokens in common", "share")
    ]
    delta_p_mean: Annotated[float, doc("mean change of the actual token's probability")]
    delta_p_mean_se: Annotated[float, doc("standard error over predictions")]
    delta_p_rms: Annotated[
        float,
        score("Δp rms", "lower", "root mean square of the change of the actual token's probability", "share", column=5),
    ]
    delta_p_rms_se: Annotated[float, doc("standard error over predictions")]
    confident_flips: Annotated[
        float,
        score(
            "confident flips",
            "lower",
            "share of predictions whose top token changes although the original gave it more than 50 %",
            "share",
            column=6,
        ),
    ]
    kld_chunks: Annotated[list[float], doc("mean KL divergence of each chunk [nat]")] = []
    kld_p99_se: Annotated[Number, doc("bootstrap standard error over chunks; null below eight chunks")] = None
    acceptance: Annotated[
        Number,
        score(
            "acceptance",
            "higher",
            "expected share of the candidate's tokens that speculative decoding accepts: "
            "1 - total variation, the mean over predictions of the sum of min(p, q)",
            "share",
            column=8,
        ),
    ] = None
    acceptance_se: Annotated[Number, doc("standard error over predictions")] = None
    acceptance_chunk_se: Annotated[Number, doc("standard error from the means of chunks")] = None

    @property
    def kld_error(self) -> float:
        """The standard error of the mean KL divergence [nat], over predictions or chunks, whichever is larger."""
        return max(self.kld_mean_se, self.kld_mean_chunk_se or 0.0)


class PositionScores(Model):
    """The predictions of tokens at some positions of their chunks."""

    first: Annotated[int, doc("position in the chunk, from 0")]
    last: int
    kld_mean: Annotated[float, doc("mean KL divergence [nat]")]
    predictions: int


class LikelyToken(Model):
    """A token with its probabilities."""

    id: int
    text: Annotated[str | None, doc("null without a tokenizer")]
    p_original: Annotated[Number, doc("probability by the original; null: not kept")]
    p: Annotated[Number, doc("probability by the candidate; null: not kept")]


class WorstToken(Model):
    """A prediction with a large divergence: the token that came, and the most probable one of each side."""

    chunk: Annotated[int, doc("number of the chunk in its text, from 0")]
    position: Annotated[int, doc("position of the token in the chunk, from 0")]
    source: Annotated[str, doc("name of the text")]
    kld: Annotated[float, doc("KL divergence [nat]")]
    before: Annotated[str | None, doc("the text in front of it; null without a tokenizer")]
    token: LikelyToken
    predicted_original: LikelyToken
    predicted: LikelyToken


class TextScores(Model):
    """The predictions of one of several texts."""

    name: str
    scores: Scores

    # For rules, whose metrics have distinct names:
    text_kld_mean = property(attrgetter("scores.kld_mean"), doc="kld_mean of one of several texts [nat]")
    text_ppl_ratio = property(attrgetter("scores.ppl_ratio"), doc="ppl_ratio of one of several texts")
    text_top1 = property(attrgetter("scores.top1"), doc="top1 of one of several texts")


OF_TEXTS = ("text_kld_mean", "text_ppl_ratio", "text_top1")


class Embeddings(Model):
    """Errors of chunk embeddings, which are means of the last hidden states over tokens."""

    chunks: int
    cosine_mean: Annotated[
        Number, score("cosine", "higher", "mean cosine between the embeddings of both sides", column=0)
    ]
    cosine_min: Annotated[Number, score("least cosine", "higher", "least cosine of a chunk's embeddings", column=1)]
    rank_correlation: Annotated[
        Number,
        score(
            "rank correlation", "higher", "Spearman correlation of the cosines between all pairs of chunks", column=2
        ),
    ]
    relative_error: Annotated[
        Number, score("relative error", "lower", "‖y - x‖ / ‖x‖ over the last hidden states", column=3)
    ]


class StepError(Model):
    """The output error over the calls of one step."""

    step: int
    output_error: Number
    calls: int


class Outputs(Model):
    """Errors of the outputs of recorded calls, with the same inputs on both sides."""

    output_error: Annotated[
        Number, score("output error", "lower", "mean over calls of ‖y - x‖² / ‖x‖²", "share", column=0)
    ]
    output_error_se: Annotated[Number, doc("standard error over groups; null for a single group")]
    output_snr_db: Annotated[
        Number, score("output SNR", "higher", "-10·log10(output_error) [dB]; null: no error", "dB", column=1)
    ]
    output_cosine: Annotated[Number, score("cosine", "higher", "mean cosine over calls", column=3)]
    output_error_worst: Annotated[Number, score("worst call", "lower", "largest error of a call", "share", column=2)]
    worst_call: Annotated[str, doc("name of the worst call in the file")]
    calls: int
    groups: int
    steps: Annotated[list[StepError], doc("errors by step, if calls name their steps")]


class Rollout(Model):
    """The latents at the end of the candidate's own path of flow matching, compared with the original's."""

    rollout_error: Annotated[Number, score("rollout error", "lower", "mean over groups of ‖y - x‖² / ‖x‖²", "share")]
    rollout_error_se: Annotated[Number, doc("standard error over groups; null for a single group")]
    rollout_psnr_db: Annotated[
        Number,
        score(
            "rollout PSNR",
            "higher",
            "mean over groups; the peak is the range of the original's latents; null: no error [dB]",
            "dB",
        ),
    ]
    rollout_cosine: Annotated[Number, score("rollout cosine", "higher", "mean over groups")]
    groups: int
    steps: Annotated[list[StepError], doc("errors of the latents after each step; `calls` counts groups")]


def _find(parts: Iterable[object], metric: str) -> float | None:
    """Return the metric from the first part that has a field of this name; None if no part has one."""
    value: float | None = next((getattr(part, metric) for part in parts if hasattr(part, metric)), None)
    return value


def _find_error(value: Callable[[str], float | None], metric: str) -> float | None:
    """Return the standard error of a metric, from predictions or from means of chunks, whichever is larger."""
    if metric == "ppl_ratio":
        ratio, error = value(metric), _find_error(value, "ln_ppl_ratio")
        return None if ratio is None or error is None else ratio * error
    errors = (value(f"{metric}{suffix}") for suffix in ("_se", "_chunk_se"))
    return max((error for error in errors if error is not None), default=None)


class Floor(Model):
    """The error of the original if it runs in its stored dtype instead of float32: any runtime makes this error."""

    dtype: Annotated[str | None, doc("dtype that the original is stored in; null: not a 16-bit float")]
    outputs: Annotated[Outputs | None, doc("null for a model that reads tokens; see also `reason`")]
    reason: Annotated[str | None, doc("why it was not measured")]
    scores: Annotated[Scores | None, doc("null for recorded calls and encoders; see also `reason`")] = None
    chunks: Annotated[list[int], doc("numbers of the chunks that it read, from 0")] = []
    embeddings: Annotated[Embeddings | None, doc("only for an encoder; see also `reason`")] = None

    def value(self, metric: str) -> float | None:
        """Return a number of its predictions, embeddings or outputs; None where it was not measured."""
        return _find((self.scores, self.embeddings, self.outputs), metric)

    def error(self, metric: str) -> float | None:
        """Return the standard error of a number, as for a candidate."""
        return _find_error(self.value, metric)


class Task(Model):
    """Results on multiple-choice questions, answered by log-likelihood."""

    name: str
    questions: int
    accuracy_original: float
    accuracy: Annotated[
        float, score("accuracy", "higher", "share of questions that the candidate answers correctly", "share")
    ]
    retention: Annotated[Number, doc("accuracy / accuracy_original; null if accuracy_original is 0")]
    agreement: Annotated[
        float, score("agreement", "higher", "share of questions with the same answer from both", "share")
    ]
    mcnemar_p: Annotated[float, score("p", "", "p-value of McNemar's exact two-sided test for a change")]


OF_TASKS = ("accuracy", "retention", "agreement")


class BlockError(Model):
    """The error of the hidden states after a unit, against the original's."""

    name: str
    relative_error: Annotated[
        Number, score("relative", "lower", "‖y - x‖ / ‖x‖ over all tokens; null: not finite", column=0)
    ]
    cosine: Annotated[
        Number,
        score("cosine", "higher", "mean cosine between the hidden states of both sides, over all tokens", column=1),
    ]
    worst_token: Annotated[int, doc("index of the token with the largest error")]
    worst_token_error: Annotated[
        Number, score("worst token error", "lower", "‖y - x‖ / ‖x‖ of the token with the largest error", column=2)
    ]


class WeightError(Model):
    """The effect of a weight's error on its actual inputs."""

    layer_name: Annotated[str, doc("name in the original, or in the model for a fused weight")]
    display_name: str
    block: Annotated[str, doc("the model unit that contains the weight")]
    output_error: Annotated[
        Number, score("output error", "lower", "‖X Eᵀ‖² / ‖X Wᵀ‖² with the original's inputs X", "share", column=0)
    ]
    share_of_block: Annotated[
        Number, score("share of block", "", "share of Σ ‖X Eᵀ‖² over the weights of its block", "share", column=1)
    ]
    inputs: Annotated[int, doc("number of rows of X")]
    predicted_kld: Annotated[Number, doc("predicted KL divergence from this weight's error alone [nat]")]
    input_error: Annotated[
        Number,
        score(
            "input error",
            "lower",
            "‖(X̃ - X) Ŵᵀ‖² / ‖X Wᵀ‖², where the candidate's inputs X are rounded to X̃; null: not rounded",
            "share",
            column=3,
        ),
    ] = None
    share_of_inputs: Annotated[
        Number,
        score(
            "share of inputs",
            "",
            "input_error / (output_error + input_error): the rest comes from the weight's own error",
            "share",
            column=4,
        ),
    ] = None
    input_spread: Annotated[
        Number, doc("largest ‖x‖ of an input over the geometric mean of nonzero ‖x‖; null: its inputs are tokens")
    ] = None
    predicted_output_error: Annotated[
        Number, doc("predicted output error of the calls from this weight's error alone")
    ] = None


class RouterAgreement(Model):
    """The agreement of one router of experts with the original's, over all tokens."""

    name: Annotated[str, doc("name in the model")]
    experts: int
    chosen: Annotated[int, doc("experts per token")]
    tokens: int
    same_experts: Annotated[float, score("same experts", "higher", "share of tokens with the same experts", "share")]
    router_kld: Annotated[
        Number,
        score(
            "router KLD",
            "lower",
            "mean of KL(original || candidate) of the softmax of the router's logits [nat]",
            "nat",
        ),
    ]


OF_ROUTERS = ("same_experts", "router_kld")


class SwapScore(Model):
    """The divergence of the original with one block or weight of the candidate; its inputs are not rounded."""

    name: Annotated[str, doc("name of a block in the model, or of a stored weight")]
    display_name: str
    block: Annotated[str, doc("the model unit that contains it")]
    kld_mean: Annotated[Number, doc("mean KL divergence [nat]; null: not finite")]
    kld_mean_se: Number
    kld_mean_chunk_se: Number
    top1: Annotated[Number, doc("share of predictions with the same most probable token")]
    predicted_kld: Annotated[Number, doc("predicted KL divergence of its weights, from --sensitivity [nat]")] = None

    # The name by which rules and gates know it
    swap_kld = property(attrgetter("kld_mean"), doc="mean KL divergence of the original with one block or weight [nat]")

    @property
    def kld_error(self) -> float | None:
        """The standard error of the divergence [nat], over predictions or chunks, whichever is larger."""
        return _find_error(partial(getattr, self), "kld_mean")


class Missing(Model):
    """A tensor missing from the candidate and taken from the original."""

    layer_name: str
    display_name: str
    reason: str


class Evaluated(Model):
    """A candidate with its scores."""

    name: str
    path: str
    verdict: Word
    reasons: list[str]
    bytes: int
    scores: Annotated[Scores | None, doc("null for an encoder, and if logits are not finite")]
    predicted_kld: Annotated[
        Number,
        score(
            "predicted KLD",
            "lower",
            "sum over the weights, from --sensitivity [nat]; too low above about 0.1 nat",
            "nat",
            column=7,
        ),
    ]
    embeddings: Annotated[Embeddings | None, doc("null for a model that predicts tokens")]
    tasks: list[Task]
    not_finite: Annotated[str | None, doc("the first unit with output that is not finite")]
    blocks: list[BlockError]
    weights: Annotated[list[WeightError], doc("matrices, the largest output error first")]
    missing: list[Missing]
    gates: list[Gate]
    findings: Annotated[list[Finding], doc("differences of its configuration from the original's")] = []
    activations: Annotated[dict[str, int], doc("weights by rounding scheme of their inputs")] = {}
    kv: Annotated[str | None, doc("rounding scheme of keys and values; null: none")] = None
    outputs: Annotated[Outputs | None, doc("null for a model that reads tokens")] = None
    rollout: Annotated[Rollout | None, doc("with --rollout")] = None
    texts: Annotated[list[TextScores], doc("by text, if there are several; ``scores`` cover all predictions")] = []
    positions: Annotated[list[PositionScores], doc("divergence by position in the chunk")] = []
    routers: Annotated[list[RouterAgreement], doc("only for a mixture of experts")] = []
    swaps: Annotated[list[SwapScore], doc("with --swap or --swap-blocks, the largest first")] = []
    worst_tokens: Annotated[list[WorstToken], doc("the largest divergence first")] = []
    predicted_output_error: Annotated[
        Number,
        score(
            "predicted output error",
            "lower",
            "sum over the weights, from a --sensitivity of recorded calls",
            "share",
            column=4,
        ),
    ] = None

    bits_per_weight: Annotated[
        Number, score("bits/w", "lower", "bits per weight of the tensors that pair with the original's [bit]", "bit")
    ] = None
    draft: Annotated[bool, doc("true for another model, a draft for speculative decoding")] = False
    reasons_by: Givers = None

    def value(self, metric: str) -> float | None:
        """Return a metric of the candidate, for task metrics the lowest over tasks; None if missing."""
        if metric in OF_TASKS:
            values = [getattr(task, metric) for task in self.tasks]
            return None if None in values or not values else min(values)
        return _find((self.scores, self.embeddings, self.outputs, self.rollout, self), metric)

    def error(self, metric: str) -> float | None:
        """Return the standard error of a metric, from predictions or from means of chunks, whichever is larger."""
        return _find_error(self.value, metric)


class Evaluation(Document, kw_only=True):
    """The evaluation of quantized candidates against their original, on the same tokens or calls, in one runtime.

    Weights are dequantized; activations, keys and values are rounded according to each candidate's ``activations`` and
    ``kv``. ``verdict`` is ``inconclusive`` if any candidate's is.
    """

    schema_: str = "quanterr.evaluation"
    # 1.1 adds a checksum, findings, statistics of the text; 1.2 activations, kv, outputs; 1.3 kld_chunks, kld_p99_se;
    # 1.4 input_error, floor, rollout, reference, texts, positions, worst_tokens, predicted_output_error, swaps,
    # input_spread, routers, lora, share_of_inputs, made_up, floor of encoders, acceptance, draft, transcription;
    # 1.5 bits_per_weight, reasons_by
    schema_version: str = "1.5"
    verdict: Word
    reasons: list[str]
    reasons_by: Givers = None
    original: Annotated[str, doc("path of the original")]
    original_bytes: int
    model: Annotated[str, doc("model class in transformers or diffusers")]
    kind: Literal["causal", "sequence to sequence", "transcription", "encoder", "calls"]
    dtype: Annotated[str, doc("compute dtype of both sides")]
    tokens: Tokens
    candidates: list[Evaluated]
    texts: Annotated[list[NamedTokens], doc("each of several texts; empty for one, which ``tokens`` describes")] = []
    reference: Annotated[
        str | None, doc("folder with what was saved of the original; null: the original itself was run")
    ] = None
    made_up: Annotated[bool, doc("true if the calls were drawn at random: a smoke test")] = False
    made_up_allowed: Annotated[bool, doc("true if gates may judge made-up calls")] = False
    lora: Annotated[str | None, doc("LoRA merged into both sides")] = None
    gated: Annotated[bool, doc("true if gates were set; without gates, pass means evaluated, not approved")] = False
    floor: Annotated[Floor | None, doc("null if a saved reference replaced the original")] = None
    run: RunInfo

    @property
    def gates(self) -> list[Gate]:
        """The gates of all candidates."""
        return [gate for candidate in self.candidates for gate in candidate.gates]

    def json_lines(self) -> Iterator[str]:
        """Yield the evaluation without its weights, then a line per weight of each candidate."""
        head = self._collect_fields()
        del head["candidates"]  # they come last
        kept = [name for name in Evaluated.__struct_fields__ if name != "weights"]
        head["candidates"] = [{name: getattr(candidate, name) for name in kept} for candidate in self.candidates]
        count = sum(len(candidate.weights) for candidate in self.candidates)
        yield dumps({"record": "evaluation", **head, "records": {"weight": count}}) + "\n"
        for candidate in self.candidates:
            name = dumps(candidate.name)
            for weight in candidate.weights:
                yield f'{{"record": "weight", "candidate": {name}, {dumps(weight)[1:]}\n'

    def _iterate_frame_rows(self) -> Iterator[JsonObject]:
        for candidate in self.candidates:
            for weight in candidate.weights:
                yield {"candidate": candidate.name} | asdict(weight)


def find_difference(old: Evaluation, new: Evaluation) -> str | None:
    """Return why two evaluations are not comparable, such as another text or dtype; None if they are."""
    for what, before, after in (
        ("text", old.tokens.sha256, new.tokens.sha256),
        ("context", old.tokens.context, new.tokens.context),
        ("number of chunks", old.tokens.chunks, new.tokens.chunks),
        ("dtype", old.dtype, new.dtype),
        ("LoRA", old.lora, new.lora),
        ("rounding of activations, keys or values", _list_roundings(old), _list_roundings(new)),
    ):
        if before != after:
            return f"another {what}: only evaluations of the same text and settings are comparable"
    return None


def _list_roundings(evaluation: Evaluation) -> set[str]:
    """Return the rounding schemes that emulate a runtime."""
    of_cache = {f"kv {candidate.kv}" for candidate in evaluation.candidates if candidate.kv}
    return of_cache.union(*(candidate.activations for candidate in evaluation.candidates))


# Metrics that gates can use; counts are not among them.
COUNTS = ("tokens", "chunks", "kld_chunks")
METRICS = (
    *(name for struct in (Scores, Embeddings) for name in struct.__struct_fields__ if name not in COUNTS),
    # output_error is not among them: it is an error of weights.
    *("output_snr_db", "output_cosine", "output_error_worst"),
    *("rollout_error", "rollout_error_se", "rollout_psnr_db", "rollout_cosine"),
    *PREDICTED,
    *OF_TASKS,
    "bits_per_weight",
)


OF_PREDICTIONS = collect_scores(Scores)
OF_EMBEDDINGS, OF_OUTPUTS = collect_scores(Embeddings), collect_scores(Outputs)
OF_ROLLOUTS = collect_scores(Rollout)
SCORES = OF_PREDICTIONS | collect_scores(Evaluated) | OF_EMBEDDINGS | OF_OUTPUTS | OF_ROLLOUTS | collect_scores(Task)
