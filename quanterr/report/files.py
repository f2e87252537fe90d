"""Writing outputs: checked before the work, whole or not at all."""

import errno
import io
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from quanterr.errors import ResourceError, UsageError
from quanterr.report import OUTPUTS, Output
from quanterr.util.atomic_file import PRIVATE, replace_atomically
from quanterr.util.platform import give_mode, is_closed_pipe, sync_folder
from quanterr.util.text import display

STDOUT = "-"
BEGINNING = 128  # bytes
OF_OPEN = 0o666  # the mode that a plain open() gives a new file, but for the umask
# JSON, JSON Lines and a ranking; CSV; HTML; JUnit. Markdown is a section that may be in somebody's document.
MARKS = (b'"quanterr.r', b"quanterr_verdict,", b"<!-- quanterr.", b'name="quanterr: ')
SECTION = b"<!-- quanterr:begin -->", b"<!-- quanterr:end -->"


class Target(NamedTuple):
    """Where an output goes; no path is standard output."""

    output: Output
    path: Path | None


def targets(
    given: Iterable[str],
    inputs: Iterable[str],
    output: Output | None = None,
    no_clobber: bool = False,
    outputs: Sequence[Output] = OUTPUTS,
) -> list[Target]:
    """Check the paths of ``--output-report`` before anything is computed.

    The suffix of each chooses one of ``outputs``, unless ``output`` does; - is standard output, and the first of
    them, JSON. With ``no_clobber`` no file may be there yet.

    Raises:
        UsageError: an unknown suffix, a path that is one of the inputs or lies in one, a document of somebody's,
            standard output twice.
        ResourceError: a folder that is missing or cannot be written to, a file that is not to be replaced.
    """
    known = list(inputs)
    made = [_target(path, known, output, outputs) for path in given]
    if [target.path for target in made].count(None) > 1:
        raise UsageError("--output-report -: given twice; standard output holds one document")
    for target in made if no_clobber else []:
        if target.path is not None and target.path.is_file():
            raise ResourceError(f"--output-report {display(str(target.path))}: exists, and --no-clobber is given")
    return made


def _target(given: str, inputs: list[str], output: Output | None, outputs: Sequence[Output]) -> Target:
    if given in (STDOUT, "/dev/stdout"):  # also on Windows, which has no such path
        return Target(output or outputs[0], None)
    where = f"--output-report {display(given)}"
    with _naming(where):
        path = Path(given) if _special(Path(given)) else Path(os.path.realpath(given))
        output = output or next((row for row in outputs if row.suffix == Path(given).suffix.lower()), None)
        if output is None and not _special(path):
            known = ", ".join(output.suffix for output in outputs)
            raise UsageError(f"{where}: unknown suffix; choose one of {known}, or - for stdout")
        _check_place(path, where, inputs)
        document = path.suffix.lower() == ".md" or (output is not None and output.name == "md")
        if document and path.is_file() and path.stat().st_size and not _is_output(path):
            remedy = f"quanterr render REPORT --update {display(str(path))} puts a section into it"
            raise UsageError(f"{where}: exists and is not a report; {remedy}")
        return Target(output or outputs[0], path)


def check_place(given: str, option: str, inputs: Iterable[str]) -> None:
    """Check the path of another output than a report before anything is computed.

    Raises:
        UsageError: it is one of the inputs or lies in one, or is a folder.
        ResourceError: its folder is missing or cannot be written to.
    """
    where = f"{option} {display(given)}"
    with _naming(where):
        _check_place(Path(os.path.realpath(given)), where, list(inputs))


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Around what asks the system about a path: its errors say which."""
    try:
        yield
    except OSError as error:
        raise ResourceError(f"{where}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{where}: not a file name") from error


def _check_place(path: Path, where: str, inputs: list[str]) -> None:
    if path.is_dir():
        raise UsageError(f"{where}: is a folder")
    if path.exists() and any(os.path.exists(name) and os.path.samefile(path, name) for name in inputs):
        raise UsageError(f"{where}: is an input")
    if not path.parent.is_dir():
        raise ResourceError(f"{where}: no such folder: {display(str(path.parent))}")
    if any(os.path.isdir(name) and os.path.samefile(path.parent, name) for name in inputs):
        raise UsageError(f"{where}: lies in the folder of a checkpoint that is compared; write it to another folder")
    if not os.access(path if _special(path) else path.parent, os.W_OK):
        raise ResourceError(f"{where}: cannot be written there")


def _is_output(path: Path) -> bool:
    """Whether it is one of our own outputs and nothing else; all of them name themselves at their beginning."""
    with path.open("rb") as file:
        beginning = file.read(BEGINNING)
    if beginning.lstrip().startswith(SECTION[0]):
        return path.read_bytes().rstrip().endswith(SECTION[1])
    return any(mark in beginning for mark in MARKS)


def save(found: object, path: str, outputs: Sequence[Output]) -> None:
    """What the ``save`` of a report, a ranking and a diff does.

    Raises:
        UsageError: an unknown suffix.
        ResourceError: the file cannot be written.
    """
    for target in targets([path], [], outputs=outputs):
        write_output(found, target, "save()")


def output_named(name: str) -> Output:
    """Return the output of that name.

    Raises:
        UsageError: there is none.
    """
    found = next((output for output in OUTPUTS if output.name == name), None)
    if found is None:
        raise UsageError(f"--to {display(name)}: choose one of {', '.join(output.name for output in OUTPUTS)}")
    return found


def _special(path: Path) -> bool:
    """A device or a pipe: written through, never replaced."""
    return path.exists() and not stat.S_ISREG(path.stat().st_mode) and not path.is_dir()


def write_output(found: object, target: Target, option: str = "--output-report", **more: object) -> None:
    """Write a result to a target, as its output does; ``more`` is for the output.

    Raises:
        ResourceError: the disk is full, or the file cannot be written.
    """
    write(target, lambda file: target.output.write(found, file, **more), option)


def write(target: Target, render: Callable[[IO[str]], object], option: str = "--output-report") -> None:
    """Write an output; a file that was there stays untouched until the new one is whole.

    Raises:
        ResourceError: the disk is full, or the file cannot be written.
    """
    try:
        if target.path is None:
            if getattr(sys.stdout, "name", None) == os.devnull:  # as main() opens it where the caller closed it
                raise OSError(errno.EBADF, "standard output is closed")
            sys.stdout.reconfigure(encoding="utf-8", newline="")  # type: ignore[union-attr] # a stream that main() has opened
            render(sys.stdout)
            sys.stdout.flush()
        elif _special(target.path):
            with target.path.open("w", encoding="utf-8", newline="") as file:
                render(file)
        else:
            _replace(target.path, render)
    except OSError as error:
        if is_closed_pipe(error):
            raise
        where = "standard output" if target.path is None else f"{option} {display(str(target.path))}"
        raise ResourceError(f"{where}: {error.strerror}") from error


def _replace(path: Path, render: Callable[[IO[str]], object]) -> None:
    with _whole(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        render(text)
        text.detach()  # else it would close the file


@contextmanager
def replaced(path: str, option: str) -> Iterator[IO[bytes]]:
    """A binary file that takes the place of what was there once it is whole.

    Raises:
        ResourceError: it cannot be written.
    """
    try:
        with _whole(Path(os.path.realpath(path))) as file:
            yield file
    except OSError as error:
        raise ResourceError(f"{option} {display(path)}: {error.strerror}") from error


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of another, and is on the disk then."""
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    with replace_atomically(path, OF_OPEN if mode is None else PRIVATE) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
        if mode is not None:
            give_mode(file.fileno(), mode)
    sync_folder(path.parent)


def update(given: str, found: object, output: Output, append: bool = False) -> None:
    """Put a section into a Markdown file, between its two comments; or append it where there are none.

    ``output`` makes the section of what was found.

    Raises:
        UsageError: no such document, not UTF-8, or not exactly one pair of comments.
        ResourceError: it cannot be written.
    """
    from quanterr.report.card import updated

    where = f"--update {display(given)}"
    try:
        with open(given, encoding="utf-8", newline="") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"{where}: {reason}") from error
    section = io.StringIO()
    output.write(found, section)
    made = updated(text, section.getvalue(), where, append)
    write(Target(output, Path(os.path.realpath(given))), lambda file: file.write(made), "--update")
