"""Blocks of ggml in safetensors: tensors of bytes that a configuration declares to be blocks of a ggml type.

    GPTQModel, quant_method gguf     X.qweight  U8 (rows, bytes of a row); bits and format name the type: 4, q_k_m
    ModelOpt, packing ggml           X.weight   U8 (rows, blocks of a row, bytes of a block); quant_algo is the type

Rows that do not fill blocks are padded with zeros. Such a tensor is read as X.weight of the ggml type.

Reference: ModelCloud/GPTQModel gptqmodel/nn_modules/qlinear/gguf.py and quantization/config.py (GGUFConfig);
NVIDIA/Model-Optimizer pull request 2447 (quantized_layers with packing "ggml").
"""

from collections.abc import Iterator, Mapping
from math import prod

from msgspec.structs import replace

from quanterr.checkpoints.base import Entry
from quanterr.checkpoints.ggml_types import OF_NAME
from quanterr.errors import CheckpointError
from quanterr.util.strict_json import JsonObject, as_object
from quanterr.util.text import display

CODES_SUFFIX = ".qweight"
GGUF_METHOD = "gguf"  # quant_method
# GPTQModel's (bits, format without the quality) → type.
TYPES = {(4, "q_0"): "Q4_0", (8, "q_0"): "Q8_0", (4, "q_k"): "Q4_K", (5, "q_k"): "Q5_K", (6, "q_k"): "Q6_K"}


def type_blocks(entries: Mapping[str, Entry], config: Mapping[str, JsonObject]) -> dict[str, Entry]:
    """Return the entries; entries with ggml blocks get the name, the shape and the ggml type of the weight.

    Raises:
        CheckpointError: the configuration names an unknown type, or a type whose blocks do not fit the bytes.
    """
    files = list(config.values())
    declared = [section for content in files for section in (content, *content.values()) if isinstance(section, dict)]
    return dict(_type_each(entries, declared))


def _type_each(entries: Mapping[str, Entry], declared: list[JsonObject]) -> Iterator[tuple[str, Entry]]:
    global_config = next((section for section in declared if section.get("quant_method") == GGUF_METHOD), None)
    layers = {
        name: layer["quant_algo"]
        for section in declared
        for name, layer in as_object(section.get("quantized_layers")).items()
        if isinstance(layer, dict) and layer.get("packing") == "ggml"
    }
    for name, entry in entries.items():
        if global_config is not None and name.endswith(CODES_SUFFIX) and entry.dtype == "U8":
            bits, words = global_config.get("bits"), str(global_config.get("format"))
            type_name = TYPES.get((bits, "_".join(words.split("_")[:2]))) if isinstance(bits, int) else None
            typed = _retype(
                entry, f"{name.removesuffix(CODES_SUFFIX)}.weight", type_name, f"bits {bits} and format {words}"
            )
            yield typed.name, typed
        elif entry.dtype == "U8" and (algorithm := layers.get(name.removesuffix(".weight"))) is not None:
            yield name, _retype(entry, name, algorithm, f"quant_algo {algorithm}")
        else:
            yield name, entry


def _retype(entry: Entry, name: str, type_name: object, declared: str) -> Entry:
    """Return the entry as a weight of a ggml type, with as many columns as its blocks have elements."""
    known = OF_NAME.get(type_name) if isinstance(type_name, str) else None
    if known is None or known.head or known.tail or known.rows > 1:  # no producer stores other types in safetensors
        raise CheckpointError(
            f"{entry.file}: {display(entry.name)}: quanterr cannot read {declared}, which the configuration declares"
        )
    elements, n_bytes = known.elements, known.n_bytes
    row = prod(entry.shape[1:])
    if len(entry.shape) < 2 or row % n_bytes:
        raise CheckpointError(
            f"{entry.file}: {entry}: the configuration declares {known.name}, whose blocks have {n_bytes} bytes: no "
            f"row of {row} bytes consists of them"
        )
    return replace(entry, name=name, dtype=known.name, shape=(entry.shape[0], row // n_bytes * elements))
