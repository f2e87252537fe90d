"""Writing outputs: checked before the work, whole or not at all."""

import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, NamedTuple

from quanterr.errors import ResourceError, UsageError
from quanterr.report import OUTPUTS, SCHEMA, Output
from quanterr.text import display

STDOUT = "-"


class Target(NamedTuple):
    """Where an output goes; no path is standard output."""

    output: Output
    path: Path | None


def targets(given: Iterable[str], inputs: Iterable[str]) -> list[Target]:
    """Check the paths of ``--output-report`` before anything is computed.

    Raises:
        UsageError: an unknown suffix, or a path that is one of the inputs or lies in one.
        ResourceError: a folder that is missing or cannot be written to.
    """
    return [_target(path, list(inputs)) for path in given]


def _target(given: str, inputs: list[str]) -> Target:
    if given in (STDOUT, "/dev/stdout"):
        return Target(OUTPUTS[0], None)
    where = f"--output-report {display(given)}"
    try:
        path = Path(given) if _special(Path(given)) else Path(os.path.realpath(given))
        return Target(_checked(path, Path(given).suffix.lower(), where, inputs), path)
    except OSError as error:
        raise ResourceError(f"{where}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{where}: not a file name") from error


def _checked(path: Path, suffix: str, where: str, inputs: list[str]) -> Output:
    output = next((output for output in OUTPUTS if suffix == output.suffix), None)
    if output is None and not _special(path):
        known = ", ".join(output.suffix for output in OUTPUTS)
        raise UsageError(f"{where}: unknown suffix; choose one of {known}, or - for stdout")
    if path.is_dir():
        raise UsageError(f"{where}: is a folder")
    if path.exists() and any(_lies_in(path, name) for name in inputs):
        raise UsageError(f"{where}: is an input of the comparison, or one of its files")
    if not path.parent.is_dir():
        raise ResourceError(f"{where}: no such folder: {display(str(path.parent))}")
    if not os.access(path if _special(path) else path.parent, os.W_OK):
        raise ResourceError(f"{where}: cannot be written there")
    return output or OUTPUTS[0]


def _lies_in(path: Path, given: str) -> bool:
    """Whether the path is that input or one of its files; an earlier report in its folder is none of them."""
    if not os.path.exists(given):
        return False
    return os.path.samefile(path, given) or (os.path.samefile(path.parent, given) and not _is_report(path))


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(64).decode("ascii", "replace")
    return any(schema in start for schema in (SCHEMA, "quanterr.ranking"))


def _special(path: Path) -> bool:
    """A device or a pipe: written through, never replaced."""
    return path.exists() and not stat.S_ISREG(path.stat().st_mode) and not path.is_dir()


def write(target: Target, render: Callable[[IO[str]], None]) -> None:
    """Write an output; a file that was there stays untouched until the new one is whole.

    Raises:
        ResourceError: the disk is full, or the file cannot be written.
    """
    try:
        if target.path is None:
            render(sys.stdout)
            sys.stdout.flush()
        elif _special(target.path):
            with target.path.open("w", encoding="ascii") as file:
                render(file)
        else:
            _replace(target.path, render)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ResourceError(f"--output-report {display(str(target.path or STDOUT))}: {error.strerror}") from error


def _replace(path: Path, render: Callable[[IO[str]], None]) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            render(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode(path))  # mkstemp makes it private
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def _sync_folder(folder: Path) -> None:
    """Make sure that the new name is on the disk as well."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mode(path: Path) -> int:
    """What a plain open() would give the file."""
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
