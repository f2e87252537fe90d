"""Correct files of real quantization methods cause no warning; these tests write them in float64, without quanterr."""

from functools import cache

import numpy as np
import pytest
import torch
from support import packing
from support.making import compare, legacy

MODULE = "model.layers.0.mlp.up_proj"
NAME = f"{MODULE}.weight"
MLX = {"quantization": {"group_size": 64, "bits": 8}}
GPTQ = {"quantization_config": {"quant_method": "gptq", "checkpoint_format": "gptq"}}
AUTO_ROUND = {"quantization_config": {"quant_method": "auto-round"}}


def weights(rows, cols, seed=0, sizes=0.4, outliers=3):
    """Return weights with heavy tails, rows of many sizes and columns of outliers, exact in BF16, as float64."""
    random = np.random.default_rng(seed)
    w = 0.02 * random.standard_t(5, (rows, cols)) * np.exp(sizes * random.standard_normal((rows, 1)))
    w[:, random.choice(cols, outliers, replace=False)] *= random.uniform(4, 12, outliers)
    return torch.tensor(w).bfloat16().double().numpy()


@cache
def inputs(cols=256, n=512):
    """Return correlated inputs with channels of many sizes, a few of them far larger."""
    random = np.random.default_rng(0)
    directions, _ = np.linalg.qr(random.standard_normal((cols, cols)))
    x = (random.standard_normal((n, cols)) / np.sqrt(np.arange(1, cols + 1))) @ directions.T
    x *= np.exp(0.5 * random.standard_normal(cols))
    x[:, random.choice(cols, 4, replace=False)] *= 10
    return x


def by_gptq(w, x, bits, group, symmetric, in_order=False):
    """Return codes, zero points and scales, (r, c) each, as in the paper, and each column's group, for inputs x.

    ``in_order``: columns of large inputs first (act-order).
    """
    hessian = x.T @ x
    hessian += 0.01 * np.diag(hessian).mean() * np.eye(len(hessian))
    order = np.argsort(-np.diag(hessian)) if in_order else np.arange(len(hessian))
    factor = np.linalg.cholesky(np.linalg.inv(hessian[order][:, order])).T
    left, top = w[:, order].copy(), 2**bits - 1
    codes, zeros, scales = np.zeros((3, *w.shape))
    for col in range(w.shape[1]):
        if col % group == 0:
            part = left[:, col : col + group]
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            if symmetric:
                high = np.maximum(high, -low)
                low = -high
            scale = np.float16((high - low) / top).astype(float)
            scale[scale == 0] = 1  # a group that holds only zeros
            zero = np.full(len(w), (top + 1) / 2) if symmetric else np.round(-low / scale)
        codes[:, col] = np.clip(np.round(left[:, col] / scale) + zero, 0, top)
        zeros[:, col], scales[:, col] = zero, scale
        error = (left[:, col] - (codes[:, col] - zero) * scale) / factor[col, col]
        left[:, col:] -= np.outer(error, factor[col, col:])
    back = np.argsort(order)
    return codes[:, back], zeros[:, back], scales[:, back], (np.arange(w.shape[1]) // group)[back]


def as_gptq(codes, zeros, scales, groups, bits):
    """Return tensors as GPTQModel stores them."""
    first = np.unique(groups, return_index=True)[1]
    return {
        f"{MODULE}.qweight": torch.from_numpy(packing.dense(codes.astype(int), bits).T.copy()),
        f"{MODULE}.qzeros": torch.from_numpy(packing.less_one(zeros[:, first].T.astype(int), bits).copy()),
        f"{MODULE}.scales": torch.from_numpy(scales[:, first].T.astype(np.float16).copy()),
        f"{MODULE}.g_idx": torch.from_numpy(groups.astype(np.int32)),
    }


def report_of(folder, w, stored, config=None, **options):
    return compare(folder, {NAME: torch.from_numpy(w).bfloat16()}, stored, config=config or {}, **options)


def map_findings(report, min_severity="info"):
    severities = ("info", "warning", "error")[("info", "warning", "error").index(min_severity) :]
    return {finding.code: finding for finding in report.findings if finding.severity in severities}


def snr_db(x, y):
    return 10 * np.log10((x**2).sum() / ((y - x) ** 2).sum())


class TestCompensatingErrors:
    """GPTQ improves the outputs while each weight gets worse."""

    @pytest.mark.parametrize("in_order", [False, True])
    @pytest.mark.parametrize("symmetric", [False, True])
    @pytest.mark.parametrize("bits", [2, 3, 4, 8])
    def test_compensating_errors_are_accepted(self, tmp_path, bits, symmetric, in_order):
        w, x = weights(64, 256, bits), inputs()
        codes, zeros, scales, groups = by_gptq(w, x, bits, 64, symmetric, in_order)
        plain = (np.clip(np.round(w / scales) + zeros, 0, 2**bits - 1) - zeros) * scales
        y = (codes - zeros) * scales
        report = report_of(tmp_path, w, as_gptq(codes, zeros, scales, groups, bits), GPTQ)

        assert snr_db(x @ w.T, x @ y.T) > snr_db(x @ w.T, x @ plain.T)
        assert report.layers[0].excess_db == pytest.approx(snr_db(w, plain) - snr_db(w, y), abs=0.5)
        assert {} == map_findings(report, "warning")

    @pytest.mark.parametrize("bits", [3, 8])
    def test_compensating_errors_are_not_an_error_without_a_declared_method(self, tmp_path, bits):
        w, x = weights(64, 256, bits), inputs()
        report = report_of(tmp_path, w, as_gptq(*by_gptq(w, x, bits, 64, True, True), bits))

        assert {} == map_findings(report, "error")

    @pytest.mark.parametrize("share", [0.5, 0.9])
    def test_zeros_of_the_original_follow_no_grid(self, tmp_path, share):
        w = weights(256, 256)
        w[np.random.default_rng(9).random(w.shape) < share] = 0
        report = report_of(tmp_path, w, as_gptq(*by_gptq(w, inputs(), 4, 64, True), 4), GPTQ)

        assert report.layers[0].excess_db > 2
        assert "another_source" not in map_findings(report)

    def test_uncompensated_block_is_reported(self, tmp_path):
        w, x = weights(64, 256), inputs()
        codes, *rest = by_gptq(w, x, 8, 64, True)
        codes[20, 64:128] = codes[20, 127:63:-1]
        finding = map_findings(report_of(tmp_path, w, as_gptq(codes, *rest, 8), GPTQ), "warning")["excess_error"]

        assert [[20, 64]] == finding.evidence["places"]

    @pytest.mark.parametrize(("config", "severity"), [(GPTQ, "warning"), (None, "error")])
    def test_excessive_errors_are_a_warning_where_compensation_is_possible(self, tmp_path, config, severity):
        w, x = weights(64, 256), inputs()
        codes, *rest = by_gptq(w, x, 8, 64, True)
        codes = np.clip(codes + np.random.default_rng(1).integers(-3, 4, codes.shape), 0, 255)
        finding = map_findings(report_of(tmp_path, w, as_gptq(codes, *rest, 8), config))["excess_error"]

        assert severity == finding.severity
        assert finding.evidence["excess_db"] > 8

    @pytest.mark.parametrize(("importance", "is_error"), [(1e-6, False), (1.0, True)])
    def test_errors_count_by_importance(self, tmp_path, importance, is_error):
        w, even = weights(64, 256), np.arange(256) % 2 == 0
        scales = np.abs(w).max(1, keepdims=True) / 127
        codes = np.round(w / scales) + 128
        codes[:, even] += np.random.default_rng(1).integers(-3, 4, codes[:, even].shape)
        stored = as_gptq(np.clip(codes, 0, 255), np.full(w.shape, 128.0), scales + 0 * w, np.zeros(256, int), 8)
        imatrix = tmp_path / "imatrix.dat"
        imatrix.write_bytes(legacy({"blk.0.ffn_up.weight": np.where(even, importance, 1.0)}))
        report = report_of(tmp_path, w, stored, importance=imatrix)

        assert is_error == ("excess_error" in map_findings(report, "error"))


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nibbles(values):
    """Return E2M1 codes of (r, c), two in a byte, the first in the low bits."""
    codes = np.abs(np.abs(values)[..., None] - E2M1).argmin(-1) | np.signbit(values) << 3
    return torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))


def as_mxfp4(w, exponent):
    """Return MXFP4 as ModelOpt and Quark store it, by a rule for exponents."""
    blocks = w.reshape(len(w), -1, 32)
    exponents = exponent(np.abs(blocks).max(2, keepdims=True))
    values = np.clip(blocks / 2.0**exponents, -6, 6).reshape(w.shape)
    return {NAME: nibbles(values), f"{NAME}_scale": torch.from_numpy((exponents[..., 0] + 127).astype(np.uint8))}


def as_nvfp4(w, scale=None):
    """Return NVFP4 as ModelOpt stores it; ``scale`` is the tensor's scale."""
    blocks = w.reshape(len(w), -1, 16)
    scale = scale or np.abs(w).max() / 448 / 6
    scales = torch.from_numpy(np.abs(blocks).max(2) / 6 / scale).to(torch.float8_e4m3fn)
    steps = scales.double().numpy()[..., None] * scale
    values = np.divide(blocks, steps, out=np.zeros_like(blocks), where=steps != 0).clip(-6, 6)
    second = torch.tensor(scale, dtype=torch.float32)
    return {NAME: nibbles(values.reshape(w.shape)), f"{NAME}_scale": scales, f"{NAME}_scale_2": second}


def as_int8(w, scales, offsets=0.5):
    """Return 8-bit codes, rounded up where the remainder is above 1 minus the offsets."""
    codes = np.floor(np.divide(w, scales, out=np.zeros_like(w), where=scales != 0) + offsets).clip(-128, 127)
    return {NAME: torch.from_numpy(codes.astype(np.int8)), f"{NAME}_scale": torch.from_numpy(scales).float()}


SIGNS = np.where(np.random.default_rng(3).random((64, 256)) < 0.5, -1.0, 1.0)


class TestPowersOfTwo:
    @pytest.mark.parametrize("rule", [lambda x: np.floor(np.log2(x)) - 2, lambda x: np.ceil(np.log2(x / 6))])
    @pytest.mark.parametrize(
        "w",
        [
            weights(64, 256),
            0.018 * SIGNS,
            0.0149 + 0 * SIGNS,  # OCP's rule clips these by a fifth
            np.exp(np.random.default_rng(4).standard_normal((64, 1))) * SIGNS,
            np.random.default_rng(5).uniform(-0.0155, 0.0155, (64, 256)),
        ],
        ids=["heavy tails", "two values", "constant", "two values a row", "uniform"],
    )
    def test_power_of_two_scales_are_good_by_any_rule(self, tmp_path, w, rule):
        w = torch.from_numpy(w).bfloat16().double().numpy()

        expected = {"constant_weight"} if w.min() == w.max() else set()

        assert expected == map_findings(report_of(tmp_path, w, as_mxfp4(w, rule))).keys()

    @pytest.mark.parametrize("size", [1e4, 0.7])
    def test_ocp_rule_clips_the_largest_values(self, tmp_path, size):
        """Clipped by a fifth, one value is most of the weight's error, or of its row's."""
        w = weights(128, 256)
        w[[20, 90], 17] = torch.tensor(2.0**13 * 1.9 if size > 1 else 0.95).bfloat16().item()
        report = report_of(tmp_path, w, as_mxfp4(w, lambda x: np.floor(np.log2(x)) - 2))

        assert {} == map_findings(report, "warning")

    @pytest.mark.parametrize("seed", range(4))
    def test_factor_of_a_few_huge_values_is_no_fault(self, tmp_path, seed):
        """OCP's rule clips them by up to a quarter."""
        w, random = weights(1024, 128, seed), np.random.default_rng(seed)
        w.reshape(-1)[random.choice(w.size, 8, replace=False)] = 256 * random.uniform(0.8, 1, 8)
        report = report_of(tmp_path, w, as_mxfp4(w, lambda x: np.floor(np.log2(x)) - 2))

        assert {} == map_findings(report, "warning")

    def test_power_of_two_scales_at_half_size_are_reported(self, tmp_path):
        w = weights(64, 256)
        findings = map_findings(report_of(tmp_path, w, as_mxfp4(w, lambda x: np.floor(np.log2(x)) - 4)))

        assert "larger values are clipped" in findings["scale_loss"].message


class TestZeros:
    def test_original_zeros_may_have_zero_scales(self, tmp_path):
        w = weights(64, 256, outliers=0)  # columns of outliers cause a separate info
        w[10:14] = 0
        stored = as_int8(w, np.abs(w).max(1, keepdims=True) / 127)

        assert {} == map_findings(report_of(tmp_path, w, stored))

    def test_zero_scales_that_lose_values_are_reported(self, tmp_path):
        w = weights(64, 256)
        scales = np.abs(w).max(1, keepdims=True) / 127
        w[10:13], scales[10:14] = 0, 0
        findings = map_findings(report_of(tmp_path, w, as_int8(w, scales)))

        assert 4 == findings["scale_zero"].evidence["scales"]


class TestUnderflow:
    @pytest.mark.parametrize(("rows", "severity"), [(1, "info"), (40, "warning")])
    def test_underflow_next_to_far_larger_rows_is_reported(self, tmp_path, rows, severity):
        w = weights(128, 256)
        w[5 : 5 + rows] *= 1e-6
        (finding,) = report_of(tmp_path, w, as_nvfp4(w)).findings

        assert ("underflow", severity) == (finding.code, finding.severity)
        assert "too small for the scales of nvfp4" in finding.message

    @pytest.mark.parametrize(("rows", "severity"), [(1, "info"), (40, "warning")])
    def test_underflow_of_transposed_experts_is_reported(self, tmp_path, rows, severity):
        w = weights(256, 128)
        w[5 : 5 + rows] *= 1e-6
        codes, scales, scale = as_nvfp4(w).values()
        codes, scales = (part.view(torch.uint8).T.contiguous()[None] for part in (codes, scales))
        name = "model.layers.0.mlp.experts.down_proj"
        stored = {
            name: codes,
            f"{name}_weight_scale": scales.view(torch.float8_e4m3fn),
            f"{name}_weight_scale_2": scale,
        }
        report = compare(tmp_path, {name: torch.from_numpy(w.T[None].copy()).bfloat16()}, stored)
        (finding,) = report.findings

        assert ("nvfp4_experts", "underflow", severity) == (report.layers[0].format, finding.code, finding.severity)

    def test_weights_too_small_for_float16_scales_are_named(self, tmp_path):
        w = 1e-5 * weights(64, 256)
        findings = map_findings(report_of(tmp_path, w, as_gptq(*by_gptq(w, inputs(), 4, 64, True), 4), GPTQ), "warning")

        assert {"underflow"} == findings.keys()
        assert "float16" in findings["underflow"].message

    def test_underflow_does_not_excuse_zero_scales(self, tmp_path):
        """The row has zeros although a scale could have been stored."""
        w = weights(128, 256)
        stored = as_nvfp4(w)
        stored[f"{NAME}_scale"][5] = 0
        stored[NAME][5] = 0
        findings = map_findings(report_of(tmp_path, w, stored), "warning")

        assert "scales are zero: all values are lost" in findings["scale_loss"].message


@pytest.mark.parametrize("make", [np.sign, np.ones_like, lambda w: np.sign(np.round(30 * w))])
@pytest.mark.parametrize("by_row", [False, True])
def test_few_distinct_values_are_exact_in_any_codes(tmp_path, make, by_row):
    sizes = np.exp(np.random.default_rng(6).standard_normal((64, 1))) if by_row else 0.02
    w = torch.from_numpy(make(weights(64, 256)) * sizes).bfloat16().double().numpy()
    report = report_of(tmp_path, w, as_int8(w, np.abs(w).max(1, keepdims=True)))
    finding, *others = report.findings

    assert ("lossless_codes", "info") == (finding.code, finding.severity)
    assert "BitNet" in finding.remedy
    assert (["constant_weight"] if w.min() == w.max() else []) == [other.code for other in others]


def test_rows_of_one_value_are_exact_with_scales_of_rows(tmp_path):
    w = np.linspace(0.01, 0.03, 4096)[:, None]
    report = compare(tmp_path, {NAME: torch.from_numpy(w).float()}, as_int8(w, np.abs(w) / 127))

    assert {} == map_findings(report, "warning")


class TestRandomRounding:
    @pytest.mark.parametrize("heavy", [1, 40])
    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("is_declared", [False, True])
    def test_random_rounding_is_a_warning_unless_it_is_declared(self, tmp_path, heavy, shared, is_declared):
        w = weights(64, 256)
        w[17] *= heavy
        scales = np.abs(w).max(1, keepdims=True) / 127
        scales = scales.max().reshape(1) if shared else scales
        config = {"quantization_config": {"rounding": "stochastic"}} if is_declared else None
        report = report_of(tmp_path, w, as_int8(w, scales, np.random.default_rng(7).random(w.shape)), config)
        finding = map_findings(report)["excess_error"]

        assert ("info" if is_declared else "warning") == finding.severity
        assert {"excess_error"} >= map_findings(report, "warning").keys()
        assert "rounded at random" in finding.message
        assert report.layers[0].excess_db > 2.5

    def test_other_values_are_not_called_truncated(self, tmp_path):
        w = weights(64, 256)
        scales = np.abs(w).max(1, keepdims=True) / 127
        other = w + 0.55 * scales * np.random.default_rng(8).standard_normal(w.shape)
        finding = map_findings(report_of(tmp_path, w, as_int8(other, scales)), "warning")["excess_error"]

        assert 3 < finding.evidence["excess_db"] < 8
        assert "another revision or training step" in finding.remedy

    def test_noise_is_not_excused_by_autoround(self, tmp_path):
        w = weights(64, 256)
        scales = np.abs(w).max(1, keepdims=True) / 127
        other = w + 0.25 * scales * np.random.default_rng(8).standard_normal(w.shape)
        finding = map_findings(report_of(tmp_path, w, as_int8(other, scales), AUTO_ROUND), "warning")["excess_error"]

        assert 1.5 < finding.evidence["excess_db"] < 3

    def test_rounding_always_down_is_reported(self, tmp_path):
        w = weights(64, 256)
        report = report_of(tmp_path, w, as_int8(w, np.abs(w).max(1, keepdims=True) / 127, 0.0))

        assert {"excess_error"} == set(map_findings(report, "warning"))


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.5])
def test_fold_factors_are_known_as_precisely_as_codes_show(tmp_path, spread):
    """AWQ in 3 bits records its factors nowhere but in the codes."""
    up, down = weights(384, 256, 2), weights(256, 384, 3)
    s = np.exp(spread * np.random.default_rng(2).standard_normal(384))
    other = "model.layers.0.mlp.down_proj.weight"
    x = {name: torch.from_numpy(w).bfloat16() for name, w in ((NAME, up), (other, down))}
    report = compare(tmp_path, x, packing.as_ct_pack(NAME, up / s[:, None], 3) | packing.as_ct_pack(other, down * s, 3))

    assert {} == map_findings(report, "warning")


@pytest.mark.parametrize(("share", "rows"), [(0.3, slice(3, 4)), (0.15, slice(None))])
def test_fold_factors_do_not_excuse_noise(tmp_path, share, rows):
    up, down = weights(384, 256, 2), weights(256, 384, 3)
    s = np.exp(0.1 * np.random.default_rng(2).standard_normal(384))
    other = "model.layers.0.mlp.down_proj.weight"
    x = {name: torch.from_numpy(w).bfloat16() for name, w in ((NAME, up), (other, down))}
    sizes = np.sqrt((up**2).mean(1, keepdims=True))
    wrong = up.copy()
    wrong[rows] += (share * sizes * np.random.default_rng(4).standard_normal(up.shape))[rows]
    report = compare(
        tmp_path, x, packing.as_ct_pack(NAME, wrong / s[:, None], 4) | packing.as_ct_pack(other, down * s, 4)
    )

    assert not {"excess_rows", "excess_error"}.isdisjoint(map_findings(report, "warning"))


class TestLearnedCodes:
    """AutoRound takes one of two codes for each value, and learns how far the codes of each group reach."""

    @pytest.mark.parametrize("is_declared", [False, True])
    def test_few_groups_may_reach_half_as_far(self, tmp_path, is_declared):
        w = weights(64, 256)
        scales = (np.abs(w).reshape(64, -1, 32).max(2) / 7.5).astype(np.float16).astype(float).repeat(32, 1)
        for n in range(5):
            scales[11 * n, 64 * (n % 4) : 64 * (n % 4) + 32] /= 2
        codes = np.round(w / scales).clip(-8, 7) + 8
        stored = as_gptq(codes, np.full_like(codes, 8), scales, np.arange(256) // 32, 4)
        report = report_of(tmp_path, w, stored, AUTO_ROUND if is_declared else None)

        assert map_findings(report)["scale_loss"].severity == ("info" if is_declared else "warning")
        assert {"scale_loss"} >= map_findings(report, "warning").keys()

    def test_codes_that_ignore_the_value_are_not_excused_as_learned(self, tmp_path):
        w = weights(64, 256)
        either = np.random.default_rng(7).integers(0, 2, w.shape)
        report = report_of(tmp_path, w, as_int8(w, np.abs(w).max(1, keepdims=True) / 127, either), AUTO_ROUND)

        assert "excess_error" in map_findings(report, "warning")


class TestNearestCodes:
    """Outliers leave the other values few codes, and no factor explains the rounding error."""

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("group", [32, 256])
    def test_nearest_two_bit_codes_are_not_an_error(self, tmp_path, group, seed):
        w = weights(64, 256, seed)
        w[:, 40 * seed] *= 20

        assert {} == map_findings(report_of(tmp_path, w, packing.as_ct_pack(NAME, w, 2, group)), "warning")

    @pytest.mark.parametrize("bits", [2, 3, 4])
    def test_compensated_outlier_column_is_not_an_error(self, tmp_path, bits):
        w = weights(64, 256)
        w[:, 17] *= 30
        report = report_of(tmp_path, w, as_gptq(*by_gptq(w, inputs(), bits, 256, True), bits))

        assert {} == map_findings(report, "error")


class TestMassiveValue:
    """Beside a single massive value, all others have far more error than the weight as a whole."""

    @pytest.mark.parametrize("size", [100, 1e4])
    def test_massive_value_does_not_make_other_rows_worse(self, tmp_path, size):
        w = weights(64, 256)
        w[21, 17] = size
        report = report_of(tmp_path, w, as_gptq(*by_gptq(w, inputs(), 4, 64, True), 4), GPTQ)

        assert {} == map_findings(report, "warning")

    def test_column_with_a_massive_value_needs_no_factor(self, tmp_path):
        w = weights(64, 256)
        w[21, 17] = torch.tensor(1e4).bfloat16().item()

        assert {} == map_findings(report_of(tmp_path, w, as_mlx(w, 8), MLX), "warning")

    def test_damaged_rows_beside_a_massive_value_are_reported(self, tmp_path):
        w = weights(64, 256)
        w[21, 17] = 1e4
        codes, *rest = by_gptq(w, inputs(), 8, 64, True)
        codes[40] = codes[41]

        assert map_findings(report_of(tmp_path, w, as_gptq(codes, *rest, 8), GPTQ), "warning")


def as_mlx(w, bits):
    """Return MLX tensors, whose biases are rounded to BF16 after the codes were made."""
    blocks = w.reshape(len(w), -1, 64)
    low, high = blocks.min(2, keepdims=True), blocks.max(2, keepdims=True)
    scales = (high - low) / (2**bits - 1)
    codes = np.round((blocks - low) / scales).astype(int).reshape(w.shape)
    return {
        f"{MODULE}.weight": torch.from_numpy(packing.dense(codes, bits).view(np.uint32)),
        f"{MODULE}.scales": torch.from_numpy(scales[..., 0]).bfloat16(),
        f"{MODULE}.biases": torch.from_numpy(low[..., 0]).bfloat16(),
    }


class TestRoundedAfterwards:
    """Biases or scales that are rounded after the codes cost little in some parts; severity depends on the size."""

    def test_scales_rounded_afterwards_are_accepted(self, tmp_path):
        w = weights(64, 256)

        assert {} == map_findings(report_of(tmp_path, w, as_mlx(w, 8), MLX), "warning")

    def test_rows_from_neighbours_are_reported(self, tmp_path):
        w = weights(1024, 256, sizes=0.1)
        stored = as_mlx(w, 8)
        for key in stored:
            stored[key][100:104] = stored[key][101:105].clone()
        findings = map_findings(report_of(tmp_path, w, stored, MLX), "warning")

        assert "excess_rows" in findings
