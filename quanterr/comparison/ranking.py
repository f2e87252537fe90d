"""Several candidates for one original, ranked: checkpoints, or recipes that quantize it on the fly."""

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Unpack

from quanterr.checkpoints import Checkpoint, entered
from quanterr.comparison import Path, compare_each
from quanterr.comparison.bounds import with_bounds
from quanterr.comparison.estimating import estimate
from quanterr.gates import Prepared, prepare
from quanterr.options import ComparisonOptions, RankKeywords, RankOptions, SweepKeywords, SweepOptions
from quanterr.pairing.importance import read_importance, weighing
from quanterr.recipes import PRESETS, Recipe, recipes_named
from quanterr.recipes.sampling import share_of
from quanterr.recipes.studies import studied
from quanterr.report.hardware import bandwidth_of
from quanterr.report.keeping import budget
from quanterr.report.ranking.making import make_ranking, name_candidates
from quanterr.report.ranking.model import Ranking
from quanterr.selection import Selection


def rank(
    original: Path | Checkpoint, candidates: Sequence[Path | Checkpoint], **options: Unpack[RankKeywords]
) -> Ranking:
    """Which of several quantized checkpoints is best for its size, and which layers could come from another?

    ``options`` are the fields of :class:`quanterr.options.RankOptions`, by name; the original is read once. A candidate
    whose report would be inconclusive is not ranked and makes the ranking's verdict ``inconclusive``.

    Raises:
        UsageError: fewer than two candidates, one that is given twice, or as :func:`compare`.
        CheckpointError, ResourceError: as :func:`compare`.
    """
    chosen = RankOptions(**options)
    return rank_candidates(original, candidates, chosen, prepare(chosen))


def rank_candidates(
    original: Path | Checkpoint, candidates: Sequence[Path | Checkpoint], options: RankOptions, rules: Prepared
) -> Ranking:
    """The same with rules that were read before."""
    recipes = recipes_named(options.against) if options.against else []
    paths = [side.path if isinstance(side, Checkpoint) else os.fspath(side) for side in candidates]
    names = name_candidates([*paths, *names_in(recipes)])
    return _ranked(original, [*candidates, *recipes], names, options, options.keep_original, rules)


def sweep(original: Path | Checkpoint, to: Iterable[str] = (), **options: Unpack[SweepKeywords]) -> Ranking:
    """What would other formats cost? The original quantized on the fly by each of some recipes, ranked.

    ``to``: recipes such as ``"fp8_row"`` or ``"int4_g{32,64}"``; without any, a preset. ``options`` are the other
    fields of :class:`quanterr.options.SweepOptions`, by name.

    Raises:
        UsageError: not a recipe, nothing to quantize, or as :func:`compare`.
        CheckpointError: a weight holds NaN or infinity, or as :func:`compare`.
        ResourceError: as :func:`compare`.
    """
    chosen = SweepOptions(to=to, **options)
    return sweep_recipes(original, chosen, prepare(chosen))


def sweep_recipes(original: Path | Checkpoint, options: SweepOptions, rules: Prepared) -> Ranking:
    """The same with rules that were read before."""
    recipes = recipes_named(options.to or PRESETS, options.scales)
    if options.hardware is not None:
        bandwidth_of(options.hardware)  # a mistake in it costs no run
    if options.sample is not None:
        keep = None if options.keep_original is None else budget(options.keep_original)
        found = estimate(original, recipes, share_of(options.sample), keep, options)
    else:
        found = _ranked(original, recipes, names_in(recipes), options, options.keep_original, rules)
    if options.study and found.complete:
        found = with_studies(found, original, recipes, options)
    return found if options.hardware is None else with_bounds(found, original, recipes, options, options.hardware)


def _ranked(
    original: Path | Checkpoint,
    candidates: Sequence[Path | Checkpoint | Recipe],
    names: Sequence[str],
    options: ComparisonOptions,
    keep_original: str | None,
    rules: Prepared,
) -> Ranking:
    """The ranking of candidates and recipes under these names, each judged."""
    keep = None if keep_original is None else budget(keep_original)
    reports = [rules.judge(report) for report in compare_each(original, candidates, options)]
    return make_ranking(names, reports, keep, [one.name for one in candidates if isinstance(one, Recipe)])


def with_studies(
    ranking: Ranking, original: Path | Checkpoint, recipes: Sequence[Recipe], options: ComparisonOptions
) -> Ranking:
    """The ranking of recipes with what outliers and scales do to each."""
    with ExitStack() as stack:
        checkpoint = entered(stack, original, options.lenient, options.cache)
        means = None if options.importance is None else read_importance(options.importance)
        weigh = weighing(checkpoint, means)
        found = studied(checkpoint, recipes, Selection(options.layers, options.exclude), options.stop, weigh)
        checkpoint.check_unchanged()
    return ranking.model_copy(update={"studies": found})


def names_in(recipes: Iterable[Recipe]) -> list[str]:
    """Their names."""
    return [recipe.name for recipe in recipes]
