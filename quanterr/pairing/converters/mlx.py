"""What mlx-lm does to tensors besides renaming them, by ``model_type`` of config.json.

Norms of some models have one added to them: mlx-lm multiplies by what is stored, where transformers multiplies by one
plus that. Gemma's norms stay as they are: mlx-lm adds the one when it computes. Convolutions are [out, width, in].

Reference: ml-explore/mlx-lm 0.32.2 mlx_lm/models/*.py, sanitize of each model; MLX configurations have the key
``quantization`` if the model is quantized.
"""

import re

# Norms of these models that have one added, by their path in transformers.
PLUS_ONE = frozenset({"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"})
SHIFTED = re.compile(r"(.*\.)?(input_layernorm|post_attention_layernorm|norm|[qk]_norm)")
NOT_SHIFTED = re.compile(r".*linear_attn\.norm")
# step3p5 is left out: whether its norms were shifted cannot be told from its names (mlx_lm/models/step3p5.py).


def is_shifted(path: str) -> bool:
    """Return whether a norm, by its path without wrappers and ``.weight``, has one added to it in these models."""
    return SHIFTED.fullmatch(path) is not None and NOT_SHIFTED.fullmatch(path) is None
