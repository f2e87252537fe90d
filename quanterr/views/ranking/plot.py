"""The figure of a ranking."""

from typing import TYPE_CHECKING

from quanterr.documents.ranking.model import Ranking
from quanterr.outputs.figures import Dot, plot_dots

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(ranking: Ranking) -> "Figure":
    """Draw SNR over size."""
    dots = [
        Dot(one.name, one.bytes, one.snr_db, is_best=one.on_front)
        for one in ranking.candidates
        if one.bytes is not None and one.snr_db is not None
    ]
    return plot_dots(dots, "Error over size", "SNR [dB]")
