"""Notices that runs print on stderr: hosts, retries, files that are not standard."""

import logging
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from quanterr.cli.process import is_other_rank
from quanterr.util.addresses import host_of
from quanterr.util.processes import count_unconnected_tasks
from quanterr.util.waiting import notices

if TYPE_CHECKING:
    from quanterr.documents.base import Finding


def warn(findings: "Iterable[Finding]") -> None:
    """Print findings about non-standard files on stderr, as nobody may read the report."""
    from quanterr.findings.files import NOTE
    from quanterr.outputs.formatting import sentence

    for message in dict.fromkeys(sentence(finding.message) for finding in findings if finding.code == NOTE):
        print(f"quanterr: warning: {message}", file=sys.stderr)


class _Notices(logging.Handler):
    """Handler that prints log records on stderr, above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line."""
        from tqdm import tqdm

        tqdm.write(f"quanterr: {record.getMessage()}", file=sys.stderr)


def announce(paths: Iterable[str], quiet: bool) -> None:
    """Print the hosts to read from on stderr, warn of srun tasks that repeat the work, and set up notices.

    ``quiet`` leaves out the hosts and limits notices, such as retries, to errors.
    """
    if tasks := count_unconnected_tasks():
        print(
            f"quanterr: srun started {tasks} tasks, and each does all the work and writes all outputs; export "
            "MASTER_ADDR and MASTER_PORT to share the work (see quanterr guide scale)",
            file=sys.stderr,
        )
    hosts = sorted({host for path in paths if (host := host_of(path)) is not None})
    quiet = quiet or is_other_rank()
    notices.handlers = [_Notices()]
    notices.setLevel(logging.ERROR if quiet else logging.WARNING)
    if hosts and not quiet:
        print(f"quanterr: reading from {', '.join(hosts)}", file=sys.stderr)
