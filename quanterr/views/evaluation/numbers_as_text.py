"""Functions that format numbers of an evaluation, with their standard errors, for all outputs."""

from math import ceil
from statistics import fmean

from quanterr.documents.evaluation.model import (
    OF_EMBEDDINGS,
    OF_OUTPUTS,
    OF_PREDICTIONS,
    SCORES,
    Evaluated,
    Evaluation,
    Floor,
)
from quanterr.documents.evaluation.pairs import PairedDifference, compare_neighbours
from quanterr.metrics import PREDICTED
from quanterr.outputs.formatting import format_in_units
from quanterr.util.text import count, display

UNSHOWN_OF_FLOOR = ("ppl", "ppl_ratio")  # the floor reads fewer chunks than candidates
SIGNIFICANCE = 0.05  # p-value below which a difference is significant
CHUNK = "chunk"
WANTED_RELATIVE_SE = 0.03  # wanted standard error of the KL divergence, relative to its mean
WEIGHTS_CAVEAT = (
    "Weights are dequantized and activations are not quantized: a runtime that quantizes them may be worse. "
)
EMULATION_CAVEAT = (
    "Weights are dequantized; inputs, keys and values are rounded as in a runtime, but computed in float32: "
    "the kernels of a runtime may differ. "
)
INPUTS_CAVEAT = "Latents and conditionings were made up (normal numbers): errors on real ones will differ. "
PREDICTIONS_CAVEAT = "Predictions cover the weights alone. "
PREDICTION_DEFINITIONS = (
    "Perplexity and divergence follow llama.cpp's definitions; ± is the standard error over predictions or chunks, "
    "whichever is larger."
)
CALL_DEFINITIONS = "± is the standard error over groups of calls."
CHUNK_DEFINITIONS = "An embedding is the mean of the last hidden states of a chunk."
DEFINITIONS_BY_KIND = {
    "calls": CALL_DEFINITIONS,
    "encoder": CHUNK_DEFINITIONS,
}  # by the kind of evaluation; DEFINED for all others


def format_caveat(evaluation: Evaluation) -> str:
    """Return sentences about what the numbers include and leave out."""
    emulated = any(candidate.activations or candidate.kv for candidate in evaluation.candidates)
    predicted = emulated and bool(_list_predicted(evaluation))
    inputs = INPUTS_CAVEAT if evaluation.made_up else ""
    defined = DEFINITIONS_BY_KIND.get(evaluation.kind, PREDICTION_DEFINITIONS)
    return (
        f"{inputs}{EMULATION_CAVEAT if emulated else WEIGHTS_CAVEAT}{PREDICTIONS_CAVEAT if predicted else ''}{defined}"
    )


def format_inputs(candidate: Evaluated | Floor) -> str:
    """Return the rounding schemes of inputs, keys and values, such as "fp8_token, KV fp8"."""
    if isinstance(candidate, Floor):
        return "none"
    schemes = sorted(candidate.activations, key=lambda name: -candidate.activations[name])
    return ", ".join([*schemes, *([f"KV {candidate.kv}"] if candidate.kv else [])]) or "none"


def list_metrics(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Return titles and names of the metrics to show."""
    scores = {"encoder": OF_EMBEDDINGS, "calls": OF_OUTPUTS}.get(evaluation.kind, OF_PREDICTIONS)
    shown = {name: score for name, score in scores.items() if score.column is not None}
    shown |= {name: SCORES[name] for name in _list_predicted(evaluation)}
    first = "acceptance" if all(candidate.draft for candidate in evaluation.candidates) else ""
    order = sorted(shown.items(), key=lambda item: (item[0] != first, item[1].column or 0))
    return [(score.title, name) for name, score in order]


def _list_predicted(evaluation: Evaluation) -> list[str]:
    return [name for name in PREDICTED if any(candidate.value(name) is not None for candidate in evaluation.candidates)]


def format_metric(candidate: Evaluated | Floor, metric: str) -> str:
    """Return a metric of a candidate with its standard error."""
    value, error = candidate.value(metric), candidate.error(metric)
    if isinstance(candidate, Floor) and (value is None or metric in UNSHOWN_OF_FLOOR):
        return "-"
    if value is None:
        return "undefined"
    return format_in_units(SCORES[metric], value, error, 4 if SCORES[metric].unit == "share" else 5)


def describe_setup(evaluation: Evaluation) -> str:
    """Return the evaluated model, its dtype and its text in one line."""
    tokens = evaluation.tokens
    scored = f", {tokens.scored:,} predictions scored" if tokens.scored else ""
    first = next((c.scores for c in evaluation.candidates if c.scores is not None), None)
    ppl = "" if first is None else f"; PPL {first.ppl_original:.5g} ± {first.ppl_original_se:.2g}"
    if evaluation.kind == "calls":
        return f"{evaluation.model} in {evaluation.dtype}: {count(tokens.chunks, 'call')}"
    chunks = count(tokens.chunks, "chunk")
    return f"{evaluation.model} in {evaluation.dtype}: {chunks} of {tokens.context:,} tokens{scored}{ppl}"


def pick_main_metric(evaluation: Evaluation) -> str:
    """Return the metric that orders candidates."""
    return list_metrics(evaluation)[0][1]


def find_nearest(evaluation: Evaluation) -> Evaluated | None:
    """Return the candidate nearest to the original; None if none has a value."""
    first = next(iter(order_candidates(evaluation)), None)
    return None if first is None or first.value(pick_main_metric(evaluation)) is None else first


def order_candidates(evaluation: Evaluation) -> list[Evaluated]:
    """Return the candidates, the nearest to the original first, those without a value last."""
    metric = pick_main_metric(evaluation)
    sign = -1 if SCORES[metric].better == "higher" else 1
    values = {id(candidate): candidate.value(metric) for candidate in evaluation.candidates}
    return sorted(
        evaluation.candidates,
        key=lambda candidate: (values[id(candidate)] is None, sign * (values[id(candidate)] or 0.0)),
    )


def conclusion(evaluation: Evaluation) -> str:
    """Return a sentence with the candidate nearest to the original and its value."""
    best = find_nearest(evaluation)
    if best is None:
        return "; ".join(evaluation.reasons)
    metric = pick_main_metric(evaluation)
    what = f"{SCORES[metric].title} {format_metric(best, metric)}"
    name = display(best.name)
    subject = f"{name} is nearest to the original" if len(evaluation.candidates) > 1 else name
    failing = [display(candidate.name) for candidate in evaluation.candidates if candidate.verdict == "fail"]
    failed = f"; gates do not hold for {', '.join(failing)}" if failing and len(evaluation.candidates) > 1 else ""
    first, after = next(iter(compare_neighbours(evaluation)), None), ""
    if first and first[0] is best:
        _, far, apart = first
        after = (
            f"; {display(far.name)} {'is next' if apart.p < SIGNIFICANCE else 'may be as near'} ({_format_p(apart.p)})"
        )
    return f"{subject}: {what}{after}{failed}"


def is_below_floor(evaluation: Evaluation, candidate: Evaluated) -> bool:
    """Return whether a candidate's error is no larger than the floor, the error of rounding to the original's dtype.

    Divergences are compared on the chunks that the floor read, embeddings and outputs on all.
    """
    floor = evaluation.floor
    if floor is None:
        return False
    if floor.scores is not None and candidate.scores is not None:
        return fmean(candidate.scores.kld_chunks[n] for n in floor.chunks) <= fmean(floor.scores.kld_chunks)
    metric = "relative_error" if floor.embeddings is not None else "output_error"
    floor_error, error = floor.value(metric), candidate.value(metric)
    return floor_error is not None and error is not None and error <= floor_error


def describe_floor(evaluation: Evaluation, floor: Floor) -> str:
    """Return the title of the floor's row in tables."""
    n = len(floor.chunks)
    return f"floor: the original in {floor.dtype}{f', {count(n, CHUNK)}' if 0 < n < evaluation.tokens.chunks else ''}"


def list_floor_lines(evaluation: Evaluation) -> list[str]:
    """Return a line that names the candidates below the floor, or says why there is no floor."""
    floor = evaluation.floor
    if floor is None:
        return []
    if floor.reason is not None:
        return [f"no floor: {floor.reason}"]
    below = [candidate.name for candidate in evaluation.candidates if is_below_floor(evaluation, candidate)]
    return [f"below the floor: {', '.join(below)}; rounding to {floor.dtype} alone deviates more"] if below else []


def describe_nearer(near: Evaluated, far: Evaluated, apart: PairedDifference) -> str:
    """Return a text that says which of two candidates is nearer to the original, and whether significantly."""
    relation = "is nearer than" if apart.p < SIGNIFICANCE else "is not significantly nearer than"
    return f"{near.name} {relation} {far.name}: by {apart.mean:.3g} ± {apart.error:.2g} nat, {_format_p(apart.p)}"


def _format_p(p: float) -> str:
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.2g}"


def describe_precision(evaluation: Evaluation) -> str:
    """Return how many chunks the divergence needs for WANTED_RELATIVE_SE; empty if it is so precise already."""
    best = find_nearest(evaluation)
    if best is None or best.scores is None or best.scores.kld_mean_chunk_se is None or best.scores.kld_mean <= 0:
        return ""
    share, chunks = best.scores.kld_error / best.scores.kld_mean, best.scores.chunks
    if share <= WANTED_RELATIVE_SE:
        return ""
    wanted = ceil(chunks * (share / WANTED_RELATIVE_SE) ** 2)
    aim = f"about {wanted:,} would give ± {100 * WANTED_RELATIVE_SE:g} %"
    return f"{count(chunks, 'chunk')}: KLD ± {100 * share:.2g} %; {aim}"
