"""``quanterr rank``: several candidates for one original, in one pass over it."""

import gc
from typing import TYPE_CHECKING, Annotated

import typer

from quanterr.cli import gate
from quanterr.cli.common import (
    AsJson,
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
    color_of,
    command_line,
    deliver,
    help_of,
    require_memory,
    warn,
    watching,
)
from quanterr.cli.gate import BaselineReport, FailIf, Require, StrictWarnings, Thresholds
from quanterr.selection import CompareOptions

if TYPE_CHECKING:
    from quanterr.report.ranking.model import Ranking

HELP = help_of("""Compare several quantized checkpoints with one original and say which is best for its size.

\b
[bold]quanterr rank original.safetensors fp8.safetensors int8.safetensors[/bold]
[bold]quanterr rank original/ recipes/*.safetensors -l attn,mlp -o ranking.json[/bold]
[bold]quanterr rank org/name q4.gguf q5.gguf q6.gguf --json | jq '.front, .swaps'[/bold]
[bold]quanterr rank original/ fp8/ int8/ --keep-original 200MiB -o ranking.html[/bold]

The original is read once, whatever the number of candidates. Error is compared over the same layers for
all. A candidate that compare would call inconclusive is named first and never ranked.

Exit status: 0 all candidates compared completely, and all gates hold for each; 1 one does not; 2 wrong usage;
3 an input is unreadable; 4 a candidate is inconclusive; 5 memory, device or disk; 70 a bug.
""")


def rank(
    original: Original,
    candidates: Annotated[
        list[str],
        typer.Argument(metavar="Q1 Q2 ...", help="The checkpoints to rank, two or more.", show_default=False),
    ],
    lenient: Lenient = False,
    layers: Layers = None,
    allow_partial: Annotated[
        bool,
        typer.Option(
            "--allow-partial",
            help="Exit 0 even if a candidate is inconclusive; it is still not ranked.",
            rich_help_panel="Selection",
        ),
    ] = False,
    importance: Importance = None,
    keep_original: Annotated[
        str | None,
        typer.Option(
            "--keep-original",
            metavar="BYTES|dB",
            help="Propose which layers to leave unquantized: so that they add at most 500MiB, or gain 3dB.",
            rich_help_panel="Metrics",
            show_default=False,
        ),
    ] = None,
    sensitivity: Sensitivity = None,
    thresholds: Thresholds = None,
    require: Require = None,
    fail_if: FailIf = None,
    baseline: BaselineReport = None,
    strict_warnings: StrictWarnings = False,
    as_json: AsJson = False,
    outputs: Outputs = None,
    no_clobber: NoClobber = False,
    top_layers: Annotated[
        int,
        typer.Option(
            "--top-layers",
            metavar="N",
            help="How many layers to show, by how much the choice matters.",
            min=0,
            rich_help_panel="Output",
        ),
    ] = 10,
    color: Colors = Color.AUTO,
    no_color: NoColor = False,
    quiet: Quiet = False,
    device: Device = "auto",
) -> None:
    """Rank several candidates."""
    from quanterr.report.files import targets
    from quanterr.report.keeping import budget
    from quanterr.report.ranking import OUTPUTS
    from quanterr.report.ranking.as_table import brief, show
    from quanterr.report.ranking.making import names_of, ranked

    gc.disable()  # a plan of many weights makes each of its rounds slow, and there are no cycles to find
    names = names_of(candidates)  # a mistake in them costs no run, nor the import of torch
    keep = None if keep_original is None else budget(keep_original)
    inputs = [original, *candidates, *(path for path in (baseline, sensitivity) if path is not None)]
    to = targets(outputs or [], inputs, no_clobber=no_clobber, outputs=OUTPUTS)
    rules = gate.prepared(thresholds, require or [], fail_if or [], baseline, strict_warnings, fail_fast=False)
    with Interrupt() as interrupt:
        require_memory()
        from quanterr.comparison import compare_each

        with watching(quiet) as on_progress:
            options = CompareOptions(
                layers=layers or [],
                device=device,
                importance=importance,
                sensitivity=sensitivity,
                lenient=lenient,
                on_progress=on_progress,
                stop=interrupt.stop,
                command=command_line(),
            )
            reports = [rules.judge(report) for report in compare_each(original, candidates, options)]
        ranking = ranked(names, reports, keep)
        warn(found for candidate in ranking.candidates for found in candidate.findings)
        status = _status(ranking, allow_partial, interrupt.signal)
        shown = Display(top_layers, color_of(color, no_color), quiet, as_json=as_json)
        deliver(
            ranking, to, shown, lambda console, wrote: show(ranking, console, top_layers, status, wrote), brief(ranking)
        )
        for name, report in zip(names, reports, strict=True):
            gate.report_verdict(report, name)
    raise typer.Exit(status)


def _status(ranking: "Ranking", allow_partial: bool, signal: int | None) -> int:
    from quanterr.report.gate_results import exit_status

    if signal is not None and not ranking.complete:
        return 128 + signal
    return exit_status(ranking, allow_partial)
