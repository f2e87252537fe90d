"""The computation of a plan: the best recipe for each layer within a budget, from measurements on the real weights."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, log10
from typing import Any

from msgspec.structs import replace

from quanterr.advice.runtimes import load_together
from quanterr.checkpoints import Checkpoint, open_checkpoints
from quanterr.comparison import compare_each
from quanterr.documents.base import Tool
from quanterr.documents.comparison.layer import Layer, LosslessLayer, find_sizes
from quanterr.documents.comparison.model import Report
from quanterr.documents.plan.model import ORIGINAL, Measure, Plan, PlannedLayer, Point, Uniform
from quanterr.errors import Interrupted, UsageError
from quanterr.findings.files import FALLBACK, LEFT_UNQUANTIZED
from quanterr.options import PlanOptions, SameIn
from quanterr.options.keywords import accept_fields_of
from quanterr.pairing.importance import architecture_of
from quanterr.planning.goals import LIMITS, METRICS, SQUARED, WEIGHTED, Goal, parse_goal
from quanterr.recipes import PRESETS, parse_recipe, parse_recipes
from quanterr.selection.roles import block_of, role_of
from quanterr.tensors.in_memory import Side, hold
from quanterr.util.knapsack import KnapsackItem, solve, trace_path
from quanterr.util.text import count, display, itemize, size
from quanterr.version import __version__

CURVE_POINTS = 40  # approximate number
BITS_TOLERANCE = 5e-4  # bits per weight: a recipe with 4.50025 fits a budget of 4.5
MAX_SMALL_SHARE = 0.01  # norms and biases are at most this share of the bytes; embeddings or heads are more
GGUF_PREFIX = "gguf_"
COST_TOLERANCE = 1e-12  # relative, as the order in which costs are added up varies
# Measure → the source of its costs.
SOURCES = {SQUARED: "original", WEIGHTED: "importance matrix", **dict.fromkeys(METRICS, "sensitivity")}
GUESS_NOTE = (
    ": a guess, which can be worse than one format for all layers. "
    "quanterr evaluate ORIGINAL --text FILE --sensitivity-out s.json measures how much each layer matters (of a "
    "denoiser: --inputs FILE)"
)
GUESSES = {
    SQUARED: "without --sensitivity every squared error counts the same" + GUESS_NOTE,
    WEIGHTED: "without --sensitivity the errors of all outputs count the same" + GUESS_NOTE,
}

# Patterns of projections that runtimes fuse into one matrix, and the name that replaces them in a group's key.
FUSED_PROJECTIONS = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"\b(q|k|v)_proj\b|\bto_[qkv]\b|\b(query|key|value)\b", "qkv"),
        (r"\b(gate|up)_proj\b|\bw[13]\b", "gate_up"),
        (r"\bexperts\.\d+\b", "experts"),
    )
)


@dataclass(frozen=True, slots=True)
class _LayerOption:
    """A layer as stored by a recipe."""

    recipe: str  # the recipe that stores it, which is a fallback if rows do not fill blocks
    nbytes: int
    cost: float
    error: float  # Σe²
    layer: Layer | LosslessLayer | None  # None if it is stored as in the original


@dataclass(frozen=True, slots=True)
class _PlannableLayer:
    """A layer with its options."""

    name: str
    elements: int
    norm: float  # norm of the original
    fingerprint: str | None  # fingerprint of the original
    original: str  # format of the original
    options: Mapping[str, _LayerOption]  # recipe → option

    @property
    def signal(self) -> float:
        """Σx²."""
        return self.norm**2


@accept_fields_of(PlanOptions)
def plan(original: Side, **options: Any) -> Plan:
    """Choose a recipe for each layer: the minimum cost within a budget, or the minimum size within a limit on the cost.

    Every layer may also be left unquantized. With ``sensitivity``, the cost is the predicted KLD or output error; with
    ``importance`` alone, the squared error weighted by the importance matrix; otherwise the squared error.

    Raises:
        UsageError: there is no goal or more than one; the goal cannot be met (the message states the minimum); or
            as ``sweep``.
        CheckpointError, ResourceError: as ``sweep``.
        Interrupted: the run was stopped.
    """
    return plan_layers(hold(original), PlanOptions(**options))


def plan_layers(original: str | os.PathLike[str] | Checkpoint, chosen: PlanOptions) -> Plan:
    """Choose a recipe for each layer as :func:`plan` does, with all options in one object."""
    goal = parse_goal(chosen)
    recipes = parse_recipes(chosen.to or PRESETS, chosen.scales)
    with open_checkpoints([original], chosen.lenient, chosen.cache) as [checkpoint]:
        reports = compare_each(checkpoint, recipes, chosen, samples=False)
        if not all(report.complete for report in reports):
            raise Interrupted("interrupted before all layers were measured: no plan")
        nbytes, architecture = checkpoint.nbytes, architecture_of(checkpoint)
        for recipe, report in zip(recipes, reports, strict=True):
            if report.verdict == "inconclusive":
                raise UsageError(f"{recipe.name}: {display('; '.join(report.reasons), 2000)}")
        by_recipe = {recipe.name: report for recipe, report in zip(recipes, reports, strict=True)}

        def make(amount: float) -> Plan:
            return _make_plan(goal._replace(amount=amount), by_recipe, nbytes, architecture, chosen.same_in)

        if not chosen.verify:
            return make(goal.amount)
        from quanterr.planning.verification import keep_limit, measure

        if goal.kind == "kld":
            return replace(keep_limit(goal.amount, make, checkpoint, chosen), goal=str(goal))
        plan = make(goal.amount)
        return replace(plan, measured=measure(plan, checkpoint, chosen))


def _make_plan(goal: Goal, reports: Mapping[str, Report], nbytes: int, architecture: str, same_in: SameIn) -> Plan:
    measure = goal.measure
    rows, left_out = _collect_layers(reports, measure)
    if not rows:
        raise UsageError(f"no layer can be planned: the {SOURCES[measure]} names no layer")
    groups = _group_layers(rows, same_in)
    # The recipes that all layers of a group support.
    names = [[name for name in group[0].options if all(name in row.options for row in group)] for group in groups]
    choices = [
        [
            KnapsackItem(
                sum(row.options[recipe].nbytes for row in group), fsum(row.options[recipe].cost for row in group)
            )
            for recipe in names_of_group
        ]
        for group, names_of_group in zip(groups, names, strict=True)
    ]
    fixed = nbytes - sum(row.options[ORIGINAL].nbytes for row in rows)
    elements = sum(row.elements for row in rows)
    signal = fsum(row.signal for row in rows)
    limit, max_cost = _find_limits(goal, fixed, elements, signal)
    min_bytes = sum(min(choice.nbytes for choice in names_of_group) for names_of_group in choices)
    if min_bytes > limit:
        in_bits = f"{8 * min_bytes / elements:.4g} bits per weight"
        in_bytes = f"{size(fixed + min_bytes)}, of which {size(fixed)} are not planned; {_explain_unplanned(reports)}"
        shown = in_bits if goal.kind == "bits" else in_bytes
        raise UsageError(f"{goal}: cannot be met; the least possible is {shown}")
    solved = _solve(choices, limit, max_cost)
    if solved is None:
        raise UsageError(f"{goal}: cannot be met")
    picks, bound = solved
    recipe_of = {
        row.name: names_of_group[pick]
        for group, names_of_group, pick in zip(groups, names, picks, strict=True)
        for row in group
    }
    counts = Counter(recipe for recipe in recipe_of.values() if recipe != ORIGINAL)
    usual = counts.most_common(1)[0][0] if counts else ORIGINAL
    layers = [_make_layer(row, recipe_of[row.name], usual) for row in rows]
    planned_bytes = sum(layer.bytes for layer in layers)
    error = fsum(row.options[recipe_of[row.name]].error for row in rows)
    first = next(iter(reports.values()))
    curve = [Point(fixed + round(point.nbytes), point.cost) for point in _sample_curve(trace_path(choices))]
    notes = [GUESSES[measure]] if measure in GUESSES else []
    notes += [first.settings.calibration] if first.settings.calibration else []
    every = [finding for report in reports.values() for finding in report.findings]
    notes += [finding.message for finding in every if finding.code in (LEFT_UNQUANTIZED, FALLBACK)]
    formats = {layer.format for layer in layers if layer.recipe != ORIGINAL}
    if not load_together(formats):
        notes.append(
            f"no known runtime loads {itemize(sorted(formats), 5)} in one checkpoint; give --to recipes of one"
        )
    if (
        fixed > MAX_SMALL_SHARE * nbytes
        and not first.selection.patterns
        and all(name.startswith(GGUF_PREFIX) for name in reports)
    ):
        notes.append(f"{size(fixed)} are not planned; {_explain_unplanned(reports)}")
    if left_out:
        notes.append(
            f"the {SOURCES[measure]} does not name {count(len(left_out), 'layer')}, left unquantized: "
            f"{itemize(left_out, 3)}"
        )
    return Plan(
        tool=Tool(name="quanterr", version=__version__),
        original=first.original.path,
        original_bytes=nbytes,
        architecture=architecture,
        selection=first.selection,
        goal=str(goal),
        minimizes=goal.minimizes,
        measure=measure,
        notes=notes,
        recipes=[*reports, ORIGINAL],
        bytes=fixed + planned_bytes,
        bits_per_weight=8 * planned_bytes / elements,
        cost=fsum(layer.cost for layer in layers),
        bound=bound,
        snr_db=10 * log10(signal / error) if error else None,
        least_bytes=fixed + round(min_bytes),
        unplanned_bytes=fixed,
        layers=layers,
        uniform=sorted(
            (_make_uniform(name, rows, fixed, limit, max_cost) for name in reports), key=lambda point: point.bytes
        ),
        curve=curve,
        knee=_find_knee(curve),
        importance=first.settings.importance,
        run=first.run,
    )


def _explain_unplanned(recipes: Iterable[str]) -> str:
    """Return how to plan embeddings and heads and, if llama-quantize can carry out the plan, how it treats them."""
    words = "-l '*' also plans embeddings and heads"
    usual = ", which llama-quantize quantizes by itself; the plan's command keeps them in BF16"
    return words + usual * all(name.startswith(GGUF_PREFIX) for name in recipes)


def _collect_layers(reports: Mapping[str, Report], measure: Measure) -> tuple[list[_PlannableLayer], list[str]]:
    """Return the layers with their options, and the names of layers whose cost is unknown."""
    layers_by_name: dict[str, dict[str, Layer | LosslessLayer]] = defaultdict(dict)
    for recipe, report in reports.items():
        stored_layers: list[Layer | LosslessLayer] = [*report.layers, *report.lossless]
        for layer in stored_layers:
            if len(layer.tensor_shape) > 1 and layer.format != layer.original_format:
                layers_by_name[layer.layer_name][recipe] = layer
    rows, left_out = [], []
    for name, stored in layers_by_name.items():
        any_layer = next(iter(stored.values()))
        options = {recipe: _make_option(recipe, layer, measure) for recipe, layer in stored.items()}
        known = {recipe: option for recipe, option in options.items() if option is not None}
        if len(known) < len(options):
            left_out.append(name)
            continue
        known[ORIGINAL] = _LayerOption(ORIGINAL, find_sizes(any_layer).original, 0.0, 0.0, None)
        rows.append(
            _PlannableLayer(
                name,
                any_layer.tensor_elements,
                any_layer.original_norm or 0.0,
                any_layer.original_fingerprint,
                any_layer.original_format,
                known,
            )
        )
    return rows, left_out


def _make_option(recipe: str, layer: Layer | LosslessLayer, measure: Measure) -> _LayerOption | None:
    """Return a layer's option for a recipe; None if its cost is unknown."""
    nbytes = find_sizes(layer).quantized
    recipe = parse_recipe(recipe).for_columns(layer.tensor_shape[-1]).name
    if isinstance(layer, LosslessLayer):
        return _LayerOption(recipe, nbytes, 0.0, 0.0, layer)
    if (error := layer.squared_error) is None:
        return None
    weighted = layer.weighted_error_norm
    costs = {SQUARED: error, WEIGHTED: None if weighted is None else weighted**2}
    cost = costs[measure] if measure in costs else getattr(layer, METRICS[measure])
    return None if cost is None else _LayerOption(recipe, nbytes, cost, error, layer)


def _group_layers(rows: Sequence[_PlannableLayer], same_in: SameIn) -> list[list[_PlannableLayer]]:
    """Group the layers that must share a recipe."""
    groups: dict[str, list[_PlannableLayer]] = defaultdict(list)
    for row in rows:
        groups[_group_key(row.name, same_in)].append(row)
    return list(groups.values())


def _group_key(name: str, same_in: SameIn) -> str:
    """Return the key of the group that a layer belongs to."""
    if same_in == "block":
        return block_of(name) or name
    if same_in == "role":
        return role_of(name)
    for pattern, word in FUSED_PROJECTIONS:
        name = pattern.sub(word, name)
    return name


def _find_limits(goal: Goal, fixed: int, elements: int, signal: float) -> tuple[float, float]:
    """Return the maximum size in bytes and the maximum cost of all planned layers; infinite without a limit.

    A plan whose cost equals the limit is within it.
    """
    limit = max_cost = float("inf")
    if goal.kind == "size":
        limit = goal.amount - fixed
    elif goal.kind == "bits":
        limit = (goal.amount + BITS_TOLERANCE) * elements / 8
    elif goal.kind == "snr":
        max_cost = signal / 10 ** (goal.amount / 10) * (1 + COST_TOLERANCE)
    elif goal.kind in LIMITS:
        max_cost = goal.amount * (1 + COST_TOLERANCE)
    return limit, max_cost


def _solve(choices: Sequence[Sequence[KnapsackItem]], limit: float, max_cost: float) -> tuple[list[int], float] | None:
    """Return the choice of each group and a lower bound; None if nothing meets the limits.

    Args:
        choices: the options of each group.
        limit: maximum size in bytes; the cost is minimized, and the bound is a cost.
        max_cost: maximum cost; if finite, the size is minimized instead, and the bound is the resulting cost.
    """
    if max_cost == float("inf"):
        solution = solve(choices, limit)
        return None if solution is None else (solution.picks, solution.bound)
    solution = solve(
        [[KnapsackItem(choice.cost, choice.nbytes) for choice in options] for options in choices], max_cost
    )
    if solution is None:
        return None
    return solution.picks, fsum(options[pick].cost for options, pick in zip(choices, solution.picks, strict=True))


def _make_layer(row: _PlannableLayer, recipe: str, usual: str) -> PlannedLayer:
    """Return a layer of the plan; ``usual`` is the plan's most frequent recipe."""
    option = row.options[recipe]
    layer = option.layer
    instead = row.options.get(usual) if recipe == ORIGINAL and usual != ORIGINAL else None
    return PlannedLayer(
        layer_name=row.name,
        display_name=display(row.name),
        recipe=option.recipe,
        format=row.original if layer is None else layer.format,
        elements=row.elements,
        bytes=option.nbytes,
        bits_per_weight=8 * option.nbytes / row.elements,
        snr_db=10 * log10(row.signal / option.error) if option.error and row.signal else None,
        cost=option.cost,
        original_norm=row.norm,
        original_fingerprint=row.fingerprint,
        usual_bytes=instead.nbytes if instead else None,
        usual_cost=instead.cost if instead else None,
    )


def _make_uniform(recipe: str, rows: Sequence[_PlannableLayer], fixed: int, limit: float, max_cost: float) -> Uniform:
    """Return the size and the cost if one recipe stores all layers that support it."""
    options = [row.options.get(recipe, row.options[ORIGINAL]) for row in rows]
    nbytes = sum(option.nbytes for option in options)
    cost = fsum(option.cost for option in options)
    return Uniform(recipe, fixed + nbytes, cost, nbytes <= limit and cost <= max_cost)


def _sample_curve(points: Sequence[KnapsackItem]) -> list[KnapsackItem]:
    """Return about CURVE_POINTS of the points, including both ends."""
    step = max((len(points) - 1) / (CURVE_POINTS - 1), 1)
    places = sorted({min(round(n * step), len(points) - 1) for n in range(CURVE_POINTS)})
    return [points[place] for place in places]


def _find_knee(curve: Sequence[Point]) -> Point | None:
    """Return the point where the curve of log cost over size is furthest below the line between its ends."""
    known = [point for point in curve if point.cost > 0]
    if len(known) < 3:
        return None
    first, last = known[0], known[-1]
    wide = last.bytes - first.bytes or 1
    high = log10(first.cost / last.cost) or 1.0

    def measure_depth(point: Point) -> float:
        return 1 - (point.bytes - first.bytes) / wide - log10(point.cost / last.cost) / high

    best = max(known, key=measure_depth)
    return best if measure_depth(best) > 0 else None
