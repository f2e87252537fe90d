"""The list of checks: functions that make findings, each with the codes of its findings and the data that it needs.

A check takes one argument, whose type follows from what the check is about (``Of``).
"""

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

from quanterr.documents.base import Finding
from quanterr.documents.finding_codes import CODES


class Needs(IntEnum):
    """The data that a check needs; each level includes those before it."""

    HEADERS = 0  # names, shapes and dtypes of stored tensors, and which format they are in
    DECLARED = 1  # configurations, labels and metadata
    VALUES = 2  # values of stored tensors
    RESULT = 3  # errors of compared weights


class Of(IntEnum):
    """The subject of a check, and the type of its argument."""

    EACH = 0  # ``Contents`` of each side of a comparison, or of a single checkpoint
    QUANTIZED = 1  # ``Contents`` of the quantized side of a comparison, or of a single checkpoint
    ALONE = 2  # ``Contents`` of a single checkpoint; in a comparison, the original shows more
    BOTH = 3  # ``Comparison``: the two sides
    WEIGHT = 4  # ``MeasuredWeight``: a compared weight whose sides differ
    WEIGHTS = 5  # ``layers.AllWeights``: all compared weights together
    LAST = 6  # ``layers.AllWeights``, too, but after the search for faults of weights, which ignores these findings


HEADERS, DECLARED, VALUES, RESULT = Needs
EACH, QUANTIZED, ALONE, BOTH, WEIGHT, WEIGHTS, LAST = Of
Function = TypeVar("Function", bound=Callable[[Any], Iterable[Finding]])


class Check(NamedTuple):
    """A check, as its decorator describes it."""

    function: Callable[[Any], Iterable[Finding]]
    codes: tuple[str, ...]
    needs: Needs
    of: Of


CHECKS: list[Check] = []  # in the order in which modules were imported; ``running.py`` sorts them


def check(*codes: str, needs: Needs, of: Of) -> Callable[[Function], Function]:
    """Add the function below to the checks; ``codes`` are those of its findings (``documents/finding_codes/``).

    Raises:
        ValueError: the catalogue lacks a code.
    """
    if unknown := [code for code in codes if code not in CODES]:
        raise ValueError(f"no entry in documents/finding_codes/: {', '.join(unknown)}")

    def register(function: Function) -> Function:
        CHECKS.append(Check(function, codes, needs, of))
        return function

    return register
