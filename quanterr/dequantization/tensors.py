"""The tensors to write: from a checkpoint alone, or in the names, shapes and dtypes of its original."""

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

SHOWN = 5  # tensors named in an error
FLOATS = ("F64", "F32", "F16", "BF16")


class WrittenTensor(NamedTuple):
    """A tensor of the output. Its values are decoded from ``weight``, or its bytes copied from ``entry``."""

    name: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    weight: Weight | None
    entry: Entry | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor in the output."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def list_tensors(checkpoint: Checkpoint, selection: LayerSelection, dtype: str) -> list[WrittenTensor]:
    """Return the tensors of a checkpoint, with codes as floats of ``dtype`` and all others as they are stored.

    Scales of activations and caches are left out: without codes, nothing reads them.

    Raises:
        CheckpointError: a selected tensor is in no readable format, or its form in the model is not known; or a label
            is damaged.
        UsageError: the checkpoint is a GGUF file, whose names are of another program.
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
    found, refused = [], []
    for name in filter(selection.takes, side.codes):
        try:
            weight = own_form.restore(side.recognize(name))
        except FormatMismatch as mismatch:
            refused += [] if is_auxiliary(name) else [f"{display(name)}: {mismatch}"]
            continue
        if weight.has_codes and not _stores_shape(side, weight):
            refused.append(f"{display(name)}: {weight.format} does not store its shape: give --like ORIGINAL")
        elif weight.has_codes:
            found.append(WrittenTensor(name, dtype, weight.shape, weight))
        elif weight.codes.name != name:  # floats in another order
            found.append(WrittenTensor(name, weight.codes.dtype, weight.shape, weight))
        elif not is_auxiliary(name):
            found.append(WrittenTensor(name, weight.codes.dtype, weight.codes.shape, None, weight.codes))
    _refuse(checkpoint, refused)
    return found


def _stores_shape(side: CheckpointSide, weight: Weight) -> bool:
    """Return whether what is stored determines a weight's shape: False if the codes may be padded or regrouped.

    A format that takes the shape from the original also accepts another one.
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
    pairs = [replace(one, quantized=replace(one.quantized, alternatives=())) for one in pairing.pairs]
    return replace(pairing, pairs=pairs)


def list_tensors_like(
    original: Checkpoint, checkpoint: Checkpoint, selection: LayerSelection, dtype: str | None, by_names: bool = False
) -> tuple[list[WrittenTensor], dict[str, int]]:
    """Return the tensors of an original with the values of its quantized checkpoint.

    Names, shapes, the order of rows and the numbers are the original's form; so is the dtype, unless one is given. What
    a converter computed anew is copied from the original, and so are rows that it drops, of no token or position.
    ``by_names`` means that the original has no values that could choose among readings: a convention decides.

    Returns:
        The tensors, and the number of tensors that the converter left to another file or left out, by reason.

    Raises:
        CheckpointError: a tensor of either checkpoint has no counterpart in the other or cannot be brought into the
            original's form, or a label is damaged.
        UsageError: a pattern of the selection matches no weight.
    """
    # Factors that a quantizer moved between weights and norms stay where they are: the norms have them, too.
    pairing = pair(original, checkpoint, selection)
    pairing = _drop_alternatives(pairing) if by_names else choose_alternatives(pairing, undo=False)
    made: dict[str, WrittenTensor] = {}
    refused = []
    for one in pairing.pairs:
        try:
            made[one.name] = _make_like(one, dtype)
            if by_names and not one.quantized.has_codes and one.quantized.codes.dtype in FLOATS:
                made[one.name] = made[one.name]._replace(dtype=one.quantized.codes.dtype)
        except FormatMismatch as mismatch:
            refused.append(f"{display(one.name)}: {mismatch}")
    lost = [left for left in pairing.leftovers if left.bucket not in (Bucket.CONSUMED, Bucket.FILTERED_OUT)]
    reasons = {left.reason for left in lost if left.side == "original"}
    lost = [left for left in lost if left.side == "original" or left.reason not in reasons]
    refused += [f"{display(left.name)}: {left.reason}" for left in lost]
    _refuse(checkpoint, refused)
    copied = {entry.name: entry for entry in _list_consumed(pairing.leftovers)}
    found = []
    for name, entry in original.entries.items():
        if name in made:
            found.append(made[name])
        elif name in copied:
            found.append(WrittenTensor(name, entry.dtype, entry.shape, None, entry))
    absent = (left for left in pairing.leftovers if left.side == "original" and left.bucket == Bucket.FILTERED_OUT)
    return found, dict(Counter(left.reason for left in absent if left.reason != NOT_SELECTED))


def _list_consumed(leftovers: Iterable[Leftover]) -> Iterable[Entry]:
    return (
        entry
        for left in leftovers
        if left.side == "original" and left.bucket == Bucket.CONSUMED
        for entry in left.entries
    )


def _make_like(one: Pair, dtype: str | None) -> WrittenTensor:
    """Return a pair's tensor in the original's form.

    Raises:
        FormatMismatch: the original has another form than can be restored or written.
    """
    if one.contradiction is not None:
        raise FormatMismatch(
            f"{one.contradiction.prescribed}, but its values fit the original better as {one.contradiction.other}: "
            "they would be written wrongly; quanterr compare shows both errors"
        )
    stored, weight = one.original_codes[0], undo_views(one.original, one.quantized)
    if stored.name != one.name:
        held = f"the original has no floats of this name, but {stored}"
        raise FormatMismatch(f"{held}: leave the tensor out (--exclude), or give an original in floats")
    if weight.encoding == "bits":
        return WrittenTensor(one.name, weight.codes.dtype, stored.shape, None, weight.codes)
    if weight.n != stored.n:
        raise FormatMismatch(f"the original stores codes, {stored}: give an original in floats")
    kept = stored.dtype if stored.dtype in FLOATS else None
    chosen = (dtype if weight.has_codes else None) or kept or dtype
    if chosen is None:
        raise FormatMismatch(f"the original stores codes, {stored}: give the dtype to write (--dtype)")
    return WrittenTensor(one.name, chosen, stored.shape, weight)


def _refuse(checkpoint: Checkpoint, refused: Sequence[str]) -> None:
    """Raise CheckpointError if tensors cannot be written: a file that lacks some would be taken for the whole model."""
    if refused:
        more = f" and {len(refused) - SHOWN:,} more" if len(refused) > SHOWN else ""
        raise CheckpointError(
            f"{display(checkpoint.path)}: {count(len(refused), 'tensor')} cannot be written: "
            f"{'; '.join(refused[:SHOWN])}{more}"
        )


def count_formats(tensors: Iterable[WrittenTensor]) -> dict[str, int]:
    """Return the number of weights that are decoded, by format."""
    return dict(Counter(one.weight.format for one in tensors if one.weight is not None))
