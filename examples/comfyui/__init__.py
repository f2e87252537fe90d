"""A node of ComfyUI that records what a sampler asks of a denoiser, for quanterr evaluate --inputs.

Copy this folder to ComfyUI/custom_nodes/quanterr, put "Record calls (quanterr)" between the model and the sampler, and
queue a prompt for every seed: each adds its calls to the file. Then, beside the original in any naming:

    quanterr evaluate flux1-dev.safetensors fp8.safetensors --inputs calls.safetensors

Calls are written as diffusers' class of the model takes them: packed latents with positions, timesteps in its scale.
Families: FLUX.1 (dev, schnell), SD3 and 3.5, Wan (text to video). Record with CFG 1, or both branches are kept as calls
of their own; LoRAs, ControlNets and reference images that are applied in ComfyUI are not in the calls.

The wrapper's contract (ComfyUI, comfy/samplers.py, calc_cond_batch): it is called with the model's apply_model and
{"input": latents, "timestep": sigmas, "c": conditionings, "cond_or_uncond": [0 conditional, 1 unconditional]}.
"""

import json
import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file

KEY = "quanterr.inputs"
Arguments = dict[str, torch.Tensor]


def _flux(x: torch.Tensor, sigma: torch.Tensor, c: dict[str, Any]) -> Arguments:
    """Latents (1, channels, height, width) as patches of 2 × 2, row by row."""
    batch, channels, height, width = x.shape
    rows, columns = height // 2, width // 2
    patches = x.view(batch, channels, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5)
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] += torch.arange(rows)[:, None]
    ids[..., 2] += torch.arange(columns)
    text = c["c_crossattn"]
    guidance = {"guidance": c["guidance"].reshape(-1).expand(batch)} if c.get("guidance") is not None else {}
    return {
        "hidden_states": patches.reshape(batch, rows * columns, 4 * channels),
        "encoder_hidden_states": text,
        "pooled_projections": c["y"],
        "timestep": sigma,
        "img_ids": ids.view(-1, 3),
        "txt_ids": torch.zeros(text.shape[1], 3),
    } | guidance


def _sd3(x: torch.Tensor, sigma: torch.Tensor, c: dict[str, Any]) -> Arguments:
    return {
        "hidden_states": x,
        "encoder_hidden_states": c["c_crossattn"],
        "pooled_projections": c["y"],
        "timestep": 1000 * sigma,
    }


def _wan(x: torch.Tensor, sigma: torch.Tensor, c: dict[str, Any]) -> Arguments:
    return {"hidden_states": x, "encoder_hidden_states": c["c_crossattn"], "timestep": 1000 * sigma}


FAMILIES: dict[str, tuple[str, Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], Arguments]]] = {
    "FLUX.1": ("FluxTransformer2DModel", _flux),
    "SD3": ("SD3Transformer2DModel", _sd3),
    "Wan": ("WanTransformer3DModel", _wan),
}


class RecordCalls:
    """The node: returns the model with a wrapper that records and changes nothing."""

    CATEGORY, FUNCTION = "quanterr", "record"
    RETURN_TYPES: ClassVar = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802 - ComfyUI's name
        """Return what the node asks for."""
        return {
            "required": {
                "model": ("MODEL",),
                "family": (list(FAMILIES),),
                "path": ("STRING", {"default": "calls.safetensors"}),
                "group": ("STRING", {"default": "a prompt and a seed"}),
                "every": ("INT", {"default": 4, "min": 1}),
            }
        }

    def record(self, model: Any, family: str, path: str, group: str, every: int) -> tuple[Any]:
        """Wrap a copy of the model."""
        steps: dict[float, int] = {}

        def wrapper(apply_model: Callable[..., torch.Tensor], given: dict[str, Any]) -> torch.Tensor:
            x, sigma, c = given["input"], given["timestep"], given["c"]
            step = steps.setdefault(float(sigma[0]), len(steps))
            if step % every == 0:
                _add(path, family, group, step, given)
            return apply_model(x, sigma, **c)

        wrapped = model.clone()
        wrapped.set_model_unet_function_wrapper(wrapper)
        return (wrapped,)


def _add(path: str, family: str, group: str, step: int, given: dict[str, Any]) -> None:
    """Add a call to the file for each image of a batch."""
    model, convert = FAMILIES[family]
    tensors: dict[str, torch.Tensor] = {}
    described: dict[str, Any] = {"version": 1, "class": model, "calls": {}}
    if os.path.exists(path):
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
            described = json.loads(file.metadata()[KEY])
    size, branches = len(given["input"]), given["cond_or_uncond"]
    for n in range(size):
        c = {
            key: value[n : n + 1].cpu() if len(value) == size else value.cpu()
            for key, value in given["c"].items()
            if isinstance(value, torch.Tensor)
        }
        call = f"{len(described['calls']):04}"
        sigma = given["timestep"][n : n + 1].float().cpu()
        arguments = convert(given["input"][n : n + 1].cpu(), sigma, c)
        tensors |= {f"{call}/{key}": value.clone().contiguous() for key, value in arguments.items()}
        described["calls"][call] = {"group": group, "step": step, "sigma": float(sigma), "arguments": {}}
        if len(set(branches)) > 1:
            branch = branches[n * len(branches) // size]
            described["calls"][call]["branch"] = ("conditional", "unconditional")[branch]
    save_file(tensors, path, {KEY: json.dumps(described)})


NODE_CLASS_MAPPINGS = {"QuanterrRecordCalls": RecordCalls}
NODE_DISPLAY_NAME_MAPPINGS = {"QuanterrRecordCalls": "Record calls (quanterr)"}
