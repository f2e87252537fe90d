"""Ranking of several candidates for one original: checkpoints, or recipes that quantize it on the fly."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from quanterr.advice.kept_layers import parse_budget
from quanterr.checkpoints import Checkpoint, Unreadable, open_checkpoints, open_readable, require_readable
from quanterr.comparison import Path, compare_each, judge_loading
from quanterr.comparison.bounds import add_bounds
from quanterr.comparison.estimating import estimate
from quanterr.documents.evaluation.model import Evaluation
from quanterr.documents.ranking.model import Ranking
from quanterr.documents.ranking.scores import add_scores, check_names
from quanterr.documents.reading import read_stored
from quanterr.errors import UsageError
from quanterr.findings.runtimes.judging import choose_runtimes
from quanterr.gates import PreparedRules, prepare
from quanterr.options import ComparisonOptions, LoadingOptions, RankOptions, SweepOptions
from quanterr.options.keywords import accept_fields_of, list_given
from quanterr.pairing.importance import make_importance_lookup, read_importance
from quanterr.ranking.making import make_ranking, make_unreadable, name_candidates
from quanterr.recipes import PRESETS, Recipe, parse_recipes
from quanterr.recipes.sampling import parse_share
from quanterr.recipes.studies import study_recipes
from quanterr.tensors.in_memory import Side, hold, hold_all
from quanterr.util.hardware import bandwidth_of
from quanterr.util.waiting import notices


@accept_fields_of(RankOptions)
def rank(
    original: Side,
    candidates: Side | Iterable[Side] | Mapping[str, Side],
    **options: Any,
) -> Ranking:
    """Rank quantized checkpoints by error and size, and find layers that could better come from another candidate.

    Candidates in a dict have its keys as names: ``{"mine": a, "theirs": b}``. The original is read once. A candidate
    whose report is inconclusive is not ranked, and makes the ranking's verdict ``inconclusive``; so does one that
    cannot be read, if two others can.

    Raises:
        UsageError: there are fewer than two candidates, a candidate is given twice, or :func:`compare` raises it.
        CheckpointError, ResourceError: :func:`compare` raises it.
    """
    chosen = RankOptions(**options)
    sides: list[Side]
    sides, names = list_given(candidates)
    before, *after = hold_all([original, *sides])
    return rank_candidates(before, after, chosen, prepare(chosen), names)


def rank_candidates(
    original: Path | Checkpoint,
    candidates: Sequence[Path | Checkpoint | Unreadable],
    options: RankOptions,
    rules: PreparedRules,
    given_names: Sequence[str] = (),
) -> Ranking:
    """Rank candidates as :func:`rank` does, with prepared rules, under ``given_names`` or names from their paths."""
    recipes = parse_recipes(options.against) if options.against else []
    paths = [side.path if isinstance(side, Checkpoint | Unreadable) else os.fspath(side) for side in candidates]
    names = name_candidates([*paths, *list_names(recipes)], given_names)
    path = options.evaluation
    evaluated = None if path is None else (read_stored(path, Evaluation), path)
    if evaluated is not None:
        check_names([*paths, *list_names(recipes)], *evaluated)
    with open_readable(candidates, options.lenient, options.cache) as opened:
        require_readable(opened, 1 if recipes else 2)
        ranking = _rank(original, [*opened, *recipes], names, options, options.keep_original, rules, options)
    if evaluated is None:
        return ranking
    try:
        return add_scores(ranking, *evaluated)
    except UsageError as error:  # the ranking itself is worth keeping
        notices.warning("%s", error)
        return ranking


@accept_fields_of(SweepOptions)
def sweep(original: Side, to: Iterable[str] = (), **options: Any) -> Ranking:
    """Quantize the original on the fly by several recipes, and rank them by error and size.

    Raises:
        UsageError: a recipe is unknown, there is nothing to quantize, or :func:`compare` raises it.
        CheckpointError: a weight contains NaN or infinity, or :func:`compare` raises it.
        ResourceError: :func:`compare` raises it.
    """
    chosen = SweepOptions(to=to, **options)
    return sweep_recipes(hold(original), chosen, prepare(chosen))


def sweep_recipes(original: Path | Checkpoint, options: SweepOptions, rules: PreparedRules) -> Ranking:
    """Rank recipes as :func:`sweep` does, with prepared rules."""
    recipes = parse_recipes(options.to or PRESETS, options.scales)
    if options.hardware is not None:
        bandwidth_of(options.hardware)  # fail on unknown hardware before the run
    if options.sample is not None:
        keep = None if options.keep_original is None else parse_budget(options.keep_original)
        ranking = estimate(original, recipes, parse_share(options.sample), keep, options)
    else:
        ranking = _rank(original, recipes, list_names(recipes), options, options.keep_original, rules, LoadingOptions())
    studied = options.study and ranking.complete
    if not studied and options.hardware is None:
        return ranking
    with open_checkpoints([original], options.lenient, options.cache) as [checkpoint]:
        if studied:
            ranking = add_studies(ranking, checkpoint, recipes, options)
        return (
            ranking if options.hardware is None else add_bounds(ranking, checkpoint, recipes, options, options.hardware)
        )


def _rank(
    original: Path | Checkpoint,
    candidates: Sequence[Path | Checkpoint | Recipe | Unreadable],
    names: Sequence[str],
    options: ComparisonOptions,
    keep_original: str | None,
    rules: PreparedRules,
    loading: LoadingOptions,
) -> Ranking:
    """Compare, judge and rank candidates and recipes under these names."""
    keep = None if keep_original is None else parse_budget(keep_original)
    named = [
        (name, candidate)
        for name, candidate in zip(names, candidates, strict=True)
        if not isinstance(candidate, Unreadable)
    ]
    choose_runtimes([*loading.runtimes, *rules.runtimes])  # unknown names are refused before the run
    reports = compare_each(original, [candidate for _, candidate in named], options)
    reports = [
        report
        if isinstance(candidate, Recipe)
        else judge_loading(report, candidate, loading, rules.runtimes, options.lenient)
        for (_, candidate), report in zip(named, reports, strict=True)
    ]
    reports = [rules.judge(report) for report in reports]
    recipes = [candidate.name for candidate in candidates if isinstance(candidate, Recipe)]
    unreadable = [
        make_unreadable(name, candidate.path, candidate.reason)
        for name, candidate in zip(names, candidates, strict=True)
        if isinstance(candidate, Unreadable)
    ]
    return make_ranking([name for name, _ in named], reports, keep, recipes, unreadable)


def add_studies(
    ranking: Ranking, original: Checkpoint, recipes: Sequence[Recipe], options: ComparisonOptions
) -> Ranking:
    """Add the study of each recipe to the ranking: the effect of outliers and scales."""
    means = None if options.importance is None else read_importance(options.importance)
    weigh = make_importance_lookup(original, means)
    studies = study_recipes(original, recipes, options.selection, options.stop, weigh)
    original.check_unchanged()
    return replace(ranking, studies=studies)


def list_names(recipes: Iterable[Recipe]) -> list[str]:
    """Return the name of each recipe."""
    return [recipe.name for recipe in recipes]
