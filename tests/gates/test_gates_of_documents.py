"""One language of rules for every document: evaluations, rankings and plans, with ``quanterr gate`` on each."""

import json

import pytest
from msgspec.structs import replace
from support import sample_documents as sample
from support.forked import call
from support.sample_reports import report_of, small

import quanterr
from quanterr.documents.evaluation.values import VOCABULARY
from quanterr.documents.kinds import KINDS
from quanterr.errors import Status, UsageError
from quanterr.gates.expression import parse

LOCAL = {"GITHUB_ACTIONS": "", "GITHUB_STEP_SUMMARY": ""}
CHUNKS = 16


def statuses(evaluation, *rules, **more):
    """Return the statuses of the first candidate's gates."""
    return [gate.status for gate in quanterr.judge(evaluation, require=rules, **more).candidates[0].gates]


@pytest.fixture
def evaluation():
    """An evaluation with a KLD of 0.0125 ± 0.0006 and relative errors of 1 and 2 % after its two blocks."""
    made = sample.evaluation()
    candidates = [
        replace(candidate, findings=[], gates=[], verdict="pass", reasons=["evaluated"])
        for candidate in made.candidates
    ]
    return replace(made, candidates=candidates)


@pytest.fixture
def path(evaluation, tmp_path):
    evaluation.save(tmp_path / "evaluation.json")
    return tmp_path / "evaluation.json"


class TestEvaluations:
    @pytest.mark.parametrize(
        ("rule", "status"),
        [
            ("kld_mean <= 0.0125", "pass"),
            ("kld_mean < 0.0125", "fail"),
            ("kld_mean == 0.0125", "pass"),
            ("upper(kld_mean) < 0.0136", "fail"),  # 0.0125 + 1.96 · 0.0006 = 0.013676
            ("upper(kld_mean) < 0.0137", "pass"),
            ("lower(kld_mean) > 0.0113", "pass"),  # 0.011324
            ("lower(kld_mean) > 0.0114", "fail"),
            ("max(relative_error) <= 0.02", "pass"),
            ("max(relative_error) < 0.02", "fail"),
            ("share(relative_error <= 0.015) == 0.5", "pass"),
            ("worst_token_error <= 0.05", "pass"),
            ("median(cosine) >= 0.9999", "pass"),
            ("max(output_error) <= 0.001", "pass"),
            ("max(output_error) < 0.001", "fail"),
            ("each(predicted_kld) <= 0.002", "pass"),  # for each weight
            ("predicted_kld <= 0.002", "fail"),  # for the candidate: 0.011
            ("min(accuracy) >= 0.725", "pass"),
            ("accuracy > 0.725", "fail"),
            ("cosine_mean > -2", "fail"),  # for encoders: undefined here
        ],
    )
    def test_evaluations_have_functions_over_blocks_weights_and_tasks(self, evaluation, rule, status):
        assert [status] == statuses(evaluation, rule)

    @pytest.mark.parametrize(
        ("rule", "status"),
        [
            ("ratio(kld_mean) <= 2", "pass"),
            ("ratio(kld_mean) < 2", "fail"),
            ("delta(kld_mean) <= 0.0125", "pass"),
            ("delta(kld_mean) < 0.0125", "fail"),
            ("rel_delta(kld_mean) == 1", "pass"),
            ("delta(output_error) <= 0.001", "pass"),  # for each weight: 0.001 and 0.0005 more
            ("ratio(output_error) == 2", "pass"),
            ("delta(accuracy) == 0", "pass"),
        ],
    )
    def test_evaluations_compare_with_a_baseline(self, evaluation, rule, status):
        worse = sample.evaluation(2.0)
        worse = replace(worse, candidates=[replace(candidate, findings=[]) for candidate in worse.candidates])

        assert [status] == statuses(worse, rule, baseline=evaluation)

    def test_baseline_alone_allows_a_tenth_more(self, evaluation):
        assert "pass" == quanterr.judge(evaluation, baseline=sample.evaluation()).verdict
        assert "fail" == quanterr.judge(evaluation, baseline=sample.evaluation(0.9)).verdict

    def test_baseline_with_another_text_is_refused(self, evaluation):
        other = replace(evaluation, tokens=replace(evaluation.tokens, sha256="f" * 64))
        with pytest.raises(UsageError, match="another text"):
            quanterr.judge(evaluation, baseline=other)

    def test_forbidden_condition_fails_where_it_is_undefined(self, evaluation):
        for rule in ("kld_mean > 0.01", "cosine_mean < 2", "min(cosine) < 1"):
            judged = quanterr.judge(evaluation, fail_if=[rule])
            assert "fail" == judged.candidates[0].gates[0].status, rule

    def test_patterns_select_weights(self, evaluation, tmp_path):
        rules = tmp_path / "rules.toml"
        rules.write_text(
            'schema = 1\n[[rule]]\nid = "q"\nrequire = "output_error < 0.0006"\nlayers = ["model.layers.1.*"]\n'
        )
        gate = quanterr.judge(evaluation, rules).candidates[0].gates[0]

        assert ("pass", 2) == (gate.status, gate.judged)

    def test_pattern_without_a_match_is_wrong_usage(self, evaluation, tmp_path):
        rules = tmp_path / "rules.toml"
        rules.write_text('schema = 1\n[[rule]]\nid = "q"\nrequire = "output_error < 1"\nlayers = ["nothing_here"]\n')
        with pytest.raises(UsageError, match="nothing_here"):
            quanterr.judge(evaluation, rules)

    def test_judging_again_forgets_gates_and_keeps_inconclusive_reasons(self, evaluation):
        failed = quanterr.judge(evaluation, require=["kld_mean < 0"])
        missing = replace(
            evaluation.candidates[0], verdict="inconclusive", reasons=["1 tensor taken from the original"]
        )
        without = replace(evaluation, candidates=[missing])

        assert ("fail", "pass") == (failed.verdict, quanterr.judge(failed, require=["kld_mean < 1"]).verdict)
        for _ in range(2):
            without = quanterr.judge(without, require=["kld_mean < 0"])
            assert "inconclusive" == without.verdict
            assert "fp8: 1 tensor taken from the original" == without.reasons[0]

    @pytest.mark.parametrize(
        ("rule", "words"),
        [
            ("kld_men <= 1", "no metric of the evaluation named kld_men; did you mean kld_mean, "),
            ("global(kld_mean) <= 1", "kld_mean is a metric of the evaluation; write it without global()"),
            (
                "mean(kld_mean) <= 1",
                "kld_mean is a metric of the evaluation itself, not of its parts: write kld_mean alone",
            ),
            ("upper(kld_max) <= 1", "kld_max has no standard error; write it without upper(), which takes "),
            ("upper(output_error) <= 1", "output_error has no standard error"),
            ("snr_db >= 30", "no metric of the evaluation named snr_db"),
        ],
    )
    def test_rule_for_another_document_proposes_alternatives(self, rule, words):
        with pytest.raises(UsageError) as raised:
            parse(rule, VOCABULARY)

        assert words in str(raised.value)


class TestReports:
    def test_reports_have_no_intervals(self):
        with pytest.raises(UsageError, match=r"snr_db has no standard error; .* no metric of this report"):
            parse("upper(snr_db) >= 30")

    def test_report_metrics_compare_with_a_baseline(self):
        condition = parse("delta(findings.warning) <= 0")

        assert ("whole", "delta") == (condition.scope, condition.function)


class TestRankingsAndPlans:
    def test_ranking_candidates_are_judged_separately(self):
        judged = quanterr.judge(sample.ranking(), require=["bits_per_weight <= 100", "max(bytes) < 1"])

        assert ["pass", "fail"] == [gate.status for gate in judged.candidates[0].gates]
        assert ("inconclusive", "inconclusive") == (judged.candidates[-1].verdict, judged.verdict)

    def test_plan_stores_no_verdict(self):
        with pytest.raises(UsageError, match="a plan stores no verdict"):
            quanterr.judge(sample.plan(), require=["bits_per_weight <= 9"])


def gate(*words, env=None):
    return call("gate", *words, env=LOCAL | (env or {}))


class TestCommand:
    """Each test starts its own process to check statuses and streams."""

    def test_gate_judges_an_evaluation_in_the_same_language(self, path, tmp_path):
        done = gate(path, "--fail-if", "upper(kld_mean) > 0.02", "--require", "max(relative_error) <= 0.02", "--json")
        document = json.loads(done.stdout)

        assert (Status.GATE_FAILED, "fail") == (done.returncode, document["verdict"])
        assert ["pass", "fail"] == [candidate["verdict"] for candidate in document["candidates"]]

    def test_gate_explains_a_block_and_a_weight(self, path):
        rules = ("--require", "kld_mean < 1", "--require", "output_error < 1", "--require", "max(cosine) < 2")
        done = gate(path, *rules, "--explain", "model.layers.0.mlp.up_proj.weight")

        assert 2 == done.stdout.count("layer model.layers.0.mlp.up_proj.weight, in weight")
        assert "rule kld_mean < 1: applies to the whole model" in done.stdout
        assert "rule output_error < 1: holds: 0.001 (margin 0.999)" in done.stdout
        assert "rule max(cosine) < 2: applies to blocks" in done.stdout

    def test_gate_updates_the_baseline_and_writes_the_github_summary(self, path, evaluation, tmp_path):
        baseline = tmp_path / "baseline.json"
        sample.evaluation().save(baseline)
        words = ("--baseline", baseline, "--update-baseline", "-o", tmp_path / "judged.xml")
        done = gate(path, *words, env={"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")})

        assert Status.OK == done.returncode, done.stderr
        assert "pass" == json.loads(baseline.read_text())["verdict"]
        assert "### quanterr `fp8`: pass" in (tmp_path / "summary.md").read_text()
        assert "ratio(kld_mean)" in (tmp_path / "judged.xml").read_text()

    def test_gate_judges_plans_and_rankings(self, tmp_path):
        sample.plan().save(tmp_path / "plan.json")
        sample.ranking().save(tmp_path / "ranking.json")
        plan = gate(tmp_path / "plan.json", "--require", "bits_per_weight <= 8.1", "--require", "min(snr_db) >= 20")
        ranking = gate(tmp_path / "ranking.json", "--require", "snr_db >= 1", "--allow-partial")

        assert "fail" in plan.stderr  # a kept layer has no SNR, so the rule is undefined and fails
        assert (Status.GATE_FAILED, Status.GATE_FAILED) == (plan.returncode, ranking.returncode), ranking.stderr

    def test_job_summary_contains_the_plan(self, tmp_path):
        sample.plan().save(tmp_path / "plan.json")
        env = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
        done = gate(tmp_path / "plan.json", "--require", "bits_per_weight <= 9", env=env)

        assert Status.OK == done.returncode, done.stderr
        assert ["### quanterr: pass", "## Quantization plan"] == [
            line for line in (tmp_path / "summary.md").read_text().splitlines() if line.startswith("#")
        ]

    def test_baseline_from_another_kind_is_wrong_usage(self, path, tmp_path):
        sample.plan().save(tmp_path / "plan.json")
        done = gate(path, "--baseline", tmp_path / "plan.json")

        assert Status.USAGE == done.returncode
        assert "plan.json: the kind of the baseline (plan) differs from the document's (evaluation)" in done.stderr


def test_every_document_kind_has_its_vocabulary():
    for document_kind in KINDS.values():
        vocabulary = document_kind.values.VOCABULARY
        assert document_kind.name.lower() == vocabulary.document
        assert parse(vocabulary.example, vocabulary)
        assert vocabulary.no_worse is None or parse(vocabulary.no_worse, vocabulary)


def test_checkpoint_cannot_be_a_baseline(path, tmp_path):
    checkpoint = tmp_path / "model.safetensors"
    checkpoint.write_bytes((2).to_bytes(8, "little") + b"{}")
    done = call("gate", path, "--baseline", checkpoint)

    assert Status.UNREADABLE == done.returncode
    assert "is a checkpoint, not a report" in done.stderr


class TestMetrics:
    @pytest.mark.parametrize("make", sample.KINDS_WITH_SAMPLES)
    def test_every_document_metric_has_a_name_that_gates_know(self, make):
        document = getattr(sample, make)()
        numbers = document.metrics()
        of_subject = {name.rpartition("/")[2] for name in numbers}

        assert of_subject
        for name in of_subject:
            parse(f"{name} >= 0", KINDS[document.schema_].values.VOCABULARY)

    def test_report_metrics_equal_the_values_gates_judge(self):
        report = replace(report_of(small()), findings=[])
        numbers = report.metrics()
        rules = [f"global({name[7:]}) == {value!r}" for name, value in numbers.items() if name.startswith("global/")]
        rules += [f"{name} == {value!r}" for name, value in numbers.items() if not name.startswith("global/")]

        assert len(rules) > 10
        judged = quanterr.judge(report, require=[rule for rule in rules if "inf" not in rule])
        assert {"pass"} == {gate.status for gate in judged.gates}

    def test_candidate_metrics_begin_with_the_candidate_name(self):
        evaluation = sample.evaluation()

        numbers = evaluation.metrics()

        first = evaluation.candidates[0]
        assert numbers[f"{first.name}/kld_mean"] == first.scores.kld_mean
        assert {name.rpartition("/")[0] for name in numbers} == {candidate.name for candidate in evaluation.candidates}
