"""Contradictions between the scheme that a configuration declares for each weight and how the weight is stored."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from quanterr.checkpoints import MODELOPT_CONFIG
from quanterr.checkpoints.base import RECIPE
from quanterr.declarations import Declarations, Scheme
from quanterr.documents.base import Finding
from quanterr.findings.checks import DECLARED, EACH, check
from quanterr.findings.contents import Contents, Stored
from quanterr.findings.declared import report_mismatch
from quanterr.formats import Weight
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import count, display, itemize

MODELOPT_KEYS = ("quant_algo", "group_size")  # keys that ModelOpt writes to both files
FLOAT_CODES = frozenset({"F8_E4M3", "F8_E5M2"})
INTEGER_CODES = frozenset({"I8", "I32"})
BYTE_BITS = 8  # compressed-tensors stores each code of fewer bits in a byte of its own in these formats
INT8_FORMATS, FP8_FORMATS = {"int8_tensor", "int8_row", "int8_block", "ct_int"}, {"fp8_tensor", "fp8_row", "fp8_block"}
# Format that compressed-tensors declares → formats of the tensors that its loaders then look for.
FORMATS_BY_DECLARATION = {
    "pack-quantized": {"ct_pack"},
    "int-quantized": INT8_FORMATS,
    "float-quantized": FP8_FORMATS | {"mxfp8"},
    "naive-quantized": INT8_FORMATS | FP8_FORMATS | {"mxfp8"},
    "nvfp4-pack-quantized": {"ct_nvfp4"},
    "nvfp4-e5m3-pack-quantized": {"ct_nvfp4_e5m3"},
    "mxfp4-pack-quantized": {"ct_mxfp4"},
    "mxfp6-pack-quantized": {"ct_mxfp6"},
    "mxfp8-quantized": {"mxfp8"},
    "marlin-24": {"ct_marlin24"},
}
COMPRESSED_FORMATS = frozenset().union(*FORMATS_BY_DECLARATION.values())
SCALED_FORMATS = (INT8_FORMATS | FP8_FORMATS) - {"ct_int"}
PACKED_FLOATS = frozenset({"ct_nvfp4", "ct_nvfp4_e5m3", "ct_mxfp4", "ct_mxfp6"})
# Formats whose groups of columns have the size that their configuration declares.
GROUPED_FORMATS = frozenset(
    {
        *("nvfp4", "mxfp8", "mxfp4", "mlx_mxfp4", "mlx_mxfp8", "mlx_nvfp4", "mlx_affine", "quark_fp4", "quark_int4"),
        *("gptq", "gptq_v2", "gptq_p", "gptq_marlin", "awq_gemm", "awq_gemv", "awq_gemv_fast", "awq_marlin"),
        *("modelopt_int4", "ct_pack", "ct_int", "ct_nvfp4", "ct_nvfp4_e5m3", "ct_mxfp4", "ct_mxfp6"),
    }
)
# Strategy that compressed-tensors declares → granularities of the scales that it stores: a row shorter than a group has
# one scale.
STRATEGIES = {"tensor": {"tensor"}, "channel": {"channel"}, "group": {"group", "channel"}, "block": {"block"}}
REORDERING_VALUES = ("group", "dynamic", True)  # values of actorder with which columns of a group are not neighbours
USUAL_BLOCK = 128  # rows and columns of the usual blocks; a smaller matrix is a single block


class Difference(NamedTuple):
    """What is declared, and what is stored instead, in words."""

    declared: str
    stored: str


@check("config_mismatch", needs=DECLARED, of=EACH)
def check_schemes(contents: Contents) -> Iterator[Finding]:
    """Report weights that contradict their declared schemes, or two declarations that contradict each other."""
    if contents.checkpoint.kind == RECIPE:  # a recipe's notes name what it leaves unquantized
        return
    twice = [] if contents.number == 0 else list(compare_declarations(contents.checkpoint.config))
    # If two declarations differ, nobody knows which one is meant.
    yield from twice or _compare_schemes(contents.labels.declarations, contents.weights)


def _compare_schemes(declared: Declarations, stored: Sequence[Stored]) -> Iterator[Finding]:
    """Check bits, types, groups and scales of quantized weights against what is declared for each."""
    coded = [(item, declared.of(item.weight.name)) for item in stored if item.weight.has_codes]
    of_compressed = declared.program is not None and declared.program.name == "compressed-tensors"
    names_by_difference: dict[Difference, list[str]] = {}
    for item, scheme in coded:
        if scheme and scheme.is_quantized:
            for compare in (*COMPARISONS, *(COMPRESSED_TENSORS_COMPARISONS if of_compressed else ())):
                if difference := compare(scheme, item):
                    names_by_difference.setdefault(difference, []).append(item.name)
    for (declares, is_stored), names in names_by_difference.items():
        yield _report(declared.place, declares, is_stored, names)
    if of_compressed:
        yield from _check_format(declared, [item for item, _ in coded if item.weight.format in COMPRESSED_FORMATS])
    yield from _check_block_size(declared, [item for item, _ in coded])


def _report(place: str, declared: str, stored: str, names: Sequence[str]) -> Finding:
    message = f"{place} declares {declared}, but {stored} are stored for {count(len(names), 'weight')}: "
    return report_mismatch(message + itemize(names, 3), names)


def _name_place(scheme: Scheme) -> str:
    """Return where a scheme is declared, if not for all modules."""
    return f" in {scheme.key}" if scheme.entry else ""


def _compare_bits(scheme: Scheme, stored: Stored) -> Difference | None:
    weight, bits = stored.weight, scheme.bits
    in_bytes = (
        weight.format in INT8_FORMATS and (bits or 0) < BYTE_BITS and "weights" in scheme.fields
    )  # of compressed-tensors
    if not bits or not weight.code_bits or bits == weight.code_bits or in_bytes:
        return None
    return Difference(f"codes of {bits} bits{_name_place(scheme)}", f"codes of {weight.code_bits} bits")


def _compare_type(scheme: Scheme, stored: Stored) -> Difference | None:
    """Compare the declared type, int or float, with the dtype of the codes."""
    dtype, format_name = stored.weight.codes.dtype, stored.weight.format
    if scheme.number == "int" and (dtype in FLOAT_CODES or format_name in PACKED_FLOATS):
        return Difference("codes of type int", f"codes of {format_name if format_name in PACKED_FLOATS else dtype}")
    if scheme.number == "float" and dtype in INTEGER_CODES and stored.weight.uniform_bits:
        return Difference("codes of type float", f"codes of {dtype}")
    return None


def _compare_group_size(scheme: Scheme, stored: Stored) -> Difference | None:
    weight, size = stored.weight, scheme.group_size
    has_groups = weight.format in GROUPED_FORMATS or (weight.format in SCALED_FORMATS and "weights" in scheme.fields)
    if not size or not has_groups:
        return None
    if weight.block_size and (weight.block_size[0] > 1 or len(weight.block_size) > 2):
        return None
    columns, cols = weight.block_size[1] if weight.block_size else weight.matrix[1], weight.matrix[1]
    if columns == (min(size, cols) if size > 0 else cols):
        return None
    return Difference(f"group_size {size}{_name_place(scheme)}", f"groups of {columns} columns")


def _compare_algorithm(scheme: Scheme, stored: Stored) -> Difference | None:
    """Compare ModelOpt's quant_algo, if it names FP8 or NVFP4, as W4A8_NVFP4_FP8 does, with the format."""
    algorithm = str(scheme.fields.get("quant_algo")).upper()
    name = next((name for name in ("nvfp4", "fp8") if name.upper() in algorithm), None)
    if name is None or name in stored.weight.format:
        return None
    return Difference(f"quant_algo {display(algorithm)}{_name_place(scheme)}", stored.weight.format)


def _compare_symmetry(scheme: Scheme, stored: Stored) -> Difference | None:
    """Compare the declared symmetry with zero points that are stored or not."""
    is_packed = stored.weight.format.startswith("ct_") and stored.weight.block_size
    if not is_packed and stored.weight.format not in SCALED_FORMATS:
        return None
    has_zero_points = any(entry.name.endswith("weight_zero_point") for entry in stored.parts)
    if scheme.is_symmetric is True and scheme.number != "float" and has_zero_points:
        return Difference("symmetric codes", "zero points")
    if scheme.is_symmetric is False and not has_zero_points:
        return Difference("codes that are not symmetric", "no zero points")
    return None


def _compare_strategy(scheme: Scheme, stored: Stored) -> Difference | None:
    """Compare the declared strategy with the granularity of the scales."""
    strategy = as_object(scheme.fields.get("weights")).get("strategy")
    allowed = STRATEGIES.get(strategy) if isinstance(strategy, str) else None
    granularity = _find_granularity(stored.weight) if stored.weight.format in COMPRESSED_FORMATS else ""
    if not allowed or not granularity or granularity in allowed:
        return None
    return Difference(f"strategy {strategy}", f"a scale for each {granularity}")


def _find_granularity(weight: Weight) -> str:
    """Return what each scale is for: a tensor, channel (row), group of columns or block; empty if several fit."""
    rows, cols = weight.matrix
    if rows == 1:
        return ""
    if weight.block_size is not None:
        return "group" if weight.block_size[0] == 1 else "block" if len(weight.shape) == 2 else ""
    if len(weight.shape) != 2:
        return ""
    if weight.format.endswith("_tensor"):
        return "tensor" if max(rows, cols) > USUAL_BLOCK else ""
    return "channel" if weight.format.endswith("_row") or weight.format == "ct_pack" else ""


def _compare_order(scheme: Scheme, stored: Stored) -> Difference | None:
    """Compare a declared order of columns with the stored one; without it, loaders group neighbouring columns."""
    order = as_object(scheme.fields.get("weights")).get("actorder")
    if (
        order not in REORDERING_VALUES
        or stored.weight.format != "ct_pack"
        or any(entry.name.endswith("g_idx") for entry in stored.parts)
    ):
        return None
    return Difference(f"actorder {order}", "weights without weight_g_idx, the order of columns,")


Comparison = Callable[[Scheme, Stored], Difference | None]
COMPARISONS: tuple[Comparison, ...] = (_compare_bits, _compare_type, _compare_group_size, _compare_algorithm)
COMPRESSED_TENSORS_COMPARISONS: tuple[Comparison, ...] = (_compare_symmetry, _compare_strategy, _compare_order)


def _check_format(declared: Declarations, coded: Sequence[Stored]) -> Iterator[Finding]:
    """Report weights in other formats than their groups declare, or than the checkpoint declares for all groups.

    A group's format takes precedence, so a checkpoint may have weights of other formats than the global one.
    """
    config = declared.config
    groups = [as_object(group) for group in as_object(config.get("config_groups")).values()]
    of_all, *of_each = (name if isinstance(name, str) else None for name in _list_formats(config, groups))
    of_groups = {name or of_all for name in of_each}
    for formats, min_count in ((of_groups, 1), ({of_all}, len(coded))):
        named = {name for name in formats if isinstance(name, str) and name in FORMATS_BY_DECLARATION}
        stored = set().union(*(FORMATS_BY_DECLARATION[name] for name in named))
        other = [item for item in coded if item.weight.format not in stored]
        if named and named == formats and len(other) >= max(1, min_count):
            formats_stored = sorted({item.weight.format for item in other})
            names = [item.name for item in other]
            yield _report(declared.place, f"format {' and '.join(sorted(named))}", " and ".join(formats_stored), names)
            return


def _list_formats(config: JsonFields, groups: Sequence[JsonFields]) -> list[object]:
    return [config.get("format"), *(group.get("format") for group in groups)]


def _check_block_size(declared: Declarations, coded: Sequence[Stored]) -> Iterator[Finding]:
    """Report FP8 blocks whose size is not declared, and declared blocks if whole tensors have a single scale.

    Reference: vllm-project/vllm model_executor/layers/quantization/fp8.py Fp8LinearMethod.create_weights;
    huggingface/transformers@5.24.0 utils/quantization_config.py FineGrainedFP8Config.
    """
    if declared.config.get("quant_method") != "fp8":
        return
    other = [item.name for item in coded if item.weight.format == "fp8_block"]
    if size := declared.config.get("weight_block_size"):
        tensors = [item for item in coded if item.weight.format == "fp8_tensor"]
        large = [item.name for item in tensors if _find_granularity(item.weight)]
        if large and not other:
            yield _report(declared.place, f"weight_block_size {size}", "scales of whole tensors", large)
    elif other:
        stored = "scales of blocks (vLLM then looks for one of each tensor, transformers for blocks of 128 × 128)"
        yield _report(declared.place, "quant_method fp8 without weight_block_size", stored, other)


def compare_declarations(files: Mapping[str, JsonFields]) -> Iterator[Finding]:
    """Report keys that config.json and hf_quant_config.json declare differently."""
    config = as_object(files.get("config.json", {}).get("quantization_config"))
    other = as_object(files.get(MODELOPT_CONFIG, {}).get("quantization"))
    for key in MODELOPT_KEYS:
        there, here = config.get(key), other.get(key)
        if there is not None and here is not None and there != here:
            message = (
                f"config.json declares {key} {display(str(there))}, but {MODELOPT_CONFIG} declares "
                f"{display(str(here))}: some runtimes read one, some the other"
            )
            yield report_mismatch(message, key=key)
