"""The catalogue of findings: each code with its severities, its meaning, an example and a remedy.

A module for each heading of the guide's page findings.md, which ``tests/make_guide.py`` makes from these entries.
"""

from quanterr.documents.finding_codes import (
    declarations,
    errors,
    files,
    inputs,
    repairs,
    requests,
    scales,
    unquantized,
    values,
)
from quanterr.documents.finding_codes.base import FindingCode

__all__ = ["CODES", "FORMER_NAMES", "HEADINGS", "FindingCode"]

# In the order of the page.
HEADINGS: dict[str, dict[str, FindingCode]] = {
    module.TITLE: module.CODES
    for module in (files, declarations, scales, inputs, values, errors, repairs, unquantized, requests)
}
CODES: dict[str, FindingCode] = {code: entry for codes in HEADINGS.values() for code, entry in codes.items()}

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
