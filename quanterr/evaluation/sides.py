"""The weights of both checkpoints by the name and in the shape in which the original stores them, whole.

Pairing may have changed the original's side where the other stores a weight otherwise: transposed, a norm plus one,
-exp of it. A model needs its own convention: there the quantized weight is brought back. Factors that a quantizer
folded into norms stay where the file has them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quanterr.checkpoints import Checkpoint
from quanterr.errors import CheckpointError, FormatMismatch
from quanterr.evaluation.memory import room_for_weight
from quanterr.evaluation.rounding import DECLARED, NONE, Rounding
from quanterr.findings.files import RECIPE
from quanterr.formats import Weight
from quanterr.pairing import pair, views
from quanterr.pairing.alternatives import choose_alternatives
from quanterr.pairing.plan import Bucket, Pair, Plan
from quanterr.pairing.sampling import on_cpu
from quanterr.pairing.side import Recognized, Side
from quanterr.pairing.smoothing import undo_smoothing
from quanterr.selection import Selection
from quanterr.tensors.chunks import CPU_CHUNK, CUDA_CHUNK, Cut
from quanterr.tensors.devices import CPU
from quanterr.tensors.workspace import Workspace
from quanterr.util.text import display

Back = Callable[[Tensor], Tensor]

# Leftovers that a model does without: it computes them, or the converter did; scales and labels.
NOT_NEEDED = (Bucket.CONSUMED, Bucket.FILTERED_OUT)


class Sides:
    """The original, and the quantized checkpoints in its terms."""

    def __init__(self, original: Checkpoint, device: torch.device = CPU) -> None:
        """Recognize its weights, which are dequantized on the device.

        Raises:
            CheckpointError: one that is stored in no known way.
        """
        self.checkpoint, self._recognized, self.device = original, Recognized(), device
        side = Side("original", original, self._recognized)
        side.attach_siblings()
        self.weights = {name: _recognized(side, name) for name in side.codes}
        self._workspace = Workspace(device)
        self._chunk = CUDA_CHUNK if device.type == "cuda" else CPU_CHUNK
        self.read_bytes = 0

    def get(self, name: str) -> Tensor:
        """A tensor of the original."""
        return self.whole(self.weights[name])

    def whole(self, weight: Weight) -> Tensor:
        """A weight, dequantized chunk by chunk into one float32 tensor of its shape."""
        self.read_bytes += weight.nbytes
        rows, cols = weight.matrix
        out = room_for_weight((rows, cols), self._workspace.device)
        with torch.inference_mode():
            for chunk in Cut(rows, cols, self._chunk):
                values = weight.dequantize(chunk, self._workspace).weight
                out[chunk.row : chunk.stop_row, chunk.col : chunk.stop_col] = values
        return out.view(weight.shape)


class Candidate:
    """A quantized checkpoint in the original's terms."""

    def __init__(
        self, sides: Sides, quantized: Checkpoint, activations: str = NONE, kv: str = NONE, undo: bool = True
    ) -> None:
        """Pair it with the original; ``activations`` and ``kv`` are how its runtime rounds: see rounding.py.

        ``undo``: :meth:`compared` undoes factors that a quantizer folded elsewhere, which takes the original's values.

        Raises:
            CheckpointError: a weight that cannot be brought into the original's shape.
        """
        self.sides, self.checkpoint = sides, quantized
        self.plan: Plan = choose_alternatives(
            pair(sides.checkpoint, quantized, Selection([]), sides._recognized), undo=False
        )
        virtual = quantized.kind == RECIPE  # its files are none, and declare nothing
        inputs, cache = (NONE if virtual and way == DECLARED else way for way in (activations, kv))
        self.rounding = Rounding(self.plan, quantized.entries, inputs, cache, sides.device)
        self.found = {each.name: (each.quantized, self._back(each)) for each in self.plan.pairs}
        self.unfolded = self._unfolded() if undo else {}
        left = [item for item in self.plan.leftovers if item.bucket not in NOT_NEEDED]
        self.not_found = {item.name: item.reason for item in left if item.name in sides.weights}
        self.unused = {item.name: item.reason for item in left if item.side == "quantized"}

    @property
    def names(self) -> list[str]:
        """Stored names of all that its model is made of: what is not found is taken from the original."""
        return list(dict.fromkeys([*self.found, *self.sides.weights]))

    def get(self, name: str) -> Tensor:
        """A tensor of it by the original's name; the original's own where it has none."""
        if name not in self.found:
            return self.sides.get(name)
        weight, back = self.found[name]
        return back(self.sides.whole(weight))

    def compared(self, name: str) -> Tensor:
        """The same with the factors undone that a quantizer folded elsewhere: what compares with the original's."""
        if name not in self.unfolded:
            return self.get(name)
        weight, back = self.unfolded[name]
        return back(self.sides.whole(weight))

    def _unfolded(self) -> dict[str, tuple[Weight, Back]]:
        """Weights that are others once all factors are undone."""
        with on_cpu() as workspaces:
            undone, _ = undo_smoothing(list(self.plan.pairs), workspaces)
        return {
            after.name: (after.quantized, self._back(after))
            for before, after in zip(self.plan.pairs, undone, strict=True)
            if after.quantized is not before.quantized
        }

    def _back(self, each: Pair) -> Back:
        """What brings the quantized weight into the original's convention and shape."""
        stored = self.sides.weights.get(each.name)
        if stored is None:  # a head that only this side stores
            return lambda tensor: tensor
        back = _inverse(each.original.dequantize)
        if each.original.shape != stored.shape and each.original.shape != stored.shape[:-2] + stored.shape[:-3:-1]:
            raise CheckpointError(
                f"{display(each.name)}: paired as {list(each.original.shape)}, the original stores {list(stored.shape)}"
            )
        return partial(_shaped, shape=stored.shape, back=back)


def _recognized(side: Side, name: str) -> Weight:
    try:
        return side.recognized(name)
    except FormatMismatch as error:
        raise CheckpointError(f"{display(side.checkpoint.path)}: {display(name)}: {error}") from error


def _shaped(tensor: Tensor, shape: tuple[int, ...], back: Back) -> Tensor:
    return back(tensor).reshape(shape)


def _inverse(dequantize: object) -> Back:
    """The inverse of a view of views.py that pairing laid on the original; the identity for what is no view."""
    function, args = getattr(dequantize, "func", None), list[Any](getattr(dequantize, "args", ()))
    if function is views._plus:
        return lambda tensor: tensor - args[1]
    if function is views._minus_exp:
        return lambda tensor: (-tensor).log()
    if function in (views._transposed, views._kernels_transposed):
        return lambda tensor: tensor.transpose(-1, -2).contiguous()
    return lambda tensor: tensor
