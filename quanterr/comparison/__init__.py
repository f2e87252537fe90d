"""The comparison run: open the checkpoints, pair their weights, compare them, assemble the report."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Unpack

from quanterr.checkpoints import Checkpoint, enter_checkpoint
from quanterr.comparison.assembly import ReportBuilder
from quanterr.comparison.journal import Journal, make_identity
from quanterr.comparison.ranks import Ranks
from quanterr.comparison.scheduler import Scheduler
from quanterr.comparison.sharing import Sharing
from quanterr.comparison.tasks import group_by_original
from quanterr.findings.files import RECIPE
from quanterr.gates import prepare
from quanterr.kernel.library import KernelChoice, choose_kernel
from quanterr.keywords import accept_fields_of
from quanterr.metrics import METRICS_VERSION
from quanterr.options import CompareKeywords, CompareOptions, ComparisonOptions
from quanterr.pairing import pair
from quanterr.pairing.alternatives import choose_alternatives
from quanterr.pairing.importance import (
    Means,
    architecture_of,
    attach_importance,
    make_importance_lookup,
    read_importance,
)
from quanterr.pairing.model import ComparedWeight
from quanterr.pairing.names import canonicalize
from quanterr.pairing.side import WeightCache
from quanterr.report.model import Report, Settings
from quanterr.report.sensitivity import read_sensitivity
from quanterr.selection import LayerSelection
from quanterr.tensors.clock import Clock
from quanterr.tensors.devices import describe_device, pick_device
from quanterr.util.platform import give_back_memory, with_slashes
from quanterr.util.rank_group import join_rank_group
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display

if TYPE_CHECKING:
    from quanterr.recipes import Recipe

Path = str | os.PathLike[str]
STORED = (str, os.PathLike, Checkpoint)  # types of candidates that are not recipes


@accept_fields_of(CompareOptions)
def compare(original: Path | Checkpoint, quantized: Path | Checkpoint, **options: Unpack[CompareKeywords]) -> Report:
    """Measure how far a quantized checkpoint is from its original, layer by layer.

    Args:
        original: a file, a folder, an index, a cached ``org/name``, or an open checkpoint.
        quantized: the same.
        options: the fields of :class:`quanterr.CompareOptions`, by name. Rules (``require=["snr_db >= 28"]``) decide
            the verdict.

    Tensors that cannot be compared are in ``report.not_compared`` and make the verdict ``inconclusive``.

    Raises:
        UsageError: a pattern matches nothing, no layer is left, the device is unknown, or a rule is invalid.
        CheckpointError: an input is missing, damaged, or changes while it is read.
        ResourceError: the device is not available, or memory runs out.
    """
    chosen = CompareOptions(**options)
    rules = prepare(chosen)
    return rules.judge(compare_each(original, [quantized], chosen)[0])


def compare_each(
    original: Path | Checkpoint,
    candidates: "Sequence[Path | Checkpoint | Recipe]",
    options: ComparisonOptions,
    samples: bool = True,
) -> list[Report]:
    """Return the report of :func:`compare` for each candidate, reading the original only once.

    A recipe quantizes the original on the fly. Without ``samples``, reports lack the estimates from a sample of rows:
    the errors that the stored scales, good scales and the format allow. Raises the errors of :func:`compare`;
    ``report.run`` describes the whole pass.
    """
    stop = options.stop or threading.Event()
    with join_rank_group(stop) as group:
        return _compare_each(original, candidates, options, stop, None if group is None else Ranks(group), samples)


def _compare_each(
    original: Path | Checkpoint,
    candidates: "Sequence[Path | Checkpoint | Recipe]",
    options: ComparisonOptions,
    stop: threading.Event,
    ranks: Ranks | None,
    samples: bool,
) -> list[Report]:
    clock, choice = Clock(), choose_kernel()
    sensitivity = None if options.sensitivity is None else read_sensitivity(os.fspath(options.sensitivity))
    with ExitStack() as stack:
        selection = LayerSelection(options.layers, options.exclude)
        before = enter_checkpoint(stack, original, options.lenient, options.cache)
        means = None if options.importance is None else read_importance(options.importance)
        made = _quantize([side for side in candidates if not isinstance(side, STORED)], before, selection, means)
        after = [
            enter_checkpoint(stack, side, options.lenient, options.cache) if isinstance(side, STORED) else next(made)
            for side in candidates
        ]
        recognized: WeightCache | None = {} if len(after) > 1 else None
        pairings = [
            choose_alternatives(pair(before, quantized, selection, recognized), undo=quantized.kind != RECIPE)
            for quantized in after
        ]
        if means is not None:
            pairings = [
                attach_importance(pairing, means, architecture_of(before, quantized))
                for pairing, quantized in zip(pairings, after, strict=True)
            ]
        del recognized
        builders = [
            ReportBuilder(pairing)
            if sensitivity is None
            else ReportBuilder(pairing, sensitivity.alphas(_recipe_of(side)), sensitivity.cost.metric)
            for pairing, side in zip(pairings, after, strict=True)
        ]
        canonicalize.cache_clear()
        give_back_memory()  # that pairing used for its tables of names

        def take(candidate: int, done: ComparedWeight) -> None:
            layer = builders[candidate].add(done)
            if layer is not None and options.on_layer is not None:
                options.on_layer(layer)

        same = None
        if options.resume is not None or ranks is not None:
            same = make_identity([before, *after], pairings, options, choice.kernel is not None, samples)
        sharing = Sharing(take, _open_journal(options, ranks, same, stack), ranks)
        run = Scheduler(
            sharing.drop_finished(group_by_original([pairing.pairs for pairing in pairings])),
            pick_device(options.device),
            sharing.finish,
            options.outlier_threshold,
            stop,
            may_move=options.device == "auto",
            kernel=choice.kernel,
            samples=samples,
            claim=None if ranks is None else ranks.claim,
            share=0.0 if ranks is None else ranks.rank / ranks.world,
        )
        on_progress = options.on_progress or (lambda progress: None)
        progress = run.progress  # outlives the run
        complete = sharing.collect(run, run.run(on_progress), lambda: on_progress(progress))
        for checkpoint in (before, *after):
            checkpoint.check_unchanged()
        info = clock.describe_run(
            options.command,
            _describe_device(run),
            run.threads,
            progress.done_bytes,
            str(KernelChoice(None) if run.device.type == "cuda" else choice),
        )
        del run  # its tasks take about 200 bytes per weight
        give_back_memory()  # that workers used for their buffers
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
            ranks.group.end()
        return reports


def _recipe_of(candidate: Checkpoint) -> str | None:
    return candidate.path if candidate.kind == RECIPE else None


def _quantize(
    recipes: "Sequence[Recipe]", original: Checkpoint, selection: LayerSelection, means: Means | None
) -> Iterator[Checkpoint]:
    """Quantize the original by each recipe, on the fly; recipes are imported only if there are any."""
    if recipes:
        from quanterr.recipes.quantized_file import quantize_by

        yield from quantize_by(recipes, original, selection, make_importance_lookup(original, means))


def _open_journal(
    options: ComparisonOptions, ranks: Ranks | None, same: JsonObject | None, stack: ExitStack
) -> Journal | None:
    """Open the requested journal, before any rank writes to its own, and make the ranks agree on inputs and pairs.

    ``same`` is the identity of the run; None if there are neither a journal nor other ranks.
    """
    if same is None:
        return None
    journal = None
    if options.resume is not None:
        journal = stack.enter_context(Journal(options.resume, same, 0 if ranks is None else ranks.rank))
    if ranks is not None:
        kind = pick_device(options.device).type  # determines the chunks, and so the last digits
        ranks.group.agree({key: value for key, value in same.items() if key != "written"} | {"device": kind})
    return journal


def _describe_device(run: Scheduler) -> str:
    name = describe_device(run.device)
    return f"{name}; also cpu, as memory ran out at {display(run.moved_at)}" if run.moved_at else name
