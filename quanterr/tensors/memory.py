"""Memory of tensors: views of bytes, sizes of buffers, and room for whole weights, which is often freed again."""

from __future__ import annotations

import ctypes
from math import prod

from quanterr.lazy_torch import Tensor, torch
from quanterr.util.platform import allocate_pages

MIN_PAGED_BYTES = 1 << 20  # weights of this size and above get separate pages


def room_for_weight(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return an uninitialized float32 tensor.

    A large tensor on the CPU gets separate pages, so that freeing it leaves no hole between other blocks. They are
    huge pages, which the system provides faster.
    """
    n_bytes = 4 * prod(shape)
    if device != torch.device("cpu") or n_bytes < MIN_PAGED_BYTES:
        return torch.empty(shape, dtype=torch.float32, device=device)
    try:
        pages = allocate_pages(n_bytes)
    except OSError as error:
        raise MemoryError(f"{n_bytes} bytes for a weight") from error
    return torch.frombuffer(pages, dtype=torch.float32).view(shape)


def view_memory(host: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, which must outlive them."""
    memory = (ctypes.c_char * (host.numel() * host.itemsize)).from_address(host.data_ptr())
    return memoryview(memory).cast("B")


def round_up(n_bytes: int) -> int:
    """Round up to a power of two, so that weights of similar size use the same buffer."""
    return max(1 << (n_bytes - 1).bit_length(), 64) if n_bytes else 64
