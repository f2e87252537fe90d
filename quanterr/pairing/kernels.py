"""The order of axes of convolution kernels, which MLX stores with the inputs last (converters/mlx.py).

Shapes show the order, unless two axes have the same length. Then the order of the file's other kernels is taken, and a
sample of the values confirms it.
"""

from collections.abc import Iterator, Sequence
from math import prod

from msgspec.structs import replace

from quanterr.formats import Weight
from quanterr.pairing.converters import mlx
from quanterr.pairing.model import Alternative, Contradiction, Pair
from quanterr.pairing.names import EXPERTS, canonicalize
from quanterr.pairing.sampling import ORDER
from quanterr.pairing.views import move_inputs, move_outputs, reshape_weight

Shape = tuple[int, ...]
AS_IN_TORCH = "in torch's order of axes"


class Kernels:
    """The kernels of two checkpoints, one of which may store them in MLX's order."""

    def __init__(self, side: int | None) -> None:
        """Take the side (0 or 1) that MLX wrote, where its order is expected; None if neither is known to be MLX's."""
        self._side = side
        self._has_unmoved = False  # whether the shape of some kernel on MLX's side shows torch's order

    def unify(self, x: Weight, y: Weight) -> tuple[Weight, Weight, tuple[Alternative, ...]]:
        """Bring two weights of one name into torch's order if shapes show MLX's; also return other interpretations."""
        name, weights = x.name, (x, y)
        if x.shape == y.shape:
            is_kernel = self._side is not None and _is_kernel(name, x.shape) and not _is_plain(x.shape)
            if is_kernel and not _find_interpretations(y, x.shape):
                self._has_unmoved = True
            return x, y, ()
        for side in (self._side,) if self._side is not None else (1, 0) if _has_kernel_name(name, x.shape) else ():
            interpretations = _find_interpretations(weights[side], weights[1 - side].shape)
            if interpretations:
                first, others = interpretations[0], tuple(_offer(side, other, x) for other in interpretations[1:])
                return (first, y, others) if side == 0 else (x, first, others)
        return x, y, ()

    def settle(self, pair: Pair) -> Pair:
        """Return a pair with the order of the file's other kernels, if its shapes do not show an order."""
        shape, is_known = pair.original.shape, self._side is not None
        side = 1 if not is_known and _has_kernel_name(pair.name, shape) else self._side
        if side is None or not pair.original.codes.shape == shape == pair.quantized.codes.shape:
            return pair
        stored = (pair.original, pair.quantized)[side]
        interpretations = () if stored.encoding == "bits" or _is_plain(shape) else _find_interpretations(stored, shape)
        if not interpretations:
            return pair
        if not is_known or self._has_unmoved or not _is_kernel(pair.name, shape):
            offered = tuple(_offer(side, other, pair.original) for other in interpretations)
            return replace(pair, alternatives=(*pair.alternatives, *offered))
        contradiction = Contradiction(f"{interpretations[0].evidence[0]}, as MLX expects", AS_IN_TORCH)
        offered = tuple(_offer(side, other, pair.original) for other in interpretations[1:])
        as_stored = replace(_offer(side, stored, pair.original), contradiction=contradiction)
        first = replace(pair, original=interpretations[0]) if side == 0 else replace(pair, quantized=interpretations[0])
        return replace(first, alternatives=(*pair.alternatives, *offered, as_stored))


def _offer(side: int, interpretation: Weight, original: Weight) -> Alternative:
    return Alternative(interpretation, None, ORDER) if side == 0 else Alternative(original, interpretation, ORDER)


def _find_interpretations(weight: Weight, shape: Shape) -> Sequence[Weight]:
    """Return the interpretations of a weight of MLX as a kernel with this shape in torch, the likeliest first."""
    fits = len(shape) > 2 and weight.n == prod(shape) > 0
    is_stack = EXPERTS in canonicalize(weight.name)[0].split(".")
    return tuple(_read(weight, shape)) if fits and not is_stack else ()


def _read(weight: Weight, shape: Shape) -> Iterator[Weight]:
    for kernel in mlx.KERNELS:
        stored = kernel.store(shape)
        if weight.shape in (stored, (stored[0], prod(stored[1:]))):
            moved = (move_outputs if kernel.is_transposed else move_inputs)(weight, shape)
            yield replace(moved, evidence=(kernel.text, *moved.evidence))
    if weight.shape == (shape[0], prod(shape[1:])):
        yield reshape_weight(weight, shape)


def _has_kernel_name(name: str, shape: Shape) -> bool:
    """Return whether a weight is a kernel of a language model, by its name alone."""
    return len(shape) == 3 and canonicalize(name)[0].rpartition(".")[2] in mlx.KERNEL_NAMES


def _is_kernel(name: str, shape: Shape) -> bool:
    """Return whether a weight is the kernel of a convolution, by its name and its number of axes."""
    path, ending = canonicalize(name)
    is_named = not ending and (name.endswith(".weight") or path.endswith(mlx.NORMALIZED))
    return is_named and (len(shape) > 3 or (len(shape) == 3 and "conv" in path))


def _is_plain(shape: Shape) -> bool:
    """Return whether kernels have one input or one position, so that their elements have the same order in MLX."""
    return len(shape) < 3 or shape[1] == 1 or prod(shape[2:]) == 1
