"""ModelSlim's checkpoints for Ascend: their description, and contradictions between scales."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.making import store

import quanterr

GOLDEN = Path(__file__).parents[1] / "golden"
DESCRIPTION = "quant_model_description.json"
CASES = sorted(path.parent for path in GOLDEN.glob(f"*/*/{DESCRIPTION}"))
ALL, MIX = GOLDEN / "modelslim_int" / "modelslim", "w8a8_mix"


def change(folder, case, declared=None, tensors=None, drop=()):
    """Write a golden case with some tensors and types in its description replaced; None removes a name."""
    stored = load_file(case / "model.safetensors") | (tensors or {})
    path = store(folder / "y", {name: t for name, t in stored.items() if name not in drop}, config={"model_type": "x"})
    description = json.loads((case / DESCRIPTION).read_text()) | (declared or {})
    (path / DESCRIPTION).write_text(
        json.dumps({name: declared_type for name, declared_type in description.items() if declared_type is not None})
    )
    return path


def part(case, name):
    return load_file(case / "model.safetensors")[name]


def select_findings(path, code):
    return [(finding.severity, finding.message) for finding in quanterr.inspect(path).findings if finding.code == code]


@pytest.mark.parametrize("case", CASES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_producer_files_contain_no_contradiction(case):
    inspection = quanterr.inspect(case)

    assert {"w4a4_dynamic_offsets.weight", "w4a4_dynamic_groups.weight"} >= {
        name for finding in inspection.findings for name in finding.evidence.get("layers", [])
    }
    assert ["ambiguous_layout"] * (case == ALL) == [finding.code for finding in inspection.findings]


class TestTypes:
    @pytest.mark.parametrize(
        ("case", "name", "declared", "says"),
        [
            ("modelslim_int", "w8a16", None, "does not name codes, which vllm-ascend refuses and SGLang takes for"),
            ("modelslim_int", "w8a16", "FLOAT", "declares FLOAT, but they are stored as modelslim_int"),
            ("modelslim_int", "w8a16", "W8A8", "declares W8A8, but their deq_scale is missing"),
            ("modelslim_int", "w8a16", "W8A8_MXFP8", "declares W8A8_MXFP8, but they are stored as modelslim_int"),
            (
                "modelslim_int4",
                "up_proj",
                "W8A8_DYNAMIC",
                "declares W8A8_DYNAMIC, but they are stored as modelslim_int4",
            ),
            ("mxfp4", "w4a8", "W8A8_MXFP8", "declares W8A8_MXFP8, but they are stored as mxfp4"),
            ("mxfp8", "w8a8", None, "does not name codes"),
        ],
    )
    def test_contradicted_types_are_errors(self, tmp_path, case, name, declared, says):
        path = change(tmp_path, GOLDEN / case / "modelslim", {f"{name}.weight": declared})
        ((severity, message),) = select_findings(path, "config_mismatch")

        assert "error" == severity
        assert message.startswith(f"{DESCRIPTION} {says}")
        assert message.endswith(f"1 weight: {name}.weight")

    def test_plain_numbers_declared_as_quantized_are_an_error(self, tmp_path):
        name = "w8a16.weight"
        tensors = {name: part(ALL, name).float()}
        path = change(tmp_path, ALL, tensors=tensors, drop=("w8a16.weight_scale", "w8a16.weight_offset"))

        ((severity, message),) = select_findings(path, "config_mismatch")
        assert ("error", True) == (severity, "declares W8A16, but they are stored as dense" in message)

    @pytest.mark.parametrize("declared", ["W4A16", "W4A4_FLATQUANT_DYNAMIC", "NF4", "W8A8SC"])
    def test_unsupported_types_are_refused(self, tmp_path, declared):
        ((severity, message),) = select_findings(change(tmp_path, ALL, {"w8a16.weight": declared}), "not_read")

        assert ("error", True) == (severity, f"declares {declared}, which is not supported" in message)

    def test_types_with_fewer_bits_than_the_codes_are_refused(self, tmp_path):
        ((_, message),) = select_findings(change(tmp_path, ALL, {"w8a16.weight": "W4A4_DYNAMIC"}), "not_read")

        assert "declared W4A4_DYNAMIC, but w8a16.weight (I8 [8, 64]) has codes from -" in message

    def test_codes_without_a_description_are_undeclared(self, tmp_path):
        path = change(tmp_path, ALL)
        (path / DESCRIPTION).unlink()

        assert ["error"] == [severity for severity, _ in select_findings(path, "undeclared_codes")]

    def test_config_json_describes_the_original(self, tmp_path):
        path = change(tmp_path, ALL)
        (path / "config.json").write_text(
            json.dumps({"model_type": "x", "quantization_config": {"quant_method": "fp8"}})
        )

        assert [] == select_findings(path, "config_mismatch") + select_findings(path, "undeclared_codes")

    def test_types_determine_input_rounding(self):
        activations = {weight.name: weight.activations for weight in quanterr.inspect(ALL).weights}

        assert ("int8_token", "int4_token", None) == tuple(
            activations[f"{name}.weight"] for name in ("w8a8_dynamic", "w4a4_dynamic", "w8a16")
        )


class TestScales:
    @pytest.mark.parametrize(
        ("factor", "refused"), [(1.0, False), (1 + 2**-9, False), (1.02, True), (float("nan"), True)]
    )
    def test_deq_scale_must_equal_weight_scale_times_input_scale(self, tmp_path, factor, refused):
        scale = part(ALL, f"{MIX}.weight_scale")
        findings = select_findings(change(tmp_path, ALL, tensors={f"{MIX}.weight_scale": scale * factor}), "not_read")

        assert refused == bool(findings)
        assert all(
            "w8a8_mix.deq_scale (I64 [8]) is not weight_scale · input_scale: row 0 has" in m for _, m in findings
        )

    @pytest.mark.parametrize(
        ("tensors", "says"),
        [
            ({"deq_scale": torch.full((8,), 1 << 40)}, "should hold the bits of float32 numbers"),
            ({"deq_scale": torch.ones(7)}, "a layer with static inputs has one input_scale"),
            ({"input_scale": torch.ones(2)}, "a layer with static inputs has one input_scale"),
            ({"weight_offset": torch.zeros(8)}, "should have the shape of"),
            ({"weight_scale": torch.ones(7, 1)}, "should have one number or more for each of 8 rows"),
            ({"left_trans": torch.eye(8), "right_trans": torch.eye(8)}, "stored as ModelSlim with FlatQuant"),
            ({"svd_lowrank_l1": torch.ones(2, 64), "svd_lowrank_l2": torch.ones(8, 2)}, "ModelSlim with SVD"),
            ({"weight_scale_second": torch.ones(8, 4)}, "unused: w8a8_mix.weight_scale_second"),
        ],
    )
    def test_misfitting_scales_are_refused(self, tmp_path, tensors, says):
        path = change(tmp_path, ALL, tensors={f"{MIX}.{name}": tensor for name, tensor in tensors.items()})
        ((_, message),) = select_findings(path, "not_read")

        assert says in message

    @pytest.mark.parametrize(
        ("name", "tensor", "says"),
        [
            (
                "scale",
                torch.ones(8, 4),
                "should have one number for each row if there is down_proj.weight_scale_second",
            ),
            ("scale_second", torch.ones(4, 4), "should have one number or more for each of 8 rows"),
            ("offset_second", torch.zeros(8, 2), "should have the shape of down_proj.weight_scale_second"),
        ],
    )
    def test_two_stage_scales_must_fit(self, tmp_path, name, tensor, says):
        tensors = {f"down_proj.weight_{name}": tensor}
        if name == "scale":
            tensors["down_proj.weight_offset"] = torch.zeros(8, 4)
        ((_, message),) = select_findings(
            change(tmp_path, GOLDEN / "modelslim_int4" / "stages", tensors=tensors), "not_read"
        )

        assert says in message

    def test_offsets_ignored_by_runtimes_are_doubted(self):
        ((severity, message),) = select_findings(ALL, "ambiguous_layout")

        assert "warning" == severity
        assert "its weight_offset is not 0, but vllm-ascend and SGLang ignore it for W4A4" in message
