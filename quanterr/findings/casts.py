"""Tensors that the original keeps in F32 among 16-bit weights, but the quantized checkpoint stores in fewer bits.

Models compute some things in F32 on purpose: the routing of experts and its correction biases, the decay of recurrent
layers (A_log, dt_bias, D), the mixing of hyper-connections. If the original's other weights have 16 bits, the F32 of
these tensors is on purpose; a program that casts every unquantized tensor to one dtype loses these digits. Norms are
left out: 16 bits suffice for them, and programs cast them when they load a model. But 8 bits do not suffice for any
vector of a quantized checkpoint: FP8 numbers without a scale have only 25 to 31 dB.
"""

from collections.abc import Iterator, Sequence
from math import inf

from quanterr.documents.base import Finding
from quanterr.findings.checks import LAST, RESULT, check
from quanterr.findings.codes import make_finding
from quanterr.findings.layers import AllWeights, WeightSummary
from quanterr.pairing.model import Pair
from quanterr.selection.roles import role_of
from quanterr.tensors.casts import Copy
from quanterr.util.text import count, display, itemize

WIDE, HALF = "F32", frozenset({"BF16", "F16"})
CAST_FORMATS = ("dense", "fp8_cast")  # numbers without scales; those of GGUF are left out: its converter chooses dtypes


@check("cast_down", needs=RESULT, of=LAST)
def check_casts(weights: AllWeights) -> Iterator[Finding]:
    """Report tensors whose cast lost digits."""
    seen, pairs = weights.seen, weights.pairing.pairs
    vectors = [weight for weight in seen if _is_vector_in_bytes(weight.pair) and not _is_narrowed(weight.pair)]
    if vectors and any(pair.quantized.encoding == "codes" for pair in pairs):
        yield _report(vectors, "that the original keeps in 16 bits or more", "keep norms and biases in 16 bits")
    narrowed = [weight for weight in seen if _is_narrowed(weight.pair) and weight.copy != Copy.CHANGED]
    if not narrowed or not _has_mostly_half_floats(pairs):
        return
    kept = f"that the original keeps in {WIDE} among 16-bit ones"
    yield _report(narrowed, kept, f"keep them in {WIDE}, which the model computes with")


def _report(cast: Sequence[WeightSummary], kept: str, remedy: str) -> Finding:
    names = [weight.pair.name for weight in cast]
    worst = min(cast, key=lambda weight: weight.figures.snr_db if weight.figures else inf)
    worst_db = worst.figures.snr_db if worst.figures else None
    dtypes = " and ".join(sorted({weight.pair.quantized.codes.dtype for weight in cast}))
    shown = f"; the worst, {display(worst.pair.name)}, has {worst_db:.1f} dB" if worst_db is not None else ""
    message = (
        f"{count(len(names), 'tensor')} {kept} {'is' if len(names) == 1 else 'are'} stored as {dtypes}: "
        f"{itemize(names, 3)}{shown}"
    )
    return make_finding(
        "cast_down", "warning", None, message, f"{remedy}: they are small", layers=names, snr_db=worst_db
    )


def _is_vector_in_bytes(pair: Pair) -> bool:
    """Return True for a norm, a bias or another vector whose 16 bits or more became 8 without a scale."""
    x, y = pair.original, pair.quantized
    return (
        len(x.shape) == 1
        and x.format == CAST_FORMATS[0]
        and y.format == CAST_FORMATS[1]
        and x.codes.bits > y.codes.bits
    )


def _is_narrowed(pair: Pair) -> bool:
    x, y = pair.original, pair.quantized
    is_unscaled = x.format == CAST_FORMATS[0] and y.format in CAST_FORMATS
    return is_unscaled and x.codes.dtype == WIDE and y.codes.bits < x.codes.bits and role_of(pair.name) != "norm"


def _has_mostly_half_floats(pairs: Sequence[Pair]) -> bool:
    """Return whether the original stores more elements in 16 bits than in F32."""
    sizes = {WIDE: 0, "half": 0}
    for pair in pairs:
        dtype = pair.original.codes.dtype
        if dtype == WIDE or dtype in HALF:
            sizes[WIDE if dtype == WIDE else "half"] += pair.original.n
    return sizes["half"] > sizes[WIDE]
