"""Optional parts that some weights of a kind lack, and F32 tensors that were cast to fewer bits."""

import pytest
import torch
from support.making import compare, label, numbers, quantized_fp8, store

import quanterr

FP8 = torch.float8_e4m3fn


def experts(lacking=(), part="pre_quant_scale", n=6):
    """Return experts in INT8 with a factor for each input, which some lack."""
    tensors = {}
    for expert in range(n):
        name = f"model.layers.0.mlp.experts.{expert}.up_proj"
        tensors |= {f"{name}.weight": torch.ones(8, 32, dtype=torch.int8), f"{name}.weight_scale": torch.ones(8)}
        if expert not in lacking:
            tensors[f"{name}.{part}"] = torch.ones(32)
    return tensors


def select_findings(findings, code):
    return [finding for finding in findings if finding.code == code]


class TestMissingParts:
    def test_experts_without_the_factors_of_the_others_are_named(self, tmp_path):
        y = store(tmp_path / "y.safetensors", experts((2, 4)))
        x = {name: tensor.float() for name, tensor in experts(range(6)).items() if name.endswith("weight")}
        names = [f"model.layers.0.mlp.experts.{n}.up_proj.weight" for n in (2, 4)]
        report = quanterr.compare(store(tmp_path / "x.safetensors", x), y, device="cpu")

        for findings in (report.findings, quanterr.inspect(y).findings):
            (finding,) = select_findings(findings, "missing_part")
            assert ("warning", names) == (finding.severity, finding.evidence["layers"])
            assert "2 weights of 6 lack pre_quant_scale, which the others of the same kind have" in finding.message

    def test_stacked_experts_are_named_one_by_one(self, tmp_path):
        y = store(tmp_path / "y.safetensors", experts((3,)))
        x = {"model.layers.0.mlp.experts.up_proj": torch.ones(6, 8, 32)}
        report = quanterr.compare(store(tmp_path / "x.safetensors", x), y, device="cpu")
        (finding,) = select_findings(report.findings, "missing_part")

        assert ["model.layers.0.mlp.experts.3.up_proj.weight"] == finding.evidence["layers"]

    @pytest.mark.parametrize("lacking", [(), range(6), range(3), (1, 2, 3, 4, 5)])
    def test_parts_that_all_or_half_of_the_weights_lack_are_silent(self, tmp_path, lacking):
        y = store(tmp_path / "y.safetensors", experts(lacking))

        assert [] == select_findings(quanterr.inspect(y).findings, "missing_part")

    def test_weights_of_another_kind_may_lack_the_part(self, tmp_path):
        tensors = experts()
        name = "model.layers.0.self_attn.o_proj.weight"
        tensors |= {name: torch.ones(8, 32, dtype=torch.int8), f"{name}_scale": torch.ones(8)}

        assert [] == select_findings(
            quanterr.inspect(store(tmp_path / "y.safetensors", tensors)).findings, "missing_part"
        )

    def test_absent_zero_points_of_few_layers_are_reported(self, tmp_path):
        tensors = {}
        for n in range(4):
            name = f"model.layers.{n}.mlp.up_proj.weight"
            tensors |= {f"{name}_packed": torch.zeros(8, 8, dtype=torch.int32), f"{name}_scale": torch.ones(8, 2)}
            tensors[f"{name}_shape"] = torch.tensor([8, 64])
            if n:
                tensors[f"{name}_zero_point"] = torch.zeros(1, 2, dtype=torch.int32)
        (finding,) = select_findings(
            quanterr.inspect(store(tmp_path / "y.safetensors", tensors)).findings, "missing_part"
        )

        assert "1 weight of 4 lacks zero_point, which" in finding.message


class TestCasts:
    WIDE = ("linear_attn.A_log", "linear_attn.dt_bias", "mlp.gate.e_score_correction_bias", "attn_hc.fn")

    def original(self):
        tensors = {f"model.layers.0.{name}": numbers(48, seed=n).float() / 3 for n, name in enumerate(self.WIDE)}
        tensors["model.layers.0.mlp.up_proj.weight"] = numbers(64, 64).bfloat16()
        return tensors

    def compare(self, tmp_path, x, cast):
        weight, scale = quantized_fp8(numbers(64, 64).float())
        y = {name: tensor.to(cast) if tensor.dtype == torch.float32 else tensor for name, tensor in x.items()}
        y["model.layers.0.mlp.up_proj.weight"] = weight
        if cast != FP8:  # a file with scales must have one for each weight in FP8
            y["model.layers.0.mlp.up_proj.weight_scale"] = scale
        sides = store(tmp_path / "x.safetensors", x), store(tmp_path / "y.safetensors", y)
        return select_findings(quanterr.compare(*sides, device="cpu").findings, "cast_down")

    @pytest.mark.parametrize(("cast", "dtype"), [(torch.bfloat16, "BF16"), (torch.float16, "F16"), (FP8, "F8_E4M3")])
    def test_tensors_in_full_precision_that_were_cast_are_named(self, tmp_path, cast, dtype):
        (finding,) = self.compare(tmp_path, self.original(), cast)

        assert {f"model.layers.0.{name}" for name in self.WIDE} == set(finding.evidence["layers"])
        assert f"4 tensors that the original keeps in F32 among 16-bit ones are stored as {dtype}: " in finding.message
        assert finding.evidence["snr_db"] > 20  # half of a step of E4M3 is 2^-4 of a value
        assert "warning" == finding.severity

    def test_cast_that_loses_nothing_is_silent(self, tmp_path):
        x = {name: tensor.bfloat16().to(tensor.dtype) for name, tensor in self.original().items()}

        assert [] == self.compare(tmp_path, x, torch.bfloat16)

    def test_original_in_full_precision_may_be_cast(self, tmp_path):
        x = {name: tensor.float() for name, tensor in self.original().items()}

        assert [] == self.compare(tmp_path, x, torch.bfloat16)

    def test_norms_may_be_cast_to_16_bits(self, tmp_path):
        x = {"model.layers.0.mlp.up_proj.weight": numbers(64, 64).bfloat16()}
        x["model.layers.0.input_layernorm.weight"] = 1 + numbers(64).float() / 3

        assert [] == self.compare(tmp_path, x, torch.bfloat16)

    def test_kept_tensors_are_silent(self, tmp_path):
        assert [] == self.compare(tmp_path, self.original(), torch.float32)


NORM, UP = "model.layers.0.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"


class TestVectorsInBytes:
    def test_norms_in_fp8_beside_quantized_weights_are_a_warning(self, tmp_path):
        x = {NORM: 1 + numbers(128), UP: numbers(64, 128)}
        nvfp4 = {UP: torch.ones(64, 64, dtype=torch.uint8), f"{UP}_scale": torch.ones(64, 8).to(FP8)}
        y = {NORM: x[NORM].to(FP8), f"{UP}_scale_2": torch.tensor(0.1), **nvfp4}
        y[UP.replace("weight", "comfy_quant")] = label(format="nvfp4")
        (finding,) = select_findings(compare(tmp_path, x, y).findings, "cast_down")

        assert ("warning", [NORM]) == (finding.severity, finding.evidence["layers"])
        assert "is stored as F8_E4M3" in finding.message

    def test_norms_may_be_cast_like_all_other_tensors(self, tmp_path):
        x = {NORM: 1 + numbers(128), UP: numbers(64, 128)}

        assert [] == select_findings(
            compare(tmp_path, x, {name: w.to(FP8) for name, w in x.items()}).findings, "cast_down"
        )


def test_changed_frequencies_are_not_called_folded(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    x = {name: 10000 ** -(torch.arange(64) / 64), UP: numbers(64, 128)}
    findings = compare(tmp_path, x, x | {name: x[name] ** 2}).findings

    assert ["rope_theta" in finding.remedy for finding in findings if name in finding.evidence.get("layers", ())] == [
        True
    ]


def test_norms_of_ones_are_not_called_a_factor(tmp_path):
    norms = {NORM.replace("0", str(n)): 0.5 + numbers(128, seed=n) for n in range(4)}
    x = {**norms, UP: numbers(64, 128)}
    findings = compare(tmp_path, x, x | {name: torch.ones(128).bfloat16() for name in norms}).findings

    assert "scale_factor" not in {finding.code for finding in findings}
    assert any("4 norms are 1 throughout" in finding.message for finding in findings if finding.severity == "warning")
