"""Losses of stored scales against good ones, for too large and too small scales with the nearest codes of both."""

import math

import gguf
import pytest
import torch
from mutation import originals
from safetensors.torch import save_file
from support.gguf_stored import Stored, architecture, write_gguf
from support.making import numbers

import quanterr
from quanterr.checkpoints.ggml_types import BLOCKS
from quanterr.kernel.levels import E4M3, INT8, Levels, Scaling, uniform
from quanterr.recipes import superblocks
from quanterr.samples.good_scales import ScaleGroups, find_groups, measure_losses, order_columns
from quanterr.samples.rows import sample_chunks

NAME = "layers.0.mlp.up_proj.weight"


def snr_db(x, y):
    x, y = x.double(), y.double()
    return 10 * math.log10(float(x.square().sum() / (y - x).square().sum()))


def weight(rows=64, cols=256):
    """Return rows of many sizes."""
    return numbers(rows, cols, seed=3).float() * torch.logspace(-1, 1, rows)[:, None]


def by_row(x, times):
    unit = times * x.abs().amax(1, keepdim=True) / 127
    codes = (x / unit).round().clamp(-128, 127)
    return {NAME: codes.to(torch.int8), f"{NAME}_scale": unit}, codes * unit


def by_tensor(x, times):
    unit = times * x.abs().amax().view(1) / 127
    codes = (x / unit).round().clamp(-128, 127)
    return {NAME: codes.to(torch.int8), f"{NAME}_scale": unit}, codes * unit


def by_block(x, times):
    unit = times * x.view(-1, 32, x.shape[1] // 32, 32).abs().amax((1, 3)) / 127
    units = unit.repeat_interleave(32, 0).repeat_interleave(32, 1)
    codes = (x / units).round().clamp(-128, 127)
    return {NAME: codes.to(torch.int8), f"{NAME}_scale": unit}, codes * units


def by_group(x, times):
    """Return compressed-tensors' 4-bit codes in groups of 32."""
    blocks = x.view(len(x), -1, 32)
    unit = times * blocks.abs().amax(2, keepdim=True) / 7.5
    codes = (blocks / unit).round().clamp(-8, 7)
    words = (codes + 8).view(len(x), -1, 8).long()
    packed = sum(words[:, :, n] << 4 * n for n in range(8)).to(torch.int32)
    stored = {f"{NAME}_packed": packed, f"{NAME}_scale": unit.squeeze(2), f"{NAME}_shape": torch.tensor(x.shape)}
    return stored, (codes * unit).view(x.shape)


def fp8(x, times):
    unit = times * x.abs().amax(1, keepdim=True) / 448
    codes = (x / unit).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {NAME: codes, f"{NAME}_scale": unit}, codes.float() * unit


def shift(x, signed):
    """Return compressed-tensors' 4-bit groups of 32 with zero points, or with unsigned ones cut off at 7."""
    blocks = x.view(len(x), -1, 32)
    low, high = blocks.amin(2, keepdim=True).clamp(max=0), blocks.amax(2, keepdim=True).clamp(min=0)
    unit = (high - low) / 15
    zero = ((-low / unit).round() - (8 if signed else 0)).clamp(-8, 7)
    codes = ((blocks / unit).round() + zero).clamp(-8, 7).view(len(x), -1, 8)
    of_zeros = zero.squeeze(2).t().reshape(-1, len(x) // 8, 8)
    packed, zeros = (
        sum((codes_of_side.long() + 8)[..., n] << 4 * n for n in range(8)).to(torch.int32)
        for codes_of_side in (codes, of_zeros)
    )
    stored = {f"{NAME}_packed": packed, f"{NAME}_scale": unit.squeeze(2), f"{NAME}_shape": torch.tensor(x.shape)}
    return stored | {f"{NAME}_zero_point": zeros.t().contiguous()}


def compare(folder, x, stored):
    save_file({NAME: x}, folder / "x.safetensors")
    save_file(stored, folder / "y.safetensors")
    return quanterr.compare(folder / "x.safetensors", folder / "y.safetensors", device="cpu")


def findings_by_code(report):
    return {finding.code: finding for finding in report.findings}


@pytest.mark.parametrize("signed", [True, False])
def test_zero_points_out_of_range_are_reported_instead_of_outliers(tmp_path, signed):
    x = numbers(64, 256, seed=3).float()
    report = compare(tmp_path, x, shift(x, signed))

    assert ([] if signed else [("zero_points", "error")]) == [
        (finding.code, finding.severity) for finding in report.findings
    ]
    if not signed:
        assert "% of its codes are at the end of their range" in report.findings[0].message
        assert "zero points are out of the range of codes; they allow 3." in report.findings[0].message


LEVELS = [by_row, by_tensor, by_block, by_group]


class TestLevels:
    @pytest.mark.parametrize("write", [*LEVELS, fp8])
    def test_good_scales_cost_no_accuracy(self, tmp_path, write):
        x = weight()
        report = compare(tmp_path, x, write(x, 1.0)[0])

        assert report.layers[0].scale_loss_db < 1.0
        assert "scale_loss" not in findings_by_code(report)

    @pytest.mark.parametrize("write", LEVELS)
    @pytest.mark.parametrize("times", [3.0, 8.0, 20.0])
    def test_excessive_scales_lose_the_calculated_amount(self, tmp_path, write, times):
        """The expected loss is computed by other formulas in float64; some groups are sampled, so 1 dB is allowed."""
        x = weight()
        stored, y = write(x, times)
        lost = snr_db(x, write(x, 1.0)[1]) - snr_db(x, y)
        report = compare(tmp_path, x, stored)
        layer, finding = report.layers[0], findings_by_code(report)["scale_loss"]

        assert layer.scale_loss_db == pytest.approx(lost, abs=1.0)
        assert layer.format_snr_db == layer.attainable_snr_db + layer.scale_loss_db
        assert layer.avoidable_db == layer.scale_loss_db + layer.excess_db
        assert ("error" if lost > 9 else "warning") == finding.severity
        assert finding.evidence["scale_ratio"] == pytest.approx(times, rel=0.1)

    @pytest.mark.parametrize("write", LEVELS)
    def test_too_small_scales_clip(self, tmp_path, write):
        x = weight()
        report = compare(tmp_path, x, write(x, 0.3)[0])

        assert "larger values are clipped" in findings_by_code(report)["scale_loss"].message
        assert "clipped" not in findings_by_code(report)

    def test_used_bits_are_reported(self, tmp_path):
        x = weight()
        report = compare(tmp_path, x, by_row(x, 64.0)[0])

        assert "codes use 2 of 8 bits: scales are 64" in findings_by_code(report)["scale_loss"].message
        assert "inconclusive" == report.verdict

    @pytest.mark.parametrize(("times", "loses"), [(64.0, False), (2.0**16, True)])
    def test_floats_lose_no_accuracy_until_they_underflow(self, tmp_path, times, loses):
        x = weight()

        assert loses == ("scale_loss" in findings_by_code(compare(tmp_path, x, fp8(x, times)[0])))

    @pytest.mark.parametrize("bits", [2, 3, 4])
    def test_fewer_bits_in_whole_bytes_are_right(self, tmp_path, bits):
        x = weight()
        x[::3] = 0
        stored, _ = by_row(x.where(x != 0, 1e-9), 127 / (2 ** (bits - 1) - 1))

        assert "scale_loss" not in findings_by_code(compare(tmp_path, x, stored))


class TestParts:
    def test_bad_group_in_a_sampled_row_is_found(self, tmp_path):
        x = weight()
        blocks = x.view(64, -1, 32).clone()
        blocks[20, 3] *= 16  # the scale is made from this
        scales = by_group(blocks.view(x.shape), 1.0)[0][f"{NAME}_scale"]
        codes = (x.view(64, -1, 32) / scales[..., None]).round().clamp(-8, 7)
        words = (codes + 8).view(64, -1, 8).long()
        packed = sum(words[:, :, n] << 4 * n for n in range(8)).to(torch.int32)
        stored = by_group(x, 1.0)[0] | {f"{NAME}_scale": scales, f"{NAME}_packed": packed}
        finding = findings_by_code(compare(tmp_path, x, stored))["scale_loss"]

        assert ("warning", [[20, 96]]) == (finding.severity, finding.evidence["places"])

    def test_bad_row_outside_the_sample_is_found(self, tmp_path):
        x = numbers(1024, 256, seed=4).float()
        row = next(n for n in range(300, 1024) if not any(c.row <= n < c.stop_row for c in sample_chunks((1024, 256))))
        stored, _ = by_row(x, 1.0)
        stored[f"{NAME}_scale"][row] *= 16
        stored[NAME][row] = (x[row] / stored[f"{NAME}_scale"][row]).round().to(torch.int8)
        finding = findings_by_code(compare(tmp_path, x, stored))["scale_loss"]

        assert ("warning", [[row, -1]]) == (finding.severity, finding.evidence["places"])

    @pytest.mark.parametrize("ggml_type", ["TQ1_0", "TQ2_0", "Q4_0"])
    def test_zero_scale_is_a_warning_even_where_it_costs_little(self, tmp_path, ggml_type):
        """With three values, normal numbers reach only 2 dB, so a block of zeros costs little, but is not rounding."""
        x, (elements, size) = weight(64, 1024), BLOCKS[ggml_type]
        blocks = gguf.quantize(x.numpy(), gguf.GGMLQuantizationType[ggml_type]).reshape(-1, size)
        at = 5 * 1024 + 512
        blocks[at // elements, slice(2) if ggml_type == "Q4_0" else slice(-2, None)] = 0
        save_file({"blk.0.ffn_up.weight": x}, tmp_path / "x.safetensors")
        stored = Stored("blk.0.ffn_up.weight", ggml_type, tuple(x.shape), blocks.tobytes())
        y = write_gguf(tmp_path / "y.gguf", [stored], architecture("llama"))
        finding = findings_by_code(quanterr.compare(tmp_path / "x.safetensors", y, device="cpu"))["scale_loss"]

        assert ("warning", [[5, 512]]) == (finding.severity, finding.evidence["places"])
        assert "scales are zero" in finding.message

    @pytest.mark.parametrize("seed", range(100, 105))
    def test_scales_rounded_to_a_step_need_no_warning(self, tmp_path, seed):
        """llama.cpp's Q2_K chooses scales that clip a little, and rounds them to a fifteenth of the largest of 16."""
        x = originals.matrix(128, 512, seed)
        blocks = superblocks.q2_k(x.float().view(-1, 16, 16))
        save_file({"blk.0.ffn_up.weight": x}, tmp_path / "x.safetensors")
        stored = Stored("blk.0.ffn_up.weight", "Q2_K", tuple(x.shape), blocks.numpy().tobytes())
        y = write_gguf(tmp_path / "y.gguf", [stored], architecture("llama"))
        report = quanterr.compare(tmp_path / "x.safetensors", y, device="cpu")

        assert [] == [finding.message for finding in report.findings if finding.severity != "info"]


class TestGroups:
    def test_column_factors_are_not_other_groups(self):
        unit = torch.rand(8, 4).repeat_interleave(16, 1) * torch.rand(64)

        assert ScaleGroups(1, 16) == find_groups((1, 16), unit)

    def test_reordered_columns_are_brought_together(self):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
        unit = torch.rand(8, 4).repeat_interleave(16, 1)[:, order]

        assert find_groups((1, 16), unit) is None
        assert ScaleGroups(1, 16) == find_groups((1, 16), unit[:, order_columns(16, unit)])
        assert order_columns(16, torch.rand(8, 64)) is None

    def test_different_zero_points_make_a_range(self):
        x = torch.rand(8, 32, generator=torch.Generator().manual_seed(1)) + torch.arange(8)[:, None] / 8 - 0.5
        levels, low = uniform(4), x.amin(1, keepdim=True).clamp(max=0)
        unit = (x.amax(1, keepdim=True) - low) / 15
        losses = measure_losses(levels, x, None, Scaling(2 * unit, low), ScaleGroups(1, 32))

        assert losses.needed.flatten().tolist() == pytest.approx([0.5] * 8)

    def test_zero_scales_do_not_affect_zero_points(self):
        """Zero is code 8 in all groups; where the scale is zero, no zero point can be read."""
        x = numbers(8, 32, seed=3).float()
        x[0] = 0.4 * x[0].abs()
        good = torch.maximum(x.amax(1) / 7, -x.amin(1) / 8)
        unit = good.index_fill(0, torch.tensor([5]), 0.0)[:, None]
        losses = measure_losses(uniform(4), x, None, Scaling(unit, -8 * unit), ScaleGroups(1, 32))

        # At most sixteen roundings of float32, including the codes of zero.
        assert losses.good.flatten().tolist() == pytest.approx(good.tolist(), rel=16 * 2**-24, abs=0)

    @pytest.mark.parametrize(("bits", "gains"), [(3, True), (8, False)])
    def test_scales_with_few_levels_are_searched(self, bits, gains):
        """A scale of 0.7 of the largest value is better for most of a row with outliers."""
        x, top = numbers(8, 256, seed=7).float(), 2 ** (bits - 1) - 1
        x[:, 0] = 4 * x.abs().amax(1)
        unit = x.abs().amax(1, keepdim=True) / top
        levels = Levels(0, 0, -top - 1.0, float(top))
        losses = measure_losses(levels, x, None, Scaling(unit), ScaleGroups(1, 256))
        candidates = torch.tensor([1.0, 0.7, 0.775, 0.85, 0.925, 1.075, 1.15, 1.225, 1.3])
        best = torch.stack(
            [((x / (f * unit)).round().clamp(-top - 1, top) * f * unit - x).square().sum(1) for f in candidates]
        ).amin(0)

        assert gains == bool((losses.good_sq[0, :, 0] < losses.stored_sq[:, 0]).all())
        assert not gains or losses.good_sq[0, :, 0].tolist() == pytest.approx(best.tolist(), rel=1e-5)

    def test_elements_without_a_code_do_not_count(self):
        x, pruned = numbers(8, 32, seed=5).float(), torch.arange(32) % 4 < 2
        unit = x.masked_fill(pruned, 0).abs().amax(1, keepdim=True).expand(8, 32) / 127
        losses = measure_losses(INT8, x, None, Scaling(unit.masked_fill(pruned, 0.0)), ScaleGroups(1, 32))

        assert losses.needed.flatten().tolist() == pytest.approx([1.0] * 8, rel=1 / 127)  # one more code below zero

    def test_power_of_two_scales_are_compared_with_powers_of_two(self):
        x = numbers(8, 32, seed=6).float()
        unit = 2.0 ** (x.abs().amax(1, keepdim=True) / 448).log2().ceil()
        losses = measure_losses(E4M3, x, None, Scaling(unit), ScaleGroups(1, 32))

        assert bool((losses.stored_sq <= losses.good_sq.amax(0) * (1 + 1e-6)).all())

    def test_usual_error_of_floats_is_their_error(self):
        """Of values x between powers of two, the mean squared error is s²/12 at steps of s, s²/48 to s²/12 of x²."""
        x = numbers(64, 256, seed=6).float()
        unit = x.abs().amax(1, keepdim=True) / 440  # no rounding makes it too small
        losses = measure_losses(E4M3, x, None, Scaling(unit), ScaleGroups(1, 256))
        cast = (x / unit).to(torch.float8_e4m3fn).float() * unit

        assert 0.5 < float(losses.stored_sq.sum() / (cast - x).double().square().sum()) < 2

    def test_signed_one_bit_codes_may_have_power_of_two_scales(self):
        x = -numbers(8, 32, seed=6).float().abs()
        losses = measure_losses(Levels(0, 1, -1.0, 0.0), x, None, Scaling(torch.ones(8, 1)), ScaleGroups(1, 32))

        assert losses.needed.flatten().tolist() == pytest.approx(x.abs().amax(1).tolist())
        assert bool((losses.good_sq <= losses.x_sq).all())
