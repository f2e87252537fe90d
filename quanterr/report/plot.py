"""Matplotlib figures of documents for notebooks: maps of the error, and error over size."""

import io
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, NamedTuple

from quanterr.errors import UsageError
from quanterr.report.document import Document
from quanterr.roles import place_of
from quanterr.util.text import display

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from quanterr.report.evaluation.model import Evaluated, Evaluation
    from quanterr.report.model import Report
    from quanterr.report.plan.model import Plan
    from quanterr.report.ranking.model import Ranking

MIB = 2**20
BINS = 24
LONGEST = 48  # maximum length of a name
DPI = 110


def plot(document: Document) -> "Figure":
    """Return a matplotlib Figure, which notebooks show and ``savefig`` writes.

    Raises:
        UsageError: matplotlib is not installed, or there is nothing to draw.
    """
    if document.noun not in PLOTS:
        raise UsageError(f"plot(): there is nothing to draw: it draws {', '.join(PLOTS)}, not {document.noun}")
    return PLOTS[document.noun](document)


def _make_figure(panels: int) -> "tuple[Figure, list[Axes]]":
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


def _escape_name(name: str) -> str:
    """Return a shortened name in which matplotlib sees no formula."""
    return display(name, LONGEST).replace("$", r"\$")


def _label(axes: "Axes", name: str, place: tuple[float, float], color: str | None = None) -> None:
    axes.annotate(_escape_name(name), place, textcoords="offset points", xytext=(6, 4), color=color)


def _plot_report(report: "Report") -> "Figure":
    """Draw the SNR of each module in each block, and a histogram of layers by SNR."""
    levels = [layer.snr_db for layer in report.layers if layer.snr_db is not None]
    if not levels:
        raise UsageError("plot(): no layer differs, so none has an SNR")
    figure, (where, how_many) = _make_figure(2)
    _draw_map(report, figure, where)
    how_many.hist(levels, bins=BINS, log=True)  # on this scale a few bad layers stay visible
    how_many.set(title="Layers by SNR", xlabel="SNR [dB]", ylabel="layers")
    return figure


def _draw_map(report: "Report", figure: "Figure", axes: "Axes") -> None:
    """Draw the worst weight of each module in each block; layers outside of blocks are left out."""
    found = [(place_of(layer.layer_name), layer.snr_db) for layer in report.layers]
    placed = [(place, level) for place, level in found if place and level is not None]
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
    axes.set_yticks(range(len(modules)), [_escape_name(module) for module in modules])
    figure.colorbar(image, ax=axes, label="SNR [dB]")


class _Dot(NamedTuple):
    """A candidate: its size, its value and the standard error of the value."""

    name: str
    bytes: int
    value: float
    error: float = 0.0
    is_best: bool = False  # Pareto-optimal


def _plot_dots(dots: Sequence[_Dot], title: str, label: str, log: bool = False) -> "Figure":
    figure, (axes,) = _make_figure(1)
    if not dots:
        raise UsageError("plot(): no candidate has a number to draw")
    front = sorted((dot for dot in dots if dot.is_best), key=lambda dot: dot.bytes)
    axes.plot([dot.bytes / MIB for dot in front], [dot.value for dot in front], "--", lw=1, label="Pareto-optimal")
    for dot in dots:
        axes.errorbar(dot.bytes / MIB, dot.value, yerr=dot.error or None, fmt="o", capsize=3)
        _label(axes, dot.name, (dot.bytes / MIB, dot.value))
    axes.set(title=title, xlabel="size [MiB]", ylabel=label)
    axes.margins(0.15)
    if len(front) > 1:
        axes.legend()
    if log:
        axes.set_yscale("log")
    return figure


def _plot_ranking(ranking: "Ranking") -> "Figure":
    """Draw SNR over size."""
    dots = [
        _Dot(one.name, one.bytes, one.snr_db, is_best=one.on_front)
        for one in ranking.candidates
        if one.bytes is not None and one.snr_db is not None
    ]
    return _plot_dots(dots, "Error over size", "SNR [dB]")


def _plot_evaluation(evaluation: "Evaluation") -> "Figure":
    """Draw an error of the model over size: KLD, the error of outputs, or the distance of embeddings."""
    found = [(one, *_pick_error(one)) for one in evaluation.candidates]
    values = [(one, value, error) for one, _, value, error in found if isfinite(value)]
    dots = [
        _Dot(one.name, one.bytes, value, error, not any(_is_better(other, (one, value)) for other in values))
        for one, value, error in values
    ]
    return _plot_dots(dots, "Model error over size", found[0][1], log=all(dot.value > 0 for dot in dots))


def _is_better(other: "tuple[Evaluated, float, float]", one: "tuple[Evaluated, float]") -> bool:
    (a, lost, _), (b, own) = other, one
    return a is not b and a.bytes <= b.bytes and lost <= own and (a.bytes, lost) != (b.bytes, own)


def _pick_error(one: "Evaluated") -> tuple[str, float, float]:
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


def _plot_plan(plan: "Plan") -> "Figure":
    """Draw the least cost at each size, the plan, and uniform recipes."""
    figure, (axes,) = _make_figure(1)
    points = sorted((point.bytes / MIB, point.cost) for point in plan.curve)
    axes.plot([size for size, _ in points], [cost for _, cost in points], lw=1, label="the best mix")
    axes.plot(plan.bytes / MIB, plan.cost, "o", label="this plan")
    for one in plan.uniform:
        axes.plot(one.bytes / MIB, one.cost, "x", color="gray")
        _label(axes, one.recipe, (one.bytes / MIB, one.cost), color="gray")
    axes.set(title="Cost over size", xlabel="size [MiB]", ylabel=plan.measure)
    axes.legend()
    return figure


PLOTS: dict[str, Callable[[Any], "Figure"]] = {
    "report": _plot_report,
    "ranking": _plot_ranking,
    "evaluation": _plot_evaluation,
    "plan": _plot_plan,
}
