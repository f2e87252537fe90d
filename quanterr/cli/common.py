"""What the commands that read checkpoints share: signals, progress, standard output."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from quanterr.errors import ResourceError, Status

if TYPE_CHECKING:
    from types import FrameType

    from quanterr.cli.progress import Bar, Heartbeat
    from quanterr.report.model import Finding, Layer


class Color(StrEnum):
    """When to use colours."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


Lenient = Annotated[
    bool,
    typer.Option(
        "--lenient",
        help="Accept files that are odd and yet mean one thing only, and warn: bytes at the end, a header padded "
        "with other than spaces.",
        rich_help_panel="Inputs",
    ),
]


NoClobber = Annotated[
    bool,
    typer.Option("--no-clobber", help="Do not replace a report that is there.", rich_help_panel="Output"),
]


class Interrupt:
    """Ctrl-C and SIGTERM: the first ends the run with what there is, the second ends the program.

    So does a layer that violates a rule, where that is asked for.
    """

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self.stop = threading.Event()
        self.signal: int | None = None
        self.violation: str | None = None

    def at(self, violated: "Callable[[Layer], str | None]") -> "Callable[[Layer], None]":
        """What ends the run at the first layer of which ``violated`` tells something."""

        def look(layer: "Layer") -> None:
            if self.violation is None and (told := violated(layer)) is not None:
                self.violation = told
                self.stop.set()
                print(f"quanterr: stopped by --fail-fast: {told}", file=sys.stderr)

        return look

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._caught) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, _: "FrameType | None") -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        self.stop.set()
        with suppress(OSError):  # nobody hears it
            os.write(2, b"\nquanterr: interrupted; writing what there is (again to leave at once)\n")


def warn(findings: "Iterable[Finding]") -> None:
    """Tell on stderr what is odd about the files: of that nobody may hear only in a report."""
    from quanterr.findings.files import NOTE
    from quanterr.report.formatting import sentence

    for message in dict.fromkeys(sentence(found.message) for found in findings if found.code == NOTE):
        print(f"quanterr: warning: {message}", file=sys.stderr)


@contextmanager
def watching(quiet: bool) -> "Iterator[Bar | Heartbeat | None]":
    """Progress on stderr, unless it is to be quiet there."""
    from quanterr.cli.progress import Bar, Heartbeat

    on_progress = None if quiet else Bar() if sys.stderr.isatty() else Heartbeat()
    try:
        yield on_progress
    finally:
        if on_progress is not None:
            on_progress.close()


@contextmanager
def printing() -> Iterator[None]:
    """Around whatever writes to standard output: a closed pipe and a full disk end the command.

    Raises:
        ResourceError: standard output cannot be written.
    """
    try:
        yield
    except BrokenPipeError as error:
        _abandon_stdout()
        raise typer.Exit(Status.BROKEN_PIPE) from error
    except OSError as error:
        _abandon_stdout()
        raise ResourceError(f"standard output: {error.strerror}") from error


def _abandon_stdout() -> None:
    """Nothing more can be written there, nor flushed at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
