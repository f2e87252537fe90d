"""Rules on reports: which hold, and that undefined, missing or broken values never satisfy one."""

import operator
import re
from math import inf, nan, nextafter
from statistics import fmean
from xml.etree.ElementTree import Element, tostring

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reports import finding, make, row

from quanterr.documents.comparison.values import EQUAL_LAYER, LAYER_METRICS, MODEL_METRICS, REPORT_METRICS, ReportValues
from quanterr.documents.gate_results import exit_status, list_reasons
from quanterr.errors import Status, UsageError
from quanterr.gates.as_text import format_gates
from quanterr.gates.explanation import explain_layer
from quanterr.gates.expression import FUNCTIONS, INTERVAL_FUNCTIONS, LOADS, OPERATORS, parse
from quanterr.gates.rules import Rule
from quanterr.gates.verdicts import judge_subject
from quanterr.outputs import junit
from quanterr.util.text import format_decisive


def judge(report, *rules, baseline=None):
    """Judge a synthetic report by gates; a rule may be given as its condition alone."""
    rules = [rule if isinstance(rule, Rule) else Rule(rule, parse(rule)) for rule in rules]
    return judge_subject(ReportValues(report), rules, ReportValues(baseline) if baseline else None)


def gate(report, rule, baseline=None, **more):
    """Return the single gate of a rule."""
    return judge(report, Rule("id", parse(rule), **more), baseline=baseline).gates[0]


LAYERS = {"a": 20.0, "b": 30.0, "c": 40.0}
OWN, MARKED = {"original_fingerprint": "0badcafe"}, {"original_fingerprint": "decafbad"}
BEFORE = make({"a": 21.0, "b": 30.0, "c": 39.0})

# For every function: its value, the first that meets a lower limit, and the first that meets an upper limit.
TABLE = {
    "snr_db": (20.0, 40.0),
    "each(snr_db)": (20.0, 40.0),
    "min(snr_db)": (20.0, 20.0),
    "max(snr_db)": (40.0, 40.0),
    "mean(snr_db)": (30.0, 30.0),
    "median(snr_db)": (30.0, 30.0),
    "p25(snr_db)": (25.0, 25.0),
    "p5(snr_db)": (21.0, 21.0),
    "share(snr_db >= 30)": (2 / 3, 2 / 3),
    "global(overall_snr_db)": (28.5, 28.5),
    "delta(snr_db)": (-1.0, 1.0),
    "rel_delta(snr_db)": (-1 / 21, 1 / 39),
    "ratio(snr_db)": (20 / 21, 40 / 39),
    "original_compared_fraction": (0.75, 0.75),
    "findings.warning": (1.0, 1.0),
}
OF_LAYERS = [value for value in TABLE if "snr_db" in value and "global" not in value]


def whole(**more):
    return make(LAYERS, findings=[finding(None, "warning")], **more)


def weighted_by(path, outlier_threshold=0.01):
    return {"outlier_threshold": outlier_threshold, "importance": path, "sensitivity": path}


def compares(value):
    return "delta" in value or "ratio" in value


def baseline_for(value):
    return BEFORE if compares(value) else None


class TestEveryFunction:
    def test_every_function_is_in_the_table(self):
        functions = {value.partition("(")[0] for value in TABLE if "(" in value}

        known = {"pNN" if name in ("p25", "p5") else name for name in functions}
        # No number of a report has a standard error, and loads() is no number: test_loading_gates.py.
        assert {row.name for row in FUNCTIONS} - INTERVAL_FUNCTIONS - {LOADS} == known

    @pytest.mark.parametrize(("value", "lowest", "highest"), [(k, *v) for k, v in TABLE.items()])
    def test_rule_holds_up_to_its_limit_and_not_a_digit_beyond(self, value, lowest, highest):
        above, below = nextafter(lowest, inf), nextafter(highest, -inf)
        expected = {
            f"{value} >= {lowest!r}": "pass",
            f"{value} >= {above!r}": "fail",
            f"{value} > {lowest!r}": "fail",
            f"{value} > {nextafter(lowest, -inf)!r}": "pass",
            f"{value} <= {highest!r}": "pass",
            f"{value} <= {below!r}": "fail",
            f"{value} < {highest!r}": "fail",
            f"{value} < {nextafter(highest, inf)!r}": "pass",
            f"{value} == {lowest!r}": "pass" if lowest == highest else "fail",
            f"{value} == {above!r}": "fail",
            f"{value} != {lowest!r}": "fail",
            f"{value} != {above!r}": "pass",
        }

        assert expected == {rule: gate(whole(), rule, baseline_for(value)).status for rule in expected}

    @pytest.mark.parametrize("value", TABLE)
    def test_value_is_shown_with_enough_digits_to_see_the_violation(self, value):
        lowest, limit = TABLE[value][0], nextafter(TABLE[value][0], inf)
        outcome = gate(whole(), f"{value} >= {limit!r}", baseline_for(value))

        assert (lowest, limit, lowest - limit) == (outcome.observed, outcome.limit, outcome.margin)
        assert outcome.margin < 0
        assert format_decisive(lowest, limit) in outcome.message
        assert float(format_decisive(lowest, limit)) < limit

    @pytest.mark.parametrize("value", [*OF_LAYERS, "global(overall_snr_db)"])
    @pytest.mark.parametrize("sign", OPERATORS)
    @pytest.mark.parametrize("undefined", [None, nan])
    def test_undefined_value_fails_either_way(self, value, sign, undefined):
        report = make({"a": 20.0, "b": undefined, "c": 40.0}, overall=None, aggregate={"nonfinite": {}})
        condition = parse(f"{value} {sign} 30")
        before = ReportValues(BEFORE) if compares(value) else None
        rules = [Rule("this", condition), Rule("opposite", condition.negate())]

        assert ["fail", "fail"] == [g.status for g in judge_subject(ReportValues(report), rules, before).gates]

    @pytest.mark.parametrize("value", OF_LAYERS)
    def test_undefined_values_are_skipped_on_request(self, value):
        report = make({"a": 20.0, "new" if compares(value) else "b": None, "c": 40.0})
        before = make({"a": 21.0, "c": 39.0}) if compares(value) else None
        outcome = gate(report, f"{value} >= -100", before, undefined="skip")

        assert ("pass", 3, 1) == (outcome.status, outcome.judged, outcome.skipped)
        assert "3 layers, 1 skipped" in outcome.message

    @pytest.mark.parametrize("value", OF_LAYERS)
    def test_rule_fails_where_all_changed_layers_are_skipped(self, value):
        report = make({"a": None, "b": None}, lossless=["same"])
        before = make({}, lossless=["same"]) if compares(value) else None
        outcome = gate(report, f"{value} >= -100", before, undefined="skip")

        assert ("fail", 3, 2) == (outcome.status, outcome.judged, outcome.skipped)
        assert "that differs has snr_db over 3 layers (1 identical), 2 skipped" in outcome.message

    @pytest.mark.parametrize("value", [*OF_LAYERS, "global(overall_snr_db)"])
    @pytest.mark.parametrize("undefined", ["fail", "skip"])
    def test_rule_without_any_value_fails_either_way(self, value, undefined):
        report = make({"a": None}, overall=None, aggregate={"nonfinite": {}})
        for text in (f"{value} >= -100", f"{value} < -100"):
            assert "fail" == gate(report, text, baseline_for(value), undefined=undefined).status

    @pytest.mark.parametrize("value", [*OF_LAYERS, "global(overall_snr_db)"])
    def test_rule_without_any_layer_fails_either_way(self, value):
        report = make(overall=None, aggregate={"nonfinite": {"overall_snr_db": "nan"}})
        for text in (f"{value} >= -100", f"{value} < -100"):
            assert "fail" == gate(report, text, baseline_for(value)).status

    @pytest.mark.parametrize("value", OF_LAYERS)
    def test_rule_whose_patterns_match_no_layer_fails_either_way(self, value):
        for text in (f"{value} >= -100", f"{value} < -100"):
            with pytest.raises(UsageError, match='rule "id": no layer matches "nowhere"'):
                gate(whole(), text, baseline_for(value), layers=("a", "nowhere"))
            for dead in ("nowhere", "!nowhere"):
                outcome = gate(whole(verdict="inconclusive"), text, baseline_for(value), layers=("a", dead))

                assert "fail" == outcome.status
                assert f'no layer matches "{dead}"' in outcome.message

    @pytest.mark.parametrize("value", TABLE)
    def test_incomplete_report_fails_either_way(self, value):
        for text in (f"{value} >= -100", f"{value} < -100"):
            judged = judge(whole(complete=False), text, baseline=baseline_for(value))

            assert ("inconclusive", "fail") == (judged.verdict, judged.gates[0].status)

    @pytest.mark.parametrize("value", [value for value in TABLE if "." not in value])
    def test_misspelt_metric_is_refused_with_the_nearest_name(self, value):
        metric = "original_compared_fraction" if "fraction" in value else "snr_db"
        with pytest.raises(UsageError, match=f"did you mean .*{metric}"):
            parse(f"{value.replace(metric, metric[:-2] + metric[:-3:-1])} >= 30")

    @pytest.mark.parametrize("value", [*OF_LAYERS, "global(overall_snr_db)"])
    @pytest.mark.parametrize(
        "spoil",
        [
            {"findings": [finding("b")]},
            {"missing": ["d"]},
            {"missing": ["b"]},
            {"rows": [row("d", 30.0, finite=False)]},
        ],
        ids=["finding", "missing", "compared and missing", "not finite"],
    )
    @pytest.mark.parametrize("undefined", ["fail", "skip"])
    def test_unreliable_layer_fails_either_way(self, value, spoil, undefined):
        report = make(LAYERS, **spoil)
        for text in (f"{value} >= -100", f"{value} < -100"):
            assert "fail" == gate(report, text, baseline_for(value), undefined=undefined).status


class TestIdenticalLayers:
    @pytest.mark.parametrize("value", ["snr_db", "min(snr_db)", "mean(snr_db)", "p05(snr_db)", "share(snr_db >= 9)"])
    def test_identical_layers_satisfy_every_floor(self, value):
        outcome = gate(make(lossless=["a", "b"]), f"{value} >= 1")

        assert ("pass", 2, 2) == (outcome.status, outcome.judged, outcome.identical)
        assert "the same on both sides" in outcome.message

    def test_skipped_identical_layers_are_counted(self):
        report = make(lossless=["a", "b"])
        report.lossless[0].bits_per_weight = None
        outcome = gate(report, "bits_per_weight <= 16", undefined="skip")

        assert outcome.message.endswith("holds: 2 layers, 1 skipped, the same on both sides")

    @pytest.mark.parametrize("metric", [name for name, r in LAYER_METRICS.items() if r.better == "lower"])
    def test_identical_layers_satisfy_every_error_bound(self, metric):
        report = make(lossless=["a"], settings=weighted_by("one.dat"))

        assert ("fail" if metric == "saturated_pct" else "pass") == gate(report, f"{metric} <= 16").status
        assert metric in EQUAL_LAYER or metric in ("bits_per_weight", "saturated_pct")

    @pytest.mark.parametrize(
        "rule",
        ["weighted_snr_db >= 20", "weighted_nmse <= 1", "share(weighted_nmse <= 1) >= 1", "global(weighted_nmse) <= 1"],
    )
    @pytest.mark.parametrize("undefined", ["fail", "skip"])
    def test_identical_layers_are_weighted_only_with_an_importance_matrix(self, rule, undefined):
        weighted, plain = (make(lossless=["a"], settings=weighted_by(path)) for path in ("one.dat", None))

        assert "pass" == gate(weighted, rule, undefined=undefined).status
        assert "fail" == gate(plain, rule, undefined=undefined).status

    def test_identical_layers_do_not_stand_in_for_an_unweighted_layer(self):
        report = make(rows=[row("b", 30.0, weighted_snr_db=None)], lossless=["a"], settings=weighted_by("one.dat"))

        assert ["b"] == [violation.layer for violation in gate(report, "weighted_snr_db >= 20").violations]

    def test_means_over_layers_leave_out_identical_layers(self):
        outcome = gate(make(LAYERS, lossless=["same"]), "mean(snr_db) >= 30")

        assert ("pass", 30.0, 4, 1) == (outcome.status, outcome.observed, outcome.judged, outcome.identical)

    @pytest.mark.parametrize(
        ("value", "expected"),
        {
            "max(bits_per_weight)": 16.0,
            "min(bits_per_weight)": 8.0,
            "mean(bits_per_weight)": 12.0,
            "share(bits_per_weight <= 8.5)": 0.5,
        }.items(),
    )
    def test_identical_layers_count_with_their_size(self, value, expected):
        report = make(rows=[row("a", 30.0, bits_per_weight=8.0)], lossless=["same"])

        assert expected == gate(report, f"{value} <= 100").observed

    def test_identical_layers_satisfy_limits_on_the_whole_model(self):
        assert "pass" == gate(make(lossless=["a"], overall=None), "global(overall_snr_db) >= 30").status
        assert "fail" == gate(make(lossless=["a"]), "global(compression_ratio) >= 0").status

    def test_identical_layers_have_no_norm(self):
        assert "fail" == gate(make(lossless=["a"]), "quantized_norm >= 0").status

    def test_perfect_values_match_the_metrics(self):
        assert (inf, 0.0, 1.0, inf) == tuple(
            EQUAL_LAYER[name] for name in ("snr_db", "nmse", "cosine_similarity", "effective_bits")
        )
        assert not {"original_norm", "quantized_norm", "bits_per_weight", "theoretical_sqnr_db"} & set(EQUAL_LAYER)


class TestInfiniteValues:
    """Infinite values are null in the report: something is broken, and no rule about it holds."""

    @pytest.mark.parametrize("value", OF_LAYERS)
    @pytest.mark.parametrize("infinite", [inf, -inf])
    @pytest.mark.parametrize("undefined", ["fail", "skip"])
    def test_infinite_values_fail_either_way_and_are_not_skipped(self, value, infinite, undefined):
        report = make({"a": 20.0, "b": infinite, "c": 40.0})
        for text in (f"{value} >= -100", f"{value} <= 100"):
            outcome = gate(report, text, baseline_for(value), undefined=undefined)

            assert ("fail", f"snr_db is {infinite}") == (outcome.status, outcome.violations[0].reason)

    @pytest.mark.parametrize("infinite", ["+inf", "-inf"])
    def test_infinite_model_values_fail_either_way(self, infinite):
        report = make(LAYERS, overall=None, aggregate={"nonfinite": {"overall_snr_db": infinite}})
        for text in ("global(overall_snr_db) >= -100", "global(overall_snr_db) <= 100"):
            assert "fail" == gate(report, text).status

    def test_infinite_values_come_before_other_violations(self):
        outcome = gate(make({"b": 10.0, "a": -inf}), "snr_db >= 20")

        assert ["a", "b"] == [violation.layer for violation in outcome.violations]

    def test_infinite_value_cannot_improve(self):
        before, report = make({"a": -inf, "b": 30.0}), make({"a": -inf, "b": 30.0})

        assert ["a"] == [v.layer for v in gate(report, "delta(snr_db) >= -1", before).violations]


class TestSelection:
    def test_changed_norms_and_biases_are_judged_where_a_pattern_names_them(self):
        report = make({"a.weight": 30.0}, other={"a.bias": 3.0})

        assert "pass" == gate(report, "snr_db >= 20").status
        assert "pass" == gate(report, "snr_db >= 20", layers=("*.weight",)).status
        assert "fail" == gate(report, "snr_db >= 20", layers=("a.*",)).status

    def test_excluded_layer_is_not_judged(self):
        assert "pass" == gate(make(LAYERS), "snr_db >= 30", layers=("!a",)).status

    def test_excluding_a_missing_layer_is_wrong_usage(self):
        report = make({"model.mlp.up": 20.0}, lossless=["same"], other={"norm": 9.0})
        for layers in (("!model.mpl*",), ("mlp", "!model.mpl*")):
            with pytest.raises(UsageError, match=r'rule "id": no layer matches "!model\.mpl\*"; did you mean'):
                gate(report, "snr_db >= 20", layers=layers)

        assert "pass" == gate(report, "snr_db >= 20", layers=("!same", "!norm")).status

    def test_uncompared_layer_can_be_excluded(self):
        assert "pass" == gate(make(LAYERS, missing=["gone"]), "snr_db >= 20", layers=("!gone",)).status

    def test_pattern_outside_the_report_selection_is_explained(self):
        report = make(LAYERS, selection={"patterns": ["attn", "!*.bias"]})
        with pytest.raises(UsageError, match=r'no layer matches "!mlp".* \(the report covers only attn !\*\.bias\)'):
            gate(report, "snr_db >= 20", layers=("!mlp",))

    def test_missing_layer_elsewhere_does_not_matter(self):
        report = make(LAYERS, missing=["d"], findings=[finding("e")])

        assert "pass" == gate(report, "snr_db >= 20", layers=("a", "b")).status

    def test_last_rule_with_an_id_decides_for_its_layers(self):
        strict = Rule("id", parse("snr_db >= 30"))
        lenient = Rule("id", parse("snr_db >= 15"), layers=("a",))
        first, second = judge(make(LAYERS), strict, lenient).gates

        assert ("pass", 2) == (first.status, first.judged)
        assert ("pass", 1) == (second.status, second.judged)

    def test_rules_with_different_ids_all_apply(self):
        strict = Rule("one", parse("snr_db >= 30"))
        lenient = Rule("two", parse("snr_db >= 15"), layers=("a",))

        assert ["fail", "pass"] == [gate.status for gate in judge(make(LAYERS), strict, lenient).gates]

    def test_rule_that_decides_for_no_layer_fails(self):
        first = judge(make({"a": 30.0}), Rule("id", parse("snr_db >= 1")), Rule("id", parse("snr_db >= 2"), ("a",)))

        assert "later rules with the same id decide for all layers that it selects" in first.gates[0].message


class TestBaseline:
    def test_missing_layer_fails(self):
        outcome = gate(make({"a": 20.0}), "delta(snr_db) >= -9", BEFORE, undefined="skip")

        assert ["b", "c"] == [violation.layer for violation in outcome.violations]
        assert "is in the baseline but not in this report" == outcome.violations[0].reason

    @pytest.mark.parametrize(("undefined", "status"), [("fail", "fail"), ("skip", "pass")])
    def test_new_layer_has_no_change(self, undefined, status):
        outcome = gate(make(LAYERS | {"d": 30.0}), "delta(snr_db) >= -9", BEFORE, undefined=undefined)

        assert status == outcome.status

    def test_layer_that_is_no_longer_identical_got_worse_without_limit(self):
        assert "fail" == gate(make({"a": 90.0}), "delta(snr_db) >= -1000", make(lossless=["a"])).status
        relative = "rel_delta(snr_db) >= -1000"
        now, before = make({"a": 90.0, "b": 30.0}), make({"b": 30.0}, lossless=["a"])
        assert "fail" == gate(now, relative, before, undefined="skip").status
        assert "pass" == gate(make(lossless=["a"]), "delta(snr_db) >= 1000", make({"a": 90.0})).status

    @pytest.mark.parametrize("before", [{"a": 30.0}, {"a": None}])
    def test_only_new_layers_are_skipped(self, before):
        report = make({"a": None, "b": 30.0})
        for old in (make(before | {"b": 30.0}), make({"b": 30.0}, lossless=["a"])):
            outcome = gate(report, "delta(snr_db) >= -1", old, undefined="skip")

            assert ("fail", 0, "a") == (outcome.status, outcome.skipped, outcome.violations[0].layer)

    def test_layer_identical_in_the_baseline_is_described_as_such(self):
        same, differs = make(lossless=["a"]), make({"a": 90.0})

        def reason(rule, report, before):
            return gate(report, rule, before).violations[0].reason

        was = "; it was the same on both sides in the baseline"
        assert f"delta(snr_db) is -inf{was}" == reason("delta(snr_db) >= -100", differs, same)
        assert f"rel_delta(nmse) is inf{was}" == reason("rel_delta(nmse) <= 100", differs, same)
        assert "delta(snr_db) is inf" == reason("delta(snr_db) <= 100", same, differs)
        assert "snr_db is -inf" == reason("delta(snr_db) >= -100", make({"a": -inf}), differs)
        assert "snr_db is -inf" == judge(make({"a": -inf}), "snr_db >= 1").gates[0].violations[0].reason

    @pytest.mark.parametrize("function", ["delta", "rel_delta"])
    def test_layer_that_stays_identical_did_not_change(self, function):
        assert "pass" == gate(make(lossless=["a"]), f"{function}(snr_db) == 0", make(lossless=["a"])).status
        assert "pass" == gate(make(lossless=["a"]), f"{function}(nmse) == 0", make(lossless=["a"])).status

    @pytest.mark.parametrize("undefined", ["fail", "skip"])
    @pytest.mark.parametrize(
        ("spoil", "reason"),
        [
            ({"rows": [row("a", 20.0)], "findings": [finding("a")]}, "cannot be relied on in the baseline"),
            ({"rows": [row("a", 20.0, finite=False)]}, "cannot be relied on in the baseline"),
            ({"missing": ["a"]}, "was not compared in the baseline"),
        ],
        ids=["finding", "not finite", "missing"],
    )
    def test_layer_unreliable_in_the_baseline_is_never_skipped(self, undefined, spoil, reason):
        before, report = make({"b": 30.0}, **spoil), make({"a": 30.0, "b": 30.0})
        outcome = gate(report, "delta(snr_db) >= 0", before, undefined=undefined)

        assert [("a", reason)] == [(violation.layer, violation.reason) for violation in outcome.violations]
        assert "pass" == judge(report, "snr_db >= 30", "delta(snr_db) >= -90", baseline=before).gates[0].status

    @pytest.mark.parametrize(
        ("before", "why"),
        [
            (make(LAYERS, original={"tensors": 4, "bytes": 300}), "a different original: 4 tensors there, 3 here"),
            (make(LAYERS, original={"tensors": 3, "bytes": 301}), "a different original: 301 bytes there, 300 here"),
            (make(LAYERS, selection={"patterns": ["attn"]}), "different selection: attn there, all layers here"),
            (make(LAYERS, settings=weighted_by(None, 0.1)), "another outlier threshold: 0.1 there, 0.01 here"),
            (make(rows=[row("a", 20.0, original_norm=1.001)]), "the norm of the original a is 1.001 there, 1 here"),
            (make(rows=[row("a", 20.0) | MARKED]), "the original a has other values there than here"),
        ],
    )
    def test_unrelated_baseline_is_refused(self, before, why):
        with pytest.raises(UsageError) as caught:
            judge(
                make(rows=[row(name, snr) | OWN for name, snr in LAYERS.items()]),
                "delta(snr_db) >= -1",
                baseline=before,
            )

        assert "the baseline does not apply to this report: it " in str(caught.value)
        assert why in str(caught.value)

    def test_baseline_of_another_finetune_is_accepted_on_request(self):
        before = make(rows=[row(name, snr, original_norm=2.0) for name, snr in LAYERS.items()])
        report = make(LAYERS)
        rule = Rule("delta", parse("delta(snr_db) >= -1"), baseline_original="any")
        judged = judge(report, rule, "snr_db >= 1", baseline=before)

        assert ("pass", ["everything selected was compared; 2 gates hold; the baseline has another original"]) == (
            judged.verdict,
            judged.reasons,
        )
        says = "the norm of the original a is 2 there, 1 here"
        assert [says, None] == [gate.baseline_original for gate in judged.gates]
        assert f"note: the baseline has another original: {says}" == format_gates(judged.gates)[-1]
        with pytest.raises(UsageError, match="--baseline-original any compares with it nevertheless"):
            judge(report, rule, "delta(snr_db) >= -2", baseline=before)

    @pytest.mark.parametrize(
        ("rows", "why"),
        [
            ([row("a", 20.0, original_norm=2.0)], "b is only here"),
            ([row("a", 20.0, original_norm=2.0), row("b", 30.0, tensor_elements=7)], "b has 7 elements there, "),
        ],
    )
    def test_baseline_of_another_model_is_refused_in_any_case(self, rows, why):
        rule = Rule("delta", parse("delta(snr_db) >= -1"), baseline_original="any")
        with pytest.raises(UsageError, match=why):
            judge(make({"a": 20.0, "b": 30.0}), rule, baseline=make(rows=rows, original={"tensors": 3, "bytes": 300}))

    @pytest.mark.parametrize(
        ("before", "why"),
        [
            (make(LAYERS, complete=False), "its run was interrupted"),
            (make(LAYERS, findings=[finding(None)]), "it is inconclusive: None: broken"),
            (make(LAYERS, missing=["d"], findings=[finding(None)]), "it is inconclusive: None: broken"),
            (make(LAYERS, verdict="inconclusive", reasons=["why"]), "it is inconclusive: why"),
            (make(), "it is inconclusive: nothing was compared"),
        ],
    )
    def test_unreliable_baseline_is_refused(self, before, why):
        with pytest.raises(UsageError, match=f"the baseline is not reliable: {why}; compare again, or"):
            judge(make(LAYERS), Rule("id", parse("delta(snr_db) >= -1"), undefined="skip"), baseline=before)

    def test_infinite_layer_does_not_indicate_another_original(self):
        broken, good = make(rows=[row("a", None, original_norm=0.9, finite=False)]), make({"a": 20.0})
        judged = judge(broken, "delta(snr_db) >= -1", baseline=good)

        assert ("inconclusive", Status.INCONCLUSIVE) == (judged.verdict, exit_status(judged))
        assert "has elements that are NaN or infinite" == judged.gates[0].violations[0].reason
        assert "fail" == gate(good, "delta(snr_db) >= -1", broken).status

    @pytest.mark.parametrize(
        ("there", "here"),
        [("a/one.dat", "a/two.dat"), (None, "one.dat"), ("one.dat", None), ("C:\\m\\one.dat", "two.dat")],
    )
    def test_another_importance_matrix_is_refused_where_it_counts(self, there, here):
        before, after = (make(LAYERS, settings=weighted_by(path)) for path in (there, here))
        names = [re.split(r"[/\\]", path or "none")[-1] for path in (there, here)]
        for rule in ("delta(weighted_snr_db) >= -1", "rel_delta(weighted_nmse) <= 1"):
            with pytest.raises(
                UsageError, match="it has another importance matrix: {} in the baseline, {} in this".format(*names)
            ):
                judge(after, "snr_db >= 1", rule, baseline=before)

        assert "pass" == judge(after, "delta(snr_db) >= -1", "weighted_nmse <= 1", baseline=before).verdict

    @pytest.mark.parametrize("there", ["/elsewhere/one.dat", "C:\\m\\one.dat", "one.dat"])
    def test_same_importance_matrix_in_another_folder_is_accepted(self, there):
        before, after = (make(LAYERS, settings=weighted_by(path)) for path in (there, "m/one.dat"))

        assert "pass" == gate(after, "delta(weighted_snr_db) >= -1", before).status

    def test_baseline_from_another_device_is_accepted(self):
        before = make(rows=[row("a", 20.0, original_norm=1 + 1e-9)])

        assert "pass" == gate(make({"a": 20.0}), "delta(snr_db) >= 0", before).status


class TestVerdict:
    def test_satisfied_gates_pass_and_are_counted(self):
        judged = judge(make(LAYERS), "snr_db >= 1", "min(snr_db) >= 1")

        assert ("pass", Status.OK) == (judged.verdict, exit_status(judged))
        assert ["everything selected was compared; 2 gates hold"] == judged.reasons

    def test_failed_gates_give_one_reason_each(self):
        judged = judge(make(LAYERS), "snr_db >= 25", "min(snr_db) >= 1", "max(snr_db) < 40")

        assert ("fail", Status.GATE_FAILED) == (judged.verdict, exit_status(judged))
        assert [judged.gates[0].message, judged.gates[2].message] == judged.reasons
        assert "gate snr_db >= 25 does not hold: 1 of 3 layers, the worst a: 20 (margin -5)" == judged.reasons[0]

    def test_failed_warning_does_not_change_the_verdict(self):
        judged = judge(make(LAYERS), Rule("id", parse("snr_db >= 25"), severity="warn"), "min(snr_db) >= 1")

        assert ("pass", Status.OK, "fail") == (judged.verdict, exit_status(judged), judged.gates[0].status)
        assert "1 gate holds; failed with a warning: 1 gate" in judged.reasons[0]

    @pytest.mark.parametrize(
        ("report", "reason"),
        [
            (make(LAYERS, verdict="inconclusive", reasons=["why"]), "why"),
            (make(LAYERS, verdict="inconclusive"), "the report is inconclusive without a reason"),
            (make(LAYERS, complete=False), "the run was interrupted"),
            (make(LAYERS, missing=["d"]), "d: not compared: has no counterpart"),
            (make(LAYERS, findings=[finding("a")]), "a: broken"),
            (make(LAYERS, findings=[finding("not a layer")]), "not a layer: broken"),
            (make(LAYERS, findings=[finding(None)]), "None: broken"),
            (make(LAYERS, rows=[row("d", 30.0, finite=False)]), "d: has elements that are NaN or infinite"),
            (make(), "nothing was compared"),
        ],
    )
    def test_unreliable_report_is_inconclusive_whatever_the_gates_state(self, report, reason):
        for rule in ("findings.info == 0", "snr_db >= 1000"):
            judged = judge(report, rule)

            assert ("inconclusive", reason) == (judged.verdict, judged.reasons[0])
            assert Status.INCONCLUSIVE == exit_status(judged)

    def test_allowed_partial_report_is_judged_by_its_gates(self):
        report = make(LAYERS, missing=["d"])

        assert Status.OK == exit_status(judge(report, "findings.info == 0"), allow_partial=True)
        assert Status.GATE_FAILED == exit_status(judge(report, "snr_db >= 1"), allow_partial=True)

    def test_damage_is_not_excused_with_what_was_not_compared(self):
        report = make(LAYERS, missing=["d"], verdict="inconclusive", findings=[finding("a")])
        absent = make(LAYERS, missing=["d"], verdict="inconclusive", findings=[finding("d")])

        assert Status.INCONCLUSIVE == exit_status(report, allow_partial=True)
        assert [report.findings[0].message] == ReportValues(report).damage
        assert Status.OK == exit_status(absent, allow_partial=True)

    @pytest.mark.parametrize("is_older", [False, True])
    def test_reasons_from_earlier_gates_are_dropped(self, is_older):
        before = judge(make(LAYERS, missing=["d"]), "snr_db >= 1000")
        stored = make(LAYERS, missing=["d"], verdict="inconclusive", reasons=before.reasons)
        stored.gates, stored.reasons_by = before.gates, None if is_older else before.reasons_by

        assert ["result", "gate"] == before.reasons_by == [reason.by for reason in list_reasons(stored)]
        assert before.reasons[:1] == judge(stored, "findings.info == 0").reasons

    def test_rules_that_were_not_applied_leave_a_report_to_others(self):
        stored = make(LAYERS, verdict="inconclusive", reasons=["not judged: no baseline"])
        for by, verdict in (["rules"], "pass"), (["result"], "inconclusive"), (None, "inconclusive"):
            stored.reasons_by = by

            assert verdict == judge(stored, "findings.info == 0").verdict

    def test_reasons_name_their_source(self):
        report = make(LAYERS, missing=["d"], findings=[finding("a"), finding(None)])

        assert ["finding", "finding", "result"] == judge(report, "findings.info == 0").reasons_by

    def test_violations_come_worst_first(self):
        outcome = gate(make(LAYERS | {"d": None}), "snr_db >= 35")

        assert [("d", None), ("a", -15.0), ("b", -5.0)] == [(v.layer, v.margin) for v in outcome.violations]
        assert "d" == outcome.worst_layer

    def test_satisfied_gate_names_the_layer_nearest_to_the_limit(self):
        outcome = gate(make(LAYERS, lossless=["same"]), "snr_db >= 15")

        assert ("a", 20.0, 5.0) == (outcome.worst_layer, outcome.observed, outcome.margin)

    def test_margin_too_large_for_a_number_is_left_out(self):
        assert gate(make(LAYERS), "snr_db >= -1.7e308").margin is not None
        assert gate(make(rows=[row("a", 1.7e308)]), "snr_db >= -1.7e308").margin is None


class TestCause:
    """A warning explains why a number is bad; an error already takes the number's place."""

    TRUNCATED = "20.0 dB: truncated"
    FOUND = finding("a", "warning") | {"code": "excess_error", "message": f"a: {TRUNCATED}"}

    @pytest.mark.parametrize("rule", ["snr_db >= 25", "global(overall_snr_db) >= 99", "findings.warning == 0"])
    def test_cause_appears_in_every_output_with_the_value(self, rule):
        outcome = gate(make(LAYERS, findings=[self.FOUND]), rule)
        suite = Element("testsuite")
        junit._add_gate(suite, outcome, outcome.id)

        assert self.TRUNCATED in outcome.message
        assert outcome.violations[0].observed is not None
        for text in ("\n".join(format_gates([outcome])), tostring(suite, encoding="unicode")):
            assert self.TRUNCATED in text
            assert f"{outcome.observed:.5g} (margin" in text

    def test_reason_without_a_number_appears_once_on_stderr(self):
        gates = judge(make(LAYERS, missing=["gone"]), "snr_db >= 1", "snr_db >= 2").gates
        first, *others = format_gates(gates)[1:]

        assert "has no counterpart" in first
        assert ["FAIL: gate snr_db >= 2: as above"] == others

    def test_cause_appears_once_on_stderr(self):
        gates = judge(make(LAYERS, findings=[self.FOUND]), "snr_db >= 25", "snr_db >= 26", "min(snr_db) >= 99").gates

        assert 1 == "\n".join(format_gates(gates[:2])).count(self.TRUNCATED)

    @pytest.mark.parametrize(
        ("code", "rule", "layer"),
        [
            ("unused_codes", "snr_db >= 25", "a"),
            ("excess_error", "layers <= 1", ""),
            ("excess_error", "snr_db >= 99", "b"),
        ],
    )
    def test_unrelated_finding_is_not_given_as_a_cause(self, code, rule, layer):
        more = {"layers": (layer,)} if layer else {}
        outcome = gate(make(LAYERS, findings=[self.FOUND | {"code": code}]), rule, **more)

        assert "fail" == outcome.status
        assert self.TRUNCATED not in outcome.message


class TestReportMetrics:
    @pytest.mark.parametrize(
        ("metric", "value"),
        {
            "original_compared_fraction": 0.75,
            "quantized_compared_fraction": 1.0,
            "layers": 3,
            "lossless": 2,
            "other_changes": 1,
            "not_compared": 1,
            "findings.error": 0,
            "findings.warning": 2,
            "findings.info": 1,
        }.items(),
    )
    def test_report_metrics_equal_the_report(self, metric, value):
        findings = [finding(None, severity) for severity in ("warning", "info", "warning")]
        report = make(LAYERS, lossless=["x", "y"], other={"n": 3.0}, missing=["m"], findings=findings)

        assert value == gate(report, f"{metric} == {value}").observed
        assert metric in REPORT_METRICS

    def test_report_metrics_are_undefined_where_no_layer_was_selected(self):
        nothing = {"original_compared_fraction": None, "quantized_compared_fraction": None}

        assert "fail" == gate(make(LAYERS, coverage=nothing), "original_compared_fraction >= 0").status


class TestExplain:
    RULES = (
        Rule("attn", parse("snr_db >= 30"), ("a*",)),
        Rule("attn", parse("snr_db >= 15"), ("a2",)),
        Rule("all", parse("mean(snr_db) >= 15")),
        Rule("model", parse("global(nmse) <= 1")),
        Rule("pct", parse("saturated_pct <= 1"), undefined="skip"),
    )
    REPORT = make({"a1": 20.0, "b": 30.0}, rows=[row("a2", 16.0, saturated_pct=None)])

    def test_explanation_names_the_deciding_rule(self):
        lines = explain_layer(ReportValues(self.REPORT), self.RULES, "a2")

        assert [
            "layer a2, in layers",
            "  rule attn: snr_db >= 30: selects it; a later rule with the same id decides",
            "  rule attn: snr_db >= 15: holds: 16 (margin 1)",
            "  rule all: mean(snr_db) >= 15: includes it with 16",
            "  rule model: global(nmse) <= 1: applies to the whole model",
            "  rule pct: saturated_pct <= 1: skips it: saturated_pct is undefined",
        ] == lines

    def test_explanation_states_the_problem_with_a_layer(self):
        assert "does not hold: 20 (margin -10)" in explain_layer(ReportValues(self.REPORT), self.RULES, "a1")[1]
        assert "does not select it" in explain_layer(ReportValues(self.REPORT), self.RULES, "b")[1]
        broken = ReportValues(make({"a1": 20.0}, findings=[finding("a1")]))
        assert "does not hold: broken" in explain_layer(broken, self.RULES, "a1")[1]

    def test_explanation_mentions_a_new_layer(self):
        rules = [Rule("new", parse("delta(snr_db) >= 0"), undefined="skip")]
        lines = explain_layer(ReportValues(self.REPORT), rules, "a1", ReportValues(make({"b": 30.0})))

        assert "  rule new: delta(snr_db) >= 0: skips it: is not in the baseline" == lines[1]

    def test_explanation_proposes_the_nearest_layer(self):
        report = ReportValues(make({"model.layers.0.mlp.weight": 1.0}))
        with pytest.raises(UsageError, match=r"no layer named .*did you mean model\.layers\.0\.mlp\.weight"):
            explain_layer(report, self.RULES, "layers.0.mlp.weight")


COMPARE = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
SIGNS = st.sampled_from(list(OPERATORS))
LIMITS = st.floats(-60, 100)
STATES = st.sampled_from(["good", "good", "good", "null", "not finite", "finding", "missing", "the same", "other"])
FUNCTION = st.sampled_from(["each", "min", "max", "mean", "median", "p10", "share", "delta", "rel_delta", "global"])


@st.composite
def reports(draw):
    """Draw a report of a few layers, each in some state, and return the states by name."""
    states = {f"layer{n}": draw(STATES) for n in range(draw(st.integers(0, 5)))}
    snr = {name: draw(st.floats(-50, 90)) for name in states}
    rows = [row(name, snr[name], finite=state != "not finite") for name, state in states.items() if state in GOOD]
    rows += [row(name, None) for name, state in states.items() if state == "null"]

    def name_report(state):
        return [name for name, layer_state in states.items() if layer_state == state]

    report = make(
        rows=rows,
        lossless=name_report("the same"),
        missing=name_report("missing"),
        other={name: snr[name] for name in name_report("other")},
        findings=[finding(name) for name in name_report("finding")],
    )
    return report, states, snr


GOOD = ("good", "not finite", "finding")
BROKEN = {"not finite", "finding", "missing"}


@given(made_up=reports(), function=FUNCTION, sign=SIGNS, limit=LIMITS, skip=st.booleans())
def test_null_missing_or_broken_layer_passes_no_rule_about_it(made_up, function, sign, limit, skip):
    report, states, snr = made_up
    text = {
        "share": f"share(snr_db {sign} {limit!r}) >= 0",
        "global": f"global(overall_snr_db) {sign} {limit!r}",
    }.get(function, f"{function}(snr_db) {sign} {limit!r}")
    undefined = "skip" if skip else "fail"
    baseline = make(dict.fromkeys(states or ["gone"], 20.0)) if "delta" in function else None
    judged = judge(report, Rule("id", parse(text), undefined=undefined), baseline=baseline)
    about = [state for state in states.values() if state != "other" or function == "global"]

    if BROKEN & set(about) or not about or ("null" in about and not skip and function != "global"):
        assert "fail" == judged.gates[0].status
    if BROKEN & set(states.values()) or not states:
        assert "inconclusive" == judged.verdict
    if judged.gates[0].status == "pass" and function == "each":
        good = [snr[name] for name, state in states.items() if state == "good"]
        assert all(COMPARE[sign](value, limit) for value in good)
    if judged.gates[0].status == "pass" and function in ("min", "max", "mean"):
        good = [snr[name] for name, state in states.items() if state == "good"] or [inf]
        value = {"min": min, "max": max, "mean": fmean}[function](good)
        assert COMPARE[sign](value, limit) or abs(value - limit) < 1e-9


@given(made_up=reports(), function=FUNCTION, sign=SIGNS, limit=LIMITS)
def test_rule_and_its_opposite_never_both_hold(made_up, function, sign, limit):
    report, states, _ = made_up
    metric = "overall_snr_db" if function == "global" else "snr_db > 3" if function == "share" else "snr_db"
    condition = parse(f"{function}({metric}) {sign} {limit!r}")
    baseline = ReportValues(make(dict.fromkeys(states or ["gone"], 20.0))) if "delta" in function else None
    rules = [Rule("this", condition), Rule("opposite", condition.negate())]

    assert ["pass", "pass"] != [gate.status for gate in judge_subject(ReportValues(report), rules, baseline).gates]


class TestNames:
    def test_every_layer_metric_can_be_judged(self):
        report = make({"a": 0.5})
        for metric in LAYER_METRICS:
            assert "pass" == gate(report, f"{metric} > 0").status

    def test_every_model_metric_can_be_judged(self):
        report = make({"a": 0.5}, overall=0.5)
        for metric in MODEL_METRICS:
            assert "pass" == gate(report, f"global({metric}) > 0").status


@pytest.mark.parametrize("code", ["identical", "swapped_sides"])
def test_no_rule_holds_for_the_original_itself_or_for_swapped_sides(code):
    finding = {"code": code, "severity": "warning", "layer": None, "message": "is this the quantized checkpoint?"}
    report = make(LAYERS, findings=[finding])

    judged = judge(report, "snr_db >= 10")

    assert ("inconclusive", [finding["message"]]) == (judged.verdict, judged.reasons)
    assert Status.INCONCLUSIVE == exit_status(judged)
    assert "pass" == judge(report).verdict  # without a rule nothing is claimed
    assert "pass" == judge(make(LAYERS, findings=[finding | {"severity": "info"}]), "snr_db >= 10").verdict
