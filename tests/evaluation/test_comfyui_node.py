"""The example node for ComfyUI follows its wrapper's contract and records calls that reproduce the model's outputs."""

import runpy
from pathlib import Path

import pytest
import torch

import quanterr
from quanterr.evaluation.denoisers.calls import read_calls

diffusers = pytest.importorskip("diffusers", reason='diffusers is not installed (pip install "quanterr[diffusion]")')

from support.denoisers import FAMILIES  # noqa: E402 - it imports diffusers
from support.float32 import OUTPUT_ERROR  # noqa: E402

pytestmark = pytest.mark.session

NODE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "comfyui" / "__init__.py"))
SIGMAS = [1.0, 0.75, 0.5]


class Patcher:
    """Stand in for comfy.model_patcher.ModelPatcher: a copy that keeps a wrapper."""

    def clone(self):
        return Patcher()

    def set_model_unet_function_wrapper(self, wrapper):
        self.wrapper = wrapper


def save(name, folder, **changed):
    model_class, config, *_ = FAMILIES[name]
    torch.manual_seed(1)
    model = getattr(diffusers, model_class)(**config | changed).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model


def flux(model):
    """Call FLUX as ComfyUI does, by diffusers' own pipeline: latents (n, c, h, w) in and out."""
    pipeline = diffusers.FluxPipeline

    def apply(x, sigma, c_crossattn, y, guidance, **_):
        n, channels, height, width = x.shape
        ids = pipeline._prepare_latent_image_ids(n, height // 2, width // 2, "cpu", torch.float32)
        packed = pipeline._pack_latents(x, n, channels, height, width)
        output = model(
            hidden_states=packed, encoder_hidden_states=c_crossattn, pooled_projections=y, timestep=sigma,
            guidance=guidance.expand(n), img_ids=ids, txt_ids=torch.zeros(c_crossattn.shape[1], 3), return_dict=False,
        )[0]  # fmt: skip
        return pipeline._unpack_latents(output, 8 * height, 8 * width, 8)

    return apply, {"y": torch.randn(2, 20), "guidance": torch.tensor([3.5])}, (2, 4, 8, 12)


def sd3(model):
    def apply(x, sigma, c_crossattn, y, **_):
        return model(x, c_crossattn, pooled_projections=y, timestep=1000 * sigma, return_dict=False)[0]

    return apply, {"y": torch.randn(2, 20)}, (2, 4, 8, 8)


@pytest.mark.parametrize(("family", "make"), [("FLUX.1", flux), ("SD3", sd3)])
def test_recorded_calls_reproduce_the_model_output(family, make, tmp_path):
    changed = {"in_channels": 16, "out_channels": 16} if family == "FLUX.1" else {}
    model = save(family, tmp_path / "original", **changed)
    apply, conditionings, shape = make(model)
    conditionings |= {"c_crossattn": torch.randn(2, 8, 24), "transformer_options": {}}
    path = tmp_path / "calls.safetensors"
    [wrapped] = NODE["RecordCalls"]().record(Patcher(), family, str(path), "a fox, 1", 2)
    outputs = []
    with torch.no_grad():
        for sigma in SIGMAS:
            given = {
                "input": torch.randn(shape), "timestep": torch.full((2,), sigma), "c": conditionings,
                "cond_or_uncond": [0, 1],
            }  # fmt: skip
            outputs.append(wrapped.wrapper(apply, given))
            assert torch.equal(outputs[-1], apply(given["input"], given["timestep"], **conditionings))
    calls = read_calls(str(path))
    calls.check(model)

    assert [(0, "conditional"), (0, "unconditional"), (2, "conditional"), (2, "unconditional")] == [
        (call.step, call.branch) for call in calls.calls
    ]
    for n, call in enumerate(calls.calls):
        with torch.no_grad():
            again = model(**call.arguments, return_dict=False)[0]
        if family == "FLUX.1":
            again = diffusers.FluxPipeline._unpack_latents(again, 8 * shape[2], 8 * shape[3], 8)
        # One image at a time instead of two, so sums are split differently.
        apart = outputs[2 * (n // 2)][n % 2] - again[0]
        assert apart.norm() <= OUTPUT_ERROR * again[0].norm()
    evaluation = quanterr.evaluate(tmp_path / "original", against=["int8_row"], inputs=path)
    assert ("pass", 4, 1) == (
        evaluation.verdict, evaluation.candidates[0].outputs.calls, evaluation.candidates[0].outputs.groups
    )  # fmt: skip
