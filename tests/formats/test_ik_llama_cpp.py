"""GGUF types whose rows have heads or are interleaved: damage is noticed, and pieces are read from the right bytes.

tests/formats/test_formats.py checks with golden files that values equal those of ik_llama.cpp.
"""

import struct

import numpy as np
import pytest
import torch
from support.gguf_stored import I32, Stored, array, write_gguf
from support.making import read_whole, same_bits, store

import quanterr
from quanterr.advice.kept_commands import list_words
from quanterr.checkpoints import open_checkpoint
from quanterr.checkpoints.ggml_types import IN_FORKS, OF_NAME, REFUSED, TYPES
from quanterr.errors import CheckpointError
from quanterr.pairing.side import CheckpointSide

SHAPE = 64, 512
# Type → its blocks begin with a float16 scale for each of its rows.
SCALED = {
    "IQ4_K": True,
    "IQ3_K_R4": True,
    "IQ5_KS": False,
    "IQ4_KS_R4": False,
    "IQ3_KT": False,
    "Q5_K_R4": True,
    "IQ1_S_R4": False,
}
every_layout = pytest.mark.parametrize("ggml_type", SCALED)


def rows_of(ggml_type, shape=SHAPE):
    """Return random codes with equal scales, uint8 (groups of rows, bytes)."""
    of = OF_NAME[ggml_type]
    groups, blocks = shape[0] // of.rows, shape[1] // of.elements
    raw = np.random.default_rng(of.number).integers(0, 256, (groups, blocks, of.rows * of.n_bytes), dtype=np.uint8)
    if SCALED[ggml_type]:
        n = of.rows * (2 if ggml_type.startswith("Q5_K") else 1)
        raw[:, :, : 2 * n] = np.full(n, 1e-4, np.float16).view(np.uint8)
    heads = np.full((groups, of.rows), 1e-4, np.float16 if of.head == 2 else np.float32).view(np.uint8)
    return np.concatenate([heads[:, : of.rows * of.head], raw.reshape(groups, -1)], 1)


def write(folder, ggml_type, raw, shape=SHAPE):
    return write_gguf(folder / "y.gguf", [Stored("w", ggml_type, shape, raw.tobytes()), Stored("z", "F32", (64,))])


def values_of(folder, ggml_type, raw):
    with open_checkpoint(write(folder, ggml_type, raw)) as checkpoint:
        return read_whole(CheckpointSide("y", checkpoint).recognize("w", SHAPE)).clone()


def original_of(folder, ggml_type, raw):
    """Write numbers close to the stored ones."""
    x = values_of(folder, ggml_type, raw)
    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)) * 0.03 * x.std()
    return store(folder / "x.safetensors", {"w": x + noise, "z": torch.zeros(64)})


def gravest(report):
    return {finding.code for finding in report.findings if finding.severity != "info"}


@every_layout
class TestDamage:
    def test_undamaged_rows_cause_no_warning(self, tmp_path, ggml_type):
        raw = rows_of(ggml_type)
        report = quanterr.compare(original_of(tmp_path, ggml_type, raw), write(tmp_path, ggml_type, raw), device="cpu")

        assert [("w", "ggml." + ggml_type.lower())] == [
            (layer.layer_name, layer.quantized_dtype) for layer in report.layers
        ]
        assert "nonfinite_quantized" not in gravest(report)
        assert 30 < report.layers[0].snr_db < 34

    def test_swapped_rows_are_noticed(self, tmp_path, ggml_type):
        raw = rows_of(ggml_type)
        x = original_of(tmp_path, ggml_type, raw)
        raw[[1, 2]] = raw[[2, 1]]
        report = quanterr.compare(x, write(tmp_path, ggml_type, raw), device="cpu")

        assert report.layers[0].snr_db < 15
        assert gravest(report)

    def test_infinite_scale_is_noticed(self, tmp_path, ggml_type):
        raw = rows_of(ggml_type)
        x = original_of(tmp_path, ggml_type, raw)
        infinite = struct.pack("<e" if OF_NAME[ggml_type].head in (0, 2) else "<f", float("inf"))
        raw[3, : len(infinite)] = np.frombuffer(infinite, np.uint8)
        report = quanterr.compare(x, write(tmp_path, ggml_type, raw), device="cpu")

        assert "nonfinite_quantized" in gravest(report)

    def test_missing_row_is_refused(self, tmp_path, ggml_type):
        raw = rows_of(ggml_type)[:-1]
        with pytest.raises(CheckpointError, match=r"overlap|truncated"):
            open_checkpoint(write(tmp_path, ggml_type, raw))

    def test_type_with_another_size_is_refused(self, tmp_path, ggml_type):
        raw, size = rows_of(ggml_type), OF_NAME[ggml_type].count_bytes(SHAPE)
        others = [
            other_type
            for other_type in OF_NAME.values()
            if other_type.count_bytes(SHAPE) != size and other_type.number not in IN_FORKS
        ]
        for other in others[::7]:
            with pytest.raises(CheckpointError, match=r"overlap|belong to no tensor|truncated"):
                open_checkpoint(write(tmp_path, other.name, raw))


@pytest.mark.parametrize(("ggml_type", "other"), [("IQ4_K", "Q4_K"), ("IQ3_K", "Q3_K"), ("IQ4_KS_R4", "IQ4_KS")])
def test_type_with_the_same_size_is_noticed_by_its_values(tmp_path, ggml_type, other):
    raw = rows_of(ggml_type) if ggml_type in SCALED else rows_of("IQ3_K_R4")
    x = original_of(tmp_path, ggml_type, raw)
    report = quanterr.compare(x, write(tmp_path, other, raw), device="cpu")

    assert gravest(report) & {"implausible_error", "nonfinite_quantized"}


@pytest.mark.parametrize("shape", [(6, 512), (512,), (3, 5, 512)])
def test_rows_that_do_not_fill_groups_are_an_error(tmp_path, shape):
    with pytest.raises(CheckpointError, match=r"\d rows, but IQ4_KS_R4 interleaves 4"):
        open_checkpoint(write_gguf(tmp_path / "y.gguf", [Stored("w", "IQ4_KS_R4", shape, bytes(1024))]))


def test_stacked_experts_are_read_in_order(tmp_path):
    raw = rows_of("IQ4_KS_R4", (24, 512))
    whole = Stored("w", "IQ4_KS_R4", (3, 8, 512), raw.tobytes())
    alone = Stored("w", "IQ4_KS_R4", (24, 512), raw.tobytes())
    values = []
    for tensor in (whole, alone):
        with open_checkpoint(write_gguf(tmp_path / "y.gguf", [tensor])) as checkpoint:
            values.append(read_whole(CheckpointSide("y", checkpoint).recognize("w", tensor.shape)).clone())

    assert same_bits(*values)


def test_another_shape_from_comfyui_is_an_error(tmp_path):
    shape = array("comfy.gguf.orig_shape.w", I32, (16, 32, 4, 16))
    with pytest.raises(CheckpointError, match="IQ4_KS, which stores whole rows: not known"):
        open_checkpoint(write_gguf(tmp_path / "y.gguf", [Stored("w", "IQ4_KS", SHAPE)], [shape]))


def test_ids_shared_by_forks_are_refused_with_all_their_names():
    assert {"IQ2_TN", "IQ1_TN"} <= {name for name, _ in IN_FORKS.values()}
    assert not REFUSED.keys() & TYPES.keys()


@pytest.mark.parametrize("n_bytes", [4 * 512 * 18 // 32, 4 * 512 // 4])
def test_i2_s_with_another_size_is_refused_with_all_its_names(tmp_path, n_bytes):
    tensors = [Stored("w", "I2_S", (4, 512), bytes(n_bytes)), Stored("z", "F32", (64,))]
    with open_checkpoint(write_gguf(tmp_path / "y.gguf", tensors)) as checkpoint:
        assert "type I2_S or IQ4_NL_4_4 (id 36)" in checkpoint.entries["w"].unknown
        assert checkpoint.entries["z"].unknown is None


@pytest.mark.parametrize(("ggml_type", "is_command"), [("IQ4_KS", False), ("Q5_K", True)])
def test_llama_quantize_is_only_proposed_for_types_it_knows(tmp_path, ggml_type, is_command):
    name = "blk.0.ffn_up.weight"
    original = write_gguf(tmp_path / "x.gguf", [Stored(name, "F32", SHAPE)])
    quantized = write_gguf(
        tmp_path / "y.gguf", [Stored(name, ggml_type, SHAPE, bytes([1] * OF_NAME[ggml_type].count_bytes(SHAPE)))]
    )
    words = list_words(quanterr.compare(original, quantized, device="cpu"), [name])

    assert is_command == next(word.is_command for word in words if word.program == "llama-quantize")
