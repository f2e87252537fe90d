"""The diff of two rankings, evaluations or plans, metric by metric: plain data with a schema version."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot, inf, log
from typing import Any, Literal, NamedTuple

from quanterr.documents.comparison.same_original import describe_selections, find_other_tensor
from quanterr.documents.diff.base import SAME_DB, Difference, check_comparable, pair_up
from quanterr.documents.document import Document
from quanterr.documents.evaluation.model import find_difference as of_evaluations
from quanterr.documents.images.model import find_difference as of_images
from quanterr.documents.kinds import DocumentKind
from quanterr.documents.plan.model import Plan
from quanterr.documents.ranking.model import Ranking
from quanterr.documents.subjects import WIDTH, Item, Subject
from quanterr.util.strict_json import JsonObject

SCHEMA_VERSION = "1.0"

Word = Literal["better", "worse", "unchanged"]

SAME = 0.01  # relative change of an output error up to which it counts as unchanged
SAME_SSIM = 1e-6


@dataclass(slots=True)
class MetricChange:
    """A metric of a candidate. ``chance``: whether the change is within the 95 % interval for different tokens."""

    metric: str
    old: float
    new: float
    change: float
    change_se: float | None  # standard error if both had read different tokens, so an upper bound; null: unknown
    chance: bool | None  # null: unknown
    word: Word


@dataclass(slots=True)
class WeightChange:
    """A weight whose output error changed by more than 1 %."""

    layer: str
    old_output_error: float
    new_output_error: float
    ratio: float | None  # null: the old error was 0


@dataclass(slots=True)
class LayerChange:
    """A layer's SNR in a candidate of a ranking; null if identical to the original, or if the original is zero."""

    layer: str
    old_snr_db: float | None
    new_snr_db: float | None
    change_db: float | None


@dataclass(slots=True)
class RecipeChange:
    """A layer whose planned recipe changed."""

    layer: str
    old_recipe: str
    new_recipe: str
    old_bytes: int
    new_bytes: int
    old_cost: float
    new_cost: float


@dataclass(slots=True)
class StoredChange:
    """A weight that is stored otherwise."""

    layer: str
    old_format: str | None
    new_format: str | None
    old_bytes: int
    new_bytes: int


@dataclass(slots=True)
class ImageChange:
    """A pair of images whose SSIM changed."""

    layer: str
    old_ssim: float
    new_ssim: float
    change: float


ItemChange = WeightChange | LayerChange | RecipeChange | StoredChange | ImageChange


@dataclass(slots=True)
class CandidateChange:
    """A candidate of both documents, or the plan (without verdicts). Items are sorted by change, the largest first."""

    name: str
    old_name: str
    old_verdict: str | None
    new_verdict: str | None
    old_bytes: int | None
    new_bytes: int | None
    metrics: list[MetricChange]
    worse: list[ItemChange]
    better: list[ItemChange]
    unchanged: int
    added: list[str]
    gone: list[str]


@dataclass(slots=True, repr=False)
class CandidateDiff(Difference):
    """The diff of two documents. If the comparison was forced, ``difference`` says why they are not comparable."""

    schema: str  # quanterr.evaluation_diff, quanterr.ranking_diff, quanterr.plan_diff
    schema_version: str
    old: str
    new: str
    difference: str | None
    candidates: list[CandidateChange]
    added: list[str]  # names of candidates
    gone: list[str]

    def _frame_rows(self) -> Iterator[JsonObject]:
        return self.rows()


class Changes(NamedTuple):
    """Functions that compare documents of a kind."""

    item: str  # kind of items: weight, layer
    changed: Callable[[Item, Item], tuple[float, ItemChange] | None]  # how much worse an item is; None: unchanged
    difference: Callable[[Any, Any], str | None]  # returns why two documents are not comparable


def diff_candidates(
    kind: DocumentKind, old: Document, new: Document, names: tuple[str, str], force: bool
) -> CandidateDiff:
    """Compare two documents of a kind, candidate by candidate.

    Raises:
        UsageError: their originals, texts or settings differ, and ``force`` is False.
    """
    document = kind.name.lower()
    why = CHANGES[document].difference(old, new)
    check_comparable(names, why, force)
    before, after = (_list_sides(kind, one) for one in (old, new))
    if len(before) == len(after) == 1:  # the same candidate, whatever its names
        before = dict(zip(after, before.values(), strict=True))
    both, added, gone = pair_up(before, after)
    changes = [_compare_sides(CHANGES[document], *pair) for pair in both]
    return CandidateDiff(f"quanterr.{document}_diff", SCHEMA_VERSION, *names, why, changes, added, gone)


class CandidateSide(NamedTuple):
    """A candidate in one of the documents."""

    name: str
    verdict: str | None
    bytes: int | None
    subject: Subject


def _list_sides(kind: DocumentKind, document: Document) -> dict[str, CandidateSide]:
    """Return the candidates by name; a document without candidates is one, named after its kind."""
    subjects: Sequence[Subject] = kind.values.list_subjects(document)
    names = [subject.name or kind.name.lower() for subject in subjects]
    candidates = getattr(document, "candidates", [document])
    return {
        name: CandidateSide(name, getattr(one, "verdict", None), getattr(one, "bytes", None), subject)
        for name, one, subject in zip(names, candidates, subjects, strict=True)
    }


def _compare_sides(how: Changes, was: CandidateSide, now: CandidateSide) -> CandidateChange:
    sides = (was.subject.items, now.subject.items)
    both, added, gone = pair_up(*({item.name: item for item in items if item.kind == how.item} for items in sides))
    found = [change for pair in both if (change := how.changed(*pair)) is not None]
    return CandidateChange(
        name=now.name,
        old_name=was.name,
        old_verdict=was.verdict,
        new_verdict=now.verdict,
        old_bytes=was.bytes,
        new_bytes=now.bytes,
        metrics=list(_compare_metrics(was.subject, now.subject)),
        worse=[item for by, item in sorted(found, key=lambda one: -one[0]) if by > 0],
        better=[item for by, item in sorted(found, key=lambda one: one[0]) if by <= 0],
        unchanged=len(both) - len(found),
        added=added,
        gone=gone,
    )


def _compare_metrics(was: Subject, now: Subject) -> Iterator[MetricChange]:
    for metric, score in now.vocabulary.scores.items():
        old, new = was.whole.get(metric), now.whole.get(metric)
        if old is None or new is None:
            continue
        errors = was.errors.get(metric), now.errors.get(metric)
        error = hypot(*(e for e in errors if e is not None)) if None not in errors else None
        chance = None if error is None else abs(new - old) <= WIDTH * error
        word: Word = "unchanged" if new == old else "better" if (new < old) == (score.better == "lower") else "worse"
        yield MetricChange(metric, old, new, new - old, error, chance, word)


def _compare_weight(was: Item, now: Item) -> tuple[float, ItemChange] | None:
    x, y = was.values.output_error, now.values.output_error
    if x is None or y is None or x == y:
        return None
    by = log(y / x) if x and y else inf if y else -inf
    return (by, WeightChange(now.name, x, y, y / x if x else None)) if abs(by) > log(1 + SAME) else None


def _compare_layer(was: Item, now: Item) -> tuple[float, ItemChange] | None:
    levels = was.values.snr_db, now.values.snr_db
    x, y = (inf if level is None else level for level in levels)
    if x == y or abs(y - x) <= SAME_DB:
        return None
    return x - y, LayerChange(now.name, *levels, None if None in levels else y - x)


def _compare_recipe(was: Item, now: Item) -> tuple[float, ItemChange] | None:
    old, new = was.values, now.values
    if old.recipe == new.recipe:
        return None
    pairs = (getattr(side, key) for key in ("recipe", "bytes", "cost") for side in (old, new))
    return new.cost - old.cost, RecipeChange(now.name, *pairs)


def _find_stored_change(was: Item, now: Item) -> tuple[float, ItemChange] | None:
    old, new = was.values, now.values
    if (old.format, old.bytes) == (new.format, new.bytes):
        return None
    return float(new.bytes - old.bytes), StoredChange(now.name, old.format, new.format, old.bytes, new.bytes)


def _compare_image(was: Item, now: Item) -> tuple[float, ItemChange] | None:
    x, y = was.values.ssim, now.values.ssim
    return None if abs(y - x) <= SAME_SSIM else (x - y, ImageChange(now.name, x, y, y - x))


def _find_ranking_difference(old: Ranking, new: Ranking) -> str | None:
    return _find_other_original(old, new) or (None if old.sample == new.sample else "it has a different sample of rows")


def _find_plan_difference(old: Plan, new: Plan) -> str | None:
    if old.measure != new.measure:
        return f"the cost is {old.measure} there, {new.measure} here"
    why = find_other_tensor(old.layers, new.layers)
    return f"it has a different original: {why}" if why else _find_other_original(old, new)


def _find_other_original(old: Ranking | Plan, new: Ranking | Plan) -> str | None:
    if old.original_bytes != new.original_bytes:
        return f"it has a different original: {old.original_bytes:,} bytes there, {new.original_bytes:,} here"
    if old.selection.patterns != new.selection.patterns:
        return describe_selections(old.selection.patterns, new.selection.patterns)
    return None


CHANGES: Mapping[str, Changes] = {
    "evaluation": Changes("weight", _compare_weight, of_evaluations),
    "ranking": Changes("layer", _compare_layer, _find_ranking_difference),
    "plan": Changes("layer", _compare_recipe, _find_plan_difference),
    "inspection": Changes("weight", _find_stored_change, lambda old, new: None),
    "images": Changes("pair", _compare_image, of_images),
}
