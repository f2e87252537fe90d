"""Findings: each from a checkpoint with just that fault, and none from valid checkpoints."""

import ast
import json
import math
from pathlib import Path

import pytest
import torch
from support.making import compare, numbers, quantized_fp8, quantized_int8, store

import quanterr
from quanterr.dequantization.run import dequantize
from quanterr.documents.base import Finding
from quanterr.documents.finding_codes import CODES, FORMER_NAMES
from quanterr.findings import make_finding
from quanterr.findings.factors import explain_factor, explain_factors
from quanterr.findings.repairs import Sample, describe_order, find_simplest_repair
from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.samples.measuring import SampleMeasurer
from quanterr.samples.rows import list_rows, sample_chunks

UP = "layers.{}.mlp.up_proj.weight"
SHAPE = 64, 128


def model(n=1, shape=SHAPE):
    return {UP.format(i): numbers(*shape, seed=i) for i in range(n)}


def store_codes(x, quantize=quantized_fp8):
    """Return codes and one scale for each weight."""
    tensors = {}
    for name, weight in x.items():
        tensors[name], tensors[f"{name}_scale"] = quantize(weight)
    return tensors


def by_row(weight):
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scale).round().to(torch.int8), scale


def by_row_of_few_bits(weight):
    scale = weight.float().abs().amax(1, keepdim=True) / 7
    return (weight.float() / scale).round().to(torch.int8), scale


def map_findings(report):
    return {finding.code: finding for finding in report.findings}


def faulty(folder, change, n=1, quantize=quantized_fp8, shape=SHAPE):
    """Return the findings after ``change`` was applied to the stored tensors of the last weight."""
    x = model(n, shape)
    y = store_codes(x, quantize)
    name = UP.format(n - 1)
    change(y, name)
    return map_findings(compare(folder, x, y)), name


def times(factor):
    def change(y, name):
        y[f"{name}_scale"] = y[f"{name}_scale"] * factor

    return change


def codes_as(function):
    def change(y, name):
        y[name] = function(y[name].view(torch.uint8)).contiguous().view(y[name].dtype)

    return change


class TestCodes:
    def test_evidence_holds_only_json_values(self):
        made = make_finding(
            "implausible_error", "error", None, "x", snr_db=-math.inf, cosine_similarity=math.nan, rows=[1]
        )

        assert {"snr_db": None, "cosine_similarity": None, "rows": [1]} == made.evidence

    def test_every_finding_has_a_code_with_its_severity_and_every_code_is_used(self):
        made, used = {}, set()
        for path in Path(quanterr.__file__).parent.rglob("*.py"):
            declares = path.parent.name == "finding_codes" or path.name == "explanations.py"
            counts = path.parent.name == "kernel"  # Some codes of findings are also names of sums.
            tree = ast.parse(path.read_text())
            for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
                function.decorator_list.clear()  # to declare a code is not to use it
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "make_finding":
                    code, severity = (getattr(value, "value", None) for value in node.args[:2])
                    if isinstance(code, str):
                        made.setdefault(code, set()).add(severity)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not (declares or counts):
                    used.add(node.value)

        assert made
        assert made.keys() <= CODES.keys()
        for code, severities in made.items():
            assert {severity for severity in severities if isinstance(severity, str)} <= set(CODES[code].severities)
        # The code that reports these puts their names together from the side.
        assert CODES.keys() - used == {"nonfinite_original", "nonfinite_quantized"}

    def test_former_code_names_are_still_read(self):
        made = Finding(code="far_off", severity="error", layer=None, message="x", remedy=None, evidence={})

        assert "implausible_error" == made.code
        assert set(FORMER_NAMES.values()) <= CODES.keys()
        assert FORMER_NAMES.keys().isdisjoint(CODES)

    def test_every_code_has_an_example_and_a_remedy_in_whole_sentences(self):
        for code, row in CODES.items():
            assert row.example, code
            assert row.remedy[0].isupper(), code
            assert row.remedy.endswith("."), code


@pytest.mark.parametrize("quantize", [quantized_fp8, quantized_int8, by_row])
def test_correct_weights_raise_no_finding(tmp_path, quantize):
    x = model(6)

    assert [] == compare(tmp_path, x, store_codes(x, quantize)).findings


class TestScales:
    @pytest.mark.parametrize("factor", [3.0, 0.25, 1.1, 448.0, -1.0])
    def test_factor_is_named_with_the_level_without_it(self, tmp_path, factor):
        findings, name = faulty(tmp_path, times(factor))

        assert ("error", name) == (findings["scale_factor"].severity, findings["scale_factor"].layer)
        assert factor == pytest.approx(float(findings["scale_factor"].evidence["found"]), rel=0.002)
        assert f"off by a factor of {findings['scale_factor'].evidence['found']}" in findings["scale_factor"].message
        assert findings["scale_factor"].evidence["snr_db_repaired"] > 30 > findings["scale_factor"].evidence["snr_db"]
        assert "implausible_error" not in findings

    def test_factor_causing_part_of_the_error_is_a_warning(self, tmp_path):
        def four_bits(weight):
            scale = weight.float().abs().amax() / 127
            coarse = weight.float().abs().amax() / 7
            return ((weight.float() / coarse).round() * coarse / scale).round().to(torch.int8), scale * 1.1

        x = model()
        findings = map_findings(compare(tmp_path, x, store_codes(x, four_bits)))

        assert {"scale_factor": "warning", "excess_error": "error"} == {c: findings[c].severity for c in findings}
        assert (
            "1.124 times the original's overall" in findings["scale_factor"].message
        )  # no repair: 31 dB are attainable

    def test_factor_shared_by_many_weights_is_one_finding(self, tmp_path):
        x = model(4)
        y = store_codes(x)
        for name in x:
            y[f"{name}_scale"] = y[f"{name}_scale"] * 2
        report = compare(tmp_path, x, y)
        errors = [finding for finding in report.findings if finding.severity == "error"]

        assert [("scale_factor", None)] == [(finding.code, finding.layer) for finding in errors]
        assert list(x) == errors[0].evidence["layers"]
        assert "4 weights are the original times 2" in errors[0].message
        assert "power of two" in errors[0].message
        assert "inconclusive" == report.verdict

    def test_scales_for_other_rows_are_noticed(self, tmp_path):
        x = {name: (weight * torch.linspace(0.5, 2, 64)[:, None]).bfloat16() for name, weight in model().items()}
        y = store_codes(x, by_row)
        name = UP.format(0)
        y[f"{name}_scale"] = y[f"{name}_scale"].roll(1, 0)
        findings = map_findings(compare(tmp_path, x, y))

        assert "one factor per row corrects it" in findings["scale_factor"].message
        assert "each scale belongs 1 place earlier" in findings["scale_factor"].message

    def test_scales_for_other_blocks_are_noticed(self, tmp_path):
        x = model(shape=(128, 128))
        name = UP.format(0)
        levels = torch.logspace(-1, 1, 16).reshape(4, 4).repeat_interleave(32, 0).repeat_interleave(32, 1)
        x[name] = (x[name] * levels).bfloat16()
        blocks = x[name].float().reshape(4, 32, 4, 32)
        scale = blocks.abs().amax((1, 3)) / 127
        codes = (blocks / scale[:, None, :, None]).round().reshape(128, 128).to(torch.int8)
        findings = map_findings(compare(tmp_path, x, {name: codes, f"{name}_scale": scale.t().contiguous()}))

        assert "one factor per block corrects it" in findings["scale_factor"].message
        assert "error" == findings["scale_factor"].severity

    def test_column_factors_are_noticed(self, tmp_path):
        x = model()
        name = UP.format(0)
        findings = map_findings(
            compare(tmp_path, x, store_codes({name: x[name] * torch.linspace(0.3, 3, 128)}, by_row))
        )

        assert "one factor per column corrects it" in findings["scale_factor"].message

    def test_scales_equal_to_one_are_a_single_finding(self, tmp_path):
        x = {name: (weight * 20).to(torch.float8_e4m3fn).float() for name, weight in model(2).items()}
        y = {name: weight.to(torch.float8_e4m3fn) for name, weight in x.items()}
        y |= {f"{name}_scale": torch.tensor(1.0) for name in x}
        findings = map_findings(compare(tmp_path, {name: weight * 1.001 for name, weight in x.items()}, y))

        assert ("info", list(x)) == (findings["scale_constant"].severity, findings["scale_constant"].evidence["layers"])

    @pytest.mark.parametrize("judged", [True, False])
    def test_codes_at_the_end_of_their_range_are_noticed(self, tmp_path, monkeypatch, judged):
        def clip(weight):
            scale = weight.float().abs().amax() / 127 / 4
            return (weight.float() / scale).round().clamp(-127, 127).to(torch.int8), scale

        if not judged:  # scales of codebooks are not judged; this test imitates one
            monkeypatch.setattr(SampleMeasurer, "_measure_closely", lambda *_: None)
        x = model()
        findings = map_findings(compare(tmp_path, x, store_codes(x, clip)))

        assert ("error", "warning")[not judged] == findings["scale_loss" if judged else "saturated"].severity
        assert judged == ("saturated" not in findings)


class TestActivationScales:
    @pytest.mark.parametrize(
        ("value", "code", "severity"),
        [
            (math.nan, "scale_nonfinite", "error"),
            (math.inf, "scale_nonfinite", "error"),
            (0.0, "scale_zero", "warning"),
            (-0.5, "scale_negative", "warning"),
        ],
    )
    @pytest.mark.parametrize("ending", ["mlp.up_proj.input_scale", "self_attn.k_scale"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_unusable_activation_scales_are_noticed(self, tmp_path, ending, value, code, severity, dtype):
        x, name = model(), f"layers.0.{ending}"
        report = compare(tmp_path, x, store_codes(x) | {name: torch.tensor([0.5, value], dtype=dtype)})
        (finding,) = report.findings

        assert (code, severity, [name]) == (finding.code, finding.severity, finding.evidence["tensors"])
        assert name in finding.message
        assert ("inconclusive" if severity == "error" else "pass") == report.verdict

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("layers.0.mlp.up_proj.input_scale", torch.tensor(0.5)),
            ("layers.0.mlp.up_proj.input_zero_point", torch.tensor(0.0)),
            ("layers.0.mlp.up_proj.input_scale", torch.zeros(4, dtype=torch.uint8)),
            ("scaled_fp8", torch.zeros(2)),
            ("layers.0.mlp.up_proj.input_activation_scale", torch.tensor(0.0)),
        ],
    )
    def test_other_activation_scales_are_silent(self, tmp_path, name, value):
        x = model()

        assert [] == compare(tmp_path, x, store_codes(x) | {name: value}).findings


@pytest.mark.parametrize(
    ("factor", "scale", "words"),
    [
        (-1.0, 0.5, "sign is inverted"),
        (3.0, 1.0, "the real scale was dropped"),
        (0.02, 0.0004, "applied twice"),
        (0.0004, 0.02, "inverse"),
        (0.02, 0.02, "already include them"),
        (448.0, 0.01, "largest FP8 E4M3"),
        (1 / 127, 0.3, "largest INT8"),
        (0.25, 0.3, "power of two"),
        (1.3, 0.01, ""),
    ],
)
def test_factor_suggests_its_reason(factor, scale, words):
    scales = ScaleStatistics(1, 0, 0, 0, scale, scale, scale)

    assert words in explain_factor(factor, scales)
    assert bool(words) == bool(explain_factor(factor, scales))


@pytest.mark.parametrize(("others", "is_told"), [([0.5, 4.0], True), ([0.25, 0.31], False)])
def test_wrong_exponent_makes_all_factors_powers_of_two(others, is_told):
    assert is_told == ("power of two" in explain_factor(0.25, None, others))


def test_missing_scale_is_reported_instead_of_a_factor():
    assert ": no scale is stored for it; the real scale was dropped" == explain_factor(448.0, None, (), True)


@pytest.mark.parametrize(
    ("stored", "factors", "words"),
    [
        (lambda s: s * 0 + 1, lambda s: 1 / s, "every stored scale is 1; the real scales were dropped"),
        (lambda s: s * s, lambda s: s, "applied twice, or stored squared"),
        (lambda s: 1 / s, lambda s: s**-2, "inverse"),
        (lambda s: s, lambda s: s, "already include them"),
        (lambda s: s.roll(1), lambda s: s.roll(1) / s, "belongs 1 place earlier"),
        (lambda s: s.roll(16), lambda s: s.roll(16) / s, "belongs 16 places later"),
        (lambda s: s, lambda s: s.flip(0) / s, ""),
        (lambda s: -s, lambda s: s, ""),
    ],
)
def test_row_factors_suggest_wrong_scales(stored, factors, words):
    scales = torch.rand(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.01
    explanation = explain_factors(factors(scales), stored(scales))

    assert words in explanation
    assert bool(words) == bool(explanation)


class TestOrder:
    def test_rows_in_another_order_are_an_error(self, tmp_path):
        findings, name = faulty(tmp_path, codes_as(lambda codes: codes.roll(1, 0)))

        assert ("error", name) == (findings["permuted"].severity, findings["permuted"].layer)
        assert "its rows are in a different order (shifted by 1)" in findings["permuted"].message
        assert findings["permuted"].evidence["snr_db_repaired"] > 30

    def test_swapped_neighbouring_columns_are_an_error(self, tmp_path):
        findings, _ = faulty(tmp_path, codes_as(lambda codes: codes.reshape(64, 64, 2).flip(2).reshape(64, 128)))

        assert "its columns are in a different order (neighbours are swapped" in findings["permuted"].message

    def test_order_without_a_simple_rule_is_an_error(self, tmp_path):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
        findings, _ = faulty(tmp_path, codes_as(lambda codes: codes[order]))

        assert "irregular order" in findings["permuted"].message

    def test_transposed_weight_is_an_error(self, tmp_path):
        findings, _ = faulty(tmp_path, codes_as(lambda codes: codes.t()), shape=(64, 64))

        assert "error" == findings["transposed"].severity

    @pytest.mark.parametrize(
        ("there", "words"),
        [
            (lambda i: i ^ 1, "neighbours"),
            (lambda i: (i - 2) % 64, "shifted by 2"),
            (lambda i: (i + 3) % 64, "shifted by -3"),
            (lambda i: 63 - i, "in reverse"),
            (lambda i: i ^ 7, "reversed within runs of 8"),
            (lambda i: i ^ 16, "halves of runs of 32 are swapped, as with nibbles in the wrong order"),
            (lambda i: i % 8 * 8 + i // 8, "interleaved"),
            (lambda i: i * 5 % 64, "irregular order"),
            (lambda i: {3: 9, 9: 3}.get(i, i), "a few are in other places"),
        ],
    )
    def test_order_is_described_in_words(self, there, words):
        order = list(range(64))

        assert words in describe_order(order, [there(i) for i in order], 64)

    @pytest.mark.parametrize(
        ("places", "code", "words"),
        [
            (
                [0, 1, 0, 1, 0, 1],
                "swapped_weight",
                "2 of 6 experts of the original are left, the others are lost (2 holds 0",
            ),
            ([5, 0, 1, 2, 3, 4], "permuted", "its experts are in a different order (shifted by 1)"),
        ],
    )
    def test_experts_in_other_places_are_named(self, tmp_path, places, code, words):
        name = "model.layers.0.mlp.experts.down_proj"
        x = {name: numbers(6, 256, 1100)}  # the sample for repairs ends within the first weight
        findings = map_findings(compare(tmp_path, x, {name: x[name][places]}))

        assert {code} == findings.keys()
        assert places == findings[code].evidence["experts"]
        assert words in findings[code].message

    def test_experts_repeated_in_the_original_are_in_their_places(self, tmp_path):
        name = "model.layers.0.mlp.experts.down_proj"
        x = numbers(4, 64, 64)[[0, 0, 2, 3]]
        findings = map_findings(compare(tmp_path, {name: x}, {name: torch.cat([x[:3], 0.5 * x[3:]])}))

        assert not {"permuted", "swapped_weight"} & findings.keys()

    @pytest.mark.parametrize(
        "name", ["model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"]
    )
    def test_exchanged_gate_and_up_are_named(self, tmp_path, name):
        x = {name: numbers(*([3] if "experts" in name else []), 512, 640)}
        findings = map_findings(compare(tmp_path, x, {name: x[name].roll(256, -2)}))

        assert {"permuted"} == findings.keys()
        assert "gate is stored where up belongs, and up for gate" in findings["permuted"].message

    def test_weight_from_another_layer_is_named(self, tmp_path):
        x = model(3)
        y = store_codes(x)
        first, second = UP.format(0), UP.format(2)
        for part in ("", "_scale"):
            y[first + part], y[second + part] = y[second + part], y[first + part]
        findings = [f for f in compare(tmp_path, x, y).findings if f.code == "swapped_weight"]

        assert [(first, second), (second, first)] == [(f.layer, f.evidence["weight"]) for f in findings]

    def test_unrelated_tensor_is_far_off_and_no_repair_is_proposed(self, tmp_path):
        x = model()
        findings = map_findings(compare(tmp_path, x, store_codes({name: numbers(*SHAPE, seed=9) for name in x})))

        assert {"implausible_error"} == findings.keys()


@pytest.mark.parametrize(("x", "y"), [(1e-160, 1e155), (1e155, 1e-160), (1e160, 1.001e160)])
def test_values_too_large_to_square_do_not_pass(tmp_path, x, y):
    ones = torch.ones(16, 64, dtype=torch.float64)
    report = compare(tmp_path, {"a.weight": x * ones}, {"a.weight": y * ones})

    assert ("inconclusive", ["implausible_error"]) == (report.verdict, [finding.code for finding in report.findings])


class TestZeroPoints:
    def test_errors_leaning_to_one_side_are_a_warning(self, tmp_path):
        x = model()
        findings = map_findings(
            compare(tmp_path, x, store_codes({name: weight + 0.002 for name, weight in x.items()}, by_row))
        )

        assert ("warning", UP.format(0)) == (findings["biased_error"].severity, findings["biased_error"].layer)

    @pytest.mark.parametrize(("rows", "codes"), [(1, set()), (4, {"biased_error"})])
    def test_few_errors_may_lean_to_one_side_by_chance(self, tmp_path, rows, codes):
        """The mean of 64 errors is a third of their energy at 4.6 standard errors, as by chance; of 256 at 9."""
        errors = torch.tensor([1.0, -1.0]).repeat(rows * 32).view(rows, 64) + math.sqrt(0.5)
        steps, scale = by_row(numbers(rows, 64))
        y = steps * scale
        x = y - 0.8 * scale * errors
        findings = map_findings(compare(tmp_path, {"a.weight": x}, store_codes({"a.weight": y}, by_row)))

        assert codes == findings.keys() & {"biased_error"}

    def test_shift_per_row_is_proposed(self, tmp_path):
        x = model()
        shifts = torch.linspace(-0.2, 0.2, 64)[:, None]
        findings = map_findings(
            compare(tmp_path, x, store_codes({name: weight + shifts for name, weight in x.items()}, by_row))
        )

        assert "one shift per row corrects it" in findings["zero_points"].message


class TestRows:
    def test_zero_rows_are_a_warning(self, tmp_path):
        def change(y, name):
            y[name].view(torch.uint8)[[5, 9]] = 0

        findings, name = faulty(tmp_path, change)

        assert ("warning", name, [5, 9]) == (
            findings["dead_rows"].severity,
            findings["dead_rows"].layer,
            findings["dead_rows"].evidence["rows"],
        )

    def test_much_worse_row_is_named(self, tmp_path):
        def change(y, name):
            y[name].view(torch.uint8)[7, ::8] = 0

        findings, _ = faulty(tmp_path, change)

        assert [7] == findings["bad_rows"].evidence["rows"]

    def test_rows_sharing_a_scale_with_an_outlier_are_silent(self, tmp_path):
        x = numbers(1024, 128)
        x[3, 5] = 30 * x.float().std()
        blocks = [by_row(block.reshape(1, -1)) for block in x.split(128)]
        codes = torch.cat([codes.view(128, 128) for codes, _ in blocks])
        scale = torch.cat([scale for _, scale in blocks])
        report = compare(tmp_path, {"a.weight": x}, {"a.weight": codes, "a.weight_scale": scale})
        rows = report.layers[0].worst_rows

        assert report.layers[0].format == "int8_block"
        assert rows[0].snr_db < report.layers[0].snr_db - 8
        assert "bad_rows" not in map_findings(report)


def test_error_far_below_the_usual_format_level_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(SampleMeasurer, "_measure_closely", lambda *_: None)  # imitates a format without nearest codes
    x = model()
    findings = map_findings(
        compare(tmp_path, x, store_codes({name: w + 0.2 * numbers(*SHAPE, seed=9) for name, w in x.items()}))
    )

    assert ("warning", [31, 32]) == (findings["below_usual"].severity, findings["below_usual"].evidence["usual_snr_db"])


NORM, BIAS = "layers.0.input_layernorm.weight", "layers.0.mlp.up_proj.bias"
OTHER_BIAS = "layers.1.mlp.up_proj.bias"


def vectors():
    """Return a norm around 1 and two biases around 0."""
    norm = (1 + 0.3 * torch.randn(128, generator=torch.Generator().manual_seed(0))).bfloat16()
    return {NORM: norm, BIAS: numbers(64, seed=1), OTHER_BIAS: numbers(64, seed=2)}


class TestVectors:
    @pytest.mark.parametrize(
        ("name", "broken", "code", "words"),
        [
            (NORM, lambda x: x[NORM] * 0, "implausible_error", "all its values are zero"),
            (NORM, lambda x: x[NORM] * (torch.arange(128) % 3 == 0), "implausible_error", "of its 128 values are zero"),
            (NORM, lambda x: -x[NORM], "scale_factor", "times -1: the sign is inverted"),
            (NORM, lambda x: x[NORM] * 1000, "scale_factor", "times 1000"),
            (NORM, lambda x: x[NORM].flip(0), "permuted", "a permutation of the original"),
            (NORM, lambda x: x[NORM].roll(1), "permuted", "a permutation of the original"),
            (NORM, lambda x: 50 * numbers(128, seed=9), "implausible_error", "another tensor, or damaged"),
            (NORM, lambda x: x[NORM] * 20 + 0.3 * numbers(128, seed=9), "scale_factor", "times 20"),
            (BIAS, lambda x: x[BIAS] * 0, "implausible_error", "all its values are zero"),
            (BIAS, lambda x: x[BIAS] * 10, "scale_factor", "times 10"),
            (BIAS, lambda x: x[BIAS][torch.randperm(64)], "permuted", "a permutation of the original"),
            (BIAS, lambda x: x[OTHER_BIAS], "swapped_weight", f"match {OTHER_BIAS} of the original"),
            (BIAS, lambda x: numbers(64, seed=9), "implausible_error", "another tensor, or damaged"),
        ],
    )
    def test_broken_vectors_are_errors(self, tmp_path, name, broken, code, words):
        x = vectors()
        report = compare(tmp_path, x, x | {name: broken(x).to(x[name].dtype)})
        findings = [finding for finding in report.findings if finding.severity != "info"]

        assert ("inconclusive", [(code, "error", name)]) == (
            report.verdict,
            [(finding.code, finding.severity, finding.layer) for finding in findings],
        )
        assert words in findings[0].message

    @pytest.mark.parametrize(
        ("name", "sound"),
        [
            (NORM, lambda x: x[NORM].half()),
            (NORM, lambda x: x[NORM].float() * 1.0005),
            (BIAS, lambda x: x[BIAS] + 0.01 * numbers(64, seed=9)),
        ],
    )
    def test_cast_or_slightly_corrected_vectors_need_no_warning(self, tmp_path, name, sound):
        x = vectors() | model()
        report = compare(tmp_path, x, x | store_codes(model()) | {name: sound(x)})

        assert {"info"} >= {finding.severity for finding in report.findings}

    @pytest.mark.parametrize("change", [lambda _: 5.6 * numbers(64, seed=9), lambda x: x + 0.02 * numbers(64, seed=9)])
    def test_biases_for_quantized_weights_may_be_corrected_by_any_amount(self, tmp_path, change):
        x = vectors() | model()
        report = compare(tmp_path, x, x | store_codes(model()) | {BIAS: change(x[BIAS])})
        finding = map_findings(report)["bias_corrected"]
        weight = x["layers.0.mlp.up_proj.weight"].float()
        difference = change(x[BIAS]).to(x[BIAS].dtype).float() - x[BIAS].float()
        shift = float((difference.abs() / weight.norm(dim=1)).max())
        codes, scale = quantized_fp8(weight)
        share = float(difference.norm() / (codes.float() * scale - weight).norm())  # as if every input had size one

        assert ("pass", [BIAS]) == (report.verdict, finding.evidence["layers"])
        assert finding.evidence["shift"] == pytest.approx(shift, rel=1e-3)
        assert finding.evidence["share"] == pytest.approx(share, rel=1e-3)
        assert ("info" if share <= 1 else "warning") == finding.severity

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda x: 2 * x, "it was multiplied by 2"),
            (lambda x: x / 2, "it was multiplied by 0.5"),
            (lambda x: -x, "it was multiplied by -1"),
            (lambda x: x * (torch.arange(64) < 40), "elements became zero"),
            (lambda x: x * (torch.arange(64) != 40), "elements became zero"),
            (lambda x: x * (1 + (torch.arange(64) == 40)), "rows with little error changed far more than the others"),
        ],
    )
    def test_other_small_bias_changes_are_a_warning(self, tmp_path, change, words):
        x = vectors() | model()
        x[BIAS] *= 0.01  # the weight's error affects the outputs more
        finding = map_findings(compare(tmp_path, x, x | store_codes(model()) | {BIAS: change(x[BIAS])}))[
            "bias_corrected"
        ]

        assert ("warning", True) == (finding.severity, finding.evidence["share"] < 1)
        assert words in finding.message

    @pytest.mark.parametrize("norm_too", [False, True])
    def test_corrected_biases_are_not_listed_among_other_changes(self, tmp_path, norm_too):
        x = vectors() | model()
        changed = {BIAS: 3 * x[BIAS]} | ({NORM: 1.01 * x[NORM].float()} if norm_too else {})
        report = compare(tmp_path, x, x | store_codes(model()) | changed)
        findings = map_findings(report)

        assert [BIAS] == findings["bias_corrected"].evidence["layers"]
        assert {BIAS, *([NORM] if norm_too else [])} == {layer.layer_name for layer in report.other_changes}
        assert norm_too == ("other_changes" in findings)
        if norm_too:
            assert (1, "info") == (findings["other_changes"].evidence["tensors"], findings["other_changes"].severity)
            assert BIAS not in findings["other_changes"].message

    @pytest.mark.parametrize(("by", "severity"), [(0.1, "info"), (0.95, "info"), (1.05, "warning"), (20, "warning")])
    @pytest.mark.parametrize("norm", [None, 4.0])
    def test_corrections_are_judged_by_the_error_for_typical_inputs(self, tmp_path, by, severity, norm):
        x = vectors() | model()
        x["layers.0.post_attention_layernorm.weight"] = torch.full((128,), norm or 1.0)
        weight = x["layers.0.mlp.up_proj.weight"].float()
        codes, scale = quantized_fp8(weight)
        noise = numbers(64, seed=9).float()
        noise *= by * (norm or 1) * (codes.float() * scale - weight).norm() / noise.norm()
        x[BIAS] = x[BIAS].float()
        finding = map_findings(compare(tmp_path, x, x | store_codes(model()) | {BIAS: x[BIAS] + noise}))[
            "bias_corrected"
        ]

        assert severity == finding.severity
        assert finding.evidence["share"] == pytest.approx(by, rel=1e-3)

    def test_biases_are_copied_where_no_quantizer_corrects_them(self, tmp_path):
        x = vectors() | model()
        weight = x.pop("layers.0.mlp.up_proj.weight")
        name = "layers.0.mlp.up_proj.weight"
        absmax = weight.float().abs().amax(1)
        codes = (weight.float() / absmax[:, None] * 127).round().to(torch.int8)
        y = x | {name: codes, name.replace("weight", "SCB"): absmax, BIAS: x[BIAS] + 0.01 * numbers(64, seed=9)}
        report = compare(tmp_path, x | {name: weight}, y)

        assert "bnb_int8" == report.layers[0].format
        assert [BIAS] == map_findings(report)["unquantized_changed"].evidence["layers"]
        assert "bias_corrected" not in map_findings(report)

    @pytest.mark.parametrize("around_zero", [False, True])
    def test_norms_that_may_have_absorbed_scales_are_a_warning(self, tmp_path, around_zero):
        x = vectors()
        factors = torch.logspace(-1, 1, 128)[torch.randperm(128, generator=torch.Generator().manual_seed(0))]
        x[NORM] = (x[NORM].float() - 1).clamp(min=-0.8) if around_zero else x[NORM].float().abs()
        norm = (1 + x[NORM]) * factors - 1 if around_zero else x[NORM] * factors
        findings = map_findings(compare(tmp_path, x, x | {NORM: norm}))

        assert {"implausible_error", "other_changes"} == findings.keys()
        assert ("warning", [NORM]) == (
            findings["implausible_error"].severity,
            findings["implausible_error"].evidence["layers"],
        )

    def test_fused_norm_with_only_ones_is_still_a_warning(self, tmp_path):
        x = vectors()
        findings = map_findings(compare(tmp_path, x, x | {NORM: torch.ones(128)}))

        assert "warning" == findings["implausible_error"].severity

    def test_zeros_for_a_norm_with_only_ones_are_shown_with_both_readings(self, tmp_path):
        x = {NORM: torch.ones(64)}
        findings = map_findings(compare(tmp_path, x, {NORM: torch.zeros(64)}))

        assert "warning" == findings["norm_offset"].severity
        assert "stored minus one, or lost" in findings["norm_offset"].message

    @pytest.mark.parametrize("change", [lambda x: x - 1, lambda x: x + 1], ids=["minus", "plus"])
    @pytest.mark.parametrize("changed", [["layers.3.norm.weight"], ["norm.weight"]])
    def test_single_norm_among_many_that_is_off_by_one_is_an_error(self, tmp_path, change, changed):
        x = {f"layers.{n}.norm.weight": torch.ones(64) for n in range(5)} | {"norm.weight": torch.ones(64)}
        report = compare(tmp_path, x, x | {name: change(x[name]) for name in changed})

        assert [("norm_offset", "error", *changed)] == [
            (finding.code, finding.severity, finding.layer) for finding in report.findings if finding.severity != "info"
        ]
        assert "inconclusive" == report.verdict

    def test_final_norm_may_be_off_by_one_as_all_other_norms_are(self, tmp_path):
        x = {f"layers.{n}.norm.weight": torch.ones(64) for n in range(5)} | {"norm.weight": torch.ones(64)}
        findings = map_findings(compare(tmp_path, x, {name: norm + 1 for name, norm in x.items()}))

        assert ("warning", sorted(x)) == (
            findings["norm_offset"].severity,
            sorted(findings["norm_offset"].evidence["layers"]),
        )

    @pytest.mark.parametrize(
        ("y", "severity"), [(0.0, "error"), (-100.0, "warning"), (300.0, "warning"), (101.0, None), (60.0, None)]
    )
    def test_scalars_may_change_moderately(self, tmp_path, y, severity):
        report = compare(tmp_path, {"logit_scale": torch.tensor(100.0)}, {"logit_scale": torch.tensor(y)})

        assert severity == next((f.severity for f in report.findings if f.code == "implausible_error"), None)

    def test_small_values_that_a_cast_makes_zero_are_not_an_error(self, tmp_path):
        x = torch.full((64,), 1e-9)
        report = compare(tmp_path, {BIAS: x}, {BIAS: x.half()})

        assert "error" not in {finding.severity for finding in report.findings}

    @pytest.mark.parametrize(("x", "y"), [(1e-160, 1e155), (1e160, 1.001e160)])
    def test_vector_values_too_large_to_square_do_not_pass(self, tmp_path, x, y):
        ones = torch.ones(64, dtype=torch.float64)

        assert "inconclusive" == compare(tmp_path, {BIAS: x * ones}, {BIAS: y * ones}).verdict


class TestUninformativeNumbers:
    @pytest.mark.parametrize("factor", [2.0, -5.0])
    def test_vanishing_squares_are_an_error(self, tmp_path, factor):
        x = numbers(16, 32).double() * 1e-200
        findings = map_findings(compare(tmp_path, {"a.weight": x}, {"a.weight": x * factor}))

        assert ("error", "a.weight") == (findings["implausible_error"].severity, findings["implausible_error"].layer)
        assert "their squares underflow" in findings["implausible_error"].message

    def test_element_that_is_not_finite_is_a_single_finding(self, tmp_path):
        x = numbers(16, 32).float()
        broken = x.clone()
        broken[0, 0] = torch.nan
        report = compare(tmp_path, {"a.weight": broken}, {"a.weight": x + 0.001})

        assert ["nonfinite_original"] == [finding.code for finding in report.findings]


class TestAllWeights:
    def test_weight_far_below_its_group_is_a_warning(self, tmp_path, monkeypatch):
        # With a sample, the excess would be reported instead.
        monkeypatch.setattr(SampleMeasurer, "_measure_closely", lambda *_: None)
        x = model(8)
        y = store_codes(x, by_row)
        name = UP.format(3)
        noise = 0.1 * numbers(*SHAPE, seed=99).float()
        y[name], y[f"{name}_scale"] = by_row(x[name].float() + noise)
        findings = map_findings(compare(tmp_path, x, y))

        assert ("warning", name) == (findings["group_outlier"].severity, findings["group_outlier"].layer)

    def test_weights_that_their_scales_limit_need_a_finer_format(self, tmp_path):
        """Two weights have outliers in all rows, two in rows that the usual sample leaves out."""
        x = model(10, (1024, 256))
        left_out = sorted(set(range(1024)).difference(list_rows(sample_chunks((1024, 256)))))
        for n, rows in ((1, list(range(1024))), (4, list(range(1024))), (7, left_out), (8, left_out)):
            columns = torch.randint(256, (len(rows),), generator=torch.Generator().manual_seed(100 + n))
            x[UP.format(n)][rows, columns] = 0.7
        report = compare(tmp_path, x, store_codes(x, by_row_of_few_bits))
        finding = map_findings(report)["group_outlier"]

        assert ("info", [UP.format(n) for n in (1, 4, 7, 8)]) == (finding.severity, finding.evidence["layers"])
        assert "use a finer format" in finding.remedy
        assert "warning" not in {finding.severity for finding in report.findings}
        assert all(layer.attainable_snr_db >= layer.snr_db for layer in report.layers)

    def test_lossier_cast_for_small_values_is_not_a_group_outlier(self, tmp_path):
        """float16 rounds values below its normal numbers: 80 dB where the other weights are lossless."""
        x = {UP.format(n): (numbers(*SHAPE, seed=n) * (2.0**-10 if n == 3 else 0.1)).bfloat16() for n in range(8)}
        report = compare(tmp_path, x, {name: w.half() for name, w in x.items()})

        assert 60 < min(layer.snr_db for layer in report.layers) < 100
        assert "group_outlier" not in map_findings(report)

    def test_repaired_finding_is_not_reported_twice(self, tmp_path):
        findings, name = faulty(tmp_path, times(1.5), 8, by_row)

        assert ("error", name) == (findings["scale_factor"].severity, findings["scale_factor"].layer)
        assert "group_outlier" not in findings

    def test_bad_rows_in_many_weights_are_an_error_for_each(self, tmp_path):
        x = model(8)
        y = store_codes(x, by_row)
        for name in list(x)[:4]:
            y[name][7, ::2] = 0
        report = compare(tmp_path, x, y)
        findings = [finding for finding in report.findings if finding.severity != "info"]

        assert {("excess_error", "error")} == {(finding.code, finding.severity) for finding in findings}
        assert list(x)[:4] == [finding.layer for finding in findings]
        assert all("1 sampled row (7)" in finding.message for finding in findings)

    def test_bad_rows_in_many_weights_without_nearest_codes_are_an_info(self, tmp_path, monkeypatch):
        monkeypatch.setattr(SampleMeasurer, "_measure_closely", lambda *_: None)
        x = model(8)
        y = store_codes(x, by_row)
        for name in list(x)[:4]:
            y[name][7, ::2] = 0
        report = compare(tmp_path, x, y)
        (finding,) = (finding for finding in report.findings if finding.code == "bad_rows")

        assert ("info", None, list(x)[:4]) == (finding.severity, finding.layer, finding.evidence["layers"])
        assert finding.message.startswith("4 of 8 weights have rows with far more error")

    def test_norms_that_differ_by_one_are_a_warning(self, tmp_path):
        x = {f"layers.{n}.input_layernorm.weight": numbers(64, seed=n) for n in range(2)}
        findings = map_findings(compare(tmp_path, x, {name: weight + 1 for name, weight in x.items()}))

        assert ("warning", list(x)) == (findings["norm_offset"].severity, findings["norm_offset"].evidence["layers"])

    def test_identical_checkpoints_are_a_warning(self, tmp_path):
        x = model()

        assert [("identical", "warning")] == [(f.code, f.severity) for f in compare(tmp_path, x, x).findings]

    def test_copy_with_consumed_labels_passes_no_gate(self, tmp_path):
        label = torch.tensor(list(json.dumps({"format": "float8_e4m3fn"}).encode()), dtype=torch.uint8)
        x = {"a.weight": numbers(32, 64).to(torch.float8_e4m3fn), "a.weight_scale": torch.tensor(1.0)}
        report = compare(tmp_path, x | {"a.comfy_quant": label}, x | {"a.comfy_quant": label.clone()})

        assert "warning" == map_findings(report)["identical"].severity
        assert "pass" != quanterr.judge(report, require=["snr_db >= 30"]).verdict

    def test_swapped_sides_are_a_warning(self, tmp_path):
        x = model(2)
        report = compare(tmp_path, store_codes(x), x)

        assert ("warning", "pass") == (map_findings(report)["swapped_sides"].severity, report.verdict)
        assert "the original stores 2 weights quantized" in map_findings(report)["swapped_sides"].message

    def test_dequantized_copy_is_no_sign_of_swapped_sides(self, tmp_path):
        store(tmp_path / "codes.safetensors", store_codes(model(2)))
        dequantize(tmp_path / "codes.safetensors", tmp_path / "copy.safetensors")
        report = quanterr.compare(tmp_path / "codes.safetensors", tmp_path / "copy.safetensors", device="cpu")

        assert "info" == map_findings(report)["swapped_sides"].severity
        assert "its copy" not in report.view(0).conclusion
        assert "pass" == quanterr.judge(report, require=["snr_db >= 50"]).verdict

    @pytest.mark.parametrize(
        ("changed", "coded", "severity"),
        [(1, True, "warning"), (3, True, "error"), (3, False, "warning"), (0, True, None)],
    )
    def test_changed_unquantized_tensors_are_noticed(self, tmp_path, changed, coded, severity):
        """Some of six tensors in BF16 come from another training step."""
        x = {f"layers.{n}.attn.q_proj.weight": numbers(32, 64, seed=n) for n in range(6)}
        y = x | {name: weight + 0.01 * numbers(32, 64, seed=9) for name, weight in list(x.items())[:changed]}
        codes = model() if coded else {}
        report = compare(tmp_path, x | codes, y | store_codes(codes))
        finding = map_findings(report).get("unquantized_changed")

        assert severity == (finding and finding.severity)
        assert ("inconclusive" if severity == "error" else "pass") == report.verdict
        if finding:
            assert (6, list(y)[:changed]) == (finding.evidence["tensors"], finding.evidence["layers"])
            assert finding.message.startswith(f"{changed} of 6 tensors that both checkpoints store unquantized differ")

    def test_changed_norms_alone_do_not_prove_another_checkpoint(self, tmp_path):
        x = {f"layers.{n}.norm.weight": numbers(64, seed=n) for n in range(6)}
        y = {name: weight + 0.01 * numbers(64, seed=9) for name, weight in x.items()}
        findings = map_findings(compare(tmp_path, x | model(), y | store_codes(model())))

        assert "warning" == findings["unquantized_changed"].severity

    def test_cast_tensors_may_differ_slightly(self, tmp_path):
        x = {f"layers.{n}.attn.q_proj.weight": numbers(32, 64, seed=n) for n in range(6)}
        y = {name: weight.to(torch.float16) * 1.0001 for name, weight in x.items()}

        assert "unquantized_changed" not in map_findings(compare(tmp_path, x | model(), y | store_codes(model())))

    def test_lossless_codes_are_a_warning(self, tmp_path):
        x = {name: weight.to(torch.float8_e4m3fn).float() for name, weight in model().items()}
        y = {name: weight.to(torch.float8_e4m3fn) for name, weight in x.items()}
        y |= {f"{name}_scale": torch.tensor(1.0) for name in x}
        findings = map_findings(compare(tmp_path, x, y))

        assert "warning" == findings["lossless_codes"].severity

    def test_configuration_without_codes_is_a_warning(self, tmp_path):
        x = model()
        y = {name: weight * 1.001 for name, weight in x.items()}
        findings = map_findings(compare(tmp_path, x, y, config={"quantization_config": {"quant_method": "fp8"}}))

        assert "warning" == findings["config_without_codes"].severity


class TestRepairsOnOtherRows:
    @pytest.mark.parametrize("shape", [(2, 512), (8, 64), (64, 64)])
    def test_factors_that_merely_shrink_noise_are_not_a_repair(self, shape):
        x, noise = (torch.randn(shape, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (1, 2))

        assert find_simplest_repair(Sample(x, x + 1.2 * noise), 2) is None

    def test_factor_for_each_column_is_found_on_the_other_rows(self):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        factors = torch.linspace(0.2, 3, 64, dtype=torch.float64)
        repair, corrected = find_simplest_repair(Sample(x, x * factors), 8)

        assert ("scale_factor", True) == (repair.code, corrected.snr_db > 200)
        assert "per column" in repair.message

    def test_repair_must_come_near_the_attainable_level(self):
        x, noise = (torch.randn(64, 64, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
        sample = Sample(x.double(), (2 * x + 0.2 * noise).double())

        assert find_simplest_repair(sample, 8, attainable_db=15.0) is not None
        assert find_simplest_repair(sample, 8, attainable_db=40.0) is None
