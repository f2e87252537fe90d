"""The config of a denoiser in a single file, recognized from the names and shapes of its tensors.

Shapes determine sizes and numbers of blocks. What they do not show (dimensions of rotary embeddings, widths of heads,
epsilons) comes from the defaults of diffusers' class, which fit the family's released model, or from constants here:

    head widths     Qwen-Image and Wan 128, SD3 64, AuraFlow 256: transformer/config.json of Qwen/Qwen-Image,
                    Wan-AI/Wan2.1-T2V-14B-Diffusers, stabilityai/stable-diffusion-3-medium-diffusers, fal/AuraFlow-v0.3
    32 heads        Lightricks/LTX-Video: every size
    cross-attention Sana: 112 of 2240 and 72 of 1152 channels (Efficient-Large-Model/Sana_1600M_1024px_diffusers,
                    Sana_600M_1024px_diffusers)
    UNets           unet/config.json of stable-diffusion-v1-5/stable-diffusion-v1-5, stabilityai/stable-diffusion-2-1,
                    stabilityai/stable-diffusion-xl-base-1.0

Tensors have the names that Black Forest Labs, Stability AI, Alibaba and others gave them, which ComfyUI keeps
(comfyanonymous/ComfyUI, comfy/model_detection.py).
"""

from collections.abc import Callable, Mapping
from math import isqrt, prod
from typing import NamedTuple

from quanterr.errors import CheckpointError
from quanterr.evaluation.models.layouts import Shape, denoiser_names
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display, itemize

HEAD, SD3_HEAD, AURAFLOW_HEAD, SANA_HEAD = 128, 64, 256, 32
LTX_HEADS = 32
SANA_CROSS_HEADS = {2240: 112, 1152: 72}  # width of a cross-attention head, by channels

_UNET: JsonObject = {
    "block_out_channels": [320, 640, 1280, 1280],
    "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
    "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
}
# Width of the text embeddings that cross-attention reads → config.
UNET_CONFIGS: Mapping[int, JsonObject] = {
    768: _UNET | {"cross_attention_dim": 768, "attention_head_dim": 8},
    1024: _UNET | {"cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20], "use_linear_projection": True},
    2048: {
        "block_out_channels": [320, 640, 1280],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "cross_attention_dim": 2048,
        "attention_head_dim": [5, 10, 20],
        "transformer_layers_per_block": [1, 2, 10],
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}


class Tensors:
    """The shapes of a denoiser's tensors, by bare names."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        """Keep the shapes."""
        self.shapes = shapes

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def size(self, name: str, axis: int = 0) -> int:
        """Return the size of a tensor along an axis.

        Raises:
            KeyError: there is no such tensor, or no such axis.
        """
        shape = self.shapes[name]
        if axis >= len(shape):
            raise KeyError(name)
        return shape[axis]

    def blocks(self, prefix: str) -> int:
        """Return how many numbered blocks have a prefix, as in ``double_blocks.0``."""
        return len({name.removeprefix(prefix).split(".")[0] for name in self.shapes if name.startswith(prefix)})


class Family(NamedTuple):
    """A family of denoisers: the tensor by which it is recognized, diffusers' class, and a function for its config."""

    name: str
    probe: str
    model: str
    config: Callable[[Tensors], JsonObject]


def _rotary_head(t: Tensors, name: str) -> int:
    """Return the width of a head from its norm; rotary axes, which no tensor shows, are known only for HEAD channels.

    Raises:
        KeyError: the width is not HEAD.
    """
    head = t.size(name)
    if head != HEAD:
        raise KeyError(f"heads of {HEAD} channels (it has {head})")
    return head


def _flux(t: Tensors) -> JsonObject:
    """Return the part of the config that FLUX.1, FLUX.2 and Chroma share."""
    head = _rotary_head(t, "double_blocks.0.img_attn.norm.key_norm.scale")
    return {
        "in_channels": t.size("img_in.weight", 1),
        "out_channels": t.size("final_layer.linear.weight"),
        "num_layers": t.blocks("double_blocks."),
        "num_single_layers": t.blocks("single_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": t.size("img_in.weight") // head,
        "joint_attention_dim": t.size("txt_in.weight", 1),
    }


def _flux1(t: Tensors) -> JsonObject:
    return _flux(t) | {
        "pooled_projection_dim": t.size("vector_in.in_layer.weight", 1),
        "guidance_embeds": "guidance_in.in_layer.weight" in t,
    }


def _flux2(t: Tensors) -> JsonObject:
    return _flux(t) | {
        "timestep_guidance_channels": t.size("time_in.in_layer.weight", 1),
        "mlp_ratio": t.size("double_blocks.0.img_mlp.2.weight", 1) / t.size("img_in.weight"),
        "guidance_embeds": "guidance_in.in_layer.weight" in t,
    }


def _chroma(t: Tensors) -> JsonObject:
    return _flux(t) | {
        "approximator_num_channels": t.size("distilled_guidance_layer.in_proj.weight", 1),
        "approximator_hidden_dim": t.size("distilled_guidance_layer.in_proj.weight"),
        "approximator_layers": t.blocks("distilled_guidance_layer.layers."),
    }


def _sd3(t: Tensors) -> JsonObject:
    inner, patch = t.size("x_embedder.proj.weight"), t.size("x_embedder.proj.weight", 2)
    n_blocks = t.blocks("joint_blocks.")
    return {
        "patch_size": patch,
        "in_channels": t.size("x_embedder.proj.weight", 1),
        "out_channels": t.size("final_layer.linear.weight") // patch**2,
        "num_layers": n_blocks,
        "attention_head_dim": SD3_HEAD,
        "num_attention_heads": inner // SD3_HEAD,
        "joint_attention_dim": t.size("context_embedder.weight", 1),
        "caption_projection_dim": t.size("context_embedder.weight"),
        "pooled_projection_dim": t.size("y_embedder.mlp.0.weight", 1),
        "pos_embed_max_size": isqrt(t.size("pos_embed", 1)),
        "qk_norm": "rms_norm" if "joint_blocks.0.x_block.attn.ln_q.weight" in t else None,
        "dual_attention_layers": [n for n in range(n_blocks) if f"joint_blocks.{n}.x_block.attn2.qkv.weight" in t],
    }


def _unet(t: Tensors) -> JsonObject:
    text = next(
        (shape[1] for name, shape in t.shapes.items() if name.endswith(".attn2.to_k.weight") and len(shape) == 2), 0
    )
    if text not in UNET_CONFIGS:
        raise KeyError(f"cross-attention to {' or '.join(map(str, UNET_CONFIGS))} channels (it has {text})")
    channels = {"in_channels": t.size("input_blocks.0.0.weight", 1), "out_channels": t.size("out.2.weight")}
    return UNET_CONFIGS[text] | channels


def _wan(t: Tensors) -> JsonObject:
    inner, patch = t.size("patch_embedding.weight"), t.shapes["patch_embedding.weight"][2:]
    has_image = "blocks.0.cross_attn.k_img.weight" in t
    return {
        "patch_size": list(patch),
        "in_channels": t.size("patch_embedding.weight", 1),
        "out_channels": t.size("head.head.weight") // prod(patch),
        "num_layers": t.blocks("blocks."),
        "attention_head_dim": HEAD,
        "num_attention_heads": inner // HEAD,
        "text_dim": t.size("text_embedding.0.weight", 1),
        "freq_dim": t.size("time_embedding.0.weight", 1),
        "ffn_dim": t.size("blocks.0.ffn.0.weight"),
        "cross_attn_norm": "blocks.0.norm3.weight" in t,
        "image_dim": t.size("img_emb.proj.0.weight") if has_image else None,
        "added_kv_proj_dim": inner if has_image else None,
    }


def _qwen_image(t: Tensors) -> JsonObject:
    is_layered = "time_text_embed.addition_t_embedding.weight" in t
    return {
        "in_channels": t.size("img_in.weight", 1),
        "out_channels": t.size("proj_out.weight") // 4,
        "num_layers": t.blocks("transformer_blocks."),
        "attention_head_dim": HEAD,
        "num_attention_heads": t.size("img_in.weight") // HEAD,
        "joint_attention_dim": t.size("txt_in.weight", 1),
        "zero_cond_t": ZERO_TIMESTEP in t,
        "use_additional_t_cond": is_layered,
        "use_layer3d_rope": is_layered,
    }


def _next_dit(t: Tensors, width: str, layers: str, refiners: str, heads: str, kv_heads: str) -> JsonObject:
    """Return the part of the config that Z-Image and Lumina 2 share, under the given names of diffusers."""
    channels, head = t.size("x_embedder.weight"), t.size("layers.0.attention.q_norm.weight")
    return {
        "in_channels": t.size("x_embedder.weight", 1) // 4,
        width: channels,
        layers: t.blocks("layers."),
        refiners: t.blocks("noise_refiner."),
        heads: channels // head,
        kv_heads: (t.size("layers.0.attention.qkv.weight") - channels) // 2 // head,
        "cap_feat_dim": t.size("cap_embedder.0.weight"),
    }


def _z_image(t: Tensors) -> JsonObject:
    return _next_dit(t, "dim", "n_layers", "n_refiner_layers", "n_heads", "n_kv_heads")


def _lumina2(t: Tensors) -> JsonObject:
    names = "hidden_size", "num_layers", "num_refiner_layers", "num_attention_heads", "num_kv_heads"
    return _next_dit(t, *names)


def _hunyuan_video(t: Tensors) -> JsonObject:
    channels, patch = t.size("img_in.proj.weight", 1), t.shapes["img_in.proj.weight"][2:]
    head = _rotary_head(t, "double_blocks.0.img_attn_q_norm.weight")
    return {
        "in_channels": channels,
        "out_channels": t.size("final_layer.linear.weight") // prod(patch),
        "patch_size": patch[1],
        "patch_size_t": patch[0],
        "num_layers": t.blocks("double_blocks."),
        "num_single_layers": t.blocks("single_blocks."),
        "num_refiner_layers": t.blocks("txt_in.individual_token_refiner.blocks."),
        "attention_head_dim": head,
        "num_attention_heads": t.size("img_in.proj.weight") // head,
        "text_embed_dim": t.size("txt_in.input_embedder.weight", 1),
        "pooled_projection_dim": t.size("vector_in.in_layer.weight", 1),
        "guidance_embeds": "guidance_in.mlp.0.weight" in t,
        "image_condition_type": "latent_concat" if channels == 2 * 16 + 1 else None,
    }


def _ltx(t: Tensors) -> JsonObject:
    return {
        "in_channels": t.size("patchify_proj.weight", 1),
        "out_channels": t.size("proj_out.weight"),
        "num_layers": t.blocks("transformer_blocks."),
        "num_attention_heads": LTX_HEADS,
        "attention_head_dim": t.size("patchify_proj.weight") // LTX_HEADS,
        "cross_attention_dim": t.size("transformer_blocks.0.attn2.to_k.weight", 1),
        "caption_channels": t.size("caption_projection.linear_1.weight", 1),
    }


def _sana(t: Tensors) -> JsonObject:
    inner = t.size("x_embedder.proj.weight")
    if inner not in SANA_CROSS_HEADS:
        raise KeyError(f"{' or '.join(map(str, SANA_CROSS_HEADS))} channels (it has {inner})")
    return {
        "in_channels": t.size("x_embedder.proj.weight", 1),
        "out_channels": t.size("final_layer.linear.weight"),
        "num_layers": t.blocks("blocks."),
        "attention_head_dim": SANA_HEAD,
        "num_attention_heads": inner // SANA_HEAD,
        "cross_attention_head_dim": SANA_CROSS_HEADS[inner],
        "num_cross_attention_heads": inner // SANA_CROSS_HEADS[inner],
        "cross_attention_dim": inner,
        "caption_channels": t.size("y_embedder.y_proj.fc1.weight", 1),
        "mlp_ratio": t.size("blocks.0.mlp.inverted_conv.conv.weight") / 2 / inner,
    }


def _auraflow(t: Tensors) -> JsonObject:
    inner = t.size("init_x_linear.weight")
    return {
        "in_channels": t.size("init_x_linear.weight", 1) // 4,
        "out_channels": t.size("final_linear.weight") // 4,
        "num_mmdit_layers": t.blocks("double_layers."),
        "num_single_dit_layers": t.blocks("single_layers."),
        "attention_head_dim": AURAFLOW_HEAD,
        "num_attention_heads": inner // AURAFLOW_HEAD,
        "joint_attention_dim": t.size("cond_seq_linear.weight", 1),
        "caption_projection_dim": t.size("cond_seq_linear.weight"),
        "pos_embed_max_size": t.size("positional_encoding", 1),
    }


ZERO_TIMESTEP = "__index_timestep_zero__"  # ComfyUI's marker of Qwen-Image-Edit 2511 (comfy/model_detection.py)
MARKERS = frozenset({ZERO_TIMESTEP})  # stored tensors that are not parameters

# The first family whose probe is stored wins, so a family comes after all others that also store its probe.
FAMILIES = (
    Family("FLUX.2", "double_stream_modulation_img.lin.weight", "Flux2Transformer2DModel", _flux2),
    Family("Chroma", "distilled_guidance_layer.in_proj.weight", "ChromaTransformer2DModel", _chroma),
    Family("FLUX.1", "double_blocks.0.img_attn.norm.key_norm.scale", "FluxTransformer2DModel", _flux1),
    Family("SD3", "joint_blocks.0.context_block.adaLN_modulation.1.bias", "SD3Transformer2DModel", _sd3),
    Family("Stable Diffusion", "input_blocks.0.0.weight", "UNet2DConditionModel", _unet),
    Family("Wan", "head.modulation", "WanTransformer3DModel", _wan),
    Family("Qwen-Image", "transformer_blocks.0.img_mod.1.weight", "QwenImageTransformer2DModel", _qwen_image),
    Family("Z-Image", "layers.0.adaLN_modulation.0.weight", "ZImageTransformer2DModel", _z_image),
    Family("Lumina 2", "layers.0.adaLN_modulation.1.weight", "Lumina2Transformer2DModel", _lumina2),
    Family(
        "HunyuanVideo",
        "txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1.bias",
        "HunyuanVideoTransformer3DModel",
        _hunyuan_video,
    ),
    Family("LTX-Video", "patchify_proj.weight", "LTXVideoTransformer3DModel", _ltx),
    Family("Sana", "attention_y_norm.weight", "SanaTransformer2DModel", _sana),
    Family("AuraFlow", "double_layers.0.attn.w1q.weight", "AuraFlowTransformer2DModel", _auraflow),
)

CONVERTED = "its config is not in quanterr: give that of its diffusers folder with --config FOLDER"
NOT_CONVERTED = "diffusers has no converter of its single files: evaluate its diffusers folder"
# Families that are refused, as they share probes with those above or diffusers cannot convert them: name, probe,
# remedy.
REFUSED = (
    ("Wan VACE", "vace_blocks.0.after_proj.bias", CONVERTED),
    ("Wan Animate", "motion_encoder.dec.direction.weight", CONVERTED),
    ("LTX-2", "av_ca_a2v_gate_adaln_single.emb.timestep_embedder.linear_1.weight", CONVERTED),
    ("Chroma Radiance", "nerf_image_embedder.embedder.0.weight", NOT_CONVERTED),
    ("HunyuanVideo 1.5", "byt5_in.fc1.weight", NOT_CONVERTED),
    ("FramePack", "clean_x_embedder.proj.weight", NOT_CONVERTED),
    ("HiDream", "double_stream_blocks.0.block.adaLN_modulation.1.bias", CONVERTED),
    ("Mochi", "blocks.0.attn.qkv_x.weight", CONVERTED),
    ("Cosmos", "blocks.0.self_attn.q_proj.weight", CONVERTED),
)
PIXART = ("PixArt", "t_block.1.weight", NOT_CONVERTED)  # Sana has this tensor, too


def recognize(shapes: Mapping[str, Shape], where: str) -> JsonObject:
    """Return diffusers' config for a single file, with ``_class_name``, from the shapes of its tensors.

    ``where`` names the file in errors.

    Raises:
        CheckpointError: the family is unknown, cannot be converted by diffusers, or has unknown constants.
    """
    bare, _ = denoiser_names(shapes)
    tensors = Tensors({short: shapes[name] for short, name in bare.items()})
    refused = next((row for row in REFUSED if row[1] in tensors), None)
    family = next((row for row in FAMILIES if row.probe in tensors), None)
    if refused is None and family is None and PIXART[1] in tensors:
        refused = PIXART
    if refused is not None:
        raise CheckpointError(f"{where}: {refused[0]} by its tensor {refused[1]}; {refused[2]}")
    if family is None:
        known = ", ".join(row.name for row in FAMILIES)
        raise CheckpointError(
            f"{where}: no config.json beside it, and its names ({itemize(list(tensors.shapes), 3)}) are of no known "
            f"family of denoisers ({known}); give the config of its diffusers folder with --config FOLDER"
        )
    try:
        return {"_class_name": family.model} | family.config(tensors)
    except (KeyError, IndexError, ZeroDivisionError) as error:
        lacks = display(str(error.args[0])) if isinstance(error, KeyError) else "shapes that the family has"
        raise CheckpointError(
            f"{where}: {family.name} by its tensor {family.probe}, but it lacks {lacks}; give "
            "the config of its diffusers folder with --config FOLDER"
        ) from error
