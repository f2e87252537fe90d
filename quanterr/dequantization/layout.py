"""The files of the output: the tensors of each, its header, and the other files of a model's folder."""

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
KEPT_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
MAX_KEPT_BYTES = 64 * 2**20  # larger ones are no such files


class OutputFile(NamedTuple):
    """A file of tensors, which follow its header without gaps."""

    name: str
    header: bytes
    tensors: Sequence[WrittenTensor]

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def lay_out(
    tensors: Sequence[WrittenTensor], name: str | None, max_bytes: int, modules: Sequence[str] = ()
) -> list[OutputFile]:
    """Divide tensors into files of at most ``max_bytes``, in their order, or put all into the file ``name``.

    A larger tensor gets a file of its own. So does each of the folders ``modules``, for the tensors whose names begin
    with it.
    """
    if name is not None:
        return [_make_file(name, tensors)]
    files = []
    for module in modules:
        start = f"{module}."
        module_tensors = [
            tensor._replace(name=tensor.name.removeprefix(start)) for tensor in tensors if tensor.name.startswith(start)
        ]
        tensors = [tensor for tensor in tensors if not tensor.name.startswith(start)]
        files += [_make_file(f"{module}/{WHOLE}", module_tensors)] if module_tensors else []
    return [*_divide(tensors, max_bytes), *files]


def _divide(tensors: Sequence[WrittenTensor], max_bytes: int) -> list[OutputFile]:
    """Return the files of the model itself."""
    shards: list[list[WrittenTensor]] = [[]]
    room = max_bytes
    for tensor in tensors:
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    if len(shards) == 1:
        return [_make_file(WHOLE, tensors)]
    return [_make_file(SHARD.format(n, len(shards)), shard) for n, shard in enumerate(shards, 1)]


def _make_file(name: str, tensors: Sequence[WrittenTensor]) -> OutputFile:
    """Return a file of tensors; the header is padded so that the tensors begin at a multiple of eight bytes."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        fields[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return OutputFile(name, len(text).to_bytes(8, "little") + text, tensors)


def make_index(files: Sequence[OutputFile]) -> dict[str, bytes]:
    """Return the index of shards, as the Hugging Face Hub defines it, by file name; empty for a model in one file."""
    shards = [file for file in files if "/" not in file.name]  # the index does not list modules
    if len(shards) == 1:
        return {}
    total = sum(tensor.nbytes for file in shards for tensor in file.tensors)
    places = {tensor.name: file.name for file in shards for tensor in file.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    return {INDEX: (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()}


def identify(checkpoints: Iterable[Checkpoint], files: Iterable[OutputFile]) -> str:
    """Return a hash of the inputs and of all headers, which is equal only for runs that write the same files."""
    digest = sha256()
    for checkpoint in checkpoints:
        digest.update(json.dumps(checkpoint.identity, sort_keys=True).encode())
    for file in files:
        digest.update(file.header)
    return digest.hexdigest()


def list_other_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the other files of a model's folder by name; config.json without its quantization settings.

    Raises:
        CheckpointError: config.json is not valid JSON.
    """
    folder = checkpoint.folder
    if folder is None or checkpoint.kind == "file":
        return {}
    contents = {}
    modules = [f"{module}/{name}" for module in list_folders(folder) for name in list_module(folder, module)]
    for name in [*list_names(folder), *modules]:
        if (
            not name.endswith(KEPT_SUFFIXES)
            or name in (MODELOPT_CONFIG, *QUANTIZATION_CONFIGS)
            or name.endswith(".index.json")
        ):
            continue
        try:
            content = read_small_file(folder / name, MAX_KEPT_BYTES)
        except (OSError, ValueError):  # folders and broken links are not files of the model
            continue
        try:
            contents[name] = _drop_quantization(content) if name == "config.json" else content
        except strict_json.InvalidJson as error:
            raise CheckpointError(
                f"{display(str(folder / name))}: {error}, so its quantization settings cannot be removed; repair it"
            ) from error
    return contents


def _drop_quantization(content: bytes) -> bytes:
    """Return a config.json without quantization_config, which sections such as text_config may also contain."""
    config = strict_json.as_object(strict_json.loads(content))
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in QUANTIZATION_KEYS:
            part.pop(key, None)
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def is_file_name(place: Path) -> bool:
    """Return whether the output is one file instead of a folder."""
    return place.suffix in (".safetensors", ".sft")
