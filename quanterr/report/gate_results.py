"""What gates say of a report, as plain data that needs no pydantic: a stored report is judged without it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from quanterr.errors import Status

Word = Literal["pass", "fail", "inconclusive"]


@dataclass(slots=True)
class Violation:
    """Why a gate does not hold: one layer, or the whole where ``layer`` is null.

    ``observed`` is null where there is no finite number, as ``reason`` then says. ``margin`` is how far inside
    the limit it is: negative outside.
    """

    layer: str | None
    observed: float | None
    margin: float | None
    reason: str | None


@dataclass(slots=True)
class Gate:
    """One rule, judged.

    ``require`` is its condition, ``layers`` its patterns (none: every layer), ``reason`` why its author wants
    it. It decided for ``judged`` layers, of which ``identical`` are the same on both sides and hold, and left
    out ``skipped`` ones, which have no such number. ``observed`` is the value of the condition: of the layer
    nearest to the limit or furthest beyond it (``worst_layer``), or of all together; null where it is
    undefined or infinite. ``margin`` is how far inside ``limit`` it is: negative outside. ``violations``
    are all of them, the worst first. A gate of severity ``warn`` does not change the verdict.
    """

    id: str
    require: str
    layers: list[str]
    severity: Literal["error", "warn"]
    reason: str | None
    status: Literal["pass", "fail"]
    judged: int
    identical: int
    skipped: int
    observed: float | None
    limit: float
    margin: float | None
    worst_layer: str | None
    message: str
    violations: list[Violation]


class Verdict(NamedTuple):
    """What comes out for one thing that is judged."""

    verdict: Word
    reasons: list[str]
    gates: list[Gate]


class Judged(Protocol):
    """A report, a ranking, an evaluation, a candidate of them, the verdict on one."""

    @property
    def verdict(self) -> Word:
        """Of the whole."""

    @property
    def reasons(self) -> Sequence[str]:
        """Why."""

    @property
    def gates(self) -> Sequence[Gate]:
        """All of them."""


def exit_status(judged: Judged, allow_partial: bool = False) -> Status:
    """The status a result ends with: an unreliable one outranks a gate that does not hold."""
    if judged.verdict == "inconclusive" and not allow_partial:
        return Status.INCONCLUSIVE
    failed = any(gate.status == "fail" and gate.severity == "error" for gate in judged.gates)
    return Status.GATE_FAILED if failed else Status.OK
