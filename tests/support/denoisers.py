"""Small denoisers in the names of their original authors, and the same as folders of diffusers.

The names and shapes are those of the released files (Black Forest Labs, Stability AI, Alibaba, Tongyi, Tencent,
Lightricks, Alpha-VLLM, NVIDIA, fal), at small sizes. diffusers' own converter makes its folder of them, with weights.
"""

import inspect
import json
from math import prod

import diffusers
import torch
from diffusers.loaders import single_file_model, single_file_utils
from safetensors.torch import save_file


def linear(name, rows, cols, bias=True):
    return {f"{name}.weight": (rows, cols)} | ({f"{name}.bias": (rows,)} if bias else {})


def join(*parts):
    return {name: shape for part in parts for name, shape in part.items()}


def _flux_mlp(name, width, hidden, bias=True):
    return join(linear(f"{name}.0", hidden, width, bias), linear(f"{name}.2", width, hidden, bias))


def _embedder(name, width, cols, bias=True):
    return join(linear(f"{name}.in_layer", width, cols, bias), linear(f"{name}.out_layer", width, width, bias))


def _mlp_embedder(name, width, cols):
    return join(linear(f"{name}.mlp.0", width, cols), linear(f"{name}.mlp.2", width, width))


def flux(width=32, head=16, text=24, pooled=20, channels=4, doubles=2, singles=2, guidance=True, modulated=True):
    double = [
        join(
            linear(f"double_blocks.{n}.{part}_attn.qkv", 3 * width, width),
            linear(f"double_blocks.{n}.{part}_attn.proj", width, width),
            _flux_mlp(f"double_blocks.{n}.{part}_mlp", width, 4 * width),
            {f"double_blocks.{n}.{part}_attn.norm.{side}_norm.scale": (head,) for side in ("query", "key")},
            linear(f"double_blocks.{n}.{part}_mod.lin", 6 * width, width) if modulated else {},
        )
        for n in range(doubles)
        for part in ("img", "txt")
    ]
    single = [
        join(
            linear(f"single_blocks.{n}.linear1", 7 * width, width),
            linear(f"single_blocks.{n}.linear2", width, 5 * width),
            {f"single_blocks.{n}.norm.{side}_norm.scale": (head,) for side in ("query", "key")},
            linear(f"single_blocks.{n}.modulation.lin", 3 * width, width) if modulated else {},
        )
        for n in range(singles)
    ]
    modulation = join(
        _embedder("time_in", width, 256),
        _embedder("vector_in", width, pooled),
        _embedder("guidance_in", width, 256) if guidance else {},
        linear("final_layer.adaLN_modulation.1", 2 * width, width),
    )
    return join(
        linear("img_in", width, channels),
        linear("txt_in", width, text),
        linear("final_layer.linear", channels, width),
        modulation if modulated else {},
        *double,
        *single,
    )


def chroma():
    guidance = [
        join(
            _embedder(f"distilled_guidance_layer.layers.{n}", 24, 24),
            {f"distilled_guidance_layer.norms.{n}.scale": (24,)},
        )
        for n in range(2)
    ]
    return join(
        flux(modulated=False),
        linear("distilled_guidance_layer.in_proj", 24, 64),
        linear("distilled_guidance_layer.out_proj", 32, 24),
        *guidance,
    )


def flux2(width=32, head=16, text=24, channels=4):
    double = [
        join(
            linear(f"double_blocks.{n}.{part}_attn.qkv", 3 * width, width, bias=False),
            linear(f"double_blocks.{n}.{part}_attn.proj", width, width, bias=False),
            linear(f"double_blocks.{n}.{part}_mlp.0", 6 * width, width, bias=False),
            linear(f"double_blocks.{n}.{part}_mlp.2", width, 3 * width, bias=False),
            {f"double_blocks.{n}.{part}_attn.norm.{side}_norm.scale": (head,) for side in ("query", "key")},
        )
        for n in range(2)
        for part in ("img", "txt")
    ]
    single = [
        join(
            linear(f"single_blocks.{n}.linear1", 9 * width, width, bias=False),
            linear(f"single_blocks.{n}.linear2", width, 4 * width, bias=False),
            {f"single_blocks.{n}.norm.{side}_norm.scale": (head,) for side in ("query", "key")},
        )
        for n in range(2)
    ]
    return join(
        linear("img_in", width, channels, bias=False),
        linear("txt_in", width, text, bias=False),
        _embedder("time_in", width, 256, bias=False),
        _embedder("guidance_in", width, 256, bias=False),
        linear("double_stream_modulation_img.lin", 6 * width, width, bias=False),
        linear("double_stream_modulation_txt.lin", 6 * width, width, bias=False),
        linear("single_stream_modulation.lin", 3 * width, width, bias=False),
        linear("final_layer.linear", channels, width, bias=False),
        linear("final_layer.adaLN_modulation.1", 2 * width, width, bias=False),
        *double,
        *single,
    )


def sd3(width=64, text=24, pooled=20, channels=4, depth=2):
    """Return SD3.5 medium: norms of queries and keys, and a second attention in the first block."""
    blocks = []
    for n in range(depth):
        last, x = n == depth - 1, f"joint_blocks.{n}.x_block"
        for block in (x, f"joint_blocks.{n}.context_block"):
            ends = last and block != x  # nothing reads the context after the last block
            blocks += [
                linear(f"{block}.attn.qkv", 3 * width, width),
                {f"{block}.attn.ln_{letter}.weight": (64,) for letter in "qk"},
                {} if ends else linear(f"{block}.attn.proj", width, width),
                {} if ends else linear(f"{block}.mlp.fc1", 4 * width, width),
                {} if ends else linear(f"{block}.mlp.fc2", width, 4 * width),
                linear(
                    f"{block}.adaLN_modulation.1", (2 if ends else 9 if block == x and n == 0 else 6) * width, width
                ),
            ]
        if n == 0:
            blocks += [
                linear(f"{x}.attn2.qkv", 3 * width, width),
                linear(f"{x}.attn2.proj", width, width),
                {f"{x}.attn2.ln_{letter}.weight": (64,) for letter in "qk"},
            ]
    return join(
        {
            "pos_embed": (1, 64, width),
            "x_embedder.proj.weight": (width, channels, 2, 2),
            "x_embedder.proj.bias": (width,),
        },
        _mlp_embedder("t_embedder", width, 256),
        _mlp_embedder("y_embedder", width, pooled),
        linear("context_embedder", width, text),
        linear("final_layer.linear", 4 * channels, width),
        linear("final_layer.adaLN_modulation.1", 2 * width, width),
        *blocks,
    )


def wan(width=128, text=24, hidden=48, channels=4, image=False):
    attention = ("q", "k", "v", "o")
    blocks = [
        join(
            *(
                linear(f"blocks.{n}.{module}_attn.{part}", width, width)
                for module in ("self", "cross")
                for part in attention
            ),
            {
                f"blocks.{n}.{module}_attn.norm_{letter}.weight": (width,)
                for module in ("self", "cross")
                for letter in "qk"
            },
            *(linear(f"blocks.{n}.cross_attn.{letter}_img", width, width) for letter in ("k", "v") if image),
            {f"blocks.{n}.cross_attn.norm_k_img.weight": (width,)} if image else {},
            {f"blocks.{n}.norm3.weight": (width,), f"blocks.{n}.norm3.bias": (width,)},
            linear(f"blocks.{n}.ffn.0", hidden, width),
            linear(f"blocks.{n}.ffn.2", width, hidden),
            {f"blocks.{n}.modulation": (1, 6, width)},
        )
        for n in range(2)
    ]
    from_image = join(
        {f"img_emb.proj.0.{suffix}": (20,) for suffix in ("weight", "bias")},
        linear("img_emb.proj.1", 20, 20),
        linear("img_emb.proj.3", width, 20),
        {f"img_emb.proj.4.{suffix}": (width,) for suffix in ("weight", "bias")},
    )
    return join(
        {"patch_embedding.weight": (width, channels, 1, 2, 2), "patch_embedding.bias": (width,)},
        linear("text_embedding.0", width, text),
        linear("text_embedding.2", width, width),
        linear("time_embedding.0", width, 256),
        linear("time_embedding.2", width, width),
        linear("time_projection.1", 6 * width, width),
        linear("head.head", 4 * channels, width),
        {"head.modulation": (1, 2, width)},
        from_image if image else {},
        *blocks,
    )


def z_image(width=256, text=24, channels=4, head=128):
    """Return Z-Image as ComfyUI stores it, with fused queries, keys and values."""
    hidden = width * 8 // 3

    def block(name, modulated=True):
        return join(
            {f"{name}.attention.qkv.weight": (3 * width, width), f"{name}.attention.out.weight": (width, width)},
            {f"{name}.attention.{letter}_norm.weight": (head,) for letter in "qk"},
            {f"{name}.feed_forward.w{n}.weight": (hidden, width) for n in (1, 3)},
            {f"{name}.feed_forward.w2.weight": (width, hidden)},
            {f"{name}.{module}_norm{n}.weight": (width,) for module in ("attention", "ffn") for n in (1, 2)},
            linear(f"{name}.adaLN_modulation.0", 4 * width, min(width, 256)) if modulated else {},
        )

    return join(
        linear("x_embedder", width, 4 * channels),
        {"cap_embedder.0.weight": (text,)},
        linear("cap_embedder.1", width, text),
        _timestep(1024, min(width, 256)),
        {"x_pad_token": (1, width), "cap_pad_token": (1, width)},
        linear("final_layer.linear", 4 * channels, width),
        linear("final_layer.adaLN_modulation.1", width, min(width, 256)),
        block("layers.0"),
        block("layers.1"),
        block("noise_refiner.0"),
        block("context_refiner.0", modulated=False),
    )


def _timestep(hidden, width):
    return join(linear("t_embedder.mlp.0", hidden, 256), linear("t_embedder.mlp.2", width, hidden))


def lumina2(width=96, kv=48, head=24, text=24, channels=4):
    hidden = 384

    def block(name, modulated=True):
        return join(
            {f"{name}.attention.qkv.weight": (width + 2 * kv, width), f"{name}.attention.out.weight": (width, width)},
            {f"{name}.attention.{letter}_norm.weight": (head,) for letter in "qk"},
            {f"{name}.feed_forward.w{n}.weight": (hidden, width) for n in (1, 3)},
            {f"{name}.feed_forward.w2.weight": (width, hidden)},
            {f"{name}.{module}_norm{n}.weight": (width,) for module in ("attention", "ffn") for n in (1, 2)},
            linear(f"{name}.adaLN_modulation.1", 4 * width, width) if modulated else {},
        )

    return join(
        linear("x_embedder", width, 4 * channels),
        {"cap_embedder.0.weight": (text,), "norm_final.weight": (width,)},
        linear("cap_embedder.1", width, text),
        _timestep(width, width),
        linear("final_layer.linear", 4 * channels, width),
        linear("final_layer.adaLN_modulation.1", width, width),
        block("layers.0"),
        block("layers.1"),
        block("noise_refiner.0"),
        block("context_refiner.0", modulated=False),
    )


def hunyuan_video(width=32, head=16, text=24, pooled=20, channels=4):
    double = [
        join(
            linear(f"double_blocks.0.{part}_attn_qkv", 3 * width, width),
            linear(f"double_blocks.0.{part}_attn_proj", width, width),
            {f"double_blocks.0.{part}_attn_{letter}_norm.weight": (head,) for letter in "qk"},
            linear(f"double_blocks.0.{part}_mlp.fc1", 4 * width, width),
            linear(f"double_blocks.0.{part}_mlp.fc2", width, 4 * width),
            linear(f"double_blocks.0.{part}_mod.linear", 6 * width, width),
        )
        for part in ("img", "txt")
    ]
    refiner = "txt_in.individual_token_refiner.blocks.0"
    return join(
        {"img_in.proj.weight": (width, channels, 1, 2, 2), "img_in.proj.bias": (width,)},
        linear("txt_in.input_embedder", width, text),
        _mlp_embedder("txt_in.t_embedder", width, 256),
        linear("txt_in.c_embedder.linear_1", width, text),
        linear("txt_in.c_embedder.linear_2", width, width),
        linear(f"{refiner}.self_attn_qkv", 3 * width, width),
        linear(f"{refiner}.self_attn_proj", width, width),
        linear(f"{refiner}.mlp.fc1", 4 * width, width),
        linear(f"{refiner}.mlp.fc2", width, 4 * width),
        linear(f"{refiner}.adaLN_modulation.1", 2 * width, width),
        {f"{refiner}.norm{n}.{suffix}": (width,) for n in (1, 2) for suffix in ("weight", "bias")},
        _mlp_embedder("time_in", width, 256),
        _mlp_embedder("guidance_in", width, 256),
        _embedder("vector_in", width, pooled),
        linear("final_layer.linear", 4 * channels, width),
        linear("final_layer.adaLN_modulation.1", 2 * width, width),
        linear("single_blocks.0.linear1", 7 * width, width),
        linear("single_blocks.0.linear2", width, 5 * width),
        {f"single_blocks.0.{letter}_norm.weight": (head,) for letter in "qk"},
        linear("single_blocks.0.modulation.linear", 3 * width, width),
        *double,
    )


def sana(width=64, text=24, channels=4):
    block = join(
        {"blocks.0.scale_shift_table": (6, width), "blocks.0.attn.qkv.weight": (3 * width, width)},
        linear("blocks.0.attn.proj", width, width),
        linear("blocks.0.cross_attn.q_linear", width, width),
        linear("blocks.0.cross_attn.kv_linear", 2 * width, width),
        linear("blocks.0.cross_attn.proj", width, width),
        {"blocks.0.mlp.inverted_conv.conv.weight": (4 * width, width, 1, 1)},
        {"blocks.0.mlp.inverted_conv.conv.bias": (4 * width,)},
        {
            "blocks.0.mlp.depth_conv.conv.weight": (4 * width, 1, 3, 3),
            "blocks.0.mlp.depth_conv.conv.bias": (4 * width,),
        },
        {"blocks.0.mlp.point_conv.conv.weight": (width, 2 * width, 1, 1)},
    )
    return join(
        {
            "pos_embed": (1, 16, width),
            "x_embedder.proj.weight": (width, channels, 1, 1),
            "x_embedder.proj.bias": (width,),
        },
        _mlp_embedder("t_embedder", width, 256),
        linear("t_block.1", 6 * width, width),
        {"y_embedder.y_embedding": (8, text), "attention_y_norm.weight": (width,)},
        linear("y_embedder.y_proj.fc1", width, text),
        linear("y_embedder.y_proj.fc2", width, width),
        linear("final_layer.linear", channels, width),
        {"final_layer.scale_shift_table": (2, width)},
        block,
    )


def auraflow(width=32, text=24, channels=4):
    def parts(name, attentions, mlps, modulations, hidden=256):
        return join(
            *({f"{name}.attn.{attention}.weight": (width, width)} for attention in attentions),
            *({f"{name}.{mlp}.c_fc{n}.weight": (hidden, width) for n in (1, 2)} for mlp in mlps),
            *({f"{name}.{mlp}.c_proj.weight": (width, hidden)} for mlp in mlps),
            *({f"{name}.{modulation}.1.weight": (6 * width, width)} for modulation in modulations),
        )

    both = [f"w{n}{letter}" for n in (1, 2) for letter in "qkvo"]
    return join(
        {
            "register_tokens": (1, 8, width),
            "positional_encoding": (1, 64, width),
            "cond_seq_linear.weight": (width, text),
        },
        linear("init_x_linear", width, 4 * channels),
        _mlp_embedder("t_embedder", width, 256),
        {"final_linear.weight": (4 * channels, width), "modF.1.weight": (2 * width, width)},
        parts("double_layers.0", both, ("mlpX", "mlpC"), ("modX", "modC")),
        parts("single_layers.0", both[:4], ("mlp",), ("modCX",)),
    )


def rename(name, config, renames):
    """Return the tensors of a family whose single files differ from diffusers' class only by names."""
    tensors = {}
    for key, tensor in getattr(diffusers, name)(**config).state_dict().items():
        for author_name, original in renames:
            key = key.replace(author_name, original)
        tensors[key] = tuple(tensor.shape)
    return tensors


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


FLUX = {"in_channels": 4, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
        "joint_attention_dim": 24, "axes_dims_rope": (4, 4, 8)}  # fmt: skip
LTX = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 32, "attention_head_dim": 2, "num_layers": 2,
       "cross_attention_dim": 64, "caption_channels": 24}  # fmt: skip
QWEN = {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 128, "num_attention_heads": 1,
        "joint_attention_dim": 24}  # fmt: skip
UNET = {"block_out_channels": (32, 64), "layers_per_block": 2, "sample_size": 8, "cross_attention_dim": 24,
        "attention_head_dim": 8, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}  # fmt: skip
SDXL = UNET | {"attention_head_dim": (2, 4), "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
               "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "transformer_layers_per_block": (1, 2),
               "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
               "projection_class_embeddings_input_dim": 64}  # fmt: skip


def unet_names(config):
    """Return the names of Stability AI's UNet, as diffusers' convert_diffusers_to_original_sdxl.py maps them."""
    model = diffusers.UNet2DConditionModel(**config)
    levels, layers = len(config["block_out_channels"]), config["layers_per_block"]
    heads = [
        ("time_embedding.linear_1", "time_embed.0"), ("time_embedding.linear_2", "time_embed.2"),
        ("add_embedding.linear_1", "label_emb.0.0"), ("add_embedding.linear_2", "label_emb.0.2"),
        ("conv_in", "input_blocks.0.0"), ("conv_norm_out", "out.0"), ("conv_out", "out.2"),
    ]  # fmt: skip
    for level in range(levels):
        for n in range(layers):
            number = 1 + level * (layers + 1) + n
            heads.append((f"down_blocks.{level}.resnets.{n}.", f"input_blocks.{number}.0."))
            heads.append((f"down_blocks.{level}.attentions.{n}.", f"input_blocks.{number}.1."))
        heads.append((f"down_blocks.{level}.downsamplers.0.conv", f"input_blocks.{(level + 1) * (layers + 1)}.0.op"))
        attends = config["up_block_types"][level].startswith("Cross")
        for n in range(layers + 1):
            number = level * (layers + 1) + n
            heads.append((f"up_blocks.{level}.resnets.{n}.", f"output_blocks.{number}.0."))
            heads.append((f"up_blocks.{level}.attentions.{n}.", f"output_blocks.{number}.1."))
        last = level * (layers + 1) + layers
        heads.append((f"up_blocks.{level}.upsamplers.0.", f"output_blocks.{last}.{2 if attends else 1}."))
    heads += [("mid_block.resnets.0.", "middle_block.0."), ("mid_block.attentions.0.", "middle_block.1."),
              ("mid_block.resnets.1.", "middle_block.2.")]  # fmt: skip
    inside = [("norm1", "in_layers.0"), ("conv1", "in_layers.2"), ("norm2", "out_layers.0"), ("conv2", "out_layers.3"),
              ("time_emb_proj", "emb_layers.1"), ("conv_shortcut", "skip_connection")]  # fmt: skip
    names = {}
    for key, tensor in model.state_dict().items():
        for author_name, original in heads:
            if key.startswith(author_name):
                rest = key[len(author_name) :]
                for word, other in inside if "resnets" in author_name else ():
                    rest = rest.replace(word, other)
                names[f"model.diffusion_model.{original}{rest}"] = tuple(tensor.shape)
                break
        else:
            raise AssertionError(key)
    return names


# Number of levels → a VAE of that many.
VAE = {
    levels: {"block_out_channels": (8, 16, 24, 32, 40)[:levels], "norm_num_groups": 8, "layers_per_block": 2,
             "down_block_types": ("DownEncoderBlock2D",) * levels, "up_block_types": ("UpDecoderBlock2D",) * levels}
    for levels in (4, 3, 5)
}  # fmt: skip
WAN_VAE = {"base_dim": 8, "z_dim": 4}


def vae_names(config):
    """Return the names and shapes of a VAE in the files of CompVis, Stability AI and Black Forest Labs."""
    last, names = len(config["block_out_channels"]) - 1, {}
    heads = [
        ("mid_block.resnets.0", "mid.block_1"), ("mid_block.resnets.1", "mid.block_2"),
        ("mid_block.attentions.0", "mid.attn_1"), ("conv_norm_out", "norm_out"), ("conv_shortcut", "nin_shortcut"),
        ("group_norm", "norm"), ("to_out.0", "proj_out"), *((f"to_{letter}", letter) for letter in "qkv"),
    ]  # fmt: skip
    for level in range(last + 1):
        heads += [
            (f"down_blocks.{level}.resnets", f"down.{level}.block"),
            (f"down_blocks.{level}.downsamplers.0", f"down.{level}.downsample"),
            (f"up_blocks.{level}.resnets", f"up.{last - level}.block"),
            (f"up_blocks.{level}.upsamplers.0", f"up.{last - level}.upsample"),
        ]
    for key, tensor in diffusers.AutoencoderKL(**config).state_dict().items():
        is_kernel = "attentions" in key and tensor.dim() == 2
        for author_name, original in heads:
            key = key.replace(author_name, original)
        names[key] = (*tensor.shape, 1, 1) if is_kernel else tuple(tensor.shape)
    return names


def wan_vae_names(config):
    """Return the names of Wan's own VAE (Wan-Video/Wan2.1 wan/modules/vae.py), which counts all blocks in a row."""
    heads = [
        ("post_quant_conv", "conv2"), ("quant_conv", "conv1"), ("norm_out", "head.0"), ("conv_out", "head.2"),
        ("conv_in", "conv1"), ("down_blocks", "downsamples"), ("mid_block.attentions.0", "middle.1"),
        ("mid_block.resnets.0", "middle.0"), ("mid_block.resnets.1", "middle.2"), ("conv_shortcut", "shortcut"),
        *((f"up_blocks.{level}.resnets.{n}.", f"upsamples.{4 * level + n}.") for level in range(4) for n in range(3)),
        *((f"up_blocks.{level}.upsamplers.0.", f"upsamples.{4 * level + 3}.") for level in range(3)),
    ]  # fmt: skip
    inside = [("norm1", "residual.0"), ("conv1", "residual.2"), ("norm2", "residual.3"), ("conv2", "residual.6")]
    names = {}
    for key, tensor in diffusers.AutoencoderKLWan(**config).state_dict().items():
        of_block = any(word in key for word in ("resnets", "down_blocks"))
        for author_name, original in (*(inside if of_block else ()), *heads):
            key = key.replace(author_name, original)
        names[key] = tuple(tensor.shape)
    return names


# Family: class, config, tensors of its single file, constants of diffusers' converter that do not fit small sizes,
# arguments of a call.
FAMILIES = {
    "FLUX.1": ("FluxTransformer2DModel", FLUX | {"pooled_projection_dim": 20, "guidance_embeds": True}, flux,
        {3072: 32},
        lambda n: {"hidden_states": draw(1, 16, 4, seed=n), "encoder_hidden_states": draw(1, 8, 24, seed=n),
                   "pooled_projections": draw(1, 20, seed=n), "timestep": torch.tensor([0.7]),
                   "guidance": torch.tensor([3.5]), "img_ids": draw(16, 3, seed=1), "txt_ids": torch.zeros(8, 3)}),
    "FLUX.2": ("Flux2Transformer2DModel", FLUX | {"axes_dims_rope": (4, 4, 4, 4)}, flux2, {},
        lambda n: {"hidden_states": draw(1, 16, 4, seed=n), "encoder_hidden_states": draw(1, 8, 24, seed=n),
                   "timestep": torch.tensor([0.7]), "guidance": torch.tensor([3.5]), "img_ids": draw(16, 4, seed=1),
                   "txt_ids": torch.zeros(8, 4)}),
    "Chroma": ("ChromaTransformer2DModel",
        FLUX | {"approximator_num_channels": 64, "approximator_hidden_dim": 24, "approximator_layers": 2}, chroma,
        {3072: 32},
        lambda n: {"hidden_states": draw(1, 16, 4, seed=n), "encoder_hidden_states": draw(1, 8, 24, seed=n),
                   "timestep": torch.tensor([0.7]), "img_ids": draw(16, 3, seed=1), "txt_ids": torch.zeros(8, 3)}),
    "SD3": ("SD3Transformer2DModel",
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2,
         "attention_head_dim": 64, "num_attention_heads": 1, "joint_attention_dim": 24, "caption_projection_dim": 64,
         "pooled_projection_dim": 20, "pos_embed_max_size": 8, "qk_norm": "rms_norm", "dual_attention_layers": (0,)},
        sd3, {},
        lambda n: {"hidden_states": draw(1, 4, 8, 8, seed=n), "encoder_hidden_states": draw(1, 8, 24, seed=n),
                   "pooled_projections": draw(1, 20, seed=n), "timestep": torch.tensor([500])}),
    "SD 1.5": ("UNet2DConditionModel", UNET, lambda: unet_names(UNET), {},
        lambda n: {"sample": draw(1, 4, 8, 8, seed=n), "timestep": torch.tensor(500),
                   "encoder_hidden_states": draw(1, 8, 24, seed=n)}),
    "SDXL": ("UNet2DConditionModel", SDXL, lambda: unet_names(SDXL), {},
        lambda n: {"sample": draw(1, 4, 8, 8, seed=n), "timestep": torch.tensor(500),
                   "encoder_hidden_states": draw(1, 8, 24, seed=n),
                   "added_cond_kwargs.text_embeds": draw(1, 16, seed=n),
                   "added_cond_kwargs.time_ids": draw(1, 6, seed=n)}),
    "Wan": ("WanTransformer3DModel",
        {"num_attention_heads": 1, "attention_head_dim": 128, "in_channels": 4, "out_channels": 4, "text_dim": 24,
         "ffn_dim": 48, "num_layers": 2}, wan, {},
        lambda n: {"hidden_states": draw(1, 4, 2, 8, 8, seed=n), "timestep": torch.tensor([500]),
                   "encoder_hidden_states": draw(1, 8, 24, seed=n)}),
    "Wan image to video": ("WanTransformer3DModel",
        {"num_attention_heads": 1, "attention_head_dim": 128, "in_channels": 4, "out_channels": 4, "text_dim": 24,
         "ffn_dim": 48, "num_layers": 2, "image_dim": 20, "added_kv_proj_dim": 128}, lambda: wan(image=True), {},
        lambda n: {"hidden_states": draw(1, 4, 2, 8, 8, seed=n), "timestep": torch.tensor([500]),
                   "encoder_hidden_states": draw(1, 8, 24, seed=n),
                   "encoder_hidden_states_image": draw(1, 4, 20, seed=n)}),
    "Qwen-Image": ("QwenImageTransformer2DModel", QWEN,
        lambda: rename("QwenImageTransformer2DModel", QWEN, []), {},
        lambda n: {"hidden_states": draw(1, 16, 16, seed=n), "encoder_hidden_states": draw(1, 7, 24, seed=n),
                   "encoder_hidden_states_mask": torch.ones(1, 7, dtype=torch.long), "timestep": torch.tensor([0.5]),
                   "img_shapes": [[(1, 4, 4)]]}),
    "Z-Image": ("ZImageTransformer2DModel",
        {"in_channels": 4, "dim": 256, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
         "cap_feat_dim": 24}, z_image, {},
        lambda n: {"x.0": draw(4, 1, 8, 8, seed=n), "t": torch.tensor([0.5]), "cap_feats.0": draw(8, 24, seed=n)}),
    "Lumina 2": ("Lumina2Transformer2DModel",
        {"in_channels": 4, "hidden_size": 96, "num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 4,
         "num_kv_heads": 2, "multiple_of": 128, "cap_feat_dim": 24, "axes_dim_rope": (8, 8, 8), "sample_size": 8},
        lumina2, {2304: 96, 768: 48},
        lambda n: {"hidden_states": draw(1, 4, 8, 8, seed=n), "timestep": torch.tensor([0.5]),
                   "encoder_hidden_states": draw(1, 8, 24, seed=n),
                   "encoder_attention_mask": torch.ones(1, 8, dtype=torch.bool)}),
    "HunyuanVideo": ("HunyuanVideoTransformer3DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1,
         "num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 24, "pooled_projection_dim": 20,
         "rope_axes_dim": (4, 4, 8)}, hunyuan_video, {3072: 32},
        lambda n: {"hidden_states": draw(1, 4, 2, 8, 8, seed=n), "timestep": torch.tensor([500]),
                   "encoder_hidden_states": draw(1, 8, 24, seed=n), "guidance": torch.tensor([6000.0]),
                   "encoder_attention_mask": torch.ones(1, 8), "pooled_projections": draw(1, 20, seed=n)}),
    "LTX-Video": ("LTXVideoTransformer3DModel", LTX,
        lambda: rename("LTXVideoTransformer3DModel", LTX,
                        [("proj_in", "patchify_proj"), ("time_embed", "adaln_single"), ("norm_q", "q_norm"),
                         ("norm_k", "k_norm")]), {},
        lambda n: {"hidden_states": draw(1, 32, 4, seed=n), "encoder_hidden_states": draw(1, 8, 24, seed=n),
                   "timestep": torch.tensor([500]), "encoder_attention_mask": torch.ones(1, 8), "num_frames": 2,
                   "height": 4, "width": 4}),
    "Sana": ("SanaTransformer2DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 1,
         "num_cross_attention_heads": 2, "cross_attention_head_dim": 32, "cross_attention_dim": 64,
         "caption_channels": 24, "mlp_ratio": 2.0}, sana, {},
        lambda n: {"hidden_states": draw(1, 4, 4, 4, seed=n), "encoder_hidden_states": draw(1, 8, 24, seed=n),
                   "timestep": torch.tensor([500])}),
    "AuraFlow": ("AuraFlowTransformer2DModel",
        {"sample_size": 8, "in_channels": 4, "out_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
         "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 24, "caption_projection_dim": 32,
         "pos_embed_max_size": 64}, auraflow, {},
        lambda n: {"hidden_states": draw(1, 4, 8, 8, seed=n), "encoder_hidden_states": draw(1, 8, 24, seed=n),
                   "timestep": torch.tensor([0.5])}),
}  # fmt: skip


def converter(family):
    """Return diffusers' converter for a family, at the width of the small config."""
    name, _, _, constants, _ = FAMILIES[family]
    function = single_file_model.SINGLE_FILE_LOADABLE_CLASSES[name]["checkpoint_mapping_fn"]
    if constants:
        source = inspect.getsource(function)
        for large, small in constants.items():
            assert str(large) in source
            source = source.replace(str(large), str(small))
        scope = dict(vars(single_file_utils))
        exec(source, scope)  # diffusers' own function
        function = scope[function.__name__]
    if function.__name__ == "<lambda>":  # older versions of diffusers convert nothing for this family
        return lambda checkpoint, **_: function(checkpoint)
    return function


def make_model(family, folder):
    """Save a model of a family as a folder of diffusers; return the model and the tensors of its single file."""
    name, config, names, _, _ = FAMILIES[family]
    torch.manual_seed(1)
    tensors = {key: torch.randn(shape) * min(0.2, prod(shape[1:]) ** -0.5) for key, shape in names().items()}
    wanted = "" if name != "UNet2DConditionModel" else "model.diffusion_model."
    assert all(key.startswith(wanted) for key in tensors)
    model = getattr(diffusers, name)(**config).eval()
    converted = converter(family)(checkpoint=dict(tensors), config=dict(model.config))
    model.load_state_dict(converted, strict=True)
    model.save_pretrained(folder)
    return model, tensors


def scaled_fp8(tensors):
    """Store matrices in blocks as ComfyUI's scaled FP8; return the tensors and the values of the codes."""
    written, values = {}, dict(tensors)
    for name, tensor in tensors.items():
        written[name] = tensor
        if tensor.dim() == 2 and name.endswith(".weight") and min(tensor.shape) > 8 and "." in name:
            scale = tensor.abs().max() / 448
            codes = (tensor / scale).to(torch.float8_e4m3fn)
            written[name], written[name.replace(".weight", ".scale_weight")] = codes, scale
            values[name] = codes.float() * scale
    return written | {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}, values


def call(family, number):
    """Return the arguments of a call; items of dictionaries and lists have a dot in their names."""
    return FAMILIES[family][4](number)


def nest(arguments):
    """Return the arguments as a forward takes them."""
    arguments_found = {}
    for key, value in arguments.items():
        outer, dot, inner = key.partition(".")
        if inner.isdigit():
            arguments_found.setdefault(outer, []).append(value)
        elif dot:
            arguments_found.setdefault(outer, {})[inner] = value
        else:
            arguments_found[key] = value
    return arguments_found


def write_calls(family, path, n_calls=4):
    """Write a file of calls of a family, in two groups."""
    tensors, calls = {}, {}
    for number in range(n_calls):
        arguments = call(family, number)
        for key, value in arguments.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{number:04}/{key}"] = value.contiguous()
        plain = {key: value for key, value in arguments.items() if not isinstance(value, torch.Tensor)}
        calls[f"{number:04}"] = {"group": f"prompt {number // 2}", "step": number % 2, "arguments": plain}
    metadata = {"version": 1, "class": FAMILIES[family][0], "calls": calls}
    save_file(tensors, path, {"quanterr.inputs": json.dumps(metadata)})
    return path
