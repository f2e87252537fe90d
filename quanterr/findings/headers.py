"""Findings about headers and labels, which need no comparison of weights."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from quanterr.documents.base import Finding
from quanterr.findings.checks import ALONE, BOTH, DECLARED, EACH, HEADERS, QUANTIZED, VALUES, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Comparison, Contents
from quanterr.findings.importance import NOT_COLLECTED
from quanterr.findings.limits import ROUNDED_DB
from quanterr.formats import CODE_DTYPES
from quanterr.pairing.model import COMPUTED, NOT_SELECTED, Bucket, Leftover
from quanterr.pairing.tied import DROPPED, TIED
from quanterr.pairing.transforms import find_fused_transforms
from quanterr.pairing.views import find_whole
from quanterr.selection.roles import role_of
from quanterr.tensors.chunks import Chunk
from quanterr.util.text import count, display, itemize

NUMBER = re.compile(r"\d+\.\d+(e[-+]?\d+)?|\d+e[-+]?\d+|(?<=\.)\d+(?=\.)")  # a fraction, or the number of a block


@check("nothing_excluded", needs=HEADERS, of=BOTH)
def check_exclusions(comparison: Comparison) -> Iterator[Finding]:
    """Report patterns that exclude nothing."""
    if comparison.pairing.idle:
        yield make_finding("nothing_excluded", "info", None, "; ".join(comparison.pairing.idle))


@check("label_without_layer", "rotated_weights", "config_without_codes", needs=DECLARED, of=EACH)
def check_labels(contents: Contents) -> Iterator[Finding]:
    """Report labels, rotations and a method that the weights of a checkpoint contradict."""
    labels = contents.labels
    if labels.orphans:
        message = f"the header{contents.whose} labels layers that are not stored: {itemize(list(labels.orphans))}"
        yield make_finding("label_without_layer", "warning", None, message)
    if not contents.is_alone:  # such a checkpoint is correct, but its weights are not comparable with the original's
        fused = find_fused_transforms(labels.config, [stored.weight for stored in contents.weights])
        if rotated := ", ".join(
            f"{display(transform.group)} ({display(transform.matrix_type)})" for transform in fused
        ):
            message = f"config.json{contents.whose} declares rotations fused into its weights: {rotated}"
            remedy = "compare the checkpoint from before the rotations were fused, or use the rotated original"
            yield make_finding("rotated_weights", "error", None, message, remedy)
    is_complete = all(leftover.bucket is Bucket.CONSUMED for leftover in contents.pairing.leftovers)
    is_unquantized = (
        contents.weights and is_complete and not any(stored.weight.has_codes for stored in contents.weights)
    )
    if contents.side == "quantized" and labels.method and is_unquantized:
        message = f"the configuration declares {display(labels.method)}, but no weight is stored quantized"
        yield make_finding("config_without_codes", "warning", None, message, "is this the quantized checkpoint?")


@check("swapped_sides", needs=HEADERS, of=BOTH)
def check_sides(comparison: Comparison) -> Iterator[Finding]:
    """Report a quantized original and an unquantized second checkpoint: swapped, unless the second is a float copy."""
    pairs = comparison.pairing.pairs
    coded = sum(pair.original.has_codes and pair.original.n > 0 for pair in pairs)
    if coded and not any(pair.quantized.has_codes for pair in pairs):
        stores = f"the original stores {count(coded, 'weight')} quantized, the quantized checkpoint none"
        if comparison.min_snr_db >= ROUNDED_DB:
            message = f"{stores}: it is the original's copy in floats, as dequantize writes it"
            yield make_finding("swapped_sides", "info", None, message)
            return
        message = f"{stores}: are the arguments swapped?"
        yield make_finding("swapped_sides", "warning", None, message, "pass the original first")


@check("dummy_scale", needs=HEADERS, of=QUANTIZED)
def check_unused_scales(contents: Contents) -> Iterator[Finding]:
    """Report scales of weights that are not quantized."""
    if contents.is_alone and not any(stored.weight.has_codes for stored in contents.weights):
        return  # a name that ends in scale is then an ordinary parameter
    if names := contents.pairing.names_with_unused_scale:
        layer = names[0] if len(names) == 1 else None
        whose = f"{display(names[0])} is" if layer else f"{count(len(names), 'weight')} ({itemize(names, 3)}) are"
        message = f"{whose} not quantized but {'has' if layer else 'have'} a scale of 1, which was ignored"
        yield make_finding("dummy_scale", "warning", layer, message, layers=names)


@check("computed_buffer", needs=HEADERS, of=EACH)
def check_buffers(contents: Contents) -> Iterator[Finding]:
    """Report tensors that only one side stores, as the model computes them."""
    if computed := [leftover.name for leftover in contents.leftovers if leftover.reason == COMPUTED]:
        message = (
            f"only the {contents.side} checkpoint stores {count(len(computed), 'tensor')} that the model computes: "
            f"{itemize(computed, 3)}; the stored values equal the computed ones"
        )
        yield make_finding("computed_buffer", "info", None, message, tensors=computed)


@check("permuted", needs=HEADERS, of=BOTH)
def check_reordered(comparison: Comparison) -> Iterator[Finding]:
    """Report experts in another order, which the comparison undoes."""
    if routers := list(comparison.pairing.reordered):
        message = (
            f"the experts of {count(len(routers), 'block')} are in another order, and so are the rows of their "
            f"routers ({itemize(routers, 3)}): the function is the same, and the comparison undoes that"
        )
        remedy = "nothing, unless adapters or tools name experts by number"
        yield make_finding("permuted", "info", None, message, remedy, layers=routers)


@check("config_mismatch", needs=DECLARED, of=BOTH)
def check_dropped_head(comparison: Comparison) -> Iterator[Finding]:
    """Report a stored output layer that loaders drop, as config.json ties it to the embedding."""
    leftovers = comparison.pairing.leftovers
    tensors = [leftover.name for leftover in leftovers if (leftover.side, leftover.reason) == ("quantized", DROPPED)]
    if not tensors:
        return
    head = tensors[0].rpartition(".")[0] + ".weight"  # the first tensor holds its elements
    message = (
        f"config.json declares {TIED}, but {display(head)} is {'quantized' if len(tensors) > 1 else 'stored'} "
        "separately: loaders use the embedding instead, so that it is not compared"
    )
    remedy = f"leave it out of the file, or declare {TIED} false"
    yield make_finding("config_mismatch", "warning", None, message, remedy, layers=[head], key=TIED)


@check("omitted_parts", needs=HEADERS, of=BOTH)
def check_omissions(comparison: Comparison) -> Iterator[Finding]:
    """Report tensors that a converter leaves to another file."""
    for (side, reason), names in group_omissions(comparison.pairing.leftovers).items():
        message = (
            f"{count(len(names), 'tensor')} of the {side} checkpoint are not a part of this comparison: {reason}: "
            f"{itemize(names, 3)}"
        )
        remedy = "compare the other file as well, if there is one"
        yield make_finding("omitted_parts", "info", None, message, remedy, tensors=names)


@check("fp8_without_scale", needs=HEADERS, of=QUANTIZED)
def check_plain_casts(contents: Contents) -> Iterator[Finding]:
    """Report FP8 weights that are read without a scale."""
    if casts := [stored.name for stored in contents.weights if stored.weight.encoding == "cast"]:
        message = f"FP8 values of {count(len(casts), 'tensor')} are taken for casts without scale: {itemize(casts, 3)}"
        remedy = "if the model was quantized with scales, they are missing from this file"
        yield make_finding("fp8_without_scale", "info", None, message, remedy)


@check("codes_without_scale", needs=HEADERS, of=ALONE)
def check_bare_codes(contents: Contents) -> Iterator[Finding]:
    """Report codes that match no format because they lack a scale."""
    weights = [stored.weight for stored in contents.weights]
    if bare := [weight.name for weight in weights if weight.format == "verbatim" and weight.codes.dtype in CODE_DTYPES]:
        yield make_finding("codes_without_scale", "warning", None, f"stored codes have no scale: {itemize(bare)}")


@check("ambiguous_layout", needs=HEADERS, of=ALONE)
def check_layouts_alone(contents: Contents) -> Iterator[Finding]:
    """Report the weights of one checkpoint whose layout is ambiguous."""
    yield from report_layouts(
        (stored.name, warning) for stored in contents.weights for warning in stored.weight.warnings
    )


@check("ambiguous_layout", needs=HEADERS, of=BOTH)
def check_layouts_of_both(comparison: Comparison) -> Iterator[Finding]:
    """Report the weights of both sides whose layout is ambiguous."""
    pairs = comparison.pairing.pairs
    sides = ((pair.name, side) for pair in pairs for side in (pair.original, pair.quantized))
    yield from report_layouts((name, warning) for name, side in sides for warning in side.warnings)


@check("ambiguous_layout", needs=VALUES, of=BOTH)
def check_padding(comparison: Comparison) -> Iterator[Finding]:
    """Report vocabularies with more rows than the original's: an info if these are all alike, as padding is."""
    pairs = comparison.pairing.pairs
    users = Counter(pair.quantized.codes.name for pair in pairs)  # rows of fused weights belong to several pairs
    padded = [
        pair
        for pair in pairs
        if len(pair.original.shape) == 2
        and role_of(pair.name) in NOT_COLLECTED
        and users[pair.quantized.codes.name] == 1
    ]
    wholes = [(pair, whole) for pair in padded if (whole := find_whole(pair.quantized)) is not pair.quantized]
    for pair, whole in wholes:
        first, stop = pair.original.matrix[0], whole.matrix[0]
        rows = comparison.quantized.reader.read(whole, Chunk(first, stop, 0, whole.matrix[1]))
        is_padding = bool((rows == rows[:1]).all())
        message = f"{display(pair.name)}: {count(stop - first, 'more row')} than in the original"
        message += ", all alike, are padding" if is_padding else " are not compared: new tokens?"
        yield make_finding("ambiguous_layout", "info" if is_padding else "warning", pair.name, message)


def report_layouts(doubts: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """Report weights with an ambiguous layout, given as (name, reason), with one finding for each reason.

    Reasons that differ only in measured errors, or in the number of a block, count as one.
    """
    by_reason: dict[str, dict[str, str]] = {}
    for name, reason in doubts:
        by_reason.setdefault(NUMBER.sub("", reason), {}).setdefault(name, reason)
    for reasons in by_reason.values():
        names, reason = list(reasons), next(iter(reasons.values()))
        layer = names[0] if len(names) == 1 else None
        whose = display(names[0]) if layer else f"{count(len(names), 'weight')} ({itemize(names, 3)})"
        of_first = ", the first of them" if len(set(reasons.values())) > 1 else ""
        yield make_finding("ambiguous_layout", "warning", layer, f"{whose}{of_first}: {reason}", tensors=names)


def group_omissions(leftovers: Iterable[Leftover]) -> dict[tuple[str, str], list[str]]:
    """Return the names of tensors that a converter leaves to another file by its rules, by side and reason."""
    omitted: dict[tuple[str, str], list[str]] = {}
    for leftover in leftovers:
        if leftover.bucket is Bucket.FILTERED_OUT and leftover.reason != NOT_SELECTED:
            omitted.setdefault((leftover.side, leftover.reason), []).append(leftover.name)
    return omitted
