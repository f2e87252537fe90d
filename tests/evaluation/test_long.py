"""Long contexts: logits and attention in pieces give the same as the whole."""

import json

import pytest
import torch
from msgspec.structs import asdict
from safetensors.torch import save_file
from support.small_models import ids, load_tensors, save_model
from test_texts import CONVERSATIONS, PROMPT, TURNS, template, with_words
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import quanterr
from quanterr.evaluation.run import study
from quanterr.evaluation.running import attention, logits
from quanterr.evaluation.running.model_run import ModelRun

pytestmark = pytest.mark.session

FLOAT64 = 1e-9  # sums in another order
CONTEXT = 48
OPTIONS = {"context": CONTEXT, "dtype": "float64", "batch": 2}


def in_pieces(patch, rows=5):
    """Let a piece hold at most so many rows of logits for two chunks, and at most 7 queries of attention."""
    patch.setattr(logits, "MAX_LOGITS", 0)
    patch.setattr(logits, "PIECE_LOGITS", rows * 2 * 96)
    patch.setattr(attention, "MAX_ELEMENTS", 7 * CONTEXT)
    patch.setattr(attention, "MIN_SHARED_ELEMENTS", 0)


def alike(first, second):
    """Return whether two evaluations have the same numbers, up to the order of sums."""
    for x, y in zip(first.candidates, second.candidates, strict=True):
        assert (x.name, x.verdict, x.not_finite) == (y.name, y.verdict, y.not_finite)
        for key, value in asdict(x.scores).items():
            same = None if value is None else pytest.approx(value, rel=FLOAT64, abs=1e-12)
            assert same == asdict(y.scores)[key], key
        assert [a.kld_mean for a in x.positions] == pytest.approx([b.kld_mean for b in y.positions], rel=FLOAT64)
        for a, b in zip(x.weights, y.weights, strict=True):
            assert (a.layer_name, a.block) == (b.layer_name, b.block)
            assert pytest.approx(a.output_error, rel=FLOAT64) == b.output_error
    return True


# With or without a separate head, a soft cap after it, its own attention, windows, logits of all positions.
@pytest.mark.parametrize("name", ["llama", "llama tied", "gemma2", "gpt_oss", "mistral", "mixtral", "mamba"])
def test_pieces_give_the_same_as_the_whole(name, tmp_path, monkeypatch):
    original, tokens = save_model(name, tmp_path / "original"), ids(tmp_path, 4 * CONTEXT)
    whole = quanterr.evaluate(original, against="int8_row", tokens=tokens, **OPTIONS)
    in_pieces(monkeypatch)
    calls, compute = [], ModelRun.compute
    monkeypatch.setattr(ModelRun, "compute", lambda *given: calls.append(given[1:]) or compute(*given))

    assert alike(whole, quanterr.evaluate(original, against="int8_row", tokens=tokens, **OPTIONS))
    assert {(-24, -19), (-4, 0)} <= set(calls)


def test_drafts_and_the_floor_work_in_pieces(tmp_path, monkeypatch):
    original, draft = (
        save_model("llama", tmp_path / "original"),
        save_model("llama", tmp_path / "small", num_hidden_layers=1),
    )
    half = {name: tensor.bfloat16() for name, tensor in load_tensors(original).items()}
    save_file(half, original / "model.safetensors", {"format": "pt"})
    tokens = ids(tmp_path, 4 * CONTEXT)
    whole = quanterr.evaluate(original, draft=draft, tokens=tokens, **OPTIONS)
    in_pieces(monkeypatch)
    evaluation = quanterr.evaluate(original, draft=draft, tokens=tokens, **OPTIONS)

    assert alike(whole, evaluation)
    assert whole.floor.scores.kld_mean > 0
    # The floor computes in bfloat16.
    assert pytest.approx(whole.floor.scores.kld_mean, rel=1e-4) == evaluation.floor.scores.kld_mean


def test_conversations_work_in_pieces(tmp_path, monkeypatch):
    original = save_model("llama", tmp_path / "original")
    with_words(original)
    template(original, TURNS + PROMPT)
    lines = [{"messages": [{"role": r, "content": c} for r, c in conversation]} for conversation in CONVERSATIONS]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = {"against": "int8_row", "chat": tmp_path / "chat.jsonl", **OPTIONS}
    whole = quanterr.evaluate(original, **options)
    in_pieces(monkeypatch, 1)

    assert alike(whole, quanterr.evaluate(original, **options))


def test_model_with_changed_head_inputs_runs_without_pieces(tmp_path, monkeypatch):
    """The code after the model's body would change the hidden states a second time."""

    def forward(self, input_ids, use_cache=None, logits_to_keep=0):
        hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(2 * hidden[:, -logits_to_keep:]))

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    original, tokens = save_model("llama", tmp_path / "original"), ids(tmp_path, 4 * CONTEXT)
    whole = quanterr.evaluate(original, against="int8_row", tokens=tokens, **OPTIONS)
    in_pieces(monkeypatch)

    assert alike(whole, quanterr.evaluate(original, against="int8_row", tokens=tokens, **OPTIONS))


def test_reference_works_in_pieces(tmp_path, monkeypatch):
    original, tokens = save_model("llama", tmp_path / "original"), ids(tmp_path, 4 * CONTEXT)
    in_pieces(monkeypatch)
    study(original, save_reference=tmp_path / "reference", tokens=tokens, **OPTIONS)
    beside = quanterr.evaluate(original, kv="fp8", tokens=tokens, **OPTIONS)
    calls, compute = [], ModelRun.compute
    monkeypatch.setattr(ModelRun, "compute", lambda *given: calls.append(given[1:]) or compute(*given))
    evaluation = quanterr.evaluate(original, reference=tmp_path / "reference", kv="fp8", tokens=tokens, **OPTIONS)

    assert beside.candidates[0].scores == evaluation.candidates[0].scores
    assert (-24, -19) in calls


def test_equal_masks_are_shared(tmp_path, monkeypatch):
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    in_pieces(monkeypatch)
    with attention.attention_in_pieces():
        how = {"batch_size": 1, "q_length": CONTEXT, "kv_length": CONTEXT, "allow_is_causal_skip": False}
        first, second = (MASKS["sdpa"](**how, device=torch.device("cpu")) for _ in range(2))
        other = MASKS["sdpa"](**how | {"q_length": 8}, device=torch.device("cpu"))

    assert first is second
    assert other is not first


def test_long_context_keys_are_rounded_whole(tmp_path, monkeypatch):
    original = save_model("mistral", tmp_path / "original")
    tokens = ids(tmp_path, 4 * CONTEXT)
    whole = quanterr.evaluate(original, kv="fp8_head", tokens=tokens, **OPTIONS)
    in_pieces(monkeypatch)

    assert alike(whole, quanterr.evaluate(original, kv="fp8_head", tokens=tokens, **OPTIONS))
