"""Which rows of stored tensors make up a denoiser's parameters, according to diffusers' own single-file converters.

A file of the original authors (Black Forest Labs, Stability AI, Alibaba, …) or of ComfyUI uses other names than
diffusers' class of the model, and fuses projections. diffusers' converters rename, split, join and swap tensors along
rows, without arithmetic. Here they run on labels, one integer for each stored row, so that the result shows where each
row belongs. The layout is the same for every format, as weights are dequantized before they are cut.

Source of the converters: huggingface/diffusers, src/diffusers/loaders/single_file_model.py,
SINGLE_FILE_LOADABLE_CLASSES.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quanterr.checkpoints.ggml_types import lacks_leading_ones
from quanterr.errors import CheckpointError
from quanterr.util.text import count, display, itemize

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # stored name → shape of the values

COMFY = "model.diffusion_model."
# A whole pipeline in one file has the denoiser's tensors under a prefix, besides its VAE and its text encoders.
PIPELINE_PREFIXES = (COMFY, "diffusion_model.")
COMMON_PREFIXES = ("transformer.", "unet.", "net.")  # prefixes that are stripped only if every tensor has them
MAX_NAMED = 3


class Rows(NamedTuple):
    """Consecutive rows of a stored tensor, along its first axis: ``n`` of them, from row ``first`` on."""

    source: str
    first: int
    n: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows that make up each parameter, from top to bottom, and rows that belong to no parameter."""

    parameters: Mapping[str, tuple[Rows, ...]]  # by names of the model
    ignored: frozenset[str] = frozenset()  # stored tensors of other parts of a pipeline, or that the converter drops
    unknown: frozenset[str] = frozenset()  # stored tensors that the model lacks
    prefix: str = ""  # prefix of the stored names

    def has_names_of(self, other: "Layout") -> bool:
        """Return whether parameters in both layouts come from tensors of the same names, apart from prefixes."""
        names, others = self._list_bare_names(), other._list_bare_names()
        shared = names.keys() & others.keys()
        return bool(shared) and all(names[name] == others[name] for name in shared)

    def _list_bare_names(self) -> dict[str, list[str]]:
        return {
            name: [rows.source.removeprefix(self.prefix) for rows in pieces] for name, pieces in self.parameters.items()
        }


def denoiser_names(names: Iterable[str]) -> tuple[dict[str, str], str]:
    """Return the denoiser's tensors in a file, bare name to stored name, and the prefix of the stored names."""
    every = list(names)
    prefix = next((p for p in PIPELINE_PREFIXES if any(name.startswith(p) for name in every)), None)
    if prefix is None:
        prefix = next((p for p in COMMON_PREFIXES if every and all(name.startswith(p) for name in every)), "")
    return {name.removeprefix(prefix): name for name in every if name.startswith(prefix)}, prefix


def find_layout(
    model: nn.Module, config: Mapping[str, object], shapes: Shapes, where: str, has_lost_ones: bool = False
) -> Layout:
    """Find the layout of a checkpoint for a model of diffusers, by the names and shapes of its tensors.

    ``where`` names the checkpoint in errors. ``has_lost_ones`` means that it is a file of ggml, which omits leading
    dimensions of 1. A parameter for which nothing is stored is not in the layout.

    Raises:
        CheckpointError: the names are neither the model's nor names that diffusers' converter takes, or a parameter has
            another shape in the model.
    """
    bare, prefix = denoiser_names(shapes)
    known: dict[str, Tensor] = model.state_dict()
    others = frozenset(shapes) - frozenset(bare.values())
    direct = Layout(
        {name: (Rows(bare[name], 0, _count_rows(shapes[bare[name]])),) for name in known if name in bare},
        others,
        _find_unknown(model, {short: [bare[short]] for short in bare if short not in known}),
        prefix,
    )
    if len(direct.parameters) == len(known):
        return direct
    try:
        converted = _convert(model, config, {short: _count_rows(shapes[name]) for short, name in bare.items()}, where)
    except CheckpointError:
        if 2 * len(direct.parameters) > len(known):  # diffusers' names, of which some are missing
            return direct
        raise
    pieces = {name: tuple(_find_runs(labels, list(bare.values()), shapes)) for name, labels in converted.items()}
    parameters = {name: rows for name, rows in pieces.items() if name in known}
    if len(parameters) < len(direct.parameters):
        return direct
    if has_lost_ones:
        for name, rows in parameters.items():
            source, shape = rows[0].source, tuple(known[name].shape)
            if rows == (Rows(source, 0, _count_rows(shapes[source])),) and lacks_leading_ones(shapes[source], shape):
                parameters[name], shapes = (Rows(source, 0, 1),), {**shapes, source: shape}
    for name, rows in parameters.items():
        _check_shape(name, tuple(known[name].shape), rows, shapes, where)
    used = {rows.source for each in pieces.values() for rows in each}
    extra = {name: [rows.source for rows in each] for name, each in pieces.items() if name not in known}
    return Layout(parameters, others | (frozenset(bare.values()) - used), _find_unknown(model, extra), prefix)


def _find_unknown(model: nn.Module, extra: Mapping[str, list[str]]) -> frozenset[str]:
    """Return the stored tensors whose converted names the model lacks, except names that diffusers ignores."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return frozenset(
        source
        for name, sources in extra.items()
        if not any(re.search(pattern, name) for pattern in patterns)
        for source in sources
    )


def _count_rows(shape: Shape) -> int:
    return shape[0] if shape else 1


def _convert(model: nn.Module, config: Mapping[str, object], rows: Mapping[str, int], where: str) -> dict[str, Tensor]:
    """Run diffusers' converter on labels; return the labels (rows,) int64 of each converted tensor.

    A label is the number of a row, counted over all tensors in order. Every tensor has only one column, as no converter
    cuts along columns.
    """
    try:
        from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
    except ImportError:
        SINGLE_FILE_LOADABLE_CLASSES = {}  # noqa: N806 - diffusers' name

    name, some = type(model).__name__, itemize(list(rows), MAX_NAMED)
    row: Any = SINGLE_FILE_LOADABLE_CLASSES.get(name)
    if row is None:
        raise CheckpointError(
            f"{where}: its names ({some}) are not those of {name}, and diffusers has no converter of single files for "
            "that class; convert it to diffusers' names first"
        )
    wanted = COMFY if name == "UNet2DConditionModel" else ""  # only this class's converter expects the prefix
    labels, first = dict[str, Tensor](), 0
    for short, n in rows.items():
        labels[wanted + short] = torch.arange(first, first + n)[:, None]
        first += n
    try:
        with _AtOwnSizes(model):
            converted = row["checkpoint_mapping_fn"](checkpoint=labels, config=dict(config))
    except KeyError as error:
        raise CheckpointError(
            f"{where}: lacks {display(str(error.args[0]))}, which diffusers' converter to {name} needs; it has {some}"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{where}: diffusers' converter to {name} fails on its names ({some}): {display(str(error), 300)}"
        ) from error
    return {key: value.flatten() for key, value in converted.items() if isinstance(value, Tensor)}


def _compute_inner_size(config: Mapping[str, int]) -> int:
    return config["num_attention_heads"] * config["attention_head_dim"]


def _compute_key_size(config: Mapping[str, int]) -> int:
    return config["num_kv_heads"] * config["hidden_size"] // config["num_attention_heads"]


# Class → the constants at which its converter splits fused projections, which are sizes of the released model → a
# function that returns the model's own size.
CONSTANTS: Mapping[str, Mapping[int, Callable[[Mapping[str, int]], int]]] = {
    "FluxTransformer2DModel": {3072: _compute_inner_size},
    "ChromaTransformer2DModel": {3072: _compute_inner_size},
    "HunyuanVideoTransformer3DModel": {3072: _compute_inner_size},
    "Lumina2Transformer2DModel": {2304: lambda config: config["hidden_size"], 768: _compute_key_size},
}


class _AtOwnSizes(TorchFunctionMode):
    """Splits at the model's own sizes in place of a converter's constants; the last part takes the rest."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        constants = CONSTANTS.get(type(model).__name__, {})
        self._sizes = {constant: size(model.config) for constant, size in constants.items()}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.split and self._sizes:
            *sizes, _ = [self._sizes.get(size, size) for size in args[1]]
            args = (args[0], [*sizes, len(args[0]) - sum(sizes)])
        return function(*args, **(kwargs or {}))


def _find_runs(labels: Tensor, order: list[str], shapes: Shapes) -> list[Rows]:
    """Cut the labels of a parameter into runs of consecutive rows of one stored tensor."""
    starts = torch.tensor([0, *(_count_rows(shapes[name]) for name in order)]).cumsum(0)
    owners = torch.searchsorted(starts, labels, right=True) - 1
    breaks = (labels[1:] != labels[:-1] + 1) | (owners[1:] != owners[:-1])
    ends = [*(torch.nonzero(breaks)[:, 0] + 1).tolist(), len(labels)]
    runs, first = [], 0
    for end in ends:
        if end > first:
            owner = int(owners[first])
            runs.append(Rows(order[owner], int(labels[first] - starts[owner]), end - first))
        first = end
    return runs


def _check_shape(name: str, shape: Shape, pieces: tuple[Rows, ...], shapes: Shapes, where: str) -> None:
    """Check that the rows of a parameter have the shape that it has in the model.

    Raises:
        CheckpointError: the shapes differ.
    """
    rows = sum(piece.n for piece in pieces)
    columns = {shapes[piece.source][1:] for piece in pieces}
    if rows != _count_rows(shape) or columns != {shape[1:]}:
        sources = itemize([f"{piece.source} {list(shapes[piece.source])}" for piece in pieces], MAX_NAMED)
        raise CheckpointError(
            f"{where}: {count(rows, 'row')} of {sources} make up {display(name)}, which is {list(shape)} in the model "
            "of the config; is this the config of another variant?"
        )
