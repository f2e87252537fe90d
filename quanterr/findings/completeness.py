"""Tensors that a checkpoint lacks although its configuration, or its other blocks, require them.

Only inspections run these checks, as in a comparison the original shows what is missing.
"""

import re
from collections.abc import Collection, Iterable, Iterator

from quanterr.checkpoints import Checkpoint
from quanterr.documents.base import Finding
from quanterr.documents.inspection.model import NOT_READ
from quanterr.findings.checks import ALONE, DECLARED, HEADERS, check
from quanterr.findings.codes import make_finding
from quanterr.findings.configs import CONFIG, TIED
from quanterr.findings.contents import Contents
from quanterr.pairing.conversion import is_mlx
from quanterr.pairing.model import Bucket
from quanterr.selection.roles import place_of
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import count, display, itemize

EMBEDDING = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?embed_tokens\.\w+")
HEADS = ("lm_head.", "language_model.lm_head.", "model.lm_head.", "embed_out.", "output.")
# Prefixes of tensors of language models, and suffixes of the names of classes that generate text with these models.
MODEL_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
GENERATOR_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
EMBEDDING_PREFIXES = ("embed", "wte.", "tok_embeddings.", "word_embeddings.")
WRITE_AGAIN = "quantize or convert again: loaders refuse the checkpoint, or fill the weight with random numbers"
# Keys of config.json that declare layers for multi-token prediction, and parts of the names of their tensors.
PREDICTION_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
PREDICTION_NAMES = re.compile(r"(?:^|\.)(?:mtp\w*|nextn\w*|eh_proj|enorm|hnorm)\.")
# Matrices that every block of attention, or with a dense MLP, needs.
REQUIRED_MODULES = re.compile(
    r"(?:.*\.)?(?:[qkvo]_proj|(?:gate|up|down)_proj|qkv|out_proj|fc[12]|attn_(?:q|k|v|qkv|output|out)|ffn_(?:gate|up|down))"
)
# Ends of the names of parts that are useless without the codes.
PART_SUFFIXES = re.compile(
    r"(.+)\.(qzeros|scales|g_idx|weight_(?:scale(?:_inv|_2)?|zero_point|shape|g_idx|global_scale))"
)
STACK = re.compile(r"(?:.*\.)?(?:layers|blk|h)")  # blocks that have the same matrices, unlike those of denoisers
PER_BLOCK_KEYS = (
    "attention.head_count",
    "attention.head_count_kv",
    "feed_forward_length",
)  # keys of GGUF files whose value may be a list with a number for each block
# Keys of config.json of models whose blocks differ from each other.
UNEVEN_KEYS = (
    *("num_kv_shared_layers", "cla_share_factor", "block_configs", "hybrid_override_pattern", "layers_block_type"),
    "attention_k_eq_v",  # Gemma 4: keys are values, too, in layers of full attention
)


@check(NOT_READ, needs=HEADERS, of=ALONE)
def check_formats(contents: Contents) -> Iterator[Finding]:
    """Report weights of no known format."""
    for leftover in contents.leftovers:
        if leftover.bucket is Bucket.ERROR:
            yield make_finding(
                NOT_READ, "error", leftover.name, f"{display(leftover.name)}: not read: {leftover.reason}"
            )


@check("incomplete", needs=DECLARED, of=ALONE)
def check_completeness(contents: Contents) -> Iterator[Finding]:
    """Report a checkpoint without tensors, and parts of its model that it lacks."""
    checkpoint = contents.checkpoint
    names = checkpoint.entries
    if not names:
        message = f"{display(checkpoint.path)} holds no tensors"
        yield make_finding(
            "incomplete", "warning", None, message, "write the file again: it has a header and nothing else"
        )
        return
    config = {} if checkpoint.gguf else checkpoint.model_config
    yield from _check_head(config, names)
    yield from _check_ends(config, names)
    if not is_mlx(checkpoint):  # mlx-lm never predicts several tokens, and leaves these layers out
        yield from _check_prediction(config, names)
    yield from _check_tower(checkpoint)
    if not any(config.get(key) for key in UNEVEN_KEYS) and not _have_blocks_own_sizes(checkpoint):
        yield from _check_blocks(names)


def _have_blocks_own_sizes(checkpoint: Checkpoint) -> bool:
    """Return whether GGUF metadata describe each block apart, or blocks that share keys and values."""
    metadata = checkpoint.gguf
    if metadata is None:
        return False
    sizes = (metadata.values.get(f"{metadata.architecture}.{key}") for key in PER_BLOCK_KEYS)
    return any(isinstance(size, tuple) for size in sizes) or bool(metadata.get_model_int("attention.shared_kv_layers"))


def _check_head(config: JsonFields, names: Iterable[str]) -> Iterator[Finding]:
    """Report an absent output layer that the embedding does not replace."""
    classes = config.get("architectures")
    predicts = not isinstance(classes, list) or any("ForCausalLM" in str(name) for name in classes)
    if config.get(TIED) is not False or not predicts or any(name.startswith(HEADS) for name in names):
        return
    if any(EMBEDDING.fullmatch(name) for name in names):
        message = f"{CONFIG} declares {TIED} false, but no lm_head is stored: loaders fill it with random numbers"
        remedy = f"store the output layer, or declare {TIED} true if the model uses its embedding"
        yield make_finding("incomplete", "warning", None, message, remedy)


def _check_ends(config: JsonFields, names: Collection[str]) -> Iterator[Finding]:
    """Report a language model without its embedding, or without the norm after its blocks if these have norms.

    Blocks without either are not reported: tools store such parts of a model on purpose.
    """
    classes = config.get("architectures")
    if not isinstance(classes, list) or not any(str(name).endswith(GENERATOR_SUFFIXES) for name in classes):
        return
    has_head = any(name.startswith(HEADS) for name in names)
    for root in MODEL_PREFIXES:
        blocks = [name for name in names if name.startswith(f"{root}layers.")]
        ends = [name for name in names if name.startswith(root) and not name.startswith(f"{root}layers.")]
        has_embedding = any(name.startswith(EMBEDDING_PREFIXES, len(root)) for name in ends)
        has_norm = any("norm" in name or ".ln_" in name for name in ends)
        lacking = []
        if not has_embedding and not (has_head and config.get(TIED) is not False):
            lacking.append("an embedding")
        if not has_norm and any("norm" in name for name in blocks):
            lacking.append("a norm after the last block")
        if blocks and lacking and (has_embedding or has_norm or has_head):
            message = f"{display(root)}layers has blocks, but {display(root.rstrip('.'))} lacks {' and '.join(lacking)}"
            yield make_finding("incomplete", "warning", None, message, WRITE_AGAIN)


def _check_prediction(config: JsonFields, names: Iterable[str]) -> Iterator[Finding]:
    """Report layers of multi-token prediction that the configuration promises and that are not stored."""
    key = next((key for key in PREDICTION_KEYS if config.get(key)), None)
    blocks = config.get("num_hidden_layers")
    if key is None or any(PREDICTION_NAMES.search(name) for name in names):
        return
    following = f"layers.{blocks}."  # DeepSeek's names: a block after the last
    if not any(f".{following}" in f".{name}" for name in names):
        message = (
            f"{CONFIG} declares {key} {config[key]}, but no layer of multi-token prediction (MTP) is stored: runtimes "
            "that predict several tokens fail, others work"
        )
        yield make_finding("incomplete", "warning", None, message, "keep the MTP layers, or declare none")


def _check_tower(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Report blocks of an image or audio tower that GGUF metadata promise and that are not stored."""
    if checkpoint.gguf is None:
        return
    for tower, letter in (("vision", "v"), ("audio", "a")):
        promised = checkpoint.gguf.get_int(f"clip.{tower}.block_count") or 0
        block_name = re.compile(rf"{letter}\.blk\.(\d+)\.")
        stored = {int(match[1]) for name in checkpoint.entries if (match := block_name.match(name))}
        lacking = [n for n in range(min(promised, 10_000)) if n not in stored]
        if lacking:
            message = (
                f"the GGUF metadata (clip.{tower}.block_count) declare {count(promised, 'block')}, but no tensor is "
                f"stored for {itemize([f'{letter}.blk.{n}' for n in lacking], 3)}"
            )
            yield make_finding(
                "incomplete", "warning", None, message, "convert the model again: llama.cpp refuses the file"
            )


def _check_blocks(names: Iterable[str]) -> Iterator[Finding]:
    """Report matrices that at most a quarter of the blocks lack although all others of their stack have them."""
    having: dict[str, dict[str, set[int]]] = {}  # stack → module → blocks
    for name in names:
        if (place := place_of(name)) and not name.endswith(".bias"):
            module = place.module if name.endswith(".weight") else place.module.rpartition(".")[0]
            having.setdefault(place.stack, {}).setdefault(module, set()).add(place.block)
    for stack, modules in having.items():
        if not STACK.fullmatch(stack):
            continue
        blocks = set[int]().union(*modules.values())
        for module, present in modules.items():
            lacking = blocks - present
            # If only these blocks have some other module, they are blocks of another architecture.
            if (
                REQUIRED_MODULES.fullmatch(module)
                and 0 < 3 * len(lacking) <= len(present)
                and not any(other <= lacking for other in modules.values())
            ):
                yield _report_gap(stack, module, sorted(lacking), len(present))


def _report_gap(stack: str, module: str, lacking: list[int], having: int) -> Finding:
    shown = itemize([f"{stack}.{n}" for n in lacking], 3)
    message = (
        f"{shown} {'lacks' if len(lacking) == 1 else 'lack'} {display(module)}, which the other "
        f"{count(having, 'block')} of {display(stack)} have"
    )
    return make_finding("incomplete", "warning", None, message, WRITE_AGAIN)


@check("missing_codes", needs=HEADERS, of=ALONE)
def check_lone_parts(contents: Contents) -> Iterator[Finding]:
    """Report scales and zero points whose codes are not stored."""
    names = [*(pair.name for pair in contents.pairing.pairs), *(leftover.name for leftover in contents.leftovers)]
    parts_by_module: dict[str, list[str]] = {}
    for name in names:
        if match := PART_SUFFIXES.fullmatch(name):
            parts_by_module.setdefault(match[1], []).append(match[2])
    for module, parts in parts_by_module.items():
        message = f"{display(module)} has {' and '.join(sorted(parts))}, but no codes: its weight is missing"
        remedy = "quantize this layer again, or download the file again"
        yield make_finding("missing_codes", "error", f"{module}.weight", message, remedy, parts=parts)
