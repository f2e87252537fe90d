"""A model built from its config.json, without memory for its weights."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quanterr.errors import CheckpointError, ResourceError, UsageError
from quanterr.evaluation.folder import ModelFolder
from quanterr.evaluation.workload import CALLS, Workload, workload_of
from quanterr.tensors.devices import CPU
from quanterr.util.strict_json import JsonObject, as_object
from quanterr.util.text import display

DIFFUSION = 'evaluate --inputs needs diffusers: pip install "quanterr[diffusion]"'
EXTRA = 'evaluate needs transformers and greenlet: pip install "quanterr[evaluate]"'


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
    shown, fields = folder.named("config.json"), _fields(folder)
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


def _fields(folder: ModelFolder) -> JsonObject:
    """What its config.json says.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    shown = folder.named("config.json")
    try:
        return as_object(json.loads((folder.path / "config.json").read_text(encoding="utf-8")))
    except OSError as error:
        raise CheckpointError(f"{shown}: {error.strerror}; the folder of a model is needed, with its config") from error
    except ValueError as error:
        raise CheckpointError(f"{shown}: not JSON") from error


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the original's config.json says, and in which dtype and where all sides compute."""

    config: Any
    dtype: torch.dtype
    device: torch.device = CPU

    @property
    def workload(self) -> Workload:
        """What the model is for."""
        return workload_of(self.config)

    def build(self) -> nn.Module:
        """The model, its parameters on the meta device and its buffers (rotary tables) real.

        Raises:
            CheckpointError: transformers cannot build it.
            ResourceError: too little memory for its buffers.
        """
        import transformers

        auto = getattr(transformers, self.workload.loader)
        self.config._experts_implementation = "eager"  # one product for each expert, so that each weight is seen
        return _built(lambda: auto.from_config(self.config, dtype=self.dtype), "transformers", self.device)


@dataclass(frozen=True, slots=True)
class Denoiser:
    """A model of diffusers, as its config.json says: see :class:`Architecture`."""

    config: JsonObject
    dtype: torch.dtype
    device: torch.device = CPU

    @property
    def workload(self) -> Workload:
        """Recorded calls."""
        return CALLS

    def build(self) -> nn.Module:
        """The model, its parameters on the meta device and its buffers real.

        Raises:
            UsageError: diffusers is not installed.
            CheckpointError: diffusers cannot build it.
        """
        try:
            import diffusers
        except ImportError as error:
            raise UsageError(DIFFUSION) from error
        name = str(self.config.get("_class_name"))
        kind = getattr(diffusers, name, None)
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise CheckpointError(f"config.json: diffusers {diffusers.__version__} has no model {display(name)}")
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(self.dtype)
            return _built(lambda: kind.from_config(self.config), "diffusers", self.device)  # type: ignore[attr-defined]
        finally:
            torch.set_default_dtype(before)


def _built(make: Callable[[], Any], program: str, device: torch.device) -> nn.Module:
    """A model without memory for its parameters, made by a program that may not be able to."""
    try:
        with _parameters_on_meta(), CPU:
            model = make()
        _move_buffers(model, device)
    except MemoryError as error:
        raise ResourceError("too little memory to build the model") from error
    except Exception as error:
        raise CheckpointError(f"config.json: {program} cannot build this model: {display(str(error), 500)}") from error
    found: nn.Module = model.eval().requires_grad_(False)
    return found


def denoiser_config(folder: ModelFolder) -> JsonObject | None:
    """The config.json of a model of diffusers; None where the folder holds none."""
    try:
        fields = _fields(folder)
    except CheckpointError:
        return None  # what reads it for transformers says why
    return fields if "_class_name" in fields else None


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Made on the CPU, as from_pretrained makes them, so that they have the same digits everywhere."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(device)


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
