"""How diffs name changed items of documents with candidates, and which columns they show."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from quanterr.outputs.sections import CellColumn

ABOUT = (
    "From two stored results. ± is a standard error computed as if the two had read different tokens. Within chance: "
    "other tokens could cause a change of this size."
)


class ItemWords(NamedTuple):
    """Words and columns with which a diff shows the changed items of a document."""

    worse: str  # ends the title "12 layers …" of the items that are worse
    better: str  # ends the title of the items that are better
    columns: Sequence[CellColumn[Any]]
    ends: Callable[[Any], tuple[object, object, object]]  # returns the old and new value and the change, for CSV
    about: str = ABOUT
