"""Codes that loaders misread, because no configuration or label declares them, or because it declares another method.

Loaders read a checkpoint as its config.json says. Without quantization_config, or with a quant_method that it does not
know, transformers builds unquantized layers, which take codes for weights or get random weights. mlx-lm quantizes
layers only if config.json has "quantization". ComfyUI reads a layer as its label says, and
refuses a label without a format; once one layer has a label, it casts the codes of a layer without one to the dtype of
computation.

Reference: huggingface/transformers@5.24.0 quantizers/auto.py get_hf_quantizer, AutoHfQuantizer.supports_quant_method;
ml-explore/mlx-lm@003da2e9 mlx_lm/utils.py load_model; comfyanonymous/ComfyUI comfy/ops.py _load_quantized_module.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache

from quanterr.checkpoints import ASCEND_CONFIG, Checkpoint
from quanterr.checkpoints.labels import HEADER, HEADER_KEY, Labels
from quanterr.checkpoints.places import list_names
from quanterr.documents.base import Finding
from quanterr.findings.ascend import check_description
from quanterr.findings.checks import DECLARED, QUANTIZED, check
from quanterr.findings.codes import make_finding
from quanterr.findings.configs import CONFIG, TIED
from quanterr.findings.contents import Contents
from quanterr.findings.families import (
    BNB_SETTINGS,
    COMFYUI_FORMATS,
    COMMON_FORMATS,
    COMPRESSED,
    EXCLUSIVE_METHODS,
    FAMILIES,
    FORMATS_BY_METHOD,
    INVERSE,
    KNOWN_METHODS,
    MLX,
    MULTI_LAYOUT_METHODS,
    Family,
)
from quanterr.findings.structure import report_model_mismatch
from quanterr.formats import FORMATS, Weight, find_rows
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import count, display, itemize

HEAD_PREFIX = "lm_head."
TOWER_NAME = re.compile(r"(?:model\.)?(?:vision_tower|vision_model|visual|vision_encoder|audio_tower|audio_model)\.")
TEXT_SUFFIXES = ("_text", "_text_model")  # suffixes of the model_type of the language model of a multimodal model
LOADED_PREFIX = "model"  # loaders of Hugging Face's layout read model.safetensors and model-00001-of-….safetensors
COMFY_SCALE = "scale_weight"  # the end of a name of scales that only ComfyUI has
NEUTRAL_METADATA = ("format", "total_size")  # keys of a safetensors header that do not mention codes
# Names of blocks of denoisers, which ComfyUI loads from single files.
DENOISER_BLOCK = re.compile(r"(?:.*\.)?(?:(?:double|single|joint|transformer|input|output|middle)_blocks?|blocks)\.\d")


@check("config_mismatch", needs=DECLARED, of=QUANTIZED)
def check_tied_head(contents: Contents) -> Iterator[Finding]:
    """Report a quantized output layer that loaders replace by the embedding, as config.json ties the two."""
    if contents.checkpoint.model_config.get(TIED) is not True:
        return
    heads = [
        stored
        for stored in contents.weights
        if stored.weight.has_codes and stored.weight.codes.name.startswith(HEAD_PREFIX)
    ]
    for name in (head.name for head in heads if not any(row.takes_tied_head for row in find_rows(head.weight.format))):
        yield report_model_mismatch(
            f"config.json declares {TIED}, but {display(name)} is quantized separately: "
            "loaders use the embedding instead",
            [name],
        )


@check("config_mismatch", needs=DECLARED, of=QUANTIZED)
def check_class(contents: Contents) -> Iterator[Finding]:
    """Report tensors of a vision or audio tower if the configuration is that of a language model alone."""
    checkpoint = contents.checkpoint
    main = checkpoint.config.get(CONFIG, {})
    model_type, sections = main.get("model_type"), [key for key, value in main.items() if isinstance(value, dict)]
    tower = [name for name in checkpoint.entries if TOWER_NAME.match(name)]
    if (
        isinstance(model_type, str)
        and model_type.endswith(TEXT_SUFFIXES)
        and tower
        and not any("vision" in key or "audio" in key for key in sections)
    ):
        message = (
            f"{CONFIG} declares model_type {display(model_type)}, a language model alone, but "
            f"{count(len(tower), 'tensor')} belong to a tower: {itemize(tower, 3)}: loaders of this type leave them "
            "out, or find no weight by its name"
        )
        remedy = f"put the original's {CONFIG} back, which has model_type, architectures and the tower's configuration"
        yield make_finding("config_mismatch", "warning", None, message, remedy, key="model_type")


@check("undeclared_codes", "config_mismatch", needs=DECLARED, of=QUANTIZED)
def check_loading(contents: Contents) -> Iterator[Finding]:
    """Check that config.json, or labels instead of it, let loaders read the codes of a checkpoint's weights."""
    checkpoint, labels = contents.checkpoint, contents.labels
    # Of several weights that share codes, only the last.
    weights = list({stored.weight.codes.name: stored.weight for stored in contents.weights}.values())
    yield from _check_labels(checkpoint, labels, weights)
    if description := checkpoint.config.get(ASCEND_CONFIG):
        yield from check_description(description, weights)
        return
    coded = [(weight, family) for weight in weights if weight.has_codes and (family := _find_family(weight.format))]
    if labels.config:
        says_mlx = "quantization" in checkpoint.config.get("config.json", {})
        other = [(weight, family) for weight, family in coded if family.name != MLX or not says_mlx]
        yield from _check_method(labels.config, other)
        if not says_mlx and "quant_method" not in labels.config and _has_layout_of_loaders(checkpoint):
            yield from _report_not_of_mlx([weight for weight, family in coded if family.name == MLX])
        yield from _check_bits(labels.config, [weight for weight, _ in coded if weight.format in BNB_SETTINGS])
    elif (
        coded
        and _has_layout_of_loaders(checkpoint)
        and not _is_declared_elsewhere(checkpoint, labels, {weight.name for weight, _ in coded})
    ):
        yield from _report_undeclared(
            [weight for weight, family in coded if not family.has_own and not is_read_by_comfyui(weight, labels)]
        )


@check("config_mismatch", needs=DECLARED, of=QUANTIZED)
def check_layouts(contents: Contents) -> Iterator[Finding]:
    """Report weights stored in another format than config.json names, within a family of formats."""
    families: dict[str, dict[str, str]] = {}  # key → value → format
    for key, value, name in ((*row.declared, row.name) for row in FORMATS if row.declared):
        families.setdefault(key, {})[value] = name
    for key, formats in families.items():
        declared = formats.get(str(contents.labels.config.get(key)).lower())
        named = [(stored.name, stored.weight.format) for stored in contents.weights if declared]
        other = [name for name, format_name in named if format_name in formats.values() and format_name != declared]
        if other:
            yield report_model_mismatch(
                f"config.json declares {declared}, but another format is stored for {count(len(other), 'weight')}: "
                f"{itemize(other, 3)}",
                other,
            )


def _check_labels(checkpoint: Checkpoint, labels: Labels, weights: Sequence[Weight]) -> Iterator[Finding]:
    """Report weights without a label for ComfyUI if other weights have one, or if the file is meant for ComfyUI.

    NVFP4 without labels is a warning, as no other program reads it from a single file.
    """
    yield from _check_label_formats(labels)
    of_comfy = [weight for weight in weights if weight.format in COMFYUI_FORMATS and weight.codes.name == weight.name]
    names = [weight.name for weight in of_comfy if not is_read_by_comfyui(weight, labels)]
    if not names or labels.marker or labels.config:
        return
    are_few = 2 * len(names) <= len(of_comfy)  # otherwise the file is perhaps not meant for ComfyUI
    severity, lacks, note = "error" if are_few else "info", "but no comfy_quant label as others have", ""
    if len(names) == len(of_comfy):
        of_denoiser = sum(DENOISER_BLOCK.match(name) is not None for name in names)
        if checkpoint.config or 2 * of_denoiser <= len(names) or _is_declared_elsewhere(checkpoint, labels):
            return
        lacks = f"and no label for ComfyUI (comfy_quant, {HEADER_KEY})"
        severity, note = "info", "; other programs may know the format"
        if any(weight.format == "nvfp4" for weight in of_comfy):
            severity, note = "warning", ""
    has = "has" if len(names) == 1 else "have"
    message = (
        f"{count(len(names), 'weight')} {has} codes and scales, {lacks}: {itemize(names, 3)}: ComfyUI takes the codes "
        f"for weights{note}"
    )
    remedy = "write the file again with a label for each quantized layer"
    yield make_finding("undeclared_codes", severity, None, message, remedy, layers=names)


def _check_label_formats(labels: Labels) -> Iterator[Finding]:
    """Report labels without a format; ComfyUI follows the label in the header, if there is one."""
    names = []
    for module, module_labels in labels.by_module.items():
        followed = next((label for label in module_labels if label.source == HEADER), module_labels[0])
        if followed.format is None:
            names.append(module)
    if names:
        lacking = "label lacks" if len(names) == 1 else "labels lack"
        message = (
            f'{count(len(names), "layer")}, whose {lacking} "format": '
            f"{itemize(names, 3)}: ComfyUI refuses the file; other programs may know what the codes are"
        )
        remedy = 'write "format" into each label, such as "int8_tensorwise" for INT8 codes with one scale per row'
        yield make_finding("undeclared_codes", "warning", None, message, remedy, layers=names)


@cache
def _find_family(format_name: str) -> Family | None:
    return next((family for family in FAMILIES if format_name in family.formats), None)


def _has_layout_of_loaders(checkpoint: Checkpoint) -> bool:
    """Return whether transformers and similar loaders read these files: by their names, next to config.json."""
    main = checkpoint.config.get("config.json", {})
    is_model = bool(main.get("model_type") or main.get("architectures"))
    named = checkpoint.kind in ("folder", "index") or any(
        file.path.name.startswith(LOADED_PREFIX) for file in checkpoint.files
    )
    return is_model and named and checkpoint.gguf is None


def _is_declared_elsewhere(checkpoint: Checkpoint, labels: Labels, described: Collection[str] = ()) -> bool:
    """Return whether a section of config.json, a header or another file declares codes.

    torchao's header describes each of its weights (``described``), but without a configuration, transformers does not
    read these descriptions, so they do not count.
    """
    if labels.marker or _mentions_quantization(checkpoint.config):
        return True
    if any(
        "quant" in f"{key} {text}".lower()
        for key, text in labels.metadata.items()
        if key not in (*NEUTRAL_METADATA, *described)
    ):
        return True
    names = list_names(checkpoint.folder) if checkpoint.folder else []
    return any("quant" in name.lower() and name.endswith(".json") for name in names)


def _mentions_quantization(declared: object) -> bool:
    """Return whether a part of the configurations, at any depth, has settings of a quantization."""
    if not isinstance(declared, dict):
        return False
    return any(
        (isinstance(value, dict) and bool(value) and ("quant" in key.lower() or "compression" in key.lower()))
        or _mentions_quantization(value)
        for key, value in declared.items()
    )


def is_read_by_comfyui(weight: Weight, labels: Labels) -> bool:
    """Return whether ComfyUI reads the weight, which needs no config.json."""
    return bool(labels.of(weight.codes.name)) or any(
        entry.name.endswith(COMFY_SCALE) for entry in weight.parts.values()
    )


def _report_undeclared(weights: Sequence[Weight]) -> Iterator[Finding]:
    """Report codes that no file declares: an error, or a warning if their format is so simple that programs read it."""
    if not weights:
        return
    names = [weight.name for weight in weights]
    formats = sorted({weight.format for weight in weights})
    message = (
        f"config.json declares no quantization, but {count(len(names), 'weight')} "
        f"{_inflect_be(names)} stored as {' and '.join(formats)}: {itemize(names, 3)}: "
        f"loaders {_describe_reading(weights[0])}"
    )
    remedy = "put the quantization_config that the quantizer wrote (MLX: quantization) back into config.json"
    severity = "warning" if COMMON_FORMATS.issuperset(formats) else "error"
    yield make_finding("undeclared_codes", severity, None, message, remedy, layers=names)


def _report_not_of_mlx(weights: Sequence[Weight]) -> Iterator[Finding]:
    """Report codes of MLX whose settings are not in "quantization", the only key that mlx-lm reads."""
    if weights:
        names = [weight.name for weight in weights]
        message = (
            f'config.json has no "quantization", but {count(len(names), "weight")} {_inflect_be(names)} stored as '
            f"{weights[0].format}: {itemize(names, 3)}: mlx-lm looks for it, and fails"
        )
        remedy = 'copy the settings to "quantization" in config.json'
        yield make_finding("config_mismatch", "warning", None, message, remedy, layers=names, key="quantization")


def _inflect_be(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _describe_reading(weight: Weight) -> str:
    """Return what loaders do with a weight that they take to be unquantized."""
    codes = weight.codes
    if codes.name != weight.name:
        return f"look for {display(weight.name)}, which is not stored, and refuse or fill it with random numbers"
    if codes.shape != weight.shape:
        return f"refuse codes of another shape than the weight, {list(codes.shape)} for {list(weight.shape)}"
    return "take its codes for weights, without their scales"


def _check_method(config: JsonFields, coded: Sequence[tuple[Weight, Family]]) -> Iterator[Finding]:
    """Report weights that the declared quant_method does not read."""
    named = config.get("quant_method")
    method = named.lower() if isinstance(named, str) else ""
    wrong: dict[Family, list[Weight]] = {}
    for weight, family in coded:
        if method and not _can_read(method, family, weight):
            wrong.setdefault(family, []).append(weight)
    for family, weights in wrong.items():
        yield _report_method(method, family, weights)


def _can_read(method: str, family: Family, weight: Weight) -> bool:
    """Return whether loaders that this quant_method selects read a weight of a family."""
    if family.methods or method in MULTI_LAYOUT_METHODS:
        return method in family.methods | MULTI_LAYOUT_METHODS
    if method == COMPRESSED and any(entry.name.endswith(INVERSE) for entry in weight.parts.values()):
        return False
    return (
        method in KNOWN_METHODS
        and method not in EXCLUSIVE_METHODS
        and weight.format in FORMATS_BY_METHOD.get(method, family.formats)
    )


def _report_method(method: str, family: Family, weights: Sequence[Weight]) -> Finding:
    """Return the finding that loaders selected by a quant_method do not read these weights.

    It is an error if they leave layers without the weights, a warning if they refuse the file.
    """
    names = [weight.name for weight in weights]
    owner = next((other for other in FAMILIES if other != family and method in other.methods), None)
    is_refused = not family.methods and (
        method not in KNOWN_METHODS or method in FORMATS_BY_METHOD or method == COMPRESSED
    )
    if owner is not None and owner.tensors and owner.tensors == family.tensors:
        is_refused, does = True, f"loaders of {owner.name} refuse these shapes"
    elif is_refused and method in KNOWN_METHODS:
        does = "loaders that follow it look for other scales"
    elif method in KNOWN_METHODS:
        does = f"loaders that follow it {_describe_reading(weights[0])}"
    else:
        does = f"no loader has this method; transformers skips it, so that loaders {_describe_reading(weights[0])}"
    message = (
        f"config.json declares quant_method {display(method)}, but {count(len(names), 'weight')} "
        f"{'has' if len(names) == 1 else 'have'} the tensors of {family.name} ({weights[0].format}): "
        f"{itemize(names, 3)}: {does}"
    )
    remedy = "declare the method that made these tensors, with its settings"
    severity = "warning" if is_refused else "error"
    return make_finding("config_mismatch", severity, None, message, remedy, layers=names, key="quant_method")


def _check_bits(config: JsonFields, weights: Sequence[Weight]) -> Iterator[Finding]:
    """Report codes of bitsandbytes for which load_in_4bit and load_in_8bit are set to wrong or contradictory values."""
    for needed, denied in dict.fromkeys(BNB_SETTINGS[weight.format] for weight in weights):
        affected = [weight for weight in weights if BNB_SETTINGS[weight.format] == (needed, denied)]
        if config.get("quant_method") is None or (config.get(needed) in (True, None) and not config.get(denied)):
            continue
        settings = f"{needed} {json.dumps(config.get(needed))}, {denied} {json.dumps(config.get(denied))}"
        names = [weight.name for weight in affected]
        message = (
            f"config.json declares {settings}, but {count(len(affected), 'weight')} {_inflect_be(names)} stored as "
            f"{affected[0].format}: {itemize(names, 3)}: transformers refuses that, or skips the quantization"
        )
        remedy = f"declare {needed} true, and {denied} false"
        yield make_finding("config_mismatch", "warning", None, message, remedy, layers=names, key=needed)
