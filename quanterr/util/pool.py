"""A pool of threads that share tasks and have buffers of their own."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

Task = TypeVar("Task")
Buffers = TypeVar("Buffers")
Result = TypeVar("Result")

TICK_SECONDS = 0.1  # seconds between two calls of ``on_wait``


@contextmanager
def map_in_threads(
    work: Callable[[Task, Buffers], Result],
    tasks: Iterable[Task],
    buffers: Sequence[Buffers],
    ahead: int | None = None,
    on_wait: Callable[[], None] | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> Iterator[Iterator[Result]]:
    """Yield the results of ``work(task, buffers)`` in the order of the tasks; each of ``buffers`` has its own thread.

    Each thread calls ``prepare`` first. ``ahead`` limits how many tasks are begun before their results are taken, to
    limit the memory; None means all. ``on_wait`` is called ten times per second while a result is awaited, and after
    it.

    The first error of a task is raised in place of its result, and no further task is begun. The end of the context
    cancels tasks that have not begun, and waits for the others.
    """
    of_thread, left, errors = threading.local(), list(buffers), list[BaseException]()

    def prepare_thread() -> None:
        prepare()
        of_thread.buffers = left.pop()

    def carry_out(task: Task) -> Result:
        if errors:
            raise errors[0]
        try:
            return work(task, of_thread.buffers)
        except BaseException as error:
            errors.append(error)
            raise

    pool = ThreadPoolExecutor(len(buffers), initializer=prepare_thread)
    try:
        yield _take((pool.submit(carry_out, task) for task in tasks), ahead, on_wait or (lambda: None))
    finally:
        pool.shutdown(cancel_futures=True)


def _take(begun: Iterator[Future[Result]], ahead: int | None, on_wait: Callable[[], None]) -> Iterator[Result]:
    """Yield the results, with at most ``ahead`` further tasks begun at any time."""
    waiting = deque(islice(begun, ahead))
    while waiting:
        waiting.extend(islice(begun, 1))
        first = waiting.popleft()
        while not wait([first], TICK_SECONDS).done:
            on_wait()
        on_wait()
        yield first.result()
