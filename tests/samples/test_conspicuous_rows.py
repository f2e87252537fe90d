"""Groups, tiles and rows outside the sample are examined if their errors are unusually large."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import packing
from support.making import numbers

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.comparison.run import compare_each
from quanterr.kernel import library
from quanterr.options import CompareOptions
from quanterr.recipes import parse_recipe
from quanterr.recipes.quantized_file import mix_recipes

NAME = "layers.0.mlp.up_proj.weight"
ROWS, COLS, ROW = 1024, 512, 333  # the sample has 16 runs of a few rows, none of which contains this row
NATIVE = pytest.mark.skipif(library.find_best().kernel is None, reason="no compiled kernel here")
KERNELS = ["torch", pytest.param("native", marks=NATIVE)]


@pytest.fixture(scope="module")
def original():
    random = np.random.default_rng(4)
    w = 0.02 * random.standard_t(6, (ROWS, COLS)) * np.exp(0.3 * random.standard_normal((ROWS, 1)))
    return torch.tensor(w).bfloat16().double().numpy()


def findings_by_code(folder, x, stored):
    save_file({NAME: torch.from_numpy(x).bfloat16()}, folder / "x.safetensors")
    save_file(stored, folder / "y.safetensors")
    report = quanterr.compare(folder / "x.safetensors", folder / "y.safetensors", device="cpu")
    return {finding.code: finding for finding in report.findings if finding.severity != "info"}


def by_group(x, change=lambda scales: None):
    """Return 4-bit integers in groups of 32, the nearest for scales changed by ``change``."""
    blocks = x.reshape(ROWS, -1, 32)
    scales = np.float16(np.abs(blocks).max(2) / 7.5)
    change(scales)
    unit = np.where(scales == 0, np.inf, scales.astype(float))[..., None]
    codes = np.clip(np.round(blocks / unit), -8, 7) + 8
    return {
        f"{NAME}_packed": torch.from_numpy(packing.dense(codes.reshape(x.shape).astype(int), 4)),
        f"{NAME}_scale": torch.from_numpy(scales),
        f"{NAME}_shape": torch.tensor(x.shape),
    }


def by_tile(x, change=lambda scales: None):
    """Return 8-bit integers in tiles of 32 by 32."""
    tiles = x.reshape(ROWS // 32, 32, COLS // 32, 32)
    scales = np.float32(np.abs(tiles).max((1, 3)) / 127)
    change(scales)
    codes = np.clip(np.round(tiles / scales[:, None, :, None]), -127, 127).reshape(x.shape)
    return {NAME: torch.from_numpy(codes).to(torch.int8), f"{NAME}_scale": torch.from_numpy(scales)}


@pytest.mark.parametrize("store", [by_group, by_tile])
@pytest.mark.parametrize("kernel", KERNELS)
def test_correct_weight_raises_no_finding(tmp_path, monkeypatch, original, store, kernel):
    monkeypatch.setenv("QUANTERR_KERNEL", kernel)

    assert {} == findings_by_code(tmp_path, original, store(original))


@pytest.mark.parametrize("row", [ROW, *range(203, 211)])  # outside and inside the sample
@pytest.mark.parametrize("kernel", KERNELS)
def test_group_with_an_excessive_scale_is_found(tmp_path, monkeypatch, original, kernel, row):
    monkeypatch.setenv("QUANTERR_KERNEL", kernel)

    def change(scales):
        scales[row, 3] *= 16

    findings = findings_by_code(tmp_path, original, by_group(original, change))
    assert [row, 96] in findings["scale_loss"].evidence["places"]


def test_scales_with_more_error_than_zeros_are_an_error(tmp_path, original):
    def change(scales):
        scales *= 64

    assert "error" == findings_by_code(tmp_path, original, by_group(original, change))["scale_loss"].severity


@pytest.mark.parametrize("tile", [(13, 3), (0, 15), (31, 15)])  # in the last tile, padding is not in the file
@pytest.mark.parametrize("kernel", KERNELS)
def test_tile_with_an_excessive_scale_is_found(tmp_path, monkeypatch, original, kernel, tile):
    monkeypatch.setenv("QUANTERR_KERNEL", kernel)
    x = original.reshape(ROWS // 32, 32, COLS // 32, 32)[tile[0], :, tile[1]]
    scale = np.abs(x).max() / 127
    e = np.round(x / (16 * scale)) * 16 * scale - x

    def change(scales):
        scales[tile] *= 16

    evidence = findings_by_code(tmp_path, original, by_tile(original, change))["scale_loss"].evidence
    assert [[32 * tile[0], 32 * tile[1]]] == evidence["places"]
    assert evidence["worst_snr_db"] == pytest.approx(10 * np.log10((x * x).sum() / (e * e).sum()), abs=0.01)


def test_row_with_a_zero_scale_is_found(tmp_path, original):
    def change(scales):
        scales[ROW] = 0

    assert {"scale_zero", "dead_rows"} & findings_by_code(tmp_path, original, by_group(original, change)).keys()


def by_range(x, row=None, times=1.0):
    """Return 4-bit integers in groups of 128 with zero points; one row has scales this many times larger."""
    blocks = x.reshape(ROWS, -1, 128)
    low, high = blocks.min(2), blocks.max(2)
    scales = (high - low) / 15
    if row is not None:
        scales[row] *= times
    scales = torch.from_numpy(scales).bfloat16().double().numpy()
    zeros = np.clip(np.round(-low / scales), 0, 15)
    codes = np.clip(np.round(blocks / scales[..., None]) + zeros[..., None], 0, 15).reshape(x.shape)
    return {
        f"{NAME}_packed": torch.from_numpy(packing.dense(codes.astype(int), 4)),
        f"{NAME}_scale": torch.from_numpy(scales).bfloat16(),
        f"{NAME}_zero_point": torch.from_numpy(packing.dense(zeros.astype(int).T, 4).T.copy()),
        f"{NAME}_shape": torch.tensor(x.shape),
    }


@pytest.mark.parametrize("times", [1 / 8, 8])
def test_equal_zero_points_in_a_row_do_not_hide_wide_scales(tmp_path, original, times):
    """Excessive scales give all groups of a row one zero point, which would be right if the weight had just one."""
    finding = findings_by_code(tmp_path, original, by_range(original, ROW, times))["scale_loss"]

    assert "4 groups of 128, the worst at row 333" in finding.message
    assert finding.evidence["scale_ratio"] == pytest.approx(times, rel=2**-8)  # scales are rounded to BF16


@pytest.mark.parametrize("times", [1.3, 1.6])
def test_row_with_its_own_factor_is_reported(tmp_path, original, times):
    """The codes are those of a correct file; only the scale differs."""
    stored = by_group(original)
    stored[f"{NAME}_scale"][ROW] *= times
    finding = findings_by_code(tmp_path, original, stored)["excess_rows"]

    assert "1 sampled row (333): " in finding.message
    assert finding.evidence["factor"] == pytest.approx(times, rel=0.02)  # some of the energy comes from rounding


def test_row_with_a_negligible_factor_is_silent(tmp_path, original):
    stored = by_group(original)
    stored[f"{NAME}_scale"][ROW] *= 1.05

    assert {} == findings_by_code(tmp_path, original, stored)


@pytest.mark.parametrize("kernel", KERNELS)
def test_damaged_group_is_found_in_a_row_with_a_dominant_outlier(tmp_path, monkeypatch, original, kernel):
    monkeypatch.setenv("QUANTERR_KERNEL", kernel)
    x = original.copy()
    x[ROW, 30] = 40 * np.abs(x[ROW]).max()

    def change(scales):
        scales[ROW, 3] *= 1.4

    stored = by_group(x)
    scales = by_group(x, change)[f"{NAME}_scale"]
    findings = findings_by_code(
        tmp_path, x, stored | {f"{NAME}_scale": scales}
    )  # the codes belong to the earlier scales

    assert [[ROW, 64]] == findings["excess_blocks"].evidence["places"]


RECIPES = (
    *("fp8_tensor", "fp8_row", "nvfp4", "mxfp4", "mxfp8", "int8_row", "int4_g64:asym", "nf4"),
    *("gguf_q4_k", "gguf_q8_0"),
)


@pytest.mark.parametrize("kernel", KERNELS)
def test_float64_original_has_the_findings_of_the_same_values_in_float32(tmp_path, monkeypatch, kernel):
    monkeypatch.setenv("QUANTERR_KERNEL", kernel)
    names = {f"layers.{number}.mlp.up_proj.weight": parse_recipe(recipe) for number, recipe in enumerate(RECIPES)}
    sources = {name: numbers(128, 512, seed=at, dtype=torch.float32) for at, name in enumerate(names)}
    originals = {name: values.double() for name, values in sources.items()}
    for values in originals.values():
        values[51, 64:96] *= 3  # a row outside the sample
        values[51, 70] = 2
    save_file(sources, tmp_path / "source.safetensors")
    save_file(originals, tmp_path / "wide.safetensors")
    save_file({name: values.float() for name, values in originals.items()}, tmp_path / "narrow.safetensors")
    with open_checkpoint(tmp_path / "source.safetensors") as source:
        quantized, _ = mix_recipes(source, names, "quantized")
        findings = {
            side: compare_each(tmp_path / f"{side}.safetensors", [quantized], CompareOptions(device="cpu"))[0].findings
            for side in ("wide", "narrow")
        }

    wide, narrow = (
        [(finding.code, finding.severity, finding.layer) for finding in findings[side]] for side in ("wide", "narrow")
    )
    assert wide == narrow
    assert names.keys() <= {finding.layer for finding in findings["wide"]} | {
        layer for finding in findings["wide"] for layer in finding.evidence.get("layers", ())
    }
