"""The run on one screen: open, pair, compare, assemble."""

import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime

import torch

from quanterr.checkpoints import Checkpoint, open_checkpoint
from quanterr.comparison.assembly import ReportBuilder
from quanterr.comparison.scheduler import Progress, Scheduler, pick_device
from quanterr.comparison.tasks import group_by_original
from quanterr.metrics import METRICS_VERSION, OUTLIER
from quanterr.pairing import pair
from quanterr.pairing.alternatives import choose_alternatives
from quanterr.pairing.importance import architecture_of, read_importance, with_importance
from quanterr.pairing.plan import ComparedWeight
from quanterr.pairing.side import Recognized
from quanterr.report.model import Layer, Report, RunInfo, Settings
from quanterr.report.ranked import names_of, ranked
from quanterr.report.ranking import Ranking
from quanterr.selection import Selection
from quanterr.util.memory import give_back
from quanterr.util.text import display

Path = str | os.PathLike[str]


def compare(
    original: Path | Checkpoint,
    quantized: Path | Checkpoint,
    *,
    layers: Iterable[str] = (),
    device: str = "auto",
    outlier_threshold: float = OUTLIER,
    importance: str | os.PathLike[str] | None = None,
    lenient: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    on_layer: Callable[[Layer], None] | None = None,
    stop: threading.Event | None = None,
    command: Iterable[str] = (),
) -> Report:
    """How far is the quantized checkpoint from its original, layer by layer?

    Args:
        original: a file, a folder, an index, a cached ``org/name``, or an open checkpoint.
        quantized: the same.
        layers: patterns as for ``--layers-to-compare`` (see quanterr/selection.py); without any, all.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        outlier_threshold: an element with a larger ``|e|`` is an outlier.
        importance: an importance matrix of llama.cpp's: gives weighted_nmse and weighted_snr_db.
        lenient: accept files that are odd and yet mean one thing only, see :func:`quanterr.open_checkpoint`.
        watch: called ten times a second with the progress.
        on_layer: called with each layer that differs as soon as it is compared, by a thread of the run.
        stop: when it gets set, the run ends after the current chunks and the report is incomplete.
        command: what the user called, for ``report.run``.

    What cannot be compared is in ``report.not_compared`` and makes the verdict ``inconclusive``.

    Raises:
        UsageError: a pattern that matches nothing, patterns that leave nothing, an unknown device.
        CheckpointError: an input that is missing, damaged, or changes while it is read.
        ResourceError: no such device, or no memory.
    """
    return compare_each(
        original,
        [quantized],
        layers=layers,
        device=device,
        outlier_threshold=outlier_threshold,
        importance=importance,
        lenient=lenient,
        on_progress=on_progress,
        on_layer=on_layer,
        stop=stop,
        command=command,
    )[0]


def compare_each(
    original: Path | Checkpoint,
    candidates: Sequence[Path | Checkpoint],
    *,
    layers: Iterable[str] = (),
    device: str = "auto",
    outlier_threshold: float = OUTLIER,
    importance: str | os.PathLike[str] | None = None,
    lenient: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    on_layer: Callable[[Layer], None] | None = None,
    stop: threading.Event | None = None,
    command: Iterable[str] = (),
) -> list[Report]:
    """The reports that :func:`compare` would make of each candidate, from one pass over the original.

    Arguments and errors are those of :func:`compare`; ``report.run`` is of the whole pass.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    with ExitStack() as stack:
        before, *after = (_opened(side, lenient, stack) for side in (original, *candidates))
        selection = Selection(layers)
        recognized: Recognized | None = {} if len(after) > 1 else None
        plans = [choose_alternatives(pair(before, quantized, selection, recognized)) for quantized in after]
        if importance is not None:
            means = read_importance(importance)
            plans = [
                with_importance(plan, means, architecture_of(before, quantized))
                for plan, quantized in zip(plans, after, strict=True)
            ]
        del recognized
        builders = [ReportBuilder(plan) for plan in plans]
        give_back()  # the tables of names that pairing took

        def finish(candidate: int, done: ComparedWeight) -> None:
            layer = builders[candidate].add(done)
            if layer is not None and on_layer is not None:
                on_layer(layer)

        run = Scheduler(
            group_by_original([plan.pairs for plan in plans]),
            pick_device(device),
            finish,
            outlier_threshold,
            stop or threading.Event(),
            may_move=device == "auto",
        )
        complete = run.run(on_progress or (lambda progress: None))
        for checkpoint in (before, *after):
            checkpoint.check_unchanged()
        info = RunInfo(
            started=started.isoformat(timespec="seconds"),
            seconds=time.monotonic() - clock,
            device=_told(run),
            threads=run.threads,
            torch=torch.__version__,
            python=platform.python_version(),
            read_bytes=run.progress.done_bytes,
            command=list(command),
        )
        settings = Settings(
            outlier_threshold=outlier_threshold,
            importance=None if importance is None else os.fspath(importance),
            metrics_version=METRICS_VERSION,
        )
        return [
            builder.report(before, quantized, selection.patterns, settings, complete, info)
            for builder, quantized in zip(builders, after, strict=True)
        ]


def rank(
    original: Path | Checkpoint,
    candidates: Sequence[Path | Checkpoint],
    *,
    layers: Iterable[str] = (),
    device: str = "auto",
    lenient: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    command: Iterable[str] = (),
) -> Ranking:
    """Which of several quantized checkpoints is best for its size, and which layers could come from another?

    Arguments are those of :func:`compare`; the original is read once. A candidate whose report would be
    inconclusive is not ranked and makes the ranking's verdict ``inconclusive``.

    Raises:
        UsageError: fewer than two candidates, one that is given twice, or as :func:`compare`.
        CheckpointError, ResourceError: as :func:`compare`.
    """
    names = names_of([side.path if isinstance(side, Checkpoint) else os.fspath(side) for side in candidates])
    reports = compare_each(
        original,
        candidates,
        layers=layers,
        device=device,
        lenient=lenient,
        on_progress=on_progress,
        stop=stop,
        command=command,
    )
    return ranked(names, reports)


def _opened(side: Path | Checkpoint, lenient: bool, stack: ExitStack) -> Checkpoint:
    return side if isinstance(side, Checkpoint) else stack.enter_context(open_checkpoint(side, lenient))


def _told(run: Scheduler) -> str:
    device = run.device
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    return f"{name}; cpu too, for want of memory at {display(run.moved_at)}" if run.moved_at else name
