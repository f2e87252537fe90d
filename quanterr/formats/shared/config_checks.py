"""Checks of config.json and of the contents of small tensors against a layout."""

import re
import struct

from quanterr.checkpoints import Entry
from quanterr.errors import FormatMismatch
from quanterr.formats.base import Parts
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import display

CODES = {"U8": "B", "I8": "b", "I16": "h", "U16": "H", "I32": "i", "U32": "I", "I64": "q", "U64": "Q"}

# Patterns come from the file; a pattern with many repetitions could take exponential time to match.
MAX_PATTERN, MAX_REPETITIONS = 512, 3


def check_quant_method(parts: Parts, *names: str) -> tuple[str, ...]:
    """Return a warning if quant_method in config.json is not one of the stored layout's ``names``.

    Raises:
        FormatMismatch: the weight has a ComfyUI label, and ComfyUI has a label for none of these layouts.
    """
    if parts.hints.labels:
        raise FormatMismatch(f"{parts.hints.labels[0]}, but its tensors have the layout of {names[0]}")
    method = parts.hints.config.get("quant_method")
    if not isinstance(method, str) or method.lower() in names:
        return ()
    return (f"config.json declares quant_method {display(method)}, but its tensors have the layout of {names[0]}",)


def find_declared_method(config: JsonFields, *names: str) -> str | None:
    """Return the setting by which a configuration names a quantizer whose loaders prescribe how codes are read.

    ``names`` are beginnings of quant_method. Only ModelOpt writes quant_algo and quantized_layers. Return None if the
    configuration names none of these quantizers.
    """
    method, algorithm = config.get("quant_method"), config.get("quant_algo")
    if isinstance(method, str) and method.lower().startswith(names):
        return f"quant_method {display(method)}"
    if "modelopt" not in names or method is not None:
        return None
    if isinstance(algorithm, str):
        return f"quant_algo {display(algorithm)}"
    return "quantized_layers" if config.get("quantized_layers") else None


def matches(pattern: str, module: str, from_start: bool = False) -> bool:
    """Return whether a regular expression in config.json matches a module's name; risky patterns never match."""
    repetitions = sum(pattern.count(sign) for sign in "*+?{")
    if len(pattern) > MAX_PATTERN or repetitions > MAX_REPETITIONS or re.search(r"\)[*+?{]", pattern):
        return False
    try:
        return (re.match if from_start else re.search)(pattern, module) is not None
    except (re.error, OverflowError):
        return False


def read_integers(entry: Entry) -> list[int]:
    """Read all numbers of a small integer tensor."""
    return list(struct.unpack(f"<{entry.n}{CODES[entry.dtype]}", entry.read()))


def read_floats(entry: Entry) -> tuple[float, ...]:
    """Read all numbers of a small tensor of F32, BF16 or F16."""
    stored = entry.read()
    if entry.dtype == "BF16":  # the upper halves of float32 numbers
        stored = struct.pack(f"<{entry.n}I", *(half << 16 for half in struct.unpack(f"<{entry.n}H", stored)))
    return struct.unpack(f"<{entry.n}{'e' if entry.dtype == 'F16' else 'f'}", stored)


def check_permutation(entry: Entry, numbers: list[int]) -> None:
    """Check that ``numbers``, read from ``entry``, are a permutation.

    Raises:
        FormatMismatch: a number is missing or occurs twice.
    """
    if sorted(numbers) != list(range(len(numbers))):
        raise FormatMismatch(f"{entry} should hold each number from 0 to {len(numbers) - 1} once")
