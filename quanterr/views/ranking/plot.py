"""The figure of a ranking."""

from typing import TYPE_CHECKING

from quanterr.documents.ranking.model import Ranking
from quanterr.outputs.figures import plot_dots
from quanterr.views.ranking.view import make_dots

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(ranking: Ranking) -> "Figure":
    """Draw over size the KLD from an evaluation, or the SNR."""
    return plot_dots(make_dots(ranking))
