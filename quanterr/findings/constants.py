"""Matrices that hold a single value, mostly zero, on both sides, so that metrics of errors do not show them.

The sums of errors prove zeros. To prove another value, the few matrices whose mean is as large as their largest element
are read again. This is a warning if another matrix of the same shape holds different values; otherwise somebody may
have made the matrix constant on purpose.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from quanterr.documents.base import Finding
from quanterr.findings.codes import make_finding
from quanterr.findings.limits import FLOAT32_TOLERANCE
from quanterr.formats import Weight
from quanterr.formats.reading import Reader
from quanterr.metrics.sums import RowSums, Sums, as_float
from quanterr.pairing.model import Pair
from quanterr.selection.roles import role_of, unify_numbers
from quanterr.tensors.chunks import CPU_CHUNK, Cut
from quanterr.util.text import count, itemize

# Matrices that may rightly be zero: those that are zero at the start of training and that training may not reach
# (LoRA's second matrix, ControlNet's zero convolutions), and the embedding of token types in models without types.
MAY_BE_ZERO = re.compile(r"lora_(?:B|up)\b|(?<![^\W_])zero_|token_type")
MAX_LISTED_EXPERTS = 8


def is_learned_matrix(pair: Pair) -> bool:
    """Return True for a matrix, or stack of matrices, whose elements differ in every trained model.

    Norms, biases, masks and tables that models compute may be constant, or the same in all blocks.
    """
    return min(pair.original.matrix) > 1 and _is_learned(unify_numbers(pair.name))


@lru_cache(maxsize=1 << 12)  # names without numbers repeat in all blocks and experts
def _is_learned(name: str) -> bool:
    role = role_of(name)
    if role == "norm" or name.endswith("bias"):
        return False
    return (name.endswith("weight") or role == "experts") and not MAY_BE_ZERO.search(name)


def is_kept(sums: Sums | RowSums) -> bool:
    """Return True if both sides have about the same values; otherwise other findings report their difference."""
    return 2 * sums.e_sq < sums.x_sq


class ConstantWeights:
    """Collector of matrices that are zero, or may be constant, on both sides."""

    def __init__(self, alone: bool = False) -> None:
        """Start without matrices; ``alone`` is True if a single checkpoint is examined, which then is both sides."""
        self._alone = alone
        self._zero: dict[int, tuple[Pair, list[int]]] = {}  # number → pair, and which matrices of a stack, if not all
        self._suspects: dict[int, Pair] = {}
        self._filled: set[tuple[int, ...]] = set()  # shapes of matrices that hold different values

    def add(self, number: int, pair: Pair, sums: Sums) -> bool:
        """Add a learned matrix; return True if it is, or may be, a single value."""
        if not sums.n or sums.nonfinite:
            return False
        if not sums.x_nonzero:
            if sums.exact:
                self._zero[number] = pair, []
            return True
        if abs(as_float(sums.x)) >= (1 - FLOAT32_TOLERANCE) * sums.n * sums.x_max:
            if is_kept(sums):
                self._suspects[number] = pair
            return True
        if zero := [n for n, row_sums in sums.matrices.items() if not row_sums.x_sq and not row_sums.e_max]:
            self._zero[number] = pair, sorted(zero)
        self._filled.add(pair.original.shape)
        return False

    def findings(self, reader: Reader) -> Iterator[Finding]:
        """Report the matrices, in the order of the pairing."""
        zero = [self._zero[number] for number in sorted(self._zero)]
        labels = [(pair, pair.name + _list_experts(experts)) for pair, experts in zero]
        suspects = [self._suspects[number] for number in sorted(self._suspects)]
        constant = [(pair, pair.name) for pair in _keep_constant(suspects, reader)]
        for what, labelled in (("zero", labels), ("a single value", constant)):
            for severity in ("warning", "info"):
                same = [
                    matrix
                    for matrix in labelled
                    if (matrix[0].original.shape in self._filled) == (severity == "warning")
                ]
                if same:
                    yield self._report(what, severity, same)

    def _report(self, what: str, severity: str, labelled: Sequence[tuple[Pair, str]]) -> Finding:
        """Report matrices, given with their labels."""
        pairs, labels = zip(*labelled, strict=True)
        where, whose = ("", "the checkpoint") if self._alone else (" on both sides", "the original")
        message = (
            f"{count(len(pairs), 'weight')} {'is' if len(pairs) == 1 else 'are'} {what} throughout{where}: "
            f"{itemize(labels, 4)}; trained matrices are not{'' if self._alone else ', and no metric shows it'}"
        )
        remedy = (
            f"compare {whose} with the one from which it was converted or uploaded: its values were lost, "
            "unless somebody set them on purpose"
        )
        return make_finding("constant_weight", severity, None, message, remedy, layers=[pair.name for pair in pairs])


def _list_experts(numbers: Sequence[int]) -> str:
    """Return a suffix with the numbers of the matrices of a stack; empty if there are none."""
    if not numbers:
        return ""
    more = ", …" if len(numbers) > MAX_LISTED_EXPERTS else ""
    return (
        f" ({'expert' if len(numbers) == 1 else 'experts'} {', '.join(map(str, numbers[:MAX_LISTED_EXPERTS]))}{more})"
    )


def _keep_constant(pairs: Iterable[Pair], reader: Reader) -> Iterator[Pair]:
    """Return the pairs of which both sides hold a single value each; reading stops at the first other value."""
    for pair in pairs:
        if all(_is_constant(side, reader) for side in (pair.original, pair.quantized)):
            yield pair


def _is_constant(weight: Weight, reader: Reader) -> bool:
    first: float | None = None
    for chunk in Cut(*weight.matrix, CPU_CHUNK):
        values = reader.read(weight, chunk)
        first = float(values[0, 0]) if first is None else first
        if not bool((values == first).all()):
            return False
    return True
