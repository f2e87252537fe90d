"""What a run has in common with earlier ones, by a journal, and with other processes, as ranks."""

from collections.abc import Callable, Sequence

from quanterr.comparison.journal import Journal
from quanterr.comparison.ranks import Ranks, Take
from quanterr.comparison.scheduler import Scheduler
from quanterr.comparison.tasks import Job
from quanterr.pairing.plan import ComparedWeight


class Sharing:
    """Where finished weights come from and go to; a run of one process without a journal takes its own."""

    def __init__(self, take: Take, journal: Journal | None, ranks: Ranks | None) -> None:
        """``take`` is for weights of the result."""
        self._take, self._journal, self._ranks = take, journal, ranks
        self._missing: set[tuple[int, int]] = set()  # candidates and numbers; of a run that shares nothing empty

    def left(self, tasks: list[tuple[Job, ...]]) -> Sequence[tuple[Job, ...]]:
        """The tasks without what the journal has."""
        if self._journal is None and self._ranks is None:
            return tasks
        self._missing = {(job.candidate, job.number) for jobs in tasks for job in jobs}
        known = self._taken_over(self._journal) if self._journal is not None else set()
        left = (tuple(job for job in jobs if job[:2] not in known) for jobs in tasks)
        return [jobs for jobs in left if jobs]

    def _taken_over(self, journal: Journal) -> set[tuple[int, int]]:
        """What journals have; rank 0 takes all of it, the others send it what only they may see."""
        known: set[tuple[int, int]] = set()
        is_first = self._ranks is None or self._ranks.rank == 0
        for records, goes_on in ((journal.kept, True), (journal.of_others, is_first)):
            for kept in records:
                place = kept.candidate, kept.done.number
                if goes_on and place in self._missing and place not in known:
                    self._hand_over(*kept)
                known.add(place)
        return known

    def finish(self, candidate: int, done: ComparedWeight) -> None:
        """A weight that was compared here."""
        if self._journal is not None:
            self._journal.add(candidate, done)
        self._hand_over(candidate, done)

    def _hand_over(self, candidate: int, done: ComparedWeight) -> None:
        if self._ranks is not None and self._ranks.rank > 0:
            self._ranks.send(candidate, done)
            return
        self._missing.discard((candidate, done.number))
        self._take(candidate, done)

    def collected(self, run: Scheduler, complete: bool, on_wait: Callable[[], None]) -> bool:
        """Whether all weights are there, after this process has done its part in a run that has ended.

        Raises:
            ElsewhereError: the result is rank 0's.
            QuanterrError: another rank has failed.
        """
        if self._ranks is None:
            return complete
        self._ranks.company.check()
        if self._ranks.rank > 0:
            self._ranks.finish(run.parts())
        self._ranks.collect(self._take, self._missing, on_wait)
        run.add(self._ranks.parts())
        return not self._missing
