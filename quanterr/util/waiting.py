"""Retries of failed requests, and waiting for as long as a host that limits requests asks.

A host that limits the rate of requests often states how long to wait. Then all threads that use the host wait, and the
logger ``quanterr`` reports it with one warning; without a handler, Python prints the warning on stderr.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from quanterr.errors import Interrupted, ResourceError
from quanterr.util.text import display

Answer = TypeVar("Answer")

ATTEMPTS = 6
WAIT = 0.2  # seconds before the second attempt, then four times as long before each further one
LONGEST_WAIT = 10.0  # maximum seconds between two attempts
MAX_REQUESTED_WAIT = 600.0  # seconds that a host may ask for; the hub limits requests per 300 seconds
MIN_REPORTED_WAIT = 2.0  # seconds: shorter waits are not reported
TICK_SECONDS = 0.1  # between two checks of whether to continue waiting

notices = logging.getLogger("quanterr")

_lock = threading.Lock()
_free_at: dict[str, float] = {}  # host → value of time.monotonic() from which requests are allowed again
_stopped: list[Callable[[], bool]] = []


class RetryableError(Exception):
    """A failure after which a retry may succeed; ``host`` is set if that host limits the rate of requests."""

    def __init__(self, reason: str, host: str | None = None) -> None:
        """Keep the reason, which the final error names if all attempts fail."""
        super().__init__(reason)
        self.host = host


def retry(where: str, ask: Callable[[], Answer]) -> Answer:
    """Return the result of ``ask``, calling it again after each :class:`RetryableError`, up to :data:`ATTEMPTS` times.

    Raises:
        ResourceError: all attempts failed.
        Interrupted: the run was stopped while it waited.
    """
    for attempt in range(ATTEMPTS):
        try:
            return ask()
        except RetryableError as error:
            if attempt == ATTEMPTS - 1:
                raise ResourceError(f"{display(where)}: {ATTEMPTS} attempts failed, the last: {error}") from error
            seconds = min(WAIT * 4**attempt, LONGEST_WAIT)
            if error.host is None:
                _sleep_until(where, time.monotonic() + seconds)
            else:
                _block_host(error.host, seconds, str(error))
    raise AssertionError("unreachable")


def handle_busy_host(host: str, seconds: float | None, reason: str) -> Exception:
    """Let all requests to a host wait for ``seconds``, after it refused one, and return the error to raise."""
    if seconds is None:
        return RetryableError(reason, host)
    if seconds > MAX_REQUESTED_WAIT:
        return ResourceError(
            f"{host}: {reason}: asks to wait {seconds:.0f} s, longer than the limit of {MAX_REQUESTED_WAIT:.0f} s; "
            "run again later"
        )
    _block_host(host, seconds, reason)
    return RetryableError(reason, host)


def wait_for(host: str) -> None:
    """Wait until requests to the host are allowed again.

    Raises:
        Interrupted: the run was stopped while it waited.
    """
    while (free_at := _free_at.get(host, 0.0)) > time.monotonic():
        _sleep_until(host, free_at)


@contextmanager
def allow_stop(stopped: Callable[[], bool]) -> Iterator[None]:
    """Within this context, end waits early if the ``stopped`` functions of all active contexts return True."""
    _stopped.append(stopped)
    try:
        yield
    finally:
        _stopped.remove(stopped)


def _block_host(host: str, seconds: float, reason: str) -> None:
    """Hold back all requests to the host for ``seconds``."""
    with _lock:
        before, until = _free_at.get(host, 0.0), time.monotonic() + seconds
        _free_at[host] = max(before, until)
    if seconds >= MIN_REPORTED_WAIT and until > before + 1:
        then = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        notices.warning("%s: %s: waits %.0f s, until %s", display(host), reason, seconds, then)


def _sleep_until(where: str, until: float) -> None:
    while (left := until - time.monotonic()) > 0:
        if _stopped and all(stopped() for stopped in list(_stopped)):
            raise Interrupted(f"interrupted while waiting for {display(where)}")
        time.sleep(min(left, TICK_SECONDS))
