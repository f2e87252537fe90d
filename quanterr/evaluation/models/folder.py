"""The folder with a model's config.json and tokenizer: the original's own, or copies from a store."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from quanterr.checkpoints import Checkpoint
from quanterr.checkpoints.places import find_missing, read_small_file
from quanterr.errors import CheckpointError
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
LARGEST = 256 << 20  # bytes


class ModelFolder(NamedTuple):
    """The folder of a model: where the files are on this machine, and the path that the user gave."""

    path: Path
    address: str

    def named(self, name: str) -> str:
        """Return the path of one of its files, for messages."""
        return display(f"{self.address.rstrip('/')}/{name}")


@contextmanager
def model_folder(original: Checkpoint) -> Iterator[ModelFolder]:
    """Return the folder of the checkpoint's files; for a store, a temporary folder with copies.

    Raises:
        CheckpointError: a file cannot be read, or is too large.
        ResourceError: the store does not respond.
    """
    place = original.folder
    if place is None or isinstance(place, Path):
        yield ModelFolder(place or Path(original.path), str(place or original.path))
        return
    with TemporaryDirectory(prefix="quanterr-") as made:
        for name in set(FILES) - set(find_missing(place, list(FILES))):
            try:
                Path(made, name).write_bytes(read_small_file(place / name, LARGEST))
            except FileNotFoundError:
                continue
            except ValueError as error:
                raise CheckpointError(f"{display(str(place / name))}: {error}") from error
        yield ModelFolder(Path(made), str(place))
