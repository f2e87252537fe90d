"""Static scales of inputs that are declared but not stored, or that differ between weights that runtimes fuse."""

from collections.abc import Iterator
from math import inf

from quanterr.documents.base import Finding
from quanterr.findings.checks import DECLARED, QUANTIZED, VALUES, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Contents
from quanterr.findings.fused_scales import group_names
from quanterr.findings.limits import FLOAT32_TOLERANCE, MISMATCH_FACTOR
from quanterr.pairing.inputs import find_absent_scales, find_clamped_inputs, read_static_scales
from quanterr.util.text import count, display, itemize


@check("no_input_scale", needs=DECLARED, of=QUANTIZED)
def check_clamped_inputs(contents: Contents) -> Iterator[Finding]:
    """Report the weights whose inputs ComfyUI clamps, because they lack an input scale."""
    yield from report_missing_input_scales(find_clamped_inputs(contents.pairing, contents.checkpoint.entries))


def report_missing_input_scales(names: list[str]) -> Iterator[Finding]:
    """Report the FP8 layers of ComfyUI in ``names``, which have no input scale."""
    if names:
        message = (
            f"{count(len(names), 'layer')} in FP8 without input_scale: {itemize(names, 3)}; ComfyUI uses a scale of 1 "
            "and clamps inputs at 448"
        )
        remedy = "calibrate an input_scale, or set full_precision_matrix_mult"
        yield make_finding("no_input_scale", "info", None, message, remedy, layers=names)


@check("sibling_scales", needs=VALUES, of=QUANTIZED)
def check_sibling_inputs(contents: Contents) -> Iterator[Finding]:
    """Report fused weights whose static scales of inputs differ."""
    scales = read_static_scales(contents.inputs)
    groups = []
    for names in group_names(scales):
        numbers = {name: scales[name].number for name in names}
        low, high = min(numbers, key=lambda name: numbers[name]), max(numbers.values())
        if 0 < numbers[low] < high < inf and high / numbers[low] > 1 + FLOAT32_TOLERANCE:
            groups.append((high / numbers[low], low))
    if not groups:
        return
    largest, name = max(groups)
    names = [name for _, name in groups]
    used = (
        f"the scale that a runtime takes clips the inputs of {display(name)} at 1/{largest:.3g} of its range"
        if scales[name].multiplies
        else f"the range of {display(name)} is the smaller one, which clips the inputs that its siblings saw"
    )
    message = (
        f"runtimes fuse {count(len(groups), 'group')} of weights whose static scales of inputs differ, by a factor of "
        f"up to {largest:.3g}, though their inputs are the same: {itemize(names, 3)}; {used}"
    )
    remedy = "calibrate the inputs again, with one scale for fused weights (q, k and v; gate and up; w1 and w3)"
    severity = "warning" if largest >= MISMATCH_FACTOR else "info"
    yield make_finding("sibling_scales", severity, None, message, remedy, ratio=largest, layers=names)


@check("missing_input_scale", needs=DECLARED, of=QUANTIZED)
def check_absent_scales(contents: Contents) -> Iterator[Finding]:
    """Report declared static scales of inputs that are not stored."""
    weights = find_absent_scales(contents.inputs)
    if weights:
        names, missing = list(weights), itemize(list(dict.fromkeys(weights.values())), 3)
        message = (
            f"static scales of inputs are declared, but {missing} is missing for {count(len(names), 'weight')}: "
            f"{itemize(names, 3)}"
        )
        if all(inputs.scale is None for inputs in contents.inputs.values()):
            message += "; as no weight has one, a runtime does not quantize the inputs (W4A16 for W4A4), or refuses"
        remedy = "recalibrate, or declare dynamic activations; otherwise runtimes refuse the file or use a scale of 1"
        yield make_finding("missing_input_scale", "warning", None, message, remedy, layers=names)
