"""The list of checks: complete, in a fixed order, and run as far as their needs are met."""

import re
from pathlib import Path

import pytest
import torch
from support.making import compare, label, numbers, quantized_fp8, store

import quanterr
from quanterr import findings
from quanterr.documents.finding_codes import CODES
from quanterr.findings.checks import CHECKS, HEADERS, QUANTIZED, check
from quanterr.findings.running import MODULES

# Codes of findings that commands make themselves, without a registered check.
ELSEWHERE = {"checksum_mismatch", "large_output_errors", "massive_activations", "not_emulated", "reference_versions"}
Q, K = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
X = {Q: numbers(64, 128, seed=1), K: numbers(64, 128, seed=2)}
STATIC = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}


def make_codes(more=()):
    tensors = {}
    for name, weight in X.items():
        tensors[name], tensors[f"{name}_scale"] = quantized_fp8(weight)
        tensors[name.replace(".weight", ".input_scale")] = torch.tensor(0.01)
    return tensors | dict(more)


def inspect(folder, tensors, values=False):
    path = store(folder / "m.safetensors", tensors)
    return {finding.code: finding.severity for finding in quanterr.inspect(path, values=values).findings}


def test_every_module_with_a_check_has_its_place_in_the_order():
    folder = Path(findings.__file__).parent
    having = [path for path in folder.rglob("*.py") if re.search(r"^@check\(", path.read_text(), re.MULTILINE)]
    modules = {(path.parent if path.stem == "__init__" else path).stem for path in having}

    assert modules == {module.__name__.rpartition(".")[2] for module in MODULES}


def test_every_code_has_a_check():
    assert CODES.keys() - ELSEWHERE == {code for check in CHECKS for code in check.codes}


def test_check_of_an_unknown_code_is_refused():
    with pytest.raises(ValueError, match="no entry in documents/finding_codes/: unheard_of"):
        check("unheard_of", needs=HEADERS, of=QUANTIZED)


class TestInspection:
    def test_correct_checkpoint_has_no_finding(self, tmp_path):
        assert {} == inspect(tmp_path, make_codes(), values=True)

    def test_ignored_scale_is_reported(self, tmp_path):
        name = "model.layers.0.mlp.up_proj.weight"
        more = {name: numbers(64, 128, seed=3), f"{name}_scale": torch.tensor(1.0)}

        assert {"dummy_scale": "warning"} == inspect(tmp_path, make_codes(more))

    def test_number_of_input_scales_is_checked_by_headers_alone(self, tmp_path):
        more = {Q.replace(".weight", ".input_scale"): torch.ones(7)}

        assert {"scale_misfit": "warning"} == inspect(tmp_path, make_codes(more))

    def test_inputs_that_comfyui_clamps_are_reported(self, tmp_path):
        codes, scale = quantized_fp8(numbers(64, 128))
        tensors = {"a.weight": codes, "a.weight_scale": scale, "a.comfy_quant": label(format="float8_e4m3fn")}

        assert {"no_input_scale": "info"} == inspect(tmp_path, tensors)

    def test_input_scales_of_fused_weights_are_compared_if_values_are_read(self, tmp_path):
        tensors = make_codes({K.replace(".weight", ".input_scale"): torch.tensor(0.08)})
        path = store(tmp_path / "m", tensors, config=STATIC)
        codes_found = [
            [finding.code for finding in quanterr.inspect(path, values=values).findings] for values in (False, True)
        ]

        assert [[], ["sibling_scales"]] == codes_found

    def test_scales_of_an_unquantized_checkpoint_are_parameters(self, tmp_path):
        tensors = X | {f"{Q}_scale": torch.tensor(1.0)}

        assert {} == inspect(tmp_path, tensors)


def test_findings_of_a_comparison_are_in_the_order_of_the_checks(tmp_path):
    more = {
        Q.replace(".weight", ".input_scale"): torch.ones(7),
        "model.norm.weight": numbers(128, seed=4) * 2,
        "lm_head.weight": numbers(8, 128, seed=5),
        "lm_head.weight_scale": torch.tensor(1.0),
    }
    x = X | {"model.norm.weight": numbers(128, seed=4), "lm_head.weight": more["lm_head.weight"]}
    codes = [finding.code for finding in compare(tmp_path, x, make_codes(more)).findings]

    assert ["dummy_scale", "scale_misfit"] == codes[:2]
    assert "other_changes" == codes[-1]
