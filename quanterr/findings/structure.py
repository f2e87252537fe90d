"""Contradictions between what a checkpoint declares about its model and the tensors that it holds."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from quanterr.checkpoints import Checkpoint, GgufMetadata
from quanterr.documents.base import Finding
from quanterr.findings.codes import make_finding
from quanterr.findings.configs import CONFIG, config_of
from quanterr.findings.heads import OF_BLOCK, check_heads
from quanterr.findings.loading import check_loading
from quanterr.findings.schemes import LINEAR, check_scheme, keep_strings, matches
from quanterr.formats import FORMATS, find_rows
from quanterr.pairing.inputs import find_torchao_config
from quanterr.pairing.model import Pair, Pairing
from quanterr.selection.roles import role_of, without_numbers
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import count, display, listed

BLOCK = re.compile(OF_BLOCK)
EMBEDDINGS = ("embed_tokens.weight", "token_embd.weight")
HEAD = "lm_head."
HEADS = {
    "num_attention_heads": ("q_proj.weight", "attn_q.weight"),
    "num_key_value_heads": ("k_proj.weight", "attn_k.weight"),
}
IGNORED = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers", "llm_int8_skip_modules")
BY_LAYER = ("dynamic", "extra_config", "layer_quant_config", "quantized_layers", "quant_config", "modules_dtype_dict")
# Weights that quantizers skip without declaring it: routers, T5's embedding of relative positions.
LEFT = re.compile(r".*(attention_bias|\.gate|router|_gate|Dense\w+\.wo)\.weight")
REMEDY = "check that the configuration belongs to this checkpoint; loaders that follow it fail or build another model"


def check_structure(quantized: Checkpoint, plan: Pairing) -> Iterator[Finding]:
    """Check what the quantized checkpoint declares about its model against its tensors."""
    declared, where = _read_declared(quantized)
    yield from _check_blocks(declared, where, quantized.entries)
    yield from _check_sizes(declared, where, plan.pairs)
    yield from check_heads(quantized, plan.pairs)
    yield from _check_tied_head(quantized, plan.pairs)
    labels = plan.labels.get("quantized")
    if labels:
        yield from check_loading(quantized, labels, [pair.quantized for pair in plan.pairs])
        yield from _check_recipe(labels.config, plan.pairs)
        yield from check_scheme(quantized, labels.config, plan.pairs)


def _read_declared(checkpoint: Checkpoint) -> tuple[Mapping[str, int], str]:
    """Return the declared sizes of the model by the keys of config.json, and the place that declares them."""
    if checkpoint.gguf is not None:
        return _read_gguf_sizes(checkpoint.gguf), "the GGUF metadata"
    config = config_of(checkpoint)
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


def _report_mismatch(message: str, layers: Sequence[str] = ()) -> Finding:
    """Return the finding that the configuration contradicts the tensors."""
    return make_finding(
        "config_mismatch", "warning", None, message, REMEDY, **({"layers": list(layers)} if layers else {})
    )


def _check_blocks(declared: Mapping[str, int], where: str, names: Collection[str]) -> Iterator[Finding]:
    """Check the number of blocks; blocks of multi-token prediction may follow."""
    said = declared.get("num_hidden_layers")
    found = {int(match[1]) for name in names if (match := BLOCK.match(name))} if said else set()
    if not said or not found:
        return
    stored, most = max(found) + 1, said + declared.get("num_nextn_predict_layers", 0)
    if not said <= stored <= most:
        yield _report_mismatch(f"{where} declares {count(said, 'block')}, but the tensors belong to {stored}")


def _check_sizes(declared: Mapping[str, int], where: str, pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Check the width of the embedding, and that the number of heads divides the rows of q and k."""
    width = declared.get("hidden_size")
    for pair in pairs:
        shape = pair.original.shape
        if width and len(shape) == 2 and pair.name.endswith(EMBEDDINGS) and shape[1] != width:
            yield _report_mismatch(f"{where} declares a width of {width}, but {display(pair.name)} has {shape[1]}")
    for key, endings in HEADS.items():
        heads = declared.get(key)
        odd = [p.name for p in pairs if p.name.endswith(endings) and heads and p.original.shape[0] % heads]
        if odd:
            yield _report_mismatch(
                f"{where} declares {count(heads or 0, 'head')} ({key}), which do not divide the rows of "
                f"{listed(odd, 3)}",
                odd,
            )


def _check_tied_head(quantized: Checkpoint, pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Report an output layer that is quantized separately although the embedding is declared to replace it."""
    main = quantized.config.get("config.json")
    if not isinstance(main, dict) or main.get("tie_word_embeddings") is not True:
        return
    coded = (p for p in pairs if p.quantized.has_codes and p.quantized.codes.name.startswith(HEAD))
    for name in (p.name for p in coded if not any(row.takes_tied_head for row in find_rows(p.quantized.format))):
        yield _report_mismatch(
            f"config.json declares tie_word_embeddings, but {display(name)} is quantized separately: "
            "loaders use the embedding instead",
            [name],
        )


def _check_recipe(config: JsonFields, pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Check which layers are quantized, and in which format."""
    if not config:
        return
    excluded = {pair.name for pair in pairs if _is_excluded(pair.name, config)}
    taken = [p.name for p in pairs if p.quantized.has_codes and p.name in excluded]
    if taken:
        yield _report_mismatch(
            f"config.json excludes {count(len(taken), 'layer')} from quantization, but codes are stored: "
            f"{listed(taken, 3)}",
            taken,
        )
    yield from _check_layouts(config, pairs)
    linear = [
        p for p in pairs if len(p.original.shape) == 2 and role_of(p.name) in LINEAR and not LEFT.fullmatch(p.name)
    ]
    left = [p.name for p in linear if p.quantized.encoding == "floats" and p.name not in excluded]
    method = config.get("quant_method") or config.get("quant_algo")
    few = 0 < 4 * len(left) < len(linear)
    if method and (few or _are_quantized_elsewhere(left, config, linear)):
        yield _report_mismatch(
            f"the configuration declares {display(str(method))} and does not exclude {listed(left, 3)}, "
            f"which {'is' if len(left) == 1 else 'are'} stored unquantized",
            left,
        )


def _are_quantized_elsewhere(left: Sequence[str], config: JsonFields, linear: Sequence[Pair]) -> bool:
    """Return True if some of these modules are quantized in other blocks, and config.json treats all layers alike."""
    targets = [as_object(group).get("targets") for group in as_object(config.get("config_groups")).values()]
    if any(config.get(key) for key in BY_LAYER) or any(target != ["Linear"] for target in targets):
        return False
    coded = {without_numbers(pair.name) for pair in linear if pair.quantized.has_codes}
    return any(without_numbers(name) in coded for name in left)


def _check_layouts(config: JsonFields, pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Report weights stored in another format than config.json names, within a family of formats."""
    families: dict[str, dict[str, str]] = {}  # key → value → format
    for key, value, name in ((*row.declared, row.name) for row in FORMATS if row.declared):
        families.setdefault(key, {})[value] = name
    for key, formats in families.items():
        declared = formats.get(str(config.get(key)).lower())
        stored = [(p.name, p.quantized.format) for p in pairs if declared]
        other = [name for name, format_name in stored if format_name in formats.values() and format_name != declared]
        if other:
            yield _report_mismatch(
                f"config.json declares {declared}, but another format is stored for {count(len(other), 'weight')}: "
                f"{listed(other, 3)}",
                other,
            )


def _is_excluded(weight: str, config: JsonFields) -> bool:
    """Return True if a quantization_config leaves a weight unquantized by name."""
    if any(matches(entry, weight) for key in IGNORED for entry in keep_strings(config.get(key))):
        return True
    of_torchao = as_object(config.get("quant_type"))
    return bool(of_torchao) and not find_torchao_config(weight.removesuffix(".weight"), of_torchao)
