"""A plan as its reader sees it: what it costs beside one recipe for all, what decides, the curve."""

from collections import Counter
from collections.abc import Iterator

from quanterr.report import html_data
from quanterr.report.formatting import sentence
from quanterr.report.html_data import DIFFERS, IDENTICAL, Row, columns_of, rounded
from quanterr.report.made import how_it_was_made
from quanterr.report.plan.model import ORIGINAL, Measurement, Plan
from quanterr.report.sections import (
    LAYERS,
    MAP,
    Case,
    Cells,
    Column,
    LayerName,
    Lines,
    Maps,
    Metric,
    Name,
    Section,
    Suite,
    Table,
    View,
)
from quanterr.roles import role_of
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display, size

UNIFORM = (Column("size", 0), Column("cost", 1), Column("fits", 2, right=False))
COSTS = (Column("recipe", 0, right=False), Column("bits", 2), Column("SNR dB", 3), Column("share", 1))
CSV_LAYER = ("layer_name", "recipe", "format", "elements", "bytes", "bits_per_weight", "snr_db", "cost")
CSV_COLUMNS = ("list", *CSV_LAYER, "reason")
LIMITS_OF_COST = ("--max-kld", "--min-snr")  # goals: the least bytes are sought
TIMES = 3  # from which on a change is said as a factor
CURVE = 8  # points
METRICS = {
    "share": Metric("Share of the cost", "lower", "%", log=True, column="Share %"),
    "bits": Metric("Bits per weight", "lower", "bit", column="Bits"),
    "snr_db": Metric("Predicted SNR", "higher", "dB", column="SNR dB"),
}
ABOUT = (
    "The cost is predicted from the error that each recipe makes in each layer, measured on the real weights. "
    "quanterr compare --plan checks what a quantizer made of it, quanterr evaluate what it does to the model."
)


def view(plan: Plan, top: int) -> View:
    """The plan with the ``top`` layers that cost most."""
    facts: list[tuple[str, list[str]]] = [
        ("original", [Name(plan.original), f", {size(plan.original_bytes)}"]),
        ("planned", [f"{count(len(plan.layers), 'layer')}; {size(plan.unplanned_bytes)} stay as they are"]),
        ("cost", [plan.measure]),
        *([("measured", [_measured(plan.measured)])] if plan.measured else []),
    ]
    sections = [
        *([Section("notes", "Notes", [Lines(plan.notes, warn=True)])] if plan.notes else []),
        Section("uniform", "One recipe for all", [_uniform(plan), Lines([_mix(plan)])]),
        MAP,
        *([Section("worst", "What costs most", [_worst(plan, top)])] if top else []),
        Section("curve", "Size and cost", [Lines([_curve(plan)])]),
        LAYERS,
        how_it_was_made(plan.run, f"{plan.tool.name} {plan.tool.version}"),
    ]
    words = {"role": "Role", "recipe": "Recipe"}
    maps = Maps(METRICS, words, lambda: page_data(plan), "share", "share")
    made_by = f"{plan.tool.name} {plan.tool.version}"
    return View("Quantization plan", None, conclusion(plan), [], facts, sections, ABOUT, made_by, maps)


def page_data(plan: Plan) -> JsonObject:
    """All layers, for the page's scripts."""
    total = plan.cost or 1.0
    return columns_of(
        Row(
            layer.layer_name,
            IDENTICAL if layer.recipe == ORIGINAL else DIFFERS,
            {"role": role_of(layer.layer_name), "recipe": display(layer.recipe)},
            {
                "share": rounded(layer.cost / total, html_data.SHARE_DIGITS),
                "bits": rounded(layer.bits_per_weight, html_data.DIGITS),
                "snr_db": rounded(layer.snr_db, html_data.DIGITS),
            },
        )
        for layer in plan.layers
    )


def _measured(found: Measurement) -> str:
    chunks = count(found.chunks, "chunk")
    return (
        f"KLD {found.kld:.4g} ± {found.kld_se:.2g} nat, PPL × {found.ppl_ratio:.4g} on {chunks} of "
        f"{found.context} tokens of {display(found.source)}"
    )


def _uniform(plan: Plan) -> Table:
    rows = [[one.recipe, size(one.bytes), f"{one.cost:.4g}", "yes" if one.fits else "no"] for one in plan.uniform]
    rows.append(["this plan", size(plan.bytes), f"{plan.cost:.4g}", "yes"])
    return Table("The plan beside one recipe for all", "recipe", UNIFORM, rows)


def _mix(plan: Plan) -> str:
    """How many layers have which recipe."""
    counts = Counter(layer.recipe for layer in plan.layers)
    found = [f"{count(n, 'layer')} {recipe}" for recipe, n in counts.most_common()]
    return "; ".join(found).replace(ORIGINAL, "as in the original")


def _worst(plan: Plan, top: int) -> Table:
    total = plan.cost or 1.0
    worst = sorted(plan.layers, key=lambda layer: -layer.cost)[:top]
    rows = [
        [
            LayerName(layer.layer_name),
            layer.recipe,
            f"{layer.bits_per_weight:.4g}",
            "-" if layer.snr_db is None else f"{layer.snr_db:.2f}",
            f"{100 * layer.cost / total:.3g} %",
        ]
        for layer in worst
    ]
    title = f"The layers that cost most, {len(worst):,} of {count(len(plan.layers), 'layer')}"
    return Table(title, "layer", COSTS, rows)


def _curve(plan: Plan) -> str:
    """The least cost of some sizes."""
    step = max(len(plan.curve) // CURVE, 1)
    points = ", ".join(f"{size(point.bytes)} {point.cost:.3g}" for point in plan.curve[::step])
    knee = f"; more buys less from {size(plan.knee.bytes)} on" if plan.knee else ""
    return f"least cost by size: {points}{knee}"


def rows(plan: Plan) -> Iterator[Cells]:
    """CSV: the plan, then each layer and each recipe for all."""
    yield {"list": "plan", "bytes": plan.bytes, "cost": plan.cost, "snr_db": plan.snr_db, "reason": plan.goal}.items()
    for layer in plan.layers:
        yield ({"list": "layers"} | {name: getattr(layer, name) for name in CSV_LAYER}).items()
    for one in plan.uniform:
        yield {"list": "uniform", "recipe": one.recipe, "bytes": one.bytes, "cost": one.cost}.items()


def suites(plan: Plan) -> list[Suite]:
    """JUnit: one test, which passes: a goal that cannot be met has no plan."""
    return [Suite("plan", [Case("plan", sentence(plan.goal), output=conclusion(plan))])]


def conclusion(plan: Plan) -> str:
    """What the plan reaches, and how far it can be from the best one."""
    bound = "the best plan there is" if plan.bound >= plan.cost else _distance(plan)
    beside = _beside(plan)
    found = plan.measured
    measured = "" if found is None else f", measured {found.kld:.4g} ± {found.kld_se:.2g} nat"
    return (
        f"{plan.goal}: {size(plan.bytes)}, {plan.bits_per_weight:.4g} bits per weight{measured}, {plan.measure} "
        f"{plan.cost:.4g}{beside}; {bound}"
    )


def _beside(plan: Plan) -> str:
    """What is gained on the best of the recipes for all that keep the limit: bytes, where the limit is one of cost."""
    fitting = [one for one in plan.uniform if one.fits]
    if plan.goal.startswith(LIMITS_OF_COST):
        least = min(fitting, key=lambda one: one.bytes, default=None)
        return (
            f", {100 * (plan.bytes / least.bytes - 1):+.3g} % of bytes against {least.recipe} for all" if least else ""
        )
    best = min(fitting, key=lambda one: one.cost, default=None)
    if best is None or best.cost <= 0:
        return ""
    factor = plan.cost / best.cost
    change = f"{factor:.3g} times that of" if factor > TIMES else f"{100 * (factor - 1):+.3g} % against"
    return f", {change} {best.recipe} for all"


def brief(plan: Plan) -> str:
    """The answer on one line."""
    return f"quanterr: {conclusion(plan)}"


def _distance(plan: Plan) -> str:
    return f"no plan is more than {100 * (plan.cost / plan.bound - 1):.2g} % better" if plan.bound > 0 else "no bound"
