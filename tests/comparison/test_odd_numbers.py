"""Numbers that no model has: values beyond any ratio, and digits that are not ASCII."""

import json

import pytest
import torch
from support.making import compare
from support.stored import original, to_fp8, write

import quanterr
from quanterr.documents.gate_results import exit_status
from quanterr.errors import Status


@pytest.mark.parametrize("huge", [1e200, -1e300], ids=str)
def test_values_beyond_any_ratio_are_an_ordinary_error(tmp_path, huge):
    x, y = torch.ones(2, 2, dtype=torch.float64) * 1e-100, torch.full((2, 2), huge, dtype=torch.float64)
    report = compare(tmp_path, {"w": x}, {"w": y})

    assert Status.INCONCLUSIVE == exit_status(report)
    assert ["implausible_error"] == [finding.code for finding in report.findings if finding.severity == "error"]
    assert "too large for their error to be measured" in report.reasons[0]


@pytest.mark.parametrize("digits", ["²", "1" * 5000], ids=["a superscript", "5000 digits"])
@pytest.mark.parametrize(
    "declared", [{"weight_block_size": "{}x{}"}, {"version": "{}.{}", "quant_method": "fp8"}], ids=str
)
def test_invalid_numbers_in_a_configuration_are_handled(tmp_path, digits, declared):
    declared = {key: text.format(digits, digits) for key, text in declared.items()}
    folder = tmp_path / "y"
    write(folder / "model.safetensors", to_fp8(original()))
    packed = {"a.weight_packed": torch.zeros(8, 4, dtype=torch.int32), "a.weight_scale": torch.ones(8, 1)}
    write(folder / "packed" / "model.safetensors", packed | {"a.weight_shape": torch.tensor([8, 32])})
    for place in (folder, folder / "packed"):
        (place / "config.json").write_text(json.dumps({"quantization_config": declared}))

    report = quanterr.compare(write(tmp_path / "x.safetensors", original()), folder, device="cpu")

    assert Status.OK == exit_status(report)
    assert ["ct_pack"] == list(quanterr.inspect(folder / "packed").formats)


def test_superscript_block_number_is_handled(tmp_path):
    x = {"².0.a.weight": torch.ones(4, 4), "b.layers.².a.weight": torch.ones(4, 4), "².weight": torch.ones(4, 4)}
    report = compare(tmp_path, x, {name: weight + 0.01 * torch.eye(4) for name, weight in x.items()})

    assert Status.OK == exit_status(report)
    assert 3 == len(report.layers)
