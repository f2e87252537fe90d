"""A GGUF file as an original: its weights under the names, and in the layout, in which its model is saved.

The file is paired with the model that its config describes, of which only names and shapes are known, as pairing undoes
what llama.cpp's converter does to names, orders and numbers. Every parameter of the model must be in the file, and
every tensor of the file in the model; otherwise, the config belongs to another model, and is refused.
"""

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from quanterr.checkpoints import Checkpoint, CheckpointFile, Entry
from quanterr.errors import CheckpointError, FormatMismatch
from quanterr.evaluation.models.building import Architecture, read_config
from quanterr.evaluation.models.folder import is_language_model, model_folder
from quanterr.evaluation.models.gguf_config import INSTEAD
from quanterr.evaluation.models.layouts import Rows
from quanterr.evaluation.models.names import find_twins
from quanterr.evaluation.models.rows import RowsFile
from quanterr.pairing import pair
from quanterr.pairing.model import Bucket, Pair
from quanterr.pairing.views import undo_views
from quanterr.selection import LayerSelection
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display, itemize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shape = tuple[int, ...]


class _Described(CheckpointFile):
    """The tensors of a model of which only names and shapes are known."""

    is_certain = True

    def __init__(self, path: str) -> None:
        """Keep the ``path`` for messages; no file is opened."""
        self.path, self.size = Path(path), 0

    def read_into(self, view: memoryview, offset: int) -> None:
        """Raise CheckpointError, as only headers are known, which are enough to pair a GGUF file."""
        raise CheckpointError(f"{self}: the values of its model are not known before they are read")


def as_original(checkpoint: Checkpoint, config: str | os.PathLike[str] | None) -> Checkpoint:
    """Return a GGUF file of a language model under the names of its model, and any other checkpoint unchanged.

    ``config`` is the config.json of the model, or its folder, which also has the tokenizer, if they should not be
    derived from the file.

    Raises:
        CheckpointError: no config follows from the file, or the model lacks some of the tensors, or the file does.
    """
    if not is_language_model(checkpoint):
        return checkpoint
    given = None if config is None else Path(config)
    if given is not None and not given.is_dir():
        given = given.parent
    renamed = Checkpoint(checkpoint.path, checkpoint.kind, checkpoint.files, {}, folder=given, source=checkpoint)
    model, fields = _build(renamed)
    entries = _find_entries(checkpoint, model, fields)
    return Checkpoint(
        checkpoint.path,
        checkpoint.kind,
        checkpoint.files,
        entries,
        checkpoint.metadata,
        fields,
        revision=checkpoint.revision,
        notes=checkpoint.notes,
        folder=given,
        source=checkpoint,
    )


def describe_model(checkpoint: Checkpoint) -> Checkpoint:
    """Return the names and shapes of the model of a GGUF file; its values cannot be read.

    Raises:
        CheckpointError: no config follows from the file.
    """
    model, fields = _build(checkpoint)
    return _describe(checkpoint, _list_saved_shapes(model), fields)


def _build(checkpoint: Checkpoint) -> tuple["PreTrainedModel", JsonObject]:
    """Return the model that a file describes, without values, and its configuration."""
    with model_folder(checkpoint, with_tokenizer=False) as folder:
        described = read_config(folder)
    return Architecture(described, torch.float32).build(), {"config.json": described.to_dict()}


def _describe(checkpoint: Checkpoint, shapes: Mapping[str, Shape], fields: JsonObject) -> Checkpoint:
    file = _Described(checkpoint.path)
    described = {name: Entry(name, "F32", shape, file, 0, 4 * prod(shape)) for name, shape in shapes.items()}
    return Checkpoint(checkpoint.path, "model", (), described, config=fields)


def find_parts(original: Checkpoint) -> dict[str, list[str]]:
    """Map each tensor of a GGUF file to the model's tensors that it holds entirely; empty for other originals."""
    tensors_by_stored: dict[str, list[str]] = {}
    for name, entry in original.entries.items() if original.source else ():
        file = entry.file
        if isinstance(file, RowsFile) and len(file.sources) == 1:
            [stored] = file.sources
            tensors_by_stored.setdefault(stored, []).append(name)
    return tensors_by_stored


def _find_entries(checkpoint: Checkpoint, model: "PreTrainedModel", fields: JsonObject) -> dict[str, Entry]:
    """Return the model's tensors, read from the file.

    Raises:
        CheckpointError: one of the two lacks some tensors, or a tensor has another form than the model's.
    """
    shapes, where = _list_saved_shapes(model), display(checkpoint.path)
    pairing = pair(_describe(checkpoint, shapes, fields), checkpoint, LayerSelection(()))
    left = {item.name for item in pairing.leftovers if item.bucket is not Bucket.CONSUMED}
    left |= {each.name for each in pairing.pairs if each.name not in shapes}
    left = {name for name in left if checkpoint.gguf is None or not checkpoint.gguf.predicts(name)}
    if left:
        lacks, extra = sorted(left & shapes.keys()), sorted(left - shapes.keys())
        lacking = f"it lacks {itemize(lacks, 3)} of the model, or has another shape of it" if lacks else ""
        unknown = f"the model lacks {count(len(extra), 'tensor')} of it, {itemize(extra, 3)}" if extra else ""
        unread = (item.reason for item in pairing.leftovers if item.bucket in (Bucket.UNSUPPORTED, Bucket.ERROR))
        both = "; ".join(text for text in (lacking, unknown, next(unread, "")) if text)
        raise CheckpointError(f"{where}: {type(model).__name__} is not its model: {both}; {INSTEAD}")
    return {each.name: _make_entry(each, shapes[each.name], where) for each in pairing.pairs}


def _list_saved_shapes(model: "PreTrainedModel") -> Mapping[str, Shape]:
    """Return names and shapes of the tensors of a model as ``save_pretrained`` writes them, tied ones once."""
    from transformers.core_model_loading import revert_weight_conversion

    twins, state = find_twins(model), model.state_dict()
    order = {name: n for n, name in enumerate(state)}
    once = {
        name: tensor
        for name, tensor in state.items()
        if all(order.get(twin, -1) > order[name] for twin in twins.get(name, ()))
    }
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, once).items()}


def _make_entry(each: Pair, shape: Shape, where: str) -> Entry:
    """Return a tensor of the model, read from the file's tensors in the form of the model.

    Raises:
        CheckpointError: the converter's changes cannot be undone.
    """
    try:
        weight = undo_views(each.original, replace(each.quantized, alternatives=()))
    except FormatMismatch as mismatch:
        raise CheckpointError(f"{where}: {display(each.name)}: {mismatch}; {INSTEAD}") from mismatch
    if weight.shape != shape or each.original.n != prod(shape):
        raise CheckpointError(
            f"{where}: {display(each.name)}: stored as {list(weight.shape)}, in another form than the model's "
            f"{list(shape)}; {INSTEAD}"
        )
    return RowsFile(each.name, shape, [(weight, Rows(each.name, 0, shape[0] if shape else 1))]).entry
