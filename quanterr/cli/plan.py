"""``quanterr plan``: which recipe each layer should have under a budget."""

import gc
from enum import StrEnum
from typing import Annotated

import typer

from quanterr.cli.common import (
    AsJson,
    Cache,
    Color,
    Colors,
    Device,
    Display,
    Importance,
    Interrupt,
    Layers,
    Lenient,
    NoClobber,
    NoColor,
    Original,
    Outputs,
    Quiet,
    Sensitivity,
    TopLayers,
    announce,
    color_of,
    command_line,
    deliver,
    help_of,
    printing,
    require_memory,
    watching,
)
from quanterr.errors import UsageError
from quanterr.util.text import display

HELP = help_of("""Choose a recipe for each layer: the least error within a budget, measured on the real weights.

\b
[bold]quanterr plan original/ --size 6GiB --sensitivity s.json[/bold]
[bold]quanterr plan original/ --bits 4.5 --to gguf_q4_k,gguf_q6_k,gguf_q8_0 --export llama-quantize[/bold]
[bold]quanterr plan original/ --max-kld 0.01 --sensitivity s.json -o plan.json[/bold]
[bold]quanterr compare original/ produced/ --plan plan.json[/bold]

Layers that runtimes fuse (q k v; gate up; the experts of a block) have one recipe. The answer says by how much another
plan could be better. Without --sensitivity, which quanterr evaluate --sensitivity writes, all squared errors count
the same: a guess.

Exit status: 0 planned; 2 wrong usage, or a budget that cannot be met; 3 an input is unreadable; 5 memory or device.
""")

PANEL = "Goal (one of them)"


class SameIn(StrEnum):
    """Which layers have one recipe."""

    FUSED = "fused"
    BLOCK = "block"
    ROLE = "role"


def plan(
    original: Original,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="RECIPES",
            help="What layers may be, separated by commas; they may stay as they are, too. Without it, a preset.",
            rich_help_panel="Recipes",
            show_default=False,
        ),
    ] = None,
    scales: Annotated[
        str | None,
        typer.Option(
            "--scales",
            metavar="CALIBRATORS",
            help="Make each recipe with each of these: absmax, mse, p99.9.",
            rich_help_panel="Recipes",
            show_default=False,
        ),
    ] = None,
    same_in: Annotated[
        SameIn, typer.Option("--same-in", help="Which layers have one recipe.", rich_help_panel="Recipes")
    ] = SameIn.FUSED,
    size: Annotated[
        str | None,
        typer.Option(
            "--size", metavar="BYTES", help="Of the whole checkpoint: 6GiB.", rich_help_panel=PANEL, show_default=False
        ),
    ] = None,
    bits: Annotated[
        float | None,
        typer.Option(
            "--bits",
            metavar="NUMBER",
            help="Per weight of the planned layers, scales included.",
            rich_help_panel=PANEL,
            show_default=False,
        ),
    ] = None,
    max_kld: Annotated[
        float | None,
        typer.Option(
            "--max-kld",
            metavar="NAT",
            help="The smallest size whose predicted KLD is no larger; needs --sensitivity.",
            rich_help_panel=PANEL,
            show_default=False,
        ),
    ] = None,
    min_snr: Annotated[
        float | None,
        typer.Option(
            "--min-snr",
            metavar="dB",
            help="The smallest size whose SNR over the planned layers is no lower.",
            rich_help_panel=PANEL,
            show_default=False,
        ),
    ] = None,
    lenient: Lenient = False,
    cache: Cache = None,
    layers: Layers = None,
    importance: Importance = None,
    sensitivity: Sensitivity = None,
    export: Annotated[
        str | None,
        typer.Option(
            "--export",
            metavar="PROGRAM",
            help="On stdout, not tables: for llama-quantize, llmcompressor, torchao, modelopt, bitsandbytes, "
            "convert_to_quant or mlx.",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    outputs: Outputs = None,
    no_clobber: NoClobber = False,
    top_layers: TopLayers = 10,
    color: Colors = Color.AUTO,
    no_color: NoColor = False,
    quiet: Quiet = False,
    device: Device = "auto",
) -> None:
    """Which recipe should each layer have?"""
    from quanterr.report.files import targets, write_output
    from quanterr.report.plan import OUTPUTS

    gc.disable()  # many layers, and there are no cycles to find
    inputs = [original, *(path for path in (importance, sensitivity) if path is not None)]
    where = targets(outputs or [], inputs, no_clobber=no_clobber, outputs=OUTPUTS)
    nbytes = None if size is None else _bytes(size)
    announce([original], quiet)
    with Interrupt(keeps=False) as interrupt:
        require_memory()
        from quanterr.planning import plan as planned
        from quanterr.planning.exports import check_consumer, exported
        from quanterr.recipes import PRESETS

        check_consumer(export)
        with watching(quiet or export is not None) as on_progress:
            found = planned(
                original,
                size=nbytes,
                bits=bits,
                max_kld=max_kld,
                min_snr=min_snr,
                to=to or PRESETS,
                scales=scales,
                same_in=same_in.value,
                layers=layers or [],
                importance=importance,
                sensitivity=sensitivity,
                lenient=lenient,
                cache=cache,
                device=device,
                on_progress=on_progress,
                stop=interrupt.stop,
                command=command_line(),
            )
        if export is not None:
            text = exported(found, export)
            for target in where:
                write_output(found, target)
            with printing():
                print(text, end="", flush=True)
            return
        shown = Display(top_layers, color_of(color, no_color), quiet, as_json=as_json)
        deliver(found, where, shown)


def _bytes(text: str) -> float:
    from quanterr.report.keeping import UNITS, amount_of

    amount, unit = amount_of(text)
    if unit not in UNITS:
        raise UsageError(f"--size {display(text)}: give bytes, such as 6GiB or 700MB")
    return amount * UNITS[unit]
