"""What the shell offers after Tab: names from tables and from the guide, so that nothing imports torch."""

import re
from collections.abc import Iterable
from glob import escape, glob

FORMAT = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)  # a row of the guide's table


def presets(incomplete: str) -> list[str]:
    """Presets of thresholds, and TOML files."""
    from quanterr.gates.rules import PRESETS

    return [*_beginning(PRESETS, incomplete), *sorted(glob(f"{escape(incomplete)}*.toml"))]


def topics(incomplete: str) -> list[str]:
    """Pages of the guide."""
    from quanterr.guide import TOPICS

    return _beginning(TOPICS, incomplete)


def names(incomplete: str) -> list[str]:
    """What explain knows."""
    from quanterr.guide import KINDS

    known = (entry.name for kind in KINDS for entry in kind())
    return [*_beginning(dict.fromkeys(known), incomplete), *formats(incomplete)]


def formats(incomplete: str) -> list[str]:
    """Formats that are read."""
    from quanterr.guide import read_page

    return _beginning(FORMAT.findall(read_page("formats")), incomplete)


def _beginning(known: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in known if name.startswith(incomplete)]
