"""Changes of numbers that converters make, from the original to what is stored."""

from typing import NamedTuple


class Added(NamedTuple):
    """A number is added, as to norms that one program stores around zero and another around one."""

    number: float

    @property
    def text(self) -> str:
        """The change in words."""
        return "plus one" if self.number == 1 else f"plus {self.number:g}"


class NegatedExponential(NamedTuple):
    """-exp of each element, as Mamba computes A from the trained A_log."""

    text: str = "-exp of the original"


class Exponential(NamedTuple):
    """exp of each element."""

    text: str = "exp of the original"


class Multiplied(NamedTuple):
    """Rows times numbers of the configuration, from top to bottom: (rows, factor); None stands for all that follow."""

    factors: tuple[tuple[int | None, float], ...]
    source: str

    @property
    def text(self) -> str:
        """The change in words."""
        return f"times {self.source}"


Change = Added | NegatedExponential | Exponential | Multiplied
