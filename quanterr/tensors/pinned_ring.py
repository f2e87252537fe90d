"""Copies from files to an accelerator: several threads read into pinned slots of memory, which streams copy.

One thread reads from the system's cache at a fraction of the rate at which an accelerator takes bytes from pinned
memory. The slots form a ring: while one is copied, the next are filled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue
from weakref import WeakValueDictionary

from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.devices import use_stream
from quanterr.tensors.memory import round_up, view_memory

SLOTS = 8
SLOT = 32 << 20  # maximum bytes of a slot: as many as a chunk of float32 has
PIECE = 2 << 20  # bytes that a thread reads at a time; pieces above 4 MiB halved the rate of reads from the cache
READERS = 8

Read = Callable[[memoryview, int], None]  # fills memory with bytes from a position on


class _Slot:
    """Pinned memory, and the last copy from it to the device."""

    def __init__(self, device: torch.device) -> None:
        self.copied = torch.Event(device=device)
        self._host = torch.empty(0, dtype=torch.uint8)

    def reserve(self, n_bytes: int) -> Tensor:
        """Return ``n_bytes`` of memory that can be overwritten."""
        self.copied.synchronize()
        if self._host.numel() < n_bytes:
            self._host = torch.empty(round_up(n_bytes), dtype=torch.uint8, pin_memory=True)
        return self._host[:n_bytes]


class PinnedRing:
    """The slots of a device and the threads that fill them; all workspaces of the device use them."""

    def __init__(self, device: torch.device) -> None:
        """Start with empty slots and without threads: both grow when they are needed."""
        self._device, self._readers = device, ThreadPoolExecutor(READERS)
        self._free = SimpleQueue[_Slot]()
        for _ in range(SLOTS):
            self._free.put(_Slot(device))

    def load(self, out: Tensor, read: Read, piece: int, copies: torch.Stream) -> None:
        """Fill ``out``, (n,) uint8 on the device, for work that this thread issues on its stream from now on.

        ``read`` fills ``piece`` bytes at a time, in several threads at once. ``copies`` is the stream that copies them,
        after the work that this thread has already issued, which may use ``out``.
        """
        computing, issued = torch.accelerator.current_stream(self._device), torch.Event(device=self._device)
        issued.record(computing)
        copies.wait_event(issued)
        step = SLOT // piece * piece
        for begin in range(0, out.numel(), step):
            part, slot = out[begin : begin + step], self._free.get()
            try:
                host = slot.reserve(part.numel())
                self._fill(view_memory(host), begin, read, piece)
                with use_stream(copies):
                    part.copy_(host, non_blocking=True)
                slot.copied.record(copies)
                computing.wait_event(slot.copied)
            finally:
                self._free.put(slot)

    def _fill(self, memory: memoryview, begin: int, read: Read, piece: int) -> None:
        """Fill memory with the bytes from ``begin`` on: ``piece`` bytes in this thread, the rest in the readers."""
        others = [
            self._readers.submit(read, memory[at : at + piece], begin + at) for at in range(piece, len(memory), piece)
        ]
        try:
            read(memory[:piece], begin)
        finally:
            wait(others)  # until the other readers have written to the slot, it may not be passed on
        for other in others:
            other.result()


_rings: WeakValueDictionary[torch.device, PinnedRing] = WeakValueDictionary()
_opening = threading.Lock()


def open_ring(device: torch.device) -> PinnedRing:
    """Return the ring of a device, which lives as long as any workspace uses it."""
    with _opening:
        ring = _rings.get(device)
        if ring is None:
            ring = _rings[device] = PinnedRing(device)
        return ring
