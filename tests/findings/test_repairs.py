"""Faults that many weights share are one finding, and scales that stayed in place do not hide a transpose."""

import pytest
import torch
from support.making import compare, numbers

NAME = "model.layers.{}.self_attn.q_proj.weight"
SIZE = 128


def fp8(x, granularity):
    """Return FP8 codes and their scales: one, one for each row, or one for each block of 64 x 64."""
    if granularity == "tensor":
        scale = (x.abs().max() / 448).view(1)
        return (x / scale).to(torch.float8_e4m3fn), scale
    if granularity == "row":
        scale = x.abs().amax(1, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn), scale
    blocks = x.view(SIZE // 64, 64, SIZE // 64, 64)
    scale = blocks.abs().amax((1, 3)) / 448
    return (blocks / scale[:, None, :, None]).reshape(x.shape).to(torch.float8_e4m3fn), scale


def findings_of(folder, granularity, change, n):
    """Return the findings about weights of rows of many sizes, whose codes and scales were changed."""
    sizes = torch.logspace(-1, 1, SIZE)[torch.randperm(SIZE, generator=torch.Generator().manual_seed(1)), None]
    x = {NAME.format(i): numbers(SIZE, SIZE, seed=i).float() * sizes for i in range(n)}
    y = {}
    for name, w in x.items():
        y[name], y[f"{name}_scale"] = change(*fp8(w, granularity))
    return [finding for finding in compare(folder, x, y).findings if finding.severity != "info"]


@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
def test_inverted_scales_of_many_weights_are_one_finding(tmp_path, granularity):
    (finding,) = findings_of(tmp_path, granularity, lambda codes, scale: (codes, 1 / scale), 10)

    assert ("scale_factor", "error") == (finding.code, finding.severity)
    assert "10 weights, of which 8 were read again" in finding.message
    assert "scales are stored as their inverse" in finding.message
    assert [NAME.format(i) for i in range(10)] == sorted(finding.evidence["layers"])


@pytest.mark.parametrize("granularity", ["row", "block"])
def test_transposed_codes_under_scales_in_place_are_named(tmp_path, granularity):
    def transpose(codes, scale):
        return codes.view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn), scale

    (finding,) = findings_of(tmp_path, granularity, transpose, 2)

    assert ("transposed", "error") == (finding.code, finding.severity)
    assert "it is stored transposed, but its scales are not" in finding.message
    assert 2 == len(finding.evidence["layers"])
