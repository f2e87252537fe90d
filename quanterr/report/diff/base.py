"""What changes between two results of any kind have in common."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import IO, Any, ClassVar, cast

from quanterr.errors import UsageError
from quanterr.report import OUTPUTS, Output
from quanterr.report.document import Declared
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display, size


class Difference(Declared):
    """What changed: a dataclass of plain data with a schema version."""

    OUTPUTS: ClassVar[tuple[Output, ...]] = tuple(one for one in OUTPUTS if one.name not in ("jsonl", "junit"))

    @property
    def noun(self) -> str:
        """What it is called."""
        return "diff"

    def to_dict(self) -> JsonObject:
        """Plain data for JSON."""
        return asdict(cast(Any, self))

    def to_json(self) -> str:
        """Strict, ASCII JSON."""
        return strict_json.dumps(self.to_dict(), indent=1) + "\n"

    def write_json(self, file: IO[str]) -> None:
        """Write it as strict, ASCII JSON."""
        file.write(self.to_json())


def refuse(names: tuple[str, str], why: str | None, force: bool) -> None:
    """Refuse to compare what does not belong together.

    Raises:
        UsageError: there is a reason, and it is not forced.
    """
    if why and not force:
        old, new = map(display, names)
        raise UsageError(f"{old} cannot be compared with {new}: {why}; --force compares them")


def answer(difference: str | None, changed: str) -> str:
    """What changed, with why the two do not belong together, where that was forced."""
    return changed if difference is None else f"not comparable: {difference}; {changed}"


def sizes(old: int, new: int) -> str:
    """``2.50 MiB -> 2.75 MiB (+10.00 %)``."""
    if old == new or not old:
        return size(new)
    return f"{size(old)} -> {size(new)} ({100 * (new - old) / old:+.2f} %)"


def counted(numbers: Iterable[tuple[int, str]]) -> str:
    """``4 worse, 2 better``: those that are not zero, but for the first two."""
    return ", ".join(f"{n:,} {word}" for place, (n, word) in enumerate(numbers) if n or place < 2)
