"""Reader of PyTorch's files: .bin, .pt, .pth, .ckpt. Nothing in them is executed (see pickle_program.py).

    zip archive        NAME/data.pkl, the pickle; NAME/data/KEY, the bytes of a storage, not compressed; NAME/byteorder
    before torch 1.6   five pickles: magic number, version, machine, the object, keys of storages; then for each key
                       the number of its elements, i64, and their bytes

The checkpoint consists of the tensors in the dictionary that a file holds. If this dictionary has dictionaries of
weights under names such as ``state_dict``, the first of these is read, and notes name the others. Tensors of torchao
are described as in the header of its safetensors files.

Reference: pytorch/pytorch torch/serialization.py.
"""

import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from quanterr.checkpoints import pickle_program
from quanterr.checkpoints.base import DTYPE_BITS, MAX_TENSORS, CheckpointFile, Entry, check_lengths
from quanterr.checkpoints.pickle_program import Name, Record, Storage, StoredTensor
from quanterr.errors import CheckpointError
from quanterr.util.text import count, display, itemize

ZIP_START, LEGACY_START = b"PK\x03\x04", b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."  # first bytes
LOCAL_HEADER = 30  # bytes before the name of a member
UTF_8_FLAG = 0x800  # flag of a member's name
MAX_PICKLE = 1 << 30  # bytes
MAX_DEPTH = 16  # dictionaries in dictionaries
# Keys of a file's dictionary under which there are weights, and moving averages of weights.
WEIGHTS = ("state_dict", "model_state_dict", "model", "module", "params", "net", "generator")
AVERAGES = ("params_ema", "ema", "model_ema", "ema_state_dict", "state_dict_ema")
TRAINING_KEYS = ("optimizer", "optimizer_states", "optimizer_state_dict", "lr_schedulers", "lr_scheduler", "scheduler")
PART_PREFIX = "_"


class _Place(NamedTuple):
    """The bytes of a storage in the file."""

    offset: int
    n_bytes: int


class _Stream(io.RawIOBase):
    """A checkpoint's file as a stream."""

    def __init__(self, file: CheckpointFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        n = min(len(view), max(self._file.size - self._at, 0))
        self._file.read_into(view[:n], self._at)
        self._at += n
        return n

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at


def is_pickle(file: CheckpointFile) -> bool:
    """Return whether a file begins as a file of torch.save does."""
    start = file.read(0, min(file.size, len(LEGACY_START)))
    return start.startswith(ZIP_START) or start == LEGACY_START


def read_header(file: CheckpointFile, lenient: bool = False) -> tuple[list[Entry], dict[str, str], list[str]]:
    """Read the entries, the descriptions of torchao's tensors, and notes on what the file holds besides.

    Raises:
        CheckpointError: the file is damaged, is no file of torch.save, or needs the code of a program.
    """
    is_zip = file.read(0, len(ZIP_START)) == ZIP_START
    content, places = _read_zip(file) if is_zip else _read_legacy(file)
    notes: list[str] = []
    tensors, metadata = dict[str, StoredTensor](), dict[str, str]()
    for name, value in _flatten(_find_weights(file, content, notes), file):
        if isinstance(value, Record):
            tensors.update(_describe_subclass(name, value, metadata))
        else:
            tensors[name] = value
    if not tensors:
        raise CheckpointError(f"{file}: no tensors in the dictionary that the file holds")
    if len(tensors) > MAX_TENSORS:
        raise CheckpointError(f"{file}: {len(tensors)} tensors exceed the limit of {MAX_TENSORS}")
    entries = [_make_entry(file, name, tensor, places) for name, tensor in tensors.items()]
    notes += [f"{file}: {display(entry.name)}: {entry.unknown}" for entry in entries if entry.unknown]
    check_lengths(entries, lenient, notes)
    return entries, metadata, notes


def _read_zip(file: CheckpointFile) -> tuple[Any, dict[str, _Place]]:
    try:
        with zipfile.ZipFile(io.BufferedReader(_Stream(file))) as archive:
            members = {member.filename: member for member in archive.infolist()}
            pickles = [name for name in members if name.rpartition("/")[2] == "data.pkl"]
            if len(pickles) != 1:
                raise CheckpointError(f"{file}: a zip archive without a data.pkl: not a file of torch.save")
            folder = pickles[0].removesuffix("data.pkl")
            if any(name.startswith(f"{folder}code/") for name in members):
                raise CheckpointError(
                    f"{file}: a TorchScript archive, which holds a program; save model.state_dict() as safetensors"
                )
            order = _read_member(archive, f"{folder}byteorder") if f"{folder}byteorder" in members else b"little"
            if order != b"little":
                raise CheckpointError(f"{file}: byte order {display(order.decode(errors='replace'))}; known is little")
            program = io.BytesIO(_read_member(archive, pickles[0]))
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(f"{file}: the zip archive is damaged or truncated: {display(str(error))}") from error
    content, data = pickle_program.run(program, f"{file}: {pickles[0]}"), f"{folder}data/"
    stored = {name.removeprefix(data): member for name, member in members.items() if name.startswith(data)}
    return content, {key: _find_place(file, member) for key, member in stored.items()}


def _read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return the bytes of a member that is not a storage."""
    member = archive.getinfo(name)
    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
        raise ValueError(f"{name} is compressed, which torch.save never does")
    if member.file_size > MAX_PICKLE:
        raise ValueError(f"{name} has more than {MAX_PICKLE} bytes")
    return archive.read(name)


def _find_place(file: CheckpointFile, member: zipfile.ZipInfo) -> _Place:
    """Return the place of a member's bytes, which follow its local header."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{file}: {display(member.filename)} is compressed, which torch.save never does")
    at, name = member.header_offset, member.orig_filename.encode("utf-8" if member.flag_bits & UTF_8_FLAG else "cp437")
    header = file.read(at, LOCAL_HEADER + len(name)) if at + LOCAL_HEADER + len(name) <= file.size else b""
    if not header.startswith(ZIP_START) or header[LOCAL_HEADER:] != name:
        raise CheckpointError(f"{file}: {display(member.filename)}: its local header is not at byte {at}")
    begin = at + LOCAL_HEADER + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    if begin + member.file_size > file.size:
        raise CheckpointError(f"{file}: {display(member.filename)} ends beyond the end of the file, which is truncated")
    return _Place(begin, member.file_size)


def _read_legacy(file: CheckpointFile) -> tuple[Any, dict[str, _Place]]:
    stream = io.BufferedReader(_Stream(file))
    _, version, machine, content, keys = (pickle_program.run(stream, str(file)) for _ in range(5))
    if version != 1001 or not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise CheckpointError(f"{file}: version {display(str(version))} or byte order of torch.save that is not known")
    storages = {storage.key: storage for storage in _list_storages(content)}
    places, at = dict[str, _Place](), stream.tell()
    for key in keys if isinstance(keys, list) else []:
        storage = storages.get(key) if isinstance(key, str) else None
        if storage is None:
            raise CheckpointError(f"{file}: storage {display(str(key))} belongs to no tensor")
        n_bytes = storage.n * DTYPE_BITS[storage.dtype] // 8
        if at + 8 + n_bytes > file.size:
            raise CheckpointError(f"{file}: storage {display(key)} ends beyond the end of the file, which is truncated")
        if int.from_bytes(file.read(at, 8), "little") != storage.n:
            raise CheckpointError(f"{file}: storage {display(key)} should have {count(storage.n, 'element')}")
        places[key] = _Place(at + 8, n_bytes)
        at += 8 + n_bytes
    return content, places


def _list_storages(content: Any) -> Iterator[Storage]:
    """Yield the storages of all tensors in the values that a pickle made; each value is visited once."""
    left, seen = [content], set[int]()
    while left:
        value = left.pop()
        if isinstance(value, StoredTensor):
            yield value.storage
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            left.extend(value.values() if isinstance(value, dict) else value)


def _find_weights(file: CheckpointFile, content: Any, notes: list[str]) -> dict[Any, Any]:
    """Return the dictionary of weights in what a file holds, with notes on the rest."""
    if not isinstance(content, dict):
        type_name = content.type_name if isinstance(content, Record) else type(content).__name__
        raise CheckpointError(
            f"{file}: holds a value of type {type_name}, not a dictionary of tensors: save model.state_dict()"
        )
    if any(isinstance(value, StoredTensor) for value in content.values()):
        return content
    holding = [key for key, value in content.items() if isinstance(value, dict) and _holds_tensors(value)]
    for key in (*WEIGHTS, *AVERAGES):
        if key in holding:
            rest = [str(other) for other in holding if other != key and other not in TRAINING_KEYS]
            if rest:
                notes.append(f"{file}: read are the tensors under {display(key)}; not those under {itemize(rest)}")
            return _find_weights(file, content[key], notes) if len(holding) == 1 else content[key]
    return {key: value for key, value in content.items() if key not in TRAINING_KEYS}


def _holds_tensors(value: Mapping[Any, Any], depth: int = 0) -> bool:
    return any(
        isinstance(item, StoredTensor | Record)
        or (depth < 2 and isinstance(item, dict) and _holds_tensors(item, depth + 1))
        for item in value.values()
    )


def _flatten(
    dictionary: Mapping[Any, Any], file: CheckpointFile, prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, StoredTensor | Record]]:
    """Yield the tensors of a dictionary; those of dictionaries in it have its key in front of their names."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{file}: {display(prefix[:80])}…: more than {MAX_DEPTH} nested dictionaries")
    for key, value in dictionary.items():
        if isinstance(value, StoredTensor) or (isinstance(value, Record) and value.state):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict):
            yield from _flatten(value, file, f"{prefix}{key}.", depth + 1)


def _describe_subclass(name: str, record: Record, metadata: dict[str, str]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the parts of a tensor of torchao, and describe it as formats/shared/torchao_header.py expects."""
    module, _, last = name.rpartition(".")
    parts = {key: value for key, value in record.state.items() if isinstance(value, StoredTensor)}
    others = {str(key): _describe(value) for key, value in record.state.items() if key not in parts}
    described = {"_type": record.type_name.rpartition(".")[2], "_data": others, "_tensor_data_names": sorted(parts)}
    metadata[name] = json.dumps(described)
    for key, value in parts.items():
        yield f"{module}.{PART_PREFIX}{last}_{key}" if module else f"{PART_PREFIX}{last}_{key}", value


def _describe(value: Any) -> Any:
    """Return a value of a tensor's attribute as JSON; None for a value that no format needs."""
    if isinstance(value, Name):
        return {"_type": "torch.dtype", "_data": value.text.removeprefix("torch.")}
    if isinstance(value, list | tuple) and all(isinstance(item, int | str) for item in value):
        return list(value)
    return value if isinstance(value, str | int | float | bool) else None


def _make_entry(file: CheckpointFile, name: str, tensor: StoredTensor, places: Mapping[str, _Place]) -> Entry:
    where = f"{file}: {display(name)}"
    storage, place = tensor.storage, places.get(tensor.storage.key)
    bits = DTYPE_BITS[tensor.dtype]
    if place is None:
        raise CheckpointError(f"{where}: its storage {display(storage.key)} is not in the file")
    n_bytes = prod(tensor.shape) * bits // 8
    begin = tensor.offset * bits // 8
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    if n_bytes and begin + (last + 1) * bits // 8 > place.n_bytes:
        raise CheckpointError(
            f"{where}: {list(tensor.shape)} of {tensor.dtype} from element {tensor.offset} on ends after its storage, "
            f"which has {count(place.n_bytes, 'byte')}"
        )
    reason = None
    if n_bytes and not _is_contiguous(tensor):
        reason = f"stored with strides {list(tensor.strides)}, not row by row; save it again with tensor.contiguous()"
    return Entry(name, tensor.dtype, tensor.shape, file, place.offset + begin, n_bytes, reason)


def _is_contiguous(tensor: StoredTensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
