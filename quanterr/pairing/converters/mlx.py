"""Changes of mlx-lm to tensors besides their names, by ``model_type`` of config.json.

Norms of some models have one added to them: mlx-lm multiplies by what is stored, where transformers multiplies by one
plus that. Gemma's norms stay as they are: mlx-lm adds the one when it computes. Convolutions are [out, width, in].

Reference: ml-explore/mlx-lm 0.32.2 mlx_lm/models/*.py, sanitize of each model; MLX configurations have the key
``quantization`` if the model is quantized.
"""

import re
from collections.abc import Collection

from quanterr.pairing.converters.numbers import Added, Change, multiply, multiply_mamba_inputs
from quanterr.util.strict_json import JsonFields

# Norms of these models that have one added, by their path in transformers.
PLUS_ONE = frozenset({"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"})
SHIFTED = re.compile(r"(.*\.)?(input_layernorm|post_attention_layernorm|norm|[qk]_norm)")
NOT_SHIFTED = re.compile(r".*linear_attn\.norm")
# step3p5 is left out: its names do not show whether its norms were shifted (mlx_lm/models/step3p5.py).

# mlx-lm computes with the language model alone and leaves out towers, and layers that predict further tokens.
LEFT_OUT = re.compile(r"(.*\.)?(visual|vision_tower|vision_model|audio_tower|multi_modal_projector|mtp)\..*")
FALCON_H1 = frozenset({"falcon_h1"})
# Weights that are multiplied by numbers of the configuration: the last word of the path → the change.
MULTIPLIED = {
    "embed_tokens": multiply(("embedding_multiplier", None)),
    "lm_head": multiply(("lm_head_multiplier", None)),
    "q_proj": multiply(("attention_in_multiplier", None)),
    "k_proj": multiply(("attention_in_multiplier", None)),
    "o_proj": multiply(("attention_out_multiplier", None)),
    "out_proj": multiply(("ssm_out_multiplier", None)),
    "gate_proj": multiply(("mlp_multipliers", 0)),
    "down_proj": multiply(("mlp_multipliers", 1)),
    "in_proj": multiply_mamba_inputs,
}


def find_change(kinds: Collection[str], path: str, config: JsonFields) -> Change | None:
    """Return what mlx-lm does to the numbers of a weight, by its path without wrappers and ``.weight``."""
    if not FALCON_H1.isdisjoint(kinds):
        find = MULTIPLIED.get(path.rpartition(".")[2])
        return None if find is None else find(config)
    is_shifted = SHIFTED.fullmatch(path) is not None and NOT_SHIFTED.fullmatch(path) is None
    return Added(1.0) if is_shifted and not PLUS_ONE.isdisjoint(kinds) else None
