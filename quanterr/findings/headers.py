"""Findings made before any weight is compared, about headers, labels, undone factors, importance and sensitivity."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import log10

from quanterr.documents.base import Finding
from quanterr.findings.codes import make_finding
from quanterr.findings.limits import FEW
from quanterr.pairing.model import COMPUTED, NOT_SELECTED, Bucket, FoldedScales, Leftover, Pair, Pairing
from quanterr.pairing.sampling import on_cpu
from quanterr.pairing.tied import DROPPED, TIED
from quanterr.pairing.transforms import find_fused_transforms
from quanterr.pairing.views import find_whole
from quanterr.selection.roles import role_of
from quanterr.tensors.chunks import Chunk
from quanterr.util.text import count, display, listed

NUMBER = re.compile(r"\d+\.\d+(e[-+]?\d+)?|\d+e[-+]?\d+|(?<=\.)\d+(?=\.)")  # a fraction, or the number of a block
NOT_COLLECTED = ("embedding", "head")  # roles that llama-imatrix skips by default
SMALLEST_ERROR = 1e-10  # relative errors below this are shown as 200 dB


def check_plan(plan: Pairing) -> Iterator[Finding]:
    """Report contradictions and oddities in headers and labels."""
    if plan.idle:
        yield make_finding("nothing_excluded", "info", None, "; ".join(plan.idle))
    weights = {
        "original": [pair.original for pair in plan.pairs],
        "quantized": [pair.quantized for pair in plan.pairs],
    }
    for side, labels in plan.labels.items():
        if labels.orphans:
            layers = listed(list(labels.orphans))
            message = f"the header of the {side} checkpoint labels layers that are not stored: {layers}"
            yield make_finding("label_without_layer", "warning", None, message)
        fused = find_fused_transforms(labels.config, weights[side])
        if rotated := ", ".join(f"{display(each.group)} ({display(each.kind)})" for each in fused):
            message = f"config.json of the {side} checkpoint declares rotations fused into its weights: {rotated}"
            remedy = "compare the checkpoint from before the rotations were fused, or use the rotated original"
            yield make_finding("rotated_weights", "error", None, message, remedy)
        coded = any(pair.quantized.has_codes for pair in plan.pairs)
        all_paired = all(one.bucket is Bucket.CONSUMED for one in plan.leftovers)
        if side == "quantized" and labels.method and plan.pairs and not coded and all_paired:
            message = f"the configuration declares {display(labels.method)}, but no weight is stored quantized"
            yield make_finding("config_without_codes", "warning", None, message, "is this the quantized checkpoint?")
    coded_originals = sum(pair.original.has_codes and pair.original.n > 0 for pair in plan.pairs)
    if coded_originals and not any(pair.quantized.has_codes for pair in plan.pairs):
        message = (
            f"the original stores {count(coded_originals, 'weight')} quantized, the quantized checkpoint none: "
            "are the arguments swapped?"
        )
        yield make_finding("swapped_sides", "warning", None, message, "pass the original first")
    if names := plan.names_with_unused_scale:
        layer = names[0] if len(names) == 1 else None
        whose = f"{display(names[0])} is" if layer else f"{count(len(names), 'weight')} ({listed(names, 3)}) are"
        message = f"{whose} not quantized but {'has' if layer else 'have'} a scale of 1, which was ignored"
        yield make_finding("dummy_scale", "warning", layer, message, layers=names)
    for side in plan.labels:
        computed = [one.name for one in plan.leftovers if one.side == side and one.reason == COMPUTED]
        if computed:
            message = (
                f"only the {side} checkpoint stores {count(len(computed), 'tensor')} that the model computes: "
                f"{listed(computed, 3)}; the stored values equal the computed ones"
            )
            yield make_finding("computed_buffer", "info", None, message, tensors=computed)
    if plan.reordered:
        whose = listed(list(plan.reordered), 3)
        message = (
            f"the experts of {count(len(plan.reordered), 'block')} are in another order, and so are the rows of their "
            f"routers ({whose}): the function is the same, and the comparison undoes that"
        )
        remedy = "nothing, unless adapters or tools name experts by number"
        yield make_finding("permuted", "info", None, message, remedy, layers=list(plan.reordered))
    yield from _report_dropped_head(plan.leftovers)
    for (side, reason), names in group_omissions(plan.leftovers).items():
        message = (
            f"{count(len(names), 'tensor')} of the {side} checkpoint are not a part of this comparison: {reason}: "
            f"{listed(names, 3)}"
        )
        remedy = "compare the other file as well, if there is one"
        yield make_finding("omitted_parts", "info", None, message, remedy, tensors=names)
    casts = [pair.name for pair in plan.pairs if pair.quantized.encoding == "cast"]
    if casts:
        message = f"FP8 without a scale, read as a plain cast: {count(len(casts), 'tensor')}: {listed(casts, 3)}"
        remedy = "if the model was quantized with scales, they are missing from this file"
        yield make_finding("fp8_without_scale", "info", None, message, remedy)
    sides = ((pair.name, side) for pair in plan.pairs for side in (pair.original, pair.quantized))
    yield from report_layouts((name, warning) for name, side in sides for warning in side.warnings)
    yield from _report_padding(plan.pairs)


def _report_padding(pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Report vocabularies with more rows than the original's: an info if these are all alike, as padding is."""
    users = Counter(pair.quantized.codes.name for pair in pairs)  # rows of fused weights belong to several pairs
    padded = [
        pair
        for pair in pairs
        if len(pair.original.shape) == 2
        and role_of(pair.name) in NOT_COLLECTED
        and users[pair.quantized.codes.name] == 1
    ]
    wholes = [(pair, whole) for pair in padded if (whole := find_whole(pair.quantized)) is not pair.quantized]
    with on_cpu() as workspaces:
        for pair, whole in wholes:
            first, stop = pair.original.matrix[0], whole.matrix[0]
            rows = whole.dequantize(Chunk(first, stop, 0, whole.matrix[1]), workspaces[1]).weight
            is_padding = bool((rows == rows[:1]).all())
            message = f"{display(pair.name)}: {count(stop - first, 'more row')} than in the original"
            message += ", all alike, are padding" if is_padding else " are not compared: new tokens?"
            yield make_finding("ambiguous_layout", "info" if is_padding else "warning", pair.name, message)


def _report_dropped_head(leftovers: Iterable[Leftover]) -> Iterator[Finding]:
    """Report a stored output layer that loaders drop, as config.json ties it to the embedding."""
    tensors = [one.name for one in leftovers if (one.side, one.reason) == ("quantized", DROPPED)]
    if not tensors:
        return
    head = tensors[0].rpartition(".")[0] + ".weight"  # the first tensor holds its elements
    message = (
        f"config.json declares {TIED}, but {display(head)} is {'quantized' if len(tensors) > 1 else 'stored'} "
        "separately: loaders use the embedding instead, so that it is not compared"
    )
    remedy = f"leave it out of the file, or declare {TIED} false"
    yield make_finding("config_mismatch", "warning", None, message, remedy, layers=[head], key=TIED)


def report_layouts(doubts: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """Report weights with more than one reading, given as (name, reason), in one finding for each kind of reason.

    Reasons that differ only in the errors of readings, or in the number of a block, are of one kind.
    """
    by_kind: dict[str, dict[str, str]] = {}
    for name, reason in doubts:
        by_kind.setdefault(NUMBER.sub("", reason), {}).setdefault(name, reason)
    for reasons in by_kind.values():
        names, reason = list(reasons), next(iter(reasons.values()))
        layer = names[0] if len(names) == 1 else None
        whose = display(names[0]) if layer else f"{count(len(names), 'weight')} ({listed(names, 3)})"
        of_first = ", the first of them" if len(set(reasons.values())) > 1 else ""
        yield make_finding("ambiguous_layout", "warning", layer, f"{whose}{of_first}: {reason}", tensors=names)


def group_omissions(leftovers: Iterable[Leftover]) -> dict[tuple[str, str], list[str]]:
    """Return the names of tensors that a converter leaves to another file by its rules, by side and reason."""
    omitted: dict[tuple[str, str], list[str]] = {}
    for one in leftovers:
        if one.bucket is Bucket.FILTERED_OUT and one.reason != NOT_SELECTED:
            omitted.setdefault((one.side, one.reason), []).append(one.name)
    return omitted


def report_contradictions(pairs: Iterable[Pair]) -> Iterator[Finding]:
    """Report weights that fit another reading than the one that a convention prescribes, one finding per reading."""
    found: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        if pair.contradiction is not None:
            found.setdefault(pair.contradiction[:2], []).append(pair)
    for (prescribed, other), same in found.items():
        names = [pair.name for pair in same]
        errors = [pair.contradiction for pair in same if pair.contradiction is not None]
        first, second = (
            [-20 * log10(max(one, SMALLEST_ERROR)) for one in each]
            for each in zip(*((one.prescribed_error, one.other_error) for one in errors), strict=True)
        )
        layer = names[0] if len(names) == 1 else None
        whose = display(names[0]) if layer else f"{count(len(names), 'weight')} ({listed(names, 3)})"
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


def report_folding(folded: Sequence[FoldedScales]) -> Iterator[Finding]:
    """Report scales that a quantizer moved between weights, with the error as stored and after moving them back."""
    if folded:
        names = list(dict.fromkeys(name for one in folded for name in one.names))
        sources = list(dict.fromkeys(one.source for one in folded))
        least = min(folded, key=lambda one: one.before_db)
        yield make_finding(
            "folded_scales",
            "info",
            None if len(sources) > 1 else sources[0],
            f"scales of {count(len(names), 'weight')} ({listed(names, 4)}) were folded into {listed(sources, 2)}; the "
            f"comparison undoes that: {least.after_db:.1f} dB on a sample of {display(least.worst)}, "
            f"{least.before_db:.1f} dB as stored",
            "nothing if the quantizer does this (AWQ, SmoothQuant); use both tensors together",
            layers=names,
            sources=sources,
            snr_db_as_stored=least.before_db,
            snr_db=least.after_db,
        )
    for one in folded:
        if one.without:
            have, lack = listed(list(one.names), 4), listed(list(one.without), 4)
            yield make_finding(
                "folded_scales",
                "error",
                one.source,
                f"{display(one.source)} absorbed the scales of {have}; {lack}, which it also feeds, lack them",
                "quantize these layers again with the same scales",
                layers=list(one.without),
            )
        if one.misplaced:
            yield make_finding(
                "folded_scales",
                "error",
                one.misplaced,
                f"{display(one.misplaced)} has the scales that {display(one.source)} absorbed in another order of "
                "heads than config.json declares: each head of values feeds neighbouring heads of queries",
                "repeat the scales of each head for its heads of queries, one after the other, and quantize again",
                layers=[one.misplaced],
            )
        if one.unlike:
            rows = listed([str(row) for row in one.unlike], 4)
            yield make_finding(
                "folded_scales",
                "warning",
                one.source,
                f"{display(one.source)} absorbed the scales of {display(one.names[1])}, but some of its rows "
                f"({rows}) have other factors than the columns that they feed",
                "quantize both layers again with the same scales",
                layers=list(one.names),
                rows=list(one.unlike),
            )
        if one.bias:
            yield make_finding(
                "folded_scales",
                "error",
                one.bias,
                f"{display(one.source)} absorbed scales, but its bias {display(one.bias)} did not",
                "apply the same factors to the bias, or quantize these layers again",
                layers=[one.bias],
            )


def check_importance(plan: Pairing) -> Iterator[Finding]:
    """Report the weights, and the experts of stacks, that the importance matrix does not cover."""
    covered = plan.covered
    if covered is None:
        return
    missing = [one.name for one in covered if one.uncovered is None]
    if len(missing) == len(covered):
        message = "the importance matrix names none of the compared weights"
        remedy = "pass the importance matrix that was made for this model"
        yield make_finding("importance_unmatched", "error", None, message, remedy)
    elif missing:
        yield _report_uncovered(plan, missing)
    partly = [one for one in covered if one.uncovered]
    if partly:
        n = sum(one.uncovered or 0 for one in partly)
        message = (
            f"no activations for {count(n, 'expert')}, whose inputs are weighted equally: "
            f"{listed([one.name for one in partly], 3)}"
        )
        yield make_finding("importance_uncovered", "warning", None, message, experts=n)


def _report_uncovered(plan: Pairing, missing: Sequence[str]) -> Finding:
    """Report weights missing from the importance matrix: a warning if more than embeddings, head and a few others."""
    quantized = [pair for pair in plan.pairs if pair.quantized.has_codes and role_of(pair.name) not in NOT_COLLECTED]
    left = [pair for pair in quantized if pair.name in set(missing)]
    share = sum(pair.original.n for pair in left) / max(1, sum(pair.original.n for pair in quantized))
    if max(share, len(left) / max(1, len(quantized))) > FEW:
        message = (
            f"the importance matrix does not cover {len(left):,} of {count(len(quantized), 'quantized weight')}, "
            f"{share:.0%} of their elements: {listed([pair.name for pair in left], 3)}"
        )
        remedy = "collect the matrix from the whole model: weighted numbers leave these weights out"
        return make_finding("importance_missing", "warning", None, message, remedy, weights=len(missing), share=share)
    message = f"the importance matrix does not cover {count(len(missing), 'weight')}: {listed(list(missing), 3)}"
    return make_finding("importance_missing", "info", None, message, weights=len(missing), share=share)


def check_sensitivity(matrices: Sequence[str], alphas: Mapping[str, float] | None) -> Iterator[Finding]:
    """Report the compared matrices that the sensitivity (``alphas``, by name) does not cover."""
    missing = [name for name in matrices if name not in (alphas or {})]
    if alphas is None or not missing:
        return
    if len(missing) == len(matrices):
        message = "the sensitivity names none of the compared weights"
        remedy = "pass the file that evaluate --sensitivity wrote for this original"
        yield make_finding("sensitivity_unmatched", "error", None, message, remedy)
    else:
        message = f"the sensitivity does not cover {count(len(missing), 'weight')}: {listed(missing, 3)}"
        yield make_finding("sensitivity_missing", "info", None, message, weights=len(missing))
