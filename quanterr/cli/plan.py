"""``quanterr plan``: choose a recipe for each layer under a budget."""

import shlex
import sys
from dataclasses import replace
from os import fspath
from typing import TYPE_CHECKING, Annotated

from quanterr.cli.completion import PROGRAMS
from quanterr.cli.display import Display, deliver, guard_stdout, write_result
from quanterr.cli.interrupt import Interrupt
from quanterr.cli.next_steps import suggest_after_plan
from quanterr.cli.notices import announce
from quanterr.cli.options import AllBut, Original, with_options
from quanterr.cli.process import command_line
from quanterr.errors import UsageError
from quanterr.options import OUTPUT, Option, PlanOptions
from quanterr.util.text import display

if TYPE_CHECKING:
    from quanterr.documents.plan.model import Plan


@with_options
def plan(
    original: Original,
    options: Annotated[PlanOptions, AllBut(("outlier_threshold",))],
    show: Annotated[Display, AllBut(("sort_by", "no_plot", "allow_partial"))],
    export: Annotated[
        str | None,
        Option(
            "Print the plan for this program instead of tables, or write a shell script with -o FILE.sh: "
            f"{', '.join(PROGRAMS[:-1])} or {PROGRAMS[-1]}.",
            OUTPUT,
            "PROGRAM",
            words="programs",
        ),
    ] = None,
) -> None:
    """Choose a recipe for each layer: the least error within a budget, measured on the real weights.

    \b
    [bold]quanterr plan original/ --size 6GiB --sensitivity s.json[/bold]
    [bold]quanterr plan original/ --bits 4.5 --to gguf_q4_k,gguf_q6_k,gguf_q8_0 --export llama-quantize -o run.sh[/bold]
    [bold]quanterr plan original/ --max-kld 0.01 --sensitivity s.json --measure --text heldout.txt -o plan.json[/bold]
    [bold]quanterr compare original/ produced/ --plan plan.json[/bold]

    Layers that runtimes fuse (q k v; gate up; the experts of a block) share a recipe. The result bounds how much better
    any other plan could be. Without --sensitivity (from quanterr evaluate --sensitivity-out), all squared errors count
    alike, which is a guess. --measure measures the plan's divergence on a text; --max-kld then bounds the measured
    value.

    Exit status: 0 planned; 2 wrong usage, or a budget that cannot be met; 3 an input is unreadable; 5 memory or device.
    """
    from quanterr.cli.opening import open_run
    from quanterr.outputs import OUTPUTS, Output
    from quanterr.planning.goals import parse_goal

    parse_goal(options)  # raises before torch is imported
    script = Output("sh", ".sh", "a shell script for the program of --export", "quanterr.planning.exports")
    if export is None and any(fspath(path).lower().endswith(script.suffix) for path in show.outputs):
        raise UsageError(f"-o FILE{script.suffix} is a script for a program; name it: --export {' or '.join(PROGRAMS)}")
    outputs = OUTPUTS if export is None else (*OUTPUTS, script)
    to = show.targets([original, options.importance, options.sensitivity], outputs)
    scripts = [target for target in to if target.output is script]
    documents = [target for target in to if target.output is not script]
    announce([original], show.quiet)
    with Interrupt(keeps=False) as interrupt:
        silent = show.quiet or export is not None
        with open_run([original], options, interrupt, silent) as ((checkpoint,), asked):
            from quanterr.planning.exports import CONSUMERS, check_consumer, list_writable
            from quanterr.planning.run import plan_layers

            check_consumer(export)
            for target in documents if scripts else ():
                if target.path is not None and target.path.name == CONSUMERS[str(export)].file:
                    raise UsageError(
                        f"-o {display(str(target.path))}: the script writes the file for {export} under this name; "
                        "choose another"
                    )
            if export is not None and not options.to:
                asked = replace(asked, to=list_writable(export))
                if not show.quiet:
                    print(f"quanterr: plans with what {export} writes: {', '.join(asked.to)}", file=sys.stderr)
            result = plan_layers(checkpoint, asked)
        if export is None or scripts:
            deliver(result, documents, show, next_step="" if export else suggest_after_plan(result, command_line()))
            for target in scripts:
                write_result(result, target, program=export)
                if not show.quiet:
                    print(f"quanterr: run: {shlex.join(['sh', str(target.path)])}", file=sys.stderr)
            return
        for target in documents:  # before the export, which a program may refuse
            write_result(result, target)
        _print_export(result, export, show.quiet)


def _print_export(plan: "Plan", program: str, quiet: bool) -> None:
    """Print a plan for a program, and on stderr how to use it."""
    from quanterr.outputs.formatting import MAX_SENTENCE_LENGTH
    from quanterr.planning.exports import CONSUMERS, export_command, export_plan

    text = export_plan(plan, program)
    with guard_stdout():
        print(text, end="", flush=True)
    if not quiet and (how := export_command(plan, program)):
        print(
            f"quanterr: save as {CONSUMERS[program].file} and run: {display(how, MAX_SENTENCE_LENGTH)}", file=sys.stderr
        )
