"""Threads that help or watch the main thread, such as for reading ahead and heartbeats."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def run_beside(work: Callable[[threading.Event], object], patience: float | None = None) -> Iterator[None]:
    """Run ``work`` in a thread during this context, and wait for the thread at the end.

    ``work`` takes an event that is set at the end of the context, and should then return. If it does not return within
    ``patience`` seconds, the context ends anyway.
    """
    ended = threading.Event()
    thread = threading.Thread(target=work, args=[ended], daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(patience)
