"""Changed items of each kind of document with candidates, in the words and columns of diffs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from quanterr.outputs.sections import CellColumn

ABOUT = (
    "From two stored results. ± is a standard error as if both had read different tokens. Within chance: the change is "
    "no larger than different tokens would cause."
)


class ItemWords(NamedTuple):
    """How a diff shows the changed items of a kind of document."""

    worse: str  # "12 layers …" above the items that are worse, and those that are better
    better: str
    columns: Sequence[CellColumn[Any]]
    ends: Callable[[Any], tuple[object, object, object]]  # the old value, the new one and the change, for CSV
    about: str = ABOUT
