"""What the commands that read checkpoints share: signals, progress, standard output."""

import importlib
import logging
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from os import PathLike, fspath
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from quanterr.cli.options import But, Only
from quanterr.errors import Interrupted, ResourceError, Status, UsageError
from quanterr.options import OUTPUT, SELECTION, Option
from quanterr.util.addresses import host_of, strip_credentials
from quanterr.util.platform import is_closed_pipe, limit_of_memory
from quanterr.util.processes import count_unconnected_tasks, this_process
from quanterr.util.text import escape_surrogates, size
from quanterr.util.waiting import allow_stop, notices

if TYPE_CHECKING:
    from types import FrameType

    from quanterr.cli.progress import Bar, Heartbeat, Steps
    from quanterr.report import Output
    from quanterr.report.base import Finding
    from quanterr.report.diff.base import Difference
    from quanterr.report.document import Document
    from quanterr.report.files import Target
    from quanterr.report.model import Layer
    from quanterr.report.sections import View


ROOM = 256 * 2**20  # bytes: what a small comparison takes above torch
LOADING = 60  # seconds of processor time that loading torch may take; it takes 2 to 4


def help_of(text: str) -> str:
    """Help whose paragraphs are wrapped to the terminal; those that begin with ``\\b`` keep their lines."""
    return "\n\n".join(p if p.startswith("\b") else " ".join(p.split()) for p in text.strip().split("\n\n"))


def _named(params: list[Any]) -> list[Any]:
    """Options with what they take: nothing, for a switch, where typer writes <bool>."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command whose help names what options take."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options and arguments, with -h."""
        return _named(super().get_params(ctx))


class Group(TyperGroup):
    """The same of the whole program."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options."""
        return _named(super().get_params(ctx))


class Color(StrEnum):
    """When to use colours."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class SchemaOf(StrEnum):
    """What has a JSON Schema."""

    REPORT = "report"
    RANKING = "ranking"
    EVALUATION = "evaluation"
    PLAN = "plan"
    INSPECTION = "inspection"


class SortBy(StrEnum):
    """What the worst layers are sorted by."""

    SNR = "snr"
    MAE = "mae"
    RELATIVE = "relative"
    MAX = "max"


@dataclass(frozen=True, kw_only=True)
class Display:
    """Where a result goes, and how it is shown."""

    as_json: Annotated[bool, Option("JSON on stdout instead of tables.", OUTPUT, flags="--json")] = False
    outputs: Annotated[
        Iterable[str],
        Option(
            "Write the result; the suffix chooses the format (.json .jsonl .csv .html .md .xml); - is JSON on stdout. "
            "Repeatable.",
            OUTPUT,
            "FILE",
            "--output-report -o",
        ),
    ] = ()
    no_clobber: Annotated[bool, Option("Do not replace a file that exists.", OUTPUT)] = False
    top_layers: Annotated[int, Option("Number of layers to show.", OUTPUT, "N", least=0)] = 10
    sort_by: Annotated[SortBy, Option("The metric that ranks the worst layers.", OUTPUT)] = SortBy.SNR
    no_plot: Annotated[bool, Option("Do not draw maps and curves.", OUTPUT)] = False
    color: Annotated[Color, Option("Colours.", OUTPUT)] = Color.AUTO
    no_color: Annotated[bool, Option("The same as --color never.", OUTPUT)] = False
    quiet: Annotated[bool, Option("No table and no progress; the verdict on stderr.", OUTPUT, flags="--quiet -q")] = (
        False
    )
    verbose: Annotated[
        bool, Option("Show all findings, and what decided each format.", OUTPUT, flags="--verbose -v")
    ] = False
    allow_partial: Annotated[
        bool,
        Option("Exit 0 even if something was not compared; the result still says inconclusive.", SELECTION),
    ] = False

    @property
    def colors(self) -> Color:
        """What both options of colours say."""
        return Color.NEVER if self.no_color else self.color

    def targets(
        self, inputs: Iterable[str | PathLike[str] | None], outputs: "Sequence[Output] | None" = None
    ) -> "list[Target]":
        """Where it goes, checked before any work: no output replaces one of the inputs, None among them left out.

        Raises:
            UsageError: a suffix that is no output's, one place twice, a folder that is not there, an input.
        """
        from quanterr.report import OUTPUTS
        from quanterr.report.files import targets

        given = [fspath(path) for path in inputs if path is not None]
        return targets(list(self.outputs), given, no_clobber=self.no_clobber, outputs=outputs or OUTPUTS)


OF_TABLES = Only(("as_json", "color", "no_color"))
OF_RESULTS = But(("sort_by", "no_plot", "verbose"))  # of rankings, plans and evaluations

Original = Annotated[
    str, typer.Argument(metavar="ORIGINAL", help="The checkpoint before quantization.", show_default=False)
]


class Interrupt:
    """Ctrl-C and SIGTERM: the first ends the run with what there is, the second ends the program.

    So does a layer that violates a rule, where that is asked for.
    """

    def __init__(self, keeps: bool = True) -> None:
        """Nothing has happened yet; ``keeps``: what was done by then is a result."""
        self._told = "writing what there is" if keeps else "ending"
        self.stop = threading.Event()
        self.signal: int | None = None
        self.violation: str | None = None

    def at(self, violated: "Callable[[Layer], str | None]") -> "Callable[[Layer], None]":
        """Ends the run at the first layer for which ``violated`` returns a reason."""

        def look(layer: "Layer") -> None:
            if self.violation is None and (description := violated(layer)) is not None:
                self.violation = description
                self.stop.set()
                print(f"quanterr: stopped by --fail-fast: {description}", file=sys.stderr)

        return look

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._caught) for number in (signal.SIGINT, signal.SIGTERM)}
        self._waits = allow_stop(self.stop.is_set)
        self._waits.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._waits.__exit__(None, None, None)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, _: "FrameType | None") -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        self.stop.set()
        with suppress(OSError):  # nobody hears it
            os.write(2, f"\nquanterr: interrupted; {self._told} (again to leave at once)\n".encode())


@contextmanager
def ended_by(interrupt: Interrupt) -> Iterator[None]:
    """Around a run that has no result when it is interrupted: ends the command with the signal's own status."""
    try:
        yield
    except Interrupted as error:
        print(f"quanterr: {error}", file=sys.stderr)
        raise typer.Exit(128 + (interrupt.signal or signal.SIGINT)) from error


def require_memory() -> None:
    """Load torch in another process first, where the address space is limited (``ulimit -v``).

    A library that gets too little ends its process, with any status; 1 would read as "a gate failed".

    Raises:
        ResourceError: it is too little.
    """
    limit = limit_of_memory()
    if limit is None or "torch" in sys.modules:
        return
    child = os.fork()
    if child == 0:
        _load_torch_and_leave()
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise ResourceError(f"the limit of {size(limit)} (ulimit -v) is too low to load torch; raise it")


def _load_torch_and_leave() -> NoReturn:
    """End this process: with 0 if torch can be loaded and leaves room to work in.

    Its processor time is limited: an import that runs out of memory has been seen to go round in circles.
    """
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (LOADING, LOADING))
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        importlib.import_module("torch")
        mmap.mmap(-1, ROOM).close()
    except BaseException:  # whatever it is, the process must not return into the program
        os._exit(1)
    os._exit(0)


def command_line() -> list[str]:
    """What the user called, for the report."""
    return ["quanterr", *(escape_surrogates(strip_credentials(word)) for word in sys.argv[1:])]


def warn(findings: "Iterable[Finding]") -> None:
    """Print what is non-standard about the files on stderr: a report alone might go unread."""
    from quanterr.findings.files import NOTE
    from quanterr.report.formatting import sentence

    for message in dict.fromkeys(sentence(found.message) for found in findings if found.code == NOTE):
        print(f"quanterr: warning: {message}", file=sys.stderr)


def is_other_rank() -> bool:
    """Whether this is one of several processes of a run, and not the one that prints and writes."""
    with suppress(UsageError):  # which the run itself raises
        return this_process().rank > 0
    return False


class _Notices(logging.Handler):
    """Prints what happens on the way, above the bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """A line."""
        from tqdm import tqdm

        tqdm.write(f"quanterr: {record.getMessage()}", file=sys.stderr)


def announce(paths: Iterable[str], quiet: bool) -> None:
    """Say on stderr which hosts are read from, when they let wait, and that tasks of srun do the same work again."""
    if tasks := count_unconnected_tasks():
        print(
            f"quanterr: srun started {tasks} tasks, and each does all the work and writes all outputs: export "
            "MASTER_ADDR and MASTER_PORT, and they share it (quanterr guide scale)",
            file=sys.stderr,
        )
    hosts = sorted({host for path in paths if (host := host_of(path)) is not None})
    quiet = quiet or is_other_rank()
    notices.handlers = [_Notices()]
    notices.setLevel(logging.ERROR if quiet else logging.WARNING)
    if hosts and not quiet:
        print(f"quanterr: reads from {', '.join(hosts)}", file=sys.stderr)


@contextmanager
def watching(quiet: bool) -> "Iterator[Bar | Heartbeat | None]":
    """Progress on stderr, unless it is to be quiet there."""
    from quanterr.cli.progress import Bar, Heartbeat

    on_progress = None if quiet or is_other_rank() else Bar() if sys.stderr.isatty() else Heartbeat()
    try:
        yield on_progress
    finally:
        if on_progress is not None:
            on_progress.close()


@contextmanager
def stepping(quiet: bool) -> "Iterator[Steps | None]":
    """Progress of an evaluation on stderr, unless it is to be quiet there."""
    from quanterr.cli.progress import Steps

    steps = None if quiet else Steps(sys.stderr.isatty())
    try:
        yield steps
    finally:
        if steps is not None:
            steps.close()


@contextmanager
def printing() -> Iterator[None]:
    """Around whatever writes to standard output: a closed pipe and a full disk end the command.

    Raises:
        ResourceError: standard output cannot be written.
    """
    try:
        yield
    except OSError as error:
        _abandon_stdout()
        if is_closed_pipe(error):
            raise typer.Exit(Status.BROKEN_PIPE) from error
        raise ResourceError(f"standard output: {error.strerror}") from error


def _abandon_stdout() -> None:
    """Nothing more can be written there, nor flushed at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def deliver(
    found: "Document | Difference",
    to: "Sequence[Target]",
    display: Display,
    status: int | None = None,
    next_step: str = "",
    view: "View | None" = None,
) -> None:
    """Deliver a document to where it was asked for: files, tables that end with the exit ``status``, standard output.

    ``next_step`` is the command that is proposed; ``view`` is printed in the place of the document's usual one.

    Files first: no reader that leaves the table early costs a result, and no full disk costs the table. Standard output
    carries one thing: the document, if one is to go there.
    """
    from quanterr.report.files import write_output

    documents = [target for target in to if target.path is None]
    wrote: list[str] = []
    with printing():
        try:
            for target in to:
                if target.path is not None:
                    write_output(found, target)
                    wrote.append(str(target.path))
        finally:
            _print_result(found, display, bool(documents), (status, wrote, next_step), view)
        for target in documents:
            write_output(found, target)
        if display.as_json and not documents:
            sys.stdout.write(found.to_json())
            sys.stdout.flush()


def _print_result(
    found: "Document | Difference",
    display: Display,
    to_stderr: bool,
    answer: tuple[int | None, list[str], str],
    view: "View | None",
) -> None:
    from quanterr.report import terminal

    if display.quiet:
        print(found.brief(), file=sys.stderr)
    elif not display.as_json:
        stream = sys.stderr if to_stderr else sys.stdout
        shown = view or found.view(display.top_layers)
        console = terminal.console(stream, display.colors)
        terminal.show(shown, console, terminal.Answer(*answer), display.verbose, not display.no_plot)
        stream.flush()
