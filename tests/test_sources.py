"""Weights that were quantized from other values than the original's, and sound ones whose codes are not the nearest."""

import pytest
import torch
from making import numbers
from safetensors.torch import save_file

import quanterr
from quanterr.recipes.tensors import fake_quantize

NAME = "layers.0.mlp.up_proj.weight"


def signs(folder, change, rounding=torch.round):
    """The signs told of 4 bits, one scale for each row, of what ``change`` makes of the original."""
    x = numbers(256, 512, seed=3).float()
    source = change(x)
    unit = source.abs().amax(1, keepdim=True) / 7
    codes = rounding(source / unit).clamp(-7, 7)
    save_file({NAME: x}, folder / "x.safetensors")
    save_file({NAME: codes.to(torch.int8), f"{NAME}_scale": unit}, folder / "y.safetensors")
    report = quanterr.compare(folder / "x.safetensors", folder / "y.safetensors", device="cpu")
    return [found.evidence["signs"] for found in report.findings if found.code == "another_source"]


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def finetuned(x):
    return x + noise(*x.shape) * x.std() * 0.08


def merged(x):
    return x + noise(len(x), 8) @ noise(8, x.shape[1]) * x.std() * 0.03


def test_a_finetune_is_told(tmp_path):
    assert [["rounding"]] == signs(tmp_path, finetuned)


def test_a_merged_lora_is_told(tmp_path):
    (found,) = signs(tmp_path, merged)

    assert "directions" in found


def test_an_earlier_format_is_told(tmp_path):
    (found,) = signs(tmp_path, lambda x: fake_quantize(x, "int5_g128"))

    assert "grid" in found


def at_random(values):
    return (values + torch.rand(values.shape, generator=torch.Generator().manual_seed(2)) - 0.5).round()


@pytest.mark.parametrize("rounding", [torch.round, at_random, torch.trunc])
def test_to_round_otherwise_is_no_other_source(tmp_path, rounding):
    assert [] == signs(tmp_path, lambda x: x, rounding)
