"""Further modules of a model of sentence-transformers: dense layers behind the pooling, each in a folder of its own.

modules.json lists them, the transformer first, whose files are in the model's own folder:

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
WHOLE = "model.safetensors"  # a whole model, which some loaders prefer to the shards of an index in the same folder
WITHOUT_WEIGHTS = ("Transformer", "Pooling", "Normalize", "Dropout")  # ends of types; the first is the model itself
MAX_BYTES = 1 << 20


def find_modules(folder: Place) -> list[str]:
    """Return the folders of a model's further modules that have weights."""
    return [name for name, kind in _read_modules(folder) if kind and WHOLE in list_module(folder, name)]


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
    """Return the folder of each further module, and whether its kind has weights; none without a valid modules.json."""
    try:
        listed = strict_json.loads(read_small_file(folder / MODULES, MAX_BYTES), lenient=True)
    except (OSError, ValueError, CheckpointError):  # the model's own weights are read all the same
        return []
    found = [strict_json.as_object(one) for one in listed] if isinstance(listed, list) else []
    named = [(one.get("path"), not str(one.get("type")).endswith(WITHOUT_WEIGHTS)) for one in found]
    return [(name, kind) for name, kind in named if isinstance(name, str) and _is_folder_name(name)]


def _is_folder_name(name: str) -> bool:
    """Return whether a name from an untrusted file stays in the model's folder."""
    return name not in ("", ".", "..") and not any(sign in name for sign in "/\\:\0")
