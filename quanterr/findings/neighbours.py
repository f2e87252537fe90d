"""Stored scales of activations and of the KV cache, held against those of the same module in other blocks.

No weight depends on them, so nothing else tells a wrong one. Calibrated ones differ by 100 or so between blocks, those
of experts by more.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from quanterr.findings.codes import finding
from quanterr.formats.shared.scale_grid import chunks_of_scale
from quanterr.pairing import SIDES
from quanterr.pairing.model import Pair
from quanterr.report.base import Finding
from quanterr.roles import role_of, without_numbers
from quanterr.tensors.workspace import Workspace
from quanterr.util.text import count, listed

APART, EXPERTS_APART = 1e3, 1e4  # times the median of the others, or a part of it
FEW = 3  # of fewer in a group, all of their role are neighbours
OF_CACHE = ("k_scale", "v_scale", "kv_scale", "k_cache_scale", "v_cache_scale")
MOST_OF_CACHE = 1e5  # times the largest code of FP8: no key or value is that large
LOW_BITS = 1 << 16  # of float32: what BF16 lacks
REMEDY = "no weight depends on them, but runtimes that use them compute otherwise: calibrate again"

Found = dict[str, str]  # name → the same, with what is wrong


def of_neighbours(side: str, scales: Mapping[str, float], pairs: Sequence[Pair], read: Workspace) -> Iterator[Finding]:
    """What tells wrong scales of a side; ``scales``: name → mean of those that are finite and positive."""
    groups, number = _groups(scales), SIDES.index(side)
    far: Found = {}
    for group in groups:
        far |= _far(group)
    huge = {name: f"{name} ({value:.3g})" for name, value in scales.items() if _is_huge(name, value)}
    missing = _missing(groups, pairs, number)
    equal = _equal(scales, pairs, number, read)
    for found, what in (
        (far, f"far from their neighbours' in {count(len(far), 'tensor')}"),
        (huge, f"above {MOST_OF_CACHE:.0e} for {count(len(huge), 'tensor')} of the KV cache"),
        (missing, f"missing of {count(len(missing), 'layer')}, others like them have one"),
        (equal, f"the same as the scale of the weight in {count(len(equal), 'tensor')}, unlike in others"),
    ):
        if found:
            message = f"scales of activations of the {side} checkpoint are {what}: {listed(list(found.values()), 3)}"
            yield finding("scale_unlike", "warning", None, message, REMEDY, tensors=list(found))


def _place(name: str) -> tuple[str, str]:
    """The module of a scale, and what it scales."""
    module, _, ending = name.rpartition(".")
    return module, ending


def _groups(scales: Mapping[str, float]) -> list[dict[str, float]]:
    """Scales of one module in all blocks; of a role where these are few."""
    by_module: dict[tuple[str, str], dict[str, float]] = {}
    by_role: dict[tuple[str, str], dict[str, float]] = {}
    for name, value in scales.items():
        module, ending = _place(name)
        by_module.setdefault((without_numbers(module), ending), {})[name] = value
    for (_, ending), group in by_module.items():
        if len(group) < FEW:
            by_role.setdefault((role_of(next(iter(group))), ending), {}).update(group)
    return [*(group for group in by_module.values() if len(group) >= FEW), *by_role.values()]


def _far(group: Mapping[str, float]) -> Found:
    """Those far from both values in the middle of the others."""
    found, values = {}, sorted(group.values())
    for name, value in group.items():
        if len(values) < 2 or values[-1] <= APART * values[0]:  # most often
            break
        limit = EXPERTS_APART if role_of(name) == "experts" else APART
        low, high = _middle_but(values, bisect_left(values, value))
        if not low / limit <= value <= high * limit:
            found[name] = f"{name} ({value:.3g}; the others' median is {low if value < low else high:.3g})"
    return found


def _middle_but(values: Sequence[float], left_out: int) -> tuple[float, float]:
    """The two values in the middle, or twice the one, of sorted values without one of them."""
    n = len(values) - 1
    low, high = (values[at + (at >= left_out)] for at in ((n - 1) // 2, n // 2))
    return low, high


def _is_huge(name: str, value: float) -> bool:
    return _place(name)[1] in OF_CACHE and value > MOST_OF_CACHE


def _missing(groups: Sequence[Mapping[str, float]], pairs: Sequence[Pair], side: int) -> Found:
    """Modules like those that have a scale, and without one, where they are few."""
    kinds = _kinds(pairs, side)
    found: Found = {}
    for group in groups:
        places = [_place(name) for name in group]
        having, endings = {module for module, _ in places}, {ending for _, ending in places}
        like = {_likeness(module, kinds[module]) for module in having if module in kinds}
        lacking = [module for module, kind in kinds.items() if module not in having and _likeness(module, kind) in like]
        if 2 * len(lacking) < len(having):
            found |= {f"{module}.{ending}": f"{module}.{ending}" for module in lacking for ending in endings}
    return found


def _likeness(module: str, kind: object) -> tuple[str, object]:
    """What modules of all blocks have in common that have the same scales."""
    return without_numbers(module), kind


def _kinds(pairs: Sequence[Pair], side: int) -> dict[str, object]:
    """Module → the format of its codes; what holds such modules → their names."""
    found: dict[str, object] = {}
    inner: dict[str, set[str]] = {}
    for pair in pairs:
        weight = (pair.original, pair.quantized)[side]
        module = _place(pair.codes[side][0].name)[0]
        above, name = _place(module)
        if weight.has_codes:
            found[module] = weight.format
        inner.setdefault(above, set()).add(name)
    return {module: frozenset(names) for module, names in inner.items()} | found


def _equal(scales: Mapping[str, float], pairs: Sequence[Pair], side: int, read: Workspace) -> Found:
    """Those that are the scale of their weight, digit for digit, where most are not: convert_to_quant copies all."""
    equal, compared = {}, 0
    for pair in pairs:
        weight = (pair.original, pair.quantized)[side]
        own = [entry for entry in weight.parts.values() if entry.n == 1 and entry.dtype == "F32"]
        for name in (entry.name for entry in pair.consumed[side] if entry.n == 1 and entry.name in scales):
            values = {float(next(chunks_of_scale(entry, read))) for entry in own}
            compared += bool(values)
            if scales[name] in values and _has_many_digits(scales[name]):
                equal[name] = f"{name} ({scales[name]:.3g})"
    return equal if 2 * len(equal) < compared else {}


def _has_many_digits(value: float) -> bool:
    """Whether it is no number of BF16, of which two may be the same by chance."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits % LOW_BITS != 0
