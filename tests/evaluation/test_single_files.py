"""Denoisers in single files with their authors' names give the numbers of their diffusers folders, in any format."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.float32 import of_squared_error
from support.making import finish

import quanterr
from quanterr.errors import CheckpointError
from quanterr.evaluation.denoisers.families import recognize

diffusers = pytest.importorskip("diffusers", reason='diffusers is not installed (pip install "quanterr[diffusion]")')

# diffusers' Chroma imports a class of FLUX from a deprecated module, which warns.
pytestmark = [pytest.mark.session, pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning")]

from support.denoisers import (  # noqa: E402 - it imports diffusers
    FAMILIES,
    auraflow,
    call,
    converter,
    flux,
    flux2,
    hunyuan_video,
    make_model,
    nest,
    sana,
    scaled_fp8,
    sd3,
    wan,
    write_calls,
    z_image,
)

CALLS = 2


def output(model, family, number):
    with torch.no_grad():
        result = model(**nest(call(family, number)), return_dict=False)[0]
    return (torch.cat([tensor.flatten() for tensor in result]) if isinstance(result, list) else result).double()


@pytest.mark.parametrize("family", FAMILIES)
def test_single_file_has_the_same_numbers_as_its_diffusers_folder(family, tmp_path):
    model, tensors = make_model(family, tmp_path / "diffusers")
    written, values = scaled_fp8(tensors)
    save_file(tensors, tmp_path / "original.safetensors")
    save_file(written, tmp_path / "fp8.safetensors")
    prefix = "" if family.startswith("SD ") or family == "SDXL" else "model.diffusion_model."
    beside = {"first_stage_model.decoder.conv_in.weight": torch.ones(3, 3)} if prefix else {}
    save_file({prefix + key: value for key, value in written.items()} | beside, tmp_path / "whole.safetensors")
    inputs = write_calls(family, tmp_path / "calls.safetensors", CALLS)

    base = [output(model, family, n) for n in range(CALLS)]
    model.load_state_dict(converter(family)(checkpoint=dict(values), config=dict(model.config)), strict=True)
    quantized = [output(model, family, n) for n in range(CALLS)]
    errors = [float((y - x).square().sum() / x.square().sum()) for x, y in zip(base, quantized, strict=True)]

    candidates = [tmp_path / "fp8.safetensors", tmp_path / "whole.safetensors"]
    of_folder = quanterr.evaluate(tmp_path / "diffusers", candidates, inputs=inputs)
    of_file = quanterr.evaluate(
        tmp_path / "original.safetensors", candidates, inputs=inputs, config=tmp_path / "diffusers"
    )

    mean = sum(errors) / CALLS
    for candidate in (*of_folder.candidates, *of_file.candidates):
        assert ("pass", []) == (candidate.verdict, candidate.missing), candidate.reasons
        assert mean == pytest.approx(candidate.outputs.output_error, rel=of_squared_error(mean))
    assert mean > 0
    assert {row.layer_name for row in of_file.candidates[0].weights} <= tensors.keys()


@pytest.mark.parametrize("family", ["SD3", "Wan", "Qwen-Image", "Z-Image"])
def test_family_is_recognized_from_names_and_shapes(family, tmp_path):
    model, tensors = make_model(family, tmp_path / "diffusers")
    save_file({f"model.diffusion_model.{key}": value for key, value in tensors.items()}, tmp_path / "original.sft")
    config = recognize({key: tuple(value.shape) for key, value in tensors.items()}, "a file")
    same = quanterr.evaluate(
        tmp_path / "original.sft", [tmp_path / "diffusers"], inputs=write_calls(family, tmp_path / "calls.sft", 1)
    )

    given = {key: tuple(value) if isinstance(value, list) else value for key, value in model.config.items()}
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}
    assert {key: given[key] for key in fields} == fields
    assert 0 == same.candidates[0].outputs.output_error


# From transformer/config.json of black-forest-labs/FLUX.1-dev, stabilityai/stable-diffusion-3.5-medium,
# Wan-AI/Wan2.1-I2V-14B-480P-Diffusers and Tongyi-MAI/Z-Image-Turbo, and from unet/config.json of
# stable-diffusion-v1-5/stable-diffusion-v1-5 and stabilityai/stable-diffusion-xl-base-1.0.
RELEASED = {
    "FLUX.1 dev": (
        lambda: flux(3072, 128, 4096, 768, 64, 19, 38),
        {"_class_name": "FluxTransformer2DModel", "attention_head_dim": 128, "guidance_embeds": True, "in_channels": 64,
         "joint_attention_dim": 4096, "num_attention_heads": 24, "num_layers": 19, "num_single_layers": 38,
         "pooled_projection_dim": 768, "out_channels": 64},
    ),
    "FLUX.1 schnell": (
        lambda: flux(3072, 128, 4096, 768, 64, 19, 38, guidance=False),
        {"_class_name": "FluxTransformer2DModel", "guidance_embeds": False},
    ),
    "FLUX.2 dev": (
        lambda: flux2(6144, 128, 15360, 128),
        {"_class_name": "Flux2Transformer2DModel", "attention_head_dim": 128, "in_channels": 128, "mlp_ratio": 3.0,
         "joint_attention_dim": 15360, "num_attention_heads": 48, "timestep_guidance_channels": 256},
    ),
    "SD3.5 medium": (
        lambda: sd3(1536, 4096, 2048, 16, 24) | {"pos_embed": (1, 384**2, 1536)},
        {"_class_name": "SD3Transformer2DModel", "attention_head_dim": 64, "caption_projection_dim": 1536,
         "in_channels": 16, "joint_attention_dim": 4096, "num_attention_heads": 24, "num_layers": 24,
         "out_channels": 16, "patch_size": 2, "pooled_projection_dim": 2048, "pos_embed_max_size": 384,
         "qk_norm": "rms_norm"},
    ),
    "Wan 2.1 image to video": (
        lambda: wan(5120, 4096, 13824, 36, image=True)
        | {"head.head.weight": (64, 5120), "img_emb.proj.0.weight": (1280,)},
        {"_class_name": "WanTransformer3DModel", "added_kv_proj_dim": 5120, "attention_head_dim": 128,
         "cross_attn_norm": True, "ffn_dim": 13824, "freq_dim": 256, "image_dim": 1280, "in_channels": 36,
         "num_attention_heads": 40, "out_channels": 16, "patch_size": [1, 2, 2], "text_dim": 4096},
    ),
    "Z-Image Turbo": (
        lambda: z_image(3840, 2560, 16),
        {"_class_name": "ZImageTransformer2DModel", "cap_feat_dim": 2560, "dim": 3840, "in_channels": 16, "n_heads": 30,
         "n_kv_heads": 30},
    ),
    "HunyuanVideo": (
        lambda: hunyuan_video(3072, 128, 4096, 768, 16),
        {"_class_name": "HunyuanVideoTransformer3DModel", "attention_head_dim": 128, "guidance_embeds": True,
         "in_channels": 16, "num_attention_heads": 24, "out_channels": 16, "patch_size": 2, "patch_size_t": 1,
         "pooled_projection_dim": 768, "text_embed_dim": 4096, "image_condition_type": None},
    ),
    "Sana 1600M": (
        lambda: sana(2240, 2304, 32)
        | {"blocks.0.mlp.inverted_conv.conv.weight": (11200, 2240, 1, 1)},
        {"_class_name": "SanaTransformer2DModel", "attention_head_dim": 32, "caption_channels": 2304,
         "cross_attention_dim": 2240, "cross_attention_head_dim": 112, "in_channels": 32, "mlp_ratio": 2.5,
         "num_attention_heads": 70, "num_cross_attention_heads": 20, "out_channels": 32},
    ),
    "AuraFlow 0.3": (
        lambda: auraflow(3072, 2048, 4) | {"positional_encoding": (1, 9216, 3072)},
        {"_class_name": "AuraFlowTransformer2DModel", "attention_head_dim": 256, "caption_projection_dim": 3072,
         "in_channels": 4, "joint_attention_dim": 2048, "num_attention_heads": 12, "out_channels": 4,
         "pos_embed_max_size": 9216},
    ),
    "SD 1.5": (
        lambda: {"input_blocks.0.0.weight": (320, 4, 3, 3), "out.2.weight": (4, 320, 3, 3),
                 "middle_block.1.transformer_blocks.0.attn2.to_k.weight": (1280, 768)},
        {"_class_name": "UNet2DConditionModel", "attention_head_dim": 8, "block_out_channels": [320, 640, 1280, 1280],
         "cross_attention_dim": 768, "in_channels": 4, "out_channels": 4},
    ),
    "SDXL": (
        lambda: {"input_blocks.0.0.weight": (320, 4, 3, 3), "out.2.weight": (4, 320, 3, 3),
                 "middle_block.1.transformer_blocks.0.attn2.to_k.weight": (1280, 2048)},
        {"_class_name": "UNet2DConditionModel", "attention_head_dim": [5, 10, 20], "cross_attention_dim": 2048,
         "addition_embed_type": "text_time", "projection_class_embeddings_input_dim": 2816,
         "transformer_layers_per_block": [1, 2, 10], "use_linear_projection": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("release", RELEASED)
def test_released_models_have_their_published_config(release):
    shapes, config = RELEASED[release]
    recognized = recognize(shapes(), "a file")

    assert config == {key: recognized[key] for key in config}


def test_quantized_original_with_other_names_is_dequantized(tmp_path):
    family = "FLUX.2"
    model, tensors = make_model(family, tmp_path / "diffusers")
    written, values = scaled_fp8(tensors)
    save_file(written, tmp_path / "fp8.safetensors")
    inputs = write_calls(family, tmp_path / "calls.safetensors", 1)
    evaluation = quanterr.evaluate(
        tmp_path / "fp8.safetensors", [tmp_path / "diffusers"], inputs=inputs, config=tmp_path / "diffusers"
    )
    y = output(model, family, 0)
    model.load_state_dict(converter(family)(checkpoint=dict(values), config={}), strict=True)
    x = output(model, family, 0)

    assert ("pass", []) == (evaluation.candidates[0].verdict, evaluation.candidates[0].missing), evaluation.candidates[
        0
    ].reasons
    error = float((y - x).square().sum() / x.square().sum())
    assert error == pytest.approx(evaluation.candidates[0].outputs.output_error, rel=of_squared_error(error))


UNKNOWN = {
    "HunyuanVideo 1.5": ("byt5_in.fc1.weight", "HunyuanVideo 1.5 by its tensor byt5_in.fc1.weight; diffusers has no"),
    "PixArt": ("t_block.1.weight", "PixArt by its tensor t_block.1.weight; diffusers has no converter"),
    "VACE": ("vace_blocks.0.after_proj.bias", "Wan VACE by its tensor .*give that of its diffusers folder with"),
    "none": ("a.weight", r"its names \(a.weight\) are of no known family of denoisers \(FLUX.2, Chroma"),
    "FLUX without the rest": (
        "double_blocks.0.img_attn.norm.key_norm.scale",
        "FLUX.1 by its tensor .*, but it lacks img_in.weight; give the config",
    ),
    "FLUX of other heads": (
        "double_blocks.0.img_attn.norm.key_norm.scale",
        r"FLUX.1 by .*, but it lacks heads of 128 channels \(it has 4\); give the config",
    ),
}  # fmt: skip


def test_family_with_tensors_of_other_shapes_is_refused(tmp_path):
    shapes = hunyuan_video(width=128, head=128) | {"img_in.proj.weight": (128, 4)}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "a.safetensors")
    save_file({"0/hidden_states": torch.ones(1)}, tmp_path / "calls.safetensors")

    with pytest.raises(CheckpointError, match="but it lacks shapes that the family has"):
        quanterr.evaluate(
            tmp_path / "a.safetensors", [tmp_path / "a.safetensors"], inputs=tmp_path / "calls.safetensors"
        )


@pytest.mark.parametrize("case", UNKNOWN)
def test_unrecognized_model_is_refused(case, tmp_path):
    name, says = UNKNOWN[case]
    save_file({name: torch.ones(128 if case == "FLUX without the rest" else 4, 4)}, tmp_path / "a.safetensors")
    save_file({"0/hidden_states": torch.ones(1)}, tmp_path / "calls.safetensors")

    with pytest.raises(CheckpointError, match=says):
        quanterr.evaluate(
            tmp_path / "a.safetensors", [tmp_path / "a.safetensors"], inputs=tmp_path / "calls.safetensors"
        )


class TestWrongModel:
    @pytest.fixture
    def folder(self, tmp_path):
        make_model("FLUX.2", tmp_path / "diffusers")
        return tmp_path

    @staticmethod
    def evaluate(original, candidate, folder, **options):
        inputs = write_calls("FLUX.2", folder / "calls.safetensors", 1)
        return quanterr.evaluate(original, [candidate], inputs=inputs, **options)

    def test_candidate_from_another_family_is_refused(self, folder):
        save_file({key: torch.ones(shape) for key, shape in wan().items()}, folder / "wan.safetensors")
        with pytest.raises(CheckpointError, match=r"wan.safetensors: nothing in it makes up .* more of Flux2Trans"):
            self.evaluate(folder / "diffusers", folder / "wan.safetensors", folder)

    def test_candidate_that_no_converter_takes_is_refused(self, folder):
        save_file({"single_blocks.0.colour.weight": torch.ones(2, 2)}, folder / "odd.safetensors")
        with pytest.raises(
            CheckpointError, match=r"odd.safetensors: lacks colour, which diffusers' converter to Flux2"
        ):
            self.evaluate(folder / "diffusers", folder / "odd.safetensors", folder)

    def test_candidate_without_a_tensor_is_refused(self, folder):
        tensors = {key: torch.ones(shape) for key, shape in flux2().items() if key != "img_in.weight"}
        save_file(tensors, folder / "part.safetensors")
        with pytest.raises(
            CheckpointError, match=r"part.safetensors: nothing in it makes up x_embedder.weight of Flux2"
        ):
            self.evaluate(folder / "diffusers", folder / "part.safetensors", folder)

    def test_original_without_a_tensor_is_refused(self, folder):
        path = next((folder / "diffusers").glob("*.safetensors"))
        save_file({key: t for key, t in load_file(path).items() if key != "x_embedder.weight"}, path)
        save_file({key: torch.ones(shape) for key, shape in flux2().items()}, folder / "a.safetensors")
        with pytest.raises(CheckpointError, match=r"diffusers: lacks x_embedder.weight, which the config's model has"):
            self.evaluate(folder / "diffusers", folder / "a.safetensors", folder)

    def test_config_for_another_size_is_refused(self, folder):
        path = folder / "diffusers" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"joint_attention_dim": 32}))
        save_file({key: torch.ones(shape) for key, shape in flux2().items()}, folder / "a.safetensors")
        says = r"32 rows of txt_in.weight \[32, 24\] make up context_embedder.weight, which is \[32, 32\] in the model"
        with pytest.raises(CheckpointError, match=says):
            self.evaluate(folder / "a.safetensors", folder / "a.safetensors", folder, config=folder / "diffusers")

    def test_tensor_unknown_to_the_model_is_refused(self, folder):
        tensors = {key: torch.ones(shape) for key, shape in flux2().items()} | {"adapter.weight": torch.ones(2, 2)}
        save_file(tensors, folder / "a.safetensors")
        with pytest.raises(CheckpointError, match=r"Flux2Transformer2DModel of the config has no adapter.weight"):
            self.evaluate(folder / "a.safetensors", folder / "a.safetensors", folder, config=folder / "diffusers")

    def test_transformers_config_is_refused(self, folder):
        (folder / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(CheckpointError, match="no _class_name: not the config of a model of diffusers"):
            self.evaluate(folder / "diffusers", folder / "diffusers", folder, config=folder / "config.json")


def test_gguf_file_in_author_names_is_original_and_candidate(tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    family, q8 = "FLUX.2", gguf.GGMLQuantizationType.Q8_0
    _, tensors = make_model(family, tmp_path / "diffusers")
    writer, values = gguf.GGUFWriter(tmp_path / "q8.gguf", "flux"), {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
            codes = gguf.quants.quantize(tensor.numpy(), q8)
            writer.add_tensor(name, codes, raw_dtype=q8)
            values[name] = torch.from_numpy(gguf.quants.dequantize(codes, q8)).clone()
        else:
            writer.add_tensor(name, tensor.numpy())
            values[name] = tensor
    finish(writer)
    save_file(values, tmp_path / "values.safetensors")
    inputs = write_calls(family, tmp_path / "calls.safetensors", 1)
    both = [tmp_path / "q8.gguf", tmp_path / "values.safetensors"]
    evaluation = quanterr.evaluate(tmp_path / "diffusers", both, inputs=inputs, activations="none")
    same = quanterr.evaluate(both[0], [both[1]], inputs=inputs, config=tmp_path / "diffusers", activations="none")

    assert ["pass", "pass", "pass"] == [candidate.verdict for candidate in (*evaluation.candidates, *same.candidates)]
    errors = [candidate.outputs.output_error for candidate in (*evaluation.candidates, *same.candidates)]
    assert errors[0] == errors[1] > 0 == errors[2]


@pytest.mark.parametrize("family", ["Wan", "Z-Image"])
def test_gguf_file_drops_leading_ones_and_keeps_video_kernels(family, tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    model, tensors = make_model(family, tmp_path / "diffusers")
    save_file(tensors, tmp_path / "original.safetensors")
    values = {name: tensor.half().float() for name, tensor in tensors.items()}
    writer = gguf.GGUFWriter(tmp_path / "f16.gguf", "wan")
    for name, tensor in tensors.items():
        while tensor.dim() > 1 and len(tensor) == 1:
            tensor = tensor[0]
        writer.add_tensor(name, tensor.half().numpy())
    finish(writer)
    inputs = write_calls(family, tmp_path / "calls.safetensors", 1)
    x = output(model, family, 0)
    model.load_state_dict(converter(family)(checkpoint=values, config=dict(model.config)), strict=True)
    y = output(model, family, 0)
    error = float((y - x).square().sum() / x.square().sum())
    for original in ("diffusers", "original.safetensors"):
        (candidate,) = quanterr.evaluate(
            tmp_path / original,
            [tmp_path / "f16.gguf"],
            inputs=inputs,
            config=tmp_path / "diffusers" if original != "diffusers" else None,
            activations="none",
        ).candidates

        assert ("pass", []) == (candidate.verdict, candidate.missing), candidate.reasons
        assert error == pytest.approx(candidate.outputs.output_error, rel=of_squared_error(error))


def test_candidate_with_padded_rows_pairs_with_a_single_file(tmp_path):
    family, name = "Chroma", "distilled_guidance_layer.in_proj.weight"
    model, tensors = make_model(family, tmp_path / "diffusers")
    save_file(tensors, tmp_path / "original.safetensors")
    written = dict(model.state_dict())
    rows, cols = written[name].shape  # 24 rows, which comfy-kitchen pads to 32: here, codes of 0.5 with scales of 1
    label = json.dumps({"format": "nvfp4"}).encode()
    written |= {
        name: torch.full((32, cols // 2), 0x11, dtype=torch.uint8),
        name + "_scale": torch.ones(128, 4).to(torch.float8_e4m3fn),
        name + "_scale_2": torch.ones(()),
        name.replace(".weight", ".comfy_quant"): torch.tensor(list(label), dtype=torch.uint8),
    }
    save_file({key: tensor.contiguous() for key, tensor in written.items()}, tmp_path / "nvfp4.safetensors")
    inputs = write_calls(family, tmp_path / "calls.safetensors", 1)
    (candidate,) = quanterr.evaluate(
        tmp_path / "original.safetensors",
        [tmp_path / "nvfp4.safetensors"],
        inputs=inputs,
        config=tmp_path / "diffusers",
        activations="none",
    ).candidates
    x = output(model, family, 0)
    model.load_state_dict(dict(model.state_dict()) | {name: torch.full((rows, cols), 0.5)})
    y = output(model, family, 0)

    assert ("pass", []) == (candidate.verdict, candidate.missing), candidate.reasons
    error = float((y - x).square().sum() / x.square().sum())
    assert error == pytest.approx(candidate.outputs.output_error, rel=of_squared_error(error))
