"""The run on one screen: open, pair, compare, assemble."""

import os
import platform
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from quanterr.checkpoints import Checkpoint, entered
from quanterr.comparison.assembly import ReportBuilder
from quanterr.comparison.bounds import with_bounds
from quanterr.comparison.estimating import estimate
from quanterr.comparison.journal import Journal, identity
from quanterr.comparison.ranks import Ranks
from quanterr.comparison.scheduler import Scheduler
from quanterr.comparison.sharing import Sharing
from quanterr.comparison.tasks import group_by_original
from quanterr.gates import Prepared, prepare
from quanterr.metrics import METRICS_VERSION
from quanterr.native import Choice, chosen
from quanterr.options import (
    CompareKeywords,
    CompareOptions,
    ComparisonOptions,
    RankKeywords,
    RankOptions,
    SweepKeywords,
    SweepOptions,
)
from quanterr.pairing import pair
from quanterr.pairing.alternatives import choose_alternatives
from quanterr.pairing.importance import architecture_of, importance_of_columns, read_importance, with_importance
from quanterr.pairing.plan import ComparedWeight, Plan
from quanterr.pairing.side import Recognized
from quanterr.recipes import PRESETS, Recipe, recipes_named
from quanterr.recipes.candidate import ImportanceOf, quantized_by
from quanterr.recipes.sampling import share_of
from quanterr.recipes.studies import studied
from quanterr.report.base import RunInfo
from quanterr.report.hardware import bandwidth_of
from quanterr.report.keeping import budget
from quanterr.report.model import Report, Settings
from quanterr.report.ranking.making import names_of, ranked
from quanterr.report.ranking.model import Ranking
from quanterr.report.sensitivity import read_sensitivity
from quanterr.selection import Selection
from quanterr.tensors.devices import described, pick_device
from quanterr.util.company import company_of_environment
from quanterr.util.platform import give_back_memory, with_slashes
from quanterr.util.text import display

Path = str | os.PathLike[str]


def compare(original: Path | Checkpoint, quantized: Path | Checkpoint, **options: Unpack[CompareKeywords]) -> Report:
    """How far is the quantized checkpoint from its original, layer by layer?

    Args:
        original: a file, a folder, an index, a cached ``org/name``, or an open checkpoint.
        quantized: the same.
        options: the fields of :class:`quanterr.CompareOptions`, by name; with rules (``require=["snr_db >= 28"]``)
            the report is judged.

    What cannot be compared is in ``report.not_compared`` and makes the verdict ``inconclusive``.

    Raises:
        UsageError: a pattern that matches nothing, patterns that leave nothing, an unknown device, a wrong rule.
        CheckpointError: an input that is missing, damaged, or changes while it is read.
        ResourceError: no such device, or no memory.
    """
    chosen = CompareOptions(**options)
    rules = prepare(chosen)
    return rules.judge(compare_each(original, [quantized], chosen)[0])


def compare_each(
    original: Path | Checkpoint, candidates: Sequence[Path | Checkpoint | Recipe], options: ComparisonOptions
) -> list[Report]:
    """The reports that :func:`compare` would make of each candidate, from one pass over the original.

    A recipe is the original quantized by it, on the fly. Errors are those of :func:`compare`; ``report.run`` is of the
    whole pass.
    """
    stop = options.stop or threading.Event()
    with company_of_environment(stop) as company:
        return _compare_each(original, candidates, options, stop, None if company is None else Ranks(company))


def _compare_each(
    original: Path | Checkpoint,
    candidates: Sequence[Path | Checkpoint | Recipe],
    options: ComparisonOptions,
    stop: threading.Event,
    ranks: Ranks | None,
) -> list[Report]:
    started, clock, choice = datetime.now(UTC), time.monotonic(), chosen()
    alphas = None if options.sensitivity is None else read_sensitivity(os.fspath(options.sensitivity))
    with ExitStack() as stack:
        selection = Selection(options.layers, options.exclude)
        before = entered(stack, original, options.lenient, options.cache)
        means = None if options.importance is None else read_importance(options.importance)
        weigh = _weighing(before, means)
        recipes = [side for side in candidates if isinstance(side, Recipe)]
        made = iter(quantized_by(recipes, before, selection, weigh))
        after = [
            next(made) if isinstance(side, Recipe) else entered(stack, side, options.lenient, options.cache)
            for side in candidates
        ]
        recognized: Recognized | None = {} if len(after) > 1 else None
        plans = [choose_alternatives(pair(before, quantized, selection, recognized)) for quantized in after]
        if means is not None:
            plans = [
                with_importance(plan, means, architecture_of(before, quantized))
                for plan, quantized in zip(plans, after, strict=True)
            ]
        del recognized
        builders = [ReportBuilder(plan, alphas) for plan in plans]
        give_back_memory()  # the tables of names that pairing took

        def take(candidate: int, done: ComparedWeight) -> None:
            layer = builders[candidate].add(done)
            if layer is not None and options.on_layer is not None:
                options.on_layer(layer)

        sharing = Sharing(take, _journal(options, ranks, [before, *after], plans, choice, stack), ranks)
        run = Scheduler(
            sharing.left(group_by_original([plan.pairs for plan in plans])),
            pick_device(options.device),
            sharing.finish,
            options.outlier_threshold,
            stop,
            may_move=options.device == "auto",
            kernel=choice.kernel,
            claim=None if ranks is None else ranks.claim,
            share=0.0 if ranks is None else ranks.rank / ranks.world,
        )
        on_progress = options.on_progress or (lambda progress: None)
        complete = sharing.collected(run, run.run(on_progress), lambda: on_progress(run.progress))
        for checkpoint in (before, *after):
            checkpoint.check_unchanged()
        info = RunInfo(
            started=started.isoformat(timespec="seconds"),
            seconds=time.monotonic() - clock,
            device=_described(run),
            threads=run.threads,
            kernel=str(Choice(None) if run.device.type == "cuda" else choice),
            torch=torch.__version__,
            python=platform.python_version(),
            read_bytes=run.progress.done_bytes,
            command=list(options.command),
        )
        settings = Settings(
            outlier_threshold=options.outlier_threshold,
            importance=None if options.importance is None else with_slashes(os.fspath(options.importance)),
            sensitivity=None if options.sensitivity is None else with_slashes(os.fspath(options.sensitivity)),
            metrics_version=METRICS_VERSION,
        )
        reports = [
            builder.report(before, quantized, selection.patterns, settings, complete, info)
            for builder, quantized in zip(builders, after, strict=True)
        ]
        if ranks is not None:
            ranks.company.end()
        return reports


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
    names = names_of([*paths, *names_in(recipes)])
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
    return ranked(names, reports, keep, [one.name for one in candidates if isinstance(one, Recipe)])


def with_studies(
    ranking: Ranking, original: Path | Checkpoint, recipes: Sequence[Recipe], options: ComparisonOptions
) -> Ranking:
    """The ranking of recipes with what outliers and scales do to each."""
    with ExitStack() as stack:
        checkpoint = entered(stack, original, options.lenient, options.cache)
        means = None if options.importance is None else read_importance(options.importance)
        weigh = _weighing(checkpoint, means)
        found = studied(checkpoint, recipes, Selection(options.layers, options.exclude), options.stop, weigh)
        checkpoint.check_unchanged()
    return ranking.model_copy(update={"studies": found})


def _weighing(original: Checkpoint, means: Mapping[str, tuple[Tensor, Tensor]] | None) -> ImportanceOf | None:
    """The importance of the columns of each weight of an original, where a file says it."""
    return (
        None if means is None else partial(importance_of_columns, found=means, architecture=architecture_of(original))
    )


def names_in(recipes: Iterable[Recipe]) -> list[str]:
    """Their names."""
    return [recipe.name for recipe in recipes]


def _journal(
    options: ComparisonOptions,
    ranks: Ranks | None,
    checkpoints: Sequence[Checkpoint],
    plans: Sequence[Plan],
    choice: Choice,
    stack: ExitStack,
) -> Journal | None:
    """The journal that is asked for, read before any rank adds to its own; ranks agree on inputs and plan."""
    if options.resume is None and ranks is None:
        return None
    same, journal = identity(checkpoints, plans, options, choice.kernel is not None), None
    if options.resume is not None:
        journal = stack.enter_context(Journal(options.resume, same, 0 if ranks is None else ranks.rank))
    if ranks is not None:
        kind = pick_device(options.device).type  # which decides how weights are cut, and the last digits
        ranks.company.agree({key: value for key, value in same.items() if key != "written"} | {"device": kind})
    return journal


def _described(run: Scheduler) -> str:
    name = described(run.device)
    return f"{name}; cpu too, for want of memory at {display(run.moved_at)}" if run.moved_at else name
