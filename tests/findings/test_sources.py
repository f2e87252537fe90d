"""Weights made of other values than the original's, and sound ones equally far from the nearest codes."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import packing
from support.making import numbers

import quanterr

NAME = "layers.0.mlp.up_proj"


def signs(folder, x, source, bits=4):
    """Return the signs found where the integers in groups of 32 were made of ``source``, and the loss in dB."""
    save_file({f"{NAME}.weight": torch.from_numpy(x).bfloat16()}, folder / "x.safetensors")
    save_file(packing.as_ct_pack(f"{NAME}.weight", source, bits), folder / "y.safetensors")
    report = quanterr.compare(folder / "x.safetensors", folder / "y.safetensors", device="cpu")
    findings = [findings for findings in report.findings if findings.code == "another_source"]
    assert {"warning"} >= {finding.severity for finding in findings}
    return [finding.evidence["signs"] for finding in findings]


@pytest.fixture(scope="module")
def original():
    random = np.random.default_rng(5)
    w = 0.02 * random.standard_t(5, (384, 512)) * np.exp(0.3 * random.standard_normal((384, 1)))
    return torch.tensor(w).bfloat16().double().numpy()


def error_of(x, bits=4):
    """Return the root mean square error of rounding to the nearest code."""
    step = np.abs(x.reshape(len(x), -1, 32)).max(2) / (2 ** (bits - 1) - 0.5)
    return np.sqrt((step**2).mean() / 12)


def test_finetune_is_another_source(tmp_path, original):
    noise = np.random.default_rng(1).standard_normal(original.shape) * 0.7 * error_of(original)

    assert [["rounding"]] == signs(tmp_path, original, original + noise)


def test_merged_adapter_is_another_source(tmp_path, original):
    random = np.random.default_rng(2)
    update = random.standard_normal((384, 4)) @ random.standard_normal((4, 512))
    shown = signs(tmp_path, original, original + update / update.std() * 0.7 * error_of(original))

    assert 1 == len(shown)
    assert "directions" in shown[0]


def test_requantized_values_are_another_source(tmp_path, original):
    blocks = original.reshape(384, -1, 64)
    step = np.abs(blocks).max(2, keepdims=True) / 7
    shown = signs(tmp_path, original, (np.round(blocks / step) * step).reshape(original.shape))

    assert 1 == len(shown)
    assert "grid" in shown[0]


def by_row(folder, rounding):
    """Return the signs found where 4-bit codes with one scale per row were rounded this way."""
    x = numbers(256, 512, seed=3).float()
    unit = x.abs().amax(1, keepdim=True) / 7
    codes = rounding(x / unit).clamp(-7, 7)
    save_file({f"{NAME}.weight": x}, folder / "x.safetensors")
    save_file({f"{NAME}.weight": codes.to(torch.int8), f"{NAME}.weight_scale": unit}, folder / "y.safetensors")
    report = quanterr.compare(folder / "x.safetensors", folder / "y.safetensors", device="cpu")
    return [finding.evidence["signs"] for finding in report.findings if finding.code == "another_source"]


def at_random(values):
    return (values + torch.rand(values.shape, generator=torch.Generator().manual_seed(2)) - 0.5).round()


@pytest.mark.parametrize("rounding", [torch.round, at_random, torch.trunc])
def test_other_rounding_is_not_another_source(tmp_path, rounding):
    assert [] == by_row(tmp_path, rounding)


def test_nearest_codes_come_from_the_original(tmp_path, original):
    assert [] == signs(tmp_path, original, original)
