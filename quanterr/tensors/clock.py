"""The start, duration and machine of a run."""

import platform
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version

from quanterr.documents.base import RunInfo


class Clock:
    """The time since a run began."""

    def __init__(self) -> None:
        """Start the clock."""
        self._began, self._clock = datetime.now(UTC), time.monotonic()

    def describe_run(
        self, command: Iterable[str], device: str, threads: int, read_bytes: int, kernel: str | None = None
    ) -> RunInfo:
        """Describe the run until now; ``kernel`` is the kernel that summed the errors."""
        return RunInfo(
            started=self._began.isoformat(timespec="seconds"),
            seconds=time.monotonic() - self._clock,
            device=device,
            threads=threads,
            kernel=kernel,
            torch=_find_torch_version(),
            python=platform.python_version(),
            read_bytes=read_bytes,
            command=list(command),
        )


def _find_torch_version() -> str:
    """Return the version of torch without importing it, which takes seconds."""
    return str(sys.modules["torch"].__version__) if "torch" in sys.modules else version("torch")
