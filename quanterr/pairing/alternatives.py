"""Which of several readings the original bears out: the one place that looks at values before the run.

    a weight's alternatives    other readings of its tensors, where label and shapes leave several; tried only if the
                               first has more error than any correct one, and a switch is a warning
    a pair's alternative       other weights on either side: rows in another order, norms plus one, the original
                               transposed; evidence, a warning, or an error that leaves the pair uncompared
    scales folded away         see smoothing.py

Everything before works from headers alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

from quanterr.formats import Weight
from quanterr.pairing.plan import Alternative, Leftover, Pair, Plan
from quanterr.pairing.sampling import CLOSE_READING, READING, Workspaces, nearest, on_cpu
from quanterr.pairing.smoothing import undo_smoothing


def choose_alternatives(plan: Plan, undo: bool = True) -> Plan:
    """The plan with every choice made: each pair as the original bears it out, or among the leftovers.

    ``undo``: factors that a quantizer moved between weights are moved back.
    """
    pairs: list[Pair] = []
    leftovers = list(plan.leftovers)
    with on_cpu() as workspaces:
        for pair in plan.pairs:
            is_doubted = pair.quantized.alternatives and not pair.quantized.codes.file.is_certain
            read = replace(pair, quantized=_read(pair, workspaces)) if is_doubted else pair
            chosen = _chosen(read, read.alternative, workspaces) if read.alternative else read
            if isinstance(chosen, Pair):
                pairs.append(chosen)
            else:
                leftovers += chosen
        pairs, folded = undo_smoothing(pairs, workspaces) if undo else (pairs, [])
    return replace(plan, pairs=pairs, leftovers=leftovers, folded=folded)


def _read(pair: Pair, workspaces: Workspaces) -> Weight:
    """The quantized weight in the reading that is nearest to the original."""
    first = pair.quantized
    bar = CLOSE_READING if first.close_alternatives else READING
    others = [(pair.original, other) for other in first.alternatives]
    choice = nearest((pair.original, first), others, bar, workspaces)
    if choice.number is None:
        return first
    best = first.alternatives[choice.number]
    as_first = f"{choice.first:.3g}" if isfinite(choice.first) else "not finite"
    description = (
        f"read as {best.evidence[0]}: relative error {choice.least:.3g} on a sample; "
        f"{as_first} as label and shapes suggest ({first.evidence[0]})"
    )
    if first.undeclared:
        return replace(best, evidence=(*best.evidence, description))
    return replace(best, warnings=(*first.warnings, description))


def _chosen(pair: Pair, other: Alternative, workspaces: Workspaces) -> Pair | Sequence[Leftover]:
    """The pair, or what its alternative makes of it."""
    quantized = other.quantized or pair.quantized
    choice = nearest((pair.original, pair.quantized), [(other.original, quantized)], other.bar, workspaces)
    if choice.number is None:
        return replace(pair, alternative=None)
    if other.leftovers:
        return other.leftovers
    error = f"{choice.least:.3g}"
    evidence = [text.format(error=error) for text in (other.evidence,) if text]
    warnings = [text.format(error=error) for text in (other.warning,) if text]
    quantized = replace(quantized, evidence=(*quantized.evidence, *evidence), warnings=(*quantized.warnings, *warnings))
    return replace(pair, original=other.original, quantized=quantized, alternative=None)
