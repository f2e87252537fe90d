"""Authors' names of tensors that neither diffusers' converters nor the conventions of names.py cover, as data.

The rows are like those of denoisers.json: an author's name → what Hugging Face's model has for it, from top to bottom.
A bias that is another parameter there has a row in ``biases``. transformers 5 renames tensors when it loads a model;
programs that save the loaded model may keep its own names.

Reference: huggingface/transformers@5.24.0 conversion_mapping.py deepseek_v4, glm5_next, hy_v4, exaone, phimoe,
granitemoe, olmo_hybrid, nomic_bert, GPTNeoXForCausalLM; models/umt5/modeling_umt5.py and Wan-Video/Wan2.1@9737cba
wan/modules/t5.py (T5Encoder); NVIDIA/TensorRT-LLM@01c4ece docs/source/architecture/checkpoint.md and
tensorrt_llm/models/llama/convert.py, where fc is the projection in front of the activation.
"""

from typing import Any

_T5 = "encoder.block.*.layer"
_LLAMA = "model.layers.*"
_PARAMETERS = ("fn", "base", "scale")  # parameters of hyper-connections
_COMPRESSOR = {"wkv": "kv_proj", "wgate": "gate_proj", "ape": "position_bias", "norm": "kv_norm"}


def _name_block(**names: str) -> dict[str, list[str]]:
    """Return the rows of a block, from keywords that are the authors' names with ``__`` for each dot."""
    return {f"layers.*.{author_name.replace('__', '.')}": [f"{_LLAMA}.{name}"] for author_name, name in names.items()}


AUTHORS: dict[str, dict[str, Any]] = {
    "UMT5 of Wan": {
        "unequal": [],
        "tensors": {
            "token_embedding": ["shared"],
            "norm": ["encoder.final_layer_norm"],
            "blocks.*.norm1": [f"{_T5}.0.layer_norm"],
            **{f"blocks.*.attn.{projection}": [f"{_T5}.0.SelfAttention.{projection}"] for projection in "qkvo"},
            "blocks.*.pos_embedding.embedding": [f"{_T5}.0.SelfAttention.relative_attention_bias"],
            "pos_embedding.embedding": ["encoder.block.0.layer.0.SelfAttention.relative_attention_bias"],
            "blocks.*.norm2": [f"{_T5}.1.layer_norm"],
            "blocks.*.ffn.gate.0": [f"{_T5}.1.DenseReluDense.wi_0"],
            "blocks.*.ffn.fc1": [f"{_T5}.1.DenseReluDense.wi_1"],
            "blocks.*.ffn.fc2": [f"{_T5}.1.DenseReluDense.wo"],
        },
    },
    "TensorRT-LLM": {  # models whose MLP has a gate
        "unequal": ["layers.*.attention.qkv"],
        "tensors": {
            "vocab_embedding": ["model.embed_tokens"],
            "ln_f": ["model.norm"],
            "layers.*.post_layernorm": [f"{_LLAMA}.post_attention_layernorm"],
            "layers.*.attention.qkv": [f"{_LLAMA}.self_attn.{projection}_proj" for projection in "qkv"],
            "layers.*.attention.dense": [f"{_LLAMA}.self_attn.o_proj"],
            "layers.*.mlp.fc": [f"{_LLAMA}.mlp.gate_proj"],
            "layers.*.mlp.gate": [f"{_LLAMA}.mlp.up_proj"],
            "layers.*.mlp.proj": [f"{_LLAMA}.mlp.down_proj"],
        },
    },
    "DeepSeek-V4": {
        "unequal": [],
        "biases": {"layers.*.ffn.gate": f"{_LLAMA}.mlp.gate.e_score_correction_bias"},
        "tensors": {
            "embed": ["model.embed_tokens"],
            "head": ["lm_head"],
            **{f"hc_head_{parameter}": [f"model.hc_head.hc_{parameter}"] for parameter in _PARAMETERS},
            **{
                f"layers.*.hc_{sublayer}_{parameter}": [f"{_LLAMA}.{sublayer}_hc.{parameter}"]
                for sublayer in ("attn", "ffn")
                for parameter in _PARAMETERS
            },
            **_name_block(
                attn_norm="input_layernorm",
                ffn_norm="post_attention_layernorm",
                attn__attn_sink="self_attn.sinks",
                attn__wq_a="self_attn.q_a_proj",
                attn__q_norm="self_attn.q_a_norm",
                attn__wq_b="self_attn.q_b_proj",
                attn__wkv="self_attn.kv_proj",
                attn__kv_norm="self_attn.kv_norm",
                attn__wo_a="self_attn.o_a_proj",
                attn__wo_b="self_attn.o_b_proj",
                attn__indexer__wq_b="self_attn.compressor.indexer.q_b_proj",
                attn__indexer__weights_proj="self_attn.compressor.indexer.scorer.weights_proj",
                ffn__gate="mlp.gate",
                ffn__gate__tid2eid="mlp.gate.tid2eid",
                ffn__shared_experts__w1="mlp.shared_experts.gate_proj",
                ffn__shared_experts__w2="mlp.shared_experts.down_proj",
                ffn__shared_experts__w3="mlp.shared_experts.up_proj",
            ),
            **{
                f"layers.*.attn.{place}.{author_name}": [f"{_LLAMA}.self_attn.{there}.{name}"]
                for place, there in (("compressor", "compressor"), ("indexer.compressor", "compressor.indexer"))
                for author_name, name in _COMPRESSOR.items()
            },
        },
    },
    "GLM-5": {
        "unequal": [],
        "tensors": {
            **{
                f"layers.*.hc_{sublayer}_{parameter}": [f"{_LLAMA}.{sublayer}_hc.{parameter}"]
                for sublayer in ("attn", "ffn")
                for parameter in _PARAMETERS
            },
            **{
                f"layers.*.self_attn.{projection}": [f"{_LLAMA}.self_attn.forget_gate.{projection}"]
                for projection in ("f_a_proj", "f_b_proj", "dt_bias", "A_log")
            },
        },
    },
    "HY-V4": {
        "unequal": [],
        "tensors": {
            f"layers.*.hc_{author_name}_layer.{pre}hc_{parameter}": [f"{_LLAMA}.{name}_hc.{parameter}"]
            for author_name, name in (("attn", "attn"), ("mlp", "ffn"))
            for pre in ("", "hc_pre.")
            for parameter in _PARAMETERS
        },
    },
    "EXAONE": {
        "unequal": [],
        "tensors": {
            "wte": ["model.embed_tokens"],
            "ln_f": ["model.norm"],
            "h.*.ln_1": [f"{_LLAMA}.input_layernorm"],
            "h.*.ln_2": [f"{_LLAMA}.post_attention_layernorm"],
            **{
                f"h.*.attn.attention.{projection}_proj": [f"{_LLAMA}.self_attn.{projection}_proj"]
                for projection in "qkv"
            },
            "h.*.attn.attention.out_proj": [f"{_LLAMA}.self_attn.o_proj"],
            "h.*.mlp.c_fc_0": [f"{_LLAMA}.mlp.gate_proj"],
            "h.*.mlp.c_fc_1": [f"{_LLAMA}.mlp.up_proj"],
            "h.*.mlp.c_proj": [f"{_LLAMA}.mlp.down_proj"],
        },
    },
    "PhiMoE": {"unequal": [], "tensors": _name_block(block_sparse_moe__gate="mlp.router")},
    "Granite": {"unequal": [], "tensors": _name_block(block_sparse_moe__router__layer="mlp.router")},
    "OLMo Hybrid": {
        "unequal": [],
        "tensors": _name_block(
            attention_layer_norm="input_layernorm", feedforward_layer_norm="post_attention_layernorm"
        ),
    },
    "Nomic": {
        "unequal": [],
        "tensors": {
            "emb_ln": ["embeddings.LayerNorm"],
            "encoder.layers.*.attn.Wqkv": [f"layers.*.self_attn.{projection}_proj" for projection in "qkv"],
            "encoder.layers.*.attn.out_proj": ["layers.*.self_attn.o_proj"],
            "encoder.layers.*.mlp.fc11": ["layers.*.mlp.up_proj"],
            "encoder.layers.*.mlp.fc12": ["layers.*.mlp.gate_proj"],
            "encoder.layers.*.mlp.fc2": ["layers.*.mlp.down_proj"],
            "encoder.layers.*.norm1": ["layers.*.post_attention_layernorm"],
            "encoder.layers.*.norm2": ["layers.*.post_mlp_layernorm"],
        },
    },
    "GPT-NeoX": {"unequal": [], "tensors": {"embed_out": ["lm_head"]}},
}
