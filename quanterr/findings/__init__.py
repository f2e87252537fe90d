"""Findings: faults and suspicions, each with its evidence and a remedy.

Checks produce them. ``checks.py`` registers the checks, ``contents.py`` defines their arguments, ``running.py`` their
order, and the docstring of each module names the evidence that its checks use. The findings of compared weights are
collected here, as one may explain another.

Each check reports everything it sees. ``explanations`` drops findings that others explain, ``originals`` replaces those
that are wrong because the original is quantized, and ``merging`` merges findings that many weights share.

A finding of severity error makes the result inconclusive, because the numbers then do not measure rounding. So an
error needs proof: a repair that works, or an SNR that no correct weight has.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from operator import attrgetter

from msgspec.structs import replace

from quanterr.documents.base import Finding
from quanterr.findings.checks import LAST, WEIGHT, WEIGHTS
from quanterr.findings.codes import make_finding
from quanterr.findings.columns import name_moved_columns
from quanterr.findings.compensation import drop_compensated
from quanterr.findings.constants import ConstantWeights, is_learned_matrix
from quanterr.findings.contents import MeasuredWeight
from quanterr.findings.error_figures import compute_figures
from quanterr.findings.excess import (
    fits_signed_scales,
    has_moved_codes,
    has_nearest_codes,
    has_usual_excess,
    is_better_than_rounding,
    is_repairable,
    rounds_one_way,
    underflows,
)
from quanterr.findings.explanations import (
    CORRECTED_SCALES,
    FACTS,
    LOW,
    NEAR,
    ONE_WAY,
    SAMPLED,
    SIGNED,
    UNDERFLOWS,
    USUAL,
    Facts,
    drop_explained,
    list_weights,
)
from quanterr.findings.layers import (
    AllWeights,
    WeightSummary,
    detect_offset,
    find_common_factor,
    find_corrected_biases,
    find_group_outliers,
    is_norm_of_ones,
    report_common_factor,
    report_group_outliers,
)
from quanterr.findings.merging import merge_bad_rows, merge_excess
from quanterr.findings.methods import Method, find_declared_method, find_method
from quanterr.findings.originals import restate_for_another_original, restate_for_quantized_originals
from quanterr.findings.repeats import RepeatedWeights
from quanterr.findings.running import run_checks_of
from quanterr.findings.samples import (
    diagnose,
    drop_harmless_zero_scales,
    drop_limited_rows,
    find_cast_codes,
    measure_factor,
)
from quanterr.findings.scale_faults import COLUMN_FAULTS, FACTOR_FAULTS, ORDER_FAULTS
from quanterr.findings.scales import has_good_scales
from quanterr.findings.sharing import excuse_shared_scales
from quanterr.findings.sources import CodesReadAgain, check_scale_faults, check_sources, find_limited
from quanterr.findings.vectors import check_vectors, classify_shifted_copy
from quanterr.formats.reading import Reader
from quanterr.pairing.model import Pair, Pairing, WeightResult

__all__ = ["FindingCollector", "make_finding"]

DOUBTFUL_CODES = ("implausible_error", "group_outlier", "excess_error")  # findings whose weights are read again
MAX_PROOFS = 3  # maximum number of weights to read again to confirm that a common factor corrects them


class FindingCollector:
    """Collector of compared weights, which turns them into findings at the end."""

    def __init__(self, plan: Pairing) -> None:
        """Start without weights.

        Args:
            plan: the pairing of both checkpoints.
        """
        self._plan = plan
        self._folded = {fold.source.rpartition(".")[0] for fold in plan.folded}
        self._corrected = find_corrected_biases(plan.pairs)
        self._seen: list[WeightSummary] = []  # weights in the order of the calls of ``add``
        self._equal: dict[int, Pair] = {}
        self._of_weights: dict[int, list[Finding]] = {}
        self._constant, self._repeated = ConstantWeights(), RepeatedWeights()
        config = plan.labels["quantized"].config if "quantized" in plan.labels else {}
        vectors = {pair.name for pair in plan.pairs if len(pair.original.shape) == 1}
        self._by_norm = {name for fold in plan.folded if fold.source in vectors for name in fold.names}
        self._schemes = plan.labels["quantized"].declarations if "quantized" in plan.labels else None
        self._declared = find_declared_method(config)
        self._undone = {name for fold in plan.folded for name in fold.names}

    def add(self, done: WeightResult) -> None:
        """Add a compared weight; its sums are not kept."""
        pair = self._plan.pairs[done.number]
        if is_learned_matrix(pair) and not self._constant.add(done.number, pair, done.sums):
            self._repeated.add(done.number, pair, done.sums)
        if done.sums.exact:
            self._equal[done.number] = pair
            return
        method, too_small = self._find_method(pair), underflows(pair, done.sums)
        scheme = self._schemes.of(pair.quantized.name) if self._schemes else None
        findings = list(run_checks_of(WEIGHT, MeasuredWeight(pair, done, method, scheme)))
        nearest = has_nearest_codes(pair, done, method)
        good = has_good_scales(pair, done) and all(finding.code != "zero_points" for finding in findings)
        facts = {
            UNDERFLOWS: too_small,
            NEAR: nearest and good,
            USUAL: good and has_usual_excess(pair, done, method),
            ONE_WAY: rounds_one_way(done),
            SIGNED: fits_signed_scales(done),
        }
        if findings:
            self._of_weights[done.number] = findings
        figures = None if done.sums.nonfinite else compute_figures(pair, done.sums)
        self._seen.append(
            WeightSummary(
                done.number,
                pair,
                figures,
                done.scales,
                detect_offset(pair, done.sums),
                not done.sums.y_sq,
                _share_facts(*(fact for fact, is_true in facts.items() if is_true)),
                is_better_than_rounding(pair, done),
                done.attainable.snr_db if done.attainable and not nearest else None,
                nearest or not is_repairable(pair, done) or too_small,
                done.copy,
                done.attainable.excess_db if done.attainable else None,
                is_norm_of_ones(pair, done.sums),
                done.attainable.unlike_columns if done.attainable else (),
                has_moved_codes(pair, done, method),
            )
        )

    @property
    def _same(self) -> list[Pair]:
        """Weights that are identical on both sides, in the order of the pairing."""
        return [self._equal[number] for number in sorted(self._equal)]

    def findings(self, complete: bool, reader: Reader) -> list[Finding]:
        """Return all findings; for an interrupted run (not ``complete``) only those about single weights.

        Unlike checks, which are independent, the steps here follow each other: each searches for its fault (a common
        factor, codes without scales, faults of scales, repairs) in the weights for which no earlier step found one, or
        drops the findings that it explains.
        """
        seen = sorted(self._seen, key=attrgetter("number"))
        single = [finding for weight in seen for finding in self._of_weights.get(weight.number, ())]
        if not complete:
            return drop_explained(single, _gather_facts(seen, single))
        pairs = {weight.pair.name: weight.pair for weight in seen}
        single = drop_limited_rows(drop_harmless_zero_scales(single, pairs, reader), pairs, reader)
        compensated = {weight.pair.name: weight for weight in seen if self._find_method(weight.pair).may_compensate}
        single = excuse_shared_scales(drop_compensated(single, compensated, self._declared.compensates, reader), seen)
        single = name_moved_columns(single, seen, reader)
        about_all, scaled = self._check_all(seen, reader)
        outliers = find_group_outliers(seen)
        faulty = {finding.layer for finding in single if finding.code in SAMPLED and finding.severity != "info"}
        suspects = [outlier.weight for outlier in outliers if outlier.weight.pair.name not in faulty]
        limited = find_limited(suspects, reader)
        below = list(report_group_outliers(outliers, limited))
        single = [
            finding
            for finding in single
            if finding.layer not in limited or finding.code not in LOW or finding.severity == "error"
        ]
        doubtful = {finding.layer for finding in (*single, *below) if finding.code in DOUBTFUL_CODES}
        again = CodesReadAgain(reader, self._declared, self._folded, self._undone)
        scaled_names = {weight.pair.name for weight in seen if weight.number in scaled}
        # The values of other weights are known only approximately.
        exact = [weight for weight in seen if weight.pair.name not in scaled_names | self._undone]
        # Repairs may explain the errors of these weights better.
        damaged = {finding.layer for finding in single if finding.severity == "error"}
        faults = check_scale_faults(exact, again, ORDER_FAULTS)
        faults += check_scale_faults(
            [weight for weight in exact if weight.pair.name not in damaged], again, FACTOR_FAULTS
        )
        corrected = scaled_names.union(*map(list_weights, faults))
        casts = list(find_cast_codes(seen, doubtful, reader))
        others = [weight for weight in seen if weight.pair.name not in corrected.union(*map(list_weights, casts))]
        far = [weight for weight in others if not weight.nearest]
        repairs = list(diagnose(far, doubtful, self._plan.pairs, reader))
        vectors = list(check_vectors(others, self._folded, self._corrected, self._plan.pairs, reader))
        copies = [
            replace(weight, copy=classify_shifted_copy(weight, reader)) if weight.offset else weight for weight in seen
        ]
        last = run_checks_of(LAST, AllWeights(copies, self._same, self._plan, reader))
        broken = set[str]().union(
            *(list_weights(finding) for finding in (*about_all, *single, *repairs) if finding.severity == "error")
        )
        unbroken = [weight for weight in others if weight.pair.name not in broken]
        faults += check_scale_faults(
            [weight for weight in unbroken if weight.pair.name not in self._undone], again, COLUMN_FAULTS
        )
        sources = check_sources(unbroken, again)
        findings = [*about_all, *casts, *faults, *single, *sources, *repairs, *vectors, *below, *last]
        findings += [*self._constant.findings(reader), *self._repeated.findings(reader)]
        kept = restate_for_quantized_originals(drop_explained(findings, _gather_facts(seen, findings, corrected)), seen)
        return merge_bad_rows(merge_excess(restate_for_another_original(kept, seen)), len(seen))

    def _find_method(self, pair: Pair) -> Method:
        method = find_method(self._declared, pair.quantized.format, pair.name in self._undone)
        return method._replace(by_norm=True) if pair.name in self._by_norm else method

    def _check_all(self, seen: list[WeightSummary], reader: Reader) -> tuple[list[Finding], set[int]]:
        """Return the findings about all weights together, and the numbers of the weights that share one factor."""
        common, scaled = self._confirm_common_factor(
            [weight for weight in seen if not weight.nearest or (weight.figures and weight.figures.is_scaled)], reader
        )
        return [*common, *run_checks_of(WEIGHTS, AllWeights(seen, self._same, self._plan, reader))], scaled

    def _confirm_common_factor(self, seen: list[WeightSummary], reader: Reader) -> tuple[list[Finding], set[int]]:
        """Return the finding of a factor that many weights share, and their numbers, if a sample confirms it."""
        unfolded = [weight for weight in seen if weight.pair.name.rpartition(".")[0] not in self._folded]
        scaled = find_common_factor(unfolded)
        for weight in scaled[:MAX_PROOFS]:
            if weight.figures and (measured := measure_factor(weight.pair, weight.figures, not weight.nearest, reader)):
                return [report_common_factor(scaled, unfolded, *measured)], {weight.number for weight in scaled}
        return [], set()


@cache  # many weights refer to one object
def _share_facts(*facts: str) -> frozenset[str]:
    return frozenset(facts)


def _gather_facts(
    seen: Iterable[WeightSummary], findings: Sequence[Finding], corrected: Collection[str] = frozenset()
) -> Facts:
    """Map each fact to the names of the weights that have it, among the weights that the findings are about.

    Weights whose codes fit other scales (``corrected``) have no other fact, as facts are about the stored scales.
    """
    names = set[str]().union(*map(list_weights, findings)).difference(corrected)
    about = [weight for weight in seen if weight.pair.name in names]
    facts = {fact: {weight.pair.name for weight in about if fact in weight.facts} for fact in FACTS}
    return facts | {CORRECTED_SCALES: corrected}
