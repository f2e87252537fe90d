"""Writes the files of an evaluation besides its document: sensitivity, importance, saliency, references."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from quanterr.checkpoints import Checkpoint
from quanterr.errors import UsageError
from quanterr.evaluation.denoisers.calls import Call
from quanterr.evaluation.files.importance import Origin, write_importance
from quanterr.evaluation.files.references import write_reference
from quanterr.evaluation.files.saliency import Saliency
from quanterr.evaluation.files.sensitivity import Basis, Measured, profile_of, write_sensitivity
from quanterr.evaluation.models.folder import model_folder
from quanterr.evaluation.models.gguf_original import find_parts
from quanterr.evaluation.models.weights import Candidate, OriginalWeights
from quanterr.evaluation.opening import is_of_recipe
from quanterr.evaluation.preparation import Prepared, reference_settings
from quanterr.evaluation.running.candidate import Outcome
from quanterr.evaluation.running.original import OriginalRun
from quanterr.evaluation.texts.tokens import fingerprint
from quanterr.options import EvaluateOptions
from quanterr.pairing.importance import architecture_of


def check_saliency(chosen: EvaluateOptions) -> Saliency:
    """Return a collection for the most salient columns and elements, still empty.

    Raises:
        UsageError: the requested share is not a percentage.
    """
    if not 0 < chosen.saliency <= 100:
        raise UsageError(f"--saliency {chosen.saliency:g}: give a percentage above 0 and up to 100")
    return Saliency(chosen.saliency)


def write_files(
    chosen: EvaluateOptions, prepared: Prepared, run: OriginalRun, saliency: Saliency, original: Checkpoint
) -> None:
    """Write the files with what was measured on the original during the run.

    Raises:
        ResourceError: a file cannot be written.
    """
    if chosen.saliency_out is not None:
        for name, weight, product in run.errors.weights(run.stream.get):
            saliency.add(name, weight, product)
        saliency.write(os.fspath(chosen.saliency_out), original.path, prepared.source)
    if chosen.importance_out is not None:
        calls = prepared.calls
        chunks = (chosen.context, len(prepared.input_ids)) if calls is None else (0, len(calls.calls))
        origin = Origin(prepared.source, *chunks)
        write_importance(os.fspath(chosen.importance_out), run.errors.moments(), architecture_of(original), origin)
    if chosen.save_reference is not None and run.kept is not None:
        with model_folder(original) as folder:
            settings = reference_settings(chosen, prepared)
            write_reference(Path(chosen.save_reference), original, folder, settings, run.kept)


def predict(
    chosen: EvaluateOptions,
    prepared: Prepared,
    originals: OriginalWeights,
    candidates: Sequence[Candidate],
    outcomes: Sequence[Outcome],
) -> Sequence[Mapping[str, float]]:
    """Measure and write the sensitivity if it is requested; return the predicted cost by weight of each candidate."""
    if chosen.sensitivity is None:
        return [{} for _ in candidates]
    n, original = chosen.sensitivity_chunks, originals.checkpoint.path
    if prepared.calls is not None:
        given: Tensor | Sequence[Call] = prepared.calls.spread(n)
        basis = Basis(original, prepared.source, prepared.calls.sha256, 0)
    else:
        given = prepared.input_ids[:n]
        basis = Basis(original, prepared.source, fingerprint(given), given.shape[1])
    profiled = profile_of(prepared.architecture, originals, candidates, given)
    measured = {
        candidate.checkpoint.path: Measured(n, *cost)
        for n, (candidate, outcome) in enumerate(zip(candidates, outcomes, strict=True))
        if (cost := _find_cost(outcome)) and is_of_recipe(candidate.checkpoint) and not candidate.rounding.is_any
    }
    stored = {names[0]: name for name, names in find_parts(originals.checkpoint).items() if len(names) == 1}
    write_sensitivity(os.fspath(chosen.sensitivity), profiled, measured, basis, stored)
    return profiled.predictions


def _find_cost(outcome: Outcome) -> tuple[float, float] | None:
    """Return the measured cost that the sensitivity predicts, with its standard error; None without scores."""
    if outcome.scores is not None:
        return outcome.scores.kld_mean, outcome.scores.kld_error
    if outcome.outputs is not None and outcome.outputs.output_error is not None:
        return outcome.outputs.output_error, outcome.outputs.output_error_se or 0.0  # on the same calls
    return None
