"""Numbers of an evaluation as text, with their errors; the same in all outputs."""

from math import ceil

from quanterr.report.evaluation.model import (
    OF_EMBEDDINGS,
    OF_OUTPUTS,
    OF_PREDICTIONS,
    SCORES,
    Evaluated,
    Evaluation,
    Task,
)
from quanterr.report.evaluation.pairs import Difference, neighbours
from quanterr.report.formatting import in_units
from quanterr.util.text import count

SURE = 0.05  # p-value below which a difference is significant
PRECISE = 0.03  # wanted standard error of the KL divergence, relative
ALONE = "Weights are dequantized and activations are not quantized: a runtime that quantizes them may be worse. "
EMULATED = (
    "Weights are dequantized; inputs, keys and values are rounded as in a runtime, but computed in float32: "
    "the kernels of a runtime may differ. "
)
DEFINED = (
    "Perplexity and divergence follow llama.cpp's definitions; ± is the standard error over predictions or chunks, "
    "whichever is larger."
)


def caveat(evaluation: Evaluation) -> str:
    """Return what the numbers include and leave out."""
    emulated = any(candidate.activations or candidate.kv for candidate in evaluation.candidates)
    return f"{EMULATED if emulated else ALONE}{DEFINED}"


def inputs_line(candidate: Evaluated) -> str:
    """Return the rounding schemes of inputs, keys and values, such as "fp8_token, KV fp8"."""
    schemes = sorted(candidate.activations, key=lambda name: -candidate.activations[name])
    return ", ".join([*schemes, *([f"KV {candidate.kv}"] if candidate.kv else [])]) or "none"


def shown(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Return titles and names of the metrics to show."""
    kinds = {"encoder": OF_EMBEDDINGS, "calls": OF_OUTPUTS}.get(evaluation.kind, OF_PREDICTIONS)
    own = {name: score for name, score in kinds.items() if score.column is not None}
    if any(candidate.predicted_kld is not None for candidate in evaluation.candidates):
        own["predicted_kld"] = SCORES["predicted_kld"]
    return [(score.title, name) for name, score in sorted(own.items(), key=lambda item: item[1].column or 0)]


def in_words(candidate: Evaluated, metric: str) -> str:
    """Return a metric of a candidate with its standard error."""
    value, error = candidate.value(metric), candidate.error(metric)
    score = SCORES[metric]
    return "undefined" if value is None else in_units(score, value, error, 4 if score.unit == "%" else 5)


def task_cells(task: Task) -> list[str]:
    """Return the cells of a task: questions, accuracy of original and candidate, agreement, McNemar's p."""
    shares = [f"{100 * share:.4g} %" for share in (task.accuracy_original, task.accuracy, task.agreement)]
    return [f"{task.questions:,}", *shares, f"{task.mcnemar_p:.3g}"]


def base_line(evaluation: Evaluation) -> str:
    """Return the evaluated model, its dtype and its text in one line."""
    tokens = evaluation.tokens
    scored = f", {tokens.scored:,} predictions scored" if tokens.scored else ""
    first = next((c.scores for c in evaluation.candidates if c.scores is not None), None)
    ppl = "" if first is None else f"; PPL {first.ppl_original:.5g} ± {first.ppl_original_se:.2g}"
    if evaluation.kind == "calls":
        return f"{evaluation.model} in {evaluation.dtype}: {count(tokens.chunks, 'call')}"
    chunks = count(tokens.chunks, "chunk")
    return f"{evaluation.model} in {evaluation.dtype}: {chunks} of {tokens.context:,} tokens{scored}{ppl}"


def first_of(evaluation: Evaluation) -> str:
    """Return the metric that orders candidates."""
    return shown(evaluation)[0][1]


def nearest(evaluation: Evaluation) -> Evaluated | None:
    """Return the candidate nearest to the original; None if none has a value."""
    metric = first_of(evaluation)
    sign = -1 if SCORES[metric].better == "higher" else 1
    known = [(sign * value, c) for c in evaluation.candidates if (value := c.value(metric)) is not None]
    return min(known, key=lambda item: item[0])[1] if known else None


def conclusion(evaluation: Evaluation) -> str:
    """Return the nearest candidate and its value in a sentence."""
    best = nearest(evaluation)
    if best is None:
        return "; ".join(evaluation.reasons)
    metric = first_of(evaluation)
    what = f"{SCORES[metric].title} {in_words(best, metric)}"
    told = f"{best.name} is nearest to the original" if len(evaluation.candidates) > 1 else best.name
    first = next(iter(neighbours(evaluation)), None)
    return f"{told}: {what}" + (f"; {_beside(*first[1:])}" if first and first[0] is best else "")


def nearer(near: Evaluated, far: Evaluated, apart: Difference) -> str:
    """Return in words which of two candidates is nearer to the original, and whether the difference is significant."""
    sure = "is nearer than" if apart.p < SURE else "is not significantly nearer than"
    return f"{near.name} {sure} {far.name}: by {apart.mean:.3g} ± {apart.error:.2g} nat, {_p(apart.p)}"


def _beside(far: Evaluated, apart: Difference) -> str:
    """Return whether the next candidate is significantly farther."""
    return f"{far.name} is next ({_p(apart.p)})" if apart.p < SURE else f"{far.name} may be as near ({_p(apart.p)})"


def _p(p: float) -> str:
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.2g}"


def precision(evaluation: Evaluation) -> str:
    """Return how many chunks would make the divergence precise; empty if it already is."""
    best = nearest(evaluation)
    if best is None or best.scores is None or best.scores.kld_mean_chunk_se is None or best.scores.kld_mean <= 0:
        return ""
    share, chunks = best.scores.kld_error / best.scores.kld_mean, best.scores.chunks
    if share <= PRECISE:
        return ""
    wanted = ceil(chunks * (share / PRECISE) ** 2)
    return f"{count(chunks, 'chunk')}: KLD ± {100 * share:.2g} %; about {wanted:,} would give ± {100 * PRECISE:g} %"
