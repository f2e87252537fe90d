"""Small originals of many architectures: config, names and shapes as transformers' classes save them.

Sizes are telling: what is square in real models is square here, and what is not is not; fewer heads of keys than of
queries; each kind of layer occurs. Row lengths are multiples of 32, which Q8_0 and groups of 32 need.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

Shapes = dict[str, tuple[int, ...]]
F32 = ("A_log", "e_score_correction_bias", "linear_attn.norm.weight")  # as in most checkpoints
BOTH: dict[str, dict[str, Any]] = {"": {}}


@dataclass(frozen=True)
class Original:
    """``architecture``: of transformers, or of the code in the model's own repository, with ``own`` names and shapes.

    ``more``: tensors that checkpoints have beside those of the class. ``llama_cpp``, ``mlx``: variant → options of the
    converter.
    """

    architecture: str
    config: dict[str, Any]
    own: Callable[[dict[str, Any]], Shapes] | None = None
    more: Callable[[dict[str, Any]], Shapes] | None = None
    llama_cpp: dict[str, dict[str, Any]] = field(default_factory=lambda: BOTH)
    mlx: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)

    def variants_for(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return a converter's variants of this original."""
        return self.llama_cpp if kind == "llama.cpp" else self.mlx

    def origin(self, options: dict[str, Any]) -> dict[str, str]:
        """Say how the original was made."""
        import transformers

        made = f"names of the model's repository: {self.architecture}"
        if self.own is None:
            made = f"transformers {transformers.__version__} {self.architecture}.save_pretrained"
        return {"made": made, "options": json.dumps(options), "by": "tests/golden_conversions/make.py"}


def write_original(original: Original, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write config.json, and return it, with names, shapes and dtypes of tensors."""
    folder.mkdir(parents=True)
    if original.own is None:
        shapes = saved_by_transformers(original, folder)
    else:
        config = {"architectures": [original.architecture]} | original.config
        (folder / "config.json").write_text(json.dumps(config))
        shapes = original.own(config)
    config = json.loads((folder / "config.json").read_text())
    if original.more is not None:
        shapes |= original.more(config)
    for name, content in original.files.items():
        (folder / name).write_text(json.dumps(content))
    dtypes = {name: "F32" if name.endswith(F32) else "BF16" for name in shapes}
    return config, {name: {"shape": list(shapes[name]), "dtype": dtypes[name]} for name in sorted(shapes)}


def saved_by_transformers(original: Original, folder: Path) -> Shapes:
    """Save a model of transformers, and return names and shapes of its tensors."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model_class = getattr(transformers, original.architecture)
    config = model_class.config_class(**original.config)
    model_class(config).to(torch.bfloat16).save_pretrained(folder)
    saved = folder / "model.safetensors"
    with safe_open(saved, "pt") as file:
        names = file.keys()
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    saved.unlink()
    return shapes


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
BASE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = BASE | HEADS | {"head_dim": 16}
WIDE = BASE | HEADS | {"head_dim": 32}  # more elements in all heads than in the hidden state
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
HYBRID = WIDE | LINEAR | {"num_hidden_layers": 4, "full_attention_interval": 4}
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [],
}  # fmt: skip
MLA = BASE | {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
GEMMA4 = {"vision_config": None, "audio_config": None, "tie_word_embeddings": True}
GEMMA4_TEXT = WIDE | {
    "sliding_window": 8, "tie_word_embeddings": True, "num_hidden_layers": 3, "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "global_head_dim": 64,
}  # fmt: skip
MLX = {"mlx": BOTH}
TOKENIZER = {"tokenizer.json": {"model": {"vocab": {str(i): i for i in range(96)}}, "added_tokens": []}}


def qwen_mtp(config: dict[str, Any]) -> Shapes:
    """Return the layer that predicts the token after the next, as Qwen3.5 and Qwen3-Next are published with it."""
    text = config.get("text_config", config)
    hidden, heads, wide = text["hidden_size"], text["head_dim"], text["num_attention_heads"] * text["head_dim"]
    layer = "mtp.layers.0."
    shapes: Shapes = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        **{f"mtp.{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")},
        **{f"{layer}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")},
        **{f"{layer}self_attn.{name}_norm.weight": (heads,) for name in "qk"},
        f"{layer}self_attn.q_proj.weight": (2 * wide, hidden),
        f"{layer}self_attn.k_proj.weight": (wide // 2, hidden),
        f"{layer}self_attn.v_proj.weight": (wide // 2, hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, wide),
    }
    if "num_experts" in text:
        shapes[f"{layer}mlp.gate.weight"] = (text["num_experts"], hidden)
        shapes[f"{layer}mlp.shared_expert_gate.weight"] = (1, hidden)
        shapes |= gated_mlp(f"{layer}mlp.shared_expert.", hidden, text["shared_expert_intermediate_size"])
        for expert in range(text["num_experts"]):
            shapes |= gated_mlp(f"{layer}mlp.experts.{expert}.", hidden, text["moe_intermediate_size"])
        return shapes
    return shapes | gated_mlp(f"{layer}mlp.", hidden, text["intermediate_size"])


def gated_mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    """Return the matrices of a gated MLP."""
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


ORIGINALS = {
    "llama": Original("LlamaForCausalLM", LLAMA, llama_cpp={"": {}, "fuse_qkv": {"fuse_qkv": True}}, **MLX),
    "qwen2": Original("Qwen2ForCausalLM", LLAMA, llama_cpp={"": {}, "fuse_qkv": {"fuse_qkv": True}}, **MLX),
    "qwen3_moe": Original("Qwen3MoeForCausalLM", WIDE | MOE, llama_cpp={"": {}, "fuse_qkv": {"fuse_qkv": True}}, **MLX),
    "qwen3_5": Original(
        "Qwen3_5ForConditionalGeneration",
        {"text_config": HYBRID | {"mtp_num_hidden_layers": 1}, "vision_config": VISION, "tie_word_embeddings": False},
        more=qwen_mtp,
        **MLX,
    ),
    "qwen3_5_moe": Original(
        "Qwen3_5MoeForConditionalGeneration",
        {
            "text_config": HYBRID | MOE | {"shared_expert_intermediate_size": 32, "mtp_num_hidden_layers": 1},
            "vision_config": VISION,
            "tie_word_embeddings": False,
        },
        more=qwen_mtp,
        llama_cpp={"": {}, "fuse_gate_up": {"fuse_gate_up_exps": True}},
        **MLX,
    ),
    "qwen3_next": Original(
        "Qwen3NextForCausalLM",
        HYBRID | MOE | {"shared_expert_intermediate_size": 32},
        more=qwen_mtp,
        llama_cpp={"": {}, "fuse_gate_up": {"fuse_gate_up_exps": True}},
        **MLX,
    ),
    "deepseek_v3": Original("DeepseekV3ForCausalLM", MLA, **MLX),
    "glm4_moe_lite": Original("Glm4MoeLiteForCausalLM", MLA, **MLX),
    "gpt_oss": Original(
        "GptOssForCausalLM",
        LLAMA | {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
        **MLX,
    ),
    "gemma3_text": Original(
        "Gemma3ForCausalLM", WIDE | {"sliding_window": 8, "tie_word_embeddings": True}, files=TOKENIZER, **MLX
    ),
    "gemma4": Original(  # as 31B: full attention has one matrix for keys and values
        "Gemma4ForConditionalGeneration",
        GEMMA4 | {"text_config": GEMMA4_TEXT | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}},
        files=TOKENIZER,
        **MLX,
    ),
    "gemma4_moe": Original(  # as 26B-A4B
        "Gemma4ForConditionalGeneration",
        GEMMA4
        | {
            "text_config": GEMMA4_TEXT
            | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
        },
        llama_cpp={"": {}, "fuse_gate_up": {"fuse_gate_up_exps": True}},
        files=TOKENIZER,
        **MLX,
    ),
    "gemma4_per_layer": Original(  # as E2B: embeddings of each layer, the last layers use others' keys and values
        "Gemma4ForConditionalGeneration",
        GEMMA4
        | {
            "text_config": GEMMA4_TEXT
            | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 96, "num_hidden_layers": 4}
            | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
            | {"use_double_wide_mlp": True}
        },
        files=TOKENIZER,
        **MLX,
    ),
    "phi3": Original("Phi3ForCausalLM", BASE | HEADS, **MLX),
}
