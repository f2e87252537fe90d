"""LoRAs merged into both sides of a denoiser, compared with diffusers' forward and weights merged in plain torch."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.float32 import of_squared_error

import quanterr
from quanterr.errors import UsageError

diffusers = pytest.importorskip("diffusers", reason='diffusers is not installed (pip install "quanterr[diffusion]")')

from support.denoisers import call, converter, make_model, nest, write_calls  # noqa: E402 - it imports diffusers

pytestmark = pytest.mark.session

RANK, ALPHA = 4, 2.0
KINDS = {"peft": ("lora_A", "lora_B"), "kohya": ("lora_down", "lora_up")}


def adapter(tensors, names, program, prefix, underscores=False):
    """Return a LoRA for some weights as it is stored, and the merged weights."""
    generator = torch.Generator().manual_seed(5)
    stored, merged = {}, {key: value.float() for key, value in tensors.items()}
    for name in names:
        weight = tensors[f"{name}.weight"]
        down = torch.randn(RANK, *weight.shape[1:], generator=generator) * 0.3
        up = torch.randn(weight.shape[0], RANK, *(1 for _ in weight.shape[2:]), generator=generator) * 0.3
        module = prefix + (name.replace(".", "_") if underscores else name)
        first, second = KINDS[program]
        stored |= {f"{module}.{first}.weight": down, f"{module}.{second}.weight": up}
        if program == "kohya":
            stored[f"{module}.alpha"] = torch.tensor(ALPHA)
        scale = ALPHA / RANK if program == "kohya" else 1.0
        merged[f"{name}.weight"] = weight.float() + scale * (up.flatten(1) @ down.flatten(1)).view(weight.shape)
    return stored, merged


def error_of(model, family, base, other):
    """Return the mean relative error of the outputs of two calls by diffusers' own forward."""
    errors = []
    for number in range(2):
        outputs = []
        for state in (base, other):
            model.load_state_dict(state)
            with torch.no_grad():
                outputs.append(model(**nest(call(family, number)), return_dict=False)[0].double())
        x, y = outputs
        errors.append(float((y - x).square().sum() / x.square().sum()))
    return sum(errors) / 2


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    """A small FLUX in both namings, its weights rounded to BF16 as a candidate, and calls."""
    folder = tmp_path_factory.mktemp("flux")
    model, tensors = make_model("FLUX.1", folder / "original")
    save_file(tensors, folder / "original.safetensors")
    save_file({key: value.bfloat16() for key, value in tensors.items()}, folder / "candidate.safetensors")
    return folder, model, tensors, write_calls("FLUX.1", folder / "calls.safetensors", 2)


STORED = ["double_blocks.0.img_attn.qkv", "single_blocks.1.linear1", "final_layer.adaLN_modulation.1"]


@pytest.mark.parametrize(
    ("program", "prefix", "underscores"),
    [("kohya", "lora_unet_", True), ("peft", "diffusion_model.", False), ("kohya", "", False)],
)
def test_lora_with_file_names_is_merged_into_both_sides(program, prefix, underscores, flux, tmp_path):
    folder, model, tensors, inputs = flux
    stored, merged = adapter(tensors, STORED, program, prefix, underscores)
    save_file(stored | {"lora_te1_text_model.lora_down.weight": torch.ones(1, 1)}, tmp_path / "lora.safetensors")
    _, other = adapter({key: value.bfloat16() for key, value in tensors.items()}, STORED, program, prefix)
    convert = converter("FLUX.1")
    expected = error_of(
        model, "FLUX.1", *(convert(checkpoint=dict(side), config=dict(model.config)) for side in (merged, other))
    )
    evaluation = quanterr.evaluate(
        folder / "original.safetensors", [folder / "candidate.safetensors"], inputs=inputs,
        config=folder / "original", lora=tmp_path / "lora.safetensors",
    )  # fmt: skip

    assert evaluation.candidates[0].outputs.output_error == pytest.approx(expected, rel=of_squared_error(expected))
    assert ("pass", str(tmp_path / "lora.safetensors")) == (evaluation.verdict, evaluation.lora)


def test_lora_with_diffusers_names_takes_alpha_from_its_metadata(flux, tmp_path):
    folder, model, _, inputs = flux
    base = load_file(next((folder / "original").glob("*.safetensors")))
    names = ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.proj_out"]
    stored, _ = adapter(base, names, "peft", "transformer.")
    metadata = {"transformer.r": 2 * RANK, "transformer.lora_alpha": RANK}
    save_file(stored, tmp_path / "lora.safetensors", {"lora_adapter_metadata": json.dumps(metadata)})

    def merge(state):
        state = {key: value.float() for key, value in state.items()}
        for name in names:
            a, b = (stored[f"transformer.{name}.lora_{matrix}.weight"] for matrix in "AB")
            state[f"{name}.weight"] = state[f"{name}.weight"] + 0.5 * b @ a
        return state

    rounded = {key: value.bfloat16() for key, value in base.items()}
    save_file(rounded, tmp_path / "bf16.safetensors")
    expected = error_of(model, "FLUX.1", merge(base), merge(rounded))
    evaluation = quanterr.evaluate(
        folder / "original", [tmp_path / "bf16.safetensors"], inputs=inputs, lora=tmp_path / "lora.safetensors"
    )

    assert evaluation.candidates[0].outputs.output_error == pytest.approx(expected, rel=of_squared_error(expected))


def test_other_names_go_through_the_diffusers_loader(tmp_path):
    """A LoRA from musubi-tuner has the names of Wan's authors, and the folder has diffusers' names."""
    model, tensors = make_model("Wan", tmp_path / "original")
    names = [f"blocks.{n}.self_attn.{layer}" for n in range(2) for layer in "qkvo"]
    names += [f"blocks.{n}.cross_attn.{layer}" for n in range(2) for layer in "qkvo"]
    names += [f"blocks.{n}.ffn.{layer}" for n in range(2) for layer in (0, 2)]
    stored, merged = adapter(tensors, names, "kohya", "lora_unet_", underscores=True)
    save_file(stored, tmp_path / "lora.safetensors")
    rounded = {key: value.bfloat16() for key, value in tensors.items()}
    save_file(rounded, tmp_path / "bf16.safetensors")
    _, other = adapter(rounded, names, "kohya", "lora_unet_")
    convert = converter("Wan")
    expected = error_of(
        model, "Wan", *(convert(checkpoint=dict(side), config=dict(model.config)) for side in (merged, other))
    )
    inputs = write_calls("Wan", tmp_path / "calls.safetensors", 2)
    evaluation = quanterr.evaluate(
        tmp_path / "original", [tmp_path / "bf16.safetensors"], inputs=inputs, lora=tmp_path / "lora.safetensors"
    )

    assert evaluation.candidates[0].outputs.output_error == pytest.approx(expected, rel=of_squared_error(expected))


REFUSED = {
    "another family": (
        {"lora_unet_blocks_9_attn_q.lora_down.weight": (4, 8), "lora_unet_blocks_9_attn_q.lora_up.weight": (8, 4)},
        "adapts blocks_9_attn_q, which FluxTransformer2DModel lacks; is it a LoRA of another family",
    ),
    "another size": (
        {"transformer.x_embedder.lora_A.weight": (4, 9), "transformer.x_embedder.lora_B.weight": (32, 4)},
        r"its matrices for x_embedder.weight are \[32, 4\] · \[4, 9\], the weight is \[32, 4\]",
    ),
    "the other half": ({"transformer.x_embedder.lora_B.weight": (4, 4)}, "is stored without .*lora_A.weight"),
    "half of it": ({"transformer.x_embedder.lora_A.weight": (4, 4)}, "is stored without .*lora_B.weight"),
    "LoKr": ({"lora_unet_img_in.lokr_w1": (4, 4)}, "lokr_w1: only LoRAs of two matrices for each module"),
    "text encoders alone": ({"lora_te1_a.lora_down.weight": (4, 4)}, "adapts no module of a denoiser"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_lora_is_refused(case, flux, tmp_path):
    folder, _, _, inputs = flux
    shapes, says = REFUSED[case]
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "lora.safetensors")

    with pytest.raises(UsageError, match=says):
        quanterr.evaluate(folder / "original", [folder / "original"], inputs=inputs, lora=tmp_path / "lora.safetensors")
