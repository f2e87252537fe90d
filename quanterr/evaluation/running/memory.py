"""The heap of an evaluation: blocks of weights are loaded and freed all the time and must not fragment it."""

from collections.abc import Iterator
from contextlib import contextmanager

from quanterr.util.platform import keep_freed_memory

PARAMETER = 1 << 20  # bytes: larger parameters stay out of the heap while a model is built
ACTIVATION = 32 << 20  # bytes: smaller freed blocks are kept for reuse afterwards; glibc allows no more
ACTIVATIONS = 256 << 20  # bytes that are kept until a unit of the model is done


@contextmanager
def heap_for_activations() -> Iterator[None]:
    """Keep the parameters that a model makes, and frees at once, out of the heap; then keep freed activations in it.

    What remains of a parameter comes after its memory. In the heap, the parameters would keep their addresses, which a
    limit of memory (``ulimit -v``) counts even though nothing was ever written there. Activations are reused because
    fresh pages cost a third of the time.
    """
    keep_freed_memory(PARAMETER, ACTIVATIONS)
    try:
        yield
    finally:
        keep_freed_memory(ACTIVATION, ACTIVATIONS)
