"""Checks of the quantization that config.json declares against the stored tensors."""

from collections.abc import Iterator, Sequence

from quanterr.checkpoints import Checkpoint
from quanterr.findings.codes import make_finding
from quanterr.pairing.model import Pair
from quanterr.report.base import Finding
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import count, display, listed

REMEDY = "correct config.json: loaders that follow it read wrong values or refuse the checkpoint"
MODELOPT = "hf_quant_config.json"
OF_MODELOPT = ("quant_algo", "group_size")  # keys that ModelOpt writes to both files
FLOAT_CODES = frozenset({"F8_E4M3", "F8_E5M2"})
INTEGER_CODES = frozenset({"I8", "I32"})


def check_scheme(quantized: Checkpoint, config: JsonFields, pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Check what compressed-tensors and ModelOpt declare for all quantized weights, and duplicate declarations."""
    groups = [as_object(group) for group in as_object(config.get("config_groups")).values()]
    declared = [as_object(group.get("weights")) for group in groups]
    coded = [pair for pair in pairs if pair.quantized.format.startswith("ct_") and pair.quantized.block_size]
    if len(declared) == 1:
        yield from _check_group_size(declared[0], coded)
        yield from _check_symmetry(declared[0], coded)
    every = [pair for pair in pairs if pair.quantized.has_codes]
    if len({weights.get("type") for weights in declared}) == 1:
        yield from _check_type(declared[0].get("type"), every)
    twice = list(_compare_declarations(quantized.config))
    yield from twice or _check_algorithm(quantized.config, config, every)


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


def _check_type(declared: object, coded: Sequence[Pair]) -> Iterator[Finding]:
    """Report codes whose dtype contradicts the declared type, int or float."""
    wrong = {"int": FLOAT_CODES, "float": INTEGER_CODES}.get(str(declared), frozenset())
    if other := [pair for pair in coded if pair.quantized.codes.dtype in wrong]:
        dtypes = sorted({pair.quantized.codes.dtype for pair in other})
        yield _report_mismatch(f"codes of type {declared}", f"codes of {' or '.join(dtypes)}", other)


def _check_algorithm(files: JsonFields, config: JsonFields, coded: Sequence[Pair]) -> Iterator[Finding]:
    """Report weights that contradict ModelOpt's quant_algo, if it names FP8 or NVFP4, as W4A8_NVFP4_FP8 does."""
    said = str(config.get("quant_algo")).upper()
    name = next((name for name in ("nvfp4", "fp8") if name.upper() in said), None)
    if name and (other := [pair for pair in coded if name not in pair.quantized.format]):
        where = "config.json" if as_object(files.get("config.json")).get("quantization_config") else MODELOPT
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
    other = as_object(as_object(files.get(MODELOPT)).get("quantization"))
    for key in OF_MODELOPT:
        there, here = one.get(key), other.get(key)
        if there is not None and here is not None and there != here:
            message = (
                f"config.json declares {key} {display(str(there))}, but {MODELOPT} declares {display(str(here))}: "
                "some runtimes read one, some the other"
            )
            yield make_finding("config_mismatch", "warning", None, message, REMEDY, key=key)
