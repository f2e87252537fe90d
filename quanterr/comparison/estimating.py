"""A sweep of a sample of rows: an estimate of what all rows would give, with its margin."""

import os
import platform
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from math import prod

import torch

from quanterr.checkpoints import Checkpoint, entered
from quanterr.comparison.assembly import reported_dtype
from quanterr.comparison.scheduler import Progress
from quanterr.errors import Interrupted, UsageError
from quanterr.findings.files import of_notes
from quanterr.options import ComparisonOptions
from quanterr.recipes import Recipe
from quanterr.recipes.candidate import QuantizedFile, choose, quantized_by
from quanterr.recipes.matrices import Matrix, matrices_of
from quanterr.recipes.sampling import Estimate, estimated, margin
from quanterr.recipes.tensors import weight_of
from quanterr.report.base import RunInfo, Tool
from quanterr.report.keeping import Budget
from quanterr.report.model import Selection as Selected
from quanterr.report.ranking.making import UNPLACED, Rankable, Stored, db, side_by_side
from quanterr.report.ranking.model import Candidate, Ranking, WorstLayer
from quanterr.selection import Selection
from quanterr.util.platform import usable_cores
from quanterr.util.processes import this_process
from quanterr.util.text import display
from quanterr.version import __version__

LOOK = 0.1  # seconds between two looks at what is done


def estimate(
    original: str | os.PathLike[str] | Checkpoint,
    recipes: Sequence[Recipe],
    share: float,
    keep: Budget | None,
    options: ComparisonOptions,
) -> Ranking:
    """The ranking of recipes by a ``share`` of the rows of each weight.

    Raises:
        UsageError: an option that needs all rows, or nothing to quantize.
        CheckpointError: a weight holds NaN or infinity, or cannot be read.
        Interrupted: it was stopped.
    """
    _check(options)
    started, clock = datetime.now(UTC), time.monotonic()
    selection = Selection(options.layers, options.exclude)
    with ExitStack() as stack:
        checkpoint = entered(stack, original, options.lenient, options.cache)
        selection.check(checkpoint.entries)
        virtuals = _virtuals(recipes, checkpoint, selection)
        files = [_files(virtual) for virtual in virtuals]
        chosen_names, _ = choose(checkpoint, selection)
        matrices = {one.name: one for name in chosen_names for one in matrices_of(name, checkpoint.entries)}
        found = _estimates(matrices, files, share, options)
        checkpoint.check_unchanged()
        others = {
            name: Stored(entry.dtype, prod(entry.shape), entry.nbytes, 0.0, None, reported_dtype(entry.dtype), False)
            for name, entry in checkpoint.entries.items()
            if selection.takes(name)
        }
        signals = {name: next(one.signal for one in each if one is not None) for name, each in found.items()}
        chosen = [
            _rankable(
                recipe,
                virtual,
                own,
                {name: each[n] for name, each in found.items()},
                signals,
                {name: one for name, one in others.items() if virtual.entries.get(name) is checkpoint.entries[name]},
            )
            for n, (recipe, virtual, own) in enumerate(zip(recipes, virtuals, files, strict=True))
        ]
        run = RunInfo(
            started=started.isoformat(timespec="seconds"),
            seconds=time.monotonic() - clock,
            device="cpu",
            threads=usable_cores(),
            torch=torch.__version__,
            python=platform.python_version(),
            read_bytes=sum(_read_bytes(matrices[name], recipes, each) for name, each in found.items()),
            command=list(options.command),
        )
    return Ranking.model_construct(
        tool=Tool(name="quanterr", version=__version__),
        verdict="pass",
        reasons=[f"estimated from {100 * share:g} % of the rows of each weight"],
        complete=True,
        original=checkpoint.path,
        original_bytes=checkpoint.nbytes,
        selection=Selected(patterns=list(selection.patterns)),
        sample=share,
        studies=[],
        run=run,
        **side_by_side(chosen, [], keep, [recipe.name for recipe in recipes]),
    )


def _check(options: ComparisonOptions) -> None:
    for option, value in (
        ("--importance", options.importance),
        ("--sensitivity", options.sensitivity),
        ("--resume", options.resume),
    ):
        if value is not None:
            raise UsageError(f"{option}: needs all rows; leave --sample out")
    if options.device not in ("auto", "cpu"):
        raise UsageError(f"--device {display(options.device)}: a sample is measured on the CPU")
    if this_process().world > 1:
        raise UsageError("--sample: one process measures a sample")


def _virtuals(recipes: Sequence[Recipe], original: Checkpoint, selection: Selection) -> list[Checkpoint]:
    """The original by each recipe; scales of all rows are measured for those alone that need them."""
    found: dict[str, Checkpoint] = {}
    for is_local in (True, False):
        own = [recipe for recipe in recipes if recipe.scheme.is_local == is_local]
        found |= {recipe.name: made for recipe, made in zip(own, quantized_by(own, original, selection), strict=True)}
    return [found[recipe.name] for recipe in recipes]


def _read_bytes(matrix: Matrix, recipes: Sequence[Recipe], estimates: Sequence[Estimate | None]) -> int:
    """Return what was read of a weight: each sample once, and all rows where scales depend on them."""
    rows = {one.runs: one.runs.read for one in estimates if one is not None}
    is_whole = any(one and not recipe.scheme.is_local for one, recipe in zip(estimates, recipes, strict=True))
    return matrix.nbytes // matrix.shape[0] * (sum(rows.values()) + is_whole * matrix.shape[0])


def _files(virtual: Checkpoint) -> dict[str, QuantizedFile]:
    """The weights that a recipe stores."""
    files = (entry.file for entry in virtual.entries.values())
    return {file.weight: file for file in files if isinstance(file, QuantizedFile)}


def _estimates(
    matrices: dict[str, Matrix], files: Sequence[dict[str, QuantizedFile]], share: float, options: ComparisonOptions
) -> dict[str, list[Estimate | None]]:
    """Estimate each matrix by each recipe, all cores at work."""
    asked = {name: matrices[name] for own in files for name in own}
    progress = Progress(sum(matrix.nbytes for matrix in asked.values()), total_weights=len(asked))

    def one(name: str) -> list[Estimate | None]:
        if options.stop is not None and options.stop.is_set():
            raise Interrupted("interrupted; nothing is estimated before all weights were sampled")
        progress.name = name
        made = estimated(asked[name], share, [each.get(name) for each in files])
        progress.done_bytes += asked[name].nbytes
        progress.done_weights += 1
        return made

    with ThreadPoolExecutor(usable_cores(), initializer=partial(torch.set_num_threads, 1)) as pool:
        futures = {name: pool.submit(one, name) for name in asked}
        missing = set(futures.values())
        while missing and not any(future.exception() for future in futures.values() if future.done()):
            _, missing = wait(missing, LOOK, FIRST_EXCEPTION)
            if options.on_progress is not None:
                options.on_progress(progress)
        for future in missing:
            future.cancel()
        return {name: future.result() for name, future in futures.items()}


def _rankable(
    recipe: Recipe,
    virtual: Checkpoint,
    files: dict[str, QuantizedFile],
    estimates: dict[str, Estimate | None],
    signals: dict[str, float],
    others: dict[str, Stored],
) -> Rankable:
    """Return what is known of a recipe; each has the same ``signals``, whichever rows it was measured on.

    ``others`` are the tensors that it leaves as they are.
    """
    known = {name: one for name, one in estimates.items() if one is not None}
    tensors, formats = dict(others), dict[str, int]()
    for name, one in known.items():
        file = files[name]
        form = weight_of(file).format
        formats[form] = formats.get(form, 0) + 1
        n = file.source.rows * file.source.cols
        dtype, noise = reported_dtype(file.source.dtype), one.ratio * signals[name]
        tensors[name] = Stored(form, n, file.size, noise, signals[name], dtype, True, margin([one]))
    worst = min(known, key=lambda name: -known[name].ratio)
    total = [sum(part) for part in zip(*((one.signal, one.noise) for one in known.values()), strict=True)]
    row = Candidate(
        name=recipe.name,
        path=virtual.path,
        verdict="pass",
        reasons=["estimated from a sample of rows"],
        not_ranked=None,
        **UNPLACED,
        checkpoint_bytes=virtual.nbytes,
        overall_snr_db=db(total[0], total[1]),
        weighted_snr_db=None,
        predicted_kld=None,
        excess_db=None,
        worst_layer=WorstLayer(worst, display(worst), db(known[worst].signal, known[worst].noise)),
        formats=formats,
        findings=list(of_notes(virtual)),
        gates=[],
        snr_db_margin=margin(list(known.values())),
    )
    return Rankable(recipe.name, row, tensors, set())
