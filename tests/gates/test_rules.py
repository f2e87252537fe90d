"""Rules as users write them: expressions, thresholds files, presets, and messages about wrong ones."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reports import make

from quanterr.documents.comparison.values import ReportValues
from quanterr.errors import Status, UsageError
from quanterr.gates.expression import OPERATORS, parse
from quanterr.gates.rules import PRESETS, check_baseline_use, read_rules
from quanterr.gates.verdicts import judge_subject

GOOD = {
    "snr_db >= 30": ("each", "snr_db", ">=", 30.0),
    " snr_db>=-3e1 ": ("each", "snr_db", ">=", -30.0),
    "each(snr_db) > .5": ("each", "snr_db", ">", 0.5),
    "absolute_error_percentiles.p99 <= 1e-2": ("each", "absolute_error_percentiles.p99", "<=", 0.01),
    "p05( cosine_similarity ) >= 0.998": ("p05", "cosine_similarity", ">=", 0.998),
    "p99_9(nmse) < 1": ("p99_9", "nmse", "<", 1.0),
    "p99.9(nmse) < 1": ("p99.9", "nmse", "<", 1.0),
    "share(nmse <= 1e-3) >= 0.99": ("share", "nmse", ">=", 0.99),
    "global(relative_error_percentiles.p95) < 1": ("global", "relative_error_percentiles.p95", "<", 1.0),
    "rel_delta(bits_per_weight) == 0": ("rel_delta", "bits_per_weight", "==", 0.0),
    "findings.warning != 1": ("each", "findings.warning", "!=", 1.0),
}

BAD = {
    "": "an empty rule",
    "  ": "an empty rule",
    "snr_db": "column 7: expected one of < <= > >= == !=; it ends there",
    "snr_db => 30": 'column 8: expected one of < <= > >= == !=; found "=> 30"',
    "snr_db = 30": "column 8: expected one of",
    "snr_db ≥ 30": 'column 8: expected one of < <= > >= == !=; found "≥ 30"',
    "snr_db >= 30 dB": 'column 14: expected the end of the rule: one comparison, a number without a unit; found "dB"',
    "snr_db >= 30dB": "a number without a unit",
    "outlier_pct <= 5%": "a number without a unit",
    "snr_db >= 30 and nmse < 1": "one comparison",
    "20 < snr_db < 30": "column 1: expected a metric or a function",
    "20 < snr_db": "column 1: expected a metric or a function",
    "snr_db < 30 < 40": "column 13: expected the end of the rule",
    "snr_db >= nan": 'column 11: expected a number; found "nan"',
    "snr_db >= inf": "expected a number",
    "snr_db >= -": "expected a number",
    "snr_db >= 1e999": "the limit is too large for a number",
    "snr_db >= ３０": "expected a number",
    "snr_db >= __import__('os')": "expected a number",
    "snr >= 30": "no metric of a layer named snr; did you mean snr_db?",
    "SNR_DB >= 30": "no metric of a layer named SNR_DB",
    "cosine >= 0.99": "did you mean cosine_similarity",
    "worst_rows >= 1": "no metric of a layer named worst_rows",
    "absolute_error_percentiles < 1": "did you mean absolute_error_percentiles.p",
    "layer_name == 1": "no metric of a layer named layer_name",
    "overall_snr_db >= 30": "it is a metric of the whole model: global(overall_snr_db)",
    "global(snr_db) >= 30": "snr_db is a metric of layers; did you mean format_snr_db, overall_snr_db",
    "global(nothing_like_it) >= 30": "no metric of the whole model named nothing_like_it; see quanterr guide metrics",
    "global(lossless) >= 30": "lossless is a metric of the report; write it without global()",
    "mean(lossless) >= 30": "lossless is a metric of the report itself, not of its parts: write lossless alone",
    "avg(snr_db) >= 30": "no function named avg; there are each, min, max, mean, median, p05, share, global, delta",
    "medain(snr_db) >= 30": "no function named medain; did you mean median",
    "pNN(snr_db) >= 30": "no function named pNN; there are each",
    "p00(snr_db) >= 30": "p00 is not a percentile; for the lowest value write min()",
    "p100(snr_db) >= 30": "no function named p100; did you mean p05",
    "min() >= 30": "column 5: expected a metric",
    "min(snr_db >= 30": "column 12: expected )",
    "min(max(snr_db)) >= 30": "column 8: expected )",
    "min snr_db >= 30": "no metric of a layer named min; min is a function: write min(metric)",
    "share(snr_db) >= 0.9": "column 13: expected one of",
    "share(snr_db >= 30)": "it ends there",
    "share(min(snr_db) >= 30) >= 0.9": "share() takes a plain comparison",
    "share(share(snr_db >= 30) >= 1) >= 1": "share() takes a plain comparison",
    "share(findings.error == 0) >= 1": "findings.error is a metric of the report itself",
    "snr_db >= 30 # comment": "expected the end of the rule",
    "snr_db; rm -rf /": "expected one of",
    "\x1b[31m >= 30": r"\x1b[31m",
}


class TestExpression:
    @pytest.mark.parametrize(("text", "parts"), GOOD.items())
    def test_expression_is_read(self, text, parts):
        condition = parse(text)

        assert parts == (condition.function, condition.metric, condition.operator, condition.limit)
        assert text.strip() == condition.text

    @pytest.mark.parametrize(("text", "message"), BAD.items())
    def test_wrong_expression_is_an_error_with_place_and_remedy(self, text, message):
        with pytest.raises(UsageError) as caught:
            parse(text)

        assert message in str(caught.value)
        assert str(caught.value).isprintable()

    @pytest.mark.parametrize("text", GOOD)
    def test_negated_expression_reads_as_it_means(self, text):
        condition = parse(text).negate()

        assert condition == parse(condition.text)
        assert OPERATORS[parse(text).operator].opposite == condition.operator
        assert parse(text) == condition.negate()

    @given(st.text(max_size=40))
    def test_any_text_is_read_or_refused_as_an_expression(self, text):
        try:
            shown = parse(text).text
        except UsageError as error:
            shown = str(error)

        assert shown.isprintable() or shown == text.strip()

    def test_no_expression_holds_for_nan(self):
        for sign in OPERATORS:
            assert not parse(f"snr_db {sign} 1").holds(float("nan"))


def thresholds(tmp_path, text):
    path = tmp_path / "thresholds.toml"
    path.write_text(text)
    return path


RULE = '[[rule]]\nid = "x"\nrequire = "snr_db >= 30"\n'
FILES = {
    "not TOML": ("schema = 1\n[[rule]\n", "is not TOML: Expected ']]' at the end of an array declaration (at line 2"),
    "no schema": (RULE, "the first line must be: schema = 1"),
    "another schema": (f"schema = 2\n{RULE}", "the first line must be: schema = 1"),
    "a truth for a schema": (f"schema = true\n{RULE}", "the first line must be: schema = 1"),
    "nothing": ("", "the first line must be: schema = 1"),
    "no rule": ("schema = 1\n", "has no [[rule]]"),
    "unknown key": ("schema = 1\nrules = []\n", "unknown key rules; did you mean rule?"),
    "one rule, not a list": ('schema = 1\n[rule]\nid = "x"\n', "rules are written as [[rule]]"),
    "rules of a wrong type": ("schema = 1\nrule = [1]\n", "rules are written as [[rule]]"),
    "no id": ('schema = 1\n[[rule]]\nrequire = "snr_db >= 30"\n', 'thresholds.toml:2: a rule needs id = "…"'),
    "an empty id": (f"schema = 1\n{RULE}".replace('"x"', '" "'), 'thresholds.toml:2: a rule needs id = "…"'),
    "no require": ('schema = 1\n[[rule]]\nid = "x"\n', 'thresholds.toml:2: a rule needs require = "…"'),
    "a number to require": ('schema = 1\n[[rule]]\nid = "x"\nrequire = 30\n', 'a rule needs require = "…"'),
    "a misspelt key": (f'schema = 1\n{RULE}layer = ["a"]\n', 'rule "x": unknown key layer; did you mean layers?'),
    "an unknown key in a rule": (f"schema = 1\n{RULE}colour = 1\n", "known keys: id, require, layers, severity"),
    "layers as a text": (f'schema = 1\n{RULE}layers = "a"\n', "layers must be a list such as"),
    "layers as numbers": (f"schema = 1\n{RULE}layers = [1]\n", "layers must be a list such as"),
    "an empty pattern": (f'schema = 1\n{RULE}layers = [""]\n', "layers: an empty pattern"),
    "a bad regular expression": (f'schema = 1\n{RULE}layers = ["re:("]\n', "is not a regular expression"),
    "layers for a whole-model rule": (
        'schema = 1\n[[rule]]\nid = "x"\nrequire = "global(nmse) < 1"\nlayers = ["a"]\n',
        "applies to the whole model; it cannot have layers",
    ),
    "an unknown severity": (f'schema = 1\n{RULE}severity = "warning"\n', "severity must be one of error, warn, not"),
    "a severity of a wrong type": (
        f"schema = 1\n{RULE}severity = [1]\n",
        "severity must be one of error, warn, not [1]",
    ),
    "undefined as pass": (
        f'schema = 1\n{RULE}undefined = "pass"\n',
        "undefined must be one of fail, skip, not 'pass'",
    ),
    "a number for a reason": (f"schema = 1\n{RULE}reason = 1\n", "reason must be a string, not 1"),
    "a wrong expression": (
        f'schema = 1\n{RULE}\n[[rule]]\nid = "y"\nrequire = "snr >= 30"\n',
        'thresholds.toml:6: rule "y": require: "snr >= 30": no metric of a layer named snr; did you mean snr_db?',
    ),
    "one id for two whole-model rules": (
        'schema = 1\n[[rule]]\nid = "x"\nrequire = "min(nmse) < 1"\n' + RULE + 'layers = ["a"]\n',
        'two rules have the id "x"; only rules that apply to each layer can share one',
    ),
    "one id, the later for all layers": (f"schema = 1\n{RULE}{RULE}", "the later rule selects all layers"),
    "a hostile id": (
        'schema = 1\n[[rule]]\nid = "\\u001b[31m"\nrequire = "x"\n',
        r'rule "\x1b[31m": require: "x": no metric of a layer named x',
    ),
    "deeply nested": ("schema = 1\nrule = " + "[" * 5000, "is not TOML"),
}


class TestThresholdsFile:
    def test_thresholds_file_is_read(self, tmp_path):
        path = thresholds(
            tmp_path,
            f"""schema = 1
{RULE}
[[rule]]
id = "x"
layers = ["attn,mlp", "re:a,b", "!*.bias"]
require = "nmse <= 0.1"
severity = "warn"
undefined = "skip"
reason = "why"
""",
        )
        first, second = read_rules(path)

        expected = ("x", "snr_db >= 30", (), "error", "fail", None, f"{path}:2: ", "same", (), ())
        assert expected == first._replace(condition=first.condition.text)
        assert ("attn", "mlp", "re:a,b", "!*.bias") == second.layers
        assert ("warn", "skip", "why") == (second.severity, second.undefined, second.reason)

    @pytest.mark.parametrize(("text", "message"), FILES.values(), ids=FILES)
    def test_wrong_thresholds_file_is_an_error_with_line_and_remedy(self, tmp_path, text, message):
        with pytest.raises(UsageError) as caught:
            read_rules(thresholds(tmp_path, text))

        assert message in str(caught.value)
        assert Status.USAGE == caught.value.status
        assert str(caught.value).isprintable()

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("fp9", "fp9: no such file; presets are fp8, "),
            (".", "not a regular file"),
            (os.devnull, "not a regular file"),
            ("a\0b", "null byte"),
        ],
    )
    def test_unreadable_thresholds_file_is_an_error(self, name, message):
        with pytest.raises(UsageError, match=message):
            read_rules(name)

    def test_thresholds_file_must_be_utf_8(self, tmp_path):
        path = tmp_path / "thresholds.toml"
        path.write_bytes(b"schema = 1 # \xff")
        with pytest.raises(UsageError, match="is not TOML: 'utf-8' codec"):
            read_rules(path)


class TestCommandLine:
    def test_fail_if_is_the_opposite_of_require(self):
        required, forbidden = read_rules(None, ["snr_db >= 30"], ["share(nmse > 0.1) > 0.5"])

        assert ("snr_db >= 30", "share(nmse > 0.1) <= 0.5") == (required.id, forbidden.id)

    @pytest.mark.parametrize("snr_db", [20.0, None])
    def test_fail_if_never_fails_open(self, snr_db):
        report = ReportValues(make({"a": snr_db}))
        for text in ("snr_db < 30", "snr_db != 40", "min(snr_db) < 30", "share(snr_db < 30) > 0", "max(snr_db) <= 20"):
            assert "fail" == judge_subject(report, read_rules(None, (), [text])).gates[0].status

    def test_error_names_the_wrong_option(self):
        with pytest.raises(UsageError, match=r'^--require: "snr": '):
            read_rules(None, ["snr"])
        with pytest.raises(UsageError, match=r'^--fail-if: "snr": '):
            read_rules(None, [], ["snr"])

    def test_missing_rules_are_wrong_usage(self):
        with pytest.raises(UsageError, match="no rules given"):
            read_rules(None)

    def test_repeated_rule_is_wrong_usage(self):
        with pytest.raises(UsageError, match="two rules have the id"):
            read_rules(None, ["snr_db >= 30", "snr_db >= 30"])

    def test_baseline_must_exist_and_be_used(self):
        plain, comparing = read_rules(None, ["snr_db >= 30"]), read_rules(None, ["delta(snr_db) >= 0"])

        check_baseline_use(plain, given=False)
        check_baseline_use(comparing, given=True)
        check_baseline_use(plain, given=True, updated=True)
        with pytest.raises(UsageError, match="no rule compares with the baseline"):
            check_baseline_use(plain, given=True)
        with pytest.raises(UsageError, match="compares with an older report"):
            check_baseline_use(comparing, given=False, updated=True)


class TestPresets:
    def test_presets_match_the_documented_list(self):
        assert {"fp8", "int8", "int4", "nf4", "nvfp4", "mxfp4", "gguf-q4_k"} == PRESETS.keys()

    @pytest.mark.parametrize("name", PRESETS)
    def test_presets_are_rules_with_a_caveat(self, name):
        rules = read_rules(name)

        assert ["layers", "model", "codes", "coverage"] == [rule.id for rule in rules]
        assert all(rule.reason for rule in rules)
        assert "a starting point, not a guarantee" in PRESETS[name].read_text()
        assert rules[0].condition.limit < rules[1].condition.limit

    def test_file_named_like_a_preset_is_reached_by_its_path(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("fp8").write_text(f"schema = 1\n{RULE}")
        Path("int8").mkdir()

        assert ["layers", "x"] == [read_rules(name)[0].id for name in ("int8", "./fp8")]
        with pytest.raises(UsageError, match=r"^fp8: is both a preset and a file; give \./fp8"):
            read_rules("fp8")

    def test_presets_allow_plain_rounding_and_no_broken_layer(self):
        lowest = {"fp8": 31, "int8": 32, "int4": 19, "nf4": 20, "nvfp4": 20, "mxfp4": 18.8, "gguf-q4_k": 23}
        for name, snr in lowest.items():
            good = make(dict.fromkeys("abc", float(snr)), overall=float(snr))
            broken = make({"a": 9.5, "b": 60.0}, overall=float(snr))

            assert "pass" == judge_subject(ReportValues(good), read_rules(name)).verdict
            assert "fail" == judge_subject(ReportValues(broken), read_rules(name)).verdict


def test_every_message_about_a_file_begins_with_its_name(tmp_path):
    path = thresholds(tmp_path, f'schema = 1\n{RULE}layers = "a"\n')
    with pytest.raises(UsageError, match=f"^{re.escape(str(path))}:2: "):
        read_rules(path)


def test_another_original_is_accepted_by_a_rule_or_an_option(tmp_path):
    path = tmp_path / "rules.toml"
    text = 'schema = 1\n[[rule]]\nid = "x"\nrequire = "delta(snr_db) >= -1"\nbaseline_original = "any"\n'
    path.write_text(text)

    assert ["any"] == [rule.baseline_original for rule in read_rules(path)]
    assert ["any"] == [rule.baseline_original for rule in read_rules(None, "snr_db >= 1", any_original=True)]
    path.write_text(text.replace('"any"', '"other"'))
    with pytest.raises(UsageError, match="baseline_original must be one of same, any"):
        read_rules(path)
