"""Further modules of sentence-transformers are part of the model: dense layers in folders of their own."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.gguf_stored import Stored, architecture, write_gguf
from support.making import numbers, open_pairing, quantized_fp8, store

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.pairing.model import Bucket

OF_TRANSFORMER = {"embed_tokens.weight": numbers(32, 16, seed=1), "norm.weight": numbers(16, seed=2)}
DENSE = {"2_Dense": numbers(64, 16, seed=3), "3_Dense": numbers(16, 64, seed=4)}
TYPE = "sentence_transformers.models."


def model(folder, tensors=OF_TRANSFORMER, dense=DENSE, modules=None):
    """Write a model with a pooling and dense layers behind it."""
    store(folder, tensors, config={"model_type": "gemma3_text"})
    listed = [("", "Transformer"), ("1_Pooling", "Pooling"), *((name, "Dense") for name in dense)]
    named = [{"idx": n, "path": path, "type": TYPE + name} for n, (path, name) in enumerate(listed)]
    (folder / "modules.json").write_text(json.dumps(named if modules is None else modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    for name, weight in dense.items():
        weights = weight if isinstance(weight, dict) else {"linear.weight": weight}
        store(folder / name, weights, config={"in_features": 16})
    return folder


def test_dense_layers_are_read_under_the_name_of_their_folder(tmp_path):
    with open_checkpoint(model(tmp_path / "m")) as checkpoint:
        assert {*OF_TRANSFORMER, "2_Dense.linear.weight", "3_Dense.linear.weight"} == checkpoint.entries.keys()
        assert [] == list(checkpoint.notes)


@pytest.mark.parametrize(
    "modules",
    [
        {},
        [1, {"path": 3}],
        [{"path": "../m/2_Dense", "type": TYPE + "Dense"}, {"path": "..", "type": TYPE + "Dense"}],
        [{"path": "nowhere", "type": TYPE + "Dense"}],
    ],
)
def test_odd_lists_of_modules_add_nothing(tmp_path, modules):
    with open_checkpoint(model(tmp_path / "m", modules=modules)) as checkpoint:
        assert OF_TRANSFORMER.keys() == checkpoint.entries.keys()


def gguf(path, dense):
    """Write the model as llama.cpp's converter does, which adds 1 to norms."""
    made = {
        "token_embd.weight": OF_TRANSFORMER["embed_tokens.weight"].float(),
        "output_norm.weight": OF_TRANSFORMER["norm.weight"].float() + 1,
        **{f"dense_{name[0]}.weight": weight.float() for name, weight in dense.items()},
    }
    stored = [Stored(name, "F32", tuple(x.shape), x.contiguous().numpy().tobytes()) for name, x in made.items()]
    return write_gguf(path, stored, architecture("gemma-embedding"))


def test_dense_layers_are_found_in_a_gguf_file(tmp_path):
    with open_pairing(model(tmp_path / "m"), gguf(tmp_path / "m.gguf", DENSE)) as plan:
        assert [] == plan.leftovers
        assert {"2_Dense.linear.weight": "dense_2.weight", "3_Dense.linear.weight": "dense_3.weight"}.items() <= {
            pair.name: pair.quantized.name for pair in plan.pairs
        }.items()


def test_dense_layers_that_a_gguf_file_lacks_are_named(tmp_path):
    with open_pairing(model(tmp_path / "m"), gguf(tmp_path / "m.gguf", {})) as plan:
        assert {
            ("2_Dense.linear.weight", Bucket.ONLY_IN_ORIGINAL),
            ("3_Dense.linear.weight", Bucket.ONLY_IN_ORIGINAL),
        } == {(left.name, left.bucket) for left in plan.leftovers}


def test_one_file_of_the_model_is_compared_without_its_modules(tmp_path):
    folder = model(tmp_path / "m")
    for pair in ((folder, folder / "model.safetensors"), (folder / "model.safetensors", folder)):
        report = quanterr.compare(*pair, device="cpu")
        assert ("pass", []) == (report.verdict, report.not_compared)


def test_dequantized_modules_have_their_folders_again(tmp_path):
    codes, scale = quantized_fp8(DENSE["2_Dense"])
    quantized = {"2_Dense": {"linear.weight": codes, "linear.weight_scale": scale}, "3_Dense": DENSE["3_Dense"]}
    quanterr.dequantize(model(tmp_path / "m", dense=quantized), tmp_path / "out")

    assert OF_TRANSFORMER.keys() == load_file(tmp_path / "out" / "model.safetensors").keys()
    for name, weight in DENSE.items():
        made = load_file(tmp_path / "out" / name / "model.safetensors")
        assert ["linear.weight"] == list(made)
        # Half a step of E4M3 and of BF16, or of the smallest E4M3 numbers.
        near = torch.isclose(
            made["linear.weight"].float(), weight.float(), rtol=2**-4 + 2**-8, atol=float(scale) * 2**-9
        )
        assert near.all()
    assert (tmp_path / "out" / "1_Pooling" / "config.json").exists()
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
