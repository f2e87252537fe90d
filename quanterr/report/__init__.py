"""Outputs: renderings of a report, by the suffix of the file they are written to.

To add one: write its file with ``write(report, file)``, add its row here.
"""

from collections.abc import Callable
from importlib import import_module
from typing import IO, TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from quanterr.report.model import Report


SCHEMA = "quanterr.report"


class Output(NamedTuple):
    """One rendering."""

    suffix: str
    summary: str
    module: str  # imported when it is used

    @property
    def write(self) -> "Callable[[Report, IO[str]], None]":
        """The function that writes it."""
        return import_module(self.module).write  # type: ignore[no-any-return]


OUTPUTS: tuple[Output, ...] = (
    Output(".json", "strict JSON, for jq and for other commands", "quanterr.report.as_json"),
)
