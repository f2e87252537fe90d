"""Waivers: known faults are accepted until a day, listed, and come back after it."""

import json
from datetime import date

import pytest
from msgspec.structs import replace
from support import sample_documents
from support.forked import call
from support.reports import make, row
from support.stored import pair

import quanterr
from quanterr.cli import app
from quanterr.documents.base import Finding
from quanterr.documents.comparison.values import ReportValues
from quanterr.documents.gate_results import exit_status
from quanterr.errors import Status, UsageError
from quanterr.gates import judge, waivers
from quanterr.gates.explanation import explain_layer
from quanterr.gates.expression import parse
from quanterr.gates.fail_fast import make_violation_check
from quanterr.gates.rules import Rule, read_rules
from quanterr.gates.verdicts import judge_subject
from quanterr.gates.waivers import Waiver

UP = "model.layers.0.mlp.up_proj.weight"
RULE = 'schema = 1\n[[rule]]\nid = "layers"\nrequire = "snr_db >= 30"\n'
WAIVE = '[[waive]]\n{0}\nlayers = ["{1}"]\nuntil = {2}\nreason = "known since 1.0"\n'
LAST = date(2027, 3, 1)
LAYERS = {"a": 20.0, "b": 31.0, "c": 40.0}


@pytest.fixture(autouse=True)
def today(monkeypatch):
    monkeypatch.setattr(waivers, "_today", lambda: LAST)


def waive(rule=None, code=None, layers=("a",), until=LAST):
    return Waiver(rule, code, tuple(layers), until, "known since 1.0", "thresholds.toml: waiver 1")


def judge_report(report, *known, require="snr_db >= 30"):
    return judge_subject(ReportValues(report), [Rule("layers", parse(require), waivers=known)])


class TestRules:
    def test_waived_layer_is_left_out_and_listed(self):
        gate = judge_report(make(LAYERS), waive("layers")).gates[0]

        assert ("pass", 31.0, "b", 2) == (gate.status, gate.observed, gate.worst_layer, gate.judged)
        assert [("a", 20.0, "waived until 2027-03-01: known since 1.0")] == [
            (waiver.layer, waiver.observed, waiver.reason) for waiver in gate.waived
        ]
        assert gate.message.endswith("; 1 waived")

    @pytest.mark.parametrize(
        "known",
        [waive("layers", layers=("b",)), waive("other"), waive("layers", layers=()), waive(code="excess_error")],
    )
    def test_other_waivers_change_nothing(self, known):
        assert judge_report(make(LAYERS)) == judge_report(make(LAYERS), known)

    def test_waiver_ends_after_its_last_day(self, monkeypatch):
        monkeypatch.setattr(waivers, "_today", lambda: date(2027, 3, 2))

        assert "fail" == judge_report(make(LAYERS), waive("layers")).verdict

    def test_other_layers_still_fail(self):
        gate = judge_report(make(LAYERS | {"d": 25.0}), waive("layers")).gates[0]

        assert ("fail", ["d"], ["a"]) == (
            gate.status,
            [violation.layer for violation in gate.violations],
            [waiver.layer for waiver in gate.waived],
        )

    def test_waiver_of_all_layers_leaves_none_to_judge(self):
        assert ("pass", 0) == (
            (gate := judge_report(make({"a": 20.0}), waive("layers", layers=("*",))).gates[0]).status,
            gate.judged,
        )

    def test_explanation_of_a_layer_names_its_waiver(self):
        subject, rule = ReportValues(make(LAYERS)), Rule("layers", parse("snr_db >= 30"), waivers=(waive("layers"),))

        assert explain_layer(subject, [rule], "a")[1].endswith("; waived until 2027-03-01: known since 1.0")
        assert "waived" not in explain_layer(subject, [rule], "b")[1]

    def test_waiver_without_layers_is_about_the_whole(self):
        rule = "global(overall_snr_db) >= 30"

        assert "fail" == judge_report(make(LAYERS), waive("layers", layers=("*",)), require=rule).verdict
        assert "pass" == judge_report(make(LAYERS), waive("layers", layers=()), require=rule).verdict

    def test_damage_is_not_waived_with_a_rule(self):
        report = make(LAYERS, rows=[row("d", 30.0, finite=False)])

        assert "inconclusive" == judge_report(report, waive("layers", layers=("a", "d"))).verdict

    def test_fail_fast_goes_on_after_a_waived_layer(self, report):
        layer = report.layers[0]
        check = make_violation_check([Rule("id", parse("snr_db >= 99"))], None)
        known = (waive("id", layers=(layer.layer_name,)),)

        assert check(layer) is not None
        assert make_violation_check([Rule("id", parse("snr_db >= 99"), waivers=known)], None)(layer) is None


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return quanterr.compare(*pair(tmp_path_factory.mktemp("waivers")), device="cpu")


@pytest.fixture
def broken_report(report):
    finding = Finding("excess_error", "error", UP, f"{UP}: broken", None, {})
    return replace(
        report, findings=[finding], verdict="inconclusive", reasons=[finding.message], reasons_by=["finding"]
    )


class TestFindings:
    @pytest.fixture
    def thresholds(self, tmp_path):
        path = tmp_path / "thresholds.toml"
        path.write_text(RULE.replace("30", "1") + WAIVE.format('finding = "excess_error"', UP, LAST))
        return path

    def test_waived_error_is_an_info_and_layers_are_judged(self, broken_report, thresholds):
        judged = judge(broken_report, thresholds)

        assert ("pass", Status.OK) == (judged.verdict, exit_status(judged))
        assert f"waived: excess_error of {UP} until 2027-03-01: known since 1.0" in judged.reasons[0]
        assert "info" == judged.findings[0].severity
        assert judged.findings[0].message == f"{UP}: broken; error waived until 2027-03-01: known since 1.0"

    def test_stored_waiver_does_not_outlive_its_file(self, broken_report, thresholds, monkeypatch):
        stored = judge(broken_report, thresholds)
        again = judge(stored, require="snr_db >= 1")
        monkeypatch.setattr(waivers, "_today", lambda: date(2027, 3, 2))

        assert ("inconclusive", broken_report.findings) == (again.verdict, again.findings)
        assert "inconclusive" == judge(stored, thresholds).verdict

    def test_other_error_is_not_excused(self, broken_report, thresholds):
        other = replace(broken_report.findings[0], code="bad_rows")
        judged = judge(replace(broken_report, findings=[*broken_report.findings, other]), thresholds)

        assert ("inconclusive", [other.message]) == (judged.verdict, judged.reasons[:1])

    @pytest.mark.parametrize(("name", "severity"), [("other", "error"), (None, "error")])
    def test_finding_of_another_layer_or_the_whole_is_not_waived(self, broken_report, thresholds, name, severity):
        other = replace(broken_report.findings[0], layer=name, severity=severity)

        assert "inconclusive" == judge(replace(broken_report, findings=[other]), thresholds).verdict


class TestInspections:
    @pytest.mark.parametrize(
        ("code", "status", "said"),
        [
            ("missing_part", Status.OK, "waived: missing_part until 2999-01-01: known since 1.0"),
            ("missing_codes", Status.INCONCLUSIVE, "no longer needed"),
        ],
    )
    def test_waived_error_of_an_inspection_leaves_its_rules_to_judge(self, tmp_path, capsys, code, status, said):
        error = Finding("missing_part", "error", None, "no scales", None, {})
        replace(sample_documents.inspection(), findings=[error]).save(tmp_path / "inspection.json")
        path = tmp_path / "thresholds.toml"
        rule = RULE.replace("snr_db >= 30", "bits_per_weight <= 99")
        path.write_text(rule + f'[[waive]]\nfinding = "{code}"\nuntil = 2999-01-01\nreason = "known since 1.0"\n')
        with pytest.raises(SystemExit) as left:
            app(["gate", str(tmp_path / "inspection.json"), "--thresholds", str(path)])

        assert status == left.value.code
        assert said in capsys.readouterr().err


FILES = {
    'rule = "no"\n': "waiver 1: no rule is called 'no'; there are layers",
    'finding = "excess_eror"\n': "no finding is called 'excess_eror'; did you mean excess_error?",
    "": "needs either rule",
    'rule = "layers"\nfinding = "excess_error"\n': "needs either rule",
    'rule = "layers"\nx = 1\n': "unknown key x; known keys: rule, finding, layers, until, reason",
    'rule = "layers"\nreason = "x"\n': "needs until = 2027-03-01",
    'rule = "layers"\nreason = "x"\nuntil = "2027-03-01"\n': "needs until = 2027-03-01, its last day, without quotes",
    'rule = "layers"\nuntil = 2027-03-01\n': 'needs reason = "…"',
    'rule = "layers"\nuntil = 2027-03-01\nreason = "x"\nlayers = "a"\n': "layers must be a list",
}


@pytest.mark.parametrize(("text", "message"), FILES.items())
def test_wrong_waiver_is_an_error_that_says_what_to_write(tmp_path, text, message):
    path = tmp_path / "thresholds.toml"
    path.write_text(f"{RULE}[[waive]]\n{text}")

    with pytest.raises(UsageError) as error:
        read_rules(path)
    assert message in str(error.value)


@pytest.mark.session
def test_all_outputs_list_what_was_waived(tmp_path):
    path, summary = tmp_path / "thresholds.toml", tmp_path / "summary.md"
    path.write_text(RULE.replace("30", "99") + WAIVE.format('rule = "layers"', "*", "2999-01-01"))
    path.write_text(path.read_text() + WAIVE.format('finding = "excess_error"', "*", "2999-01-01"))
    made_by = ("report.json", "report.md", "report.xml", "report.html")
    words = [word for name in made_by for word in ("-o", tmp_path / name)]
    env = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}
    done = call("compare", *pair(tmp_path), "--thresholds", path, *words, env=env)
    texts = [(tmp_path / name).read_text() for name in ("report.xml", "report.html")]

    assert (Status.OK, 2) == (
        done.returncode,
        len(json.loads((tmp_path / "report.json").read_text())["gates"][0]["waived"]),
    )
    assert all(
        "waived until 2999-01-01: known since 1.0" in text for text in (done.stderr, summary.read_text(), *texts)
    )
    assert "2 failures of gates waived" in done.stdout
    assert "2 failures of gates waived" in (tmp_path / "report.md").read_text()
    assert "note: thresholds.toml" not in done.stderr
    assert f"note: {path}: waiver 2 of excess_error is no longer needed: remove it" in done.stderr
