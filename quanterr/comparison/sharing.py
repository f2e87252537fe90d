"""Finished weights, shared with earlier runs (by a journal) and with other processes (ranks)."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from quanterr.checkpoints import Checkpoint
from quanterr.comparison.journal import Journal, make_identity
from quanterr.comparison.ranks import Ranks, Take
from quanterr.comparison.scheduler import Claims, Scheduler
from quanterr.comparison.tasks import Job
from quanterr.kernel.library import choose_kernel
from quanterr.lazy_torch import torch
from quanterr.options import ComparisonOptions
from quanterr.pairing.model import Pairing, WeightResult
from quanterr.util.rank_group import RankGroup


class Sharing:
    """The flow of finished weights between this process, the journal and other ranks."""

    def __init__(self, take: Take, journal: Journal | None, ranks: Ranks | None) -> None:
        """Set up the flow; ``take`` receives each weight of the result, on rank 0."""
        self._take, self._journal, self._ranks = take, journal, ranks
        self._missing: set[tuple[int, int]] = set()  # (candidate, number)

    @property
    def claims(self) -> Claims | None:
        """The ranks' division of the weights; None for a single process."""
        return None if self._ranks is None else Claims(self._ranks.claim, self._ranks.rank / self._ranks.world)

    def drop_finished(self, tasks: list[tuple[Job, ...]]) -> list[tuple[Job, ...]]:
        """Return the tasks without the weights that are in the journal."""
        self._missing = {(job.candidate, job.number) for jobs in tasks for job in jobs}
        known = self._take_over(self._journal) if self._journal is not None else set()
        left = (tuple(job for job in jobs if job[:2] not in known) for jobs in tasks)
        return [jobs for jobs in left if jobs]

    def _take_over(self, journal: Journal) -> set[tuple[int, int]]:
        """Take over the weights in journals; return them as (candidate, number).

        Rank 0 takes all weights; other ranks send the weights in their own journal, which rank 0 may not see.
        """
        known: set[tuple[int, int]] = set()
        is_first = self._ranks is None or self._ranks.rank == 0
        for records, goes_on in ((journal.kept, True), (journal.of_others, is_first)):
            for kept in records:
                place = kept.candidate, kept.done.number
                if goes_on and place in self._missing and place not in known:
                    self._hand_over(*kept)
                known.add(place)
        return known

    def finish(self, candidate: int, done: WeightResult) -> None:
        """Record and deliver a weight that this process has compared."""
        if self._journal is not None:
            self._journal.add(candidate, done)
        self._hand_over(candidate, done)

    def _hand_over(self, candidate: int, done: WeightResult) -> None:
        if self._ranks is not None and self._ranks.rank > 0:
            self._ranks.send(candidate, done)
            return
        self._missing.discard((candidate, done.number))
        self._take(candidate, done)

    def collect(self, run: Scheduler, complete: bool, on_wait: Callable[[], None]) -> bool:
        """Collect the weights of all ranks after the run of this process; return whether all weights are complete.

        Raises:
            ElsewhereError: this is not rank 0, which has the result.
            QuanterrError: another rank has failed.
        """
        if self._ranks is None:
            return complete
        self._ranks.group.check()
        if self._ranks.rank > 0:
            self._ranks.finish(run.parts())
        self._ranks.collect(self._take, self._missing, on_wait)
        run.add(self._ranks.parts())
        return not self._missing


def open_sharing(
    stack: ExitStack,
    group: RankGroup | None,
    take: Take,
    checkpoints: Sequence[Checkpoint],
    pairings: Sequence[Pairing],
    options: ComparisonOptions,
    samples: bool,
    device: torch.device,
) -> Sharing:
    """Open the requested journal, before any rank writes to its own, and make the ranks agree on inputs and pairs."""
    ranks = None if group is None else Ranks(group)
    same = make_identity(checkpoints, pairings, options, choose_kernel().kernel is not None, samples)
    journal = None
    if options.resume is not None:
        journal = stack.enter_context(Journal(options.resume, same, 0 if ranks is None else ranks.rank))
    if ranks is not None:
        agreed = {key: value for key, value in same.items() if key != "written"}
        ranks.group.agree(agreed | {"device": device.type})  # determines the chunks, and so the last digits
    return Sharing(take, journal, ranks)
