"""The weights of both checkpoints, each as one tensor, with the original's names and shapes.

If the candidate stores a weight in another way (transposed, a norm plus one, -exp, times a number of the
configuration), pairing changes the original's side. The model needs the original's form, so these views are undone in
the quantized weight (pairing/views.py). Rows of a vocabulary that the converter left out are taken from the original.
Factors that a quantizer folded into norms stay where the file has them.
"""

from collections.abc import Collection, Iterator, Sequence
from copy import copy
from functools import partial

import torch
from torch import Tensor

from quanterr.checkpoints import Checkpoint
from quanterr.checkpoints.base import RECIPE
from quanterr.errors import CheckpointError, FormatMismatch
from quanterr.evaluation.models.layouts import Layout
from quanterr.evaluation.models.rows import RowsFile
from quanterr.evaluation.models.units import CPU
from quanterr.evaluation.running.rounding import DECLARED, NONE, Rounding
from quanterr.formats import Weight
from quanterr.formats.reading import open_reader
from quanterr.kernel.decoding import read_into
from quanterr.kernel.library import choose_kernel
from quanterr.pairing import pair
from quanterr.pairing.alternatives import choose_alternatives
from quanterr.pairing.model import Bucket, Pair, Pairing
from quanterr.pairing.side import CheckpointSide, WeightCache
from quanterr.pairing.smoothing import undo_smoothing
from quanterr.pairing.views import hold_values, is_view, undo_views
from quanterr.selection import LayerSelection
from quanterr.tensors.chunks import CPU_CHUNK, DEVICE_CHUNK, Chunk, Cut
from quanterr.tensors.memory import room_for_weight
from quanterr.tensors.pool import map_in_threads
from quanterr.tensors.workspace import Workspace
from quanterr.util.text import display

# Leftovers that a model does not need: tensors that it or the converter computes, scales and labels.
NOT_NEEDED = (Bucket.CONSUMED, Bucket.FILTERED_OUT)


class OriginalWeights:
    """The original's weights, and functions that dequantize weights of either side."""

    def __init__(self, original: Checkpoint, device: torch.device = CPU) -> None:
        """Recognize the original's weights; all weights are dequantized on the device.

        Raises:
            CheckpointError: a weight is stored in no known format.
        """
        self.checkpoint, self._recognized, self.device = original, WeightCache(), device
        side = CheckpointSide("original", original, self._recognized)
        side.attach_siblings()
        self.weights = {name: _recognize(side, name) for name in side.codes}
        on_cpu = device.type == "cpu"
        self._kernel = choose_kernel().kernel if on_cpu else None
        self._chunk = CPU_CHUNK if on_cpu else DEVICE_CHUNK
        self._workspaces = [Workspace(device) for _ in range(torch.get_num_threads() if on_cpu else 1)]
        self.read_bytes = 0
        self.layout: Layout | None = None  # the layout of a denoiser, once it is computed

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight."""
        return {name: weight.shape for name, weight in self.weights.items()}

    def get(self, name: str) -> Tensor:
        """Return a tensor of the original, float32."""
        return self.whole(self.weights[name])

    def whole(self, weight: Weight) -> Tensor:
        """Dequantize a weight, chunk by chunk, into one float32 tensor of its shape."""
        self.read_bytes += weight.nbytes
        out = room_for_weight(weight.matrix, self.device)
        chunks = Cut(*weight.matrix, self._chunk)
        threads = min(len(chunks), len(self._workspaces))
        if threads < 2:
            self._read(weight, out, chunks, self._workspaces[0])
            return out.view(weight.shape)
        shares = [chunks[n::threads] for n in range(threads)]
        with map_in_threads(partial(self._read, weight, out), shares, self._workspaces[:threads]) as read:
            list(read)  # raises their errors
        return out.view(weight.shape)

    def _read(self, weight: Weight, out: Tensor, chunks: Sequence[Chunk], workspace: Workspace) -> None:
        with torch.inference_mode():
            for chunk in chunks:
                rows = out[chunk.row : chunk.stop_row, chunk.col : chunk.stop_col]
                read_into(rows, self._kernel, weight, chunk, workspace)


class Candidate:
    """A quantized checkpoint with the original's names and shapes."""

    def __init__(
        self,
        originals: OriginalWeights,
        quantized: Checkpoint,
        activations: str = NONE,
        kv: str = NONE,
        ignored: Collection[str] = (),
        undo: bool = True,
    ) -> None:
        """Pair the checkpoint with the original.

        ``activations`` and ``kv`` name how its runtime rounds inputs, keys and values (rounding.py); ``ignored`` are
        tensors of either side that the model does not need, such as a VAE in the same file.

        With ``undo``, :meth:`compared` undoes factors that a quantizer folded into other weights, which requires the
        original's values.

        Raises:
            CheckpointError: a weight cannot be brought into the original's shape.
        """
        self.originals, self.checkpoint = originals, quantized
        self.plan: Pairing = choose_alternatives(
            pair(originals.checkpoint, quantized, LayerSelection([]), originals._recognized), undo=False
        )
        self._activations = activations
        self.rounding = self._make_rounding(kv)
        self.pairs = {each.name: each for each in self.plan.pairs}
        for each in self.plan.pairs:
            self._check_form(each)
        self.unfolded = self._unfold() if undo else {}
        left = [
            item
            for item in self.plan.leftovers
            if item.bucket not in NOT_NEEDED and item.entries[0].name not in ignored
        ]
        self.not_found = {item.name: item.reason for item in left if item.name in originals.weights}
        self.unused = {item.name: item.reason for item in left if item.side == "quantized"}

    def _make_rounding(self, kv: str) -> Rounding:
        is_virtual = self.checkpoint.kind == RECIPE  # a recipe has no files that could declare roundings
        inputs, cache = (NONE if is_virtual and way == DECLARED else way for way in (self._activations, kv))
        return Rounding(self.plan, self.checkpoint.entries, inputs, cache, self.originals.device)

    def with_caches(self, name: str, kv: Sequence[str]) -> Iterator[tuple[str, "Candidate"]]:
        """Yield name and candidate for each rounding of keys and values; all share the weights."""
        for way in kv:
            with_cache = copy(self)
            with_cache.rounding = self._make_rounding(way)
            yield name if len(kv) == 1 else f"{name}, kv {way.lower()}", with_cache

    @property
    def names(self) -> list[str]:
        """The stored names of all tensors of its model, including those that only the original has."""
        return list(dict.fromkeys([*self.pairs, *self.originals.weights]))

    def get(self, name: str) -> Tensor:
        """Return a tensor by the original's name; the original's if the candidate lacks it."""
        if name not in self.pairs:
            return self.originals.get(name)
        return self._read(self.pairs[name])

    def unfold(self, name: str) -> Tensor:
        """Return the tensor without factors that a quantizer folded into other weights, for comparison."""
        if name not in self.unfolded:
            return self.get(name)
        return self._read(self.unfolded[name])

    def _unfold(self) -> dict[str, Pair]:
        """Return the pairs that change if all folded factors are undone."""
        with open_reader() as reader:
            undone, _ = undo_smoothing(list(self.plan.pairs), reader, self.plan.key_heads)
        return {
            after.name: after
            for before, after in zip(self.plan.pairs, undone, strict=True)
            if after.quantized is not before.quantized
        }

    def _read(self, each: Pair) -> Tensor:
        """Return the quantized weight of a pair in the original's convention and shape."""
        values, stored = self.originals.whole(each.quantized), self.originals.weights.get(each.name)
        if stored is None:  # a head that only this side stores
            return values
        if is_view(each.original):
            values = self.originals.whole(undo_views(each.original, hold_values(each.quantized, values)))
        return values.view(stored.shape)

    def _check_form(self, each: Pair) -> None:
        """Raise CheckpointError if the quantized weight of a pair cannot be brought into the original's form."""
        stored = self.originals.weights.get(each.name)
        try:
            restored = undo_views(each.original, each.quantized)
        except FormatMismatch as mismatch:
            raise CheckpointError(f"{display(each.name)}: {mismatch}") from mismatch
        if stored is not None and restored.n != stored.n:
            raise CheckpointError(
                f"{display(each.name)}: paired as {list(each.original.shape)}, the original stores {list(stored.shape)}"
            )


def _recognize(side: CheckpointSide, name: str) -> Weight:
    file = side.codes[name].file
    if isinstance(file, RowsFile) and file.whole is not None:
        return file.whole
    try:
        return side.recognize(name)
    except FormatMismatch as error:
        raise CheckpointError(f"{display(side.checkpoint.path)}: {display(name)}: {error}") from error
