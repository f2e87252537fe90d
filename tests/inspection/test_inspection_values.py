"""Faults that the values of one checkpoint show without an original."""

import json

import pytest
import torch
from support.making import numbers, quantized_fp8, quantized_int8, store
from typer.testing import CliRunner

import quanterr
from quanterr.cli import app
from quanterr.errors import Status

UP = "model.layers.{}.mlp.up_proj.weight"
EXPERT = "model.layers.{}.mlp.experts.{}.up_proj.weight"
STACK = "model.layers.0.mlp.experts.gate_up_proj"
NAN, INF = float("nan"), float("inf")


def model(shape=(64, 128), n=4):
    """Return a different weight for each of several blocks."""
    return {UP.format(block): numbers(*shape, seed=block) for block in range(n)}


def quantize(tensors, by=quantized_int8):
    """Return codes and scales of all weights."""
    made = {}
    for name, weight in tensors.items():
        made[name], made[f"{name}_scale"] = by(weight)
    return made


def inspect_findings(folder, tensors):
    """Return severities and messages by code."""
    inspection = quanterr.inspect(store(folder / "m.safetensors", tensors), values=True)
    return {finding.code: (finding.severity, finding.message) for finding in inspection.findings}


@pytest.mark.parametrize("by", [dict, quantize, lambda x: quantize(x, quantized_fp8)])
def test_correct_values_are_silent(tmp_path, by):
    assert {} == inspect_findings(tmp_path, by(model()))


def test_headers_alone_do_not_reveal_values(tmp_path):
    path = store(tmp_path / "m.safetensors", {UP.format(0): torch.zeros(64, 128)})

    assert [] == quanterr.inspect(path).findings
    assert [False, True] == [quanterr.inspect(path, values=values).values for values in (False, True)]


class TestNonfinite:
    @pytest.mark.parametrize("value", [NAN, INF, -INF])
    @pytest.mark.parametrize("name", [UP.format(1), "model.norm.weight", "model.layers.0.mlp.up_proj.bias"])
    def test_elements_that_are_not_finite_are_counted(self, tmp_path, name, value):
        tensors = model() | {name: numbers(8, 128) if name.endswith("proj.weight") else numbers(128)}
        tensors[name].view(-1)[[3, 77]] = value

        severity, message = inspect_findings(tmp_path, tensors)["nonfinite_values"]
        assert "error" == severity
        assert f"{name} (2 of {tensors[name].numel():,})" in message

    def test_fp8_codes_are_decoded(self, tmp_path):
        tensors = quantize(model(), quantized_fp8)
        codes = tensors[UP.format(2)].view(torch.uint8)
        codes[5, 6] = 0x7F

        assert f"{UP.format(2)} (1 of 8,192)" in inspect_findings(tmp_path, tensors)["nonfinite_values"][1]

    def test_masks_hold_minus_infinity_but_not_nan(self, tmp_path):
        mask = torch.full((8, 8), -INF)
        assert {} == inspect_findings(tmp_path, {"model.attn_mask": mask})
        mask[0, 0] = NAN
        assert "(1 of 64)" in inspect_findings(tmp_path, {"model.attn_mask": mask})["nonfinite_values"][1]

    def test_every_chunk_in_a_large_weight_is_read(self, tmp_path, monkeypatch):
        monkeypatch.setattr("quanterr.inspection.values.CPU_CHUNK", 100)  # pieces of rows, in many tasks
        tensors = model((130, 128))
        tensors[UP.format(3)][129, 127] = NAN
        tensors[UP.format(2)][[7, 64]] = 0

        findings = inspect_findings(tmp_path, tensors)
        assert f"{UP.format(3)} (1 of 16,640)" in findings["nonfinite_values"][1]
        assert f"{UP.format(2)} (2 rows: 7, 64)" in findings["constant_rows"][1]


class TestConstants:
    @pytest.mark.parametrize(("value", "words"), [(0.0, "zero throughout"), (0.25, "a single value throughout")])
    def test_constant_weights_are_named(self, tmp_path, value, words):
        severity, message = inspect_findings(tmp_path, model() | {UP.format(1): torch.full((64, 128), value)})[
            "constant_weight"
        ]

        assert "warning" == severity
        assert f"1 weight is {words}: {UP.format(1)}; trained matrices are not" == message

    @pytest.mark.parametrize(("rows", "severity"), [(slice(60, 64), "info"), (slice(3, 7), "warning")])
    def test_constant_rows_are_a_warning_unless_they_are_the_last(self, tmp_path, rows, severity):
        tensors = model()
        tensors[UP.format(1)][rows] = 0
        finding = inspect_findings(tmp_path, quantize(tensors, quantized_fp8))["constant_rows"]

        assert severity == finding[0]
        assert f"{UP.format(1)} (4 rows: {rows.start}, {rows.start + 1}, {rows.start + 2}, …)" in finding[1]

    def test_rows_too_small_for_a_shared_scale_are_an_info(self, tmp_path):
        tensors = model()
        tensors[UP.format(1)][3] *= 1e-4
        assert "info" == inspect_findings(tmp_path, quantize(tensors))["constant_rows"][0]
        assert "constant_rows" not in inspect_findings(tmp_path, tensors)

        tensors[UP.format(1)][3] = 0
        assert "warning" == inspect_findings(tmp_path, quantize(tensors, quantized_fp8))["constant_rows"][0]

    def test_rows_for_unused_tokens_may_be_zero(self, tmp_path):
        tokens = numbers(64, 128)
        tokens[3] = 0

        assert {} == inspect_findings(tmp_path, {"model.embed_tokens.weight": tokens, "lm_head.weight": tokens})

    def test_zero_expert_is_named_once(self, tmp_path):
        stack = numbers(4, 32, 64)
        stack[2] = 0
        findings = inspect_findings(tmp_path, {STACK: stack})

        assert {"constant_weight"} == findings.keys()
        assert f"{STACK} (expert 2)" in findings["constant_weight"][1]


class TestRepetitions:
    def test_repeated_experts_are_a_warning_and_repeated_layers_an_info(self, tmp_path):
        tensors = {EXPERT.format(0, n): numbers(32, 64, seed=n) for n in range(4)}
        tensors[EXPERT.format(0, 3)] = tensors[EXPERT.format(0, 1)]
        severity, message = inspect_findings(tmp_path, tensors)["repeated_weights"]
        assert ("warning", True) == (severity, message.startswith("experts repeat each other (the same"))

        assert (
            "info"
            == inspect_findings(tmp_path, model() | {UP.format(5): numbers(64, 128, seed=2)})["repeated_weights"][0]
        )

    def test_repeated_experts_in_a_stack_are_counted(self, tmp_path):
        stack = numbers(8, 32, 64)
        stack[4:] = stack[:4]

        assert f"{STACK} (4 of 8 distinct)" in inspect_findings(tmp_path, {STACK: stack})["repeated_weights"][1]


class TestScales:
    @pytest.mark.parametrize(
        ("value", "code", "severity"),
        [(NAN, "scale_nonfinite", "error"), (INF, "scale_nonfinite", "error"), (-1.0, "scale_negative", "warning")],
    )
    def test_wrong_scales_are_named(self, tmp_path, value, code, severity):
        tensors = quantize(model())
        tensors[f"{UP.format(1)}_scale"] = torch.tensor(value)
        findings = inspect_findings(tmp_path, tensors)

        assert (severity, True) == (findings[code][0], f"{UP.format(1)} (1 of 1)" in findings[code][1])
        assert "nonfinite_values" not in findings

    def test_zero_scales_count_only_above_nonzero_codes(self, tmp_path):
        tensors, name = quantize(model()), UP.format(1)
        scale = tensors[f"{name}_scale"].expand(64, 1).clone()
        scale[60:] = 0
        tensors[f"{name}_scale"], codes = scale, tensors[name]
        lost = int((codes[60:] != 0).sum())
        assert f"{name} ({lost} elements lost)" in inspect_findings(tmp_path, tensors)["scale_zero"][1]

        codes[60:] = 0
        assert "scale_zero" not in inspect_findings(tmp_path, tensors)

    @pytest.mark.parametrize(("factor", "is_told"), [(1000.0, True), (1e-3, True), (30.0, False)])
    def test_factor_is_noticed_by_comparing_blocks(self, tmp_path, factor, is_told):
        tensors = quantize(model(), quantized_fp8)
        tensors[f"{UP.format(1)}_scale"] *= factor

        assert is_told == (UP.format(1) in inspect_findings(tmp_path, tensors).get("values_unlike", ("", ""))[1])

    def test_row_factor_is_noticed_by_comparing_rows(self, tmp_path):
        tensors, name = quantize(model()), UP.format(1)
        tensors[f"{name}_scale"] = tensors[f"{name}_scale"].expand(64, 1).clone()
        tensors[f"{name}_scale"][7] *= 3000

        assert f"{name} (1 row: 7: up to" in inspect_findings(tmp_path, tensors)["values_unlike"][1]

    def test_activation_scales_are_checked(self, tmp_path):
        tensors = quantize(model(), quantized_fp8)
        for name in model():
            tensors[name.replace("weight", "input_scale")] = torch.tensor(0.5)
        tensors[UP.format(1).replace("weight", "input_scale")] = torch.tensor(NAN)

        assert "up_proj.input_scale" in inspect_findings(tmp_path, tensors)["scale_nonfinite"][1]

    @pytest.mark.parametrize("by", [quantized_int8, quantized_fp8])
    def test_excessive_scales_leave_codes_unused(self, tmp_path, by):
        tensors = model()
        sizes = {}
        for name, weight in tensors.items():
            codes, scale = by(weight)
            wide = 1e5 if codes.dtype != torch.int8 else 40.0
            rounded = weight / (scale * wide)
            sizes[name] = (rounded.round() if codes.dtype == torch.int8 else rounded).to(codes.dtype)
            sizes[f"{name}_scale"] = scale * wide
        severity, message = inspect_findings(tmp_path, sizes)["unused_codes"]

        assert "warning" == severity
        assert "4 tensors" in message

    def test_ternary_values_use_their_full_range(self, tmp_path):
        tensors = {name: weight.sign() * (weight.abs() > 0.03) for name, weight in model().items()}

        assert "unused_codes" not in inspect_findings(tmp_path, quantize(tensors))


class TestOutputs:
    @pytest.fixture
    def broken_path(self, tmp_path):
        tensors = model() | {UP.format(1): torch.full((64, 128), NAN)}
        return store(tmp_path / "m.safetensors", tensors)

    def run(self, *arguments):
        return CliRunner().invoke(app, [*map(str, arguments)])

    def test_error_exits_with_its_status_and_fails_rules(self, broken_path, tmp_path):
        done = self.run("inspect", broken_path, "--values", "-v", "-o", tmp_path / "i.json")
        assert Status.INCONCLUSIVE == done.exit_code
        assert "error: elements are NaN or infinite" in done.stdout
        assert "every value was read once" in done.stdout

        assert Status.OK == self.run("inspect", broken_path).exit_code
        judged = self.run("gate", tmp_path / "i.json", "--require", "bits_per_weight <= 32")
        assert Status.INCONCLUSIVE == judged.exit_code

    @pytest.mark.parametrize("suffix", ["json", "html", "md", "jsonl", "xml"])
    def test_every_output_shows_the_finding(self, broken_path, tmp_path, suffix):
        path = tmp_path / f"i.{suffix}"
        quanterr.inspect(broken_path, values=True).save(path)

        assert "NaN or infinite" in path.read_text()

    def test_json_states_that_values_were_read(self, broken_path):
        document = json.loads(self.run("inspect", broken_path, "--values", "--json").stdout)

        assert document["values"] is True
        assert 4 * 64 * 128 * 2 <= document["run"]["read_bytes"]
