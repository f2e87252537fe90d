"""The report as JUnit XML, as Jenkins, GitLab, Azure and CircleCI show it.

Suite ``comparison``: whether the result can be relied on, and each reason why not, as an error: what was not
compared, what was found. Suite ``gates``: a test for each gate; one that does not hold is a failure.
All text goes through :func:`display`, which leaves no character that XML cannot hold.
"""

from typing import IO
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from quanterr.report.formatting import BUCKETS, LONG, coverage_line, gate_words, judged, sentence, violation_line
from quanterr.report.gate_results import Gate
from quanterr.report.model import Report
from quanterr.util.text import count, display, unrounded

MAX_CASES = 1000  # of a kind
MAX_VIOLATIONS = 100  # of a gate


def write(report: Report, file: IO[str]) -> None:
    """Write it."""
    suites = [_comparison(report)]
    if report.gates:
        suites.append(Element("testsuite", name="gates", timestamp=_seconds(report.run.started)))
        add_gates(suites[-1], report.gates)
    file.write(written(suites, report.verdict, report.run.seconds))


def written(suites: list[Element], verdict: str, seconds: float) -> str:
    """The document, with what is in each suite counted; the first took all the time."""
    root = Element("testsuites", name=f"quanterr: {verdict}")
    for suite in suites:
        cases = suite.findall("testcase")
        for what, kind in (("errors", "error"), ("failures", "failure"), ("skipped", "skipped")):
            suite.set(what, str(sum(case.find(kind) is not None for case in cases)))
        suite.set("tests", str(len(cases)))
        suite.set("time", f"{seconds if suite is suites[0] else 0:.3f}")
    for what in ("tests", "failures", "errors"):
        root.set(what, str(sum(int(suite.get(what, "0")) for suite in suites)))
    root.set("time", f"{seconds:.3f}")
    root.extend(suites)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _comparison(report: Report) -> Element:
    suite = Element("testsuite", name="comparison", timestamp=_seconds(report.run.started))
    whole = add_case(suite, "comparison", "everything selected was compared and can be relied on")
    reasons = "\n".join(sentence(reason) for reason in report.reasons)
    if report.verdict == "inconclusive":
        add_problem(whole, "error", f"inconclusive: {sentence(report.reasons[0]) if report.reasons else ''}", reasons)
    elif report.verdict == "fail" and not any(_fails(gate) for gate in report.gates):
        add_problem(whole, "failure", "fail", reasons)
    SubElement(whole, "system-out").text = f"{coverage_line(report)}\n{reasons}"
    for item in report.not_compared[:MAX_CASES]:
        case = add_case(suite, f"comparison.{item.side}", display(item.layer_name))
        add_problem(
            case, "error", f"not compared: {BUCKETS.get(item.bucket, display(item.bucket))}", sentence(item.reason)
        )
    _more(suite, len(report.not_compared), "tensor was not compared", "tensors were not compared")
    errors = [found for found in report.findings if found.severity == "error"]
    for found in errors[:MAX_CASES]:
        case = add_case(suite, f"comparison.{display(found.code)}", display(found.layer or "the whole"))
        remedy = sentence(found.remedy) if found.remedy else ""
        add_problem(case, "error", sentence(found.message), remedy)
    _more(suite, len(errors), "error", "errors")
    return suite


def add_gates(suite: Element, gates: list[Gate]) -> None:
    """A test for each gate; of one that only warns, the log says that it does not hold."""
    for gate in gates:
        named = f"{display(gate.id)}: " if gate.id != gate.require else ""
        case = add_case(suite, "gates", f"{named}{sentence(gate.require)}")
        if _fails(gate):
            add_problem(case, "failure", sentence(gate.message), _violations(gate))
        elif gate.status == "fail":
            SubElement(
                case, "system-err"
            ).text = f"{gate_words(gate)[0]}: {sentence(gate.message)}\n{_violations(gate)}"
        else:
            limits = f"limit {unrounded(gate.limit)}, margin {judged(gate.margin, 0)}"
            description = f"observed {judged(gate.observed, gate.limit)}, {limits}"
            SubElement(case, "system-out").text = description


def _fails(gate: Gate) -> bool:
    return gate.status == "fail" and gate.severity == "error"


def _violations(gate: Gate) -> str:
    lines = [violation_line(violation) for violation in gate.violations[:MAX_VIOLATIONS]]
    more = len(gate.violations) - len(lines)
    return "\n".join([*lines, *([f"and {more:,} more"] if more else [])])


def add_case(suite: Element, classname: str, name: str) -> Element:
    """A test, which passes unless a problem is added to it."""
    return SubElement(suite, "testcase", classname=classname, name=name, time="0")


def add_problem(case: Element, kind: str, message: str, text: str) -> None:
    """Why a test does not pass; ``kind`` is error or failure."""
    SubElement(case, kind, message=display(message, LONG), type=kind).text = text


def _more(suite: Element, n: int, one: str, many: str) -> None:
    """What has no test of its own."""
    if n > MAX_CASES:
        case = add_case(suite, "comparison", f"and {count(n - MAX_CASES, 'more ' + one, 'more ' + many)}")
        add_problem(case, "error", "too many to list; the JSON report has them all", "")


def _seconds(started: str) -> str:
    """A time as JUnit has it, without its zone."""
    return display(started)[:19]
