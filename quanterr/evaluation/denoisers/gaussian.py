"""Made-up calls of denoisers for ``--inputs gaussian:N``: latents and conditionings of unit variance.

They show only that a model runs: real conditionings have outliers and structure, so errors on them differ. Each row of
FAMILIES makes small inputs, of the shapes that the forward of a class of diffusers takes, with timesteps in the scale
of its pipeline.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quanterr.errors import UsageError
from quanterr.evaluation.denoisers.calls import Call, Calls
from quanterr.options import MADE_UP_CALLS
from quanterr.util.text import display

if TYPE_CHECKING:
    from diffusers.configuration_utils import FrozenDict

MADE_UP_PATTERN = re.compile(MADE_UP_CALLS + r"[1-9]\d{0,3}")
SIDE, TEXT = 16, 32  # latents are SIDE × SIDE tokens, or 2 SIDE × 2 SIDE pixels; a text has TEXT tokens
SEED = 17

Draw = Callable[..., Tensor]  # draws a tensor of a shape
Arguments = dict[str, object]
Made = Callable[["FrozenDict", Draw, float], Arguments]  # makes arguments for a config and a sigma between 0 and 1


def _make_packed(config: "FrozenDict", draw: Draw, sigma: float, axes: int = 3) -> Arguments:
    """Return packed latents with positions, as FLUX takes them."""
    places = torch.zeros(SIDE * SIDE, axes)  # row and column are on the second and third axis
    places[:, 1], places[:, 2] = torch.arange(SIDE * SIDE) // SIDE, torch.arange(SIDE * SIDE) % SIDE
    return {
        "hidden_states": draw(1, SIDE * SIDE, config.in_channels),
        "encoder_hidden_states": draw(1, TEXT, config.joint_attention_dim),
        "timestep": torch.tensor([sigma]),
        "img_ids": places,
        "txt_ids": torch.zeros(TEXT, axes),
    }


def _make_guidance(config: "FrozenDict") -> Arguments:
    return {"guidance": torch.tensor([3.5])} if config.guidance_embeds else {}


def _make_image(config: "FrozenDict", draw: Draw, time: Tensor, text: int) -> Arguments:
    """Return latents in the shape of an image, with text embeddings of this width."""
    side = min(2 * SIDE, getattr(config, "sample_size", None) or 2 * SIDE)
    return {
        "hidden_states": draw(1, config.in_channels, side, side),
        "encoder_hidden_states": draw(1, TEXT, text),
        "timestep": time,
    }


def _scale_timestep(sigma: float) -> Tensor:
    return torch.tensor([1000 * sigma])


def _make_wan(config: "FrozenDict", draw: Draw, sigma: float) -> Arguments:
    video: Arguments = {
        "hidden_states": draw(1, config.in_channels, 1, 2 * SIDE, 2 * SIDE),
        "encoder_hidden_states": draw(1, TEXT, config.text_dim),
        "timestep": _scale_timestep(sigma),
    }
    return video | ({"encoder_hidden_states_image": draw(1, TEXT, config.image_dim)} if config.image_dim else {})


def _make_hunyuan_video(config: "FrozenDict", draw: Draw, sigma: float) -> Arguments:
    video: Arguments = {
        "hidden_states": draw(1, config.in_channels, 1, 2 * SIDE, 2 * SIDE),
        "encoder_hidden_states": draw(1, TEXT, config.text_embed_dim),
        "encoder_attention_mask": torch.ones(1, TEXT),
        "pooled_projections": draw(1, config.pooled_projection_dim),
        "timestep": _scale_timestep(sigma),
    }
    return video | ({"guidance": torch.tensor([6000.0])} if config.guidance_embeds else {})


def _make_unet(config: "FrozenDict", draw: Draw, sigma: float) -> Arguments:
    given: Arguments = {
        "sample": draw(1, config.in_channels, 2 * SIDE, 2 * SIDE),
        "timestep": torch.tensor(round(999 * sigma)),
        "encoder_hidden_states": draw(1, TEXT, config.cross_attention_dim),
    }
    if config.addition_embed_type != "text_time":
        return given
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    times = torch.tensor([[1024.0, 1024.0, 0.0, 0.0, 1024.0, 1024.0]])  # sizes and crops in pixels
    return given | {"added_cond_kwargs": {"text_embeds": draw(1, pooled), "time_ids": times}}


FAMILIES: Mapping[str, Made] = {
    "FluxTransformer2DModel": lambda c, draw, sigma: (
        _make_packed(c, draw, sigma) | {"pooled_projections": draw(1, c.pooled_projection_dim)} | _make_guidance(c)
    ),
    "Flux2Transformer2DModel": lambda c, draw, sigma: _make_packed(c, draw, sigma, axes=4) | _make_guidance(c),
    "ChromaTransformer2DModel": _make_packed,
    "SD3Transformer2DModel": lambda c, draw, sigma: (
        _make_image(c, draw, _scale_timestep(sigma), c.joint_attention_dim)
        | {"pooled_projections": draw(1, c.pooled_projection_dim)}
    ),
    "UNet2DConditionModel": _make_unet,
    "WanTransformer3DModel": _make_wan,
    "QwenImageTransformer2DModel": lambda c, draw, sigma: {
        "hidden_states": draw(1, SIDE * SIDE, c.in_channels),
        "encoder_hidden_states": draw(1, TEXT, c.joint_attention_dim),
        "encoder_hidden_states_mask": torch.ones(1, TEXT, dtype=torch.long),
        "timestep": torch.tensor([sigma]),
        "img_shapes": [[(1, SIDE, SIDE)]],
    },
    "ZImageTransformer2DModel": lambda c, draw, sigma: {
        "x": [draw(c.in_channels, 1, 2 * SIDE, 2 * SIDE)],
        "t": torch.tensor([1 - sigma]),
        "cap_feats": [draw(TEXT, c.cap_feat_dim)],
    },
    "Lumina2Transformer2DModel": lambda c, draw, sigma: (
        _make_image(c, draw, torch.tensor([1 - sigma]), c.cap_feat_dim)
        | {"encoder_attention_mask": torch.ones(1, TEXT, dtype=torch.bool)}
    ),
    "HunyuanVideoTransformer3DModel": _make_hunyuan_video,
    "LTXVideoTransformer3DModel": lambda c, draw, sigma: {
        "hidden_states": draw(1, SIDE * SIDE, c.in_channels),
        "encoder_hidden_states": draw(1, TEXT, c.caption_channels),
        "encoder_attention_mask": torch.ones(1, TEXT),
        "timestep": _scale_timestep(sigma),
        **{"num_frames": 1, "height": SIDE, "width": SIDE},
    },
    "SanaTransformer2DModel": lambda c, draw, sigma: _make_image(c, draw, _scale_timestep(sigma), c.caption_channels),
    "AuraFlowTransformer2DModel": lambda c, draw, sigma: _make_image(
        c, draw, torch.tensor([sigma]), c.joint_attention_dim
    ),
}


def is_made_up(inputs: str) -> bool:
    """Return whether ``--inputs`` asks for made-up calls.

    Raises:
        UsageError: the number of calls is missing or invalid.
    """
    if inputs.startswith(MADE_UP_CALLS) and not MADE_UP_PATTERN.fullmatch(inputs):
        raise UsageError(f"--inputs {display(inputs)}: give a number of calls from 1 to 9999, such as {MADE_UP_CALLS}8")
    return inputs.startswith(MADE_UP_CALLS)


def make_calls(inputs: str, model: nn.Module) -> Calls:
    """Draw calls for a model with descending sigmas; each call is a group of its own.

    Raises:
        UsageError: the model's family is unknown.
    """
    name, n = type(model).__name__, int(inputs.partition(":")[2])
    made = FAMILIES.get(name)
    if made is None:
        raise UsageError(f"--inputs {inputs}: quanterr cannot make up calls of {display(name)}; record real calls")
    generator = torch.Generator().manual_seed(SEED)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    sigmas = [1 - number / n for number in range(n)]
    calls = [Call(f"{k:04}", f"{k:04}", None, made(model.config, draw, sigma)) for k, sigma in enumerate(sigmas)]
    return Calls(inputs, hashlib.sha256(f"{inputs} {SEED} {name}".encode()).hexdigest(), name, calls)
