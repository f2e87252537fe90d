"""Evaluation of candidates together with their original, and measurements of an original alone."""

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

from quanterr.checkpoints import Checkpoint, open_checkpoints
from quanterr.documents.evaluation.model import Evaluation, Rollout
from quanterr.documents.plan.model import Plan
from quanterr.errors import UsageError
from quanterr.evaluation.assembly import Baseline, Measured, assemble
from quanterr.evaluation.denoisers.rollout import roll_out
from quanterr.evaluation.files.writing import check_saliency, predict, write_files
from quanterr.evaluation.models.gguf_original import as_original
from quanterr.evaluation.models.weights import Candidate, OriginalWeights
from quanterr.evaluation.opening import read_given
from quanterr.evaluation.preparation import Prepared, prepare
from quanterr.evaluation.running import ranks
from quanterr.evaluation.running.candidate import Outcome
from quanterr.evaluation.running.draft import Draft, read_draft
from quanterr.evaluation.running.rounding import DECLARED, check_schemes, list_caches
from quanterr.evaluation.running.run import RunBesideOriginal
from quanterr.evaluation.texts.tasks import answer_tasks
from quanterr.options import NOTHING_TO_DO, EvaluateOptions
from quanterr.ranking.making import shorten_names
from quanterr.tensors.clock import Clock
from quanterr.util.rank_group import RankGroup, join_rank_group
from quanterr.util.text import display
from quanterr.util.waiting import notices


def measure(
    original: str | os.PathLike[str] | Checkpoint,
    candidates: Sequence[str | os.PathLike[str] | Checkpoint],
    against: str | Plan | Iterable[str | Plan],
    chosen: EvaluateOptions,
    clock: Clock,
    given_names: Sequence[str] = (),
) -> Evaluation:
    """Evaluate candidates together with their original, without gates. Raises the same errors as ``evaluate``."""
    given = read_given(candidates, against)
    check_schemes(chosen.activations, chosen.kv)
    if not given.names and list_caches(chosen.kv):
        given = read_given([original], ())
    if not given.names and not chosen.draft:
        raise UsageError(NOTHING_TO_DO)
    stop, saliency = chosen.stop or threading.Event(), check_saliency(chosen)
    chosen = replace(chosen, stop=stop)
    with _open([original, *given.stored, *chosen.draft], chosen, stop) as (group, [opened, *rest]):
        prepared = prepare(chosen, opened)
        architecture = prepared.architecture
        stored, others = rest[: len(given.stored)], rest[len(given.stored) :]
        every = [opened, *given.add_made(stored, opened)]
        originals = OriginalWeights(opened, architecture.device)
        names, opened_candidates = _make_candidates(
            shorten_names(given.names, given_names), every[1:], prepared, originals, chosen
        )
        drafts = [read_draft(other, opened, prepared, chosen) for other in others]
        every += others
        ranks.agree(group, every, prepared.chunks, chosen.batch, chosen.dtype)
        with closing(RunBesideOriginal(prepared, originals, opened_candidates, chosen, group, True, drafts)) as running:
            ranks.run_with(running, group)
            outcomes, of_drafts = running.outcomes(), running.draft_outcomes()
            write_files(chosen, prepared, running.original, saliency, opened)
        answers = (
            answer_tasks(architecture, originals, opened_candidates, prepared.tasks)
            if prepared.tasks
            else [[] for _ in opened_candidates]
        )
        rollouts: Sequence[Rollout | None] = [None for _ in opened_candidates]
        if chosen.rollout and prepared.calls is not None:
            rollouts = roll_out(architecture, originals, opened_candidates, prepared.calls, stop, chosen.on_progress)
        predictions = predict(chosen, prepared, originals, opened_candidates, outcomes)
        for checkpoint in every:
            checkpoint.check_unchanged()
        rows = zip(names, opened_candidates, outcomes, predictions, answers, rollouts, strict=True)
        measured = [*(Measured(*each) for each in rows), *_collect_drafts(drafts, of_drafts)]
        baseline = Baseline(opened.path, opened.nbytes, running.model, running.floor())
        # For a candidate with other names, the original is read once more.
        read = sum(
            each.read_bytes for each in {originals, *(each_measured.candidate.originals for each_measured in measured)}
        )
        return assemble(measured, baseline, prepared, chosen, clock, read)


def measure_alone(original: str | os.PathLike[str] | Checkpoint, chosen: EvaluateOptions) -> None:
    """Write the outputs that need only the original: sensitivity, importance, saliency, reference.

    Reasons why results on a text mean little are logged as errors, as there is no verdict, and no option hides errors.

    Raises the same errors as :func:`quanterr.evaluation.run.study`.
    """
    stop, saliency = chosen.stop or threading.Event(), check_saliency(chosen)
    chosen = replace(chosen, stop=stop)
    chosen.check_alone()
    with _open([original], chosen, stop) as (group, [checkpoint]):
        prepared = prepare(chosen, checkpoint)
        originals = OriginalWeights(checkpoint, prepared.architecture.device)
        ranks.agree(group, [checkpoint], prepared.chunks, chosen.batch, chosen.dtype)
        if chosen.with_moments or chosen.save_reference is not None:
            with closing(RunBesideOriginal(prepared, originals, [], chosen, group)) as running:
                ranks.run_with(running, group)
                write_files(chosen, prepared, running.original, saliency, checkpoint)
        else:
            ranks.leave_to_rank_0(group)
        predict(chosen, prepared, originals, [], [])
        checkpoint.check_unchanged()
        for doubt in prepared.doubts if group is None or group.rank == 0 else ():
            notices.error("%s: %s", display(prepared.source), doubt)


@contextmanager
def _open(
    sides: Sequence[str | os.PathLike[str] | Checkpoint], chosen: EvaluateOptions, stop: threading.Event
) -> Iterator[tuple[RankGroup | None, list[Checkpoint]]]:
    """Join the other ranks; open the original under the names of its model, and the other checkpoints."""
    with join_rank_group(stop) as group, open_checkpoints(sides, chosen.lenient, chosen.cache) as [original, *others]:
        yield group, [as_original(original, chosen.config), *others]


def _collect_drafts(drafts: Sequence[Draft], outcomes: Sequence[Outcome]) -> list[Measured]:
    names = shorten_names([draft.candidate.checkpoint.path for draft in drafts])
    return [
        Measured(f"{name}, draft", draft.candidate, outcome, {}, [], None, draft)
        for name, draft, outcome in zip(names, drafts, outcomes, strict=True)
    ]


def _make_candidates(
    names: Sequence[str],
    checkpoints: Sequence[Checkpoint],
    prepared: Prepared,
    originals: OriginalWeights,
    chosen: EvaluateOptions,
) -> tuple[list[str], list[Candidate]]:
    """Return the candidates and their names; with ``--split``, those that round anything also with weights alone."""
    counterparts = prepared.architecture.counterparts(originals, checkpoints)
    kv, alone = list(chosen.kv) or [DECLARED], []
    ways_by_name: list[tuple[str, Candidate]] = []
    for name, checkpoint, (originals_of_candidate, ignored) in zip(names, checkpoints, counterparts, strict=True):
        ways = list(
            Candidate(originals_of_candidate, checkpoint, chosen.activations, kv[0], ignored).with_caches(name, kv)
        )
        ways_by_name += ways
        if chosen.split and any(way.rounding.is_any for _, way in ways):
            alone.append((f"{name}, weights alone", Candidate(originals_of_candidate, checkpoint)))
    return [name for name, _ in ways_by_name + alone], [candidate for _, candidate in ways_by_name + alone]
