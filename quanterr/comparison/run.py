"""The run of a comparison: open, pair, split into pieces, measure, collect, check, put the report together."""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from msgspec.structs import replace

from quanterr.checkpoints import Checkpoint
from quanterr.checkpoints.base import RECIPE
from quanterr.comparison.assembly import ReportBuilder
from quanterr.comparison.devices import choose_device
from quanterr.comparison.inputs import Inputs, Path, open_inputs
from quanterr.comparison.scheduler import Scheduler
from quanterr.comparison.tasks import group_by_original
from quanterr.documents.base import Finding
from quanterr.documents.comparison.model import Report, Settings
from quanterr.documents.sensitivity import Sensitivity
from quanterr.errors import UsageError
from quanterr.formats.reading import open_reader
from quanterr.kernel.fused_sums import can_fuse
from quanterr.kernel.library import choose_kernel
from quanterr.metrics import METRICS_VERSION
from quanterr.options import ComparisonOptions
from quanterr.pairing import pair
from quanterr.pairing.alternatives import choose_alternatives
from quanterr.pairing.importance import (
    architecture_of,
    attach_importance,
)
from quanterr.pairing.model import Pairing, WeightResult
from quanterr.pairing.names import canonicalize
from quanterr.pairing.side import WeightCache
from quanterr.tensors.clock import Clock
from quanterr.tensors.devices import describe_device
from quanterr.util.platform import give_back_memory, with_slashes
from quanterr.util.rank_group import join_rank_group
from quanterr.util.text import display
from quanterr.util.waiting import notices

if TYPE_CHECKING:
    from quanterr.recipes import Recipe


def compare_each(
    original: Path | Checkpoint,
    candidates: "Sequence[Path | Checkpoint | Recipe]",
    options: ComparisonOptions,
    samples: bool = True,
    every_code: bool = False,
) -> list[Report]:
    """Return the report of :func:`quanterr.compare` for each candidate, reading the original only once.

    A recipe quantizes the original on the fly. Without ``samples``, reports lack the estimates from a sample of rows:
    the errors that the stored scales, good scales and the format allow. With ``every_code``, they have the class of
    each tensor by all of its codes. ``report.run`` describes the whole pass. Raises the errors of
    :func:`quanterr.compare`.
    """
    stop = options.stop or threading.Event()
    with join_rank_group(stop) as group, ExitStack() as stack:
        clock, choice = Clock(), choose_kernel()
        if choice.kernel is None and not choice.asked:
            notices.warning(
                "%s: without the compiled kernel, comparing takes about twenty times as long", choice.reason
            )
        inputs = stack.enter_context(open_inputs(original, candidates, options))
        device = choose_device(options.device, choice.kernel)
        pairings = _pair(inputs)
        builders = _make_builders(pairings, inputs)
        collect = _make_collector(builders, options)
        tasks = group_by_original([pairing.pairs for pairing in pairings])
        sharing = None
        if every_code and group is not None:
            raise UsageError("--every-code: runs in one process; start quanterr without torchrun")
        if group is not None or options.resume is not None:
            from quanterr.comparison.sharing import open_sharing

            checkpoints = [inputs.original, *inputs.candidates]
            sharing = open_sharing(stack, group, collect, checkpoints, pairings, options, samples, device)
        run = Scheduler(
            tasks if sharing is None else sharing.drop_finished(tasks),
            device,
            collect if sharing is None else sharing.finish,
            options.outlier_threshold,
            stop,
            may_move=options.device == "auto",
            kernel=choice.kernel,
            samples=samples,
            claims=None if sharing is None else sharing.claims,
        )
        on_progress, progress = options.on_progress or (lambda progress: None), run.progress  # outlives the run
        complete = run.run(on_progress)
        if sharing is not None:
            complete = sharing.collect(run, complete, lambda: on_progress(progress))
        on_device = "triton" if can_fuse(run.device) else "torch"
        used = str(choice) if run.device.type == "cpu" else on_device
        described = describe_device(run.device)
        if run.moved_at:
            described += f"; also cpu, as memory ran out at {display(run.moved_at)}"
        info = clock.describe_run(options.command, described, run.threads, progress.done_bytes, used)
        del run  # free its tasks: about 200 bytes per weight
        give_back_memory()  # the workers' buffers
        findings = _check(builders, inputs, complete)
        settings = _make_settings(options, inputs.sensitivity, every_code)
        reports = [
            builder.report(
                inputs.original, candidate, candidate_findings, inputs.selection.patterns, settings, complete, info
            )
            for builder, candidate, candidate_findings in zip(builders, inputs.candidates, findings, strict=True)
        ]
        if every_code and complete:
            from quanterr.comparison.every_code import add_origin

            equal = [builder.equal for builder in builders]
            reports = add_origin(reports, inputs, pairings, equal, choice.kernel, stop, progress, on_progress)
            seconds = clock.describe_run((), "", 0, 0).seconds
            reports = [replace(report, run=replace(report.run, seconds=seconds)) for report in reports]
        if group is not None:
            group.end()
        return reports


def _pair(inputs: Inputs) -> list[Pairing]:
    """Pair the weights of each candidate with the original's, and attach the importance of their columns."""
    original, candidates, selection, means, _ = inputs
    recognized: WeightCache | None = {} if len(candidates) > 1 else None
    pairings = [
        choose_alternatives(pair(original, candidate, selection, recognized), undo=candidate.kind != RECIPE)
        for candidate in candidates
    ]
    if means is not None:
        pairings = [
            attach_importance(pairing, means, architecture_of(original, candidate))
            for pairing, candidate in zip(pairings, candidates, strict=True)
        ]
    return pairings


def _make_builders(pairings: Sequence[Pairing], inputs: Inputs) -> list[ReportBuilder]:
    """Make a report builder for each candidate, and free the memory that pairing used for its tables of names."""
    sensitivity, builders = inputs.sensitivity, []
    for pairing, candidate in zip(pairings, inputs.candidates, strict=True):
        if sensitivity is None:
            builders.append(ReportBuilder(pairing))
        else:
            recipe = candidate.path if candidate.kind == RECIPE else None
            builders.append(ReportBuilder(pairing, sensitivity.alphas(recipe), sensitivity.cost.metric))
    canonicalize.cache_clear()
    give_back_memory()
    return builders


def _make_collector(
    builders: Sequence[ReportBuilder], options: ComparisonOptions
) -> Callable[[int, WeightResult], None]:
    def collect(candidate: int, done: WeightResult) -> None:
        layer = builders[candidate].add(done)
        if layer is not None and options.on_layer is not None:
            options.on_layer(layer)

    return collect


def _check(builders: Sequence[ReportBuilder], inputs: Inputs, complete: bool) -> list[list[Finding]]:
    """Return the findings about each candidate; a few weights are read again for them, and nothing after them."""
    with open_reader() as reader:
        findings = [
            builder.check(inputs.original, candidate, complete, reader)
            for builder, candidate in zip(builders, inputs.candidates, strict=True)
        ]
    for checkpoint in (inputs.original, *inputs.candidates):
        checkpoint.check_unchanged()
    return findings


def _make_settings(options: ComparisonOptions, sensitivity: Sensitivity | None, every_code: bool) -> Settings:
    return Settings(
        outlier_threshold=options.outlier_threshold,
        importance=None if options.importance is None else with_slashes(os.fspath(options.importance)),
        sensitivity=None if options.sensitivity is None else with_slashes(os.fspath(options.sensitivity)),
        calibration=None if sensitivity is None else sensitivity.note,
        every_code=every_code,
        metrics_version=METRICS_VERSION,
    )
