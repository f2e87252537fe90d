"""Runs the command line and returns its exit status. Each command imports slow modules itself."""

import errno
import gc
import io
import os
import sys
import traceback
import warnings
from contextlib import suppress
from typing import Annotated, Any

import typer

from quanterr.cli import (
    bench_formats,
    compare,
    dequantize,
    diff,
    evaluate,
    formats,
    gate,
    guide,
    images,
    inspect,
    plan,
    ppl,
    rank,
    render,
    settings,
    sweep,
    verify,
)
from quanterr.cli.display import write_failures
from quanterr.cli.options import Command, ProgramGroup, wrap_help
from quanterr.cli.process import is_other_rank
from quanterr.errors import ElsewhereError, QuanterrError, Status, UsageError
from quanterr.util.memory import is_out_of_memory, require_memory
from quanterr.util.platform import is_closed_pipe
from quanterr.util.text import escape_text
from quanterr.version import __version__

PARSER_MEMORY = 4 << 20  # bytes
# The exception that typer raises for a wrong command line: from click, or from typer's own copy of click.
USAGE_ERROR: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    cls=ProgramGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help=wrap_help("""Measure how far a quantized model checkpoint (.safetensors, .gguf, folders of shards) is from its
original, layer by layer.

\b
[bold]quanterr compare original.safetensors quantized.safetensors -o report.html[/bold]
[bold]quanterr rank original-folder/ fp8.safetensors int8.safetensors q4_k.gguf[/bold]
[bold]quanterr inspect quantized.gguf[/bold]
"""),
)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    typer.echo(f"quanterr {__version__}")
    if {"-v", "--verbose"} & set(sys.argv):  # typer has not parsed -v yet if it comes after --version
        import platform
        from importlib.metadata import PackageNotFoundError, version

        from quanterr.kernel.library import choose_kernel, read_record

        choice = choose_kernel()
        typer.echo(f"kernel: {choice}{f' ({choice.reason})' if choice.reason else ''}")
        for line in read_record().splitlines():
            typer.echo(f"  {line}")
        typer.echo(f"Python {platform.python_version()}, {platform.platform()}")
        for name in ("torch", "safetensors", "msgspec", "typer", "transformers"):
            with suppress(PackageNotFoundError):
                typer.echo(f"{name} {version(name)}")
    raise typer.Exit


# Headings of the list of commands.
FILES, ORIGINAL, RUNS = "You have both files", "You have only the original", "Does it still work?"
STORED, HELP, ADVANCED = "You have stored results", "Explanations", "Advanced"


@app.callback()
def _set_defaults(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="With --version: show the kernel, how it was compiled, and library versions."
        ),
    ] = False,
) -> None:
    context.default_map = settings.read_defaults(context)


for heading, command in (
    (FILES, compare.compare),
    (FILES, rank.rank),
    (ORIGINAL, sweep.sweep),
    (ORIGINAL, plan.plan),
    (RUNS, evaluate.evaluate),
    (RUNS, images.images),
    (STORED, render.render),
    (FILES, inspect.inspect),
    (FILES, dequantize.dequantize),
    (HELP, formats.formats),
    (STORED, gate.gate),
    (STORED, diff.diff),
    (STORED, verify.verify),
    (HELP, guide.guide),
    (HELP, guide.explain),
    (ADVANCED, ppl.ppl),
    (ADVANCED, bench_formats.bench_formats),
    (HELP, formats.schema),
):
    app.command(cls=Command, rich_help_panel=heading)(command)


class _Stderr(io.TextIOWrapper):
    """A standard error stream that drops its output once a write fails; the exit status still reports the result."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            return len(text)


def _prepare_streams() -> None:
    """Escape characters that the encoding lacks as ``\\uNNNN``; replace closed streams by the null device."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the end of the program
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    else:
        sys.stderr = _Stderr(sys.stderr.buffer, sys.stderr.encoding, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def main() -> None:
    """Run the command and exit at once: an orderly shutdown of torch would take another 0.4 s."""
    _prepare_streams()
    gc.disable()  # a command frees little before its end, and its many small objects make each collection slow
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch says so without numpy
    status = _run_app()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        status = Status.BROKEN_PIPE if is_closed_pipe(error) else Status.ENVIRONMENT
    os._exit(status)


def _run_app() -> int:
    """Run the app and return the exit status; only this function turns errors into statuses."""
    try:
        require_memory(PARSER_MEMORY)
        status = app(prog_name="quanterr", standalone_mode=False)
        return status if isinstance(status, int) else Status.OK
    except USAGE_ERROR as error:
        return _print_usage_error(error)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer and rich exit with 1 on a broken pipe
            return Status.BROKEN_PIPE
        return end.code if isinstance(end.code, int) else Status.OK if end.code is None else Status.GATE_FAILED
    except KeyboardInterrupt:  # outside Interrupt, before or after the work
        return Status.INTERRUPTED
    except QuanterrError as error:
        # All ranks raise the same usage errors; only rank 0 prints them.
        if not isinstance(error, ElsewhereError) and not (isinstance(error, UsageError) and is_other_rank()):
            print(f"quanterr: {escape_text(str(error))}", file=sys.stderr)
        write_failures(str(error), error.status)
        return error.status
    except Exception as error:  # an exit status of 1 would read as "a gate failed"
        status = _report_crash(error)
        write_failures(str(error) or type(error).__name__, status)
        return status


def _report_crash(error: Exception) -> Status:
    """Print an error that quanterr does not raise itself: a lack of memory, of disk or of torch, or a bug."""
    if is_out_of_memory(error):
        why = f" ({escape_text(str(error))})" if str(error) else ""
        print(f"quanterr: out of memory{why}: the run needs more than is available or allowed", file=sys.stderr)
        return Status.ENVIRONMENT
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        print(f"quanterr: {error.strerror}", file=sys.stderr)
        return Status.ENVIRONMENT
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        print("quanterr: this command needs torch, which is not installed: pip install torch", file=sys.stderr)
        return Status.ENVIRONMENT
    print(escape_text(traceback.format_exc()), file=sys.stderr)
    print("quanterr: this is a bug in quanterr; please report it with the lines above", file=sys.stderr)
    return Status.BUG


def _print_usage_error(error: Any) -> int:
    """Print the error in one line; without arguments, typer raises its help as an error: print that."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return Status.USAGE
    what = " ".join(error.format_message().split()).replace("Value error, ", "").rstrip(".")
    command = getattr(getattr(error, "ctx", None), "command_path", "quanterr")
    print(f"quanterr: {escape_text(what)} (see {command} --help)", file=sys.stderr)
    return Status.USAGE
