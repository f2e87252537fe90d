"""The outputs of a report, chosen by file suffix; ranking/ has the outputs of a ranking.

To add an output, write a module with ``write(report, file)`` and add a row here.
"""

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

SCHEMA = "quanterr.report"
NORM = "original_norm"  # norm of an original tensor: identifies it within a tolerance, as devices round differently
FINGERPRINT = "original_fingerprint"  # CRC-32 of some bytes of an original tensor
LISTS = ("findings", "layers", "other_changes", "lossless", "not_compared")  # lists whose lengths a report records


# Layer values that a large report repeats by column: rules read most of them, faster than layer by layer.
COLUMNS = (
    "layer_name",
    "format",
    "tensor_elements",
    "finite",
    "nonfinite",
    NORM,
    FINGERPRINT,
    "snr_db",
    "excess_db",
    "relative_error",
    "max_absolute_error",
)
MANY_LAYERS = 1000


class Output(NamedTuple):
    """One output: its name, suffix and module."""

    name: str
    suffix: str
    summary: str
    module: str  # imported on first use

    @property
    def write(self) -> Callable[..., None]:
        """The function that writes the output: ``write(document, file)``."""
        return import_module(self.module).write  # type: ignore[no-any-return]


OUTPUTS: tuple[Output, ...] = (
    Output("json", ".json", "everything, as strict JSON, for jq and for other commands", "quanterr.report.as_json"),
    Output("jsonl", ".jsonl", "the same as JSON Lines: the report, then a layer per line", "quanterr.report.as_jsonl"),
    Output("csv", ".csv", "a layer per line, for spreadsheets and pandas", "quanterr.report.as_csv"),
    Output("html", ".html", "one page: map, distribution, all layers; works offline", "quanterr.report.page"),
    Output("md", ".md", "a section for a model card", "quanterr.report.card"),
    Output("junit", ".xml", "JUnit XML, as CI systems show it", "quanterr.report.as_junit"),
)
