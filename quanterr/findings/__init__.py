"""Findings: what is wrong or suspicious, with the evidence and what to do about it.

From eleven kinds of evidence, by small functions that are independent of each other:

files       what was noted when they were opened, and where config.json contradicts them
configs     what both say of one model
structure   what a checkpoint says of its model: blocks, sizes, which layers are quantized
planned     headers, labels and what was tried before the run
activations the few stored numbers that scale activations
sums        the scales and sums of one weight
excess      a sample of it beside the nearest codes
scales      the same beside good scales
layers      all weights together
sources     a sample of weights that lost too much, whether they were made of other values
samples     repairs, tried on the first rows of the few weights that are worst off
vectors     norms and biases that differ much, read again

Each says all that it sees; ``explanations`` is the table of what explains what, ``merging`` says once what many show.

A finding of severity error makes the result inconclusive: it says that the numbers do not measure
rounding. So errors need proof, a repair that works or a level that no correct weight has.
"""

from quanterr.findings.activations import of_activations
from quanterr.findings.codes import finding
from quanterr.findings.excess import (
    allows_signs,
    has_nearest_codes,
    is_one_way,
    is_repairable,
    is_too_good,
    is_usual,
    of_attainable,
    underflows,
)
from quanterr.findings.explanations import FACTS, NEAR, ONE_WAY, SIGNED, UNDERFLOWS, USUAL, drop_explained, subjects
from quanterr.findings.figures import figures_of
from quanterr.findings.layers import (
    WeightSummary,
    biases_beside_codes,
    common_factor,
    constant_scales,
    group_outlier,
    identical,
    norm_offset,
    offset_of,
    unquantized_changed,
)
from quanterr.findings.merging import merge_bad_rows, merge_excess
from quanterr.findings.methods import Method, compensates
from quanterr.findings.outliers import outlier_columns
from quanterr.findings.planned import of_folding, of_importance, of_plan, of_sensitivity
from quanterr.findings.samples import diagnoses, lossless, lost_by_zero_scales, one_factor_mends, rounded_before
from quanterr.findings.scales import are_good, of_scales
from quanterr.findings.siblings import sibling_scales
from quanterr.findings.sources import of_sources
from quanterr.findings.sums import of_weight
from quanterr.findings.vectors import copy_once_shifted, of_vectors
from quanterr.pairing.model import Bucket, ComparedWeight, Pair, Pairing
from quanterr.pairing.sampling import on_cpu
from quanterr.report.base import Finding

__all__ = [
    "FindingCollector",
    "finding",
    "of_activations",
    "of_folding",
    "of_importance",
    "of_plan",
    "of_sensitivity",
]

DOUBTFUL = ("implausible_error", "group_outlier", "excess_error")  # codes of weights that are read again
PROOFS = 3  # weights that are read again, until one shows that a factor corrects it


class FindingCollector:
    """Takes in compared weights and returns the findings at the end."""

    def __init__(self, plan: Pairing) -> None:
        """Nothing noticed yet."""
        self._plan = plan
        self._folded = {one.source.rpartition(".")[0] for one in plan.folded}
        self._corrected = biases_beside_codes(plan.pairs)
        beside = {pair.name for pair in plan.pairs if pair.name.rpartition(".")[0] in self._folded}
        self._explained = self._corrected.union(beside, *(one.names for one in plan.folded))
        self._seen: dict[int, WeightSummary] = {}
        self._equal: dict[int, Pair] = {}
        self._of_weights: dict[int, list[Finding]] = {}
        self._facts: dict[str, set[str]] = {fact: set() for fact in FACTS}
        config = plan.labels["quantized"].config if "quantized" in plan.labels else {}
        self._compensates, self._undone = compensates(config), {name for one in plan.folded for name in one.names}

    def add(self, done: ComparedWeight) -> None:
        """Take in a compared weight; its sums are not kept."""
        pair = self._plan.pairs[done.number]
        if done.sums.exact:
            self._equal[done.number] = pair
            return
        method, too_small = Method(self._compensates, pair.name in self._undone), underflows(pair, done.sums)
        nearest, good = has_nearest_codes(pair, done, method), are_good(pair, done)
        near = nearest and good
        facts = {
            UNDERFLOWS: too_small,
            NEAR: near,
            USUAL: good and is_usual(pair, done, method),
            ONE_WAY: is_one_way(done),
            SIGNED: allows_signs(done),
        }
        for fact in facts:
            if facts[fact]:
                self._facts[fact].add(pair.name)
        if found := [*of_weight(pair, done), *of_attainable(pair, done, method), *of_scales(pair, done, method)]:
            self._of_weights[done.number] = found
        figures = None if done.sums.nonfinite else figures_of(pair, done.sums)
        self._seen[done.number] = WeightSummary(
            done.number,
            pair,
            figures,
            done.scales,
            offset_of(pair, done.sums),
            not done.sums.y_sq,
            near or too_small,
            is_too_good(pair, done),
            done.attainable.snr_db if done.attainable and not nearest else None,
            nearest or not is_repairable(pair, done) or too_small,
            done.copy,
            done.attainable.excess_db if done.attainable else None,
        )

    @property
    def _same(self) -> list[Pair]:
        """The weights that are the same on both sides, in the order of the plan."""
        return [self._equal[number] for number in sorted(self._equal)]

    def findings(self, complete: bool) -> list[Finding]:
        """All of them; of an interrupted run only what single weights show."""
        seen = [self._seen[number] for number in sorted(self._seen)]
        single = [found for one in seen for found in self._of_weights.get(one.number, ())]
        if not complete:
            return drop_explained(single, self._facts)
        single = lost_by_zero_scales(single, {one.pair.name: one.pair for one in seen})
        whole, alike = self._of_all(seen)
        below = list(group_outlier(seen))
        doubtful = {found.layer for found in (*single, *below) if found.code in DOUBTFUL}
        others = [one for one in seen if one.number not in alike]
        repairs = list(diagnoses([one for one in others if not one.nearest], doubtful, self._plan.pairs))
        vectors = list(of_vectors(others, self._folded, self._corrected, self._plan.pairs))
        coded = any(pair.quantized.has_codes for pair in self._plan.pairs)
        copies = [one._replace(copy=copy_once_shifted(one)) for one in seen]
        changed = unquantized_changed(copies, self._same, self._explained, coded)
        broken = set().union(*(subjects(one) for one in (*whole, *single, *repairs) if one.severity == "error"))
        apart = broken | self._undone  # factors that were undone are as near as codes show them, no nearer
        sources = of_sources([one for one in seen if one.pair.name not in apart], self._compensates)
        with on_cpu() as workspaces:
            siblings = list(sibling_scales(seen, workspaces[1]))
        found = drop_explained(
            [*whole, *single, *sources, *repairs, *vectors, *below, *changed, *siblings], self._facts
        )
        return merge_bad_rows(merge_excess(found), len(seen))

    def _of_all(self, seen: list[WeightSummary]) -> tuple[list[Finding], set[int]]:
        """What all weights together show; the numbers of those with one factor in common."""
        common, alike = self._common([one for one in seen if not one.nearest])
        found = [*common, *constant_scales(seen), *norm_offset(seen, self._plan.pairs)]
        selected = [leftover for leftover in self._plan.leftovers if leftover.bucket != Bucket.FILTERED_OUT]
        if self._same and not seen:
            coded = [p for p in self._same if p.original.n and p.quantized.has_codes and not p.original.has_codes]
            found.append(lossless(coded) if coded else identical(self._same, not selected))
        found += outlier_columns(seen)
        found += rounded_before([one.pair for one in seen if one.too_good], self._same if seen else ())
        return found, alike

    def _common(self, seen: list[WeightSummary]) -> tuple[list[Finding], set[int]]:
        """The factor that many weights have in common, if it corrects one of them; the numbers of those weights."""
        found, numbers = common_factor([one for one in seen if one.pair.name.rpartition(".")[0] not in self._folded])
        for number in sorted(numbers)[:PROOFS]:
            one = self._seen[number]
            if one.figures and one_factor_mends(one.pair, one.figures):
                return found, numbers
        return [], set()
