"""The metadata of a GGUF file, which describes its model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

Scalar = bool | int | float | str
Value = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """Keys and values of a GGUF file, without long texts and long arrays, and of the tokenizer only the model.

    Keys, as in ggml-org/ggml docs/gguf.md, are ``general.file_type``, ``llama.attention.head_count`` …
    """

    values: Mapping[str, Value]

    @property
    def architecture(self) -> str | None:
        """The value of ``general.architecture``: llama, qwen3, flux …; None if it is missing."""
        name = self.values.get("general.architecture")
        return name if isinstance(name, str) else None

    def get_int(self, key: str) -> int | None:
        """Return the integer under a key; None if there is none."""
        return _as_int(self.values.get(key))

    def get_model_int(self, key: str, block: int | None = None) -> int | None:
        """Return the number under ``<architecture>.<key>``; None if there is none, or if it is negative.

        If the value is an array with one element per block, as ``attention.head_count`` may be, ``block`` selects one.
        """
        value = self.values.get(f"{self.architecture}.{key}")
        if isinstance(value, tuple):
            value = value[block] if block is not None and 0 <= block < len(value) else None
        number = _as_int(value)
        return None if number is None or number < 0 else number

    def heads(self, block: int) -> int | None:
        """Return the number of attention (query) heads of a block; None if unknown."""
        return self.get_model_int("attention.head_count", block)

    def kv_heads(self, block: int) -> int | None:
        """Return the number of key and value heads of a block, by default the number of query heads."""
        number = self.get_model_int("attention.head_count_kv", block)
        return self.heads(block) if number is None else number

    def predicts(self, name: str) -> bool:
        """Return whether a tensor belongs to the last blocks, which only predict tokens further ahead."""
        block = re.match(r"blk\.(\d+)\.", name)
        count, further = (self.get_model_int(key) or 0 for key in ("block_count", "nextn_predict_layers"))
        return block is not None and further > 0 and int(block[1]) >= count - further


def _as_int(value: Value | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
