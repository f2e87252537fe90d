"""Threads that share tasks which compute with torch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

from quanterr.lazy_torch import torch
from quanterr.util import pool
from quanterr.util.pool import Buffers, Result, Task


def map_in_threads(
    work: Callable[[Task, Buffers], Result],
    tasks: Iterable[Task],
    buffers: Sequence[Buffers],
    ahead: int | None = None,
    on_wait: Callable[[], None] | None = None,
) -> AbstractContextManager[Iterator[Result]]:
    """Give the results of ``work`` as :func:`quanterr.util.pool.map_in_threads` does, in torch's inference mode."""

    def prepare() -> None:
        torch.set_num_threads(1)  # no torch threads below this one, as they would compete for the cores

    def compute(task: Task, task_buffers: Buffers) -> Result:
        with torch.inference_mode():
            return work(task, task_buffers)

    return pool.map_in_threads(compute, tasks, buffers, ahead, on_wait, prepare)
