"""Where what a checkpoint says of its model contradicts the tensors that it holds."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from quanterr.checkpoints import Checkpoint, GgufMetadata
from quanterr.findings.codes import finding
from quanterr.findings.configs import CONFIG, config_of
from quanterr.findings.schemes import of_scheme
from quanterr.formats import FORMATS, rows_of
from quanterr.pairing.gguf import REORDERED
from quanterr.pairing.model import Pair, Pairing
from quanterr.report.base import Finding
from quanterr.roles import role_of, without_numbers
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import count, display, listed

BLOCK = re.compile(r"^(?:blk|(?:model\.)?(?:language_model\.)?(?:model\.)?layers)\.(\d+)\.")
EMBEDDINGS = ("embed_tokens.weight", "token_embd.weight")
HEAD = "lm_head."
HEADS = {
    "num_attention_heads": ("q_proj.weight", "attn_q.weight"),
    "num_key_value_heads": ("k_proj.weight", "attn_k.weight"),
}
IGNORED = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers", "llm_int8_skip_modules")
BY_LAYER = ("dynamic", "extra_config", "layer_quant_config", "quantized_layers", "quant_config", "modules_dtype_dict")
LINEAR = frozenset({"attention", "mlp"})  # roles of weights that a quantizer takes, unless it is told not to
# Weights that quantizers leave without a word: routers, T5's embedding of relative positions.
LEFT = re.compile(r".*(attention_bias|\.gate|router|_gate|Dense\w+\.wo)\.weight")
ROTATED = ("attn_q.weight", "attn_k.weight")
REMEDY = "check that it belongs to this checkpoint; loaders that follow it fail, or build another model"


def of_structure(quantized: Checkpoint, plan: Pairing) -> Iterator[Finding]:
    """What the quantized checkpoint says of its model, held against its tensors."""
    declared, where = _declared(quantized)
    yield from _blocks(declared, where, quantized.entries)
    yield from _sizes(declared, where, plan.pairs)
    yield from _row_orders(plan.pairs)
    yield from _tied(quantized, plan.pairs)
    labels = plan.labels.get("quantized")
    if labels:
        yield from _recipe(labels.config, plan.pairs)
        yield from of_scheme(quantized, labels.config, plan.pairs)


def _declared(checkpoint: Checkpoint) -> tuple[Mapping[str, int], str]:
    """Sizes of the model by the keys of config.json, and what says so."""
    if checkpoint.gguf is not None:
        return _of_gguf(checkpoint.gguf), "the GGUF metadata"
    config = config_of(checkpoint)
    return {key: n for key, n in config.items() if isinstance(n, int) and not isinstance(n, bool)}, CONFIG


def _of_gguf(metadata: GgufMetadata) -> dict[str, int]:
    keys = {
        "num_hidden_layers": metadata.get_model_int("block_count"),
        "hidden_size": metadata.get_model_int("embedding_length"),
        "num_attention_heads": metadata.heads(0),
        "num_key_value_heads": metadata.kv_heads(0),
    }
    return {key: n for key, n in keys.items() if n is not None}


def _mismatch(message: str, layers: Sequence[str] = ()) -> Finding:
    return finding("config_mismatch", "warning", None, message, REMEDY, **({"layers": list(layers)} if layers else {}))


def _blocks(declared: Mapping[str, int], where: str, names: Collection[str]) -> Iterator[Finding]:
    """The number of blocks; those of multi-token prediction may follow them."""
    said = declared.get("num_hidden_layers")
    found = {int(match[1]) for name in names if (match := BLOCK.match(name))}
    if not said or not found:
        return
    stored, most = max(found) + 1, said + declared.get("num_nextn_predict_layers", 0)
    if not said <= stored <= most:
        yield _mismatch(f"{where} declares {count(said, 'block')}, the tensors are of {stored}")


def _sizes(declared: Mapping[str, int], where: str, pairs: Sequence[Pair]) -> Iterator[Finding]:
    """The width of the embedding, and rows that heads divide."""
    width = declared.get("hidden_size")
    for pair in pairs:
        shape = pair.original.shape
        if width and len(shape) == 2 and pair.name.endswith(EMBEDDINGS) and shape[1] != width:
            yield _mismatch(f"{where} declares a width of {width}, {display(pair.name)} has {shape[1]}")
    for key, endings in HEADS.items():
        heads = declared.get(key)
        odd = [p.name for p in pairs if p.name.endswith(endings) and heads and p.original.shape[0] % heads]
        if odd:
            yield _mismatch(
                f"{where} declares {count(heads or 0, 'head')} ({key}), which do not divide {listed(odd, 3)}", odd
            )


def _row_orders(pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Rows of the heads of q and k in a GGUF file: in pairs or in halves, but all alike."""
    found: dict[bool, list[str]] = {True: [], False: []}
    for pair in pairs:
        for weight in (pair.original, pair.quantized):
            if weight.codes.name.endswith(ROTATED) and len(weight.shape) > 1:
                found[REORDERED in weight.evidence].append(pair.name)
    if found[True] and found[False]:
        message = (
            f"rows of heads are in pairs in {listed(found[True], 3)}, in halves in {listed(found[False], 3)}: "
            "a runtime rotates all alike"
        )
        yield finding("mixed_row_orders", "error", None, message, "convert the model again", layers=found[True])


def _tied(quantized: Checkpoint, pairs: Sequence[Pair]) -> Iterator[Finding]:
    """An output layer that is quantized for itself though the embedding is said to stand for it."""
    main = quantized.config.get("config.json")
    if not isinstance(main, dict) or main.get("tie_word_embeddings") is not True:
        return
    coded = (p for p in pairs if p.quantized.has_codes and p.quantized.codes.name.startswith(HEAD))
    for name in (p.name for p in coded if not any(row.takes_tied_head for row in rows_of(p.quantized.format))):
        yield _mismatch(
            f"config.json declares tie_word_embeddings, but {display(name)} is quantized for itself: "
            "loaders take the embedding in its place",
            [name],
        )


def _recipe(config: JsonFields, pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Which layers are quantized, and how."""
    ignored = [entry for key in IGNORED for entry in _texts(config.get(key))]
    taken = [p.name for p in pairs if p.quantized.has_codes and any(_names(entry, p.name) for entry in ignored)]
    if taken:
        yield _mismatch(
            f"config.json declares that {count(len(taken), 'layer')} are not quantized, but codes are stored: "
            f"{listed(taken, 3)}",
            taken,
        )
    yield from _layouts(config, pairs)
    linear = [
        p for p in pairs if len(p.original.shape) == 2 and role_of(p.name) in LINEAR and not LEFT.fullmatch(p.name)
    ]
    left = [
        p.name
        for p in linear
        if p.quantized.encoding == "floats" and not any(_names(entry, p.name) for entry in ignored)
    ]
    method = config.get("quant_method") or config.get("quant_algo")
    few = 0 < 4 * len(left) < len(linear)
    if method and (few or _of_quantized_modules(left, config, linear)):
        yield _mismatch(
            f"config.json declares quant_method {display(str(method))} and does not except {listed(left, 3)}, "
            f"which {'is' if len(left) == 1 else 'are'} stored unquantized",
            left,
        )


def _of_quantized_modules(left: Sequence[str], config: JsonFields, linear: Sequence[Pair]) -> bool:
    """Whether some of them are modules that are quantized in other blocks, where config.json tells no layers apart."""
    targets = [as_object(group).get("targets") for group in as_object(config.get("config_groups")).values()]
    if any(config.get(key) for key in BY_LAYER) or any(target != ["Linear"] for target in targets):
        return False
    coded = {without_numbers(pair.name) for pair in linear if pair.quantized.has_codes}
    return any(without_numbers(name) in coded for name in left)


def _layouts(config: JsonFields, pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Of a family of formats another one than config.json names."""
    families: dict[str, dict[str, str]] = {}  # key → value → format
    for key, value, name in ((*row.declared, row.name) for row in FORMATS if row.declared):
        families.setdefault(key, {})[value] = name
    for key, formats in families.items():
        declared = formats.get(str(config.get(key)).lower())
        stored = [(p.name, p.quantized.format) for p in pairs if declared]
        other = [name for name, format_name in stored if format_name in formats.values() and format_name != declared]
        if other:
            yield _mismatch(
                f"config.json declares {declared}, but {count(len(other), 'weight')} are stored otherwise: "
                f"{listed(other, 3)}",
                other,
            )


def _texts(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _names(entry: str, weight: str) -> bool:
    """Whether an entry of an ignore list means a weight: a module, its end, a part of its path, or a pattern."""
    module = weight.removesuffix(".weight")
    if entry.startswith("re:"):
        try:
            return re.match(entry.removeprefix("re:"), module) is not None
        except re.error:
            return False
    if "*" in entry:
        return re.fullmatch(re.escape(entry).replace(r"\*", ".*"), module) is not None
    return f".{entry}." in f".{module}."
