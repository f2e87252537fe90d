"""The tensors to write, derived from a checkpoint alone, or with the names, shapes and dtypes of its original."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from msgspec.structs import replace

from quanterr.checkpoints import Checkpoint, Entry
from quanterr.checkpoints.base import DTYPE_BITS
from quanterr.errors import CheckpointError, FormatMismatch, UsageError
from quanterr.formats import Weight, is_auxiliary
from quanterr.pairing import pair
from quanterr.pairing.alternatives import choose_alternatives
from quanterr.pairing.conversion import OwnForm
from quanterr.pairing.model import NOT_SELECTED, Bucket, Leftover, Pair, Pairing
from quanterr.pairing.side import CheckpointSide
from quanterr.pairing.views import undo_views
from quanterr.selection import LayerSelection
from quanterr.util.text import count, display

MAX_NAMED = 5  # maximum number of tensors that an error names
FLOATS = ("F64", "F32", "F16", "BF16")


class WrittenTensor(NamedTuple):
    """A tensor of the output. Its values are decoded from ``weight``, or its bytes copied from ``entry``."""

    name: str
    dtype: str  # the dtype's name in safetensors
    shape: tuple[int, ...]
    weight: Weight | None
    entry: Entry | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor in the output."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def list_tensors(checkpoint: Checkpoint, selection: LayerSelection, dtype: str) -> list[WrittenTensor]:
    """Return the tensors of a checkpoint; those with codes become floats of ``dtype``, all others stay as they are.

    Scales of activations and caches are left out, as programs do not read them without codes.

    Raises:
        CheckpointError: a selected tensor is in no readable format, its shape in the model is unknown, or a label is
                    damaged.
                UsageError: the checkpoint is a GGUF file, whose names are llama.cpp's.
    """
    if checkpoint.gguf is not None:
        raise UsageError(
            f"{display(checkpoint.path)}: the names and the order of rows in a GGUF file are those of llama.cpp, and "
            "its model is not known: give --like ORIGINAL"
        )
    side = CheckpointSide("checkpoint", checkpoint)
    side.attach_siblings()
    own_form = OwnForm(checkpoint)
    selection.check(side.codes)
    tensors, refused = [], []
    for name in filter(selection.takes, side.codes):
        try:
            weight = own_form.restore(side.recognize(name))
        except FormatMismatch as mismatch:
            refused += [] if is_auxiliary(name) else [f"{display(name)}: {mismatch}"]
            continue
        if weight.has_codes and not _stores_shape(side, weight):
            refused.append(f"{display(name)}: {weight.format} does not store its shape: give --like ORIGINAL")
        elif weight.has_codes:
            tensors.append(WrittenTensor(name, dtype, weight.shape, weight))
        elif weight.codes.name != name:  # floats in another order
            tensors.append(WrittenTensor(name, weight.codes.dtype, weight.shape, weight))
        elif not is_auxiliary(name):
            tensors.append(WrittenTensor(name, weight.codes.dtype, weight.codes.shape, None, weight.codes))
    _refuse(checkpoint, refused)
    return tensors


def _stores_shape(side: CheckpointSide, weight: Weight) -> bool:
    """Return whether the stored tensors determine a weight's shape; False if the codes may be padded or regrouped.

    To find out, another shape is tried: formats that take the shape from the original accept it.
    """
    if len(weight.shape) != 2:
        return True
    rows, cols = weight.shape
    others = [(rows - 1, cols), (rows, cols - 1)] + [(rows // 2, 2 * cols)] * (rows % 2 == 0)
    for shape in others:
        try:
            if side.recognize(weight.name, shape).shape == shape:
                return False
        except FormatMismatch:
            pass
    return True


def _drop_alternatives(pairing: Pairing) -> Pairing:
    pairs = [replace(pair, quantized=replace(pair.quantized, alternatives=())) for pair in pairing.pairs]
    return replace(pairing, pairs=pairs)


def list_tensors_like(
    original: Checkpoint, checkpoint: Checkpoint, selection: LayerSelection, dtype: str | None, by_names: bool = False
) -> tuple[list[WrittenTensor], dict[str, int]]:
    """Return the tensors of an original with the values of its quantized checkpoint.

    Names, shapes and the order of rows are those of the original, and so is the dtype if None is given. Changes of
    numbers are undone. Tensors that a converter computed, and rows of no token or position that it dropped, are copied
    from the original. ``by_names`` means that the original has no values that show how to interpret a weight, so
    that conventions decide.

    Returns:
        The tensors, and the number of tensors that the converter wrote to another file or left out, by reason.

    Raises:
        CheckpointError: a tensor of either checkpoint has no counterpart in the other or cannot be brought into the
            original's form, or a label is damaged.
        UsageError: a pattern of the selection matches no weight.
    """
    # Factors that a quantizer moved from weights to norms are not undone, as the written norms have them, too.
    pairing = pair(original, checkpoint, selection)
    pairing = _drop_alternatives(pairing) if by_names else choose_alternatives(pairing, undo=False)
    tensors_by_name: dict[str, WrittenTensor] = {}
    refused = []
    for each_pair in pairing.pairs:
        try:
            tensors_by_name[each_pair.name] = _make_like(each_pair, dtype)
            if by_names and not each_pair.quantized.has_codes and each_pair.quantized.codes.dtype in FLOATS:
                tensors_by_name[each_pair.name] = tensors_by_name[each_pair.name]._replace(
                    dtype=each_pair.quantized.codes.dtype
                )
        except FormatMismatch as mismatch:
            refused.append(f"{display(each_pair.name)}: {mismatch}")
    lost = [left for left in pairing.leftovers if left.bucket not in (Bucket.CONSUMED, Bucket.FILTERED_OUT)]
    reasons = {left.reason for left in lost if left.side == "original"}
    lost = [left for left in lost if left.side == "original" or left.reason not in reasons]
    refused += [f"{display(left.name)}: {left.reason}" for left in lost]
    _refuse(checkpoint, refused)
    copied = {entry.name: entry for entry in _list_consumed(pairing.leftovers)}
    tensors = []
    for name, entry in original.entries.items():
        if name in tensors_by_name:
            tensors.append(tensors_by_name[name])
        elif name in copied:
            tensors.append(WrittenTensor(name, entry.dtype, entry.shape, None, entry))
    absent = (left for left in pairing.leftovers if left.side == "original" and left.bucket == Bucket.FILTERED_OUT)
    return tensors, dict(Counter(left.reason for left in absent if left.reason != NOT_SELECTED))


def _list_consumed(leftovers: Iterable[Leftover]) -> Iterable[Entry]:
    return (
        entry
        for left in leftovers
        if left.side == "original" and left.bucket == Bucket.CONSUMED
        for entry in left.entries
    )


def _make_like(pair: Pair, dtype: str | None) -> WrittenTensor:
    """Return the tensor of a pair with the original's name, shape and numbers.

    Raises:
        FormatMismatch: the original's form cannot be restored or written.
    """
    if pair.contradiction is not None:
        raise FormatMismatch(
            f"{pair.contradiction.prescribed}, but its values fit the original better as {pair.contradiction.other}: "
            "they would be written wrongly; quanterr compare shows both errors"
        )
    stored, weight = pair.original_codes[0], undo_views(pair.original, pair.quantized)
    if stored.name != pair.name:
        held = f"the original has no floats of this name, but {stored}"
        raise FormatMismatch(f"{held}: leave the tensor out (--exclude), or give an original in floats")
    if weight.encoding == "bits":
        return WrittenTensor(pair.name, weight.codes.dtype, stored.shape, None, weight.codes)
    if weight.n != stored.n:
        raise FormatMismatch(f"the original stores codes, {stored}: give an original in floats")
    kept = stored.dtype if stored.dtype in FLOATS else None
    chosen = (dtype if weight.has_codes else None) or kept or dtype
    if chosen is None:
        raise FormatMismatch(f"the original stores codes, {stored}: give the dtype to write (--dtype)")
    return WrittenTensor(pair.name, chosen, stored.shape, weight)


def _refuse(checkpoint: Checkpoint, refused: Sequence[str]) -> None:
    """Raise CheckpointError if tensors cannot be written, as an incomplete file could be mistaken for the model."""
    if refused:
        more = f" and {len(refused) - MAX_NAMED:,} more" if len(refused) > MAX_NAMED else ""
        raise CheckpointError(
            f"{display(checkpoint.path)}: {count(len(refused), 'tensor')} cannot be written: "
            f"{'; '.join(refused[:MAX_NAMED])}{more}"
        )


def count_formats(tensors: Iterable[WrittenTensor]) -> dict[str, int]:
    """Return the number of weights that are decoded, by format."""
    return dict(Counter(tensor.weight.format for tensor in tensors if tensor.weight is not None))
