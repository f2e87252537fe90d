"""Memory bandwidth of accelerators and computers, from data sheets [GB/s = 10^9 bytes per second]."""

import re
from difflib import get_close_matches

from quanterr.errors import UsageError
from quanterr.util.text import display

# From data sheets of NVIDIA, AMD and Apple, for the variant of each with the largest memory (H100: SXM with 80 GB).
BANDWIDTH = {
    "B200": 8000.0,
    "H200": 4800.0,
    "H100": 3350.0,
    "A100": 2039.0,
    "L40S": 864.0,
    "L4": 300.0,
    "MI300X": 5300.0,
    "MI355X": 8000.0,
    "5090": 1792.0,
    "4090": 1008.0,
    "3090": 936.0,
    "M2-ultra": 800.0,
    "M3-max": 400.0,
    "M3-ultra": 819.0,
    "M4-max": 546.0,
}


def bandwidth_of(given: str) -> tuple[str, float]:
    """Return the name and the GB/s of a machine, given its name or a bandwidth such as ``900`` or ``900GB/s``.

    Raises:
        UsageError: the machine is unknown; the message suggests the nearest.
    """
    names = {name.lower(): name for name in BANDWIDTH}
    if name := names.get(given.strip().lower()):
        return name, BANDWIDTH[name]
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*(?:gb/s)?", given.strip().lower())
    if match and float(match[1]) > 0:
        return f"{float(match[1]):g} GB/s", float(match[1])
    near = get_close_matches(given.lower(), names, n=1)
    hint = f"did you mean {names[near[0]]}?" if near else f"give GB/s, or one of {', '.join(BANDWIDTH)}"
    raise UsageError(f"--hardware {display(given)}: unknown; {hint}")
