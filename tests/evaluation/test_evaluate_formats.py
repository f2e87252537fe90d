"""Golden files as a weight of a running model, compared with the values that their libraries decode."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from support.gguf_stored import LLAMA as LLAMA_KEYS
from support.gguf_stored import Stored, write_gguf
from support.small_models import ids, load_tensors, save_model
from support.tolerances import FLOAT64
from test_evaluate import CONTEXT, compute_expected, plain
from test_evaluate_gguf import LLAMA, convert, rename

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.errors import CheckpointError
from quanterr.evaluation.models import weights as of_models

pytestmark = pytest.mark.session

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')

GOLDEN = Path(__file__).parents[1] / "golden"
UP = "model.layers.0.mlp.up_proj"
# A golden file and its weight.
CASES = [
    ("fp8_tensor/modelopt_fp8", "model.layers.0.self_attn.k_proj"),
    ("fp8_block/fp8_block128_scale_inv", "model.layers.0.mlp.down_proj"),
    ("int8_row/ct_int8_channel", "model.layers.0.self_attn.q_proj"),
    ("gptq/gptq_v1_w4_g32_asym_gptqmodel", "model.layers.0.mlp.down_proj"),
    ("gptq/gptq_v1_w4_g32_descact", "model.layers.0.mlp.down_proj"),
    ("awq_gemm/awq_gemm_g128", "model.layers.0.mlp.down_proj"),
    ("bnb_nf4/bnb_nf4_double_quant", "model.layers.0.mlp.down_proj"),
    ("ct_pack/ct_w4a16_g32_asym", "model.layers.0.mlp.down_proj"),
    ("nvfp4/modelopt_nvfp4_linear_lowfirst", "blocks.1.attn.proj"),
    ("mlx_affine/mlx_4_bits", "group64_2d"),
]


def values_of(case, module):
    return load_file(GOLDEN / f"{case}.expected.safetensors")[f"{module}.weight"]


def model_with(values, folder):
    """Return a one-layer Llama whose up projection is close to these values, and the values with its other weights."""
    rows, cols = values.shape
    tiny = {"hidden_size": cols, "intermediate_size": rows, "num_hidden_layers": 1}
    original = save_model("llama", folder / "original", **tiny)
    tensors = load_tensors(original)
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(3))
    tensors[f"{UP}.weight"] = (values + 0.02 * values.abs().max() * noise).contiguous()
    save_file(tensors, original / "model.safetensors", {"format": "pt"})
    (folder / "plain").mkdir()
    shutil.copy(original / "config.json", folder / "plain")
    save_file(tensors | {f"{UP}.weight": values}, folder / "plain/model.safetensors", {"format": "pt"})
    return original, tensors


def same_as_plain(folder, quantized):
    """Check that the evaluation of a candidate equals plain transformers with its values."""
    tokens = ids(folder, 2 * CONTEXT)
    chunks = load_file(tokens)["ids"].view(-1, CONTEXT)
    how = {"tokens": tokens, "context": CONTEXT, "dtype": "float64", "batch": 2, "activations": "none"}
    evaluation = quanterr.evaluate(folder / "original", [quantized], **how)
    scores = evaluation.candidates[0].scores
    want = compute_expected("llama", *(plain("llama", folder / side, chunks) for side in ("original", "plain")), chunks)

    assert "pass" == evaluation.verdict, evaluation.reasons
    assert pytest.approx(want, rel=FLOAT64) == (scores.ppl_original, scores.ppl, scores.kld_mean)
    assert scores.kld_mean > 1e-9
    assert [UP + ".weight"] == [weight.layer_name for weight in evaluation.candidates[0].weights if weight.output_error]


@pytest.mark.parametrize(("case", "module"), CASES, ids=[case for case, _ in CASES])
def test_golden_weight_predicts_the_same_as_its_library_values(case, module, tmp_path):
    _, tensors = model_with(values_of(case, module), tmp_path)
    source = GOLDEN / case
    parts = load_file(source / "model.safetensors" if source.is_dir() else source.with_suffix(".safetensors"))
    renamed = {name.replace(module, UP): part for name, part in parts.items() if name.startswith(f"{module}.")}
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != f"{UP}.weight"} | renamed,
        quantized / "model.safetensors",
    )
    config = json.loads((tmp_path / "original/config.json").read_text())
    if source.is_dir():
        config |= json.loads((source / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config))

    same_as_plain(tmp_path, quantized)


def test_k_type_predicts_the_same_as_llama_cpp_values(tmp_path):
    case = "gguf_q4_k/llama_quantize"
    _, tensors = model_with(values_of(case, "blk.0.attn_k"), tmp_path)
    (block,) = GGUFReader(GOLDEN / f"{case}.gguf").tensors
    parts = []
    for name, tensor in tensors.items():
        made, _ = convert("llama", name, tensor)
        up = name == f"{UP}.weight"
        raw = block.data.tobytes() if up else made.contiguous().numpy().tobytes()
        parts.append(Stored(rename(name, LLAMA), "Q4_K" if up else "F32", tuple(made.shape), raw))

    same_as_plain(tmp_path, write_gguf(tmp_path / "model.gguf", parts, LLAMA_KEYS))


def test_recipes_are_evaluated_without_a_file(tmp_path):
    """A recipe evaluates like a plain checkpoint that holds the recipe's values."""
    original = save_model("llama", tmp_path / "original")
    tokens = ids(tmp_path)
    tensors = {
        name: quanterr.fake_quantize(tensor, "int4_g8") if "_proj" in name else tensor
        for name, tensor in load_tensors(original).items()
    }
    (tmp_path / "plain").mkdir()
    save_file(tensors, tmp_path / "plain/model.safetensors")
    evaluation = quanterr.evaluate(original, [tmp_path / "plain"], against=["int4_g8"], tokens=tokens, context=CONTEXT)
    plain_scores, recipe = (candidate.scores for candidate in evaluation.candidates)

    assert ["plain", "int4_g8"] == [candidate.name for candidate in evaluation.candidates]
    assert "pass" == evaluation.verdict, evaluation.reasons
    assert plain_scores == recipe


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("case", "module"), [case for case in CASES if "mlx" not in case[0]])  # needs the original
def test_threads_read_the_same_as_a_single_one(case, module, threads, monkeypatch):
    """Pieces have a few rows, and some threads get one more than others."""
    monkeypatch.setattr(of_models, "CPU_CHUNK", 3 * values_of(case, module).shape[1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    folder = GOLDEN / case
    with open_checkpoint(folder if folder.is_dir() else folder.with_suffix(".safetensors")) as checkpoint:
        weights = of_models.OriginalWeights(checkpoint)
        weight = next(weight for name, weight in weights.weights.items() if name.startswith(f"{module}."))

        assert torch.equal(values_of(case, module), weights.whole(weight))


def test_truncated_file_is_named_by_any_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(of_models, "CPU_CHUNK", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    save_file({"a.weight": torch.ones(64, 64)}, path := tmp_path / "a.safetensors")
    with open_checkpoint(path) as checkpoint:
        weights = of_models.OriginalWeights(checkpoint)
        os.truncate(path, path.stat().st_size - 4)
        with pytest.raises(CheckpointError, match=r"a\.safetensors: changed while being read"):
            weights.get("a.weight")
