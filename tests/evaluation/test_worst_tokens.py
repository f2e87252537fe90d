"""Divergence by position and the worst tokens, compared with plain transformers; token text is shown as text only."""

from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from support.hostile_names import SHORT_NAMES
from support.markup_checks import CHECKS, STORABLE, check_lines, page_of, render
from support.sample_documents import evaluation as sample
from support.small_models import ids, save_model, with_words
from support.tolerances import FLOAT64
from test_evaluate import CONTEXT, EXACTLY, candidate, plain

import quanterr
from quanterr.documents.evaluation.model import LikelyToken, PositionScores, WorstToken
from quanterr.evaluation.running.batches import Batch
from quanterr.evaluation.running.workload import CAUSAL, Measures
from quanterr.outputs.card import format_numbers
from quanterr.outputs.sections import Chart
from quanterr.outputs.terminal import make_console, show

pytestmark = pytest.mark.session

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')


def measure(folder, name):
    """Return an evaluation and both sides' probabilities by plain transformers: (chunks, positions, vocabulary)."""
    original, tokens = save_model(name, folder / "original"), ids(folder)
    with_words(original)
    quantized, values = candidate(original)
    chunks = load_file(tokens)["ids"].view(-1, CONTEXT)
    evaluation = quanterr.evaluate(original, [quantized], tokens=tokens, context=CONTEXT, **EXACTLY)
    half = CONTEXT // 2
    rows = slice(None) if name == "t5" else slice(half, -1)
    x, y = (plain(name, path, chunks)[:, rows].double().log_softmax(-1) for path in (original, values))
    return evaluation.candidates[0], x, y, chunks, half if name == "t5" else half + 1


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_positions_and_tokens_equal_plain_transformers(name, tmp_path):
    evaluated, x, y, chunks, begin = measure(tmp_path, name)
    kld = (x.exp() * (x - y)).sum(-1)
    by_position = kld.mean(0).tolist()
    chunk, place = divmod(int(kld.argmax()), kld.shape[1])
    worst, target = evaluated.worst_tokens[0], int(chunks[chunk, begin + place])
    p, q = x[chunk, place].exp(), y[chunk, place].exp()

    assert [(n, n, 3) for n in range(begin, CONTEXT)] == [
        (item.first, item.last, item.predictions) for item in evaluated.positions
    ]
    assert by_position == pytest.approx([item.kld_mean for item in evaluated.positions], rel=FLOAT64)
    assert (chunk, begin + place, "ids") == (worst.chunk, worst.position, worst.source)
    assert float(kld.max()) == pytest.approx(worst.kld, rel=FLOAT64)
    assert (target, int(p.argmax()), int(q.argmax())) == (
        worst.token.id,
        worst.predicted_original.id,
        worst.predicted.id,
    )
    assert [float(value) for value in (p[target], q[target], p.max(), q.max())] == pytest.approx(
        [worst.token.p_original, worst.token.p, worst.predicted_original.p_original, worst.predicted.p], rel=FLOAT64
    )
    assert sorted(kld.flatten().tolist(), reverse=True) == pytest.approx(
        [item.kld for item in evaluated.worst_tokens], rel=FLOAT64
    )
    before = chunks[chunk, max(begin + place - 16, 0) : begin + place].tolist()
    words = [f"w{n}" if n < 90 else "[UNK]" if n == 90 else "" for n in before]
    assert " ".join(filter(None, words)) == worst.before


def test_position_spans_have_the_same_width(tmp_path):
    original, tokens = save_model("llama", tmp_path / "original"), ids(tmp_path, 192)
    candidate = quanterr.evaluate(original, against=["int4_g32"], tokens=tokens, context=96).candidates[0]
    scores, spans = candidate.scores, candidate.positions

    assert ([(49, 51), (52, 54), (94, 95)], 16) == (
        [(spans[n].first, spans[n].last) for n in (0, 1, -1)],
        len(spans),
    )
    assert sum(span.predictions for span in spans) == scores.tokens == 94
    assert sum(span.predictions * span.kld_mean for span in spans) / 94 == pytest.approx(scores.kld_mean, rel=1e-12)
    assert (None, None) == (candidate.worst_tokens[0].before, candidate.worst_tokens[0].token.text)


def test_answer_tokens_in_conversations_keep_their_places():
    """The assistant's tokens have their places in conversations of different lengths."""
    scored = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1, 0, 0]], dtype=torch.bool)
    chunks = torch.arange(10, 26).view(2, 8)
    logits = torch.randn(2, 2, 8, 32, generator=torch.Generator().manual_seed(0))
    measures = Measures()
    base, other = (SimpleNamespace(logits=logit) for logit in logits)
    CAUSAL.measure(base, other, Batch(0, chunks, chunks, chunks.numel(), 0, 0, scored), measures)
    log_p, log_q = logits.double().log_softmax(-1)
    kld = (log_p.exp() * (log_p - log_q)).sum(-1)
    predictions = {(prediction.chunk, prediction.position): prediction for prediction in measures.scores.worst()}

    assert {(0, 2), (0, 3), (0, 6), (1, 5)} == set(predictions)
    for (chunk, position), prediction in predictions.items():
        assert prediction.kld == pytest.approx(float(kld[chunk, position - 1]), rel=FLOAT64)
        assert prediction.target == chunks[chunk, position]


def show_worst(text):
    """Return an evaluation whose worst token is this text, with the text around it and with positions."""
    token = LikelyToken(7, text, 0.5, 0.25)
    worst = WorstToken(3, 300, text, 1.5, text, token, token, token)
    spans = [PositionScores(16 * n, 16 * n + 15, 0.01 / (n + 1), 256) for n in range(16)]
    made = sample()
    changed = [
        replace(candidate, worst_tokens=[worst], positions=spans, name=text or "x") for candidate in made.candidates
    ]
    return replace(made, candidates=changed)


TAME = page_of(render(show_worst("tame"), "html"))


@pytest.mark.parametrize("text", SHORT_NAMES, ids=lambda text: ascii(text[:16]))
def test_token_text_is_only_text(text, tmp_path):
    evaluation = show_worst(text)
    for output in ("json", "jsonl", "csv", "md", "junit"):
        CHECKS[output](render(evaluation, output))
    CHECKS["md"](format_numbers(evaluation))
    with open(tmp_path / "out.txt", "w", encoding="utf-8") as file:
        show(evaluation.view(5), make_console(file), verbose=True)

    check_lines((tmp_path / "out.txt").read_text(encoding="utf-8"))
    assert page_of(render(evaluation, "html")) == TAME
    if text in STORABLE:  # a tokenizer's text is Unicode
        evaluation.save(tmp_path / "e.json")
        assert quanterr.read_document(str(tmp_path / "e.json")).candidates == evaluation.candidates


def test_every_reader_sees_positions_and_tokens(tmp_path):
    evaluation = show_worst("to be")
    with open(tmp_path / "out.txt", "w", encoding="utf-8") as file:
        show(evaluation.view(5), make_console(file), verbose=True)
    for text in (format_numbers(evaluation), render(evaluation, "html"), (tmp_path / "out.txt").read_text()):
        assert "Worst tokens" in text
        assert "to be" in text
        assert "50 % → 25 %" in text
    assert "300-" not in render(evaluation, "csv")
    assert "list,candidate,name" in render(evaluation, "csv")
    assert "positions,to be,0-15,,0.01," in render(evaluation, "csv")


def test_page_draws_a_line_for_each_candidate():
    evaluation = show_worst("a")
    page = render(evaluation, "html")
    charts = [part for section in evaluation.view(5).sections for part in section.parts if isinstance(part, Chart)]

    # One chart shows divergence by position, one the scores of hidden states.
    assert [2, 2] == [len(chart.curves) for chart in charts]
    assert page.count('class="curve c') == 4
    assert page.count("L", page.index('class="curve c0"'), page.index('class="curve c1"')) >= 15
