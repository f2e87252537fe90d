"""The tokenizer of a language model, from the metadata of its GGUF file."""

from collections.abc import Mapping

from quanterr.checkpoints.gguf_metadata import Value
from quanterr.util.strict_json import JsonObject


def tokenizer_files(values: Mapping[str, Value]) -> dict[str, JsonObject]:
    """Return the tokenizer.json and the tokenizer_config.json.

    Raises:
        ValueError: no tokenizer follows from the keys; with the reason.
    """
    raise ValueError("no tokenizer follows from the metadata of a GGUF file yet")
