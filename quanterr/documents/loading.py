"""Whether a runtime loads a checkpoint, as results state it."""

from typing import Annotated

from quanterr.documents.base import Model
from quanterr.metrics.scores import doc
from quanterr.util.text import count

LOADS, DIFFERS, REFUSES, NOT_KNOWN = "loads", "loads, but", "refuses", "not known"


class LoadingReason(Model):
    """A reason why a runtime does not load a checkpoint as it is stored, or why that is not known."""

    effect: Annotated[str, doc("`loads, but`, `refuses` or `not known`")]
    message: Annotated[str, doc("what the runtime does, without its name")]
    place: Annotated[str, doc("the place in its code; empty: the message is a finding's")]
    layers: Annotated[list[str], doc("names of the weights or tensors concerned")]


class Loading(Model):
    """Whether a runtime loads a checkpoint, by what was read in its code."""

    runtime: str
    version: Annotated[str, doc("the version or commit that was read")]
    verdict: Annotated[str, doc("`loads`, `loads, but` (not as it is stored), `refuses`, `not known`")]
    proof: Annotated[str, doc("`run`: the runtime has loaded files of these layouts; `read`: its code was read")]
    reasons: Annotated[list[LoadingReason], doc("the worst first; none: it loads")]

    @property
    def name(self) -> str:
        """The name of the runtime as rules and options write it."""
        return self.runtime.lower()

    @property
    def refusal(self) -> str | None:
        """Why the runtime refuses the checkpoint or may not load it as stored, in a sentence; None if it loads it."""
        return None if self.verdict == LOADS else f"{self.runtime} ({self.version}): {self.describe()}"

    def __str__(self) -> str:
        return f"{LOADS} ({self.proof})" if self.verdict == LOADS else self.verdict

    def describe(self) -> str:
        """Return the verdict with the worst reason."""
        if not self.reasons:
            return str(self)
        [worst, *others] = self.reasons
        more = f" (and {count(len(others), 'more reason')})" if others else ""
        place = f" [{worst.place}]" if worst.place else ""
        return f"{self}: {worst.message}{place}{more}"
