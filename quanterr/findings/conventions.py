"""Weights that fit the original better if they are not decoded as their format's convention prescribes."""

from collections.abc import Iterator, Sequence
from math import log10

from quanterr.documents.base import Finding
from quanterr.findings.checks import RESULT, WEIGHTS, check
from quanterr.findings.codes import make_finding
from quanterr.findings.layers import AllWeights
from quanterr.pairing.model import Pair
from quanterr.util.text import count, display, itemize

SMALLEST_ERROR = 1e-10  # relative errors below this are shown as 200 dB


@check("wrong_convention", needs=RESULT, of=WEIGHTS)
def check_conventions(weights: AllWeights) -> Iterator[Finding]:
    """Report weights that fit the original better under another convention, with one finding per convention."""
    contradicted: dict[tuple[str, str], list[Pair]] = {}
    for pair in weights.pairing.pairs:
        if pair.contradiction is not None:
            contradicted.setdefault(pair.contradiction[:2], []).append(pair)
    for (prescribed, other), pairs in contradicted.items():
        names = [pair.name for pair in pairs]
        errors = [pair.contradiction for pair in pairs if pair.contradiction is not None]
        first, second = (
            [-20 * log10(max(error, SMALLEST_ERROR)) for error in side_errors]
            for side_errors in zip(*((error.prescribed_error, error.other_error) for error in errors), strict=True)
        )
        layer = names[0] if len(names) == 1 else None
        whose = display(names[0]) if layer else f"{count(len(names), 'weight')} ({itemize(names, 3)})"
        message = (
            f"{whose}: {format_range(first)} with {prescribed}, which is how it will be loaded; {format_range(second)} "
            f"with {other}, on a sample"
        )
        remedy = "convert or quantize again with a program that writes what is loaded"
        yield make_finding(
            "wrong_convention", "error", layer, message, remedy,
            layers=names, prescribed=prescribed, other=other, snr_db=min(first), snr_db_other=min(second),
        )  # fmt: skip


def format_range(levels: Sequence[float]) -> str:
    """Return ``12.3 dB``, or ``12.3 to 45.6 dB`` if the levels differ in the digits shown."""
    low, high = f"{min(levels):.1f}", f"{max(levels):.1f}"
    return f"{low} dB" if low == high else f"{low} to {high} dB"
