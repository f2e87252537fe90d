"""Matplotlib figures for notebooks."""

import io
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quanterr.errors import UsageError
from quanterr.outputs.dots import RANGE_MARGIN, WIDTH, draw_dots
from quanterr.outputs.sections import Dots
from quanterr.util.text import display

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 2**20
MAX_NAME_LENGTH = 48  # characters
DPI = 110
INCHES = 6.4, 4.2
POINTS_PER_PIXEL = 72 * INCHES[0] / WIDTH  # the pixels are those of outputs/dots.py


def make_figure(panels: int) -> "tuple[Figure, list[Axes]]":
    """Return a figure with panels side by side.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        figures = import_module("matplotlib.figure")
    except ImportError as error:
        raise UsageError('plot() needs matplotlib: pip install "quanterr[plot]"') from error
    figure = figures.Figure(figsize=(INCHES[0] * panels, INCHES[1]), dpi=DPI, layout="constrained")
    figure._repr_png_ = partial(_render_png, figure)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _render_png(figure: "Figure") -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def escape_name(name: str) -> str:
    """Return a shortened name in which matplotlib sees no formula."""
    return display(name, MAX_NAME_LENGTH).replace("$", r"\$")


def name_point(
    axes: "Axes",
    name: str,
    place: tuple[float, float],
    offset: tuple[float, float] = (6, 4),
    is_left: bool = False,
    color: str | None = None,
) -> None:
    """Write a name, ``offset`` typographic points right of and above a point; with ``is_left``, it ends there."""
    ha: Any = "right" if is_left else "left"
    axes.annotate(escape_name(name), place, textcoords="offset points", xytext=offset, ha=ha, color=color)


def plot_dots(dots: Dots | None) -> "Figure":
    """Draw the value of each candidate over its size; a line joins Pareto-optimal candidates.

    Raises:
        UsageError: there are no candidates to draw.
    """
    figure, (axes,) = make_figure(1)
    if dots is None:
        raise UsageError("plot(): no candidate has a number to draw")
    front = sorted((dot for dot in dots.shown if dot.is_best), key=lambda dot: dot.bytes)
    unit, name = (1024 * MIB, "GiB") if max(dot.bytes for dot in dots.shown) >= 1024 * MIB else (MIB, "MiB")
    if dots.log:  # first: older versions of matplotlib warn about an axis that holds a single value already
        axes.set_yscale("log")
    axes.plot([dot.bytes / unit for dot in front], [dot.value for dot in front], "--", lw=1, label="Pareto-optimal")
    drawing = draw_dots(dots)
    for dot, point in zip(dots.shown, drawing.points, strict=True):
        axes.errorbar(dot.bytes / unit, dot.value, yerr=dot.error or None, fmt="o", capsize=3)
        place, at = point.place, (dot.bytes / unit, dot.value)
        offset = (POINTS_PER_PIXEL * (place.x - point.x), POINTS_PER_PIXEL * (point.y - place.y))
        name_point(axes, point.name, at, offset, place.is_left)
    without = f"; names without {escape_name(drawing.prefix)}" if drawing.prefix else ""
    axes.set(title=f"{dots.label} over size", xlabel=f"size [{name}]{without}", ylabel=dots.label)
    axes.margins(RANGE_MARGIN)
    if len(front) > 1:
        axes.legend()
    return figure
