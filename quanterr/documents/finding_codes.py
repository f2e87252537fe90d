"""The codes of findings, each with its meaning, an example and a remedy, read from the guide's page findings.md."""

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "guide" / "findings.md"
_SECTION = re.compile(r"^### (\w+)\n\n\*\*(.+)\*\*: (.+)\.\n\n```\n(.+)\n```\n\n(.+)$", re.MULTILINE)


class FindingCode(NamedTuple):
    """A section of the page.

    Severities: info (worth knowing), warning (look at it), error (the result is unreliable).
    """

    severities: tuple[str, ...]
    meaning: str
    example: str  # a message as a report shows it
    remedy: str


CODES: dict[str, FindingCode] = {
    name: FindingCode(tuple(severities.split(", ")), *texts)
    for name, severities, *texts in _SECTION.findall(PAGE.read_text("utf-8"))
}

# Name in reports of version 0.1.0 → present name.
FORMER_NAMES = {
    "far_off": "implausible_error",
    "order": "permuted",
    "one_sided": "biased_error",
    "below_group": "group_outlier",
    "layout_doubt": "ambiguous_layout",
    "another_weight": "swapped_weight",
    "odd_file": "nonstandard_file",
    "importance_of_nothing": "importance_unmatched",
}
