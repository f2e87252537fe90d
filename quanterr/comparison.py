"""The run on one screen: open, pair, compare, assemble."""

import os
import platform
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import UTC, datetime

import torch

from quanterr.assembling import Assembly
from quanterr.checkpoints import Checkpoint, open_checkpoint
from quanterr.folding import unfold
from quanterr.importance import architecture_of, attach, read_importance
from quanterr.metrics import OUTLIER
from quanterr.pairing import pair
from quanterr.readings import settle
from quanterr.report.model import Report, RunInfo, Settings
from quanterr.running import Progress, Run, pick_device
from quanterr.selection import Selection

Path = str | os.PathLike[str]


def compare(
    original: Path | Checkpoint,
    quantized: Path | Checkpoint,
    *,
    layers: Iterable[str] = (),
    device: str = "auto",
    outlier_threshold: float = OUTLIER,
    importance: str | os.PathLike[str] | None = None,
    watch: Callable[[Progress], None] | None = None,
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
        watch: called ten times a second with the progress.
        stop: when it gets set, the run ends after the current chunks and the report is incomplete.
        command: what the user called, for ``report.run``.

    What cannot be compared is in ``report.not_compared`` and makes the verdict ``inconclusive``.

    Raises:
        UsageError: a pattern that matches nothing, an unknown device.
        CheckpointError: an input that is missing, damaged, or changes while it is read.
        ResourceError: no such device, or no memory.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    with ExitStack() as stack:
        before, after = _opened(original, stack), _opened(quantized, stack)
        selection = Selection(layers)
        plan = pair(before, after, selection)
        settle(plan.pairs)
        folded = unfold(plan.pairs)
        covered = None
        if importance is not None:
            covered = attach(plan.pairs, read_importance(importance), architecture_of(before, after))
        assembly = Assembly(plan, folded, covered)
        run = Run(plan.pairs, pick_device(device), assembly.add, outlier_threshold, stop or threading.Event())
        complete = run.run(watch or (lambda progress: None))
        before.check_unchanged()
        after.check_unchanged()
        info = RunInfo(
            started=started.isoformat(timespec="seconds"),
            seconds=time.monotonic() - clock,
            device=_told(run.device),
            threads=run.threads,
            torch=torch.__version__,
            python=platform.python_version(),
            read_bytes=run.progress.done_bytes,
            command=list(command),
        )
        settings = Settings(
            outlier_threshold=outlier_threshold, importance=None if importance is None else os.fspath(importance)
        )
        return assembly.report(before, after, selection.patterns, settings, complete, info)


def _opened(side: Path | Checkpoint, stack: ExitStack) -> Checkpoint:
    return side if isinstance(side, Checkpoint) else stack.enter_context(open_checkpoint(side))


def _told(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
