"""GGUF files written byte by byte, also such as no library writes."""

import struct
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from quanterr.checkpoints.ggml_types import OF_NAME, TYPES
from quanterr.checkpoints.gguf_file import ARRAY, SCALARS, TEXT

IDS = {name: number for number, name in TYPES.items()}
U8, U16, I32, U32, F32, BOOL, U64 = 0, 2, 5, 4, 6, 7, 10


class Stored(NamedTuple):
    """A tensor as it is written; the outermost dimension first. Without data: zeros, as many as it takes."""

    name: str
    dtype: str | int = "F32"  # or an id
    shape: tuple[int, ...] = (4,)
    data: bytes | None = None
    offset: int | None = None  # the offset that the header claims

    @property
    def raw(self) -> bytes:
        """The data."""
        if self.data is not None:
            return self.data
        ggml_type = OF_NAME.get(str(self.dtype))
        return bytes(ggml_type.count_bytes(self.shape) if ggml_type else 4 * prod(self.shape))


def text(value: str | bytes) -> bytes:
    """Return a text with its length."""
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(value_type: int, of: Any) -> bytes:
    """Return a value of that type, without the type."""
    return text(of) if value_type == TEXT else SCALARS[value_type].pack(of)


def key(name: str | bytes, value_type: int, of: Any) -> bytes:
    """Return a key and its value."""
    return text(name) + struct.pack("<I", value_type) + value(value_type, of)


def array(name: str, value_type: int, of: Iterable[Any], n: int | None = None) -> bytes:
    """Return a key and an array of values; ``n`` is the declared number of values."""
    values = list(of)
    head = struct.pack("<IIQ", ARRAY, value_type, len(values) if n is None else n)
    return text(name) + head + b"".join(value(value_type, item) for item in values)


def architecture(name: str) -> tuple[bytes, ...]:
    """Return the metadata of a model with four heads."""
    return (
        key("general.architecture", TEXT, name),
        key(f"{name}.attention.head_count", U32, 4),
        key(f"{name}.attention.head_count_kv", U32, 2),
        array("tokenizer.ggml.tokens", TEXT, ["a", "bc", ""]),
    )


LLAMA = architecture("llama")


def gguf(
    tensors: Iterable[Stored] = (),
    keys: Iterable[bytes] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    n_tensors: int | None = None,
    n_keys: int | None = None,
) -> bytes:
    """Return a file that declares ``n_tensors`` and ``n_keys``; ``alignment`` is kept, but not declared."""
    tensors, keys = list(tensors), list(keys)
    infos, data = b"", b""
    for tensor in tensors:
        offset = len(data) if tensor.offset is None else tensor.offset
        type_id = tensor.dtype if isinstance(tensor.dtype, int) else IDS[tensor.dtype]
        infos += text(tensor.name) + struct.pack("<I", len(tensor.shape))
        infos += b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
        infos += struct.pack("<IQ", type_id, offset)
        data += pad(tensor.raw, alignment)
    counts = len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys
    return pad(b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + infos, alignment) + data


def pad(raw: bytes, alignment: int) -> bytes:
    """Append zeros up to the next multiple."""
    return raw + bytes(-len(raw) % alignment)


def write_gguf(path: Path, *arguments: Any, **options: Any) -> Path:
    """Write the file of :func:`gguf` there."""
    path.write_bytes(gguf(*arguments, **options))
    return path


def pair_rows(weight: Any, heads: int) -> Any:
    """Return rows in the order of llama.cpp's converter (LlamaModel.permute)."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)
