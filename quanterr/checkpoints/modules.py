"""Modules of sentence-transformers models after the transformer, such as dense layers, each in a folder of its own.

modules.json lists all modules. The first is the transformer, whose files are in the model's folder:

    [{"path": "", "type": "sentence_transformers.models.Transformer"},
     {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
     {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]

The tensors of 2_Dense/model.safetensors have that folder in front of their names: 2_Dense.linear.weight.

Reference: huggingface/sentence-transformers@5.1.0 sentence_transformers/SentenceTransformer.py _load_sbert_model,
models/Dense.py.
"""

from quanterr.checkpoints.places import Place, list_names, read_small_file
from quanterr.errors import CheckpointError
from quanterr.util import strict_json

MODULES = "modules.json"
MODEL_FILE = (
    "model.safetensors"  # a whole model, which some loaders prefer to the shards of an index in the same folder
)
TYPES_WITHOUT_WEIGHTS = (
    "Transformer",
    "Pooling",
    "Normalize",
    "Dropout",
)  # ends of types; the first is the model itself
MAX_BYTES = 1 << 20


def find_modules(folder: Place) -> list[str]:
    """Return the folders of a model's further modules that have weights."""
    return [
        name for name, has_weights in _read_modules(folder) if has_weights and MODEL_FILE in list_module(folder, name)
    ]


def list_folders(folder: Place) -> list[str]:
    """Return the folders of all of a model's further modules, with or without weights."""
    return [name for name, _ in _read_modules(folder)]


def list_module(folder: Place, name: str) -> list[str]:
    """Return the names of the files of a module; none if it has no folder."""
    try:
        return list_names(folder / name)
    except OSError:
        return []


def _read_modules(folder: Place) -> list[tuple[str, bool]]:
    """Return the folder of each further module, and whether its type has weights; none without a valid modules.json."""
    try:
        listed = strict_json.loads(read_small_file(folder / MODULES, MAX_BYTES), lenient=True)
    except (OSError, ValueError, CheckpointError):  # the weights of the transformer can be read without it
        return []
    rows = [strict_json.as_object(row) for row in listed] if isinstance(listed, list) else []
    named = [(row.get("path"), not str(row.get("type")).endswith(TYPES_WITHOUT_WEIGHTS)) for row in rows]
    return [(name, has_weights) for name, has_weights in named if isinstance(name, str) and _is_folder_name(name)]


def _is_folder_name(name: str) -> bool:
    """Return whether a name from an untrusted file stays in the model's folder."""
    return name not in ("", ".", "..") and not any(sign in name for sign in "/\\:\0")
