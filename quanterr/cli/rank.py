"""``quanterr rank``: several candidates for one original, in one pass over it."""

import gc
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from quanterr.cli import gate
from quanterr.cli.common import (
    Against,
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
    Resume,
    Sensitivity,
    announce,
    color_of,
    command_line,
    deliver,
    ended_by,
    help_of,
    require_memory,
    warn,
    watching,
)
from quanterr.cli.gate import BaselineReport, FailIf, Require, StrictWarnings, Thresholds
from quanterr.selection import CompareOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quanterr.recipes import Recipe
    from quanterr.report.files import Target
    from quanterr.report.ranking.model import Ranking

KeepOriginal = Annotated[
    str | None,
    typer.Option(
        "--keep-original",
        metavar="BYTES|dB",
        help="Propose which layers to leave unquantized: so that they add at most 500MiB, or gain 3dB.",
        rich_help_panel="Metrics",
        show_default=False,
    ),
]
TopByChoice = Annotated[
    int,
    typer.Option(
        "--top-layers",
        metavar="N",
        help="How many layers to show, by how much the choice matters.",
        min=0,
        rich_help_panel="Output",
    ),
]
PartialRanking = Annotated[
    bool,
    typer.Option(
        "--allow-partial",
        help="Exit 0 even if a candidate is inconclusive; it is still not ranked.",
        rich_help_panel="Selection",
    ),
]

HELP = help_of("""Compare several quantized checkpoints with one original and say which is best for its size.

\b
[bold]quanterr rank original.safetensors fp8.safetensors int8.safetensors[/bold]
[bold]quanterr rank original/ recipes/*.safetensors -l attn,mlp -o ranking.json[/bold]
[bold]quanterr rank org/name q4.gguf q5.gguf q6.gguf --json | jq '.front, .swaps'[/bold]
[bold]quanterr rank original/ fp8/ int8/ --keep-original 200MiB -o ranking.html[/bold]
[bold]quanterr rank original/ mine.safetensors --against fp8_row,nvfp4[/bold]

The original is read once, whatever the number of candidates. Error is compared over the same layers for
all. A candidate that compare would call inconclusive is named first and never ranked.

Exit status: 0 all candidates compared completely, and all gates hold for each; 1 one does not; 2 wrong usage;
3 an input is unreadable; 4 a candidate is inconclusive; 5 memory, device or disk; 70 a bug.
""")


def rank(
    original: Original,
    candidates: Annotated[
        list[str],
        typer.Argument(metavar="Q1 Q2 ...", help="The checkpoints to rank.", show_default=False),
    ],
    against: Against = None,
    lenient: Lenient = False,
    cache: Cache = None,
    layers: Layers = None,
    allow_partial: PartialRanking = False,
    importance: Importance = None,
    keep_original: KeepOriginal = None,
    sensitivity: Sensitivity = None,
    thresholds: Thresholds = None,
    require: Require = None,
    fail_if: FailIf = None,
    baseline: BaselineReport = None,
    strict_warnings: StrictWarnings = False,
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
    """Rank several candidates."""
    from quanterr.report.files import targets
    from quanterr.report.ranking import OUTPUTS
    from quanterr.report.ranking.making import names_of

    gc.disable()  # a plan of many weights makes each of its rounds slow, and there are no cycles to find
    recipes = _recipes(against) if against else []
    names = names_of([*candidates, *(recipe.name for recipe in recipes)])
    inputs = [original, *candidates, *(path for path in (baseline, importance, sensitivity) if path is not None)]
    to = targets(outputs or [], inputs, no_clobber=no_clobber, outputs=OUTPUTS)
    rules = gate.prepared(thresholds, require or [], fail_if or [], baseline, strict_warnings, fail_fast=False)
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
    every: list[str | Recipe] = [*candidates, *recipes]
    raise typer.Exit(run(original, every, names, rules, keep_original, options, to, shown, allow_partial))


def _recipes(against: list[str]) -> "list[Recipe]":
    require_memory()
    from quanterr.recipes import recipes_named

    return recipes_named(against)


class More(NamedTuple):
    """What can be asked of recipes alone."""

    study: bool = False  # of outliers and scales
    hardware: str | None = None
    share: float | None = None  # of the rows that are read


NOTHING_MORE = More()


def run(
    original: str,
    candidates: "Sequence[str | Recipe]",
    names: list[str],
    rules: gate.Prepared,
    keep_original: str | None,
    options: dict[str, Any],
    to: "list[Target]",
    shown: Display,
    allow_partial: bool,
    more: More = NOTHING_MORE,
) -> int:
    """Rank files and recipes, write and show the ranking; the exit status."""
    from quanterr.report.keeping import budget

    keep = None if keep_original is None else budget(keep_original)
    announce([original, *(one for one in candidates if isinstance(one, str))], shown.quiet)
    with Interrupt() as interrupt, ended_by(interrupt):
        require_memory()
        from quanterr.comparison import compare_each, with_studies
        from quanterr.comparison.estimating import estimate
        from quanterr.report.ranking.making import ranked

        recipes = [one for one in candidates if not isinstance(one, str)]
        with watching(shown.quiet) as on_progress:
            asked = CompareOptions(**options, on_progress=on_progress, stop=interrupt.stop, command=command_line())
            if more.share is not None:
                ranking, judged = estimate(original, recipes, more.share, keep, asked), {}
            else:
                reports = [rules.judge(report) for report in compare_each(original, candidates, asked)]
                judged = dict(zip(names, reports, strict=True))
                ranking = ranked(names, reports, keep, [recipe.name for recipe in recipes])
        if more.study and ranking.complete:
            ranking = with_studies(ranking, original, recipes, asked)
        if more.hardware is not None:
            from quanterr.comparison.bounds import with_bounds

            ranking = with_bounds(ranking, original, recipes, asked, more.hardware)
        warn(found for candidate in ranking.candidates for found in candidate.findings)
        status = _status(ranking, allow_partial, interrupt.signal)
        deliver(ranking, to, shown, status)
        for name, report in judged.items():
            gate.report_verdict(report, name)
    return status


def _status(ranking: "Ranking", allow_partial: bool, signal: int | None) -> int:
    from quanterr.report.gate_results import exit_status

    if signal is not None and not ranking.complete:
        return 128 + signal
    return exit_status(ranking, allow_partial)
