"""Packed integers: every layout compared with numpy, the choice between layouts, and refusals."""

import numpy as np
import pytest
import torch
from support import packing
from support.making import chunk_of, compare, open_pairing, read_whole, same_bits, store

import quanterr
from quanterr.errors import CheckpointError
from quanterr.tensors.chunks import Chunk, Cut
from quanterr.tensors.workspace import Workspace

pytestmark = pytest.mark.session

BITS = (2, 3, 4, 5, 6, 7, 8)


class Made:
    """Random codes, zero points and scales of one weight, and the weight they stand for."""

    def __init__(self, rows, cols, size, bits, order=None, symmetric=False, dtype=np.float16, seed=0):
        generator = np.random.default_rng(seed)
        self.rows, self.cols, self.bits, self.size = rows, cols, bits, size
        blocks = -(-cols // size)
        self.order = np.arange(cols) // size if order is None else np.array(order)
        self.codes = generator.integers(0, 1 << bits, (rows, cols))
        self.scale = (0.001 + 0.01 * generator.random((rows, blocks))).astype(dtype)
        self.zeros = generator.integers(0, 1 << bits, (rows, blocks))
        if symmetric:
            self.zeros[:] = 1 << bits - 1

    @property
    def values(self):
        steps = (self.codes - packing.spread(self.zeros, self.order)).astype(np.float32)
        return torch.from_numpy(steps * packing.spread(self.scale.astype(np.float32), self.order))


def tensors_of(arrays):
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def shuffle_blocks(cols, size, seed=1):
    """Return the block of each column, in act-order."""
    return np.random.default_rng(seed).permutation(cols) // size


def read(folder, values, arrays, config=None, name="a.weight"):
    """Return the quantized weight for an original of these values, and its dequantized values, in any cut."""
    x = store(folder / "original.safetensors", {name: values})
    path = folder / ("quantized" if config is not None else "quantized.safetensors")
    y = store(path, tensors_of(arrays), config=config and {"quantization_config": config})
    with open_pairing(x, y) as plan:
        assert [pair.name for pair in plan.pairs] == [name], [left.reason for left in plan.leftovers]
        weight = plan.pairs[0].quantized
        whole = read_whole(weight)
        check_cuts(weight, whole)
        return weight, whole


def check_cuts(weight, whole):
    """Check that any cut gives the same values: a few rows at a time, and pieces of a row that start anywhere."""
    rows, cols = weight.matrix
    assert same_bits(whole, read_whole(weight, 3 * cols))
    workspace = Workspace(torch.device("cpu"))
    for row in {0, min(5, rows - 1), rows // 2, rows - 1}:
        for piece in [*reversed(Cut(1, cols, 37)), *Cut(1, cols, max(cols - 1, 1))]:
            chunk = Chunk(row, row + 1, piece.col, piece.stop_col)
            assert same_bits(whole[row : row + 1, piece.col : piece.stop_col], chunk_of(weight, chunk, workspace)), (
                chunk
            )


def gptq(made, packed="dense", less_one=False, container=32, g_idx=False):
    """Return the tensors of GPTQ; ``packed`` is the arrangement of codes."""
    pack = packing.PACKINGS[packed]
    more = {"container": container} if packed == "dense" else {}
    zeros = packing.less_one(made.zeros.T, made.bits, container) if less_one else pack(made.zeros.T, made.bits, **more)
    arrays = {
        "a.qweight": pack(made.codes, made.bits, **more).T,
        "a.qzeros": zeros,
        "a.scales": made.scale.T,
    }
    return arrays | ({"a.g_idx": made.order.astype(np.int32)} if g_idx else {})


GPTQ_V1 = {"quant_method": "gptq", "checkpoint_format": "gptq"}
GPTQ_V2 = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
GPTQ_P = {"quant_method": "gptq", "checkpoint_format": "gptq_p"}
AUTO_V1 = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
AUTO_V2 = {"quant_method": "auto-round", "packing_format": "auto_round"}
SYMMETRIC = {"sym": True}  # kernels for it ignore zero points


class TestGptq:
    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize("less_one", [True, False])
    def test_gptq_reads_any_number_of_bits(self, tmp_path, bits, less_one):
        made = Made(40, 96, 32, bits)
        config = {True: AUTO_V1, False: AUTO_V2}[less_one]
        weight, actual = read(tmp_path, made.values, gptq(made, less_one=less_one), config)

        assert same_bits(made.values, actual)
        assert (bits, (1, 32), ()) == (weight.code_bits, weight.block_size, weight.warnings)

    @pytest.mark.parametrize("bits", [3, 5, 6, 7])
    def test_gptq_reads_planes(self, tmp_path, bits):
        made = Made(64, 96, 32, bits)
        weight, actual = read(tmp_path, made.values, gptq(made, "planar"), GPTQ_P)

        assert "gptq_p" == weight.format
        assert same_bits(made.values, actual)

    @pytest.mark.parametrize("container", [8, 16, 64])
    @pytest.mark.parametrize("bits", [2, 4, 8])
    @pytest.mark.parametrize("less_one", [True, False])
    def test_gptq_reads_any_container(self, tmp_path, bits, container, less_one):
        made = Made(64, 96, 32, bits)
        arrays = gptq(made, less_one=less_one, container=container)
        weight, actual = read(tmp_path, made.values, arrays, GPTQ_V1 if less_one else GPTQ_V2)

        assert same_bits(made.values, actual)
        assert () == weight.warnings

    @pytest.mark.parametrize(
        ("rows", "cols", "size"),
        [(64, 128, 128), (64, 160, 64), (8, 72, 32), (72, 40, 40), (1, 64, 32), (33, 64, 64), (24, 100, 32)],
    )
    @pytest.mark.parametrize("bits", [3, 4, 8])
    def test_gptq_reads_any_shape_and_a_short_last_block(self, tmp_path, rows, cols, size, bits):
        made = Made(rows, cols, size, bits)
        config = GPTQ_V2 | {"bits": bits, "group_size": -1 if size == cols else size}
        weight, actual = read(tmp_path, made.values, gptq(made), config)

        assert same_bits(made.values, actual)
        assert (None if size == cols else (1, size), ()) == (weight.block_size, weight.warnings)

    @pytest.mark.parametrize("bits", [2, 3, 4, 8])
    @pytest.mark.parametrize("plain", [True, False])
    def test_gptq_reads_the_column_order(self, tmp_path, bits, plain):
        made = Made(40, 96, 32, bits, None if plain else shuffle_blocks(96, 32))
        weight, actual = read(tmp_path, made.values, gptq(made, g_idx=True), GPTQ_V2)

        assert same_bits(made.values, actual)
        assert (1, 32) == weight.block_size

    def test_gptq_crops_padded_columns(self, tmp_path):
        made = Made(40, 128, 64, 4)
        weight, actual = read(tmp_path, made.values[:, :100], gptq(made), GPTQ_V2 | {"group_size": 64})

        assert (40, 100) == weight.shape
        assert same_bits(made.values[:, :100].contiguous(), actual)

    def test_gptq_restores_a_borrow_from_zero_points(self, tmp_path):
        """True zero points 0 and 5 are 0x50; minus 0x11 that is 0x3F, whose codes are 15 and 3."""
        made = Made(64, 64, 64, 4)
        made.zeros[:, 0] = np.tile([0, 5, 0, 0, 15, 0, 1, 8], 8)
        weight, actual = read(tmp_path, made.values, gptq(made, less_one=True), GPTQ_V1)

        assert "gptq" == weight.format
        assert same_bits(made.values, actual)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_gptq_reads_scales_in_any_float(self, tmp_path, dtype):
        made = Made(40, 96, 32, 4, dtype=np.float32)
        scale = torch.from_numpy(made.scale).to(dtype)
        made.scale = scale.float().numpy()
        x = store(tmp_path / "x.safetensors", {"a.weight": made.values})
        arrays = tensors_of(gptq(made)) | {"a.scales": scale.T.contiguous()}
        with open_pairing(x, store(tmp_path / "y", arrays, config={"quantization_config": GPTQ_V2})) as plan:
            actual = read_whole(plan.pairs[0].quantized)

        assert same_bits(made.values, actual)


class TestGptqZeroPoints:
    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize("less_one", [True, False])
    @pytest.mark.parametrize("config", [None, GPTQ_V1 | SYMMETRIC, GPTQ_V2 | SYMMETRIC, AUTO_V1 | SYMMETRIC], ids=str)
    def test_equal_zero_points_reveal_their_convention(self, tmp_path, bits, less_one, config):
        made = Made(64, 96, 32, bits, symmetric=True)
        values = torch.zeros(64, 96)  # an original without information
        weight, actual = read(tmp_path, values, gptq(made, less_one=less_one), config)

        assert same_bits(made.values, actual)
        assert ("gptq" if less_one else "gptq_v2") == weight.format

    @pytest.mark.parametrize("bits", [3, 5, 6, 7])
    def test_equal_zero_points_reveal_planes(self, tmp_path, bits):
        made = Made(64, 96, 32, bits, symmetric=True)
        weight, actual = read(tmp_path, torch.zeros(64, 96), gptq(made, "planar"), GPTQ_V1 | SYMMETRIC)

        assert same_bits(made.values, actual)
        assert "gptq_p" == weight.format

    def test_equal_zero_points_that_contradict_the_configuration_are_reported(self, tmp_path):
        made = Made(64, 96, 32, 4, symmetric=True)
        weight, _ = read(tmp_path, torch.zeros(64, 96), gptq(made), GPTQ_V1 | SYMMETRIC)

        assert len(weight.warnings) == 1
        assert "config.json declares checkpoint_format gptq, but all its zero points are 8" in weight.warnings[0]

    def test_equal_zero_points_in_a_single_block_reveal_nothing(self, tmp_path):
        made = Made(64, 96, 32, 4)
        made.zeros[:, 0] = 7
        weight, actual = read(tmp_path, torch.zeros(64, 96), gptq(made), GPTQ_V2)

        assert "gptq_v2" == weight.format
        assert same_bits(made.values, actual)

    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize("stored_less_one", [True, False])
    def test_contradictory_zero_points_are_read_as_configured(self, tmp_path, bits, stored_less_one):
        original, arrays = round_to_gptq(64, 256, 32, bits, stored_less_one)
        config = AUTO_V2 if stored_less_one else AUTO_V1
        x = store(tmp_path / "x.safetensors", {"a.weight": original})
        y = store(tmp_path / "y", tensors_of(arrays), config={"quantization_config": config})
        with open_pairing(x, y) as plan:
            (pair,) = plan.pairs

        assert ("gptq_v2" if stored_less_one else "gptq") == pair.quantized.format
        assert "packing_format" in pair.contradiction.prescribed
        assert 1.2 * pair.contradiction.other_error < pair.contradiction.prescribed_error

    def test_zero_points_for_constant_weights_are_read_as_configured(self, tmp_path):
        made = Made(64, 96, 32, 4)
        made.codes[:], made.zeros[:] = 15, 9  # stored minus one: 8, the middle in version 2
        values = (made.codes - 9.0).astype(np.float32) * made.scale.astype(np.float32).repeat(32, 1)
        weight, actual = read(tmp_path, torch.from_numpy(values), gptq(made, less_one=True), GPTQ_V1)

        assert "gptq" == weight.format
        assert same_bits(torch.from_numpy(values), actual)

    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize("less_one", [True, False])
    def test_correctly_declared_zero_points_raise_no_doubt(self, tmp_path, bits, less_one):
        original, arrays = round_to_gptq(64, 256, 32, bits, less_one)
        config = AUTO_V1 if less_one else AUTO_V2
        report = compare(tmp_path, {"a.weight": original}, tensors_of(arrays), config={"quantization_config": config})

        assert [("gptq" if less_one else "gptq_v2")] == [layer.format for layer in report.layers]
        assert [] == [finding for finding in report.findings if finding.code == "ambiguous_layout"]

    def test_zero_points_follow_the_configuration_for_another_original(self, tmp_path):
        _, arrays = round_to_gptq(64, 256, 32, 8, less_one=False)
        other = 0.02 * torch.randn(64, 256, generator=torch.Generator().manual_seed(5))
        weight, _ = read(tmp_path, other, arrays, AUTO_V1)

        assert ("gptq", ()) == (weight.format, weight.warnings)


def round_to_gptq(rows, cols, size, bits, less_one):
    """Return an original and the tensors of GPTQ that plain rounding makes of it."""
    original = 0.02 * np.random.default_rng(3).standard_normal((rows, cols), np.float32)
    blocks = original.reshape(rows, -1, size)
    low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    made = Made(rows, cols, size, bits)
    made.scale = ((high - low) / ((1 << bits) - 1)).astype(np.float16)
    scale = made.scale.astype(np.float32)
    made.zeros = np.clip(np.round(-low / scale), 0, (1 << bits) - 1).astype(int)
    steps = np.round(blocks / scale[..., None]) + made.zeros[..., None]
    made.codes = np.clip(steps, 0, (1 << bits) - 1).astype(int).reshape(rows, cols)
    return torch.from_numpy(original), gptq(made, less_one=less_one)


def awq_gemm(made, zeros=True):
    pack = packing.interleave if made.bits == 4 else lambda codes: packing.dense(codes, made.bits)
    arrays = {"a.qweight": pack(made.codes.T), "a.scales": made.scale.T}
    return arrays | ({"a.qzeros": pack(made.zeros.T)} if zeros else {})


AWQ = {"quant_method": "awq", "zero_point": True}


def widen(of_block, size):
    """Return (rows, blocks) with zeros up to the number of blocks that gemv stores."""
    multiple = 8 * {32: 4, 64: 2}.get(size, 1)
    padded = np.zeros((len(of_block), -(-of_block.shape[1] // multiple) * multiple), of_block.dtype)
    padded[:, : of_block.shape[1]] = of_block
    return padded


class TestAwq:
    @pytest.mark.parametrize(("rows", "cols", "size"), [(64, 128, 128), (72, 96, 32), (8, 160, 64), (40, 40, 40)])
    @pytest.mark.parametrize("bits", BITS)
    def test_awq_gemm_is_read(self, tmp_path, rows, cols, size, bits):
        made = Made(rows, cols, size, bits)
        config = AWQ | {"version": "gemm", "bits": bits, "group_size": -1 if size == cols else size}
        weight, actual = read(tmp_path, made.values, awq_gemm(made), config)

        assert ("awq_gemm", bits, ()) == (weight.format, weight.code_bits, weight.warnings)
        assert same_bits(made.values, actual)

    def test_awq_gemm_without_zero_points_has_them_in_the_middle(self, tmp_path):
        made = Made(64, 128, 32, 4, symmetric=True)
        weight, actual = read(tmp_path, made.values, awq_gemm(made, zeros=False), AWQ)

        assert "awq_gemm" == weight.format
        assert same_bits(made.values, actual)

    @pytest.mark.parametrize(
        ("rows", "cols", "size"),
        [(64, 256, 128), (64, 256, 64), (33, 128, 32), (7, 1024, 128), (9, 96, 96), (5, 640, 64)],
    )
    @pytest.mark.parametrize("told", [True, False])
    def test_awq_gemv_is_read(self, tmp_path, rows, cols, size, told):
        made = Made(rows, cols, size, 4)
        arrays = {
            "a.qweight": packing.dense(made.codes, 4),
            "a.qzeros": packing.dense(widen(made.zeros, size), 4),
            "a.scales": widen(made.scale, size),
        }
        config = {"version": "gemv", "group_size": -1 if size == cols else size} if told else {}
        weight, actual = read(tmp_path, made.values, arrays, AWQ | config)

        assert "awq_gemv" == weight.format
        assert same_bits(made.values, actual)

    @pytest.mark.parametrize(("rows", "cols", "size"), [(64, 256, 128), (12, 256, 64), (4, 128, 32), (20, 192, 192)])
    @pytest.mark.parametrize("name", ["qzeros", "scaled_zeros"])
    def test_awq_gemv_fast_is_read(self, tmp_path, rows, cols, size, name):
        made = Made(rows, cols, size, 4)
        offset = (-made.scale.astype(np.float32) * made.zeros).astype(np.float16)
        arrays = {
            "a.qweight": packing.gemv_fast(made.codes),
            f"a.{name}": widen(offset, size).T,
            "a.scales": widen(made.scale, size).T,
        }
        scale, offset = (packing.spread(x.astype(np.float32), made.order) for x in (made.scale, offset))
        values = torch.from_numpy(made.codes.astype(np.float32) * scale + offset)
        config = AWQ | {"version": "gemv_fast", "group_size": -1 if size == cols else size}
        weight, actual = read(tmp_path, values, arrays, config)

        assert "awq_gemv_fast" == weight.format
        assert same_bits(values, actual)

    @pytest.mark.parametrize(("rows", "cols", "size"), [(64, 128, 128), (128, 256, 64), (192, 96, 32), (64, 16, 16)])
    @pytest.mark.parametrize(("codes", "scales"), [("qweight", "scales"), ("B", "s")])
    def test_awq_marlin_is_read(self, tmp_path, rows, cols, size, codes, scales):
        made = Made(rows, cols, size, 4, symmetric=True)
        order = packing.MARLIN_SCALES_SINGLE if size == cols else packing.MARLIN_SCALES
        arrays = {f"a.{codes}": packing.marlin(made.codes), f"a.{scales}": packing.permute(made.scale.T, order)}
        weight, actual = read(tmp_path, made.values, arrays, AWQ | {"zero_point": False, "version": "marlin"})

        assert {"B": "gptq_marlin", "qweight": "awq_marlin"}[codes] == weight.format
        assert same_bits(made.values, actual)


class TestQweightShapes:
    """GPTQ and AWQ store tensors with the same names and dtypes, so a square weight is the hard case."""

    @pytest.mark.parametrize("n", [64, 256])  # 256: gemv as GPTQ would have 8 times the columns
    def test_qweight_shape_reveals_the_format_for_a_square_weight(self, tmp_path, n):
        size = 32
        made = Made(n, n, size, 4)
        gemv = {
            "a.qweight": packing.dense(made.codes, 4),
            "a.qzeros": packing.dense(widen(made.zeros, size), 4),
            "a.scales": widen(made.scale, size),
        }
        for name, arrays in {"gptq_v2": gptq(made), "awq_gemm": awq_gemm(made), "awq_gemv": gemv}.items():
            folder = tmp_path / name
            folder.mkdir()
            weight, actual = read(folder, made.values, arrays, {"group_size": size, "checkpoint_format": "gptq_v2"})

            assert name == weight.format
            assert same_bits(made.values, actual)


def ct_pack(made, packed="dense", zeros=True, name="a", shape=torch.int64):
    """Return the tensors of pack-quantized, 3-D for experts."""
    pack = packing.PACKINGS[packed]
    arrays = {
        f"{name}.weight_packed": pack(made.codes, made.bits),
        f"{name}.weight_scale": made.scale,
        f"{name}.weight_shape": np.array(made.codes.shape),
    }
    if zeros:
        turned = pack(np.swapaxes(made.zeros, -1, -2), made.bits)
        arrays[f"{name}.weight_zero_point"] = np.swapaxes(turned, -1, -2)
    return arrays


def ct_config(bits=None, size=None, version="0.20.0", targets=("Linear",)):
    weights = {"num_bits": bits, "group_size": size, "type": "int", "strategy": "group"}
    groups = {"group_0": {"targets": list(targets), "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "version": version}


class TestCtPack:
    @pytest.mark.parametrize(("rows", "cols", "size"), [(40, 64, 32), (33, 100, 32), (5, 96, 96), (64, 128, 128)])
    @pytest.mark.parametrize("bits", [1, *BITS])
    @pytest.mark.parametrize("zeros", [True, False])
    def test_ct_pack_dense_is_read(self, tmp_path, rows, cols, size, bits, zeros):
        made = Made(rows, cols, size, bits, symmetric=not zeros)
        weight, actual = read(tmp_path, made.values, ct_pack(made, zeros=zeros), ct_config(bits, size))

        assert ("ct_pack", bits, ()) == (weight.format, weight.code_bits, weight.warnings)
        assert same_bits(made.values, actual)

    @pytest.mark.parametrize("bits", [3, 5, 6, 7])
    @pytest.mark.parametrize("zeros", [True, False])
    def test_ct_pack_floor_from_old_files_is_read(self, tmp_path, bits, zeros):
        made = Made(40, 96, 32, bits, symmetric=not zeros)
        arrays = ct_pack(made, "floor", zeros)
        weight, actual = read(tmp_path, made.values, arrays, ct_config(bits, 32, version="0.13.0"))

        assert (bits, ()) == (weight.code_bits, weight.warnings)
        assert same_bits(made.values, actual)

    @pytest.mark.parametrize("bits", [1, *BITS])
    @pytest.mark.parametrize("packed", ["dense", "floor"])
    def test_ct_pack_width_reveals_the_bits_without_a_configuration(self, tmp_path, bits, packed):
        made = Made(40, 192, 32, bits)
        weight, actual = read(tmp_path, made.values, ct_pack(made, packed))

        assert bits == weight.code_bits
        assert same_bits(made.values, actual)

    @pytest.mark.parametrize(("version", "packed"), [("0.17.1", "floor"), ("0.18.0", "dense")])
    def test_ct_pack_version_decides_for_few_columns(self, tmp_path, version, packed):
        """Three 7-bit codes need one word in either layout."""
        made = Made(32, 3, 3, 7, symmetric=True)
        arrays = ct_pack(made, packed, zeros=False)
        _, actual = read(tmp_path, torch.zeros(32, 3), arrays, ct_config(7, version=version))

        assert same_bits(made.values, actual)

    def test_ct_pack_takes_the_bits_from_the_group_that_names_it(self, tmp_path):
        made = Made(40, 192, 32, 7)
        config = ct_config(7, 32, "0.13.0", ["re:.*a$"])
        config["config_groups"]["group_1"] = ct_config(8, 32, targets=["re:.*b$"])["config_groups"]["group_0"]
        weight, actual = read(tmp_path, torch.zeros(40, 192), ct_pack(made, "floor"), config)

        assert (7, ()) == (weight.code_bits, weight.warnings)
        assert same_bits(made.values, actual)

    @pytest.mark.parametrize("pattern", ["re:(a+)+$", "re:.*.*.*.*b", "re:(", "re:a{9999999999}", "re:" + 600 * "a"])
    def test_ct_pack_skips_a_pattern_that_may_never_finish(self, tmp_path, pattern):
        made, name = Made(40, 192, 32, 7), 60 * "a" + ".weight"
        config = ct_config(7, 32, "0.13.0", [pattern])
        config["config_groups"]["group_1"] = ct_config(8, 32, targets=[pattern])["config_groups"]["group_0"]
        arrays = {key.replace("a.", 60 * "a" + ".", 1): array for key, array in ct_pack(made, "floor").items()}
        weight, actual = read(tmp_path, made.values, arrays, config, name)

        assert 7 == weight.code_bits
        assert same_bits(made.values, actual)

    def test_ct_pack_configuration_with_other_bits_is_reported(self, tmp_path):
        made = Made(40, 192, 32, 4)
        _, actual = read(tmp_path, made.values, ct_pack(made), ct_config(3, 32))
        findings = quanterr.inspect(tmp_path / "quantized").findings

        says = "config.json declares codes of 3 bits, but codes of 4 bits are stored for 1 weight: a.weight"
        assert [says] == [finding.message for finding in findings]
        assert same_bits(made.values, actual)

    @pytest.mark.parametrize("zeros", [True, False])
    @pytest.mark.parametrize("bits", [3, 4])
    def test_ct_pack_reads_experts(self, tmp_path, zeros, bits):
        pieces = [Made(20, 64, 32, bits, symmetric=not zeros, seed=seed) for seed in range(3)]
        made = Made(20, 64, 32, bits)
        made.codes, made.scale, made.zeros = (
            np.stack([getattr(piece, part) for piece in pieces]) for part in ("codes", "scale", "zeros")
        )
        name = "mlp.experts.gate_up_proj"
        arrays = ct_pack(made, zeros=zeros, name=name)
        weight, actual = read(tmp_path, made.values, arrays, ct_config(bits, 32), name)

        assert "ct_pack" == weight.format
        assert same_bits(made.values.view(60, 64), actual)

    @pytest.mark.parametrize("zeros", [True, False])
    def test_ct_pack_reads_the_column_order(self, tmp_path, zeros):
        made = Made(40, 96, 32, 4, shuffle_blocks(96, 32), symmetric=not zeros)
        arrays = ct_pack(made, zeros=zeros) | {"a.weight_g_idx": made.order.astype(np.int32)}
        _, actual = read(tmp_path, made.values, arrays, ct_config(4, 32))

        assert same_bits(made.values, actual)

    def test_ct_pack_ignores_an_order_with_only_minus_ones(self, tmp_path):
        made = Made(40, 96, 32, 4)
        arrays = ct_pack(made) | {"a.weight_g_idx": np.full(96, -1, np.int32)}
        _, actual = read(tmp_path, made.values, arrays, ct_config(4, 32))

        assert same_bits(made.values, actual)

    @pytest.mark.parametrize("zeros", [True, False])
    def test_ct_pack_reads_a_single_scale(self, tmp_path, zeros):
        made = Made(40, 96, 96, 4, symmetric=not zeros)
        made.scale[:], made.zeros[:] = made.scale[0, 0], made.zeros[0, 0]
        arrays = ct_pack(made, zeros=False) | {"a.weight_scale": made.scale[0]}
        if zeros:
            arrays["a.weight_zero_point"] = (made.zeros[0] - 8).astype(np.int8)
        _, actual = read(tmp_path, made.values, arrays, ct_config(4))

        assert same_bits(made.values, actual)


class TestCtInt:
    @pytest.mark.parametrize(("rows", "cols", "size"), [(40, 64, 32), (33, 100, 32), (5, 96, 96)])
    def test_ct_int_reads_zero_points(self, tmp_path, rows, cols, size):
        made = Made(rows, cols, size, 8)
        arrays = {
            "a.weight": (made.codes - 128).astype(np.int8),
            "a.weight_scale": made.scale,
            "a.weight_zero_point": (made.zeros - 128).astype(np.int8),
        }
        weight, actual = read(tmp_path, made.values, arrays, ct_config(8, size))

        assert ("ct_int", ()) == (weight.format, weight.warnings)
        assert same_bits(made.values, actual)

    def test_ct_int_reads_a_single_zero_point(self, tmp_path):
        made = Made(5, 96, 96, 8)
        made.scale[:], made.zeros[:] = made.scale[0, 0], made.zeros[0, 0]
        arrays = {
            "a.weight": (made.codes - 128).astype(np.int8),
            "a.weight_scale": made.scale[0],
            "a.weight_zero_point": (made.zeros[0] - 128).astype(np.int8),
        }
        _, actual = read(tmp_path, made.values, arrays)

        assert same_bits(made.values, actual)

    @pytest.mark.parametrize("zeros", [True, False])
    def test_ct_int_reads_the_column_order(self, tmp_path, zeros):
        made = Made(40, 96, 32, 8, shuffle_blocks(96, 32), symmetric=not zeros)
        arrays = {
            "a.weight": (made.codes - 128).astype(np.int8),
            "a.weight_scale": made.scale,
            "a.weight_g_idx": made.order.astype(np.int32),
        }
        if zeros:
            arrays["a.weight_zero_point"] = (made.zeros - 128).astype(np.int8)
        weight, actual = read(tmp_path, made.values, arrays, ct_config(8, 32))

        assert "ct_int" == weight.format
        assert same_bits(made.values, actual)


def keep_24(rows, cols, seed=2):
    """Return a mask of two in each four columns."""
    ranks = np.random.default_rng(seed).random((rows, cols // 4, 4)).argsort(-1).argsort(-1)
    return (ranks < 2).reshape(rows, cols)


class TestSparse:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize(("rows", "cols"), [(5, 64), (33, 100), (1, 8)])
    @pytest.mark.parametrize("two_of_four", [True, False])
    def test_sparse_numbers_are_read(self, tmp_path, dtype, rows, cols, two_of_four):
        generator = torch.Generator().manual_seed(1)
        mask = torch.from_numpy(
            keep_24(rows, cols) if two_of_four else np.random.default_rng(4).random((rows, cols)) > 0.7
        )
        values = torch.randn(rows, cols, generator=generator).to(dtype) * mask
        tensors = {
            "a.compressed": values[mask],
            "a.bitmask": torch.from_numpy(packing.bitmask(mask.numpy())),
            "a.shape": torch.tensor([rows, cols]),
        }
        if two_of_four:
            tensors |= {"a.compressed": values[mask].view(rows, -1), "a.shape": torch.tensor([[rows], [cols]])}
        else:
            tensors["a.row_offsets"] = mask.sum(1).cumsum(0) - mask.sum(1)
        x = store(tmp_path / "x.safetensors", {"a.weight": values})
        for path in ("a", "a.weight"):
            named = {name.replace("a.", f"{path}.", 1): tensor for name, tensor in tensors.items()}
            with open_pairing(x, store(tmp_path / f"{path}.safetensors", named)) as plan:
                weight = plan.pairs[0].quantized
                whole = read_whole(weight)
                check_cuts(weight, whole)

            assert {True: "ct_sparse24_bitmask", False: "ct_sparse_bitmask"}[two_of_four] == weight.format
            assert same_bits(values.float() + 0.0, whole)

    @pytest.mark.parametrize("two_of_four", [True, False])
    @pytest.mark.parametrize("zeros", [True, False])
    def test_sparse_int8_codes_are_read(self, tmp_path, two_of_four, zeros):
        made = Made(20, 64, 32, 8, symmetric=not zeros)
        mask = keep_24(20, 64) if two_of_four else np.random.default_rng(4).random((20, 64)) > 0.7
        made.codes[~mask] = 128  # this one is zero
        codes = (made.codes - 128).astype(np.int8)[mask]
        arrays = {
            "a.compressed": codes.reshape(20, -1) if two_of_four else codes,
            "a.bitmask": packing.bitmask(mask),
            "a.shape": np.array([20, 64]),
            "a.weight_scale": made.scale,
        }
        if zeros:
            arrays["a.weight_zero_point"] = (made.zeros - 128).astype(np.int8)
        if not two_of_four:
            arrays["a.row_offsets"] = mask.sum(1).cumsum() - mask.sum(1)
        weight, actual = read(tmp_path, made.values, arrays, ct_config(8, 32))

        assert (8, (1, 32)) == (weight.code_bits, weight.block_size)
        assert same_bits(made.values, actual)

    @pytest.mark.parametrize(
        ("rows", "cols", "bits", "blocks"),
        [(64, 64, 4, 1), (128, 384, 4, 3), (64, 256, 4, 2), (192, 128, 8, 1), (64, 512, 8, 4)],
    )
    def test_sparse_marlin_is_read(self, tmp_path, rows, cols, bits, blocks):
        made = Made(rows, cols, cols // blocks, bits, symmetric=True)
        mask = keep_24(rows, cols)
        made.codes[~mask] = 1 << bits - 1
        scales = packing.permute(made.scale.T, packing.MARLIN_24_SCALES) if blocks > 2 else made.scale.T
        arrays = {
            "a.weight_packed": packing.marlin(made.codes[mask].reshape(rows, -1), bits, sparse=True),
            "a.scale_packed": scales,
            "a.meta": packing.marlin_meta(packing.list_kept(mask)),
        }
        weight, actual = read(tmp_path, made.values, arrays, ct_config(bits, 128))

        assert ("ct_marlin24", bits) == (weight.format, weight.code_bits)
        assert same_bits(made.values, actual)


class TestModelopt:
    @pytest.mark.parametrize("shape", [(6, 128), (40, 256), (3, 20, 128)])
    @pytest.mark.parametrize("smoothed", [True, False])
    def test_modelopt_int4_is_read(self, tmp_path, shape, smoothed):
        rows, cols = np.prod(shape[:-1]), shape[-1]
        made = Made(rows, cols, 64, 4, symmetric=True, dtype=np.float32)
        pairs = made.codes.reshape(-1, 2, cols) ^ 8
        arrays = {
            "a.weight": (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8).reshape(*shape[:-2], -1, cols),
            "a.weight_scale": made.scale.reshape(*shape[:-1], -1),
            "a.weight_scale_2": np.float32(0.5),
        }
        values = made.values
        if smoothed:
            arrays["a.pre_quant_scale"] = np.linspace(0.5, 1.5, cols, dtype=np.float32)
            values = values * torch.from_numpy(arrays["a.pre_quant_scale"])
        weight, actual = read(tmp_path, values.view(shape), arrays, {"quant_method": "modelopt", "group_size": 64})

        assert ("modelopt_int4", (1, 64)) == (weight.format, weight.block_size)
        assert same_bits(values, actual)


class TestQuark:
    @pytest.mark.parametrize(("rows", "cols", "size"), [(64, 128, 128), (72, 96, 32), (8, 160, 32)])
    @pytest.mark.parametrize("dtype", ["int4", "uint4"])
    @pytest.mark.parametrize("method", ["reorder", "order"])
    @pytest.mark.parametrize("zeros", [True, False])
    def test_quark_blocks_are_read(self, tmp_path, rows, cols, size, dtype, method, zeros):
        made = Made(rows, cols, size, 4, symmetric=not zeros)
        if not zeros and dtype == "uint4":
            made.zeros[:] = 0
        flip = 8 if dtype == "int4" else 0
        pack = packing.interleave if method == "reorder" else lambda codes: packing.dense(codes, 4)
        arrays = {"a.weight": pack(made.codes.T ^ flip), "a.weight_scale": made.scale.T}
        if zeros:
            arrays["a.weight_zero_point"] = pack(made.zeros.T ^ flip)
        weight = {"dtype": dtype, "group_size": size, "qscheme": "per_group"}
        config = {"quant_method": "quark", "global_quant_config": {"weight": weight}, "export": {"pack_method": method}}
        number, actual = read(tmp_path, made.values, arrays, config)

        assert ("quark_int4", ()) == (number.format, number.warnings)
        assert same_bits(made.values, actual)

    @pytest.mark.parametrize(("rows", "cols"), [(16, 64), (72, 100)])
    @pytest.mark.parametrize("dtype", ["int4", "uint4"])
    def test_quark_rows_are_read(self, tmp_path, rows, cols, dtype):
        made = Made(rows, cols, cols, 4)
        flip = 8 if dtype == "int4" else 0
        columns = np.zeros((rows, -(-cols // 8) * 8), int)
        columns[:, :cols] = made.codes ^ flip
        arrays = {
            "a.weight": packing.interleave(columns),
            "a.weight_scale": made.scale[:, 0],
            "a.weight_zero_point": packing.interleave(made.zeros[:, 0] ^ flip),
        }
        weight = {"dtype": dtype, "group_size": None, "qscheme": "per_channel"}
        config = {"quant_method": "quark", "global_quant_config": {"weight": weight}}
        _, actual = read(tmp_path, made.values, arrays, config)

        assert same_bits(made.values, actual)

    @pytest.mark.parametrize("signed", [True, False])
    @pytest.mark.parametrize("method", ["reorder", "order"])
    def test_original_decides_without_a_quark_configuration(self, tmp_path, signed, method):
        made = Made(64, 128, 32, 4)
        flip = 8 if signed else 0
        pack = packing.interleave if method == "reorder" else lambda codes: packing.dense(codes, 4)
        arrays = {
            "a.weight": pack(made.codes.T ^ flip),
            "a.weight_scale": made.scale.T,
            "a.weight_zero_point": pack(made.zeros.T ^ flip),
        }
        _, actual = read(tmp_path, made.values, arrays)

        assert same_bits(made.values, actual)


def without(arrays, *names):
    return {name: array for name, array in arrays.items() if name not in names}


MADE = Made(40, 96, 32, 4)
GPTQ, GEMM, CT = gptq(MADE), awq_gemm(MADE), ct_pack(MADE)
INT = {
    "a.weight": np.zeros((40, 96), np.int8),
    "a.weight_scale": MADE.scale,
    "a.weight_zero_point": MADE.zeros.astype(np.int8),
}
MASK = keep_24(40, 96)
MASKED = {
    "a.compressed": np.ones((40, 48), np.float16),
    "a.bitmask": packing.bitmask(MASK),
    "a.shape": np.array([40, 96]),
}
MARLIN_24 = {
    "a.weight_packed": np.zeros((3, 128), np.int32),
    "a.scale_packed": np.ones((1, 64), np.float16),
    "a.meta": np.zeros((3, 128), np.int16),
}
FAST = {
    "a.qweight": np.zeros((10, 128), np.int16),
    "a.qzeros": np.zeros((8, 40), np.float16),
    "a.scales": np.ones((8, 40), np.float16),
}
QUARK = {"a.weight": packing.interleave(MADE.codes.T), "a.weight_scale": MADE.scale.T}

REFUSED = {
    "missing zero points of GPTQ": (
        without(GPTQ, "a.qzeros"),
        "its zero_point is missing: I32 codes, but none of a.qzeros is stored",
    ),
    "zero points of other blocks than scales": (
        GPTQ | {"a.qzeros": GPTQ["a.qzeros"][:2]},
        "a.qweight (I32 [12, 40]), a.scales (F16 [3, 40]) and a.qzeros (I32 [2, 5]) fit neither GPTQ",
    ),
    "zero points of another number of bits": (
        GPTQ | {"a.qzeros": GPTQ["a.qzeros"][:, :2]},
        "a.qweight (I32 [12, 40]) and a.qzeros (I32 [3, 2]) fit no number of bits per code in 96 columns",
    ),
    "fewer codes than columns": (
        GPTQ | {"a.qweight": GPTQ["a.qweight"][:11]},
        "fit no number of bits per code in 96 columns",
    ),
    "zero points in other containers": (
        GPTQ | {"a.qzeros": GPTQ["a.qzeros"].astype(np.int16)},
        "fit neither GPTQ",
    ),
    "an order with a missing block": (
        GPTQ | {"a.g_idx": np.full(96, 3, np.int32)},
        "a.g_idx (I32 [96]) names block 3, but blocks are 0 to 2",
    ),
    "an order with a negative block": (
        GPTQ | {"a.g_idx": np.arange(96, dtype=np.int32) - 1},
        "a.g_idx (I32 [96]) names block -1",
    ),
    "an order in a row of its own": (
        GPTQ | {"a.g_idx": np.zeros((1, 96), np.int32)},
        "a.g_idx (I32 [1, 96]) should have one number for each of 96 columns",
    ),
    "an order of other columns": (
        GPTQ | {"a.g_idx": np.zeros(200, np.int32)},
        "fit no number of bits per code in 200 columns",
    ),
    "an unused part of GPTQ": (
        GPTQ | {"a.lora_A": np.zeros((2, 96), np.float16)},
        "stored as gptq (I32), but unused: a.lora_A",
    ),
    "an unused order of AWQ": (
        GEMM | {"a.g_idx": np.zeros(96, np.int32)},
        "stored as awq_gemm (I32), but unused: a.g_idx",
    ),
    "shapes of neither GPTQ nor AWQ": (
        GEMM | {"a.qweight": GEMM["a.qweight"][:, :1]},
        "a.qweight (I32 [96, 1]), a.scales (F16 [3, 40]) and a.qzeros (I32 [3, 5]) fit neither GPTQ",
    ),
    "zero points of AWQ with other bits than codes": (
        GEMM | {"a.qzeros": GEMM["a.qzeros"][:, :4]},
        "a.qzeros (I32 [3, 4]) should be as wide as a.qweight (I32 [96, 5]) and as high as a.scales (F16 [3, 40])",
    ),
    "blocks of no size": (
        GEMM | {"a.scales": np.ones((77, 40), np.float16), "a.qzeros": np.zeros((77, 5), np.int32)},
        "77 blocks of columns fit no block size in 96 columns",
    ),
    "gemv_fast scales that differ from its columns": (
        FAST | {"a.scales": np.ones((8, 48), np.float16)},
        "should have 4 columns for each row of a.qweight (I16 [10, 128])",
    ),
    "more scales of gemv_fast than blocks": (
        FAST | {"a.scales": np.ones((64, 40), np.float16), "a.qzeros": np.zeros((64, 40), np.float16)},
        "a.scales (F16 [64, 40]) fits no block size in 128 columns",
    ),
    "a missing shape": (without(CT, "a.weight_shape"), "a layout that this version does not support"),
    "another shape": (
        CT | {"a.weight_shape": np.array([41, 96])},
        "a.weight_shape (I64 [2]) declares [41, 96], but the codes",
    ),
    "a negative shape": (CT | {"a.weight_shape": np.array([40, -96])}, "a.weight_shape (I64 [2]) declares [40, -96]"),
    "a shape of four": (CT | {"a.weight_shape": np.array([1, 1, 40, 96])}, "a.weight_shape (I64 [4]) declares []"),
    "words of no packing": (
        CT | {"a.weight_packed": CT["a.weight_packed"][:, :11]},
        "a.weight_packed (I32 [40, 11]) with a.weight_zero_point (I32 [5, 3]) fits no packing of 1 to 8 bits",
    ),
    "zero points of another packing": (
        CT | {"a.weight_zero_point": np.zeros((4, 3), np.int32)},
        "with a.weight_zero_point (I32 [4, 3]) fits no packing",
    ),
    "scales of other rows": (
        CT | {"a.weight_scale": np.ones((41, 3), np.float16)},
        "its scale a.weight_scale (F16 [41, 3]) should have one or more for each row",
    ),
    "an order of fewer columns": (
        CT | {"a.weight_g_idx": np.zeros(95, np.int32)},
        "a.weight_g_idx (I32 [95]) should have one number for each column",
    ),
    "int8 zero points that differ from its scales": (
        INT | {"a.weight_zero_point": np.zeros((40, 1), np.int8)},
        "a.weight_zero_point (I8 [40, 1]) should have the shape of a.weight_scale (F16 [40, 3])",
    ),
    "zero points of int8 in blocks of rows": (
        INT | {"a.weight_scale": np.ones((2, 3), np.float16), "a.weight_zero_point": np.ones((2, 3), np.int8)},
        "its scale a.weight_scale (F16 [2, 3]) should be one number, or one or more for each row",
    ),
    "a mask of other columns": (
        MASKED | {"a.bitmask": np.zeros((40, 11), np.uint8)},
        "a.shape (I64 [2]) declares [40, 96], which does not fit a.bitmask (U8 [40, 11])",
    ),
    "other than half of a row": (
        MASKED | {"a.compressed": np.ones((40, 47), np.float16)},
        "a.compressed (F16 [40, 47]) should hold half of each row",
    ),
    "sparse codes without a scale": (
        MASKED | {"a.compressed": np.ones((40, 48), np.int8)},
        "a.compressed (I8 [40, 48]) is stored as ct_sparse24_bitmask, but its scale is missing",
    ),
    "sparse numbers with a scale": (
        MASKED | {"a.weight_scale": np.ones((40, 1), np.float16)},
        "but it has a scale a.weight_scale (F16 [40, 1])",
    ),
    "meta of other rows": (
        MARLIN_24 | {"a.meta": np.zeros((3, 64), np.int16)},
        "a.weight_packed (I32 [3, 128]), a.scale_packed (F16 [1, 64]) and a.meta (I16 [3, 64]) do not belong together",
    ),
    "Quark scales that fit neither way": (
        QUARK | {"a.weight_scale": np.ones((3, 48), np.float16)},
        "a.weight_scale (F16 [3, 48]) fit a.weight (I32 [96, 5]) neither as one per block",
    ),
}


class TestRefused:
    @pytest.mark.parametrize(("arrays", "says"), REFUSED.values(), ids=REFUSED)
    def test_unsupported_layout_is_refused(self, tmp_path, arrays, says):
        x = store(tmp_path / "x.safetensors", {"a.weight": MADE.values})
        with open_pairing(x, store(tmp_path / "y.safetensors", tensors_of(arrays))) as plan:
            pairs, reasons = plan.pairs, {left.reason for left in plan.leftovers if left.name == "a.weight"}

        assert pairs == []
        assert [says in reason for reason in reasons] == [True], reasons

    @pytest.mark.parametrize("two_of_four", [True, False])
    def test_mask_that_marks_more_than_is_stored_is_refused(self, tmp_path, two_of_four):
        mask = MASK.copy()
        mask[7, :4] = True
        arrays = MASKED | {"a.bitmask": packing.bitmask(mask)}
        if not two_of_four:
            arrays |= {"a.compressed": np.ones(40 * 48, np.float16), "a.row_offsets": np.arange(40) * 48}
        with pytest.raises(CheckpointError, match=r"marks 50 elements in row 7, .* holds 48: damaged"):
            compare(tmp_path, {"a.weight": MADE.values}, tensors_of(arrays))


class TestBias:
    """AutoGPTQ writes a bias for every weight, of zeros where the model has none."""

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_zero_bias_changes_nothing(self, tmp_path, dtype):
        original, arrays = round_to_gptq(64, 256, 32, 4, less_one=True)
        tensors = tensors_of(arrays) | {"a.bias": torch.zeros(64, dtype=dtype)}
        report = compare(tmp_path, {"a.weight": original}, tensors, config={"quantization_config": GPTQ_V1})

        assert ("pass", []) == (report.verdict, report.not_compared)

    def test_nonzero_bias_is_reported(self, tmp_path):
        original, arrays = round_to_gptq(64, 256, 32, 4, less_one=True)
        bias = torch.zeros(64)
        bias[63] = 1e-30
        tensors = tensors_of(arrays) | {"a.bias": bias}
        report = compare(tmp_path, {"a.weight": original}, tensors, config={"quantization_config": GPTQ_V1})

        assert ("inconclusive", ["a.bias"]) == (report.verdict, [item.layer_name for item in report.not_compared])


class TestContradictions:
    @pytest.mark.parametrize(
        ("config", "says"),
        [
            ({"bits": 8}, "codes of 8 bits, but codes of 4 bits are stored for 1 weight: a.weight"),
            ({"group_size": 64}, "group_size 64, but groups of 32 columns are stored for 1 weight: a.weight"),
            ({"group_size": -1}, "group_size -1, but groups of 32 columns are stored for 1 weight: a.weight"),
        ],
    )
    def test_configuration_that_contradicts_the_tensors_is_reported(self, tmp_path, config, says):
        _, actual = read(tmp_path, MADE.values, GPTQ, GPTQ_V2 | config)
        findings = quanterr.inspect(tmp_path / "quantized").findings

        assert [f"config.json declares {says}"] == [finding.message for finding in findings]
        assert same_bits(MADE.values, actual)

    @pytest.mark.parametrize("key", ["dynamic", "extra_config"])
    def test_layer_configurations_take_precedence(self, tmp_path, key):
        config = GPTQ_V2 | {"bits": 8, "group_size": 64, key: {"a": {"bits": 4, "group_size": 32}}}
        weight, _ = read(tmp_path, MADE.values, GPTQ, config)

        assert () == weight.warnings
        assert [] == quanterr.inspect(tmp_path / "quantized").findings

    def test_ambiguous_block_size_is_reported(self, tmp_path):
        """100 columns in 4 blocks are 32 + 32 + 32 + 4 or 4 · 25."""
        made = Made(40, 100, 32, 4)
        weight, actual = read(tmp_path, made.values, ct_pack(made))

        assert ("blocks of 32 columns are inferred from shapes alone; 25 would fit as well",) == weight.warnings
        assert same_bits(made.values, actual)
