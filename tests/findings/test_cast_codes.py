"""Codes that a program cast to plain numbers, with and without the scales beside them."""

import pytest
import torch
from support.making import compare, numbers

from quanterr.findings.headers import report_layouts
from quanterr.formats.shared.cast_codes import describe_codes

NAMES = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(3)]


def quantize(dtype):
    """Return originals, codes and scales of rows."""
    x = {name: numbers(64, 128, seed=seed).float() for seed, name in enumerate(NAMES)}
    largest = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    scales = {name: w.abs().amax(1, keepdim=True) / largest for name, w in x.items()}
    codes = {name: w / scales[name] for name, w in x.items()}
    codes = {name: (w.round() if dtype == torch.int8 else w).to(dtype) for name, w in codes.items()}
    return x, codes, {f"{name}_scale": scale for name, scale in scales.items()}


def map_findings(report):
    return {(finding.code, finding.severity): finding for finding in report.findings if finding.severity != "info"}


KINDS = [(torch.float8_e4m3fn, "FP8 E4M3"), (torch.float8_e5m2, "FP8 E5M2"), (torch.int8, "INT8")]


@pytest.mark.parametrize(("dtype", "code_type"), KINDS)
def test_cast_codes_are_one_finding(tmp_path, dtype, code_type):
    x, codes, _ = quantize(dtype)
    report = compare(tmp_path, x, {name: w.bfloat16() for name, w in codes.items()})

    assert {("codes_without_scale", "error")} == map_findings(report).keys()
    (finding,) = map_findings(report).values()
    assert f"hold {code_type} codes as BF16 numbers, without their scales" in finding.message
    assert NAMES == finding.evidence["layers"]


@pytest.mark.parametrize(("dtype", "code_type"), KINDS)
def test_cast_codes_beside_their_scales_are_measured_both_ways(tmp_path, dtype, code_type):
    x, codes, scales = quantize(dtype)
    report = compare(tmp_path, x, {name: w.bfloat16() for name, w in codes.items()} | scales)

    assert {("wrong_convention", "error"), ("ambiguous_layout", "warning")} == map_findings(report).keys()
    finding = map_findings(report)["wrong_convention", "error"]
    assert (
        f"{code_type} codes that were cast to BF16, without their scale, which is how it will be loaded"
        in finding.message
    )
    assert finding.evidence["snr_db"] < 0 < finding.evidence["snr_db_other"]
    assert "unquantized" not in finding.message
    assert len(NAMES) == len(report.layers)


def test_unquantized_weight_with_a_scale_is_not_read(tmp_path):
    x, _, scales = quantize(torch.int8)
    report = compare(tmp_path, x, {name: w.bfloat16() for name, w in x.items()} | scales)

    assert "left the weight unquantized" in report.reasons[0]


def test_weight_that_is_stored_twice_is_named(tmp_path):
    x, codes, scales = quantize(torch.int8)
    twice = {name.replace(".weight", ".int8_weight"): w for name, w in codes.items()}
    report = compare(tmp_path, x, {name: w.bfloat16() for name, w in x.items()} | scales | twice)

    assert "it is stored twice, as BF16 and as the codes model.layers.0.mlp.up_proj.int8_weight" in report.reasons[0]
    assert "unquantized" not in report.reasons[0]


@pytest.mark.parametrize(
    "values",
    [
        numbers(64, 64),
        numbers(64, 64).sign(),
        torch.full((64, 64), 3.0),
        numbers(64, 64).to(torch.float8_e4m3fn).float() * 0.013,
    ],
)
def test_ordinary_numbers_are_no_codes(values):
    assert describe_codes(values) is None


def test_reasons_that_differ_in_their_numbers_are_one_finding():
    reasons = [
        (f"layers.{n}.w", f"read as codes: relative error 0.0{n} on a sample, scale layers.{n}.s") for n in (3, 4)
    ]
    first, second = report_layouts([*reasons, ("layers.3.w", "declares 4 bits")])

    assert ["layers.3.w", "layers.4.w"] == first.evidence["tensors"]
    assert "2 weights (layers.3.w, layers.4.w), the first of them: read as codes: relative error 0.03" in first.message
    assert "layers.3.w" == second.layer
