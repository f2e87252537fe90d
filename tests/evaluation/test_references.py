"""References give the same numbers without the original, to the last digit, and are refused where anything differs."""

import json
import shutil

import pytest
import torch
from msgspec.structs import asdict
from safetensors.torch import load_file, save_file
from support.forked import call
from support.small_models import ids, load_tensors, save_model, with_words
from test_evaluate import CONTEXT, candidate
from test_evaluate_gguf import GEMMA, LLAMA, write
from test_texts import CONVERSATIONS, PROMPT, TURNS, template

import quanterr
from quanterr.errors import CheckpointError, UsageError
from quanterr.evaluation.files import references
from quanterr.evaluation.run import study

pytestmark = pytest.mark.session

transformers = pytest.importorskip(
    "transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")'
)


TOKENS = 200


def make_files(folder, name="llama", **more):
    """Write an original, a candidate, a text and a reference, which is all that tests use later."""
    original, tokens = save_model(name, folder / "original"), ids(folder, TOKENS)
    quantized, _ = candidate(original)
    options = {"tokens": tokens, "context": CONTEXT, "batch": 3} | more
    study(original, save_reference=folder / "reference", **options)
    return original, quantized, options


@pytest.mark.parametrize("name", ["llama", "llama tied", "gpt2", "opt", "mixtral", "gemma2", "mamba"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_equal_those_with_the_original_to_the_last_digit(name, dtype, tmp_path):
    original, quantized, options = make_files(tmp_path, name, dtype=dtype)
    beside = quanterr.evaluate(original, [quantized], **options)
    original.rename(tmp_path / "gone")
    alone = quanterr.evaluate(quantized, reference=tmp_path / "reference", **options)

    assert asdict(beside.candidates[0].scores) == asdict(alone.candidates[0].scores)
    assert (beside.tokens, beside.original, beside.original_bytes) == (
        alone.tokens,
        alone.original,
        alone.original_bytes,
    )
    assert (None, str(tmp_path / "reference")) == (beside.reference, alone.reference)
    assert beside.candidates[0].scores.kld_mean > 0


def test_candidates_beside_a_reference_keep_their_names(tmp_path):
    _, quantized, options = make_files(tmp_path)
    evaluation = quanterr.evaluate(quantized, {"mine": quantized}, reference=tmp_path / "reference", **options)

    assert {"quantized", "mine"} == {candidate.name for candidate in evaluation.candidates}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gguf_is_aligned_by_a_few_stored_rows(family, tmp_path, monkeypatch):
    """The stored rows of the original show that norms, and rows of q and k, have other values and another order."""
    monkeypatch.setattr(references, "MAX_WHOLE_BYTES", 256)
    original, tokens = save_model(family, tmp_path / "original"), ids(tmp_path, TOKENS)
    path, _ = write(family, original, GEMMA if family == "gemma2" else LLAMA, tmp_path / "model.gguf")
    options = {"tokens": tokens, "context": CONTEXT}
    beside = quanterr.evaluate(original, [path], save_reference=tmp_path / "reference", **options)
    original.rename(tmp_path / "gone")
    alone = quanterr.evaluate(path, reference=tmp_path / "reference", **options)
    held = load_file(tmp_path / "reference" / "reference.safetensors")
    rows = held["rows/model.layers.0.self_attn.q_proj.weight"]

    assert asdict(beside.candidates[0].scores) == asdict(alone.candidates[0].scores)
    assert beside.candidates[0].scores.kld_mean < 1e-3
    assert rows.numel() <= 32 * 32 * 4


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    return folder, *make_files(folder)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"context": 16}, f"context differs: 16, and {CONTEXT} in the reference"),
        ({"chunks": 5}, f"the number of chunks differs: 5, and {TOKENS // CONTEXT} in the reference"),
        ({"batch": 2}, "batch differs: 2, and 3 in the reference"),
        ({"dtype": "float64"}, "dtype differs: float64, and float32 in the reference"),
        ({"against": ["int8_row"]}, "against: needs the original"),
        ({"importance_out": "imatrix.gguf"}, "importance_out: needs the original"),
    ],
)
def test_different_setting_is_named(files, more, message):
    folder, _, quantized, options = files
    with pytest.raises(UsageError, match=message):
        quanterr.evaluate(quantized, reference=folder / "reference", **options | more)


def test_another_text_is_refused(files, tmp_path):
    folder, _, quantized, options = files
    tokens = load_file(options["tokens"])["ids"]
    tokens[7] = 5
    save_file({"ids": tokens}, tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match="the text differs"):
        quanterr.evaluate(
            quantized, reference=folder / "reference", **options | {"tokens": tmp_path / "other.safetensors"}
        )


class TestDamaged:
    def test_damaged_hidden_states_are_noticed(self, tmp_path):
        _, quantized, options = make_files(tmp_path)
        path = tmp_path / "reference" / "reference.safetensors"
        raw = bytearray(path.read_bytes())
        raw[-3] ^= 1
        path.write_bytes(raw)
        with pytest.raises(CheckpointError, match="is not what was saved: the reference is damaged"):
            quanterr.evaluate(quantized, reference=path.parent, **options)

    def test_changed_config_is_noticed(self, tmp_path):
        _, quantized, options = make_files(tmp_path)
        path = tmp_path / "reference" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.1}))
        with pytest.raises(CheckpointError, match=r"config\.json is not what was saved"):
            quanterr.evaluate(quantized, reference=path.parent, **options)

    def test_folder_without_a_reference_is_wrong_usage(self, files, tmp_path):
        _, original, quantized, options = files
        with pytest.raises(UsageError, match="no reference: No such file"):
            quanterr.evaluate(quantized, reference=tmp_path, **options)
        with pytest.raises(UsageError, match="holds other files; name a new folder"):
            study(original, save_reference=original, **options)


def test_weight_missing_from_a_candidate_is_not_guessed(tmp_path, monkeypatch):
    """With the original, its own weight would be used and reported."""
    monkeypatch.setattr(references, "MAX_WHOLE_BYTES", 256)
    _, quantized, options = make_files(tmp_path)
    tensors = load_tensors(quantized)
    name = next(name for name in tensors if name.endswith("up_proj.weight"))
    save_file({k: v for k, v in tensors.items() if not k.startswith(name)}, tmp_path / "less.safetensors")
    with pytest.raises(
        CheckpointError, match=r"does not hold the values of .*up_proj.*evaluate it beside the original"
    ):
        quanterr.evaluate(tmp_path / "less.safetensors", reference=tmp_path / "reference", **options)


def test_encoder_has_no_reference(tmp_path):
    original = save_model("bert", tmp_path / "original")
    with pytest.raises(UsageError, match="--save-reference: works only with models that predict the next token"):
        study(original, tokens=ids(tmp_path), context=CONTEXT, save_reference=tmp_path / "reference")


def test_command_writes_and_reads_a_reference(files, tmp_path):
    _, original, quantized, options = files
    text = ("--tokens", options["tokens"], "--context", CONTEXT)
    saving = call("evaluate", "-v", original, *text, "--save-reference", tmp_path / "r")
    reading = call("evaluate", "-v", quantized, "--reference", tmp_path / "r", *text, "-o", tmp_path / "e.json")

    assert (0, 0) == (saving.returncode, reading.returncode), saving.stderr + reading.stderr
    assert f"wrote {tmp_path / 'r'}" in saving.stderr
    assert "in the place of the original" in reading.stdout
    assert str(tmp_path / "r") == json.loads((tmp_path / "e.json").read_text())["reference"]


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """A model with a chat template, a candidate, two texts and conversations, and a reference for all of them."""
    folder = tmp_path_factory.mktemp("said")
    original = save_model("llama", folder / "original")
    with_words(original)
    template(original, TURNS + PROMPT)
    for n, name in enumerate(("prose", "code")):
        (folder / f"{name}.txt").write_text(" ".join(f"w{(7 * k + n) % 90}" for k in range(8 * 16)))
    lines = [{"messages": [{"role": r, "content": c} for r, c in conversation]} for conversation in CONVERSATIONS]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = {"text": [folder / "prose.txt", folder / "code.txt"], "chat": folder / "chat.jsonl", "context": 16}
    study(original, save_reference=folder / "reference", **options)
    return folder, original, candidate(original)[0], options


def test_several_texts_and_conversations_equal_those_with_the_original(conversations):
    folder, original, quantized, options = conversations
    beside = quanterr.evaluate(original, [quantized], **options)
    alone = quanterr.evaluate(quantized, reference=folder / "reference", **options)

    for from_reference, other in zip(beside.candidates, alone.candidates, strict=True):
        assert (from_reference.scores, from_reference.texts, from_reference.positions, from_reference.worst_tokens) == (
            other.scores,
            other.texts,
            other.positions,
            other.worst_tokens,
        )
    assert ["prose", "code", "chat"] == [text.name for text in alone.candidates[0].texts]
    assert beside.texts == alone.texts


def test_other_conversations_are_refused(conversations, tmp_path):
    folder, _, quantized, options = conversations
    text = (folder / "chat.jsonl").read_text()
    (tmp_path / "chat.jsonl").write_text(text.replace("w33", "w34"))
    with pytest.raises(UsageError, match="the text differs"):
        quanterr.evaluate(quantized, reference=folder / "reference", **options | {"chat": tmp_path / "chat.jsonl"})


def test_single_text_may_be_a_string(conversations, tmp_path):
    folder, original, quantized, _ = conversations
    paths = folder / "prose.txt", str(folder / "prose.txt")
    first, second = (quanterr.evaluate(original, [quantized], text=path, context=16) for path in paths)

    assert first.candidates[0].scores == second.candidates[0].scores


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"torch": "1.0", "transformers": transformers.__version__}, f"torch 1.0, now {torch.__version__}:"),
        (None, f"torch of an unknown version, now {torch.__version__}, transformers of an unknown version"),
    ],
)
def test_other_versions_are_reported(conversations, tmp_path, versions, says):
    folder, _, quantized, options = conversations
    shutil.copytree(folder / "reference", tmp_path / "reference")
    path = tmp_path / "reference" / "reference.json"
    header = json.loads(path.read_text())
    same = header.pop("versions")
    path.write_text(json.dumps(header if versions is None else header | {"versions": versions}))
    [candidate] = quanterr.evaluate(quantized, reference=path.parent, **options).candidates
    [finding] = [finding for finding in candidate.findings if finding.code == "reference_versions"]

    assert {"torch": torch.__version__, "transformers": transformers.__version__} == same
    assert says in finding.message
    assert "info" == finding.severity
