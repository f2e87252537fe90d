"""The figure of a plan."""

from typing import TYPE_CHECKING

from quanterr.documents.plan.model import Plan
from quanterr.outputs.figures import MIB, make_figure, name_point

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(plan: Plan) -> "Figure":
    """Draw the minimum cost at each size, the plan, and uniform recipes."""
    figure, (axes,) = make_figure(1)
    points = sorted((point.bytes / MIB, point.cost) for point in plan.curve)
    axes.plot([size for size, _ in points], [cost for _, cost in points], lw=1, label="the best mix")
    axes.plot(plan.bytes / MIB, plan.cost, "o", label="this plan")
    for result in plan.uniform:
        axes.plot(result.bytes / MIB, result.cost, "x", color="gray")
        name_point(axes, result.recipe, (result.bytes / MIB, result.cost), color="gray")
    axes.set(title="Cost over size", xlabel="size [MiB]", ylabel=plan.measure)
    axes.legend()
    return figure
