"""The files of the output: which tensors each holds, its header, and the other files of a model's folder."""

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from quanterr.checkpoints import MODELOPT_CONFIG, QUANTIZATION_CONFIGS, Checkpoint
from quanterr.checkpoints.labels import QUANTIZATION_KEYS
from quanterr.checkpoints.modules import list_folders, list_module
from quanterr.checkpoints.places import list_names, read_small_file
from quanterr.dequantization.tensors import WrittenTensor
from quanterr.errors import CheckpointError
from quanterr.util import strict_json
from quanterr.util.text import display

WHOLE, SHARD, INDEX = "model.safetensors", "model-{:05d}-of-{:05d}.safetensors", "model.safetensors.index.json"
# Files that a model needs besides its weights.
KEPT = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
MOST = 64 * 2**20  # bytes of such a file


class OutputFile(NamedTuple):
    """A file of tensors, which follow its header without gaps."""

    name: str
    header: bytes
    tensors: Sequence[WrittenTensor]

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return len(self.header) + sum(one.nbytes for one in self.tensors)


def lay_out(
    tensors: Sequence[WrittenTensor], name: str | None, most: int, modules: Sequence[str] = ()
) -> list[OutputFile]:
    """Divide tensors into files of at most ``most`` bytes, in their order, or put all into the file ``name``.

    A tensor larger than that has a file of its own, and so has each of the folders ``modules``, for the tensors whose
    names begin with it.
    """
    if name is not None:
        return [_make_file(name, tensors)]
    files = []
    for module in modules:
        start = f"{module}."
        own = [one._replace(name=one.name.removeprefix(start)) for one in tensors if one.name.startswith(start)]
        tensors = [one for one in tensors if not one.name.startswith(start)]
        files += [_make_file(f"{module}/{WHOLE}", own)] if own else []
    return [*_divide(tensors, most), *files]


def _divide(tensors: Sequence[WrittenTensor], most: int) -> list[OutputFile]:
    """Return the files of the model itself."""
    shards: list[list[WrittenTensor]] = [[]]
    room = most
    for one in tensors:
        if shards[-1] and one.nbytes > room:
            shards.append([])
            room = most
        shards[-1].append(one)
        room -= one.nbytes
    if len(shards) == 1:
        return [_make_file(WHOLE, tensors)]
    return [_make_file(SHARD.format(n, len(shards)), shard) for n, shard in enumerate(shards, 1)]


def _make_file(name: str, tensors: Sequence[WrittenTensor]) -> OutputFile:
    """Return a file of tensors; the header is padded so that the tensors begin at a multiple of eight bytes."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for one in tensors:
        fields[one.name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [at, at + one.nbytes]}
        at += one.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return OutputFile(name, len(text).to_bytes(8, "little") + text, tensors)


def make_index(files: Sequence[OutputFile]) -> dict[str, bytes]:
    """Return the index of shards by its name, as the Hugging Face Hub defines it; none for a model in one file."""
    shards = [file for file in files if "/" not in file.name]  # modules are not part of it
    if len(shards) == 1:
        return {}
    total = sum(one.nbytes for file in shards for one in file.tensors)
    places = {one.name: file.name for file in shards for one in file.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    return {INDEX: (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()}


def identify(checkpoints: Iterable[Checkpoint], files: Iterable[OutputFile]) -> str:
    """Return a hash of what is read and of all headers: equal only for runs whose files are the same."""
    found = sha256()
    for checkpoint in checkpoints:
        found.update(json.dumps(checkpoint.identity, sort_keys=True).encode())
    for file in files:
        found.update(file.header)
    return found.hexdigest()


def list_other_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the other files of a model's folder by name; config.json without its quantization settings.

    Raises:
        CheckpointError: config.json is not valid JSON.
    """
    folder = checkpoint.folder
    if folder is None or checkpoint.kind == "file":
        return {}
    found = {}
    modules = [f"{module}/{name}" for module in list_folders(folder) for name in list_module(folder, module)]
    for name in [*list_names(folder), *modules]:
        if not name.endswith(KEPT) or name in (MODELOPT_CONFIG, *QUANTIZATION_CONFIGS) or name.endswith(".index.json"):
            continue
        try:
            content = read_small_file(folder / name, MOST)
        except (OSError, ValueError):  # a folder or a link to nowhere is not a file of the model
            continue
        try:
            found[name] = _drop_quantization(content) if name == "config.json" else content
        except strict_json.InvalidJson as error:
            raise CheckpointError(
                f"{display(str(folder / name))}: {error}, so its quantization settings cannot be removed; repair it"
            ) from error
    return found


def _drop_quantization(content: bytes) -> bytes:
    """Return a config.json without quantization_config, which parts such as text_config may also have."""
    config = strict_json.as_object(strict_json.loads(content))
    for part in (config, *(one for one in config.values() if isinstance(one, dict))):
        for key in QUANTIZATION_KEYS:
            part.pop(key, None)
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def is_file_name(place: Path) -> bool:
    """Return whether the output is one file instead of a folder."""
    return place.suffix in (".safetensors", ".sft")
