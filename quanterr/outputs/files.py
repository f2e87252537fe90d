"""Output files, whose paths are checked before any work, and which are written atomically."""

import errno
import gzip
import io
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, NamedTuple

from quanterr.errors import ResourceError, UsageError
from quanterr.outputs import BEGIN, END, OUTPUTS, Output
from quanterr.util.atomic_file import PRIVATE, replace_atomically
from quanterr.util.platform import give_mode, is_closed_pipe, sync_folder
from quanterr.util.text import display

STDOUT = "-"
BEGINNING_BYTES = 128  # bytes read to recognize an output of quanterr
DEFAULT_MODE = 0o666  # mode of a new file before the umask
# Markers of JSON, JSON Lines and rankings; CSV; HTML; JUnit. Markdown is recognized by its comments instead, because
# the section may be part of a user's document.
MARKERS = (b'"quanterr.r', b"quanterr_verdict,", b"<!-- quanterr.", b'name="quanterr: ')


class Target(NamedTuple):
    """Destination of an output; ``path`` None is standard output."""

    output: Output
    path: Path | None


def check_targets(
    given: Iterable[str],
    inputs: Iterable[str],
    output: Output | None = None,
    no_clobber: bool = False,
    outputs: Sequence[Output] = OUTPUTS,
    option: str = "--output-report",
) -> list[Target]:
    """Check the paths of an option before anything is computed, and return them with their outputs.

    The suffix of each path selects one of ``outputs`` unless ``output`` is given; ``.json.gz`` is JSON that gzip packs.
    ``-`` is standard output, by default in the format of the first of ``outputs`` (JSON). With ``no_clobber``, existing
    files are refused.

    Raises:
        UsageError: a suffix is unknown, a path is or lies in an input, a path is a Markdown file of the user, or
            standard output is given twice.
        ResourceError: a folder is missing or not writable, or a file exists despite ``no_clobber``.
    """
    known = list(inputs)
    made = [_make_target(path, known, output, outputs, option) for path in given]
    if [target.path for target in made].count(None) > 1:
        raise UsageError(f"{option} -: given twice; standard output can hold only one document")
    for target in made if no_clobber else []:
        if target.path is not None and target.path.is_file():
            raise ResourceError(f"{option} {display(str(target.path))}: already exists (--no-clobber)")
    return made


def _make_target(
    given: str, inputs: list[str], output: Output | None, outputs: Sequence[Output], option: str
) -> Target:
    if given in (STDOUT, "/dev/stdout"):  # on Windows, too, which lacks this path
        return Target(output or outputs[0], None)
    where = f"{option} {display(given)}"
    with _name_errors(where):
        path = Path(given) if _is_special(Path(given)) else Path(os.path.realpath(given))
        name = Path(given).name.lower().removesuffix(".gz" if _is_packed(given) else "")
        fitting = [row for row in outputs if name.endswith(row.suffix) and name != row.suffix]
        output = output or max(fitting, key=lambda row: len(row.suffix), default=None)
        if output is None and not _is_special(path):
            known = ", ".join(output.suffix for output in outputs)
            raise UsageError(f"{where}: unknown suffix; choose one of {known}, or - for stdout")
        _check_place(path, where, inputs)
        if output is not None and output.name == "png" and find_spec("matplotlib") is None:
            raise UsageError(f'{where}: needs matplotlib: pip install "quanterr[plot]"; an .svg needs nothing')
        document = path.suffix.lower() == ".md" or (output is not None and output.name == "md")
        if document and path.is_file() and path.stat().st_size and not _is_output(path):
            remedy = f"quanterr render REPORT --update {display(str(path))} inserts a section"
            raise UsageError(f"{where}: already exists, and quanterr did not write it; {remedy}")
        return Target(output or outputs[0], path)


def check_place(given: str, option: str, inputs: Iterable[str]) -> None:
    """Check the path of an additional output before anything is computed.

    Raises:
        UsageError: the path is or lies in an input, or is a folder.
        ResourceError: its folder is missing or not writable.
    """
    where = f"{option} {display(given)}"
    with _name_errors(where):
        _check_place(Path(os.path.realpath(given)), where, list(inputs))


@contextmanager
def _name_errors(where: str) -> Iterator[None]:
    """Turn errors of the operating system about a path into errors that name the path."""
    try:
        yield
    except OSError as error:
        raise ResourceError(f"{where}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{where}: not a valid file name") from error


def _check_place(path: Path, where: str, inputs: list[str]) -> None:
    if path.is_dir():
        raise UsageError(f"{where}: this is a folder; give a file")
    if path.exists() and any(os.path.exists(name) and os.path.samefile(path, name) for name in inputs):
        raise UsageError(f"{where}: this is an input, which would be overwritten")
    if not path.parent.is_dir():
        raise ResourceError(f"{where}: no such folder: {display(str(path.parent))}")
    if any(os.path.isdir(name) and os.path.samefile(path.parent, name) for name in inputs):
        raise UsageError(f"{where}: is in the folder of an input checkpoint; choose another folder")
    if not os.access(path if _is_special(path) else path.parent, os.W_OK):
        raise ResourceError(f"{where}: no permission to write there")


def _is_output(path: Path) -> bool:
    """Return True if quanterr wrote the whole file: outputs start with a marker."""
    with path.open("rb") as file:
        beginning = file.read(BEGINNING_BYTES)
    if beginning.lstrip().startswith(BEGIN.encode()):
        return path.read_bytes().rstrip().endswith(END.encode())
    return any(mark in beginning for mark in MARKERS)


def _is_packed(path: str) -> bool:
    """Return True for a path of JSON that gzip packs."""
    return path.lower().endswith(".json.gz")


def _is_special(path: Path) -> bool:
    """Return True for a device or pipe, which is written to and never replaced."""
    return path.exists() and not stat.S_ISREG(path.stat().st_mode) and not path.is_dir()


def write_output(result: object, target: Target, option: str = "--output-report", /, **more: object) -> None:
    """Write a result to a target; ``more`` are keywords for the output's ``write``.

    Raises:
        ResourceError: for the reasons that :func:`open_target` states.
    """
    with open_target(target, option) as file:
        target.output.write(result, file, **more)


@contextmanager
def open_target(target: Target, option: str) -> Iterator[IO[str]]:
    """Open the file of an output, or standard output; an existing file is replaced only when the new one is complete.

    Raises:
        ResourceError: the disk is full, or the file cannot be written.
    """
    try:
        if target.path is None:
            if getattr(sys.stdout, "name", None) == os.devnull:  # main() opened it because the caller had closed it
                raise OSError(errno.EBADF, "standard output is closed")
            sys.stdout.reconfigure(encoding="utf-8", newline="")  # type: ignore[union-attr] # main() opened this stream
            yield sys.stdout
            sys.stdout.flush()
        elif _is_special(target.path):
            with target.path.open("w", encoding="utf-8", newline="") as file:
                yield file
        else:
            with open_replacement(str(target.path), option) as binary:
                packed = gzip.GzipFile("", "wb", fileobj=binary, mtime=0) if _is_packed(target.path.name) else None
                text = io.TextIOWrapper(packed or binary, encoding="utf-8", newline="", write_through=packed is None)
                yield text
                text.flush()
                text.detach()  # a wrapper that is still attached closes the file when deleted
                if packed:
                    packed.close()
    except OSError as error:
        if is_closed_pipe(error):
            raise
        where = "standard output" if target.path is None else f"{option} {display(str(target.path))}"
        raise ResourceError(f"{where}: {error.strerror}") from error


@contextmanager
def open_replacement(path: str, option: str) -> Iterator[IO[bytes]]:
    """Open a binary file that replaces the existing one once it is complete and synced to the disk.

    Raises:
        ResourceError: the file cannot be written.
    """
    place = Path(os.path.realpath(path))
    try:
        mode = stat.S_IMODE(place.stat().st_mode) if place.exists() else None
        with replace_atomically(place, DEFAULT_MODE if mode is None else PRIVATE) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if mode is not None:
                give_mode(file.fileno(), mode)
        sync_folder(place.parent)
    except OSError as error:
        raise ResourceError(f"{option} {display(path)}: {error.strerror}") from error


def update_section(
    given: str, document: object, output: Output, append: bool = False, finish: Callable[[str, str], str] | None = None
) -> None:
    """Put a section into a Markdown file, between its two comments; with ``append``, at the end if there are none.

    ``output`` renders the section from ``document``. ``finish`` changes the whole text, given it and the name of the
    file, for errors.

    Raises:
        UsageError: the file is missing, is not UTF-8, or does not have exactly one pair of comments.
        ResourceError: the file cannot be written.
    """
    from quanterr.outputs.markdown import replace_section

    where = f"--update {display(given)}"
    try:
        with open(given, encoding="utf-8", newline="") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"{where}: {reason}") from error
    section = io.StringIO()
    output.write(document, section)
    made = replace_section(text, section.getvalue(), where, append)
    if finish is not None:
        made = finish(made, where)
    with open_target(Target(output, Path(os.path.realpath(given))), "--update") as file:
        file.write(made)
