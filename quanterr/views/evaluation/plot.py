"""The figure of an evaluation."""

from typing import TYPE_CHECKING

from quanterr.documents.evaluation.model import Evaluation
from quanterr.outputs.figures import plot_dots
from quanterr.views.evaluation.view import make_dots

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(evaluation: Evaluation) -> "Figure":
    """Draw an error of the model over size: KLD, the error of outputs, or the distance of embeddings."""
    return plot_dots(make_dots(evaluation))
