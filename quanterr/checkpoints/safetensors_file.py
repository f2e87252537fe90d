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
from typing import TypeVar

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
    make_open_error,
    make_truncation_error,
    refuse,
)
from quanterr.errors import CheckpointError, is_out_of_memory
from quanterr.util.platform import give_back_memory
from quanterr.util.strict_json import DuplicateKey, InvalidJson, JsonObject, loads
from quanterr.util.text import count, display
from quanterr.version import __version__

Shared = TypeVar("Shared", int, tuple[int, ...])

MAX_HEADER = 100_000_000  # bytes, the format's own limit
MAX_OFFSET = 2**63
WHITESPACE = b" \t\r\n"
# The library opens a file for a framework, which it imports; numpy takes 0.1 s, torch seconds and storage for the file.
FRAMEWORK = "numpy" if find_spec("numpy") else "pt"


def read_header(file: CheckpointFile, lenient: bool = False) -> tuple[list[Entry], dict[str, str], list[str]]:
    """Read entries in file order, the ``__metadata__``, and notes on what is non-standard but harmless.

    Raises:
        CheckpointError: the file is not a complete, valid safetensors file; the message names the file and tensor.
    """
    odd: list[str] = []  # notes on what only ``lenient`` accepts
    fields, data_start = _read_fields(file, lenient, odd)
    metadata = _check_metadata(file, fields.pop("__metadata__", {}))
    notes: list[str] = []
    entries = [_make_entry(file, name, fields.pop(name), data_start, notes) for name in list(fields)]
    check_lengths(entries, lenient, odd)
    end = _check_tiling(file, entries, data_start)
    if end < file.size:
        description = (
            f"{file}: {count(file.size - end, 'trailing byte')} after the last tensor; some loaders ignore them, "
        )
        refuse(f"{description}others refuse. Save the file again", lenient, odd)
    is_here = file.descriptor >= 0
    if is_here and not odd and not any(entry.unknown for entry in entries):  # the library refuses both
        _check_with_library(file)
        give_back_memory()  # the library uses about 0.5 kB per tensor for the header
    return entries, metadata, odd + notes


def _read_fields(file: CheckpointFile, lenient: bool, odd: list[str]) -> tuple[JsonObject, int]:
    """Return the parsed header, and the offset at which the data starts; the header's text is not kept."""
    header, data_start = _read_raw_header(file, lenient, odd)
    try:
        fields = loads(header)
    except DuplicateKey as error:
        raise CheckpointError(f"{file}: {_describe_duplicate(error.key)}") from error
    except InvalidJson as error:
        raise CheckpointError(f"{file}: header {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file}: header is not a JSON object")
    if len(fields) > MAX_TENSORS:
        raise CheckpointError(f"{file}: {len(fields)} tensors exceed the limit of {MAX_TENSORS}")
    return fields, data_start


def _read_raw_header(file: CheckpointFile, lenient: bool, odd: list[str]) -> tuple[bytes, int]:
    if file.size == 0:
        raise CheckpointError(f"{file}: empty file (0 bytes)")
    start = file.read(0, min(file.size, 256))
    if not start[8:].startswith(b"{") and (description := foreign_files.describe(start)):
        raise CheckpointError(f"{file}: {description}")
    if file.size < 8:
        raise CheckpointError(f"{file}: too short for a safetensors header ({file.size} bytes)")
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER:
        raise CheckpointError(
            f"{file}: header length {length} exceeds the format limit of {MAX_HEADER}; not a safetensors file"
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


def _describe_duplicate(key: str) -> str:
    if key in ("dtype", "shape", "data_offsets"):
        return f'duplicate key "{key}" in a tensor\'s entry'
    return f'tensor name or key "{display(key)}" appears twice'


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
        reason = _describe_unknown_dtype(dtype)
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


def _describe_unknown_dtype(dtype: str) -> str:
    if dtype.upper() in DTYPE_BITS:
        return f"unknown dtype {display(dtype)} (did you mean {dtype.upper()}?)"
    return f"unknown dtype {display(dtype)} (the file may be newer than quanterr {__version__})"


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
    """Return an equal shape or size that entries share as one object, to save memory."""
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
    position, before = data_start, "the start of the data"
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        begin, end = entry.offset, entry.offset + entry.nbytes
        if begin > position:
            raise CheckpointError(
                f"{file}: bytes {position - data_start}–{begin - data_start} belong to no tensor"
                f" (between {before} and {display(entry.name)})"
            )
        if begin < position:
            raise CheckpointError(
                f"{file}: {before} and {display(entry.name)} overlap at"
                f" {begin - data_start}–{min(position, end) - data_start}"
            )
        if end > file.size:
            raise make_truncation_error(file, entries, display(entry.name))
        position, before = end, display(entry.name)
    return position


def _check_with_library(file: CheckpointFile) -> None:
    try:
        with safe_open(file.utf8_path(), framework=FRAMEWORK):
            pass
    except (OSError, SafetensorError) as error:
        file.probe()
        if f"os error {errno.ENOMEM}" in str(error):  # mapping the whole file failed, which we never need
            return
        raise CheckpointError(f"{file}: the safetensors library refuses it: {display(str(error))}") from error
    except (MemoryError, RuntimeError) as error:
        if os.strerror(errno.EMFILE) in str(error):
            raise make_open_error(file.path, OSError(errno.EMFILE, str(error))) from error
        if not is_out_of_memory(error):  # as above
            raise
