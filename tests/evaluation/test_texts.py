"""Several texts and conversations: each is scored as if alone, and in a chat only the assistant's tokens are."""

import json
import random
from statistics import fmean

import pytest
import torch
from msgspec.structs import asdict
from support.forked import call
from support.small_models import auto_of, save_model, with_words
from support.tolerances import FLOAT64
from test_evaluate import candidate

import quanterr
from quanterr.errors import UsageError

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')
CONTEXT = 16
TURNS = "{% for m in messages %}w1 {{ 'w2' if m['role'] == 'user' else 'w3' }} {{ m['content'] }} w4 w5 {% endfor %}"
PROMPT = "{% if add_generation_prompt %}w1 w3 {% endif %}"
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}w1 w3 {% generation %}{{ m['content'] }} w4 "
    "{% endgeneration %}w5 {% else %}w1 w2 {{ m['content'] }} w4 w5 {% endif %}{% endfor %}"
)
CONVERSATIONS = [
    [("user", "w10 w11"), ("assistant", "w12"), ("user", "w13"), ("assistant", "w14 w15 w16")],
    [("user", "w20"), ("assistant", "w21 w22")],
    [("user", "w30 w31 w32"), ("assistant", "w33")],
]
# The assistant's tokens, including w4 after them, as numbers of words; then the whole as the template makes it.
SCORED = [[12, 4, 14, 15, 16, 4], [21, 22, 4], [33, 4]]
WHOLE_CHUNKS = [
    [1, 2, 10, 11, 4, 5, 1, 3, 12, 4, 5, 1, 2, 13, 4, 5, 1, 3, 14, 15, 16, 4, 5],
    [1, 2, 20, 4, 5, 1, 3, 21, 22, 4, 5],
    [1, 2, 30, 31, 32, 4, 5, 1, 3, 33, 4, 5],
]
PLACES = [[8, 9, 18, 19, 20, 21], [7, 8, 9], [9, 10]]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model with a tokenizer, a candidate with its plain values, two texts and conversations."""
    folder = tmp_path_factory.mktemp("texts")
    original = save_model("llama", folder / "original")
    with_words(original)
    template(original, TURNS + PROMPT)
    quantized, values = candidate(original)
    for name, words in (("prose", 90), ("code", 20)):
        draw = random.Random(words)
        (folder / f"{name}.txt").write_text(" ".join(f"w{draw.randrange(words)}" for _ in range(8 * CONTEXT)))
    lines = [{"messages": [{"role": r, "content": c} for r, c in conversation]} for conversation in CONVERSATIONS]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder, original, quantized, values


def template(original, text):
    path = original / "tokenizer_config.json"
    path.write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": text, "eos_token": "w4"})
    )


def plain_kld(original, values):
    """Return the divergences of the scored tokens in all conversations, by transformers alone."""
    x, y = (auto_of("llama").from_pretrained(folder, dtype=torch.float64).eval() for folder in (original, values))
    divergences = []
    with torch.inference_mode():
        for ids, places in zip(WHOLE_CHUNKS, PLACES, strict=True):
            log_p, log_q = (model(torch.tensor([ids])).logits[0].log_softmax(-1) for model in (x, y))
            kld = (log_p.exp() * (log_p - log_q)).sum(-1)
            divergences.append([float(kld[place - 1]) for place in places])
    return divergences


class TestSeveralTexts:
    def test_each_text_has_the_same_scores_as_separately(self, files):
        folder, original, quantized, _ = files
        options = {"context": CONTEXT, "dtype": "float64"}
        both = quanterr.evaluate(
            original, [quantized], text=[f"first={folder / 'prose.txt'}", folder / "code.txt"], **options
        )
        alone = [
            quanterr.evaluate(original, [quantized], text=folder / f"{n}.txt", **options) for n in ("prose", "code")
        ]
        [candidate] = both.candidates

        assert ["first", "code"] == [text.name for text in candidate.texts] == [text.name for text in both.texts]
        assert [scores_alone.tokens for scores_alone in alone] == [text.tokens for text in both.texts]
        for text, scores_alone in zip(candidate.texts, alone, strict=True):
            for key, value in asdict(scores_alone.candidates[0].scores).items():
                assert asdict(text.scores)[key] == pytest.approx(value, rel=FLOAT64), key
        assert candidate.scores.tokens == sum(text.scores.tokens for text in candidate.texts)
        assert candidate.scores.kld_mean == pytest.approx(fmean(text.scores.kld_mean for text in candidate.texts))
        assert alone[0].texts == alone[0].candidates[0].texts == []

    def test_gates_name_texts_and_their_mean(self, files):
        folder, original, quantized, _ = files
        texts = [folder / "prose.txt", folder / "code.txt"]
        rules = ["max(text_kld_mean) <= 100", "mean(text_top1) >= 0", "text_ppl_ratio <= 0.1"]
        candidate = quanterr.evaluate(original, [quantized], text=texts, context=CONTEXT, require=rules).candidates[0]

        assert ["pass", "pass", "fail"] == [gate.status for gate in candidate.gates]
        assert {"prose", "code"} == {violation.layer for violation in candidate.gates[2].violations}

    def test_two_texts_with_the_same_name_are_refused(self, files):
        folder, original, quantized, _ = files
        with pytest.raises(UsageError, match="two texts are called prose; name them"):
            quanterr.evaluate(original, [quantized], text=[folder / "prose.txt", f"prose={folder / 'code.txt'}"])

    @pytest.mark.session
    def test_command_shows_a_row_per_text_and_a_macro_average(self, files):
        folder, original, quantized, _ = files
        done = call(
            "evaluate", original, quantized, "--text", f"prose={folder / 'prose.txt'}", "--chat", folder / "chat.jsonl",
            "--context", 32, "--chunks", 3, "-v",
        )  # fmt: skip

        assert 0 == done.returncode, done.stderr
        assert all(name in done.stdout for name in ("By text", "prose", "chat", "macro average"))


class TestChat:
    @pytest.mark.parametrize("text", [TURNS + PROMPT, MARKED], ids=["by prefixes", "by marks"])
    def test_only_assistant_tokens_are_scored(self, files, text):
        folder, original, quantized, values = files
        template(original, text)
        try:
            options = {"chat": folder / "chat.jsonl", "context": 64, "dtype": "float64"}
            evaluation = quanterr.evaluate(original, [quantized], **options)
        finally:
            template(original, TURNS + PROMPT)
        scores, want = evaluation.candidates[0].scores, plain_kld(original, values)

        assert [[whole[p] for p in places] for whole, places in zip(WHOLE_CHUNKS, PLACES, strict=True)] == SCORED
        assert (3, 11) == (scores.chunks, scores.tokens)
        assert [fmean(divergences) for divergences in want] == pytest.approx(scores.kld_chunks, rel=FLOAT64)
        assert scores.kld_mean == pytest.approx(fmean(kld for divergences in want for kld in divergences), rel=FLOAT64)
        means = [(len(divergences), fmean(divergences)) for divergences in want]
        apart = sum((n * 3 / 11 * (mean - scores.kld_mean)) ** 2 for n, mean in means)
        assert scores.kld_mean_chunk_se == pytest.approx((apart / 2 / 3) ** 0.5, rel=FLOAT64)

    def test_template_that_rewrites_earlier_turns_is_refused(self, files):
        folder, original, quantized, _ = files
        template(original, "w{{ messages | length }} " + TURNS + PROMPT)
        try:
            with pytest.raises(UsageError, match="line 1: the chat template rewrites what it made of earlier messages"):
                quanterr.evaluate(original, [quantized], chat=folder / "chat.jsonl")
        finally:
            template(original, TURNS + PROMPT)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("x", "line 1: not JSON"),
            ('{"role": "user"}', "line 1: no conversation"),
            ('[{"role": "user", "content": "w1"}]', "line 1: has no message of the assistant"),
            ("", "no assistant's token is among the first 16 tokens"),
        ],
    )
    def test_invalid_conversation_is_named(self, files, tmp_path, line, message):
        _, original, quantized, _ = files
        (tmp_path / "c.jsonl").write_text(line)
        with pytest.raises(UsageError, match=message):
            quanterr.evaluate(original, [quantized], chat=tmp_path / "c.jsonl", context=CONTEXT)

    def test_tokenizer_without_a_template_is_named(self, files):
        folder, original, quantized, _ = files
        (original / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        try:
            with pytest.raises(UsageError, match="has no chat template"):
                quanterr.evaluate(original, [quantized], chat=folder / "chat.jsonl")
        finally:
            template(original, TURNS + PROMPT)
