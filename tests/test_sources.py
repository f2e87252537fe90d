"""Weights that were quantized otherwise than to the nearest are not told to come from another source."""

import pytest
import torch
from making import numbers
from safetensors.torch import save_file

import quanterr

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


def at_random(values):
    return (values + torch.rand(values.shape, generator=torch.Generator().manual_seed(2)) - 0.5).round()


@pytest.mark.parametrize("rounding", [torch.round, at_random, torch.trunc])
def test_to_round_otherwise_is_no_other_source(tmp_path, rounding):
    assert [] == signs(tmp_path, lambda x: x, rounding)
