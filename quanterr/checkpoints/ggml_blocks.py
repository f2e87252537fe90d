"""Blocks of ggml in safetensors: bytes that a configuration declares to be the blocks of a GGUF file.

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

CODES = ".qweight"
GGUF = "gguf"  # quant_method
# GPTQModel's (bits, format without the quality) → type.
TYPES = {(4, "q_0"): "Q4_0", (8, "q_0"): "Q8_0", (4, "q_k"): "Q4_K", (5, "q_k"): "Q5_K", (6, "q_k"): "Q6_K"}


def type_blocks(entries: Mapping[str, Entry], config: Mapping[str, JsonObject]) -> dict[str, Entry]:
    """Return the entries; those that hold ggml blocks get the name, the shape and the ggml type of the weight.

    Raises:
        CheckpointError: the configuration names a type that is not known, or one whose blocks do not fit the bytes.
    """
    files = list(config.values())
    declared = [one for content in files for one in (content, *content.values()) if isinstance(one, dict)]
    return dict(_type_each(entries, declared))


def _type_each(entries: Mapping[str, Entry], declared: list[JsonObject]) -> Iterator[tuple[str, Entry]]:
    whole = next((one for one in declared if one.get("quant_method") == GGUF), None)
    layers = {
        name: layer["quant_algo"]
        for one in declared
        for name, layer in as_object(one.get("quantized_layers")).items()
        if isinstance(layer, dict) and layer.get("packing") == "ggml"
    }
    for name, entry in entries.items():
        if whole is not None and name.endswith(CODES) and entry.dtype == "U8":
            bits, words = whole.get("bits"), str(whole.get("format"))
            found = TYPES.get((bits, "_".join(words.split("_")[:2]))) if isinstance(bits, int) else None
            made = _retype(entry, f"{name.removesuffix(CODES)}.weight", found, f"bits {bits} and format {words}")
            yield made.name, made
        elif entry.dtype == "U8" and (kind := layers.get(name.removesuffix(".weight"))) is not None:
            yield name, _retype(entry, name, kind, f"quant_algo {kind}")
        else:
            yield name, entry


def _retype(entry: Entry, name: str, kind: object, declared: str) -> Entry:
    """Return the entry as a weight of a ggml type, with as many columns as its blocks have elements."""
    known = OF_NAME.get(kind) if isinstance(kind, str) else None
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
