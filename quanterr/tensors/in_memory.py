"""Checkpoints of tensors in memory: a state dict, or a model, whose ``state_dict()`` gives them."""

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from quanterr.checkpoints import Checkpoint, CheckpointFile, Entry
from quanterr.checkpoints.base import DTYPE_BITS
from quanterr.errors import CheckpointError, UsageError
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.arrays import as_tensor
from quanterr.util import strict_json
from quanterr.util.arguments import check_types
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display

KIND = "memory"
MAX_KEPT_TENSORS = 2  # dequantized tensors that a file keeps for the next read
BYTES_HASHED_AT_ONCE = 1 << 26
# Dtype of torch → its name in a safetensors header. By text, as older versions of torch lack some.
DTYPES = {
    "torch.bool": "BOOL",
    "torch.uint8": "U8",
    "torch.int8": "I8",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e4m3fnuz": "F8_E4M3FNUZ",
    "torch.float8_e5m2fnuz": "F8_E5M2FNUZ",
    "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.int16": "I16",
    "torch.uint16": "U16",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int32": "I32",
    "torch.uint32": "U32",
    "torch.float32": "F32",
    "torch.complex64": "C64",
    "torch.float64": "F64",
    "torch.int64": "I64",
    "torch.uint64": "U64",
}


@runtime_checkable
class Model(Protocol):
    """An object with a ``state_dict()``, such as a torch.nn.Module."""

    def state_dict(self) -> "Mapping[str, Tensor]":
        """Return its tensors by name."""


Tensors: TypeAlias = Mapping[str, Tensor] | Model
Opened: TypeAlias = str | os.PathLike[str] | Checkpoint  # accepted as it is
Side: TypeAlias = Opened | Tensors


class _Part(NamedTuple):
    """A tensor, and the function that returns its values."""

    source: Tensor
    read: "Callable[[], Tensor]"  # returns a tensor of the entry's dtype and shape


class TensorsFile(CheckpointFile):
    """Tensors in memory as a file: its bytes are the data of a safetensors file with the same tensors.

    Tensors on a device are copied when they are read, and tensors of a class that defines ``dequantize``, such as
    torchao's, are dequantized by it.
    """

    def __init__(self, name: str, tensors: "Mapping[str, Tensor]") -> None:
        """Describe the tensors; none is copied.

        Raises:
            UsageError: a value is not a tensor, or its dtype or class has no bytes to read.
        """
        self.path, self.size = Path(name), 0
        self.entries: dict[str, Entry] = {}
        self.dequantized: dict[str, str] = {}  # name of a tensor that its class dequantizes → the class
        self._parts: list[tuple[Entry, _Part]] = []
        self._recent: dict[str, Tensor] = {}
        self._lock = Lock()
        for tensor_name, value in tensors.items():
            tensor = as_tensor(f"{self}: {display(tensor_name)}", value)
            part = self._describe(tensor_name, tensor)
            shape, dtype = tuple(tensor.shape), DTYPES[str(tensor.dtype)]
            entry = Entry(tensor_name, dtype, shape, self, self.size, tensor.numel() * DTYPE_BITS[dtype] // 8)
            self.entries[tensor_name] = entry
            self._parts.append((entry, part))
            self.size += entry.nbytes
        self._versions = self._read_versions()

    def _describe(self, name: str, tensor: Tensor) -> _Part:
        if str(tensor.dtype) not in DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
            properties = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise UsageError(
                f"{self}: {display(name)}: {properties}: expected a dense tensor of a dtype of safetensors"
            )
        if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:  # storage holds the values
            return _Part(tensor, tensor.detach)
        if type(tensor).dequantize is torch.Tensor.dequantize:
            class_name = f"{type(tensor).__module__}.{type(tensor).__name__}"
            raise UsageError(
                f"{self}: {display(name)}: a {class_name}, which has no dequantize(); give plain tensors "
                "(for a DTensor: full_tensor())"
            )
        self.dequantized[name] = type(tensor).__name__
        return _Part(tensor, partial(self._dequantize, name, tensor))

    def _dequantize(self, name: str, tensor: Tensor) -> Tensor:
        """Return the values of a tensor; the values of the last tensors are kept, as a tensor is read in chunks."""
        with self._lock:
            dequantized = self._recent.pop(name, None)
            if dequantized is None:
                dequantized = tensor.dequantize()
                if (dequantized.shape, dequantized.dtype) != (tensor.shape, tensor.dtype):
                    said, is_ = (f"{checked.dtype} {list(checked.shape)}" for checked in (tensor, dequantized))
                    raise CheckpointError(f"{self}: {display(name)}: is {said}, but dequantizes to {is_}")
            self._recent[name] = dequantized  # the last one
            if len(self._recent) > MAX_KEPT_TENSORS:
                del self._recent[next(iter(self._recent))]
        return dequantized

    def __str__(self) -> str:
        return display(str(self.path))

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with the bytes from ``offset`` on."""
        for entry, part in self._find_parts(offset, len(view)):
            begin, end = max(offset, entry.offset), min(offset + len(view), entry.offset + entry.nbytes)
            stored = part.read().contiguous().view(-1).view(torch.uint8)[begin - entry.offset : end - entry.offset]
            torch.frombuffer(view[begin - offset : end - offset], dtype=torch.uint8).copy_(stored)

    def _find_parts(self, offset: int, n: int) -> Iterable[tuple[Entry, _Part]]:
        k = bisect_right(self._parts, offset, key=lambda candidate: candidate[0].offset) - 1
        for entry, part in islice(self._parts, max(k, 0), None):
            if entry.offset >= offset + n:
                return
            if entry.nbytes and entry.offset + entry.nbytes > offset:
                yield entry, part

    def _read_versions(self) -> list[int]:
        """Return torch's counters of changes in place; tensors made in inference mode have none."""
        return [0 if part.source.is_inference() else part.source._version for _, part in self._parts]

    def check_unchanged(self) -> None:
        """Raise CheckpointError if torch has changed a tensor in place."""
        now = self._read_versions()
        for (entry, _), before, after in zip(self._parts, self._versions, now, strict=True):
            if before != after:
                raise CheckpointError(f"{self}: {display(entry.name)} changed while it was read; results discarded")

    @property
    def timestamps(self) -> tuple[int, ...]:
        """Empty: the tag identifies the tensors."""
        return ()

    @cached_property
    def tag(self) -> str:
        """The SHA-256 of all bytes."""
        digest = sha256()
        for offset in range(0, self.size, BYTES_HASHED_AT_ONCE):
            digest.update(self.read(offset, min(BYTES_HASHED_AT_ONCE, self.size - offset)))
        return digest.hexdigest()

    def will_need(self, offset: int, n: int) -> None:
        """Do nothing: all is in memory."""

    def close(self) -> None:
        """Do nothing: there is no open file."""


def hold(side: Side) -> Opened:
    """Return a state dict or a model as a checkpoint, which needs no closing; anything else as it is.

    A model's tensors are those of its ``state_dict()``, and its ``config`` declares how they are quantized, as
    config.json does for files. Raises UsageError if a value is not a tensor that can be read.
    """
    return hold_all([side])[0]


def hold_all(sides: Iterable[Side]) -> list[Opened]:
    """Return each side as :func:`hold` does; sides with the same name are numbered."""
    every = list(sides)
    names = Counter(_name(side) for side in every if isinstance(side, Mapping | Model))
    numbers: Counter[str] = Counter()
    checkpoints: list[Opened] = []
    for side in every:
        if not isinstance(side, Mapping | Model):
            check_types({"a checkpoint": side}, {"a checkpoint": Side})
            checkpoints.append(side)
            continue
        name = _name(side)
        numbers[name] += 1
        if names[name] > 1:
            name = f"{name} {numbers[name]}"
        file = TensorsFile(name, side if isinstance(side, Mapping) else side.state_dict())
        counts = [f"{n} {class_name} dequantized" for class_name, n in Counter(file.dequantized.values()).items()]
        shown = f"{name} ({', '.join(counts)})" if counts else name
        checkpoints.append(Checkpoint(shown, KIND, (file,), file.entries, ({},), _read_config(side, bool(counts))))
    return checkpoints


def _name(side: Tensors) -> str:
    return "state dict" if isinstance(side, Mapping) else type(side).__name__


def _read_config(side: Tensors, dequantized: bool) -> dict[str, JsonObject]:
    """Return the config of a model of transformers, as config.json has it.

    Its quantization settings are left out if tensors are ``dequantized``: they describe codes, which are not read.
    """
    make = getattr(getattr(side, "config", None), "to_json_string", None)
    if make is None:
        return {}
    config = strict_json.as_object(strict_json.loads(make().encode(), lenient=True))
    if dequantized:
        config.pop("quantization_config", None)
    return {"config.json": config}


def is_dequantized(entry: Entry) -> bool:
    """Return whether a tensor's class dequantizes it, so that its codes are not read."""
    return isinstance(entry.file, TensorsFile) and entry.name in entry.file.dequantized
