"""Weights that lost nothing, or less than rounding costs: copies, or an original that was already rounded."""

from collections.abc import Iterator, Sequence

from quanterr.documents.base import Finding
from quanterr.findings.checks import RESULT, WEIGHTS, check
from quanterr.findings.codes import make_finding
from quanterr.findings.layers import AllWeights
from quanterr.findings.limits import MIN_VALUES
from quanterr.formats.reading import Reader
from quanterr.lazy_torch import torch
from quanterr.pairing import SIDES
from quanterr.pairing.model import COMPUTED, Bucket, Leftover, Pair
from quanterr.util.text import count, itemize

MAX_WEIGHTS_READ = 64  # maximum number of identical weights to read again
TERNARY_VALUES = 3  # distinct values in a row of a ternary weight
UNREAD_BUCKETS = (Bucket.UNSUPPORTED, Bucket.ERROR, Bucket.SHAPE_MISMATCH)  # stored on both sides, but not compared


@check("lossless_codes", "identical", needs=RESULT, of=WEIGHTS)
def check_identical(weights: AllWeights) -> Iterator[Finding]:
    """Report that no weight differs: quantization lost nothing, or nothing is quantized."""
    same = weights.same
    if weights.seen or not same:
        return
    if coded := [p for p in same if p.original.n and p.quantized.has_codes and not p.original.has_codes]:
        yield _report_lossless(coded, weights.reader)
        return
    selected = [leftover for leftover in weights.pairing.leftovers if leftover.bucket != Bucket.FILTERED_OUT]
    unread = sum(leftover.bucket in UNREAD_BUCKETS and leftover.side == "original" for leftover in selected)
    unread += len(weights.pairing.pairs) - len(same)  # pairs whose codes were refused when they were read
    yield _report_identical(same, _are_copies(selected), unread)


def _are_copies(leftovers: Sequence[Leftover]) -> bool:
    """Return True if both sides store the same, apart from buffers that follow from the configuration."""
    stored = [
        {
            entry.name
            for leftover in leftovers
            if leftover.side == side and leftover.reason != COMPUTED
            for entry in leftover.entries
        }
        for side in SIDES
    ]
    return stored[0] == stored[1] and all(leftover.bucket == Bucket.CONSUMED for leftover in leftovers)


def _report_identical(same: Sequence[Pair], is_complete: bool, unread: int) -> Finding:
    """Report that nothing differs and nothing is quantized: the same checkpoint was given twice.

    Args:
        same: the pairs that are identical.
        is_complete: whether everything selected is compared, so that identical tensors mean an identical model.
        unread: number of weights that are stored on both sides, but cannot be compared.
    """
    if unread:
        message = (
            f"nothing that is quantized was compared: {count(unread, 'weight')} could not be read, and all that was "
            f"compared ({count(len(same), 'tensor')}) is the same on both sides"
        )
        return make_finding("identical", "info", None, message, "see why the others are not comparable", unread=unread)
    message = "all compared tensors are identical; is this the quantized checkpoint?"
    remedy = "check that the second checkpoint is the quantized one"
    return make_finding(
        "identical", "warning" if is_complete and all(map(_is_stored_alike, same)) else "info", None, message, remedy
    )


def _is_stored_alike(pair: Pair) -> bool:
    """Return True if both sides use the same tensor names and dtypes, as a copy does."""
    x, y = ([(entry.name, entry.dtype) for entry in entries] for entries in pair.codes)
    return x == y


def _report_lossless(coded: Sequence[Pair], reader: Reader) -> Finding:
    """Report that no quantized weight lost anything.

    Either the original was rounded before (a warning), or it has so few values that codes hold them exactly.
    """
    names = [pair.name for pair in coded]
    message = (
        f"quantization lost nothing: {count(len(coded), 'weight')} stored quantized, each identical to the original: "
        f"{itemize(names, 3)}"
    )
    ternary = all(_is_ternary(pair, reader) for pair in coded[:MAX_WEIGHTS_READ])
    if ternary:
        message += "; the original is ternary, binary or constant, like BitNet's weights, and codes hold that exactly"
        remedy = "nothing, if the model was trained so: 2-bit codes (BitNet, TQ2_0) hold it exactly in less space"
        return make_finding("lossless_codes", "info", None, message, remedy, weights=len(coded))
    message += "; the original holds values that are already rounded"
    remedy = "compare with the checkpoint from before the quantization"
    return make_finding("lossless_codes", "warning", None, message, remedy, weights=len(coded))


def _is_ternary(pair: Pair, reader: Reader) -> bool:
    """Return True if each sampled row has at most three distinct values."""
    return all(len(torch.unique(row)) <= TERNARY_VALUES for row in reader.read_first_rows(pair.original, MIN_VALUES**2))


@check("lossless_codes", needs=RESULT, of=WEIGHTS)
def check_rounded_originals(weights: AllWeights) -> Iterator[Finding]:
    """Report quantized weights whose original already holds dequantized values.

    Weights of few distinct values (ternary ones, for instance) are left out: many formats hold them exactly.
    """
    better = [weight.pair for weight in weights.seen if weight.too_good]
    same, reader = weights.same if weights.seen else (), weights.reader
    coded = [p for p in same if p.quantized.has_codes and not p.original.has_codes and p.original.n >= MIN_VALUES**2]
    names = [pair.name for pair in (*better, *coded[:MAX_WEIGHTS_READ]) if _is_varied(pair, reader)]
    if names:
        message = (
            f"{count(len(names), 'quantized weight')} lost far less than rounding costs: {itemize(names, 3)}; "
            "the original was made from the quantized model, or both from the same codes"
        )
        remedy = "compare with the checkpoint from before the quantization"
        yield make_finding("lossless_codes", "warning", None, message, remedy, layers=names)


def _is_varied(pair: Pair, reader: Reader) -> bool:
    """Return True if a weight has more distinct values than codes of few bits, and its rows than their scales hold."""
    values = reader.read_first_rows(pair.original, MIN_VALUES**2)
    return values.shape[1] > TERNARY_VALUES and len(torch.unique(values)) > MIN_VALUES
