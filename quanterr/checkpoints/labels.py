"""Labels, in which a file describes its layers; they are checked against the tensors.

    X.comfy_quant                U8, UTF-8 JSON: {"format": …, "group_size": …, "convrot": …}
    __metadata__["_quantization_metadata"]
                                 JSON: {"layers": {X: the same fields}}; X with or without the file's prefix
    scaled_fp8, prefix.scaled_fp8
                                 marker of old scaled fp8 files; its content is never read
    config.json, quantization_config, quip_params
                                 weight_block_size, config_groups[*].weights.block_structure

Reference: comfyanonymous/ComfyUI, comfy/utils.py convert_old_quants and comfy/ops.py
_load_quantized_module; transformers and compressed-tensors for config.json.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from quanterr.checkpoints import (
    ASCEND_CONFIG,
    JANG_CONFIG,
    MODELOPT_CONFIG,
    QUANTIZATION_CONFIGS,
    QUANTO_MAP,
    SINQ_CONFIG,
    Checkpoint,
    Entry,
)
from quanterr.declarations import Declarations
from quanterr.errors import CheckpointError
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonFields, JsonObject, as_object
from quanterr.util.text import display, parse_digits

COMFY_SUFFIX = ".comfy_quant"
TENSOR, HEADER = "comfy_quant tensor", "header"  # sources of a label
CONFIG = "config.json"
MARKER = "scaled_fp8"
MARKER_SIZE = 2  # a larger tensor is not a marker
QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")  # in config.json and its sections
SEED = "mxtq_seed"  # key of the seed of JANGTQ's rotation
HEADER_KEY = "_quantization_metadata"
MAX_LABEL = 1 << 16  # bytes of one .comfy_quant tensor

# Prefixes that programs add to the names of a diffusion model or language model.
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
    "first_stage_model.",
    "vae.",
)


@dataclass(frozen=True, slots=True)
class Label:
    """The label of one layer from one source; ``fields`` is the label's JSON object."""

    source: str  # TENSOR or HEADER
    fields: JsonFields = field(default_factory=dict, hash=False)

    @property
    def format(self) -> str | None:
        """The declared name of the format."""
        return _as_text(self.fields.get("format"))

    @property
    def block(self) -> tuple[int, int] | None:
        """The square block that group_size declares, (rows, cols)."""
        size = self.number("group_size")
        return (size, size) if size else None

    @property
    def rotated(self) -> bool:
        """True if the codes represent rotated columns."""
        return bool(self.fields.get("convrot"))

    def number(self, key: str) -> int | None:
        """Return the positive integer under a key; None for any other value."""
        value = self.fields.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    def __str__(self) -> str:
        return f"{self.source} declares {display(self.format or 'no format')}"


@dataclass(frozen=True, slots=True)
class Labels:
    """All labels of one checkpoint, and its declared quantization."""

    by_module: dict[str, tuple[Label, ...]]
    consumed: frozenset[str]  # entries that are labels themselves
    marker: str | None  # name of the scaled_fp8 marker
    block: tuple[int, int] | None  # block size that config.json declares
    method: str | None  # quant_method in config.json
    divides: bool  # whether config.json declares that scales are divisors
    config: JsonFields  # quantization_config, from any config file
    declarations: Declarations  # what the quantization_config declares for each module
    metadata: Mapping[str, str]  # __metadata__ of all files
    orphans: tuple[str, ...]  # layers labelled in the header that are not stored

    def of(self, weight: str) -> tuple[Label, ...]:
        """Return the labels of a weight, the most trustworthy first."""
        return self.by_module.get(weight.removesuffix(".weight"), ())


def read_labels(checkpoint: Checkpoint) -> Labels:
    """Find and parse all labels, reading the small ``.comfy_quant`` tensors and nothing else.

    Raises:
        CheckpointError: a label is not valid JSON.
    """
    by_module: dict[str, list[Label]] = {}
    consumed = set()
    marker = None
    for name, entry in checkpoint.entries.items():
        if name.endswith(COMFY_SUFFIX):
            consumed.add(name)
            by_module.setdefault(name.removesuffix(COMFY_SUFFIX), []).append(_read_label(entry))
        elif (name == MARKER or name.endswith("." + MARKER)) and entry.n <= MARKER_SIZE:
            consumed.add(name)
            marker = name
    orphans = []
    for layer, fields in _read_header_layers(checkpoint):
        module = _find_module(layer, checkpoint.entries)
        if module is None:
            orphans.append(layer)
        else:
            by_module.setdefault(module, []).append(_make_label(HEADER, fields))
    config, place = find_quantization_config(checkpoint.config)
    return Labels(
        {module: tuple(labels) for module, labels in by_module.items()},
        frozenset(consumed),
        marker,
        _find_block_size(config),
        _as_text(config.get("quant_method")) or _as_text(config.get("quant_algo")),
        config.get("weight_scale_semantics") == "inverse",
        config,
        Declarations(config, place),
        {key: text for metadata in checkpoint.metadata for key, text in metadata.items()},
        tuple(orphans),
    )


def _read_label(entry: Entry) -> Label:
    if entry.dtype != "U8" or len(entry.shape) != 1 or entry.nbytes > MAX_LABEL:
        raise CheckpointError(f"{entry.file}: {entry}: a .comfy_quant label must be a short row of U8")
    try:
        fields = strict_json.loads(entry.read())
    except strict_json.InvalidJson as error:
        raise CheckpointError(f"{entry.file}: {display(entry.name)}: label {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{entry.file}: {display(entry.name)}: label is not a JSON object")
    return _make_label(TENSOR, fields)


def _make_label(source: str, fields: JsonObject) -> Label:
    params = fields.get("params")
    if isinstance(params, dict):  # old writers nest the keys; top-level keys win
        fields = params | fields
    return Label(source, fields)


def _read_header_layers(checkpoint: Checkpoint) -> Iterator[tuple[str, JsonObject]]:
    for file, metadata in zip(checkpoint.files, checkpoint.metadata, strict=True):
        if HEADER_KEY not in metadata:
            continue
        try:
            fields = strict_json.loads_text(metadata[HEADER_KEY])
        except strict_json.InvalidJson as error:
            raise CheckpointError(f"{file}: {HEADER_KEY} in the header {error}") from error
        layers = fields.get("layers") if isinstance(fields, dict) else None
        if not isinstance(layers, dict):
            raise CheckpointError(f'{file}: {HEADER_KEY} in the header has no "layers"')
        for layer, declared in layers.items():
            if isinstance(declared, dict):
                yield layer, declared


def _find_module(layer: str, entries: dict[str, Entry]) -> str | None:
    """Return the stored module for a layer in the header: the same name, or with a prefix added or removed."""
    candidates = [layer, *(prefix + layer for prefix in PREFIXES)]
    candidates += [layer.removeprefix(prefix) for prefix in PREFIXES if layer.startswith(prefix)]
    return next((module for module in candidates if module + ".weight" in entries), None)


def find_quantization_config(config: Mapping[str, JsonObject]) -> tuple[JsonObject, str]:
    """Return the quantization_config of a checkpoint, and the file that holds it."""
    if not any(config.values()):
        return {}, CONFIG
    if declared := config.get(ASCEND_CONFIG):  # config.json then describes the original
        return declared, ASCEND_CONFIG
    main = config.get(CONFIG, {})
    beside = as_object(main.get("quip_params"))  # settings of QuIP#
    if layers := config.get(SINQ_CONFIG):
        beside = beside | {SINQ_CONFIG: layers}
    if SEED in (jang := config.get(JANG_CONFIG, {})):
        beside = beside | {SEED: jang[SEED]}
    for place in (main, as_object(main.get("text_config")), as_object(main.get("llm_config"))):
        for key in QUANTIZATION_KEYS:
            if key in place and (declared := as_object(place[key])):
                return beside | declared, CONFIG
    for name in (MODELOPT_CONFIG, JANG_CONFIG):
        if declared := as_object(config.get(name, {}).get("quantization")):
            return beside | declared, name
    others = ((config.get(name), name) for name in (*QUANTIZATION_CONFIGS, QUANTO_MAP))
    return next(((declared, name) for declared, name in others if declared), (beside, CONFIG))


def _find_block_size(config: JsonObject) -> tuple[int, int] | None:
    blocks = {_parse_pair(config.get("weight_block_size"))}
    for group in as_object(config.get("config_groups")).values():
        blocks.add(_parse_pair(as_object(as_object(group).get("weights")).get("block_structure")))
    blocks.discard(None)
    return blocks.pop() if len(blocks) == 1 else None


def _parse_pair(value: object) -> tuple[int, int] | None:
    if isinstance(value, str):  # older compressed-tensors wrote "128x128"
        value = [parse_digits(word) for word in value.split("x")]
    if isinstance(value, list) and len(value) == 2 and all(isinstance(v, int) and v > 0 for v in value):
        return value[0], value[1]
    return None


def _as_text(value: object) -> str | None:
    return value if isinstance(value, str) else None
