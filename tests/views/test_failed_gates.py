"""The headline of a report whose gates do not hold: the rule, the layer, and the values."""

from types import SimpleNamespace

import pytest
from support.reports import make, row

from quanterr.documents.comparison.values import ReportValues
from quanterr.gates.expression import parse
from quanterr.gates.rules import Rule
from quanterr.gates.verdicts import judge_subject
from quanterr.views.comparison.view import conclusion

LAYERS = {"a": 20.0, "b": 30.0, "c": 40.0}


def headline(report, *rules, baseline=None):
    gates = judge_subject(ReportValues(report), list(rules), ReportValues(baseline) if baseline else None)
    return conclusion(SimpleNamespace(verdict=gates.verdict, gates=gates.gates, layers=report.layers))


def rule(text, name=None):
    return Rule(name or text, parse(text))


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ([rule("snr_db >= 35")], "snr_db >= 35 does not hold: a 20, and 1 more layer"),
        ([rule("min(snr_db) >= 35", "least")], "least: min(snr_db) >= 35 does not hold: 20"),
        (
            [rule("snr_db >= 21"), rule("snr_db >= 1"), rule("snr_db >= 31")],
            "snr_db >= 21 does not hold: a 20; 1 more gate of 3 does not hold",
        ),
    ],
)
def test_headline_names_the_rule_its_worst_layer_and_the_value(rules, says):
    assert says == headline(make(LAYERS), *rules)


def test_headline_of_a_change_has_the_values_before_and_after():
    before = make({"a": 27.5, "b": 30.0, "c": 40.0})

    says = "delta(snr_db) >= -0.5 does not hold: a 27.50 -> 20.00 dB"
    assert says == headline(make(LAYERS), rule("delta(snr_db) >= -0.5"), baseline=before)


def test_headline_of_a_value_that_does_not_exist_gives_the_reason():
    report = make(rows=[row("a", None), row("b", 30.0)])

    assert "snr_db >= 1 does not hold: a: snr_db is undefined" == headline(report, rule("snr_db >= 1"))
