"""The GGUF names of an original's tensors, by architecture.

The names are in gguf_names.json in this folder, which tests/make_gguf_names.py makes from the gguf package.

Reference: ggml-org/llama.cpp (in llama-cpp-python 0.3.36) gguf-py/gguf/tensor_mapping.py, constants.py.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from quanterr.util.strict_json import JsonObject


def architectures() -> frozenset[str]:
    """Return all architectures with known names, as in ``general.architecture``."""
    return frozenset(_load_names()["architectures"])


@cache
def names_of(architecture: str) -> Mapping[str, str]:
    """Map original names to GGUF names, both without ``.weight`` and ``.bias``; ``{bid}`` is the block number.

    ``names_of("llama")["model.layers.{bid}.self_attn.q_proj"]`` is ``blk.{bid}.attn_q``. Separate experts share one
    name, without their number. The map of an unknown architecture is empty.
    """
    tensors = _load_names()["tensors"]
    wanted = [tensors[number] for number in _load_names()["architectures"].get(architecture, ())]
    return MappingProxyType({original: name for name, *originals in wanted for original in originals})


@cache
def _load_names() -> JsonObject:
    names: JsonObject = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    return names
