"""A plan in the terminal: what it costs beside one recipe for all, what decides, the curve."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from quanterr.report.as_table import STYLES, Column, fitted, written
from quanterr.report.plan.model import ORIGINAL, Plan
from quanterr.util.text import count, display, size

UNIFORM = (Column("size", 0), Column("cost", 1), Column("fits", 2, right=False))
LAYERS = (Column("recipe", 0, right=False), Column("bits", 2), Column("SNR dB", 3), Column("share", 1))
CURVE = 8  # points


def show(plan: Plan, to: Console, top: int = 10, wrote: Sequence[str] = ()) -> None:
    """Print it, with the ``top`` layers that cost most; the last line is the answer."""
    plain = not to.file.isatty() or "utf" not in (to.encoding or "").lower()
    wrap = not to.is_terminal
    for note in plan.notes:
        to.print(Text(display(note, 2000), style=STYLES["inconclusive"]), soft_wrap=wrap)
    head = (
        f"{display(plan.original)}: {size(plan.original_bytes)}; {count(len(plan.layers), 'layer')} planned, "
        f"{size(plan.unplanned_bytes)} stay; cost: {plan.measure}"
    )
    to.print(Text(head), soft_wrap=wrap)
    to.print()
    rows = [(one.recipe, [size(one.bytes), f"{one.cost:.4g}", "yes" if one.fits else "no"]) for one in plan.uniform]
    rows.append(("this plan", [size(plan.bytes), f"{plan.cost:.4g}", "yes"]))
    to.print(fitted("The plan beside one recipe for all", "recipe", UNIFORM, rows, plain, to))
    to.print(Text(_mix(plan)), soft_wrap=wrap)
    if top:
        to.print()
        _show_layers(plan, to, top, plain)
    to.print()
    to.print(Text(_curve(plan)), soft_wrap=wrap)
    to.print()
    to.print(Text(conclusion(plan) + written(wrote), style="bold"), soft_wrap=wrap)


def _mix(plan: Plan) -> str:
    """How many layers have which recipe."""
    counts = Counter(layer.recipe for layer in plan.layers)
    found = [f"{count(n, 'layer')} {recipe}" for recipe, n in counts.most_common()]
    return "; ".join(found).replace(ORIGINAL, "as in the original")


def _show_layers(plan: Plan, to: Console, top: int, plain: bool) -> None:
    total = plan.cost or 1.0
    worst = sorted(plan.layers, key=lambda layer: -layer.cost)[:top]
    rows = [
        (
            layer.layer_name,
            [
                layer.recipe,
                f"{layer.bits_per_weight:.4g}",
                "-" if layer.snr_db is None else f"{layer.snr_db:.2f}",
                f"{100 * layer.cost / total:.3g} %",
            ],
        )
        for layer in worst
    ]
    title = f"The layers that cost most, {len(worst):,} of {count(len(plan.layers), 'layer')}"
    to.print(fitted(title, "layer", LAYERS, rows, plain, to))


def _curve(plan: Plan) -> str:
    """The least cost of some sizes."""
    step = max(len(plan.curve) // CURVE, 1)
    points = ", ".join(f"{size(point.bytes)} {point.cost:.3g}" for point in plan.curve[::step])
    knee = f"; more buys less from {size(plan.knee.bytes)} on" if plan.knee else ""
    return f"least cost by size: {points}{knee}"


def conclusion(plan: Plan) -> str:
    """What the plan reaches, and how far it can be from the best one."""
    bound = "the best plan there is" if plan.bound >= plan.cost else _distance(plan)
    best = min((one for one in plan.uniform if one.fits), key=lambda one: one.cost, default=None)
    beside = ""
    if best is not None and best.cost > 0:
        beside = f", {100 * (plan.cost / best.cost - 1):+.3g} % against {best.recipe} for all"
    return (
        f"{plan.goal}: {size(plan.bytes)}, {plan.bits_per_weight:.4g} bits per weight, {plan.measure} "
        f"{plan.cost:.4g}{beside}; {bound}"
    )


def _distance(plan: Plan) -> str:
    return f"no plan is more than {100 * (plan.cost / plan.bound - 1):.2g} % better" if plan.bound > 0 else "no bound"
