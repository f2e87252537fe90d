"""Output options, and the delivery of results: to files, to the terminal, to standard output."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from quanterr.cli.options import AllBut, Only
from quanterr.cli.process import is_other_rank
from quanterr.errors import ResourceError, Status
from quanterr.options import OUTPUT, SELECTION, CheckedOptions, Option
from quanterr.util.platform import is_closed_pipe
from quanterr.util.text import escape_text

if TYPE_CHECKING:
    from quanterr.documents.document import Result
    from quanterr.outputs import Output
    from quanterr.outputs.files import Target
    from quanterr.outputs.sections import View

TOP_LAYERS = 10  # number of layers that tables show by default
FAILURE_STATUSES = (Status.UNREADABLE, Status.ENVIRONMENT, Status.BUG)  # after wrong usage, old reports stay
Color = Literal["auto", "always", "never"]


@dataclass(frozen=True, kw_only=True)
class Display(CheckedOptions):
    """Output options: where a result goes, and how it is shown."""

    as_json: Annotated[bool, Option("JSON on stdout instead of tables.", OUTPUT, flags="--json")] = False
    outputs: Annotated[
        Iterable[str],
        Option(
            "Write the result here, in the format of the suffix (.json .jsonl .csv .html .md .xml; of candidates also "
            ".svg .png); - is JSON on stdout.",
            OUTPUT,
            "FILE",
            "--output-report -o",
        ),
    ] = ()
    no_clobber: Annotated[bool, Option("Do not overwrite existing files.", OUTPUT, rare=True)] = False
    top_layers: Annotated[
        int | None, Option("Show tables, as -v does, with N layers; 10 by default.", OUTPUT, "N", minimum=0)
    ] = None
    sort_by: Annotated[
        Literal["snr", "mae", "relative", "max"], Option("Metric that ranks the worst layers.", OUTPUT, rare=True)
    ] = "snr"
    no_plot: Annotated[bool, Option("Do not draw maps and curves.", OUTPUT, rare=True)] = False
    color: Annotated[Color, Option("When to use colours.", OUTPUT, rare=True)] = "auto"
    no_color: Annotated[bool, Option("The same as --color never.", OUTPUT, rare=True)] = False
    quiet: Annotated[
        bool, Option("Print only the verdict, on stderr; no tables, no progress.", OUTPUT, flags="--quiet -q")
    ] = False
    verbose: Annotated[
        bool,
        Option("Show tables, maps, all findings, and how each format was recognized.", OUTPUT, flags="--verbose -v"),
    ] = False
    allow_partial: Annotated[
        bool,
        Option(
            "Exit 0 even if something was not compared, unless damage was found; the verdict stays inconclusive.",
            SELECTION,
        ),
    ] = False

    @property
    def top(self) -> int:
        """The number of layers in tables."""
        return TOP_LAYERS if self.top_layers is None else self.top_layers

    @property
    def colors(self) -> Color:
        """The choice of ``--color`` and ``--no-color`` combined."""
        return "never" if self.no_color else self.color

    def targets(self, inputs: Iterable[object], outputs: "Sequence[Output] | None" = None) -> "list[Target]":
        """Return the files and streams to write to, checked before the run. Inputs that are not paths are not checked.

        Raises:
            UsageError: an unknown suffix, standard output given twice, or an output that is or lies in an input.
            ResourceError: a folder is missing or not writable, or a file exists despite ``no_clobber``.
        """
        from quanterr.outputs import OUTPUTS
        from quanterr.outputs.files import check_targets

        input_paths = [fspath(path) for path in inputs if isinstance(path, str | PathLike)]
        _awaited_targets[:] = check_targets(
            list(self.outputs), input_paths, no_clobber=self.no_clobber, outputs=outputs or OUTPUTS
        )
        return list(_awaited_targets)


_awaited_targets: list["Target"] = []  # requested outputs of which none holds a result of this run yet


def write_result(result: object, target: "Target", **more: object) -> None:
    """Write a result to a target, as :func:`quanterr.outputs.files.write_output` does."""
    from quanterr.outputs.files import write_output

    write_output(result, target, **more)
    if target in _awaited_targets:
        _awaited_targets.remove(target)


def write_failures(message: str, status: int) -> None:
    """Write an error to each requested output without a result: an older result could pass for this run's."""
    if not _awaited_targets or status not in FAILURE_STATUSES or is_other_rank():
        return
    from quanterr.outputs.failure import write_failure

    for target in _awaited_targets:
        with suppress(ResourceError):  # the error that is reported may be the full disk
            write_failure(target, escape_text(message), status)


TABLE_OPTIONS = Only(("as_json", "color", "no_color"))
RESULT_OPTIONS = AllBut(("sort_by", "no_plot"))  # options for rankings, plans and evaluations


@contextmanager
def guard_stdout() -> Iterator[None]:
    """Exit with ``Status.BROKEN_PIPE`` if the pipe of standard output is closed.

    Raises:
        ResourceError: standard output cannot be written, such as on a full disk.
    """
    try:
        yield
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise a flush would fail at exit
        if is_closed_pipe(error):
            raise typer.Exit(Status.BROKEN_PIPE) from error
        raise ResourceError(f"standard output: {error.strerror}") from error


def deliver(
    document: "Result",
    to: "Sequence[Target]",
    display: Display,
    status: int | None = None,
    next_step: str = "",
    view: "Callable[[Any, Display], View] | None" = None,
) -> None:
    """Write a document to its files, print its tables, then write it to standard output if a target or --json asks it.

    Args:
        found: the document.
        to: the outputs to write.
        display: how to print it; with ``quiet``, one line on stderr.
        status: the exit status, shown below the tables.
        next_step: the command to propose below the tables and on the page.
        view: makes the view to print, if it is not the document's default one.

    Files come first, so that a closed pager costs no result; tables are printed even if a file cannot be written.
    Tables go to stderr if the document goes to standard output.
    """
    more = {"html": {"next_step": next_step}}  # keywords of outputs
    to_stdout = [target for target in to if target.path is None]
    wrote: list[str] = []
    with guard_stdout():
        try:
            for target in to:
                if target.path is not None:
                    write_result(document, target, **more.get(target.output.name, {}))
                    wrote.append(str(target.path))
        finally:
            if display.quiet:
                print(document.brief(), file=sys.stderr)
            elif not display.as_json:
                from quanterr.outputs import terminal

                stream = sys.stderr if to_stdout else sys.stdout
                tables = display.verbose or display.top_layers is not None
                shown: View = document.view(display.top) if view is None else view(document, display)
                outcome = terminal.Outcome(status, wrote, next_step)
                console = terminal.make_console(stream, display.colors)
                terminal.show(shown, console, outcome, tables, not display.no_plot)
                stream.flush()
        for target in to_stdout:
            write_result(document, target, **more.get(target.output.name, {}))
        if display.as_json and not to_stdout:
            document.write_json(sys.stdout)
            sys.stdout.flush()
