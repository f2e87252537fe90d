"""Files with correct numbers that a runtime refuses or misreads."""

import pytest
import torch
from support.making import label, numbers, quantized_fp8, quantized_int8, store

import quanterr
from quanterr.findings.runtimes import RULES

UP = "model.layers.0.mlp.up_proj"
TENSORS = {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}}


def list_findings(path):
    return [
        (finding.severity, finding.message)
        for finding in quanterr.inspect(path).findings
        if finding.code == "unloadable"
    ]


def by_channels(by, *shape):
    codes, scale = by(numbers(64, 128))
    return {f"{UP}.weight": codes, f"{UP}.weight_scale": scale.expand(shape).contiguous()}


@pytest.mark.parametrize("by", [quantized_fp8, quantized_int8])
class TestChannels:
    def test_flat_scales_are_refused_by_vllm(self, tmp_path, by):
        ((severity, message),) = list_findings(store(tmp_path / "m", by_channels(by, 64), config=TENSORS))

        assert "warning" == severity
        assert "vLLM" in message
        assert f"1 tensor: {UP}.weight_scale (F32 [64])" in message

    @pytest.mark.parametrize("shape", [(64, 1), (1,), ()])
    def test_other_scale_shapes_are_accepted_by_vllm(self, tmp_path, by, shape):
        assert [] == list_findings(store(tmp_path / "m", by_channels(by, *shape), config=TENSORS))

    def test_other_methods_have_other_rules(self, tmp_path, by):
        config = {"quantization_config": {"quant_method": "fbgemm_fp8"}}
        assert [] == list_findings(store(tmp_path / "m", by_channels(by, 64), config=config))
        assert [] == list_findings(store(tmp_path / "m.safetensors", by_channels(by, 64)))


class TestComfy:
    def tensors(self, dtype, by=quantized_fp8, format="float8_e4m3fn"):
        codes, scale = by(numbers(64, 128))
        return {"a.weight": codes, "a.weight_scale": scale.to(dtype), "a.comfy_quant": label(format=format)}

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_sixteen_bit_scales_are_a_warning_for_comfy_kitchen(self, tmp_path, dtype):
        ((severity, message),) = list_findings(store(tmp_path / "m.safetensors", self.tensors(dtype)))

        assert "warning" == severity
        assert "comfy-kitchen 0.2.0 expects scales of FP8 weights as F32" in message

    def test_other_tensors_are_accepted_by_comfy_kitchen(self, tmp_path):
        without_label = self.tensors(torch.bfloat16)
        del without_label["a.comfy_quant"]
        int8 = self.tensors(torch.bfloat16, quantized_int8, "int8_tensorwise")
        for number, tensors in enumerate((self.tensors(torch.float32), without_label, int8)):
            assert [] == list_findings(store(tmp_path / f"{number}.safetensors", tensors))


@pytest.mark.parametrize(("shape", "is_told"), [((64,), True), ((1, 64), False)])
def test_z_image_pad_tokens_need_two_dimensions(tmp_path, shape, is_told):
    tensors = {"model.diffusion_model.x_pad_token": numbers(*shape), "cap_pad_token": numbers(*shape)}
    findings = list_findings(store(tmp_path / "m.safetensors", tensors))

    assert is_told == bool(findings)
    assert not findings or "2 tensors: cap_pad_token (BF16 [64])" in findings[0][1]


def test_stacked_expert_codes_have_no_mapped_name(tmp_path):
    stem = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {f"{stem}_packed": torch.zeros(2, 8, 16, dtype=torch.int32), f"{stem}_scale": torch.ones(2, 8, 1)}
    ((severity, message),) = list_findings(store(tmp_path / "m", tensors, config=TENSORS))

    assert ("warning", True) == (severity, f"{stem}_packed" in message and "transformers" in message)


def test_comparison_checks_the_quantized_side(tmp_path):
    before = store(tmp_path / "a.safetensors", {f"{UP}.weight": numbers(64, 128)})
    after = store(tmp_path / "b", by_channels(quantized_fp8, 64), config=TENSORS)
    (finding,) = [
        finding for finding in quanterr.compare(before, after, device="cpu").findings if finding.code == "unloadable"
    ]

    assert [f"{UP}.weight_scale"] == finding.evidence["tensors"]


def test_every_rule_cites_its_source():
    assert all(rule.place and rule.runtime and any(digit.isdigit() for digit in rule.runtime) for rule in RULES)
