"""Damage that the values of one checkpoint show without an original, because no correct model has such values.

Scales of activations (activations.py), constants (constants.py) and repetitions (repeats.py) are checked elsewhere, by
collectors that also serve comparisons; here, both of their sides are the same checkpoint.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import sqrt
from statistics import median
from typing import NamedTuple

from quanterr.documents.base import Finding
from quanterr.findings.checks import ALONE, VALUES, check
from quanterr.findings.codes import make_finding
from quanterr.findings.constants import ConstantWeights, is_learned_matrix
from quanterr.findings.contents import Contents
from quanterr.findings.limits import MIN_PEERS, MIN_VALUES, MINOR_SHARE, OUTLIER_FACTOR
from quanterr.findings.repeats import RepeatedWeights
from quanterr.formats import Weight
from quanterr.formats.reading import Reader
from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.lazy_torch import Tensor, torch
from quanterr.metrics.sums import RowSums, Sums, exact
from quanterr.pairing.model import Pair
from quanterr.selection.roles import role_of, without_numbers
from quanterr.util.text import count, itemize

TOKEN_ROLES = ("embedding", "head")  # rows of tokens that no text has may be zero or all the same
MAX_LISTED_ROWS = 3
BLOCK_OUTLIER_FACTOR = 1e2  # maximum factor from the median of other blocks; experts have OUTLIER_FACTOR
REMEDY = "compare with the original, or quantize these layers again"


class RowValues(NamedTuple):
    """The values of each row of a weight, over its finite elements; (rows,) float64 each."""

    low: Tensor  # inf without a finite element
    high: Tensor  # -inf without a finite element
    energy: Tensor  # Σx²
    nonfinite: int = 0  # number of elements of all rows that are NaN or infinite
    minus_infinite: int = 0  # number of these that are -inf, as in masks

    @classmethod
    def join(cls, parts: "Sequence[RowValues]") -> "RowValues":
        """Join the values of consecutive rows."""
        low, high, energy = (torch.cat(list(tensors)) for tensors in list(zip(*parts, strict=True))[:3])
        return cls(low, high, energy, sum(part.nonfinite for part in parts), sum(part.minus_infinite for part in parts))


class CodeValues(NamedTuple):
    """The stored scales of a weight, and how it uses its codes."""

    scales: ScaleStatistics | None = None
    lost: int = 0  # number of elements that are zero because their scale is zero, although their code is not
    span: tuple[int, int, int] | None = None  # lowest and highest code in a sample, and the number of possible codes


@check(
    *("nonfinite_values", "scale_nonfinite", "scale_negative", "scale_zero", "unused_codes", "values_unlike"),
    *("constant_weight", "constant_rows", "repeated_weights"),
    needs=VALUES,
    of=ALONE,
)
def check_values(contents: Contents) -> Iterable[Finding]:
    """Return the findings of a pass over all values of a checkpoint."""
    return contents.value_findings(contents.reader)


class ValueFindings:
    """Collector of the weights of one checkpoint, which turns their values into findings at the end."""

    def __init__(self) -> None:
        """Start without weights."""
        self._constant, self._repeated = ConstantWeights(alone=True), RepeatedWeights(alone=True)
        self._notes: dict[str, dict[str, str]] = {}  # fault → name of a weight → its description
        self._sizes: dict[str, dict[str, float]] = {}  # weight without its numbers → name → root mean square

    def add(self, number: int, pair: Pair, rows: RowValues, codes: CodeValues) -> None:
        """Add a weight, ``number`` in the checkpoint; both sides of ``pair`` are this weight."""
        weight, name = pair.quantized, pair.name
        nonfinite = rows.nonfinite - (rows.minus_infinite if "mask" in name else 0)
        if nonfinite and not (codes.scales and codes.scales.nonfinite):
            self._note("nonfinite", name, f"{nonfinite:,} of {weight.n:,}")
        self._add_codes(name, codes)
        if not is_learned_matrix(pair):
            return
        sums = _make_sums(weight, rows)
        if not self._constant.add(number, pair, sums):
            self._repeated.add(number, pair, sums)
            self._add_rows(weight, rows)
        if not rows.nonfinite and sums.x_nonzero:
            size = sqrt(float(rows.energy.sum()) / weight.n)
            self._sizes.setdefault(without_numbers(name), {})[name] = size

    def _note(self, fault: str, name: str, description: str) -> None:
        self._notes.setdefault(fault, {})[name] = description

    def _add_codes(self, name: str, codes: CodeValues) -> None:
        scales = codes.scales
        if scales is not None:
            for fault, n in (("scale_nonfinite", scales.nonfinite), ("scale_negative", scales.negative)):
                if n:
                    self._note(fault, name, f"{n:,} of {scales.number:,}")
        if codes.lost:
            self._note("scale_zero", name, f"{count(codes.lost, 'element')} lost")
        if codes.span is not None and _is_narrow(*codes.span):
            low, high, number = codes.span
            self._note("unused_codes", name, f"{low} to {high} of {number} codes")

    def _add_rows(self, weight: Weight, rows: RowValues) -> None:
        """Note the rows of a weight that are constant, or larger than the others by OUTLIER_FACTOR."""
        constant, in_matrix = rows.low == rows.high, weight.matrix_rows or weight.matrix[0]
        _unmark_full(constant.view(-1, in_matrix))  # ``constants`` reports experts that are constant as a whole
        if weight.matrix[1] >= MIN_VALUES and role_of(weight.name) not in TOKEN_ROLES and bool(constant.any()):
            usual = len(weight.shape) > 3 or _are_last_rows(constant.view(-1, in_matrix))
            few = int(constant.sum()) <= MINOR_SHARE * len(constant)
            weak = few and _may_lose_rows(weight) and not bool(rows.low[constant].any())
            fault = "padding" if usual else "weak_rows" if weak else "constant_rows"
            self._note(fault, weight.name, _describe_rows(constant))
        largest = torch.maximum(rows.low.abs(), rows.high.abs())
        filled = largest[(largest > 0) & largest.isfinite()]
        if len(filled) >= MIN_PEERS:
            middle = float(filled.median())
            far = largest.isfinite() & (largest > OUTLIER_FACTOR * middle)
            if bool(far.any()):
                top = float(largest[far].amax())
                self._note("far_rows", weight.name, f"{_describe_rows(far)}: up to {top:.3g} for {middle:.3g}")

    def findings(self, reader: Reader) -> Iterator[Finding]:
        """Report all faults, with one finding for each fault; ``reader`` reads a few weights again."""
        self._note_outliers()
        for fault, (code, severity, what, remedy) in FINDINGS_BY_FAULT.items():
            if descriptions := self._notes.get(fault):
                names = list(descriptions)
                labels = [f"{name} ({description})" for name, description in descriptions.items()]
                message = f"{what} in {count(len(names), 'tensor')}: {itemize(labels, 3)}"
                layer = names[0] if len(names) == 1 else None
                yield make_finding(code, severity, layer, message, remedy, tensors=names)
        yield from self._constant.findings(reader)
        yield from self._repeated.findings(reader)

    def _note_outliers(self) -> None:
        """Note the weights that are far larger or smaller than the same weight in other blocks as a whole."""
        for group in self._sizes.values():
            for name, (size, middle) in _find_unlike(group).items():
                if name not in self._notes.get("far_rows", {}):
                    self._note("unlike", name, f"root mean square {size:.3g}, {middle:.3g} is the median")


# Fault → code, severity, words and remedy of its finding.
FINDINGS_BY_FAULT: Mapping[str, tuple[str, str, str, str]] = {
    "nonfinite": ("nonfinite_values", "error", "elements are NaN or infinite", REMEDY),
    "scale_nonfinite": ("scale_nonfinite", "error", "scales are NaN or infinite", REMEDY),
    "scale_negative": ("scale_negative", "warning", "scales are negative", REMEDY),
    "scale_zero": ("scale_zero", "warning", "scales are zero, but the codes that they apply to are not", REMEDY),
    "unused_codes": (
        "unused_codes", "warning", "scales are so large that half of the bits of a code would suffice", REMEDY,
    ),
    "constant_rows": (
        "constant_rows", "warning", "rows are a single value throughout, as no training leaves them", REMEDY,
    ),
    "padding": (
        "constant_rows", "info", "the last rows, or channels of convolutions, are a single value throughout",
        "nothing if they are padding, or channels that the model does not use",
    ),
    "weak_rows": (
        "constant_rows", "info", "rows are zero, perhaps because they are too small for a scale that rows share",
        "compare with the original, or use a scale per row",
    ),
    "far_rows": (
        "values_unlike", "warning",
        f"rows are more than {OUTLIER_FACTOR:,.0f} times as large as the median row", REMEDY,
    ),
    "unlike": (
        "values_unlike", "warning",
        f"values are {BLOCK_OUTLIER_FACTOR:.0f} times (of experts {OUTLIER_FACTOR:,.0f} times) as large or small as in "
        "other blocks",
        REMEDY,
    ),
}  # fmt: skip


def _make_sums(weight: Weight, rows: RowValues) -> Sums:
    """Return the sums of a comparison of a weight with itself, as far as its rows show them."""
    low, high = float(rows.low.amin()), float(rows.high.amax())
    largest = max(abs(low), abs(high))
    sums = Sums(elements=weight.n, n=weight.n - rows.nonfinite, nonfinite_quantized=rows.nonfinite)
    if largest > 0:
        sums.x_nonzero, sums.x_max, sums.x_sq = sums.n, largest, exact(float(rows.energy.sum()))
        sums.x = exact(sums.n * low) if low == high else 0  # 0 shows that the weight is not constant
    if weight.matrix_rows:
        energies = rows.energy.view(-1, weight.matrix_rows).sum(1).tolist()
        sums.matrices = {n: RowSums.from_energies(energy, 0.0, 0.0, False) for n, energy in enumerate(energies)}
    return sums


def _is_narrow(low: int, high: int, number: int) -> bool:
    """Return True if codes use so little of their range that half of the bits could hold them."""
    return (high - low + 1) ** 2 <= number


def _may_lose_rows(weight: Weight) -> bool:
    """Return True if rows share the scales of integer codes: a row far smaller than the others then becomes zero."""
    return weight.uniform_bits is not None and weight.scale is not None and weight.scale.n < weight.matrix[0]


def _unmark_full(marks: Tensor) -> None:
    """Remove the marks of matrices, (matrices, rows), all of whose rows are marked."""
    marks.masked_fill_(marks.all(1, keepdim=True), False)


def _are_last_rows(marks: Tensor) -> bool:
    """Return True if the marked rows are the last of each matrix, (matrices, rows)."""
    return bool((marks.int().diff(dim=1) >= 0).all())


def _describe_rows(marks: Tensor) -> str:
    """Return the number of marked rows, and the first of them."""
    places = marks.nonzero().view(-1)
    more = ", …" if len(places) > MAX_LISTED_ROWS else ""
    return f"{count(len(places), 'row')}: {', '.join(map(str, places[:MAX_LISTED_ROWS].tolist()))}{more}"


def _find_unlike(group: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return the weights whose size is far from the median of the group; each with its size and the median."""
    if len(group) < MIN_PEERS:
        return {}
    middle = median(group.values())
    limits = {name: OUTLIER_FACTOR if role_of(name) == "experts" else BLOCK_OUTLIER_FACTOR for name in group}
    far = {name for name, size in group.items() if not middle / limits[name] <= size <= middle * limits[name]}
    return {name: (group[name], middle) for name in group if name in far}
