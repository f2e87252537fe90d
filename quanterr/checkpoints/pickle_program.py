"""An interpreter of the pickles of ``torch.save`` that runs no code that a file names.

A pickle is a program for a machine with a stack. Here, opcodes only make dictionaries, lists, tuples, numbers and
texts, names become :class:`Name`, and calls make one of the values below. A name that is not in the tables is refused,
with an error that states the name and its place.

Reference: Python's Lib/pickletools.py (opcodes); pytorch/pytorch torch/_utils.py, torch/_tensor.py,
torch/serialization.py (what torch writes).
"""

import pickletools
from collections.abc import Callable
from typing import IO, Any, NamedTuple

from quanterr.checkpoints.base import MAX_DIMENSION, MAX_DIMENSIONS
from quanterr.errors import CheckpointError
from quanterr.util.text import display

# Class of a storage → dtype of its elements.
STORAGES = {
    "Float": "F32", "Double": "F64", "Half": "F16", "BFloat16": "BF16", "Long": "I64", "Int": "I32", "Short": "I16",
    "Char": "I8", "Byte": "U8", "Bool": "BOOL", "ComplexFloat": "C64", "Untyped": "U8",
}  # fmt: skip
# dtype of torch → its name in a safetensors header.
DTYPES = {
    "float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "complex64": "C64", "uint16": "U16", "uint32": "U32",
    "uint64": "U64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
KEY_TYPES = (str, bytes, int, float, bool, type(None))  # types of keys whose hash takes no time
MAX_OPCODES = 100_000_000
TORCHAO_PREFIX = "torchao."


class Name(NamedTuple):
    """A class or function that a file names."""

    text: str


class Storage(NamedTuple):
    """The bytes of one or several tensors."""

    key: str
    dtype: str  # dtype of its elements
    n: int  # elements; for untyped storages, bytes


class StoredTensor(NamedTuple):
    """A tensor in a storage, from element ``offset`` on."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Record(NamedTuple):
    """An object of a class that only holds values: ``state`` maps its attributes, tensors among them, to values."""

    type_name: str
    arguments: tuple[Any, ...]
    state: dict[Any, Any]


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
    return _check_tensor(storage, storage.dtype, offset, shape, strides)


def _rebuild_typed_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> StoredTensor:
    return _check_tensor(storage, DTYPES[dtype.text.removeprefix("torch.")], offset, shape, strides)


def _check_tensor(storage: Any, dtype: str, offset: Any, shape: Any, strides: Any) -> StoredTensor:
    sizes = *shape, *strides, offset
    if not isinstance(storage, Storage) or len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
        raise ValueError("not a tensor in a storage")
    if not all(type(size) is int and 0 <= size <= MAX_DIMENSION for size in sizes):
        raise ValueError("sizes that are no whole numbers up to 2^40")
    return StoredTensor(storage, dtype, offset, tuple(shape), tuple(strides))


def _rebuild_from_type(function: Any, class_name: Any, arguments: Any, state: Any) -> Any:
    """Return a tensor without its attributes; for a class of torchao, return the attributes, which are its parts."""
    if class_name.text.startswith(TORCHAO_PREFIX):
        return Record(class_name.text, (), state if isinstance(state, dict) else {})
    return CALLS[function.text](*arguments)


def _make_dictionary(*items: Any) -> dict[Any, Any]:
    if any(items):
        raise ValueError("a dictionary with contents")
    return {}


def _keep_first(first: Any, *_: Any) -> Any:
    return first


def _forget(*_: Any) -> None:
    """Return None for a value that is no weight, such as a number of numpy."""


# Functions and classes that a file may call → function that is called instead.
CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_typed_tensor,
    "torch._utils._rebuild_parameter": _keep_first,
    "torch._utils._rebuild_parameter_with_state": _keep_first,
    "torch._utils._rebuild_wrapper_subclass": _forget,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.nn.parameter.Parameter": _keep_first,
    "torch.Size": _keep_first,
    "torch.device": _forget,
    "torch.serialization._get_layout": _forget,
    "collections.OrderedDict": _make_dictionary,
    "collections.defaultdict": lambda *_: {},
    "builtins.set": _forget,
    "__builtin__.set": _forget,
    "_codecs.encode": _forget,
    "numpy.dtype": _forget,
    "numpy.core.multiarray.scalar": _forget,
    "numpy._core.multiarray.scalar": _forget,
}
# Names that a file may hold and not call.
NAMES = {
    *(f"{module}.{storage}Storage" for storage in STORAGES for module in ("torch", "torch.storage")),
    *(f"torch.{dtype}" for dtype in DTYPES),
    *("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Buffer", "torch.strided", "builtins.dict"),
    "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint",  # a key in checkpoints of Stable Diffusion
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
EMPTY_CONTAINERS = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": list, "EMPTY_TUPLE": tuple}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
MARK = object()


def run(stream: IO[bytes], where: str) -> Any:
    """Interpret the pickle at the position of ``stream``, and return its value; ``where`` names the file.

    Raises:
        CheckpointError: the pickle is damaged, or has an unknown name or opcode.
    """
    machine = _Machine(where)
    try:
        for count, (opcode, argument, place) in enumerate(pickletools.genops(stream)):
            if count > MAX_OPCODES:
                raise ValueError("too long")
            machine.place = place or 0
            machine.execute(opcode.name, argument)
    except CheckpointError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        reason = display(str(error) or type(error).__name__)
        raise CheckpointError(f"{where}: the pickle is damaged at byte {machine.place}: {reason}") from error
    return machine.result


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.place = 0  # offset of the current opcode
        self.result: Any = None
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def execute(self, opcode: str, argument: Any) -> None:
        stack = self._stack
        if opcode in LITERALS:
            stack.append(argument)
        elif opcode in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = stack[-1]
        elif opcode == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif opcode in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[argument])
        elif opcode in TUPLES:
            n = TUPLES[opcode]
            stack[-n:] = [tuple(self._pop(n))]
        elif opcode == "MARK":
            stack.append(MARK)
        elif opcode in CONSTANTS:
            stack.append(CONSTANTS[opcode])
        elif opcode in EMPTY_CONTAINERS:
            stack.append(EMPTY_CONTAINERS[opcode]())
        else:
            self._execute_rare(opcode, argument)

    def _execute_rare(self, opcode: str, argument: Any) -> None:
        stack = self._stack
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                self.result = stack.pop()
            case "TUPLE" | "LIST" | "FROZENSET":
                items = self._pop_to_mark()
                stack.append(tuple(items) if opcode == "TUPLE" else items)
            case "DICT":
                items = self._pop_to_mark()
                stack.append({})
                self._set_items(items)
            case "SETITEM":
                key, value = self._pop(2)
                del stack[-2:]
                self._set_items([key, value])
            case "SETITEMS":
                self._set_items(self._pop_to_mark())
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "APPENDS" | "ADDITEMS":
                items = self._pop_to_mark()
                stack[-1].extend(items)
            case "GLOBAL":
                stack.append(self._make_name(argument.replace(" ", ".", 1)))
            case "STACK_GLOBAL":
                module, name = self._pop(2)
                stack[-2:] = [self._make_name(f"{module}.{name}")]
            case "REDUCE" | "NEWOBJ":
                function, arguments = self._pop(2)
                stack[-2:] = [self._call(function, arguments)]
            case "BUILD":
                state = stack.pop()
                if isinstance(stack[-1], Record) and isinstance(state, dict):
                    stack[-1].state.update(state)
            case "BINPERSID":
                stack.append(_make_storage(stack.pop()))
            case "POP":
                stack.pop()
            case "POP_MARK":
                self._pop_to_mark()
            case _:
                raise CheckpointError(
                    f"{self._where}: byte {self.place}: opcode {opcode}, which torch.save never writes"
                )

    def _pop(self, n: int) -> list[Any]:
        """Return the last ``n`` items, which the caller replaces."""
        items = self._stack[-n:]
        if len(items) < n or any(item is MARK for item in items):
            raise ValueError("too few values")
        return items

    def _pop_to_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not MARK:
            at -= 1
            if at < 0:
                raise ValueError("no mark")
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise ValueError("items of what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if isinstance(key, KEY_TYPES):
                target[key] = value

    def _make_name(self, name: str) -> Name:
        if name in CALLS or name in NAMES or name.startswith(TORCHAO_PREFIX):
            return Name(name)
        raise CheckpointError(
            f"{self._where}: byte {self.place}: the pickle names {display(name)}, which is no part of plain tensors; "
            "nothing was executed. If you trust the file, load it with its program and save its tensors as safetensors"
        )

    def _call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise ValueError("a call of something that is not a function")
        if function.text.startswith(TORCHAO_PREFIX):
            return Record(function.text, arguments, {})
        if function.text not in CALLS:
            raise CheckpointError(f"{self._where}: byte {self.place}: the pickle calls {function.text}")
        return CALLS[function.text](*arguments)


def _make_storage(identity: Any) -> Storage:
    """Return the storage that a persistent id describes: ("storage", its class, key, device, number of elements, …)."""
    _, class_name, key, _, n = identity[:5]
    dtype = STORAGES[class_name.text.rpartition(".")[2].removesuffix("Storage")]
    if not isinstance(key, str) or type(n) is not int or n < 0:
        raise ValueError("not a storage")
    return Storage(key, dtype, n)
