"""Findings that explain others: each row of the table, with a file in which it applies."""

from itertools import combinations_with_replacement

import pytest
import torch
from mutation import unusual
from support.making import compare, numbers

from quanterr.documents.base import SEVERITIES
from quanterr.documents.finding_codes import CODES
from quanterr.findings import explanations, make_finding
from quanterr.findings.explanations import EXPLANATIONS, drop_explained

NAME = "layers.0.mlp.up_proj.weight"
NORM = "layers.0.input_layernorm.weight"


def by_row(x, times=1.0):
    unit = times * x.abs().amax(1, keepdim=True) / 127
    return (x / unit).round().to(torch.int8), unit


def weight_of(rows):
    return numbers(rows, 256, seed=3).float()


def find_damage(folder, change, rows=64):
    """Return the findings about one weight with changed codes or scales."""
    x = weight_of(rows)
    codes, unit = change(*by_row(x))
    return compare(folder, {NAME: x}, {NAME: codes, f"{NAME}_scale": unit}).findings


def every_other_negative(codes, unit):
    signs = torch.where(torch.arange(64)[:, None] % 2 == 0, 1, -1)
    return codes * signs.to(torch.int8), unit * signs


def zeros_in_a_row(codes, unit):
    codes[7, ::2] = 0
    return codes, unit


def noise_in_rows(codes, unit):
    """Add noise to rows outside the sample."""
    generator = torch.Generator().manual_seed(1)
    codes = (codes.float() * 7 / 127).round()  # 4 bits
    codes[20:90] += torch.randint(-3, 4, (70, 256), generator=generator)
    return codes.to(torch.int8), unit * 127 / 7


def values_of_one_size(folder):
    """Return the findings about a weight of which every code is the largest by design."""
    x = numbers(64, 256, seed=3).sign().float() * 0.03
    codes, unit = by_row(x)
    return compare(folder, {NAME: x}, {NAME: codes, f"{NAME}_scale": unit.bfloat16()}).findings


def coarse_and_at_random(folder):
    """Return the findings about random codes of rows whose outlier leaves the other elements two or three codes."""
    x = numbers(64, 256, seed=3).float()
    x[:, 17] = 2.0
    unit = x.abs().amax(1, keepdim=True) / 7
    random = torch.rand(x.shape, generator=torch.Generator().manual_seed(5))
    codes = (x / unit + 0.7 * (random - 0.5)).round().to(torch.int8)
    return compare(folder, {NAME: x}, {NAME: codes, f"{NAME}_scale": unit}).findings


def find_truncation(folder):
    """Return the findings about truncated codes of few bits, whose values are clearly smaller."""
    x = weight_of(64)
    unit = x.abs().amax(1, keepdim=True) / 15
    return compare(folder, {NAME: x}, {NAME: (x / unit).trunc().to(torch.int8), f"{NAME}_scale": unit}).findings


def rounded_down(folder):
    x = weight_of(64)
    unit = x.abs().amax(1, keepdim=True) / 127
    return compare(folder, {NAME: x}, {NAME: (x / unit).floor().to(torch.int8), f"{NAME}_scale": unit}).findings


def another_weight(folder):
    codes, unit = by_row(numbers(64, 256, seed=4).float())
    return find_damage(folder, lambda *_: (codes, unit))


def larger_weight(folder):
    """Store a larger weight of other values with scales for them."""
    codes, unit = by_row(1.5 * numbers(64, 256, seed=4).float())
    return find_damage(folder, lambda *_: (codes, unit))


def one_scale_for_both(folder):
    """Return the findings about one scale for q, k and v, of which v is far smaller, for a runtime that fuses them."""
    q, v = (numbers(64, 256, seed=n).float() * size for n, size in enumerate((1, 0.02)))
    unit, names = q.abs().max() / 127, [f"layers.0.self_attn.{part}_proj.weight" for part in "qv"]
    x = dict(zip(names, (q, v), strict=True))
    y = {name: (weight / unit).round().to(torch.int8) for name, weight in x.items()}
    return compare(folder, x, y | {f"{name}_scale": unit for name in names}).findings


def outlier_in_one_of_five(folder):
    x = {NAME.replace("0", str(n)): numbers(64, 256, seed=n).float() for n in range(5)}
    x[NAME][:, 17] = 2.0
    y = {name: by_row(w) for name, w in x.items()}
    stored = {name: codes for name, (codes, _) in y.items()} | {f"{name}_scale": unit for name, (_, unit) in y.items()}
    return compare(folder, x, stored).findings


def codes_as_numbers(folder):
    codes, _ = by_row(weight_of(64))
    return compare(folder, {NAME: weight_of(64)}, {NAME: codes.bfloat16()}).findings


def norm_in_another_order(folder):
    x = {NORM: 1 + numbers(128, seed=1)}
    return compare(folder, x, {NORM: x[NORM].flip(0)}).findings


def rows_in_another_order_than_the_name_says(folder):
    """Return the findings about rows in another order than Mistral's names mean."""
    x = numbers(64, 256).float()
    codes, unit = by_row(x)
    (folder / "config.json").write_text('{"num_attention_heads": 4}')
    quantized = {"layers.0.attention.wq.weight": codes, "layers.0.attention.wq.weight_scale": unit}
    return compare(folder, {"model.layers.0.self_attn.q_proj.weight": x}, quantized).findings


# First cause and first explained finding of each row → findings of files in which the row applies.
CASES = {
    ("wrong_convention", "scale_factor"): rows_in_another_order_than_the_name_says,
    ("codes_without_scale", "implausible_error"): codes_as_numbers,
    ("corrected scales", "implausible_error"): lambda folder: find_damage(
        folder, lambda codes, unit: (codes, 1.01 * unit)
    ),
    ("underflows", "implausible_error"): lambda folder: (
        unusual.compare(unusual.KINDS["very tiny"](), folder, None, "Q8_0").findings
    ),
    ("near", "implausible_error"): values_of_one_size,
    ("usual", "implausible_error"): coarse_and_at_random,
    ("signed", "scale_negative"): lambda folder: find_damage(folder, every_other_negative),
    ("scale_factor", "excess_error"): lambda folder: find_damage(folder, lambda codes, unit: (codes, 3 * unit)),
    ("nonfinite_original", "excess_error"): another_weight,
    ("one way", "scale_factor"): find_truncation,
    ("one way", "zero_points"): rounded_down,
    ("implausible_error", "scale_loss"): larger_weight,
    ("shared_scale", "implausible_error"): one_scale_for_both,
    ("outlier_column", "group_outlier"): outlier_in_one_of_five,
    ("scale_loss", "implausible_error"): lambda folder: find_damage(folder, lambda *_: by_row(weight_of(64), 64)),
    ("excess_error", "implausible_error"): lambda folder: find_damage(folder, zeros_in_a_row),
    ("excess_rows", "bad_rows"): lambda folder: find_damage(folder, noise_in_rows, rows=1024),
    ("scale_factor", "unquantized_changed"): norm_in_another_order,
}


def key(row):
    return row.causes[0], row.explained[0]


@pytest.mark.parametrize("row", EXPLANATIONS, ids=lambda row: " ".join(key(row)))
def test_explained_finding_appears_without_its_row(row, tmp_path, monkeypatch):
    with_it = {case.code for case in CASES[key(row)](tmp_path)}
    monkeypatch.setattr(explanations, "EXPLANATIONS", tuple(other for other in EXPLANATIONS if other is not row))
    without = {case.code for case in CASES[key(row)](tmp_path)}

    assert with_it < without
    assert without - with_it <= set(row.explained)


def test_every_row_has_codes_a_reason_and_a_case():
    assert CASES.keys() == {key(row) for row in EXPLANATIONS}
    for row in EXPLANATIONS:
        assert row.reason
        assert set(row.causes) - set(explanations.FACTS) <= CODES.keys()
        assert set(row.explained) <= CODES.keys()


def rank(severity):
    return -SEVERITIES.index(severity)  # the most severe is the highest


@pytest.mark.parametrize(("earlier", "later"), list(combinations_with_replacement(EXPLANATIONS, 2)))
def test_no_row_explains_an_earlier_cause(earlier, later):
    """So the order of findings, and of unrelated rows, does not matter."""
    assert set(earlier.causes).isdisjoint(later.explained) or rank(later.max_severity) < rank(earlier.min_severity)


def a_finding(code, severity, layer, **evidence):
    return make_finding(code, severity, layer, "x", **evidence)


@pytest.mark.parametrize("row", EXPLANATIONS, ids=lambda row: " ".join(key(row)))
def test_cause_does_not_explain_other_weights(row):
    effect = a_finding(row.explained[0], row.max_severity, "a")
    cause = a_finding(row.causes[0], row.min_severity, "b")

    assert [effect, cause] == drop_explained([effect, cause], {row.causes[0]: {"b"}})


@pytest.mark.parametrize(("severity", "stands"), [("warning", True), ("error", False)])
def test_cause_must_be_bad_enough(severity, stands):
    findings = [a_finding("scale_factor", severity, "a"), a_finding("excess_error", "warning", "a")]

    assert stands == (findings == drop_explained(findings, {}))


@pytest.mark.parametrize(("named", "stands"), [(["a"], True), (["a", "b"], False)])
def test_finding_about_many_weights_is_dropped_if_all_are_explained(named, stands):
    findings = [
        a_finding("scale_factor", "error", None, layers=named),
        a_finding("unquantized_changed", "warning", None, layers=["a", "b"]),
    ]

    assert stands == (findings == drop_explained(findings, {}))


def test_finding_without_a_weight_is_not_explained():
    findings = [a_finding("scale_factor", "error", "a"), a_finding("implausible_error", "error", None)]

    assert findings == drop_explained(findings, {})
