"""The ranking as JUnit XML: a suite for each candidate, with a test for whether it can be ranked and for each gate."""

from typing import IO
from xml.etree.ElementTree import Element, SubElement

from quanterr.report.as_junit import add_case, add_gates, add_problem, written
from quanterr.report.formatting import sentence
from quanterr.report.ranking.as_table import conclusion
from quanterr.report.ranking.model import Candidate, Ranking
from quanterr.util.text import display


def write(ranking: Ranking, file: IO[str]) -> None:
    """Write it."""
    suites = [_candidate(candidate) for candidate in ranking.candidates]
    SubElement(suites[0], "system-out").text = sentence(conclusion(ranking))
    file.write(written(suites, ranking.verdict, ranking.run.seconds))


def _candidate(candidate: Candidate) -> Element:
    suite = Element("testsuite", name=display(candidate.name))
    case = add_case(suite, "ranking", "everything selected was compared and can be relied on")
    if candidate.not_ranked:
        add_problem(case, "error", f"not ranked: {sentence(candidate.not_ranked)}", "")
    add_gates(suite, candidate.gates)
    return suite
