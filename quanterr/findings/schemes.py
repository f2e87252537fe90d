"""Checks of the quantization that config.json declares against the stored tensors."""

import re
from collections.abc import Iterator, Sequence

from quanterr.checkpoints import MODELOPT_CONFIG, Checkpoint
from quanterr.documents.base import Finding
from quanterr.findings.codes import make_finding
from quanterr.pairing.model import Pair
from quanterr.selection.roles import role_of
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import count, display, listed

REMEDY = "correct config.json: loaders that follow it read wrong values or refuse the checkpoint"
OF_MODELOPT = ("quant_algo", "group_size")  # keys that ModelOpt writes to both files
FLOAT_CODES = frozenset({"F8_E4M3", "F8_E5M2"})
INTEGER_CODES = frozenset({"I8", "I32"})
OF_INT8, OF_FP8 = {"int8_tensor", "int8_row", "int8_block", "ct_int"}, {"fp8_tensor", "fp8_row", "fp8_block"}
# Format that compressed-tensors declares → formats of the tensors that its loaders then look for.
COMPRESSED = {
    "pack-quantized": {"ct_pack"},
    "int-quantized": OF_INT8,
    "float-quantized": OF_FP8 | {"mxfp8"},
    "naive-quantized": OF_INT8 | OF_FP8 | {"mxfp8"},
    "nvfp4-pack-quantized": {"ct_nvfp4"},
    "mxfp4-pack-quantized": {"ct_mxfp4"},
    "mxfp6-pack-quantized": {"ct_mxfp6"},
    "mxfp8-quantized": {"mxfp8"},
    "marlin-24": {"ct_marlin24"},
}
COMPRESSES = frozenset().union(*COMPRESSED.values())
PLAIN = (OF_INT8 | OF_FP8) - {"ct_int"}
COMPRESSED_TENSORS = "compressed-tensors"
OF_ONE_SIZE = frozenset({"nvfp4", "mxfp8", "mlx_mxfp4", "mlx_mxfp8", "mlx_nvfp4"})  # each has groups of one size only
PACKED_FLOATS = frozenset({"ct_nvfp4", "ct_mxfp4", "ct_mxfp6"})
# Strategy that compressed-tensors declares → granularities of the scales that it stores: a row shorter than a group has
# one scale.
STRATEGIES = {"tensor": {"tensor"}, "channel": {"channel"}, "group": {"group", "channel"}, "block": {"block"}}
BLOCK = 128  # rows and columns of the blocks that are usual: a smaller matrix is one
LINEAR = frozenset({"attention", "mlp"})  # roles of weights of linear layers
OF_CLASS = re.compile(r"[A-Z]\w*")  # a target that is the name of a class of layers
OF_LINEAR = re.compile(r"Linear|Expert|MoE|MLP|Conv1D")  # in such a name: it may have matrices of weights


def check_scheme(quantized: Checkpoint, config: JsonFields, pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Check what compressed-tensors, ModelOpt and MLX declare for quantized weights, and duplicate declarations."""
    groups = [as_object(group) for group in as_object(config.get("config_groups")).values()]
    every = [pair for pair in pairs if pair.quantized.has_codes]
    compressed = [pair for pair in every if pair.quantized.format in COMPRESSES]
    for group, own in _assign_groups(groups, every):
        yield from _check_group(as_object(group.get("weights")), config, own)
    yield from _check_format(config, groups, compressed)
    if config.get("quant_method") == COMPRESSED_TENSORS:
        yield from _check_targets(groups, compressed)
    if not any(isinstance(value, dict) for value in config.values()):
        in_groups = [pair for pair in every if pair.quantized.format in OF_ONE_SIZE]
        yield from _check_group_size(config, [pair for pair in in_groups if _find_granularity(pair) == "group"])
    yield from _check_block_size(config, every)
    twice = list(_compare_declarations(quantized.config))
    yield from twice or _check_algorithm(quantized.config, config, every)


def _assign_groups(groups: Sequence[JsonFields], coded: Sequence[Pair]) -> Iterator[tuple[JsonFields, list[Pair]]]:
    """Yield each group with its weights: all if there is one group, else those that only its targets name."""
    if len(groups) < 2:
        yield from ((group, list(coded)) for group in groups)
        return
    owners = [[group for group in groups if _names(group, pair)] for pair in coded]
    for group in groups:
        yield group, [pair for pair, found in zip(coded, owners, strict=True) if found == [group]]


def _names(group: JsonFields, pair: Pair) -> bool:
    return any(_is_target(target, pair.name) for target in keep_strings(group.get("targets")))


def _check_group(weights: JsonFields, config: JsonFields, own: Sequence[Pair]) -> Iterator[Finding]:
    """Check what a group declares of its weights."""
    yield from _check_type(weights.get("type"), own)
    of_one_size = [pair for pair in own if pair.quantized.format in OF_ONE_SIZE]
    if config.get("quant_method") != COMPRESSED_TENSORS:
        yield from _check_group_size(weights, of_one_size)
        return
    packed = [pair for pair in own if pair.quantized.format.startswith("ct_") and pair.quantized.block_size]
    plain = [pair for pair in own if pair.quantized.format in PLAIN]
    yield from _check_group_size(weights, [*packed, *plain, *of_one_size])
    yield from _check_symmetry(weights, [*packed, *plain])
    yield from _check_strategy(weights, [pair for pair in own if pair.quantized.format in COMPRESSES])


def _check_group_size(weights: JsonFields, coded: Sequence[Pair]) -> Iterator[Finding]:
    """Report weights whose groups differ from the declared group_size."""
    size = weights.get("group_size")
    if isinstance(size, int) and size > 0:
        other = [pair for pair in coded if _columns_per_scale(pair) != min(size, pair.quantized.matrix[1])]
        if other:
            found = sorted({_columns_per_scale(pair) for pair in other})
            yield _report_mismatch(f"group_size {size}", f"groups of {' or '.join(map(str, found))} columns", other)


def _columns_per_scale(pair: Pair) -> int:
    """Return the number of columns that share a scale."""
    return pair.quantized.block_size[1] if pair.quantized.block_size else pair.quantized.matrix[1]


def _check_symmetry(weights: JsonFields, coded: Sequence[Pair]) -> Iterator[Finding]:
    """Report zero points that contradict the declared symmetry."""
    symmetric = weights.get("symmetric")
    if symmetric is True and weights.get("type", "int") == "int":
        if other := [pair for pair in coded if _has_zero_points(pair)]:
            yield _report_mismatch("symmetric codes", "zero points", other)
    elif symmetric is False and (other := [pair for pair in coded if not _has_zero_points(pair)]):
        yield _report_mismatch("codes that are not symmetric", "no zero points", other)


def _has_zero_points(pair: Pair) -> bool:
    return any(entry.name.endswith("weight_zero_point") for entry in pair.quantized_consumed)


def _check_format(config: JsonFields, groups: Sequence[JsonFields], coded: Sequence[Pair]) -> Iterator[Finding]:
    """Report weights in other formats than their groups declare, or than the checkpoint declares for all groups.

    A group's own format takes precedence, so that a checkpoint may have weights of other formats than that of all.
    """
    declared = config.get("format"), *(group.get("format") for group in groups)
    of_all, *of_each = (one if isinstance(one, str) else None for one in declared)
    of_groups = {one or of_all for one in of_each}
    for formats, least in ((of_groups, 1), ({of_all}, len(coded))):
        named = {name for name in formats if isinstance(name, str) and name in COMPRESSED}
        stored = set().union(*(COMPRESSED[name] for name in named))
        other = [pair for pair in coded if pair.quantized.format not in stored]
        if named and named == formats and len(other) >= max(1, least):
            found = sorted({pair.quantized.format for pair in other})
            yield _report_mismatch(f"format {' and '.join(sorted(named))}", " and ".join(found), other)
            return


def _check_strategy(weights: JsonFields, coded: Sequence[Pair]) -> Iterator[Finding]:
    """Report weights whose scales are of another granularity than the declared strategy."""
    strategy = weights.get("strategy")
    allowed = STRATEGIES.get(strategy) if isinstance(strategy, str) else None
    found = {pair.name: _find_granularity(pair) for pair in coded}
    other = [pair for pair in coded if allowed and found[pair.name] and found[pair.name] not in allowed]
    if other:
        stored = " and ".join(sorted({f"a scale for each {found[pair.name]}" for pair in other}))
        yield _report_mismatch(f"strategy {strategy}", stored, other)


def _find_granularity(pair: Pair) -> str:
    """Return what has a scale of its own: a tensor, channel (row), group of columns or block; empty if several fit."""
    weight, (rows, cols) = pair.quantized, pair.quantized.matrix
    if weight.block_size is not None:
        return "group" if weight.block_size[0] == 1 and rows > 1 else "block" if len(weight.shape) == 2 else ""
    if len(weight.shape) != 2 or rows == 1:
        return ""
    if weight.format.endswith("_tensor"):
        return "tensor" if max(rows, cols) > BLOCK else ""
    return "channel" if weight.format.endswith("_row") or weight.format == "ct_pack" else ""


def _check_targets(groups: Sequence[JsonFields], coded: Sequence[Pair]) -> Iterator[Finding]:
    """Report quantized linear layers that no target names: loaders refuse them, or take their codes for weights.

    Reference: vllm-project/vllm model_executor/layers/quantization/compressed_tensors/utils.py find_matched_target.
    """
    targets = [target for group in groups for target in keep_strings(group.get("targets"))]
    linear = [pair for pair in coded if len(pair.original.shape) == 2 and role_of(pair.name) in LINEAR]
    other = [pair for pair in linear if targets and not any(_is_target(target, pair.name) for target in targets)]
    if other:
        yield _report_mismatch(f"targets {listed(targets, 3)} and no others", "codes", other)


def _is_target(target: str, weight: str) -> bool:
    """Return whether a target, a class or an entry as of an ignore list, may mean a weight; prefixes may differ."""
    if OF_CLASS.fullmatch(target):
        return OF_LINEAR.search(target) is not None
    starts = dict.fromkeys((0, *(max(weight.find(word), 0) for word in ("model.", "layers."))))
    if any(matches(target, weight[start:]) for start in starts):
        return True
    tail = weight.removesuffix(".weight").rpartition("layers.")[2]
    return not target.startswith("re:") and target.endswith(f"layers.{tail}")


def _check_block_size(config: JsonFields, coded: Sequence[Pair]) -> Iterator[Finding]:
    """Report FP8 in blocks whose size is not declared, and declared blocks where whole tensors have a scale.

    Reference: vllm-project/vllm model_executor/layers/quantization/fp8.py Fp8LinearMethod.create_weights;
    huggingface/transformers@5.24.0 utils/quantization_config.py FineGrainedFP8Config.
    """
    if config.get("quant_method") != "fp8":
        return
    other = [pair for pair in coded if pair.quantized.format == "fp8_block"]
    if size := config.get("weight_block_size"):
        large = [pair for pair in coded if pair.quantized.format == "fp8_tensor" and _find_granularity(pair)]
        if large and not other:
            yield _report_mismatch(f"weight_block_size {size}", "scales of whole tensors", large)
    elif other:
        stored = "scales of blocks (vLLM then looks for one of each tensor, transformers for blocks of 128 × 128)"
        yield _report_mismatch("quant_method fp8 without weight_block_size", stored, other)


def _check_type(declared: object, coded: Sequence[Pair]) -> Iterator[Finding]:
    """Report codes whose dtype contradicts the declared type, int or float."""
    wrong = {"int": FLOAT_CODES, "float": INTEGER_CODES}.get(str(declared), frozenset())
    packed = PACKED_FLOATS if declared == "int" else frozenset()
    if other := [p for p in coded if p.quantized.codes.dtype in wrong or p.quantized.format in packed]:
        stored = sorted(
            {p.quantized.format if p.quantized.format in packed else p.quantized.codes.dtype for p in other}
        )
        yield _report_mismatch(f"codes of type {declared}", f"codes of {' or '.join(stored)}", other)


def _check_algorithm(files: JsonFields, config: JsonFields, coded: Sequence[Pair]) -> Iterator[Finding]:
    """Report weights that contradict ModelOpt's quant_algo, if it names FP8 or NVFP4, as W4A8_NVFP4_FP8 does."""
    said = str(config.get("quant_algo")).upper()
    name = next((name for name in ("nvfp4", "fp8") if name.upper() in said), None)
    if name and (other := [pair for pair in coded if name not in pair.quantized.format]):
        where = "config.json" if as_object(files.get("config.json")).get("quantization_config") else MODELOPT_CONFIG
        formats = sorted({pair.quantized.format for pair in other})
        yield _report_mismatch(f"quant_algo {display(said)}", " and ".join(formats), other, where)


def _report_mismatch(declared: str, stored: str, pairs: Sequence[Pair], where: str = "config.json") -> Finding:
    """Return the finding that stored weights contradict a declaration."""
    names = [pair.name for pair in pairs]
    message = (
        f"{where} declares {declared}, but {stored} are stored for {count(len(names), 'weight')}: {listed(names, 3)}"
    )
    return make_finding("config_mismatch", "warning", None, message, REMEDY, layers=names)


def _compare_declarations(files: JsonFields) -> Iterator[Finding]:
    """Report keys that config.json and hf_quant_config.json declare differently."""
    one = as_object(as_object(files.get("config.json")).get("quantization_config"))
    other = as_object(as_object(files.get(MODELOPT_CONFIG)).get("quantization"))
    for key in OF_MODELOPT:
        there, here = one.get(key), other.get(key)
        if there is not None and here is not None and there != here:
            message = (
                f"config.json declares {key} {display(str(there))}, but {MODELOPT_CONFIG} declares "
                f"{display(str(here))}: some runtimes read one, some the other"
            )
            yield make_finding("config_mismatch", "warning", None, message, REMEDY, key=key)


def matches(entry: str, weight: str) -> bool:
    """Return True if an entry of an ignore list matches a weight.

    An entry is a module, the end or a part of its path, or a pattern.
    """
    module = weight.removesuffix(".weight")
    if entry.startswith("re:"):
        try:
            return re.match(entry.removeprefix("re:"), module) is not None
        except (re.error, OverflowError, RecursionError):
            return False
    if "*" in entry:
        return re.fullmatch(re.escape(entry).replace(r"\*", ".*"), module) is not None
    return f".{entry}." in f".{module}."


def keep_strings(value: object) -> list[str]:
    """Return the strings of a list; empty for any other value."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
