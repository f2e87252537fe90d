"""Where an evaluation computes: the same numbers on every device."""

import json
from pathlib import Path

import pytest
import torch
from forked import call
from small_models import ids, saved
from test_evaluate import CONTEXT, candidate

import quanterr
from quanterr.errors import ResourceError

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')

SCORES = ("ppl_original", "ppl", "kld_mean")


def made(name, folder):
    original = saved(name, folder / "original")
    return original, candidate(original)[0], ids(folder)


def figures(candidate):
    """Scores, errors of blocks and of weights, and predictions of an evaluation, as they are in its JSON."""
    found = {name: (candidate["scores"] or {}).get(name) for name in SCORES}
    found |= {name: (candidate["embeddings"] or {}).get(name) for name in ("cosine_mean", "relative_error")}
    found |= {block["name"]: block["relative_error"] for block in candidate["blocks"]}
    for weight in candidate["weights"]:
        found[weight["layer_name"]], found[weight["layer_name"] + ": predicted"] = (
            weight["output_error"],
            weight["predicted_kld"],
        )
    return {name: figure for name, figure in found.items() if figure is not None}


def test_one_that_is_not_there_is_a_matter_of_the_machine(tmp_path):
    original, quantized, tokens = made("llama", tmp_path)

    with pytest.raises(ResourceError, match="try --device cpu"):
        quanterr.evaluate(original, [quantized], tokens=tokens, context=CONTEXT, device="cuda:99")


@pytest.mark.slow  # a process of its own: torch is told of another device, once and for all
@pytest.mark.skipif(torch.__version__ < "2.9", reason="a torch without devices that are written in Python")
@pytest.mark.parametrize("name", ["llama", "mixtral", "bert"])
def test_everything_is_moved_to_the_device(name, tmp_path):
    original, quantized, tokens = made(name, tmp_path)
    more = {"sensitivity": tmp_path / "s.json"} if name in ("llama", "mixtral") else {}
    here = quanterr.evaluate(original, [quantized], tokens=tokens, context=16, device="cpu", **more)
    script = Path(__file__).with_name("stand_in_device.py")
    words = [*map(str, (original, quantized, tokens)), *(f"{key}={path}.there" for key, path in more.items())]
    done = call(*words, program=str(script))

    assert 0 == done.returncode, done.stderr[-2000:]
    x, y = (figures(json.loads(text)["candidates"][0]) for text in (here.to_json(), done.stdout))
    assert pytest.approx(x, rel=1e-4) == y


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("name", ["llama", "llama tied", "mixtral", "gemma3", "gpt2", "mamba", "t5", "bert"])
def test_cuda_agrees_with_the_cpu(name, tmp_path):
    original, quantized, tokens = made(name, tmp_path)
    here, there = (
        quanterr.evaluate(original, [quantized], tokens=tokens, context=CONTEXT, device=device).to_json()
        for device in ("cpu", "cuda")
    )
    x, y = (figures(json.loads(text)["candidates"][0]) for text in (here, there))

    assert pytest.approx(x, rel=1e-3) == y
