import json
import re
import struct

import ml_dtypes
import numpy as np
import pytest
import torch
from support.golden_files import (
    CASES,
    FILES,
    NUMBERS,
    agree,
    expected_of,
    formats_of,
    origin_of,
    tolerance_of,
    values_of,
)
from support.making import (
    ALL_ROWS,
    FP8,
    NEW_LIBRARY,
    chunk_of,
    compare,
    fp8_codes,
    header,
    int8_codes,
    label,
    numbers,
    open_pairing,
    read_whole,
    same_bits,
    store,
)

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.formats import FORMATS
from quanterr.pairing.model import Bucket
from quanterr.tensors.chunks import Chunk, Cut
from quanterr.tensors.workspace import Workspace

pytestmark = pytest.mark.session

CPU = torch.device("cpu")


every_case = pytest.mark.parametrize("case", CASES, ids=lambda path: f"{path.parent.name}/{path.stem}")


def test_golden_folders_and_format_rows_are_the_same_set():
    assert {format.name for format in FORMATS} == {case.parent.name for case in CASES}


def test_format_names_are_unique():
    names = [format.name for format in FORMATS]

    assert sorted(set(names)) == sorted(names)


def test_golden_files_and_their_expected_values_correspond():
    stored = {path.name for path in FILES}

    assert {name for case in CASES for name in (case.name, expected_of(case).name)} == stored


@every_case
class TestEveryGoldenCase:
    def test_golden_case_is_recognized_with_its_format_and_shapes(self, case):
        origin = origin_of(case)
        with open_pairing(expected_of(case), case) as plan:
            formats = {pair.name: pair.quantized.format for pair in plan.pairs}
            shapes = {pair.name: pair.quantized.shape for pair in plan.pairs}
            left = {leftover.bucket for leftover in plan.leftovers}

        assert {"producer", "how"} <= origin.keys()
        assert all(origin.values())
        assert formats_of(case) == formats
        assert {name: tuple(tensor.shape) for name, tensor in values_of(case).items()} == shapes
        assert left <= {Bucket.CONSUMED}

    def test_golden_case_equals_its_producer_values(self, case):
        values, tolerance = values_of(case), tolerance_of(case)
        finite = [name for name, tensor in values.items() if bool(tensor.isfinite().all())]
        report = quanterr.compare(expected_of(case), case, device="cpu")
        if tolerance:
            assert all(y.max_absolute_error <= tolerance * values[y.layer_name].abs().max() for y in report.layers)
            return

        assert dict.fromkeys(finite, case.parent.name) == {y.layer_name: y.format for y in report.lossless}
        assert {0.0} >= {y.max_absolute_error for y in (*report.layers, *report.other_changes)}
        assert report.not_compared == []


@pytest.mark.parametrize("case", NUMBERS, ids=lambda path: f"{path.parent.name}/{path.stem}")
class TestEveryNumericGoldenCase:
    def test_golden_case_dequantizes_as_its_producer_does_in_any_cut(self, case):
        expected = values_of(case)
        with open_pairing(expected_of(case), case) as plan:
            for pair in plan.pairs:
                weight, whole = pair.quantized, read_whole(pair.quantized)
                cols = weight.matrix[1]
                # elements of a chunk: a few rows, many rows, a piece of a row
                sizes = {3 * cols + 1, 50 * cols, max(cols - 1, 1)}

                assert agree(case, expected[pair.name].view(weight.matrix), whole), pair.name
                assert all(same_bits(whole, read_whole(weight, size)) for size in sizes), pair.name

    def test_row_pieces_do_not_depend_on_their_start(self, case):
        workspace = Workspace()
        with open_pairing(expected_of(case), case) as plan:
            for pair in plan.pairs:
                rows, cols = pair.quantized.matrix
                whole = read_whole(pair.quantized)
                for row in {0, rows - 1}:
                    for piece in reversed(Cut(1, cols, max(7, cols // 16 | 1))):
                        chunk = Chunk(row, row + 1, piece.col, piece.stop_col)
                        actual = chunk_of(pair.quantized, chunk, workspace)

                        assert same_bits(whole[row : row + 1, piece.col : piece.stop_col], actual), chunk


FP8_NUMPY = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2}


def plan_scaled(folder, codes, scale=None, name="weight_scale"):
    """Plan a comparison in which ``a.weight`` has these codes and this scale."""
    tensors = {"a.weight": codes} if scale is None else {"a.weight": codes, f"a.{name}": scale}
    return open_pairing(
        store(folder / "original.safetensors", {"a.weight": torch.zeros(codes.shape)}),
        store(folder / "quantized.safetensors", tensors),
    )


class TestAllCodes:
    @pytest.mark.parametrize("dtype", FP8_NUMPY)
    @pytest.mark.parametrize("shape", [(16, 16), (1, 256), (256, 1), (256,)])
    def test_fp8_codes_equal_ml_dtypes(self, tmp_path, dtype, shape):
        codes = np.arange(256, dtype=np.uint8).reshape(shape)
        expected = torch.from_numpy(codes.view(FP8_NUMPY[dtype]).astype(np.float32))
        with plan_scaled(tmp_path, torch.from_numpy(codes).view(dtype)) as plan:
            weight = plan.pairs[0].quantized
            actual = read_whole(weight)

        assert same_bits(expected.view(weight.matrix), actual)

    @pytest.mark.parametrize("dtype", FP8_NUMPY)
    def test_fp8_codes_decode_the_same_singly(self, tmp_path, dtype):
        codes = np.arange(256, dtype=np.uint8).reshape(256, 1)
        expected = torch.from_numpy(codes.view(FP8_NUMPY[dtype]).astype(np.float32))
        with plan_scaled(tmp_path, torch.from_numpy(codes).view(dtype)) as plan:
            actual = read_whole(plan.pairs[0].quantized, 1)

        assert same_bits(expected, actual)

    @pytest.mark.parametrize("dtype", [*filter(None, [getattr(torch, "float8_e8m0fnu", None)]), torch.uint8])
    def test_e8m0_scales_equal_ml_dtypes(self, tmp_path, dtype):
        exponents = np.arange(256, dtype=np.uint8).reshape(256, 1)
        expected = torch.from_numpy(exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
        scale = torch.from_numpy(exponents).view(dtype)
        with plan_scaled(tmp_path, torch.ones(256, 1).to(FP8), scale, "weight_scale_inv") as plan:
            actual = read_whole(plan.pairs[0].quantized)

        assert same_bits(expected, actual)

    @pytest.mark.parametrize("scale", [1.0, 0.1, 3e-5, 1e36, 1e38, 3e38, 1e-38, 1e-42, 1e-45, -0.3, 0.0])
    @pytest.mark.parametrize("dtype", [*FP8_NUMPY, torch.int8])
    @pytest.mark.parametrize("shape", [(1,), (8, 1), (8, 4)])
    def test_codes_times_a_scale_are_rounded_once(self, tmp_path, dtype, scale, shape):
        codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = codes.view(FP8_NUMPY.get(dtype, np.int8)).astype(np.float32) * np.float32(scale)
        with plan_scaled(tmp_path, torch.from_numpy(codes).view(dtype), torch.full(shape, scale)) as plan:
            actual = read_whole(plan.pairs[0].quantized)

        assert same_bits(torch.from_numpy(expected), actual)

    @pytest.mark.parametrize(
        ("dtype", "numpy_dtype"), [(torch.bfloat16, ml_dtypes.bfloat16), (torch.float16, np.float16)]
    )
    def test_sixteen_bit_codes_equal_numpy(self, tmp_path, dtype, numpy_dtype):
        codes = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
        expected = torch.from_numpy(codes.view(numpy_dtype).astype(np.float32))
        with plan_scaled(tmp_path, torch.from_numpy(codes.view(np.int16)).view(dtype)) as plan:
            actual = read_whole(plan.pairs[0].quantized)

        assert same_bits(expected, actual)


def counts_of(folder, codes):
    """Return how many codes of a weight are at the end of their range, by chunk."""
    with plan_scaled(folder, codes, ONE) as plan, torch.inference_mode():
        weight, workspace = plan.pairs[0].quantized, Workspace()
        return [int(weight.dequantize(chunk, workspace).saturated) for chunk in Cut(*weight.matrix, ALL_ROWS)]


class TestSaturated:
    @pytest.mark.parametrize(
        ("dtype", "ends"),
        [
            (torch.float8_e4m3fn, {0x7E, 0xFE}),
            (torch.float8_e5m2, {0x7B, 0xFB}),
            (torch.int8, {0x7F, 0x80, 0x81}),
        ],
    )
    def test_saturated_codes_are_at_the_end_of_the_range(self, tmp_path, dtype, ends):
        codes = torch.arange(256, dtype=torch.uint8).view(256, 1).view(dtype)
        with plan_scaled(tmp_path, codes, ONE) as plan, torch.inference_mode():
            weight, workspace = plan.pairs[0].quantized, Workspace()
            chunks = [Chunk(row, row + 1, 0, 1) for row in range(256)]
            alone = {chunk.row for chunk in chunks if int(weight.dequantize(chunk, workspace).saturated)}

        assert ends == alone

    @pytest.mark.parametrize("n", [1, 7, 8, 1023, 1024, 1025, 2039, 2040, 2041, 4080, 100_003])
    @pytest.mark.parametrize(
        ("dtype", "code", "counts"),
        [
            (torch.int8, 126, False),
            (torch.int8, 127, True),
            (torch.int8, -127, True),
            (torch.int8, -128, True),
            (torch.float8_e4m3fn, 0x7D, False),
            (torch.float8_e4m3fn, 0x7E, True),
            (torch.float8_e4m3fn, 0x7F, False),
            (torch.float8_e5m2, 0x7A, False),
            (torch.float8_e5m2, 0x7B, True),
            (torch.float8_e5m2, 0x7C, False),
        ],
    )
    def test_saturated_codes_are_all_counted(self, tmp_path, n, dtype, code, counts):
        codes = torch.full((1, n), code, dtype=torch.int8).view(dtype)
        expected = [n if counts else 0]

        assert expected == counts_of(tmp_path, codes)


def read_refusal(folder, quantized, metadata=None, config=None, shape=None):
    """Return why the weight ``a.weight`` is not read."""
    shape = shape or tuple(quantized["a.weight"].shape)
    original = store(folder / "original.safetensors", {"a.weight": torch.zeros(shape), "b.weight": numbers(2, 32)})
    quantized = {"b.weight": numbers(2, 32), **quantized}
    path = folder / ("quantized" if config else "quantized.safetensors")
    with open_pairing(original, store(path, quantized, metadata, config)) as plan:
        leftovers = [left for left in plan.leftovers if left.name == "a.weight" and left.side == "quantized"]

        assert [pair.name for pair in plan.pairs] == ["b.weight"]
    assert [left.bucket in (Bucket.ERROR, Bucket.UNSUPPORTED) for left in leftovers] == [True]
    return leftovers[0].reason


CODES, INT8 = fp8_codes(4, 40), int8_codes(4, 40)
ONE = torch.tensor(0.01)

NARROW = torch.ones(2, 3, 16, dtype=torch.int8)
REFUSED = {
    "a missing scale of int8": (
        {"a.weight": INT8},
        "its scale is missing: I8 codes, but none of a.weight_scale",
    ),
    "a label and no scale": (
        {"a.weight": INT8, "a.comfy_quant": label(format="int8_tensorwise")},
        "its scale is missing: I8 codes, but none of a.weight_scale",
    ),
    "a missing scale among scaled weights": (
        {"a.weight": CODES, "c.weight": CODES, "c.weight_scale": ONE},
        "its scale is missing: another weight of this checkpoint has one (c.weight_scale)",
    ),
    "an unused second scale": (
        {"a.weight": CODES, "a.weight_scale": ONE, "a.weight_scale_2": ONE},
        "unused: a.weight_scale_2",
    ),
    "an unused zero point": (
        {"a.weight": CODES, "a.weight_scale": ONE, "a.weight_zero_point": torch.zeros(4, 1)},
        "unused: a.weight_zero_point",
    ),
    "zero points with a float dtype": (
        {"a.weight": INT8, "a.weight_scale": ONE, "a.weight_zero_point": torch.zeros(4, 1)},
        "its zero_point a.weight_zero_point (F32 [4, 1]) should be one of I8",
    ),
    "an unused input smoothing": (
        {"a.weight": CODES, "a.weight_scale": ONE, "a.pre_quant_scale": torch.ones(40)},
        "unused: a.pre_quant_scale",
    ),
    "an unused sibling of a plain cast": (
        {"a.weight": CODES, "a.weight_absmax": ONE},
        "stored as fp8_cast (F8_E4M3), but unused: a.weight_absmax",
    ),
    "an unused scale of plain numbers": (
        {"a.weight": numbers(4, 40), "a.weight_scale": torch.tensor(2.0)},
        "stored as dense (BF16), but unused: a.weight_scale; its producer computed scales but left the weight",
    ),
    "a scale with an unknown shape": (
        {"a.weight": fp8_codes(192, 320), "a.weight_scale": torch.ones(5, 3)},
        "scale a.weight_scale (F32 [5, 3]) fits no known layout for a weight of shape [192, 320]",
    ),
    "a scale a column": (
        {"a.weight": CODES, "a.weight_scale": torch.ones(40)},
        "scale a.weight_scale (F32 [40]) fits no known layout",
    ),
    "more scales than rows": (
        {"a.weight": CODES, "a.weight_scale": torch.ones(5, 1)},
        "scale a.weight_scale (F32 [5, 1]) fits no known layout",
    ),
    "a scale of too many dimensions": (
        {"a.weight": CODES, "a.weight_scale": torch.ones(4, 1, 1, 2)},
        "scale a.weight_scale (F32 [4, 1, 1, 2]) fits no known layout",
    ),
    "many scales for a vector": (
        {"a.weight": fp8_codes(40), "a.weight_scale": torch.ones(40)},
        "scale a.weight_scale (F32 [40]) fits no known layout",
    ),
    "a scale of float64": (
        {"a.weight": CODES, "a.weight_scale": ONE.double()},
        "its scale a.weight_scale (F64 []) should be one of BF16, F16, F32",
    ),
    "a scale of integers": (
        {"a.weight": INT8, "a.weight_scale": torch.tensor([3], dtype=torch.int32)},
        "its scale a.weight_scale (I32 [1]) should be one of BF16, F16, F32",
    ),
    "exponents as the scale of int8": (
        {"a.weight": INT8, "a.weight_scale": torch.full((4, 1), 120, dtype=torch.uint8)},
        "its scale a.weight_scale (U8 [4, 1]) does not fit a.weight (I8 [4, 40])",
    ),
    "two scales": (
        {"a.weight": CODES, "a.weight_scale": ONE, "a.scale_weight": ONE},
        "two tensors could be its scale: a.weight_scale (F32 []) and a.scale_weight (F32 [])",
    ),
    "an unknown label": (
        {"a.weight": CODES, "a.weight_scale": ONE, "a.comfy_quant": label(format="float7_sideways")},
        "comfy_quant tensor declares float7_sideways, but the codes are F8_E4M3",
    ),
    "a label of FP8 on bytes": (
        {"a.weight": torch.zeros(4, 40, dtype=torch.uint8), "a.comfy_quant": label(format="nvfp4")},
        "comfy_quant tensor declares nvfp4",
    ),
    "narrow experts with zero points": (
        {"a.weight": NARROW, "a.weight_scale": torch.ones(2, 3, 1), "a.weight_zero_point": NARROW[..., :1]},
        "a.weight (I8 [2, 3, 16]): experts with fewer than 32 columns are not supported",
    ),
    "narrow experts of bitsandbytes": (
        {"a.weight": NARROW, "a.SCB": torch.ones(2, 3)},
        "its SCB a.SCB (F32 [2, 3]) should have one number for each row of a.weight (I8 [2, 3, 16])",
    ),
    "an unsupported layout": (
        {"a.weight": torch.zeros(4, 40, dtype=torch.float8_e4m3fnuz), "a.weight_scale": ONE},
        "a.weight (F8_E4M3FNUZ [4, 40]) is in a layout that this version does not support",
    ),
}  # fmt: skip


class TestRefused:
    @pytest.mark.parametrize(("quantized", "says"), REFUSED.values(), ids=REFUSED)
    def test_unsupported_layout_is_refused(self, tmp_path, quantized, says):
        if "FNUZ" in says and not NEW_LIBRARY:
            pytest.skip("this safetensors does not write F8_E4M3FNUZ")
        reason = read_refusal(tmp_path, quantized)

        assert says in reason
        assert reason.count("(") == reason.count(")")

    def test_header_for_packed_codes_is_refused(self, tmp_path):
        tensors = {"a.weight": int8_codes(4, 40), "a.weight_scale": ONE}
        reason = read_refusal(tmp_path, tensors, header({"a": {"format": "svdquant_w4a4"}}))

        assert "header declares svdquant_w4a4, but the codes are I8" in reason

    def test_configuration_with_dividing_scales_is_refused(self, tmp_path):
        config = {"quantization_config": {"quant_method": "fp8", "weight_scale_semantics": "inverse"}}
        original = store(tmp_path / "original.safetensors", {"a.weight": torch.zeros(4, 40)})
        quantized = store(tmp_path / "quantized", {"a.weight": CODES, "a.weight_scale": ONE}, config=config)
        with open_pairing(original, quantized) as plan:
            pairs, reasons = plan.pairs, [left.reason for left in plan.leftovers if left.name == "a.weight"]

        assert pairs == []
        assert ["dividing scales" in reason for reason in reasons] == [True, True]

    def test_missing_scale_mentioned_in_config_json_is_refused(self, tmp_path):
        config = {"quantization_config": {"quant_method": "fp8"}}
        reason = read_refusal(tmp_path, {"a.weight": CODES}, config=config)

        assert "its scale is missing: config.json declares quant_method fp8" in reason

    def test_ambiguous_expert_scale_is_refused(self, tmp_path):
        original = store(tmp_path / "original.safetensors", {"experts.up": torch.zeros(3, 40, 40)})
        quantized = {"experts.up": fp8_codes(3, 40, 40), "experts.up_scale": torch.ones(3, 40)}
        with open_pairing(original, store(tmp_path / "quantized.safetensors", quantized)) as plan:
            reasons = {left.reason for left in plan.leftovers}

            assert plan.pairs == []
        assert {
            "scale experts.up_scale (F32 [3, 40]) fits no known layout for a weight of shape [3, 40, 40]"
        } == reasons


BLOCKS = [
    # shape, scale, config.json, group_size of a label, block_size
    ((140, 136), (2, 2), None, None, (128, 128)),
    ((140, 136), (2, 2), (128, 128), None, (128, 128)),
    ((140, 140), (2, 2), (70, 70), None, (70, 70)),
    ((140, 140), (2, 2), None, 70, (70, 70)),
    # One program writes label and codes together, so the label wins.
    ((140, 140), (2, 2), (128, 128), 70, (70, 70)),
    ((140, 136), (2, 2), (64, 64), None, (128, 128)),  # the label contradicts the scales and is ignored
    # The label is impossible, so the edges that divide the weight are taken.
    ((140, 136), (2, 2), None, 1, (70, 68)),
    ((384, 192), (3, 2), None, 96, (128, 96)),  # the label names the shorter edge of a block
    ((576, 48), (5, 1), None, None, (128, 48)),
    ((576, 48), (5, 1), (128, 128), None, (128, 128)),
    ((576, 200), (5, 2), None, None, (128, 128)),
    ((192, 136), (2, 2), None, None, (128, 128)),  # and not 96 × 68: blocks are square
    ((90, 50), (9, 5), None, None, (10, 10)),
    ((128, 96), (2, 3), None, None, (64, 32)),
    ((9, 96), (9, 3), None, None, (1, 32)),
    ((9, 70), (9, 5), None, None, (1, 14)),  # groups of columns divide the row
    ((9, 70), (9, 3), (1, 30), None, (1, 30)),
    ((9, 70), (9, 5), (1, 16), None, (1, 16)),
    ((70, 9), (3, 9), None, None, (32, 1)),
    ((192, 320), (4, 4), (128, 128), None, (128, 128)),  # padded for a parallel layout
    ((256, 300), (2, 4), (128, 128), None, (128, 128)),
]  # fmt: skip


class TestBlocks:
    @pytest.mark.parametrize(("shape", "grid", "config", "group_size", "edges"), BLOCKS)
    @pytest.mark.parametrize("dtype", ["fp8", "int8"])
    def test_block_edges_follow_labels_or_shapes(self, tmp_path, dtype, shape, grid, config, group_size, edges):
        codes = fp8_codes(*shape) if dtype == "fp8" else int8_codes(*shape)
        scale = 0.5 + torch.rand(grid, generator=torch.Generator().manual_seed(1))
        tensors = {"a.weight": codes, "a.weight_scale": scale}
        if group_size:
            format = "float8_e4m3fn_blockwise" if dtype == "fp8" else "int8_blockwise"
            tensors["a.comfy_quant"] = label(format=format, group_size=group_size)
        config_json = {"quantization_config": {"weight_block_size": config}} if config else None
        path = tmp_path / ("quantized" if config_json else "quantized.safetensors")
        repeated = scale.numpy().repeat(edges[0], 0).repeat(edges[1], 1)[: shape[0], : shape[1]]
        plain = codes.float().numpy() * repeated
        with open_pairing(
            store(tmp_path / "original.safetensors", {"a.weight": torch.zeros(shape)}),
            store(path, tensors, config=config_json),
        ) as plan:
            weight = plan.pairs[0].quantized
            actual = read_whole(weight)

        assert (f"{dtype}_block", edges) == (weight.format, weight.block_size)
        assert same_bits(torch.from_numpy(plain), actual)

    def test_impossible_block_size_is_reported(self, tmp_path):
        original = store(tmp_path / "original.safetensors", {"a.weight": torch.zeros(140, 136)})
        tensors = {"a.weight": fp8_codes(140, 136), "a.weight_scale": torch.ones(2, 2)}
        config = {"quantization_config": {"weight_block_size": [64, 64]}}
        with open_pairing(original, store(tmp_path / "quantized", tensors, config=config)) as plan:
            (doubt,) = plan.pairs[0].quantized.warnings

        assert "config.json declares blocks of 64 × 64, but the scale's shape implies 128 × 128, which is used" == doubt

    @pytest.mark.parametrize("edge", [14, 16])
    def test_group_edges_are_chosen_by_the_original(self, tmp_path, edge):
        x = numbers(9, 70).float() * torch.logspace(-2, 2, 70)
        groups = torch.nn.functional.pad(x, (0, 5 * edge - 70)).view(9, 5, edge)
        scale = groups.abs().amax(2) / 127
        codes = (groups / scale.unsqueeze(2)).round().to(torch.int8).view(9, -1)[:, :70].contiguous()
        report = compare(tmp_path, {"a.weight": x}, {"a.weight": codes, "a.weight_scale": scale})

        assert [(1, edge)] == [layer.block_size for layer in report.layers]
        assert report.layers[0].snr_db > 35

    @pytest.mark.parametrize(
        ("shape", "grid", "fitting"),
        [
            ((192, 192), (2, 2), ("128 × 128", "96 × 96")),
            ((96, 96), (2, 3), ("64 × 32", "48 × 32")),
            ((90, 36), (9, 3), ("10 × 16", "10 × 12")),
        ],
    )
    def test_blocks_are_refused_where_two_edges_fit_as_well(self, tmp_path, shape, grid, fitting):
        reason = read_refusal(tmp_path, {"a.weight": fp8_codes(*shape), "a.weight_scale": torch.ones(grid)})

        assert "a.weight_scale" in reason
        assert all(edges in reason for edges in fitting)

    def test_ambiguous_block_edges_follow_the_other_weights(self, tmp_path):
        shapes = {"a": (192, 192), "b": (300, 260), "c": (260, 128)}
        grids = {"a": (2, 2), "b": (3, 3), "c": (3, 1)}
        original = {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
        quantized = {f"{name}.weight": fp8_codes(*shape) for name, shape in shapes.items()}
        quantized |= {f"{name}.weight_scale": torch.ones(grid) for name, grid in grids.items()}
        with open_pairing(
            store(tmp_path / "original.safetensors", original),
            store(tmp_path / "quantized.safetensors", quantized),
        ) as plan:
            block_sizes = {pair.name: pair.quantized.block_size for pair in plan.pairs}

        assert dict.fromkeys(original, (128, 128)) == block_sizes

    @pytest.mark.parametrize("scale", [(40,), (40, 1)])
    @pytest.mark.parametrize("codes", [fp8_codes(40, 40), int8_codes(40, 40)], ids=["fp8", "int8"])
    def test_square_weight_with_a_scale_per_row_has_rows(self, tmp_path, codes, scale):
        scales = torch.arange(1.0, 41.0)
        with open_pairing(
            store(tmp_path / "original.safetensors", {"a.weight": torch.zeros(40, 40)}),
            store(tmp_path / "quantized.safetensors", {"a.weight": codes, "a.weight_scale": scales.view(scale)}),
        ) as plan:
            weight = plan.pairs[0].quantized
            actual = read_whole(weight)

        assert weight.format.endswith("_row")
        assert weight.block_size is None
        assert same_bits(codes.float() * scales[:, None], actual)

    def test_wrong_label_does_not_turn_rows_into_blocks(self, tmp_path):
        scales = torch.arange(1.0, 25.0)
        codes = fp8_codes(24, 40)
        labels = label(format="float8_e4m3fn_blockwise", group_size=64)
        with open_pairing(
            store(tmp_path / "original.safetensors", {"a.weight": torch.zeros(24, 40)}),
            store(
                tmp_path / "quantized.safetensors",
                {"a.weight": codes, "a.weight_scale": scales, "a.comfy_quant": labels},
            ),
        ) as plan:
            weight = plan.pairs[0].quantized
            actual = read_whole(weight)

        assert weight.format == "fp8_row"
        assert weight.comfy_format == "float8_e4m3fn_blockwise"
        assert same_bits(codes.float() * scales[:, None], actual)


@pytest.mark.parametrize("cols", [1, 2, 16, 31, 32, 33])
@pytest.mark.parametrize(
    ("scale", "over"),
    [((3,), (3, 1, 1)), ((3, 1, 1), (3, 1, 1)), ((3, 5, 1), (3, 5, 1)), ((3, 5), (3, 5, 1))],
)
def test_experts_with_any_width_are_read_correctly_or_refused(tmp_path, cols, scale, over):
    codes = fp8_codes(3, 5, cols)
    scales = torch.arange(1.0, 1.0 + np.prod(scale)).view(scale)
    tensors = {"experts.up": codes, "experts.up_scale": scales}
    with open_pairing(
        store(tmp_path / "original.safetensors", {"experts.up": torch.zeros(3, 5, cols)}),
        store(tmp_path / "quantized.safetensors", tensors),
    ) as plan:
        read = [read_whole(pair.quantized).view(3, 5, cols) for pair in plan.pairs]
        refused = {left.bucket for left in plan.leftovers}

    assert all(same_bits(codes.float() * scales.view(over), actual) for actual in read)
    assert bool(read) != bool(refused)


PLAIN_LABELS = ["float8_e4m3fn", "float8_e4m3fn_rowwise", "int8_tensorwise", "int8_blockwise", "mxfp8", "nvfp4"]


def doubts_of(report):
    """Return the doubts about how a weight was read."""
    return [finding.message for finding in report.findings if finding.code == "ambiguous_layout"]


class TestContradictoryLabels:
    """The stored tensors decide. The contradiction is a warning, as some runtimes obey the label."""

    @pytest.mark.parametrize("where", ["comfy_quant tensor", "header"])
    @pytest.mark.parametrize("format", PLAIN_LABELS)
    @pytest.mark.parametrize("codes", [CODES, INT8], ids=["fp8", "int8"])
    def test_label_for_another_plain_layout_is_reported(self, tmp_path, codes, format, where):
        tensors = {"a.weight": codes, "a.weight_scale": ONE}
        if where != "header":
            tensors["a.comfy_quant"] = label(format=format)
        metadata = header({"a": {"format": format}}) if where == "header" else None
        report = compare(tmp_path, {"a.weight": codes.float() * ONE}, tensors, metadata)
        stored_type = "int8" if codes.dtype == torch.int8 else "float8"
        stored = {torch.int8: "I8", FP8: "F8_E4M3"}[codes.dtype]
        message = f"a.weight: {where} declares {format}, but the codes are {stored} [4, 40]: read as stored"

        assert [layer.layer_name for layer in report.lossless] == ["a.weight"]
        assert ([] if format.startswith(stored_type) else [message]) == doubts_of(report)

    @pytest.mark.parametrize(
        ("format", "scale", "says"),
        [
            ("float8_e4m3fn", (4,), "labelled float8_e4m3fn, but its scale a.weight_scale (F32 [4]) is one per row"),
            ("float8_e4m3fn_blockwise", (4, 1), "is one per row"),
            ("float8_e4m3fn", (4, 2, 1), "is one per block"),
            ("float8_e4m3fn_rowwise", (2, 2), "is one per block"),
            ("int8_blockwise", (4, 1), "labelled int8_blockwise, but its scale a.weight_scale (F32 [4, 1])"),
            ("float8_e4m3fn_rowwise", (4,), None),
            ("float8_e4m3fn_blockwise", (2, 2), None),
            ("float8_e4m3fn_blockwise", (1,), None),  # one block covers the whole weight
            ("float8_e4m3fn_block3d", (4, 2, 1), None),
            ("int8_tensorwise", (4, 1), None),
            ("int8_lodewise", (4, 2), None),
        ],
    )
    def test_label_for_another_granularity_is_reported(self, tmp_path, format, scale, says):
        codes = int8_codes(4, 64) if format.startswith("int8") else fp8_codes(4, 64)
        tensors = {"a.weight": codes, "a.weight_scale": torch.ones(scale), "a.comfy_quant": label(format=format)}
        report = compare(tmp_path, {"a.weight": codes.float()}, tensors)
        doubts = doubts_of(report)

        assert [layer.layer_name for layer in report.lossless] == ["a.weight"]
        assert doubts == [] if says is None else says in doubts[0]

    @pytest.mark.parametrize(
        ("tensor", "in_header", "disagree"),
        [
            ({"convrot": True}, {"convrot": True, "convrot_groupsize": 256}, False),
            ({"convrot": True, "convrot_groupsize": 64}, {"convrot": True}, True),
            ({"convrot": True, "convrot_groupsize": 64}, {"convrot": True, "convrot_groupsize": 16}, True),
            ({"convrot": True, "convrot_groupsize": 64}, {}, True),
            ({}, {"convrot_groupsize": 64}, False),
            ({}, {"convrot": False}, False),
            ({"group_size": 64}, {"group_size": 128}, True),
            ({"format": "int8_tensorwise"}, {"format": "int8_blockwise"}, True),
        ],
        ids=str,
    )
    def test_contradictory_labels_are_reported(self, tmp_path, tensor, in_header, disagree):
        codes, usual = int8_codes(4, 256), {"format": "int8_tensorwise"}
        tensors = {"a.weight": codes, "a.weight_scale": ONE, "a.comfy_quant": label(**usual | tensor)}
        report = compare(tmp_path, {"a.weight": codes.float()}, tensors, header({"a": usual | in_header}))
        messages = [f.message for f in report.findings if "labels disagree" in f.message]

        assert disagree == bool(messages)
        assert all("but ComfyUI follows the header" in message for message in messages)

    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
    def test_label_for_a_known_but_unsupported_layout_is_refused(self, tmp_path, dtype):
        tensors = {"a.weight": torch.zeros(4, 20, dtype=dtype), "a.weight_scale": ONE}
        reason = read_refusal(tmp_path, tensors | {"a.comfy_quant": label(format="int8_block32")}, shape=(4, 40))

        assert "comfy_quant tensor declares int8_block32: an unsupported layout; " in reason
        assert "quantize again as int8_blockwise" in reason

    @pytest.mark.parametrize(
        ("settings", "tensors", "says"),
        [
            ({"use_codebook": True}, {}, "are not codes and the values that they stand for"),
            ({"use_codebook_scale": True}, {}, "SDNQ with use_codebook_scale True is not supported"),
            (
                {"use_codebook": True},
                {"a.scale": torch.ones(4, 16)},
                "declares int4, but a.scale (F32 [4, 16]) has a value for each of 16 codes",
            ),
            (
                {"use_codebook": True, "weights_dtype": "uint4"},
                {"a.scale": torch.ones(3, 16)},
                "a.weight (U8 [80]) does not hold 3 rows in 1 groups",
            ),
            ({"weights_dtype": "uint9"}, {}, "config.json declares weights_dtype uint9"),
            ({"weights_dtype": "int5"}, {}, "config.json declares int5, but "),
            ({}, {"a.scale_2": ONE}, "its scales are quantized as well"),
        ],
    )
    def test_unsupported_sdnq_settings_are_refused(self, tmp_path, settings, tensors, says):
        config = {"quantization_config": {"quant_method": "sdnq", "weights_dtype": "int4"} | settings}
        stored = {"a.weight": torch.zeros(80, dtype=torch.uint8), "a.scale": torch.ones(4, 1)}

        assert says in read_refusal(tmp_path, stored | tensors, config=config, shape=(4, 40))


class TestAllZeroLayers:
    """convert_to_quant stores ones of shape [M // 64, N // 64] with zeros, even where that is empty."""

    @pytest.mark.parametrize("scale", [(0, 1), (0, 0), (5, 7, 2), (7,)])
    @pytest.mark.parametrize("fields", [{}, {"convrot": True, "convrot_groupsize": 4}], ids=str)
    def test_zero_layer_with_a_misfitting_scale_is_read_as_zeros_and_reported(self, tmp_path, scale, fields):
        original = {"a.weight": torch.zeros(41, 100)}
        tensors = {"a.weight": torch.zeros(41, 100, dtype=torch.int8), "a.weight_scale": torch.ones(scale)}
        tensors["a.comfy_quant"] = label(format="int8_tensorwise", **fields)
        report = compare(tmp_path, original, tensors)
        doubts = [message for message in doubts_of(report) if "fits no known layout: read as zeros" in message]

        assert [layer.layer_name for layer in report.lossless] == ["a.weight"]
        assert report.verdict == "pass"
        assert len(doubts) == 1

    @pytest.mark.parametrize("place", [0, 4099, (1 << 20) + 3])
    def test_misfitting_scale_is_refused_where_a_code_is_not_zero(self, tmp_path, place):
        codes = torch.zeros(1025, 1025, dtype=torch.int8)
        codes.view(-1)[place] = 1
        reason = read_refusal(tmp_path, {"a.weight": codes, "a.weight_scale": torch.ones(0, 1)})

        assert "scale a.weight_scale (F32 [0, 1]) fits no known layout for a weight of shape [1025, 1025]" in reason


def test_codes_and_scales_may_lie_at_odd_offsets(tmp_path):
    codes, scale = fp8_codes(5, 7), torch.arange(1.0, 6.0)
    parts = {
        "odd": ("U8", [3], bytes(3)),
        "a.weight": ("F8_E4M3", [5, 7], bytes(codes.view(torch.uint8).flatten().tolist())),
        "a.weight_scale": ("F32", [5], scale.numpy().tobytes()),
    }
    entries, data = {}, b""
    for name, (dtype, shape, raw) in parts.items():
        offsets = [len(data), len(data) + len(raw)]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    packed = json.dumps(entries).encode()
    quantized = tmp_path / "quantized.safetensors"
    quantized.write_bytes(struct.pack("<Q", len(packed)) + packed + data)
    tensors = {"a.weight": torch.zeros(5, 7), "odd": torch.zeros(3, dtype=torch.uint8)}
    with open_pairing(store(tmp_path / "original.safetensors", tensors), quantized) as plan:
        values = {pair.name: read_whole(pair.quantized, 3) for pair in plan.pairs}

    assert same_bits(codes.float() * scale[:, None], values["a.weight"])


def test_workspace_serves_weights_with_different_sizes_and_formats(tmp_path):
    tensors, plain = {}, {}
    for n, (rows, cols) in enumerate([(3, 500), (1, 7), (200, 33), (2, 2), (64, 64)]):
        codes = fp8_codes(rows, cols, seed=n) if n % 2 else int8_codes(rows, cols, seed=n)
        scale = torch.rand(rows, generator=torch.Generator().manual_seed(n))
        tensors |= {f"{n}.weight": codes, f"{n}.weight_scale": scale, f"{n}.bias": numbers(cols, seed=n)}
        plain |= {
            f"{n}.weight": codes.float() * scale[:, None],
            f"{n}.bias": numbers(1, cols, seed=n).float(),
        }
    original = {name: torch.zeros(tensors[name].shape) for name in plain}
    workspace = Workspace()
    with open_pairing(
        store(tmp_path / "original.safetensors", original), store(tmp_path / "quantized.safetensors", tensors)
    ) as plan:
        for _ in range(2):
            for pair in plan.pairs:
                chunk = Cut(*pair.quantized.matrix, ALL_ROWS)[0]

                assert same_bits(plain[pair.name], chunk_of(pair.quantized, chunk, workspace)), pair.name


def test_overwritten_part_is_read_again(tmp_path):
    path = store(tmp_path / "x.safetensors", {"a": torch.arange(4.0), "b": torch.arange(4.0, 8.0)})
    workspace = Workspace()
    with open_checkpoint(path) as checkpoint:
        a, b = checkpoint.entries["a"], checkpoint.entries["b"]
        workspace.read_whole("part", a)
        workspace.read("part", b, 0, (4,))

        assert workspace.read_whole("part", a).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
def test_label_may_name_the_other_fp8_type(tmp_path, dtype):
    """ComfyUI declares every layer of an old scaled_fp8 file float8_e4m3fn, even where e5m2 is stored."""
    codes = fp8_codes(4, 40, dtype=dtype)
    tensors = {"a.weight": codes, "a.weight_scale": ONE, "a.comfy_quant": label(format="float8_e4m3fn")}
    with open_pairing(
        store(tmp_path / "original.safetensors", {"a.weight": torch.zeros(4, 40)}),
        store(tmp_path / "quantized.safetensors", tensors),
    ) as plan:
        weight = plan.pairs[0].quantized
        actual = read_whole(weight)

    assert same_bits(codes.float() * ONE, actual)
    assert (dtype == torch.float8_e5m2) == ("but the codes are F8_E5M2 [4, 40]" in " ".join(weight.warnings))


@pytest.mark.parametrize("fields", [{"format": "float8_e4m3fn"}, {"format": "nvfp4"}, {"convrot": True}], ids=str)
def test_label_on_plain_numbers_is_reported(tmp_path, fields):
    """The label means codes, but the tensor holds numbers: a runtime that obeys the label reads something else."""
    x = numbers(4, 32)
    report = compare(tmp_path, {"a.weight": x}, {"a.weight": x, "a.comfy_quant": label(**fields)})
    messages = [f.message for f in report.findings if f.severity == "warning" and "stored as BF16" in f.message]

    assert [layer.layer_name for layer in report.lossless] == ["a.weight"]
    assert len(messages) == 1


def test_every_reference_names_a_commit_or_a_release():
    without_producer = {"dense", "verbatim", "fp8_cast"}
    dated = re.compile(r"Reference:.*?(@\w|\d\.\d)", re.DOTALL)

    assert without_producer == {row.name for row in FORMATS if not dated.search(row.specification)}
