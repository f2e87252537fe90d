"""Reader of the protobuf encoding of an ONNX model: its nodes, and where the bytes of its tensors are.

    field       varint: number << 3 | kind; then by kind: 0 a varint, 1 eight bytes, 2 a varint length and so many
                bytes, 5 four bytes. A varint has 7 bits in each byte, the lowest first; if the high bit is set, more
                bytes follow
    model       7 graph
    graph       1 node (repeated), 5 initializer (repeated tensor), 15 sparse initializer
    node        1 inputs, 2 outputs, 3 name, 4 operator, 5 attributes, 9 metadata (keys and values)
    attribute   1 name, 3 number, 4 text, 5 tensor, 6 graph, 11 graphs
    tensor      1 dimensions, 2 type, 8 name; 9 bytes, or 4 floats, 5 i32, 7 i64, 10 doubles, 11 u64 as numbers;
                13 external data (keys location, offset, length), if 14 is 1

No number is trusted: each length is checked against what contains it. Bytes of tensors are skipped.

Reference: onnx/onnx@1.23.2 onnx/onnx.proto; protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Iterator
from typing import NamedTuple

from quanterr.checkpoints.base import MAX_DIMENSION, MAX_DIMENSIONS, MAX_TENSORS, CheckpointFile
from quanterr.errors import CheckpointError
from quanterr.util.text import display

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5  # kinds of fields
SIZES = {EIGHT: 8, FOUR: 4}
MAX_VARINT = 10  # bytes
MAX_FIELDS = 1 << 23  # maximum number of fields in a file; 1,000 layers have about 200,000
MAX_TEXT = 1 << 16  # bytes
MAX_DEPTH = 16  # graphs in attributes of nodes
MAX_NUMBERS = 1 << 22  # bytes of a tensor that stores its numbers as varints
WINDOW = 1 << 16  # bytes read at a time
EXTERNAL = 1  # data_location
SCOPE = "pkg.torch.onnx.name_scopes"
# Field of a tensor that stores numbers → kind of one number.
NUMBERS = {4: FOUR, 5: VARINT, 7: VARINT, 10: EIGHT, 11: VARINT}


class Field(NamedTuple):
    """A field of a message: the number that it holds, or else the bytes from ``begin`` to ``end`` of the file."""

    number: int
    wire_type: int
    value: int
    begin: int
    end: int


class StoredTensor(NamedTuple):
    """A tensor: its bytes are ``raw`` (begin, end), in another file, or those of the ``numbers``."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    raw: tuple[int, int] | None
    external: dict[str, str] | None
    numbers: tuple[Field, ...]


class Node(NamedTuple):
    """A node of the graph."""

    name: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, int | str]
    scope: str = ""  # written by PyTorch's exporter: a Python list of modules, from the model to the operator

    def input(self, place: int) -> str:
        """Return the name of an input; empty if the node has none at this place."""
        return self.inputs[place] if place < len(self.inputs) else ""

    def get_int(self, name: str, default: int) -> int:
        """Return an attribute that is a number."""
        value = self.attributes.get(name, default)
        return value if isinstance(value, int) else default


class Graph(NamedTuple):
    """All nodes and tensors of a model, those of graphs within nodes included."""

    nodes: list[Node]
    tensors: dict[str, StoredTensor]
    repeated: list[str]  # names of tensors that two branches have


class Parser:
    """Reads the messages of a file, from window to window."""

    def __init__(self, file: CheckpointFile) -> None:
        """Begin with an empty window."""
        self.file = file
        self.graph = Graph([], {}, [])
        self._window, self._start, self._fields = b"", 0, 0

    def parse_model(self) -> Graph:
        """Return the graph of the model.

        Raises:
            CheckpointError: the file is damaged, or has no graph; the message names the place.
        """
        graphs = [field for field in self._iterate(0, self.file.size, "the model") if field.number == 7]
        if len(graphs) != 1:
            raise CheckpointError(f"{self.file}: {len(graphs)} graphs in an ONNX model, expected one: damaged?")
        self._parse_graph(graphs[0], 0)
        return self.graph

    def decode_numbers(self, tensor: StoredTensor, size: int) -> bytes:
        """Return numbers that are stored one by one as they are in memory, ``size`` bytes each."""
        if sum(field.end - field.begin for field in tensor.numbers) > MAX_NUMBERS:
            raise CheckpointError(
                f"{self.file}: {display(tensor.name)}: more than {MAX_NUMBERS} bytes of numbers stored one by one; "
                "save the model again with raw_data"
            )
        data = bytearray()
        for field in tensor.numbers:
            wire_type = NUMBERS[field.number]
            if wire_type != VARINT:
                data += self.file.read(field.begin, field.end - field.begin)
                continue
            at, what = field.begin, display(tensor.name)
            values = [field.value] if field.wire_type == VARINT else []
            while at < field.end:
                value, at = self._read_varint(at, field.end, what)
                values.append(value)
            data += b"".join((value & (1 << 8 * size) - 1).to_bytes(size, "little") for value in values)
        return bytes(data)

    def _parse_graph(self, graph: Field, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{self.file}: byte {graph.begin}: more than {MAX_DEPTH} graphs in each other")
        here = set[str]()
        for field in self._iterate(graph.begin, graph.end, "the graph"):
            if field.number == 1:
                self._parse_node(field, depth)
            elif field.number == 5:
                self._add_tensor(self._parse_tensor(field), here)
            elif field.number == 15:
                raise CheckpointError(f"{self.file}: byte {field.begin}: a sparse initializer, which is not read")

    def _add_tensor(self, tensor: StoredTensor, here: set[str]) -> None:
        tensors = self.graph.tensors
        if tensor.name in here or not tensor.name:
            problem = "appears twice" if tensor.name else "has no name"
            raise CheckpointError(f"{self.file}: initializer {display(tensor.name)} {problem}")
        if tensor.name in tensors:
            self.graph.repeated.append(tensor.name)
        if len(tensors) >= MAX_TENSORS:
            raise CheckpointError(f"{self.file}: more than {MAX_TENSORS} tensors")
        here.add(tensor.name)
        tensors.setdefault(tensor.name, tensor)

    def _parse_node(self, node: Field, depth: int) -> None:
        texts: dict[int, list[str]] = {1: [], 2: [], 3: [], 4: []}
        metadata: dict[str, str] = {}
        attributes: dict[str, int | str] = {}
        for field in self._iterate(node.begin, node.end, "a node"):
            if field.number in texts:
                texts[field.number].append(self._read_text(field, "a name in a node"))
            elif field.number == 5:
                self._parse_attribute(field, attributes, tuple(texts[2]), depth)
            elif field.number == 9:
                metadata.update([self._read_pair(field)])
        names, operators = (texts[number] or [""] for number in (3, 4))
        inputs, outputs, scope = tuple(texts[1]), tuple(texts[2]), metadata.get(SCOPE, "")
        self.graph.nodes.append(Node(names[-1], operators[-1], inputs, outputs, attributes, scope))

    def _parse_attribute(
        self, attribute: Field, attributes: dict[str, int | str], outputs: tuple[str, ...], depth: int
    ) -> None:
        """Add a number or text to the attributes; the tensor of a Constant is a tensor of the graph."""
        name = ""
        value: int | str | None = None
        for field in self._iterate(attribute.begin, attribute.end, "an attribute"):
            match field.number:
                case 1:
                    name = self._read_text(field, "the name of an attribute")
                case 3:
                    value = field.value - (1 << 64) if field.value >> 63 else field.value
                case 4 if field.end - field.begin <= MAX_TEXT:
                    value = self._read_text(field, "the text of an attribute")
                case 5 if outputs:
                    self._add_tensor(self._parse_tensor(field)._replace(name=outputs[0]), set())
                case 6 | 11:
                    self._parse_graph(field, depth + 1)
        if value is not None:
            attributes[name] = value

    def _parse_tensor(self, tensor: Field) -> StoredTensor:
        name, type_id, location = "", 0, 0
        shape: list[int] = []
        raw, external, numbers = None, dict[str, str](), list[Field]()
        for field in self._iterate(tensor.begin, tensor.end, "a tensor"):
            match field.number:
                case 1:
                    shape += self._read_sizes(field)
                case 2:
                    type_id = field.value
                case 8:
                    name = self._read_text(field, "the name of a tensor")
                case 9:
                    raw = field.begin, field.end
                case 13:
                    external.update([self._read_pair(field)])
                case 14:
                    location = field.value
                case _ if field.number in NUMBERS:
                    numbers.append(field)
        if len(shape) > MAX_DIMENSIONS or any(size > MAX_DIMENSION for size in shape):
            raise CheckpointError(f"{self.file}: {display(name)}: impossible shape {shape[: MAX_DIMENSIONS + 1]}")
        if len(numbers) == 1 and numbers[0].wire_type == BYTES and NUMBERS[numbers[0].number] != VARINT:
            raw = raw or (numbers[0].begin, numbers[0].end)
        elsewhere = external if location == EXTERNAL else None
        return StoredTensor(name, type_id, tuple(shape), raw, elsewhere, tuple(numbers))

    def _read_sizes(self, field: Field) -> list[int]:
        """Return the dimensions in a field, which holds one, or several after each other."""
        if field.wire_type == VARINT:
            return [field.value]
        sizes, at = list[int](), field.begin
        while at < field.end and len(sizes) <= MAX_DIMENSIONS:
            size, at = self._read_varint(at, field.end, "a dimension")
            sizes.append(size)
        return sizes

    def _read_pair(self, pair: Field) -> tuple[str, str]:
        """Return the key and the value of external data or of metadata."""
        texts = {1: "", 2: ""}
        for field in self._iterate(pair.begin, pair.end, "a pair"):
            if field.number in texts and field.end - field.begin <= MAX_TEXT:
                texts[field.number] = self._read_text(field, "a key or value")
        return texts[1], texts[2]

    def _read_text(self, field: Field, what: str) -> str:
        n = field.end - field.begin
        if field.wire_type != BYTES or n > MAX_TEXT:
            problem = f"has {n} bytes; the limit is {MAX_TEXT}" if field.wire_type == BYTES else "is not a text"
            raise CheckpointError(f"{self.file}: byte {field.begin}: {what} {problem}")
        return self._read(field.begin, n).decode(errors="replace")

    def _iterate(self, begin: int, end: int, what: str) -> Iterator[Field]:
        """Yield the fields of a message."""
        at = begin
        while at < end:
            self._fields += 1
            if self._fields > MAX_FIELDS:
                raise CheckpointError(f"{self.file}: byte {at}: more than {MAX_FIELDS} fields")
            first = at
            key, at = self._read_varint(at, end, what)
            number, wire_type, value = key >> 3, key & 7, 0
            if not number or wire_type not in (VARINT, EIGHT, BYTES, FOUR):
                raise CheckpointError(f"{self.file}: byte {first}: no field of {what} begins with {key}: damaged?")
            if wire_type == VARINT:
                value, at = self._read_varint(at, end, what)
                n = 0
            else:
                n, at = self._read_varint(at, end, what) if wire_type == BYTES else (SIZES[wire_type], at)
            if n > end - at:
                raise CheckpointError(
                    f"{self.file}: truncated or damaged: a field of {what} should have {n} bytes at byte {at}, but "
                    f"{what} ends at byte {end}"
                )
            yield Field(number, wire_type, value, at, at + n)
            at += n

    def _read_varint(self, at: int, end: int, what: str) -> tuple[int, int]:
        """Return the number at a place, and the place after it."""
        value = 0
        for place, byte in enumerate(self._read(at, min(MAX_VARINT, end - at))):
            value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return value & (1 << 64) - 1, at + place + 1
        raise CheckpointError(f"{self.file}: byte {at}: a number in {what} does not end: truncated or damaged?")

    def _read(self, at: int, n: int) -> bytes:
        begin = at - self._start
        if begin < 0 or begin + n > len(self._window):
            self._window, self._start = self.file.read(at, min(max(n, WINDOW), self.file.size - at)), at
            begin = 0
        return self._window[begin : begin + n]
