"""What can go wrong, and the exit status that says so.

QuanterrError
├── UsageError          2   a wrong argument, or a pattern that matches nothing
├── CheckpointError     3   an input cannot be read or is invalid
├── ReportError         3   a stored report cannot be read or is invalid
├── ResourceError       5   memory, device, disk, an output that cannot be written
└── ElsewhereError          one of several ranks ends: rank 0 reports

FormatMismatch                      not an error of the run: why one stored weight does not fit one format
"""

from enum import IntEnum


class Status(IntEnum):
    """Exit status of the command. When several hold, the unreliable result outranks the failed gate."""

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
    Status.INCONCLUSIVE: "something was not compared, or the result is meaningless (`--allow-partial`: 0)",
    Status.ENVIRONMENT: "memory, device, disk, an output that cannot be written",
    Status.BUG: "a bug in quanterr",
    Status.INTERRUPTED: "Ctrl-C; the report is written and marked incomplete",
    Status.BROKEN_PIPE: "the reader of the output closed the pipe",
    Status.TERMINATED: "SIGTERM; as Ctrl-C",
}


class QuanterrError(Exception):
    """Something the user can correct; the message names it and says how."""

    status = Status.BUG


class UsageError(QuanterrError):
    """A wrong argument or configuration."""

    status = Status.USAGE


class CheckpointError(QuanterrError):
    """An input that cannot be read or is invalid."""

    status = Status.UNREADABLE


class ReportError(QuanterrError):
    """A stored report that cannot be read or is invalid."""

    status = Status.UNREADABLE


class ResourceError(QuanterrError):
    """The machine does not give what is needed."""

    status = Status.ENVIRONMENT


class Interrupted(QuanterrError):
    """A run that was stopped before it had a result."""

    status = Status.INTERRUPTED


class ElsewhereError(QuanterrError):
    """Why one of several ranks ends: rank 0 has the result, or reports what went wrong."""

    def __init__(self, status: Status) -> None:
        """With the status of the run."""
        super().__init__("rank 0 reports it")
        self.status = status


# What is said where memory, or room for one more thread, is missing: by Python, the C library, C++, torch.
NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",  # of Windows
    "Cannot allocate memory",
    "can't start new thread",
    "bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host has no memory left, by whatever kind of exception that was raised."""
    return isinstance(error, MemoryError) or any(description in str(error) for description in NO_MEMORY)


class FormatMismatch(Exception):
    """Why a stored weight does not fit a format; becomes the reason in the report."""
