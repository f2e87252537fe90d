"""A draft model for speculative decoding: how many of its tokens are accepted, compared with plain transformers."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import save_file
from support.forked import call
from support.small_models import auto_of, ids, load_tensors, save_model, with_words

import quanterr
from quanterr.errors import UsageError

pytestmark = pytest.mark.session

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')
CONTEXT = 16
FLOAT64 = 1e-9  # both sides compute in float64
WORDS = 91  # tokens of the tokenizer
DRAFT_SIZES = {"num_hidden_layers": 1, "hidden_size": 16, "vocab_size": 92}  # fewer unused rows than the original's 96


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """An original, a draft with the same tokens, and a text."""
    folder = tmp_path_factory.mktemp("drafts")
    original, draft = save_model("llama", folder / "original"), save_model("llama", folder / "small", **DRAFT_SIZES)
    with_words(original)
    with_words(draft)
    draw = random.Random(0)
    (folder / "text").write_text(" ".join(f"w{draw.randrange(90)}" for _ in range(8 * CONTEXT)))
    return folder, original, draft


@pytest.fixture(scope="module")
def evaluation(files):
    folder, original, draft = files
    return quanterr.evaluate(
        original, against="int4_g32", draft=draft, text=folder / "text", context=CONTEXT, dtype="float64"
    )


def distributions(folder, chunks, rows):
    """Return a plain model's predictions for the second half of each chunk, from the first rows of its head."""
    model = auto_of("llama").from_pretrained(folder, dtype=torch.float64).eval()
    with torch.inference_mode():
        return model(input_ids=chunks).logits[:, CONTEXT // 2 : -1, :rows].softmax(-1)


def test_acceptance_equals_rejection_sampling_with_a_plain_model(files, evaluation):
    """By Leviathan et al. (2023), x ~ q is accepted with probability min(1, p(x) / q(x))."""
    folder, original, draft = files
    chunks = torch.tensor([int(word[1:]) for word in (folder / "text").read_text().split()]).view(-1, CONTEXT)
    p, q = (distributions(path, chunks, DRAFT_SIZES["vocab_size"]) for path in (original, draft))
    accepted = (q * (p / q).clamp(max=1)).sum(-1)
    candidate = evaluation.candidates[1]

    assert ("small, draft", True, "pass") == (candidate.name, candidate.draft, candidate.verdict)
    assert pytest.approx(float(accepted.mean()), rel=FLOAT64) == candidate.scores.acceptance
    chunk_se = float(accepted.mean(-1).std()) / len(accepted) ** 0.5
    assert pytest.approx(chunk_se, rel=FLOAT64) == candidate.scores.acceptance_chunk_se
    kld = float((p * (p / q).log()).sum(-1).mean())
    assert pytest.approx(kld, rel=FLOAT64) == candidate.scores.kld_mean


def test_draft_does_not_change_other_candidates(files, evaluation):
    folder, original, _ = files
    alone = quanterr.evaluate(original, against="int4_g32", text=folder / "text", context=CONTEXT, dtype="float64")

    assert alone.candidates[0] == evaluation.candidates[0]
    assert 0.5 < alone.candidates[0].scores.acceptance < 1


def test_original_as_its_own_draft_is_always_accepted(files):
    folder, original, _ = files
    copy = shutil.copytree(original, folder / "copy")
    scores = quanterr.evaluate(original, draft=copy, text=folder / "text", context=CONTEXT).candidates[0].scores

    assert pytest.approx(1, abs=96 * 2.0**-53) == scores.acceptance
    assert 0 == scores.kld_mean


def test_command_shows_the_draft_first_and_gates_judge_it(files, tmp_path):
    folder, original, draft = files
    done = call(
        "evaluate", original, "--draft", draft, "--text", folder / "text", "--context", CONTEXT,
        "--require", "lower(acceptance) >= 0.9", "-o", tmp_path / "e.json",
    )  # fmt: skip
    candidate = json.loads((tmp_path / "e.json").read_text())["candidates"][0]

    assert 1 == done.returncode
    assert "small, draft: acceptance " in done.stdout
    assert "fail" == candidate["gates"][0]["status"]
    assert candidate["gates"][0]["observed"] < candidate["scores"]["acceptance"]


def other_word(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"w7"', '"v7"'))


def no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def few_rows(folder):
    shutil.rmtree(folder)
    save_model("llama", folder, **DRAFT_SIZES | {"vocab_size": WORDS - 1})
    with_words(folder)


def encoder(folder):
    shutil.rmtree(folder)
    save_model("bert", folder)


REFUSED = [
    (other_word, 'small: another vocabulary: token 7 is "v7", the original\'s is "w7"'),
    (no_tokenizer, r"small/tokenizer\.json is missing: are both vocabularies the same"),
    (few_rows, "small: heads of 90 and 96 rows: one lacks tokens of the vocabulary"),
    (encoder, "small: works only with models that predict the next token; bert does not"),
]


@pytest.mark.parametrize(("change", "why"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_another_vocabulary_or_model_kind_is_refused(files, tmp_path, change, why):
    folder, original, draft = files
    change(shutil.copytree(draft, tmp_path / "small"))

    with pytest.raises(UsageError, match=why):
        quanterr.evaluate(original, draft=tmp_path / "small", text=folder / "text", context=CONTEXT)


def test_drafts_without_tokenizers_must_agree_in_size_and_are_inconclusive(tmp_path):
    original, draft = (
        save_model("llama", tmp_path / "original"),
        save_model("llama", tmp_path / "small", num_hidden_layers=1),
    )
    tokens = ids(tmp_path)
    evaluation = quanterr.evaluate(original, draft=draft, tokens=tokens, context=CONTEXT)

    assert "inconclusive" == evaluation.verdict
    assert "whether the same ids are the same tokens was not checked" in evaluation.reasons[0]
    few = save_model("llama", tmp_path / "few", vocab_size=95)
    with pytest.raises(UsageError, match="few: another vocabulary: 95 tokens, the original has 96"):
        quanterr.evaluate(original, draft=few, tokens=tokens, context=CONTEXT)


def test_draft_that_is_not_finite_has_no_scores(files, tmp_path):
    folder, original, draft = files
    broken = shutil.copytree(draft, tmp_path / "small")
    tensors = load_tensors(broken)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    evaluation = quanterr.evaluate(original, draft=broken, text=folder / "text", context=CONTEXT)

    assert ("inconclusive", None) == (evaluation.verdict, evaluation.candidates[0].scores)
    assert "small, draft: not finite from model.norm on" == evaluation.reasons[0]


def test_draft_needs_the_original(files, tmp_path):
    folder, _, draft = files

    with pytest.raises(UsageError, match="draft: needs the original, and reference has none of its weights"):
        quanterr.evaluate("q.gguf", draft=draft, reference=tmp_path, text=folder / "text")
