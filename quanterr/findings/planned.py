"""What is known before the run: from headers and labels, from factors undone, from the importance matrix."""

from collections.abc import Iterator, Mapping, Sequence

from quanterr.findings.codes import finding
from quanterr.pairing.model import COMPUTED, Bucket, FoldedScales, Pairing
from quanterr.report.base import Finding
from quanterr.roles import role_of
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import count, display, listed

NOT_COLLECTED = ("embedding", "head")  # roles for which llama-imatrix sees no inputs, unless it is told to
FEW_MISSING = 0.05  # share of the other quantized weights
FUSED_LOCATIONS = frozenset({"weight_input", "weight_output"})


def of_plan(plan: Pairing) -> Iterator[Finding]:
    """What headers and labels show."""
    if plan.idle:
        yield finding("nothing_excluded", "info", None, f"{'; '.join(plan.idle)}; so nothing was left out by that")
    for side, labels in plan.labels.items():
        if labels.orphans:
            layers = listed(list(labels.orphans))
            message = f"the header of the {side} checkpoint labels layers that are not stored: {layers}"
            yield finding("label_without_layer", "warning", None, message)
        if rotated := _fused_rotations(labels.config):
            message = f"config.json of the {side} checkpoint declares rotations fused into its weights: {rotated}"
            remedy = "compare before the transform is fused, or with the rotated original"
            yield finding("rotated_weights", "error", None, message, remedy)
        coded = any(pair.quantized.has_codes for pair in plan.pairs)
        all_paired = all(one.bucket is Bucket.CONSUMED for one in plan.leftovers)
        if side == "quantized" and labels.method and plan.pairs and not coded and all_paired:
            message = f"config.json declares quant_method {display(labels.method)}, but no weight is stored quantized"
            yield finding("config_without_codes", "warning", None, message, "is this the quantized checkpoint?")
    coded_originals = sum(pair.original.has_codes and pair.original.n > 0 for pair in plan.pairs)
    if coded_originals and not any(pair.quantized.has_codes for pair in plan.pairs):
        message = (
            f"the original stores {count(coded_originals, 'weight')} quantized, the quantized checkpoint none: "
            "are the arguments swapped?"
        )
        yield finding("swapped_sides", "warning", None, message, "pass the original first")
    for name in plan.names_with_unused_scale:
        message = f"{display(name)} is not quantized but has a scale of 1, which was ignored"
        yield finding("dummy_scale", "warning", name, message)
    for side in plan.labels:
        computed = [one.name for one in plan.leftovers if one.side == side and one.reason == COMPUTED]
        if computed:
            message = (
                f"only the {side} checkpoint stores {count(len(computed), 'tensor')} that the model computes: "
                f"{listed(computed, 3)}; the values are the computed ones"
            )
            yield finding("computed_buffer", "info", None, message, tensors=computed)
    casts = [pair.name for pair in plan.pairs if pair.quantized.encoding == "cast"]
    if casts:
        message = f"FP8 without a scale, read as a plain cast: {count(len(casts), 'tensor')}: {listed(casts, 3)}"
        remedy = "if the model was quantized with scales, they are missing from this file"
        yield finding("fp8_without_scale", "info", None, message, remedy)
    for pair in plan.pairs:
        for warning in pair.original.warnings + pair.quantized.warnings:
            yield finding("ambiguous_layout", "warning", pair.name, f"{display(pair.name)}: {warning}")


def _fused_rotations(config: JsonFields) -> str:
    """Transforms of compressed-tensors that are part of the stored weights, in words."""
    description = []
    for name, group in as_object(as_object(config.get("transform_config")).get("config_groups")).items():
        applied = as_object(group).get("apply")
        places = applied if isinstance(applied, list) else []
        if any(as_object(place).get("location") in FUSED_LOCATIONS for place in places):
            description.append(f"{display(name)} ({display(str(group.get('type')))})")
    return ", ".join(description)


def of_folding(folded: Sequence[FoldedScales]) -> Iterator[Finding]:
    """Scales that moved between weights: reported with the error as stored, and with them undone."""
    if folded:
        names = list(dict.fromkeys(name for one in folded for name in one.names))
        sources = list(dict.fromkeys(one.source for one in folded))
        least = min(folded, key=lambda one: one.before_db)
        yield finding(
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
            yield finding(
                "folded_scales",
                "error",
                one.source,
                f"{display(one.source)} absorbed the scales of {have}; {lack}, which it also feeds, lack them",
                "quantize these layers again with the same scales",
                layers=list(one.without),
            )
        if one.bias:
            yield finding(
                "folded_scales",
                "error",
                one.bias,
                f"{display(one.source)} took up scales, its bias {display(one.bias)} did not",
                "give the bias the same factors, or quantize these layers again",
                layers=[one.bias],
            )


def of_importance(plan: Pairing) -> Iterator[Finding]:
    """For which weights, and which matrices of stacks, nothing is known of their inputs."""
    covered = plan.covered
    if covered is None:
        return
    missing = [description.name for description in covered if description.uncovered is None]
    if len(missing) == len(covered):
        message = "the importance matrix names none of the compared weights"
        remedy = "pass the importance matrix that was made for this model"
        yield finding("importance_unmatched", "error", None, message, remedy)
    elif missing:
        yield _not_covered(plan, missing)
    partly = [description for description in covered if description.uncovered]
    if partly:
        n = sum(description.uncovered or 0 for description in partly)
        message = (
            f"{count(n, 'expert')} without activations; all their inputs count the same: "
            f"{listed([t.name for t in partly], 3)}"
        )
        yield finding("importance_uncovered", "warning", None, message, experts=n)


def _not_covered(plan: Pairing, missing: Sequence[str]) -> Finding:
    """A warning where it is more than embeddings, the head, and a few others."""
    quantized = [pair for pair in plan.pairs if pair.quantized.has_codes and role_of(pair.name) not in NOT_COLLECTED]
    left = [pair for pair in quantized if pair.name in set(missing)]
    share = sum(pair.original.n for pair in left) / max(1, sum(pair.original.n for pair in quantized))
    if max(share, len(left) / max(1, len(quantized))) > FEW_MISSING:
        message = (
            f"the importance matrix does not cover {len(left):,} of {count(len(quantized), 'quantized weight')}, "
            f"{share:.0%} of their elements: {listed([pair.name for pair in left], 3)}"
        )
        remedy = "make the matrix from the whole of this model: weighted numbers leave these weights out"
        return finding("importance_missing", "warning", None, message, remedy, weights=len(missing), share=share)
    message = f"the importance matrix does not cover {count(len(missing), 'weight')}: {listed(list(missing), 3)}"
    return finding("importance_missing", "info", None, message, weights=len(missing), share=share)


def of_sensitivity(plan: Pairing, alphas: Mapping[str, float] | None) -> Iterator[Finding]:
    """For which matrices it is not known how much they matter."""
    matrices = [pair.name for pair in plan.pairs if len(pair.original.shape) > 1]
    missing = [name for name in matrices if name not in (alphas or {})]
    if alphas is None or not missing:
        return
    if len(missing) == len(matrices):
        message = "the sensitivity names none of the compared weights"
        remedy = "pass what evaluate --sensitivity wrote of this original"
        yield finding("sensitivity_unmatched", "error", None, message, remedy)
    else:
        message = f"the sensitivity does not cover {count(len(missing), 'weight')}: {listed(missing, 3)}"
        yield finding("sensitivity_missing", "info", None, message, weights=len(missing))
