"""Outputs of all documents, by the suffix of the file that they are written to.

To add one: write its file with ``write(document, file)``, add its row here.
"""

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

SCHEMA = "quanterr.report"
NORM = "original_norm"  # of each tensor: identifies the original, the same on every device within a tolerance
FINGERPRINT = "original_fingerprint"  # of each tensor: of some of its bytes
BEGIN, END = "<!-- quanterr:begin -->", "<!-- quanterr:end -->"  # of the section in a user's document
LISTS = ("findings", "layers", "other_changes", "lossless", "not_compared")  # a report says how long they are


class Output(NamedTuple):
    """One rendering."""

    name: str
    suffix: str
    summary: str
    module: str  # imported when it is used

    @property
    def write(self) -> Callable[..., None]:
        """The function that writes it."""
        return import_module(self.module).write  # type: ignore[no-any-return]


OUTPUTS: tuple[Output, ...] = (
    Output("json", ".json", "everything, as strict JSON, for jq and for other commands", "quanterr.report.as_json"),
    Output("jsonl", ".jsonl", "the same as JSON Lines: the whole, then an item per line", "quanterr.report.as_jsonl"),
    Output("csv", ".csv", "an item per line, for spreadsheets and pandas", "quanterr.report.as_csv"),
    Output("html", ".html", "one page: answer, map, all layers; works offline", "quanterr.report.page"),
    Output("md", ".md", "a section for a model card", "quanterr.report.card"),
    Output("junit", ".xml", "JUnit XML, as CI systems show it", "quanterr.report.as_junit"),
)
