"""Outputs state each reason once, for several candidates and for gates."""

import io

import pytest
from make_snapshots import show_view, terminal
from msgspec.structs import replace
from support import sample_documents
from support.sample_reports import report_of, tiny

from quanterr.documents.gate_results import Verdict
from quanterr.documents.subjects import combine_verdicts, name_candidates
from quanterr.findings import make_finding
from quanterr.gates import judge
from quanterr.gates.as_text import format_gates
from quanterr.gates.github import format_summary, make_annotations
from quanterr.outputs import OUTPUTS
from quanterr.outputs.card import format_numbers
from quanterr.outputs.sections import merge_findings
from quanterr.views.comparison import items

RULES = ["upper(kld_mean) <= 0.02", "top1 >= 0.9"]
MISMATCH = "rope_theta is 10000, the original"
NAMED = [("both candidates", 2), ("all 3 candidates", 3)]


def sound_evaluation():
    document = sample_documents.evaluation()
    sound = [
        replace(candidate, findings=[], verdict="pass", reasons=["evaluated"], gates=[])
        for candidate in document.candidates
    ]
    return replace(document, candidates=sound, verdict="pass", reasons=["evaluated"])


DOCUMENTS = {
    "inconclusive": sample_documents.evaluation,
    "fails": lambda: judge(sound_evaluation(), require=RULES),
    "report": lambda: judge(report_of(sample_documents.model("x")), require=["snr_db >= 33", "layers <= 5"]),
}


def candidates_of(document):
    return getattr(document, "candidates", [document])


def messages_of(document) -> list[str]:
    gates = [gate for candidate in candidates_of(document) for gate in candidate.gates if gate.status == "fail"]
    assert gates
    return [gate.message for gate in gates]


@pytest.mark.parametrize(("words", "n"), NAMED)
def test_reason_shared_by_all_candidates_counts_them(words, n):
    verdicts = {str(k): Verdict("fail", ["too far", *([] if k else ["and more"])], []) for k in range(n)}

    verdict, stored = combine_verdicts(verdicts)

    assert ("fail", [f"{words}: too far", "0: and more"]) == (verdict, stored["reasons"])


def test_few_candidates_are_named():
    assert "a, b" == name_candidates(["a", "b"], 3)
    assert "a" == name_candidates(["a"], 1)


@pytest.mark.parametrize("output", [output.name for output in OUTPUTS if output.name in ("md", "csv", "html")])
def test_shared_reason_in_an_evaluation_is_printed_once(output):
    file = io.StringIO()
    next(output_name for output_name in OUTPUTS if output_name.name == output).write(
        sample_documents.evaluation(), file
    )
    header = file.getvalue().partition("wiki.txt")[0]

    assert 1 == header.count(MISMATCH) or output == "csv"
    assert f"both candidates: {MISMATCH}" in header


@pytest.mark.parametrize("name", DOCUMENTS)
class TestGates:
    def test_gate_reasons_appear_once_in_a_terminal(self, name):
        document = DOCUMENTS[name]()
        gates = [line for candidate in candidates_of(document) for line in format_gates(candidate.gates)]
        shown = terminal(lambda to: show_view(document, to), width=200) + "\n".join(gates)

        assert [1] * len(messages_of(document)) == [shown.count(message) for message in messages_of(document)]

    def test_gate_reasons_appear_once_in_a_summary(self, name):
        document = DOCUMENTS[name]()
        shown = "".join(map(format_summary, candidates_of(document))) + format_numbers(document)

        assert all(shown.count(message) <= 1 for message in messages_of(document))
        assert all(gate.require in shown for candidate in candidates_of(document) for gate in candidate.gates)

    def test_gate_reasons_appear_once_in_annotations(self, name):
        document = DOCUMENTS[name]()
        shown = "\n".join(line for candidate in candidates_of(document) for line in make_annotations(candidate))

        assert all(1 == shown.count(message) for message in messages_of(document))


def test_unjudged_gate_is_one_annotation():
    """The reason makes the verdict inconclusive and is also the message of a gate."""
    evaluated = sound_evaluation()
    few = [replace(candidate, scores=replace(candidate.scores, chunks=4)) for candidate in evaluated.candidates[:1]]
    judged = judge(replace(evaluated, candidates=few), require=RULES[:1]).candidates[0]

    assert "inconclusive" == judged.verdict
    assert 1 == len(make_annotations(judged))
    assert "cannot be judged" in format_summary(judged)


def test_finding_that_begins_with_its_recipe_names_it_once():
    finding = make_finding("fallback_recipe", "info", None, "gguf_q4_k: 2 weights are stored as gguf_q5_0")
    shown = merge_findings([("gguf_q4_k", finding), ("plan.json", replace(finding, message="another"))], 2).listed

    assert ["", "plan.json"] == [name for name, _ in shown]


def test_junit_explains_an_unreliable_report_in_one_test_only():
    report = report_of(tiny())
    suite, reason = items.suites(report)[0], report.reasons[0]

    assert reason in suite.cases[0].message
    assert reason not in suite.cases[0].output
