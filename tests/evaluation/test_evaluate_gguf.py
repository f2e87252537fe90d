"""GGUF files in the original's model: reordered rows of q and k, norms plus one, transposed and negated weights.

The values are those that llama.cpp's own Python package decodes.
"""

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gguf_stored import F32, U32, Stored, architecture, key, pair_rows, write_gguf
from support.small_models import auto_of, ids, load_tensors, save_model
from support.tolerances import FLOAT64
from test_evaluate import CONTEXT, EXACTLY, compute_expected, plain

import quanterr

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')

Q8_0 = gguf.GGMLQuantizationType.Q8_0
LLAMA = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
GEMMA = LLAMA | {"post_attention_layernorm": "post_attention_norm"}
GPT2 = {"attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
        "ln_1": "attn_norm", "ln_2": "ffn_norm"}  # fmt: skip
MAMBA = {"mixer.in_proj": "ssm_in", "mixer.x_proj": "ssm_x", "mixer.dt_proj": "ssm_dt", "mixer.out_proj": "ssm_out",
         "mixer.conv1d": "ssm_conv1d", "mixer.A_log": "ssm_a", "mixer.D": "ssm_d", "norm": "attn_norm"}  # fmt: skip
NAMES_OUTSIDE_BLOCKS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
         "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
         "backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm"}  # fmt: skip


def rename(name, blocks):
    """Return llama.cpp's name; A_log and D lack .weight."""
    path, _, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
    match = re.fullmatch(r"(?:model|transformer|backbone)\.(?:layers|h)\.(\d+)\.(.+)", path)
    llama_name = f"blk.{match[1]}.{blocks[match[2]]}" if match else NAMES_OUTSIDE_BLOCKS[path]
    return f"{llama_name}.{suffix}" if suffix else llama_name


def convert(family, name, values):
    """Return a tensor as llama.cpp's converter stores it, and the function that restores it."""
    if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = 4 if "q_proj" in name else 2
        order = torch.from_numpy(pair_rows(torch.arange(len(values)).float(), heads).numpy()).long()
        return values[order], lambda stored: torch.empty_like(stored).index_copy_(0, order, stored)
    if family == "gemma2" and "norm" in name:
        return values + 1, lambda stored: stored - 1
    if family == "gpt2" and re.search(r"c_(attn|proj|fc)\.weight$", name):
        return values.t().contiguous(), lambda stored: stored.t().contiguous()
    if name.endswith("A_log"):
        return -values.exp(), lambda stored: (-stored).log()
    if name.endswith("conv1d.weight"):
        return values.squeeze(1), lambda stored: stored.unsqueeze(1)
    return values, lambda stored: stored


def write(family, folder, blocks, path, keys=()):
    """Write a saved model as GGUF with matrices in Q8_0, and return the values it stands for by original names."""
    tensors, values = [], {}
    for name, tensor in load_tensors(folder).items():
        made, back = convert(family, name, tensor.float())
        llama_name = rename(name, blocks)
        array = np.ascontiguousarray(made.numpy())
        if array.ndim == 2 and array.shape[1] % 32 == 0 and not llama_name.startswith(("position", "blk.0.ssm_conv")):
            raw = gguf.quants.quantize(array, Q8_0)
            tensors.append(Stored(llama_name, "Q8_0", array.shape, raw.tobytes()))
            made = torch.from_numpy(gguf.quants.dequantize(raw, Q8_0)).reshape(made.shape)
        else:
            tensors.append(Stored(llama_name, "F32", array.shape, array.tobytes()))
        values[name] = back(made).contiguous()
    return write_gguf(path, tensors, [*architecture(family), *keys]), values


@pytest.mark.parametrize(
    ("family", "name", "blocks"),
    [("llama", "llama", LLAMA), ("gemma2", "gemma2", GEMMA), ("gpt2", "gpt2", GPT2), ("mamba", "mamba", MAMBA)],
    ids=["llama", "gemma2", "gpt2", "mamba"],
)
def test_gguf_file_predicts_the_same_as_its_values(family, name, blocks, tmp_path):
    original = save_model(name, tmp_path / "original")
    path, values = write(family, original, blocks, tmp_path / "model.gguf")
    (tmp_path / "plain").mkdir()
    save_file(values, tmp_path / "plain/model.safetensors", {"format": "pt"})
    (tmp_path / "plain/config.json").write_text((original / "config.json").read_text())
    tokens = ids(tmp_path)
    chunks = load_file(tokens)["ids"].view(-1, CONTEXT)
    weights = {"activations": "none"}
    evaluation = quanterr.evaluate(original, [path], tokens=tokens, context=CONTEXT, **EXACTLY, **weights)
    scores = evaluation.candidates[0].scores
    want = compute_expected(name, *(plain(name, folder, chunks) for folder in (original, tmp_path / "plain")), chunks)

    assert ("pass", []) == (evaluation.verdict, evaluation.candidates[0].missing), evaluation.reasons
    assert pytest.approx(want, rel=FLOAT64) == (scores.ppl_original, scores.ppl, scores.kld_mean)
    assert 0 < scores.kld_mean < 0.01
    assert all(weight.output_error < 1e-3 for weight in evaluation.candidates[0].weights)


def round_q8_0(x):
    """Round as llama.cpp does on x86: 127 / amax in float32, amax / 127 in float16."""
    blocks = x.float().reshape(*x.shape[:-1], -1, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    codes = (blocks * (torch.tensor(127.0) / largest)).round()
    return (codes * (largest / 127).half().float()).reshape(x.shape).to(x.dtype)


def test_inputs_are_rounded_as_in_llama_cpp(tmp_path):
    original = save_model("llama", tmp_path / "original")
    path, values = write("llama", original, LLAMA, tmp_path / "model.gguf")
    tokens = ids(tmp_path)
    chunks = load_file(tokens)["ids"].view(-1, CONTEXT)
    candidate = quanterr.evaluate(original, [path], tokens=tokens, context=CONTEXT, **EXACTLY).candidates[0]
    model = auto_of("llama").from_pretrained(original, dtype=torch.float64).eval()
    model.load_state_dict(values)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.in_features % 32 == 0:  # others are stored as F32
            module.register_forward_pre_hook(lambda _, args: (round_q8_0(args[0]),))
    with torch.inference_mode():
        logits = model(input_ids=chunks, use_cache=False).logits
    *_, kld = compute_expected("llama", plain("llama", original, chunks), logits, chunks)

    assert ({"q8_0": 13}, "pass") == (candidate.activations, candidate.verdict), candidate.reasons
    assert kld == pytest.approx(candidate.scores.kld_mean, rel=1e-6)


def test_transformers_own_gguf_reader_gives_the_same(tmp_path):
    """transformers derives the model from the file's keys and dequantizes with llama.cpp's package."""
    pytest.importorskip("accelerate", reason="accelerate is not installed (pip install -e '.[dev]')")
    from transformers import AutoModelForCausalLM

    original = save_model("llama", tmp_path / "original")
    sizes = {"block_count": 2, "context_length": 128, "embedding_length": 32, "feed_forward_length": 48}
    sizes |= {"rope.dimension_count": 8, "vocab_size": 96}
    keys = [key(f"llama.{name}", U32, size) for name, size in sizes.items()]
    keys.append(key("llama.attention.layer_norm_rms_epsilon", F32, 1e-6))
    path, _ = write("llama", original, LLAMA, tmp_path / "model.gguf", keys)
    tokens = ids(tmp_path)
    chunks = load_file(tokens)["ids"].view(-1, CONTEXT)
    weights = {"activations": "none"}
    evaluation = quanterr.evaluate(original, [path], tokens=tokens, context=CONTEXT, **EXACTLY, **weights)
    scores = evaluation.candidates[0].scores
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float64).eval()
        logits = model(input_ids=chunks, use_cache=False).logits
    want = compute_expected("llama", plain("llama", original, chunks), logits, chunks)

    assert pytest.approx(want, rel=FLOAT64) == (scores.ppl_original, scores.ppl, scores.kld_mean)
    assert scores.kld_mean > 1e-6


PERPLEXITY = Path(__file__).parents[1] / "golden_evaluation"  # make.py there made this model with llama.cpp
PRINTED = json.loads((PERPLEXITY / "expected.json").read_text())
PRINTED_DIGITS = {"abs": 1e-5, "rel": 1e-6}  # printed digits; the original's logarithms are kept in 16 bits


@pytest.fixture(scope="module")
def scores():
    evaluation = quanterr.evaluate(
        PERPLEXITY / "original",
        [PERPLEXITY / "q4_0.gguf"],
        tokens=PERPLEXITY / "ids.safetensors",
        context=64,
        activations="none",
    )
    return evaluation.candidates[0].scores


@pytest.mark.parametrize("name", PRINTED)
def test_scores_equal_llama_perplexity(scores, name):
    value, *error = PRINTED[name]
    assert value == pytest.approx(getattr(scores, name), **PRINTED_DIGITS)
    if error:
        assert error[0] == pytest.approx(getattr(scores, f"{name}_se"), **PRINTED_DIGITS)
