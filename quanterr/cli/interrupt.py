"""Ends a run early, with its partial result, on Ctrl-C, on SIGTERM or when a layer violates a rule."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import typer

from quanterr.errors import Interrupted, Status
from quanterr.util.waiting import allow_stop

if TYPE_CHECKING:
    from types import FrameType

    from quanterr.documents.comparison.layer import Layer
    from quanterr.documents.comparison.model import Report
    from quanterr.documents.ranking.model import Ranking


class Interrupt:
    """Handler of Ctrl-C and SIGTERM: the first ends the run early with a partial result, the second ends the program.

    With :meth:`stop_at`, a layer that violates a rule also ends the run early.
    """

    def __init__(self, keeps: bool = True) -> None:
        """Start before any signal; ``keeps`` means that an interrupted run still has a result."""
        self._consequence = "writing the partial result" if keeps else "stopping"
        self.stop = threading.Event()
        self.signal: int | None = None
        self.violation: str | None = None

    def stop_at(self, violated: "Callable[[Layer], str | None]") -> "Callable[[Layer], None]":
        """Return a callback that ends the run at the first layer for which ``violated`` returns a reason."""

        def check(layer: "Layer") -> None:
            if self.violation is None and (description := violated(layer)) is not None:
                self.violation = description
                self.stop.set()
                print(f"quanterr: stopped by --fail-fast: {description}", file=sys.stderr)

        return check

    def __enter__(self) -> "Interrupt":
        self._undo = ExitStack()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._undo.callback(signal.signal, number, signal.signal(number, self._handle_signal))
        self._undo.enter_context(allow_stop(self.stop.is_set))
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Exit with the signal's status, 128 plus its number, if the run has no result because it was interrupted."""
        self._undo.close()
        if isinstance(error, Interrupted):
            print(f"quanterr: {error}", file=sys.stderr)
            raise typer.Exit(128 + (self.signal or signal.SIGINT)) from error

    def _handle_signal(self, number: int, _: "FrameType | None") -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        self.stop.set()
        with suppress(OSError):  # stderr is closed
            os.write(2, f"\nquanterr: interrupted; {self._consequence} (interrupt again to quit at once)\n".encode())


def decide_status(judged: "Report | Ranking", allow_partial: bool, interrupt: Interrupt) -> int:
    """Return the exit status of a judged document whose run may have been interrupted."""
    from quanterr.documents.gate_results import exit_status

    if interrupt.signal is not None and not judged.complete:
        return 128 + interrupt.signal
    if interrupt.violation is not None and not judged.complete:  # later layers cannot undo a violation
        return Status.GATE_FAILED
    return exit_status(judged, allow_partial)
