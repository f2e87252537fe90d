"""The view of a plan: its cost compared with single recipes, the most expensive layers, the curve."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import fsum, log10

from quanterr.documents.plan.model import ORIGINAL, Measurement, Plan, PlannedLayer
from quanterr.outputs.formatting import format_if_known, format_percent, format_size_change, sentence
from quanterr.outputs.page.columns import DIFFERS, DIGITS, IDENTICAL, SHARE_DIGITS, round_digits
from quanterr.outputs.sections import (
    MAP,
    Case,
    CellColumn,
    Chart,
    Column,
    Curve,
    Facts,
    LayerName,
    Lines,
    MapMetric,
    Maps,
    Name,
    Row,
    Section,
    Suite,
    Table,
    View,
    fill,
)
from quanterr.selection.roles import role_of
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display, itemize, size
from quanterr.views.diff.candidates.items import ItemWords
from quanterr.views.parts import make_view

CSV_LAYER = ("layer_name", "recipe", "format", "elements", "bytes", "bits_per_weight", "snr_db", "cost")
CSV_COLUMNS = ("list", *CSV_LAYER, "reason")
MIN_FACTOR = 3  # ratio above which a change is written as a factor
MINOR_SHARE = 0.01  # share of the cost below which pages fold a layer
MAX_CURVE_POINTS = 8  # approximate number of points in the text
MIB = 2**20
MAX_SUMMARIZED = 3  # layers in the summary
MAX_LISTED_KEPT = 50  # unquantized layers in the table; the export and the page's list have all
ABSENT = "-"
METRICS = {
    "share": MapMetric("Share of the cost", "lower", "%", log=True, column="Share %"),
    "bits": MapMetric("Bits/w", "lower", "bit", column="Bits/w"),
    "snr_db": MapMetric("Predicted SNR", "higher", "dB", column="SNR dB"),
}
ABOUT = (
    "The cost is predicted from the error that each recipe makes in each layer, measured on the real weights. To check "
    "a quantizer's output against the plan, use quanterr compare --plan; to check the model, quanterr evaluate."
)


def view(plan: Plan, top: int) -> View:
    """Return the view of a plan with the ``top`` most expensive layers."""
    facts: Facts = [
        ("original", [Name(plan.original), f", {size(plan.original_bytes)}"]),
        ("planned", [f"{count(len(plan.layers), 'layer')}; {size(plan.unplanned_bytes)} stay as they are"]),
        ("cost", [plan.measure]),
        *([("measured", [_describe_measurement(plan.measured)])] if plan.measured else []),
    ]
    points = [(point.bytes / MIB, point.cost) for point in plan.curve if point.cost > 0]
    charts = [Chart(f"least {plan.measure} by size", "MiB", [Curve(Name("plans"), points)])] if len(points) > 1 else []
    sections = [
        Section("notes", "Notes", [Lines(plan.notes, warn=True)] if plan.notes else []),
        Section("uniform", "One recipe for all", [_make_uniform_table(plan), Lines([_count_recipes(plan)])]),
        MAP,
        Section("worst", "Most expensive layers", [_make_worst_table(plan, top)] if top else []),
        Section("kept", "Layers as in the original", [_make_kept_table(plan)] if top and _list_kept(plan) else []),
        Section("curve", "Size and cost", [*charts, Lines([_format_curve(plan)])]),
    ]
    words = {"role": "Role", "recipe": "Recipe"}
    maps = Maps(METRICS, words, lambda: _make_rows(plan), "share", "share")
    summary = list(_summarize(plan))
    return make_view(plan, "Quantization plan", conclusion(plan), facts, sections, ABOUT, maps, summary=summary)


def _summarize(plan: Plan) -> Iterator[str]:
    """Yield the number of layers of each recipe, the layers that stay as they are, and the most expensive layers."""
    yield from plan.notes
    yield _count_recipes(plan)
    kept = _list_kept(plan)
    if kept:
        yield f"as in the original: {itemize([layer.layer_name for layer in kept], MAX_SUMMARIZED)}"
    total = plan.cost or 1.0
    worst = sorted((layer for layer in plan.layers if layer.cost), key=lambda layer: -layer.cost)[:MAX_SUMMARIZED]
    for layer in worst:
        cost = format_percent(layer.cost / total)
        yield f"most expensive: {cost}  {display(layer.layer_name)}: {layer.recipe}, {format_if_known(layer.snr_db)} dB"
    if plan.knee:
        yield f"diminishing returns from {size(plan.knee.bytes)} on"


def _make_rows(plan: Plan) -> Iterator[Row]:
    """Yield all layers for the page's scripts."""
    total = plan.cost or 1.0
    return (
        Row(
            layer.layer_name,
            IDENTICAL if layer.recipe == ORIGINAL else DIFFERS,
            {"role": role_of(layer.layer_name), "recipe": display(layer.recipe)},
            {
                "share": round_digits(layer.cost / total, SHARE_DIGITS),
                "bits": round_digits(layer.bits_per_weight, DIGITS),
                "snr_db": round_digits(layer.snr_db, DIGITS),
            },
        )
        for layer in plan.layers
    )


def _describe_measurement(measurement: Measurement) -> str:
    chunks = count(measurement.chunks, "chunk")
    return (
        f"KLD {measurement.kld:.4g} ± {measurement.kld_se:.2g} nat, PPL × {measurement.ppl_ratio:.4g} on {chunks} of "
        f"{measurement.context} tokens of {display(measurement.source)}"
    )


def _make_uniform_table(plan: Plan) -> Table:
    rows = [
        [result.recipe, size(result.bytes), _format_cost(plan, result.cost), "yes" if result.fits else "no"]
        for result in plan.uniform
    ]
    rows.append(["this plan", size(plan.bytes), _format_cost(plan, plan.cost), "yes"])
    cost = "SNR" if _find_signal(plan) else "cost"
    columns = (Column("size", 0), Column(cost, 1), Column("fits", 2, right=False))
    return Table("The plan compared with single recipes", "recipe", columns, rows)


def _find_signal(plan: Plan) -> float | None:
    """Return Σx² of the planned layers if the cost is Σe², to show an SNR; None otherwise, or if unknown."""
    if plan.measure != "squared error":
        return None
    norms = [layer.original_norm for layer in plan.layers]
    return None if None in norms else fsum(norm**2 for norm in norms if norm is not None)


def _format_cost(plan: Plan, cost: float, digits: int = 4) -> str:
    """Format a cost as other outputs do: a share in per cent, a squared error as an SNR, KLD as a number."""
    if plan.measure == "predicted output error":
        return f"{100 * cost:.{digits}g} %"
    if signal := _find_signal(plan):
        return f"{10 * log10(signal / cost):.2f} dB" if cost else "exact"
    return f"{cost:.{digits}g}"


def _count_recipes(plan: Plan) -> str:
    """Return the number of layers of each recipe."""
    counts = Counter(layer.recipe for layer in plan.layers)
    counted = [f"{count(n, 'layer')} {recipe}" for recipe, n in counts.most_common()]
    return "; ".join(counted).replace(ORIGINAL, "as in the original")


def _make_worst_table(plan: Plan, top: int) -> Table:
    total = plan.cost or 1.0
    worst = sorted(plan.layers, key=lambda layer: -layer.cost)[:top]
    columns: Sequence[CellColumn[PlannedLayer]] = (
        (Column("recipe", 0, right=False), lambda layer: layer.recipe),
        (Column("bits/w", 2), lambda layer: f"{layer.bits_per_weight:.4g}"),
        (Column("SNR dB", 3), lambda layer: format_if_known(layer.snr_db)),
        (Column("share", 1), lambda layer: format_percent(layer.cost / total)),
    )
    filled = fill(columns, ((LayerName(layer.layer_name), layer) for layer in worst))
    title = f"The {len(worst):,} most expensive of {count(len(plan.layers), 'layer')}"
    minor = sum(layer.cost < MINOR_SHARE * total for layer in worst)
    return Table(title, "layer", *filled, minor=minor, minor_because="below 1 % of the cost")


def _list_kept(plan: Plan) -> list[PlannedLayer]:
    """Return the layers that stay as in the original, the largest gain first."""
    kept = [layer for layer in plan.layers if layer.recipe == ORIGINAL]
    return sorted(kept, key=lambda layer: (-(layer.usual_cost or 0.0), -layer.bytes))


def _make_kept_table(plan: Plan) -> Table:
    """Return the table of layers that stay as in the original, compared with the plan's most frequent recipe."""
    total, kept = plan.cost or 1.0, _list_kept(plan)

    def format_added(layer: PlannedLayer) -> str:
        return ABSENT if layer.usual_bytes is None else size(layer.bytes - layer.usual_bytes)

    def format_avoided(layer: PlannedLayer) -> str:
        return ABSENT if layer.usual_cost is None else format_percent(layer.usual_cost / total)

    columns: Sequence[CellColumn[PlannedLayer]] = (
        (Column("more bytes", 0), format_added),
        (Column("cost avoided", 1), format_avoided),
    )
    filled = fill(columns, ((LayerName(layer.layer_name), layer) for layer in kept[:MAX_LISTED_KEPT]))
    number = (
        f"The first {MAX_LISTED_KEPT} of {len(kept):,} layers"
        if len(kept) > MAX_LISTED_KEPT
        else count(len(kept), "layer")
    )
    return Table(f"{number} kept as in the original, compared with the plan's most frequent recipe", "layer", *filled)


def _format_curve(plan: Plan) -> str:
    """Return the minimum cost at some sizes, and the size from which more bytes gain little."""
    step = max(len(plan.curve) // MAX_CURVE_POINTS, 1)
    points = ", ".join(f"{size(point.bytes)} {_format_cost(plan, point.cost, 3)}" for point in plan.curve[::step])
    knee = f"; diminishing returns from {size(plan.knee.bytes)} on" if plan.knee else ""
    return f"{'best SNR' if _find_signal(plan) else 'least cost'} by size: {points}{knee}"


def rows(plan: Plan) -> Iterator[JsonObject]:
    """Yield CSV rows: the plan, then each layer and each single recipe."""
    yield {"list": "plan", "bytes": plan.bytes, "cost": plan.cost, "snr_db": plan.snr_db, "reason": plan.goal}
    for layer in plan.layers:
        yield {"list": "layers"} | {name: getattr(layer, name) for name in CSV_LAYER}
    for result in plan.uniform:
        yield {"list": "uniform", "recipe": result.recipe, "bytes": result.bytes, "cost": result.cost}


def suites(plan: Plan) -> list[Suite]:
    """Return one JUnit test, which always passes, as there is no plan if the goal cannot be met."""
    return [Suite("plan", [Case("plan", sentence(plan.goal), output=conclusion(plan))])]


def conclusion(plan: Plan) -> str:
    """Return the size and error of the plan, and how far it can be from the optimum."""
    bound, gain = "no plan is better", _describe_gain(plan)
    if plan.bound < plan.cost:
        more = f"{100 * (plan.cost / plan.bound - 1):.2g} %" if plan.bound > 0 else ""
        bound = f"no plan is more than {more} better" if more else "no bound"
    measurement = plan.measured
    measured = "" if measurement is None else f", measured {measurement.kld:.4g} ± {measurement.kld_se:.2g} nat"
    return (
        f"{plan.goal}: {size(plan.bytes)}, {plan.bits_per_weight:.4g} bits per weight{measured}, "
        f"{'SNR' if _find_signal(plan) else plan.measure} {_format_cost(plan, plan.cost)}{gain}; {bound}"
    )


def _describe_gain(plan: Plan) -> str:
    """Return the change against the best single recipe within the limit, in bytes if the cost is limited."""
    fitting = [result for result in plan.uniform if result.fits]
    if plan.minimizes == "bytes":
        smallest = min(fitting, key=lambda result: result.bytes, default=None)
        return (
            f", {100 * (plan.bytes / smallest.bytes - 1):+.3g} % of bytes against {smallest.recipe} for all"
            if smallest
            else ""
        )
    best = min(fitting, key=lambda result: result.cost, default=None)
    if best is None or best.cost <= 0:
        return ""
    factor = plan.cost / best.cost
    if _find_signal(plan):
        return f", {-10 * log10(factor):+.2f} dB against {best.recipe} for all" if plan.cost else ""
    change = f"{factor:.3g} times as much as" if factor > MIN_FACTOR else f"{100 * (factor - 1):+.3g} % against"
    return f", {change} {best.recipe} for all"


ITEM_WORDS = ItemWords(
    "changed, at more cost",
    "changed, at the same or less cost",
    columns=(
        (Column("old recipe", 0, right=False), lambda layer: layer.old_recipe),
        (Column("new recipe", 1, right=False), lambda layer: layer.new_recipe),
        (Column("bytes", 3), lambda layer: format_size_change(layer.new_bytes - layer.old_bytes)),
        (Column("cost", 2), lambda layer: f"{layer.new_cost - layer.old_cost:+.3g}"),
    ),
    ends=lambda layer: (layer.old_recipe, layer.new_recipe, layer.new_bytes - layer.old_bytes),
    about="From two stored plans. Costs are predicted, in the same measure for both.",
)
