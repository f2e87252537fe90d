"""Where stored tensors can be read in several ways, the one that the original bears out.

A format gives the reading that label and shapes tell, and the others as its ``readings``. They are tried
on a few rows, and only where the first is further off than any right one: a switch is told as a doubt.
"""

from dataclasses import replace
from math import isfinite

from quanterr.formats import Weight
from quanterr.pairing.names import may_be_turned
from quanterr.pairing.plan import Pair
from quanterr.pairing.sampling import BETTER, RELATED, SUSPICIOUS, UNRELATED, Workspaces, on_cpu, relative_error
from quanterr.pairing.views import transposed

# Readings that differ by one step of the codes (rounding is a third of a step, one step more thrice as much) or in
# the edges of blocks: the wrong one cannot be nearer by this factor.
CLEARLY = 1.2


def choose_alternatives(pairs: list[Pair]) -> None:
    """Replace, in place, each pair that another reading of its tensors brings much closer together."""
    told = {_is_turned(pair) for pair in pairs if may_be_turned(pair.name, pair.original.shape) and not _square(pair)}
    with on_cpu() as workspaces:
        for number, pair in enumerate(pairs):
            if pair.quantized.alternatives:
                pairs[number] = replace(pair, quantized=_settled(pair, workspaces))
            if _may_be_turned(pair) and told != {False}:
                pairs[number] = _turned(pairs[number], workspaces, sure=True in told)


def _settled(pair: Pair, workspaces: Workspaces) -> Weight:
    first = pair.quantized
    error = relative_error(pair.original, first, workspaces)
    if error <= SUSPICIOUS and not first.close_alternatives:
        return first
    errors = [(relative_error(pair.original, weight, workspaces), weight) for weight in first.alternatives]
    least, best = min(errors, key=lambda found: found[0])
    if not least < error or (CLEARLY if first.close_alternatives else BETTER) * least > error:
        return first
    told = f"{error:.3g}" if isfinite(error) else "not finite"
    doubt = (
        f"read as {best.evidence[0]}: relative error {least:.3g} on a sample; "
        f"as label and shapes tell ({first.evidence[0]}) it is {told}"
    )
    return replace(best, warnings=(*first.warnings, doubt))


def _square(pair: Pair) -> bool:
    shape = pair.original.shape
    return len(shape) > 1 and shape[-1] == shape[-2]


def _is_turned(pair: Pair) -> bool:
    """Whether a weight that is not square was paired with its inputs and outputs swapped."""
    return pair.original.shape != pair.original.codes.shape


def _may_be_turned(pair: Pair) -> bool:
    return _square(pair) and pair.original.format == "dense" and may_be_turned(pair.name, pair.original.shape)


def _turned(pair: Pair, workspaces: Workspaces, sure: bool) -> Pair:
    """A square original the other way round, if that is how the quantized weight has it.

    ``sure``: weights that are not square, of which the shape tells, are the other way round too.
    """
    if relative_error(pair.original, pair.quantized, workspaces) < UNRELATED:
        return pair
    turned = transposed(pair.original)
    error = relative_error(turned, pair.quantized, workspaces)
    if not error < RELATED:
        return pair
    said = f"the original is stored [in, out]: relative error {error:.3g} on a sample when it is transposed"
    quantized = replace(pair.quantized, evidence=(*pair.quantized.evidence, said))
    if not sure:
        quantized = replace(
            quantized, warnings=(*quantized.warnings, f"{said}, and no weight that is not square tells so")
        )
    return replace(pair, original=turned, quantized=quantized)
