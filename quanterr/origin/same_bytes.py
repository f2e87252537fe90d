"""Tests whether two weights are decoded in the same way from the same bytes, which is faster than to decode both."""

import ctypes
from collections.abc import Callable
from functools import partial
from types import MethodType

from msgspec import Struct

from quanterr.checkpoints import Entry
from quanterr.lazy_torch import torch

BYTES_AT_ONCE = 1 << 22


def is_same_function(a: object, b: object, on_piece: Callable[[], None]) -> bool:
    """Return whether two functions that decode weights are the same code, with equal parameters and equal bytes.

    Decoders are data, whose fields are compared one by one, and stored tensors among them by their bytes. False
    means that the values may be equal all the same: what is not known to be equal counts as different. ``on_piece`` is
    called before each piece is read.
    """
    entries: list[tuple[Entry, Entry]] = []
    return _is_same(a, b, entries) and all(have_same_bytes(*pair, on_piece) for pair in dict.fromkeys(entries))


def _is_same(a: object, b: object, entries: list[tuple[Entry, Entry]]) -> bool:
    """Compare all but the bytes of stored tensors, which are appended to ``entries`` in pairs."""
    if isinstance(a, Entry) and isinstance(b, Entry):
        entries.append((a, b))
        return True
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Struct):
        return all(_is_same(getattr(a, field), getattr(b, field), entries) for field in a.__struct_fields__)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_is_same(*both, entries) for both in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return _is_same(tuple(a.items()), tuple(b.items()), entries)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, MethodType) and isinstance(b, MethodType):
        return a.__func__ is b.__func__ and _is_same(a.__self__, b.__self__, entries)
    if isinstance(a, partial) and isinstance(b, partial):
        return a.func is b.func and _is_same((a.args, a.keywords), (b.args, b.keywords), entries)
    if isinstance(a, ctypes.Structure) and isinstance(b, ctypes.Structure):
        return bytes(a) == bytes(b)
    return bool(a == b)


def have_same_bytes(a: Entry, b: Entry, on_piece: Callable[[], None]) -> bool:
    """Return whether two stored tensors have the same dtype, shape and bytes; reading ends at the first difference."""
    if (a.dtype, a.shape, a.nbytes) != (b.dtype, b.shape, b.nbytes):
        return False
    buffers = [memoryview(bytearray(min(BYTES_AT_ONCE, a.nbytes))) for _ in (a, b)]
    for at in range(0, a.nbytes, BYTES_AT_ONCE):
        on_piece()
        pieces = [buffer[: a.nbytes - at] for buffer in buffers]
        for entry, piece in zip((a, b), pieces, strict=True):
            entry.file.read_into(piece, entry.offset + at)
        if not torch.equal(*(torch.frombuffer(piece, dtype=torch.uint8) for piece in pieces)):
            return False
    return True
