"""Subjects of a ranking for rules: each candidate with the layers that differ in at least one of them.

Diffs compare the SNR of layers.
"""

from dataclasses import dataclass
from math import inf

from quanterr.documents.comparison.same_original import find_other_source
from quanterr.documents.diff.base import SAME_DB, Changes
from quanterr.documents.diff.candidates.model import ItemChange
from quanterr.documents.gate_results import Reason, list_damage, list_waived
from quanterr.documents.ranking.model import Candidate, Ranking
from quanterr.documents.subjects import Item, Subject, Vocabulary, list_own_reasons
from quanterr.metrics.scores import collect_scores

OF_CANDIDATES = (
    *("rank", "bytes", "bits_per_weight", "squared_error", "snr_db", "snr_db_margin", "best_layers"),
    *("checkpoint_bytes", "overall_snr_db", "weighted_snr_db", "predicted_kld", "excess_db", "tokens_per_second"),
    *("predicted_output_error", "kld_mean", "ppl", "top1", "output_error"),
)
OF_LAYERS = ("bytes", "squared_error", "snr_db")

VOCABULARY = Vocabulary(
    "ranking",
    dict.fromkeys(OF_LAYERS, "layer"),
    OF_CANDIDATES,
    "bits_per_weight <= 4.5",
    scores=collect_scores(Candidate),
    loads=True,
)


def list_subjects(ranking: Ranking) -> list[Subject]:
    """Return the candidates."""
    return [_make_subject(ranking, candidate) for candidate in ranking.candidates]


def _make_subject(ranking: Ranking, candidate: Candidate) -> Subject:
    layers = [
        Item(layer.layer_name, "layer", choice)
        for layer in ranking.layers
        for choice in layer.choices
        if choice.candidate == candidate.name
    ]
    unreliable = list_own_reasons(candidate)
    if candidate.not_ranked:
        unreliable = unreliable or [Reason(f"not ranked: {candidate.not_ranked}", "result")]
    return Subject(
        VOCABULARY,
        layers,
        {metric: getattr(candidate, metric) for metric in OF_CANDIDATES},
        candidate.name,
        unreliable=unreliable,
        complete=ranking.complete,
        patterns=ranking.selection.patterns,
        damage=list_damage(candidate),
        loading=candidate.loading,
        waived=list_waived(candidate),
    )


@dataclass(slots=True)
class LayerChange(ItemChange):
    """A layer's SNR in a candidate of a ranking; null if identical to the original, or if the original is zero."""

    old_snr_db: float | None
    new_snr_db: float | None
    change_db: float | None


def _compare_layers(was: Item, now: Item) -> tuple[float, ItemChange] | None:
    levels = was.values.snr_db, now.values.snr_db
    x, y = (inf if level is None else level for level in levels)
    if x == y or abs(y - x) <= SAME_DB:
        return None
    return x - y, LayerChange(now.name, *levels, None if None in levels else y - x)


def _find_difference(old: Ranking, new: Ranking) -> str | None:
    return find_other_source(old, new) or (None if old.sample == new.sample else "it has a different sample of rows")


CHANGES = Changes("layer", _compare_layers, _find_difference)
