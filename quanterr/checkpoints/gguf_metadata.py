"""What a GGUF file says of the model it holds."""

from collections.abc import Mapping
from dataclasses import dataclass

Scalar = bool | int | float | str
Value = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """Keys and values of a GGUF file; the tokenizer, long texts and long arrays are left out.

    Keys are those of ggml-org/ggml docs/gguf.md: ``general.file_type``, ``llama.attention.head_count`` …
    """

    values: Mapping[str, Value]

    @property
    def architecture(self) -> str | None:
        """``general.architecture``: llama, qwen3, flux …"""
        name = self.values.get("general.architecture")
        return name if isinstance(name, str) else None

    def whole(self, key: str) -> int | None:
        """The whole number under a key; None where there is none."""
        return _whole(self.values.get(key))

    def of_model(self, key: str, block: int | None = None) -> int | None:
        """The whole number under ``<architecture>.<key>``; None where there is none.

        Some models have one for each block (``attention.head_count`` is then an array): it is that of ``block``.
        """
        value = self.values.get(f"{self.architecture}.{key}")
        if isinstance(value, tuple):
            value = value[block] if block is not None and 0 <= block < len(value) else None
        return _whole(value)

    def heads(self, block: int) -> int | None:
        """Attention heads of a block: as many has its q."""
        return self.of_model("attention.head_count", block)

    def kv_heads(self, block: int) -> int | None:
        """Heads of k and v of a block: those of q where nothing else is said."""
        found = self.of_model("attention.head_count_kv", block)
        return self.heads(block) if found is None else found


def _whole(value: Value | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
