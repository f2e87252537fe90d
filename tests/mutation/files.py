"""Checkpoints on disk: a shard for each weight, so that a broken one shares the others with the sound one."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

from mutation.coding import Coded
from mutation.originals import CONFIG

GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "rope_freqs": "rope_freqs",
}  # fmt: skip
Weights = Mapping[str, Coded | Tensor]


def write(folder: Path, weights: Weights, config: Mapping[str, Any], sound: Path | None = None) -> Path:
    """Write a folder of safetensors.

    Weights that are not given are linked from ``sound``, a folder made the same way.
    """
    folder.mkdir(parents=True)
    places: dict[str, str] = {}
    if sound is not None:
        index = json.loads((sound / "model.safetensors.index.json").read_text())["weight_map"]
        changed = {f"{name}.safetensors" for name in weights}
        places = {key: file for key, file in index.items() if file not in changed}
        for file in set(places.values()):
            os.link(sound / file, folder / file)
    for name, weight in weights.items():
        tensors = weight.layout.store(name, weight) if isinstance(weight, Coded) else {name: weight}
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / f"{name}.safetensors")
        places |= dict.fromkeys(tensors, f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def gguf_name(name: str) -> str:
    """Return the name of a tensor in a GGUF file."""
    base, ending = name.rsplit(".", 1)
    if base.startswith("model.layers."):
        _, _, layer, part = base.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.{ending}"
    return f"{GGUF_NAMES[base]}.{ending}"


def write_gguf(path: Path, weights: Weights, changed: Mapping[str, Any] | None = None) -> Path:
    """Write a GGUF file of a Qwen2 model with gguf's own writer; ``changed`` metadata have the config's names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = CONFIG | dict(changed or {})
    writer = gguf.GGUFWriter(path, metadata.get("architecture", "qwen2"))
    writer.add_block_count(metadata["num_hidden_layers"])
    writer.add_embedding_length(metadata["hidden_size"])
    writer.add_feed_forward_length(metadata["intermediate_size"])
    writer.add_head_count(metadata["num_attention_heads"])
    writer.add_head_count_kv(metadata["num_key_value_heads"])
    writer.add_rope_freq_base(metadata["rope_theta"])
    writer.add_layer_norm_rms_eps(metadata["rms_norm_eps"])
    writer.add_context_length(metadata["max_position_embeddings"])
    for key, add in {
        "rope_dimension_count": writer.add_rope_dimension_count,
        "key_length": writer.add_key_length,
        "value_length": writer.add_value_length,
    }.items():
        if key in metadata:
            add(metadata[key])
    for name, weight in weights.items():
        if isinstance(weight, Coded):
            ggml_type, raw = weight.layout.store(name, weight)
            data = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(weight.shape[0], -1).numpy()
            writer.add_tensor(gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType[ggml_type])
        else:
            writer.add_tensor(gguf_name(name), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def remove(paths: Iterable[Path]) -> None:
    """Delete folders and files."""
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
