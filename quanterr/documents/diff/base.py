"""Base class of all diffs."""

from collections.abc import Callable
from dataclasses import asdict
from typing import IO, Any, NamedTuple, cast

from quanterr.documents.document import Result
from quanterr.documents.subjects import Item
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonObject

SAME_DB = 1e-6  # devices sum in different orders, so smaller changes are noise


class Difference(Result):
    """Base of diffs, which are dataclasses of plain data with a schema version."""

    @property
    def noun(self) -> str:
        """Always "diff"."""
        return "diff"

    def to_dict(self) -> JsonObject:
        """Return plain data for JSON."""
        return asdict(cast(Any, self))

    def write_json(self, file: IO[str]) -> None:
        """Write the diff as strict ASCII JSON."""
        file.write(strict_json.dumps(self.to_dict(), indent=1) + "\n")


class Changes(NamedTuple):
    """How two documents of a kind are compared."""

    item: str  # kind of items: weight, layer, pair
    # Returns how much worse the new item is than the old one, and the change; None if it is unchanged.
    compare: Callable[[Item, Item], tuple[float, Any] | None]
    find_difference: Callable[[Any, Any], str | None]  # returns why two documents are not comparable
