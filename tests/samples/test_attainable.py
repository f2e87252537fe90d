"""The SNR that a weight's stored scales allow, from a sample of its rows."""

import json
import math
import re
from itertools import product

import pytest
import torch
from mutation import unusual
from safetensors.torch import save_file
from support.making import config_of, finish, label, numbers, store

import quanterr
from quanterr.findings import make_finding
from quanterr.findings.merging import merge_excess
from quanterr.formats.shared.convrot import rotate
from quanterr.recipes.tensors import quantize_tensor
from quanterr.samples.measuring import SampleMeasurer
from quanterr.samples.native import prepare_sample
from quanterr.samples.rows import MAX_ROW_COLUMNS, RUN, RUNS, sample_chunks
from quanterr.tensors.workspace import Workspace

NAME = "model.layers.0.mlp.up_proj.weight"


def by_row(x, bits=8, scale=1.0):
    """Return codes and scales by plain rounding, with one scale per row."""
    unit = x.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1) * scale
    return (x / unit).round().clamp(-128, 127).to(torch.int8), unit


def spread_db(n):
    """Return four standard errors of the ratio of two sums of n squared uniform errors: var(e²) = 0.8 mean²."""
    return 4 * 10 / math.log(10) * math.sqrt(2 * 0.8 / n)


def report_of(folder, x, codes, unit):
    save_file({NAME: x}, folder / "x.safetensors")
    save_file({NAME: codes, f"{NAME}_scale": unit}, folder / "y.safetensors")
    return quanterr.compare(folder / "x.safetensors", folder / "y.safetensors", device="cpu")


def findings_by_code(report):
    return {finding.code: finding for finding in report.findings}


@pytest.fixture
def x():
    return numbers(64, 256, seed=3).float()


class TestOneWeight:
    def test_plain_rounding_is_as_good_as_its_scales_allow(self, tmp_path, x):
        layer = report_of(tmp_path, x, *by_row(x)).layers[0]

        assert (0.0, 0.0, 0.0) == (layer.excess_db, layer.off_code_pct, layer.clipped_pct)
        assert layer.attainable_snr_db == pytest.approx(layer.snr_db, abs=1e-6)

    def test_attainable_snr_equals_the_nearest_codes(self, tmp_path, x):
        codes, unit = by_row(x)
        best = codes.double() * unit.double() - x.double()
        noisy = (codes.int() + torch.randint(-3, 4, codes.shape, generator=torch.Generator().manual_seed(1))).clamp(
            -128, 127
        )
        layer = report_of(tmp_path, x, noisy.to(torch.int8), unit).layers[0]
        expected = 10 * math.log10(float(x.double().square().sum() / best.square().sum()))

        assert layer.attainable_snr_db == pytest.approx(expected, abs=1e-4)
        assert layer.excess_db == pytest.approx(expected - layer.snr_db, abs=1e-4)
        assert layer.off_code_pct == pytest.approx(100 * float(((noisy - codes.int()).abs() > 1).double().mean()))

    def test_negative_scales_with_matching_codes_are_accepted(self, tmp_path, x):
        codes, unit = by_row(x)
        signs = torch.where(torch.arange(64)[:, None] % 2 == 0, 1, -1)
        right = report_of(tmp_path, x, codes * signs.to(torch.int8), unit * signs)
        wrong = report_of(tmp_path, x, codes, unit * signs)

        assert (0.0, []) == (right.layers[0].excess_db, right.findings)
        assert "scale_negative" in findings_by_code(wrong)

    @pytest.mark.parametrize("scale", ["row", "tensor"])
    def test_column_that_dominates_the_scales_is_named(self, tmp_path, x, scale):
        x[:, 17] = 60 * x.std() * torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)
        unit = x.abs().amax(1, keepdim=True) / 127
        unit = unit if scale == "row" else unit.amax().view(1)
        report = report_of(tmp_path, x, (x / unit).round().to(torch.int8), unit)
        finding = findings_by_code(report)["outlier_column"]
        rest = x.clone()
        rest[:, 17] = 0
        finer = rest.abs().amax(1, keepdim=True) / 127 if scale == "row" else rest.abs().amax() / 127
        e = (rest / finer).round() * finer - rest
        true = 10 * math.log10(float(rest.square().sum() / e.square().sum()))

        assert ("info", 17) == (finding.severity, finding.evidence["column"])
        assert finding.evidence["snr_db_without"] == pytest.approx(true, abs=spread_db(x.numel()))
        assert "pass" == report.verdict

    @pytest.mark.parametrize("scale", ["row", "tensor"])
    def test_all_columns_that_dominate_the_scales_are_named(self, tmp_path, x, scale):
        x = torch.cat([x, x, x, x], dim=1)
        x[:, [17, 40, 300]] *= 40
        unit = x.abs().amax(1, keepdim=True) / 127
        unit = unit if scale == "row" else unit.amax().view(1)
        finding = findings_by_code(report_of(tmp_path, x, (x / unit).round().to(torch.int8), unit))["outlier_column"]
        rest = x.clone()
        rest[:, [17, 40, 300]] = 0
        finer = rest.abs().amax(1, keepdim=True) / 127 if scale == "row" else rest.abs().amax() / 127
        e = (rest / finer).round() * finer - rest
        true = 10 * math.log10(float(rest.square().sum() / e.square().sum()))

        assert [17, 40, 300] == finding.evidence["columns"]
        assert finding.evidence["snr_db_without"] == pytest.approx(true, abs=spread_db(x.numel()))

    @pytest.mark.parametrize(("rows", "share"), [(448, 0.57), (256, 0.33)])
    def test_outlier_columns_in_one_fused_part_are_named(self, tmp_path, rows, share):
        """Rows of the MLP follow those of q, k and v in one weight, so the first rows do not have its outliers."""
        x = numbers(784 if share > 0.5 else 768, 1024).float()
        columns = [5, 99, 300, 301, 640, 1000]
        x[-rows:, columns] *= 40
        finding = findings_by_code(report_of(tmp_path, x, *by_row(x)))["outlier_column"]

        assert columns == finding.evidence["columns"]
        first, last = re.search(r"between rows (\d+) and (\d+)", finding.message).groups()
        step = len(x) // 32  # rows are read at 32 places
        assert 0 <= int(first) - (len(x) - rows) < step
        assert 0 <= len(x) - 1 - int(last) < step

    def test_weight_without_outliers_names_no_column(self, tmp_path, x):
        assert "outlier_column" not in findings_by_code(report_of(tmp_path, x, *by_row(x, bits=4)))

    def test_clipped_values_exceed_the_range_by_more_than_half_a_step(self, tmp_path, x):
        codes, unit = by_row(x, scale=0.5)
        report = report_of(tmp_path, x, codes, unit)
        expected = 100 * float(((x / unit > 127.5) | (x / unit < -128.5)).double().mean())

        assert report.layers[0].clipped_pct == pytest.approx(expected)
        assert "larger values are clipped" in findings_by_code(report)["scale_loss"].message
        assert 0.0 == report.layers[0].excess_db

    def test_eight_bits_at_thirteen_decibels_are_an_error(self, tmp_path, x):
        codes, unit = by_row(x, bits=4, scale=1.0)
        report = report_of(tmp_path, x, (codes.int() * 18).to(torch.int8), unit / 18)
        finding = findings_by_code(report)["excess_error"]

        assert ("error", "inconclusive") == (finding.severity, report.verdict)
        assert finding.evidence["excess_db"] > 8

    def test_truncation_costs_six_decibels_and_is_a_warning(self, tmp_path, x):
        unit = x.abs().amax(1, keepdim=True) / 127
        report = report_of(tmp_path, x, (x / unit).trunc().to(torch.int8), unit)
        finding = findings_by_code(report)["excess_error"]

        assert "warning" == finding.severity
        assert finding.evidence["excess_db"] == pytest.approx(6, abs=0.3)
        assert "one of the two next to its value: truncated" in finding.message

    def test_digits_do_not_depend_on_threads(self, tmp_path, monkeypatch):
        wide = numbers(2048, 512, seed=5).float()
        codes, unit = by_row(wide)
        codes[5] += 3
        results = set()
        for cores in (1, 2, 3):
            monkeypatch.setattr("quanterr.comparison.devices.usable_cores", lambda n=cores: n)
            layer = report_of(tmp_path, wide, codes, unit).layers[0]
            results.add((layer.attainable_snr_db, layer.excess_db, layer.off_code_pct))

        assert 1 == len(results)

    def test_codebook_has_no_attainable_snr(self, tmp_path):
        report = quanterr.compare(
            "tests/golden/aqlm/aqlm_synthetic.expected.safetensors",
            "tests/golden/aqlm/aqlm_synthetic.safetensors",
            device="cpu",
        )

        assert {None} >= {layer.excess_db for layer in report.layers}


class TestParts:
    def test_zero_columns_are_an_error(self, tmp_path, x):
        codes, unit = by_row(x)
        codes[:, 252:] = 0
        finding = findings_by_code(report_of(tmp_path, x, codes, unit))["excess_error"]

        assert "error" == finding.severity
        assert "4 sampled columns (252 to 255)" in finding.message
        assert "all zero" in finding.message

    def test_row_with_an_excessive_scale_is_named(self, tmp_path, x):
        codes, unit = by_row(x, 4)
        unit[9] *= 1.3
        finding = findings_by_code(report_of(tmp_path, x, codes, unit))["excess_rows"]

        assert "1 sampled row (9)" in finding.message
        assert "1.28 times the original's" in finding.message

    def test_scales_that_fit_each_value_allow_exact_values(self, tmp_path, x):
        codes, unit = by_row(x)
        exact = codes * unit
        codes[9] = codes[9].flip(0)
        finding = findings_by_code(report_of(tmp_path, exact, codes, unit))["excess_rows"]

        assert "their scales allow exact values" in finding.message

    def test_damaged_block_in_a_row_is_named(self, tmp_path, x):
        codes, unit = by_row(x)
        codes[20, 64:128] += 1
        finding = findings_by_code(report_of(tmp_path, x, codes, unit))["excess_blocks"]

        assert "1 block of 64 columns, the worst at row 20, columns 64 to 127" in finding.message

    def test_bad_row_outside_the_sample_is_found(self, tmp_path):
        large = numbers(1024, 256, seed=4).float()
        codes, unit = by_row(large)
        row = next(n for n in range(300, 1024) if not any(c.row <= n < c.stop_row for c in sample_chunks((1024, 256))))
        codes[row] += 5
        finding = findings_by_code(report_of(tmp_path, large, codes, unit))["excess_rows"]

        assert f"({row})" in finding.message

    def test_zero_rows_are_all_counted(self, tmp_path):
        large = numbers(1024, 256, seed=4).float()
        codes, unit = by_row(large)
        codes[::10] = 0
        finding = findings_by_code(report_of(tmp_path, large, codes, unit))["dead_rows"]

        assert 103 == finding.evidence["number"]
        assert "103 rows of zeros" in finding.message


class TestCleared:
    """Unusual but correct weights cause no error, and no warning about a scale."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda x: x.sign() * 0.02,
            lambda x: torch.full_like(x, 0.3),
            lambda x: x**3,
            lambda x: x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) < 0.05),
            lambda x: x * 1e-7,
            lambda x: x * 1e7,
            lambda x: torch.where(torch.arange(256) == 17, 300.0, 1.0) * x,
        ],
        ids=["ternary", "constant", "heavy tails", "sparse", "tiny", "huge", "outlier column"],
    )
    @pytest.mark.parametrize("bits", [2, 3, 4, 8])
    def test_unusual_but_correct_weight_passes(self, tmp_path, x, make, bits):
        unusual = make(x)
        report = report_of(tmp_path, unusual, *by_row(unusual, bits))

        assert [] == [finding.message for finding in report.findings if finding.severity == "error"]
        assert "scale_factor" not in findings_by_code(report)
        assert "pass" == report.verdict

    @pytest.mark.parametrize("values", ["positive", "very sparse"])
    def test_ternary_weights_need_no_smaller_scale_for_their_fourth_value(self, tmp_path, values):
        report = unusual.compare(unusual.KINDS[values](), tmp_path, None, "TQ2_0")

        assert [] == [finding.message for finding in report.findings if finding.severity != "info"]

    @pytest.mark.parametrize("ggml_type", unusual.TYPES)
    def test_values_flushed_to_zero_by_gguf_are_reported(self, tmp_path, ggml_type):
        """The finding is a warning if some coarse values remain."""
        report = unusual.compare(unusual.KINDS["very tiny"](), tmp_path, None, ggml_type)
        (finding,) = report.findings
        is_gone = report.layers[0].snr_db < 3

        assert "underflow" == finding.code
        assert (("inconclusive", "error") if is_gone else ("pass", "warning")) == (report.verdict, finding.severity)
        assert is_gone or ggml_type == "Q8_0"

    @pytest.mark.parametrize("name", ["ternary", "signs", "constant"])
    @pytest.mark.parametrize("format_name", ["MXFP8", "CT INT4 32", "CT INT4 128"])
    def test_few_distinct_values_pass(self, tmp_path, name, format_name):
        x = unusual.KINDS[name]()

        assert "pass" == unusual.compare(x, tmp_path, unusual.FORMATS[format_name](x), "").verdict

    @pytest.mark.parametrize("shape", [(4, 4), (4, 8), (1, 64)])
    def test_small_weight_passes(self, tmp_path, shape):
        small = numbers(*shape, seed=8).float()

        assert "pass" == report_of(tmp_path, small, *by_row(small, 3)).verdict

    def test_excessive_scales_are_not_excused(self, tmp_path):
        x = numbers(64, 256, seed=3).float()
        codes, unit = by_row(x, 2)
        report = report_of(tmp_path, x, codes.sign(), 100 * unit)

        assert "inconclusive" == report.verdict

    def test_good_sample_does_not_clear_a_bad_weight(self, tmp_path):
        large = numbers(4096, 64, seed=4).float()
        codes, unit = by_row(large)
        inside = {n for c in sample_chunks((4096, 64)) for n in range(c.row, c.stop_row)}
        for row in range(4096):
            if row not in inside:
                codes[row] = codes[row].flip(0)
        report = report_of(tmp_path, large, codes, unit)

        assert "inconclusive" == report.verdict


def test_sample_is_chosen_by_index():
    chunks = sample_chunks((4096, 512))

    assert RUNS == len(chunks)
    assert {RUN} == {chunk.stop_row - chunk.row for chunk in chunks}
    assert (0, 4096) == (chunks[0].row, chunks[-1].stop_row)
    assert 1 == len(sample_chunks((64, 256)))
    assert [] == sample_chunks((0, 8))


def test_every_layer_in_a_report_has_the_attainable_numbers(tmp_path, x):
    report = json.loads(report_of(tmp_path, x, *by_row(x)).to_json())

    assert {"attainable_snr_db", "excess_db", "off_code_pct", "clipped_pct"} <= report["layers"][0].keys()


def test_many_similar_findings_become_one():
    many = [make_finding("clipped", "warning", f"w{n}", f"w{n}: clipped", clipped_pct=n) for n in range(9)]
    (finding,) = merge_excess(many)

    assert ("clipped", None, 9) == (finding.code, finding.layer, len(finding.evidence["layers"]))


@pytest.mark.parametrize("code", ["excess_error", "excess_rows"])
def test_infinite_value_is_the_worst_among_many(code):
    numbers = [1.0, None, 3.0, 2.0]
    many = [make_finding(code, "info", f"w{n}", f"w{n}", excess_db=v, worst_snr_db=v) for n, v in enumerate(numbers)]

    assert "4 weights; the worst: w1" == merge_excess(many)[0].message


class TestTooGood:
    def test_original_made_from_the_codes_is_a_warning(self, tmp_path):
        x = numbers(64, 256, seed=3).float()
        codes, unit = by_row(x)
        finding = findings_by_code(report_of(tmp_path, (codes * unit).bfloat16().float(), codes, unit))[
            "lossless_codes"
        ]

        assert ("warning", [NAME]) == (finding.severity, finding.evidence["layers"])

    def test_exact_weight_among_rounded_ones_is_a_warning(self, tmp_path):
        x = {f"layers.{n}.mlp.up_proj.weight": numbers(64, 256, seed=n).float() for n in range(2)}
        y = {}
        for name, weight in x.items():
            y[name], y[f"{name}_scale"] = by_row(weight)
        first = next(iter(x))
        x[first] = y[first] * y[f"{first}_scale"]
        save_file(x, tmp_path / "x.safetensors")
        save_file(y, tmp_path / "y.safetensors")
        report = quanterr.compare(tmp_path / "x.safetensors", tmp_path / "y.safetensors", device="cpu")

        assert [first] == findings_by_code(report)["lossless_codes"].evidence["layers"]

    @pytest.mark.parametrize("values", [3, 17])
    def test_few_distinct_values_are_exact_in_many_formats(self, tmp_path, values):
        x = (numbers(64, 256, seed=3).float() * values).round().clamp(-(values // 2), values // 2)

        findings = findings_by_code(report_of(tmp_path, x, *by_row(x)))

        assert "lossless_codes" not in findings or "layers" not in findings["lossless_codes"].evidence

    def test_sparse_weights_are_not_called_lossless(self, tmp_path):
        x = numbers(64, 256, seed=3).float()
        x *= torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) < 0.03

        assert "lossless_codes" not in findings_by_code(report_of(tmp_path, x, *by_row(x)))


class TestExperts:
    """Experts of one layer correlate at 0.9."""

    def compare(self, tmp_path, order):
        base = numbers(64, 256, seed=1).float()
        x = {
            f"model.layers.0.mlp.experts.{n}.up_proj.weight": 0.9 * base + 0.436 * numbers(64, 256, seed=10 + n).float()
            for n in range(4)
        }
        names, y = list(x), {}
        for name, other in zip(names, order, strict=True):
            y[name], y[f"{name}_scale"] = by_row(x[names[other]])
        save_file(x, tmp_path / "x.safetensors")
        save_file(y, tmp_path / "y.safetensors")
        return names, quanterr.compare(tmp_path / "x.safetensors", tmp_path / "y.safetensors", device="cpu")

    @pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 0, 2, 3)], ids=["exchanged", "doubled"])
    def test_swapped_experts_are_named(self, tmp_path, order):
        names, report = self.compare(tmp_path, order)
        swapped = {
            finding.layer: finding.evidence["weight"] for finding in report.findings if finding.code == "swapped_weight"
        }

        assert {names[n]: names[other] for n, other in enumerate(order) if n != other} == swapped
        assert "inconclusive" == report.verdict

    def test_experts_in_their_own_places_pass(self, tmp_path):
        _, report = self.compare(tmp_path, (0, 1, 2, 3))

        assert "pass" == report.verdict
        assert [] == [finding.message for finding in report.findings if finding.severity != "info"]


def test_row_wider_than_a_sample_is_taken_in_pieces(tmp_path):
    wide = numbers(64, MAX_ROW_COLUMNS * 3 // 2, seed=5).float()
    chunks = sample_chunks(tuple(wide.shape))

    assert {(0, MAX_ROW_COLUMNS), (MAX_ROW_COLUMNS, wide.shape[1])} == {(chunk.col, chunk.stop_col) for chunk in chunks}
    codes, unit = by_row(wide)
    assert {1} == {chunk.stop_row - chunk.row for chunk in chunks}
    codes[:, MAX_ROW_COLUMNS + 64 : MAX_ROW_COLUMNS + 128] = codes[
        :, MAX_ROW_COLUMNS + 64 : MAX_ROW_COLUMNS + 128
    ].flip(1)
    report = report_of(tmp_path, wide, codes, unit)

    assert report.layers[0].attainable_snr_db == pytest.approx(40, abs=1)
    assert (
        f"columns {MAX_ROW_COLUMNS + 64} to {MAX_ROW_COLUMNS + 127}" in findings_by_code(report)["excess_error"].message
    )


@pytest.mark.parametrize("ggml_type", ["Q8_0", "Q5_1"])
@pytest.mark.parametrize("name", ["sizes of rows", "sizes of columns"])
def test_rest_under_scales_too_small_for_float16_needs_no_warning(tmp_path, name, ggml_type):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    ggml_type = gguf.GGMLQuantizationType[ggml_type]
    x = unusual.KINDS[name]()
    save_file({"model.layers.0.mlp.up_proj.weight": x}, tmp_path / "x.safetensors")
    writer = gguf.GGUFWriter(str(tmp_path / "q.gguf"), "llama")
    writer.add_tensor("blk.0.ffn_up.weight", gguf.quantize(x.numpy(), ggml_type), raw_dtype=ggml_type)
    finish(writer)
    findings = quanterr.compare(tmp_path / "x.safetensors", tmp_path / "q.gguf").findings

    assert not [finding for finding in findings if finding.severity != "info"]


@pytest.mark.usefixtures("compiled_kernel")
class TestKernelMeasuresSamples:
    """The kernel measures samples without defects, and torch all others; both must find the same."""

    @pytest.mark.session
    @pytest.mark.parametrize(("along", "cols"), [("rows", 128), ("columns", 128), ("columns", 300)])
    def test_kernel_finds_the_same_as_torch(self, tmp_path, monkeypatch, along, cols):
        """Each row or each column has a scale; some of 300 rows are sampled."""
        turned = (lambda matrix: matrix.t().contiguous()) if along == "columns" else torch.clone
        changes = {
            "sound": lambda codes, unit: (codes, unit),
            "large": lambda codes, unit: (codes, 2.9 * unit),
            "clipped": lambda codes, unit: (codes, 0.7 * unit),
            "no_scale": lambda codes, unit: (codes, unit * (torch.arange(64)[:, None] != 9)),
            "powers": lambda codes, unit: (codes, 2.0 ** unit.log2().ceil()),
            "moved": lambda codes, unit: (codes.roll(1, 1), unit),
            "negative": lambda codes, unit: (-codes, -unit),
            "few_bits": lambda codes, unit: (codes.div(127 / 7).round(), unit * (127 / 7)),
            "one_scale": lambda codes, unit: (codes, unit.amax()),
            "one_large": lambda codes, unit: (codes, 3 * unit.amax()),
        }
        x, y = {}, {}
        for case, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
            # Every change twice, so that each weight has two different neighbours
            for n, name in enumerate((*changes, *changes)):
                values = numbers(64, cols, seed=n).float()
                unit = values.abs().amax(1, keepdim=True) / (127 if case == "int8" else 448)
                stored = (values / unit).round().to(torch.int8) if case == "int8" else (values / unit).to(dtype).float()
                codes, scale = changes[name](stored, unit)
                x[f"{case}.{n}.weight"] = turned(values)
                y |= {f"{case}.{n}.weight": turned(codes.to(dtype)), f"{case}.{n}.weight_scale": turned(scale)}
        save_file(x, tmp_path / "x.safetensors")
        save_file(y, tmp_path / "y.safetensors")
        files = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
        by_torch, *others = self.reports(monkeypatch, *files, from_values=along == "rows")

        assert len({layer.scale_loss_db for layer in by_torch.layers}) > len(changes)
        for by_kernel in others:
            self.check_equal(by_kernel, by_torch, cols)
            assert [finding.code for finding in by_kernel.findings] == [finding.code for finding in by_torch.findings]

    @pytest.mark.session
    @pytest.mark.parametrize(
        ("recipe", "rows"),
        [
            *((name, 64) for name in ("nvfp4", "mxfp4", "int4_g32 moved", "mlx_q4_g64", "nf4", "nf4:double moved")),
            *((name, 300) for name in ("nvfp4 moved", "int4_g32", "nf4")),  # more rows than a sample has
        ],
    )
    def test_kernel_and_torch_find_the_same_damage(self, tmp_path, monkeypatch, recipe, rows):
        """Codes and scales of groups are shifted by a row or column, zero, or have other bits, also off the sample.

        As by GPTQ, many ``moved`` codes are not the nearest.
        """
        recipe, _, moved = recipe.partition(" ")
        damages = {
            "none": lambda raw: None,
            "zero": lambda raw: raw[5:25].zero_(),
            "bits": lambda raw: raw[::97].bitwise_xor_(0x44),
            "byte": lambda raw: raw[333:334].fill_(0x77),
            "moved": lambda raw: raw.copy_(raw.roll(64)),
            "later": lambda raw: raw.copy_(raw.roll(1)),
            "beside": lambda raw: raw[len(raw) // 4 : len(raw) // 4 + 20].zero_(),
        }
        x, y = {}, {}
        for n, (part, damage) in enumerate(product(range(2), damages.values())):
            x[f"{n}.weight"] = values = numbers(rows, 128, seed=n).float()
            if moved:
                values = values + values.std() * 0.15 * numbers(rows, 128, seed=n + 99).float() / values.abs().amax()
            stored = quantize_tensor(values, recipe)
            damage(list(stored.values())[part].view(-1).view(torch.uint8))
            y |= {f"{n}.{name}": tensor.clone() for name, tensor in stored.items()}
        save_file(x, tmp_path / "x.safetensors")
        quantized = store(tmp_path / "y", y, config=config_of(recipe))
        findings_by_code = [
            [(finding.code, finding.layer) for finding in report.findings]
            for report in self.reports(monkeypatch, tmp_path / "x.safetensors", quantized)
        ]

        assert findings_by_code[1:] == findings_by_code[:1] * 2

    def test_kernel_finds_scale_losses_outside_the_sample(self, tmp_path, monkeypatch):
        """Codes have a single zero point, and so does the good scale derived for them."""
        x, y = {}, {}
        for n, factor in enumerate((1.0, 2.5)):
            x[f"{n}.weight"] = values = numbers(300, 128, seed=n).float()
            scale = values.view(300, 4, 32).abs().amax(2) / 7
            scale[100, 1:] *= factor
            codes = (values.view(300, 4, 32) / scale[:, :, None]).round().int().view(300, 16, 8) + 8
            y[f"{n}.weight_packed"] = sum(codes[:, :, place] << 4 * place for place in range(8)).int()
            y |= {f"{n}.weight_scale": scale, f"{n}.weight_shape": torch.tensor([300, 128])}
        save_file(x, tmp_path / "x.safetensors")
        quantized = store(tmp_path / "y", y, config=config_of("int4_g32"))
        findings_by_code = [
            [(finding.code, finding.layer, finding.message) for finding in report.findings]
            for report in self.reports(monkeypatch, tmp_path / "x.safetensors", quantized, all_sound=True)
        ]

        assert ["scale_loss"] == [code for code, *_ in findings_by_code[0]]
        assert findings_by_code[1:] == findings_by_code[:1] * 2

    @pytest.mark.session
    @pytest.mark.parametrize("size", [64, 256])
    def test_kernel_rotates_columns_first(self, tmp_path, monkeypatch, size):
        x, y = {}, {}
        for n, name in enumerate(("sound", "moved", "sampled")):
            values = numbers(300 if name == "sampled" else 64, 256, seed=n).float()
            x[f"{name}.weight"] = values
            turned = rotate(size, values.clone(), Workspace(torch.device("cpu")))
            unit = turned.abs().amax(1, keepdim=True) / 127
            codes = (turned / unit).round().to(torch.int8)
            declared = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": size}
            y[f"{name}.weight"] = codes.roll(1, 1) if name == "moved" else codes
            y |= {f"{name}.weight_scale": unit, f"{name}.comfy_quant": label(**declared)}
        save_file(x, tmp_path / "x.safetensors")
        save_file(y, tmp_path / "y.safetensors")
        by_torch, *others = self.reports(monkeypatch, tmp_path / "x.safetensors", tmp_path / "y.safetensors")

        for by_kernel in others:
            self.check_equal(by_kernel, by_torch, 256)
            assert [finding.code for finding in by_kernel.findings] == [finding.code for finding in by_torch.findings]

    def reports(self, monkeypatch, *files, all_sound=False, from_values=True):
        """Return reports with samples measured by torch, by the kernel during the run, and from their values."""
        measured, finish = [], SampleMeasurer._finish_plain

        def finish_measured(measurer, sample):
            measured.append(finish(measurer, sample))
            return measured[-1]

        with monkeypatch.context() as patch:
            patch.setattr(SampleMeasurer, "_finish_plain", lambda *_: None)
            reports_by_kernel = [quanterr.compare(*files, device="cpu")]
        monkeypatch.setattr(SampleMeasurer, "_finish_plain", finish_measured)
        for prepare in (prepare_sample, lambda *_: None) if from_values else (prepare_sample,):
            measured.clear()
            monkeypatch.setattr("quanterr.samples.kept_rows.prepare_sample", prepare)
            reports_by_kernel.append(quanterr.compare(*files, device="cpu"))
            assert any(measured)
            assert all(measured) == all_sound
        return reports_by_kernel

    def check_equal(self, report, other, cols):
        close = 2 * (cols + 8) * 2**-24 * 10 / math.log(10)  # dB: two float32 sums of a row, each rounded thrice
        for layer, other_layer in zip(report.layers, other.layers, strict=True):
            for name in ("attainable_snr_db", "excess_db", "scale_loss_db", "off_code_pct", "clipped_pct"):
                assert getattr(layer, name) == pytest.approx(getattr(other_layer, name), rel=0, abs=close), (
                    layer.layer_name,
                    name,
                )


def test_ternary_code_with_a_fourth_value_is_reported(tmp_path, x):
    """BitNet's codes are 0, 1 and 2; a 3 in place of each 2 doubles the value 1."""
    scale = x.abs().mean()
    codes = (x / scale).round().clamp(-1, 1).to(torch.uint8) + 1
    planes = torch.where(codes == 2, 3, codes).view(4, 16, 256)
    save_file({NAME: x}, tmp_path / "x.safetensors")
    packed = planes[0] | planes[1] << 2 | planes[2] << 4 | planes[3] << 6
    save_file({NAME: packed, f"{NAME}_scale": 1 / scale.view(1)}, tmp_path / "y.safetensors")
    findings = findings_by_code(quanterr.compare(tmp_path / "x.safetensors", tmp_path / "y.safetensors", device="cpu"))

    assert "excess_error" in findings
