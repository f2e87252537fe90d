"""Proposes, below a result, the next command as a line that can be pasted."""

import json
import os
import shlex
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

from quanterr.util.addresses import clean_words

if TYPE_CHECKING:
    from quanterr.documents.comparison.model import Report
    from quanterr.documents.document import Document
    from quanterr.documents.plan.model import Plan
    from quanterr.documents.ranking.model import Candidate, Ranking

# Options of compare, rank, sweep and plan, without which the proposed command would be about other layers or errors.
SHARED_OPTIONS = ("-l", "--layers-to-compare", "--exclude", "--importance", "--sensitivity", "--cache")
SHARED_SWITCH = "--lenient"  # a shared option without a value
MIN_COMMAND_WORDS = 3  # minimum number of words in a recorded command line: quanterr, the command, a path


def suggest_after_report(
    report: "Report", sides: tuple[str, str], command: Sequence[str], wrote: Sequence[object]
) -> str:
    """Propose evaluate; for files that it cannot run, the report's page unless an output was written.

    Propose nothing if the verdict is inconclusive or the report's conclusion names doubts.
    """
    from quanterr.outputs.formatting import list_doubts

    if report.verdict == "inconclusive" or list_doubts(report.verdict, report.findings):
        return ""
    if asked := _list_inputs(sides[0]):
        return _join_command(["quanterr", "evaluate", *sides, *asked])
    return "" if wrote else _join_command([*command, "-o", "report.html"])


def suggest_after_rank(ranking: "Ranking", paths: Sequence[str], command: Sequence[str]) -> str:
    """Propose compare for the best stored candidate; if all were quantized on the fly, a plan with their recipes.

    Both keep the options of ``command`` that select and weight layers.
    """
    original, *files = paths
    ranked = [candidate for candidate in ranking.candidates if candidate.rank is not None]
    stored = [candidate.path for candidate in ranked if candidate.path in files]
    if stored:
        return _join_command(["quanterr", "compare", original, stored[0], *_list_shared(command), "-o", "report.html"])
    if files:
        return ""
    from statistics import median  # few commands need it, and importing it takes 3 ms

    from quanterr.advice.runtimes import load_together

    planned: list[Candidate] = []  # the best candidate, and those that a runtime loads together with it
    for candidate in ranked:
        if load_together({name for other in (*planned, candidate) for name in other.formats}):
            planned.append(candidate)
    bits = [candidate.bits_per_weight for candidate in planned if candidate.bits_per_weight is not None]
    if len(bits) < 2:
        return ""
    recipes = ",".join(candidate.name for candidate in planned)
    budget = ceil(100 * median(bits)) / 100  # rounded up, so that it can be met
    return _join_command(
        ["quanterr", "plan", original, "--bits", f"{budget:g}", "--to", recipes, *_list_shared(command)]
    )


def suggest_after_plan(plan: "Plan", command: Sequence[str]) -> str:
    """Propose to export the plan for the first program that can write all its recipes, unless it was exported."""
    if any(word.partition("=")[0] == "--export" for word in command):
        return ""
    from quanterr.planning.exports import consumers_of

    programs = consumers_of(plan)
    words = [word for word in command if word not in ("-q", "--quiet")]  # the export prints on stderr how to use it
    return _join_command([*words, "--export", programs[0]]) if programs else ""


def suggest_for_stored(document: "Document") -> str:
    """Propose the command that the run of a stored document proposed; empty if it proposed none."""
    from quanterr.documents.comparison.model import Report

    command = document.run.command
    if len(command) < MIN_COMMAND_WORDS:
        return ""
    if isinstance(document, Report):
        return suggest_after_report(document, (document.original.path, document.quantized.path), command, command)
    from quanterr.documents.plan.model import Plan
    from quanterr.documents.ranking.model import Ranking

    if isinstance(document, Ranking):
        files = [candidate.path for candidate in document.candidates if candidate.path in command]
        return suggest_after_rank(document, [document.original, *files], command)
    return suggest_after_plan(document, command) if isinstance(document, Plan) else ""


def _list_shared(command: Sequence[str]) -> list[str]:
    """Return the shared options of a command with their values."""
    options: list[str] = []
    for n, word in enumerate(command):
        if word in SHARED_OPTIONS:
            options += command[n : n + 2]
        elif word == SHARED_SWITCH or word.startswith(("-l", *(f"{flag}=" for flag in SHARED_OPTIONS))):  # or -lattn
            options.append(word)
    return options


def _list_inputs(original: str) -> list[str]:
    """Return the input options that evaluate needs for a folder's model; empty without a readable config.json."""
    try:
        with open(os.path.join(original, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError):
        return []
    if not isinstance(config, dict):
        return []
    return ["--inputs", "CALLS"] if "_class_name" in config else ["--text", "FILE"]


def _join_command(words: Sequence[str]) -> str:
    return shlex.join(clean_words(words))
