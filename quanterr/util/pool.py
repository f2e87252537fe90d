"""Threads that share tasks, each with its own buffers."""

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

TICK = 0.1  # seconds between two calls of ``on_wait``


@contextmanager
def map_in_threads(
    work: Callable[[Task, Buffers], Result],
    tasks: Iterable[Task],
    buffers: Sequence[Buffers],
    ahead: int | None = None,
    on_wait: Callable[[], None] | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> Iterator[Iterator[Result]]:
    """Give the results of ``work(task, its thread's buffers)``, in the order of the tasks; a thread for each buffers.

    Each thread calls ``prepare`` first. ``ahead`` limits the tasks that are begun before their results are taken, and
    so the memory; None: all. ``on_wait`` is called while a result is awaited, ten times per second, and after it.

    The first error of a task is raised in the place of a result, and no further task is begun; neither is any after the
    context. Its end waits for those that are begun.
    """
    own, left, errors = threading.local(), list(buffers), list[BaseException]()

    def prepare_thread() -> None:
        prepare()
        own.buffers = left.pop()

    def carry_out(task: Task) -> Result:
        if errors:
            raise errors[0]
        try:
            return work(task, own.buffers)
        except BaseException as error:
            errors.append(error)
            raise

    pool = ThreadPoolExecutor(len(buffers), initializer=prepare_thread)
    try:
        yield _take((pool.submit(carry_out, task) for task in tasks), ahead, on_wait or (lambda: None))
    finally:
        pool.shutdown(cancel_futures=True)


def _take(begun: Iterator[Future[Result]], ahead: int | None, on_wait: Callable[[], None]) -> Iterator[Result]:
    """Yield the results; at most ``ahead`` more tasks are begun meanwhile."""
    waiting = deque(islice(begun, ahead))
    while waiting:
        waiting.extend(islice(begun, 1))
        first = waiting.popleft()
        while not wait([first], TICK).done:
            on_wait()
        on_wait()
        yield first.result()
