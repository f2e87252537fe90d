"""Numbers of an evaluation as people read them, with their errors; the same in all outputs."""

from quanterr.report.evaluation.model import Evaluated, Evaluation, Task
from quanterr.util.text import count

CAVEAT = (
    "Weights are dequantized and activations are not quantized: a runtime that quantizes these as well may be worse. "
    "Perplexity and divergence follow llama.cpp's definitions; ± is a standard error."
)

# Titles, values and errors of what is shown of a model that predicts tokens, and of one that embeds texts.
PREDICTIONS = (
    ("KLD", "kld_mean"),
    ("KLD 99 %", "kld_p99"),
    ("PPL", "ppl"),
    ("PPL ratio", "ppl_ratio"),
    ("same top", "top1"),
    ("Δp rms", "delta_p_rms"),
    ("sure flips", "confident_flips"),
)
EMBEDDINGS = (
    ("cosine", "cosine_mean"),
    ("least cosine", "cosine_min"),
    ("rank correlation", "rank_correlation"),
    ("relative error", "relative_error"),
)
SHARES = ("top1", "confident_flips", "delta_p_rms")


def shown(evaluation: Evaluation) -> tuple[tuple[str, str], ...]:
    """Titles and metrics of what is shown of it."""
    if evaluation.kind == "encoder":
        return EMBEDDINGS
    predicted = any(candidate.predicted_kld is not None for candidate in evaluation.candidates)
    return (*PREDICTIONS, ("predicted KLD", "predicted_kld")) if predicted else PREDICTIONS


def worded(candidate: Evaluated, metric: str) -> str:
    """``0.01234 ± 0.0005``; shares in per cent."""
    value, error = candidate.value(metric), candidate.value(f"{metric}_se")
    if value is None:
        return "undefined"
    if metric in SHARES:
        return f"{100 * value:.4g} %" if error is None else f"{100 * value:.4g} ± {100 * error:.2g} %"
    return f"{value:.5g}" if error is None else f"{value:.5g} ± {error:.2g}"


def task_cells(task: Task) -> list[str]:
    """Questions, accuracy of the original and of the candidate, agreement, and McNemar's p."""
    shares = [f"{100 * share:.4g} %" for share in (task.accuracy_original, task.accuracy, task.agreement)]
    return [f"{task.questions:,}", *shares, f"{task.mcnemar_p:.3g}"]


def base_line(evaluation: Evaluation) -> str:
    """What was evaluated, on one line."""
    tokens = evaluation.tokens
    scored = f", {tokens.scored:,} predictions scored" if tokens.scored else ""
    first = next((c.scores for c in evaluation.candidates if c.scores is not None), None)
    ppl = "" if first is None else f"; PPL {first.ppl_original:.5g} ± {first.ppl_original_se:.2g}"
    chunks = count(tokens.chunks, "chunk")
    return f"{evaluation.model} in {evaluation.dtype}: {chunks} of {tokens.context:,} tokens{scored}{ppl}"


def nearest(evaluation: Evaluation) -> Evaluated | None:
    """The candidate that is nearest to the original; None if none has a number."""
    metric, sign = ("cosine_mean", -1) if evaluation.kind == "encoder" else ("kld_mean", 1)
    known = [(sign * value, c) for c in evaluation.candidates if (value := c.value(metric)) is not None]
    return min(known, key=lambda item: item[0])[1] if known else None


def conclusion(evaluation: Evaluation) -> str:
    """The same in a sentence."""
    best = nearest(evaluation)
    if best is None:
        return "; ".join(evaluation.reasons)
    metric = "cosine_mean" if evaluation.kind == "encoder" else "kld_mean"
    title = next(title for title, name in shown(evaluation) if name == metric)
    what = f"{title} {worded(best, metric)}"
    told = f"{best.name} is nearest to the original" if len(evaluation.candidates) > 1 else best.name
    return f"{told}: {what}"
