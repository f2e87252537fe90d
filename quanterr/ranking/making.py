"""Makes a ranking from reports of several candidates: their order, the Pareto front, and swaps of layers.

The pooled SNR of a report covers only the layers that differ in its candidate, so those of several reports are not
comparable. Here, Σe² is summed over the same layers for all candidates; identical layers count as 0.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log10
from pathlib import PurePath
from typing import NamedTuple

from quanterr.advice.kept_layers import (
    DTYPES,
    MAX_PROPOSED,
    Budget,
    KeptLayer,
    choose_few,
    choose_within,
    cut_at_knee,
    find_bound_layers,
    order_by_worth,
)
from quanterr.advice.runtimes import load_together
from quanterr.documents.base import Tool
from quanterr.documents.comparison.layer import StoredSizes, find_sizes
from quanterr.documents.comparison.model import Report
from quanterr.documents.gate_results import Reason, store_reasons
from quanterr.documents.ranking.model import Candidate, Choice, RankedLayer, Ranking, Swap, Swaps, WorstLayer
from quanterr.errors import UsageError
from quanterr.ranking.gains import find_gains
from quanterr.util.addresses import strip_credentials
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display, escape_surrogates
from quanterr.version import __version__

# Fields of a candidate that ranking fills in.
UNRANKED_FIELDS: JsonObject = {"rank": None, "on_front": False, "behind": None, "bytes": None, "bits_per_weight": None}
UNRANKED_FIELDS |= {"squared_error": None, "snr_db": None, "best_layers": 0}

OF_AGGREGATE = ("overall_snr_db", "weighted_snr_db", "predicted_kld", "excess_db", "predicted_output_error")

NO_AGGREGATE: JsonObject = dict.fromkeys(OF_AGGREGATE)

MIN_GAIN = 0.5  # minimum gain of a swap, in mean errors per layer: swaps of tiny layers gain next to nothing
# All swaps that add at most this share of a candidate's bytes are proposed, and at least the best MAX_PROPOSED.
MAX_FREE_SHARE = 0.01
SUFFIXES = (".safetensors", ".sft", ".gguf")


UNQUANTIZED_FORMAT = "dense"  # the format of unquantized weights


class StoredTensor(NamedTuple):
    """A tensor as stored by one candidate."""

    format: str
    elements: int
    sizes: StoredSizes
    error: float  # Σe²
    signal: float | None  # Σx²; None if identical on both sides, as reports omit it then
    dtype: str  # dtype in the original
    is_layer: bool  # True for a weight; False for a norm, bias or other 1-D tensor
    margin: float | None = None  # half-width of the 95 % interval of an estimated SNR [dB]


@dataclass(slots=True, eq=False)
class Rankable:
    """A candidate whose report allows a rank."""

    name: str
    row: Candidate  # fields from its own report
    tensors: dict[str, StoredTensor]
    bound: set[str]  # layers that are valid only with another tensor of this candidate
    nbytes: int = 0
    error: float = 0.0


def name_candidates(paths: Sequence[str], given: Sequence[str] = ()) -> list[str]:
    """Return short, distinct names of candidates: the last parts of their paths, without a common suffix.

    The first ones have the ``given`` names.

    Raises:
        UsageError: there are fewer than two candidates, or one, or a name, is given twice.
    """
    if len(paths) < 2:
        raise UsageError("give at least two candidates; for one use quanterr compare")
    return shorten_names(paths, given)


def shorten_names(paths: Sequence[str], given: Sequence[str] = ()) -> list[str]:
    """Return short, distinct names for any number of candidates, as ``name_candidates`` does.

    Raises:
        UsageError: a candidate, or a name, is given twice.
    """
    if given:
        kept = [escape_surrogates(name) for name in given] + shorten_names(paths[len(given) :])
        if twice := next((name for name, n in Counter(kept).items() if n > 1), None):
            raise UsageError(f"{display(twice)}: two candidates have this name")
        return kept
    parts = [PurePath(os.path.abspath(strip_credentials(path))).parts for path in paths]
    for n, path in enumerate(paths):
        if parts[n] in parts[:n]:
            raise UsageError(f"{display(path)} is given twice")
    names = []
    for parts_of_path in parts:
        length = next(
            n for n in range(1, len(parts_of_path) + 1) if sum(other[-n:] == parts_of_path[-n:] for other in parts) == 1
        )
        names.append(escape_surrogates(PurePath(*parts_of_path[-length:]).as_posix()))
    shared = next((suffix for suffix in SUFFIXES if all(name.endswith(suffix) for name in names)), "")
    return [name.removesuffix(shared) for name in names]


def make_ranking(
    names: Sequence[str],
    reports: Sequence[Report],
    keep: Budget | None = None,
    recipes: Collection[str] = (),
    unreadable: Sequence[Candidate] = (),
) -> Ranking:
    """Return the ranking of candidates from their reports, which share one original and one selection.

    ``keep`` is the budget for layers to leave unquantized, proposed for each candidate. ``recipes`` are the names of
    candidates that are recipes, ``unreadable`` rows of further candidates.
    """
    by_name = dict(zip(names, reports, strict=True))
    excluded = {name: why for name, report in by_name.items() if (why := _find_exclusion(report))}
    chosen = [
        Rankable(
            name, _make_candidate(name, report, None), _collect_tensors(report), find_bound_layers(report.findings)
        )
        for name, report in by_name.items()
        if name not in excluded
    ]
    rest = [_make_candidate(name, by_name[name], why) for name, why in excluded.items()]
    rest += unreadable
    excluded |= {candidate.name: candidate.not_ranked or "" for candidate in unreadable}
    failed = {name: report for name, report in by_name.items() if report.verdict == "fail"}
    first = reports[0]
    reasons = [
        *(Reason(f"{name}: {why}", "result") for name, why in excluded.items()),
        *(Reason(f"{name}: {'; '.join(report.reasons)}", "gate") for name, report in failed.items()),
    ]
    return Ranking(
        tool=Tool(name="quanterr", version=__version__),
        verdict="inconclusive" if excluded else "fail" if failed else "pass",
        **store_reasons(reasons or [Reason("everything selected was compared in every candidate", "result")]),
        complete=all(report.complete for report in reports),
        original=first.original.path,
        original_bytes=first.original.bytes,
        selection=first.selection,
        gated=any(report.gated for report in reports),
        run=first.run,
        **compare_candidates(chosen, rest, keep, recipes),
    )


def compare_candidates(
    chosen: list[Rankable], rest: Sequence[Candidate], keep: Budget | None, recipes: Collection[str]
) -> JsonObject:
    """Return the fields of a ranking that compare candidates; ``rest`` are candidates without a rank."""
    names = set.intersection(*(set(candidate.tensors) for candidate in chosen)) if chosen else set()
    common = sorted(names, key=_make_natural_key)
    layers = [name for name in common if any(c.tensors[name].is_layer for c in chosen)]
    for candidate in chosen:
        candidate.nbytes = sum(candidate.tensors[name].sizes.quantized for name in common)
        candidate.error = sum(candidate.tensors[name].error for name in layers)
    chosen.sort(key=lambda candidate: (candidate.error, candidate.nbytes))
    signal = sum(_find_signal(chosen, name) for name in layers)
    elements = sum(chosen[0].tensors[name].elements for name in common) if chosen else 0
    in_layers = [_make_layer(chosen, name) for name in layers]
    rows = [*(_fill_rank(candidate, chosen, in_layers, signal, elements) for candidate in chosen), *rest]
    front = [candidate for candidate in chosen if _find_better(candidate, chosen) is None]
    swaps = [_find_swaps(candidate, chosen, layers, signal) for candidate in front]
    kept = [_propose_kept(candidate, layers, signal, keep) for candidate in (chosen if keep else chosen[:1])]
    return {
        "tensors": len(common),
        "elements": elements,
        "candidates": rows,
        "front": [candidate.name for candidate in sorted(front, key=lambda candidate: candidate.nbytes)],
        "swaps": [swaps_of_candidate for swaps_of_candidate in swaps if swaps_of_candidate.layers],
        "gains": find_gains(rows, recipes),
        "kept": [swaps_of_candidate for swaps_of_candidate in kept if swaps_of_candidate.layers],
        "layers": in_layers,
    }


def _make_natural_key(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts layers.2 before layers.10."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")]


def _find_exclusion(report: Report) -> str | None:
    """Return why a candidate cannot be ranked, or None."""
    if report.verdict == "inconclusive":
        return "; ".join(["inconclusive", *report.reasons])
    undefined = next((layer for layer in report.layers if None in (layer.error_norm, layer.original_norm)), None)
    return None if undefined is None else f"the error of {undefined.display_name} is undefined"


def _collect_tensors(report: Report) -> dict[str, StoredTensor]:
    """Return all compared tensors of a report by name."""
    tensors_by_name = {}
    for tensors, is_layer in ((report.layers, True), (report.other_changes, False)):
        for layer in tensors:
            error, signal = 0.0, None
            if is_layer and layer.squared_error is not None and layer.original_norm is not None:
                error, signal = layer.squared_error, layer.original_norm**2
            tensors_by_name[layer.layer_name] = StoredTensor(
                layer.format, layer.tensor_elements, find_sizes(layer), error, signal, layer.original_dtype, is_layer
            )
    for same in report.lossless:
        tensors_by_name[same.layer_name] = StoredTensor(
            same.format, same.tensor_elements, find_sizes(same), 0.0, None, same.original_dtype, False
        )
    return tensors_by_name


def _find_signal(chosen: Iterable[Rankable], name: str) -> float:
    """Return Σx² of a layer, from a candidate in which it differs."""
    return next(signal for c in chosen if (signal := c.tensors[name].signal) is not None)


def compute_snr(signal: float, error: float) -> float | None:
    """Return the SNR in dB; None if either value is zero."""
    return 10 * log10(signal / error) if signal and error else None


def _find_better(candidate: Rankable, others: Iterable[Rankable]) -> str | None:
    """Return the first candidate that is not worse in error and bytes, and better in one; None if there is none."""
    for other in others:
        no_worse = other.error <= candidate.error and other.nbytes <= candidate.nbytes
        if no_worse and (other.error, other.nbytes) != (candidate.error, candidate.nbytes):
            return other.name
    return None


def _make_candidate(name: str, report: Report, why_not: str | None) -> Candidate:
    """Return a candidate with the fields from its own report; ranking fills in the others."""
    worst = min(report.layers, key=lambda layer: (layer.snr_db is not None, layer.snr_db or 0.0), default=None)
    return Candidate(
        name=name,
        path=report.quantized.path,
        verdict=report.verdict,
        reasons=report.reasons,
        reasons_by=report.reasons_by,
        not_ranked=why_not,
        **UNRANKED_FIELDS,
        checkpoint_bytes=report.quantized.bytes,
        **{name: getattr(report.aggregate, name) for name in OF_AGGREGATE},
        worst_layer=WorstLayer(worst.layer_name, worst.display_name, worst.snr_db) if worst else None,
        formats=dict(Counter(layer.format for layer in report.layers)),
        findings=report.findings,
        gates=report.gates,
        loading=report.loading,
    )


def make_unreadable(name: str, path: str, reason: str) -> Candidate:
    """Return the row of a candidate that could not be read, with the reason."""
    why = f"cannot be read: {reason}"
    return Candidate(
        name=name,
        path=path,
        verdict="inconclusive",
        **store_reasons([Reason(why, "result")]),
        not_ranked=why,
        **UNRANKED_FIELDS,
        checkpoint_bytes=0,
        **NO_AGGREGATE,
        worst_layer=None,
        formats={},
        findings=[],
        gates=[],
        unreadable=True,
    )


def _fill_rank(
    candidate: Rankable, chosen: Sequence[Rankable], layers: Sequence[RankedLayer], signal: float, elements: int
) -> Candidate:
    """Return the row of a ranked candidate, with the fields that compare it with others."""
    row = candidate.row
    row.rank, row.behind = chosen.index(candidate) + 1, _find_better(candidate, chosen)
    row.on_front = row.behind is None
    row.bytes, row.squared_error, row.snr_db = candidate.nbytes, candidate.error, compute_snr(signal, candidate.error)
    row.bits_per_weight = 8 * candidate.nbytes / elements if elements else None
    row.best_layers = sum(layer.best == candidate.name for layer in layers)
    return row


def _make_layer(chosen: Sequence[Rankable], name: str) -> RankedLayer:
    signal = _find_signal(chosen, name)
    choices = []
    for candidate in chosen:
        stored = candidate.tensors[name]
        snr_db = compute_snr(signal, stored.error)
        size = stored.sizes.quantized
        choices.append(Choice(candidate.name, stored.format, size, stored.error, snr_db, stored.margin))
    best = min(choices, key=lambda choice: (choice.squared_error, choice.bytes))
    return RankedLayer(name, display(name), chosen[0].tensors[name].elements, best.candidate, choices)


def _find_swaps(candidate: Rankable, chosen: Sequence[Rankable], layers: Sequence[str], signal: float) -> Swaps:
    """Return the swaps of a candidate's layers with the largest gains per byte: all that add few bytes, or the best.

    If any runtime loads the candidate, a runtime also loads the result.
    """
    min_gain = MIN_GAIN * candidate.error / max(len(layers), 1)
    formats = {candidate.tensors[name].format for name in layers}
    candidates_for_swaps = []
    for name in layers:
        options = [swap for other in chosen if other is not candidate and (swap := _make_swap(candidate, other, name))]
        candidates_for_swaps += [swap for swap in options if -swap.squared_error_change >= min_gain]
    swaps: dict[str, Swap] = {}
    for swap in sorted(candidates_for_swaps, key=_swap_key):
        if swap.layer_name not in swaps and (swap.format in formats or load_together({*formats, swap.format})):
            formats.add(swap.format)
            swaps[swap.layer_name] = swap
    added = accumulate(swap.bytes_change for swap in swaps.values())
    free = sum(cost <= MAX_FREE_SHARE * candidate.nbytes for cost in added)
    return _sum_swaps(candidate, list(swaps.values())[: max(free, MAX_PROPOSED)], signal)


def _sum_swaps(candidate: Rankable, swaps: list[Swap], signal: float) -> Swaps:
    """Return several swaps with their total effect."""
    bytes_change = sum(swap.bytes_change for swap in swaps)
    error_change = sum(swap.squared_error_change for swap in swaps)
    return Swaps(
        candidate=candidate.name,
        layers=swaps,
        bytes_change=bytes_change,
        bytes=candidate.nbytes + bytes_change,
        squared_error_change=error_change,
        snr_db=compute_snr(signal, max(candidate.error + error_change, 0.0)),
    )


def _propose_kept(candidate: Rankable, layers: Sequence[str], signal: float, keep: Budget | None) -> Swaps:
    """Return layers to leave unquantized: those within a budget, or a few that cause a large part of the error."""
    stored = {name: candidate.tensors[name] for name in layers if name not in candidate.bound}
    added = {name: tensor.sizes.original - tensor.sizes.quantized for name, tensor in stored.items()}
    changed = [
        name for name, tensor in stored.items() if added[name] or tensor.format != UNQUANTIZED_FORMAT
    ]  # the other tensors stay as they are in the original
    ordered = order_by_worth(KeptLayer(name, added[name], stored[name].error) for name in changed)
    error = candidate.error
    kept = choose_within(ordered, keep, error) if keep else choose_few(ordered, error, candidate.nbytes)
    if keep and not keep.is_gain:
        kept = cut_at_knee(kept)
    dtypes = {layer.name: stored[layer.name].dtype for layer in kept}
    swaps = [
        Swap(
            layer.name,
            display(layer.name),
            None,
            DTYPES.get(dtype := dtypes[layer.name], dtype),
            layer.added,
            -layer.error,
        )
        for layer in kept
    ]
    return _sum_swaps(candidate, swaps, signal)


def _make_swap(candidate: Rankable, other: Rankable, name: str) -> Swap | None:
    """Return the swap of a layer for another candidate's, if that has less error and both can be stored alone."""
    was, would_be = candidate.tensors[name], other.tensors[name]
    if would_be.error >= was.error or name in candidate.bound or name in other.bound:
        return None
    bytes_change = would_be.sizes.quantized - was.sizes.quantized
    error_change = would_be.error - was.error
    return Swap(name, display(name), other.name, would_be.format, bytes_change, error_change)


def _swap_key(swap: Swap) -> tuple[bool, float]:
    """Return a sort key that orders swaps that add no bytes first, by gain, then all others by gain per byte."""
    costs = swap.bytes_change > 0
    return costs, swap.squared_error_change / (swap.bytes_change if costs else 1)
