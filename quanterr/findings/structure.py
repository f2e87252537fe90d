"""Contradictions between the sizes that a checkpoint declares for its model and the tensors that it holds."""

import re
from collections.abc import Iterator, Mapping, Sequence

from quanterr.checkpoints import Checkpoint, GgufMetadata
from quanterr.documents.base import Finding
from quanterr.findings.attention_heads import BLOCK_PREFIX
from quanterr.findings.checks import DECLARED, QUANTIZED, check
from quanterr.findings.codes import make_finding
from quanterr.findings.configs import CONFIG
from quanterr.findings.contents import Contents
from quanterr.pairing.views import find_whole
from quanterr.util.text import count, display, itemize

BLOCK_NAME = re.compile(BLOCK_PREFIX)
EMBEDDINGS = ("embed_tokens.weight", "token_embd.weight")
HEADS = {
    "num_attention_heads": ("q_proj.weight", "attn_q.weight"),
    "num_key_value_heads": ("k_proj.weight", "attn_k.weight"),
}
REMEDY = "check that the configuration belongs to this checkpoint; loaders that follow it fail or build another model"


def _read_declared(checkpoint: Checkpoint) -> tuple[Mapping[str, int], str]:
    """Return the declared sizes of the model by the keys of config.json, and the place that declares them."""
    if checkpoint.gguf is not None:
        return _read_gguf_sizes(checkpoint.gguf), "the GGUF metadata"
    config = checkpoint.model_config
    return {key: n for key, n in config.items() if isinstance(n, int) and not isinstance(n, bool)}, CONFIG


def _read_gguf_sizes(metadata: GgufMetadata) -> dict[str, int]:
    """Return the sizes that GGUF metadata declares, by the keys of config.json."""
    keys = {
        "num_hidden_layers": metadata.get_model_int("block_count"),
        "hidden_size": metadata.get_model_int("embedding_length"),
        "num_attention_heads": metadata.heads(0),
        "num_key_value_heads": metadata.kv_heads(0),
    }
    return {key: n for key, n in keys.items() if n is not None}


def report_model_mismatch(message: str, layers: Sequence[str] = ()) -> Finding:
    """Return the finding that the configuration contradicts the tensors."""
    return make_finding(
        "config_mismatch", "warning", None, message, REMEDY, **({"layers": list(layers)} if layers else {})
    )


@check("config_mismatch", needs=DECLARED, of=QUANTIZED)
def check_blocks(contents: Contents) -> Iterator[Finding]:
    """Check the declared number of blocks; blocks of multi-token prediction may follow these."""
    declared, where = _read_declared(contents.checkpoint)
    blocks = declared.get("num_hidden_layers")
    numbers = (
        {int(match[1]) for name in contents.checkpoint.entries if (match := BLOCK_NAME.match(name))}
        if blocks
        else set()
    )
    if not blocks or not numbers:
        return
    stored, highest = max(numbers) + 1, blocks + declared.get("num_nextn_predict_layers", 0)
    if not blocks <= stored <= highest:
        yield report_model_mismatch(f"{where} declares {count(blocks, 'block')}, but the tensors belong to {stored}")


@check("config_mismatch", needs=DECLARED, of=QUANTIZED)
def check_sizes(contents: Contents) -> Iterator[Finding]:
    """Check the sizes of the embedding, and that the number of heads divides the rows of q and k."""
    declared, where = _read_declared(contents.checkpoint)
    width, rows = declared.get("hidden_size"), declared.get("vocab_size")
    for stored in contents.weights:
        shape = stored.weight.shape
        if len(shape) != 2 or not stored.has_shape or not stored.name.endswith(EMBEDDINGS):
            continue
        name = display(stored.name)
        if width and shape[1] != width:
            yield report_model_mismatch(f"{where} declares a width of {width}, but {name} has {shape[1]}")
        if rows and rows not in (shape[0], find_whole(stored.weight).matrix[0]):
            yield report_model_mismatch(f"{where} declares vocab_size {rows}, but {name} has {count(shape[0], 'row')}")
    for key, endings in HEADS.items():
        heads = declared.get(key)
        odd = [
            stored.name
            for stored in contents.weights
            if stored.name.endswith(endings) and heads and stored.has_shape and stored.weight.shape[0] % heads
        ]
        if odd:
            yield report_model_mismatch(
                f"{where} declares {count(heads or 0, 'head')} ({key}), which do not divide the rows of "
                f"{itemize(odd, 3)}",
                odd,
            )
