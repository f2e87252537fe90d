"""Denoisers on recorded calls, compared with diffusers' own forward and the same dequantized weights."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.float32 import OF_BFLOAT16, of_squared_error

import quanterr
from quanterr.errors import CheckpointError, UsageError
from quanterr.outputs.card import format_numbers

pytestmark = pytest.mark.session

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
    """Return the tensors of a call and its other arguments."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "FluxTransformer2DModel": lambda: ({
            "hidden_states": draw(1, 16, 4), "encoder_hidden_states": draw(1, 8, 32),
            "pooled_projections": draw(1, 32), "timestep": torch.tensor([0.7]), "img_ids": draw(16, 3),
            "txt_ids": draw(8, 3),
        }, {}),
        "SD3Transformer2DModel": lambda: ({
            "hidden_states": draw(1, 4, 8, 8), "encoder_hidden_states": draw(1, 12, 32),
            "pooled_projections": draw(1, 64), "timestep": torch.tensor([500]),
        }, {}),
        "WanTransformer3DModel": lambda: ({
            "hidden_states": draw(1, 4, 2, 8, 8), "timestep": torch.tensor([500]),
            "encoder_hidden_states": draw(1, 12, 16),
        }, {"return_dict": False}),
        "QwenImageTransformer2DModel": lambda: ({
            "hidden_states": draw(1, 16, 16), "encoder_hidden_states": draw(1, 7, 16),
            "encoder_hidden_states_mask": torch.ones(1, 7, dtype=torch.long), "timestep": torch.tensor([0.5]),
        }, {"img_shapes": [[(1, 4, 4)]]}),
        "LTXVideoTransformer3DModel": lambda: ({
            "hidden_states": draw(1, 32, 4), "encoder_hidden_states": draw(1, 12, 16),
            "timestep": torch.tensor([500]), "encoder_attention_mask": torch.ones(1, 12),
        }, {"num_frames": 2, "height": 4, "width": 4}),
    }[name]()  # fmt: skip


def save(name, folder):
    torch.manual_seed(1)
    model = getattr(diffusers, name)(**MODELS[name]).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model


def record(name, path, number_of_calls=6, **changed):
    """Write a file of calls in two groups."""
    tensors, described = {}, {}
    for number in range(number_of_calls):
        arguments, plain = inputs_of(name, number)
        tensors |= {f"{number:04}/{key}": value.contiguous() for key, value in arguments.items()}
        described[f"{number:04}"] = {"group": f"prompt {number // 3}", "step": number % 3, "arguments": plain}
    metadata = {"version": 1, "class": name, "calls": described} | changed
    save_file(tensors, path, {"quanterr.inputs": json.dumps(metadata)})
    return path


def scale_fp8(tensors):
    """Return ComfyUI's scaled FP8 and the values it stands for."""
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
    """Return the error of each call by diffusers' own forward."""
    errors_of_calls = []
    base = {key: value.clone() for key, value in model.state_dict().items()}
    for number in range(calls):
        arguments, plain = inputs_of(name, number)
        outputs = []
        for state in (base, values):
            model.load_state_dict(state)
            with torch.no_grad():
                returned = model(**arguments, **plain)
            outputs.append((returned[0] if isinstance(returned, tuple) else returned.sample).double())
        x, y = outputs
        errors_of_calls.append(float((y - x).square().sum() / x.square().sum()))
    model.load_state_dict(base)
    return errors_of_calls


@pytest.mark.parametrize("name", MODELS)
def test_output_errors_equal_diffusers_own_forward(name, tmp_path):
    model = save(name, tmp_path / "original")
    written, values = scale_fp8(load_file(next((tmp_path / "original").glob("*.safetensors"))))
    save_file(written, tmp_path / "fp8.safetensors")
    inputs = record(name, tmp_path / "inputs.safetensors")
    evaluation = quanterr.evaluate(tmp_path / "original", [tmp_path / "fp8.safetensors"], inputs=inputs)
    outputs, expected = evaluation.candidates[0].outputs, errors(model, values, name, 6)
    means = [sum(expected[:3]) / 3, sum(expected[3:]) / 3]

    mean = sum(expected) / 6
    assert mean == pytest.approx(outputs.output_error, rel=of_squared_error(mean))
    assert max(expected) == pytest.approx(outputs.output_error_worst, rel=of_squared_error(max(expected)))
    assert f"{expected.index(max(expected)):04}" == outputs.worst_call
    assert abs(means[0] - means[1]) / 2 == pytest.approx(outputs.output_error_se, abs=mean * of_squared_error(mean))
    assert [(0, 2), (1, 2), (2, 2)] == [(step.step, step.calls) for step in outputs.steps]
    assert ("calls", "pass", 2) == (evaluation.kind, evaluation.verdict, outputs.groups)


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
def test_calls_for_another_model_are_refused(changed, says, tmp_path):
    save("FluxTransformer2DModel", tmp_path / "original")
    inputs = record("FluxTransformer2DModel", tmp_path / "inputs.safetensors", 1, **changed)

    with pytest.raises(UsageError, match=says):
        quanterr.evaluate(tmp_path / "original", [tmp_path / "original"], inputs=inputs)


def test_call_without_a_needed_argument_is_refused(tmp_path):
    save("FluxTransformer2DModel", tmp_path / "original")
    save_file({"0000/timestep": torch.ones(1)}, tmp_path / "inputs.safetensors")

    with pytest.raises(UsageError, match="call 0000 lacks hidden_states, which FluxTransformer2DModel needs"):
        quanterr.evaluate(tmp_path / "original", [tmp_path / "original"], inputs=tmp_path / "inputs.safetensors")


def test_unsuitable_shapes_are_wrong_usage(tmp_path):
    save("FluxTransformer2DModel", tmp_path / "original")
    arguments, _ = inputs_of("FluxTransformer2DModel", 0)
    tensors = {f"a/{key}": value.contiguous() for key, value in arguments.items()} | {
        "a/hidden_states": torch.ones(1, 16, 5)
    }
    save_file(tensors, tmp_path / "inputs.safetensors")

    with pytest.raises(UsageError, match="inputs: FluxTransformer2DModel cannot take a call: "):
        quanterr.evaluate(tmp_path / "original", [tmp_path / "original"], inputs=tmp_path / "inputs.safetensors")


def test_denoiser_refuses_a_text(tmp_path):
    save("FluxTransformer2DModel", tmp_path / "original")
    (tmp_path / "text").write_text("words")

    with pytest.raises(UsageError, match="reads no text: give recorded calls with inputs"):
        quanterr.evaluate(tmp_path / "original", [tmp_path / "original"], text=tmp_path / "text")


def test_model_missing_from_diffusers_is_named(tmp_path):
    save("FluxTransformer2DModel", tmp_path / "original")
    path = tmp_path / "original" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_class_name": "Flux9Transformer2DModel"}))
    inputs = record("FluxTransformer2DModel", tmp_path / "inputs.safetensors", 1)

    with pytest.raises(CheckpointError, match="has no model Flux9Transformer2DModel"):
        quanterr.evaluate(tmp_path / "original", [tmp_path / "original"], inputs=inputs)


def test_original_with_zero_outputs_is_an_error(tmp_path):
    save("FluxTransformer2DModel", tmp_path / "original")
    path = next((tmp_path / "original").glob("*.safetensors"))
    tensors = load_file(path)
    save_file(tensors, tmp_path / "other.safetensors")
    save_file(tensors | {key: torch.zeros_like(tensors[key]) for key in ("proj_out.weight", "proj_out.bias")}, path)
    inputs = record("FluxTransformer2DModel", tmp_path / "inputs.safetensors", 1)

    with pytest.raises(CheckpointError, match="call 0000: the original's output is zero"):
        quanterr.evaluate(tmp_path / "original", [tmp_path / "other.safetensors"], inputs=inputs)


def test_every_output_states_the_output_error(tmp_path):
    save("FluxTransformer2DModel", tmp_path / "original")
    inputs = record("FluxTransformer2DModel", tmp_path / "inputs.safetensors", 2)
    evaluation = quanterr.evaluate(
        tmp_path / "original", inputs=inputs, against=["int8_row"], require=["output_snr_db >= 20"]
    )
    for suffix in ("json", "html", "md", "csv", "xml", "jsonl"):
        evaluation.save(tmp_path / f"e.{suffix}")

    assert "output SNR" in (tmp_path / "e.md").read_text()
    assert "output_snr_db &gt;= 20" in (tmp_path / "e.xml").read_text()
    assert "pass" == evaluation.verdict


def test_example_records_the_actual_model_inputs(tmp_path):
    name = "QwenImageTransformer2DModel"
    model = save(name, tmp_path / "original")
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "capture_inputs.py"))
    with example["Recorder"](model, every=2) as recorder, torch.no_grad():
        for group in ("a", "b"):
            with recorder.group(group):
                for seed in range(3):
                    arguments, plain = inputs_of(name, seed)
                    model(arguments.pop("hidden_states"), **arguments, **plain)
    recorder.save(tmp_path / "calls.safetensors")
    evaluation = quanterr.evaluate(tmp_path / "original", inputs=tmp_path / "calls.safetensors", against=["int8_row"])
    outputs = evaluation.candidates[0].outputs

    assert (4, 2, [0, 2]) == (outputs.calls, outputs.groups, [step.step for step in outputs.steps])
    assert 0 < outputs.output_error < 0.1


SMALL_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
OTHERS = {
    "CLIPVisionModel": (SMALL_SIZES | {"image_size": 16, "patch_size": 8}, {"pixel_values": (2, 3, 16, 16)}),
    "BertForSequenceClassification": (SMALL_SIZES | {"vocab_size": 50, "num_labels": 1}, {"inputs_embeds": (2, 6, 32)}),
    "ASTModel": (
        SMALL_SIZES | {"max_length": 32, "num_mel_bins": 16, "patch_size": 8, "time_stride": 8, "frequency_stride": 8},
        {"input_values": (2, 32, 16)},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_transformers_models_take_calls(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    fields, shapes = OTHERS[name]
    model_class = getattr(transformers, name)
    torch.manual_seed(3)
    model = model_class(model_class.config_class(**fields)).eval()
    model.save_pretrained(tmp_path / "original")
    stored = load_file(tmp_path / "original" / "model.safetensors")
    written, values = dict(stored), dict(stored)
    for key, tensor in stored.items():
        if tensor.dim() == 2 and "layer" in key and key.endswith(".weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 127
            codes = (tensor / scale).round()
            written[key], written[key.replace(".weight", ".weight_scale")] = codes.to(torch.int8), scale
            values[key] = codes * scale
    save_file(written, tmp_path / "int8.safetensors")
    inputs = [{key: torch.randn(shape) for key, shape in shapes.items()} for _ in range(2)]
    calls = {f"{n}/{key}": value for n, arguments in enumerate(inputs) for key, value in arguments.items()}
    save_file(calls, tmp_path / "calls.safetensors", {"quanterr.inputs": json.dumps({"version": 1, "class": name})})

    def run(folder):
        arguments = model_class.from_pretrained(folder).eval()
        with torch.no_grad():
            return [arguments(**call)[0].double() for call in inputs]

    (tmp_path / "values").mkdir()
    shutil.copy(tmp_path / "original" / "config.json", tmp_path / "values")
    save_file(values, tmp_path / "values" / "model.safetensors", {"format": "pt"})
    x_and_y = zip(run(tmp_path / "original"), run(tmp_path / "values"), strict=True)
    expected = [float((y - x).square().sum() / x.square().sum()) for x, y in x_and_y]
    evaluation = quanterr.evaluate(
        tmp_path / "original", [tmp_path / "int8.safetensors"], inputs=tmp_path / "calls.safetensors"
    )

    mean = sum(expected) / 2
    assert mean > 0
    assert mean == pytest.approx(evaluation.candidates[0].outputs.output_error, rel=of_squared_error(mean))
    assert ("calls", name, "pass") == (evaluation.kind, evaluation.model, evaluation.verdict)


def test_language_model_takes_calls_or_a_text(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.BertModel(transformers.BertConfig(**SMALL_SIZES | {"vocab_size": 50})).save_pretrained(
        tmp_path / "original"
    )
    save_file({"0/pixel_values": torch.ones(1)}, tmp_path / "calls.safetensors")

    with pytest.raises(UsageError, match="call 0 has pixel_values, which BertModel does not take"):
        quanterr.evaluate(tmp_path / "original", [tmp_path / "original"], inputs=tmp_path / "calls.safetensors")


def test_timesteps_stay_exact_in_the_floor():
    from quanterr.evaluation.running.floor import _ExactScalars

    guidance, hidden, weight = torch.tensor([3.5]), torch.ones(1, 2, 2), torch.ones(2, 2).bfloat16()
    with _ExactScalars():
        scaled = guidance.to(torch.bfloat16) * 1000
        product = torch.nn.functional.linear(hidden, weight)

    assert [3500.0] == scaled.tolist()  # in bfloat16 it would be 3504
    assert torch.bfloat16 == product.dtype
    assert torch.bfloat16 == hidden.to(torch.bfloat16).dtype


class TestFloor:
    @staticmethod
    def evaluate(tmp_path, stored, name="SD3Transformer2DModel", **options):
        model = save(name, tmp_path / "float32").to(stored)
        model.save_pretrained(tmp_path / "original")
        inputs = record(name, tmp_path / "inputs.safetensors", 3)
        return model, quanterr.evaluate(tmp_path / "original", against=["int8_row"], inputs=inputs, **options)

    @pytest.mark.parametrize("name", ["SD3Transformer2DModel", "FluxTransformer2DModel"])
    def test_floor_is_the_original_in_its_own_dtype_against_float32(self, name, tmp_path, monkeypatch):
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # bfloat16 support in the CPU rounds its own sums
        model, evaluation = self.evaluate(tmp_path, torch.bfloat16, name)
        expected = []
        for number in range(3):
            arguments, plain = inputs_of(name, number)
            half = {
                key: value.bfloat16() if value.is_floating_point() and not key.endswith("_ids") else value
                for key, value in arguments.items()
            }  # FLUX's timestep 0.7 is 1000 · 0.7 = 700 in bfloat16 as well
            with torch.no_grad():
                y = model.bfloat16()(**half, **plain).sample.double()
                x = model.float()(**arguments, **plain).sample.double()
            expected.append(float((y - x).square().sum() / x.square().sum()))

        assert sum(expected) / 3 == pytest.approx(evaluation.floor.outputs.output_error, rel=OF_BFLOAT16)
        assert ("bfloat16", None, 3) == (
            evaluation.floor.dtype,
            evaluation.floor.reason,
            evaluation.floor.outputs.calls,
        )

    def test_floor_is_in_every_table_and_names_candidates_below_it(self, tmp_path):
        _, evaluation = self.evaluate(tmp_path, torch.bfloat16)
        evaluation.candidates[0].outputs.output_error = evaluation.floor.outputs.output_error / 2
        text = format_numbers(evaluation)

        assert "floor: the original in bfloat16" in text
        assert "below the floor: int8_row; rounding to bfloat16 alone deviates more" in text
        assert "Output error by step" in text

    @pytest.mark.parametrize(
        ("dtype", "options", "says"),
        [
            (torch.float32, {}, "the original is not stored in a 16-bit float"),
            (torch.bfloat16, {"dtype": "bfloat16"}, "both sides compute in 16 bits: --dtype float32 measures it"),
        ],
    )
    def test_missing_floor_states_its_reason(self, tmp_path, dtype, options, says):
        _, evaluation = self.evaluate(tmp_path, dtype, **options)

        assert (None, says) == (evaluation.floor.outputs, evaluation.floor.reason)
        assert f"no floor: {says}" in format_numbers(evaluation)

    def test_failed_floor_does_not_end_the_evaluation(self, tmp_path):
        _, evaluation = self.evaluate(tmp_path, torch.float16)
        model = save("SD3Transformer2DModel", tmp_path / "large")
        model.proj_out.weight.data.mul_(1e6).clamp_(-6e4, 6e4)
        model.half().save_pretrained(tmp_path / "large")
        inputs = tmp_path / "inputs.safetensors"
        large = quanterr.evaluate(tmp_path / "large", against=["int8_row"], inputs=inputs)

        assert evaluation.floor.outputs.output_error > 0
        assert "the original's output is not finite in float16" == large.floor.reason
        assert large.candidates[0].outputs.output_error > 0
