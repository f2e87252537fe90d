"""``quanterr gate``: judge a stored report again, without the models. Also the options it shares with compare."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from quanterr.cli.common import Color, Colors, NoClobber, NoColor, color_of, help_of, printing
from quanterr.cli.completion import presets
from quanterr.errors import UsageError
from quanterr.util import strict_json
from quanterr.util.colors import painted, wanted
from quanterr.util.text import display, no_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quanterr.gates.rules import Rule
    from quanterr.report.documents import Kind
    from quanterr.report.files import Target
    from quanterr.report.gate_results import Judged, Verdict
    from quanterr.report.model import Layer, Report
    from quanterr.report.subjects import Subject

HELP = help_of("""Judge a stored report, ranking, evaluation or plan by rules, without the models.

\b
[bold]quanterr gate report.json --require 'snr_db >= 28'[/bold]
[bold]quanterr gate report.json --thresholds thresholds.toml --baseline last-release.json[/bold]
[bold]quanterr gate evaluation.json --fail-if 'upper(kld_mean) > 0.01'[/bold]
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
        help="A condition that must hold, such as 'snr_db >= 28', of evaluate 'upper(kld_mean) <= 0.01'. Repeatable.",
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
        help="An older JSON of its kind, for delta, rel_delta and ratio; alone it asks for 'delta(snr_db) >= -0.5', "
        "of evaluate 'ratio(kld_mean) <= 1.1'.",
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
    report: Annotated[
        str,
        typer.Argument(
            metavar="REPORT", help="The JSON of compare, rank, sweep, evaluate or plan.", show_default=False
        ),
    ],
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
    """Judge a stored document."""
    import gc

    from quanterr.gates import verdicts_of
    from quanterr.gates.explaining import explain as explained
    from quanterr.gates.rules import check_baseline_use, read_rules
    from quanterr.report.documents import kind_of
    from quanterr.report.files import targets
    from quanterr.report.gate_results import Verdict, exit_status
    from quanterr.report.subjects import counterpart, overall

    gc.disable()  # what is read is kept to the end, and the end is near
    colored = wanted(sys.stderr, color_of(color, no_color))
    if update_baseline and baseline is None:
        raise UsageError("--update-baseline overwrites the file of --baseline: give one")
    kind = kind_of(report)
    given = baseline is not None
    rules = read_rules(thresholds, require or [], fail_if or [], strict_warnings, given, kind.values.VOCABULARY)
    check_baseline_use(rules, given, update_baseline)
    if baseline is not None and _same_file(report, baseline):
        raise UsageError(f"--baseline {display(baseline)}: is the report itself; give an older report")
    inputs = [report, *([] if baseline is None else [baseline])]
    to = targets(outputs or [], inputs, no_clobber=no_clobber, outputs=kind.outputs)
    before = [] if baseline is None else _read(baseline, rules, kind)
    subjects = _read(report, rules, kind)
    verdicts = verdicts_of(subjects, rules, before)
    if explain is not None:
        lines = [line for one in subjects for line in explained(one, rules, explain, counterpart(one, before))]
        stream = sys.stderr if any(target.path is None for target in to) else sys.stdout
        print("\n".join(map(no_command, lines)), file=stream)
    for subject, verdict in zip(subjects, verdicts, strict=True):
        report_verdict(verdict, subject.name, quiet=quiet, colored=colored)
    by_name = {subject.name: verdict for subject, verdict in zip(subjects, verdicts, strict=True) if subject.name}
    word, reasons = overall(by_name) if by_name else verdicts[0][:2]
    whole = Verdict(word, reasons, [gate for verdict in verdicts for gate in verdict.gates])
    _tell_verdict(whole, quiet, colored)
    if as_json:
        _print_json(_fields(whole, subjects, verdicts))
    if to or update_baseline:
        _write(report, subjects, verdicts, to, baseline if update_baseline else None, _against_update(whole))
    raise typer.Exit(exit_status(whole, allow_partial))


def _read(path: str, rules: "list[Rule]", kind: "Kind") -> "list[Subject]":
    """What is judged of a stored document; of a report what rules need alone, which is faster.

    Raises:
        UsageError: it is a document of another kind.
        ReportError: it cannot be read.
    """
    from quanterr.gates import subjects_of
    from quanterr.gates.judging import needed
    from quanterr.report.documents import kind_of, read_document
    from quanterr.report.reading import read_extract
    from quanterr.report.values import ReportValues

    found = kind_of(path)
    if found != kind:
        kinds = f"is of another kind ({found.name.lower()}) than what is judged ({kind.name.lower()})"
        raise UsageError(f"--baseline {display(path)}: {kinds}")
    if kind.name == "Report":
        return [ReportValues(read_extract(path, *needed(rules)))]
    return subjects_of(read_document(path), rules)


def _fields(whole: "Verdict", subjects: "Sequence[Subject]", verdicts: "Sequence[Verdict]") -> dict[str, object]:
    if subjects[0].name is None:
        return whole._asdict()
    pairs = zip(subjects, verdicts, strict=True)
    candidates = [{"name": subject.name} | verdict._asdict() for subject, verdict in pairs]
    return {"verdict": whole.verdict, "reasons": whole.reasons, "candidates": candidates}


def _tell_verdict(found: "Verdict", quiet: bool, colored: bool) -> None:
    from quanterr.report.formatting import sentence

    print(f"verdict: {painted(found.verdict, TONES[found.verdict], colored)}", file=sys.stderr)
    if quiet or found.verdict != "inconclusive":
        return
    of_gates = {gate.message for gate in found.gates}
    for reason in found.reasons:
        if reason not in of_gates:
            print(f"  - {no_command(sentence(reason))}", file=sys.stderr)


def _print_json(fields: dict[str, object]) -> None:
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
    from quanterr.report.values import ReportValues

    rules = read_rules(thresholds, require, fail_if, strict_warnings, baseline is not None)
    check_baseline_use(rules, baseline is not None)
    before = None if baseline is None else ReportValues(read_extract(baseline, *needed(rules)))
    if before is not None:
        before.check_usable()
    old = [before] if before else []
    return Prepared(lambda report: judged(report, rules, old), first_violation(rules, before) if fail_fast else None)


def not_judged(report: "Report", error: UsageError) -> "Report":
    """The report of a comparison that could not be judged as it was asked to."""
    from quanterr.report.values import NOT_JUDGED

    before = report.reasons if report.verdict == "inconclusive" else []
    return report.model_copy(update={"verdict": "inconclusive", "reasons": [f"{NOT_JUDGED}{error}", *before]})


def report_verdict(judged: "Judged", candidate: str | None = None, quiet: bool = False, colored: bool = False) -> None:
    """The gates on standard error; on GitHub the verdict in the job's summary and as annotations as well."""
    from quanterr.gates.as_text import gate_lines

    if judged.gates and not quiet:
        of = [] if candidate is None else [no_command(f"{display(candidate)}:")]
        print("\n".join([*of, *gate_lines(judged.gates, colored)]), file=sys.stderr)
    annotate(judged, candidate)


def annotate(judged: "Judged", candidate: str | None = None) -> None:
    """On GitHub: the verdict in the job's summary and as annotations."""
    from quanterr.gates import github

    if not github.here():
        return
    for line in github.annotations(judged, candidate):
        print(line, file=sys.stderr)
    if problem := github.write_summary(judged, candidate):
        print(f"quanterr: {problem}", file=sys.stderr)


def _write(
    path: str,
    subjects: "Sequence[Subject]",
    verdicts: "Sequence[Verdict]",
    to: "list[Target]",
    baseline: str | None,
    against: str | None,
) -> None:
    """The whole document with its verdict, to where it was asked for and, with nothing against it, to the baseline."""
    from quanterr.gates import with_verdicts
    from quanterr.report import OUTPUTS
    from quanterr.report.documents import read_document
    from quanterr.report.files import Target, write_output

    document = with_verdicts(read_document(path), subjects, verdicts)
    if baseline is not None and against is None:
        to = [*to, Target(OUTPUTS[0], Path(os.path.realpath(baseline)))]
    for target in to:
        write_output(document, target)
    if baseline is not None:
        done = "is now this report" if against is None else f"is unchanged: {against}"
        print(f"baseline {display(baseline)} {done}", file=sys.stderr)


def _against_update(judged: "Verdict") -> str | None:
    """Why the report does not become the baseline: a gate that only warns would be lowered by it as well."""
    if judged.verdict != "pass":
        return judged.verdict
    failed = [gate.id for gate in judged.gates if gate.status == "fail"]
    return f"warning: gate {display(failed[0])} does not hold" if failed else None
