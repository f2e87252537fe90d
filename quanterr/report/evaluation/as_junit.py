"""The evaluation as JUnit XML: a suite for each candidate, with a test for its reliability and one for each gate."""

from typing import IO
from xml.etree.ElementTree import Element, SubElement

from quanterr.report.as_junit import add_case, add_gates, add_problem, written
from quanterr.report.evaluation.model import Evaluated, Evaluation
from quanterr.report.formatting import sentence
from quanterr.util.text import display


def write(evaluation: Evaluation, file: IO[str]) -> None:
    """Write it."""
    suites = [_candidate(candidate) for candidate in evaluation.candidates]
    file.write(written(suites, evaluation.verdict, evaluation.run.seconds))


def _candidate(candidate: Evaluated) -> Element:
    suite = Element("testsuite", name=display(candidate.name))
    case = add_case(suite, "evaluation", "evaluated completely, and can be relied on")
    if candidate.verdict == "inconclusive":
        add_problem(case, "error", f"inconclusive: {sentence(candidate.reasons[0])}", "")
    if candidate.findings:
        told = (f"{found.severity}: {sentence(found.message)}" for found in candidate.findings)
        SubElement(case, "system-err").text = "\n".join(told)
    add_gates(suite, candidate.gates)
    return suite
