"""Work beside the main work, which it helps or watches: reading ahead, heartbeats."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def run_beside(work: Callable[[threading.Event], object], patience: float | None = None) -> Iterator[None]:
    """Run ``work`` in a thread during this context, at whose end the thread is waited for.

    ``work`` takes an event that is set at the end of the context, and should then return. It is left alone if it does
    not within ``patience`` seconds.
    """
    ended = threading.Event()
    thread = threading.Thread(target=work, args=[ended], daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(patience)
