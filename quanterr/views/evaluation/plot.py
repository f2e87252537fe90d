"""The figure of an evaluation."""

from math import isfinite, nan
from typing import TYPE_CHECKING

from quanterr.documents.evaluation.model import Evaluated, Evaluation
from quanterr.outputs.figures import Dot, plot_dots

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(evaluation: Evaluation) -> "Figure":
    """Draw an error of the model over size: KLD, the error of outputs, or the distance of embeddings."""
    found = [(one, *_pick_error(one)) for one in evaluation.candidates]
    values = [(one, value, error) for one, _, value, error in found if isfinite(value)]
    dots = [
        Dot(one.name, one.bytes, value, error, not any(_is_better(other, (one, value)) for other in values))
        for one, value, error in values
    ]
    return plot_dots(dots, "Model error over size", found[0][1], log=all(dot.value > 0 for dot in dots))


def _is_better(other: "tuple[Evaluated, float, float]", one: "tuple[Evaluated, float]") -> bool:
    (a, lost, _), (b, own) = other, one
    return a is not b and a.bytes <= b.bytes and lost <= own and (a.bytes, lost) != (b.bytes, own)


def _pick_error(one: Evaluated) -> tuple[str, float, float]:
    """Return the label, value and standard error to draw for a candidate."""
    if one.scores is not None:
        error = one.scores.kld_mean_chunk_se
        return "KLD [nat]", one.scores.kld_mean, one.scores.kld_mean_se if error is None else error
    if one.outputs is not None:
        value = one.outputs.output_error
        return "relative error of the output", nan if value is None else value, one.outputs.output_error_se or 0.0
    if one.embeddings is not None and one.embeddings.cosine_mean is not None:
        return "1 - cosine of the embeddings", 1 - one.embeddings.cosine_mean, 0.0
    return "", nan, 0.0
