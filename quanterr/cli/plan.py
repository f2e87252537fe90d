"""``quanterr plan``: which recipe each layer should have under a budget."""

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
    help_of,
    printing,
    require_memory,
    watching,
)
from quanterr.cli.next_steps import after_plan
from quanterr.cli.options import But, with_options
from quanterr.options import OUTPUT, PlanOptions
from quanterr.util.text import display

HELP = help_of("""Choose a recipe for each layer: the least error within a budget, measured on the real weights.

\b
[bold]quanterr plan original/ --size 6GiB --sensitivity s.json[/bold]
[bold]quanterr plan original/ --bits 4.5 --to gguf_q4_k,gguf_q6_k,gguf_q8_0 --export llama-quantize[/bold]
[bold]quanterr plan original/ --max-kld 0.01 --sensitivity s.json --verify --text heldout.txt -o plan.json[/bold]
[bold]quanterr compare original/ produced/ --plan plan.json[/bold]

Layers that runtimes fuse (q k v; gate up; the experts of a block) have one recipe. The answer says by how much another
plan could be better. Without --sensitivity, which quanterr evaluate --sensitivity writes, all squared errors count
the same: a guess. --verify measures on a text what the plan does to the model; then --max-kld is kept by that.

Exit status: 0 planned; 2 wrong usage, or a budget that cannot be met; 3 an input is unreadable; 5 memory or device.
""")


@with_options
def plan(
    original: Original,
    options: Annotated[PlanOptions, But(("outlier_threshold",))],
    show: Annotated[Display, But(("sort_by", "no_plot", "verbose", "allow_partial"))],
    export: Annotated[
        str | None,
        typer.Option(
            "--export",
            metavar="PROGRAM",
            help="On stdout, not tables: for llama-quantize, llmcompressor, torchao, modelopt, bitsandbytes, "
            "convert_to_quant or mlx.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Which recipe should each layer have?"""
    from quanterr.report.files import write_output
    from quanterr.report.formatting import LONG

    to = show.targets([original, options.importance, options.sensitivity])
    announce([original], show.quiet)
    with Interrupt(keeps=False) as interrupt:
        require_memory()
        from quanterr.planning import plan_layers
        from quanterr.planning.exports import CONSUMERS, check_consumer, export_command, export_plan

        check_consumer(export)
        with watching(show.quiet or export is not None) as on_progress:
            command = tuple(command_line())
            found = plan_layers(
                original, replace(options, on_progress=on_progress, stop=interrupt.stop, command=command)
            )
        if export is not None:
            text = export_plan(found, export)
            for target in to:
                write_output(found, target)
            with printing():
                print(text, end="", flush=True)
            if not show.quiet and (how := export_command(found, export)):
                print(f"quanterr: as {CONSUMERS[export].file}, for: {display(how, LONG)}", file=sys.stderr)
            return
        deliver(found, to, show, next_step=after_plan(found, command))
