"""Stored scales of activations and of the KV cache: they change no weight, and break the model anyway."""

from collections.abc import Iterator

import torch

from quanterr.checkpoints import Entry
from quanterr.findings.codes import finding
from quanterr.formats import is_auxiliary
from quanterr.formats.shared.scale_grid import chunks_of_scale
from quanterr.formats.shared.scale_statistics import Scales
from quanterr.pairing import SIDES
from quanterr.pairing.plan import Bucket, Plan
from quanterr.report.model import Finding
from quanterr.tensors.workspace import Workspace
from quanterr.util.text import count, listed

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
NO_SCALES = "zero_point", "scaled_fp8"  # endings of the others that change no weight
MAY_BE_ZERO = "activation_scale"  # where Gemma's quantizer rounds no activation
MOST_EACH = 4096  # elements of one
MOST = 1 << 20  # and of all that are read


def of_activations(plan: Plan) -> Iterator[Finding]:
    """Scales of activations that are not finite, negative or zero."""
    for side in SIDES:
        yield from _of_side(side, _stored(plan, side))


def _of_side(side: str, entries: dict[str, Entry]) -> Iterator[Finding]:
    workspace, left = Workspace(torch.device("cpu")), MOST
    bad: dict[tuple[str, str, str], list[str]] = {
        ("scale_nonfinite", "error", "NaN or infinite"): [],
        ("scale_negative", "warning", "negative"): [],
        ("scale_zero", "warning", "zero"): [],
    }
    for name, entry in entries.items():
        left -= entry.n
        if left < 0:
            break
        scales = Scales.of(chunks_of_scale(entry, workspace))
        zero = 0 if name.endswith(MAY_BE_ZERO) else scales.zero
        for names, n in zip(bad.values(), (scales.nonfinite, scales.negative, zero), strict=True):
            if n:
                names.append(name)
    for (code, severity, what), names in bad.items():
        if names:
            message = (
                f"scales of activations that are {what}, in {count(len(names), 'tensor')} of the {side} checkpoint: "
                f"{listed(names, 3)}"
            )
            remedy = "no weight depends on them, but runtimes that use them are broken: calibrate again"
            yield finding(code, severity, None, message, remedy, tensors=names)


def _stored(plan: Plan, side: str) -> dict[str, Entry]:
    """Entries of a side that hold such scales, by name."""
    at = SIDES.index(side)
    consumed = [entry for pair in plan.pairs for entry in pair.consumed[at]]
    consumed += [
        entry
        for leftover in plan.leftovers
        if leftover.side == side and leftover.bucket == Bucket.CONSUMED
        for entry in leftover.entries
    ]
    return {entry.name: entry for entry in consumed if _is_scale(entry)}


def _is_scale(entry: Entry) -> bool:
    return (
        entry.dtype in FLOATS
        and 0 < entry.n <= MOST_EACH
        and is_auxiliary(entry.name)
        and not entry.name.endswith(NO_SCALES)
    )
