"""Blocks of ggml in safetensors are read like those in a GGUF file, with the values of golden files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import quanterr
from quanterr import open_checkpoint
from quanterr.checkpoints.ggml_types import BLOCKS
from quanterr.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden"
NAME = "model.layers.0.mlp.up_proj"


def store_in_gguf(ggml_type):
    """Return the bytes of a golden weight's rows, (rows, bytes), and the values that its producer decodes."""
    for case in sorted((GOLDEN / f"gguf_{ggml_type.lower()}").glob("*.gguf")):
        with open_checkpoint(case) as checkpoint:
            for entry in checkpoint.entries.values():
                if entry.dtype == ggml_type and len(entry.shape) == 2 and entry.shape[1] % BLOCKS[ggml_type][0] == 0:
                    raw = torch.frombuffer(bytearray(entry.read()), dtype=torch.uint8).view(entry.shape[0], -1)
                    return raw, load_file(case.with_name(f"{case.stem}.expected.safetensors"))[entry.name]
    raise LookupError(ggml_type)


def write(folder, tensors, config):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def compare(tmp_path, values, tensors, config):
    save_file({f"{NAME}.weight": values}, tmp_path / "original.safetensors")
    return quanterr.compare(
        tmp_path / "original.safetensors", write(tmp_path / "quantized", tensors, config), device="cpu"
    )


def method(bits, name):
    return {"quant_method": "gguf", "bits": bits, "format": name}


def layer(ggml_type, n_bytes):
    layers = {NAME: {"quant_algo": ggml_type, "group_size": 256, "block_payload_bytes": n_bytes, "packing": "ggml"}}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


@pytest.mark.parametrize(
    ("ggml_type", "bits", "name"),
    [("Q4_0", 4, "q_0"), ("Q8_0", 8, "q_0"), ("Q4_K", 4, "q_k_m"), ("Q5_K", 5, "q_k_s"), ("Q6_K", 6, "q_k")],
)
def test_gptqmodel_stores_blocks_in_rows(tmp_path, ggml_type, bits, name):
    raw, values = store_in_gguf(ggml_type)
    report = compare(tmp_path, values, {f"{NAME}.qweight": raw}, method(bits, name))

    assert [(f"{NAME}.weight", f"gguf_{ggml_type.lower()}")] == [
        (layer.layer_name, layer.format) for layer in report.lossless
    ]
    assert [] == report.not_compared


@pytest.mark.parametrize(("ggml_type", "n_bytes"), [("IQ2_XS", 74), ("IQ1_S", 50), ("IQ2_XXS", 66), ("Q8_0", 34)])
def test_modelopt_has_an_axis_for_the_block_bytes(tmp_path, ggml_type, n_bytes):
    raw, values = store_in_gguf(ggml_type)
    report = compare(tmp_path, values, {f"{NAME}.weight": raw.view(len(raw), -1, n_bytes)}, layer(ggml_type, n_bytes))

    assert [(f"{NAME}.weight", f"gguf_{ggml_type.lower()}")] == [
        (layer.layer_name, layer.format) for layer in report.lossless
    ]
    assert [] == report.not_compared


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        (
            {f"{NAME}.qweight": torch.zeros(4, 100, dtype=torch.uint8)},
            method(4, "q_k_m"),
            "blocks have 144 bytes: no row of 100",
        ),
        (
            {f"{NAME}.qweight": torch.zeros(4, 144, dtype=torch.uint8)},
            method(3, "q_k"),
            "cannot read bits 3 and format q_k",
        ),
        ({f"{NAME}.weight": torch.zeros(4, 2, 60, dtype=torch.uint8)}, layer("IQ2_XS", 60), "blocks have 74 bytes"),
        (
            {f"{NAME}.weight": torch.zeros(4, 2, 60, dtype=torch.uint8)},
            layer("W9A9", 60),
            "cannot read quant_algo W9A9",
        ),
    ],
)
def test_misfitting_declaration_is_an_error(tmp_path, tensors, config, words):
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(write(tmp_path / "x", tensors, config))


def test_damaged_scale_is_noticed(tmp_path):
    """A weight of normal numbers is coded by the gguf library, and the scale of a block is doubled."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed (pip install -e '.[dev]')")
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    raw = torch.from_numpy(gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0)).clone()
    sound = compare(tmp_path, values, {f"{NAME}.qweight": raw.clone()}, method(8, "q_0"))
    raw[3, 1] += 4  # the exponent of a float16: twice the scale
    (tmp_path / "broken").mkdir()
    broken = compare(tmp_path / "broken", values, {f"{NAME}.qweight": raw}, method(8, "q_0"))

    assert set() == {finding.severity for finding in sound.findings} & {"warning", "error"}
    assert {finding.layer for finding in broken.findings if finding.severity != "info"} == {f"{NAME}.weight"}


@pytest.mark.parametrize("layers", [["a"], "a", None, {"a": "b"}])
def test_layers_without_a_block_declaration_are_plain(tmp_path, layers):
    values = torch.randn(4, 64, generator=torch.manual_seed(0))
    report = compare(tmp_path, values, {f"{NAME}.weight": values}, {"quantized_layers": layers})

    assert [f"{NAME}.weight"] == [layer.layer_name for layer in report.lossless]
