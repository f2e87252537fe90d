"""The units of a model, which are modules whose weights are loaded together.

A unit is a block of the model (a class of ``_no_split_modules`` or ``_repeated_blocks``), or another module with
weights of its own: the embedding, the last norm, the head. Weights of a module that contains units are loaded once and
stay in memory. So do tables that are never trained, such as sinusoids, as audio encoders read them without calling
their module.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quanterr.errors import CheckpointError
from quanterr.util.text import display

CPU = torch.device("cpu")


class Slot(NamedTuple):
    """The place of a weight: its name in the model, and the module's attribute."""

    name: str
    module: nn.Module
    attribute: str
    is_buffer: bool

    @property
    def tensor(self) -> Tensor:
        """The tensor that fills the slot now."""
        filled = (self.module._buffers if self.is_buffer else self.module._parameters)[self.attribute]
        assert filled is not None  # noqa: S101 - a slot is made for a tensor
        return filled

    def fill(self, tensor: Tensor) -> None:
        """Put a weight into the slot."""
        if self.is_buffer:
            self.module._buffers[self.attribute] = tensor
        else:
            self.module._parameters[self.attribute] = nn.Parameter(tensor, requires_grad=False)


class Unit:
    """A part of the model whose weights are in memory only while it runs."""

    def __init__(self, name: str, module: nn.Module, device: torch.device = CPU) -> None:
        """Find the slots of the module."""
        self.name, self.module, self.forward, self._device = name, module, module.forward, device
        self.slots = list(slots_of(name, module))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill the slots with weights, by their names in the model."""
        for slot in self.slots:
            slot.fill(convert(tensors[slot.name], slot))

    def free(self) -> None:
        """Fill the slots with NaN, so that it shows if a weight is read outside of its unit."""
        for slot in self.slots:  # one element, expanded: a meta tensor could be read without an error
            shape, dtype = slot.tensor.shape, slot.tensor.dtype
            value = float("nan") if dtype.is_floating_point else 0
            slot.fill(torch.full((1,), value, dtype=dtype, device=self._device).expand(shape))


def convert(tensor: Tensor, slot: Slot) -> Tensor:
    """Return a weight in the dtype of its slot.

    Raises:
        CheckpointError: the model's parameter has another shape.
    """
    if tensor.shape != slot.tensor.shape:
        expected = list(slot.tensor.shape)
        raise CheckpointError(
            f"{display(slot.name)}: stored as {list(tensor.shape)}, the model of config.json has {expected}"
        )
    return tensor.to(slot.tensor.dtype)


def slots_of(prefix: str, module: nn.Module) -> Iterator[Slot]:
    """Yield the slots of a module and of all modules in it, by their names in the model."""
    for path, owner in module.named_modules():
        full = ".".join(part for part in (prefix, path) if part)
        yield from _own_slots(full, owner)


def _own_slots(full: str, owner: nn.Module) -> Iterator[Slot]:
    """Yield the slots of a module without its submodules: parameters and persistent buffers."""
    dot = "." if full else ""
    for name, parameter in owner._parameters.items():
        if parameter is not None:
            yield Slot(f"{full}{dot}{name}", owner, name, is_buffer=False)
    for name, buffer in owner._buffers.items():
        if buffer is not None and name not in owner._non_persistent_buffers_set:
            yield Slot(f"{full}{dot}{name}", owner, name, is_buffer=True)


def units_of(model: nn.Module, device: torch.device) -> dict[str, Unit]:
    """Return the units of a built model by their names, in its order; their weights will be on the device."""
    attributes = ("_no_split_modules", "_repeated_blocks")  # names in transformers and in diffusers
    blocks = {name for attribute in attributes for name in getattr(model, attribute, None) or ()}
    units: dict[str, Unit] = {}
    for name, module in model.named_modules():
        if not name or any(name.startswith(f"{unit}.") for unit in units):
            continue
        if isinstance(module, nn.Embedding) and not module.weight.requires_grad:
            continue
        below = any(any(_own_slots("", inner)) for inner in module.modules() if inner is not module)
        if type(module).__name__ in blocks or (any(_own_slots("", module)) and not below):
            units[name] = Unit(name, module, device)
    return units


def list_kept_slots(model: nn.Module, units: Mapping[str, Unit]) -> list[Slot]:
    """Return the slots that belong to no unit, such as class tokens, whose weights stay in memory."""
    inside = {id(module) for unit in units.values() for module in unit.module.modules()}
    return [
        slot for path, owner in model.named_modules() if id(owner) not in inside for slot in _own_slots(path, owner)
    ]
