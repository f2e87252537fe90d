"""Evaluation of candidates against a stored reference, without the original and so without output errors of weights."""

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from quanterr.checkpoints import Checkpoint, open_checkpoints
from quanterr.documents.evaluation.model import Evaluation
from quanterr.documents.plan.model import Plan
from quanterr.errors import UsageError
from quanterr.evaluation.assembly import Baseline, Measured, assemble
from quanterr.evaluation.files.references import SAVE, USE, Reference
from quanterr.evaluation.models.weights import Candidate, OriginalWeights
from quanterr.evaluation.preparation import prepare, reference_settings
from quanterr.evaluation.running.rounding import DECLARED, check_schemes
from quanterr.evaluation.running.run import RunBesideReference
from quanterr.options import EvaluateOptions
from quanterr.ranking.making import shorten_names
from quanterr.tensors.clock import Clock
from quanterr.util.rank_group import join_rank_group


def measure_beside(
    folder: Path,
    candidates: Sequence[str | os.PathLike[str] | Checkpoint],
    against: str | Plan | Iterable[str | Plan],
    chosen: EvaluateOptions,
    clock: Clock,
    given_names: Sequence[str] = (),
) -> Evaluation:
    """Evaluate candidates on the text of the reference in ``folder``, without gates.

    ``given_names`` are the names of all candidates except the first, which was given in the place of the original.

    Raises:
        UsageError: an option needs the original, or the text or a setting differs from the reference's.
        CheckpointError: the reference is damaged, or lacks values that a candidate needs.
    """
    _check_needs_no_original(against, chosen)
    check_schemes(chosen.activations, chosen.kv)
    paths = [side.path if isinstance(side, Checkpoint) else os.fspath(side) for side in candidates]
    names_to_keep = [*shorten_names(paths[:1]), *given_names] if given_names else []
    reference = Reference(folder)
    with ExitStack() as stack:
        original = reference.checkpoint()
        prepared = prepare(chosen, original)
        reference.check(reference_settings(chosen, prepared))
        every = stack.enter_context(open_checkpoints(candidates, chosen.lenient, chosen.cache))
        originals = OriginalWeights(original, prepared.architecture.device)
        kv = list(chosen.kv) or [DECLARED]
        ways = [
            way
            for name, checkpoint in zip(shorten_names(paths, names_to_keep), every, strict=True)
            for way in Candidate(originals, checkpoint, chosen.activations, kv[0], undo=False).with_caches(name, kv)
        ]
        names, opened_candidates = [name for name, _ in ways], [candidate for _, candidate in ways]
        with closing(RunBesideReference(prepared, opened_candidates, chosen, reference)) as running:
            running.run()
            outcomes = running.outcomes()
        for checkpoint in every:
            checkpoint.check_unchanged()
        measured = [
            Measured(*each, predicted={}, tasks=[], rollout=None)
            for each in zip(names, opened_candidates, outcomes, strict=True)
        ]
        baseline = Baseline(
            reference.original,
            reference.original_bytes,
            running.model,
            reference=os.fspath(folder),
            findings=list(reference.findings()),
        )
        return assemble(measured, baseline, prepared, chosen, clock, originals.read_bytes)


def _check_needs_no_original(against: str | Plan | Iterable[str | Plan], chosen: EvaluateOptions) -> None:
    """Check that no option needs the original.

    Raises:
        UsageError: an option needs the original.
    """
    given = {
        "--against": against,
        "--draft": chosen.draft,
        "--task": chosen.tasks,
        "--sensitivity-out": chosen.sensitivity,
        "--swap": chosen.swap,
        "--swap-blocks": chosen.swap_blocks,
        "--importance-out": chosen.importance_out,
        "--saliency-out": chosen.saliency_out,
        SAVE: chosen.save_reference,
    }
    for option, value in given.items():
        if value:
            raise UsageError(f"{option}: needs the original, and {USE} has none of its weights; leave one of them out")
    if chosen.split:
        raise UsageError(f"--split: {USE} measures each candidate once; leave one of them out")
    with join_rank_group(threading.Event()) as group:
        if group is not None:
            raise UsageError(f"{USE} cannot be used with several processes: start one")
