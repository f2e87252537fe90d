"""Changes of mlx-lm, mlx-vlm and mlx-audio to tensors besides their names, by ``model_type`` of config.json.

1 is added to the norms of some models, because MLX multiplies by the stored values, and transformers by 1 plus the
stored values. Gemma's norms are not changed: there, mlx-lm adds 1 when it computes.

Reference: ml-explore/mlx-lm 0.32.2 mlx_lm/models/*.py, Blaizzy/mlx-vlm 0.7.10 mlx_vlm/models/*/*.py and
mlx_vlm/speculative/drafters/qwen3_5_mtp, Blaizzy/mlx-audio 0.6.2 mlx_audio/*/models/*/*.py, sanitize of each model; MLX
configurations have the key ``quantization`` if the model is quantized.
"""

import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import NamedTuple

from quanterr.pairing.converters.numbers import Added, Change, multiply, multiply_mamba_inputs
from quanterr.util.strict_json import JsonFields


class Shifted(NamedTuple):
    """Norms to which MLX's programs add 1."""

    kinds: frozenset[str]  # model_types
    norms: re.Pattern[str]  # their paths in transformers
    originals: re.Pattern[str] = re.compile(".*")  # names of originals whose norms are still unshifted


SHIFTED = (
    Shifted(
        frozenset(
            ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_mtp", "qwen3_next", "minicpmv4_6")
        ),
        re.compile(
            r"(mtp\.)?(layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm)|norm"
            r"|pre_fc_norm_(embedding|hidden))"
        ),
    ),
    Shifted(
        frozenset(("step3p5", "step3p7")),
        re.compile(r"layers\.\d+\.(.*\.)?\w*norm|norm"),
        re.compile(r".*\.moe\.((gate|up|down)_proj|gate|router_bias)\b.*|.*(?<!\.mlp)\.share_expert\..*"),
    ),
)

# Tensors that MLX's programs leave out: patterns of names, and the reason.
LEFT_OUT = tuple(
    (re.compile(rf"(.*\.)?({pattern})"), reason)
    for pattern, reason in (
        (
            r"(visual|vision_tower|vision_model|audio_tower|multi_modal_projector)\..*",
            "left out by mlx-lm, which computes with the language model alone",
        ),
        (r"(encoder|audio_tower)\.embed_positions\.weight", "left out by mlx-audio, which computes it"),
        (
            r"masked_spec_embed|project_(hid|q)\..*|quantizer\.(codevectors|weight_proj\..*)",  # wav2vec 2.0
            "left out by mlx-audio: only training needs it",
        ),
    )
)
# Paths that MLX's programs rename, here and in the originals: pattern and replacement, applied in this order.
RENAMED = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?:visual|vpm|vision_model|vision_tower\.vision_model)\.(.*)", r"vision_tower.\1"),
        (r"apm\.(.*)", r"audio_tower.\1"),
        (r"(?:llm|text_model)\.(layers\.\d+\..*|norm|embed_tokens)", r"\1"),
        (r"wav2vec2\.(.*)", r"\1"),
        (r"(.*in_proj)_weight", r"\1"),
        (r"(layers\.\d+)\.moe\.((?:gate|up|down)_proj)", r"\1.mlp.experts.\2"),
        (r"(layers\.\d+)\.moe\.gate", r"\1.mlp.gate.gate"),
        (r"(layers\.\d+)\.moe\.router", r"\1.mlp.gate.router"),  # its bias
        (r"(layers\.\d+)\.(share_expert\..*)", r"\1.mlp.\2"),
        # Whisper, whose names in MLX are those of its authors:
        (r"((?:en|de)coder)\.blocks\.(\d+\..*)", r"\1.layers.\2"),
        (r"((?:en|de)coder\.layers\.\d+)\.attn(_ln|\..*)", r"\1.self_attn\2"),
        (r"(decoder\.layers\.\d+)\.cross_attn(_ln|\..*)", r"\1.encoder_attn\2"),
        (r"((?:en|de)coder\.layers\.\d+\.(?:self|encoder)_attn)_ln", r"\1_layer_norm"),
        (r"((?:en|de)coder\.layers\.\d+)\.mlp_ln", r"\1.final_layer_norm"),
        (r"((?:en|de)coder\.layers\.\d+)\.mlp([12])", r"\1.fc\2"),
        (r"((?:en|de)coder\.layers\.\d+\.(?:self|encoder)_attn)\.out", r"\1.out_proj"),
        (r"((?:en|de)coder\.layers\.\d+\.(?:self|encoder)_attn)\.(q|k|v)(?:uery|ey|alue)", r"\1.\2_proj"),
        (r"((?:en|de)coder)\.ln(?:_post)?", r"\1.layer_norm"),
        (r"decoder\.token_embedding", "decoder.embed_tokens"),
        (r"decoder\.positional_embedding", "decoder.embed_positions"),
    )
)
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


class Kernel(NamedTuple):
    """The order of the axes of a convolution's kernel in MLX; in torch, the positions are the last axes."""

    text: str
    is_transposed: bool = False  # torch stores these [in, out, …], and other kernels [out, in, …]

    def store(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in MLX of a kernel of torch."""
        first, second, *positions = shape
        return (second, *positions, first) if self.is_transposed else (first, *positions, second)


KERNELS = (
    Kernel("stored [out, …, in], like MLX's convolutions"),
    Kernel("stored [out, …, in], like MLX's transposed convolutions", is_transposed=True),
)
# Last words of kernels' paths in language models, for files that do not say that MLX wrote them.
KERNEL_NAMES = frozenset({"conv1d", "conv", "q_conv1d", "k_conv1d", "v_conv1d"})
NORMALIZED = ".weight_v"  # end of a kernel's path that weight_g scales


@lru_cache(maxsize=1 << 16)
def rename(path: str) -> str:
    """Return the path that a weight has in MLX, by its path without wrappers and ``.weight``."""
    for pattern, replacement in RENAMED:
        if pattern.fullmatch(path):
            path = pattern.sub(replacement, path)
    return path


def find_change(
    model_types: Collection[str], path: str, config: JsonFields, original: Iterable[str] | None
) -> Change | None:
    """Return how mlx-lm changes the values of a weight, given its path without wrappers and ``.weight``; None if not.

    ``original``: names of the checkpoint that MLX's was made from; None if it is not known.
    """
    if not FALCON_H1.isdisjoint(model_types):
        find = MULTIPLIED.get(path.rpartition(".")[2])
        return None if find is None else find(config)
    for row in SHIFTED:
        if not row.kinds.isdisjoint(model_types) and row.norms.fullmatch(path):
            return Added(1.0) if original is None or any(map(row.originals.fullmatch, original)) else None
    return None
