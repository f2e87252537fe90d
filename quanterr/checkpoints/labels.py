"""What a file says about its own layers: evidence that is checked against the tensors, never believed.

    X.comfy_quant                U8, UTF-8 JSON: {"format": …, "group_size": …, "convrot": …}
    __metadata__["_quantization_metadata"]
                                 JSON: {"layers": {X: the same}}; X with or without the file's prefix
    scaled_fp8, prefix.scaled_fp8
                                 marker of the old scaled fp8 files; its contents are never read
    config.json, quantization_config, quip_params
                                 weight_block_size, config_groups[*].weights.block_structure

Reference: comfyanonymous/ComfyUI, comfy/utils.py convert_old_quants and comfy/ops.py
_load_quantized_module; transformers and compressed-tensors for config.json.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from quanterr.checkpoints import Checkpoint, Entry
from quanterr.errors import CheckpointError
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonFields, JsonObject, as_object
from quanterr.util.text import display, whole

COMFY_SUFFIX = ".comfy_quant"
TENSOR, HEADER = "comfy_quant tensor", "header"  # where a label stands
MARKER = "scaled_fp8"
MARKER_SIZE = 2  # elements, at most: a tensor of more is none
HEADER_KEY = "_quantization_metadata"
MAX_LABEL = 1 << 16  # bytes of one .comfy_quant tensor

# Prefixes that programs put before the names of a diffusion model or of a language model.
PREFIXES = (
    "model.diffusion_model.",
    "diffusion_model.",
    "model.language_model.",
    "language_model.model.",
    "model.model.",
    "transformer.",
    "model.",
    "unet.",
    "net.",
)


@dataclass(frozen=True, slots=True)
class Label:
    """What one place says about one layer; ``fields`` is its JSON."""

    source: str  # TENSOR or HEADER
    fields: JsonFields = field(default_factory=dict, hash=False)

    @property
    def format(self) -> str | None:
        """The name of the format."""
        return _text(self.fields.get("format"))

    @property
    def block(self) -> tuple[int, int] | None:
        """(rows, cols) of a square block."""
        size = self.number("group_size")
        return (size, size) if size else None

    @property
    def rotated(self) -> bool:
        """Whether the codes are those of rotated columns."""
        return bool(self.fields.get("convrot"))

    def number(self, key: str) -> int | None:
        """A positive integer; None for whatever else stands there."""
        value = self.fields.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    def __str__(self) -> str:
        return f"{self.source} says {display(self.format or 'nothing of the format')}"


@dataclass(frozen=True, slots=True)
class Labels:
    """All labels of one checkpoint."""

    by_module: dict[str, tuple[Label, ...]]
    consumed: frozenset[str]  # entries that are labels themselves
    marker: str | None  # name of a scaled_fp8 marker
    block: tuple[int, int] | None  # of config.json
    method: str | None  # quant_method of config.json
    divides: bool  # config.json declares the scale is a divisor
    config: JsonFields  # quantization_config, wherever it stands
    metadata: Mapping[str, str]  # of all files
    orphans: tuple[str, ...]  # modules named in the header that are not stored

    def of(self, weight: str) -> tuple[Label, ...]:
        """Labels of a weight, the most trustworthy first."""
        return self.by_module.get(weight.removesuffix(".weight"), ())


def read_labels(checkpoint: Checkpoint) -> Labels:
    """Find and parse all labels; reads the small ``.comfy_quant`` tensors and nothing else.

    Raises:
        CheckpointError: a label that is not JSON.
    """
    found: dict[str, list[Label]] = {}
    consumed = set()
    marker = None
    for name, entry in checkpoint.entries.items():
        if name.endswith(COMFY_SUFFIX):
            consumed.add(name)
            found.setdefault(name.removesuffix(COMFY_SUFFIX), []).append(_of_tensor(entry))
        elif (name == MARKER or name.endswith("." + MARKER)) and entry.n <= MARKER_SIZE:
            consumed.add(name)
            marker = name
    orphans = []
    for layer, fields in _header_layers(checkpoint):
        module = _stored_module(layer, checkpoint.entries)
        if module is None:
            orphans.append(layer)
        else:
            found.setdefault(module, []).append(_label(HEADER, fields))
    config = _quantization_config(checkpoint.config)
    return Labels(
        {module: tuple(labels) for module, labels in found.items()},
        frozenset(consumed),
        marker,
        _config_block(config),
        _text(config.get("quant_method")) or _text(config.get("quant_algo")),
        config.get("weight_scale_semantics") == "inverse",
        config,
        {key: text for metadata in checkpoint.metadata for key, text in metadata.items()},
        tuple(orphans),
    )


def _of_tensor(entry: Entry) -> Label:
    if entry.dtype != "U8" or len(entry.shape) != 1 or entry.nbytes > MAX_LABEL:
        raise CheckpointError(f"{entry.file}: {entry}: a .comfy_quant label is a short row of U8")
    try:
        fields = strict_json.loads(entry.read())
    except strict_json.Invalid as error:
        raise CheckpointError(f"{entry.file}: {display(entry.name)}: label {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{entry.file}: {display(entry.name)}: label is not a JSON object")
    return _label(TENSOR, fields)


def _label(source: str, fields: JsonObject) -> Label:
    params = fields.get("params")
    if isinstance(params, dict):  # old writers nest the same keys; the top level wins
        fields = params | fields
    return Label(source, fields)


def _header_layers(checkpoint: Checkpoint) -> Iterator[tuple[str, JsonObject]]:
    for file, metadata in zip(checkpoint.files, checkpoint.metadata, strict=True):
        if HEADER_KEY not in metadata:
            continue
        try:
            fields = strict_json.loads(metadata[HEADER_KEY].encode())
        except strict_json.Invalid as error:
            raise CheckpointError(f"{file}: {HEADER_KEY} in the header {error}") from error
        layers = fields.get("layers") if isinstance(fields, dict) else None
        if not isinstance(layers, dict):
            raise CheckpointError(f'{file}: {HEADER_KEY} in the header has no "layers"')
        for layer, declared in layers.items():
            if isinstance(declared, dict):
                yield layer, declared


def _stored_module(layer: str, entries: dict[str, Entry]) -> str | None:
    """The module a header means: its own name, or that with a prefix more or less."""
    candidates = [layer, *(prefix + layer for prefix in PREFIXES)]
    candidates += [layer.removeprefix(prefix) for prefix in PREFIXES if layer.startswith(prefix)]
    return next((module for module in candidates if module + ".weight" in entries), None)


def _quantization_config(config: JsonObject) -> JsonObject:
    main = as_object(config.get("config.json"))
    quip = as_object(main.get("quip_params"))  # where QuIP# has its settings
    for place in (main, as_object(main.get("text_config")), as_object(main.get("llm_config"))):
        for key in ("quantization_config", "compression_config", "quantization"):
            if found := as_object(place.get(key)):
                return quip | found
    if found := as_object(as_object(config.get("hf_quant_config.json")).get("quantization")):
        return found
    names = ("quantize_config.json", "quant_config.json", "quantization_config.json")
    return next((found for name in names if (found := as_object(config.get(name)))), quip)


def _config_block(config: JsonObject) -> tuple[int, int] | None:
    blocks = {_pair(config.get("weight_block_size"))}
    for group in as_object(config.get("config_groups")).values():
        blocks.add(_pair(as_object(as_object(group).get("weights")).get("block_structure")))
    blocks.discard(None)
    return blocks.pop() if len(blocks) == 1 else None


def _pair(value: object) -> tuple[int, int] | None:
    if isinstance(value, str):  # older compressed-tensors wrote "128x128"
        value = [whole(word) for word in value.split("x")]
    if isinstance(value, list) and len(value) == 2 and all(isinstance(v, int) and v > 0 for v in value):
        return value[0], value[1]
    return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
