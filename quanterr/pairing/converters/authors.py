"""Names of models whose authors' names neither diffusers nor the conventions of names.py know, as data.

The rows are like those of denoisers.json: an author's name → what Hugging Face's model has for it, from top to bottom.

Reference: Wan-Video/Wan2.1@9737cba wan/modules/t5.py (T5Encoder) and huggingface/transformers@5.24.0
models/umt5/modeling_umt5.py; NVIDIA/TensorRT-LLM@01c4ece docs/source/architecture/checkpoint.md and
tensorrt_llm/models/llama/convert.py, where fc is the projection in front of the activation.
"""

from typing import Any

_T5 = "encoder.block.*.layer"
_LLAMA = "model.layers.*"

AUTHORS: dict[str, dict[str, Any]] = {
    "UMT5 of Wan": {
        "unequal": [],
        "tensors": {
            "token_embedding": ["shared"],
            "norm": ["encoder.final_layer_norm"],
            "blocks.*.norm1": [f"{_T5}.0.layer_norm"],
            **{f"blocks.*.attn.{one}": [f"{_T5}.0.SelfAttention.{one}"] for one in "qkvo"},
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
            "layers.*.attention.qkv": [f"{_LLAMA}.self_attn.{one}_proj" for one in "qkv"],
            "layers.*.attention.dense": [f"{_LLAMA}.self_attn.o_proj"],
            "layers.*.mlp.fc": [f"{_LLAMA}.mlp.gate_proj"],
            "layers.*.mlp.gate": [f"{_LLAMA}.mlp.up_proj"],
            "layers.*.mlp.proj": [f"{_LLAMA}.mlp.down_proj"],
        },
    },
}
