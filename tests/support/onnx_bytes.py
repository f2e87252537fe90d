"""ONNX models, byte by byte: protobuf messages of a graph, its nodes and its tensors."""

from collections.abc import Iterable
from math import prod

FLOAT, UINT8, INT8, INT32, INT64, STRING = 1, 2, 3, 6, 7, 8
SIZES = {FLOAT: 4, UINT8: 1, INT8: 1, INT32: 4, INT64: 8}


def varint(number: int) -> bytes:
    """Return a number as protobuf writes it, low bits first; negative ones modulo 2^64."""
    number %= 1 << 64
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*written, number))


def field(number: int, value: int | str | bytes) -> bytes:
    """Return a field that holds a number, or else a text or a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    raw = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(raw)) + raw


def tensor(name: str, dtype: int, shape: Iterable[int], raw: bytes | None = None, *more: bytes) -> bytes:
    """Return a tensor with these bytes, zeros by default, and ``more`` fields."""
    sizes = tuple(shape)
    raw = bytes(SIZES[dtype] * prod(sizes)) if raw is None and not more else raw
    content = b"".join(field(1, size) for size in sizes) + field(2, dtype) + field(8, name)
    return content + (b"" if raw is None else field(9, raw)) + b"".join(more)


def external(**keys: object) -> tuple[bytes, bytes]:
    """Return the fields of a tensor whose data are in another file."""
    pairs = (field(1, key) + field(2, str(value)) for key, value in keys.items())
    return b"".join(field(13, pair) for pair in pairs), field(14, 1)


def node(
    operator: str, inputs: Iterable[str], outputs: Iterable[str] = ("y",), name: str = "", **numbers: int
) -> bytes:
    """Return a node whose attributes are numbers."""
    content = b"".join(field(1, input_name) for input_name in inputs) + b"".join(
        field(2, input_name) for input_name in outputs
    )
    attributes = (field(1, key) + field(3, value) + field(20, 2) for key, value in numbers.items())
    return content + field(3, name) + field(4, operator) + b"".join(field(5, attribute) for attribute in attributes)


def graph(nodes: Iterable[bytes] = (), tensors: Iterable[bytes] = ()) -> bytes:
    """Return a graph."""
    return b"".join(field(1, node) for node in nodes) + field(2, "g") + b"".join(field(5, tensor) for tensor in tensors)


def model(nodes: Iterable[bytes] = (), tensors: Iterable[bytes] = ()) -> bytes:
    """Return a model."""
    return field(1, 10) + field(2, "a test") + field(7, graph(nodes, tensors))
