"""Checks of scales of activations and of the KV cache against the same module in other blocks.

No weight depends on these scales, so errors of weights do not show a wrong one. Calibrated scales differ by a factor of
about 100 between blocks, and by more between experts. Those of SmolLM2-135M (30 layers) differ from the median over
blocks by a factor of up to 5 (k, and inputs of q), 9 (v, and inputs of o) and 13 (inputs of gate), but the inputs of
three down_proj are 30 to 200 times the median, because of massive activations. So smaller deviations are judged by the
bounds that norms and weights give (ranges.py); where these are unknown, only modules without massive activations are
judged.
"""

import struct
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import exp, log
from statistics import median

from quanterr.documents.base import Finding
from quanterr.findings.codes import make_finding
from quanterr.findings.limits import CHANCE_DEVIATIONS, MIN_PEERS, OUTLIER_FACTOR
from quanterr.findings.ranges import Ranges
from quanterr.formats.reading import Reader
from quanterr.pairing import SIDES
from quanterr.pairing.model import Pair
from quanterr.selection.roles import role_of, without_numbers
from quanterr.util.text import count, itemize

EXPERT_OUTLIER_FACTOR = 1e4  # factor from the median of the other experts; OUTLIER_FACTOR is for other weights
DOUBTFUL_FACTOR = 8.0  # factor from the median of the others above which bounds from norms and weights are computed
EVEN_MODULE_FACTOR = 30.0  # factor from the median of the others, for EVEN_MODULES where these bounds are unknown
# Last words of modules whose inputs have no massive activations.
EVEN_MODULES = frozenset(
    ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "query_key_value")
)
CACHE_SCALES = ("k_scale", "v_scale", "kv_scale", "k_cache_scale", "v_cache_scale")
MAX_CACHE_SCALE = 1e5  # no key or value is as large as this times the largest FP8 code
BF16_STEP = 1 << 16  # BF16 lacks the low 16 bits of a float32
REMEDY = "recalibrate: no weight depends on these scales, but runtimes that use them give wrong outputs"

Descriptions = dict[str, str]  # name of a scale → its description in a message


def compare_with_neighbours(
    side: str,
    scales: Mapping[str, float],
    stored: Collection[str],
    pairs: Sequence[Pair],
    ranges: Ranges | None,
    reader: Reader,
) -> Iterator[Finding]:
    """Report scales of one side that differ from their neighbours.

    Args:
        side: original or quantized.
        scales: name → mean of the finite, positive scales.
        stored: names of all scales, whatever their values.
        pairs: the paired weights.
        ranges: the ranges that norms and weights allow; None if folding has changed these.
        reader: reads the scales of weights.
    """
    if not scales:  # without scales in any block, none counts as missing
        return
    groups, number = _group_scales(scales), SIDES.index(side)
    far: Descriptions = {}
    for group in groups:
        far |= _find_far(group) or _find_implausible(group, ranges)
    huge = {name: f"{name} ({value:.3g})" for name, value in scales.items() if _is_huge(name, value)}
    missing = _find_missing(groups, stored, pairs, number)
    equal = _find_copied(scales, pairs, number, reader)
    for descriptions, what in (
        (far, f"far from their neighbours in {count(len(far), 'tensor')}"),
        (huge, f"above {MAX_CACHE_SCALE:.0e} for {count(len(huge), 'tensor')} of the KV cache"),
        (missing, f"missing for {count(len(missing), 'layer')}, unlike for the same layers of other blocks"),
        (equal, f"equal to the scale of the weight in {count(len(equal), 'tensor')}, unlike in others"),
    ):
        if descriptions:
            message = (
                f"activation scales of the {side} checkpoint are {what}: {itemize(list(descriptions.values()), 3)}"
            )
            yield make_finding("scale_unlike", "warning", None, message, REMEDY, tensors=list(descriptions))


def _split_name(name: str) -> tuple[str, str]:
    """Split the name of a scale into its module and its ending."""
    module, _, ending = name.rpartition(".")
    return module, ending


def _group_scales(scales: Mapping[str, float]) -> list[dict[str, float]]:
    """Group the scales of the same module in all blocks; small groups are joined by role."""
    by_module: dict[tuple[str, str], dict[str, float]] = {}
    by_role: dict[tuple[str, str], dict[str, float]] = {}
    for name, value in scales.items():
        module, ending = _split_name(name)
        by_module.setdefault((without_numbers(module), ending), {})[name] = value
    for (_, ending), group in by_module.items():
        if len(group) < MIN_PEERS:
            by_role.setdefault((role_of(next(iter(group))), ending), {}).update(group)
    return [*(group for group in by_module.values() if len(group) >= MIN_PEERS), *by_role.values()]


def _find_far(group: Mapping[str, float]) -> Descriptions:
    """Return the scales whose factor from both middle values of the others exceeds the limit."""
    far, values = {}, sorted(group.values())
    for name, value in group.items():
        if len(values) < 2 or values[-1] <= OUTLIER_FACTOR * values[0]:  # the common case
            break
        limit = EXPERT_OUTLIER_FACTOR if role_of(name) == "experts" else OUTLIER_FACTOR
        low, high = _find_middle_without(values, bisect_left(values, value))
        if not low / limit <= value <= high * limit:
            far[name] = f"{name} ({value:.3g}; the others' median is {low if value < low else high:.3g})"
    return far


def _find_implausible(group: Mapping[str, float], ranges: Ranges | None) -> Descriptions:
    """Return the scales that differ from their peers and do not fit the range of the numbers that they scale."""
    implausible: Descriptions = {}
    logs = sorted(log(value) for value in group.values())
    if len(logs) < 2 or logs[-1] - logs[0] <= log(DOUBTFUL_FACTOR):  # the common case
        return implausible
    is_one_module = len(set(map(without_numbers, group))) == 1
    for name, value in group.items():
        if role_of(name) == "experts":  # calibration may have sent few tokens to an expert
            continue
        others = list(logs)
        others.remove(log(value))
        middle = median(others)
        if abs(log(value) - middle) <= log(DOUBTFUL_FACTOR):
            continue
        allowed, reach = (None, None) if ranges is None else (ranges.find_range(name), ranges.find_reach(name, value))
        if allowed is None or reach is None:
            if is_one_module and _is_apart(name, log(value), middle, others):
                implausible[name] = f"{name} ({value:.3g}; the others' median is {exp(middle):.3g})"
        elif reach > 2 * allowed.limit:
            implausible[name] = (
                f"{name} ({value:.3g}, for numbers up to {reach:.3g}: weights allow {allowed.limit:.3g} at most)"
            )
        elif reach < allowed.usual:
            implausible[name] = (
                f"{name} ({value:.3g}, which clips numbers at {reach:.3g}: by its weights, most are about "
                f"{allowed.usual:.3g})"
            )
    return implausible


def _is_apart(name: str, value: float, middle: float, others: Sequence[float]) -> bool:
    """Return True if the logarithm of a scale is far from the others', and massive activations do not explain it."""
    module, ending = _split_name(name)
    word = _split_name(module)[1]
    is_even = ending in CACHE_SCALES or word in EVEN_MODULES
    limit = max(log(EVEN_MODULE_FACTOR), CHANCE_DEVIATIONS * median(abs(other - middle) for other in others))
    too_small = middle - value > limit and (is_even or word == "down_proj")
    return len(others) >= MIN_PEERS and (too_small or (is_even and value - middle > limit))


def _find_middle_without(values: Sequence[float], left_out: int) -> tuple[float, float]:
    """Return the two middle values of sorted values without element ``left_out``, or a single one twice."""
    n = len(values) - 1
    low, high = (values[at + (at >= left_out)] for at in ((n - 1) // 2, n // 2))
    return low, high


def _is_huge(name: str, value: float) -> bool:
    """Return True for a KV cache scale that is larger than any key or value needs."""
    return _split_name(name)[1] in CACHE_SCALES and value > MAX_CACHE_SCALE


def _find_missing(
    groups: Sequence[Mapping[str, float]], stored: Collection[str], pairs: Sequence[Pair], side: int
) -> Descriptions:
    """Return the scales missing from modules whose counterparts in other blocks have one."""
    contents_by_module = _classify_modules(pairs, side)
    missing: Descriptions = {}
    for group in groups:
        places = [_split_name(name) for name in group]
        having, endings = {module for module, _ in places}, {ending for _, ending in places}
        keys = {_make_key(module, contents_by_module[module]) for module in having if module in contents_by_module}
        lacking = [
            module
            for module, content in contents_by_module.items()
            if module not in having and _make_key(module, content) in keys
        ]
        if 2 * len(lacking) < len(having):
            names = [f"{module}.{ending}" for module in lacking for ending in endings]
            missing |= {name: name for name in names if name not in stored}
    return missing


def _make_key(module: str, content: object) -> tuple[str, object]:
    """Return a key that corresponding modules of all blocks share."""
    return without_numbers(module), content


def _classify_modules(pairs: Sequence[Pair], side: int) -> dict[str, object]:
    """Map modules to the formats of their codes, and parent modules to the names of their children."""
    formats: dict[str, object] = {}
    inner: dict[str, set[str]] = {}
    for pair in pairs:
        weight = (pair.original, pair.quantized)[side]
        module = _split_name(pair.codes[side][0].name)[0]
        above, name = _split_name(module)
        if weight.has_codes:
            formats[module] = weight.format
        inner.setdefault(above, set()).add(name)
    return {module: frozenset(names) for module, names in inner.items()} | formats


def _find_copied(scales: Mapping[str, float], pairs: Sequence[Pair], side: int, reader: Reader) -> Descriptions:
    """Return the activation scales that equal their weight's scale in every digit.

    If half of them or more are equal, none is returned: convert_to_quant copies all scales.
    """
    equal, compared = {}, 0
    for pair in pairs:
        weight = (pair.original, pair.quantized)[side]
        weight_scales = [entry for entry in weight.parts.values() if entry.n == 1 and entry.dtype == "F32"]
        for name in (entry.name for entry in pair.other_entries[side] if entry.n == 1 and entry.name in scales):
            values = {reader.read_number(entry) for entry in weight_scales}
            compared += bool(values)
            if scales[name] in values and _has_many_digits(scales[name]):
                equal[name] = f"{name} ({scales[name]:.3g})"
    return equal if 2 * len(equal) < compared else {}


def _has_many_digits(value: float) -> bool:
    """Return True if a float32 is not a BF16 value; two BF16 values may be equal by chance."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits % BF16_STEP != 0
