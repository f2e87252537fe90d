"""Estimates the result of a sweep, and the margin of the estimate, from a sample of rows."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod

from quanterr.advice.kept_layers import Budget
from quanterr.checkpoints import Checkpoint
from quanterr.comparison.assembly import name_torch_dtype
from quanterr.comparison.inputs import open_inputs
from quanterr.comparison.journal import digest_file
from quanterr.comparison.scheduler import Progress
from quanterr.documents.base import Tool
from quanterr.documents.comparison.layer import StoredSizes
from quanterr.documents.comparison.model import Selection as Selected
from quanterr.documents.gate_results import Reason, store_reasons
from quanterr.documents.ranking.model import Candidate, Ranking, WorstLayer
from quanterr.documents.sensitivity import Sensitivity
from quanterr.errors import Interrupted, UsageError
from quanterr.findings.files import report_notes
from quanterr.findings.importance import report_insensitive
from quanterr.options import ComparisonOptions
from quanterr.pairing.importance import make_importance_lookup
from quanterr.ranking.making import UNRANKED_FIELDS, Rankable, StoredTensor, compare_candidates, compute_snr
from quanterr.recipes import Recipe
from quanterr.recipes.matrices import Matrix, matrices_of
from quanterr.recipes.quantized_file import ImportanceOf, QuantizedFile, choose_weights, quantize_by
from quanterr.recipes.sampling import Estimate, estimate_matrix, find_margin, pack_estimates, unpack_estimates
from quanterr.recipes.tensors import read_weight
from quanterr.selection import LayerSelection
from quanterr.tensors.clock import Clock
from quanterr.tensors.pool import map_in_threads
from quanterr.util.platform import usable_cores
from quanterr.util.rank_group import RankGroup, join_rank_group
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display
from quanterr.version import __version__


def estimate(
    original: str | os.PathLike[str] | Checkpoint,
    recipes: Sequence[Recipe],
    share: float,
    keep: Budget | None,
    options: ComparisonOptions,
) -> Ranking:
    """Rank recipes by a sample: a ``share`` (0 to 1) of the rows of each weight. Ranks of a run take weights in turn.

    Raises:
        UsageError: an option needs all rows, or there is nothing to quantize.
        CheckpointError: a weight contains NaN or infinity, or cannot be read.
        Interrupted: the run was stopped.
        ElsewhereError: this is not rank 0, which has the result.
    """
    _check(options)
    stop = options.stop or threading.Event()
    with join_rank_group(stop) as group:
        return _estimate(original, recipes, share, keep, options, stop, group)


def _estimate(
    original: str | os.PathLike[str] | Checkpoint,
    recipes: Sequence[Recipe],
    share: float,
    keep: Budget | None,
    options: ComparisonOptions,
    stop: threading.Event,
    group: RankGroup | None,
) -> Ranking:
    clock = Clock()
    with open_inputs(original, (), options) as (checkpoint, _, selection, means, sensitivity):
        selection.check(checkpoint.entries)
        if group is not None:
            group.agree(_identify(checkpoint, recipes, share, selection, options))
        virtuals = _quantize(recipes, checkpoint, selection, make_importance_lookup(checkpoint, means))
        files = [
            {
                entry.file.weight: entry.file
                for entry in virtual.entries.values()
                if isinstance(entry.file, QuantizedFile)
            }
            for virtual in virtuals
        ]
        chosen_names, _ = choose_weights(checkpoint, selection)
        by_weight = {name: matrices_of(name, checkpoint.entries) for name in chosen_names}
        matrices = {matrix.name: matrix for alike in by_weight.values() for matrix in alike}
        estimates = _estimate_all(matrices, files, share, options.on_progress, stop, group)
        checkpoint.check_unchanged()
        others = {
            name: StoredTensor(
                entry.dtype,
                prod(entry.shape),
                StoredSizes(entry.nbytes, entry.nbytes),
                0.0,
                None,
                name_torch_dtype(entry.dtype),
                False,
            )
            for name, entry in checkpoint.entries.items()
            if selection.takes(name)
        }
        signals = {
            name: next(result.signal for result in each if result is not None) for name, each in estimates.items()
        }
        chosen = [
            _make_rankable(
                recipe,
                virtual,
                quantized_files,
                matrices,
                {name: each[n] for name, each in estimates.items()},
                signals,
                {
                    name: tensor
                    for name, tensor in others.items()
                    if virtual.entries.get(name) is checkpoint.entries[name]
                },
            )
            for n, (recipe, virtual, quantized_files) in enumerate(zip(recipes, virtuals, files, strict=True))
        ]
        if sensitivity is not None:
            names = {name: [matrix.name for matrix in alike] for name, alike in by_weight.items()}
            for candidate in chosen:
                _add_prediction(candidate, sensitivity, names)
        read_bytes = sum(_count_read_bytes(matrices[name], recipes, each) for name, each in estimates.items())
        run = clock.describe_run(options.command, "cpu", usable_cores(), read_bytes)
        if group is not None:
            group.end()
    return Ranking(
        tool=Tool(name="quanterr", version=__version__),
        verdict="pass",
        **store_reasons([Reason(f"estimated from {100 * share:g} % of the rows of each weight", "result")]),
        complete=True,
        original=checkpoint.path,
        original_bytes=checkpoint.nbytes,
        selection=Selected(patterns=list(selection.patterns)),
        sample=share,
        studies=[],
        run=run,
        **compare_candidates(chosen, [], keep, [recipe.name for recipe in recipes]),
    )


def _check(options: ComparisonOptions) -> None:
    if options.resume is not None:
        raise UsageError("--resume: needs all rows; leave --sample out")
    if options.device not in ("auto", "cpu"):
        raise UsageError(f"--device {display(options.device)}: a sample is measured on the CPU")


def _identify(
    checkpoint: Checkpoint,
    recipes: Sequence[Recipe],
    share: float,
    selection: LayerSelection,
    options: ComparisonOptions,
) -> JsonObject:
    """Return the inputs and settings that all ranks must share."""
    return {
        "quanterr": __version__,
        "inputs": checkpoint.identity,
        "contents": [file.digest() for file in checkpoint.files],
        "recipes": [recipe.name for recipe in recipes],
        "sample": share,
        "layers": list(selection.patterns),
        "importance": digest_file(options.importance),
    }


def _quantize(
    recipes: Sequence[Recipe], original: Checkpoint, selection: LayerSelection, importance: ImportanceOf | None
) -> list[Checkpoint]:
    """Return the original quantized by each recipe, on the fly; only recipes with non-local scales measure all rows."""
    by_name: dict[str, Checkpoint] = {}
    for is_local in (True, False):
        chosen = [recipe for recipe in recipes if recipe.encoder.is_local == is_local]
        checkpoints = quantize_by(chosen, original, selection, importance)
        by_name |= {recipe.name: checkpoint for recipe, checkpoint in zip(chosen, checkpoints, strict=True)}
    return [by_name[recipe.name] for recipe in recipes]


def _count_read_bytes(matrix: Matrix, recipes: Sequence[Recipe], estimates: Sequence[Estimate | None]) -> int:
    """Return the bytes read from a weight: each sample once, and all rows if scales depend on all rows."""
    rows = {result.runs: result.runs.read for result in estimates if result is not None}
    is_whole = any(result and not recipe.encoder.is_local for result, recipe in zip(estimates, recipes, strict=True))
    return matrix.nbytes // matrix.shape[0] * (sum(rows.values()) + is_whole * matrix.shape[0])


def _estimate_all(
    matrices: dict[str, Matrix],
    files: Sequence[dict[str, QuantizedFile]],
    share: float,
    on_progress: Callable[[Progress], None] | None,
    stop: threading.Event,
    group: RankGroup | None,
) -> dict[str, list[Estimate | None]]:
    """Estimate each matrix for each recipe, on all cores; None where a recipe does not quantize the matrix.

    Raises:
        Interrupted: the run was stopped.
        ElsewhereError: this is not rank 0, which has all estimates.
        QuanterrError: another rank has failed.
    """
    asked = {name: matrices[name] for by_weight in files for name in by_weight}
    progress = Progress(sum(matrix.nbytes for matrix in asked.values()), total_weights=len(asked))

    def estimate_one(task: tuple[int, str], buffers: None) -> list[Estimate | None] | None:
        number, name = task
        if stop.is_set():
            raise Interrupted("interrupted before all weights were sampled: no estimate")
        if group is not None and group.add(f"claim/{number}", 1) > 1:
            return None
        progress.name = name
        per_recipe = estimate_matrix(asked[name], share, [each.get(name) for each in files])
        progress.done_bytes += asked[name].nbytes
        progress.done_weights += 1
        return per_recipe

    show = None if on_progress is None else partial(on_progress, progress)
    try:
        with map_in_threads(estimate_one, enumerate(asked), [None] * usable_cores(), on_wait=show) as results:
            estimates = {
                name: per_recipe for name, per_recipe in zip(asked, results, strict=True) if per_recipe is not None
            }
    finally:
        if group is not None:
            group.check()  # another rank's error explains a stop
    for packed in () if group is None else group.gather(partial(pack_estimates, estimates)):
        estimates |= unpack_estimates(packed)
    return {name: estimates[name] for name in asked}  # ordered as in a single process


def _make_rankable(
    recipe: Recipe,
    virtual: Checkpoint,
    files: dict[str, QuantizedFile],
    matrices: Mapping[str, Matrix],
    estimates: dict[str, Estimate | None],
    signals: dict[str, float],
    others: dict[str, StoredTensor],
) -> Rankable:
    """Make the ranking entry of a recipe; all recipes use the same ``signals``, even if measured on other rows.

    ``others`` are the tensors that the recipe does not quantize.
    """
    known = {name: result for name, result in estimates.items() if result is not None}
    tensors, formats = dict(others), dict[str, int]()
    for name, result in known.items():
        file = files[name]
        form = read_weight(file).format
        formats[form] = formats.get(form, 0) + 1
        n = file.source.rows * file.source.cols
        dtype, noise = name_torch_dtype(file.source.dtype), result.ratio * signals[name]
        sizes = StoredSizes(matrices[name].nbytes, file.size)
        tensors[name] = StoredTensor(form, n, sizes, noise, signals[name], dtype, True, find_margin([result]))
    worst = min(known, key=lambda name: -known[name].ratio)
    total = [sum(part) for part in zip(*((result.signal, result.noise) for result in known.values()), strict=True)]
    weighted = [
        sum(part)
        for part in zip(
            *(result.weighted_energies for result in known.values() if result.weighted_energies), strict=True
        )
    ]
    row = Candidate(
        name=recipe.name,
        path=virtual.path,
        verdict="pass",
        **store_reasons([Reason("estimated from a sample of rows", "result")]),
        not_ranked=None,
        **UNRANKED_FIELDS,
        checkpoint_bytes=virtual.nbytes,
        overall_snr_db=compute_snr(total[0], total[1]),
        weighted_snr_db=compute_snr(weighted[0], weighted[1]) if weighted else None,
        predicted_kld=None,
        excess_db=None,
        worst_layer=WorstLayer(worst, display(worst), compute_snr(known[worst].signal, known[worst].noise)),
        formats=formats,
        findings=list(report_notes(virtual)),
        gates=[],
        snr_db_margin=find_margin(list(known.values())),
    )
    return Rankable(recipe.name, row, tensors, set())


def _add_prediction(candidate: Rankable, sensitivity: Sensitivity, weights: Mapping[str, Sequence[str]]) -> None:
    """Add the cost that a sensitivity predicts; ``weights`` maps each stored weight to the names of its matrices.

    Raises:
        UsageError: the sensitivity names none of the weights.
    """
    alphas, cost = sensitivity.alphas(candidate.name), 0.0
    quantized = {name: of for name, of in weights.items() if any(candidate.tensors[matrix].is_layer for matrix in of)}
    for finding in report_insensitive(list(quantized), alphas):
        if finding.severity == "error":
            raise UsageError(f"--sensitivity: {finding.message}; {finding.remedy}")
        candidate.row.findings.append(finding)
    for name in quantized.keys() & alphas.keys():
        stored = [candidate.tensors[matrix] for matrix in quantized[name]]
        signal = sum(tensor.signal or 0.0 for tensor in stored)
        cost += alphas[name] * sum(tensor.error for tensor in stored) / signal if signal else 0.0
    setattr(candidate.row, sensitivity.cost.metric, cost)
