"""Checks of stored scales of activations and of the KV cache: no weight depends on them, but the model does."""

from collections.abc import Iterator, Mapping, Sequence

from quanterr.checkpoints import Entry
from quanterr.documents.base import Finding
from quanterr.findings.codes import make_finding
from quanterr.findings.neighbours import compare_with_neighbours
from quanterr.findings.ranges import Ranges
from quanterr.formats import is_auxiliary
from quanterr.formats.shared.scale_grid import iterate_scales
from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.lazy_torch import torch
from quanterr.pairing import SIDES
from quanterr.pairing.inputs import CacheScales
from quanterr.pairing.model import Bucket, Pairing
from quanterr.tensors.workspace import Workspace
from quanterr.util.text import count, display, listed

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
NO_SCALES = "zero_point", "scaled_fp8"  # endings of auxiliary tensors that are not scales
MAY_BE_ZERO = "activation_scale"  # zero where Gemma's quantizer does not round activations
OF_INPUTS = "input_scale", "activation_scale", "act_scale"
MOST_SCALE = 1e12  # scales of activations and tables of factors stay below it; scales stay above its inverse
# 1e30 as float32, in rope_freqs: llama.cpp rotates these dimensions by nothing (Gemma 4).
NOT_ROTATED = 1.0000000150474662e30
# What is missing of a KV cache → what vLLM or other runtimes do (see find_cache_scales).
WITHOUT_SCALES = {
    "keys": "vLLM refuses the file",
    "values": "vLLM uses those of keys",
    "keys and values": "runtimes use 1",
    "keys or values": "runtimes use 1 or another scale, or refuse",
}
MOST_EACH = 4096  # most elements of a tensor to read
MOST = 1 << 20  # most elements to read in total


def check_activation_scales(plan: Pairing) -> Iterator[Finding]:
    """Check activation scales, and other tensors that belong to no weight, for values that cannot be right."""
    for side in SIDES:
        of_none = _entries_of_no_weight(plan, side)
        scales = [entry for entry in (*_entries_of_weights(plan, side), *of_none) if is_auxiliary(entry.name)]
        yield from _check_side(side, scales, plan)
        tables = [entry for entry in of_none if not is_auxiliary(entry.name) and _is_readable(entry)]
        yield from _check_tables(side, tables)
    yield from _check_sizes(plan)


def report_missing_input_scales(names: list[str]) -> Iterator[Finding]:
    """Report the FP8 layers of ComfyUI in ``names``, which have no input scale."""
    if names:
        message = (
            f"{count(len(names), 'layer')} in FP8 without input_scale: {listed(names, 3)}; ComfyUI uses a scale of 1 "
            "and clamps inputs at 448"
        )
        remedy = "calibrate an input_scale, or set full_precision_matrix_mult"
        yield make_finding("no_input_scale", "info", None, message, remedy, layers=names)


def report_absent_scales(weights: Mapping[str, str], is_calibrated: bool) -> Iterator[Finding]:
    """Report declared static scales of inputs that are not stored.

    ``weights`` maps names of weights to their missing tensors; ``is_calibrated`` states whether other weights have a
    scale.
    """
    if weights:
        names, missing = list(weights), listed(list(dict.fromkeys(weights.values())), 3)
        message = (
            f"static scales of inputs are declared, but {missing} is missing for {count(len(names), 'weight')}: "
            f"{listed(names, 3)}"
        )
        if not is_calibrated:
            message += "; as no weight has one, a runtime does not quantize the inputs (W4A16 for W4A4), or refuses"
        remedy = "recalibrate, or declare dynamic activations; otherwise runtimes refuse the file or use a scale of 1"
        yield make_finding("missing_input_scale", "warning", None, message, remedy, layers=names)


def report_cache_scales(cache: CacheScales) -> Iterator[Finding]:
    """Report what is wrong with the scales that are stored for a KV cache, and which are not stored."""
    remedy = "calibrate k_scale and v_scale"
    if names := list(cache.missing):
        kinds = dict.fromkeys(cache.missing.values())
        what = next(iter(kinds)) if len(kinds) == 1 else "keys or values"
        there = "an FP8 KV cache is declared" if cache.is_declared else "the other modules have scales of a KV cache"
        message = (
            f"{there}, but scales of {what} are missing for "
            f"{count(len(names), 'attention module')}: {listed(names, 3)}; {WITHOUT_SCALES[what]}"
        )
        yield make_finding("missing_kv_scale", "warning", None, message, remedy, modules=names)
    if cache.shared:
        message = (
            f"keys and values share one scale, kv_scale, in {count(len(cache.shared), 'attention module')}: "
            f"{listed(cache.shared, 3)}; vLLM uses it for both, and calls that deprecated"
        )
        yield make_finding("missing_kv_scale", "info", None, message, remedy, modules=cache.shared)
    if (names := [one.name for one in cache.several]) and not cache.of_heads:
        shown = listed([f"{one.name} ({one.n:,})" for one in cache.several], 3)
        message = (
            f"scales of keys or values hold several numbers in {count(len(names), 'tensor')}, where one was declared: "
            f"{shown}; vLLM refuses them"
        )
        yield make_finding("scale_misfit", "warning", None, message, "store one scale per module", tensors=names)


def report_lone_rotations(reasons: Mapping[str, str]) -> Iterator[Finding]:
    """Report rotations of weights without a counterpart; ``reasons`` maps names of transforms to reasons."""
    for name, why in reasons.items():
        message = f"config.json declares the transform {display(name)}: {why}; the weights stay rotated at run time"
        remedy = "export the model again with both sides of the transform, and with its matrix"
        yield make_finding("missing_rotation", "warning", None, message, remedy, transform=name)


def _check_tables(side: str, entries: list[Entry]) -> Iterator[Finding]:
    """Check tables such as rope_freqs, which are part of no weight but are read by every runtime."""
    workspace = Workspace(torch.device("cpu"))
    bad = []
    for entry in entries:
        table = workspace.read("table", entry, 0, (entry.n,)).double()
        if not bool(((table.abs() < MOST_SCALE) | (table == NOT_ROTATED)).all()):
            bad.append(entry.name)
    if bad:
        message = (
            f"NaN, infinity or values above {MOST_SCALE:.0e} in {count(len(bad), 'tensor')} of the {side} checkpoint "
            f"outside any weight: {listed(bad, 3)}"
        )
        yield make_finding("bad_table", "error", None, message, "copy them from the original", tensors=bad)


def _check_sizes(plan: Pairing) -> Iterator[Finding]:
    """Check that the number of each weight's activation scales divides its rows or columns."""
    odd = [
        f"{entry.name} ({entry.n:,})"
        for pair in plan.pairs
        for entry in pair.quantized_consumed
        if entry.name.endswith(OF_INPUTS) and entry.n and all(size % entry.n for size in pair.quantized.matrix)
    ]
    if odd:
        message = (
            f"activation scales whose number fits neither the rows nor the columns of their weight: {listed(odd, 3)}"
        )
        yield make_finding("scale_misfit", "warning", None, message, "recalibrate", tensors=odd)


def _check_side(side: str, stored: Sequence[Entry], plan: Pairing) -> Iterator[Finding]:
    """Check the values of the activation scales of one side."""
    workspace, left = Workspace(torch.device("cpu")), MOST
    bad: dict[tuple[str, str, str], list[str]] = {
        ("scale_nonfinite", "error", "NaN or infinite"): [],
        ("scale_negative", "warning", "negative"): [],
        ("scale_zero", "warning", "zero"): [],
        ("scale_extreme", "warning", f"above {MOST_SCALE:.0e} or below {1 / MOST_SCALE:.0e}"): [],
    }
    means = {}
    for name, entry in {entry.name: entry for entry in stored if _is_readable(entry)}.items():
        left -= entry.n
        if left < 0:
            break
        scales = ScaleStatistics.compute(iterate_scales(entry, workspace))
        zero = 0 if name.endswith(MAY_BE_ZERO) else scales.zero
        extreme = scales.number and not scales.nonfinite and not zero and _is_extreme(scales)
        for names, n in zip(bad.values(), (scales.nonfinite, scales.negative, zero, extreme), strict=True):
            if n:
                names.append(name)
        if scales.mean and not (scales.nonfinite or scales.negative or extreme):
            means[name] = scales.mean
    for (code, severity, what), names in bad.items():
        if names:
            message = (
                f"activation scales are {what} in {count(len(names), 'tensor')} of the {side} checkpoint: "
                f"{listed(names, 3)}"
            )
            remedy = "recalibrate: no weight depends on these scales, but runtimes that use them give wrong outputs"
            yield make_finding(code, severity, None, message, remedy, tensors=names)
    ranges = None if plan.folded else Ranges(plan.pairs, SIDES.index(side), workspace)
    of_all = {entry.name for entry in stored}
    yield from compare_with_neighbours(side, means, of_all, plan.pairs, ranges, workspace)


def _is_extreme(scales: ScaleStatistics) -> bool:
    """Return True if a nonzero scale is above MOST_SCALE, or below its inverse."""
    sizes = [abs(value) for value in (scales.low, scales.high) if value]
    return any(not 1 / MOST_SCALE <= size <= MOST_SCALE for size in sizes)


def _entries_of_weights(plan: Pairing, side: str) -> list[Entry]:
    """Return the tensors stored with the weights of a side."""
    return [entry for pair in plan.pairs for entry in pair.consumed[SIDES.index(side)]]


def _entries_of_no_weight(plan: Pairing, side: str) -> list[Entry]:
    """Return the known tensors of a side that belong to no weight."""
    known = (one for one in plan.leftovers if one.side == side and one.bucket == Bucket.CONSUMED)
    return [entry for leftover in known for entry in leftover.entries]


def _is_readable(entry: Entry) -> bool:
    """Return True if a tensor holds floats that may be scales, and few enough to be read."""
    return entry.dtype in FLOATS and 0 < entry.n <= MOST_EACH and not entry.name.endswith(NO_SCALES)
