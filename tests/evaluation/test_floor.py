"""The floor of language models: the original in its stored dtype, compared with plain transformers in that dtype."""

import json

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from support.float32 import OF_BFLOAT16
from support.small_models import ids, load_tensors, save_model, with_words
from test_evaluate import CONTEXT, compute_expected, plain
from torch.nn import functional as F  # noqa: N812 - its usual name

import quanterr
from quanterr.evaluation.models.units import Unit
from quanterr.evaluation.running import floor
from quanterr.outputs.card import format_numbers
from quanterr.views.evaluation.numbers_as_text import is_below_floor

pytestmark = pytest.mark.session

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')


def in_bfloat16(name, folder):
    """Save a model in bfloat16."""
    save_model(name, folder)
    tensors = {key: tensor.bfloat16() for key, tensor in load_tensors(folder).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def evaluate(folder, name="llama", n=96, **options):
    """Evaluate a model that is stored in bfloat16 against two recipes."""
    original, tokens = in_bfloat16(name, folder / "original"), ids(folder, n)
    return tokens, quanterr.evaluate(
        original, against=["int8_row", "int4_g32"], tokens=tokens, context=CONTEXT, **options
    )


@pytest.fixture(scope="module")
def shared_evaluation(tmp_path_factory):
    return evaluate(tmp_path_factory.mktemp("floor"), n=9 * CONTEXT)[1]


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3", "t5"])
def test_floor_equals_the_divergence_in_plain_bfloat16_transformers(name, tmp_path):
    tokens, evaluation = evaluate(tmp_path, name, batch=3)
    chunks = load_file(tokens)["ids"].view(-1, CONTEXT)
    x, y = (plain(name, tmp_path / "original", chunks, dtype) for dtype in (torch.float32, torch.bfloat16))
    base, ppl, kld = compute_expected(name, x, y, chunks)

    assert (base, ppl, kld) == (
        pytest.approx(evaluation.floor.scores.ppl_original, rel=1e-4),
        pytest.approx(evaluation.floor.scores.ppl, rel=1e-3),
        pytest.approx(evaluation.floor.scores.kld_mean, rel=OF_BFLOAT16),
    )
    assert ("bfloat16", None, [0, 1, 2]) == (evaluation.floor.dtype, evaluation.floor.reason, evaluation.floor.chunks)


def test_encoder_floor_covers_hidden_states_in_all_chunks(tmp_path):
    """The error is the root of an energy, so its tolerance is half as large."""
    tokens, evaluation = evaluate(tmp_path, "bert", n=6 * CONTEXT)
    chunks = load_file(tokens)["ids"].view(-1, CONTEXT)
    x, y = (plain("bert", tmp_path / "original", chunks, dtype).double() for dtype in (torch.float32, torch.bfloat16))
    floor = evaluation.floor.embeddings
    cosines = torch.nn.functional.cosine_similarity(x.mean(1), y.mean(1), -1)

    assert 6 == floor.chunks
    assert pytest.approx(float((y - x).norm() / x.norm()), rel=OF_BFLOAT16 / 2) == floor.relative_error
    assert pytest.approx(float(1 - cosines.mean()), rel=OF_BFLOAT16) == 1 - floor.cosine_mean
    errors = [candidate.embeddings.relative_error for candidate in evaluation.candidates]
    assert [error <= floor.relative_error for error in errors] == [
        is_below_floor(evaluation, c) for c in evaluation.candidates
    ]
    assert errors[0] < floor.relative_error < errors[1]


def test_floor_reads_only_the_first_chunks(shared_evaluation):
    assert [0, 1, 2, 3] == shared_evaluation.floor.chunks
    assert (9, 4) == (shared_evaluation.tokens.chunks, len(shared_evaluation.floor.scores.kld_chunks))


def test_floor_is_a_row_and_names_candidates_below_it_on_the_same_chunks(shared_evaluation, tmp_path):
    """A candidate is worse on the chunks that the floor has not read and below it on the others."""
    near, far = shared_evaluation.candidates
    chunks = [0.5 * kld for kld in shared_evaluation.floor.scores.kld_chunks] + [1.0] * 5
    scores = replace(near.scores, kld_chunks=chunks, kld_mean=sum(chunks) / 9)
    changed = replace(shared_evaluation, candidates=[replace(near, scores=scores), far])
    for ending in ("json", "csv"):
        changed.save(tmp_path / f"e.{ending}")
    text = format_numbers(changed)

    assert "floor: the original in bfloat16, 4 chunks" in text
    assert "below the floor: int8_row; rounding to bfloat16 alone deviates more" in text
    assert f"floor,,kld_mean,,{shared_evaluation.floor.scores.kld_mean!r}" in (tmp_path / "e.csv").read_text()
    assert changed.floor == quanterr.read_document(str(tmp_path / "e.json")).floor
    assert json.loads((tmp_path / "e.json").read_text())["floor"]["outputs"] is None


def test_candidate_above_the_floor_is_not_called_below_it(shared_evaluation):
    assert shared_evaluation.floor.scores.kld_mean < shared_evaluation.candidates[1].scores.kld_mean
    assert "int4_g32: bfloat16 alone rounds" not in format_numbers(shared_evaluation)


def test_floor_is_missing_where_both_sides_compute_in_16_bits(tmp_path):
    _, evaluation = evaluate(tmp_path, dtype="bfloat16")
    says = "both sides compute in 16 bits: --dtype float32 measures it"

    assert (None, says) == (evaluation.floor.scores, evaluation.floor.reason)


def test_floor_is_missing_for_a_float32_original(tmp_path):
    original, tokens = save_model("llama", tmp_path / "original"), ids(tmp_path)
    evaluation = quanterr.evaluate(original, against=["int8_row"], tokens=tokens, context=CONTEXT)

    assert (None, "the original is not stored in a 16-bit float") == (evaluation.floor.scores, evaluation.floor.reason)


def test_several_texts_contribute_their_first_chunks_each(tmp_path):
    original = in_bfloat16("llama", tmp_path / "original")
    with_words(original)
    for n, name in enumerate("ab"):
        words = [f"w{(7 * k + n) % 90}" for k in range(8 * CONTEXT)]
        (tmp_path / f"{name}.txt").write_text(" ".join(words))
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    evaluation = quanterr.evaluate(original, against=["int8_row"], text=texts, context=CONTEXT)

    assert [0, 1, 2, 3, 8, 9, 10, 11] == evaluation.floor.chunks


def test_tensors_computed_from_weights_are_converted_each_time():
    """A new result may lie at the address of an earlier one; weights themselves are converted once."""
    module = torch.nn.Linear(8, 8, bias=False).bfloat16()
    weight, x = module.weight.detach(), torch.ones(1, 8, dtype=torch.bfloat16)
    products = floor._Products()
    products.keep(Unit("u", module))
    with torch.inference_mode(), products:
        assert torch.equal(F.linear(x, weight), F.linear(x, weight.clone()))
        assert torch.equal(F.linear(x, weight.t()), F.linear(x, weight.t().clone()))
        assert torch.equal(F.linear(x, weight[:4]), F.linear(x, weight)[:, :4])
        computed = 2 * weight
        before = F.linear(x, computed)
        assert torch.equal(F.linear(x, computed.mul_(2)), 2 * before)
