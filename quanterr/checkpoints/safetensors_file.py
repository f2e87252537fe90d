"""Strict reader of the header of a safetensors file.

    8 bytes     u64, little endian: length of the header
    header      JSON object: name → {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": str → str;
                starts with "{", may be padded with spaces
    data        the tensors, without gaps or overlaps

This reader is strict where the safetensors library is lax (duplicate names, unknown padding, any number of tensors and
dimensions); then the library checks the file as well. With ``lenient``, oddities that are unambiguous (white space in
front, other padding, bytes at the end, very long names) are accepted.

Reference: huggingface/safetensors, README.md and safetensors/src/tensor.rs.
"""

import errno
import os
import sys
from functools import lru_cache
from importlib.util import find_spec
from math import prod
from operator import attrgetter
from typing import Literal, TypeVar

import msgspec
from safetensors import SafetensorError, safe_open

from quanterr.checkpoints import foreign_files
from quanterr.checkpoints.base import (
    DTYPE_BITS,
    MAX_DIMENSION,
    MAX_DIMENSIONS,
    MAX_TENSORS,
    CheckpointFile,
    Entry,
    check_lengths,
    make_joined_error,
    make_open_error,
    make_truncation_error,
    refuse,
)
from quanterr.errors import CheckpointError
from quanterr.util.memory import is_out_of_memory, require_memory
from quanterr.util.platform import give_back_memory
from quanterr.util.strict_json import DuplicateKey, InvalidJson, loads
from quanterr.util.text import count, display
from quanterr.version import __version__

Shared = TypeVar("Shared", int, tuple[int, ...])

MAX_HEADER_BYTES = 100_000_000  # bytes, the format's own limit
MAX_OFFSET = 2**63
WHITESPACE = b" \t\r\n"
# The library imports the framework for which it opens a file. That takes 0.1 s for numpy; for torch it takes seconds,
# and torch also allocates storage for the file.
FRAMEWORK = "numpy" if find_spec("numpy") else "pt"


def read_header(file: CheckpointFile, lenient: bool = False) -> tuple[list[Entry], dict[str, str], list[str]]:
    """Read entries in file order and the ``__metadata__``, and make notes on harmless deviations from the standard.

    Raises:
        CheckpointError: the file is not a complete, valid safetensors file; the message names the file and tensor.
    """
    odd: list[str] = []  # notes on deviations that only ``lenient`` accepts
    header, data_start = _read_raw_header(file, lenient, odd)
    notes: list[str] = []
    entries, metadata = _read_plain(file, header, data_start) or _read_any(file, header, data_start, notes)
    del header
    check_lengths(entries, lenient, odd)
    end = _check_tiling(file, entries, data_start)
    if end < file.size:
        if _begins_header(file, end):
            raise make_joined_error(file, end, "Get the separate shards and their model.safetensors.index.json again")
        description = (
            f"{file}: {count(file.size - end, 'trailing byte')} after the last tensor; some loaders ignore them, "
        )
        refuse(f"{description}others refuse. Save the file again", lenient, odd)
    is_here = file.descriptor >= 0
    if is_here and not odd and not any(entry.unknown for entry in entries):  # the library refuses both
        require_memory(LIBRARY_MEMORY_FACTOR * data_start)
        _check_with_library(file)
        if data_start > LARGE_HEADER_BYTES:
            give_back_memory()
    return entries, metadata, odd + notes


def _begins_header(file: CheckpointFile, at: int) -> bool:
    """Return whether the header of a safetensors file begins at a byte: its length, then a JSON object."""
    if file.size - at <= 10:
        return False
    first = file.read(at, 9)
    return first[8:] == b"{" and 2 <= int.from_bytes(first[:8], "little") <= min(file.size - at - 8, MAX_HEADER_BYTES)


LIBRARY_MEMORY_FACTOR = 16  # memory that the library needs / size of a header; up to 1 kB for a tensor
LARGE_HEADER_BYTES = 100_000  # about 1,000 tensors


class _Fields(msgspec.Struct, gc=False):
    """The fields of a tensor in a header; all other keys, such as the keys of the metadata, are ignored."""

    dtype: Literal[tuple(DTYPE_BITS)] | None = None  # type: ignore[valid-type]
    shape: tuple[int, ...] | None = None
    data_offsets: tuple[int, int] | None = None


class _Metadata(msgspec.Struct, gc=False, rename={"metadata": "__metadata__"}):
    """The metadata of a header."""

    metadata: msgspec.Raw | None = None


_decode_fields = msgspec.json.Decoder(dict[str, _Fields]).decode
_decode_metadata = msgspec.json.Decoder(_Metadata).decode
QUOTES_PER_TENSOR = 10  # around the name, the three keys and the dtype


def _read_plain(file: CheckpointFile, header: bytes, data_start: int) -> tuple[list[Entry], dict[str, str]] | None:
    """Read a header without deviations, five times as fast as :func:`_read_any`; return None for any other header.

    Without escapes, the number of quotation marks shows that no name or key occurs twice, and that none is unknown.
    """
    if not header.isascii() or b"\\" in header:
        return None
    try:
        fields, stored = _decode_fields(header), _decode_metadata(header).metadata
        metadata = {} if stored is None else _check_metadata(file, loads(bytes(stored)))
    except (msgspec.MsgspecError, RecursionError, InvalidJson, CheckpointError):
        return None
    quotes = 0
    if stored is not None:
        del fields["__metadata__"]
        quotes = 2 + bytes(stored).count(b'"')
    if header.count(b'"') != quotes + QUOTES_PER_TENSOR * len(fields):
        return None
    sizes: dict[tuple[str, tuple[int, ...]], int | None] = {}
    entries = []
    for name in list(fields):  # popping frees memory for the entries of the next tensors
        tensor = fields.pop(name)
        dtype, shape, offsets = tensor.dtype, tensor.shape, tensor.data_offsets
        if dtype is None or shape is None or offsets is None:
            return None
        if (dtype, shape) not in sizes:
            sizes[dtype, shape] = _compute_size(dtype, shape)
        (begin, end), size = offsets, sizes[dtype, shape]
        if begin < 0 or end >= MAX_OFFSET or end - begin != size:
            return None
        entries.append(Entry(name, dtype, _intern(shape), file, data_start + begin, size))
    return entries, metadata


def _compute_size(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Return the bytes of a tensor; None if the shape is impossible."""
    n_bytes, rest = divmod(prod(shape) * DTYPE_BITS[dtype], 8)
    is_shape = len(shape) <= MAX_DIMENSIONS and all(0 <= size <= MAX_DIMENSION for size in shape)
    return n_bytes if is_shape and not rest else None


def _read_any(
    file: CheckpointFile, header: bytes, data_start: int, notes: list[str]
) -> tuple[list[Entry], dict[str, str]]:
    """Read any header, with notes on unknown fields and dtypes."""
    try:
        fields = loads(header)
    except DuplicateKey as error:
        what = f'tensor name or key "{display(error.key)}" appears twice'
        if error.key in ("dtype", "shape", "data_offsets"):
            what = f'duplicate key "{error.key}" in a tensor\'s entry'
        raise CheckpointError(f"{file}: {what}") from error
    except InvalidJson as error:
        raise CheckpointError(f"{file}: header {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file}: header is not a JSON object")
    if len(fields) > MAX_TENSORS:
        raise CheckpointError(f"{file}: {len(fields)} tensors exceed the limit of {MAX_TENSORS}")
    metadata = _check_metadata(file, fields.pop("__metadata__", {}))
    return [_make_entry(file, name, fields.pop(name), data_start, notes) for name in list(fields)], metadata


def _read_raw_header(file: CheckpointFile, lenient: bool, odd: list[str]) -> tuple[bytes, int]:
    if file.size == 0:
        raise CheckpointError(f"{file}: empty file (0 bytes)")
    start = file.read(0, min(file.size, 256))
    if not start[8:].startswith(b"{") and (description := foreign_files.describe(start)):
        raise CheckpointError(f"{file}: {description}")
    if file.size < 8:
        raise CheckpointError(f"{file}: too short for a safetensors header ({file.size} bytes)")
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: header length {length} exceeds the format limit of {MAX_HEADER_BYTES}; not a safetensors file"
        )
    if 8 + length > file.size:
        raise CheckpointError(
            f"{file}: header claims {length} bytes, file has {file.size}: truncated or not safetensors"
        )
    header = file.read(8, length)
    if not header.startswith(b"{"):
        if not header.lstrip(WHITESPACE).startswith(b"{"):
            raise CheckpointError(f"{file}: header is not a JSON object; it must start with '{{'")
        refuse(f"{file}: header starts with 0x{header[0]:02x}; it must start with '{{'", lenient, odd)
    padding = header[len(header.rstrip(WHITESPACE)) :].strip(b" ")
    if padding:
        refuse(f"{file}: header padded with 0x{padding[0]:02x}; expected spaces", lenient, odd)
    n = header.count(b'"data_offsets"')
    if n > MAX_TENSORS:
        raise CheckpointError(f"{file}: {n} tensors exceed the limit of {MAX_TENSORS}")
    return header, 8 + length


def _check_metadata(file: CheckpointFile, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: __metadata__ must be an object of strings")
    for key, text in value.items():
        if not isinstance(text, str):
            raise CheckpointError(f'{file}: metadata value for "{display(key)}" must be a string')
    return value


def _make_entry(file: CheckpointFile, name: str, value: object, data_start: int, notes: list[str]) -> Entry:
    where = f"{file}: {display(name)}"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{file}: tensor name {display(name)} is not valid Unicode") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: entry is not an object")
    for key in ("dtype", "shape", "data_offsets"):
        if key not in value:
            raise CheckpointError(f'{where}: missing "{key}"')
    unknown = sorted(value.keys() - {"dtype", "shape", "data_offsets"})
    notes.extend(f'{where}: ignoring unknown field "{display(key)}"' for key in unknown)
    dtype = value["dtype"]
    if not isinstance(dtype, str):
        raise CheckpointError(f"{where}: dtype must be a string, found {display(str(dtype))}")
    dtype = sys.intern(dtype)  # one object for all entries
    shape = _check_shape(where, value["shape"])
    begin, end = _check_offsets(where, value["data_offsets"])
    if dtype not in DTYPE_BITS:  # becomes an error if the tensor is selected
        known = dtype.upper() in DTYPE_BITS
        hint = f"did you mean {dtype.upper()}?" if known else f"the file may be newer than quanterr {__version__}"
        reason = f"unknown dtype {display(dtype)} ({hint})"
        notes.append(f"{where}: {reason}")
        return Entry(name, dtype, shape, file, data_start + begin, end - begin, reason)
    entry = Entry(name, dtype, shape, file, data_start + begin, _intern(end - begin))
    bits = entry.n * entry.bits
    if bits % 8:
        raise CheckpointError(f"{where}: {bits} bits is not a whole number of bytes")
    if bits // 8 != entry.nbytes:
        raise CheckpointError(
            f"{where}: shape {list(shape)} of {dtype} needs {bits // 8} bytes, range has {entry.nbytes}"
        )
    return entry


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_OFFSET


def _check_shape(where: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(_is_size(size) for size in value):
        raise CheckpointError(f"{where}: shape must be a list of integers in 0…2^63")
    if len(value) > MAX_DIMENSIONS:
        raise CheckpointError(f"{where}: {len(value)} dimensions; the limit is {MAX_DIMENSIONS}")
    if any(size > MAX_DIMENSION for size in value):
        raise CheckpointError(f"{where}: dimension exceeds 2^40: {value}")
    shape: tuple[int, ...] = _intern(tuple(value))
    return shape


@lru_cache(maxsize=1 << 10)
def _intern(value: Shared) -> Shared:
    """Return an equal shape or size that all entries share, to save memory."""
    return value


def _check_offsets(where: str, value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(_is_size(offset) for offset in value):
        raise CheckpointError(f"{where}: data_offsets must be two integers in 0…2^63")
    begin, end = value
    if end < begin:
        raise CheckpointError(f"{where}: end before begin in data_offsets {value}")
    return begin, end


def _check_tiling(file: CheckpointFile, entries: list[Entry], data_start: int) -> int:
    """Check that the tensors cover the data without gaps or overlaps; return where the last one ends."""
    position, before = data_start, None
    for entry in sorted(entries, key=_get_place):
        begin, end = entry.offset, entry.offset + entry.nbytes
        if begin != position:
            raise _make_tiling_error(file, before, entry, position, data_start)
        if end > file.size:
            raise make_truncation_error(file, entries, display(entry.name))
        position, before = end, entry
    return position


_get_place = attrgetter("offset", "nbytes")


def _make_tiling_error(
    file: CheckpointFile, before: Entry | None, entry: Entry, position: int, data_start: int
) -> CheckpointError:
    """Return the error for an entry that does not begin at ``position``, where the one before it ends."""
    begin, end = entry.offset, entry.offset + entry.nbytes
    name = "the start of the data" if before is None else display(before.name)
    if begin > position:
        return CheckpointError(
            f"{file}: bytes {position - data_start}–{begin - data_start} belong to no tensor"
            f" (between {name} and {display(entry.name)})"
        )
    return CheckpointError(
        f"{file}: {name} and {display(entry.name)} overlap at {begin - data_start}–{min(position, end) - data_start}"
    )


def _check_with_library(file: CheckpointFile) -> None:
    try:
        with safe_open(file.utf8_path(), framework=FRAMEWORK):
            pass
    except (OSError, SafetensorError) as error:
        file.probe()
        if f"os error {errno.ENOMEM}" in str(error):  # the library could not map the whole file, which is not needed
            return
        raise CheckpointError(f"{file}: the safetensors library refuses it: {display(str(error))}") from error
    except (MemoryError, RuntimeError) as error:
        if os.strerror(errno.EMFILE) in str(error):
            raise make_open_error(file.path, OSError(errno.EMFILE, str(error))) from error
        if not is_out_of_memory(error):  # otherwise the memory did not suffice to map the file
            raise
