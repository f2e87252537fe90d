"""Shell completion: names from tables and the guide, so that completing imports no torch."""

import re
from collections.abc import Iterable
from glob import escape, glob

FORMAT = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)  # a row of the guide's table


def presets(incomplete: str) -> list[str]:
    """Return the presets of thresholds and the TOML files that begin with ``incomplete``."""
    from quanterr.gates.rules import PRESETS

    return [*_filter_prefix(PRESETS, incomplete), *sorted(glob(f"{escape(incomplete)}*.toml"))]


def topics(incomplete: str) -> list[str]:
    """Return the pages of the guide that begin with ``incomplete``."""
    from quanterr.guide import TOPICS

    return _filter_prefix(TOPICS, incomplete)


def names(incomplete: str) -> list[str]:
    """Return the names that explain knows and that begin with ``incomplete``."""
    from quanterr.guide import KINDS, list_names

    return [*_filter_prefix(list_names(KINDS), incomplete), *formats(incomplete)]


def formats(incomplete: str) -> list[str]:
    """Return the supported formats that begin with ``incomplete``."""
    from quanterr.guide import read_page

    return _filter_prefix(FORMAT.findall(read_page("formats")), incomplete)


def _filter_prefix(known: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in known if name.startswith(incomplete)]
