"""The table of outputs; the suffix of a file chooses one.

To add an output, write a module with ``write(document, file)`` and add a row here.
"""

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

BEGIN, END = "<!-- quanterr:begin -->", "<!-- quanterr:end -->"  # around a section in a user's document


class Output(NamedTuple):
    """An output: its name, the suffix of its file, and the module that writes it."""

    name: str
    suffix: str
    summary: str
    module: str  # imported on first use

    @property
    def write(self) -> Callable[..., None]:
        """The function that writes the output."""
        return import_module(self.module).write  # type: ignore[no-any-return]


OUTPUTS: tuple[Output, ...] = (
    Output("json", ".json", "everything, as strict JSON, for jq and for other commands", "quanterr.outputs.json"),
    Output("jsonl", ".jsonl", "the same as JSON Lines: the whole, then an item per line", "quanterr.outputs.jsonl"),
    Output("csv", ".csv", "an item per line, for spreadsheets and pandas", "quanterr.outputs.csv"),
    Output("html", ".html", "one page: answer, map, all layers; works offline", "quanterr.outputs.page.rendering"),
    Output("md", ".md", "a section for a model card", "quanterr.outputs.card"),
    Output("junit", ".xml", "JUnit XML, as CI systems show it", "quanterr.outputs.junit"),
)
# Plots of candidates, for results that have candidates.
PICTURE_OUTPUTS = (
    Output("svg", ".svg", "a plot of candidates by error and size, for model cards", "quanterr.outputs.svg"),
    Output("png", ".png", "the same, drawn by matplotlib", "quanterr.outputs.png"),
)
CANDIDATE_OUTPUTS = OUTPUTS + PICTURE_OUTPUTS
# What compare --every-code shows, for programs that sign and attest.
STATEMENT = Output("intoto", ".intoto.json", "a statement of origin, for signatures", "quanterr.documents.statement")
# Diffs have neither lists of items to stream nor tests.
DIFF_OUTPUTS = tuple(output for output in OUTPUTS if output.name not in ("jsonl", "junit"))
