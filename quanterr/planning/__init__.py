"""Which recipe should each layer have, under a budget? Every recipe is measured on the real weights, then chosen from.

1  the original quantized by each recipe, in one pass: what each layer would take, and cost
2  layers that a runtime fuses choose together
3  the least cost within the budget, with a bound (quanterr/knapsack.py)
"""

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import fsum, log10, sqrt
from typing import Final, Literal, NamedTuple, Unpack

from quanterr.checkpoints import Checkpoint, entered
from quanterr.comparison import compare_each
from quanterr.errors import UsageError
from quanterr.findings.files import FALLBACK, LEFT
from quanterr.knapsack import Choice, path, solve
from quanterr.options import PlanKeywords, PlanOptions, SameIn
from quanterr.pairing.importance import architecture_of
from quanterr.recipes import PRESETS, recipe_named, recipes_named
from quanterr.report.base import Tool
from quanterr.report.keeping import UNITS, amount_of, original_bytes, stored_bytes
from quanterr.report.model import Layer, LosslessLayer, Report
from quanterr.report.plan.model import ORIGINAL, Measure, Plan, PlannedLayer, Point, Uniform
from quanterr.roles import block_of, role_of
from quanterr.util.text import count, display, listed, size
from quanterr.version import __version__

POINTS = 40  # of the curve
ROUNDED = 5e-4  # bits per weight: a recipe of 4.50025 is within 4.5
SQUARED: Final = "squared error"
WEIGHTED: Final = "weighted squared error"
KLD: Final = "predicted KLD"
SOURCES = {SQUARED: "original", WEIGHTED: "importance matrix", KLD: "sensitivity"}  # of what a layer's error costs
BETTER = (
    ": a guess, which can be worse than one format for all. "
    "quanterr evaluate ORIGINAL --text FILE --sensitivity s.json measures what matters"
)
GUESSES = {
    SQUARED: "without --sensitivity every squared error counts the same" + BETTER,
    WEIGHTED: "without --sensitivity the errors of all outputs count the same" + BETTER,
}

# Projections that runtimes make one matrix of: by what stands for them.
FUSED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"\b(q|k|v)_proj\b|\bto_[qkv]\b|\b(query|key|value)\b", "qkv"),
        (r"\b(gate|up)_proj\b|\bw[13]\b", "gate_up"),
        (r"\bexperts\.\d+\b", "experts"),
    )
)


class Goal(NamedTuple):
    """A budget of bytes, or a limit of the cost under which the size shall be the least."""

    kind: Literal["size", "bits", "kld", "snr"]
    amount: float

    def __str__(self) -> str:
        return {
            "size": f"--size {size(self.amount)}",
            "bits": f"--bits {self.amount:g}",
            "kld": f"--max-kld {self.amount:g}",
            "snr": f"--min-snr {self.amount:g}",
        }[self.kind]


@dataclass(frozen=True, slots=True)
class _Option:
    """A layer as a recipe stores it."""

    recipe: str  # that stores it: of one whose blocks the rows do not fill, its fallback
    nbytes: int
    cost: float
    error: float  # Σe²
    layer: Layer | LosslessLayer | None  # None: as in the original


@dataclass(frozen=True, slots=True)
class _Row:
    """A layer, and what it may be."""

    name: str
    elements: int
    signal: float  # Σx²
    fingerprint: str | None  # of the original
    original: str  # format
    options: Mapping[str, _Option]  # by recipe


def plan(original: str | os.PathLike[str] | Checkpoint, **options: Unpack[PlanKeywords]) -> Plan:
    """Which recipe should each layer have? The least cost within a budget, or the least size within a limit.

    ``options`` are the fields of :class:`quanterr.options.PlanOptions`, by name. Every layer may stay as it is, too.
    With ``sensitivity`` the cost is predicted KLD, with ``importance`` alone squared error weighted by it, otherwise
    squared error.

    Raises:
        UsageError: no or several goals, a goal that cannot be met (says the least possible), or as ``sweep``.
        CheckpointError, ResourceError: as ``sweep``.
    """
    return plan_layers(original, PlanOptions(**options))


def plan_layers(original: str | os.PathLike[str] | Checkpoint, chosen: PlanOptions) -> Plan:
    """The same with its options as one."""
    nbytes_at_most = _bytes(chosen.size) if isinstance(chosen.size, str) else chosen.size
    given = {"size": nbytes_at_most, "bits": chosen.bits, "kld": chosen.max_kld, "snr": chosen.min_snr}
    goals = [Goal(kind, amount) for kind, amount in given.items() if amount is not None]  # type: ignore[arg-type]
    if len(goals) != 1:
        raise UsageError("give one goal: --size, --bits, --max-kld or --min-snr")
    if goals[0].kind == "kld" and chosen.sensitivity is None:
        raise UsageError("--max-kld needs --sensitivity FILE, which quanterr evaluate --sensitivity writes")
    if chosen.verify != (chosen.text is not None):
        raise UsageError("--verify measures a plan on a text: give both, --verify and --text FILE")
    if chosen.verify and chosen.importance is not None:
        raise UsageError("--verify: what is measured is quantized without an importance matrix; leave --importance out")
    measured_as = _measure(chosen)
    if goals[0].kind == "snr" and measured_as != SQUARED:
        raise UsageError("--min-snr is a limit of squared error: leave out --sensitivity and --importance")
    recipes = recipes_named(chosen.to or PRESETS, chosen.scales)
    with ExitStack() as stack:
        checkpoint = entered(stack, original, chosen.lenient, chosen.cache)
        reports = compare_each(checkpoint, recipes, chosen)
        nbytes, architecture = checkpoint.nbytes, architecture_of(checkpoint)
        for recipe, report in zip(recipes, reports, strict=True):
            if report.verdict == "inconclusive":
                raise UsageError(f"{recipe.name}: {display('; '.join(report.reasons), 2000)}")
        by_recipe = {recipe.name: report for recipe, report in zip(recipes, reports, strict=True)}
        goal = goals[0]

        def make(amount: float) -> Plan:
            return _planned(Goal(goal.kind, amount), by_recipe, nbytes, architecture, chosen.same_in, measured_as)

        if not chosen.verify:
            return make(goal.amount)
        from quanterr.planning.verifying import keep_limit, measure

        if goal.kind == "kld":
            return keep_limit(goal.amount, make, checkpoint, chosen).model_copy(update={"goal": str(goal)})
        plan = make(goal.amount)
        return plan.model_copy(update={"measured": measure(plan, checkpoint, chosen)})


def _planned(
    goal: Goal, reports: Mapping[str, Report], nbytes: int, architecture: str, same_in: SameIn, measure: Measure
) -> Plan:
    rows, left_out = _rows(reports, measure)
    if not rows:
        raise UsageError(f"no layer can be planned: the {SOURCES[measure]} names none of them")
    groups = _groups(rows, same_in)
    names = [_shared(group) for group in groups]
    choices = [
        [
            Choice(sum(row.options[recipe].nbytes for row in group), fsum(row.options[recipe].cost for row in group))
            for recipe in own
        ]
        for group, own in zip(groups, names, strict=True)
    ]
    fixed = nbytes - sum(row.options[ORIGINAL].nbytes for row in rows)
    elements = sum(row.elements for row in rows)
    limit = _budget(goal, fixed, elements)
    least = sum(min(choice.nbytes for choice in own) for own in choices)
    if least > limit:
        in_bits = f"{8 * least / elements:.4g} bits per weight"
        in_bytes = (
            f"{size(fixed + least)}, of which {size(fixed)} are not planned; -l '*' plans embeddings and heads, too"
        )
        shown = in_bits if goal.kind == "bits" else in_bytes
        raise UsageError(f"{goal}: cannot be met; the least possible is {shown}")
    signal = fsum(row.signal for row in rows)
    most = _most(goal, signal)
    solved = _solve(choices, limit, most)
    if solved is None:
        raise UsageError(f"{goal}: cannot be met")
    picks, bound = solved
    recipe_of = {row.name: own[pick] for group, own, pick in zip(groups, names, picks, strict=True) for row in group}
    layers = [_layer(row, recipe_of[row.name]) for row in rows]
    planned_bytes = sum(layer.bytes for layer in layers)
    error = fsum(row.options[recipe_of[row.name]].error for row in rows)
    first = next(iter(reports.values()))
    curve = [Point(fixed + round(one.nbytes), one.cost) for one in _sampled(path(choices))]
    notes = [GUESSES[measure]] if measure in GUESSES else []
    notes += [first.settings.calibration] if first.settings.calibration else []
    every = [found for report in reports.values() for found in report.findings]
    notes += [found.message for found in every if found.code in (LEFT, FALLBACK)]
    if left_out:
        notes.append(
            f"the {SOURCES[measure]} does not name {count(len(left_out), 'layer')}, which stay: {listed(left_out, 3)}"
        )
    return Plan.model_construct(
        tool=Tool(name="quanterr", version=__version__),
        original=first.original.path,
        original_bytes=nbytes,
        architecture=architecture,
        selection=first.selection,
        goal=str(goal),
        measure=measure,
        notes=notes,
        recipes=[*reports, ORIGINAL],
        bytes=fixed + planned_bytes,
        bits_per_weight=8 * planned_bytes / elements,
        cost=fsum(layer.cost for layer in layers),
        bound=bound,
        snr_db=10 * log10(signal / error) if error else None,
        least_bytes=fixed + round(least),
        unplanned_bytes=fixed,
        layers=layers,
        uniform=sorted((_uniform(name, rows, fixed, limit, most) for name in reports), key=lambda one: one.bytes),
        curve=curve,
        knee=_knee(curve),
        run=first.run,
    )


def _bytes(text: str) -> float:
    amount, unit = amount_of(text)
    if unit not in UNITS:
        raise UsageError(f"--size {display(text)}: give bytes, such as 6GiB or 700MB")
    return amount * UNITS[unit]


def _measure(options: PlanOptions) -> Measure:
    """What an error costs: with both, the importance still decides the scales of recipes that search them."""
    if options.sensitivity is not None:
        return KLD
    return SQUARED if options.importance is None else WEIGHTED


def _rows(reports: Mapping[str, Report], measure: Measure) -> tuple[list[_Row], list[str]]:
    """What each layer may be; names of those whose cost is not known."""
    found: dict[str, dict[str, Layer | LosslessLayer]] = defaultdict(dict)
    for recipe, report in reports.items():
        stored_layers: list[Layer | LosslessLayer] = [*report.layers, *report.lossless]
        for layer in stored_layers:
            if len(layer.tensor_shape) > 1 and layer.format != layer.original_format:
                found[layer.layer_name][recipe] = layer
    rows, left_out = [], []
    for name, stored in found.items():
        any_layer = next(iter(stored.values()))
        signal = (any_layer.original_norm or 0.0) ** 2
        options = {recipe: _option(recipe, layer, measure) for recipe, layer in stored.items()}
        known = {recipe: option for recipe, option in options.items() if option is not None}
        if len(known) < len(options):
            left_out.append(name)
            continue
        nbytes = original_bytes(any_layer.original_dtype, any_layer.tensor_elements)
        known[ORIGINAL] = _Option(ORIGINAL, nbytes, 0.0, 0.0, None)
        rows.append(
            _Row(
                name,
                any_layer.tensor_elements,
                signal,
                any_layer.original_fingerprint,
                any_layer.original_format,
                known,
            )
        )
    return rows, left_out


def _option(recipe: str, layer: Layer | LosslessLayer, measure: Measure) -> _Option | None:
    """Return a layer as a recipe stores it; None where its cost is not known."""
    nbytes = stored_bytes(layer.bits_per_weight, layer.tensor_elements)
    recipe = recipe_named(recipe).for_columns(layer.tensor_shape[-1]).name
    if isinstance(layer, LosslessLayer):
        return _Option(recipe, nbytes, 0.0, 0.0, layer)
    error = layer.error_norm**2
    weighted = layer.weighted_error_norm
    costs = {KLD: layer.predicted_kld, SQUARED: error, WEIGHTED: None if weighted is None else weighted**2}
    cost = costs[measure]
    return None if cost is None else _Option(recipe, nbytes, cost, error, layer)


def _groups(rows: Sequence[_Row], same_in: SameIn) -> list[list[_Row]]:
    """Layers that have one recipe."""
    found: dict[str, list[_Row]] = defaultdict(list)
    for row in rows:
        found[_key(row.name, same_in)].append(row)
    return list(found.values())


def _key(name: str, same_in: SameIn) -> str:
    if same_in == "block":
        return block_of(name) or name
    if same_in == "role":
        return role_of(name)
    for pattern, word in FUSED:
        name = pattern.sub(word, name)
    return name


def _shared(group: Sequence[_Row]) -> list[str]:
    """Recipes that all layers of a group can have."""
    return [recipe for recipe in group[0].options if all(recipe in row.options for row in group)]


def _budget(goal: Goal, fixed: int, elements: int) -> float:
    """Bytes of the planned layers; without a limit infinite."""
    if goal.kind == "size":
        return goal.amount - fixed
    return (goal.amount + ROUNDED) * elements / 8 if goal.kind == "bits" else float("inf")


def _most(goal: Goal, signal: float) -> float:
    """The largest cost of the planned layers; without a limit infinite."""
    if goal.kind == "snr":
        return signal / 10 ** (goal.amount / 10)
    return goal.amount if goal.kind == "kld" else float("inf")


def _solve(choices: Sequence[Sequence[Choice]], limit: float, most: float) -> tuple[list[int], float] | None:
    """The choice of each group, and what no plan can cost less: the least cost of ``limit`` bytes, or where the cost
    may be ``most``, the least bytes. None where nothing meets it.
    """
    if most == float("inf"):
        found = solve(choices, limit)
        return None if found is None else (found.picks, found.bound)
    found = solve([[Choice(choice.cost, choice.nbytes) for choice in own] for own in choices], most)
    if found is None:
        return None
    return found.picks, fsum(own[pick].cost for own, pick in zip(choices, found.picks, strict=True))


def _layer(row: _Row, recipe: str) -> PlannedLayer:
    option = row.options[recipe]
    layer = option.layer
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
        original_norm=sqrt(row.signal),
        original_fingerprint=row.fingerprint,
    )


def _uniform(recipe: str, rows: Sequence[_Row], fixed: int, limit: float, most: float) -> Uniform:
    options = [row.options.get(recipe, row.options[ORIGINAL]) for row in rows]
    nbytes = sum(option.nbytes for option in options)
    cost = fsum(option.cost for option in options)
    return Uniform(recipe, fixed + nbytes, cost, nbytes <= limit and cost <= most)


def _sampled(points: Sequence[Choice]) -> list[Choice]:
    """Some forty of them, the ends among these."""
    step = max((len(points) - 1) / (POINTS - 1), 1)
    places = sorted({min(round(n * step), len(points) - 1) for n in range(POINTS)})
    return [points[place] for place in places]


def _knee(curve: Sequence[Point]) -> Point | None:
    """Where the curve of log cost over size is furthest below the line between its ends."""
    known = [point for point in curve if point.cost > 0]
    if len(known) < 3:
        return None
    first, last = known[0], known[-1]
    wide = last.bytes - first.bytes or 1
    high = log10(first.cost / last.cost) or 1.0

    def below(point: Point) -> float:
        return 1 - (point.bytes - first.bytes) / wide - log10(point.cost / last.cost) / high

    best = max(known, key=below)
    return best if below(best) > 0 else None
