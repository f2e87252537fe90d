"""What the tensors of an original are called in a GGUF file, by architecture.

The names stand in gguf_names.json beside this file, which tests/make_gguf_names.py makes from the gguf package.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) gguf-py/gguf/tensor_mapping.py.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from quanterr.util.strict_json import JsonObject


def architectures() -> frozenset[str]:
    """Every architecture whose names are known, by ``general.architecture``."""
    return frozenset(_document()["architectures"])


@cache
def names_of(architecture: str) -> Mapping[str, str]:
    """Original name → GGUF name, both without ``.weight`` and ``.bias``; ``{bid}`` stands for the number of the block.

    ``names_of("llama")["model.layers.{bid}.self_attn.q_proj"]`` is ``blk.{bid}.attn_q``. A model with separate experts
    has them under one name here, without their number. Empty for an unknown architecture.
    """
    tensors = _document()["tensors"]
    wanted = [tensors[number] for number in _document()["architectures"].get(architecture, ())]
    return MappingProxyType({original: name for name, *originals in wanted for original in originals})


@cache
def _document() -> JsonObject:
    found: JsonObject = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    return found
