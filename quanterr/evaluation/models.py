"""A model built from its config.json without memory for its weights, and the units that are loaded one at a time.

A unit is a block of the model (a class of ``_no_split_modules``), or another module that has weights of its own: the
embedding, the last norm, the head. Whatever hangs on a module that has units below it is loaded at once and kept.
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quanterr.errors import CheckpointError, ResourceError, UsageError
from quanterr.evaluation.folder import ModelFolder
from quanterr.tensors.devices import CPU
from quanterr.util.text import display

EXTRA = 'evaluate needs transformers and greenlet: pip install "quanterr[evaluate]"'
CAUSAL, SEQUENCE, ENCODER = "causal", "sequence to sequence", "encoder"


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
    whole = set(getattr(model, "_no_split_modules", None) or ())
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


def kind_of(config: Any) -> str:
    """Whether it continues a text, answers one with another, or embeds it."""
    names = getattr(config, "architectures", None) or []
    if getattr(config, "is_encoder_decoder", False):
        return SEQUENCE
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_MODELS
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED_MODELS

    masked = config.model_type in MASKED_MODELS
    return CAUSAL if config.model_type in CAUSAL_MODELS and not masked else ENCODER


def read_config(folder: ModelFolder) -> Any:
    """The config of a folder, for a model that transformers knows.

    Raises:
        UsageError: transformers is not installed.
        CheckpointError: no config.json, one that is damaged or quantized, or an architecture that transformers lacks.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise UsageError(EXTRA) from error
    shown = folder.named("config.json")
    try:
        fields = json.loads((folder.path / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{shown}: {error.strerror}; the folder of a model is needed, with its config") from error
    except ValueError as error:
        raise CheckpointError(f"{shown}: not JSON") from error
    if fields.get("quantization_config"):
        raise CheckpointError(f"{shown}: says that this is a quantized model; the original is needed first")
    try:
        return AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        name = display(str(fields.get("model_type", "without a model_type")))
        raise CheckpointError(
            f"{shown}: transformers has no model {name}; a newer version may "
            "(models with code of their own are not run)"
        ) from error


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the original's config.json says, and in which dtype and where all sides compute."""

    config: Any
    dtype: torch.dtype
    device: torch.device = CPU

    @property
    def kind(self) -> str:
        """CAUSAL, SEQUENCE or ENCODER."""
        return kind_of(self.config)

    def build(self) -> nn.Module:
        """The model, its parameters on the meta device and its buffers (rotary tables) real.

        Raises:
            CheckpointError: transformers cannot build it.
            ResourceError: too little memory for its buffers.
        """
        from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

        auto: Any = {CAUSAL: AutoModelForCausalLM, SEQUENCE: AutoModelForSeq2SeqLM, ENCODER: AutoModel}[self.kind]
        self.config._experts_implementation = "eager"  # one product for each expert, so that each weight is seen
        try:
            with _parameters_on_meta(), CPU:
                model = auto.from_config(self.config, dtype=self.dtype)
            _move_buffers(model, self.device)
        except MemoryError as error:
            raise ResourceError("too little memory to build the model") from error
        except Exception as error:
            raise CheckpointError(
                f"config.json: transformers cannot build this model: {display(str(error), 500)}"
            ) from error
        found: nn.Module = model.eval().requires_grad_(False)
        return found


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Made on the CPU, as from_pretrained makes them, so that they have the same digits everywhere."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(device)


def inputs_of(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """Arguments of the model's forward for token ids (n, tokens); nothing is generated, so nothing is cached."""
    return {"input_ids": ids} | ({"use_cache": False} if takes(model, "use_cache") else {})


def takes(model: nn.Module, argument: str) -> bool:
    """Whether the model's forward has an argument of that name."""
    return argument in inspect.signature(model.forward).parameters


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """As accelerate.init_empty_weights: parameters are made without memory."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            made = nn.Parameter(parameter.to("meta"), requires_grad=False)
            made.__dict__.update(parameter.__dict__)
            module._parameters[name] = made

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
