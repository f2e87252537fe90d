"""Units of a model: what is loaded at a time.

A unit is a block of the model (a class of ``_no_split_modules``), or another module that has weights of its own: the
embedding, the last norm, the head. Whatever hangs on a module that has units below it is loaded at once and kept.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quanterr.errors import CheckpointError
from quanterr.tensors.devices import CPU
from quanterr.util.text import display


class Slot(NamedTuple):
    """Where a weight belongs: its name in the model, and the module's attribute."""

    name: str
    module: nn.Module
    attribute: str
    is_buffer: bool

    @property
    def there(self) -> Tensor:
        """What stands there now."""
        found = (self.module._buffers if self.is_buffer else self.module._parameters)[self.attribute]
        assert found is not None  # noqa: S101 - slots are made of those that are
        return found

    def fill(self, tensor: Tensor) -> None:
        """Put a weight there."""
        if self.is_buffer:
            self.module._buffers[self.attribute] = tensor
        else:
            self.module._parameters[self.attribute] = nn.Parameter(tensor, requires_grad=False)


class Unit:
    """A part of the model whose weights are in memory only while it runs."""

    def __init__(self, name: str, module: nn.Module, device: torch.device = CPU) -> None:
        """Find its slots."""
        self.name, self.module, self.forward, self._device = name, module, module.forward, device
        self.slots = list(slots_of(name, module))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put its weights in, by their names in the model."""
        for slot in self.slots:
            slot.fill(fitting(slot, tensors[slot.name]))

    def free(self) -> None:
        """Take them out again: whoever reads one outside of its unit finds NaN."""
        for slot in self.slots:
            slot.fill(_nothing(slot.there, self._device))


def fitting(slot: Slot, tensor: Tensor) -> Tensor:
    """A weight in the dtype of its slot.

    Raises:
        CheckpointError: it has another shape than the model has there.
    """
    if tensor.shape != slot.there.shape:
        there = list(slot.there.shape)
        raise CheckpointError(
            f"{display(slot.name)}: stored as {list(tensor.shape)}, the model of config.json has {there}"
        )
    return tensor.to(slot.there.dtype)


def _nothing(like: Tensor, device: torch.device) -> Tensor:
    """One NaN in that shape and dtype, without memory; on the meta device some models would compute garbage."""
    value = float("nan") if like.is_floating_point() else 0
    return torch.full((1,), value, dtype=like.dtype, device=device).expand(like.shape)


def slots_of(prefix: str, module: nn.Module) -> Iterator[Slot]:
    """All weights of a module and of those in it, by their names in the model."""
    for path, owner in module.named_modules():
        full = ".".join(part for part in (prefix, path) if part)
        yield from _own(full, owner)


def _own(full: str, owner: nn.Module) -> Iterator[Slot]:
    dot = "." if full else ""
    for name, parameter in owner._parameters.items():
        if parameter is not None:
            yield Slot(f"{full}{dot}{name}", owner, name, is_buffer=False)
    for name, buffer in owner._buffers.items():
        if buffer is not None and name not in owner._non_persistent_buffers_set:
            yield Slot(f"{full}{dot}{name}", owner, name, is_buffer=True)


def units_of(model: nn.Module, device: torch.device) -> dict[str, Unit]:
    """The units by their names, in the order of the model; their weights are on that device."""
    kinds = ("_no_split_modules", "_repeated_blocks")  # of transformers and of diffusers
    whole = {name for kind in kinds for name in getattr(model, kind, None) or ()}
    units: dict[str, Unit] = {}
    for name, module in model.named_modules():
        if not name or any(name.startswith(f"{unit}.") for unit in units):
            continue
        below = any(any(_own("", inner)) for inner in module.modules() if inner is not module)
        if type(module).__name__ in whole or (any(_own("", module)) and not below):
            units[name] = Unit(name, module, device)
    return units


def kept_slots(model: nn.Module, units: Mapping[str, Unit]) -> list[Slot]:
    """Slots that are in no unit: of class tokens and the like."""
    inside = {id(module) for unit in units.values() for module in unit.module.modules()}
    return [slot for path, owner in model.named_modules() if id(owner) not in inside for slot in _own(path, owner)]
