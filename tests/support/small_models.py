"""Small models of many architectures with random weights, as transformers saves them; and what it makes of tokens."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

COMMON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = COMMON | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 8}
MOE = GATED | {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

# Name → class of the config, its fields.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GATED | {"tie_word_embeddings": False}),
    "llama tied": ("LlamaConfig", GATED | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", GATED),
    "qwen3_moe": ("Qwen3MoeConfig", MOE | {"num_experts": 4}),
    "mixtral": ("MixtralConfig", GATED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOssConfig", GATED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": (
        "Llama4TextConfig",
        GATED | {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "pad_token_id": 0},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        MOE
        | {
            "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
    "gemma2": ("Gemma2Config", GATED | {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", GATED | {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "mistral": ("MistralConfig", GATED | {"sliding_window": 8}),
    "phi3": ("Phi3Config", {k: v for k, v in GATED.items() if k != "head_dim"} | IDS),
    "gpt2": ("GPT2Config", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "opt": ("OPTConfig", COMMON | IDS | {"ffn_dim": 48, "max_position_embeddings": 128, "word_embed_proj_dim": 32}),
    "mamba": ("MambaConfig", {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "t5": ("T5Config", {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
                        "decoder_start_token_id": 0}),
    "bert": ("BertConfig", COMMON | {"intermediate_size": 48, "max_position_embeddings": 128}),
}  # fmt: skip


def auto_of(name: str) -> Any:
    """Return the class that loads a model of that name."""
    import transformers

    special = {"t5": transformers.AutoModelForSeq2SeqLM, "bert": transformers.AutoModel}
    return special.get(name, transformers.AutoModelForCausalLM)


def save_model(name: str, folder: Path, shard: str = "50GB", **changed: int) -> Path:
    """Save a model with large random weights, so that errors are visible, in float32; ``changed`` edits its config."""
    import transformers

    class_name, fields = MODELS[name]
    torch.manual_seed(0)
    model = auto_of(name).from_config(getattr(transformers, class_name)(**fields | changed)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a saved model."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def quantized_by(recipe: Any, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return matrices as codes and scales, and their values as a plain model needs them."""
    written, values = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "embed" not in name and "lm_head" not in name and min(tensor.shape) > 4:
            codes, scale = recipe(tensor)
            written[name], written[f"{name}_scale"] = codes, scale
            values[name] = codes.float() * scale
    return written, values


def ids(folder: Path, n: int = 96, vocabulary: int = 96) -> Path:
    """Write a file of token ids."""
    path = folder / "ids.safetensors"
    save_file({"ids": torch.randint(3, vocabulary, (n,), generator=torch.Generator().manual_seed(1))}, path)
    return path


def with_words(folder: Path) -> None:
    """Write a tokenizer whose tokens are w0 … w89."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{n}": n for n in range(90)} | {"[UNK]": 90}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
