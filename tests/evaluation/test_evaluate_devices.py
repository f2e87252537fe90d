"""An evaluation gives the same numbers on every device."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import simulated_device
from support.float32 import OUTPUT_ERROR, of_squared_error
from support.forked import call
from support.simulated_device import NAME, UNKNOWN, simulate
from support.small_models import ids, save_model
from test_evaluate import CONTEXT, candidate

import quanterr
from quanterr.errors import ResourceError

pytestmark = pytest.mark.session

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')

MODELS = ["llama", "llama tied", "mixtral", "gemma3", "gpt2", "mamba", "t5", "bert"]
SCORES = ("ppl_original", "ppl", "kld_mean")


def make_files(name, folder):
    original = save_model(name, folder / "original")
    return original, candidate(original)[0], ids(folder)


def figures(candidate):
    """Return scores, errors of blocks and weights, and predictions of an evaluation, from its JSON."""
    numbers = {name: (candidate["scores"] or {}).get(name) for name in SCORES}
    numbers |= {name: (candidate["embeddings"] or {}).get(name) for name in ("cosine_mean", "relative_error")}
    numbers |= {block["name"]: block["relative_error"] for block in candidate["blocks"]}
    for weight in candidate["weights"]:
        numbers[weight["layer_name"]], numbers[weight["layer_name"] + ": predicted"] = (
            weight["output_error"],
            weight["predicted_kld"],
        )
    return {name: figure for name, figure in numbers.items() if figure is not None}


def test_missing_device_is_an_environment_error(tmp_path):
    original, quantized, tokens = make_files("llama", tmp_path)

    with pytest.raises(ResourceError, match="try device cpu"):
        quanterr.evaluate(original, [quantized], tokens=tokens, context=CONTEXT, device="cuda:99")


def agree(x, y, relative=None):
    """Return whether figures agree: to ``relative``, or to float32 precision where all are squares of differences."""
    assert x.keys() == y.keys()
    return all(
        x[name] == pytest.approx(y[name], rel=relative or of_squared_error(y[name] or 1.0), abs=2 * OUTPUT_ERROR**2)
        for name in x
    )


def on_both(make):
    """Return the figures of an evaluation on the CPU and on a simulated device."""
    here = make("cpu")
    with simulate():
        on_device = make(NAME)
    assert f"{NAME} (simulated)" == on_device.run.device
    return [figures(json.loads(evaluation.to_json())["candidates"][0]) for evaluation in (here, on_device)]


@UNKNOWN
@pytest.mark.parametrize("name", MODELS)
def test_device_agrees_with_the_cpu(name, tmp_path):
    original, quantized, tokens = make_files(name, tmp_path)

    assert agree(
        *on_both(lambda device: quanterr.evaluate(original, [quantized], tokens=tokens, context=16, device=device))
    )


@UNKNOWN
@pytest.mark.parametrize("activations", ["int8_token", "fp8_token", "nvfp4"])
def test_inputs_and_the_kv_cache_are_rounded_as_on_the_cpu(activations, tmp_path):
    original, quantized, tokens = make_files("llama", tmp_path)
    how = {
        "context": 16,
        "dtype": "float64",
        "activations": activations,
        "kv": "fp8",
    }  # so that no value is rounded differently by chance

    assert agree(
        *on_both(lambda device: quanterr.evaluate(original, [quantized], tokens=tokens, device=device, **how)),
        relative=1e-9,
    )


@UNKNOWN
@pytest.mark.slow  # imports diffusers
def test_denoiser_agrees_with_the_cpu(tmp_path):
    pytest.importorskip("diffusers", reason='diffusers is not installed (pip install "quanterr[diffusion]")')
    import test_evaluate_calls as calls

    name = "QwenImageTransformer2DModel"
    calls.save(name, tmp_path / "original")
    stored = load_file(next((tmp_path / "original").glob("*.safetensors")))
    save_file(calls.scale_fp8(stored)[0], tmp_path / "fp8.safetensors")
    sides = tmp_path / "original", [tmp_path / "fp8.safetensors"]
    inputs = calls.record(name, tmp_path / "inputs.safetensors", number_of_calls=2)
    here = quanterr.evaluate(*sides, inputs=inputs, device="cpu")
    with simulate():
        on_device = quanterr.evaluate(*sides, inputs=inputs, device=NAME)
    x, y = (evaluation.candidates[0].outputs.output_error for evaluation in (here, on_device))

    assert x == pytest.approx(y, rel=of_squared_error(y))


@UNKNOWN
# Bytes of memory: too few for the first buffers, for the weights, for the logits.
@pytest.mark.parametrize("limit", [100, 50_000, 150_000])
def test_too_little_memory_is_an_environment_error(limit, tmp_path):
    original, quantized, tokens = make_files("llama", tmp_path)
    how = {"tokens": tokens, "context": 16, "device": NAME}
    with simulate(limit=limit), pytest.raises(ResourceError, match="memory") as raised:
        quanterr.evaluate(original, [quantized], **how)

    assert 5 == raised.value.status


@UNKNOWN
@pytest.mark.slow  # in its own process: after a backward pass torch accepts no further devices
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_sensitivity_agrees_with_the_cpu(name, tmp_path):
    original, quantized, tokens = make_files(name, tmp_path)
    here = quanterr.evaluate(
        original, [quantized], tokens=tokens, context=16, device="cpu", sensitivity=tmp_path / "s.json"
    )
    words = *map(str, (original, quantized, tokens)), f"sensitivity={tmp_path}/there.json"
    done = call(*words, program=str(Path(simulated_device.__file__)))

    assert 0 == done.returncode, done.stderr[-2000:]
    assert agree(*(figures(json.loads(text)["candidates"][0]) for text in (here.to_json(), done.stdout)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("name", MODELS)
def test_cuda_agrees_with_the_cpu(name, tmp_path):
    original, quantized, tokens = make_files(name, tmp_path)
    here, on_gpu = (
        quanterr.evaluate(original, [quantized], tokens=tokens, context=CONTEXT, device=device).to_json()
        for device in ("cpu", "cuda")
    )
    x, y = (figures(json.loads(text)["candidates"][0]) for text in (here, on_gpu))

    assert pytest.approx(x, rel=1e-3) == y
