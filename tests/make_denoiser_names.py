"""Generate quanterr/pairing/converters/denoisers.json by running diffusers' single-file converters on labels.

VAEs are in the file, too: a pipeline's folder has one next to its denoiser.

python tests/make_denoiser_names.py        tests/pairing/test_denoiser_names.py checks the file against diffusers

Every row of a small file in the authors' names gets a label of its own, one integer. Where the labels end up shows
which parameters of diffusers a stored tensor holds, and in which order.
"""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import diffusers
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from support.denoisers import (
    FAMILIES,
    SDXL,
    UNET,
    VAE,
    WAN_VAE,
    converter,
    rename,
    unet_names,
    vae_names,
    wan,
    wan_vae_names,
    z_image,
)

FILE = Path(__file__).resolve().parent.parent / "quanterr" / "pairing" / "converters" / "denoisers.json"
SOURCE = (
    "diffusers {}: loaders/single_file_utils.py of huggingface/diffusers (Apache License 2.0, The HuggingFace Team)"
)

BLOCK = re.compile(r"(?:^|\.)(?:\w*blocks|\w*layers|norms|\w*refiner)\.(\d+)\.")
UNET_BLOCK = re.compile(r"\.transformer_blocks\.(\d+)\.")  # a UNet has few other blocks, which differ from each other
NUMBERS = range(3)
COMFY = "model.diffusion_model."

LEVELS = {"block_out_channels": (32, 64, 96, 128), "attention_head_dim": 8}
SD15 = UNET | LEVELS | {
    "down_block_types": (*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"),
    "up_block_types": ("UpBlock2D", *["CrossAttnUpBlock2D"] * 3),
}  # fmt: skip
BASE = SDXL | LEVELS | {
    "block_out_channels": (32, 64, 96),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": 1,
}  # fmt: skip
REFINER = SDXL | LEVELS | {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": 1,
}  # fmt: skip


LTX2 = {
    "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16, "cross_attention_dim": 32,
    "audio_num_attention_heads": 2, "audio_attention_head_dim": 8, "audio_cross_attention_dim": 16,
    "in_channels": 8, "out_channels": 8, "audio_in_channels": 8, "audio_out_channels": 8, "caption_channels": 24,
    "gated_attn": True, "cross_attn_mod": True, "audio_gated_attn": True, "audio_cross_attn_mod": True,
}  # fmt: skip
OF_LTX2 = [
    ("av_cross_attn_video_scale_shift", "av_ca_video_scale_shift_adaln_single"),
    ("av_cross_attn_video_a2v_gate", "av_ca_a2v_gate_adaln_single"),
    ("av_cross_attn_audio_scale_shift", "av_ca_audio_scale_shift_adaln_single"),
    ("av_cross_attn_audio_v2a_gate", "av_ca_v2a_gate_adaln_single"),
    ("video_a2v_cross_attn_scale_shift_table", "scale_shift_table_a2v_ca_video"),
    ("audio_a2v_cross_attn_scale_shift_table", "scale_shift_table_a2v_ca_audio"),
    ("proj_in", "patchify_proj"), ("time_embed", "adaln_single"), ("norm_q", "q_norm"), ("norm_k", "k_norm"),
]  # fmt: skip
COSMOS2 = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1,
    "text_embed_dim": 24, "adaln_lora_dim": 8, "concat_padding_mask": False, "extra_pos_embed_type": None,
}  # fmt: skip
OF_COSMOS2 = [
    ("time_embed.t_embedder", "t_embedder.1"), ("time_embed.norm", "t_embedding_norm"),
    ("norm_out.linear_", "final_layer.adaln_modulation."), ("transformer_blocks", "blocks"),
    ("norm1.linear_", "adaln_modulation_self_attn."), ("norm2.linear_", "adaln_modulation_cross_attn."),
    ("norm3.linear_", "adaln_modulation_mlp."), ("attn1", "self_attn"), ("attn2", "cross_attn"),
    ("to_q", "q_proj"), ("to_k", "k_proj"), ("to_v", "v_proj"), ("to_out.0", "output_proj"), ("norm_q", "q_norm"),
    ("norm_k", "k_norm"), ("ff.net.0.proj", "mlp.layer1"), ("ff.net.2", "mlp.layer2"),
    ("patch_embed.proj", "x_embedder.proj.1"), ("proj_out", "final_layer.linear"),
]  # fmt: skip


def z_image_norm():
    """Return Z-Image's names with a norm that diffusers' converter leaves out."""
    return z_image() | {"norm_final.weight": (256,)}


def wan_vace():
    """Return Wan's names together with those of VACE."""
    shapes = wan(image=True)
    blocks = {"vace_" + name: shape for name, shape in shapes.items() if name.startswith("blocks.")}
    more = {
        f"vace_blocks.0.{word}_proj.{ending}": (8, 8) for word in ("before", "after") for ending in ("weight", "bias")
    }
    return shapes | blocks | more


# Family of the table → (family of denoisers.py or class, config of the converter, tensors) of each of its models.
MODELS = {
    "FLUX.1, Chroma": [(name, None, FAMILIES[name][2]) for name in ("FLUX.1", "Chroma")],
    "FLUX.2": [("FLUX.2", None, FAMILIES["FLUX.2"][2])],
    "SD3": [("SD3", None, FAMILIES["SD3"][2])],
    "Stable Diffusion": [("SD 1.5", config, lambda config=config: unet_names(config))
                         for config in (SD15, BASE, REFINER)],
    "Wan": [("Wan", None, wan_vace)],
    "Z-Image": [("Z-Image", None, z_image_norm)],
    **{name: [(name, None, FAMILIES[name][2])]
       for name in ("Lumina 2", "HunyuanVideo", "LTX-Video", "Sana", "AuraFlow")},
    "LTX-2": [("LTX2VideoTransformer3DModel", LTX2, lambda: rename("LTX2VideoTransformer3DModel", LTX2, OF_LTX2))],
    "Cosmos-Predict2": [
        ("CosmosTransformer3DModel", COSMOS2, lambda: rename("CosmosTransformer3DModel", COSMOS2, OF_COSMOS2))
    ],
    # The number of a block in the decoder depends on how many there are.
    **{f"VAE with {levels} levels": [("AutoencoderKL", VAE[levels], lambda levels=levels: vae_names(VAE[levels]))]
       for levels in VAE},
    "VAE of Wan": [("AutoencoderKLWan", WAN_VAE, lambda: wan_vae_names(WAN_VAE))],
}  # fmt: skip


class Piece(NamedTuple):
    """Consecutive rows of a stored tensor: ``n`` rows from ``first`` on are part ``part`` of a parameter."""

    first: int
    n: int
    name: str
    part: int | None = None  # None: the whole parameter

    def __str__(self) -> str:
        return self.name if self.part is None else f"{self.name}:{self.part}"


def pieces_of(family, shapes, config):
    """Run the converter of a family on labels; return the pieces of each stored tensor, from top to bottom."""
    prefix = COMFY if all(name.startswith(COMFY) for name in shapes) else ""  # as the converter of UNets wants it
    bare = {name.removeprefix(prefix): shape for name, shape in shapes.items()}
    labels, owners = {}, []
    for name, shape in bare.items():
        labels[prefix + name] = torch.arange(len(owners), len(owners) + shape[0])[:, None]
        owners += [(name, row) for row in range(shape[0])]
    pieces_by_name = {name: [] for name in bare}
    convert = (
        SINGLE_FILE_LOADABLE_CLASSES[family]["checkpoint_mapping_fn"] if family not in FAMILIES else converter(family)
    )
    for parameter, rows in convert(checkpoint=labels, config=config).items():
        runs = [[]]
        for before, label in pairwise([None, *rows.flatten().tolist()]):
            if before is not None and (label != before + 1 or owners[label][0] != owners[before][0]):
                runs.append([])
            runs[-1].append(owners[label])
        assert len({len(run) for run in runs}) == 1, parameter  # parts of one parameter are equal
        for part, run in enumerate(runs):
            piece = Piece(run[0][1], len(run), parameter, part if len(runs) > 1 else None)
            pieces_by_name[run[0][0]].append(piece)
    for name, pieces in pieces_by_name.items():
        pieces.sort()
        ends = [piece.first + piece.n for piece in pieces]
        assert [piece.first for piece in pieces] == [0, *ends][: len(pieces)], name
        assert not pieces or ends[-1] == bare[name][0], name
    return pieces_by_name


def flat_names(family, shapes, config):
    """Return the convolutions with a kernel of 1 × 1 that the converter of a VAE turns into matrices."""
    stored = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    held = pieces_of(family, shapes, config)
    converted = SINGLE_FILE_LOADABLE_CLASSES[family]["checkpoint_mapping_fn"](checkpoint=dict(stored), config=config)
    return {name for name, pieces in held.items() if any(converted[p.name].ndim < stored[name].ndim for p in pieces)}


def widen(shapes, block):
    """Give every numbered block the tensors of all of them, and the number of blocks of NUMBERS."""
    tensors = {}
    for name, shape in shapes.items():
        match = block.search(name)
        for number in NUMBERS[: 2 if "refiner." in name else 3] if match else ():
            tensors.setdefault(f"{name[: match.start(1)]}{number}{name[match.end(1) :]}", shape)
        if not match:
            tensors[name] = shape
    return tensors


def rows_of(family, shapes, config, block):
    """Return stored name → names of its pieces, with ``*`` for a number of a block, and ``$`` for the last one's.

    Also return the stored names whose pieces have different sizes.
    """
    names, unequal = {}, set()
    for name, pieces in pieces_of(family, widen(shapes, block), config).items():
        match, number = block.search(name), ""
        key = name
        if match:
            number, key = match[1], f"{name[: match.start(1)]}*{name[match.end(1) :]}"
        held = [_with_star(str(piece), block, number) for piece in pieces]
        if len({piece.n for piece in pieces}) > 1:
            unequal.add(key)
        if names.setdefault(key, held) != held and held:
            assert int(number) == NUMBERS[-1], name  # only the last block is special
            names[key.replace("*", "$")] = held
    return names, unequal


def _with_star(name, block, number):
    """Put ``*`` in place of the number of the block."""
    match = block.search(name) if number else None
    if not match:
        return name
    assert match[1] == number, name
    return f"{name[: match.start(1)]}*{name[match.end(1) :]}"


def without_kinds(rows):
    """Leave out .weight and .bias where a tensor and its pieces have the same one, and names that stay as they are."""
    stems, names = {}, {}
    for name, pieces in rows.items():
        stem, _, ending = name.rpartition(".")
        same = [re.sub(rf"\.{ending}(?=:|$)", "", piece) for piece in pieces]
        if ending in ("weight", "bias") and all(piece != bare for piece, bare in zip(pieces, same, strict=True)):
            assert stems.setdefault(stem, same) == same, name
            names[stem] = same
        else:
            names[name] = pieces
    return {name: pieces for name, pieces in names.items() if pieces != [name]}


def document():
    """Return the content of the generated file, a stored tensor per line."""
    families = []
    for title, models in MODELS.items():
        rows, parts, flat = {}, set(), set()
        for family, config, make in models:
            config = config or FAMILIES[family][1]
            block = UNET_BLOCK if title == "Stable Diffusion" else BLOCK
            names, unequal = rows_of(family, make(), dict(config), block)
            assert all(rows.get(name, pieces) == pieces for name, pieces in names.items()), family
            rows |= names
            parts |= unequal
            if family.startswith("Autoencoder"):
                flat |= flat_names(family, make(), dict(config))
        # Sizes of unequal parts follow from the other checkpoint's shapes.
        named = f'"unequal": {json.dumps(_stems(parts))}'
        named += f', "flat": {json.dumps(_stems(flat))}' if flat else ""
        families.append(f'{json.dumps(title)}: {{{named}, "tensors": {_object(without_kinds(rows))}}}')
    source = json.dumps(SOURCE.format(diffusers.__version__))
    return f'{{\n"source": {source},\n"families": {{\n' + ",\n".join(families) + "\n}\n}\n"


def _stems(names):
    return sorted({re.sub(r"\.(weight|bias)$", "", name) for name in names})


def _object(rows):
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(pieces)}" for name, pieces in rows.items()) + "\n}"


if __name__ == "__main__":
    FILE.write_text(document())
