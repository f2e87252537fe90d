"""Numbers of an evaluation as text, with their errors; the same in all outputs."""

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

OF_ALL_CHUNKS = ("ppl", "ppl_ratio")  # the floor reads fewer chunks, so these would mislead next to the candidates'
SURE = 0.05  # p-value below which a difference is significant
CHUNK = "chunk"
PRECISE = 0.03  # wanted standard error of the KL divergence, relative
ALONE = "Weights are dequantized and activations are not quantized: a runtime that quantizes them may be worse. "
EMULATED = (
    "Weights are dequantized; inputs, keys and values are rounded as in a runtime, but computed in float32: "
    "the kernels of a runtime may differ. "
)
MADE_UP = "Latents and conditionings were made up (normal numbers): errors on real ones will differ. "
OF_WEIGHTS = "Predictions cover the weights alone. "
DEFINED = (
    "Perplexity and divergence follow llama.cpp's definitions; ± is the standard error over predictions or chunks, "
    "whichever is larger."
)
OF_CALLS = "± is the standard error over groups of calls."
OF_CHUNKS = "An embedding is the mean of the last hidden states of a chunk."
DEFINITIONS = {"calls": OF_CALLS, "encoder": OF_CHUNKS}  # by the kind of evaluation; DEFINED for all others


def format_caveat(evaluation: Evaluation) -> str:
    """Return what the numbers include and leave out."""
    emulated = any(candidate.activations or candidate.kv for candidate in evaluation.candidates)
    predicted = emulated and bool(_list_predicted(evaluation))
    inputs = MADE_UP if evaluation.made_up else ""
    defined = DEFINITIONS.get(evaluation.kind, DEFINED)
    return f"{inputs}{EMULATED if emulated else ALONE}{OF_WEIGHTS if predicted else ''}{defined}"


def format_inputs(candidate: Evaluated | Floor) -> str:
    """Return the rounding schemes of inputs, keys and values, such as "fp8_token, KV fp8"."""
    if isinstance(candidate, Floor):
        return "none"
    schemes = sorted(candidate.activations, key=lambda name: -candidate.activations[name])
    return ", ".join([*schemes, *([f"KV {candidate.kv}"] if candidate.kv else [])]) or "none"


def list_metrics(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Return titles and names of the metrics to show."""
    kinds = {"encoder": OF_EMBEDDINGS, "calls": OF_OUTPUTS}.get(evaluation.kind, OF_PREDICTIONS)
    own = {name: score for name, score in kinds.items() if score.column is not None}
    own |= {name: SCORES[name] for name in _list_predicted(evaluation)}
    first = "acceptance" if all(candidate.draft for candidate in evaluation.candidates) else ""
    order = sorted(own.items(), key=lambda item: (item[0] != first, item[1].column or 0))
    return [(score.title, name) for name, score in order]


def _list_predicted(evaluation: Evaluation) -> list[str]:
    return [name for name in PREDICTED if any(candidate.value(name) is not None for candidate in evaluation.candidates)]


def format_metric(candidate: Evaluated | Floor, metric: str) -> str:
    """Return a metric of a candidate with its standard error."""
    value, error = candidate.value(metric), candidate.error(metric)
    if isinstance(candidate, Floor) and (value is None or metric in OF_ALL_CHUNKS):
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
    return sorted(evaluation.candidates, key=lambda one: (values[id(one)] is None, sign * (values[id(one)] or 0.0)))


def conclusion(evaluation: Evaluation) -> str:
    """Return the nearest candidate and its value in a sentence."""
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
        after = f"; {display(far.name)} {'is next' if apart.p < SURE else 'may be as near'} ({_format_p(apart.p)})"
    return f"{subject}: {what}{after}{failed}"


def is_below_floor(evaluation: Evaluation, candidate: Evaluated) -> bool:
    """Return whether a candidate's error is no larger than the rounding of the original's own dtype.

    Divergences are compared on the chunks that the floor read, embeddings and outputs on all.
    """
    floor = evaluation.floor
    if floor is None:
        return False
    if floor.scores is not None and candidate.scores is not None:
        return fmean(candidate.scores.kld_chunks[n] for n in floor.chunks) <= fmean(floor.scores.kld_chunks)
    metric = "relative_error" if floor.embeddings is not None else "output_error"
    least, own = floor.value(metric), candidate.value(metric)
    return least is not None and own is not None and own <= least


def describe_floor(evaluation: Evaluation, floor: Floor) -> str:
    """Return the name of the floor's row."""
    n = len(floor.chunks)
    return f"floor: the original in {floor.dtype}{f', {count(n, CHUNK)}' if 0 < n < evaluation.tokens.chunks else ''}"


def list_floor_lines(evaluation: Evaluation) -> list[str]:
    """Return in a line which candidates are below the floor, or why there is no floor."""
    floor = evaluation.floor
    if floor is None:
        return []
    if floor.reason is not None:
        return [f"no floor: {floor.reason}"]
    below = [candidate.name for candidate in evaluation.candidates if is_below_floor(evaluation, candidate)]
    return [f"below the floor: {', '.join(below)}: {floor.dtype} alone rounds more than that"] if below else []


def describe_nearer(near: Evaluated, far: Evaluated, apart: PairedDifference) -> str:
    """Return in words which of two candidates is nearer to the original, and whether the difference is significant."""
    sure = "is nearer than" if apart.p < SURE else "is not significantly nearer than"
    return f"{near.name} {sure} {far.name}: by {apart.mean:.3g} ± {apart.error:.2g} nat, {_format_p(apart.p)}"


def _format_p(p: float) -> str:
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.2g}"


def describe_precision(evaluation: Evaluation) -> str:
    """Return how many chunks would make the divergence precise; empty if it already is."""
    best = find_nearest(evaluation)
    if best is None or best.scores is None or best.scores.kld_mean_chunk_se is None or best.scores.kld_mean <= 0:
        return ""
    share, chunks = best.scores.kld_error / best.scores.kld_mean, best.scores.chunks
    if share <= PRECISE:
        return ""
    wanted = ceil(chunks * (share / PRECISE) ** 2)
    return f"{count(chunks, 'chunk')}: KLD ± {100 * share:.2g} %; about {wanted:,} would give ± {100 * PRECISE:g} %"
