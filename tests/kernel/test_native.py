"""The compiled kernel compared with torch's: the same values bit by bit, sums as close as float32 allows."""

import ctypes
import os
import random
import re
import shlex
import subprocess
import threading
import time
from dataclasses import fields
from math import isfinite, log, log10
from statistics import median

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.gguf_stored import Stored, write_gguf
from support.golden_files import NUMBERS, expected_of
from support.making import CPU, FP8, config_of, in_memory, label, open_pairing, read_whole, same_bits, store, sum_up
from test_kernel import TAME, normal, quantize

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.checkpoints.ggml_types import BLOCKS, OF_NAME
from quanterr.comparison import scheduler
from quanterr.comparison.worker import Worker
from quanterr.errors import CheckpointError, UsageError
from quanterr.findings import FindingCollector
from quanterr.formats import exl3, gguf_basic, gguf_codebook, gguf_ik, gguf_iq, gguf_k, gguf_low, gguf_trellis
from quanterr.formats.shared import code_tiles, hadamard
from quanterr.formats.shared.code_tiles import TileLayout
from quanterr.kernel import library, rotation, rounding, structs
from quanterr.kernel.decoder import MAX_ROTATED_COLUMNS
from quanterr.kernel.decoding import decode, measure_error
from quanterr.kernel.enums import ElementType, Packing
from quanterr.kernel.interpreter import decoder_of
from quanterr.kernel.native_sums import KeptRows, NativeSums, Operand, sum_histograms
from quanterr.kernel.specification import SUMS_ALONE, SumOptions
from quanterr.kernel.structs import SideStruct
from quanterr.metrics import OUTLIER, PERCENTILES, RELATIVE_OUTLIER, find_ranks
from quanterr.metrics.histogram import Histogram
from quanterr.metrics.peaks import WINDOW, CellGrid, compute_shares, select_conspicuous
from quanterr.metrics.sums import ADDED, KEPT_ROWS, Sums, as_float, worst_rows
from quanterr.pairing.side import CheckpointSide
from quanterr.recipes import microscaled, scaled, searches, superblocks, tables
from quanterr.recipes.tensors import quantize_tensor
from quanterr.samples import codes, scales
from quanterr.samples import native as samples
from quanterr.samples.conspicuous_rows import MIN_CELL_RATIO
from quanterr.samples.kept_rows import SampleKeeper
from quanterr.samples.measuring import SampleMeasurer
from quanterr.samples.nearest import HALF_STEP, Nearest
from quanterr.samples.reading import PairReader
from quanterr.tensors.chunks import CPU_CHUNK, Chunk, Cut
from quanterr.tensors.workspace import FilledWorkspace, Workspace

BUILT = library.find_best().kernel
needs_kernel = pytest.mark.skipif(BUILT is None, reason=f"no compiled kernel here: {library.find_best().reason}")
WIDEST = library.INSTRUCTION_SETS.index(BUILT.instructions) if BUILT else -1
KERNELS = [library.load(name).kernel for name in library.INSTRUCTION_SETS[: WIDEST + 1]]
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.instructions)

ROTATED = "int8_convrot", "convrot_w4a4"
SHARED = "hqq", "quanto_int2", "modelopt_int4"  # bytes hold codes of several rows
COMPILER = shlex.split(os.environ.get("CC", "cc"))
STRUCTS = "Side", "Run", "Rows", "Sample", "Numbers", "Codes", "Bits", "Blocks"
AGREEMENT = 5e-8  # relative: lost by the float32 lanes of a segment
SUMS = [name for name in structs.SUMS if name not in ("x", "y", "e", "xy")]
SIGNED = {"x": "x_abs", "y": "x_abs", "e": "e_abs", "xy": "x_sq"}  # sums that cancel, and those of magnitudes


MODULES = gguf_basic, gguf_codebook, gguf_ik, gguf_iq, gguf_k, gguf_low, gguf_trellis
DESCRIBED = sorted(
    name
    for module in MODULES
    for block_type in module.TYPES
    for name, block in block_type.blocks.items()
    if not block.rewrite and name not in ElementType.__members__
)


def decode_all(weight, kernel=BUILT, size=1 << 22):
    """Return a weight as the kernel decodes it, chunk by chunk."""
    whole = torch.empty(weight.matrix)
    workspaces = Workspace(), Workspace()
    sums = NativeSums(kernel, OUTLIER)
    operands = tuple(Operand(weight, workspace, None) for workspace in workspaces)
    for chunk in Cut(*weight.matrix, size):
        kept = torch.empty(chunk.shape), torch.empty(chunk.shape)
        with torch.inference_mode():
            addresses = KeptRows(tuple(side.data_ptr() for side in kept))
            assert sums.sums(operands, [chunk], SUMS_ALONE, addresses) is not None
        assert same_bits(*kept)
        whole[chunk.row : chunk.stop_row, chunk.col : chunk.stop_col] = kept[1]
    return whole


@every_kernel
@pytest.mark.parametrize("size", [2, 4, 8, 64, 128, 256, 4096])
def test_rotated_values_equal_torch(monkeypatch, kernel, size):
    values = normal(8192, 3).view(-1) * torch.tensor(10.0) ** torch.randint(-30, 30, (3 * 8192,))
    by_kernel, expected = values.clone(), values.clone()
    monkeypatch.setattr(rotation, "choose_kernel", lambda: library.KernelChoice(None))
    rotation.rotate(expected, size)
    monkeypatch.setattr(rotation, "choose_kernel", lambda: library.KernelChoice(kernel))
    rotation.rotate(by_kernel, size)

    assert same_bits(expected, by_kernel)


@every_kernel
@pytest.mark.parametrize("size", [1, 2, 8, 32, 128, 4096, 12 * 16])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hadamard_products_equal_torch(monkeypatch, kernel, size, axis, dtype):
    shape = (2 * size, 37) if axis == 0 else (3, 2 * size)
    source, factors = normal(*shape).to(dtype) ** 3, [normal(1, n)[0].double() for n in shape]

    def product(choice):
        monkeypatch.setattr(hadamard, "choose_kernel", lambda: library.KernelChoice(choice))
        return hadamard.multiply(source, size, axis, factors)

    assert same_bits(product(None), product(kernel))


def multiply_in_order(matrix, x):
    """Return the product in float32, as a column of fused multiply-adds: rounded to odd in float64, then to nearest."""
    total = torch.zeros(len(matrix), x.shape[1])
    for k in range(len(x)):
        product = matrix[:, k, None].double() * x[k].double()  # this product is exact in float64
        near = product + total
        rest = product - (near - (near - product)) + (total - (near - product))
        inexact = (rest != 0) & (near.view(torch.int64) & 1 == 0)
        total = torch.where(inexact, torch.nextafter(near, rest.sign() * torch.inf), near).float()
    return total


def rotate_sides(monkeypatch, kernel, values, factors):
    monkeypatch.setattr(exl3, "choose_kernel", lambda: library.KernelChoice(kernel))
    out = torch.zeros(len(values), values.shape[1] + 5)
    exl3.rotate(values, factors, out[:, 1:-4])
    return out[:, 1:-4]


ROTATED_VALUES = {
    "usual": lambda x: x,
    "tiny": lambda x: x * 1e-42,
    "large": lambda x: x * 1e33,
    "of unlike sizes": lambda x: x * torch.tensor(10.0) ** (torch.arange(x.numel()) % 53 - 36).view(x.shape),
    "zeros of both signs": lambda x: torch.where(x.abs() < 1, 0.0 * x, x),
    "alike": lambda x: x[:, :1].expand_as(x).contiguous(),
}


@pytest.mark.parametrize("kernel", KERNELS[1:], ids=lambda kernel: kernel.instructions)
@pytest.mark.parametrize("change", ROTATED_VALUES.values(), ids=ROTATED_VALUES)
def test_both_sides_are_rotated_with_sums_in_order(monkeypatch, kernel, change):
    values, cols, rows = change(normal(128, 256)), normal(256, seed=1), normal(128, seed=2)
    cols[3], rows[5] = 0, -0.0
    matrix = (hadamard.make_sylvester(128) / 128**0.5).float()
    by_block = values.view(-1, 128).t()
    right = multiply_in_order(matrix, by_block).t().reshape(values.shape) * cols
    expected = multiply_in_order(matrix, right) * rows[:, None]

    assert same_bits(expected, rotate_sides(monkeypatch, kernel, values, (cols, rows)))


@pytest.mark.parametrize("kernel", KERNELS[:1], ids=lambda kernel: kernel.instructions)
def test_both_sides_are_rotated_by_torch_without_fused_operations(monkeypatch, kernel):
    values, factors = normal(128, 256), (normal(256, seed=1), normal(128, seed=2))
    by_torch, by_kernel = (rotate_sides(monkeypatch, choice, values, factors) for choice in (None, kernel))

    assert same_bits(by_torch, by_kernel)


PARTS = {
    "usual": lambda x: x,
    "tiny": lambda x: x * 1e-20,
    "of unlike sizes": lambda x: x * torch.tensor(2.0) ** (torch.arange(len(x)) % 60 - 30).view(-1, 1, 1),
    "positive": torch.abs,
    "zero or flat": lambda x: torch.where(torch.arange(len(x)).view(-1, 1, 1) % 2 == 0, 0.0, x[:, :, :1].expand_as(x)),
}
SEARCHES = {
    "minimum": lambda x, w, codes: searches.search_with_minimum(x, 15, searches.STEPS_WITH_MINIMUM, w, codes=codes),
    "minimum, by default": lambda x, w, codes: searches.search_with_minimum(x, 15, [-0.5, 0.0, 0.5], codes=codes),
    "minimum, absolute": lambda x, w, codes: searches.search_with_minimum(x, 3, [0.0], absolute=True, codes=codes),
    "symmetric": lambda x, w, codes: (searches.search_symmetric(x, 32, w, codes),),
    "symmetric, by default": lambda x, w, codes: (searches.search_symmetric(x, 32),),
    "three bits": lambda x, w, codes: (searches.search_three_bits(x),),
    "positive": lambda x, w, codes: searches.search_positive(x[:, 0].abs(), 63, w[:, 0]),
}


@every_kernel
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("change", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("size", [8, 16, 24, 32])
def test_ggml_scales_equal_torch(monkeypatch, kernel, search, change, size):
    x, weights = change(normal(101, size).view(101, 1, size)), normal(101, size).view(101, 1, size).abs()

    def encode(choice):
        monkeypatch.setattr(searches, "choose_kernel", lambda: library.KernelChoice(choice))
        codes = torch.zeros_like(x)
        return *search(x, weights, codes), codes

    assert all(torch.equal(of_torch, other) for of_torch, other in zip(encode(None), encode(kernel), strict=True))


@every_kernel
@pytest.mark.parametrize("importance", [None, normal(9, 256).abs()], ids=["", "importance"])
@pytest.mark.parametrize("change", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("ggml_type", superblocks.K_TYPES)
def test_k_type_blocks_equal_torch(monkeypatch, kernel, ggml_type, change, importance):
    x = change(normal(9, 256).view(9, 1, 256)).view(9, 256)

    def encode(choice):
        for module in (searches, superblocks, rounding):
            monkeypatch.setattr(module, "choose_kernel", lambda: library.KernelChoice(choice))
        return superblocks.K_TYPES[ggml_type](x, importance)

    assert torch.equal(encode(None), encode(kernel))


@every_kernel
@pytest.mark.usefixtures("compiled_kernel")
def test_k_type_units_equal_torch_halves(monkeypatch, kernel):
    """The largest scales are next to each bound between two halves, and beyond their range.

    The compiled kernel searches for all codes; torch finds others for infinite values.
    """
    halves = torch.arange(0, 0x7C00, 37).short().view(torch.float16).float()
    bounds = torch.cat([(halves[1:] + halves[:-1]) / 2, halves, torch.tensor([65519.0, 65520.0, 1e6, 1e38])]) * 128
    largest = torch.cat([torch.nextafter(bounds, torch.tensor(way)) for way in (torch.inf, -torch.inf)] + [bounds])
    scales = torch.linspace(-1, 0.5, 16) * largest[:, None]
    x = normal(len(scales), 256).view(-1, 16, 16) * largest[:, None, None]

    def encode(choice):
        monkeypatch.setattr(superblocks, "choose_kernel", lambda: library.KernelChoice(choice))
        return superblocks._encode(superblocks.Q6_K, x, None, scales)

    assert torch.equal(encode(None), encode(kernel))


@every_kernel
@pytest.mark.parametrize("shape", [(1, 7), (3, 64), (5, 200)])
def test_sums_over_regions_equal_torch(kernel, shape):
    x, y, best, steps = (normal(*shape, seed=seed) for seed in range(4))
    given = x, y, Nearest(best.where(steps < 1.5, y), steps.abs() * 2, y > 1)
    whole = [Chunk(0, shape[0], 0, shape[1])]
    by_kernel = [codes.Sampler(kernel=kernel_used)._sum_natively(*given) for kernel_used in (kernel, KERNELS[0])]
    by_native, first, expected = (
        torch.cat([torch.as_tensor(sums).double().view(-1) for sums in region_sums])
        for region_sums in (*by_kernel, codes.Sampler()._sum(whole, *given))
    )

    close = (x.numel() + 8) * 2**-52 * float(expected.max())  # two float64 sums; no Σ|product| exceeds the largest sum
    torch.testing.assert_close(by_native, expected, rtol=0, atol=close)
    assert same_bits(first, by_native)


@needs_kernel
@pytest.mark.parametrize("where", range(3))
def test_regions_with_infinity_are_left_to_torch(where):
    sides = [normal(2, 64, seed=seed) for seed in range(4)]
    sides[where][1, 3] = torch.inf
    x, y, best, steps = sides

    assert codes.Sampler(kernel=BUILT)._sum_natively(x, y, Nearest(best, steps, x > 9)) is None


@every_kernel
@pytest.mark.parametrize("mask", [1, 255, 65535])
def test_tile_codes_equal_torch(monkeypatch, kernel, mask):
    bits = torch.Generator().manual_seed(mask)
    stored = torch.randint(-(1 << 31), 1 << 31, (5, 3, 9), generator=bits).int()
    codes = torch.stack([torch.randint(0, high, (28,), generator=bits) for high in (9, 9, 32)], 1).int()
    layout, table = TileLayout(4, 7, codes), torch.rand(mask + 1, generator=bits)

    def values(choice):
        monkeypatch.setattr(code_tiles, "choose_kernel", lambda: library.KernelChoice(choice))
        return code_tiles.look_up(stored.transpose(0, 1)[:, 1:], layout, table)

    assert same_bits(values(None), values(kernel))


@needs_kernel
class TestValues:
    @pytest.mark.parametrize("case", NUMBERS, ids=lambda path: f"{path.parent.name}/{path.stem}")
    def test_golden_values_equal_the_format_bit_by_bit(self, case):
        with open_pairing(expected_of(case), case) as plan:
            for pair in plan.pairs:
                for weight in (pair.original, pair.quantized):
                    decoder = decoder_of(weight.dequantize)
                    if (
                        decoder
                        and weight.matrix[1] % decoder.storage_unit[0] == decoder.cols % decoder.storage_unit[0] == 0
                    ):
                        assert same_bits(read_whole(weight), decode_all(weight)), weight.name

    @pytest.mark.parametrize(
        "name",
        [
            "bf16",
            "e4m3",
            "gptq",
            "gptq_by_importance",
            "awq_gemm",
            "ct_pack",
            "gguf_q4_k",
            "nvfp4",
            *ROTATED,
            *SHARED,
            "gemma_int",
            "awq_w4a16",
        ],
    )
    def test_values_do_not_depend_on_the_cut(self, tmp_path, name):
        with open_pairing(*store_as(tmp_path, name)) as plan:
            weight = plan.pairs[0].quantized
            cols = weight.matrix[1]
            sizes = [8 * cols, 24 * cols, *([512] if name in ROTATED else []), *([19 * cols] if name in SHARED else [])]

            assert decoder_of(weight.dequantize)
            assert all(same_bits(read_whole(weight), decode_all(weight, size=size)) for size in sizes)

    @pytest.mark.parametrize("name", ["e4m3", "gptq", "gptq_by_importance", "ct_pack", *SHARED])
    @pytest.mark.parametrize("rows", [(0, 48), (8, 40), (24, 25)])
    def test_replaced_codes_decode_as_in_the_format(self, tmp_path, name, rows):
        """Codes are replaced to find the ends of a weight's range; they are in memory, not in a file."""
        with open_pairing(*store_as(tmp_path, name)) as plan:
            weight, chunk = plan.pairs[0].quantized, Chunk(*rows, 0, 2048)
            plain, native_too = FilledWorkspace(), FilledWorkspace()
            for workspace in (plain, native_too):
                workspace.fill((weight.codes,), 0x5A)
            expected, by_kernel = weight.dequantize(chunk, plain).weight, torch.empty(chunk.shape)

            assert decode(BUILT, weight, chunk, native_too, by_kernel)
            assert same_bits(expected, by_kernel)

    @every_kernel
    @pytest.mark.parametrize("name", ["e4m3", "gptq", "awq_gemm", "gguf_q4_k", "nvfp4"])
    def test_errors_equal_torch(self, tmp_path, kernel, name):
        with open_pairing(*store_as(tmp_path, name)) as plan:
            sides = [(side, Workspace()) for side in (plan.pairs[0].original, plan.pairs[0].quantized)]
            rows, cols = sides[0][0].matrix
            for chunk in (Chunk(0, rows, 0, cols), Chunk(8, 9, 0, cols)):
                x, y = (side.dequantize(chunk, workspace).weight.clone() for side, workspace in sides)
                expected = float(x.double().square().sum()), float((y - x).double().square().sum())

                assert expected == pytest.approx(measure_error(kernel, sides, chunk), rel=chunk.n * 2**-52, abs=0)

    @every_kernel
    def test_errors_in_odd_columns_equal_torch(self, kernel):
        x, y = normal(3, 1019), normal(3, 1019, seed=1)
        sides = [ctypes.byref(SideStruct(file=-1, row_bytes=4 * 1019, stored=side.data_ptr())) for side in (x, y)]
        expected = float(x.double().square().sum()), float((y - x).double().square().sum())

        sums = (ctypes.c_double * 2)()
        assert kernel.library.quanterr_measure(*sides, 3, 1019, 2, sums) == structs.DONE
        assert expected == pytest.approx([*sums], rel=x.numel() * 2**-52, abs=0)

    @every_kernel
    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
    @pytest.mark.parametrize("scale", [1.0, 0.1, 1e36, 3e38, 1e-38, 1e-45, -0.3, 0.0])
    @pytest.mark.parametrize("shape", [(1,), (8, 1), (8, 4)])
    def test_all_byte_codes_equal_numpy(self, tmp_path, kernel, dtype, scale, shape):
        codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
        numpy = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2}
        with np.errstate(over="ignore", invalid="ignore"):
            expected = codes.view(numpy.get(dtype, np.int8)).astype(np.float32) * np.float32(scale)
        tensors = {"a.weight": torch.from_numpy(codes).view(dtype), "a.weight_scale": torch.full(shape, scale)}
        y = store(tmp_path / "y.safetensors", tensors)
        with open_pairing(store(tmp_path / "x.safetensors", {"a.weight": torch.zeros(8, 32)}), y) as plan:
            assert same_bits(torch.from_numpy(expected), decode_all(plan.pairs[0].quantized, kernel))

    @every_kernel
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_all_16_bit_codes_equal_torch(self, tmp_path, kernel, dtype):
        codes = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(256, 256).view(dtype)
        x = store(tmp_path / "x.safetensors", {"a.weight": codes})
        with open_pairing(x, x) as plan:
            assert same_bits(codes.float(), decode_all(plan.pairs[0].original, kernel))

    @pytest.mark.session
    @every_kernel
    @pytest.mark.parametrize("name", [name for name in BLOCKS if name in ElementType.__members__])
    def test_any_ggml_block_equals_the_format(self, tmp_path, kernel, name):
        (m, k), (n, n_bytes) = (6, 1024), BLOCKS[name]
        any_bits = torch.Generator().manual_seed(n_bytes)
        stored = torch.randint(0, 256, (m * k // n * n_bytes,), dtype=torch.uint8, generator=any_bits)
        with open_checkpoint(write_gguf(tmp_path / "y.gguf", [Stored("X.weight", name, (m, k), bytes(stored))])) as y:
            weight = CheckpointSide("y", y).recognize("X.weight", (m, k))
            expected, decoded_values = read_whole(weight), decode_all(weight, kernel, size=k)

        assert same_bits(expected[~expected.isnan()], decoded_values[~expected.isnan()])
        assert torch.equal(expected.isnan(), decoded_values.isnan())

    @every_kernel
    @pytest.mark.parametrize("name", DESCRIBED)
    def test_described_blocks_equal_the_format_in_any_row_cut(self, tmp_path, kernel, name):
        m, k = 16, 512
        stored = torch.randint(0, 256, (OF_NAME[name].count_bytes((m, k)),), dtype=torch.uint8)
        with open_checkpoint(write_gguf(tmp_path / "y.gguf", [Stored("X.weight", name, (m, k), bytes(stored))])) as y:
            weight = CheckpointSide("y", y).recognize("X.weight", (m, k))
            expected = read_whole(weight)
            for rows in (1, 3, 5, 16):
                decoded_values = decode_all(weight, kernel, size=rows * k)

                assert same_bits(expected, decoded_values), rows


def store_as(folder, name):
    """Write a large enough weight in a format, and an original."""
    m, k = 48, 2048
    any_bits = torch.Generator().manual_seed(1)

    def codes(*shape, dtype=torch.uint8):
        n_bytes = torch.Size(shape).numel() * dtype.itemsize
        return torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=any_bits).view(dtype).view(shape)

    def scales(*shape):
        return (0.001 + 0.01 * torch.rand(shape, generator=any_bits)).half()

    fp8_scales = torch.randint(8, 0x7F, (m, k // 16), dtype=torch.uint8, generator=any_bits).view(FP8)
    words = {"X.qweight": codes(k // 8, m, dtype=torch.int32), "X.scales": scales(k // 128, m)}
    tensors = {
        "bf16": {"X.weight": normal(m, k).bfloat16()},
        "e4m3": {"X.weight": normal(m, k).to(FP8), "X.weight_scale": torch.rand(m, 1)},
        "gptq": words | {"X.qzeros": torch.full((k // 128, m // 8), 0x77777777, dtype=torch.int32)},
        "gptq_by_importance": words
        | {
            "X.qzeros": codes(k // 128, m // 8, dtype=torch.int32),
            "X.g_idx": (torch.randperm(k, generator=any_bits) // 128).int(),
        },
        "awq_gemm": {
            "X.qweight": codes(k, m // 8, dtype=torch.int32),
            "X.scales": scales(k // 128, m),
            "X.qzeros": codes(k // 128, m // 8, dtype=torch.int32),
        },
        "ct_pack": {
            "X.weight_packed": codes(m, k // 8, dtype=torch.int32),
            "X.weight_scale": scales(m, k // 128),
            "X.weight_shape": torch.tensor([m, k]),
        },
        "nvfp4": {
            "X.weight": codes(m, k // 2),
            "X.weight_scale": fp8_scales,
            "X.weight_scale_2": torch.tensor(0.01),
            "X.comfy_quant": label(format="nvfp4"),
        },
        "int8_convrot": {
            "X.weight": codes(m, k, dtype=torch.int8),
            "X.weight_scale": scales(m, 1).float(),
            "X.comfy_quant": label(format="int8_tensorwise", convrot=True, convrot_groupsize=64),
        },
        "convrot_w4a4": {
            "X.weight": codes(m, k // 2, dtype=torch.int8),
            "X.weight_scale": scales(m).float(),
            "X.comfy_quant": label(format="convrot_w4a4", convrot_groupsize=256),
        },
    }
    tensors |= {
        "hqq": {
            "X.W_q": codes(m * k // 256, 128),
            "X.scale": scales(m * k // 128, 1),
            "X.zero": scales(m * k // 128, 1),
            "X.shape": torch.tensor([m, k]),
            "X.group_size": torch.tensor(128),
            "X.packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
        },
        "quanto_int2": {
            "X.weight._data._data": codes(m * k // 512, 128),
            "X.weight._scale": scales(m * k // 128, 1),
            "X.weight._shift": scales(m * k // 128, 1),
        },
        "modelopt_int4": {"X.weight": codes(m // 2, k), "X.weight_scale": scales(m, k // 128).float()},
        "gemma_int": {"X.weight": codes(m, k // 4), "X.weight_scale": scales(m, 1).float()},
        "awq_w4a16": {
            "X.weight": codes(m, k // 2, dtype=torch.int8),
            "X.weight_scale": scales(k // 64, m),
            "X.weight_zero": scales(k // 64, m),
            "X.comfy_quant": label(format="awq_w4a16"),
        },
    }
    x = store(folder / "x.safetensors", {"X.weight": normal(m, k)})
    if name == "gguf_q4_k":
        from support.gguf_stored import Stored, write_gguf

        halves = scales(m * k // 256, 2).view(torch.uint8)
        blocks = torch.cat([halves, codes(m * k // 256, 140)], 1)
        return x, write_gguf(folder / "y.gguf", [Stored("X.weight", "Q4_K", (m, k), bytes(blocks.numpy().tobytes()))])
    return x, store(folder / "y.safetensors", tensors[name])


def assert_near(values, exact, tolerance=AGREEMENT):
    """Check that counts are equal and sums close; sums that cancel are measured by their terms' magnitudes."""
    counts = [name for name in ADDED if name not in structs.SUMS and "outliers" not in name]
    assert {name: getattr(exact, name) for name in counts} == {name: getattr(values, name) for name in counts}
    off = {}
    for name in structs.SUMS:
        magnitude = abs(as_float(getattr(exact, SIGNED.get(name, name))))
        if name == "y":
            magnitude += as_float(exact.e_abs)
        if name == "xy":
            magnitude += as_float(exact.y_sq)
        if name == "y_sq":  # the kernel finds it as x² + 2xe + e²
            magnitude += as_float(exact.x_sq) + as_float(exact.e_sq)
        error = abs(as_float(getattr(values, name) - getattr(exact, name)))
        if error > tolerance * magnitude:
            off[name] = error / magnitude if magnitude else error
    assert off == {}
    for name in ("e_max", "e_min", "relative_max", "cast_max", "x_max"):
        assert getattr(values, name) == pytest.approx(getattr(exact, name), rel=2**-22, abs=0)


SHAPES = [(64, 512), (37, 129), (300, 7), (1, 1), (3, 17_000)]
UNUSUAL = {
    "all alike": lambda m, k: torch.full((m, k), 0.1),
    "two values": lambda m, k: torch.where(torch.arange(m * k).view(m, k) % 3 == 0, 0.1, -0.7),
    "zeros": lambda m, k: torch.zeros(m, k),
    "tiny": lambda m, k: 1e-30 * normal(m, k),
    "subnormal": lambda m, k: 1e-42 * normal(m, k),
    "huge": lambda m, k: 1e30 * normal(m, k),
    "one outlier per row": lambda m, k: normal(m, k).index_fill_(1, torch.tensor([0]), 1e4),
    "very heavy tails": lambda m, k: normal(m, k) ** 9,
}


@needs_kernel
class TestSums:
    @pytest.mark.parametrize("make", (TAME | UNUSUAL).values(), ids=TAME | UNUSUAL)
    @pytest.mark.parametrize("bits", [8, 3])
    def test_sums_equal_float64(self, make, bits):
        for shape in SHAPES:
            x = make(*shape)
            y = quantize(x, bits)

            assert_near(sum_up(x, y, kernel=BUILT), sum_up(x, y, wide=True))

    @pytest.mark.parametrize("make", (TAME | UNUSUAL).values(), ids=TAME | UNUSUAL)
    def test_percentiles_equal_the_counts(self, make):
        for shape in SHAPES:
            x = make(*shape)
            histogram, ranks = sum_up(x, quantize(x, 3), kernel=BUILT).histogram, find_ranks(x.numel())
            counted = Histogram(histogram.zeros, histogram.counts, histogram.first)

            assert set(ranks) == histogram.known.keys()
            assert counted.values_at(ranks) == histogram.values_at(ranks)

    @pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("side", [0, 1])
    def test_infinite_values_are_counted_and_left_out(self, special, side):
        sides = [normal(40, 700), quantize(normal(40, 700))]
        sides[side][7, 300], sides[side][8, 699] = special, special
        sums, exact = sum_up(*sides, kernel=BUILT), sum_up(*sides, wide=True)

        assert_near(sums, exact)
        assert 2 in (sums.nonfinite_original, sums.nonfinite_quantized)

    @pytest.mark.parametrize("way", [{}, {"wide": True}, {"kernel": BUILT}], ids=["fast", "exact", "native"])
    @pytest.mark.parametrize("size", [CPU_CHUNK, 512], ids=["whole rows", "pieces of rows"])
    def test_zero_row_is_dead_unless_the_original_is_zero(self, way, size):
        """Energies do not decide: those of e equal those of x where y is twice x, or is lost in roundings of x."""
        x = normal(40, 1024)
        y = quantize(x, 6)
        x[7] = 0
        y[3], y[5], y[7], y[9], y[11] = 0, 2 * x[5], 0, 1e-9, 0
        y[11, 1000] = 1e-6
        sums = sum_up(x, y, size, **way)

        assert [3] == [number for number, row in sums.rows.items() if row.dead]
        assert sums.dead_rows == (size == CPU_CHUNK)

    @given(st.data())
    @settings(deadline=None, max_examples=60)
    def test_sums_over_any_numbers_equal_float64(self, data):
        single = st.one_of(st.floats(width=32), st.floats(-1, 1, width=32), st.sampled_from([0.0, -0.0, 1e-45, 3e38]))
        few = data.draw(st.lists(st.tuples(single, single), min_size=1, max_size=40))
        times, cols = data.draw(st.sampled_from([1, 3, 700])), data.draw(st.sampled_from([1, 5]))
        x, y = (torch.tensor(side * times * cols).view(-1, cols * len(few)) for side in zip(*few, strict=True))

        assert_near(sum_up(x, y, kernel=BUILT), sum_up(x, y, wide=True), 2e-7 if times > 1 else AGREEMENT)

    @every_kernel
    @pytest.mark.parametrize("make", (TAME | UNUSUAL).values(), ids=TAME | UNUSUAL)
    def test_sums_have_the_same_digits_on_every_instruction_set(self, kernel, make):
        x = make(70, 1500)
        y = quantize(x, 6)

        assert sum_up(x, y, kernel=KERNELS[0]) == sum_up(x, y, kernel=kernel)

    @every_kernel
    def test_errors_with_infinite_ratios_are_counted_once(self, kernel):
        """Of a segment that float32 cannot sum, the kernel learns that after it has counted the bins."""
        x = normal(9, 1100)
        y = quantize(x, 6)
        x[:, 700], y[:, 700] = 1e-45, 0.25
        sums = sum_up(x, y, kernel=kernel)

        assert_near(sums, sum_up(x, y, wide=True))
        assert sums.histogram.zeros + sum(sums.histogram.counts) == x.numel()

    @every_kernel
    @pytest.mark.parametrize("cell", [(1, 1500), (1, 64), (16, 128), (64, 1500)], ids=str)
    def test_largest_cell_values_are_found(self, kernel, cell):
        """Rows start in the middle of a cell, and float32 cannot sum one segment."""
        x = normal(70, 1500)
        x[31, 600] = 1e30
        y, chunk, cells = quantize(x, 6), Chunk(20, 70, 0, 1500), CellGrid(*cell)
        operands = Operand(in_memory(x), Workspace()), Operand(in_memory(y), Workspace())
        sums = NativeSums(kernel, OUTLIER).sums(operands, [chunk], SumOptions(cells=cells), None)
        down, across = cells.of(chunk)
        values = torch.zeros(2, down.stop * cell[0], across.stop * cell[1])
        values[:, 20:70, :1500] = torch.stack((x, y - x))[:, 20:].abs()
        expected = values.view(2, down.stop, cell[0], across.stop, cell[1]).amax((2, 4))[:, down.start :]

        assert down.start == sums.peaks[0].first
        assert torch.equal(expected, sums.peaks[0].values)

    @pytest.mark.parametrize("rows", [1, 3])
    def test_sums_have_the_same_digits_in_every_cut(self, rows):
        x = normal(50, 70_000) ** 3
        y = quantize(x, 6)
        whole, cut = (sum_up(x, y, size, kernel=BUILT) for size in (50 * 70_000, rows * 70_000))
        pieces = sum_up(x, y, 1 << 14, kernel=BUILT)
        apart = {field.name for field in fields(whole)} - {"rows", "dead_rows"}

        assert worst_rows(whole.rows.items()) == worst_rows(cut.rows.items())
        for other in (cut, pieces):
            assert {name: getattr(whole, name) for name in apart} == {name: getattr(other, name) for name in apart}

    @pytest.mark.parametrize("name", ["bf16", "e4m3", "gptq", "awq_gemm", "gguf_q4_k", *ROTATED])
    def test_largest_error_is_found_in_every_code_arrangement(self, tmp_path, name):
        with open_pairing(*store_as(tmp_path, name)) as plan:
            pair = plan.pairs[0]
            y = read_whole(pair.quantized)
            (rows, cols), row = y.shape, y.shape[0] - 2
            x, largest = y.clone(), [cols - 3, cols - 1]
            x[row, largest], x[row - 1, 0], x[row, 0] = 1e3, -50.0, torch.inf
            worker = Worker(CPU, CPU_CHUNK, OUTLIER, kernel=BUILT)
            with torch.inference_mode():
                [sums] = worker.sum_chunks([replace(pair, original=in_memory(x))], [Chunk(0, rows, 0, cols)])

        col = min(largest, key=lambda col: (-abs(float(y[row, col].double() - 1e3)), col))
        assert (row, col, (1e3, float(y[row, col]))) == sums.worst[1:]

    @pytest.mark.usefixtures("compiled_kernel")
    @pytest.mark.parametrize("scales", ["tensor", "row", "block"])
    def test_sample_rows_are_kept(self, tmp_path, monkeypatch, scales):
        monkeypatch.setattr(SampleMeasurer, "_finish_plain", lambda *_: None)
        x = normal(96, 640).bfloat16()
        r, c = {"tensor": (96, 640), "row": (1, 640), "block": (32, 64)}[scales]
        parts = x.float().view(96 // r, r, 640 // c, c)
        scale = parts.abs().amax((1, 3), keepdim=True) / 127
        codes = (parts / scale).round().to(torch.int8).view(96, 640)
        original = store(tmp_path / "x.safetensors", {"X.weight": x})
        quantized = store(tmp_path / "y.safetensors", {"X.weight": codes, "X.weight_scale": scale[:, 0, :, 0].clone()})

        def layers():
            return quanterr.compare(original, quantized, device="cpu").layers

        kept = layers()
        with monkeypatch.context() as patch:
            patch.setattr(SampleKeeper, "keep_sample", lambda *_: None)
            read_again = layers()
        monkeypatch.setattr(PairReader, "_stack", lambda *_: pytest.fail("the sample is read again"))

        assert read_again == kept == layers()

    def test_importance_weighs_columns_and_elements(self):
        x = normal(60, 1000)
        y = quantize(x, 5)
        for weights in (torch.rand(1, 1000), torch.rand(60, 1000)):

            def importance(chunk, weights=weights):
                return weights if len(weights) == 1 else weights[chunk.row : chunk.stop_row]

            sums = sum_up(x, y, kernel=BUILT, importance=importance)

            assert_near(sums, sum_up(x, y, wide=True, importance=importance))

    def test_truncated_file_is_an_error_and_gives_no_sum(self, tmp_path):
        x, y = store_as(tmp_path, "e4m3")
        with open_pairing(x, y) as plan:
            y.write_bytes(y.read_bytes()[:-5000])
            worker = Worker(CPU, CPU_CHUNK, OUTLIER, kernel=BUILT)
            with pytest.raises(CheckpointError, match="changed while being read"):
                worker.sum_chunks(plan.pairs, [Chunk(0, 48, 0, 2048)])


@needs_kernel
def test_histograms_add_up_the_same_together_and_one_by_one():
    """Histograms without any bin do not widen the sum."""
    errors = [normal(50, seed=n).abs() * 10**n for n in range(3)]
    many = [Histogram.of(torch.zeros(7)), *map(Histogram.of, errors), Histogram.empty()]
    together, expected = sum_histograms(many), Histogram.empty()
    for histogram in many:
        expected.add(histogram)

    assert together == expected
    assert len(together.counts) == len(expected.counts)


@every_kernel
def test_kernel_and_torch_select_the_same_outstanding_cells(kernel):
    """Some weights have cells of zeros, with or without errors."""
    answers = set()
    for seed in range(100):
        choose = random.Random(seed)
        torch.manual_seed(seed)
        down, across = choose.randint(1, 9), choose.randint(1, 9)
        peaks = (torch.rand(2, down, across) + 0.5) * (torch.rand(2, down, across) > choose.choice((0, 0.3)))
        starts = [(choose.randrange(down), choose.randrange(across)) for _ in range(choose.randint(1, 7))]
        parts = [(row, choose.randint(row + 1, down), col, choose.randint(col + 1, across)) for row, col in starts]
        shares, min_usual = compute_shares(peaks), choose.choice((0.0, 1.0))
        usual = max(median([float(shares[a:b, c:d].amax()) for a, b, c, d in parts]), min_usual)

        selected = select_conspicuous(peaks, shares, MIN_CELL_RATIO * usual, 1)
        answers.add(bool(selected))
        numbers = (ctypes.c_int64 * (4 * len(parts)))(*(number for part in parts for number in part))
        given = peaks.data_ptr(), down, across, numbers, len(parts), min_usual, MIN_CELL_RATIO
        assert kernel.library.quanterr_stands_out(*given) == bool(selected)
    assert answers == {True, False}


WEIGHTS = 3  # in the files of the next tests


@pytest.mark.usefixtures("compiled_kernel")
@pytest.mark.parametrize("rows", [16, 128], ids=["whole", "sampled"])
class TestSamples:
    """Samples are measured as by torch on all instruction sets."""

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
    @pytest.mark.parametrize("shape", [(1, 1), (16, 1), (16, 10), (1, 10)], ids=["tensor", "row", "group", "block"])
    def test_samples_with_byte_codes_are_measured_as_by_torch(self, tmp_path, monkeypatch, shape, rows, dtype):
        """A third of the weights have suitable scales; the others' scales are larger, so they lose precision."""
        down, across = 1 if shape == (1, 1) else rows // 16 * shape[0], shape[1]
        x, y = {}, {}
        for n in range(WEIGHTS):
            x[f"{n}.weight"] = values = normal(rows, 635, seed=n) * torch.linspace(1, 40, 635)
            padded = torch.nn.functional.pad(values, (0, 5)).view(down, rows // down, across, 640 // across)
            scale = padded.abs().amax((1, 3), keepdim=True) / (127 if dtype == torch.int8 else 448) * (1 + n % 3 / 5)
            codes = (padded / scale).view(rows, 640)[:, :635]
            y[f"{n}.weight"] = (codes.round() if dtype == torch.int8 else codes).to(dtype)
            y[f"{n}.weight_scale"] = scale[:, 0, :, 0].clone() if scale.numel() > 1 else scale.view(())
        self.check(monkeypatch, store(tmp_path / "x.safetensors", x), store(tmp_path / "y.safetensors", y), 640)

    @pytest.mark.parametrize(
        "recipe",
        ["nvfp4", "mxfp4", "mxfp8", "int4_g32", "int8_g32", "int4_g32:asym", "mlx_q4_g64", "nf4", "fp4", "nf4:double"],
    )
    def test_samples_with_grouped_codes_are_measured_as_by_torch(self, tmp_path, monkeypatch, recipe, rows):
        """The largest values may be clipped, as by int4; codes may be next to the nearest (MLX) or from a table."""
        x = {f"{n}.weight": normal(rows, 640, seed=n) * torch.linspace(1, 4, 640) for n in range(WEIGHTS)}
        self.check_recipe(tmp_path, monkeypatch, recipe, x, x)

    @pytest.mark.session
    @pytest.mark.parametrize(
        "recipe", ["int4_g32", "int8_g32", "int4_g32:asym", "mlx_q4_g64", "nvfp4", "fp8_row", "nf4", "nf4:double"]
    )
    def test_samples_with_compensating_codes_are_measured_as_by_torch(self, tmp_path, monkeypatch, recipe, rows):
        """As by GPTQ, many codes are not the nearest, and the errors of a group's last columns are larger."""
        x = {f"{n}.weight": normal(rows, 640, seed=n) for n in range(WEIGHTS)}
        steps = (torch.arange(640) % 128 + 64) / 128 * 4 / {"int8_g32": 127, "fp8_row": 24}.get(recipe, 7)
        moved = {name: x[name] + 0.3 * steps * normal(rows, 640, seed=n + 20) for n, name in enumerate(x)}
        self.check_recipe(tmp_path, monkeypatch, recipe, x, moved)

    @pytest.mark.session
    @pytest.mark.parametrize("error", [0, 0.3])
    @pytest.mark.parametrize("order", ["by importance", "plain"])
    def test_samples_around_a_single_zero_point_are_measured_as_by_torch(
        self, tmp_path, monkeypatch, rows, order, error
    ):
        """As in GPTQ's symmetric codes, columns are packed downwards with the zero point 8; groups may be any columns.

        With an ``error``, the codes compensate each other.
        """
        x, stored, generator = {}, {}, torch.Generator().manual_seed(1)
        for n in range(WEIGHTS):
            x[f"{n}.weight"] = values = normal(rows, 640, seed=n)
            groups = torch.randperm(640, generator=generator) if order == "by importance" else torch.arange(640)
            groups = groups // 128
            largest = values[:, groups.argsort(stable=True)].view(rows, 5, 128).abs().amax(2)
            scale = (largest / 7.25).half()
            steps = values / scale[:, groups] + error * normal(rows, 640, seed=n + 20)
            nibbles = (steps.round().clamp(-8, 7).int() + 8).t().reshape(80, 8, rows)
            stored |= {
                f"{n}.g_idx": groups.int(),
                f"{n}.qweight": sum(nibbles[:, place] << 4 * place for place in range(8)).contiguous(),
                f"{n}.qzeros": torch.full((5, rows // 8), 0x77777777, dtype=torch.int32),
                f"{n}.scales": scale.t().contiguous(),
            }
        config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
        y = store(tmp_path / "y", stored, config=config)
        self.check(monkeypatch, store(tmp_path / "x.safetensors", x), y, 640)

    def check_recipe(self, tmp_path, monkeypatch, recipe, x, moved):
        """Check the samples of weights where ``moved`` are quantized in place of ``x``."""
        parts = {n: quantize_tensor(values, recipe) for n, values in enumerate(moved.values())}
        stored = {f"{n}.{name}": part for n, weight_parts in parts.items() for name, part in weight_parts.items()}
        y = store(tmp_path / "y", stored, config=config_of(recipe))
        self.check(monkeypatch, store(tmp_path / "x.safetensors", x), y, 640)

    def check(self, monkeypatch, original, quantized, cols):
        taken, take = [], SampleMeasurer._finish_plain
        monkeypatch.setattr(FindingCollector, "findings", lambda *_: [])  # only numbers are compared
        monkeypatch.setattr(SampleMeasurer, "_finish_plain", lambda *args: taken.append(take(*args)) or taken[-1])

        def layers(kernel):
            monkeypatch.setattr(library, "find_best", lambda: library.KernelChoice(kernel))
            return quanterr.compare(original, quantized, device="cpu").layers

        first, *others = map(layers, KERNELS)

        assert sum(sample is not None for sample in taken) >= 2 * len(
            KERNELS
        )  # of 3 weights; torch looks at a few rows of each
        assert all(other == first for other in others)
        monkeypatch.setattr(SampleMeasurer, "_finish_plain", lambda *_: None)
        close = 2 * (cols + 8) * 2**-24 * 10 / log(10)  # dB: two float32 sums of ``cols`` products, each rounded thrice
        for layer, other in zip(first, layers(BUILT), strict=True):
            means = layer.scale_factor or 0, other.scale_factor or 0
            assert means[0] == pytest.approx(means[1], rel=layer.scale_count * 2**-52, abs=0)
            assert (layer.clipped_pct, layer.off_code_pct) == (other.clipped_pct, other.off_code_pct)
            for name in ("attainable_snr_db", "excess_db", "scale_loss_db", "format_snr_db"):
                assert getattr(layer, name) == pytest.approx(getattr(other, name), rel=0, abs=close), name


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (96, 1), (96, 10), (3, 10), (3, 1)], ids=str)
def test_kernel_reads_stored_scales_itself(tmp_path, kernel, shape, dtype):
    """The kernel reads scales for all rows at once, and for chunks that start within a block of rows."""
    codes = (normal(96, 640, seed=1) * 40).clamp(-127, 127).to(torch.int8)
    scale = (normal(*shape) if shape else normal(1)[0]).abs().to(dtype)
    path = store(tmp_path / "y.safetensors", {"X.weight": codes, "X.weight_scale": scale})
    with open_pairing(store(tmp_path / "x.safetensors", {"X.weight": normal(96, 640)}), path) as plan:
        weight = plan.pairs[0].quantized
        expected = weight.dequantize(Chunk(0, 96, 0, 640), Workspace()).weight

        assert decoder_of(weight.dequantize).stored is not None
        for size in (1 << 20, 7 * 640):
            assert same_bits(expected, decode_all(weight, kernel, size))


@every_kernel
@pytest.mark.parametrize("shared", [7, 256, 1 << 40])
def test_kernel_reads_nested_scales_itself(tmp_path, kernel, shared):
    """bitsandbytes numbers scales across rows, so the scales of a factor may start within a row or a chunk."""
    state = {"quant_type": "nf4", "blocksize": 64, "nested_blocksize": shared, "nested_offset": 0.37}
    stored = {
        "X.weight": torch.randint(0, 256, (96 * 320, 1), generator=torch.Generator().manual_seed(1)).byte(),
        "X.weight.quant_map": normal(16),
        "X.weight.absmax": torch.randint(0, 256, (960,), generator=torch.Generator().manual_seed(2)).byte(),
        "X.weight.nested_absmax": normal(-(-960 // shared)),
        "X.weight.nested_quant_map": normal(256, seed=1),
        "X.weight.quant_state.bitsandbytes__nf4": label(**state, dtype="bfloat16", shape=[96, 640]),
    }
    x, y = store(tmp_path / "x.safetensors", {"X.weight": normal(96, 640)}), store(tmp_path / "y.safetensors", stored)
    with open_pairing(x, y) as plan:
        weight = plan.pairs[0].quantized
        expected = weight.dequantize(Chunk(0, 96, 0, 640), Workspace()).weight

        assert decoder_of(weight.dequantize).stored.nested
        for size in (1 << 20, 7 * 640):
            assert same_bits(expected, decode_all(weight, kernel, size))
    assert quanterr.compare(x, y, device="cpu").layers[0].tensor_elements == 96 * 640


@every_kernel
@pytest.mark.parametrize("blocks", [2, 5, 7, 40])
def test_columns_may_belong_to_any_block(tmp_path, kernel, blocks):
    """GPTQ may have blocks of different sizes, or more blocks than columns."""
    random = torch.Generator().manual_seed(blocks)
    stored = {
        "X.qweight": torch.randint(-(2**31), 2**31, (4, 64), generator=random).int(),
        "X.qzeros": torch.randint(-(2**31), 2**31, (blocks, 8), generator=random).int(),
        "X.scales": normal(blocks, 64).half(),
        "X.g_idx": torch.randint(0, blocks, (32,), generator=random).int(),
    }
    x, y = store(tmp_path / "x.safetensors", {"X.weight": normal(64, 32)}), store(tmp_path / "y.safetensors", stored)
    with open_pairing(x, y) as plan:
        weight = plan.pairs[0].quantized
        expected = weight.dequantize(Chunk(0, 64, 0, 32), Workspace()).weight

        assert decoder_of(weight.dequantize).columns
        for size in (1 << 20, 7 * 32):
            assert same_bits(expected, decode_all(weight, kernel, size))
    assert quanterr.compare(x, y, device="cpu").layers[0].tensor_elements == 64 * 32


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zeros", ["one", "one differs"])
def test_kernel_reads_scales_stored_by_columns(tmp_path, kernel, zeros, dtype):
    """A single zero point in GPTQ is part of the codes' values."""
    points = torch.full((3, 8), 0x77777777, dtype=torch.int32)
    if zeros == "one differs":
        points[1, 5] = 0x77277777
    words = torch.randint(-(2**31), 2**31, (48, 64)).int()
    stored = {"X.qweight": words, "X.qzeros": points, "X.scales": normal(3, 64).to(dtype)}
    path = store(tmp_path / "y.safetensors", stored)
    with open_pairing(store(tmp_path / "x.safetensors", {"X.weight": normal(64, 384)}), path) as plan:
        weight = plan.pairs[0].quantized
        expected = weight.dequantize(Chunk(0, 64, 0, 384), Workspace()).weight

        assert (zeros == "one") == (decoder_of(weight.dequantize).zero is None)
        assert decoder_of(weight.dequantize).stored.turned
        for size in (1 << 20, 7 * 384):
            assert same_bits(expected, decode_all(weight, kernel, size))


@needs_kernel
class TestSmallWeights:
    """The kernel computes the sums of small weights in one call, while others are finished."""

    def plan(self, tmp_path):
        x = {f"{n}.weight": normal(n + 1, 64) for n in range(5)} | {"empty.weight": normal(0, 64)}
        y = {name: quantize(values, 5) for name, values in x.items()}
        return open_pairing(store(tmp_path / "x.safetensors", x), store(tmp_path / "y.safetensors", y))

    def compare(self, worker, pairs):
        return [worker.sum_chunks([pair], list(Cut(*pair.original.matrix, CPU_CHUNK)))[0] for pair in pairs]

    def test_small_weights_have_the_same_sums_together_and_separately(self, tmp_path):
        with self.plan(tmp_path) as plan, torch.inference_mode():
            alone, together = (Worker(CPU, CPU_CHUNK, OUTLIER, kernel=BUILT) for _ in range(2))
            together.begin(plan.pairs)

            assert self.compare(alone, plan.pairs) == self.compare(together, plan.pairs)

    def test_small_weights_keep_their_values_until_the_next_batch_but_one(self, tmp_path):
        with self.plan(tmp_path) as plan, torch.inference_mode():
            worker, first = Worker(CPU, CPU_CHUNK, OUTLIER, kernel=BUILT), plan.pairs[1]
            whole = Chunk(0, *first.original.matrix[:1], 0, 64)
            expected = first.quantized.dequantize(whole, Workspace()).weight
            for later, kept in ((plan.pairs[:2], True), (plan.pairs[2:], True), ([], False)):
                worker.begin(later)
                self.compare(worker, later)
                values = worker._buffers.small.values(first)

                assert kept == (values is not None)
                assert values is None or same_bits(expected, values[1])

    def test_small_weights_in_a_truncated_file_raise_their_own_error(self, tmp_path):
        with self.plan(tmp_path) as plan, torch.inference_mode():
            path = tmp_path / "y.safetensors"
            path.write_bytes(path.read_bytes()[:-100])
            worker = Worker(CPU, CPU_CHUNK, OUTLIER, kernel=BUILT)
            worker.begin(plan.pairs)
            with pytest.raises(CheckpointError, match="changed while being read"):
                self.compare(worker, plan.pairs)

    def test_small_weights_are_awaited_if_another_weight_fails(self, tmp_path, monkeypatch):
        """The kernel uses the buffers of small weights until it is done."""
        with self.plan(tmp_path):
            pass
        begun, start = [], NativeSums.start

        def slow_start(sums, tasks):
            wait = start(sums, tasks)
            begun.append(wait)
            return lambda: (begun.remove(wait), wait())[1]

        monkeypatch.setattr(NativeSums, "start", slow_start)
        monkeypatch.setattr(scheduler, "MAX_ROUND_WEIGHTS", 2)
        monkeypatch.setattr(Worker, "finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            quanterr.compare(tmp_path / "x.safetensors", tmp_path / "y.safetensors", device="cpu")

        assert not begun


class TestChoice:
    def test_misspelt_kernel_is_an_error(self, monkeypatch):
        monkeypatch.setenv(library.VARIABLE, "nativ")
        with pytest.raises(UsageError, match="QUANTERR_KERNEL=nativ: choose torch or native"):
            library.choose_kernel()

    def test_torch_is_used_on_request(self, monkeypatch):
        monkeypatch.setenv(library.VARIABLE, "torch")

        assert str(library.choose_kernel()) == "torch"

    def test_missing_native_kernel_is_an_error_with_a_remedy(self, monkeypatch):
        monkeypatch.setenv(library.VARIABLE, "native")
        monkeypatch.setattr(library, "find_best", lambda: library.KernelChoice(None, "no kernel was compiled"))
        with pytest.raises(UsageError, match="no kernel was compiled; install a C compiler, then quanterr again"):
            library.choose_kernel()

    def test_torch_computes_without_a_native_kernel(self, monkeypatch, tmp_path):
        monkeypatch.delenv(library.VARIABLE, raising=False)
        monkeypatch.setattr(library, "find_best", lambda: library.KernelChoice(None, "no kernel was compiled"))
        report = quanterr.compare(*store_as(tmp_path, "e4m3"), device="cpu")

        assert report.run.kernel == "torch"
        assert isfinite(report.layers[0].snr_db)

    @needs_kernel
    def test_kernel_compiled_with_another_header_is_not_used(self, monkeypatch, tmp_path):
        """In the other header, two fields of the same size are swapped."""
        other = tmp_path / "kernel.h"
        other.write_text(structs.HEADER.read_text().replace("double e_max, e_min", "double e_min, e_max"))
        monkeypatch.setattr(structs, "HEADER", other)

        assert library.load.__wrapped__("base").kernel is None
        assert "belongs to another version of quanterr" in library.load.__wrapped__("base").reason

    @needs_kernel
    def test_both_kernels_make_the_same_report(self, monkeypatch, tmp_path):
        sides, reports = store_as(tmp_path, "e4m3"), []
        for kernel in ("torch", "native"):
            monkeypatch.setenv(library.VARIABLE, kernel)
            reports.append(quanterr.compare(*sides, device="cpu").layers[0])

        assert reports[0].snr_db == pytest.approx(reports[1].snr_db, rel=AGREEMENT)
        assert reports[0].worst_element == reports[1].worst_element
        assert reports[0].absolute_error_percentiles == reports[1].absolute_error_percentiles


class TestBuild:
    def test_missing_compiler_builds_no_kernel_and_does_not_fail(self, monkeypatch, tmp_path):
        from quanterr.kernel import build

        monkeypatch.setenv("CC", "no-such-compiler")

        assert ([], "no kernel: there is no C compiler no-such-compiler (CC names another)") == build.compile_kernels(
            tmp_path
        )

    def test_failing_compiler_builds_no_kernel(self, monkeypatch, tmp_path):
        from quanterr.kernel import build

        compiler = tmp_path / "cc"
        compiler.write_text("#!/bin/sh\necho 'kernel.c:1: no' >&2\nexit 1\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CC", str(compiler))
        libraries, record = build.compile_kernels(tmp_path)

        assert [] == libraries
        assert record.startswith(f"no kernel: it cannot be compiled\nkernel_base.so: {compiler} -std=c11 ")
        assert record.endswith("\nfailed with status 1:\nkernel.c:1: no")

    @needs_kernel
    def test_struct_layouts_equal_the_compiler(self, tmp_path):
        """Only a compiler knows where it places fields, so this starts one."""
        declared = {name: getattr(structs, f"{name}Struct") for name in STRUCTS}
        places = [f"offsetof({name}, {field})" for name in STRUCTS for field, *_ in declared[name]._fields_]
        numbers = ", ".join([*places, *(f"sizeof({name})" for name in STRUCTS)])
        source = tmp_path / "places.c"
        source.write_text(f'#include <stddef.h>\n#include "kernel.h"\nEXPORT const int places[] = {{{numbers}}};\n')
        command = [*COMPILER, "-shared", "-fPIC", f"-I{structs.HEADER.parent}", "-o", tmp_path / "places.so", source]
        subprocess.run(command, check=True)
        fields = [getattr(declared[name], field).offset for name in STRUCTS for field, *_ in declared[name]._fields_]
        python_layout = [*fields, *(ctypes.sizeof(declared[name]) for name in STRUCTS)]

        assert python_layout == [
            *(ctypes.c_int * len(python_layout)).in_dll(ctypes.CDLL(tmp_path / "places.so"), "places")
        ]

    @pytest.mark.parametrize(
        "declaration", ["char *;", "int32_t (*f)(void);", "unknown n;", "int32_t n[UNKNOWN];", "int32_t n : 3;"]
    )
    def test_unreadable_declaration_is_an_error(self, monkeypatch, declaration):
        monkeypatch.setattr(structs, "_read_structs", lambda: {"Odd": declaration})

        with pytest.raises((ValueError, KeyError)):
            structs.read_fields("Odd")

    def test_kernel_has_the_same_constants_as_the_metrics(self):
        sources = structs.HEADER.read_text() + (structs.HEADER.parent / "compare.c").read_text()
        constants = dict(re.findall(r"^#define (\w+) +([\d.]+)", sources, re.MULTILINE))

        assert float(constants["RELATIVE_OUTLIER"]) == RELATIVE_OUTLIER
        assert int(constants["KEPT_ROWS"]) == KEPT_ROWS
        assert int(constants["RANKS"]) == len(PERCENTILES)
        assert int(constants["WINDOW"]) == WINDOW
        assert int(constants["SEGMENT"]) == MAX_ROTATED_COLUMNS

    def test_samples_have_the_same_limits_as_torch(self):
        """The limits may be stricter, so that torch looks at all doubtful regions; every field has a value."""
        limits = {name: getattr(samples.LIMITS, name) for name, _ in structs.LimitsStruct._fields_}

        assert all(limits.values())
        assert limits["half_step"] == HALF_STEP
        assert limits["group_db"] == scales.GROUP_DB
        assert (limits["floor"], limits["min_elements"], limits["min_regions"]) == (
            codes.NEGLIGIBLE_SHARE,
            codes.MIN_REGION_ELEMENTS,
            codes.MIN_TILES,
        )
        assert 0.99 * codes.MIN_EXPLAINED_SHARE < limits["like"] < codes.MIN_EXPLAINED_SHARE
        for name, usual in {"part": codes.PART_DB, "worse": codes.BETTER_DB, "apart": codes.TILE_DB}.items():
            assert usual - 0.1 < 10 * log10(limits[name]) < usual
        assert -codes.BETTER_DB - 0.1 < 10 * log10(limits["better"]) < -codes.BETTER_DB
        assert codes.COMPENSATED_DB < 10 * log10(limits["compensated"]) < codes.COMPENSATED_DB + 0.1

    def test_searches_have_the_same_constants_as_torch(self):
        sources = ((structs.HEADER.parent / name).read_text() for name in ("searches.c", "shared.h"))
        constants = dict(re.findall(r"^#define (\w+) ([\d.e-]+)", "".join(sources), re.MULTILINE))

        assert (float(constants["MIN_MAGNITUDE"]), int(constants["PASSES"])) == (
            searches.MIN_MAGNITUDE,
            searches.MAX_PASSES,
        )


CODES = {
    "e4m3": scaled.FP8.codes,
    "e2m1": microscaled._make_e2m1(),
    "nf4": tables._make_codes("nf4"),
    "fp4": tables._make_codes("fp4"),
    "integers": rounding.make_integers(-8, 7, 8),
    "truncated": rounding.make_truncated_integers(15),
    "away": rounding.make_signed_bytes(),
}


def near(codes):
    """Return numbers at which the nearest code changes, their neighbours, and the ends of float32's range."""
    halves = torch.arange(-20, 20) / 2
    bounds = torch.cat(
        [halves, torch.arange(-448 * 16, 448 * 16 + 1) / 16, 2.0 ** torch.arange(-20, 9), halves * 2**-10]
    )
    if codes.kernel.n_bounds:
        table = (ctypes.c_float * codes.kernel.n_bounds).from_address(codes.kernel.bounds)
        bounds = torch.cat([bounds, torch.tensor(list(table))])
    ends = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e30, -1e30, torch.inf, -torch.inf])
    return torch.cat([bounds, *(torch.nextafter(bounds, torch.tensor(way)) for way in (torch.inf, -torch.inf)), ends])


@pytest.fixture
def choose(monkeypatch):
    """A function that lets recipes round by a kernel or by torch."""
    return lambda kernel: monkeypatch.setattr(rounding, "choose_kernel", lambda: library.KernelChoice(kernel))


@every_kernel
class TestRounding:
    @pytest.mark.parametrize("name", CODES)
    def test_each_number_has_the_same_code_as_in_torch(self, choose, kernel, name):
        x = near(CODES[name])[None]
        if name == "away":
            x = x.clamp(-127, 127)  # scales are the largest magnitude over 127
        outcomes = []
        for choice in (None, kernel):
            choose(choice)
            outcomes.append(rounding.find_codes(x.clone(), torch.ones(1, 1), CODES[name], x.shape[1]))

        assert torch.equal(*outcomes)

    @pytest.mark.parametrize("group", [2, 16, 32, 100, 1000])
    @pytest.mark.parametrize("rows", [1, 5])
    def test_each_group_uses_its_own_unit(self, choose, kernel, group, rows):
        x, groups = normal(5, 500), -(-500 // group)
        units, before, after = (torch.rand(rows, groups) + 0.5 for _ in range(3))
        for name, multiply, *shifts in (
            ("e4m3", False, None, None),
            ("e4m3", True, None, None),
            ("integers", False, None, after),
            ("truncated", True, before, after),
        ):
            outcomes = []
            for choice in (None, kernel):
                choose(choice)
                options = {"multiply": multiply, "before": shifts[0], "after": shifts[1]}
                outcomes.append(rounding.find_codes(x, units, CODES[name], group, **options))

            assert torch.equal(*outcomes), name

    @pytest.mark.parametrize("packing", Packing)
    def test_four_bit_codes_are_packed(self, choose, kernel, packing):
        x, units, to = 4 * normal(70, 32), torch.rand(70, 1) + 0.5, rounding.make_integers(-8, 7, 8)
        choose(None)
        codes = rounding.find_codes(x, units, to, 32)
        first, second = (codes[:, :16], codes[:, 16:]) if packing == Packing.HALVES else (codes[:, ::2], codes[:, 1::2])
        expected = first << 4 | second if packing == Packing.HIGH_FIRST else first | second << 4
        for choice in (None, kernel):
            choose(choice)
            gapped = torch.zeros(70, 40, dtype=torch.uint8)  # rows with gaps between them in memory
            inside = gapped[:, 5 : 37 if packing == Packing.BYTES else 21]
            packed_codes = rounding.find_codes(x, units, to, 32, packing=packing)
            rounding.find_codes(x, units, to, 32, packing=packing, out=inside)

            assert torch.equal(codes if packing == Packing.BYTES else expected, packed_codes)
            assert torch.equal(packed_codes, inside)
            assert not gapped[:, :5].any()
            assert not gapped[:, 5 + inside.shape[1] :].any()

    @pytest.mark.parametrize("size", [1, 8, 32, 45])
    def test_first_maximum_wins_a_tie(self, choose, kernel, size):
        x = normal(1000, size).bfloat16().float()
        x[:3] = torch.tensor([[0.0], [2.0], [-2.0]])
        x[1, 1:], x[2, 1:] = -2.0, 2.0
        outcomes = []
        for choice in (None, kernel):
            choose(choice)
            outcomes.append(rounding.find_largest(x))

        assert torch.equal(*outcomes)

    @pytest.mark.parametrize("packing", [Packing.LOW_FIRST, Packing.HIGH_FIRST])
    @pytest.mark.parametrize(("cols", "group"), [(8, 8), (16, 16), (48, 48), (64, 32), (30, 10), (36, 32)])
    def test_codes_that_do_not_fill_vectors_are_packed_as_by_torch(self, choose, kernel, packing, cols, group):
        x, units, to = 4 * normal(7, cols), torch.rand(7, -(-cols // group)) + 0.5, rounding.make_integers(-8, 7, 8)
        outcomes = []
        for choice in (None, kernel):
            choose(choice)
            outcomes.append(rounding.find_codes(x, units, to, group, packing=packing))

        assert torch.equal(*outcomes)

    @pytest.mark.parametrize("size", [1, 2, 16, 32, 45, 1000])
    def test_magnitudes_are_group_maxima(self, choose, kernel, size):
        x = normal(5, 333)
        x[1, 1], x[2, 2], x[3, 3] = -torch.inf, torch.nan, -x.abs().max()
        groups = [group.abs().amax() for group in x.view(-1).split(size)]
        for choice in (None, kernel):
            choose(choice)

            torch.testing.assert_close(
                rounding.find_magnitudes(x, size), torch.stack(groups), rtol=0, atol=0, equal_nan=True
            )


def words(declaration):
    """Return the names that a C declaration declares."""
    first, *others = declaration.strip().split(",")
    return [name for name in (first.split(" ")[-1], *others) if name.strip()]


@needs_kernel
@pytest.mark.slow
def test_file_truncated_during_reading_is_an_error_and_never_a_signal(tmp_path):
    """Files are cut at random moments: each comparison ends with all sums or with an error."""
    x = normal(512, 1024)
    paths = (
        store(tmp_path / "x.safetensors", {"a.weight": x}),
        store(tmp_path / "y.safetensors", {"a.weight": x.half()}),
    )
    contents, chance = [path.read_bytes() for path in paths], random.Random(1)
    chunks = list(Cut(512, 1024, 1 << 16))

    def compare(cut=None):
        with open_pairing(*paths) as plan, torch.inference_mode():
            worker, total = Worker(CPU, 1 << 16, OUTLIER, kernel=BUILT), Sums()
            if cut:
                cut.start()
            for first in range(0, len(chunks), 2):
                total.add(worker.sum_chunks(plan.pairs, chunks[first : first + 2])[0])
            for side in (plan.pairs[0].original, plan.pairs[0].quantized):
                side.codes.file.check_unchanged()
        return total.n, total.x_sq, total.e_sq

    started = time.perf_counter()
    whole, errors = compare(), 0
    usual = time.perf_counter() - started
    for _ in range(300):
        side = chance.randrange(2)
        length = chance.randrange(len(contents[side]))
        cut = threading.Timer(chance.random() * usual, os.truncate, [paths[side], length])
        try:
            assert whole == compare(cut)
        except CheckpointError:
            errors += 1
        cut.join()
        paths[side].write_bytes(contents[side])

    assert 0 < errors
