"""The run on one screen: open, pair, compare, assemble."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Unpack

from quanterr.checkpoints import Checkpoint, entered
from quanterr.comparison.assembly import ReportBuilder
from quanterr.comparison.journal import Journal, identity
from quanterr.comparison.ranks import Ranks
from quanterr.comparison.scheduler import Scheduler
from quanterr.comparison.sharing import Sharing
from quanterr.comparison.tasks import group_by_original
from quanterr.findings.files import RECIPE
from quanterr.gates import prepare
from quanterr.keywords import accept_fields_of
from quanterr.metrics import METRICS_VERSION
from quanterr.native import KernelChoice, choose_kernel
from quanterr.options import CompareKeywords, CompareOptions, ComparisonOptions
from quanterr.pairing import pair
from quanterr.pairing.alternatives import choose_alternatives
from quanterr.pairing.importance import Means, architecture_of, read_importance, weighing, with_importance
from quanterr.pairing.plan import ComparedWeight, Plan
from quanterr.pairing.side import Recognized
from quanterr.report.model import Report, Settings
from quanterr.report.sensitivity import read_sensitivity
from quanterr.selection import Selection
from quanterr.tensors.clock import Clock
from quanterr.tensors.devices import describe_device, pick_device
from quanterr.util.company import company_of_environment
from quanterr.util.platform import give_back_memory, with_slashes
from quanterr.util.text import display

if TYPE_CHECKING:
    from quanterr.recipes import Recipe

Path = str | os.PathLike[str]
STORED = (str, os.PathLike, Checkpoint)  # candidates that are no recipes


@accept_fields_of(CompareOptions)
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
    original: Path | Checkpoint, candidates: "Sequence[Path | Checkpoint | Recipe]", options: ComparisonOptions
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
    candidates: "Sequence[Path | Checkpoint | Recipe]",
    options: ComparisonOptions,
    stop: threading.Event,
    ranks: Ranks | None,
) -> list[Report]:
    clock, choice = Clock(), choose_kernel()
    sensitivity = None if options.sensitivity is None else read_sensitivity(os.fspath(options.sensitivity))
    with ExitStack() as stack:
        selection = Selection(options.layers, options.exclude)
        before = entered(stack, original, options.lenient, options.cache)
        means = None if options.importance is None else read_importance(options.importance)
        made = _made([side for side in candidates if not isinstance(side, STORED)], before, selection, means)
        after = [
            entered(stack, side, options.lenient, options.cache) if isinstance(side, STORED) else next(made)
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
        builders = [
            ReportBuilder(plan, None if sensitivity is None else sensitivity.alphas(_recipe_of(side)))
            for plan, side in zip(plans, after, strict=True)
        ]
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
        info = clock.describe_run(
            options.command,
            _described(run),
            run.threads,
            run.progress.done_bytes,
            str(KernelChoice(None) if run.device.type == "cuda" else choice),
        )
        settings = Settings(
            outlier_threshold=options.outlier_threshold,
            importance=None if options.importance is None else with_slashes(os.fspath(options.importance)),
            sensitivity=None if options.sensitivity is None else with_slashes(os.fspath(options.sensitivity)),
            calibration=None if sensitivity is None else sensitivity.note,
            metrics_version=METRICS_VERSION,
        )
        reports = [
            builder.report(before, quantized, selection.patterns, settings, complete, info)
            for builder, quantized in zip(builders, after, strict=True)
        ]
        if ranks is not None:
            ranks.company.end()
        return reports


def _recipe_of(candidate: Checkpoint) -> str | None:
    return candidate.path if candidate.kind == RECIPE else None


def _made(
    recipes: "Sequence[Recipe]", original: Checkpoint, selection: Selection, means: Means | None
) -> Iterator[Checkpoint]:
    """The original quantized by each recipe; all that recipes need is imported for these alone."""
    if recipes:
        from quanterr.recipes.quantized_file import quantize_by

        yield from quantize_by(recipes, original, selection, weighing(original, means))


def _journal(
    options: ComparisonOptions,
    ranks: Ranks | None,
    checkpoints: Sequence[Checkpoint],
    plans: Sequence[Plan],
    choice: KernelChoice,
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
    name = describe_device(run.device)
    return f"{name}; cpu too, for want of memory at {display(run.moved_at)}" if run.moved_at else name
