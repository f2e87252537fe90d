"""``quanterr compare``: compare a quantized checkpoint with its original."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from quanterr.cli.display import Display, deliver
from quanterr.cli.interrupt import Interrupt, decide_status
from quanterr.cli.next_steps import suggest_after_report
from quanterr.cli.notices import announce, warn
from quanterr.cli.options import argument, with_options
from quanterr.cli.process import command_line
from quanterr.cli.verdicts import report_verdict, summarize
from quanterr.errors import Status, UnjudgedError, UsageError
from quanterr.options import GATES, INPUTS, CompareOptions, Option

if TYPE_CHECKING:
    from quanterr.documents.comparison.model import Report
    from quanterr.outputs.sections import View


@with_options
def compare(
    options: CompareOptions,
    show: Display,
    original: Annotated[str | None, argument("ORIGINAL", "The checkpoint before quantization.")] = None,
    quantized: Annotated[str | None, argument("QUANTIZED", "The quantized checkpoint.")] = None,
    original_option: Annotated[
        str | None, Option("The same as ORIGINAL.", INPUTS, "PATH", "--original", rare=True)
    ] = None,
    quantized_option: Annotated[
        str | None, Option("The same as QUANTIZED.", INPUTS, "PATH", "--quantized", rare=True)
    ] = None,
    fail_fast: Annotated[
        bool,
        Option(
            "Stop at the first layer that violates a rule; the report is marked incomplete, and the exit status is 1.",
            GATES,
            rare=True,
        ),
    ] = False,
    planned: Annotated[
        str | None,
        Option(
            "A plan.json of quanterr plan: each layer must match it in format, bits and SNR (at most 0.5 dB less; 1 dB "
            "for 8-bit integers).",
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

    Each side is a .safetensors, .sft, .gguf, .onnx, .bin, .pt, .pth or .ckpt file, a folder of shards, an index, or
    org/name in the local Hugging Face cache.

    Exit status: 0 compared completely; 1 a gate does not hold; 2 wrong usage; 3 an input is unreadable; 4 something was
    not compared, or the result is meaningless; 5 memory, device or disk; 70 a bug.
    """
    from quanterr.cli.opening import open_run
    from quanterr.documents.plan.model import Plan
    from quanterr.documents.reading import read_stored
    from quanterr.findings.runtimes.judging import choose_runtimes
    from quanterr.gates import prepare
    from quanterr.gates.fail_fast import make_violation_check
    from quanterr.outputs import OUTPUTS, STATEMENT

    sides = _resolve_sides(original, quantized, original_option, quantized_option)
    inputs = [*sides, options.baseline, options.importance, options.sensitivity, planned]
    to = show.targets(inputs, (*OUTPUTS, STATEMENT))
    if not options.every_code and any(target.output is STATEMENT for target in to):
        raise UsageError(f"-o FILE{STATEMENT.suffix}: a statement of origin needs --every-code")
    rules = prepare(options)
    choose_runtimes([*options.runtimes, *rules.runtimes])  # raises before torch is imported
    violated = make_violation_check(rules.rules, next(iter(rules.before), None)) if fail_fast else None
    plan = None if planned is None else read_stored(planned, Plan)
    announce(sides, show.quiet)
    with Interrupt() as interrupt:
        asked = replace(options, on_layer=interrupt.stop_at(violated)) if violated else options
        try:
            with open_run(sides, asked, interrupt, show.quiet) as (opened, asked):
                from quanterr.comparison import compare_pair

                report = compare_pair(opened[0], opened[1], asked, rules, plan)
        except UnjudgedError as error:
            warn(error.document.findings)
            deliver(error.document, to, show, Status.USAGE, view=_make_view)
            raise
        warn(report.findings)
        if not report.complete:  # a statement must not be written for tensors that the run did not reach
            to = [target for target in to if target.output is not STATEMENT]
        status = decide_status(report, show.allow_partial, interrupt)
        deliver(report, to, show, status, suggest_after_report(report, sides, command_line(), to), _make_view)
        report_verdict(report, quiet=show.quiet)  # the one line lists the gates that do not hold
        summarize(report, options.baseline)
    raise typer.Exit(status)


def _make_view(report: "Report", show: Display) -> "View":
    from quanterr.views.comparison.view import view

    return view(report, show.top, show.sort_by)


def _resolve_sides(*paths: str | None) -> tuple[str, str]:
    """Return the paths of original and quantized, each given as an argument or an option.

    Raises:
        UsageError: a side is missing or given twice.
    """
    *arguments, original, quantized = paths
    left = [argument for argument in arguments if argument is not None]
    sides = [option if option is not None else left.pop(0) if left else None for option in (original, quantized)]
    if left:
        raise UsageError("a checkpoint is given twice, as an argument and as an option")
    if sides[0] is None or sides[1] is None:
        raise UsageError("two checkpoints are needed: quanterr compare ORIGINAL QUANTIZED (see --help)")
    return sides[0], sides[1]
