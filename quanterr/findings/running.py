"""The order of all checks, and their runs: for a comparison, and for one checkpoint."""

from collections.abc import Iterator
from types import ModuleType

from quanterr.documents.base import Finding
from quanterr.findings import (
    activations,
    adapters,
    caches,
    completeness,
    configs,
    declared,
    file_types,
    files,
    folding,
    headers,
    heads,
    importance,
    inputs,
    loading,
    parts,
    results,
    runtimes,
    schemes,
    structure,
    values,
)
from quanterr.findings.checks import BOTH, CHECKS, EACH, QUANTIZED, Check, Needs
from quanterr.findings.contents import Comparison, Contents

# Findings are in the order of these modules, and of the checks in each.
MODULES: tuple[ModuleType, ...] = (
    *(files, adapters, configs),
    *(structure, heads, loading, parts, file_types, runtimes, caches, declared, schemes, completeness),
    *(headers, activations, inputs, folding, importance, values, results),
)


def list_checks() -> list[Check]:
    """Return all checks in the order of their findings."""
    order = {module.__name__: number for number, module in enumerate(MODULES)}
    return sorted(CHECKS, key=lambda one: order[one.function.__module__])


def run_checks(comparison: Comparison) -> Iterator[Finding]:
    """Run the checks of both sides, of each, and of the quantized one."""
    sides = {EACH: (comparison.original, comparison.quantized), QUANTIZED: (comparison.quantized,)}
    for one in list_checks():
        for subject in (comparison,) if one.of is BOTH else sides.get(one.of, ()):
            yield from one.function(subject)


def run_checks_alone(contents: Contents, known: Needs) -> Iterator[Finding]:
    """Run the checks of one checkpoint that need no more than is ``known``."""
    for one in list_checks():
        if one.of is not BOTH and one.needs <= known:
            yield from one.function(contents)
