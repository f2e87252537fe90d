"""Helpers that commands share: display options, signals, progress, standard output."""

import importlib
import logging
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from quanterr.cli.options import AllBut, Only, argument
from quanterr.errors import Interrupted, ResourceError, Status, UsageError
from quanterr.options import OUTPUT, SELECTION, CheckedOptions, Option
from quanterr.util.addresses import host_of, strip_credentials
from quanterr.util.platform import is_closed_pipe, limit_of_memory
from quanterr.util.processes import count_unconnected_tasks, this_process
from quanterr.util.text import escape_surrogates, size
from quanterr.util.waiting import allow_stop, notices

if TYPE_CHECKING:
    from types import FrameType

    from quanterr.documents.base import Finding
    from quanterr.documents.comparison.layer import Layer
    from quanterr.documents.comparison.model import Report
    from quanterr.documents.document import Result
    from quanterr.documents.ranking.model import Ranking
    from quanterr.outputs import Output
    from quanterr.outputs.files import Target
    from quanterr.outputs.sections import View

TOP_LAYERS = 10  # in tables, by default
ROOM = 256 * 2**20  # bytes that a small comparison needs besides torch
LOADING = 60  # limit for loading torch, in seconds of processor time; it usually takes 2 to 4


Color = Literal["auto", "always", "never"]


class _PlainSwitches:
    """Clears the metavar of switches, for which typer's help would print <bool>."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc] # of TyperCommand or TyperGroup
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_PlainSwitches, TyperCommand):
    """A command whose help shows switches without a metavar."""


class ProgramGroup(_PlainSwitches, TyperGroup):
    """The whole program, whose help shows switches without a metavar."""


@dataclass(frozen=True, kw_only=True)
class Display(CheckedOptions):
    """Output options: where a result goes, and how it is shown."""

    as_json: Annotated[bool, Option("JSON on stdout instead of tables.", OUTPUT, flags="--json")] = False
    outputs: Annotated[
        Iterable[str],
        Option(
            "Write the result here, in the format of the suffix (.json .jsonl .csv .html .md .xml); - is JSON on "
            "stdout. Repeatable.",
            OUTPUT,
            "FILE",
            "--output-report -o",
        ),
    ] = ()
    no_clobber: Annotated[bool, Option("Do not overwrite existing files.", OUTPUT)] = False
    top_layers: Annotated[
        int | None, Option("Show tables, as -v does, with N layers; 10 by default.", OUTPUT, "N", least=0)
    ] = None
    sort_by: Annotated[
        Literal["snr", "mae", "relative", "max"], Option("Metric that ranks the worst layers.", OUTPUT)
    ] = "snr"
    no_plot: Annotated[bool, Option("Do not draw maps and curves.", OUTPUT)] = False
    color: Annotated[Color, Option("When to use colours.", OUTPUT)] = "auto"
    no_color: Annotated[bool, Option("The same as --color never.", OUTPUT)] = False
    quiet: Annotated[
        bool, Option("Print only the verdict, on stderr; no tables, no progress.", OUTPUT, flags="--quiet -q")
    ] = False
    verbose: Annotated[
        bool,
        Option("Show tables, maps, all findings, and how each format was recognized.", OUTPUT, flags="--verbose -v"),
    ] = False
    allow_partial: Annotated[
        bool, Option("Exit 0 even if something was not compared; the verdict stays inconclusive.", SELECTION)
    ] = False

    @property
    def top(self) -> int:
        """The number of layers in tables."""
        return TOP_LAYERS if self.top_layers is None else self.top_layers

    @property
    def colors(self) -> Color:
        """The choice of ``--color`` and ``--no-color`` combined."""
        return "never" if self.no_color else self.color

    def targets(
        self, inputs: Iterable[str | PathLike[str] | None], outputs: "Sequence[Output] | None" = None
    ) -> "list[Target]":
        """Return the places to write to, checked before any work. An input may be None.

        Raises:
            UsageError: an unknown suffix, a place given twice, a missing folder, or an output that is an input.
        """
        from quanterr.outputs import OUTPUTS
        from quanterr.outputs.files import check_targets

        given = [fspath(path) for path in inputs if path is not None]
        return check_targets(list(self.outputs), given, no_clobber=self.no_clobber, outputs=outputs or OUTPUTS)


TABLE_OPTIONS = Only(("as_json", "color", "no_color"))
RESULT_OPTIONS = AllBut(("sort_by", "no_plot"))  # for rankings, plans and evaluations

Original = Annotated[str, argument("ORIGINAL", "The checkpoint before quantization.")]


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


def require_memory() -> None:
    """Try to load torch in a child process if the address space is limited (``ulimit -v``).

    A library that runs out of memory ends its process with any status; 1 would read as "a gate failed".

    Raises:
        ResourceError: the limit is too low to load torch.
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
    """End this process, with status 0 if torch can be loaded and leaves ``ROOM`` bytes.

    Processor time is limited because an import without enough memory can loop forever.
    """
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (LOADING, LOADING))
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        importlib.import_module("torch")
        mmap.mmap(-1, ROOM).close()
    except BaseException:  # the child must never return into the program
        os._exit(1)
    os._exit(0)


def command_line() -> list[str]:
    """Return the words of the command line without credentials, for the report."""
    return ["quanterr", *(escape_surrogates(strip_credentials(word)) for word in sys.argv[1:])]


def warn(findings: "Iterable[Finding]") -> None:
    """Print findings about non-standard files on stderr, as nobody may read the report."""
    from quanterr.findings.files import NOTE
    from quanterr.outputs.formatting import sentence

    for message in dict.fromkeys(sentence(found.message) for found in findings if found.code == NOTE):
        print(f"quanterr: warning: {message}", file=sys.stderr)


def is_other_rank() -> bool:
    """Return True in each process of a distributed run except rank 0, which alone prints and writes."""
    with suppress(UsageError):  # the run itself raises it
        return this_process().rank > 0
    return False


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


@contextmanager
def guard_stdout() -> Iterator[None]:
    """Exit with ``Status.BROKEN_PIPE`` if the pipe of standard output is closed.

    Raises:
        ResourceError: standard output cannot be written, such as on a full disk.
    """
    try:
        yield
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that no flush fails at exit
        if is_closed_pipe(error):
            raise typer.Exit(Status.BROKEN_PIPE) from error
        raise ResourceError(f"standard output: {error.strerror}") from error


def deliver(
    found: "Result",
    to: "Sequence[Target]",
    display: Display,
    status: int | None = None,
    next_step: str = "",
    view: "View | None" = None,
) -> None:
    """Write a document to its files, print its tables, then write it to standard output if a target or --json says so.

    Args:
        found: the document.
        to: the outputs to write.
        display: how to print it; with ``quiet``, one line on stderr.
        status: the exit status, shown below the tables.
        next_step: the command to propose below the tables and on the page.
        view: printed instead of the document's default view.

    Files come first, so that a closed pager costs no result; tables are printed even if a file cannot be written.
    Tables go to stderr if the document goes to standard output.
    """
    documents = [target for target in to if target.path is None]
    wrote: list[str] = []
    with guard_stdout():
        try:
            for target in to:
                if target.path is not None:
                    _write(found, target, next_step)
                    wrote.append(str(target.path))
        finally:
            _print_result(found, display, bool(documents), (status, wrote, next_step), view)
        for target in documents:
            _write(found, target, next_step)
        if display.as_json and not documents:
            found.write_json(sys.stdout)
            sys.stdout.flush()


def _write(found: "Result", target: "Target", next_step: str) -> None:
    """Write an output; pages show the proposed command, too."""
    from quanterr.outputs.files import write_output

    write_output(found, target, **({"next_step": next_step} if target.output.name == "html" else {}))


def _print_result(
    found: "Result", display: Display, to_stderr: bool, answer: tuple[int | None, list[str], str], view: "View | None"
) -> None:
    if display.quiet:
        print(found.brief(), file=sys.stderr)
    elif not display.as_json:
        from quanterr.outputs import terminal

        stream = sys.stderr if to_stderr else sys.stdout
        shown = view or found.view(display.top)
        tables = display.verbose or display.top_layers is not None
        console = terminal.console(stream, display.colors)
        terminal.show(shown, console, terminal.Outcome(*answer), tables, not display.no_plot)
        stream.flush()
