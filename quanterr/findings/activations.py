"""Checks of stored scales of activations and of the KV cache, which change no weight, but the model's outputs."""

from collections.abc import Iterator, Sequence

from quanterr.checkpoints import Entry
from quanterr.documents.base import Finding
from quanterr.findings.checks import EACH, HEADERS, QUANTIZED, VALUES, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Contents
from quanterr.findings.neighbours import compare_with_neighbours
from quanterr.findings.ranges import Ranges
from quanterr.formats import is_auxiliary
from quanterr.formats.reading import Reader
from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.pairing import SIDES
from quanterr.pairing.model import Bucket, Pairing
from quanterr.tensors.workspace import read_entry
from quanterr.util.text import count, itemize

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
NO_SCALES = "zero_point", "scaled_fp8"  # endings of auxiliary tensors that are not scales
MAY_BE_ZERO = "activation_scale"  # zero where Gemma's quantizer does not round activations
INPUT_SCALES = "input_scale", "activation_scale", "act_scale"
MAX_SCALE = 1e12  # scales of activations and tables of factors stay below it; scales stay above its inverse
# 1e30 as float32, in rope_freqs: llama.cpp does not rotate dimensions with this factor (Gemma 4).
NOT_ROTATED = 1.0000000150474662e30
MAX_TENSOR_ELEMENTS = 4096  # maximum size of a tensor to read
MAX_ELEMENTS = 1 << 20  # maximum number of elements to read in total


@check(
    *("scale_nonfinite", "scale_negative", "scale_zero", "scale_extreme", "scale_unlike", "bad_table"),
    needs=VALUES,
    of=EACH,
)
def check_activation_scales(contents: Contents) -> Iterator[Finding]:
    """Check activation scales, and other tensors outside of weights, for values that no correct file has."""
    of_none = [
        entry for leftover in contents.leftovers if leftover.bucket == Bucket.CONSUMED for entry in leftover.entries
    ]
    of_weights = [entry for pair in contents.pairing.pairs for entry in pair.other_entries[contents.number]]
    scales = [entry for entry in (*of_weights, *of_none) if is_auxiliary(entry.name)]
    yield from _check_side(contents.side, scales, contents.pairing, contents.reader)
    tables = [entry for entry in of_none if not is_auxiliary(entry.name) and _is_readable(entry)]
    yield from _check_tables(contents.side, tables)


def _check_tables(side: str, entries: list[Entry]) -> Iterator[Finding]:
    """Check tables such as rope_freqs, which are part of no weight but are read by every runtime."""
    bad = []
    for entry in entries:
        table = read_entry(entry).double()
        if not bool(((table.abs() < MAX_SCALE) | (table == NOT_ROTATED)).all()):
            bad.append(entry.name)
    if bad:
        message = (
            f"NaN, infinity or values above {MAX_SCALE:.0e} in {count(len(bad), 'tensor')} of the {side} checkpoint "
            f"outside any weight: {itemize(bad, 3)}"
        )
        yield make_finding("bad_table", "error", None, message, "copy them from the original", tensors=bad)


@check("scale_misfit", needs=HEADERS, of=QUANTIZED)
def check_scale_sizes(contents: Contents) -> Iterator[Finding]:
    """Check that the number of each weight's activation scales divides its rows or columns."""
    odd = [
        f"{entry.name} ({entry.n:,})"
        for stored in contents.weights
        for entry in stored.parts
        if entry.name.endswith(INPUT_SCALES) and entry.n and all(size % entry.n for size in stored.weight.matrix)
    ]
    if odd:
        message = (
            f"activation scales whose number fits neither the rows nor the columns of their weight: {itemize(odd, 3)}"
        )
        yield make_finding("scale_misfit", "warning", None, message, "recalibrate", tensors=odd)


def _check_side(side: str, stored: Sequence[Entry], plan: Pairing, reader: Reader) -> Iterator[Finding]:
    """Check the values of the activation scales of one side."""
    left = MAX_ELEMENTS
    bad: dict[tuple[str, str, str], list[str]] = {
        ("scale_nonfinite", "error", "NaN or infinite"): [],
        ("scale_negative", "warning", "negative"): [],
        ("scale_zero", "warning", "zero"): [],
        ("scale_extreme", "warning", f"above {MAX_SCALE:.0e} or below {1 / MAX_SCALE:.0e}"): [],
    }
    means = {}
    for name, entry in {entry.name: entry for entry in stored if _is_readable(entry)}.items():
        left -= entry.n
        if left < 0:
            break
        scales = ScaleStatistics.compute(reader.iterate_scales(entry))
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
                f"{itemize(names, 3)}"
            )
            remedy = "recalibrate: no weight depends on these scales, but runtimes that use them give wrong outputs"
            yield make_finding(code, severity, None, message, remedy, tensors=names)
    ranges = None if plan.folded else Ranges(plan.pairs, SIDES.index(side), reader)
    of_all = {entry.name for entry in stored}
    yield from compare_with_neighbours(side, means, of_all, plan.pairs, ranges, reader)


def _is_extreme(scales: ScaleStatistics) -> bool:
    """Return True if a nonzero scale is above MAX_SCALE, or below its inverse."""
    sizes = [abs(value) for value in (scales.low, scales.high) if value]
    return any(not 1 / MAX_SCALE <= size <= MAX_SCALE for size in sizes)


def _is_readable(entry: Entry) -> bool:
    """Return True if a tensor holds floats that may be scales, and few enough to be read."""
    return entry.dtype in FLOATS and 0 < entry.n <= MAX_TENSOR_ELEMENTS and not entry.name.endswith(NO_SCALES)
