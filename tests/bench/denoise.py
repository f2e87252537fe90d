"""A small FLUX that is trained here, quantized in many ways: output error, its prediction, plans.

python tests/bench/denoise.py [FOLDER]     five minutes on two cores; prints the tables of the guide's page numbers

The model (0.6 M parameters) learns by flow matching to draw waves of twelve orientations and frequencies, 16 × 16, with
random phases. Sensitivities are of calls on its way from noise to image; errors are measured on other calls.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from math import pi
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import quanterr
from quanterr.checkpoints import Checkpoint

sys.path.insert(0, str(Path(__file__).parent))

from plans import show_plans
from trained import run

SIDE, PATCH, KINDS = 16, 2, 12
TOKENS, CHANNELS = (SIDE // PATCH) ** 2, PATCH**2
TEXT_TOKENS, TEXT_WIDTH = 4, 32
CONFIG = {
    "patch_size": 1, "in_channels": CHANNELS, "num_layers": 2, "num_single_layers": 4, "attention_head_dim": 16,
    "num_attention_heads": 4, "joint_attention_dim": TEXT_WIDTH, "pooled_projection_dim": TEXT_WIDTH,
    "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
BATCH, STEPS, SAMPLED = 16, 600, 8  # training; steps from noise to image
SEED = 0
RECIPES = ("fp8_tensor", "fp8_row", "int8_row", "int6_g32", "int5_g32", "int4_g32", "int3_g32")
PLANNED = ("int2_g32", "int3_g32", "int4_g32", "int5_g32", "int6_g32", "int8_g32")
BUDGETS = (3.5, 4.0, 4.5, 5.0, 6.0)


def images(kinds: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return waves (n, tokens, channels) of the given kinds, with random phases."""
    angles, waves = kinds % 4 * (pi / 4), 1 + kinds // 4
    at = torch.arange(SIDE) * (2 * pi / SIDE)
    along = angles.cos()[:, None, None] * at[:, None] + angles.sin()[:, None, None] * at
    phases = torch.rand(len(kinds), 1, 1, generator=generator) * 2 * pi
    drawn = (waves[:, None, None] * along + phases).sin()
    cut = drawn.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    return cut.reshape(len(kinds), TOKENS, CHANNELS)


def arguments(x: torch.Tensor, kinds: torch.Tensor, sigma: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments of a call; the text of each kind is random numbers."""
    generator = torch.Generator().manual_seed(SEED + 1)
    texts = torch.randn(KINDS, TEXT_TOKENS, TEXT_WIDTH, generator=generator)
    rows = SIDE // PATCH
    ids = torch.zeros(TOKENS, 3)
    ids[:, 1], ids[:, 2] = torch.arange(TOKENS) // rows, torch.arange(TOKENS) % rows
    return {
        "hidden_states": x,
        "encoder_hidden_states": texts[kinds],
        "pooled_projections": texts[kinds, 0],
        "timestep": sigma,
        "img_ids": ids,
        "txt_ids": torch.zeros(TEXT_TOKENS, 3),
    }


def train(folder: Path) -> None:
    """Train by flow matching: the velocity from image to noise; save the model and calls on its paths."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(SEED)
    model_class: Any = FluxTransformer2DModel
    model = model_class(**CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, STEPS)
    generator = torch.Generator().manual_seed(SEED)
    for step in range(STEPS):
        kinds = torch.randint(0, KINDS, (BATCH,), generator=generator)
        image = images(kinds, generator)
        noise = torch.randn(image.shape, generator=generator)
        sigma = torch.rand(BATCH, generator=generator)
        x = image + sigma[:, None, None] * (noise - image)
        velocity = model(**arguments(x, kinds, sigma), return_dict=False)[0]
        loss: Any = (velocity - (noise - image)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {float(loss.detach()):.3f}", file=sys.stderr, flush=True)
    model.train(False)
    for name, seeds in (("calibration", range(8)), ("held_out", range(100, 116))):
        record(model, folder / f"{name}.safetensors", seeds)
    model.save_pretrained(folder / "original")


def path_of(model: Any, seed: int) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
    """Yield the calls of one path from noise to image, with their sigmas."""
    kinds = torch.tensor([seed % KINDS])
    x = torch.randn(1, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(seed))
    for step in range(SAMPLED):
        sigma = 1 - step / SAMPLED
        call = arguments(x, kinds, torch.tensor([sigma]))
        yield sigma, call
        with torch.no_grad():
            x = x - model(**call, return_dict=False)[0] / SAMPLED


def record(model: Any, path: Path, seeds: Sequence[int]) -> None:
    """Write the calls of some paths as ``--inputs`` reads them."""
    tensors: dict[str, torch.Tensor] = {}
    calls: dict[str, dict[str, Any]] = {}
    for seed in seeds:
        for step, (sigma, call) in enumerate(path_of(model, seed)):
            name = f"{len(calls):04}"
            tensors |= {f"{name}/{key}": value.clone() for key, value in call.items()}
            calls[name] = {"group": f"seed {seed}", "step": step, "sigma": sigma}
    described = {"version": 1, "class": "FluxTransformer2DModel", "calls": calls}
    save_file(tensors, path, {"quanterr.inputs": json.dumps(described)})


def bench(folder: Path, original: Checkpoint) -> None:
    """Print both tables."""
    sensitivity = folder / "sensitivity.json"
    asked: dict[str, Any] = {"sensitivity": sensitivity, "sensitivity_chunks": 64}
    evaluation = quanterr.evaluate(
        folder / "original", against=RECIPES, inputs=folder / "calibration.safetensors", activations="none", **asked
    )
    print("| recipe | output error | predicted | predicted ÷ measured |")
    print("|---|---|---|---|")
    for candidate in evaluation.candidates:
        outputs, predicted = candidate.outputs, candidate.predicted_output_error
        if outputs is not None and outputs.output_error and predicted is not None:
            error = outputs.output_error
            measured = f"{error:.3g} ± {outputs.output_error_se:.1g}"
            print(f"| {candidate.name} | {measured} | {predicted:.3g} | {predicted / error:.2f} |")

    def measure(plans: Sequence[Checkpoint], uniform: Sequence[str]) -> dict[str, float]:
        made = quanterr.evaluate(
            folder / "original", plans, against=uniform, inputs=folder / "held_out.safetensors", activations="none"
        )
        return {
            candidate.name: candidate.outputs.output_error or 0.0
            for candidate in made.candidates
            if candidate.outputs is not None
        }

    show_plans(original, sensitivity, PLANNED, BUDGETS, measure)


if __name__ == "__main__":
    run(__doc__ or "", ".bench-denoise", "original/config.json", train, bench)
