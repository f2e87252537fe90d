"""Choice among readings of a weight by comparison with the original: the only step before the run that reads values.

    a weight's alternatives    other readings of its tensors, where label and shapes allow several; tried only if the
                               first has a larger error than any correct reading; a switch is a warning
    a pair's alternative       other weights on either side: rows in another order, norms plus one, the original
                               transposed; gives evidence, a warning, or an error that leaves the pair uncompared
    folded scales              see smoothing.py

All earlier steps work from headers alone.
"""

from collections.abc import Sequence
from math import isfinite

from msgspec.structs import replace

from quanterr.pairing.model import Alternative, Leftover, Pair, Pairing
from quanterr.pairing.sampling import CLOSE_READING, READING, Workspaces, choose_nearest, on_cpu
from quanterr.pairing.smoothing import undo_smoothing


def choose_alternatives(pairing: Pairing, undo: bool = True) -> Pairing:
    """Return the pairing with every alternative decided: each pair has its best reading, or is among the leftovers.

    With ``undo``, factors that a quantizer moved between weights are moved back.
    """
    pairs: list[Pair] = []
    leftovers = list(pairing.leftovers)
    with on_cpu() as workspaces:
        for pair in pairing.pairs:
            is_doubted = pair.quantized.alternatives and not pair.quantized.codes.file.is_certain
            read = _choose_reading(pair, workspaces) if is_doubted else pair
            chosen = _choose_alternative(read, read.alternative, workspaces) if read.alternative else read
            if isinstance(chosen, Pair):
                pairs.append(chosen)
            else:
                leftovers += chosen
        pairs, folded = undo_smoothing(pairs, workspaces) if undo else (pairs, [])
    return replace(pairing, pairs=pairs, leftovers=leftovers, folded=folded)


def _choose_reading(pair: Pair, workspaces: Workspaces) -> Pair:
    """Return the pair with the quantized weight in the reading that is nearest to the original."""
    first = pair.quantized
    bar = CLOSE_READING if first.close_alternatives else READING
    others = ((pair.original, other) for other in first.alternatives)
    choice = choose_nearest((pair.original, first), others, bar, workspaces)
    if choice.number is None:
        first.alternatives = ()  # no longer needed: they are as large as the weight
        return pair
    best = first.alternatives[choice.number]
    as_first = f"{choice.first:.3g}" if isfinite(choice.first) else "not finite"
    description = (
        f"read as {best.evidence[0]}: relative error {choice.least:.3g} on a sample; "
        f"{as_first} as label and shapes suggest ({first.evidence[0]})"
    )
    if first.undeclared:
        return replace(pair, quantized=replace(best, evidence=(*best.evidence, description)))
    return replace(pair, quantized=replace(best, warnings=(*first.warnings, description)))


def _choose_alternative(pair: Pair, other: Alternative, workspaces: Workspaces) -> Pair | Sequence[Leftover]:
    """Return the pair or, if the values favour its alternative, the alternative pair or its leftovers."""
    quantized = other.quantized or pair.quantized
    choice = choose_nearest((pair.original, pair.quantized), [(other.original, quantized)], other.bar, workspaces)
    if choice.number is None:
        return replace(pair, alternative=None)
    if other.leftovers:
        return other.leftovers
    error = f"{choice.least:.3g}"
    evidence = [text.format(error=error) for text in (other.evidence,) if text]
    warnings = [text.format(error=error) for text in (other.warning,) if text]
    quantized = replace(quantized, evidence=(*quantized.evidence, *evidence), warnings=(*quantized.warnings, *warnings))
    return replace(pair, original=other.original, quantized=quantized, alternative=None)
