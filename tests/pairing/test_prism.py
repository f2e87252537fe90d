"""Weights of PrismML's fork of llama.cpp are compared as they were before the rotation that their file declares."""

import numpy as np
import pytest
import torch
from support.gguf_stored import I32, TEXT, U32, Stored, array, key, write_gguf
from support.stored import write

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.documents.gate_results import exit_status
from quanterr.errors import CheckpointError

ROWS, COLS, BLOCK = 8, 512, 256
SIGNS = np.random.default_rng(7).choice([-1, 1], COLS)
WEIGHTS = np.random.default_rng(8).standard_normal((ROWS, COLS)).astype(np.float32)


def hadamard(size):
    places = np.arange(size)
    ones = np.array([[bin(i & j).count("1") for j in places] for i in places])
    return np.where(ones % 2, -1.0, 1.0) / np.sqrt(size)


def rotate(values, signs):
    """Rotate rows as a quantizer of the fork does, in float64: H (s · w)."""
    return ((values * signs).reshape(-1, BLOCK) @ hadamard(BLOCK)).reshape(values.shape)


def pq2_0(values):
    """Return blocks of PQ2_0 by plain rounding to -d, 0 and d, and the values that they stand for, float64."""
    blocks = values.reshape(-1, 128)
    d = (1.2 * np.abs(blocks).mean(1, keepdims=True)).astype(np.float16)
    codes = np.clip(np.round(blocks / d.astype(np.float64)), -1, 1).astype(np.int64) + 1
    packed = (codes.reshape(-1, 32, 4) << np.array([0, 2, 4, 6])).sum(2).astype(np.uint8)
    decoded = (codes - 1) * d.astype(np.float64)
    return np.concatenate([d.view(np.uint8), packed], 1).tobytes(), decoded.reshape(values.shape)


def declare(**changed):
    """Return the keys of a rotation; a change to None leaves a key out."""
    keys = {
        "version": key("prism.hadamard.version", U32, 1),
        "block_size": key("prism.hadamard.block_size", U32, BLOCK),
        "transform": key("prism.hadamard.transform", TEXT, "normalized-sylvester-walsh-hadamard"),
        "axis": key("prism.hadamard.axis", TEXT, "input-last-dimension"),
        "sign_mode": key("prism.hadamard.sign_mode", TEXT, "explicit"),
        "sign_widths": array("prism.hadamard.sign_widths", I32, [COLS]),
        "sign_values": array("prism.hadamard.sign_values", I32, SIGNS.tolist()),
        "weight_names": array("prism.hadamard.weight_names", TEXT, ["a.weight"]),
    }
    return [item for item in (keys | changed).values() if item is not None]


def make_pair(folder, keys, signs=SIGNS):
    """Return an original, a file with its rotated weight, and the values that the file stands for, float64."""
    blocks, stored = pq2_0(rotate(WEIGHTS.astype(np.float64), signs))
    original = write(folder / "x.safetensors", {"a.weight": torch.from_numpy(WEIGHTS)})
    path = write_gguf(folder / "y.gguf", [Stored("a.weight", "PQ2_0", (ROWS, COLS), blocks)], keys)
    return original, path, rotate(stored, np.ones(COLS)) * signs


@pytest.mark.parametrize("mode", ["explicit", "identity"])
def test_rotation_is_undone(mode, tmp_path):
    keys, signs = declare(), SIGNS
    if mode == "identity":
        identity = key("prism.hadamard.sign_mode", TEXT, "identity")
        keys, signs = declare(sign_mode=identity, sign_widths=None, sign_values=None), np.ones(COLS)
    original, quantized, values = make_pair(tmp_path, keys, signs)
    layer = quanterr.compare(original, quantized, device="cpu").layers[0]
    x = WEIGHTS.astype(np.float64)

    assert layer.format == "gguf_pq2_0"
    assert layer.snr_db == pytest.approx(10 * np.log10((x**2).sum() / ((x - values) ** 2).sum()), abs=1e-5)  # float32
    assert layer.snr_db > 4


def test_type_without_a_declared_rotation_is_reported(tmp_path):
    """Such files load in the fork and compute nonsense."""
    original, quantized, _ = make_pair(tmp_path, [])
    report = quanterr.compare(original, quantized, device="cpu")

    assert exit_status(report) != 0
    assert any("prism.hadamard." in finding.message for finding in report.findings)


@pytest.mark.parametrize(
    "changed",
    [
        {"version": key("prism.hadamard.version", U32, 2)},
        {"transform": key("prism.hadamard.transform", TEXT, "dct")},
        {"axis": None},
        {"block_size": key("prism.hadamard.block_size", U32, 96)},
        {"sign_mode": key("prism.hadamard.sign_mode", TEXT, "random")},
        {"sign_widths": array("prism.hadamard.sign_widths", I32, [COLS - 1])},
        {"sign_widths": None},
        {"sign_values": array("prism.hadamard.sign_values", I32, [1] * (COLS - 1))},
        {"sign_values": array("prism.hadamard.sign_values", I32, [2] * COLS)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_unsupported_declaration_is_an_error(changed, tmp_path):
    original, quantized, _ = make_pair(tmp_path, declare(**changed))

    with pytest.raises(CheckpointError, match=rf"y\.gguf: key prism\.hadamard\.{next(iter(changed))} is "):
        quanterr.compare(original, quantized, device="cpu")


def test_weight_of_another_width_is_not_compared(tmp_path):
    widths = array("prism.hadamard.sign_widths", I32, [256])
    signs = array("prism.hadamard.sign_values", I32, [1] * 256)
    original, quantized, _ = make_pair(tmp_path, declare(sign_widths=widths, sign_values=signs))
    report = quanterr.compare(original, quantized, device="cpu")

    assert exit_status(report) != 0
    assert any("signs for rows of [256], but its rows have 512" in tensor.reason for tensor in report.not_compared)


def test_same_id_of_another_fork_is_refused(tmp_path):
    """ik_llama.cpp once stored IQ2_TN under this id, in fewer bytes."""
    data = bytes(64 * COLS // 256 * 66)
    path = write_gguf(tmp_path / "y.gguf", [Stored("a.weight", "PQ2_0", (64, COLS), data), Stored("b", "F32", (64,))])

    with open_checkpoint(path) as checkpoint:
        assert "IQ2_TN" in checkpoint.entries["a.weight"].unknown
