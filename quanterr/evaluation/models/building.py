"""A model built from its config.json, with no memory for its weights."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from quanterr.checkpoints import Checkpoint
from quanterr.errors import CheckpointError, ResourceError, UsageError
from quanterr.evaluation.denoisers.families import MARKERS, recognize
from quanterr.evaluation.extras import DIFFUSION, EXTRA
from quanterr.evaluation.models.folder import ModelFolder
from quanterr.evaluation.models.layouts import Layout, find_layout
from quanterr.evaluation.models.lora import Lora, MergedNames
from quanterr.evaluation.models.names import ConversionNames, LayoutNames, Names
from quanterr.evaluation.models.renaming import Counterpart, counterpart
from quanterr.evaluation.models.units import CPU
from quanterr.evaluation.models.weights import OriginalWeights
from quanterr.evaluation.running.workload import CALLS, Workload, workload_of
from quanterr.util.memory import is_out_of_memory
from quanterr.util.platform import keep_freed_memory
from quanterr.util.strict_json import JsonObject, as_object
from quanterr.util.text import display, itemize

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LARGE_PARAMETER_BYTES = 1 << 20  # larger parameters stay out of the heap while a model is built
MAX_REUSED_BLOCK_BYTES = 32 << 20  # smaller freed blocks are kept for reuse afterwards; glibc's maximum
MAX_KEPT_BYTES = 256 << 20  # free memory that is kept until a unit of the model has run
RANDOM_FUNCTIONS = ("normal_", "uniform_")  # endings of names of functions that initialize tensors
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def read_config(folder: ModelFolder) -> "PretrainedConfig":
    """Return transformers' config of the model in a folder.

    Raises:
        UsageError: transformers is not installed.
        CheckpointError: config.json is missing, damaged or quantized, or transformers lacks the architecture or refuses
            a value.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise UsageError(EXTRA) from error
    shown, fields = folder.locate("config.json"), _read_fields(folder)
    if fields.get("quantization_config"):
        raise CheckpointError(f"{shown}: declares a quantized model; pass the original first")
    try:
        return AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        name = display(str(fields.get("model_type", "without a model_type")))
        raise CheckpointError(
            f"{shown}: transformers has no model {name}; a newer version may "
            "(models with code of their own are not run)"
        ) from error
    except Exception as error:  # validators of configs raise errors of their own
        raise CheckpointError(f"{shown}: transformers refuses it: {display(str(error), 300)}") from error


def read_denoiser_config(
    folder: ModelFolder, original: Checkpoint, config: Path | None, with_inputs: bool
) -> JsonObject | None:
    """Return the config of a model of diffusers, from ``config``, from the folder, or derived from the tensors.

    ``config`` is a config.json or its folder. ``with_inputs`` means that recorded calls are given, so the original must
    be a model that takes them. Returns None if the config, or the lack of one, indicates a language model.

    Raises:
        CheckpointError: ``config`` is not a config of diffusers, or the original is a single file of no known family.
    """
    if config is not None:
        place = config if config.is_dir() else config.parent
        own_folder = ModelFolder(place, str(place))
        fields = _read_fields(own_folder)
        if "_class_name" not in fields:
            raise CheckpointError(
                f"{own_folder.locate('config.json')}: no _class_name: not the config of a model of diffusers"
            )
        return fields
    if (folder.path / "config.json").exists():
        fields = _read_fields(folder)
        return fields if "_class_name" in fields else None
    try:
        return recognize(OriginalWeights(original).shapes, display(original.path))
    except CheckpointError:
        if with_inputs:
            raise
        return None  # read_config reports what is missing


def _read_fields(folder: ModelFolder) -> JsonObject:
    """Return the fields of a folder's config.json.

    Raises:
        CheckpointError: the config.json is missing or damaged.
    """
    shown = folder.locate("config.json")
    try:
        return as_object(json.loads((folder.path / "config.json").read_text(encoding="utf-8")))
    except OSError as error:
        raise CheckpointError(f"{shown}: {error.strerror}; the folder of a model is needed, with its config") from error
    except ValueError as error:
        raise CheckpointError(f"{shown}: not JSON") from error


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model of transformers: the original's config, and the dtype and device in which all sides compute."""

    config: "PretrainedConfig"
    dtype: torch.dtype
    device: torch.device = CPU
    recorded: bool = False  # runs on recorded calls instead of a text

    @property
    def workload(self) -> Workload:
        """The task of the model."""
        return CALLS if self.recorded else workload_of(self.config)

    def build(self) -> nn.Module:
        """Build the model, its parameters on the meta device and its buffers (rotary tables) real.

        Raises:
            CheckpointError: transformers cannot build it.
            ResourceError: too little memory for its buffers.
        """
        import transformers

        # Multiplies by each expert's weight separately, so that each weight's inputs can be measured.
        self.config._experts_implementation = "eager"
        name = next(iter(self.config.architectures or ()), "") if self.recorded else ""
        model_class = getattr(transformers, name, None)
        if self.recorded and model_class is not None:  # the class whose weights were saved, with its head
            model = _build(lambda: model_class._from_config(self.config, dtype=self.dtype), "transformers", self.device)
        else:
            auto = getattr(transformers, self.workload.loader)
            # A GGUF file of an encoder lacks the pooler, whose outputs are not measured.
            less = {} if getattr(self.config, "add_pooling_layer", True) else {"add_pooling_layer": False}
            model = _build(lambda: auto.from_config(self.config, dtype=self.dtype, **less), "transformers", self.device)
        kept = {"_keep_in_fp32_modules_strict"} | ({"_keep_in_fp32_modules"} if self.dtype is torch.float16 else set())
        _keep_float32(model, *kept)
        return model

    def names(self, model: nn.Module, originals: OriginalWeights, stored: Iterable[str]) -> Names:
        """Assign stored tensors to the parameters of the model."""
        return ConversionNames(model, stored)

    def counterparts(self, originals: OriginalWeights, candidates: Sequence[Checkpoint]) -> list[Counterpart]:
        """Return the original unchanged for each candidate, as models of transformers have only one naming.

        The model of a GGUF file has no blocks for multi-token prediction, which other files may have.
        """
        described = [each.gguf if originals.checkpoint.source else None for each in candidates]
        return [
            Counterpart(originals, frozenset(name for name in each.entries if metadata and metadata.predicts(name)))
            for each, metadata in zip(candidates, described, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Denoiser:
    """A model of diffusers: see :class:`Architecture`."""

    config: JsonObject
    dtype: torch.dtype
    device: torch.device = CPU
    lora: Lora | None = None  # merged into all sides

    @property
    def workload(self) -> Workload:
        """The task of the model: recorded calls."""
        return CALLS

    def build(self) -> nn.Module:
        """Build the model, its parameters on the meta device and its buffers real.

        Raises:
            UsageError: diffusers is not installed.
            CheckpointError: diffusers cannot build it.
        """
        try:
            import diffusers
        except ImportError as error:
            raise UsageError(DIFFUSION) from error
        name = str(self.config.get("_class_name"))
        model_class = getattr(diffusers, name, None)
        if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
            raise CheckpointError(f"config.json: diffusers {diffusers.__version__} has no model {display(name)}")
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(self.dtype)
            model = _build(lambda: model_class.from_config(self.config), "diffusers", self.device)  # type: ignore[attr-defined]
        finally:
            torch.set_default_dtype(before)
        _keep_float32(model, "_keep_in_fp32_modules")
        return model

    def names(self, model: nn.Module, originals: OriginalWeights, stored: Iterable[str]) -> Names:
        """Assign stored tensors, under diffusers' names or a single file's, to the parameters of the model.

        Raises:
            CheckpointError: the names belong to another model, or the model lacks some of the tensors.
            UsageError: the LoRA belongs to another model.
        """
        layout = self._layout(model, originals)
        if self.lora is None:
            return LayoutNames(model, layout)
        return MergedNames(model, layout, self.lora.changes(model, layout))

    def _layout(self, model: nn.Module, originals: OriginalWeights) -> Layout:
        """Return the layout of the original, which is computed only once."""
        if originals.layout is None:
            where = display(originals.checkpoint.path)
            originals.layout = find_layout(model, self.config, originals.shapes, where)
            if unknown := sorted(originals.layout.unknown - MARKERS):
                raise CheckpointError(
                    f"{where}: {type(model).__name__} of the config has no {itemize(unknown, 3)}; is this the config "
                    "of another variant? Give the right one with --config FOLDER"
                )
        return originals.layout

    def counterparts(self, originals: OriginalWeights, candidates: Sequence[Checkpoint]) -> list[Counterpart]:
        """Return the original for each candidate, in the candidate's names.

        Raises:
            CheckpointError: a candidate's names belong to another model.
        """
        model = self.build()
        layout = self._layout(model, originals)
        return [counterpart(model, self.config, originals, layout, each) for each in candidates]


def _build(make: Callable[[], nn.Module], program: str, device: torch.device) -> nn.Module:
    """Build a model with no memory for its parameters; ``make`` calls ``program``, which errors name."""
    try:
        with _keep_heap_for_activations(), _put_parameters_on_meta(), CPU, _WithoutValues():
            model = make()
        # from_pretrained makes buffers on the CPU, too: so they are equal on every device.
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    module._buffers[name] = buffer.to(device)
    except Exception as error:
        if is_out_of_memory(error):
            raise ResourceError("too little memory to build the model") from error
        raise CheckpointError(f"config.json: {program} cannot build this model: {display(str(error), 500)}") from error
    return model.eval()


def _keep_float32(model: nn.Module, *lists: str) -> None:
    """Convert the modules that from_pretrained keeps in float32 to it; ``lists`` are the attributes that name them.

    Reference: transformers, modeling_utils.py, _get_dtype_plan; diffusers, models/modeling_utils.py.
    """
    kept = {name for each in lists for name in getattr(model, each, None) or ()}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype.itemsize == 2 and kept & {*path.split("."), name}:
                module._parameters[name] = nn.Parameter(parameter.float(), requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype.itemsize == 2 and kept & {*path.split("."), name}:
                module._buffers[name] = buffer.float()


@contextmanager
def _keep_heap_for_activations() -> Iterator[None]:
    """Allocate parameters, which a model frees at once, outside of the heap; afterwards, keep freed activations in it.

    In the heap, objects that outlive a parameter come after its memory, so that its addresses could not be returned,
    which a limit of memory (``ulimit -v``) counts even though nothing was written there. Activations are reused because
    new pages would take a third of the time.
    """
    keep_freed_memory(LARGE_PARAMETER_BYTES, MAX_KEPT_BYTES)
    try:
        yield
    finally:
        keep_freed_memory(MAX_REUSED_BLOCK_BYTES, MAX_KEPT_BYTES)


class _WithoutValues(TorchFunctionMode):
    """Skips random values of parameters without memory, for which torch takes milliseconds each, drawing nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "").endswith(RANDOM_FUNCTIONS):
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.device.type == "meta":
                return tensor
        return function(*args, **(kwargs or {}))


@contextmanager
def _put_parameters_on_meta() -> Iterator[None]:
    """Make parameters without memory, as accelerate.init_empty_weights does."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            made = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            module._parameters[name] = made

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
