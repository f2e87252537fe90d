"""Scales that are wrong although the codes are right: the cause is named, and not another source of the codes."""

import numpy as np
import pytest
import torch
from mutation import methods
from mutation.coding import sound
from mutation.layouts import find_layout
from mutation.originals import matrix
from mutation.pairs import Bench, Case, make_pair
from support import packing
from support.making import compare

import quanterr
from quanterr.findings.factors import explain_factor

NAMES = [f"model.layers.{layer}.mlp.up_proj" for layer in range(3)]
ROWS, COLS, GROUP = 128, 256, 32


@pytest.fixture(scope="module")
def original():
    """Return weights whose columns are of different sizes, as act-order needs them."""
    random = np.random.default_rng(3)
    sizes = np.exp(0.5 * random.standard_normal(COLS))
    drawn = {name: 0.02 * random.standard_normal((ROWS, COLS)) * sizes for name in NAMES}
    return {name: torch.from_numpy(w).bfloat16().double().numpy() for name, w in drawn.items()}


def as_codes(w, bits, groups, step=1.0):
    """Return codes counted from the middle, and the scales, (rows, groups); ``groups`` has that of each column."""
    largest = np.stack([np.abs(w[:, groups == group]).max(1) for group in range(groups.max() + 1)], 1)
    scales = largest / (2 ** (bits - 1) - 0.5)
    half = 2 ** (bits - 1)
    return np.clip(np.round(w / scales[:, groups]), -half, half - 1).astype(int) + half, (step * scales).astype(
        np.float32
    )


def as_ct_pack(name, w, bits=4, step=1.0, groups=None, stored_order=None):
    codes, scales = as_codes(w, bits, np.arange(COLS) // GROUP if groups is None else groups, step)
    stored = {"packed": packing.dense(codes, bits), "scale": scales, "shape": np.array(w.shape, np.int32)}
    if stored_order is not None:
        stored["g_idx"] = stored_order.astype(np.int32)
    return {f"{name}.weight_{part}": torch.from_numpy(array) for part, array in stored.items()}


def as_int8(name, w, step=1.0):
    scales = np.abs(w).max(1, keepdims=True) / 127
    codes = torch.from_numpy(np.round(w / scales)).to(torch.int8)
    return {f"{name}.weight": codes, f"{name}.weight_scale": torch.from_numpy(step * scales).float()}


def as_fp8(name, w, step=1.0):
    scale = np.abs(w).max() / 448
    codes = torch.from_numpy(w / scale).to(torch.float8_e4m3fn)
    return {f"{name}.weight": codes, f"{name}.weight_scale": torch.tensor([step * scale]).float()}


def report_of(folder, original, quantize):
    x = {f"{name}.weight": torch.from_numpy(w).bfloat16() for name, w in original.items()}
    y = {}
    for name, w in original.items():
        y |= quantize(name, w)
    return compare(folder, x, y)


def map_findings(report):
    return {(finding.code, finding.severity): finding for finding in report.findings if finding.severity != "info"}


@pytest.mark.parametrize(
    ("quantize", "factor", "severity"),
    [
        (as_ct_pack, 0.8, "warning"),
        (as_ct_pack, 0.9, "warning"),
        (as_ct_pack, 1.02, "warning"),
        (as_ct_pack, 2.5, "error"),
        (as_int8, 0.99, "warning"),
        (as_int8, 1.02, "warning"),
        (as_fp8, 1.02, "warning"),
        (as_fp8, 1.25, "error"),
    ],
)
def test_factor_of_all_scales_is_the_only_cause(tmp_path, original, quantize, factor, severity):
    report = report_of(tmp_path, original, lambda name, w: quantize(name, w, step=factor))

    assert {("scale_factor", severity)} == map_findings(report).keys()
    (finding,) = map_findings(report).values()
    assert f"3 weights are the original times {factor:g}:" in finding.message
    assert factor == pytest.approx(finding.evidence["factor"], rel=1e-3)


@pytest.mark.parametrize("quantize", [as_ct_pack, as_int8, as_fp8])
def test_right_scales_have_no_factor(tmp_path, original, quantize):
    assert {} == map_findings(report_of(tmp_path, original, quantize))


def test_factor_of_one_weight_is_not_another_source(tmp_path, original):
    report = report_of(tmp_path, original, lambda name, w: as_ct_pack(name, w, step=0.85 if name == NAMES[1] else 1.0))

    assert {("scale_factor", "warning")} == map_findings(report).keys()
    (finding,) = map_findings(report).values()
    assert [f"{NAMES[1]}.weight"] == finding.evidence["layers"]
    assert "times 0.85" in finding.message


def test_factors_of_rows_are_not_another_source(tmp_path, original):
    sizes = np.exp(0.1 * np.random.default_rng(4).standard_normal((ROWS, 1)))
    report = report_of(tmp_path, original, lambda name, w: as_ct_pack(name, w, step=sizes))

    assert {"scale_factor"} == {code for code, _ in map_findings(report)}
    (finding,) = map_findings(report).values()
    assert "one factor for each row corrects it" in finding.message


def shuffle_groups(seed=5):
    """Return the group of each column in act-order."""
    return np.random.default_rng(seed).permutation(COLS) // GROUP


def test_lost_order_of_columns_is_not_another_source(tmp_path, original):
    report = report_of(tmp_path, original, lambda name, w: as_ct_pack(name, w, groups=shuffle_groups()))

    assert {"permuted"} == {code for code, _ in map_findings(report)}
    (finding,) = map_findings(report).values()
    assert "the order of columns (act-order, g_idx) was lost" in finding.message
    assert finding.evidence["snr_db_repaired"] > finding.evidence["snr_db"] + 1


def test_stored_order_of_columns_is_right(tmp_path, original):
    order = shuffle_groups()
    report = report_of(tmp_path, original, lambda name, w: as_ct_pack(name, w, groups=order, stored_order=order))

    assert {} == map_findings(report)


def test_groups_of_unequal_sizes_have_no_attainable_snr(tmp_path, original):
    groups, stored_order = shuffle_groups(), shuffle_groups()
    stored_order[0] = (stored_order[0] + 1) % (COLS // GROUP)
    report = report_of(
        tmp_path, original, lambda name, w: as_ct_pack(name, w, groups=groups, stored_order=stored_order)
    )

    assert [None] * len(NAMES) == [layer.format_snr_db for layer in report.layers]


def test_order_that_names_a_single_group_is_found_from_the_values(tmp_path, original):
    zeros = np.zeros(COLS)
    findings = map_findings(report_of(tmp_path, original, lambda name, w: as_ct_pack(name, w, stored_order=zeros)))

    assert {("wrong_convention", "error"), ("ambiguous_layout", "warning")} == findings.keys()
    assert "names 1 of 8 blocks, which is how it will be loaded" in findings["wrong_convention", "error"].message
    assert "columns in order, on a sample" in findings["wrong_convention", "error"].message


def test_exchanged_scales_of_groups_are_named(tmp_path, original):
    moved = (np.arange(COLS) // GROUP + 1) % (COLS // GROUP)
    report = report_of(tmp_path, original, lambda name, w: as_ct_pack(name, w, groups=moved))

    assert {"permuted"} == {code for code, _ in map_findings(report)}
    assert "groups of columns have each other's scales" in next(iter(map_findings(report).values())).message


@pytest.mark.parametrize(("factor", "doubt", "words"), [(250, 1e-3, ""), (255, 1e-3, "255"), (252, 0.02, "255")])
def test_number_explains_a_factor_only_as_exactly_as_it_is_known(factor, doubt, words):
    explanation = explain_factor(factor, None, doubt=doubt)

    assert words in explanation
    assert bool(words) == bool(explanation)


@pytest.mark.parametrize("layout", ["AWQ", "GPTQ 4 bits asym", "GPTQ 2 bits asym", "CT INT4 asym g128", "HQQ"])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_zero_points_that_are_a_step_off_are_the_only_cause(tmp_path, layout, share):
    x = {f"{NAMES[0]}.weight": matrix(128, 512, 3)}
    damage = methods.shift_zeros(share)
    pair = make_pair(Bench(tmp_path), find_layout(layout), x, lambda layout, x: damage(layout, x, sound(layout, x)))
    (finding,) = [finding for finding in pair.report.findings if finding.layer]

    assert ("zero_points", [1.0, 1.0]) == (finding.code, finding.evidence["factors"])


@pytest.mark.parametrize("layout", ["Q4_K", "Q5_K", "Q6_K"])
def test_rounded_scales_of_superblocks_are_the_only_cause(tmp_path, layout):
    x = {f"{NAMES[0]}.weight": matrix(64, 512, 3)}
    pair = make_pair(
        Bench(tmp_path), find_layout(layout), x, lambda layout, x: methods.round_scales(layout, x, sound(layout, x))
    )
    (finding,) = [finding for finding in pair.report.findings if finding.layer]

    assert "scale_factor" == finding.code
    assert "superblock" in finding.message
    low, high = finding.evidence["factors"]
    assert 1 - 1 / 16 <= low < 1 < high <= 1 + 1 / 16


@pytest.mark.parametrize("layout", ["INT8 tensor", "INT8 128 × 128", "FP8 128 × 128"])
def test_rounded_scales_beside_outliers_are_the_only_cause(tmp_path, layout):
    x = matrix(256, 512, 3).float()
    x[:, 7] *= 20
    pair = make_pair(Bench(tmp_path), find_layout(layout), {f"{NAMES[0]}.weight": x.bfloat16()})
    before = pair.weights[f"{NAMES[0]}.weight"]
    broken = methods.round_scales(pair.layout, x, before)
    path = pair.write(Case("rounded", {f"{NAMES[0]}.weight": broken}), None)
    report = quanterr.compare(pair.original, path, device="cpu")

    assert {"config_mismatch"} >= {code for code, _ in map_findings(pair.report)}
    assert {"scale_factor"} == {code for code, _ in map_findings(report)} - {"config_mismatch"}
