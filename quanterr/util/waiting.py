"""Asking again what may yet be answered, and waiting for as long as a host says.

A host that is asked too often says so, and often for how long. That holds for all who ask it: they wait together, and
one line tells of it. It is a warning of the logger ``quanterr``: without a handler Python prints it on stderr.
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
WAIT = 0.2  # seconds before the second attempt; four times as many before each other, at most
LONGEST_WAIT = 10.0
LONGEST_TOLD = 600.0  # seconds that a host may ask for: the hub counts requests in windows of 300
WORTH_TELLING = 2.0  # seconds
TICK = 0.1  # seconds between two looks at whether to go on waiting

notices = logging.getLogger("quanterr")

_lock = threading.Lock()
_free_at: dict[str, float] = {}  # by host: when it may be asked again, as time.monotonic() counts
_stopped: list[Callable[[], bool]] = []


class Again(Exception):
    """An answer after which it is worth asking again; ``host``: the one that is too busy for anyone, if that is why."""

    def __init__(self, reason: str, host: str | None = None) -> None:
        """With the reason, for when it is given up."""
        super().__init__(reason)
        self.host = host


def retried(where: str, ask: Callable[[], Answer]) -> Answer:
    """What ``ask`` gives, asked again while that may help.

    Raises:
        ResourceError: it did not help.
        Interrupted: nobody wants to wait any more.
    """
    for attempt in range(ATTEMPTS):
        try:
            return ask()
        except Again as error:
            if attempt == ATTEMPTS - 1:
                raise ResourceError(f"{display(where)}: {ATTEMPTS} attempts failed, the last: {error}") from error
            seconds = min(WAIT * 4**attempt, LONGEST_WAIT)
            if error.host is None:
                _rest(where, time.monotonic() + seconds)
            else:
                _keep_from(error.host, seconds, str(error))
    raise AssertionError("unreachable")


def busy(host: str, seconds: float | None, reason: str) -> Exception:
    """The error of a host that is asked too often; ``seconds`` that it asks to wait, which all do from now on."""
    if seconds is None:
        return Again(reason, host)
    if seconds > LONGEST_TOLD:
        return ResourceError(
            f"{host}: {reason}: asks to wait {seconds:.0f} s, and no longer than {LONGEST_TOLD:.0f} s are waited; "
            "run again later"
        )
    _keep_from(host, seconds, reason)
    return Again(reason, host)


def wait_for(host: str) -> None:
    """Return when the host may be asked.

    Raises:
        Interrupted: nobody wants to wait any more.
    """
    while (free_at := _free_at.get(host, 0.0)) > time.monotonic():
        _rest(host, free_at)


@contextmanager
def stoppable(stopped: Callable[[], bool]) -> Iterator[None]:
    """Waits end when ``stopped`` is true, and so is whatever else was given here and still holds."""
    _stopped.append(stopped)
    try:
        yield
    finally:
        _stopped.remove(stopped)


def _keep_from(host: str, seconds: float, reason: str) -> None:
    """Let nobody ask the host for so long."""
    with _lock:
        before, until = _free_at.get(host, 0.0), time.monotonic() + seconds
        _free_at[host] = max(before, until)
    if seconds >= WORTH_TELLING and until > before + 1:
        then = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        notices.warning("%s: %s: waits %.0f s, until %s", display(host), reason, seconds, then)


def _rest(where: str, until: float) -> None:
    while (left := until - time.monotonic()) > 0:
        if _stopped and all(stopped() for stopped in list(_stopped)):
            raise Interrupted(f"interrupted while waiting for {display(where)}")
        time.sleep(min(left, TICK))
