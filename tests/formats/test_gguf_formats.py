"""GGUF checkpoints from end to end; tests/formats/test_formats.py checks their values."""

import math
import struct

import numpy as np
import pytest
import torch
from support.gguf_stored import I32, Stored, array, gguf, write_gguf
from support.making import open_pairing, read_whole, same_bits
from support.stored import write

import quanterr
from quanterr.checkpoints.ggml_types import BLOCKS
from quanterr.documents.gate_results import exit_status
from quanterr.errors import CheckpointError, Status
from quanterr.formats import CODE_DTYPES, FORMATS
from quanterr.pairing.model import Bucket
from quanterr.tensors.chunks import CPU_CHUNK

RNG = np.random.default_rng(0)


def weights(*shape):
    return torch.from_numpy(RNG.standard_normal(shape).astype(np.float32) * 0.05)


def q8_0(x):
    """Return blocks of Q8_0, by plain rounding, and their values."""
    blocks = x.numpy().reshape(-1, 32)
    scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    codes = np.rint(blocks / scale.astype(np.float32)).astype(np.int8)
    values = codes.astype(np.float32) * scale.astype(np.float32)
    return np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], 1).tobytes(), torch.from_numpy(values)


def tq2_0(x):
    """Return blocks of TQ2_0, by plain rounding."""
    blocks = x.numpy().reshape(-1, 256)
    scale = np.abs(blocks).max(1, keepdims=True).astype(np.float16)
    codes = (np.rint(blocks / scale.astype(np.float32)) + 1).astype(np.uint8).reshape(-1, 2, 4, 32)
    packed = codes[:, :, 0] | codes[:, :, 1] << 2 | codes[:, :, 2] << 4 | codes[:, :, 3] << 6
    return np.concatenate([packed.reshape(-1, 64), scale.view(np.uint8)], 1).tobytes()


def test_every_block_type_is_a_format_with_its_size():
    dtypes = {dtype for row in FORMATS for dtype in row.codes.dtypes}

    assert set(BLOCKS) <= dtypes
    assert set(BLOCKS) <= CODE_DTYPES


def test_two_gguf_files_are_compared(tmp_path):
    x = weights(40, 64)
    codes, values = q8_0(x)
    original = write_gguf(
        tmp_path / "model-f32.gguf", [Stored("blk.0.ffn_up.weight", "F32", (40, 64), x.numpy().tobytes())]
    )
    quantized = write_gguf(tmp_path / "model-q8_0.gguf", [Stored("blk.0.ffn_up.weight", "Q8_0", (40, 64), codes)])

    report = quanterr.compare(original, quantized, device="cpu")

    (layer,) = report.layers
    error = (values.view(40, 64) - x).double()
    assert Status.OK == exit_status(report)
    assert ("gguf_q8_0", "ggml.q8_0", "torch.float32") == (layer.format, layer.quantized_dtype, layer.original_dtype)
    assert ((1, 32), 8.5) == (layer.block_size, layer.bits_per_weight)
    assert math.isclose(49.92, layer.theoretical_sqnr_db)
    assert (None, 0) == (layer.saturated_pct, layer.scale_count)
    assert math.isclose(float((error**2).mean()), layer.mean_squared_error, rel_tol=1e-6)


def test_large_weights_give_the_same_with_any_number_of_threads(tmp_path, monkeypatch):
    shapes = {"tall": (1_500, 1_024), "wide": (2, CPU_CHUNK + 96), "experts": (3, 300, 1_024)}
    original, quantized, squares = {}, [], {}
    for name, shape in shapes.items():
        original[name] = weights(*shape)
        codes, values = q8_0(original[name])
        quantized.append(Stored(name, "Q8_0", shape, codes))
        squares[name] = float(((values.view(shape) - original[name]).double() ** 2).mean())
    x, y = write(tmp_path / "x.safetensors", original), write_gguf(tmp_path / "y.gguf", quantized)
    reports = []
    for threads in (1, 3):
        monkeypatch.setattr("quanterr.comparison.devices.usable_cores", lambda threads=threads: threads)
        reports.append(quanterr.compare(x, y, device="cpu"))

    assert reports[0].layers == reports[1].layers
    for layer in reports[0].layers:
        assert math.isclose(squares[layer.layer_name], layer.mean_squared_error, rel_tol=1e-6)


def test_weight_stored_in_another_shape_is_compared_in_its_own(tmp_path):
    x = weights(16, 4, 3, 3)
    codes, values = q8_0(x)
    shape = array("comfy.gguf.orig_shape.conv.weight", I32, x.shape)
    quantized = write_gguf(tmp_path / "y.gguf", [Stored("conv.weight", "Q8_0", (18, 32), codes)], [shape])
    original = write(tmp_path / "x.safetensors", {"model.diffusion_model.conv.weight": x})

    with open_pairing(original, quantized) as plan:
        weight = plan.pairs[0].quantized
        assert (16, 4, 3, 3) == weight.shape
        assert same_bits(values.view(16, 36), read_whole(weight, 7 * 36))
    assert (16, 4, 3, 3) == quanterr.compare(original, quantized, device="cpu").layers[0].tensor_shape


@pytest.mark.parametrize("bits", [16, 32])
def test_numbers_without_blocks_are_compared_directly(tmp_path, bits):
    x = weights(8, 8).to({16: torch.bfloat16, 32: torch.float32}[bits])
    data = x.view(torch.uint8).numpy().tobytes()
    quantized = write_gguf(tmp_path / "y.gguf", [Stored("a", {16: "BF16", 32: "F32"}[bits], (8, 8), data)])
    report = quanterr.compare(write(tmp_path / "x.safetensors", {"a": x}), quantized, device="cpu")

    assert [("a", "dense")] == [(layer.layer_name, layer.format) for layer in report.lossless]


# Tensors that do not belong together


def reasons(folder, *tensors, shape=(2, 64)):
    """Return why the weight ``a.weight`` is not read."""
    original = write(folder / "x.safetensors", {"a.weight": weights(*shape)})
    with open_pairing(original, write_gguf(folder / "y.gguf", tensors)) as plan:
        assert [] == plan.pairs
        assert {Bucket.ERROR} == {left.bucket for left in plan.leftovers if left.name == "a.weight"}
        return next(left.reason for left in plan.leftovers if left.name == "a.weight")


@pytest.mark.parametrize("dtype", ["Q4_0", "MXFP4"])
def test_unexpected_scale_is_refused(tmp_path, dtype):
    refused = reasons(tmp_path, Stored("a.weight", dtype, (2, 64)), Stored("a.scale", "F32", (1,)))

    assert f"stored as gguf_{dtype.lower()} ({dtype}), but unused: a.scale" == refused


@pytest.mark.parametrize("shape", [(2,), (3,), (64,), (2, 1)])
def test_scale_must_be_single_or_one_per_expert(tmp_path, shape):
    refused = reasons(tmp_path, Stored("a.weight", "NVFP4", (2, 64)), Stored("a.scale", "F32", shape))

    assert (
        f"scale a.scale (F32 {list(shape)}) should be one number or one per expert of a weight of shape [2, 64]"
        in refused
    )


def test_second_nvfp4_scale_is_refused(tmp_path):
    tensors = [
        Stored("a.weight", "NVFP4", (2, 64)),
        Stored("a.scale", "F32", (1,)),
        Stored("a.weight_scale", "F32", (1,)),
    ]

    assert "stored as gguf_nvfp4 (NVFP4), but unused: a.weight_scale" == reasons(tmp_path, *tensors)


def test_nvfp4_scale_may_have_the_name_from_other_converters(tmp_path):
    blocks = RNG.integers(0, 256, 2 * 36).astype(np.uint8).tobytes()
    values = {}
    for name in ("a.scale", "a.weight.scale"):
        tensors = Stored("a.weight", "NVFP4", (2, 64), blocks), Stored(name, "F32", (1,), struct.pack("<f", 0.3))
        path = write_gguf(tmp_path / f"{name}.gguf", tensors)
        with open_pairing(write(tmp_path / "x.safetensors", {"a.weight": weights(2, 64)}), path) as plan:
            values[name] = plan.pairs[0].quantized
            values[name, "values"] = read_whole(values[name])

    assert same_bits(values["a.scale", "values"], values["a.weight.scale", "values"])
    assert [(), 1] == [values["a.scale"].warnings, len(values["a.weight.scale"].warnings)]


# The largest error of right readings


def low_bit_report(folder, x, codes):
    original = write(folder / "x.safetensors", {"a.weight": x})
    return quanterr.compare(
        original, write_gguf(folder / "y.gguf", [Stored("a.weight", "TQ2_0", (8, 256), codes)]), device="cpu"
    )


def test_two_bit_weight_may_be_almost_as_far_off_as_zeros(tmp_path):
    x = weights(8, 256)
    report = low_bit_report(tmp_path, x, tq2_0(x))

    assert Status.OK == exit_status(report)
    assert 0 < report.layers[0].snr_db < 3
    assert "error" not in {finding.severity for finding in report.findings}


def test_two_bit_weight_further_off_than_zeros_is_an_error(tmp_path):
    report = low_bit_report(tmp_path, weights(8, 256), tq2_0(weights(8, 256)))

    assert Status.INCONCLUSIVE == exit_status(report)
    assert ["implausible_error"] == [finding.code for finding in report.findings]


def test_q2_0_with_another_block_size_is_refused(tmp_path):
    """A fork of llama.cpp stores blocks of 128 elements in 34 bytes under the same id."""
    rows, cols = 8, 1_024
    data = bytes(rows * cols // 128 * 34)
    path = write_gguf(tmp_path / "y.gguf", [Stored("a", "Q2_0", (rows, cols), data), Stored("b", "F32", (64,))])

    with pytest.raises(CheckpointError, match="a and b overlap"):
        quanterr.compare(path, path, device="cpu")


def test_single_element_in_a_block_is_in_its_place(tmp_path):
    """Q4_0 shows the order of codes: the low halves of all bytes come first, then the high halves."""
    codes = [8] * 32
    codes[3], codes[20] = 9, 5
    packed = bytes(codes[j] | codes[16 + j] << 4 for j in range(16))
    path = tmp_path / "y.gguf"
    path.write_bytes(gguf([Stored("a", "Q4_0", (1, 32), struct.pack("<e", 2.0) + packed)]))
    expected = torch.zeros(1, 32)
    expected[0, 3], expected[0, 20] = 2.0, -6.0

    with open_pairing(write(tmp_path / "x.safetensors", {"a": expected}), path) as plan:
        assert torch.equal(expected, read_whole(plan.pairs[0].quantized))


# Values that are not finite


def test_scale_that_is_not_finite_is_a_finding_and_the_file_is_read(tmp_path):
    block = struct.pack("<e", 0.5) + bytes(range(32))
    broken = b"".join(struct.pack("<e", scale) + block[2:] for scale in (float("nan"), float("inf")))
    original = write_gguf(tmp_path / "x.gguf", [Stored("w", "Q8_0", (3, 32), block * 3)])
    quantized = write_gguf(tmp_path / "y.gguf", [Stored("w", "Q8_0", (3, 32), block + broken)])

    report = quanterr.compare(original, quantized, device="cpu")

    assert Status.INCONCLUSIVE == exit_status(report)
    assert ["nonfinite_quantized"] == [finding.code for finding in report.findings]
    assert "w: 64 of 96 elements of the quantized weight are NaN or infinite" in report.reasons[0]
