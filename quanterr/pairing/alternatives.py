"""Choice among the interpretations of a weight, before the run: the nearest to the original on a sample of values.

    a weight's alternatives    other interpretations of its tensors, where label and shapes allow several; tried only if
                               the first has a larger error than any correct one
    a pair's alternatives      other weights on either side: norms plus one, the original transposed
    experts in another order   see experts.py
    folded scales              see smoothing.py

Label, configuration, program and architecture determine how programs will read a file. If one of them prescribes an
interpretation, that one stays; if another fits much better, the file is wrong, which is reported as an error with both
numbers. If nothing prescribes an interpretation, the nearest one is chosen.

Earlier steps read only headers, except for reversed matrices and small tensors whose values show what they are.
"""

from collections.abc import Sequence
from itertools import chain
from math import isfinite

from msgspec.structs import replace

from quanterr.formats.reading import Reader, open_reader
from quanterr.pairing.experts import restore_experts
from quanterr.pairing.model import Alternative, Contradiction, Leftover, Pair, Pairing
from quanterr.pairing.sampling import CLOSE_INTERPRETATION, ORDER, InterpretationThreshold, choose_nearest
from quanterr.pairing.smoothing import undo_smoothing


def choose_alternatives(pairing: Pairing, undo: bool = True) -> Pairing:
    """Return the pairing after a choice among all alternatives; pairs without a clear choice are among the leftovers.

    With ``undo``, factors that a quantizer moved between weights are moved back, and experts that were reordered
    together with the rows of their router are put back in order.
    """
    pairs: list[Pair] = []
    leftovers = list(pairing.leftovers)
    with open_reader() as reader:
        for pair in pairing.pairs:
            is_doubted = pair.quantized.alternatives and not pair.quantized.codes.file.is_certain
            read = _choose_interpretation(pair, reader) if is_doubted or pair.original.alternatives else pair
            chosen = _choose_alternative(read, reader) if read.alternatives else read
            if isinstance(chosen, Pair):
                pairs.append(chosen)
            else:
                leftovers += chosen
        reordered = restore_experts(pairs, reader) if undo else []
        pairs, folded = undo_smoothing(pairs, reader, pairing.key_heads) if undo else (pairs, [])
    return replace(pairing, pairs=pairs, leftovers=leftovers, folded=folded, reordered=reordered)


def _choose_interpretation(pair: Pair, reader: Reader) -> Pair:
    """Return the pair in the prescribed interpretation, or else in the nearest one."""
    x, y = pair.original, pair.quantized
    others = chain(((x, other) for other in y.alternatives), ((other, y) for other in x.alternatives))
    bar = CLOSE_INTERPRETATION if y.close_alternatives or x.close_alternatives else ORDER
    choice = choose_nearest((x, y), others, bar, reader)
    if choice.number is None:
        y.alternatives = ()  # no longer needed: they are as large as the weight
        return pair
    of_x = choice.number - len(y.alternatives)
    first, best = (y, y.alternatives[choice.number]) if of_x < 0 else (x, x.alternatives[of_x])
    if first.prescribed:
        contradiction = Contradiction(first.evidence[0], best.evidence[0], choice.first, choice.min_error)
        y.alternatives = ()
        return replace(pair, contradiction=contradiction)
    as_first = f"{choice.first:.3g}" if isfinite(choice.first) else "not finite"
    description = (
        f"read as {best.evidence[0]}: relative error {choice.min_error:.3g} on a sample; "
        f"{as_first} as label and shapes suggest ({first.evidence[0]})"
    )
    if first.undeclared:
        chosen = replace(best, alternatives=(), evidence=(*best.evidence, description))
    else:
        chosen = replace(best, alternatives=(), warnings=(*first.warnings, description))
    return replace(pair, quantized=chosen) if of_x < 0 else replace(pair, original=chosen)


def _choose_alternative(pair: Pair, reader: Reader) -> Pair | Sequence[Leftover]:
    """Return the pair, in the nearest of its interpretations if nothing prescribes one; or its leftovers."""
    for bar in dict.fromkeys(other.bar for other in pair.alternatives):
        same = [other for other in pair.alternatives if other.bar == bar]
        chosen = _choose_among(pair, same, bar, reader)
        if chosen is not None:
            return chosen
    return replace(pair, alternatives=())


def _choose_among(
    pair: Pair, others: Sequence[Alternative], bar: InterpretationThreshold, reader: Reader
) -> Pair | Sequence[Leftover] | None:
    """Return the choice of the nearest alternative; None if none is nearer than the first interpretation."""
    tried = [(other.original, other.quantized or pair.quantized) for other in others]
    choice = choose_nearest((pair.original, pair.quantized), tried, bar, reader)
    if choice.number is None:
        return None
    other = others[choice.number]
    if other.leftovers:
        return other.leftovers
    if other.contradiction is not None:
        contradiction = other.contradiction._replace(prescribed_error=choice.first, other_error=choice.min_error)
        return replace(pair, alternatives=(), contradiction=contradiction)
    error = f"{choice.min_error:.3g}"
    evidence = [text.format(error=error) for text in (other.evidence,) if text]
    warnings = [text.format(error=error) for text in (other.warning,) if text]
    quantized = other.quantized or pair.quantized
    quantized = replace(quantized, evidence=(*quantized.evidence, *evidence), warnings=(*quantized.warnings, *warnings))
    return replace(pair, original=other.original, quantized=quantized, alternatives=())
