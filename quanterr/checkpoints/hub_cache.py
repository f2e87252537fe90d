"""Lookup of ``org/name`` in the local Hugging Face cache; nothing is ever downloaded into the cache.

    $HF_HUB_CACHE, else $HF_HOME/hub, else $XDG_CACHE_HOME/huggingface/hub, else ~/.cache/huggingface/hub
        models--org--name/refs/<revision>           the commit
        models--org--name/snapshots/<commit>/…      links to ../../blobs/…

Reference: huggingface.co/docs/hub/local-cache.
"""

import os
import re
from pathlib import Path

from quanterr.errors import CheckpointError
from quanterr.util.small_file import read_small
from quanterr.util.text import display

MAX_REF = 1000  # bytes of a file in refs/
MODEL_ID = re.compile(r"(?:hf://)?(?P<org>[\w.-]+)/(?P<name>[\w.-]+?)(?:@(?P<revision>[\w.-]+))?(?:/(?P<inside>.+))?")


def cache_folder() -> Path:
    """Return the folder in which the Hugging Face libraries keep downloads."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "huggingface" / "hub"


def is_model_id(given: str) -> bool:
    """Return whether a path that does not exist looks like ``org/name`` or ``org/name@revision``."""
    folder = given.split("/")[0]
    return bool(re.fullmatch(r"[\w.-]+/[\w.@-]+", given)) and not (
        given.endswith((".safetensors", ".sft", ".gguf", ".json")) or os.path.isdir(folder)
    )


def names_a_model(given: str) -> bool:
    """Return whether ``given`` is a model id: ``org/name``, ``hf://org/name@revision/inside`` or similar."""
    return bool(MODEL_ID.fullmatch(given)) and not any(part in ("..", ".") for part in given.split("/"))


def may_ask_the_hub() -> bool:
    """Return whether the hub may be contacted: huggingface_hub's HF_HUB_OFFLINE is not set."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() not in ("1", "on", "yes", "true")


def find_snapshot(given: str) -> tuple[Path, str]:
    """Return the folder of a cached model, or the file that is named inside it, and the commit.

    Raises:
        CheckpointError: ``given`` is not a model id, or not in the cache; the message says how to download it.
    """
    match = MODEL_ID.fullmatch(given)
    if not match or not names_a_model(given):
        raise CheckpointError(f"{display(given)}: no such file, and not a model id like org/name")
    model = f"{match['org']}/{match['name']}"
    revision = match["revision"] or "main"
    home = cache_folder() / f"models--{match['org']}--{match['name']}"
    try:
        commit = read_small(home / "refs" / revision, MAX_REF).decode().strip()
    except (OSError, ValueError):
        commit = revision
    snapshot = home / "snapshots" / commit
    if not re.fullmatch(r"[\w.-]+", commit) or not snapshot.is_dir():
        wanted = f" --revision {revision}" if match["revision"] else ""
        raise CheckpointError(
            f"{display(given)}: no such file, nor in the Hugging Face cache ({display(str(cache_folder()))}); "
            f"get it with `hf download {model}{wanted}`"
        )
    inside = match["inside"]
    return (snapshot / inside if inside else snapshot), commit
