"""Lookup of ``ollama:NAME`` in the local store of Ollama; nothing is downloaded.

    $OLLAMA_MODELS, else ~/.ollama/models, else /usr/share/ollama/.ollama/models (the service on Linux)
        manifests/<host>/<namespace>/<model>/<tag>    JSON: layers with mediaType and digest
        blobs/sha256-<digest>                         the GGUF file of the layer that is the model

Reference: ollama/ollama, types/model/name.go and server/manifest.go.
"""

import os
import re
from pathlib import Path

from quanterr.errors import CheckpointError
from quanterr.util import strict_json
from quanterr.util.small_file import read_small
from quanterr.util.text import display, listed

PREFIX = "ollama:"
HOST, NAMESPACE, TAG = "registry.ollama.ai", "library", "latest"
MODEL = "application/vnd.ollama.image.model"
MOST = 1 << 20  # bytes of a manifest
PART = re.compile(r"[\w][\w.-]*")


def find_blob(given: str) -> Path:
    """Return the file with the weights of ``ollama:NAME``; a name is ``[[host/]namespace/]model[:tag]``.

    Raises:
        CheckpointError: the name is invalid, or the store has no such model; the message lists its models.
    """
    name, _, tag = given.removeprefix(PREFIX).partition(":")
    parts = [*(HOST, NAMESPACE)[: max(3 - len(name.split("/")), 0)], *name.split("/")]
    if len(parts) != 3 or not all(map(PART.fullmatch, [*parts, tag or TAG])):
        raise CheckpointError(f"{display(given)}: not a name of Ollama, such as ollama:llama3.2:1b")
    for store in _list_stores():
        manifest = store.joinpath("manifests", *parts, tag or TAG)
        try:
            layers = strict_json.as_object(strict_json.loads(read_small(manifest, MOST))).get("layers")
        except (OSError, ValueError, strict_json.InvalidJson):
            continue
        for layer in layers if isinstance(layers, list) else ():
            if isinstance(layer, dict) and layer.get("mediaType") == MODEL:
                return store / "blobs" / str(layer.get("digest")).replace(":", "-").replace("/", "-")
    there = sorted({name for store in _list_stores() for name in _list_models(store)})
    models = f"it has {listed(there)}" if there else "it has none"
    raise CheckpointError(
        f"{display(given)}: not in the store of Ollama: {models}; get it with `ollama pull {display(name)}`"
    )


def _list_stores() -> list[Path]:
    if folder := os.environ.get("OLLAMA_MODELS"):
        return [Path(folder).expanduser()]
    return [Path.home() / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]


def _list_models(store: Path) -> list[str]:
    """Return the models of a store by the names that Ollama lists."""
    try:
        found = [path.relative_to(store / "manifests").parts for path in (store / "manifests").glob("*/*/*/*")]
    except OSError:
        return []
    return [f"{'/'.join(parts[2:-1] if parts[:2] == (HOST, NAMESPACE) else parts[:-1])}:{parts[-1]}" for parts in found]
