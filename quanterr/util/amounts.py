"""Amounts with units, as users write them: ``1.5GB``, ``500MiB``, ``3dB``."""

import re
from math import isfinite

from quanterr.errors import UsageError
from quanterr.util.text import display

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(option: str, text: str, examples: str) -> float:
    """Parse an option's amount of bytes, such as ``1.5GB``.

    Raises:
        UsageError: the text is not an amount of bytes; the message gives the ``examples``.
    """
    amount, unit = parse_amount(text)
    if unit not in UNITS:
        raise UsageError(f"{option} {display(text)}: give bytes, such as {examples}")
    return amount * UNITS[unit]


def parse_amount(text: str) -> tuple[float, str]:
    """Return a positive number and its unit in lower case; 0 and a question mark for any other text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*([a-z]*)", text.strip().lower())
    amount = float(match[1]) if match else 0.0
    return (amount, match[2]) if match and isfinite(amount) and amount > 0 else (0.0, "?")
