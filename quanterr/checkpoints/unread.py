"""Files of weights in a checkpoint's folder that do not belong to it: copies for other runtimes, leftovers.

Files that loaders use only on request do not count: variants (``model.fp16.safetensors``), and adapters without
adapter_config.json. With that file, transformers adds the adapter to the model.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from quanterr.checkpoints.base import CheckpointFile, Entry, Unread
from quanterr.checkpoints.places import Place
from quanterr.checkpoints.safetensors_file import read_header
from quanterr.errors import QuanterrError

WEIGHT_SUFFIXES = (".safetensors", ".sft")
ADAPTER = re.compile(r"(?:adapters?|pytorch_lora_weights)[._].*")
COMPUTED = "jangtq_runtime.safetensors"  # signs and codebooks of JANGTQ, which follow from the numbers of columns
ADAPTER_CONFIG = "adapter_config.json"
SHARD = re.compile(r"-\d{5}-of-\d{5}")


def find_unread(
    folder: Place, stored: Sequence[str], read: Sequence[str], entries: Mapping[str, Entry]
) -> Iterator[Unread]:
    """Yield the files of weights among ``stored`` that are not in ``read``; no header is fetched from a store."""
    variants = tuple(f"{_find_stem(name)}." for name in read)
    for name in stored:
        if name in (*read, COMPUTED) or not name.endswith(WEIGHT_SUFFIXES) or _find_stem(name).startswith(variants):
            continue
        if ADAPTER.match(name) and ADAPTER_CONFIG not in stored:
            continue
        yield Unread(name, _find_differing(folder / name, entries) if isinstance(folder, Path) else ())


def _find_stem(name: str) -> str:
    return SHARD.sub("", name).rpartition(".")[0]


def _find_differing(path: Path, entries: Mapping[str, Entry]) -> tuple[str, ...]:
    try:
        file = CheckpointFile(path)
    except QuanterrError:
        return ()
    try:
        stored, *_ = read_header(file, lenient=True)
    except QuanterrError:
        return ()
    finally:
        file.close()
    pairs = ((entry, entries[entry.name]) for entry in stored if entry.name in entries)
    return tuple(entry.name for entry, other in pairs if (entry.shape, entry.nbytes) != (other.shape, other.nbytes))
