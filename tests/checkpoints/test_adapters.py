"""Adapters are no models: they are named, and a model beside one is read."""

import json

import pytest
import torch
from support.making import numbers, store

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.errors import CheckpointError

UP = "model.layers.0.mlp.up_proj"
MODEL = {f"{UP}.weight": numbers(16, 16, seed=1), "model.norm.weight": numbers(16, seed=2)}
LORA = {f"base_model.model.{UP}.lora_A.weight": numbers(2, 16), f"base_model.model.{UP}.lora_B.weight": numbers(16, 2)}
KOHYA = {
    "lora_unet_up.lora_down.weight": numbers(2, 16),
    "lora_unet_up.lora_up.weight": numbers(16, 2),
    "lora_unet_up.alpha": torch.tensor(2.0),
}
MLX = {f"{UP}.lora_a": numbers(16, 2), f"{UP}.lora_b": numbers(2, 16)}
LOKR = {"lycoris_up.lokr_w1": numbers(2, 2), "lycoris_up.lokr_w2": numbers(8, 8), "lycoris_up.alpha": torch.tensor(1.0)}


@pytest.mark.parametrize("tensors", [LORA, KOHYA, MLX, LOKR])
def test_adapters_are_named_and_refused_beside_a_model(tmp_path, tensors):
    model, adapter = store(tmp_path / "m.safetensors", MODEL), store(tmp_path / "a.safetensors", tensors)
    (finding,) = quanterr.inspect(adapter).findings

    assert ("warning", "adapter") == (finding.severity, finding.code)
    assert "a LoRA adapter, not a model: it has low-rank changes of 1 layer" in finding.message
    for pair in ((model, adapter), (adapter, model)):
        with pytest.raises(CheckpointError, match=r"a\.safetensors: a LoRA adapter, not a model.*--lora"):
            quanterr.compare(*pair, device="cpu")


def test_two_adapters_can_be_compared(tmp_path):
    x = store(tmp_path / "x.safetensors", LORA)
    y = store(tmp_path / "y.safetensors", {name: value.float() for name, value in LORA.items()})

    assert 2 == len(quanterr.compare(x, y, device="cpu").lossless)


@pytest.mark.parametrize("weight", [f"{UP}.base_layer.weight", f"{UP}.weight"])
def test_models_with_adapters_of_their_own_are_models(tmp_path, weight):
    stored = {
        weight: numbers(16, 16),
        f"{UP}.lora_A.speech.weight": numbers(2, 16),
        f"{UP}.lora_B.speech.weight": numbers(16, 2),
    }
    assert "adapter" not in {
        finding.code for finding in quanterr.inspect(store(tmp_path / "m.safetensors", stored)).findings
    }


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "adapters.safetensors", "pytorch_lora_weights.safetensors"]
)
def test_model_is_read_from_a_folder_with_an_adapter(tmp_path, name):
    folder = store(tmp_path / "m", MODEL, config={})
    store(folder / name, LORA)
    with open_checkpoint(folder) as checkpoint:
        assert MODEL.keys() == checkpoint.entries.keys()
        assert () == checkpoint.unread

    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with open_checkpoint(folder) as checkpoint:
        assert [name] == [unread.name for unread in checkpoint.unread]
