"""The folder with a model's config.json and tokenizer: the original's, or a copy from a store, a GGUF file or memory.

All code reads the description of a model from here, so any source of these files can be an original.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from quanterr.checkpoints import Checkpoint
from quanterr.checkpoints.gguf_file import read_all_values
from quanterr.checkpoints.places import find_missing, read_small_file
from quanterr.errors import CheckpointError
from quanterr.evaluation.models.gguf_config import INSTEAD, config_of
from quanterr.evaluation.models.gguf_tokenizer import tokenizer_files
from quanterr.pairing.conversion import has_llama_names
from quanterr.tensors.in_memory import KIND as IN_MEMORY
from quanterr.util.text import display

# Files that transformers reads for a config, a tokenizer and a processor of images.
FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "processor_config.json",
    "preprocessor_config.json",
)
MAX_FILE_BYTES = 256 << 20


class ModelFolder(NamedTuple):
    """The folder of a model: the path of its files on this machine, and the path that the user gave."""

    path: Path
    address: str
    lacks: Mapping[
        str, str
    ] = {}  # file → why it is missing, and what to do, to which messages add what else can be done
    is_made: bool = False  # made from the metadata of a GGUF file

    def locate(self, name: str) -> str:
        """Return the path of one of its files, for messages."""
        return display(f"{self.address.rstrip('/')}/{name}")


@contextmanager
def model_folder(original: Checkpoint, with_tokenizer: bool = True) -> Iterator[ModelFolder]:
    """Yield the folder of the checkpoint's files, which is temporary for a store, a GGUF file or a model in memory.

    Without ``with_tokenizer``, no tokenizer is made from a GGUF file, as that takes seconds for a large vocabulary.

    Raises:
        CheckpointError: a file cannot be read, or is too large; no config follows from a GGUF file.
        ResourceError: the store does not respond.
    """
    described = original.source or original
    is_given = original.source is not None and original.folder is not None  # with --config
    if not is_given and is_language_model(described):
        with TemporaryDirectory(prefix="quanterr-") as made:
            yield _write_files(described, Path(made), with_tokenizer)
        return
    if original.kind == IN_MEMORY:
        with TemporaryDirectory(prefix="quanterr-") as made:
            for name, content in original.config.items():
                Path(made, name).write_text(json.dumps(content), encoding="utf-8")
            yield ModelFolder(Path(made), original.path)
        return
    place = original.folder
    if place is None or isinstance(place, Path):
        yield ModelFolder(place or Path(original.path), str(place or original.path))
        return
    with TemporaryDirectory(prefix="quanterr-") as made:
        for name in set(FILES) - set(find_missing(place, list(FILES))):
            try:
                Path(made, name).write_bytes(read_small_file(place / name, MAX_FILE_BYTES))
            except FileNotFoundError:
                continue
            except ValueError as error:
                raise CheckpointError(f"{display(str(place / name))}: {error}") from error
        yield ModelFolder(Path(made), str(place))


def is_language_model(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is a GGUF file of llama.cpp, whose metadata describes its model and tokenizer."""
    return checkpoint.gguf is not None and has_llama_names(checkpoint)


def _write_files(checkpoint: Checkpoint, folder: Path, with_tokenizer: bool) -> ModelFolder:
    """Write the files that follow from the metadata of a GGUF file.

    Raises:
        CheckpointError: no config follows from it.
    """
    values = {key: value for file in reversed(checkpoint.files) for key, value in read_all_values(file).items()}
    files = {"config.json": config_of(checkpoint, values)}
    lacks = {}
    try:
        files |= tokenizer_files(values) if with_tokenizer else {}
    except ValueError as error:
        lacks["tokenizer.json"] = f"does not follow from the file: {error}; {INSTEAD}, or"
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return ModelFolder(folder, checkpoint.path, lacks, is_made=True)
