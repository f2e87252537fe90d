"""Shell completion: names from tables and the guide, so that completing imports no torch."""

import re
from collections.abc import Iterable
from glob import escape, glob

NAME = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)  # in a row of the guide's tables of formats and recipes
PROGRAMS = ("llama-quantize", "llmcompressor", "torchao", "modelopt", "bitsandbytes", "convert_to_quant", "mlx")


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

    known = [*_filter_prefix(list_names(KINDS), incomplete), *formats(incomplete), *recipes(incomplete)]
    return list(dict.fromkeys(known))


def formats(incomplete: str) -> list[str]:
    """Return the supported formats that begin with ``incomplete``."""
    from quanterr.guide import read_page

    return _filter_prefix(NAME.findall(read_page("formats")), incomplete)


def recipes(incomplete: str) -> list[str]:
    """Return lists of recipes, separated by commas, whose last one is completed."""
    from quanterr.guide import read_page

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _filter_prefix(NAME.findall(read_page("plan")), last)]


def programs(incomplete: str) -> list[str]:
    """Return the programs that plans are exported for and that begin with ``incomplete``."""
    return _filter_prefix(PROGRAMS, incomplete)


def _filter_prefix(known: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in known if name.startswith(incomplete)]
