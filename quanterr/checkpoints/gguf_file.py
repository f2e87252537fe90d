"""Strict reader of the header of a GGUF file, versions 2 and 3, little endian.

    4 bytes     "GGUF"
    u32         version
    u64, u64    number of tensors, number of keys
    keys        for each: text, u32 type of the value, value
    tensors     for each: text, u32 number of dimensions (at most 5), u64 sizes, innermost first, u32 type, u64 offset
    padding     up to the next multiple of general.alignment (default: 32)
    data        the tensors, each padded to a multiple of the alignment; offsets count from here

A text is a u64 length and that many bytes of UTF-8. An array is the u32 type of its elements, their u64 number, and
the elements. A model may be split into files name-00001-of-00003.gguf with the keys split.no (from 0), split.count and
split.tensors.count; only the first file has the other keys.

ComfyUI-GGUF stores tensors whose rows are not whole blocks in another shape; the key comfy.gguf.orig_shape.<tensor>
has the true shape as an array of integers.

No number is trusted: each length and count is checked against the rest of the file before anything is read.

Reference: ggml-org/ggml docs/gguf.md; ggml-org/llama.cpp ggml/src/gguf.cpp; city96/ComfyUI-GGUF loader.py,
tools/fix_5d_tensors.py.
"""

from bisect import bisect_right
from collections.abc import Collection
from math import prod
from struct import Struct
from typing import NamedTuple

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
    make_truncation_error,
    refuse,
)
from quanterr.checkpoints.ggml_types import IN_FORKS, OF_NAME, REFUSED, TYPES, GgmlType
from quanterr.checkpoints.gguf_metadata import GgufMetadata, Scalar, Value
from quanterr.errors import CheckpointError
from quanterr.util.text import count, display
from quanterr.version import __version__

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # used if the file declares none
ALIGNMENT_KEY = "general.alignment"
ALIGNMENT_TYPE = 4  # required type (u32) of the key: llama.cpp and the gguf package reject any other
ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
TOKENIZER, TOKENIZER_MODEL = "tokenizer.", "tokenizer.ggml.model"  # llama.cpp refuses a file without the second
I2_S = 36
REQUIRED_INTEGERS = (ORIGINAL_SHAPE, ALIGNMENT_KEY, "split.")  # keys whose values must be whole numbers or shapes

MAX_KEYS = 1 << 17
MAX_KEY = 65_535  # bytes, the format's own limit
MAX_TENSOR_DIMENSIONS = 5  # ggml has 4; ComfyUI-GGUF adds the kernels of video models
MAX_TENSOR_BYTES = 1 << 63
MAX_ALIGNMENT = 1 << 30
MAX_KEPT_TEXT = 4096  # bytes; longer texts are chat templates
MAX_KEPT_ARRAY = 1024  # elements; longer arrays are vocabularies
MAX_TEXTS = 1 << 24  # texts in an array, which must be read or skipped one by one
MAX_TOKEN = 1 << 16  # bytes of a text in an array
MIN_KEY_BYTES = 13  # size of a key with an empty name and the shortest value
MIN_TENSOR_BYTES = 24  # size of a tensor in the header without name and dimensions

WINDOW_BYTES = 1 << 20  # bytes of the header read at a time

U32, U64 = Struct("<I"), Struct("<Q")
SCALARS = {
    0: Struct("<B"),
    1: Struct("<b"),
    2: Struct("<H"),
    3: Struct("<h"),
    4: U32,
    5: Struct("<i"),
    6: Struct("<f"),
    7: Struct("<?"),
    10: U64,
    11: Struct("<q"),
    12: Struct("<d"),
}
TEXT, ARRAY = 8, 9


class GgufHeader(NamedTuple):
    """The header of a GGUF file: entries in file order, metadata, and notes on oddities."""

    entries: list[Entry]
    metadata: GgufMetadata
    notes: list[str]


class _Cursor:
    """A position in the header, which is read from front to back and never beyond the end of the file."""

    def __init__(self, file: CheckpointFile) -> None:
        self.file, self.at = file, 0
        self._window, self._start = b"", 0

    @property
    def n_left(self) -> int:
        """The number of bytes from here to the end of the file."""
        return self.file.size - self.at

    def take(self, n: int, what: str) -> bytes:
        """Read the next ``n`` bytes, which error messages call ``what``."""
        self._require(n, what)
        begin = self.at - self._start
        if begin + n > len(self._window):
            self._window, self._start = self.file.read(self.at, min(max(n, WINDOW_BYTES), self.n_left)), self.at
            begin = 0
        self.at += n
        return self._window[begin : begin + n]

    def skip(self, n: int, what: str) -> None:
        """Skip the next ``n`` bytes."""
        self._require(n, what)
        self.at += n

    def skip_texts(self, n: int, what: str) -> None:
        """Skip the next ``n`` texts."""
        if n > MAX_TEXTS:
            raise CheckpointError(f"{self.file}: {what} has {n} elements; the limit is {MAX_TEXTS}")
        if 8 * n > self.n_left:
            raise self._make_truncation_error(8 * n, what)
        size = self.file.size
        for _ in range(n):
            begin = self.at - self._start
            if begin + 8 > len(self._window):  # take() refills the window
                self.take(8, what)
                self.at -= 8
                begin = 0
            length = U64.unpack_from(self._window, begin)[0]
            if length > size - self.at - 8:
                raise self._make_truncation_error(length, what)
            self.at += 8 + length

    def read_number(self, number_format: Struct, what: str) -> int:
        """Read the next number."""
        number: int = number_format.unpack(self.take(number_format.size, what))[0]
        return number

    def read_text(self, limit: int, what: str) -> str:
        """Read the next text of at most ``limit`` bytes: a name or a key."""
        n = self.read_number(U64, what)
        if n > limit:
            raise CheckpointError(f"{self.file}: {what} has {n} bytes; the limit is {limit}")
        raw = self.take(n, what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file}: {what} is not valid UTF-8: {display(repr(raw))}") from error

    def _require(self, n: int, what: str) -> None:
        if n > self.n_left:
            raise self._make_truncation_error(n, what)

    def _make_truncation_error(self, n: int, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file}: truncated in the header: {what} should have {n} bytes at byte {self.at}, "
            f"but the file ends at {self.file.size}"
        )


def is_gguf(file: CheckpointFile) -> bool:
    """Return whether to read a file as GGUF, judging by its first bytes, or by its name if these are inconclusive."""
    start = file.read(0, min(file.size, 9))
    return start.startswith(MAGIC) or (file.path.suffix == ".gguf" and start[8:] != b"{")


def read_header(file: CheckpointFile, lenient: bool = False) -> GgufHeader:
    """Read entries, metadata, and notes on what is non-standard but harmless.

    Raises:
        CheckpointError: the file is not a complete, valid GGUF file; the message names the file, key or tensor.
    """
    cursor = _Cursor(file)
    _check_version(cursor)
    n_tensors = _read_count(cursor, "tensors", MAX_TENSORS)
    n_keys = _read_count(cursor, "keys", MAX_KEYS)
    for n, min_bytes, what in ((n_keys, MIN_KEY_BYTES, "key"), (n_tensors, MIN_TENSOR_BYTES, "tensor")):
        if n * min_bytes > cursor.n_left:
            raise CheckpointError(f"{file}: truncated in the header: no room for {count(n, what)} in {file.size} bytes")
    metadata = GgufMetadata(_read_values(cursor, n_keys))
    alignment = _find_alignment(file, metadata)
    tensors = [_read_tensor(cursor, number) for number in range(n_tensors)]
    data_start = -(-cursor.at // alignment) * alignment
    ends = sorted({*(tensor.offset for tensor in tensors), max(file.size - data_start, 0)})
    fork_types = {tensor.type_id for tensor in tensors if _is_fork_type(tensor, ends, alignment)}
    entries = [_make_entry(file, tensor, metadata, data_start, ends, fork_types) for tensor in tensors]
    notes = [f"{file}: {display(entry.name)}: {entry.unknown}" for entry in entries if entry.unknown]
    notes += _note_orphans(file, entries, metadata)
    _check_names(file, entries)
    check_lengths(entries, lenient, notes)
    extra = file.size - _check_tiling(file, entries, data_start, alignment)
    if extra > 0:
        begin = file.size - extra
        if file.read(begin, min(extra, len(MAGIC))) == MAGIC:
            raise make_joined_error(file, begin, "Get the separate shards, or join them with llama-gguf-split --merge")
        description = f"{file}: {count(extra, 'trailing byte')} after the last tensor. Save the file again"
        refuse(description, lenient, notes)
    return GgufHeader(entries, metadata, notes)


def read_all_values(file: CheckpointFile) -> dict[str, Value]:
    """Return the values of all keys, with the tokenizer, long texts and long arrays.

    Raises:
        CheckpointError: the header is damaged; the message names the key.
    """
    cursor = _Cursor(file)
    _check_version(cursor)
    _read_count(cursor, "tensors", MAX_TENSORS)
    return _read_values(cursor, _read_count(cursor, "keys", MAX_KEYS), whole=True)


def _check_version(cursor: _Cursor) -> None:
    file = cursor.file
    if file.size == 0:
        raise CheckpointError(f"{file}: empty file (0 bytes)")
    start = file.read(0, min(file.size, 256))
    if not start.startswith(MAGIC):
        description = foreign_files.describe(start)
        if description is None and len(start) < len(MAGIC):
            description = f"too short for a GGUF header ({len(start)} bytes)"
        raise CheckpointError(
            f"{file}: "
            f"{description or f'not a GGUF file: it begins with {display(repr(start[:4]))}, expected {MAGIC!r}'}"
        )
    cursor.skip(len(MAGIC), "the magic")
    raw = cursor.take(4, "the version")
    version, swapped = (int.from_bytes(raw, order) for order in ("little", "big"))
    if version in VERSIONS:
        return
    if swapped in VERSIONS:
        raise CheckpointError(
            f"{file}: big endian GGUF, version {swapped}; quanterr reads little endian files. Convert it with "
            "gguf_convert_endian.py of llama.cpp"
        )
    if version == 1:
        raise CheckpointError(f"{file}: GGUF version 1, which llama.cpp no longer reads; convert the model again")
    raise CheckpointError(
        f"{file}: GGUF version {version}; quanterr reads 2 and 3 (the file may be newer than this version of quanterr)"
    )


def _read_count(cursor: _Cursor, what: str, limit: int) -> int:
    n = cursor.read_number(U64, f"the number of {what}")
    if n > limit:
        raise CheckpointError(f"{cursor.file}: {n} {what} exceed the limit of {limit}")
    return n


def _read_values(cursor: _Cursor, n: int, whole: bool = False) -> dict[str, Value]:
    """Read the next ``n`` keys; unless ``whole``, leave out long values, and the tokenizer except for its model."""
    values: dict[str, Value] = {}
    seen: set[str] = set()
    for number in range(n):
        key = cursor.read_text(MAX_KEY, f"key number {number}")
        what = f"key {display(key)}"
        if not key:
            raise CheckpointError(f"{cursor.file}: key number {number} has no name")
        if key in seen:
            raise CheckpointError(f"{cursor.file}: {what} appears twice")
        seen.add(key)
        type_id = cursor.read_number(U32, what)
        if key == ALIGNMENT_KEY and type_id != ALIGNMENT_TYPE:
            raise CheckpointError(
                f"{cursor.file}: {what} has type {type_id}; it must be of type {ALIGNMENT_TYPE} (u32)"
            )
        is_kept = whole or not key.startswith(TOKENIZER) or key == TOKENIZER_MODEL
        value = _read_value(cursor, type_id, what, is_kept, whole)
        if key.startswith(REQUIRED_INTEGERS) and not isinstance(value, int | tuple):
            raise CheckpointError(f"{cursor.file}: {what} should be a whole number or a shape")
        if value is not None:
            values[key] = value
    return values


def _read_value(cursor: _Cursor, type_id: int, what: str, keep: bool, whole: bool) -> Value | None:
    """Read the next value; return None unless ``keep``, or for a long value unless ``whole``."""
    if type_id == ARRAY:
        return _read_array(cursor, what, keep, whole)
    if type_id == TEXT:
        n = cursor.read_number(U64, what)
        if keep and (whole or n <= MAX_KEPT_TEXT):
            return cursor.take(n, what).decode(errors="replace")
        cursor.skip(n, what)
        return None
    if type_id not in SCALARS:
        raise CheckpointError(f"{cursor.file}: {what} has the unknown type {type_id}; types are 0 to 12")
    scalar: Scalar = SCALARS[type_id].unpack(cursor.take(SCALARS[type_id].size, what))[0]
    return scalar if keep else None


def _read_array(cursor: _Cursor, what: str, keep: bool, whole: bool) -> Value | None:
    type_id, n = cursor.read_number(U32, what), cursor.read_number(U64, what)
    if type_id == ARRAY:
        raise CheckpointError(f"{cursor.file}: {what} is an array of arrays, which no known program writes")
    if type_id == TEXT:
        if whole and n <= MAX_TEXTS and 8 * n <= cursor.n_left:
            return tuple([cursor.read_text(MAX_TOKEN, what) for _ in range(n)])
        cursor.skip_texts(n, what)
        return None
    if type_id not in SCALARS:
        raise CheckpointError(f"{cursor.file}: {what} is an array of the unknown type {type_id}; types are 0 to 12")
    size = SCALARS[type_id].size
    if not keep or (n > MAX_KEPT_ARRAY and not whole):
        cursor.skip(n * size, what)
        return None
    return tuple(scalar for (scalar,) in SCALARS[type_id].iter_unpack(cursor.take(n * size, what)))


def _find_alignment(file: CheckpointFile, metadata: GgufMetadata) -> int:
    alignment = metadata.values.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(f"{file}: general.alignment is {display(str(alignment))}; it must be a power of two")
    return alignment


class _Tensor(NamedTuple):
    """A tensor as the header declares it, the innermost dimension first."""

    name: str
    dimensions: tuple[int, ...]
    type_id: int
    offset: int


def _read_tensor(cursor: _Cursor, number: int) -> _Tensor:
    name = cursor.read_text(MAX_KEY, f"the name of tensor number {number}")
    what = display(name)
    n = cursor.read_number(U32, what)
    if n > MAX_TENSOR_DIMENSIONS:
        raise CheckpointError(f"{cursor.file}: {what}: {n} dimensions; the limit is {MAX_TENSOR_DIMENSIONS}")
    dimensions = tuple(cursor.read_number(U64, what) for _ in range(n))
    if any(size > MAX_DIMENSION for size in dimensions):
        raise CheckpointError(f"{cursor.file}: {what}: dimension exceeds 2^40: {list(dimensions)}")
    return _Tensor(name, dimensions, cursor.read_number(U32, what), cursor.read_number(U64, what))


def _make_entry(
    file: CheckpointFile,
    tensor: _Tensor,
    metadata: GgufMetadata,
    data_start: int,
    ends: list[int],
    fork_types: Collection[int],
) -> Entry:
    """Make the entry of a tensor; an entry of unknown type ends at the next of the sorted offsets ``ends``.

    Tensors whose type id is in ``fork_types`` have a type of a fork, whose id llama.cpp uses for another type.
    """
    where = f"{file}: {display(tensor.name)}"
    shape = tuple(reversed(tensor.dimensions))
    true_shape = _find_true_shape(where, tensor, shape, metadata)
    if tensor.type_id not in TYPES or tensor.type_id in fork_types:
        if prod(size or 1 for size in shape) >= MAX_TENSOR_BYTES:  # other readers may overflow before they come to a 0
            raise CheckpointError(f"{where}: shape {list(shape)} is too large: 2^63 elements or more")
        dtype, unknown = _describe_unknown_type(tensor.type_id)
        following = bisect_right(ends, tensor.offset)
        n_bytes = ends[following] - tensor.offset if following < len(ends) else 0
        return Entry(tensor.name, dtype, true_shape, file, data_start + tensor.offset, n_bytes, unknown)
    dtype = TYPES[tensor.type_id]
    return Entry(
        tensor.name,
        dtype,
        true_shape,
        file,
        data_start + tensor.offset,
        _count_bytes(where, dtype, shape, true_shape == shape),
    )


def _count_bytes(where: str, dtype: str, shape: tuple[int, ...], keeps_shape: bool) -> int:
    """Return the bytes of a tensor. Its rows must be whole blocks, and its groups of interleaved rows complete."""
    block_type = OF_NAME.get(dtype) or GgmlType(0, dtype, 1, DTYPE_BITS[dtype] // 8)
    cols = shape[-1] if shape else 1
    if cols % block_type.elements:
        raise CheckpointError(
            f"{where}: rows of {cols} elements are not whole blocks of {dtype}, which have {block_type.elements}"
        )
    rows = shape[-2] if len(shape) > 1 else 1
    if rows % block_type.rows:
        raise CheckpointError(f"{where}: {rows} rows, but {dtype} interleaves {block_type.rows} each")
    if not keeps_shape and (block_type.head or block_type.rows > 1 or block_type.tail):
        raise CheckpointError(f"{where}: {ORIGINAL_SHAPE}… with {dtype}, which stores whole rows: not known")
    if (
        prod(size or 1 for size in shape) * (block_type.n_bytes + block_type.head + block_type.tail)
        >= MAX_TENSOR_BYTES * block_type.elements
    ):
        raise CheckpointError(f"{where}: shape {list(shape)} is too large: 2^63 bytes or more")
    return block_type.count_bytes(shape)


def _is_fork_type(tensor: _Tensor, ends: list[int], alignment: int) -> bool:
    """Return whether the bytes of a tensor do not fit the type with its id, which a fork may use for another type."""
    following = bisect_right(ends, tensor.offset)
    if tensor.type_id not in IN_FORKS or following == len(ends):
        return False
    block_type = OF_NAME[TYPES[tensor.type_id]]
    room, needed = ends[following] - tensor.offset, block_type.count_bytes(tensor.dimensions[::-1])
    if tensor.type_id == I2_S and (tensor.dimensions[:1] or (1,))[0] % block_type.elements:
        return True
    if room < needed:
        return following < len(ends) - 1  # the last tensor may have been cut off
    return tensor.type_id == I2_S and room >= needed + alignment


def _describe_unknown_type(type_id: int) -> tuple[str, str]:
    """Return a name for the type, and why it is not read."""
    if known := REFUSED.get(type_id) or IN_FORKS.get(type_id):
        name, why = known
        return name, f"type {name} (id {type_id}), {why}"
    newer = f"the file may be newer than quanterr {__version__}, or from a fork of llama.cpp"
    return f"type {type_id}", f"unknown type id {type_id} ({newer})"


def _find_true_shape(where: str, tensor: _Tensor, stored: tuple[int, ...], metadata: GgufMetadata) -> tuple[int, ...]:
    """Return the shape of the weight: as stored, unless ComfyUI-GGUF has reshaped the tensor."""
    description = metadata.values.get(ORIGINAL_SHAPE + tensor.name)
    if description is None:
        return stored
    sizes = description if isinstance(description, tuple) else (description,)
    shape = tuple(size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size >= 0)
    if shape != description or len(shape) > MAX_DIMENSIONS or prod(shape) != prod(stored):
        raise CheckpointError(
            f"{where}: {ORIGINAL_SHAPE}… is {display(str(description))}, but {list(stored)} elements are stored"
        )
    return shape


def _check_names(file: CheckpointFile, entries: list[Entry]) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise CheckpointError(f"{file}: tensor name {display(entry.name)} appears twice")
        seen.add(entry.name)


def _check_tiling(file: CheckpointFile, entries: list[Entry], data_start: int, alignment: int) -> int:
    """Check that the tensors cover the data with only padding between them; return where the last padding ends."""
    for entry in entries:
        begin = entry.offset - data_start
        if begin % alignment:
            raise CheckpointError(f"{file}: {display(entry.name)}: offset {begin} is not a multiple of {alignment}")
    end, before = data_start, "the start of the data"
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        begin, expected, name = entry.offset, -(-end // alignment) * alignment, display(entry.name)
        if begin < end:
            common = f"{begin - data_start}–{min(end, begin + entry.nbytes) - data_start}"
            raise CheckpointError(f"{file}: {before} and {name} overlap at {common}")
        if begin > expected:
            for lost in entries:
                if lost.offset > file.size:
                    where = f"{file}: {display(lost.name)}: offset {lost.offset - data_start}"
                    raise CheckpointError(f"{where} is past the end of the file ({file.size:,} bytes)")
            hole = f"{expected - data_start}–{begin - data_start}"
            raise CheckpointError(f"{file}: bytes {hole} belong to no tensor (between {before} and {name})")
        if begin + entry.nbytes > file.size:
            raise make_truncation_error(file, entries, name)
        end, before = begin + entry.nbytes, name
    return -(-end // alignment) * alignment


def _note_orphans(file: CheckpointFile, entries: list[Entry], metadata: GgufMetadata) -> list[str]:
    names = {entry.name for entry in entries}
    description = [key.removeprefix(ORIGINAL_SHAPE) for key in metadata.values if key.startswith(ORIGINAL_SHAPE)]
    return [
        f"{file}: {ORIGINAL_SHAPE}… names {display(name)}, which is not stored"
        for name in description
        if name not in names
    ]
