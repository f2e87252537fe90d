"""Lookup of ``ollama:NAME`` in the local store of Ollama; nothing is downloaded.

    $OLLAMA_MODELS, else ~/.ollama/models, else /usr/share/ollama/.ollama/models (the service on Linux)
        manifests/<host>/<namespace>/<model>/<tag>    JSON: layers with mediaType, digest and perhaps name
        blobs/sha256-<digest>                         the content of a layer

Models have one of two layouts:

    …image.model     a layer that is a GGUF file
    …image.tensor    for Ollama's MLX engine: a layer for each tensor, or for the experts of a block, that is a small
                     safetensors file of codes X.weight, X.weight.scale, X.weight.bias and X.weight.global_scale, whose
                     metadata states quant_type and group_size, or X.weight.quant_type and X.weight.group_size;
                     names of image models start with a component, as transformer/
    …image.json      beside those: a JSON file of the original, by its name

Reference: ollama/ollama@fb307609 types/model/name.go, server/manifest.go, x/imagegen/manifest/manifest.go,
x/create/writer.go, x/create/quantize.go, x/create/prequant.go, x/quant/quant.go.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from quanterr.errors import CheckpointError
from quanterr.util import strict_json
from quanterr.util.small_file import read_small
from quanterr.util.strict_json import JsonObject, as_object
from quanterr.util.text import display, itemize, parse_digits

PREFIX = "ollama:"
HOST, NAMESPACE, TAG = "registry.ollama.ai", "library", "latest"
GGUF_LAYER, TENSOR_LAYER, JSON_LAYER = (
    f"application/vnd.ollama.image.{layer}" for layer in ("model", "tensor", "json")
)
MAX_MANIFEST = 1 << 24  # bytes
NAME_PART = re.compile(r"[\w][\w.-]*")
MODES: dict[str, JsonObject] = {  # quant_type → how MLX names it
    "int4": {"bits": 4, "mode": "affine"},
    "int8": {"bits": 8, "mode": "affine"},
    "nvfp4": {"bits": 4, "mode": "nvfp4"},
    "mxfp4": {"bits": 4, "mode": "mxfp4"},
    "mxfp8": {"bits": 8, "mode": "mxfp8"},
}
ALIASES = {"fp4": "int4", "q4": "int4", "fp8": "int8", "q8": "int8"}
QUANT_TYPE, GROUP_SIZE, SCALE = "quant_type", "group_size", ".scale"


class Model(NamedTuple):
    """The files of a model in the store."""

    files: list[Path]  # a GGUF file, or the tensors
    configs: dict[str, Path] | None  # JSON files by their names; None for GGUF, which describes itself


def find_model(given: str, components: Iterable[str]) -> Model:
    """Return the files of ``ollama:NAME``; a name is ``[[host/]namespace/]model[:tag]``.

    Of a model of several components, the first of ``components`` that it has is returned.

    Raises:
        CheckpointError: the name is invalid, or the store has no such model; the message lists its models.
    """
    name, _, tag = given.removeprefix(PREFIX).partition(":")
    parts = [*(HOST, NAMESPACE)[: max(3 - len(name.split("/")), 0)], *name.split("/")]
    if len(parts) != 3 or not all(map(NAME_PART.fullmatch, [*parts, tag or TAG])):
        raise CheckpointError(f"{display(given)}: not a name of Ollama, such as ollama:llama3.2:1b")
    for store in _list_stores():
        manifest = store.joinpath("manifests", *parts, tag or TAG)
        try:
            layers = strict_json.as_object(strict_json.loads(read_small(manifest, MAX_MANIFEST))).get("layers")
        except (OSError, ValueError, strict_json.InvalidJson):
            continue
        known = [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
        if model := _gather(store, known, components):
            return model
    there = sorted({name for store in _list_stores() for name in _list_models(store)})
    models = f"it has {itemize(there)}" if there else "it has none"
    raise CheckpointError(
        f"{display(given)}: not in the store of Ollama: {models}; get it with `ollama pull {display(name)}`"
    )


def _gather(store: Path, layers: list[JsonObject], components: Iterable[str]) -> Model | None:
    """Return the files of the layers of a manifest; None if no layer has weights."""
    for layer in layers:
        if layer.get("mediaType") == GGUF_LAYER:
            return Model([_place(store, layer)], None)
    named = [(str(layer.get("name")), layer) for layer in layers]
    for prefix in ("", *(f"{component}/" for component in components)):
        in_component = [(name.removeprefix(prefix), layer) for name, layer in named if name.startswith(prefix)]
        in_component = [(name, layer) for name, layer in in_component if "/" not in name]
        if tensors := [_place(store, layer) for _, layer in in_component if layer.get("mediaType") == TENSOR_LAYER]:
            return Model(
                tensors,
                {name: _place(store, layer) for name, layer in in_component if layer.get("mediaType") == JSON_LAYER},
            )
    return None


def _place(store: Path, layer: JsonObject) -> Path:
    return store / "blobs" / str(layer.get("digest")).replace(":", "-").replace("/", "-")


def find_declared(files: Iterable[tuple[Mapping[str, str], Iterable[str]]]) -> JsonObject:
    """Return the quantization that the metadata of blobs states, by module, in the form of MLX's configuration.

    ``files`` has the metadata and the names of the tensors of each file.
    """
    declared: JsonObject = {}
    for metadata, names in files:
        for name in names if any(QUANT_TYPE in key for key in metadata) else ():
            weight = name.removesuffix(SCALE)
            stated, group = (metadata.get(f"{weight}.{key}", metadata.get(key)) for key in (QUANT_TYPE, GROUP_SIZE))
            if weight != name and stated is not None:
                quant_type, size = stated.strip().lower(), parse_digits(group or "")
                mode = MODES.get(ALIASES.get(quant_type, quant_type), {})
                declared[weight.removesuffix(".weight")] = mode | ({"group_size": size} if size else {})
    return declared


def declare(
    configs: Mapping[str, JsonObject], declared: JsonObject, superseded: Iterable[str]
) -> dict[str, JsonObject]:
    """Return config files that declare the quantization of the blobs, instead of any quantization of the original.

    ``superseded`` has the names of config files that declare only a quantization.
    """
    main = configs.get("config.json", {})
    kept = {key: value for key, value in main.items() if key not in ("quantization_config", "compression_config")}
    quantization = as_object(main.get("quantization")) | declared
    others = {name: config for name, config in configs.items() if name not in superseded}
    return others | {"config.json": kept | {"quantization": quantization}}


def _list_stores() -> list[Path]:
    if folder := os.environ.get("OLLAMA_MODELS"):
        return [Path(folder).expanduser()]
    return [Path.home() / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]


def _list_models(store: Path) -> list[str]:
    """Return the models of a store by the names that Ollama lists."""
    try:
        names = [path.relative_to(store / "manifests").parts for path in (store / "manifests").glob("*/*/*/*")]
    except OSError:
        return []
    return [f"{'/'.join(parts[2:-1] if parts[:2] == (HOST, NAMESPACE) else parts[:-1])}:{parts[-1]}" for parts in names]
