"""``quanterr gate``: judge a stored document without the models."""

import os
import pathlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from quanterr.cli.display import Display, guard_stdout, write_result
from quanterr.cli.options import AllBut, argument, with_options
from quanterr.cli.verdicts import report_verdict, summarize
from quanterr.errors import UsageError
from quanterr.options import GATES, GateOptions, JudgedLayers, Option
from quanterr.util.colors import paint, use_color
from quanterr.util.text import display, escape_commands

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quanterr.documents.document import Document
    from quanterr.documents.gate_results import Verdict
    from quanterr.documents.subjects import Subject
    from quanterr.outputs.files import Target

SCHEMA = "quanterr.gate"
TONES = {"pass": "pass", "fail": "fail", "inconclusive": "warning"}


@with_options
def gate(
    report: Annotated[str, argument("REPORT", "The JSON of compare, rank, sweep, evaluate, plan or inspect.")],
    gates: GateOptions,
    judged: JudgedLayers,
    show: Annotated[Display, AllBut(("sort_by", "no_plot", "verbose", "top_layers"))],
    update_baseline: Annotated[
        bool, Option("Overwrite the file of --baseline with this report if all gates hold, warnings included.", GATES)
    ] = False,
    explain: Annotated[str | None, Option("Explain how each rule judges this layer.", GATES, "LAYER")] = None,
) -> None:
    """Judge a stored report, ranking, evaluation or plan by rules, without the models.

    \b
    [bold]quanterr gate report.json --require 'snr_db >= 28'[/bold]
    [bold]quanterr gate report.json --thresholds thresholds.toml --baseline last-release.json[/bold]
    [bold]quanterr gate evaluation.json --fail-if 'upper(kld_mean) > 0.01'[/bold]
    [bold]quanterr gate report.json --thresholds fp8 --explain model.layers.0.mlp.up_proj.weight[/bold]

    A rule is a condition that must hold. It does not hold if a value is undefined or missing; an unknown name is an
    error. See quanterr guide gates for the metrics and functions.

    Exit status: 0 all gates hold; 1 a gate does not hold; 2 wrong usage or thresholds; 3 a report is unreadable; 4 the
    comparison was incomplete or meaningless.
    """

    from quanterr.documents.base import dumps
    from quanterr.documents.gate_results import exit_status
    from quanterr.documents.kinds import find_kind, read_document
    from quanterr.documents.subjects import find_counterpart
    from quanterr.gates import (
        combine_subject_verdicts,
        find_waivers,
        github,
        judge_subjects,
        prepare,
        read_subjects,
        store_verdicts,
        warn_of_waivers,
    )
    from quanterr.gates.explanation import explain_layer
    from quanterr.gates.selectors import restrict_rules
    from quanterr.gates.waivers import waive_findings

    colored = use_color(sys.stderr, show.colors)
    baseline = os.fspath(gates.baseline) if isinstance(gates.baseline, str | os.PathLike) else None
    if update_baseline and baseline is None:
        raise UsageError("--update-baseline overwrites the file of --baseline: name one with --baseline")
    if baseline is not None and _is_same_file(report, baseline):
        raise UsageError(f"--baseline {display(baseline)}: is the report itself; give an older report")
    to = show.targets([report, baseline])
    document_kind = find_kind(report)
    rules, before = prepare(gates, document_kind, required=True, updated=update_baseline)
    subjects = read_subjects(report, rules, document_kind, compared=bool(before), strict=gates.strict_warnings)
    rules = restrict_rules(rules, judged.layers, subjects)
    verdicts = judge_subjects(subjects, rules, before)
    if explain is not None:
        lines = [
            line
            for subject in subjects
            for line in explain_layer(subject, rules, explain, find_counterpart(subject, before))
        ]
        stream = sys.stderr if any(target.path is None for target in to) else sys.stdout
        print("\n".join(map(escape_commands, lines)), file=stream)
    for subject, verdict in zip(subjects, verdicts, strict=True):
        report_verdict(verdict, subject.name, quiet=show.quiet, colored=colored)
        for waived in subject.waived:
            print(f"waived: {escape_commands(waived)}", file=sys.stderr)
    whole = combine_subject_verdicts(subjects, verdicts)
    waivers = find_waivers(rules)
    is_shown = github.has_summary()
    stored = read_document(report) if waivers or is_shown or to or update_baseline else None
    document = stored and waive_findings(stored, waivers)
    if document and waivers:
        warn_of_waivers(waivers, verdicts, document)
    _print_verdict(whole, show.quiet, colored)
    if document and is_shown:
        stores_verdict = hasattr(document, "verdict")  # False for a plan
        summarize(store_verdicts(document, subjects, verdicts) if stores_verdict else document, baseline)
    if show.as_json:
        with guard_stdout():
            print(dumps(_list_fields(whole, subjects, verdicts)), flush=True)
    if document and (to or update_baseline):
        _write_document(store_verdicts(document, subjects, verdicts), to, baseline if update_baseline else None, whole)
    damage = [message for subject in subjects for message in subject.damage]
    raise typer.Exit(exit_status(whole, show.allow_partial, damage))


def _list_fields(whole: "Verdict", subjects: "Sequence[Subject]", verdicts: "Sequence[Verdict]") -> dict[str, object]:
    if subjects[0].name is None:
        return {"schema": SCHEMA, **whole._asdict()}
    pairs = zip(subjects, verdicts, strict=True)
    candidates = [{"name": subject.name} | verdict._asdict() for subject, verdict in pairs]
    judged = {key: value for key, value in whole._asdict().items() if key != "gates"}
    return {"schema": SCHEMA, **judged, "candidates": candidates}


def _print_verdict(verdict: "Verdict", quiet: bool, colored: bool) -> None:
    from quanterr.documents.gate_results import list_other_reasons
    from quanterr.outputs.formatting import sentence

    print(f"verdict: {paint(verdict.verdict, TONES[verdict.verdict], colored)}", file=sys.stderr)
    if quiet or verdict.verdict != "inconclusive":
        return
    for reason in list_other_reasons(verdict):
        print(f"  - {escape_commands(sentence(reason))}", file=sys.stderr)


def _is_same_file(report: str, baseline: str) -> bool:
    """Return True if both paths name the same file, whose comparison with itself could not show any change."""
    try:
        return os.path.samefile(report, baseline)
    except (OSError, ValueError):  # reading the file raises the proper error
        return False


def _write_document(document: "Document", to: "list[Target]", baseline: str | None, judged: "Verdict") -> None:
    """Write the document to the targets and, if all gates hold, to the baseline."""
    from quanterr.outputs import OUTPUTS
    from quanterr.outputs.files import Target

    against: str | None = None if judged.verdict == "pass" else judged.verdict
    failed = [gate.id for gate in judged.gates if gate.status == "fail"]
    if against is None and failed:  # a warning, which the new baseline would hide
        against = f"warning: gate {display(failed[0])} does not hold"
    if baseline is not None and against is None:
        to = [*to, Target(OUTPUTS[0], pathlib.Path(os.path.realpath(baseline)))]
    for target in to:
        write_result(document, target)
    if baseline is not None:
        done = "updated to this report" if against is None else f"not updated: {against}"
        print(f"baseline {display(baseline)}: {done}", file=sys.stderr)
