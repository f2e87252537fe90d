"""Derives the class of each tensor from the pass over its codes and from the findings about it.

Codes of a method that moves errors, learns a rounding or folds factors are not the nearest. They are `compensated` if
the method is declared, if there are as many as such a method leaves, if they are as near as it leaves them, and if no
finding about the layer is a warning. In the files of ``tests/golden_methods``:

    GPTQ          9 to 32 % of the codes are off, of which at most 0.2 % of all codes by three steps or more
    AutoRound     2.7 to 24 %, all by one step
    AWQ           0.1 to 1.5 %, all by one step, as factors are known only approximately
    imatrix       0.07 to 0.3 % of Q4_0 to Q5_1, all by one step; K types have the nearest codes
"""

from collections.abc import Iterable, Mapping, Sequence

from quanterr.checkpoints import Checkpoint
from quanterr.documents.base import Finding
from quanterr.documents.comparison.model import NotCompared
from quanterr.documents.comparison.origin import NOT_SHOWN, OriginClass, TensorOrigin
from quanterr.findings.methods import AWQ, Method, find_declared_method, find_method
from quanterr.origin.places import Places
from quanterr.origin.tracing import NO_PLACES, Trace
from quanterr.pairing.model import Pair, Pairing
from quanterr.util.text import display

IMATRIX = "quantize.imatrix.file"  # key of a GGUF file that was quantized with an importance matrix
MIN_MOVED_SHARE = 0.01  # share of codes that compensation and learned rounding move, at least
MAX_FOLDED_SHARE = 0.03  # share of codes that factors which are not known exactly move, at most
MAX_SEARCHED_SHARE = 0.01  # share of codes that a search by importance leaves beside the nearest, at most
MAX_FAR_SHARE = 0.01  # share of codes that compensation moves by three steps or more, at most


def classify(
    pairing: Pairing,
    traces: Sequence[Trace],
    quantized: Checkpoint,
    findings: Iterable[Finding],
    not_compared: Iterable[NotCompared],
) -> list[TensorOrigin]:
    """Return the class of each tensor, in the order of the pairing; then the tensors that were not compared."""
    lost = [
        TensorOrigin(
            layer_name=tensor.layer_name,
            display_name=tensor.display_name,
            kind=NOT_SHOWN,
            format=None,
            elements=tensor.elements,
            bytes=tensor.bytes,
            reason=f"not compared, of the {tensor.side} side: {tensor.reason}",
        )
        for tensor in not_compared
    ]
    refused = {tensor.layer_name for tensor in lost}
    classifier = _Classifier(pairing, quantized, findings)
    pairs = zip(pairing.pairs, traces, strict=True)
    return [*(classifier.classify(pair, trace) for pair, trace in pairs if pair.name not in refused), *lost]


class _Classifier:
    """Classifies tensors, with what the metadata of the whole checkpoint declares."""

    def __init__(self, pairing: Pairing, quantized: Checkpoint, findings: Iterable[Finding]) -> None:
        labels = pairing.labels.get("quantized")
        self._declared = find_declared_method(labels.config if labels else {})
        self._weighted = quantized.gguf is not None and IMATRIX in quantized.gguf.values
        self._folded = {name for fold in pairing.folded for name in fold.names}
        self._absorbed = {fold.source for fold in pairing.folded}
        doubted = [finding for finding in findings if finding.severity != "info" and finding.layer is not None]
        self._doubts: Mapping[str | None, Finding] = {finding.layer: finding for finding in reversed(doubted)}

    def classify(self, pair: Pair, trace: Trace) -> TensorOrigin:
        """Return the class of a pair's quantized tensor."""
        weight = pair.quantized
        origin_class, reason = self._find_class(pair, trace)
        off = NO_PLACES if origin_class == "nearest" else trace.off
        return TensorOrigin(
            layer_name=pair.name,
            display_name=display(pair.name),
            kind=origin_class,
            format=weight.format,
            elements=weight.n,
            bytes=weight.nbytes,
            recipe=trace.recipe or None,
            unlike=trace.unlike.n,
            unlike_places=tuple(trace.unlike.first),
            arithmetic=(trace.arithmetic or None) if origin_class == "nearest" else None,
            free_codes=trace.free if origin_class == "nearest" else None,
            scale_bits=_count_scale_bits(pair) if origin_class in ("nearest", "compensated") else None,
            off_codes=off.n,
            off_rows=off.rows,
            steps=tuple(off.steps) if any(off.steps) else (),
            places=tuple(off.first),
            reason=reason,
        )

    def _find_class(self, pair: Pair, trace: Trace) -> tuple[OriginClass, str | None]:
        """Return the class, and the reason why the tensor is in no better class."""
        if trace.is_copy:
            return "identical", None
        if trace.is_exact:
            return "exact", None
        few = f"{trace.recipe} gives all values but {trace.unlike.n:,}" if trace.recipe else ""
        if trace.is_nearest:
            return "nearest", few or None
        if trace.has_codes_of_recipe:
            return "nearest", f"{few}; all codes are its own, but not all scales"
        if few:
            return NOT_SHOWN, few
        if trace.reason:
            return NOT_SHOWN, trace.reason
        return self._judge_moved(pair, trace)

    def _judge_moved(self, pair: Pair, trace: Trace) -> tuple[OriginClass, str | None]:
        """Return the class of a tensor with codes that are not the nearest, or with changed numbers."""
        if not pair.quantized.has_codes:
            if pair.name in self._absorbed:
                return "compensated", "factors were folded into it, and out of the weights after it"
            return NOT_SHOWN, "numbers that are not the original's"
        if doubt := self._doubts.get(pair.name):
            return NOT_SHOWN, f"{doubt.code}: {doubt.statement}"
        method = find_method(self._declared, pair.quantized.format, pair.name in self._folded)
        why = _explain_moved(method, trace.moved, pair.quantized.n, self._weighted)
        return ("compensated", why) if why else (NOT_SHOWN, "codes that are not the nearest to the original's values")


def _explain_moved(method: Method, places: Places, n: int, weighted: bool) -> str | None:
    """Describe the method that explains so many codes that are not the nearest; return None if none does."""
    moved, far, several = places.n / n, places.steps[2] / n, places.steps[1] + places.steps[2]
    if method.may_compensate and moved >= MIN_MOVED_SHARE and far <= MAX_FAR_SHARE:
        return f"a method that compensates errors is {'declared' if method.compensates else 'common in such files'}"
    if method.learns and moved >= MIN_MOVED_SHARE and not several:
        return "a learned rounding is declared"
    if (method.folded or method is AWQ) and moved <= MAX_FOLDED_SHARE and not several:
        return "factors were folded into its columns, which are known approximately"
    if method.by_importance and weighted and moved <= MAX_SEARCHED_SHARE and not several:
        return "its scales were searched by importance"
    return None


def _count_scale_bits(pair: Pair) -> int | None:
    """Return the stored bits besides the codes: scales, zero points and other parts; None if unknown."""
    weight = pair.quantized
    return None if weight.code_bits is None else max(8 * weight.nbytes - weight.n * weight.code_bits, 0)
