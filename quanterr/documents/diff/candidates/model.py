"""The diff of two documents with candidates, metric by metric: plain data with a schema version."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quanterr.documents.diff.base import Difference
from quanterr.util.strict_json import JsonObject

SCHEMA_VERSION = "1.0"

Word = Literal["better", "worse", "unchanged"]


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
class ItemChange:
    """A changed item; each kind of document has a class of its own, in its ``values.py``."""

    layer: str  # name of the item


@dataclass(slots=True)
class CandidateChange:
    """A candidate that both documents have, or the two plans, which have no verdicts.

    Items are sorted by change, the largest first.
    """

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
    """The diff of two documents. If the comparison was forced, ``difference`` explains why they are not comparable."""

    schema: str  # such as quanterr.ranking_diff
    schema_version: str
    old: str
    new: str
    difference: str | None
    candidates: list[CandidateChange]
    added: list[str]  # names of candidates
    gone: list[str]

    def _iterate_frame_rows(self) -> Iterator[JsonObject]:
        return self.rows()
