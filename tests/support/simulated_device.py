"""A simulated accelerator: the CPU computes its tensors under the rules of CUDA.

    with simulated(): quanterr.compare(…, device="sim")

What would fail on CUDA fails here, too: operations that are given tensors of both places, operations and dtypes that
CUDA lacks (:mod:`cuda_rules`), the host's use of device memory, and work on streams that nothing puts in order
(:mod:`simulated_streams`). It can run out of memory at a given byte, and lack dtypes.

Registered with torch once in a process, but only available within :func:`simulate`. Before a process's first backward
pass, as torch knows all devices from then on; so there is a program that evaluates with one:

    python tests/support/simulated_device.py original quantized ids.safetensors     prints the evaluation as JSON
"""

import sys
import weakref
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from inspect import signature
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from support import simulated_streams as streams
from support.cuda_rules import MOVES, check_operation, check_places

NAME = "sim"
WAITING = (  # The host waits for these operations, because the shape of what they return depends on values.
    "_local_scalar_dense nonzero masked_select unique_dim _unique _unique2 unique_consecutive equal bincount "
    "repeat_interleave is_nonzero"
)
WAITS = frozenset(WAITING.split())
HOST = torch.device("cpu")


class Device:
    """A device with so many bytes of memory and missing features; also the module ``torch.sim``."""

    def __init__(self):
        self.reset(0)

    def reset(self, count, limit=None, lacks=()):
        self.count, self.limit, self.lacks = count, limit, frozenset(lacks)
        self.used = self.peak = 0
        self._run = object()  # memory of earlier runs is not counted, when allocated or freed

    def allocate(self, n_bytes):
        """Count memory; return what :meth:`free` is to be given."""
        with streams.LOCK:
            if self.limit is not None and self.used + n_bytes > self.limit:
                raise torch.OutOfMemoryError(f"{self.used} bytes of {self.limit} are in use, {n_bytes} more needed")
            self.used += n_bytes
            self.peak = max(self.peak, self.used)
            return self._run

    def free(self, n_bytes, run):
        if run is self._run:
            self.used -= n_bytes

    def is_available(self):
        return self.count > 0

    def device_count(self):
        return self.count

    def get_device_name(self, device):
        return "simulated"

    def empty_cache(self):
        pass

    def is_initialized(self):
        return True

    def current_device(self):
        return 0

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        pass

    def _lazy_init(self):
        pass


DEVICE = Device()
UNKNOWN = pytest.mark.skipif(torch.__version__ < "2.9", reason="a torch without devices that are written in Python")


class Address:
    """An address in device memory: it can be compared, but not passed to code on the host."""

    def __init__(self, number):
        self._number = number

    def __eq__(self, other):
        return isinstance(other, Address) and self._number == other._number

    def __hash__(self):
        return hash(self._number)


class DeviceTensor(torch.Tensor):
    """A tensor on the device; ``raw`` has its values, ``memory`` the allocation that it shares with its views."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw, memory, device):
        with torch._C._InferenceMode(False):  # in which wrappers cannot be made
            return torch.Tensor._make_wrapper_subclass(
                cls,
                raw.size(),
                strides=raw.stride(),
                storage_offset=raw.storage_offset(),
                dtype=raw.dtype,
                device=device,
            )

    def __init__(self, raw, memory, device):
        self.raw, self.memory = raw, memory

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})

    def __getitem__(self, index):
        return super().__getitem__(self._place(index))

    def __setitem__(self, index, value):
        super().__setitem__(self._place(index), value)

    def _place(self, index):
        """Place lists of indices on the device: torch makes tensors of them in C++, where no subclass is known."""
        if isinstance(index, list):
            return torch.tensor(index, device=self.device)
        return tuple(map(self._place, index)) if isinstance(index, tuple) else index

    def new_tensor(self, data, dtype=None, device=None):
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)

    def tolist(self):
        return self.cpu().tolist()

    def record_stream(self, stream):
        self.memory.keep_for(stream)

    def data_ptr(self):
        return Address(self.raw.data_ptr())

    def untyped_storage(self):
        return Storage(self.memory.address)

    def numpy(self, *_, **__):
        raise TypeError("can't convert a tensor on a device to numpy: copy it to host memory first")

    __array__ = numpy

    def __repr__(self):
        return f"{self.raw} on {self.device}"


class Storage(NamedTuple):
    """Memory of the device; the host knows only its address."""

    address: int

    def data_ptr(self):
        return Address(self.address)


class Operation(NamedTuple):
    """The schema of an operation."""

    name: str  # without the _ of operations in place
    written: tuple[int | str, ...]  # positions and names of arguments that it writes to
    is_view: bool
    is_composite: bool


@cache
def describe(function):
    schema = function._schema
    written = [
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    name = schema.name.removeprefix("aten::")
    name = name if name.endswith("__") else name.rstrip("_")
    return Operation(name, tuple(written), function.is_view, function._can_decompose())


def run(function, args, kwargs):
    """Compute an operation on the device, or one between it and the host."""
    operation = describe(function)
    if operation.is_composite:
        return function.decompose(*args, **kwargs)
    given = []  # filled with the tensors among the arguments
    raw_args, raw_kwargs = _take_raw(args, given), _take_raw(kwargs, given)
    ours = [value for value in given if isinstance(value, DeviceTensor)]
    target = _find_target(operation, ours, args, kwargs)
    if operation.is_view:
        return _wrap(function(*raw_args, **raw_kwargs), given, target)
    written = [args[key] if isinstance(key, int) else kwargs.get(key) for key in operation.written]
    _check(operation, args, given, ours, written)
    if kwargs:
        raw_kwargs = _on_host(raw_kwargs)
    made = function(*raw_args, **raw_kwargs)
    if ours:
        _note(operation, args, kwargs, ours, written)
    return _wrap(made, given, target)


def _take_raw(value, tensors):
    """Replace tensors of the device by their values; add all tensors to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.raw if isinstance(value, DeviceTensor) else value
    if isinstance(value, (list, tuple)):
        made = [_take_raw(item, tensors) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict):
        return {key: _take_raw(item, tensors) for key, item in value.items()}
    return value


def _find_target(operation, ours, args, kwargs):
    """Return the device of the result."""
    if operation.name == "copy":
        return args[0].device
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    return ours[0].device if ours else HOST


def _check(operation, args, given, ours, written):
    dtypes = {tensor.dtype for tensor in ours}
    check_operation(operation.name, dtypes)
    if lacking := DEVICE.lacks & dtypes:
        raise TypeError(f"Cannot convert a tensor to {lacking} on this device, which does not support it")
    if len(given) > 1 and ours and operation.name not in MOVES:
        hosts = [value for value in given if not isinstance(value, DeviceTensor)]
        check_places(operation.name, args, ours, hosts, written)
        if len({tensor.device for tensor in ours}) > 1:
            raise RuntimeError(f"aten::{operation.name} of tensors on {[str(tensor.device) for tensor in ours]}")


def _on_host(kwargs):
    """Return arguments with which the CPU computes the same; it cannot pin memory without an accelerator."""
    changes = {"device": HOST, "pin_memory": False}
    return {key: value if value is None else changes.get(key, value) for key, value in kwargs.items()}


def _note(operation, args, kwargs, ours, written):
    """Record an operation in its stream, and wait for it where the host needs the result."""
    stream = streams.current(ours[0].device.index)
    number = stream.issue()
    for tensor in ours:
        writes = any(tensor is other for other in written)
        if writes and tensor.shape != tensor.raw.shape:
            raise RuntimeError(f"aten::{operation.name} gives its result another shape: {tuple(tensor.raw.shape)}")
        if tensor.numel():
            tensor.memory.use(*_find_extent(tensor.raw), writes, stream, number)
    if operation.name in MOVES:
        _note_copy(stream, number, args, kwargs)
    elif operation.name in WAITS or _has_mask(args):
        stream.complete(number)


def _note_copy(stream, number, args, kwargs):
    """Record a copy between host and device. The host waits for it unless it need not block."""
    is_copy = len(args) > 1 and isinstance(args[1], torch.Tensor)
    source = args[1] if is_copy else args[0]
    target = args[0].device if is_copy else torch.device(kwargs.get("device") or source.device)
    may_return = kwargs.get("non_blocking") or (is_copy and len(args) > 2 and args[2])
    if not isinstance(source, DeviceTensor) and may_return:
        if is_pinned(source):
            stream.copy_later(number, source)
    elif (source.device.type == "cpu") != (target.type == "cpu"):
        stream.complete(number)


def _has_mask(args):
    """Return True if a mask selects elements: the host must then know their number."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _find_extent(raw):
    """Return the first byte of a tensor in its memory, and the one after the last."""
    first, size = raw.storage_offset(), raw.itemsize
    if raw.is_contiguous():
        n = raw.numel()
    else:
        n = 1 + sum((n - 1) * step for n, step in zip(raw.shape, raw.stride(), strict=True))
    return first * size, (first + n) * size


def _wrap(made, given, target):
    """Give tensors that were written to back as they were given; others are new on the device, or views there."""
    if isinstance(made, torch.Tensor):
        for value in given:
            if made is value or (isinstance(value, DeviceTensor) and made is value.raw):
                return value
        return place(made, target, given) if target.type == NAME else made
    if isinstance(made, (list, tuple)):
        return type(made)([_wrap(value, given, target) for value in made])
    return made


def place(raw, device, among=()):
    """Return a tensor on the device with these values; a view of one of ``among`` shares its memory."""
    storage = raw.untyped_storage()
    address = storage.data_ptr()
    if raw.dtype in DEVICE.lacks:
        raise TypeError(f"Cannot convert a tensor to {raw.dtype} on this device, which does not support it")
    for tensor in among:
        if isinstance(tensor, DeviceTensor) and tensor.memory.address == address and address:
            return DeviceTensor(raw, tensor.memory, tensor.device)
    device = torch.device(NAME, device.index or 0)
    stream = streams.current(device.index)
    n_bytes = storage.nbytes()
    memory = streams.Memory(address, stream, partial(DEVICE.free, n_bytes, DEVICE.allocate(n_bytes)))
    memory.use(0, n_bytes, True, stream, stream.issue())
    return DeviceTensor(raw, memory, device)


def check_tables(monkeypatch, package):
    """Clear the caches for each device of a package's functions; refuse results that are not complete yet.

    Another thread may take them from the cache and use them on its own stream at once.
    """
    for module, name, function in _list_tables(package):
        function.cache_clear()
        monkeypatch.setattr(module, name, _finish(function))


@cache
def _list_tables(package):
    return [
        (module, name, function)
        for module in [module for name, module in sys.modules.items() if name.startswith(package)]
        for name, function in vars(module).items()
        if hasattr(function, "cache_clear") and "device" in signature(function).parameters
    ]


def _finish(function):
    @wraps(function)
    def call(*args):
        made, tensors = function(*args), []
        _take_raw(made, tensors)
        if any(isinstance(tensor, DeviceTensor) and not tensor.memory.is_done() for tensor in tensors):
            raise streams.HazardError(f"{function.__name__} caches a tensor that may not be there yet")
        return made

    return call


_pinned: dict[int, "weakref.ref[torch.Tensor]"] = {}  # allocations by their address


def is_pinned(tensor):
    is_kept = _pinned.get(tensor.untyped_storage().data_ptr())
    return is_kept is not None and is_kept() is not None


_empty = torch.empty


def _is_ours(device):
    return device is not None and torch.device(device).type == NAME


def _make_on_device(function):
    """Wrap a function of torch that makes tensors in C++: make them on the host, then place them."""

    @wraps(function)
    def make(*args, device=None, **kwargs):
        if not _is_ours(device):
            return function(*args, device=device, **kwargs)
        made = place(function(*_take_raw(args, []), **kwargs), torch.device(device))
        streams.current(made.device.index).synchronize()  # torch copies from the host here, and waits for the copy
        return made

    return make


MAKERS = {name: _make_on_device(getattr(torch, name)) for name in ("tensor", "as_tensor")}


def make_empty(*args, pin_memory=False, **kwargs):
    """Act as ``torch.empty``, but pin memory only where there is an accelerator."""
    made = _empty(*args, **kwargs)
    if pin_memory:
        _pinned[made.data_ptr()] = weakref.ref(made)
    return made


@cache
def register():
    """Register the device with torch, once and for all."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend  # torch 2.9

    _setup_privateuseone_for_python_backend(NAME, backend_module=DEVICE)
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda operation, *args, **kwargs: run(operation, args, kwargs), "PrivateUse1")
    ranges = torch.library.Library("aten", "IMPL")
    for name in ("default", "start", "start_step"):  # torch's own give an empty tensor another shape
        operation = getattr(torch.ops.aten.arange, name)
        ranges.impl(
            operation._schema.name + ("" if name == "default" else f".{name}"), _run_as(operation), "PrivateUse1"
        )
    return library, ranges  # both must stay alive


def _run_as(operation):
    return lambda *args, **kwargs: run(operation, args, kwargs)


@contextmanager
def simulate(count=1, limit=None, lacks=()):
    """Let there be ``count`` devices with ``limit`` bytes of memory together, without the dtypes ``lacks``.

    Yields the device, whose ``used`` and ``peak`` are bytes of memory.
    """
    register()
    DEVICE.reset(count, limit, lacks)
    streams.hazards.clear()
    places = {
        **{(torch, name): make for name, make in MAKERS.items()},
        (torch, "empty"): make_empty,
        (torch, "Stream"): streams.Stream,
        (torch, "Event"): streams.Event,
        (torch.accelerator, "current_stream"): lambda device=None: streams.current(torch.device(device).index or 0),
        (torch.accelerator, "set_stream"): streams.choose,
    }
    patches = [patch.object(module, name, stand_in) for (module, name), stand_in in places.items()]
    for patched in patches:
        patched.start()
    try:
        yield DEVICE
    finally:
        for patched in patches:
            patched.stop()
        DEVICE.count = 0
    assert not streams.hazards, streams.hazards[0]


_entered = ExitStack()


def enter(count):
    """Let there be devices for the rest of the process."""
    _entered.enter_context(simulate(count))


def main(original, quantized, tokens, *by_products):
    from quanterr.evaluation.run import evaluate

    with simulate():
        more = dict(word.split("=") for word in by_products)
        print(evaluate(original, [quantized], tokens=tokens, context=16, device=NAME, **more).to_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
