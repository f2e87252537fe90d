"""``quanterr evaluate``: is the model still good, on a text."""

import gc
import sys
from typing import Annotated, Any

import typer

from quanterr.cli.common import (
    Against,
    AllowPartial,
    AsJson,
    Cache,
    Color,
    Colors,
    Device,
    Display,
    Interrupt,
    Lenient,
    NoClobber,
    NoColor,
    Outputs,
    Quiet,
    TopLayers,
    announce,
    color_of,
    command_line,
    deliver,
    ended_by,
    help_of,
    require_memory,
    stepping,
)
from quanterr.cli.gate import BaselineReport, FailIf, Require, StrictWarnings, Thresholds, annotate
from quanterr.util.text import display

PANEL = "Text"
HELP = help_of("""Run the original's model with the weights of each side on a text: perplexity, divergence, agreement.

\b
[bold]quanterr evaluate original/ quantized/ --text wiki.test.raw[/bold]
[bold]quanterr evaluate original/ a/ b.gguf --text wiki.test.raw --chunks 20 -o eval.html[/bold]
[bold]quanterr evaluate original/ --against fp8_row,nvfp4,int4_g128 --text wiki.test.raw[/bold]
[bold]quanterr evaluate original/ --text calibration.txt --sensitivity s.json[/bold]
[bold]quanterr evaluate original/ quantized/ --tokens ids.safetensors --require 'upper(kld_mean) <= 0.01'[/bold]

ORIGINAL is a folder with config.json, here or in a store (hf://org/name). Any format that compare reads runs through
transformers' model of it, one block of each side in memory. Needs pip install "quanterr[evaluate]"; no model code is
downloaded or run.

Exit status: 0 all gates hold; 1 one does not; 2 wrong usage; 3 an input is unreadable; 4 a candidate lacks tensors, or
is not finite; 5 memory or disk; 70 a bug.
""")


def evaluate(
    original: Annotated[
        str, typer.Argument(metavar="ORIGINAL", help="The model's folder, here or in a store.", show_default=False)
    ],
    candidates: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="QUANTIZED ...",
            help="Quantized checkpoints of it; without any, --sensitivity, --importance-out, --saliency-out alone.",
            show_default=False,
        ),
    ] = None,
    against: Against = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="A text, UTF-8, read through the original's tokenizer.json.",
            rich_help_panel=PANEL,
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            metavar="FILE",
            help="Token ids instead: a safetensors file with one tensor of integers.",
            rich_help_panel=PANEL,
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="FILE",
            help="Questions with choices, a JSON line each: question, choices, answer (its number). Repeatable.",
            rich_help_panel=PANEL,
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int,
        typer.Option(
            "--context",
            metavar="N",
            help="Tokens of a chunk; predictions of its second half are scored.",
            min=2,
            rich_help_panel=PANEL,
        ),
    ] = 512,
    chunks: Annotated[
        int | None,
        typer.Option(
            "--chunks", metavar="N", help="How many chunks at most.", min=1, rich_help_panel=PANEL, show_default=False
        ),
    ] = None,
    lenient: Lenient = False,
    cache: Cache = None,
    thresholds: Thresholds = None,
    require: Require = None,
    fail_if: FailIf = None,
    baseline: BaselineReport = None,
    strict_warnings: StrictWarnings = False,
    allow_partial: AllowPartial = False,
    sensitivity: Annotated[
        str | None,
        typer.Option(
            "--sensitivity",
            metavar="FILE",
            help="Write how much each weight matters (JSON), and predict the divergence of the candidates.",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    importance_out: Annotated[
        str | None,
        typer.Option(
            "--importance-out",
            metavar="FILE",
            help="Write the second moments of inputs as an importance matrix of llama.cpp (GGUF).",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    saliency_out: Annotated[
        str | None,
        typer.Option(
            "--saliency-out",
            metavar="FILE",
            help="Write the most salient columns and elements of each weight (JSON): Var(x) · w².",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    saliency: Annotated[
        float,
        typer.Option("--saliency", metavar="PERCENT", help="How many of them.", rich_help_panel="Output"),
    ] = 1.0,
    as_json: AsJson = False,
    outputs: Outputs = None,
    no_clobber: NoClobber = False,
    top_layers: TopLayers = 10,
    color: Colors = Color.AUTO,
    no_color: NoColor = False,
    quiet: Quiet = False,
    device: Device = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="In which both sides compute: float32, bfloat16 or float64.",
            rich_help_panel="Performance",
        ),
    ] = "float32",
    batch: Annotated[
        int,
        typer.Option(
            "--batch",
            metavar="N",
            help="Chunks that run through a block together.",
            min=1,
            rich_help_panel="Performance",
        ),
    ] = 2,
) -> None:
    """Is the model still good?"""
    from quanterr.report.evaluation import OUTPUTS
    from quanterr.report.files import check_place, targets
    from quanterr.report.gate_results import exit_status

    gc.disable()  # a model has many modules, and there are no cycles to find
    inputs = [original, *(candidates or []), *(path for path in (text, tokens, *(tasks or [])) if path is not None)]
    to = targets(outputs or [], inputs, no_clobber=no_clobber, outputs=OUTPUTS)
    by_products = {
        "--sensitivity": sensitivity,
        "--importance-out": importance_out,
        "--saliency-out": saliency_out,
    }
    for option, path in by_products.items():
        if path is not None:
            check_place(path, option, inputs)
    announce([original, *(candidates or [])], quiet)
    with Interrupt(keeps=False) as interrupt:
        require_memory()
        from quanterr.evaluation import evaluate as evaluated
        from quanterr.evaluation import study

        with stepping(quiet) as on_progress, ended_by(interrupt):
            options: dict[str, Any] = {
                "text": text,
                "tokens": tokens,
                "context": context,
                "chunks": chunks,
                "batch": batch,
                "dtype": dtype,
                "device": device,
                "thresholds": thresholds,
                "require": require or [],
                "fail_if": fail_if or [],
                "baseline": baseline,
                "strict_warnings": strict_warnings,
                "tasks": tasks or [],
                "sensitivity": sensitivity,
                "importance_out": importance_out,
                "saliency_out": saliency_out,
                "saliency": saliency,
                "lenient": lenient,
                "cache": cache,
                "on_progress": on_progress,
                "stop": interrupt.stop,
                "command": command_line(),
            }
            if not candidates and not against:
                study(original, **options)
                written = ", ".join(display(path) for path in by_products.values() if path is not None)
                print(f"quanterr: wrote {written}", file=sys.stderr)
                return
            evaluation = evaluated(original, candidates or [], against=against or [], **options)
        status = exit_status(evaluation, allow_partial)
        shown = Display(top_layers, color_of(color, no_color), quiet, as_json=as_json)
        deliver(evaluation, to, shown, status)
        for candidate in evaluation.candidates:
            annotate(candidate, candidate.name)
    raise typer.Exit(status)
