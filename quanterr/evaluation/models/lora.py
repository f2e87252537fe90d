"""LoRA adapters that ``--lora`` merges into both sides, to see whether the adapter still works when quantized.

    W' = W + alpha / rank · B A        in float32, after W is dequantized

A (rank, columns) and B (rows, rank) are called lora_A and lora_B (PEFT, diffusers), or lora_down and lora_up (kohya).
Modules are named as in diffusers or in the original's own file, with dots or with underscores (kohya). diffusers' LoRA
loaders convert other names. A missing alpha equals the rank.

Source: kohya-ss/sd-scripts, networks/lora.py; huggingface/diffusers, src/diffusers/loaders/lora_pipeline.py and
lora_conversion_utils.py; huggingface/peft, src/peft/tuners/lora/layer.py.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from quanterr.errors import UsageError
from quanterr.evaluation.models.layouts import Layout, Rows
from quanterr.evaluation.models.names import Get, LayoutNames
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonObject, as_object
from quanterr.util.text import display, itemize

NAME_ENDINGS = (  # endings of the names of A and of B
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_A.default.weight", ".lora_B.default.weight"),
    (".lora_down.weight", ".lora_up.weight"),
    (".lora.down.weight", ".lora.up.weight"),
)
ALPHA = ".alpha"
MODULE_PREFIXES = (  # prefixes of the names of modules
    *("base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.", "unet."),
    *("lora_unet_", "lora_transformer_"),
)
OF_TEXT_ENCODERS = ("text_encoder", "lora_te", "lora_prior_te")
METADATA = "lora_adapter_metadata"  # where diffusers stores r and lora_alpha of its adapters, as JSON
# Class of models → diffusers' loader of its LoRAs.
LOADERS = {
    "AuraFlowTransformer2DModel": "AuraFlowLoraLoaderMixin",
    "ChromaTransformer2DModel": "FluxLoraLoaderMixin",
    "Flux2Transformer2DModel": "Flux2LoraLoaderMixin",
    "FluxTransformer2DModel": "FluxLoraLoaderMixin",
    "HunyuanVideoTransformer3DModel": "HunyuanVideoLoraLoaderMixin",
    "LTXVideoTransformer3DModel": "LTXVideoLoraLoaderMixin",
    "Lumina2Transformer2DModel": "Lumina2LoraLoaderMixin",
    "QwenImageTransformer2DModel": "QwenImageLoraLoaderMixin",
    "SD3Transformer2DModel": "SD3LoraLoaderMixin",
    "SanaTransformer2DModel": "SanaLoraLoaderMixin",
    "WanTransformer3DModel": "WanLoraLoaderMixin",
    "ZImageTransformer2DModel": "ZImageLoraLoaderMixin",
}


class Change(NamedTuple):
    """What an adapter adds to rows of a parameter, from row ``first`` on: ``scale`` · B A."""

    first: int
    down: Tensor  # A (rank, …)
    up: Tensor  # B (rows, rank, …)
    scale: float

    def add_to(self, weight: Tensor) -> None:
        """Add the change to a weight, in place."""
        rows = weight[self.first : self.first + len(self.up)]
        product = self.up.flatten(1).to(weight) @ self.down.flatten(1).to(weight)
        rows.add_(product.view(rows.shape), alpha=self.scale)


@dataclass
class Lora:
    """A stored adapter."""

    source: str
    sha256: str
    tensors: Mapping[str, Tensor]
    scale: float | None = None  # scale of all modules, if it is in the metadata
    _changes: dict[str, list[Change]] = field(default_factory=dict)  # by parameter; empty until ``changes`` is called

    @property
    def _where(self) -> str:
        return f"--lora {display(self.source)}"

    def changes(self, model: nn.Module, layout: Layout) -> Mapping[str, list[Change]]:
        """Return the changes of each parameter of a model; only the first call reads ``layout``, the original's.

        Raises:
            UsageError: the adapter changes a module that the model lacks, or that has another shape.
        """
        if not self._changes:
            shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if tensor.dim() > 1}
            pairs = _pair_matrices(self.tensors, self._where, self.scale)
            placed = _place(pairs, shapes, layout)
            if placed is None:
                converted = _pair_matrices(_convert(self.tensors, type(model).__name__), self._where, self.scale)
                # Converters drop unknown names. They split modules, but do not join any, so fewer mean dropped ones.
                placed = _place(converted, shapes, layout) if len(converted) >= len(pairs) else None
            if placed is None:
                lacking = itemize([name for name in pairs if _place({name: pairs[name]}, shapes, layout) is None], 3)
                name = type(model).__name__
                raise UsageError(
                    f"{self._where}: adapts {lacking}, which {name} lacks; is it a LoRA of another family?"
                )
            self._check(placed, shapes)
            self._changes = placed
        return self._changes

    def _check(self, placed: Mapping[str, list[Change]], shapes: Mapping[str, tuple[int, ...]]) -> None:
        for name, changes in placed.items():
            for change in changes:
                shape = shapes[name]
                columns = change.down[0].numel()
                fits = columns * len(change.up) == torch.Size((len(change.up), *shape[1:])).numel()
                if not fits or change.first + len(change.up) > shape[0] or change.up.shape[1] != len(change.down):
                    matrices = f"{list(change.up.shape)} · {list(change.down.shape)}"
                    raise UsageError(
                        f"{self._where}: its matrices for {display(name)} are {matrices}, the weight is {list(shape)}; "
                        "is it a LoRA of another model?"
                    )


class MergedNames(LayoutNames):
    """The stored names of a denoiser's checkpoint, with an adapter merged into its parameters."""

    def __init__(self, model: nn.Module, layout: Layout, changes: Mapping[str, list[Change]]) -> None:
        """Keep the layout and the changes."""
        super().__init__(model, layout)
        self._changes = changes

    def tensors(self, names: Iterable[str], get: Get) -> dict[str, Tensor]:
        """Return parameters by their names in the model, merged in float32."""
        parameters = super().tensors(names, get)
        for name in parameters.keys() & self._changes.keys():
            merged = parameters[name].to(torch.promote_types(parameters[name].dtype, torch.float32), copy=True)
            for change in self._changes[name]:
                change.add_to(merged)
            parameters[name] = merged
        return parameters


def read_lora(path: str) -> Lora:
    """Read an adapter.

    Raises:
        UsageError: the file is missing, or is not a LoRA with two matrices per module.
    """
    where = f"--lora {display(path)}"
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
        with open(path, "rb") as raw:
            digest = hashlib.file_digest(raw, "sha256").hexdigest()
        described = as_object(strict_json.loads(metadata.get(METADATA, "{}").encode()))
    except (OSError, SafetensorError, ValueError) as error:
        raise UsageError(f"{where}: {display(str(error), 200)}") from error
    ends = (*(end for pair in NAME_ENDINGS for end in pair), ALPHA)
    adapter = {name: tensor for name, tensor in tensors.items() if not name.startswith(OF_TEXT_ENCODERS)}
    if odd := [name for name in adapter if not name.endswith(ends)]:
        raise UsageError(
            f"{where}: {itemize(odd, 3)}: only LoRAs of two matrices for each module can be merged (no DoRA, LoKr, "
            "LoHa, no changes of biases and norms)"
        )
    if not adapter:
        raise UsageError(f"{where}: adapts no module of a denoiser")
    return Lora(path, digest, adapter, _read_scale(described, where))


def _read_scale(described: JsonObject, where: str) -> float | None:
    """Return alpha / rank of all modules from diffusers' metadata; None if it is not given.

    Raises:
        UsageError: modules have different alphas.
    """
    bare = {key.rpartition(".")[2]: value for key, value in described.items()}
    if bare.get("alpha_pattern") or bare.get("rank_pattern"):
        raise UsageError(f"{where}: alphas by module in the metadata cannot be read: store them as tensors")
    alpha, rank = bare.get("lora_alpha"), bare.get("r")
    return alpha / rank if isinstance(alpha, int | float) and isinstance(rank, int) and rank else None


def _pair_matrices(tensors: Mapping[str, Tensor], where: str, scale: float | None) -> dict[str, Change]:
    """Return A, B and scale of each module, by its name without prefixes and suffixes.

    Raises:
        UsageError: a matrix is missing.
    """
    changes = {}
    for name in tensors:
        pair = next((pair for pair in NAME_ENDINGS if name.endswith(pair)), None)
        if pair is None:
            continue
        stem = name.removesuffix(pair[0]).removesuffix(pair[1])
        if missing := next((stem + end for end in pair if stem + end not in tensors), None):
            raise UsageError(f"{where}: {display(name)} is stored without {display(missing)}")
        (down, up), alpha = (tensors[stem + end] for end in pair), tensors.get(stem + ALPHA)
        scale_of_module = float(alpha) / len(down) if alpha is not None else 1.0 if scale is None else scale
        for prefix in MODULE_PREFIXES:
            stem = stem.removeprefix(prefix)
        changes[stem] = Change(0, down, up, scale_of_module)
    return changes


def _place(
    pairs: Mapping[str, Change], shapes: Mapping[str, tuple[int, ...]], layout: Layout
) -> dict[str, list[Change]] | None:
    """Return the changes of each parameter; None if a name matches no parameter and no stored tensor."""
    by_module = {_flatten_name(name.removesuffix(".weight")): name for name in shapes}
    pieces: dict[str, list[tuple[str, int, Rows]]] = {}
    for name, parts in layout.parameters.items():
        first = 0
        for rows in parts:
            stored = _flatten_name(rows.source.removeprefix(layout.prefix).removesuffix(".weight"))
            if name in shapes:
                pieces.setdefault(stored, []).append((name, first, rows))
            first += rows.n
    changes: dict[str, list[Change]] = {}
    for module, change in pairs.items():
        parameter = by_module.get(_flatten_name(module))
        if parameter is not None:
            changes.setdefault(parameter, []).append(change)
        elif _flatten_name(module) in pieces:
            for owner, first, rows in pieces[_flatten_name(module)]:
                part = change.up[rows.first : rows.first + rows.n]
                changes.setdefault(owner, []).append(change._replace(first=first, up=part))
        else:
            return None
    return changes


def _flatten_name(module: str) -> str:
    """Return the name of a module in kohya's form, with underscores."""
    return module.replace(".", "_")


def _convert(tensors: Mapping[str, Tensor], model: str) -> Mapping[str, Tensor]:
    """Return a LoRA in diffusers' names; empty if diffusers cannot convert it."""
    try:
        from diffusers.loaders import lora_pipeline
    except ImportError:
        return {}
    loader = getattr(lora_pipeline, LOADERS.get(model, ""), None)
    if loader is None:
        return {}
    try:
        state = loader.lora_state_dict(dict(tensors))
    except Exception:  # converters raise many kinds of errors for names of other families
        return {}
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
