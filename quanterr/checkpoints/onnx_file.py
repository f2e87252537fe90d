"""Reader of ONNX models: the weights that the nodes of the graph use, under the names that they have in the model.

    initializer with the name of a parameter    that name: model.norm.weight; ONNX Runtime GenAI's without the operator:
                                                model.layers.0.attn.q_proj.MatMul.weight → ….attn.q_proj.weight
    anonymous (onnx::MatMul_1234, val_12)       the path of its node: /model/layers.0/mlp/up_proj/MatMul →
                                                model.layers.0.mlp.up_proj.weight; or its scope in the node's metadata
    a matrix that another operator uses         its own name (onnx::LSTM_7): nothing says how the model names it
    other constants of the graph                shapes, masks, scales of activations, …: left out

A weight X of a node that has its parts as inputs becomes several entries, which formats/onnx.py reads:

    X.onnx_nbits, X.onnx_codes, X.onnx_inputs_first    codes of blocks, codes of a tensor, or plain numbers [in, out]
    X.onnx_scale, X.onnx_zero_point                    its other parts
    metadata[X]                                        JSON: what the node states of them

Tensors are in the file, or in files beside it (location, offset, length), which must be in the same folder or below.

Reference: onnx/onnx@1.23.2 onnx/onnx.proto, docs/ExternalData.md, docs/Operators.md; microsoft/onnxruntime@1.32.0
docs/ContribOperators.md, onnxruntime/python/tools/quantization; microsoft/onnxruntime-genai@a0c04eb1
src/python/py/models/builders/base.py.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from quanterr.checkpoints import foreign_files
from quanterr.checkpoints.base import DTYPE_BITS, CheckpointFile, Entry, check_lengths, close_all
from quanterr.checkpoints.onnx_wire import Node, Parser, StoredTensor
from quanterr.checkpoints.places import Place, open_file
from quanterr.errors import CheckpointError
from quanterr.util.text import display, itemize, parse_digits

SUFFIX = ".onnx"
# The dtype of each type of a tensor, from 0 on; "-" has none.
NAMES = """- F32 U8 I8 U16 I16 I32 I64 - BOOL F16 F64 U32 U64 C64 - BF16 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ
    - - F4 F8_E8M0"""
DTYPES = {type_id: name for type_id, name in enumerate(NAMES.split()) if name != "-"}
# Types that are packed in bytes, low bits first, without padding of rows → bits, and whether they are signed.
PACKED = {21: (4, False), 22: (4, True), 25: (2, False), 26: (2, True)}
FLOATS = frozenset(("F32", "F16", "BF16", "F64"))

PARAMETER = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
# Ends that quantizers append to a weight's name.
QUANTIZED = re.compile(r"(_DQ)?_Q\d+(G-?\d+)?$|(_Transposed(_\d+)?)?_quantized$")
TRANSPOSED = "_Transposed"  # ONNX Runtime's dynamic quantizer has transposed the weight
OPERATOR = re.compile(r"\.(MatMul|Add|Gemm|Conv|Gather)(\w*)\.(?=q?weight|bias)")
BLOCKS, CODES, INPUTS_FIRST = "onnx_nbits", "onnx_codes", "onnx_inputs_first"  # ends of names of weights' elements
SCALE, ZERO_POINT = "onnx_scale", "onnx_zero_point"


NONE = 1 << 16  # more inputs than any node has


class Use(NamedTuple):
    """The places of a weight's parts among a node's inputs."""

    weight: int
    scale: int = NONE
    zero_point: int = NONE
    bias: int = NONE
    suffix: str = CODES
    inputs_first: bool = False  # the weight is [in, out]


# Operator → its weights.
USES: dict[str, tuple[Use, ...]] = {
    "MatMul": (Use(1, inputs_first=True),),
    "FusedMatMul": (Use(1, inputs_first=True),),
    "Gemm": (Use(1, bias=2, inputs_first=True),),
    "Conv": (Use(1, bias=2),),
    "Gather": (Use(0),),
    "MatMulInteger": (Use(1, zero_point=3, inputs_first=True),),
    "ConvInteger": (Use(1, zero_point=3),),
    "DynamicQuantizeMatMul": (Use(1, 2, 3, 4, inputs_first=True),),
    "MatMulIntegerToFloat": (Use(1, 3, 5, 6, inputs_first=True),),
    "QLinearMatMul": (Use(3, 4, 5, inputs_first=True),),
    "QLinearConv": (Use(3, 4, 5, 8),),
    "QGemm": (Use(3, 4, 5, inputs_first=True),),
    "MatMulNBits": (Use(1, 2, 3, 5, BLOCKS),),
    "GatherBlockQuantized": (Use(0, 2, 3, suffix=BLOCKS),),
    "QMoE": (Use(2, 3, 11, 4, BLOCKS), Use(5, 6, 12, 7, BLOCKS), Use(8, 9, 13, 10, BLOCKS)),
}
DEQUANTIZE = "DequantizeLinear"
PASSING = frozenset(("Transpose", "Cast", "Reshape", "Identity", "Gather"))  # between a weight and what uses it
MAX_PASSED = 8  # nodes between a weight and what uses it
# Operator → inputs that are no parameters.
CONSTANTS = {
    "RotaryEmbedding": (2, 3),
    "GroupQueryAttention": (7, 8),
    "QuantizeLinear": (1, 2),
    DEQUANTIZE: (1, 2),
    "QLinearMatMul": (1, 2, 6, 7),
    "QLinearConv": (1, 2, 6, 7),
}
# Operators without weights: their constants, such as masks and tables of positions, are left out.
ELEMENTWISE = """Abs Add And Cast Clip Concat ConstantOfShape Cos CumSum Div Equal Exp Expand Flatten Floor
    GatherElements GatherND Greater GreaterOrEqual Identity Less LessOrEqual Log Max Mean Min Mod Mul Neg Not Or Pad Pow
    Range Reciprocal Reshape Resize ScatterElements ScatterND Shape Sigmoid Sin Slice Split Sqrt Squeeze Sub Sum Tile
    TopK Transpose Trilu Unsqueeze Where"""
WITHOUT_WEIGHTS = frozenset(ELEMENTWISE.split())
MIN_WEIGHT_ELEMENTS = 4096  # a smaller matrix of an operator that is not known here counts as a constant
# Attributes that formats need.
OF_BLOCKS = ("bits", "block_size", "K", "N", "axis", "quantize_axis")
STATED = (*OF_BLOCKS, "weight_prepacked", "weights_prepacked", "quant_type")


class _Weight(NamedTuple):
    """A weight in the graph: its initializer, and the node that uses it."""

    stored: str
    node: Node
    use: Use
    scale: str = ""
    zero_point: str = ""
    bias: str = ""


class DecodedNumbers(CheckpointFile):
    """Numbers of a file that are stored one by one, as they are in memory."""

    def __init__(self, file: CheckpointFile, content: bytes) -> None:
        """Keep the bytes; errors name the file."""
        self.path, self.size, self._of, self._content = file.path, len(content), file, content

    def __str__(self) -> str:
        return str(self._of)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with the bytes from ``offset`` on."""
        view[:] = self._content[offset : offset + len(view)]

    def will_need(self, offset: int, n: int) -> None:
        """Do nothing: the bytes are in memory."""


def is_onnx(file: CheckpointFile) -> bool:
    """Return whether to read a file as ONNX, judging by its first bytes, or by its name."""
    start = file.read(0, min(file.size, 256))
    if file.path.suffix == SUFFIX:
        return foreign_files.describe(start) is None
    return start[:1] == b"\x08" and start[2:3] in (b"\x12", b"\x3a")  # ir_version, then producer_name or graph


def read_header(
    file: CheckpointFile, folder: Place, lenient: bool = False
) -> tuple[list[Entry], dict[str, str], list[str], list[CheckpointFile]]:
    """Read entries, descriptions of weights, notes, and open the files with external data.

    Raises:
        CheckpointError: the file is damaged, or external data are missing, too short, or outside of the folder.
    """
    reader = _Reader(file, folder)
    try:
        entries = list(reader.iterate_entries())
        check_lengths(entries, lenient, reader.notes)
        if not entries:
            raise CheckpointError(f"{file}: an ONNX model without weights")
    except BaseException:
        close_all(reader.opened.values())
        raise
    return entries, reader.metadata, reader.notes, list(reader.opened.values())


class _Reader:
    """The graph of one model, and the files with its tensors."""

    def __init__(self, file: CheckpointFile, folder: Place) -> None:
        self.file, self.folder, self.notes = file, folder, list[str]()
        self.opened: dict[str, CheckpointFile] = {}  # location → file
        self.metadata: dict[str, str] = {}
        self.parser = Parser(file)
        self.graph = self.parser.parse_model()
        self.tensors = self.graph.tensors
        for node in self.graph.nodes:  # equal parameters are stored once
            if node.operator == "Identity" and node.outputs and (same := self.tensors.get(node.input(0))):
                self.tensors.setdefault(node.outputs[0], same)
        self.makers = {output: node for node in self.graph.nodes for output in node.outputs}
        self.users: dict[str, list[tuple[Node, int]]] = {}  # tensor → nodes, and the place among their inputs
        for node in self.graph.nodes:
            for place, name in enumerate(node.inputs):
                self.users.setdefault(name, []).append((node, place))

    def iterate_entries(self) -> Iterator[Entry]:
        """Yield the entries of all weights, then those of all other parameters."""
        weights = self._find_weights()
        names, taken = self._name_weights(weights), set[str]()
        for weight in weights.values():
            parts = {SCALE: weight.scale, ZERO_POINT: weight.zero_point}
            taken.update((weight.stored, *parts.values()))
            yield from self._describe(names[weight.stored], weight, parts)
            if weight.bias in self.tensors and not _is_named(weight.bias):
                taken.add(weight.bias)
                yield self._make_entry(names[weight.stored].removesuffix(".weight") + ".bias", weight.bias)
        constants = {node.input(place) for node in self.graph.nodes for place in CONSTANTS.get(node.operator, ())}
        for name in self.tensors:
            if name not in taken and name not in constants and (PARAMETER.fullmatch(name) or self._may_be_weight(name)):
                yield self._make_entry(OPERATOR.sub(".", QUANTIZED.sub("", name)), name)
        if repeated := [name for name in self.graph.repeated if name in names]:
            self.notes.append(f"{self.file}: two branches have {itemize(repeated)}; the first is read")

    def _may_be_weight(self, name: str) -> bool:
        """Return whether a tensor without the name of a parameter may be the weight of an operator unknown here."""
        shape = self.tensors[name].shape
        operators = {node.operator for node, _ in self.users.get(name, ())}
        return len(shape) > 1 and prod(shape) >= MIN_WEIGHT_ELEMENTS and not operators <= WITHOUT_WEIGHTS

    def _find_weights(self) -> dict[str, _Weight]:
        """Return the weights that nodes use in a known place, by the names of their initializers."""
        weights_by_name: dict[str, _Weight] = {}
        for node in self.graph.nodes:
            if node.operator == DEQUANTIZE:
                weights = [self._follow_dequantized(node)]
            else:
                weights = [self._find_weight(node, use) for use in USES.get(node.operator, ())]
            for weight in weights:
                if weight and (
                    weight.stored not in weights_by_name or (weight.scale and not weights_by_name[weight.stored].scale)
                ):
                    weights_by_name[weight.stored] = weight
        return weights_by_name

    def _find_weight(self, node: Node, use: Use) -> _Weight | None:
        stored = node.input(use.weight)
        if stored not in self.tensors:
            return None
        scale, zero_point, bias = map(node.input, (use.scale, use.zero_point, use.bias))
        base = stored.removesuffix("_quantized")
        if use.scale == NONE and base != stored:  # named by ONNX Runtime's dynamic quantizer
            beside = f"{base}_scale", f"{base}_zero_point"
            scale, zero_point = (name if name in self.tensors else "" for name in beside)
        if node.get_int("transB", 0):
            use = use._replace(inputs_first=False)
        return _Weight(stored, node, use, scale, zero_point, bias)

    def _follow_dequantized(self, node: Node) -> _Weight | None:
        """Return the weight that a DequantizeLinear dequantizes, with the node that multiplies by it."""
        stored = self._trace_back(node.input(0))
        if stored is None:
            return None
        user, place, is_turned = self._trace_forward(node.outputs[0] if node.outputs else "")
        uses = USES.get(user.operator, ()) if user else ()
        use = next((use for use in uses if use.weight == place), Use(0))
        is_first = use.inputs_first and not (user and user.get_int("transB", 0))
        use = Use(0, inputs_first=is_first != is_turned)
        named = user or node
        stating = Node(named.name, node.operator, node.inputs, node.outputs, node.attributes)
        return _Weight(stored, stating, use, node.input(1), node.input(2))

    def _trace_back(self, name: str) -> str | None:
        """Return the initializer from which a tensor is taken; None if it is computed."""
        for _ in range(MAX_PASSED):
            if name in self.tensors:
                return name
            maker = self.makers.get(name)
            if maker is None or maker.operator not in PASSING:
                return None
            name = maker.input(0)
        return None

    def _trace_forward(self, name: str) -> tuple[Node | None, int, bool]:
        """Return the node that uses a tensor, the place among its inputs, and whether it is transposed before."""
        is_turned = False
        for _ in range(MAX_PASSED):
            users = self.users.get(name, [])
            if not users:
                break
            user, place = users[0]
            if user.operator not in PASSING or user.operator == "Gather":
                return user, place, is_turned
            is_turned ^= user.operator == "Transpose"
            name = user.outputs[0] if user.outputs else ""
        return None, 0, is_turned

    def _name_weights(self, weights: Mapping[str, _Weight]) -> dict[str, str]:
        """Return the name of each weight in the model, by its initializer."""
        short = {stored: _name_weight(weight) for stored, weight in weights.items()}
        seen = Counter(short.values())
        # Two weights of one module: their nodes' whole names differ.
        return {
            stored: name if seen[name] == 1 else f"{weights[stored].node.name.strip('/').replace('/', '.')}.{stored}"
            for stored, name in short.items()
        }

    def _describe(self, name: str, weight: _Weight, parts: Mapping[str, str]) -> Iterator[Entry]:
        """Yield the entries of a weight, and describe it."""
        tensor = self.tensors[weight.stored]
        dtype = DTYPES.get(tensor.type_id)
        is_named = _is_named(weight.stored)
        if not weight.scale and (dtype in FLOATS or weight.use.suffix != BLOCKS):
            is_first = weight.use.inputs_first and not is_named and len(tensor.shape) == 2 and dtype in FLOATS
            yield self._make_entry(f"{name}.{INPUTS_FIRST}" if is_first else name, weight.stored)
            return
        bits, signed = PACKED.get(tensor.type_id, (0, dtype == "I8"))
        stated = {key: weight.node.attributes[key] for key in STATED if key in weight.node.attributes}
        if weight.node.operator == "QMoE":
            of_weight = f"fc{1 + weight.use.weight // 3}_expert_weight_bits"
            stated["bits"] = weight.node.get_int(of_weight, weight.node.get_int("expert_weight_bits", 4))
        self.metadata[name] = json.dumps(
            {
                "operator": weight.node.operator,
                "shape": tensor.shape,
                "packed_bits": bits,
                "signed": signed,
                "inputs_first": weight.use.inputs_first,
                "is_named": is_named,
                **stated,
            }
        )
        yield self._make_entry(f"{name}.{weight.use.suffix}", weight.stored)
        for role, stored in parts.items():
            if stored:
                yield self._make_entry(f"{name}.{role}", stored)

    def _make_entry(self, name: str, stored: str) -> Entry:
        where = f"{self.file}: {display(stored)}"
        tensor = self.tensors.get(stored)
        if tensor is None:
            raise CheckpointError(f"{where}: a part of {display(name)} that the graph computes, which is not supported")
        shape, dtype = tensor.shape, DTYPES.get(tensor.type_id)
        if tensor.type_id in PACKED:
            shape, dtype = (-(-prod(shape) * PACKED[tensor.type_id][0] // 8),), "U8"
        if dtype is None:
            reason = f"has type {tensor.type_id} of ONNX, which is not read"
            self.notes.append(f"{where}: {reason}")
            return Entry(name, f"type {tensor.type_id}", shape, self.file, 0, 0, reason)
        n_bytes, rest = divmod(prod(shape) * DTYPE_BITS[dtype], 8)
        file, offset, held = self._locate(where, tensor, n_bytes, DTYPE_BITS[dtype] // 8 or 1)
        if held != n_bytes or rest:
            raise CheckpointError(f"{where}: {dtype} {list(shape)} needs {n_bytes} bytes, but {held} are stored")
        return Entry(name, dtype, shape, file, offset, n_bytes)

    def _locate(self, where: str, tensor: StoredTensor, n_bytes: int, size: int) -> tuple[CheckpointFile, int, int]:
        """Return the file of a tensor's bytes, their offset and their number."""
        if tensor.external is not None:
            file, offset, length = self._find_external(where, tensor.external, n_bytes)
            return file, offset, length
        if tensor.raw is not None:
            return self.file, tensor.raw[0], tensor.raw[1] - tensor.raw[0]
        content = self.parser.decode_numbers(tensor, size)
        return DecodedNumbers(self.file, content), 0, len(content)

    def _find_external(self, where: str, external: Mapping[str, str], n_bytes: int) -> tuple[CheckpointFile, int, int]:
        location = external.get("location", "")
        offset, length = (
            parse_digits(external.get(key) or str(usual)) for key, usual in (("offset", 0), ("length", n_bytes))
        )
        if not _stays_inside(location):
            raise CheckpointError(
                f"{where}: its data are in {display(repr(location))}, which is not a file in the folder of the model"
            )
        if offset is None or length is None:
            numbers = f"offset {external.get('offset')}, length {external.get('length')}"
            raise CheckpointError(f"{where}: external data at {display(numbers)}, expected whole numbers")
        file = self.opened.get(location)
        if file is None:
            place = self.folder
            for part in location.split("/"):
                place = place / part
            file = self.opened[location] = open_file(place)
        if offset + length > file.size:
            raise CheckpointError(
                f"{where}: its data end at byte {offset + length} of {file}, which has {file.size}: truncated"
            )
        return file, offset, length


def _stays_inside(location: str) -> bool:
    """Return whether a location is a plain path of a file in a folder or below."""
    parts = location.split("/")
    return not any(part in ("", ".", "..") or any(sign in part for sign in "\\:\0") for part in parts)


def _is_named(stored: str) -> bool:
    """Return whether a tensor has the name of a parameter, and so the form that the model gives it."""
    return bool(PARAMETER.fullmatch(stored)) and TRANSPOSED not in stored and not OPERATOR.search(stored)


def _name_weight(weight: _Weight) -> str:
    """Return the name of a weight in the model."""
    stored = QUANTIZED.sub("", weight.stored)
    if PARAMETER.fullmatch(stored):
        return re.sub(r"\.qweight$", ".weight", OPERATOR.sub(".", stored))
    path = weight.node.name.strip("/").split("/")
    scopes = re.findall(r"'([\w.]*)'", weight.node.scope)
    module = ".".join(path[:-1]) or (scopes[-2] if len(scopes) > 1 else "")
    return f"{module}.weight" if module else weight.stored
