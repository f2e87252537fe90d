"""The command line: arguments in, exit status out. Each command imports slow modules itself."""

import errno
import gc
import io
import os
import sys
import traceback
import warnings
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from quanterr.cli import (
    bench_formats,
    completion,
    diff,
    evaluate,
    gate,
    guide,
    images,
    plan,
    ppl,
    rank,
    settings,
    sweep,
)
from quanterr.cli.common import (
    TABLE_OPTIONS,
    Command,
    Display,
    Interrupt,
    ProgramGroup,
    announce,
    command_line,
    decide_status,
    deliver,
    guard_stdout,
    is_other_rank,
    require_memory,
    warn,
)
from quanterr.cli.next_steps import suggest_after_report, suggest_for_stored
from quanterr.cli.options import AllBut, Only, argument, with_options, wrap_help
from quanterr.errors import ElsewhereError, QuanterrError, Status, UsageError, is_out_of_memory
from quanterr.options import GATES, INPUTS, CompareOptions, Option, ReadOptions
from quanterr.util import strict_json
from quanterr.util.colors import paint, use_color
from quanterr.util.platform import is_closed_pipe
from quanterr.util.text import display, escape_text
from quanterr.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quanterr.documents.comparison.model import Report
    from quanterr.documents.document import Document
    from quanterr.formats.base import Format
    from quanterr.gates import PreparedRules
    from quanterr.outputs.files import Target
    from quanterr.outputs.sections import View

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


@app.command(cls=Command, rich_help_panel=FILES)
@with_options
def compare(
    options: CompareOptions,
    show: Display,
    original: Annotated[str | None, argument("ORIGINAL", "The checkpoint before quantization.")] = None,
    quantized: Annotated[str | None, argument("QUANTIZED", "The quantized checkpoint.")] = None,
    original_option: Annotated[str | None, Option("The same as ORIGINAL.", INPUTS, "PATH", "--original")] = None,
    quantized_option: Annotated[str | None, Option("The same as QUANTIZED.", INPUTS, "PATH", "--quantized")] = None,
    fail_fast: Annotated[
        bool,
        Option(
            "Stop at the first layer that violates a rule; the report is marked incomplete, and the exit status is 1.",
            GATES,
        ),
    ] = False,
    planned: Annotated[
        str | None,
        Option(
            "A plan.json of quanterr plan: each layer must match it in format, bits and SNR (within 0.5 dB).",
            GATES,
            "FILE",
            "--plan",
        ),
    ] = None,
) -> None:
    """Compare a quantized checkpoint with its original.

    \b
    [bold]quanterr compare orig.safetensors quant.safetensors[/bold]
    [bold]quanterr compare original-folder/ quantized-folder/ -l attn,mlp -o report.json[/bold]
    [bold]quanterr compare org/name quant.safetensors -q -o - | jq .aggregate.overall_snr_db[/bold]

    Each side is a .safetensors, .sft or .gguf file, a folder of shards, an index, or org/name in the local Hugging Face
    cache.

    Exit status: 0 compared completely; 1 a gate does not hold; 2 wrong usage; 3 an input is unreadable; 4 something was
    not compared, or the result is meaningless; 5 memory, device or disk; 70 a bug.
    """
    from quanterr.cli.opening import open_run
    from quanterr.gates import prepare
    from quanterr.gates.fail_fast import make_violation_check

    sides = _resolve_sides(original, quantized, original_option, quantized_option)
    to = show.targets([*sides, options.baseline, options.importance, options.sensitivity, planned])
    rules = prepare(options)
    violated = make_violation_check(rules.rules, next(iter(rules.before), None)) if fail_fast else None
    judge = _make_judge(rules, planned)
    announce(sides, show.quiet)
    with Interrupt() as interrupt:
        asked = replace(options, on_layer=interrupt.stop_at(violated) if violated else None)
        with open_run(sides, asked, interrupt, show.quiet) as (opened, asked):
            from quanterr.comparison import compare_each

            report = compare_each(opened[0], opened[1:], asked)[0]
        warn(report.findings)
        try:
            report = judge(report)
        except UsageError as error:  # such as a baseline of another original: keep the comparison
            _deliver(gate.mark_unjudged(report, error), to, show, Status.USAGE, "")
            raise
        status = decide_status(report, show.allow_partial, interrupt)
        _deliver(report, to, show, status, suggest_after_report(report, sides, command_line(), to))
        gate.report_verdict(report, quiet=show.quiet)  # the one line lists the gates that do not hold
        gate.summarize(report, options.baseline)
    raise typer.Exit(status)


def _resolve_sides(*given: str | None) -> tuple[str, str]:
    """Return the paths of original and quantized, each given as an argument or an option.

    Raises:
        UsageError: a side is missing or given twice.
    """
    *arguments, original, quantized = given
    left = [argument for argument in arguments if argument is not None]
    sides = [option if option is not None else left.pop(0) if left else None for option in (original, quantized)]
    if left:
        raise UsageError("a checkpoint is given twice, as an argument and as an option")
    if sides[0] is None or sides[1] is None:
        raise UsageError("two checkpoints are needed: quanterr compare ORIGINAL QUANTIZED (see --help)")
    return sides[0], sides[1]


def _make_judge(rules: "PreparedRules", planned: str | None) -> "Callable[[Report], Report]":
    """Return a function that judges a report by the rules and, if one is given, by the plan."""
    if planned is None:
        return rules.judge
    from quanterr.documents.plan.model import Plan
    from quanterr.documents.reading import read_stored
    from quanterr.gates.plan_check import check_against_plan

    plan = read_stored(planned, Plan)
    return lambda report: check_against_plan(rules.judge(report), plan)


def _deliver(report: "Report", to: "list[Target]", show: Display, status: int, next_step: str) -> None:
    from quanterr.documents.comparison.view import view

    shown = None if show.quiet or show.as_json else view(report, show.top, show.sort_by)
    deliver(report, to, show, status, next_step, shown)


app.command(cls=Command, rich_help_panel=FILES)(rank.rank)
app.command(cls=Command, rich_help_panel=ORIGINAL)(sweep.sweep)
app.command(cls=Command, rich_help_panel=ORIGINAL)(plan.plan)
app.command(cls=Command, rich_help_panel=RUNS)(evaluate.evaluate)
app.command(cls=Command, rich_help_panel=RUNS)(images.images)


@app.command(cls=Command, rich_help_panel=STORED)
@with_options
def render(
    stored: Annotated[str, argument("REPORT", "A JSON result written by -o FILE.json.")],
    show: Annotated[Display, Only(("outputs", "no_clobber", "quiet"))],
    to: Annotated[
        Literal["json", "jsonl", "csv", "html", "md", "junit"] | None,
        Option("json, jsonl, csv, html, md or junit. Default: chosen by the suffix of -o.", metavar="FORMAT"),
    ] = None,
    document: Annotated[
        str | None,
        Option(
            "Write the Markdown section into this document, between the comments <!-- quanterr:begin --> and "
            "<!-- quanterr:end -->.",
            metavar="FILE",
            flags="--update",
        ),
    ] = None,
    evaluation: Annotated[
        str | None,
        Option("An evaluation (JSON) of the same pair, to include in the page (-o report.html).", metavar="FILE"),
    ] = None,
    append: Annotated[bool, Option("With --update: append to a document that lacks these comments.")] = False,
) -> None:
    """Write other outputs of a stored report, ranking, evaluation or plan, without the models.

    \b
    [bold]quanterr render report.json -o report.html -o report.csv[/bold]
    [bold]quanterr render report.json --to md >> model-card.md[/bold]
    [bold]quanterr render report.json --update README.md --append[/bold]
    [bold]quanterr render plan.json -o plan.html[/bold]

    Prints the stored verdict on stderr and exits with 0 whatever it is. To fail on it, use quanterr gate.
    """
    from quanterr.documents.kinds import read_document
    from quanterr.outputs import OUTPUTS
    from quanterr.outputs.files import STDOUT, check_targets, update_section, write_output

    outputs, by_name = list(show.outputs), {output.name: output for output in OUTPUTS}
    if not to and not outputs and not document:
        raise UsageError("nothing to write: give --to html, -o report.html or --update README.md")
    if append and not document:
        raise UsageError("--append belongs to --update README.md: give both")
    if to and len(outputs) > 1:
        raise UsageError("--to is for one output; give several by their suffixes: -o report.html -o report.csv")
    given = outputs or ([STDOUT] if to else [])
    targeted = check_targets(given, [stored], by_name.get(to or ""), show.no_clobber)
    found = read_document(stored)
    page = None if evaluation is None else _view_with_evaluation(evaluation, found, targeted)
    with guard_stdout():
        if document:
            from quanterr.documents.evaluation.front_matter import put_front_matter
            from quanterr.documents.evaluation.model import Evaluation

            finish = partial(put_front_matter, evaluation=found) if isinstance(found, Evaluation) else None
            update_section(document, found, by_name["md"], append, finish)
        for target in targeted:
            more: dict[str, object] = {}
            if target.output.name == "html":
                more = {"view": page} if page else {"next_step": suggest_for_stored(found)}
            write_output(found, target, **more)
        print(found.brief(), file=sys.stderr)


def _view_with_evaluation(evaluation: str, report: "Document", to: "list[Target]") -> "View":
    """Return the view of a report that includes an evaluation of the same pair.

    Raises:
        UsageError: the document is not a report, or no output is a page.
    """
    from quanterr.documents.comparison.model import Report
    from quanterr.documents.comparison.view import view
    from quanterr.documents.evaluation.model import Evaluation
    from quanterr.documents.reading import read_stored
    from quanterr.outputs.page.rendering import TOP

    if not isinstance(report, Report):
        raise UsageError("--evaluation: only pages of a report of compare can include one")
    if not any(target.output.name == "html" for target in to):
        raise UsageError("--evaluation: only a page can include one; give -o report.html")
    return view(report, TOP, evaluation=read_stored(evaluation, Evaluation))


@app.command(cls=Command, rich_help_panel=FILES)
@with_options
def inspect(
    checkpoint: Annotated[str, argument("CHECKPOINT", "A file, a folder, an index or org/name.")],
    options: Annotated[ReadOptions, Only(("lenient",))],
    show: Annotated[Display, AllBut(("sort_by", "no_plot", "allow_partial", "top_layers"))],
    hardware: Annotated[
        str | None,
        Option(
            "Show how many tokens per second this memory bandwidth allows: H100, 4090, M3-max, 900GB/s.",
            metavar="NAME|GB/s",
        ),
    ] = None,
    values: Annotated[
        bool,
        Option("Read every weight once: NaN and infinity, zeros, repetitions, wrong scales, unused codes."),
    ] = False,
    verify: Annotated[
        bool,
        Option("Compare the SHA-256 of each file with the one that the Hugging Face hub states: hf://, downloads."),
    ] = False,
) -> None:
    """List a checkpoint's formats, sizes, bits per weight and problems. Reads headers only, unless asked for more.

    Exit status: 0 no error was found; 2 wrong usage; 3 an input is unreadable; 4 a weight is in no readable format, or
    another error was found; 5 memory or disk.
    """
    from quanterr.checkpoints import open_checkpoint
    from quanterr.util.hardware import bandwidth_of

    if hardware is not None:
        bandwidth_of(hardware)  # raises before torch is imported
    to = show.targets([checkpoint])
    announce([checkpoint], quiet=show.quiet or show.as_json)
    require_memory()
    with open_checkpoint(checkpoint, options.lenient) as found:
        from quanterr.inspection import inspect as run

        inspection = run(found, hardware=hardware, command=command_line(), values=values, verify=verify)
    warn(inspection.findings)
    deliver(inspection, to, show)
    if inspection.problems:
        raise typer.Exit(Status.INCONCLUSIVE)


@app.command(cls=Command, rich_help_panel=HELP)
@with_options
def formats(
    show: Annotated[Display, TABLE_OPTIONS],
    name: Annotated[
        str | None,
        typer.Argument(
            help="The format whose specification to print.", show_default=False, autocompletion=completion.formats
        ),
    ] = None,
    recipes: Annotated[bool, Option("List the recipes of sweep, plan and --against.")] = False,
) -> None:
    """List the supported formats, or print the specification of one."""
    require_memory()
    if recipes:
        _list_recipes(show.as_json)
        return
    from quanterr.formats import FORMATS

    colored = use_color(sys.stdout, show.colors)
    if name is None:
        _list_formats(FORMATS, show.as_json, colored)
        return
    found = next((row for row in FORMATS if row.name == name), None)
    if found is None:
        names = [row.name for row in FORMATS]
        held = sorted((known for known in names if name in known), key=lambda known: not known.startswith(name))
        near = list(dict.fromkeys([*held, *get_close_matches(name, names)]))
        description = f"did you mean {', '.join(near)}?" if name and near else f"formats are {', '.join(names)}"
        raise UsageError(f"no format named {display(name)}; {description}")
    if show.as_json:
        print(strict_json.dumps({**_format_fields(found), "specification": found.specification.strip()}, indent=1))
        return
    title = paint(found.name, "strong", colored)
    print(f"{title}: {found.summary}\nneeds {found.stated_needs}\n\n{found.specification.strip()}")


def _list_recipes(as_json: bool) -> None:
    from quanterr.recipes import list_recipes

    found = list_recipes()
    if as_json:
        print(strict_json.dumps(found, indent=1))
        return
    for name, summary in found.items():
        print(f"{name:<16}{summary}")
    print("\nOther numbers in names work, too. Options: :scales=absmax|mse|p99.9|ema, :asym, :double.")


def _list_formats(formats: "Sequence[Format]", as_json: bool, colored: bool) -> None:
    if as_json:
        print(strict_json.dumps([_format_fields(row) for row in formats], indent=1))
        return
    width = max(len(row.name) for row in formats)
    for row in formats:
        needs = paint(row.stated_needs, "faint", colored)
        print(f"{paint(f'{row.name:{width}}', 'strong', colored)}  {row.summary}\n{'':{width}}    {needs}")


def _format_fields(row: "Format") -> dict[str, str]:
    return {"name": row.name, "summary": row.summary, "needs": row.stated_needs}


app.command(cls=Command, rich_help_panel=STORED)(gate.gate)
app.command(cls=Command, rich_help_panel=STORED)(diff.diff)
app.command(cls=Command, rich_help_panel=HELP)(guide.guide)
app.command(cls=Command, rich_help_panel=HELP)(guide.explain)
app.command(cls=Command, rich_help_panel=ADVANCED)(ppl.ppl)
app.command("bench-formats", cls=Command, rich_help_panel=ADVANCED)(bench_formats.bench_formats)


@app.command(cls=Command, rich_help_panel=HELP)
def schema(
    kind: Annotated[
        Literal["report", "ranking", "evaluation", "plan", "inspection", "images"],
        typer.Argument(help="The kind of document."),
    ] = "report",
) -> None:
    """Print the JSON Schema of a report, a ranking, an evaluation or a plan."""
    import json

    from quanterr.documents.kinds import KINDS

    print(json.dumps(KINDS[f"quanterr.{kind}"].model.json_schema(), indent=2))


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
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # from torch without numpy
    status = _run_app()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        status = Status.BROKEN_PIPE if is_closed_pipe(error) else Status.ENVIRONMENT
    os._exit(status)


def _run_app() -> int:
    """Run the app and return the exit status; the one place that turns errors into statuses."""
    try:
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
        return error.status
    except Exception as error:  # an exit status of 1 would read as "a gate failed"
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
