"""Models in Ollama's local store, opened by their names."""

import json

import pytest
from support.gguf_stored import LLAMA, Stored, write_gguf

from quanterr import open_checkpoint
from quanterr.errors import CheckpointError


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store with llama3.2:1b and a model from the Hugging Face hub, laid out as by Ollama."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    (tmp_path / "blobs").mkdir()
    for n, place in enumerate(("registry.ollama.ai/library/llama3.2/1b", "hf.co/someone/model-GGUF/Q8_0")):
        digest = f"{n:064x}"
        write_gguf(tmp_path / f"blobs/sha256-{digest}", [Stored(f"tensor{n}", "F32", (2, 4))], LLAMA)
        layers = [
            {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:0"},
            {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": 1},
        ]
        (tmp_path / "manifests" / place).parent.mkdir(parents=True)
        (tmp_path / "manifests" / place).write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama3.2:1b", "tensor0"),
        ("library/llama3.2:1b", "tensor0"),
        ("registry.ollama.ai/library/llama3.2:1b", "tensor0"),
        ("hf.co/someone/model-GGUF:Q8_0", "tensor1"),
    ],
)
def test_model_name_opens_its_file(store, name, tensor):
    with open_checkpoint(f"ollama:{name}") as checkpoint:
        assert [tensor] == list(checkpoint.entries)


@pytest.mark.parametrize("name", ["llama3.2", "llama3.2:8b", "other"])
def test_missing_model_is_an_error_that_lists_the_existing_ones(store, name):
    with pytest.raises(
        CheckpointError, match=r"it has hf\.co/someone/model-GGUF:Q8_0, llama3\.2:1b; get it with `ollama "
    ):
        open_checkpoint(f"ollama:{name}")


@pytest.mark.parametrize("name", ["", "../../etc", "a/b/c/d", "a:../x", "a b"])
def test_invalid_name_is_an_error(store, name):
    with pytest.raises(CheckpointError, match=r"not a name of Ollama, such as ollama:llama3\.2:1b"):
        open_checkpoint(f"ollama:{name}")


def test_model_with_a_damaged_manifest_is_missing(store):
    (store / "manifests/registry.ollama.ai/library/llama3.2/1b").write_text('{"layers": [{"mediaType": 1}, 2]}')

    with pytest.raises(CheckpointError, match="not in the store of Ollama"):
        open_checkpoint("ollama:llama3.2:1b")
