"""Matplotlib figures for notebooks."""

import io
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from quanterr.errors import UsageError
from quanterr.util.text import display

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 2**20
LONGEST = 48  # maximum length of a name
DPI = 110


def make_figure(panels: int) -> "tuple[Figure, list[Axes]]":
    """Return a figure with panels side by side.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        figures = import_module("matplotlib.figure")
    except ImportError as error:
        raise UsageError('plot() needs matplotlib: pip install "quanterr[plot]"') from error
    figure = figures.Figure(figsize=(6.4 * panels, 4.2), dpi=DPI, layout="constrained")
    figure._repr_png_ = partial(_render_png, figure)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _render_png(figure: "Figure") -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def escape_name(name: str) -> str:
    """Return a shortened name in which matplotlib sees no formula."""
    return display(name, LONGEST).replace("$", r"\$")


def name_point(axes: "Axes", name: str, place: tuple[float, float], color: str | None = None) -> None:
    """Write a name next to a point."""
    axes.annotate(escape_name(name), place, textcoords="offset points", xytext=(6, 4), color=color)


class Dot(NamedTuple):
    """A candidate: its size, its value and the standard error of the value."""

    name: str
    bytes: int
    value: float
    error: float = 0.0
    is_best: bool = False  # Pareto-optimal


def plot_dots(dots: Sequence[Dot], title: str, label: str, log: bool = False) -> "Figure":
    """Draw the value of each candidate over its size; those that are Pareto-optimal are joined by a line.

    Raises:
        UsageError: there are no candidates to draw.
    """
    figure, (axes,) = make_figure(1)
    if not dots:
        raise UsageError("plot(): no candidate has a number to draw")
    front = sorted((dot for dot in dots if dot.is_best), key=lambda dot: dot.bytes)
    axes.plot([dot.bytes / MIB for dot in front], [dot.value for dot in front], "--", lw=1, label="Pareto-optimal")
    for dot in dots:
        axes.errorbar(dot.bytes / MIB, dot.value, yerr=dot.error or None, fmt="o", capsize=3)
        name_point(axes, dot.name, (dot.bytes / MIB, dot.value))
    axes.set(title=title, xlabel="size [MiB]", ylabel=label)
    axes.margins(0.15)
    if len(front) > 1:
        axes.legend()
    if log:
        axes.set_yscale("log")
    return figure
