"""``quanterr plan``: choose a recipe for each layer under a budget."""

import sys
from dataclasses import replace
from typing import Annotated

import typer

from quanterr.cli.common import (
    Display,
    Interrupt,
    Original,
    announce,
    command_line,
    deliver,
    guard_stdout,
    require_memory,
    show_progress,
    wrap_help,
)
from quanterr.cli.completion import PROGRAMS, programs
from quanterr.cli.next_steps import suggest_after_plan
from quanterr.cli.options import AllBut, with_options
from quanterr.options import OUTPUT, PlanOptions
from quanterr.util.text import display

HELP = wrap_help("""Choose a recipe for each layer: the least error within a budget, measured on the real weights.

\b
[bold]quanterr plan original/ --size 6GiB --sensitivity s.json[/bold]
[bold]quanterr plan original/ --bits 4.5 --to gguf_q4_k,gguf_q6_k,gguf_q8_0 --export llama-quantize[/bold]
[bold]quanterr plan original/ --max-kld 0.01 --sensitivity s.json --verify --text heldout.txt -o plan.json[/bold]
[bold]quanterr compare original/ produced/ --plan plan.json[/bold]

Layers that runtimes fuse (q k v; gate up; the experts of a block) share a recipe. The result bounds how much better any
other plan could be. Without --sensitivity (from quanterr evaluate --sensitivity), all squared errors count alike, which
is a guess. --verify measures the plan's divergence on a text; --max-kld then bounds the measured value.

Exit status: 0 planned; 2 wrong usage, or a budget that cannot be met; 3 an input is unreadable; 5 memory or device.
""")


@with_options
def plan(
    original: Original,
    options: Annotated[PlanOptions, AllBut(("outlier_threshold",))],
    show: Annotated[Display, AllBut(("sort_by", "no_plot", "verbose", "allow_partial"))],
    export: Annotated[
        str | None,
        typer.Option(
            "--export",
            metavar="PROGRAM",
            help=f"Print the plan for this program instead of tables: {', '.join(PROGRAMS[:-1])} or {PROGRAMS[-1]}.",
            autocompletion=programs,
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Choose a recipe for each layer."""
    from quanterr.cli.opening import open_inputs
    from quanterr.goals import parse_goal
    from quanterr.report.files import write_output
    from quanterr.report.formatting import LONG

    parse_goal(options)  # raises before torch is imported
    to = show.targets([original, options.importance, options.sensitivity])
    announce([original], show.quiet)
    require_memory()
    with Interrupt(keeps=False) as interrupt, open_inputs([original], options) as (checkpoint,):
        from quanterr.planning import plan_layers
        from quanterr.planning.exports import CONSUMERS, check_consumer, export_command, export_plan, list_writable

        check_consumer(export)
        if export is not None and not options.to:
            options = replace(options, to=list_writable(export))
            if not show.quiet:
                print(f"quanterr: plans with what {export} writes: {', '.join(options.to)}", file=sys.stderr)
        with show_progress(show.quiet or export is not None) as on_progress:
            command = tuple(command_line())
            found = plan_layers(
                checkpoint, replace(options, on_progress=on_progress, stop=interrupt.stop, command=command)
            )
        if export is not None:
            text = export_plan(found, export)
            for target in to:
                write_output(found, target)
            with guard_stdout():
                print(text, end="", flush=True)
            if not show.quiet and (how := export_command(found, export)):
                print(f"quanterr: save as {CONSUMERS[export].file} and run: {display(how, LONG)}", file=sys.stderr)
            return
        deliver(found, to, show, next_step=suggest_after_plan(found, command))
