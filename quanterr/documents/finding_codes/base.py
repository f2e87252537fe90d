"""What the catalogue of findings says about each code."""

from typing import NamedTuple


class FindingCode(NamedTuple):
    """The entry of a code, which reports, the guide and ``quanterr explain`` show.

    Severities: info (worth knowing), warning (look at it), error (the result is unreliable).
    """

    severity: str  # one, or several in increasing order: "info, warning"
    meaning: str  # without a capital letter and a full stop: it follows the severities
    example: str  # a message as a report shows it; only ``quanterr explain`` shows the example
    remedy: str  # whole sentences

    @property
    def severities(self) -> list[str]:
        """The severities that findings of this code may have."""
        return self.severity.split(", ")
