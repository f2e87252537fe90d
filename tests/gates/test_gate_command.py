"""``quanterr gate`` and the gates of ``quanterr compare``: statuses, messages and written files."""

import json
import os
import re
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch
from msgspec.structs import replace
from support.forked import call
from support.stored import original, pair, to_fp8, write

import quanterr
from quanterr.documents.gate_results import Gate, Violation
from quanterr.errors import Status, UsageError
from quanterr.gates.github import MAX_SUMMARY, format_summary, make_annotations
from quanterr.gates.verdicts import Verdict
from quanterr.util.text import format_decisive

pytestmark = pytest.mark.session

UP, Q = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"
HOSTILE = [
    "::error::esc\x1b[31m\n::add-mask::x.weight",
    "##[error]x.weight",
    "`back``ticks`|<b>.weight",
    "\u202eevil\u2028.weight",
    "%0A::stop-commands::.weight",
    r"a\|b|c##vso[task.complete]x.weight",
]
LOCAL = {"GITHUB_ACTIONS": "", "GITHUB_STEP_SUMMARY": ""}


def gate(*words, env=None):
    return call("gate", *words, env=LOCAL | (env or {}))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return quanterr.compare(*pair(tmp_path_factory.mktemp("gate")))


@pytest.fixture
def report_path(report, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(report.to_json())
    return path


@pytest.fixture
def worse(report, tmp_path):
    """The same report with one layer 3 dB worse."""
    fields = json.loads(report.to_json())
    fields["layers"][0]["snr_db"] -= 3
    path = tmp_path / "worse.json"
    path.write_text(json.dumps(fields))
    return path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    x = {name: torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).bfloat16() for name in HOSTILE}
    compared = quanterr.compare(write(folder / "x.safetensors", x), write(folder / "y.safetensors", to_fp8(x)))
    path = folder / "report.json"
    path.write_text(compared.to_json())
    assert set(HOSTILE) == {layer.layer_name for layer in compared.layers}
    return path


class TestStatus:
    def test_copied_original_is_inconclusive_with_its_reason(self, tmp_path):
        x = write(tmp_path / "x.safetensors", {UP: torch.ones(16, 16)})
        path = tmp_path / "report.json"
        path.write_text(quanterr.compare(x, shutil.copy(x, tmp_path / "copy.safetensors")).to_json())

        done = gate(path, "--require", "snr_db >= 20")

        assert Status.INCONCLUSIVE == done.returncode
        assert "verdict: inconclusive\n  - all compared tensors are identical; " in done.stderr

    def test_satisfied_gates_exit_with_0(self, report_path):
        done = gate(report_path, "--require", "snr_db >= 20", "--fail-if", "findings.error > 0")

        assert (Status.OK, "") == (done.returncode, done.stdout)
        assert done.stderr.startswith(
            "gates: 2 of 2 hold\npass: gate snr_db >= 20 holds: 3 layers (1 identical), the nearest"
        )
        assert done.stderr.endswith("verdict: pass\n")

    def test_failed_gate_exits_with_1(self, report_path):
        done = gate(report_path, "--require", "snr_db >= 99", "--require", "min(snr_db) >= 20")

        assert Status.GATE_FAILED == done.returncode
        assert done.stderr.startswith(
            "gates: 1 of 2 hold\nFAIL: gate snr_db >= 99 does not hold: 2 of 3 layers (1 identical), the worst"
        )
        assert done.stderr.endswith("verdict: fail\n")

    @pytest.mark.parametrize(
        "words",
        [
            (),
            ("--require", "snr >= 30"),
            ("--thresholds", "no-such-file.toml"),
            ("--require", "delta(snr_db) >= 0"),
            ("--require", "snr_db >= 1", "--update-baseline"),
            ("--require", "snr_db >= 1", "--explain", "nowhere"),
            ("--require", "snr_db >= 1", "-o", "report.docx"),
        ],
        ids=" ".join,
    )
    def test_wrong_usage_exits_with_2(self, report_path, words):
        done = gate(report_path, *words)

        assert (Status.USAGE, "") == (done.returncode, done.stdout)
        assert done.stderr.startswith("quanterr: ")

    def test_unrelated_baseline_exits_with_2(self, report_path, worse):
        fields = json.loads(worse.read_text())
        fields["original"]["bytes"] += 1
        worse.write_text(json.dumps(fields))
        done = gate(report_path, "--require", "delta(snr_db) >= 0", "--baseline", worse)

        assert Status.USAGE == done.returncode
        assert "the baseline does not apply to this report: it has a different original" in done.stderr

    @pytest.mark.parametrize("link", [os.link, os.symlink, None])
    @pytest.mark.parametrize("words", [(), ("--update-baseline",)], ids=" ".join)
    def test_report_as_its_own_baseline_exits_with_2(self, report_path, link, words):
        before, baseline = (
            report_path.read_text(),
            report_path if link is None else report_path.with_name("baseline.json"),
        )
        if link:
            link(report_path, baseline)
        done = gate(report_path, "--require", "delta(snr_db) >= 0", "--baseline", baseline, *words)

        assert Status.USAGE == done.returncode
        assert f"quanterr: --baseline {baseline}: is the report itself; give an older report" in done.stderr
        assert before == report_path.read_text()

    def test_missing_report_is_named(self, report_path):
        done = gate("no.json", "--require", "delta(snr_db) >= 0", "--baseline", report_path)

        assert (Status.UNREADABLE, "quanterr: no.json: no such file\n") == (done.returncode, done.stderr)

    @pytest.mark.parametrize("which", ["report", "baseline"])
    def test_unreadable_report_exits_with_3(self, report_path, which):
        cut = report_path.with_name("cut.json")
        cut.write_text(report_path.read_text()[:-30])
        words = (cut, "--baseline", report_path) if which == "report" else (report_path, "--baseline", cut)
        done = gate(*words, "--require", "delta(snr_db) >= 0")

        assert Status.UNREADABLE == done.returncode
        assert f"quanterr: {cut}: is not valid UTF-8 JSON" in done.stderr

    @pytest.mark.parametrize("rule", ["snr_db >= 20", "snr_db >= 99"])
    def test_unreliable_report_exits_with_4_whatever_the_gates_state(self, report_path, rule):
        fields = json.loads(report_path.read_text())
        fields["complete"] = False
        report_path.write_text(json.dumps(fields))
        done = gate(report_path, "--require", rule)

        assert Status.INCONCLUSIVE == done.returncode
        assert done.stderr.endswith("verdict: inconclusive\n  - the run was interrupted\n")

    def test_damage_is_not_excused_by_allow_partial(self, report_path):
        fields = json.loads(report_path.read_text())
        finding = {"code": "x", "severity": "error", "layer": None, "message": "m", "remedy": None, "evidence": {}}
        fields |= {"verdict": "inconclusive", "reasons": ["m"], "findings": [finding]}
        report_path.write_text(json.dumps(fields | {"records": fields["records"] | {"findings": 1}}))

        assert Status.INCONCLUSIVE == gate(report_path, "--require", "snr_db >= 20", "--allow-partial").returncode

    def test_allowed_partial_report_is_judged(self, report_path):
        fields = json.loads(report_path.read_text())
        fields |= {"verdict": "inconclusive", "reasons": ["part of it"]}
        report_path.write_text(json.dumps(fields))

        assert Status.OK == gate(report_path, "--require", "snr_db >= 20", "--allow-partial").returncode
        assert Status.GATE_FAILED == gate(report_path, "--require", "snr_db >= 99", "--allow-partial").returncode


class TestMessages:
    def test_violation_shows_enough_digits_limit_and_margin(self, report_path, report):
        lower, higher = sorted(layer.snr_db for layer in report.layers)
        limit = lower + 1e-12
        text = gate(report_path, "--require", f"snr_db >= {limit!r}").stderr
        both = gate(report_path, "--require", "snr_db >= 99").stderr

        assert f"gate snr_db >= {limit!r} does not hold" in text
        assert f"{format_decisive(lower, limit)} (margin {format_decisive(lower - limit, 0)})" in text
        assert float(format_decisive(lower, limit)) < limit
        assert f"{higher:.5g}, limit 99, margin {higher - 99:.5g}" in both

    def test_violation_shows_the_reason_and_at_most_five_layers(self, tmp_path, hostile):
        path = tmp_path / "thresholds.toml"
        path.write_text('schema = 1\n[[rule]]\nid = "x"\nrequire = "snr_db >= 99"\nreason = "prompts drift"\n')
        fields = json.loads(hostile.read_text())
        fields["layers"] += [fields["layers"][0] | {"layer_name": f"more{n}"} for n in range(3)]
        fields["aggregate"]["total_layers"] += 3
        (tmp_path / "report.json").write_text(json.dumps(fields))
        lines = gate(tmp_path / "report.json", "--thresholds", path).stderr.splitlines()

        assert "      because: prompts drift" in lines
        assert 5 == sum(line.startswith("      - ") for line in lines)
        assert "      and 4 more" in lines

    def test_warning_does_not_change_the_status(self, report_path, tmp_path):
        path = tmp_path / "thresholds.toml"
        path.write_text('schema = 1\n[[rule]]\nid = "x"\nrequire = "snr_db >= 99"\nseverity = "warn"\n')
        done = gate(report_path, "--thresholds", path)

        assert Status.OK == done.returncode
        assert "warn: gate x: snr_db >= 99 does not hold" in done.stderr

    def test_strict_warnings_change_the_status(self, report_path, tmp_path):
        path = tmp_path / "thresholds.toml"
        path.write_text('schema = 1\n[[rule]]\nid = "x"\nrequire = "snr_db >= 99"\nseverity = "warn"\n')
        done = gate(report_path, "--thresholds", path, "--strict-warnings")

        assert Status.GATE_FAILED == done.returncode
        assert "FAIL: gate x: snr_db >= 99 does not hold" in done.stderr

    def test_explain_goes_to_stdout(self, report_path):
        done = gate(report_path, "--thresholds", "fp8", "--explain", UP)
        lines = done.stdout.splitlines()

        assert f"layer {UP}, in layers" == lines[0]
        assert lines[1].startswith("  rule layers: snr_db >= 25: holds: ")
        assert "  rule model: global(overall_snr_db) >= 30: applies to the whole model" == lines[2]

    def test_explain_goes_to_stderr_where_the_report_goes_to_stdout(self, report_path):
        done = gate(report_path, "--thresholds", "fp8", "--explain", UP, "-o", "-")

        assert "pass" == json.loads(done.stdout)["verdict"]
        assert f"layer {UP}, in layers" in done.stderr


class TestWrittenFiles:
    def test_judged_report_is_written_with_its_new_verdict(self, report_path, tmp_path):
        judged = tmp_path / "judged.json"
        gate(report_path, "--require", "snr_db >= 99", "-o", judged)
        before, after = json.loads(report_path.read_text()), json.loads(judged.read_text())

        assert ("pass", [], "fail") == (before["verdict"], before["gates"], after["verdict"])
        assert [after["gates"][0]["message"]] == after["reasons"]
        assert before["layers"] == after["layers"]
        assert quanterr.read_report(judged).to_json() == judged.read_text()

    def test_judging_again_forgets_earlier_gates(self, report_path, tmp_path):
        judged, again = tmp_path / "judged.json", tmp_path / "again.json"
        gate(report_path, "--require", "snr_db >= 99", "-o", judged)
        gate(judged, "--require", "snr_db >= 20", "-o", again)
        fields = json.loads(again.read_text())

        assert ("pass", 1) == (fields["verdict"], len(fields["gates"]))
        assert ["everything selected was compared; the gate holds"] == fields["reasons"]

    def test_report_itself_is_never_overwritten(self, report_path):
        done = gate(report_path, "--require", "snr_db >= 20", "-o", report_path)

        assert Status.USAGE == done.returncode

    def test_baseline_is_updated_only_if_asked_and_all_gates_hold(self, report_path, worse, tmp_path):
        baseline = tmp_path / "baseline.json"
        baseline.write_text(report_path.read_text())
        rule = ("--require", "delta(snr_db) >= -0.5", "--baseline", baseline)

        done = gate(worse, *rule, "--update-baseline")
        assert Status.GATE_FAILED == done.returncode
        assert done.stderr.endswith(f"baseline {baseline}: not updated: fail\n")
        assert report_path.read_text() == baseline.read_text()

        done = gate(worse, "--require", "delta(snr_db) >= -5", "--baseline", baseline)
        assert Status.OK == done.returncode
        assert report_path.read_text() == baseline.read_text()

        done = gate(worse, "--require", "delta(snr_db) >= -5", "--baseline", baseline, "--update-baseline")
        assert done.stderr.endswith(f"baseline {baseline}: updated to this report\n")
        assert json.loads(worse.read_text())["layers"] == json.loads(baseline.read_text())["layers"]

        assert Status.GATE_FAILED == gate(worse, "--require", "delta(snr_db) > 0", "--baseline", baseline).returncode

    def test_failed_warning_keeps_the_baseline(self, report_path, worse, tmp_path):
        path, baseline = tmp_path / "thresholds.toml", tmp_path / "baseline.json"
        path.write_text('schema = 1\n[[rule]]\nid = "x"\nrequire = "delta(snr_db) >= -0.5"\nseverity = "warn"\n')
        baseline.write_text(report_path.read_text())
        done = gate(worse, "--thresholds", path, "--baseline", baseline, "--update-baseline")

        assert Status.OK == done.returncode
        assert done.stderr.endswith(f"baseline {baseline}: not updated: warning: gate x does not hold\n")
        assert report_path.read_text() == baseline.read_text()

    def test_baseline_for_another_original_is_never_updated(self, report_path, worse):
        fields = json.loads(worse.read_text())
        fields["original"]["tensors"] += 1
        worse.write_text(json.dumps(fields))
        done = gate(report_path, "--require", "snr_db >= 1", "--baseline", worse, "--update-baseline")

        assert Status.USAGE == done.returncode
        assert fields == json.loads(worse.read_text())


class TestCompare:
    def test_compare_judges_its_own_report(self, tmp_path):
        path = tmp_path / "report.json"
        words = ("compare", *pair(tmp_path), "-o", path, "--thresholds", "fp8")
        done = call(*words, "--require", "snr_db >= 99", env=LOCAL)
        fields = json.loads(path.read_text())

        assert Status.GATE_FAILED == done.returncode
        assert done.stdout.startswith("FAIL (exit 1): snr_db >= 99 does not hold: model.layers.")
        assert "gates: 4 of 5 hold\nFAIL: gate snr_db >= 99 does not hold" in done.stderr
        assert (["layers", "model", "codes", "coverage", "snr_db >= 99"], "fail") == (
            [gate["id"] for gate in fields["gates"]],
            fields["verdict"],
        )

    def test_unreliable_result_outranks_a_failed_gate(self, tmp_path):
        x = write(tmp_path / "x.safetensors", original())
        y = write(tmp_path / "y.safetensors", {name: t for name, t in to_fp8(original()).items() if "norm" not in name})
        words = ("compare", x, y, "-q", "--require", "snr_db >= 99", "-l")

        assert Status.INCONCLUSIVE == call(*words, "layers", env=LOCAL).returncode
        assert Status.GATE_FAILED == call(*words, "layers", "--allow-partial", env=LOCAL).returncode

    def test_compare_uses_a_baseline(self, report, report_path, worse, tmp_path):
        words = ("compare", *pair(tmp_path), "-q", "--require", "delta(snr_db) >= -0.001", "--baseline")

        assert Status.OK == call(*words, report_path, env=LOCAL).returncode

    @pytest.mark.parametrize(
        ("rules", "stops"),
        [
            (("--require", "snr_db >= 99"), True),
            (("--require", "global(nmse) < 1", "--fail-if", "snr_db < 99"), True),
            (("--require", "delta(snr_db) >= -0.5", "--baseline", "better.json"), True),
            (("--require", "theoretical_sqnr_db >= 1"), True),  # undefined for FP8
            (("--require", "snr_db >= 20"), False),
            (("--require", "snr_db >= 20", "--require", "max(snr_db) <= 1"), False),
        ],
    )
    def test_fail_fast_stops_at_the_first_violation(self, report, tmp_path, rules, stops):
        path, better = tmp_path / "report.json", tmp_path / "better.json"
        better.write_text(replace(report, layers=[replace(row, snr_db=40.0) for row in report.layers]).to_json())
        rules = [better if word == better.name else word for word in rules]
        words = ("compare", *pair(tmp_path), "-q", "-o", path, *rules)
        whole = call(*words, env=LOCAL)
        done = call(*words, "--fail-fast", env=LOCAL)
        fields = json.loads(path.read_text())

        assert whole.returncode == done.returncode
        assert (not stops, 1 if stops else 2) == (fields["complete"], len(fields["layers"]))
        if stops:
            first = fields["layers"][0]["layer_name"]
            assert re.search(rf"quanterr: stopped by --fail-fast: gate .* does not hold for {first}: ", done.stderr)
            assert ("inconclusive", Status.GATE_FAILED) == (fields["verdict"], done.returncode)
            assert "interrupted: 2 of 3 weights were compared" == fields["reasons"][0]
            assert 1 == fields["coverage"]["original"]["not_reached"]["tensors"]
            assert "error" not in fields["coverage"]["original"]
            assert quanterr.read_report(path).to_json() == path.read_text()

    def test_interrupted_run_lists_its_violations(self, tmp_path):
        path = tmp_path / "report.json"
        words = ("compare", *pair(tmp_path), "-q", "-o", path, "--require", "snr_db >= 99", "--fail-fast")
        done = call(*words, "--require", "mean(snr_db) >= 9", env=LOCAL)
        first, second = json.loads(path.read_text())["gates"]

        assert ("fail", 1) == (first["status"], len(first["violations"]))
        assert first["violations"][0]["observed"] == first["observed"] < 99
        assert ("fail", None) == (second["status"], second["observed"])
        assert [False, True] == [name["is_unjudged"] for name in (first, second)]
        assert second["message"] not in done.stderr

    def test_gate_that_an_interrupted_run_could_not_judge_is_not_failed(self, tmp_path):
        words = ("compare", *pair(tmp_path), "--require", "snr_db >= 99", "--require", "mean(snr_db) >= 9")
        done = call(*words, "--fail-fast", "-o", tmp_path / "junit.xml", env=LOCAL)
        junit = ElementTree.parse(tmp_path / "junit.xml").getroot()

        assert done.stdout.startswith("FAIL (exit 1): snr_db >= 99 does not hold: ")
        assert "gates: 0 of 2 hold, 1 not judged\nFAIL: gate snr_db >= 99 " in done.stderr
        assert "not judged: gate mean(snr_db) >= 9 cannot be judged: the report is incomplete" in done.stderr
        assert ("1", "2") == (junit.get("failures"), junit.get("errors"))

    @pytest.mark.parametrize(
        "words",
        [
            ("--require", "snr >= 30"),
            ("--fail-fast",),
            ("--fail-fast", "--require", "global(nmse) <= 1"),
            ("--thresholds", "no.toml"),
            ("--require", "delta(snr_db) >= 0"),
            ("--require", "weighted_snr_db >= 0"),
        ],
        ids=" ".join,
    )
    def test_mistake_in_the_rules_costs_no_run(self, words):
        done = call("compare", "no-such-original", "no-such-quantized", *words, env=LOCAL)

        assert Status.USAGE == done.returncode
        assert "no-such-original" not in done.stderr

    def test_unreliable_baseline_costs_no_run(self, report_path):
        fields = json.loads(report_path.read_text()) | {"complete": False}
        report_path.write_text(json.dumps(fields))
        words = ("no-such-original", "no-such-quantized", "--require", "delta(snr_db) >= 0", "--baseline", report_path)
        done = call("compare", *words, env=LOCAL)

        assert Status.USAGE == done.returncode
        assert "quanterr: the baseline is not reliable: its run was interrupted; compare again" in done.stderr

    def test_unrelated_baseline_keeps_the_comparison(self, worse, tmp_path):
        fields = json.loads(worse.read_text())
        fields["original"]["tensors"] += 1
        worse.write_text(json.dumps(fields))
        path = tmp_path / "kept.json"
        words = ("-q", "-o", path, "--require", "delta(snr_db) >= -9", "--baseline", worse)
        done = call("compare", *pair(tmp_path), *words, env=LOCAL)
        kept = json.loads(path.read_text())

        assert Status.USAGE == done.returncode
        assert "inconclusive" == kept["verdict"]
        assert kept["reasons"][0].startswith("not judged: the baseline does not apply to this report")
        assert Status.OK == gate(path, "--require", "snr_db >= 20").returncode
        assert Status.GATE_FAILED == gate(path, "--require", "snr_db >= 99").returncode

    def test_unrelated_baseline_keeps_the_library_comparison(self, worse, tmp_path):
        fields = json.loads(worse.read_text())
        fields["original"]["tensors"] += 1
        worse.write_text(json.dumps(fields))
        with pytest.raises(UsageError, match="the baseline does not apply to this report") as caught:
            quanterr.compare(*pair(tmp_path), baseline=worse, require=["delta(snr_db) >= -9"], device="cpu")

        assert "inconclusive" == caught.value.document.verdict
        assert f"not judged: {caught.value}" == caught.value.document.reasons[0].replace(
            "--baseline-original", "baseline_original"
        )

    def test_edited_report_is_reported_once(self, tmp_path):
        path, changed = tmp_path / "report.json", tmp_path / "changed.json"
        assert Status.OK == call("compare", *pair(tmp_path), "-q", "-o", path, env=LOCAL).returncode
        changed.write_text(path.read_text().replace('"complete": true', '"complete":  true'))
        words = ("--require", "snr_db >= 20", "-o", tmp_path / "again.json")

        assert "changed" not in gate(path, *words).stderr
        assert 1 == gate(changed, *words).stderr.count(f"{changed}: its checksum does not match")

        refused = f"{changed}: its checksum does not match: it was edited; --strict-warnings accepts no such file"
        for first, second in ((changed, path), (path, changed)):
            done = gate(first, "--baseline", second, "--strict-warnings")
            assert (Status.UNREADABLE, True) == (done.returncode, refused in done.stderr)


class TestSomeLayers:
    def test_only_chosen_layers_are_judged(self, report_path):
        every, some = (gate(report_path, "--require", "snr_db >= 99", *words) for words in ((), ("-l", "mlp")))

        assert "2 of 3 layers (1 identical)" in every.stderr
        assert "1 of 1 layer, the worst" in some.stderr
        assert Status.USAGE == gate(report_path, "--require", "snr_db >= 1", "-l", "no-such-layer").returncode
        assert Status.USAGE == gate(report_path, "--require", "global(nmse) <= 1", "-l", "mlp").returncode

    def test_rules_for_other_layers_are_left_out(self, report_path, tmp_path):
        path, rule = tmp_path / "thresholds.toml", '[[rule]]\nid = "{0}"\nrequire = "{1}"\nlayers = {2}\n'
        rules = ("a", "snr_db >= 99", '["attn"]'), ("b", "snr_db >= 1", '["mlp"]'), ("c", "layers >= 2", "[]")
        path.write_text("schema = 1\n" + "".join(rule.format(*written_rule) for written_rule in rules))

        assert "gates: 2 of 2 hold" in gate(report_path, "--thresholds", path, "-l", "mlp").stderr
        assert "gates: 2 of 3 hold" in gate(report_path, "--thresholds", path).stderr

    def test_report_of_some_layers_has_the_baseline_of_all(self, report_path, tmp_path):
        some = tmp_path / "some.json"
        call("compare", *pair(tmp_path), "-q", "-l", "mlp", "-o", some, env=LOCAL)

        assert "it has a different selection" in gate(some, "--baseline", report_path).stderr
        assert Status.OK == gate(some, "--baseline", report_path, "-l", "mlp").returncode
        assert Status.USAGE == gate(report_path, "--baseline", some, "-l", "mlp").returncode


class TestGitHub:
    def test_github_gets_a_summary_and_annotations(self, report_path, tmp_path):
        path = tmp_path / "summary.md"
        path.write_text("before\n")
        env = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(path)}
        done = gate(report_path, "--require", "snr_db >= 99", "--require", "min(snr_db) >= 20", env=env)

        assert path.read_text().startswith("before\n### quanterr: fail\n\n| gate | holds |")
        assert 1 == done.stderr.count("\n::error title=quanterr::gate snr_db >= 99 does not hold")
        assert "" == done.stdout

    @pytest.mark.parametrize("words", [("-q",), ("-o", "-")])
    def test_github_gets_the_compare_verdict_without_gates(self, tmp_path, words):
        path, (x, y) = tmp_path / "summary.md", pair(tmp_path)
        env = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(path)}
        good = call("compare", x, y, *words, env=env)
        bad = call("compare", x, write(tmp_path / "less.safetensors", {"other": torch.ones(2, 2)}), *words, env=env)
        first, reason = path.read_text().split("### quanterr: inconclusive\n\n")

        assert first.startswith("### quanterr: pass\n\n## Weight fidelity\n")
        assert "| SNR |" in first
        assert "<!--" not in first
        assert reason.startswith("- ")
        assert "| gate |" not in reason
        assert (Status.OK, Status.INCONCLUSIVE) == (good.returncode, bad.returncode)
        assert "::error" not in good.stderr
        assert 1 == bad.stderr.count("::error title=quanterr::inconclusive: ")

    def test_summary_has_the_numbers_and_changes_since_the_baseline(self, report_path, tmp_path):
        path = tmp_path / "summary.md"
        env = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(path)}
        baseline = tmp_path / "baseline.json"
        baseline.write_bytes(report_path.read_bytes())
        done = gate(report_path, "--require", "delta(snr_db) >= -0.5", "--baseline", baseline, env=env)
        text = path.read_text()

        assert Status.OK == done.returncode, done.stderr
        assert "| gate | holds |" in text
        assert "Since the baseline: 0 layers worse, 0 better" in text
        assert "| SNR |" in text
        assert "layers, the worst first, by SNR:" in text
        assert 1 == text.count("| yes |")  # the gates appear once
        assert "| holds |" not in text.replace("| gate | holds |", "")

    def test_unwritable_summary_is_reported_and_changes_nothing(self, report_path, tmp_path):
        env = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path)}
        done = gate(report_path, "--require", "snr_db >= 20", env=env)

        assert Status.OK == done.returncode
        assert "quanterr: $GITHUB_STEP_SUMMARY: Is a directory" in done.stderr

    def test_other_environments_get_neither_summary_nor_annotations(self, report_path, tmp_path):
        path = tmp_path / "summary.md"
        done = gate(report_path, "--require", "snr_db >= 99", env={"GITHUB_STEP_SUMMARY": str(path)})

        assert not path.exists()
        assert "::error" not in done.stderr

    def test_name_is_neither_a_command_nor_markdown(self, hostile, tmp_path):
        path = tmp_path / "summary.md"
        env = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(path)}
        rules = [word for name in HOSTILE for word in ("--require", f"snr_db >= 9{HOSTILE.index(name)}")]
        done = gate(hostile, *rules, env=env)
        commands = [line for line in done.stderr.splitlines() if line.lstrip().startswith("::")]

        assert Status.GATE_FAILED == done.returncode
        assert 6 == len(commands)
        assert all(line.startswith("::error title=quanterr::gate ") for line in commands)
        assert not re.search(r"##\w*\[", done.stderr)
        assert done.stderr.replace("\n", "").isprintable()
        assert "%0A" not in done.stderr.replace("%250A", "").replace("- %0A", "").replace("worst %0A", "")
        text = path.read_text()
        assert text.replace("\n", "").isprintable()
        of_gates, numbers = text.split("\n## Weight fidelity\n")
        assert all(line[0] in "#|`-<" for line in of_gates.splitlines() if line)
        assert {line.count("|") for line in of_gates.splitlines() if line[:1] == "|"} == {7}
        titles = ("Not compared: ", "By format:", "By role:", "The 5 worst layers", "Made by ")
        assert all(line[0] in "*-|" or line.startswith(titles) for line in numbers.splitlines() if line)

    def test_reason_is_not_a_command(self, hostile, tmp_path):
        fields = json.loads(hostile.read_text())
        fields["findings"].append(
            {
                "code": "x",
                "severity": "error",
                "layer": HOSTILE[0],
                "message": HOSTILE[0],
                "remedy": None,
                "evidence": {},
            }
        )
        path = tmp_path / "report.json"
        path.write_text(json.dumps(fields))
        done = gate(path, "--require", "snr_db >= 1", "--explain", HOSTILE[1])

        assert Status.INCONCLUSIVE == done.returncode
        assert not [line for line in (done.stdout + done.stderr).splitlines() if line.lstrip().startswith("::")]
        assert "##[" not in done.stdout + done.stderr
        assert (done.stdout + done.stderr).replace("\n", "").isprintable()


def make_failure(n, severity="error", violations=()):
    return Gate(
        f"gate{n}",
        "snr_db >= 1",
        [],
        severity,
        None,
        "fail",
        1,
        0,
        0,
        0.0,
        1.0,
        -1.0,
        None,
        f"gate{n}",
        list(violations),
    )


class TestGitHubLimits:
    @pytest.mark.parametrize(("n", "shown"), [(1, 1), (10, 10), (11, 10), (50, 10)])
    def test_at_most_ten_annotations_are_printed_and_the_last_counts_the_rest(self, n, shown):
        lines = make_annotations(Verdict("fail", [], [make_failure(k) for k in range(n)]))

        assert shown == len(lines)
        assert (f"and {n - 9} more gates do not hold" in lines[-1]) == (n > 10)

    def test_errors_come_first_and_the_rest_is_as_bad_as_its_worst(self):
        gates = [make_failure(n, "warn") for n in range(12)] + [make_failure(99)]
        lines = make_annotations(Verdict("fail", [], gates))

        assert lines[0].startswith("::error ")
        assert "gate99" in lines[0]
        assert {"::warning"} == {line.split()[0] for line in lines[1:]}

    def test_unreliable_result_comes_first_and_a_warning_stays_a_warning(self):
        lines = make_annotations(Verdict("inconclusive", ["100 % why\r"], [make_failure(1, "warn")]))

        assert ["::error title=quanterr::inconclusive: 100 %25 why\\x0d", "::warning title=quanterr::gate1"] == lines

    def test_overlong_summary_is_cut_with_a_note(self):
        violations = [Violation(f"{n}" + "ä" * 150, 0.1, -0.9, None) for n in range(20)]
        text = format_summary(Verdict("fail", [], [make_failure(n, violations=violations) for n in range(500)]))

        assert MAX_SUMMARY - 1000 < len(text.encode()) <= MAX_SUMMARY
        assert "The rest is omitted" in text[-200:]
        assert "" == format_summary(Verdict("fail", [], [make_failure(1)]), limit=10)

    def test_twenty_worst_layers_are_named_per_gate(self):
        violations = [Violation(f"layer{n}", 0.1, -0.9, None) for n in range(6000)]
        text = format_summary(Verdict("fail", [], [make_failure(1, violations=violations)]))

        assert 20 == sum(line.startswith("- `layer") for line in text.splitlines())
        assert "- and 5,980 more" in text


class TestLibrary:
    def test_library_judges_a_report(self, report):
        judged = quanterr.judge(report, "fp8", require=["snr_db >= 20"], fail_if=["layers == 0"])

        assert ("pass", 6) == (judged.verdict, len(judged.gates))
        assert [] == report.gates

    def test_library_judges_against_another_report(self, report):
        assert "pass" == quanterr.judge(report, require=["delta(snr_db) == 0"], baseline=report).verdict
        judged = quanterr.judge(report, require=["snr_db > 0"], baseline=report)
        assert ["snr_db > 0", "delta(snr_db) >= -0.5"] == [gate.require for gate in judged.gates]

    def test_stored_report_is_judged_the_same(self, report, report_path):
        rules = ["snr_db >= 31.5", "p50(nmse) <= 1", "global(cosine_similarity) >= 0.9"]

        assert quanterr.judge(report, require=rules) == quanterr.judge(quanterr.read_report(report_path), require=rules)


@pytest.mark.slow
def test_report_from_a_command_with_invalid_unicode_is_read(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.json"
    words = [sys.executable, "-m", "quanterr", "compare", *pair(tmp_path), "-q", "-o", path]
    subprocess.run(words, check=True, stderr=subprocess.DEVNULL)
    os.rename(path, tmp_path / "report.json")

    assert r"\udcff.json" in quanterr.read_report(tmp_path / "report.json").run.command[-1]
    assert Status.OK == gate(tmp_path / "report.json", "--require", "snr_db >= 1").returncode


def test_judging_a_stored_report_needs_no_torch(report_path):
    code = (
        f"from quanterr.cli import app\n"
        f"try: app(['gate', {str(report_path)!r}, '--require', 'snr_db >= 1'])\n"
        f"except SystemExit as end: assert end.code == 0, end.code\n"
        f"import sys; sys.exit('torch' in sys.modules)"
    )

    assert 0 == subprocess.run([sys.executable, "-c", code], capture_output=True).returncode


class TestBaselineAlone:
    """A baseline without any rule requires that no layer is clearly worse."""

    def lower(self, stored, by):
        """Write the same report with a lower SNR for one layer."""
        fields = json.loads(stored.read_text())
        fields["layers"][0]["snr_db"] -= by
        path = stored.with_name(f"lowered{by}.json")
        path.write_text(json.dumps(fields))
        return path

    @pytest.mark.parametrize(("by", "status"), [(0.4, Status.OK), (0.6, Status.GATE_FAILED)])
    def test_default_baseline_limit_is_half_a_decibel_and_named(self, report_path, by, status):
        done = gate(self.lower(report_path, by), "--baseline", report_path)

        assert status == done.returncode
        assert "baseline: delta(snr_db) >= -0.5" in done.stderr

    @pytest.mark.parametrize("words", [("--require", "snr_db >= 1"), ("--thresholds", "gguf-q4_k")])
    def test_baseline_adds_its_rule_to_rules_without_comparison(self, report_path, words):
        near, far = (gate(self.lower(report_path, by), "--baseline", report_path, *words) for by in (0.1, 0.7))

        assert "delta(snr_db) >= -0.5" in near.stderr
        assert Status.GATE_FAILED == far.returncode
