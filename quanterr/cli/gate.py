"""``quanterr gate``: judge a stored report again, without the models. Also the options it shares with compare."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from quanterr.cli.common import Color, Colors, NoClobber, NoColor, color_of, help_of, printing
from quanterr.cli.completion import presets
from quanterr.errors import UsageError
from quanterr.util import strict_json
from quanterr.util.colors import painted, wanted
from quanterr.util.text import display, no_command

if TYPE_CHECKING:
    from collections.abc import Callable

    from quanterr.gates.judging import Verdict
    from quanterr.report.evaluation.gates import Rule as EvaluationRule
    from quanterr.report.evaluation.model import Evaluation
    from quanterr.report.files import Target
    from quanterr.report.model import Layer, Report

HELP = help_of("""Judge a stored report by rules, without the models.

\b
[bold]quanterr gate report.json --require 'snr_db >= 28'[/bold]
[bold]quanterr gate report.json --thresholds thresholds.toml --baseline last-release.json[/bold]
[bold]quanterr gate report.json --thresholds fp8 --explain model.layers.0.mlp.up_proj.weight[/bold]

A rule is a condition that must hold. An undefined, missing or misspelt value never holds. See quanterr guide gates
for the metrics and functions.

Exit status: 0 all gates hold; 1 one does not; 2 wrong usage or thresholds; 3 a report is unreadable;
4 the report says that the comparison was incomplete or meaningless.
""")

PANEL = "Gates"
TONES = {"pass": "pass", "fail": "fail", "inconclusive": "warning"}

Thresholds = Annotated[
    str | None,
    typer.Option(
        "--thresholds",
        metavar="FILE",
        help="Rules: a TOML file, or a preset (fp8, int8, …) to start from.",
        autocompletion=presets,
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
Require = Annotated[
    list[str] | None,
    typer.Option(
        "--require",
        metavar="CONDITION",
        help="A condition that must hold, such as 'snr_db >= 28'. Repeatable.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
FailIf = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-if",
        metavar="CONDITION",
        help="A condition that must not hold, such as 'snr_db < 28'; an undefined value fails too. Repeatable.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
BaselineReport = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="FILE",
        help="An older report, for rules such as 'delta(snr_db) >= -0.5', which is the rule where no other is given.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
StrictWarnings = Annotated[
    bool,
    typer.Option(
        "--strict-warnings",
        help="Treat rules of severity warn as errors.",
        rich_help_panel=PANEL,
    ),
]

FailFast = Annotated[
    bool,
    typer.Option(
        "--fail-fast",
        help="Stop at the first layer that violates a rule; the report is marked incomplete, and the exit status is 1.",
        rich_help_panel=PANEL,
    ),
]


def gate(
    report: Annotated[str, typer.Argument(metavar="REPORT", help="A report.json of compare.", show_default=False)],
    thresholds: Thresholds = None,
    require: Require = None,
    fail_if: FailIf = None,
    baseline: BaselineReport = None,
    strict_warnings: StrictWarnings = False,
    update_baseline: Annotated[
        bool,
        typer.Option(
            "--update-baseline",
            help="If all gates hold, warnings included, make this report the baseline: overwrite the file of "
            "--baseline.",
            rich_help_panel=PANEL,
        ),
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="LAYER", help="Explain how each rule judges this layer.", rich_help_panel=PANEL, show_default=False
        ),
    ] = None,
    allow_partial: Annotated[
        bool,
        typer.Option("--allow-partial", help="Judge an inconclusive report by its gates alone."),
    ] = False,
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            "--output-report",
            "-o",
            metavar="FILE",
            help="Write the report with the new verdict, as compare does. Repeatable.",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    no_clobber: NoClobber = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Verdict and gates as JSON on stdout.", rich_help_panel="Output")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="The verdict in one line.", rich_help_panel="Output")
    ] = False,
    color: Colors = Color.AUTO,
    no_color: NoColor = False,
) -> None:
    """Judge a stored report."""
    import gc

    from quanterr.gates.explaining import explain as explained
    from quanterr.gates.judging import judge_values, needed, unreliable
    from quanterr.gates.rules import check_baseline_use, read_rules
    from quanterr.report.documents import schema_of
    from quanterr.report.evaluation import SCHEMA as EVALUATION
    from quanterr.report.files import targets
    from quanterr.report.formatting import sentence
    from quanterr.report.gate_results import exit_status
    from quanterr.report.reading import read_extract
    from quanterr.report.values import Values

    gc.disable()  # what is read is kept to the end, and the end is near
    colored = wanted(sys.stderr, color_of(color, no_color))
    if schema_of(report) == EVALUATION:
        if any((fail_if, explain, update_baseline)) or not (require or baseline or thresholds):
            raise UsageError(
                f"{display(report)} is an evaluation: give rules such as --require 'kld_mean <= 0.01', and no others"
            )
        from quanterr.report.evaluation.gates import rules_of

        own = rules_of(require or [], baseline is not None, thresholds, strict_warnings)
        judgement = _judged_evaluation(report, own, baseline, outputs or [], no_clobber)
        _tell_of_evaluation(judgement, quiet, colored, as_json)
        raise typer.Exit(exit_status(judgement, allow_partial))
    if update_baseline and baseline is None:
        raise UsageError("--update-baseline overwrites the file of --baseline: give one")
    rules = read_rules(thresholds, require or [], fail_if or [], strict_warnings, baseline is not None)
    check_baseline_use(rules, baseline is not None, update_baseline)
    if baseline is not None and _same_file(report, baseline):
        raise UsageError(f"--baseline {display(baseline)}: is the report itself; give an older report")
    to = targets(outputs or [], [report, *([] if baseline is None else [baseline])], no_clobber=no_clobber)
    values = Values(read_extract(report, *needed(rules)))
    before = None if baseline is None else Values(read_extract(baseline, *needed(rules)))
    judged = judge_values(values, rules, before)
    if explain is not None:
        stream = sys.stderr if any(target.path is None for target in to) else sys.stdout
        print("\n".join(map(no_command, explained(values, rules, explain, before))), file=stream)
    report_verdict(judged, quiet=quiet, colored=colored)
    _tell_verdict(judged.verdict, colored)
    for reason in [] if quiet else unreliable(values, rules):
        print(f"  - {no_command(sentence(reason))}", file=sys.stderr)
    if as_json:
        _print_json(judged._asdict())
    if to or update_baseline:
        _write(report, judged, to, baseline if update_baseline else None)
    raise typer.Exit(exit_status(judged, allow_partial))


def _judged_evaluation(
    path: str, rules: "list[EvaluationRule]", baseline: str | None, outputs: list[str], no_clobber: bool
) -> "Evaluation":
    """A stored evaluation, judged by its own rules and written where it was asked for."""
    from quanterr.report.evaluation import OUTPUTS
    from quanterr.report.evaluation.gates import judged
    from quanterr.report.evaluation.reading import read_evaluation
    from quanterr.report.files import targets, write_output

    inputs = [path, *([] if baseline is None else [baseline])]
    to = targets(outputs, inputs, no_clobber=no_clobber, outputs=OUTPUTS)
    found = judged(read_evaluation(path), rules, None if baseline is None else read_evaluation(baseline))
    for target in to:
        write_output(found, target)
    return found


def _tell_of_evaluation(found: "Evaluation", quiet: bool, colored: bool, as_json: bool) -> None:
    from quanterr.gates.as_text import gate_lines

    for candidate in [] if quiet else found.candidates:
        lines = [no_command(f"{display(candidate.name)}:"), *gate_lines(candidate.gates, colored)]
        print("\n".join(lines), file=sys.stderr)
    _tell_verdict(found.verdict, colored)
    if as_json:
        keys = ("name", "verdict", "reasons", "gates")
        candidates = [{key: getattr(candidate, key) for key in keys} for candidate in found.candidates]
        _print_json({"verdict": found.verdict, "reasons": found.reasons, "candidates": candidates})


def _tell_verdict(verdict: str, colored: bool) -> None:
    print(f"verdict: {painted(verdict, TONES[verdict], colored)}", file=sys.stderr)


def _print_json(fields: dict[str, Any]) -> None:
    with printing():
        print(strict_json.dumps({"schema": "quanterr.gate", **fields}, asdict), flush=True)


def _same_file(report: str, baseline: str) -> bool:
    """Whether both are one file: nothing would have changed, whatever it says."""
    try:
        return os.path.samefile(report, baseline)
    except (OSError, ValueError):  # reading them says which, and why
        return False


class Prepared(NamedTuple):
    """What judges the report of compare, and layers as they are compared, where that is asked for."""

    judge: "Callable[[Report], Report]"
    violated: "Callable[[Layer], str | None] | None" = None


def prepared(
    thresholds: str | None,
    require: list[str],
    fail_if: list[str],
    baseline: str | None,
    strict_warnings: bool,
    fail_fast: bool,
    plan: str | None = None,
) -> Prepared:
    """Rules, baseline and plan of compare are read at once: a mistake in them costs no run."""
    rules = _prepared(thresholds, require, fail_if, baseline, strict_warnings, fail_fast)
    if plan is None:
        return rules
    from quanterr.gates.planned import judged_by_plan, read_plan

    planned = read_plan(plan)
    return rules._replace(judge=lambda report: judged_by_plan(rules.judge(report), planned))


def _prepared(
    thresholds: str | None,
    require: list[str],
    fail_if: list[str],
    baseline: str | None,
    strict_warnings: bool,
    fail_fast: bool,
) -> Prepared:
    if not (thresholds is not None or require or fail_if or baseline is not None):
        if fail_fast:
            raise UsageError("--fail-fast: no rules given; give --thresholds FILE, or --require 'snr_db >= 30'")
        return Prepared(lambda report: report)

    from quanterr.gates import judged
    from quanterr.gates.fail_fast import first_violation
    from quanterr.gates.judging import needed
    from quanterr.gates.rules import check_baseline_use, read_rules
    from quanterr.report.reading import read_extract
    from quanterr.report.same_original import check_usable
    from quanterr.report.values import Values

    rules = read_rules(thresholds, require, fail_if, strict_warnings, baseline is not None)
    check_baseline_use(rules, baseline is not None)
    before = None if baseline is None else Values(read_extract(baseline, *needed(rules)))
    if before is not None:
        check_usable(before)
    return Prepared(lambda report: judged(report, rules, before), first_violation(rules, before) if fail_fast else None)


def not_judged(report: "Report", error: UsageError) -> "Report":
    """The report of a comparison that could not be judged as it was asked to."""
    from quanterr.report.values import NOT_JUDGED

    before = report.reasons if report.verdict == "inconclusive" else []
    return report.model_copy(update={"verdict": "inconclusive", "reasons": [f"{NOT_JUDGED}{error}", *before]})


def report_verdict(
    judged: "Verdict | Report", candidate: str | None = None, quiet: bool = False, colored: bool = False
) -> None:
    """The gates on standard error; on GitHub the verdict in the job's summary and as annotations as well."""
    from quanterr.gates import github
    from quanterr.gates.as_text import gate_lines

    if judged.gates and not quiet:
        of = [] if candidate is None else [no_command(f"{display(candidate)}:")]
        print("\n".join([*of, *gate_lines(judged.gates, colored)]), file=sys.stderr)
    if not github.here():
        return
    for line in github.annotations(judged, candidate):
        print(line, file=sys.stderr)
    if problem := github.write_summary(judged, candidate):
        print(f"quanterr: {problem}", file=sys.stderr)


def _write(path: str, judged: "Verdict", to: "list[Target]", baseline: str | None) -> None:
    """The whole report with its new verdict, to where it was asked for and to the baseline."""
    from quanterr.report import OUTPUTS
    from quanterr.report.files import Target, write_output
    from quanterr.report.reading import read_report

    report = read_report(path).model_copy(update=judged._asdict())
    against = _against_update(judged)
    if baseline is not None and against is None:
        to = [*to, Target(OUTPUTS[0], Path(os.path.realpath(baseline)))]
    for target in to:
        write_output(report, target)
    if baseline is not None:
        done = "is now this report" if against is None else f"is unchanged: {against}"
        print(f"baseline {display(baseline)} {done}", file=sys.stderr)


def _against_update(judged: "Verdict") -> str | None:
    """Why the report does not become the baseline: a gate that only warns would be lowered by it as well."""
    if judged.verdict != "pass":
        return judged.verdict
    failed = [gate.id for gate in judged.gates if gate.status == "fail"]
    return f"warning: gate {display(failed[0])} does not hold" if failed else None
