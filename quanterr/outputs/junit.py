"""Documents as JUnit XML, for Jenkins, GitLab, Azure and CircleCI.

A comparison or candidate is a suite. It has a test that the result is reliable and a test for each gate, which fails if
the gate does not hold, and is an error if it could not be judged. :func:`display` escapes all characters that XML
cannot represent.
"""

import re
from collections import Counter
from typing import IO
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from quanterr.documents.document import Document
from quanterr.documents.gate_results import Gate
from quanterr.outputs.formatting import (
    MAX_SENTENCE_LENGTH,
    describe_gate,
    describe_violation,
    format_observed,
    sentence,
)
from quanterr.outputs.sections import Suite
from quanterr.util.text import display, format_exact

CONDITION_END = re.compile(r"\s*(<=|>=|==|!=|<|>)[^<>=]*$")  # the end of a condition
MAX_VIOLATIONS = 100  # violations shown for each gate


def write(document: Document, file: IO[str]) -> None:
    """Write the document with test counts; the whole duration is attributed to the first suite."""
    seconds, started = document.run.seconds, display(document.run.started)[:19]  # JUnit timestamps have no time zone
    suites = [_render_suite(suite, started) for suite in document.listing.suites(document)]
    verdict = getattr(document, "verdict", None)
    root = Element("testsuites", name=f"quanterr: {verdict}" if verdict else "quanterr")
    for suite in suites:
        cases = suite.findall("testcase")
        for what, tag in (("errors", "error"), ("failures", "failure"), ("skipped", "skipped")):
            suite.set(what, str(sum(case.find(tag) is not None for case in cases)))
        suite.set("tests", str(len(cases)))
        suite.set("time", f"{seconds if suite is suites[0] else 0:.3f}")
    for what in ("tests", "failures", "errors"):
        root.set(what, str(sum(int(suite.get(what, "0")) for suite in suites)))
    root.set("time", f"{seconds:.3f}")
    root.extend(suites)
    ElementTree.indent(root)
    file.write(f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n')


def _render_suite(suite: Suite, started: str) -> Element:
    made = Element("testsuite", name=display(suite.name), timestamp=started)
    for case in suite.cases:
        element = _add_case(made, case.group, case.name)
        if case.problem:
            _add_problem(element, case.problem, case.message, case.text)
        if case.output:
            SubElement(element, "system-out").text = case.output
    seen: Counter[str] = Counter()
    for gate in suite.gates:
        name = _name_gate(gate)
        seen[name] += 1
        _add_gate(made, gate, name if seen[name] == 1 else f"{name} ({seen[name]})")
    return made


def _name_gate(gate: Gate) -> str:
    """Return the id of a rule, or its condition without the limit, so that a test keeps its name if limits change."""
    return display(gate.id) if gate.id != gate.require else sentence(CONDITION_END.sub("", gate.require))


def _add_gate(suite: Element, gate: Gate, name: str) -> None:
    """Add a test for a gate; if a gate of severity ``warn`` is violated, the test passes, with a note in its log."""
    case = _add_case(suite, "gates", name)
    if gate.status == "fail" and gate.severity == "error":
        problem = "error" if gate.is_unjudged else "failure"
        _add_problem(case, problem, sentence(gate.message), _format_violations(gate))
    elif gate.status == "fail":
        warning = f"{describe_gate(gate)[0]}: {sentence(gate.message)}"
        SubElement(case, "system-err").text = f"{warning}\n{_format_violations(gate)}"
    else:
        limits = f"limit {format_exact(gate.limit)}, margin {format_observed(gate.margin, 0)}"
        observed = f"observed {format_observed(gate.observed, gate.limit)}, {limits}"
        waived = "".join(f"\n{describe_violation(violation)}" for violation in gate.waived[:MAX_VIOLATIONS])
        SubElement(case, "system-out").text = f"{sentence(gate.require)}: {observed}{waived}"


def _format_violations(gate: Gate) -> str:
    lines = [describe_violation(violation) for violation in (*gate.violations, *gate.waived)[:MAX_VIOLATIONS]]
    more = len(gate.violations) + len(gate.waived) - len(lines)
    return "\n".join([*lines, *([f"and {more:,} more"] if more else [])])


def _add_case(suite: Element, group: str, name: str) -> Element:
    return SubElement(suite, "testcase", classname=group, name=name, time="0")


def _add_problem(case: Element, problem: str, message: str, text: str) -> None:
    SubElement(case, problem, message=display(message, MAX_SENTENCE_LENGTH), type=problem).text = text
