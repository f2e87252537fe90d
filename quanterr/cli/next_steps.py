"""What is worth asking next, as a command that can be pasted."""

import json
import os
import shlex
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from quanterr.util.addresses import strip_credentials
from quanterr.util.text import escape_surrogates

if TYPE_CHECKING:
    from quanterr.report.plan.model import Plan
    from quanterr.report.ranking.model import Ranking


def after_compare(original: str, quantized: str, command: Sequence[str], wrote: Sequence[object]) -> str:
    """Does the model still work; of files without a model, the page."""
    asked = _inputs_of(original)
    if asked:
        return _line(["quanterr", "evaluate", original, quantized, *asked])
    return "" if wrote else _line([*command, "-o", "report.html"])


def after_rank(ranking: "Ranking", paths: Sequence[str]) -> str:
    """The best candidate by itself; where all were quantized on the fly, a plan that mixes their recipes."""
    original, *files = paths
    ranked = [candidate for candidate in ranking.candidates if candidate.rank is not None]
    stored = [candidate.path for candidate in ranked if candidate.path in files]
    if stored:
        return _line(["quanterr", "compare", original, stored[0], "-o", "report.html"])
    bits = [candidate.bits_per_weight for candidate in ranked if candidate.bits_per_weight is not None]
    if files or len(bits) < 2:
        return ""
    recipes = ",".join(candidate.name for candidate in ranked)
    return _line(["quanterr", "plan", original, "--bits", f"{median(bits):.3g}", "--to", recipes])


def after_plan(plan: "Plan", command: Sequence[str]) -> str:
    """The plan for a program that writes all its recipes."""
    from quanterr.planning.exports import consumers_of

    programs = consumers_of(plan)
    return _line([*command, "--export", programs[0]]) if programs else ""


def _inputs_of(original: str) -> list[str]:
    """What evaluate needs for the model of a folder; nothing where it builds none."""
    try:
        with open(os.path.join(original, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError):
        return []
    if not isinstance(config, dict):
        return []
    return ["--inputs", "calls.safetensors"] if "_class_name" in config else ["--text", "text.txt"]


def _line(words: Sequence[str]) -> str:
    return shlex.join(escape_surrogates(strip_credentials(word)) for word in words)
