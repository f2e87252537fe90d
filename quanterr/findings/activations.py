"""Stored scales of activations and of the KV cache: they change no weight, and break the model anyway."""

from collections.abc import Iterator, Sequence

import torch

from quanterr.checkpoints import Entry
from quanterr.findings.codes import finding
from quanterr.findings.neighbours import of_neighbours
from quanterr.formats import is_auxiliary
from quanterr.formats.shared.scale_grid import chunks_of_scale
from quanterr.formats.shared.scale_statistics import Scales
from quanterr.pairing import SIDES
from quanterr.pairing.model import Bucket, Pair, Pairing
from quanterr.report.base import Finding
from quanterr.tensors.workspace import Workspace
from quanterr.util.text import count, listed

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
NO_SCALES = "zero_point", "scaled_fp8"  # endings of the others that change no weight
MAY_BE_ZERO = "activation_scale"  # where Gemma's quantizer rounds no activation
OF_INPUTS = "input_scale", "activation_scale", "act_scale"
LEAST_SCALE, MOST_SCALE = 1e-12, 1e12  # of activations: beyond, no activation is
HUGE = 1e9  # of a table of frequencies or factors
MOST_EACH = 4096  # elements of one
MOST = 1 << 20  # and of all that are read


def of_activations(plan: Pairing) -> Iterator[Finding]:
    """Scales of activations, and other tensors that are part of no weight, that cannot be right."""
    for side in SIDES:
        of_none = _of_none(plan, side)
        scales = [entry for entry in (*_of_weights(plan, side), *of_none) if is_auxiliary(entry.name)]
        yield from _of_side(side, {entry.name: entry for entry in scales if _is_small(entry)}, plan.pairs)
        tables = [entry for entry in of_none if not is_auxiliary(entry.name) and _is_small(entry)]
        yield from _of_tables(side, tables)
    yield from _of_sizes(plan)


def no_input_scale(names: list[str]) -> Iterator[Finding]:
    """FP8 layers of ComfyUI without a scale of their inputs."""
    if names:
        message = (
            f"{count(len(names), 'layer')} in FP8 without input_scale: {listed(names, 3)}; ComfyUI takes a scale of 1 "
            "and clamps inputs at 448"
        )
        remedy = "calibrate an input_scale, or set full_precision_matrix_mult"
        yield finding("no_input_scale", "info", None, message, remedy, layers=names)


def _of_tables(side: str, entries: list[Entry]) -> Iterator[Finding]:
    """Tables such as rope_freqs, which no weight depends on and each runtime reads."""
    workspace = Workspace(torch.device("cpu"))
    bad = []
    for entry in entries:
        table = workspace.read("table", entry, 0, (entry.n,)).double()
        if not bool((table.abs() < HUGE).all()):
            bad.append(entry.name)
    if bad:
        message = (
            f"NaN, infinite or above {HUGE:.0e} in {count(len(bad), 'tensor')} of the {side} checkpoint that belong to "
            f"no weight: {listed(bad, 3)}"
        )
        yield finding("bad_table", "error", None, message, "copy them from the original", tensors=bad)


def _of_sizes(plan: Pairing) -> Iterator[Finding]:
    """Scales of activations that are neither one nor one for each, or some, of the rows or columns of their weight."""
    odd = [
        f"{entry.name} ({entry.n:,})"
        for pair in plan.pairs
        for entry in pair.consumed[1]
        if entry.name.endswith(OF_INPUTS) and entry.n and all(size % entry.n for size in pair.quantized.matrix)
    ]
    if odd:
        message = f"scales of activations whose number fits neither rows nor columns of their weight: {listed(odd, 3)}"
        yield finding("scale_misfit", "warning", None, message, "calibrate again", tensors=odd)


def _of_side(side: str, entries: dict[str, Entry], pairs: Sequence[Pair]) -> Iterator[Finding]:
    workspace, left = Workspace(torch.device("cpu")), MOST
    bad: dict[tuple[str, str, str], list[str]] = {
        ("scale_nonfinite", "error", "NaN or infinite"): [],
        ("scale_negative", "warning", "negative"): [],
        ("scale_zero", "warning", "zero"): [],
        ("scale_extreme", "warning", f"above {MOST_SCALE:.0e} or below {LEAST_SCALE:.0e}"): [],
    }
    means = {}
    for name, entry in entries.items():
        left -= entry.n
        if left < 0:
            break
        scales = Scales.of(chunks_of_scale(entry, workspace))
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
                f"scales of activations that are {what}, in {count(len(names), 'tensor')} of the {side} checkpoint: "
                f"{listed(names, 3)}"
            )
            remedy = "no weight depends on them, but runtimes that use them are broken: calibrate again"
            yield finding(code, severity, None, message, remedy, tensors=names)
    yield from of_neighbours(side, means, pairs, workspace)


def _is_extreme(scales: Scales) -> bool:
    sizes = [abs(value) for value in (scales.low, scales.high) if value]
    return any(not LEAST_SCALE <= size <= MOST_SCALE for size in sizes)


def _of_weights(plan: Pairing, side: str) -> list[Entry]:
    """What is stored beside the weights of a side."""
    return [entry for pair in plan.pairs for entry in pair.consumed[SIDES.index(side)]]


def _of_none(plan: Pairing, side: str) -> list[Entry]:
    """What is known and is part of no weight of a side."""
    known = (one for one in plan.leftovers if one.side == side and one.bucket == Bucket.CONSUMED)
    return [entry for leftover in known for entry in leftover.entries]


def _is_small(entry: Entry) -> bool:
    """Whether it holds numbers, few enough to be read, that are scales or the like."""
    return entry.dtype in FLOATS and 0 < entry.n <= MOST_EACH and not entry.name.endswith(NO_SCALES)
