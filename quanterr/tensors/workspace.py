"""Reused buffers that bytes are read into and numbers are computed in.

An allocation above a hundred kilobytes costs a page fault per 4 KiB, more than the arithmetic on it. So each worker
keeps one :class:`Workspace`, and everything as large as a chunk lives in one of its named buffers. Nothing here grows
with the size of a weight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from functools import cache, partial
from math import prod
from typing import Any
from weakref import WeakValueDictionary

from quanterr.checkpoints import Entry
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.memory import round_up, view_memory
from quanterr.tensors.pinned_ring import PIECE, SLOT, PinnedRing, open_ring

# Stored dtype → torch's name of the dtype in which it is read.
TORCH_DTYPES = {
    "BOOL": "uint8",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "int16",  # only the bits of unsigned integers are needed
    "I32": "int32",
    "U32": "int32",
    "I64": "int64",
    "U64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "int8",  # the codes' bits: see formats/shared/element_types.py
    "F8_E5M2": "int8",
    "F8_E4M3FNUZ": "int8",
    "F8_E5M2FNUZ": "int8",
    "F8_E8M0": "uint8",  # bits of the exponents
    "C64": "int64",
}
OUTPUT = "values"  # the buffer for a format's result; see Workspace.output
MAX_VIEWS = 64  # maximum number of cached views; one more, and all are dropped


@cache
def find_dtype(stored: str) -> torch.dtype:
    """Return the dtype in which elements stored as ``stored`` are read."""
    dtype: torch.dtype = getattr(torch, TORCH_DTYPES[stored])
    return dtype


class _Shared:
    """A tensor that lives as long as any workspace uses it, with a lock for each part that is still missing."""

    __slots__ = ("__weakref__", "missing", "tensor")

    def __init__(self, tensor: Tensor, pieces: int) -> None:
        self.tensor, self.missing = tensor, {piece: threading.Lock() for piece in range(pieces)}

    def complete(self, fill: Callable[[Tensor, int], None]) -> None:
        """Fill the parts that no other thread is filling, then wait for the others; retry those that failed."""
        for wait in (False, True):
            for piece, lock in list(self.missing.items()):
                if lock.acquire(blocking=wait):
                    try:
                        if piece in self.missing:
                            fill(self.tensor, piece)
                            del self.missing[piece]
                    finally:
                        lock.release()


_shared: WeakValueDictionary[tuple[int, torch.device], _Shared] = WeakValueDictionary()  # by the entry's id
_making = threading.Lock()


class Workspace:
    """The buffers of one worker on one device."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Start without buffers, by default on the CPU."""
        self.device = device or torch.device("cpu")
        self._buffers: dict[str, Tensor] = {}
        self._lent: dict[str, Tensor] = {}
        self._hosts: dict[str, tuple[Tensor, memoryview]] = {}
        self.views: dict[Hashable, Any] = {}  # views of buffers; dropped when a buffer moves
        self._held: dict[str, tuple[Entry, Hashable, Tensor]] = {}
        self._shared = _shared
        self._in_use: dict[str, tuple[Entry, _Shared]] = {}
        self._ring: tuple[PinnedRing, torch.Stream] | None = None  # the way to an accelerator, and the stream of copies

    def buffer(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the buffer ``key`` on the device, with undefined contents; valid until asked for again."""
        self._held.pop(key, None)
        view = self.views.get((key, shape, dtype))
        return self._make_view(key, shape, dtype) if view is None else view

    def output(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return the buffer for a format's result, float32 by default, which the kernel uses without a copy."""
        return self.buffer(OUTPUT, shape, dtype or torch.float32)

    def _make_view(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        n_bytes = prod(shape) * dtype.itemsize
        buffer = self._buffers.get(key, self._lent.get(key))
        if len(self.views) >= MAX_VIEWS:
            self.views.clear()
        if buffer is None or buffer.numel() < n_bytes:
            self.views.clear()  # views would keep the old buffer alive
            buffer = self._buffers[key] = torch.empty(round_up(n_bytes), dtype=torch.uint8, device=self.device)
        view = self.views[key, shape, dtype] = buffer[:n_bytes].view(dtype).view(shape)
        return view

    def lend(self, key: str, memory: Tensor) -> None:
        """Use ``memory``, (n,) uint8, as the buffer of that name while it is large enough."""
        self._lent[key] = memory

    def read(self, key: str, entry: Entry, first: int, shape: tuple[int, ...]) -> Tensor:
        """Read elements of an entry from index ``first`` on, in C order, into the device buffer ``key``.

        The bytes are read into the buffer itself, or for an accelerator, into slots of its pinned ring, so unaligned
        offsets in the file are fine.

        Raises:
            CheckpointError: the file cannot be read.
        """
        dtype = find_dtype(entry.dtype)
        return self._fetch(key, entry, first * dtype.itemsize, shape, dtype)

    def read_bytes(self, key: str, entry: Entry, first: int, shape: tuple[int, ...]) -> Tensor:
        """Read bytes of an entry from byte ``first`` on as uint8, like :meth:`read`: for dtypes that torch lacks."""
        return self._fetch(key, entry, first, shape, torch.uint8)

    def _fetch(self, key: str, entry: Entry, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.device.type != "cpu":
            view = self.buffer(key, shape, dtype)
            self._load(view.view(-1).view(torch.uint8), entry, begin)
            return view
        n_bytes = prod(shape) * dtype.itemsize
        self._held.pop(key, None)  # the cached result of this buffer is overwritten
        host = self._hosts.get(key)
        if host is None or len(host[1]) < n_bytes:
            memory = torch.empty(round_up(n_bytes), dtype=torch.uint8)
            host = self._hosts[key] = memory, view_memory(memory)
        if self._buffers.get(key) is not host[0]:
            self._buffers[key] = host[0]
            self.views.clear()
        self._read_into(host[1][:n_bytes], entry, begin)
        return self.buffer(key, shape, dtype)

    def _load(self, out: Tensor, entry: Entry, begin: int) -> None:
        """Fill ``out``, (n,) uint8 on an accelerator; a local file is read in pieces by several threads."""
        if self._ring is None:
            self._ring = open_ring(self.device), torch.Stream(device=self.device)
        ring, copies = self._ring
        piece = PIECE if entry.file.descriptor >= 0 else SLOT
        unit = self._find_unit(entry)

        def read(memory: memoryview, at: int) -> None:
            self._read_into(memory, entry, begin + at)

        ring.load(out, read, piece // unit * unit, copies)

    def _find_unit(self, entry: Entry) -> int:
        """Return the number of bytes of which pieces of an entry must be multiples."""
        return 1

    def fills(self, entry: Entry) -> bool:
        """Return whether bytes of an entry are replaced while they are read; they then must be read through here."""
        return False

    def _read_into(self, memory: memoryview, entry: Entry, begin: int) -> None:
        """Fill ``memory`` with the bytes of an entry from byte ``begin`` on."""
        entry.file.read_into(memory, entry.offset + begin)

    def read_whole(self, key: str, entry: Entry) -> Tensor:
        """Return all elements of an entry, in its shape, on the device: for parts that are small or not cut by rows.

        They are read again only if the buffer ``key`` has held another entry since; never write to it.
        """
        return self.read_cached(key, entry, 0, entry.shape)

    def read_cached(self, key: str, entry: Entry, first: int, shape: tuple[int, ...]) -> Tensor:
        """Return the elements from index ``first`` on, like :meth:`read_whole`; experts and chunks are read so."""
        return self.cache(key, entry, (first, shape), lambda: self.read(key, entry, first, shape))

    def cache(self, key: str, entry: Entry, number: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the result of ``make`` for piece ``number`` of an entry, cached under ``key``; never write to it.

        ``make`` is called again only if ``key`` has held another piece or entry since.
        """
        cached = self._held.get(key)
        if cached is None or cached[0] is not entry or cached[1] != number:
            self._held.pop(key, None)
            self._held[key] = cached = entry, number, make()
        return cached[2]

    def share(
        self,
        key: str,
        entry: Entry,
        make: Callable[[], Tensor],
        fill: Callable[[Tensor, int], None] | None = None,
        pieces: int = 0,
    ) -> Tensor:
        """Cache a result as large as a weight, like :meth:`cache`, but once for all workspaces of a device.

        ``fill(tensor, piece)`` computes a part of the new tensor; threads that need it at the same time divide the
        ``pieces`` among themselves. It is freed once every workspace that used it has moved on to another entry under
        the ``key``.
        """
        cached = self._in_use.get(key)
        if cached is None or cached[0] is not entry:
            self._in_use.pop(key, None)  # free the old one before making another
            with _making:
                shared = self._shared.get((id(entry), self.device))
                if shared is None:
                    shared = self._shared[id(entry), self.device] = _Shared(make(), pieces)
                    self._finish_sharing()
            self._in_use[key] = cached = entry, shared
        if fill is not None and cached[1].missing:
            cached[1].complete(partial(self._fill, fill))
        if self.device.type != "cpu":
            cached[1].tensor.record_stream(torch.accelerator.current_stream(self.device))
        return cached[1].tensor

    def _fill(self, fill: Callable[[Tensor, int], None], tensor: Tensor, piece: int) -> None:
        fill(tensor, piece)
        self._finish_sharing()

    def _finish_sharing(self) -> None:
        if self.device.type != "cpu":  # made on one stream, used on others
            torch.accelerator.current_stream(self.device).synchronize()

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers, host and device, except lent ones."""
        hosts = (host for key, (host, _) in self._hosts.items() if self._buffers.get(key) is not host)
        return sum(b.numel() for b in self._buffers.values()) + sum(host.numel() for host in hosts)


class FilledWorkspace(Workspace):
    """A workspace in which all codes of a weight are equal: dequantizing in it gives an end of the weight's range."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Start without buffers, by default on the CPU, reading codes as stored."""
        super().__init__(device)
        self._shared = WeakValueDictionary()  # of its own: no other workspace may use results of replaced codes
        self._filled: set[int] = set()
        self._byte, self._block = 0, 1
        self._span: tuple[int, int] | None = None
        self._rows = 0, 0

    def fill(
        self,
        entries: Iterable[Entry],
        byte: int,
        block: int = 1,
        span: tuple[int, int] | None = None,
        rows: tuple[int, int] = (0, 0),
    ) -> None:
        """Let all bytes of these entries be ``byte``; with ``span``, only that range of each ``block`` bytes.

        With ``rows``, (head, length), each run of ``length`` bytes is a row: ``head`` bytes, then blocks.
        """
        request = {id(entry) for entry in entries}, byte, block, span, rows
        if request != (self._filled, self._byte, self._block, self._span, self._rows):
            self._held.clear()  # the buffers were filled in another way
        self._filled, self._byte, self._block, self._span, self._rows = request

    def fills(self, entry: Entry) -> bool:
        """Return whether an entry is filled."""
        return id(entry) in self._filled

    def _find_unit(self, entry: Entry) -> int:
        return self._block if self._span and self.fills(entry) else 1

    def _read_into(self, memory: memoryview, entry: Entry, begin: int) -> None:
        filled = self.fills(entry)
        if not filled or self._span:
            super()._read_into(memory, entry, begin)
        if filled:
            stored = torch.frombuffer(memory, dtype=torch.uint8)
            if self._span and self._rows[0]:
                heads, row = self._rows
                at = torch.arange(begin, begin + len(stored)) % row - heads
                inside = at % self._block
                stored[(at >= 0) & (inside >= self._span[0]) & (inside < self._span[1])] = self._byte
            else:
                (stored.view(-1, self._block)[:, slice(*self._span)] if self._span else stored).fill_(self._byte)


def read_entry(entry: Entry) -> Tensor:
    """Return all elements of a small entry, in its shape, on the CPU.

    Raises:
        CheckpointError: the file cannot be read.
    """
    return Workspace().read_whole("entry", entry)
