"""Denoisers on recorded calls, against diffusers' own forward with the same dequantized weights."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import quanterr
from quanterr.errors import CheckpointError, UsageError

diffusers = pytest.importorskip("diffusers", reason='diffusers is not installed (pip install "quanterr[diffusion]")')

MODELS = {
    "FluxTransformer2DModel": {
        "patch_size": 1, "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8),
    },
    "SD3Transformer2DModel": {
        "sample_size": 8, "patch_size": 1, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8,
        "num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32,
        "pooled_projection_dim": 64, "out_channels": 4,
    },
    "WanTransformer3DModel": {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
        "out_channels": 4, "text_dim": 16, "freq_dim": 256, "ffn_dim": 32, "num_layers": 2, "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32,
    },
    "QwenImageTransformer2DModel": {
        "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 4, "joint_attention_dim": 16, "guidance_embeds": False, "axes_dims_rope": (8, 4, 4),
    },
    "LTXVideoTransformer3DModel": {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16,
        "cross_attention_dim": 32, "num_layers": 2, "qk_norm": "rms_norm_across_heads", "caption_channels": 16,
    },
}  # fmt: skip


def inputs_of(name, seed):
    """Tensors of a call, and its other arguments."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "FluxTransformer2DModel": lambda: ({
            "hidden_states": drawn(1, 16, 4), "encoder_hidden_states": drawn(1, 8, 32),
            "pooled_projections": drawn(1, 32), "timestep": torch.tensor([0.7]), "img_ids": drawn(16, 3),
            "txt_ids": drawn(8, 3),
        }, {}),
        "SD3Transformer2DModel": lambda: ({
            "hidden_states": drawn(1, 4, 8, 8), "encoder_hidden_states": drawn(1, 12, 32),
            "pooled_projections": drawn(1, 64), "timestep": torch.tensor([500]),
        }, {}),
        "WanTransformer3DModel": lambda: ({
            "hidden_states": drawn(1, 4, 2, 8, 8), "timestep": torch.tensor([500]),
            "encoder_hidden_states": drawn(1, 12, 16),
        }, {"return_dict": False}),
        "QwenImageTransformer2DModel": lambda: ({
            "hidden_states": drawn(1, 16, 16), "encoder_hidden_states": drawn(1, 7, 16),
            "encoder_hidden_states_mask": torch.ones(1, 7, dtype=torch.long), "timestep": torch.tensor([0.5]),
        }, {"img_shapes": [[(1, 4, 4)]]}),
        "LTXVideoTransformer3DModel": lambda: ({
            "hidden_states": drawn(1, 32, 4), "encoder_hidden_states": drawn(1, 12, 16),
            "timestep": torch.tensor([500]), "encoder_attention_mask": torch.ones(1, 12),
        }, {"num_frames": 2, "height": 4, "width": 4}),
    }[name]()  # fmt: skip


def saved(name, folder):
    torch.manual_seed(1)
    model = getattr(diffusers, name)(**MODELS[name]).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model


def recorded(name, path, number_of_calls=6, **changed):
    """A file of calls, two groups of them."""
    tensors, said = {}, {}
    for number in range(number_of_calls):
        own, plain = inputs_of(name, number)
        tensors |= {f"{number:04}/{key}": value.contiguous() for key, value in own.items()}
        said[f"{number:04}"] = {"group": f"prompt {number // 3}", "step": number % 3, "arguments": plain}
    metadata = {"version": 1, "class": name, "calls": said} | changed
    save_file(tensors, path, {"quanterr.inputs": json.dumps(metadata)})
    return path


def fp8_scaled(tensors):
    """ComfyUI's scaled FP8, and the values that it stands for."""
    written, values = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}, dict(tensors)
    for name, tensor in tensors.items():
        written[name] = tensor
        if tensor.dim() == 2 and name.endswith(".weight") and "blocks" in name:
            scale = tensor.abs().max() / 448
            codes = (tensor / scale).to(torch.float8_e4m3fn)
            written[name], written[name.replace(".weight", ".scale_weight")] = codes, scale
            values[name] = codes.float() * scale
    return written, values


def errors(model, values, name, calls):
    """Of each call, by diffusers' own forward."""
    found = []
    base = {key: value.clone() for key, value in model.state_dict().items()}
    for number in range(calls):
        own, plain = inputs_of(name, number)
        outputs = []
        for state in (base, values):
            model.load_state_dict(state)
            with torch.no_grad():
                returned = model(**own, **plain)
            outputs.append((returned[0] if isinstance(returned, tuple) else returned.sample).double())
        x, y = outputs
        found.append(float((y - x).square().sum() / x.square().sum()))
    model.load_state_dict(base)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_output_errors_are_those_of_diffusers_own_forward(name, tmp_path):
    model = saved(name, tmp_path / "original")
    written, values = fp8_scaled(load_file(next((tmp_path / "original").glob("*.safetensors"))))
    save_file(written, tmp_path / "fp8.safetensors")
    inputs = recorded(name, tmp_path / "inputs.safetensors")
    found = quanterr.evaluate(tmp_path / "original", [tmp_path / "fp8.safetensors"], inputs=inputs)
    outputs, expected = found.candidates[0].outputs, errors(model, values, name, 6)
    means = [sum(expected[:3]) / 3, sum(expected[3:]) / 3]

    # Both compute in float32, in products that are cut alike: some thousand roundings of 2^-24 of the outputs, beside
    # an error of about 2^-5 of them.
    assert sum(expected) / 6 == pytest.approx(outputs.output_error, rel=1e-4)
    assert max(expected) == pytest.approx(outputs.output_error_worst, rel=1e-4)
    assert f"{expected.index(max(expected)):04}" == outputs.worst_call
    assert abs(means[0] - means[1]) / 2 == pytest.approx(outputs.output_error_se, rel=1e-2)
    assert [(0, 2), (1, 2), (2, 2)] == [(step.step, step.calls) for step in outputs.steps]
    assert ("calls", "pass", 2) == (found.kind, found.verdict, outputs.groups)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"class": "SD3Transformer2DModel"}, "calls of SD3Transformer2DModel, not of FluxTransformer2DModel"),
        (
            {"calls": {"0000": {"arguments": {"colour": "red"}}}},
            "has colour, which Flux",
        ),
    ],
)
def test_calls_of_another_model_are_refused(changed, says, tmp_path):
    saved("FluxTransformer2DModel", tmp_path / "original")
    inputs = recorded("FluxTransformer2DModel", tmp_path / "inputs.safetensors", 1, **changed)

    with pytest.raises(UsageError, match=says):
        quanterr.evaluate(tmp_path / "original", [tmp_path / "original"], inputs=inputs)


def test_a_call_that_lacks_an_argument_is_refused(tmp_path):
    saved("FluxTransformer2DModel", tmp_path / "original")
    save_file({"0000/timestep": torch.ones(1)}, tmp_path / "inputs.safetensors")

    with pytest.raises(UsageError, match="call 0000 lacks hidden_states, which FluxTransformer2DModel needs"):
        quanterr.evaluate(tmp_path / "original", [tmp_path / "original"], inputs=tmp_path / "inputs.safetensors")


def test_shapes_that_do_not_fit_are_wrong_usage(tmp_path):
    saved("FluxTransformer2DModel", tmp_path / "original")
    own, _ = inputs_of("FluxTransformer2DModel", 0)
    tensors = {f"a/{key}": value.contiguous() for key, value in own.items()} | {"a/hidden_states": torch.ones(1, 16, 5)}
    save_file(tensors, tmp_path / "inputs.safetensors")

    with pytest.raises(UsageError, match="--inputs: FluxTransformer2DModel cannot take a call: "):
        quanterr.evaluate(tmp_path / "original", [tmp_path / "original"], inputs=tmp_path / "inputs.safetensors")


def test_a_text_is_no_input_of_a_denoiser(tmp_path):
    saved("FluxTransformer2DModel", tmp_path / "original")
    (tmp_path / "text").write_text("words")

    with pytest.raises(UsageError, match="reads no text: give recorded calls of it with --inputs"):
        quanterr.evaluate(tmp_path / "original", [tmp_path / "original"], text=tmp_path / "text")


def test_a_model_that_diffusers_lacks_is_named(tmp_path):
    saved("FluxTransformer2DModel", tmp_path / "original")
    path = tmp_path / "original" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_class_name": "Flux9Transformer2DModel"}))
    inputs = recorded("FluxTransformer2DModel", tmp_path / "inputs.safetensors", 1)

    with pytest.raises(CheckpointError, match="has no model Flux9Transformer2DModel"):
        quanterr.evaluate(tmp_path / "original", [tmp_path / "original"], inputs=inputs)


def test_an_original_that_gives_zeros_has_no_error_to_be_measured(tmp_path):
    saved("FluxTransformer2DModel", tmp_path / "original")
    path = next((tmp_path / "original").glob("*.safetensors"))
    tensors = load_file(path)
    save_file(tensors, tmp_path / "other.safetensors")
    save_file(tensors | {key: torch.zeros_like(tensors[key]) for key in ("proj_out.weight", "proj_out.bias")}, path)
    inputs = recorded("FluxTransformer2DModel", tmp_path / "inputs.safetensors", 1)

    with pytest.raises(CheckpointError, match="call 0000: the original's output is zero"):
        quanterr.evaluate(tmp_path / "original", [tmp_path / "other.safetensors"], inputs=inputs)


def test_every_output_says_how_far_the_outputs_are_apart(tmp_path):
    saved("FluxTransformer2DModel", tmp_path / "original")
    inputs = recorded("FluxTransformer2DModel", tmp_path / "inputs.safetensors", 2)
    found = quanterr.evaluate(
        tmp_path / "original", inputs=inputs, against=["int8_row"], require=["output_snr_db >= 20"]
    )
    for suffix in ("json", "html", "md", "csv", "xml", "jsonl"):
        found.save(tmp_path / f"e.{suffix}")

    assert "output SNR" in (tmp_path / "e.md").read_text()
    assert "output_snr_db &gt;= 20" in (tmp_path / "e.xml").read_text()
    assert "pass" == found.verdict


def test_what_the_example_records_is_what_the_model_was_called_with(tmp_path):
    name = "QwenImageTransformer2DModel"
    model = saved(name, tmp_path / "original")
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "capture_inputs.py"))
    with example["Recorder"](model, every=2) as recorder, torch.no_grad():
        for group in ("a", "b"):
            with recorder.group(group):
                for seed in range(3):
                    own, plain = inputs_of(name, seed)
                    model(own.pop("hidden_states"), **own, **plain)
    recorder.save(tmp_path / "calls.safetensors")
    found = quanterr.evaluate(tmp_path / "original", inputs=tmp_path / "calls.safetensors", against=["int8_row"])
    outputs = found.candidates[0].outputs

    assert (4, 2, [0, 2]) == (outputs.calls, outputs.groups, [step.step for step in outputs.steps])
    assert 0 < outputs.output_error < 0.1
