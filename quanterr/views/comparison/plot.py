"""Figures of a report."""

from math import nan
from typing import TYPE_CHECKING

from quanterr.documents.comparison.model import Report
from quanterr.errors import UsageError
from quanterr.outputs.figures import escape_name, make_figure
from quanterr.selection.roles import place_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINS = 24


def plot(report: Report) -> "Figure":
    """Draw the SNR of each module in each block, and a histogram of layers by SNR."""
    levels = [layer.snr_db for layer in report.layers if layer.snr_db is not None]
    if not levels:
        raise UsageError("plot(): no layer differs, so none has an SNR")
    figure, (where, how_many) = make_figure(2)
    _draw_map(report, figure, where)
    how_many.hist(levels, bins=BINS, log=True)  # on this scale a few bad layers stay visible
    how_many.set(title="Layers by SNR", xlabel="SNR [dB]", ylabel="layers")
    return figure


def _draw_map(report: Report, figure: "Figure", axes: "Axes") -> None:
    """Draw the worst weight of each module in each block; layers outside of blocks are left out."""
    places = [(place_of(layer.layer_name), layer.snr_db) for layer in report.layers]
    placed = [(place, level) for place, level in places if place and level is not None]
    several = len({place.stack for place, _ in placed}) > 1
    worst: dict[tuple[str, int], float] = {}
    for place, level in placed:
        key = f"{place.stack}.{place.module}" if several else place.module, place.block
        worst[key] = min(worst.get(key, level), level)
    modules = list(dict.fromkeys(module for module, _ in worst))
    if not modules:
        axes.text(0.5, 0.5, "no layer is in a block", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    blocks = 1 + max(block for _, block in worst)
    rows = [[worst.get((module, block), nan) for block in range(blocks)] for module in modules]
    image = axes.imshow(rows, aspect="auto", cmap="viridis", interpolation="nearest")
    axes.set(title="SNR by block", xlabel="block")
    axes.set_yticks(range(len(modules)), [escape_name(module) for module in modules])
    figure.colorbar(image, ax=axes, label="SNR [dB]")
