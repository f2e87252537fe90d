"""``quanterr sweep``: what other formats would cost, without writing a file."""

import gc
from typing import Annotated

import typer

from quanterr.cli import gate
from quanterr.cli.common import (
    AsJson,
    Cache,
    Color,
    Colors,
    Device,
    Display,
    Importance,
    Layers,
    Lenient,
    NoClobber,
    NoColor,
    Original,
    Outputs,
    Quiet,
    Resume,
    Sensitivity,
    color_of,
    help_of,
    require_memory,
)
from quanterr.cli.gate import FailIf, Require
from quanterr.cli.rank import KeepOriginal, More, PartialRanking, TopByChoice, run
from quanterr.errors import UsageError

HELP = help_of("""Quantize the original on the fly by several recipes and rank them: error, size, what each choice buys.

\b
[bold]quanterr sweep original/[/bold]
[bold]quanterr sweep original/ --to fp8_row,int8_row,nvfp4,gguf_q4_k,nf4 -l attn,mlp -o sweep.html[/bold]
[bold]quanterr sweep original/ --to 'int4_g{32,64,128}' --scales absmax,mse[/bold]
[bold]quanterr sweep original/ --sample 10%[/bold]
[bold]quanterr sweep original/ --to fp8_row --require 'snr_db >= 30'[/bold]

No file is written. Each recipe goes through the readers and checks of a file on disk, and its numbers are those of
that file. Matrices X.weight are quantized; embeddings, heads, norms and routers stay. quanterr formats --recipes
lists the recipes.

Exit status: as of quanterr rank.
""")


def sweep(
    original: Original,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="RECIPES",
            help="What to quantize to, separated by commas; int4_g{32,64} is two. Without it, a preset. Repeatable.",
            rich_help_panel="Recipes",
            show_default=False,
        ),
    ] = None,
    scales: Annotated[
        str | None,
        typer.Option(
            "--scales",
            metavar="CALIBRATORS",
            help="Make each recipe with each of these: absmax, mse, p99.9, ema.",
            rich_help_panel="Recipes",
            show_default=False,
        ),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample",
            metavar="SHARE",
            help="Read a part of the rows of each weight, such as 10%; numbers are estimates with their margins.",
            rich_help_panel="Recipes",
            show_default=False,
        ),
    ] = None,
    study: Annotated[
        bool,
        typer.Option(
            "--study",
            help="Measure what outliers cost each recipe, and how much its error depends on its scales.",
            rich_help_panel="Recipes",
        ),
    ] = False,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            metavar="NAME|GB/s",
            help="How many tokens a second the memory bandwidth of a machine allows: H100, 4090, M3-max, 900GB/s.",
            rich_help_panel="Metrics",
            show_default=False,
        ),
    ] = None,
    lenient: Lenient = False,
    cache: Cache = None,
    layers: Layers = None,
    allow_partial: PartialRanking = False,
    importance: Importance = None,
    keep_original: KeepOriginal = None,
    sensitivity: Sensitivity = None,
    require: Require = None,
    fail_if: FailIf = None,
    as_json: AsJson = False,
    outputs: Outputs = None,
    no_clobber: NoClobber = False,
    top_layers: TopByChoice = 10,
    color: Colors = Color.AUTO,
    no_color: NoColor = False,
    quiet: Quiet = False,
    resume: Resume = None,
    device: Device = "auto",
) -> None:
    """What other formats would cost."""
    from quanterr.report.files import targets
    from quanterr.report.hardware import bandwidth_of
    from quanterr.report.ranking import OUTPUTS

    if hardware is not None:
        bandwidth_of(hardware)  # a mistake in it costs no run
    gc.disable()  # a plan of many weights makes each of its rounds slow, and there are no cycles to find
    inputs = [original, *(path for path in (importance, sensitivity) if path is not None)]
    where = targets(outputs or [], inputs, no_clobber=no_clobber, outputs=OUTPUTS)
    rules = gate.prepared(None, require or [], fail_if or [], None, strict_warnings=False, fail_fast=False)
    if sample is not None and (require or fail_if):
        raise UsageError("--require: needs all rows; leave --sample out")
    require_memory()
    from quanterr.recipes import PRESETS, recipes_named
    from quanterr.recipes.sampling import share_of

    recipes = recipes_named(to or PRESETS, scales)
    share = None if sample is None else share_of(sample)
    names = [recipe.name for recipe in recipes]
    options = {
        "layers": layers or [],
        "device": device,
        "importance": importance,
        "sensitivity": sensitivity,
        "resume": resume,
        "lenient": lenient,
        "cache": cache,
    }
    shown = Display(top_layers, color_of(color, no_color), quiet, as_json=as_json)
    more = More(study, hardware, share)
    raise typer.Exit(run(original, recipes, names, rules, keep_original, options, where, shown, allow_partial, more))
