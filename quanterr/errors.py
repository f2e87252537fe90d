"""Exceptions and the exit status of each.

QuanterrError
├── UsageError          2   an invalid argument, or a pattern that matches nothing
│   └── UnjudgedError       a result that the rules cannot judge
├── CheckpointError     3   an input cannot be read or is invalid
├── ReportError         3   a stored report cannot be read or is invalid
├── ResourceError       5   memory, device, disk, an output that cannot be written
├── Interrupted       130   the run was stopped before it had a result
└── ElsewhereError          a rank other than 0 ends: rank 0 reports the result or the error

FormatMismatch              why a stored weight does not fit a format: not an error of the run
"""

from enum import IntEnum
from typing import Any


class Status(IntEnum):
    """Exit status of a command. When several apply, INCONCLUSIVE outranks GATE_FAILED."""

    OK = 0
    GATE_FAILED = 1
    USAGE = 2
    UNREADABLE = 3
    INCONCLUSIVE = 4
    ENVIRONMENT = 5
    BUG = 70
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


MEANINGS = {
    Status.OK: "compared completely, all gates hold",
    Status.GATE_FAILED: "compared completely, a gate does not hold",
    Status.USAGE: "wrong usage or configuration; a pattern that matches nothing",
    Status.UNREADABLE: "an input cannot be read or is invalid",
    Status.INCONCLUSIVE: "something was not compared (`--allow-partial`: 0), or damage was found",
    Status.ENVIRONMENT: "memory, device, disk, an output that cannot be written",
    Status.BUG: "a bug in quanterr",
    Status.INTERRUPTED: "Ctrl-C; the report is written and marked incomplete",
    Status.BROKEN_PIPE: "the reader of the output closed the pipe",
    Status.TERMINATED: "SIGTERM; as Ctrl-C",
}


class QuanterrError(Exception):
    """An error that the user can correct; the message says what is wrong and what to do."""

    status = Status.BUG


class UsageError(QuanterrError):
    """An invalid argument or configuration."""

    status = Status.USAGE


class UnjudgedError(UsageError):
    """The rules cannot judge a result, such as by a baseline of another original.

    ``document`` is the result, whose verdict is inconclusive for this reason.
    """

    def __init__(self, message: str, document: Any) -> None:
        """Keep the result."""
        super().__init__(message)
        self.document = document


class CheckpointError(QuanterrError):
    """A checkpoint, or another input, that is unreadable or invalid."""

    status = Status.UNREADABLE


class ReportError(QuanterrError):
    """A stored report that is unreadable or invalid."""

    status = Status.UNREADABLE


class ResourceError(QuanterrError):
    """A lack of memory, disk, device or network, or an output that cannot be written."""

    status = Status.ENVIRONMENT


class Interrupted(QuanterrError):
    """A run that was stopped before it had a result."""

    status = Status.INTERRUPTED


class ElsewhereError(QuanterrError):
    """The end of a rank other than 0: rank 0 has the result, or reports the error."""

    def __init__(self, status: Status) -> None:
        """Keep the exit status of the run."""
        super().__init__("rank 0 reports it")
        self.status = status


class FormatMismatch(Exception):
    """The reason why a stored weight does not fit a format, as the report shows it."""
