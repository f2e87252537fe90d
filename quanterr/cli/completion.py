"""Shell completion: names from tables and the guide, so that completing imports no torch.

typer offers the names that begin with the word before the cursor.
"""

import re
from glob import escape, glob

NAME = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)  # a row in the guide's tables of formats and recipes
PROGRAMS = ("llama-quantize", "llmcompressor", "torchao", "modelopt", "bitsandbytes", "convert_to_quant", "mlx")


def presets(incomplete: str) -> list[str]:
    """Return the presets of thresholds, and the TOML files that begin with ``incomplete``."""
    from quanterr.gates.rules import PRESETS

    return [*PRESETS, *sorted(glob(f"{escape(incomplete)}*.toml"))]


def topics() -> list[str]:
    """Return the pages of the guide."""
    from quanterr.guide import TOPICS

    return list(TOPICS)


def names() -> list[str]:
    """Return the names that explain knows."""
    from quanterr.guide import KINDS, list_names

    return list(dict.fromkeys([*list_names(KINDS), *formats(), *recipes("")]))


def formats() -> list[str]:
    """Return the supported formats."""
    from quanterr.guide import read_page

    return NAME.findall(read_page("formats"))


def recipes(incomplete: str) -> list[str]:
    """Return lists of recipes, separated by commas: the complete ones in ``incomplete``, followed by one more."""
    from quanterr.guide import read_page

    before, comma, _ = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in NAME.findall(read_page("plan"))]


def programs() -> list[str]:
    """Return the programs that plans are exported for."""
    return list(PROGRAMS)
