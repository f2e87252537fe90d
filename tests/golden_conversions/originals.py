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
F32 = ("A_log", "e_score_correction_bias", "linear_attn.norm.weight")  # as in most checkpoints
BOTH: dict[str, dict[str, Any]] = {"": {}}


@dataclass(frozen=True)
class Original:
    """``architecture``: of transformers, or of the code in the model's own repository, with ``own`` names and shapes.

    ``published``: makes names and shapes of checkpoints as they are published from those that transformers saves.
    ``llama_cpp``, ``mlx``: variant → options of the converter. ``files``: further files that the converter reads.
    """

    architecture: str
    config: dict[str, Any]
    own: Callable[[dict[str, Any]], Shapes] | None = None
    published: Callable[[dict[str, Any], Shapes], Shapes] | None = None
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
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(merged(saved, original.config)))
    else:
        config = {"architectures": [original.architecture]} | original.config
        (folder / "config.json").write_text(json.dumps(config))
        shapes = original.own(config)
    config = json.loads((folder / "config.json").read_text())
    if original.published is not None:
        shapes = original.published(config, shapes)
    for name, content in original.files.items():
        (folder / name).write_text(json.dumps(content))
    dtypes = {name: "F32" if name.endswith(F32) else "BF16" for name in shapes}
    return config, {name: {"shape": list(shapes[name]), "dtype": dtypes[name]} for name in sorted(shapes)}


def merged(saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return a saved config with its fields also under the names that earlier transformers and repositories use."""
    rope = saved.get("rope_parameters") or {}
    config = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope} | saved
    for key, value in given.items():
        nested = isinstance(value, dict) and isinstance(saved.get(key), dict)
        config[key] = merged(saved[key], value) if nested else value
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
GEMMA4 = {"vision_config": None, "audio_config": None, "vocab_size": 96, "tie_word_embeddings": True}
GEMMA4_TEXT = WIDE | {
    "sliding_window": 8, "tie_word_embeddings": True, "num_hidden_layers": 3, "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "global_head_dim": 64,
}  # fmt: skip
NEMOTRON_H = {key: value for key, value in WIDE.items() if key != "num_hidden_layers"} | {
    "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "conv_kernel": 4,
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625,
}  # fmt: skip
BERT = {key: value for key, value in BASE.items() if key != "tie_word_embeddings"} | {
    "num_attention_heads": 4, "type_vocab_size": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
GPT2 = {"vocab_size": 96, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
MAMBA = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MLX = {"mlx": BOTH}
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
    """Rename the dense layer's matrices, which transformers saves as those of a sparse one."""
    return {re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name): shape for name, shape in saved.items()}


def gemma3n_names(config: dict[str, Any], saved: Shapes) -> Shapes:
    """Rename tensors of the text model to those of the whole, whose vision tower transformers cannot build here."""
    return {re.sub("^model", "model.language_model", name): shape for name, shape in saved.items()}


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
        published=with_mtp,
        **MLX,
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
    ),
    "qwen3_next": Original(
        "Qwen3NextForCausalLM",
        HYBRID | MOE | {"shared_expert_intermediate_size": 32},
        published=with_mtp,
        llama_cpp={"": {}, "fuse_gate_up": {"fuse_gate_up_exps": True}},
        **MLX,
    ),
    "deepseek_v3": Original(
        "DeepseekV3ForCausalLM", MLA | {"num_nextn_predict_layers": 1}, published=with_nextn, **MLX
    ),
    "glm4_moe_lite": Original(
        "Glm4MoeLiteForCausalLM", MLA | {"num_nextn_predict_layers": 1}, published=with_nextn, **MLX
    ),
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
    "glm4_moe": Original(
        "Glm4MoeForCausalLM",
        WIDE
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
        | {"indexer_types": ["full", "full"]},
        published=with_nextn,
        **MLX,
    ),
    "minimax_m2": Original(
        "MiniMaxM2ForCausalLM",
        WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2, "use_qk_norm": True, "rotary_dim": 16},
        **MLX,
    ),
    "kimi_linear": Original(
        "KimiLinearForCausalLM",
        {key: value for key, value in MLA.items() if key not in ("n_routed_experts", "q_lora_rank")}
        | {"num_experts": 4, "num_shared_experts": 1, "num_experts_per_token": 2, "q_lora_rank": None}
        | {"num_expert_group": 1, "topk_group": 1, "num_hidden_layers": 4, "linear_head_dim": 32}
        | {"linear_num_heads": 4, "linear_conv_kernel_dim": 4}
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
    "gemma": Original("GemmaForCausalLM", WIDE | {"tie_word_embeddings": True}, **MLX),
    "gemma2": Original("Gemma2ForCausalLM", WIDE | {"tie_word_embeddings": True, "sliding_window": 8}, **MLX),
    "gemma3n": Original(
        "Gemma3nForCausalLM",
        WIDE
        | {"tie_word_embeddings": True, "sliding_window": 8, "num_hidden_layers": 4, "intermediate_size": [96] * 4}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 96}
        | {"hidden_size_per_layer_input": 32, "laurel_rank": 32, "num_kv_shared_layers": 2}
        | {"activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]},
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
    ),
    "mistral": Original("MistralForCausalLM", LLAMA, **MLX),
    "ministral3": Original(
        "Mistral3ForConditionalGeneration",
        {
            "text_config": WIDE | {"model_type": "ministral3"},
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 32,
                "head_dim": 16,
                "image_size": 28,
            },
            "tie_word_embeddings": False,
        },
        **MLX,
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
        | {"layer_types": ["conv", "full_attention"], "tie_word_embeddings": True, "block_multiple_of": 32},
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
        WIDE
        | {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16}
        | {"mamba_rms_norm": True, "key_multiplier": 0.4, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.2}
        | {"ssm_multipliers": [0.35, 0.25, 0.17, 0.5, 0.3], "ssm_out_multiplier": 0.23, "lm_head_multiplier": 0.04}
        | {"mlp_multipliers": [0.88, 0.37], "embedding_multiplier": 5.6, "attention_in_multiplier": 1.1},
        **MLX,
    ),
    "hunyuan_dense": Original("HunYuanDenseV1ForCausalLM", WIDE, **MLX),
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
    "seed_oss": Original("SeedOssForCausalLM", WIDE, **MLX),
    "bert": Original("BertModel", BERT),
    "modernbert": Original("ModernBertModel", BERT),
    "nomic_bert": Original("NomicBertModel", BERT | {"head_dim": 16}),
    "embeddinggemma": Original("Gemma3TextModel", WIDE | {"sliding_window": 8}, files=TOKENIZER),
    "smollm3": Original("SmolLM3ForCausalLM", BASE | HEADS | {"tie_word_embeddings": True}, **MLX),
    "exaone4": Original("Exaone4ForCausalLM", LLAMA | {"sliding_window": 8}, **MLX),
    "dots1": Original(
        "Dots1ForCausalLM",
        WIDE | MOE | {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "sliding_window": None},
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
    "gpt_neox": Original("GPTNeoXForCausalLM", BASE | {"rotary_pct": 0.25, "num_attention_heads": 4}, **MLX),
    "gpt2": Original("GPT2LMHeadModel", GPT2 | {"n_embd": 64, "n_positions": 128, "n_ctx": 128}, **MLX),
    "bloom": Original("BloomForCausalLM", GPT2 | {"hidden_size": 64}),
    "mamba": Original(
        "MambaForCausalLM", MAMBA | {"state_size": 16, "time_step_rank": 32, "intermediate_size": 128}, **MLX
    ),
    "mamba2": Original(
        "Mamba2ForCausalLM",
        MAMBA | {"state_size": 16, "num_heads": 4, "head_dim": 32, "n_groups": 2, "chunk_size": 8},
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
        {key: value for key, value in MLA.items() if "expert" not in key and "group" not in key},
        **MLX,
    ),
    "t5": Original(
        "T5ForConditionalGeneration",
        {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}
