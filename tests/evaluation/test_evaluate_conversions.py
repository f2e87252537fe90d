"""Files whose converters reorder, join and change tensors predict the same as their restored values.

The values are those that llama.cpp's own Python package decodes; transformers runs them as a plain model.
"""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.conversions import materialize, put_back, read_conversion
from support.small_models import ids
from test_evaluate import CONTEXT, EXACTLY, compute_expected

import quanterr

pytestmark = pytest.mark.session

transformers = pytest.importorskip("transformers", reason='not installed (pip install "quanterr[evaluate]")')

# Numbers that a converter changed are changed back in float32, to 2^-24 of themselves; Q8_0 rounds a weight by some
# 2^-8, and a divergence is quadratic in that: each is off by 2 · 2^-24 / 2^-8 of itself if all errors have one sign,
# and sums of hundreds of numbers of either sign differ by less than a third of that.
CHANGED_IN_FLOAT32 = 1e-5
SLOW = pytest.mark.slow


def logits(folder, chunks):
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0])
    model = model.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    with torch.inference_mode():
        return model(input_ids=chunks, use_cache=False).logits


@pytest.mark.parametrize(
    "name", ["qwen3_5", pytest.param("falcon_h1", marks=SLOW), pytest.param("gemma4_moe", marks=SLOW)]
)
def test_converted_file_predicts_the_same_as_its_values(name, tmp_path):
    conversion = read_conversion(f"llama.cpp-{name}")
    made = materialize(conversion, tmp_path)
    values = put_back(conversion, made.read)
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file({n: torch.from_numpy(x.astype(np.float32)) for n, x in values.items()}, plain / "model.safetensors")
    (plain / "config.json").write_text((made.original / "config.json").read_text())
    tokens = ids(tmp_path)
    chunks = load_file(tokens)["ids"].view(-1, CONTEXT)
    evaluation = quanterr.evaluate(
        made.original, [made.quantized / "model.gguf"], tokens=tokens, context=CONTEXT, activations="none", **EXACTLY
    )
    scores = evaluation.candidates[0].scores
    want = compute_expected(name, *(logits(folder, chunks) for folder in (made.original, plain)), chunks)

    assert ("pass", []) == (evaluation.verdict, evaluation.candidates[0].missing), evaluation.reasons
    assert 0 < scores.kld_mean < 0.01
    assert pytest.approx(want, rel=CHANGED_IN_FLOAT32) == (scores.ppl_original, scores.ppl, scores.kld_mean)
