"""What config.json and the contents of small tensors say of a layout."""

import re
import struct

from quanterr.checkpoints import Entry
from quanterr.errors import FormatMismatch
from quanterr.formats.base import Parts
from quanterr.util.text import display

CODES = {"U8": "B", "I8": "b", "I16": "h", "U16": "H", "I32": "i", "U32": "I", "I64": "q", "U64": "Q"}

# A pattern comes with the file, and one with many repetitions may take for ever to match.
MAX_PATTERN, MAX_REPETITIONS = 512, 3


def check_told(parts: Parts, *names: str) -> tuple[str, ...]:
    """A doubt, where quant_method of config.json is none of the names of the layout that is stored.

    Raises:
        FormatMismatch: ComfyUI, whose labels know none of these layouts, labels it.
    """
    if parts.hints.labels:
        raise FormatMismatch(f"{parts.hints.labels[0]}, but its tensors are those of {names[0]}")
    method = parts.hints.config.get("quant_method")
    if not isinstance(method, str) or method.lower() in names:
        return ()
    return (f"config.json declares quant_method {display(method)}, but its tensors are those of {names[0]}",)


def matches(pattern: str, module: str, from_start: bool = False) -> bool:
    """Whether a regular expression of config.json is found in the name of a module; a risky one is not."""
    repetitions = sum(pattern.count(sign) for sign in "*+?{")
    if len(pattern) > MAX_PATTERN or repetitions > MAX_REPETITIONS or re.search(r"\)[*+?{]", pattern):
        return False
    try:
        return (re.match if from_start else re.search)(pattern, module) is not None
    except (re.error, OverflowError):
        return False


def integers(entry: Entry) -> list[int]:
    """All numbers of a small tensor of integers."""
    return list(struct.unpack(f"<{entry.n}{CODES[entry.dtype]}", entry.read()))


def check_permutation(entry: Entry, numbers: list[int]) -> None:
    """Refuse what is no order of as many columns.

    Raises:
        FormatMismatch: a number is missing, or there twice.
    """
    if sorted(numbers) != list(range(len(numbers))):
        raise FormatMismatch(f"{entry} should hold each number from 0 to {len(numbers) - 1} once")
