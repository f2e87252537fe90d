"""Small originals of many architectures: config, names and shapes as transformers' classes save them.

Sizes are telling: what is square in real models is square here, and what is not is not; fewer heads of keys than of
queries; each kind of layer occurs. Row lengths are multiples of 32, which Q8_0 and groups of 32 need.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

Shapes = dict[str, tuple[int, ...]]
F32 = ("A_log", "e_score_correction_bias", "linear_attn.norm.weight")  # most checkpoints store these in float32
BOTH: dict[str, dict[str, Any]] = {"": {}}


@dataclass(frozen=True)
class Original:
    """An original from which conversions are made.

    ``architecture`` is a class of transformers, or the code in the model's own repository, of which ``make_shapes``
    gives names and shapes. ``published`` turns names and shapes that transformers saves into those of published
    checkpoints. ``llama_cpp``, ``mlx``, ``mlx_vlm`` and ``mlx_audio`` map variants to options of the converter.
    ``written`` has fields that are only in config.json, ``files`` further files that the converter reads.
    """

    architecture: str
    config: dict[str, Any]
    make_shapes: Callable[[dict[str, Any]], Shapes] | None = None
    published: Callable[[dict[str, Any], Shapes], Shapes] | None = None
    llama_cpp: dict[str, dict[str, Any]] = field(default_factory=lambda: BOTH)
    mlx: dict[str, dict[str, Any]] = field(default_factory=dict)
    mlx_vlm: dict[str, dict[str, Any]] = field(default_factory=dict)
    mlx_audio: dict[str, dict[str, Any]] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)

    def variants_for(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return a converter's variants of this original."""
        variants: dict[str, dict[str, Any]] = getattr(self, kind.replace(".", "_"))
        return variants

    def origin(self, options: dict[str, Any]) -> dict[str, str]:
        """Return how the original was made."""
        import transformers

        made = f"names of the model's repository: {self.architecture}"
        if self.make_shapes is None:
            made = f"transformers {transformers.__version__} {self.architecture}.save_pretrained"
        return {"made": made, "options": json.dumps(options), "by": "tests/golden_conversions/make.py"}


def write_original(original: Original, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write config.json, and return it, with names, shapes and dtypes of tensors."""
    folder.mkdir(parents=True)
    if original.make_shapes is None:
        shapes = saved_by_transformers(original, folder)
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(merge(saved, original.config) | original.written))
    else:
        config = {"architectures": [original.architecture]} | original.config
        shapes = original.make_shapes(config)
        (folder / "config.json").write_text(json.dumps(config))
    config = json.loads((folder / "config.json").read_text())
    if original.published is not None:
        shapes = original.published(config, shapes)
    for name, content in original.files.items():
        (folder / name).write_text(json.dumps(content))
    dtypes = {name: "F32" if name.endswith(F32) else "BF16" for name in shapes}
    return config, {name: {"shape": list(shapes[name]), "dtype": dtypes[name]} for name in sorted(shapes)}


def merge(saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return a saved config with its fields also under the names that earlier transformers and repositories use."""
    rope = saved.get("rope_parameters") or {}
    config = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope} | saved
    if rope.get("rope_type") == "default":
        config["rope_scaling"] = None
    for key, value in given.items():
        nested = isinstance(value, dict) and isinstance(saved.get(key), dict)
        config[key] = merge(saved[key], value) if nested else value
    return config


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
    "max_position_embeddings": 128, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA = BASE | HEADS | {"head_dim": 16}
WIDE_HEADS = BASE | HEADS | {"head_dim": 32}  # more elements in all heads than in the hidden state
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
HYBRID = WIDE_HEADS | LINEAR | {"num_hidden_layers": 4, "full_attention_interval": 4}
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [],
}  # fmt: skip
MLA = BASE | {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
GEMMA4 = {"vision_config": None, "audio_config": None, "vocab_size": 96, "tie_word_embeddings": True}
GEMMA4_TEXT = WIDE_HEADS | {
    "sliding_window": 8, "tie_word_embeddings": True, "num_hidden_layers": 3, "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "global_head_dim": 64,
}  # fmt: skip
NEMOTRON_H = {key: value for key, value in WIDE_HEADS.items() if key != "num_hidden_layers"} | {
    "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "conv_kernel": 4,
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625,
    "intermediate_size": 128,
}  # fmt: skip
BERT = {key: value for key, value in BASE.items() if key != "tie_word_embeddings"} | {
    "num_attention_heads": 4, "type_vocab_size": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
LONG_ROPE = {
    "type": "longrope", "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0], "short_factor": [1.0] * 8,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "type": "yarn", "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8,
}  # fmt: skip
GPT2 = {"vocab_size": 96, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
GPT2_SIZES = {"n_embd": 64, "n_positions": 128, "n_ctx": 128}
MAMBA = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MLX = {"mlx": BOTH}
MLX_VLM = {"mlx_vlm": BOTH}
MLX_AUDIO: dict[str, Any] = {"mlx_audio": {"": {"model_domain": "stt"}}}
INTERLEAVED_MROPE = {  # fields that published configurations of Qwen3.5 have
    "text_config": {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "type": "default",
        }
    }
}
WITH_MMPROJ: dict[str, dict[str, Any]] = {"": {}, "mmproj": {"mmproj": True}}
MROPE = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [4, 2, 2]}
# As many layers as a projector has modules: the converter numbers both with the same numbers.
SIGLIP = {
    "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 96, "head_dim": 16, "image_size": 28,
}  # fmt: skip
AUDIO_ENCODER = {
    "d_model": 32, "encoder_layers": 4, "encoder_attention_heads": 2, "encoder_ffn_dim": 96, "num_mel_bins": 16,
    "max_source_positions": 16,
}  # fmt: skip
IMAGES = {"preprocessor_config.json": {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}}
IMG_BREAK = {"tokenizer_config.json": {"added_tokens_decoder": {"12": {"content": "[IMG_BREAK]"}}}}
INTERNLM2 = BASE | HEADS | {"model_type": "internlm2", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bias": False}
PLAMO2 = BASE | HEADS | {
    "model_type": "plamo2", "hidden_size_per_head": 16, "mamba_num_heads": 4, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_step": 2, "mamba_enabled": True, "tie_word_embeddings": True,
}  # fmt: skip
NOMIC = BERT | {
    "head_dim": 16, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 96, "n_positions": 8192,
    "max_trained_positions": 2048, "activation_function": "swiglu", "causal": False, "prenorm": False,
    "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "layer_norm_epsilon": 1e-12,
}  # fmt: skip
WORD_PIECE = {"tokenizer.json": {"model": {"type": "WordPiece"}}}
TOKENIZER = {"tokenizer.json": {"model": {"vocab": {str(i): i for i in range(96)}}, "added_tokens": []}}


def with_mtp(config: dict[str, Any], saved: Shapes) -> Shapes:
    """Add the layer that predicts the token after the next, as Qwen3.5 and Qwen3-Next are published with it."""
    text = config.get("text_config", config)
    hidden, heads, wide = text["hidden_size"], text["head_dim"], text["num_attention_heads"] * text["head_dim"]
    layer = "mtp.layers.0."
    shapes = saved | {
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


def joined_experts(config: dict[str, Any], saved: Shapes) -> Shapes:
    """Join the matrices of experts, as Qwen3.5 and later are published, and add the layer of ``with_mtp``."""
    text = config["text_config"]
    experts, hidden, inner = text["num_experts"], text["hidden_size"], text["moe_intermediate_size"]
    shapes = {}
    for name, shape in saved.items():
        before, experts_of, _ = name.partition(".experts.")
        if experts_of:
            shapes[f"{before}.experts.gate_up_proj"] = (experts, 2 * inner, hidden)
            shapes[f"{before}.experts.down_proj"] = (experts, hidden, inner)
        else:
            shapes[name] = shape
    return with_mtp(config, shapes)


def with_nextn(config: dict[str, Any], saved: Shapes) -> Shapes:
    """Add a layer that predicts the token after the next, after the last, as DeepSeek and GLM are published with it."""
    hidden, last = config["hidden_size"], config["num_hidden_layers"] - 1
    layer = f"model.layers.{last + 1}."
    of_last = {name: shape for name, shape in saved.items() if name.startswith(f"model.layers.{last}.")}
    return (
        saved
        | {name.replace(f"model.layers.{last}.", layer): shape for name, shape in of_last.items()}
        | {f"{layer}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
        | {f"{layer}eh_proj.weight": (hidden, 2 * hidden)}
        | {f"{layer}{name}.weight": (config["vocab_size"], hidden) for name in ("embed_tokens", "shared_head.head")}
    )


def kimi_names(config: dict[str, Any], saved: Shapes) -> Shapes:
    """Rename the dense layer's matrices, which transformers saves under the names of a sparse layer."""
    return {re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name): shape for name, shape in saved.items()}


def gemma3n_shapes(config: dict[str, Any]) -> Shapes:
    """Return names and shapes of the text model in the whole, whose vision tower needs a further library."""
    import transformers

    text = transformers.Gemma3nTextConfig(**config["text_config"])
    config["text_config"] = merge(text.to_dict(), config["text_config"])
    state = transformers.Gemma3nForCausalLM(text).state_dict()
    names = {name: re.sub("^model", "model.language_model", name) for name in state if name != "lm_head.weight"}
    shapes = {new: tuple(state[name].shape) for name, new in names.items()}
    # Layers that use others' keys and values are published with matrices of their own.
    of_first = {name: shape for name, shape in shapes.items() if re.search(r"layers\.0\.self_attn\.[kv]_", name)}
    layers = range(text.num_hidden_layers)
    return shapes | {name.replace(".0.", f".{i}."): shape for i in layers for name, shape in of_first.items()}


def internvl_shapes(config: dict[str, Any]) -> Shapes:
    """Return names and shapes of InternVL in the layout of its authors."""
    text, vision = config["llm_config"], config["vision_config"]
    width, inner, hidden = vision["hidden_size"], vision["intermediate_size"], text["hidden_size"]
    heads = text["num_key_value_heads"] * text["head_dim"]
    shapes: Shapes = {
        "vision_model.embeddings.class_embedding": (1, 1, width),
        "vision_model.embeddings.position_embedding": (1, 5, width),
        "vision_model.embeddings.patch_embedding.weight": (width, 3, 14, 14),
        "vision_model.embeddings.patch_embedding.bias": (width,),
        **add_bias("mlp1.0", (4 * width,)),
        **add_bias("mlp1.1", (hidden, 4 * width)),
        **add_bias("mlp1.3", (hidden, hidden)),
        "language_model.model.embed_tokens.weight": (text["vocab_size"], hidden),
        "language_model.model.norm.weight": (hidden,),
        "language_model.lm_head.weight": (text["vocab_size"], hidden),
    }
    for index in range(vision["num_hidden_layers"]):
        layer = f"vision_model.encoder.layers.{index}."
        shapes |= {f"{layer}{name}": (width,) for name in ("ls1", "ls2")}
        for name, shape in (("attn.qkv", (3 * width, width)), ("attn.proj", (width, width)), ("norm1", (width,))):
            shapes |= add_bias(layer + name, shape)
        for name, shape in (("mlp.fc1", (inner, width)), ("mlp.fc2", (width, inner)), ("norm2", (width,))):
            shapes |= add_bias(layer + name, shape)
    for index in range(text["num_hidden_layers"]):
        layer = f"language_model.model.layers.{index}."
        shapes |= {f"{layer}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        for name, rows in (("q", hidden), ("k", heads), ("v", heads)):
            shapes |= add_bias(f"{layer}self_attn.{name}_proj", (rows, hidden))
        shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, hidden)
        shapes |= gated_mlp(f"{layer}mlp.", hidden, text["intermediate_size"])
    return shapes


def add_bias(module: str, shape: tuple[int, ...]) -> Shapes:
    """Return a weight and its bias."""
    return {f"{module}.weight": shape, f"{module}.bias": shape[:1]}


def siglip_names(config: dict[str, Any], saved: Shapes) -> Shapes:
    """Rename tensors of the vision tower to the published names."""
    return {re.sub(r"^vision_tower\.", "vision_tower.vision_model.", name): shape for name, shape in saved.items()}


def internlm2_shapes(config: dict[str, Any]) -> Shapes:
    """Return names and shapes of InternLM2, which joins queries, keys and values group by group."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, grouped = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: Shapes = {
        "model.tok_embeddings.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "output.weight": (vocab, hidden),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        shapes |= {
            f"{layer}attention.wqkv.weight": ((heads + 2 * grouped) * hidden // heads, hidden),
            f"{layer}attention.wo.weight": (hidden, hidden),
            f"{layer}feed_forward.w1.weight": (inner, hidden),
            f"{layer}feed_forward.w2.weight": (hidden, inner),
            f"{layer}feed_forward.w3.weight": (inner, hidden),
            f"{layer}attention_norm.weight": (hidden,),
            f"{layer}ffn_norm.weight": (hidden,),
        }
    return shapes


def plamo2_shapes(config: dict[str, Any]) -> Shapes:
    """Return names and shapes of PLaMo 2: a Mamba layer and one with attention."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["hidden_size_per_head"]
    heads, grouped, states = config["num_attention_heads"], config["num_key_value_heads"], config["mamba_d_state"]
    wide = config["mamba_num_heads"] * head
    mamba, attention = "model.layers.layers.0.mixer.", "model.layers.layers.1.mixer."
    shapes: Shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        f"{mamba}in_proj.weight": (2 * wide, hidden),
        f"{mamba}conv1d.weight": (wide, 1, config["mamba_d_conv"]),
        f"{mamba}bcdt_proj.weight": (64 + 2 * states, wide),
        f"{mamba}dt_proj.weight": (config["mamba_num_heads"], 64),
        f"{mamba}dt_bias": (config["mamba_num_heads"],),
        f"{mamba}A_log": (config["mamba_num_heads"],),
        f"{mamba}D": (config["mamba_num_heads"],),
        f"{mamba}dt_norm_weight": (64,),
        f"{mamba}B_norm_weight": (states,),
        f"{mamba}C_norm_weight": (states,),
        f"{mamba}out_proj.weight": (hidden, wide),
        f"{attention}qkv_proj.weight": ((heads + 2 * grouped) * head, hidden),
        f"{attention}o_proj.weight": (hidden, heads * head),
        f"{attention}q_weight": (heads, head),
        f"{attention}k_weight": (grouped, head),
    }
    for index in range(2):
        layer = f"model.layers.layers.{index}."
        for name in ("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm"):
            shapes[f"{layer}{name}.weight"] = (hidden,)
        shapes[f"{layer}mlp.gate_up_proj.weight"] = (2 * inner, hidden)
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def gpt2_names(config: dict[str, Any], saved: Shapes) -> Shapes:
    """Rename tensors to the names of the first repositories, which also store masks."""
    masks = {f"h.{layer}.attn.bias": (1, 1, config["n_ctx"], config["n_ctx"]) for layer in range(config["n_layer"])}
    return {name.removeprefix("transformer."): shape for name, shape in saved.items()} | masks


def nomic_moe(config: dict[str, Any], saved: Shapes) -> Shapes:
    """Give the second layer experts, and all linear layers biases, as nomic-embed-text-v2-moe has them."""
    hidden, inner, experts = config["n_embd"], config["n_inner"], config["num_experts"]
    shapes = {name: shape for name, shape in saved.items() if ".mlp." not in name}
    shapes |= {
        "encoder.layers.0.mlp.fc1.weight": (inner, hidden),
        "encoder.layers.0.mlp.fc1.bias": (inner,),
        "encoder.layers.0.mlp.fc2.weight": (hidden, inner),
        "encoder.layers.0.mlp.fc2.bias": (hidden,),
        "encoder.layers.1.mlp.experts.bias": (hidden,),
        "encoder.layers.1.mlp.experts.mlp.w1": (experts * inner, hidden),
        "encoder.layers.1.mlp.experts.mlp.w2": (experts * inner, hidden),
        "encoder.layers.1.mlp.router.layer.weight": (experts, hidden),
    }
    for layer in range(config["n_layer"]):
        shapes[f"encoder.layers.{layer}.attn.Wqkv.bias"] = (3 * hidden,)
        shapes[f"encoder.layers.{layer}.attn.out_proj.bias"] = (hidden,)
    return shapes


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
    "qwen3_moe": Original(
        "Qwen3MoeForCausalLM", WIDE_HEADS | MOE, llama_cpp={"": {}, "fuse_qkv": {"fuse_qkv": True}}, **MLX
    ),
    "qwen3_5": Original(
        "Qwen3_5ForConditionalGeneration",
        {"text_config": HYBRID | {"mtp_num_hidden_layers": 1}, "vision_config": VISION, "tie_word_embeddings": False},
        published=with_mtp,
        **MLX,
        mlx_vlm={"": {"config": INTERLEAVED_MROPE}},
    ),
    "qwen3_5_moe": Original(
        "Qwen3_5MoeForConditionalGeneration",
        {
            "text_config": HYBRID | MOE | {"shared_expert_intermediate_size": 32, "mtp_num_hidden_layers": 1},
            "vision_config": VISION,
            "tie_word_embeddings": False,
        },
        published=joined_experts,
        llama_cpp={"": {}, "fuse_gate_up": {"fuse_gate_up_exps": True}},
        **MLX,
        mlx_vlm={"": {"config": INTERLEAVED_MROPE}},
    ),
    "qwen3_next": Original(
        "Qwen3NextForCausalLM",
        HYBRID | MOE | {"shared_expert_intermediate_size": 32},
        published=with_mtp,
        llama_cpp={"": {}, "fuse_gate_up": {"fuse_gate_up_exps": True}},
        **MLX,
    ),
    "deepseek_v3": Original("DeepseekV3ForCausalLM", MLA | {"num_nextn_predict_layers": 1}, published=with_nextn),
    "deepseek_v3_plain": Original("DeepseekV3ForCausalLM", MLA, llama_cpp={}, **MLX),
    "glm4_moe_lite": Original(
        "Glm4MoeLiteForCausalLM", MLA | {"num_nextn_predict_layers": 1}, published=with_nextn, **MLX
    ),
    "gpt_oss": Original(
        "GptOssForCausalLM",
        LLAMA | {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
        **MLX,
    ),
    "gemma3_text": Original(
        "Gemma3ForCausalLM", WIDE_HEADS | {"sliding_window": 8, "tie_word_embeddings": True}, files=TOKENIZER, **MLX
    ),
    "gemma4": Original(  # like 31B: full attention has one matrix for keys and values
        "Gemma4ForConditionalGeneration",
        GEMMA4 | {"text_config": GEMMA4_TEXT | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}},
        files=TOKENIZER,
        **MLX,
    ),
    "gemma4_moe": Original(  # like 26B-A4B
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
    "gemma4_per_layer": Original(  # like E2B: each layer has embeddings; the last layers use others' keys and values
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
    "phi3_long": Original(
        "Phi3ForCausalLM", BASE | HEADS | {"rope_scaling": LONG_ROPE, "original_max_position_embeddings": 64}, **MLX
    ),
    "llama3": Original(
        "LlamaForCausalLM",
        LLAMA
        | {
            "tie_word_embeddings": True,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        **MLX,
    ),
    "phi3": Original("Phi3ForCausalLM", BASE | HEADS, **MLX),
    "glm4_moe": Original(
        "Glm4MoeForCausalLM",
        WIDE_HEADS
        | MOE
        | {"n_routed_experts": 4, "n_shared_experts": 1, "use_qk_norm": True, "attention_bias": True}
        | {"num_nextn_predict_layers": 1, "first_k_dense_replace": 1},
        published=with_nextn,
        **MLX,
    ),
    "glm_moe_dsa": Original(
        "GlmMoeDsaForCausalLM",
        MLA
        | {"n_group": 1, "index_topk": 8, "index_head_dim": 32, "index_n_heads": 2, "num_nextn_predict_layers": 1}
        | {"indexer_types": ["full", "full"], "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        | {"moe_layer_freq": 1},
        published=with_nextn,
        **MLX,
    ),
    "minimax_m2": Original(
        "MiniMaxM2ForCausalLM",
        WIDE_HEADS
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "use_qk_norm": True,
            "rotary_dim": 16,
            "shared_intermediate_size": 0,
        },
        **MLX,
    ),
    "kimi_linear": Original(
        "KimiLinearForCausalLM",
        {key: value for key, value in MLA.items() if key not in ("n_routed_experts", "q_lora_rank")}
        | {"num_experts": 4, "num_shared_experts": 1, "num_experts_per_token": 2, "q_lora_rank": None}
        | {"num_expert_group": 1, "topk_group": 1, "num_hidden_layers": 4, "linear_head_dim": 32}
        | {"linear_num_heads": 4, "linear_conv_kernel_dim": 4, "rope_theta": 10000.0}
        | {
            "linear_attn_config": {
                "full_attn_layers": [4],
                "kda_layers": [1, 2, 3],
                "head_dim": 32,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            }
        },
        published=kimi_names,
        **MLX,
    ),
    "gemma": Original("GemmaForCausalLM", WIDE_HEADS | {"tie_word_embeddings": True}, **MLX),
    "gemma2": Original("Gemma2ForCausalLM", WIDE_HEADS | {"tie_word_embeddings": True, "sliding_window": 8}, **MLX),
    "gemma3n": Original(
        "Gemma3nForConditionalGeneration",
        {
            "model_type": "gemma3n",
            "text_config": WIDE_HEADS
            | {"tie_word_embeddings": True, "sliding_window": 8, "num_hidden_layers": 4, "intermediate_size": [96] * 4}
            | {"layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 96}
            | {"hidden_size_per_layer_input": 32, "laurel_rank": 32, "num_kv_shared_layers": 2}
            | {"activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0], "rope_theta": 1000000.0}
            | {"rope_local_base_freq": 10000.0},
        },
        make_shapes=gemma3n_shapes,
        files=TOKENIZER,
        **MLX,
    ),
    "llama4": Original(
        "Llama4ForConditionalGeneration",
        {
            "text_config": LLAMA
            | {"intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1}
            | {"interleave_moe_layer_step": 2},
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 128,
                "vision_output_dim": 32,
                "image_size": 28,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        },
        **MLX,
        mlx_vlm={"": {"config": {"vision_config": {"vision_feature_layer": -1}}}},
    ),
    "mistral": Original("MistralForCausalLM", LLAMA, **MLX),
    "ministral3": Original(
        "Mistral3ForConditionalGeneration",
        {
            "text_config": WIDE_HEADS | {"model_type": "ministral3", "rope_parameters": YARN},
            "vision_config": PIXTRAL,
            "tie_word_embeddings": False,
        },
        **MLX,
        **MLX_VLM,
    ),
    "mixtral": Original("MixtralForCausalLM", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}, **MLX),
    "nemotron": Original("NemotronForCausalLM", LLAMA, **MLX),
    "nemotron_h": Original(
        "NemotronHForCausalLM",
        NEMOTRON_H
        | {"hybrid_override_pattern": "M-*", "layers_block_type": ["linear_attention", "mlp", "full_attention"]},
        **MLX,
    ),
    "nemotron_h_moe": Original(
        "NemotronHForCausalLM",
        NEMOTRON_H
        | {"hybrid_override_pattern": "ME*", "layers_block_type": ["linear_attention", "moe", "full_attention"]}
        | {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
        | {"moe_shared_expert_intermediate_size": 64},
        **MLX,
    ),
    "lfm2": Original(
        "Lfm2ForCausalLM",
        BASE
        | HEADS
        | {"layer_types": ["conv", "full_attention"], "tie_word_embeddings": True, "block_multiple_of": 32}
        | {"block_dim": 64, "block_ff_dim": 96, "full_attn_idxs": [1]},
        **MLX,
    ),
    "lfm2_moe": Original(
        "Lfm2MoeForCausalLM",
        BASE
        | HEADS
        | MOE
        | {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"], "tie_word_embeddings": True}
        | {"num_dense_layers": 1},
        **MLX,
    ),
    "granite": Original("GraniteForCausalLM", BASE | HEADS | GRANITE, **MLX),
    "granitemoe": Original(
        "GraniteMoeForCausalLM", BASE | HEADS | GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}, **MLX
    ),
    "granitemoehybrid": Original(
        "GraniteMoeHybridForCausalLM",
        BASE
        | HEADS
        | GRANITE
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32, "mamba_n_heads": 4}
        | {"layer_types": ["mamba", "attention"], "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1},
        **MLX,
    ),
    "falcon_h1": Original(
        "FalconH1ForCausalLM",
        WIDE_HEADS
        | {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16}
        | {"mamba_rms_norm": True, "key_multiplier": 0.4, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.2}
        | {"ssm_multipliers": [0.35, 0.25, 0.17, 0.5, 0.3], "ssm_out_multiplier": 0.23, "lm_head_multiplier": 0.04}
        | {"mlp_multipliers": [0.88, 0.37], "embedding_multiplier": 5.6, "attention_in_multiplier": 1.1},
        **MLX,
    ),
    "hunyuan_dense": Original("HunYuanDenseV1ForCausalLM", WIDE_HEADS, **MLX),
    "hunyuan_moe": Original(
        "HunYuanMoEV1ForCausalLM",
        LLAMA
        | {"num_experts": 4, "moe_topk": [2, 2], "moe_intermediate_size": [96, 96], "num_shared_expert": [1, 1]}
        | {"use_qk_norm": True},
        **MLX,
    ),
    "ernie4_5": Original("Ernie4_5ForCausalLM", LLAMA | {"use_bias": False}, **MLX),
    "ernie4_5_moe": Original(
        "Ernie4_5_MoeForCausalLM",
        BASE
        | HEADS
        | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_layer_interval": 1},
        **MLX,
    ),
    "seed_oss": Original("SeedOssForCausalLM", WIDE_HEADS, **MLX),
    "bert": Original("BertModel", BERT),
    "modernbert": Original("ModernBertModel", BERT),
    "nomic_bert": Original("NomicBertModel", NOMIC, files=WORD_PIECE),
    "nomic_bert_moe": Original(
        "NomicBertModel",
        NOMIC
        | {"activation_function": "gelu", "moe_every_n_layers": 2, "num_experts": 4, "moe_top_k": 2}
        | {"qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "n_positions": 2048},
        published=nomic_moe,
        files=WORD_PIECE,
    ),
    "embeddinggemma": Original("Gemma3TextModel", WIDE_HEADS | {"sliding_window": 8}, files=TOKENIZER),
    "smollm3": Original("SmolLM3ForCausalLM", BASE | HEADS | {"tie_word_embeddings": True}, **MLX),
    "exaone4": Original(
        "Exaone4ForCausalLM", LLAMA | {"sliding_window": 8}, written={"sliding_window_pattern": "LG"}, **MLX
    ),
    "dots1": Original(
        "Dots1ForCausalLM",
        WIDE_HEADS
        | MOE
        | {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "sliding_window": None},
        **MLX,
    ),
    "cohere2": Original(
        "Cohere2ForCausalLM", LLAMA | {"rotary_pct": 1.0, "tie_word_embeddings": True, "sliding_window": 8}, **MLX
    ),
    "olmo2": Original("Olmo2ForCausalLM", BASE | HEADS, **MLX),
    "olmoe": Original("OlmoeForCausalLM", BASE | HEADS | {"num_experts": 4, "num_experts_per_tok": 2}, **MLX),
    "stablelm": Original("StableLmForCausalLM", BASE | HEADS | {"use_qkv_bias": True}, **MLX),
    "starcoder2": Original("Starcoder2ForCausalLM", BASE | HEADS | {"tie_word_embeddings": True}, **MLX),
    "falcon": Original(
        "FalconForCausalLM",
        BASE | {"num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 96},
    ),
    "gpt_neox": Original(
        "GPTNeoXForCausalLM",
        BASE | {"rotary_pct": 0.25, "rotary_emb_base": 10000, "intermediate_size": 256, "num_attention_heads": 4},
        llama_cpp={"": {"plain_config": True}},
        **MLX,
    ),
    "gpt2": Original("GPT2LMHeadModel", GPT2 | GPT2_SIZES),
    "gpt2_published": Original("GPT2LMHeadModel", GPT2 | GPT2_SIZES, published=gpt2_names, llama_cpp={}, **MLX),
    "bloom": Original("BloomForCausalLM", GPT2 | {"hidden_size": 64}),
    "mamba": Original(
        "MambaForCausalLM",
        MAMBA | {"state_size": 16, "time_step_rank": 32, "intermediate_size": 128, "tie_word_embeddings": True},
        **MLX,
    ),
    "mamba2": Original(
        "Mamba2ForCausalLM",
        MAMBA
        | {"state_size": 16, "num_heads": 4, "head_dim": 32, "n_groups": 2, "chunk_size": 8, "intermediate_size": 128},
        **MLX,
    ),
    "jamba": Original(
        "JambaForCausalLM",
        BASE
        | HEADS
        | {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
        | {"mamba_d_state": 16, "mamba_dt_rank": 32},
        **MLX,
    ),
    "minicpm3": Original(
        "MiniCPM3ForCausalLM",
        {key: value for key, value in MLA.items() if "expert" not in key and "group" not in key}
        | {"rope_scaling": LONG_ROPE, "scale_emb": 12, "v_head_dim": 16, "scale_depth": 1.4, "dim_model_base": 32},
        **MLX,
    ),
    "t5": Original(
        "T5ForConditionalGeneration",
        {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "qwen2_5_vl": Original(
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": BASE | HEADS | {"rope_parameters": MROPE},
            "vision_config": VISION | {"depth": 4, "fullatt_block_indexes": [1, 3]},
        },
        llama_cpp=WITH_MMPROJ,
        files=IMAGES,
    ),
    "qwen3_vl": Original(
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": WIDE_HEADS | {"rope_parameters": MROPE},
            "vision_config": VISION | {"depth": 4, "deepstack_visual_indexes": [1, 2]},
        },
        llama_cpp=WITH_MMPROJ,
        files=IMAGES,
        mlx_vlm={"": {"config": {"vision_config": {"model_type": "qwen3_vl"}}}},
    ),
    "gemma3": Original(  # The embeddings have rows without a token.
        "Gemma3ForConditionalGeneration",
        {
            "text_config": WIDE_HEADS | {"sliding_window": 8, "tie_word_embeddings": True, "vocab_size": 100},
            "vision_config": SIGLIP | {"vision_use_head": False},
            "mm_tokens_per_image": 4,
        },
        published=siglip_names,
        llama_cpp=WITH_MMPROJ,
        files=TOKENIZER | IMAGES,
    ),
    "pixtral": Original(
        "LlavaForConditionalGeneration",
        {"text_config": WIDE_HEADS | {"model_type": "mistral"}, "vision_config": PIXTRAL, "tie_word_embeddings": False},
        llama_cpp=WITH_MMPROJ,
        files=TOKENIZER | IMAGES | IMG_BREAK,
    ),
    "smolvlm": Original(
        "SmolVLMForConditionalGeneration",
        {"text_config": LLAMA | {"model_type": "llama"}, "vision_config": SIGLIP},
        llama_cpp={"mmproj": {"mmproj": True}},
        files=IMAGES,
        **MLX_VLM,
    ),
    "gemma4_towers": Original(
        "Gemma4ForConditionalGeneration",
        {
            "text_config": GEMMA4_TEXT,
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 96,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "position_embedding_size": 16,
                "patch_size": 4,
            },
            "audio_config": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "output_proj_dims": 64,
                "subsampling_conv_channels": [8, 4],
                "conv_kernel_size": 5,
            },
        },
        llama_cpp={"mmproj": {"mmproj": True}},
        files=TOKENIZER | IMAGES,
    ),
    "qwen2_audio": Original(
        "Qwen2AudioForConditionalGeneration",
        {"text_config": BASE | HEADS | {"model_type": "qwen2"}, "audio_config": AUDIO_ENCODER},
        llama_cpp=WITH_MMPROJ,
        **MLX_AUDIO,
    ),
    "wav2vec2": Original(
        "Wav2Vec2ForCTC",
        {
            "vocab_size": 32,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 96,
            "conv_dim": [32, 32],
            "conv_stride": [5, 2],
            "conv_kernel": [10, 3],
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 4,
            "mask_time_prob": 0.0,
            "mask_feature_prob": 0.0,
        },
        llama_cpp={},
        written={"model_type": "mms"},  # the name by which mlx-audio finds the model
        **MLX_AUDIO,
    ),
    "moonshine": Original(
        "MoonshineForConditionalGeneration",
        {
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 96,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "pad_token_id": 0,
        },
        llama_cpp={},
        **MLX_AUDIO,
    ),
    "voxtral": Original(
        "VoxtralForConditionalGeneration",
        {
            "text_config": WIDE_HEADS | {"model_type": "llama"},
            "hidden_size": 64,
            "audio_config": {
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 4,
                "num_attention_heads": 2,
                "num_mel_bins": 16,
                "max_source_positions": 16,
            },
        },
        llama_cpp={"mmproj": {"mmproj": True}},
    ),
    "internvl": Original(
        "InternVLChatModel",
        {
            "model_type": "internvl_chat",
            "downsample_ratio": 0.5,
            "llm_config": LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
            "vision_config": {
                "architectures": ["InternVisionModel"],
                "model_type": "intern_vit_6b",
                "hidden_size": 32,
                "intermediate_size": 96,
                "num_hidden_layers": 4,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "layer_norm_eps": 1e-6,
                "hidden_act": "gelu",
            },
        },
        make_shapes=internvl_shapes,
        llama_cpp=WITH_MMPROJ,
        files=IMAGES,
        mlx_vlm={"": {"config": {"llm_config": {"rms_norm_eps": 1e-6}}}},
    ),
    "qwen3": Original("Qwen3ForCausalLM", WIDE_HEADS, **MLX),
    "qwen2_moe": Original(
        "Qwen2MoeForCausalLM",
        BASE | HEADS | MOE | {"shared_expert_intermediate_size": 96},
        llama_cpp={"": {}, "fuse_qkv": {"fuse_qkv": True}},
        **MLX,
    ),
    "qwen3_5_moe_by_expert": Original(  # as transformers saves it
        "Qwen3_5MoeForConditionalGeneration",
        {
            "text_config": HYBRID | MOE | {"shared_expert_intermediate_size": 32, "mtp_num_hidden_layers": 1},
            "vision_config": VISION,
            "tie_word_embeddings": False,
        },
        published=with_mtp,
    ),
    "qwen3_vl_moe": Original(
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": WIDE_HEADS | MOE | {"rope_parameters": MROPE},
            "vision_config": VISION | {"depth": 4, "deepstack_visual_indexes": [1, 2]},
        },
        files=IMAGES,
    ),
    "deepseek_v2": Original(  # like V2 Lite
        "DeepseekV2ForCausalLM", MLA | {"q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 2}
    ),
    "deepseek_v32": Original(
        "DeepseekV32ForCausalLM",
        MLA | {"n_group": 1, "index_topk": 8, "index_head_dim": 32, "index_n_heads": 2, "num_nextn_predict_layers": 1},
        published=with_nextn,
    ),
    "glm": Original("GlmForCausalLM", LLAMA | {"attention_bias": True}, **MLX),
    "glm4": Original("Glm4ForCausalLM", LLAMA, **MLX),
    "phi": Original("PhiForCausalLM", BASE | {"num_attention_heads": 4}, **MLX),
    "olmo": Original("OlmoForCausalLM", BASE | HEADS),
    "olmo3": Original("Olmo3ForCausalLM", BASE | HEADS | {"sliding_window": 8}, **MLX),
    "cohere": Original("CohereForCausalLM", BASE | HEADS | {"tie_word_embeddings": True}, **MLX),
    "arcee": Original("ArceeForCausalLM", LLAMA),
    "dbrx": Original(
        "DbrxForCausalLM",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 128,
            "vocab_size": 96,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 500000.0, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        },
        **MLX,
    ),
    "xlm_roberta": Original("XLMRobertaModel", BERT | {"pad_token_id": 1, "type_vocab_size": 1}),
    "exaone_moe": Original(
        "ExaoneMoeForCausalLM",
        WIDE_HEADS | MOE | {"num_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": 8},
        written={"sliding_window_pattern": "LG", "is_moe_layer": [False, True], "scoring_func": "sigmoid"},
    ),
    "hunyuan_v3": Original("HYV3ForCausalLM", WIDE_HEADS | MOE | {"num_shared_experts": 1, "first_k_dense_replace": 1}),
    "afmoe": Original("AfmoeForCausalLM", WIDE_HEADS | MOE | {"num_shared_experts": 1, "num_dense_layers": 1}, **MLX),
    "bamba": Original(
        "BambaForCausalLM",
        BASE
        | HEADS
        | {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16},
    ),
    "falcon_mamba": Original(
        "FalconMambaForCausalLM",
        MAMBA | {"state_size": 16, "time_step_rank": 32, "intermediate_size": 128, "tie_word_embeddings": True},
    ),
    "gpt_bigcode": Original("GPTBigCodeForCausalLM", GPT2 | {"n_embd": 64, "n_positions": 128}, **MLX),
    # What changes the computation and is in the metadata alone.
    "qwen2_yarn": Original(
        "Qwen2ForCausalLM",
        LLAMA
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 1000000.0,
                "beta_fast": 16.0,
            }
        },
    ),
    "llama_biased": Original(
        "LlamaForCausalLM",
        LLAMA
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
        | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}},
    ),
    "gemma3_scaled": Original(
        "Gemma3ForCausalLM",
        WIDE_HEADS
        | {"num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }
        },
        files=TOKENIZER,
    ),
    "phi3_partial": Original(
        "Phi3ForCausalLM",
        BASE
        | HEADS
        | {"sliding_window": 8, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75}
        | {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "internlm2": Original("InternLM2ForCausalLM", INTERNLM2, make_shapes=internlm2_shapes, **MLX),
    "plamo2": Original("Plamo2ForCausalLM", PLAMO2, make_shapes=plamo2_shapes),
}
