"""The order of all checks, and functions that run them for a comparison, or for one checkpoint."""

from collections.abc import Iterator
from functools import cache
from types import ModuleType

from quanterr.documents.base import Finding
from quanterr.findings import (
    activations,
    adapters,
    attention_heads,
    caches,
    casts,
    completeness,
    configs,
    conventions,
    declared,
    excess,
    file_types,
    files,
    folding,
    fused_scales,
    headers,
    importance,
    inputs,
    layers,
    loading,
    lossless,
    outliers,
    parts,
    results,
    runtimes,
    scales,
    schemes,
    structure,
    sums,
    values,
)
from quanterr.findings.checks import ALONE, BOTH, CHECKS, EACH, QUANTIZED, Check, Needs, Of
from quanterr.findings.contents import Comparison, Contents, MeasuredWeight
from quanterr.findings.layers import AllWeights

# Findings are in the order of these modules, and of the checks in each.
MODULES: tuple[ModuleType, ...] = (
    *(files, adapters, configs),
    *(structure, attention_heads, loading, parts, file_types, runtimes, caches, declared, schemes, completeness),
    *(headers, activations, inputs, folding, importance, values),
    *(sums, excess, scales, layers, conventions, outliers, lossless, casts, fused_scales, results),
)


@cache
def list_checks(*of: Of) -> list[Check]:
    """Return the checks about any of these, in the order of their findings."""
    order = {module.__name__: number for number, module in enumerate(MODULES)}
    return sorted((check for check in CHECKS if check.of in of), key=lambda check: order[check.function.__module__])


def run_checks(comparison: Comparison) -> Iterator[Finding]:
    """Run the checks about both sides together, about each side, and about the quantized side of a comparison."""
    sides = (comparison.original, comparison.quantized)
    subjects = {BOTH: (comparison,), EACH: sides, QUANTIZED: sides[1:]}
    for check in list_checks(*subjects):
        for subject in subjects[check.of]:
            yield from check.function(subject)


def run_checks_alone(contents: Contents, known: Needs) -> Iterator[Finding]:
    """Run the checks of one checkpoint that need no more than is ``known``."""
    for check in list_checks(EACH, QUANTIZED, ALONE):
        if check.needs <= known:
            yield from check.function(contents)


def run_checks_of(of: Of, subject: MeasuredWeight | AllWeights) -> Iterator[Finding]:
    """Run the checks of a weight, or of all weights."""
    for check in list_checks(of):
        yield from check.function(subject)
