"""What all exports of plans share."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from quanterr.documents.plan.model import ORIGINAL, Plan

HEAD = "lm_head"
STACK = (1, 1, 1)  # stands for the shape of a stack of experts
INTEGER = re.compile(r"int(?P<bits>[2-8])_(?:g(?P<group>\d+)|(?P<channel>channel))(?P<asym>:asym)?")


class Consumer(NamedTuple):
    """A quantizing program: the recipes that it writes, and the form in which it reads a plan."""

    writes: Callable[[str], bool]
    export: Callable[[Plan, Mapping[str, Sequence[str]]], str]  # takes a plan, and recipe → modules
    takes_stacks: bool = False  # whether it can quantize stacks of experts
    file: str = ""  # the file that the command reads
    command: str = ""  # a command with {original} and {file}
    python: str = ""  # Python code with {original} and {file}, for a library
    reads: str = ""  # suffix of the original; empty for a folder
    mixes: bool = True  # whether a checkpoint can have several recipes


def list_kept_modules(modules: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the modules that stay unquantized: those that the plan leaves so, and the head if it is not planned."""
    kept = list(modules.get(ORIGINAL, ()))
    planned = [name for names in modules.values() for name in names]
    return kept if any(name.rpartition(".")[2] == HEAD for name in planned) else [HEAD, *kept]


def format_json(content: object) -> str:
    """Return the JSON that a program reads from a file."""
    return json.dumps(content, indent=1) + "\n"
