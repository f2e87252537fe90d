"""Contradictions between what a checkpoint declares about its model and the tensors that it holds.

Nothing here needs an original: ``inspect`` and comparisons run the same checks.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from quanterr.checkpoints import Checkpoint, GgufMetadata
from quanterr.checkpoints.base import RECIPE
from quanterr.checkpoints.labels import Labels
from quanterr.documents.base import Finding
from quanterr.findings.activations import report_cache_scales, report_lone_rotations
from quanterr.findings.codes import make_finding
from quanterr.findings.configs import CONFIG, TIED, config_of
from quanterr.findings.declared import Stored, check_declared
from quanterr.findings.file_types import check_file_type
from quanterr.findings.heads import OF_BLOCK, check_heads
from quanterr.findings.loading import check_loading
from quanterr.findings.parts import check_optional_parts
from quanterr.findings.runtimes import check_runtimes
from quanterr.findings.schemes import check_schemes, compare_declarations
from quanterr.formats import FORMATS, find_rows
from quanterr.pairing.inputs import find_cache_scales
from quanterr.pairing.transforms import find_lone_transforms
from quanterr.pairing.views import find_whole
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import count, display, listed

BLOCK = re.compile(OF_BLOCK)
EMBEDDINGS = ("embed_tokens.weight", "token_embd.weight")
HEAD = "lm_head."
OF_TOWER = re.compile(r"(?:model\.)?(?:vision_tower|vision_model|visual|vision_encoder|audio_tower|audio_model)\.")
OF_TEXT = ("_text", "_text_model")  # ends of model_type: the section of a multimodal model that is its language model
HEADS = {
    "num_attention_heads": ("q_proj.weight", "attn_q.weight"),
    "num_key_value_heads": ("k_proj.weight", "attn_k.weight"),
}
REMEDY = "check that the configuration belongs to this checkpoint; loaders that follow it fail or build another model"


def check_structure(checkpoint: Checkpoint, labels: Labels, stored: Sequence[Stored]) -> Iterator[Finding]:
    """Check what a checkpoint declares about its model against its tensors; ``stored`` are its weights."""
    declared, where = _read_declared(checkpoint)
    yield from _check_blocks(declared, where, checkpoint.entries)
    yield from _check_sizes(declared, where, stored)
    yield from check_heads(checkpoint, stored)
    yield from _check_tied_head(checkpoint, stored)
    yield from _check_class(checkpoint)
    yield from check_loading(checkpoint, labels, [one.weight for one in stored])
    yield from _check_layouts(labels.config, stored)
    yield from check_optional_parts(one.weight for one in stored)
    yield from check_file_type(checkpoint)
    yield from check_runtimes(checkpoint.entries, labels.method)
    yield from report_lone_rotations(find_lone_transforms(labels.config, checkpoint.entries))
    yield from report_cache_scales(find_cache_scales(labels.config, checkpoint.entries))
    if checkpoint.kind == RECIPE:  # its notes name what it leaves unquantized
        return
    yield from check_declared(labels.declarations, stored, checkpoint.entries)
    twice = list(compare_declarations(checkpoint.config))
    yield from twice or check_schemes(labels.declarations, stored)  # of two schemes, nobody knows which one is meant


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


def _check_sizes(declared: Mapping[str, int], where: str, stored: Sequence[Stored]) -> Iterator[Finding]:
    """Check the sizes of the embedding, and that the number of heads divides the rows of q and k."""
    width, rows = declared.get("hidden_size"), declared.get("vocab_size")
    for one in stored:
        shape, name = one.weight.shape, display(one.name)
        if len(shape) != 2 or not one.has_shape or not one.name.endswith(EMBEDDINGS):
            continue
        if width and shape[1] != width:
            yield _report_mismatch(f"{where} declares a width of {width}, but {name} has {shape[1]}")
        if rows and rows not in (shape[0], find_whole(one.weight).matrix[0]):
            yield _report_mismatch(f"{where} declares vocab_size {rows}, but {name} has {count(shape[0], 'row')}")
    for key, endings in HEADS.items():
        heads = declared.get(key)
        odd = [
            one.name
            for one in stored
            if one.name.endswith(endings) and heads and one.has_shape and one.weight.shape[0] % heads
        ]
        if odd:
            yield _report_mismatch(
                f"{where} declares {count(heads or 0, 'head')} ({key}), which do not divide the rows of "
                f"{listed(odd, 3)}",
                odd,
            )


def _check_tied_head(checkpoint: Checkpoint, stored: Sequence[Stored]) -> Iterator[Finding]:
    """Report an output layer that is stored in another way than the embedding that is declared to replace it."""
    if config_of(checkpoint).get(TIED) is not True:
        return
    heads = [one for one in stored if one.weight.has_codes and one.weight.codes.name.startswith(HEAD)]
    for name in (one.name for one in heads if not any(row.takes_tied_head for row in find_rows(one.weight.format))):
        yield _report_mismatch(
            f"config.json declares {TIED}, but {display(name)} is quantized separately: "
            "loaders use the embedding instead",
            [name],
        )


def _check_class(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Report a tower of images or sounds beside a configuration of a language model alone."""
    main = as_object(checkpoint.config.get(CONFIG))
    kind, sections = main.get("model_type"), [key for key, value in main.items() if isinstance(value, dict)]
    tower = [name for name in checkpoint.entries if OF_TOWER.match(name)]
    if (
        isinstance(kind, str)
        and kind.endswith(OF_TEXT)
        and tower
        and not any("vision" in key or "audio" in key for key in sections)
    ):
        message = (
            f"{CONFIG} declares model_type {display(kind)}, a language model alone, but {count(len(tower), 'tensor')} "
            f"belong to a tower: {listed(tower, 3)}: loaders of this type leave them out, or find no weight by its name"
        )
        remedy = f"put the original's {CONFIG} back, which has model_type, architectures and the tower's configuration"
        yield make_finding("config_mismatch", "warning", None, message, remedy, key="model_type")


def _check_layouts(config: JsonFields, stored: Sequence[Stored]) -> Iterator[Finding]:
    """Report weights stored in another format than config.json names, within a family of formats."""
    families: dict[str, dict[str, str]] = {}  # key → value → format
    for key, value, name in ((*row.declared, row.name) for row in FORMATS if row.declared):
        families.setdefault(key, {})[value] = name
    for key, formats in families.items():
        declared = formats.get(str(config.get(key)).lower())
        found = [(one.name, one.weight.format) for one in stored if declared]
        other = [name for name, format_name in found if format_name in formats.values() and format_name != declared]
        if other:
            yield _report_mismatch(
                f"config.json declares {declared}, but another format is stored for {count(len(other), 'weight')}: "
                f"{listed(other, 3)}",
                other,
            )
