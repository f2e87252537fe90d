"""Perplexity from log-probabilities that a server returned for the tokens of a text.

Each line is the JSON of one chunk or request, in one of these forms:

    [-1.2, -0.3]                                                     natural logarithms
    {"logprobs": [-1.2, -0.3]}, {"token_logprobs": [null, -0.3]}     null: the first token has no prediction
    {"choices": [{"logprobs": {"token_logprobs": [null, -0.3]}}]}    OpenAI, completions with echo
    {"choices": [{"logprobs": {"content": [{"logprob": -0.3}]}}]}    OpenAI, chat
"""

import json
from math import exp, isfinite, sqrt
from typing import NamedTuple

from quanterr.errors import ReportError, UsageError
from quanterr.util.text import display


class Perplexity(NamedTuple):
    """The perplexity over the tokens of a file, with its standard error."""

    path: str
    tokens: int
    chunks: int
    ppl: float
    ppl_se: float


class Ratio(NamedTuple):
    """The perplexity ratio of two files; the standard error pairs equal tokens."""

    ln_ratio: float
    ln_ratio_se: float
    ratio: float


def read_logprobs(path: str) -> list[list[float]]:
    """Read log-probabilities (natural logarithms) by line.

    Raises:
        ReportError: the file is missing, a line has none of the forms, or a number is not finite or above 0.
    """
    where = display(path)
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line for line in file if line.strip()]
    except OSError as error:
        raise ReportError(f"{where}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ReportError(f"{where}: not UTF-8 text") from error
    numbers = [_read_numbers(line, f"{where}, line {n}") for n, line in enumerate(lines, 1)]
    if sum(map(len, numbers)) < 2:
        raise ReportError(f"{where}: found {sum(map(len, numbers))} log-probabilities; at least 2 are needed")
    return numbers


def _read_numbers(line: str, where: str) -> list[float]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ReportError(f"{where}: not JSON") from error
    values = []
    for number in (each for each in _find_list(value, where) if each is not None):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ReportError(f"{where}: {display(json.dumps(number), 40)} is not a log-probability")
        if not isfinite(number) or number > 0:
            raise ReportError(
                f"{where}: {number} is not a natural logarithm of a probability, which is finite and at most 0"
            )
        values.append(float(number))
    return values


def _find_list(value: object, where: str) -> list[object]:
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        if isinstance(choices := value.get("choices"), list):
            return [number for choice in choices for number in _read_choice(choice, where)]
        for key in ("token_logprobs", "logprobs"):
            if isinstance(value.get(key), list):
                return list(value[key])
    raise ReportError(f'{where}: no list of log-probabilities, such as {{"logprobs": [-1.2, -0.3]}}')


def _read_choice(choice: object, where: str) -> list[object]:
    logprobs = choice.get("logprobs") if isinstance(choice, dict) else None
    if isinstance(logprobs, dict):
        if isinstance(logprobs.get("token_logprobs"), list):
            return list(logprobs["token_logprobs"])
        content = logprobs.get("content")
        if isinstance(content, list) and all(isinstance(item, dict) and "logprob" in item for item in content):
            return [item["logprob"] for item in content]
    raise ReportError(f"{where}: a choice without log-probabilities; ask the server for logprobs")


def compute_perplexity(path: str, lines: list[list[float]]) -> Perplexity:
    """Return exp(mean of -ln p) with its standard error."""
    values = [-number for line in lines for number in line]
    mean, error = _compute_mean(values)
    return Perplexity(path, len(values), len(lines), exp(mean), exp(mean) * error)


def compute_ratio(lines: list[list[float]], baseline: list[list[float]]) -> Ratio:
    """Return the ratio of perplexities of two files.

    Raises:
        UsageError: the numbers of tokens differ, so the files are not about the same tokens.
    """
    if [len(line) for line in lines] != [len(line) for line in baseline]:
        counts = [sum(map(len, each)) for each in (lines, baseline)]
        raise UsageError(
            f"--baseline: {counts[1]:,} log-probabilities in {len(baseline):,} lines, but {counts[0]:,} in "
            f"{len(lines):,} in the other file: both must be about the same tokens"
        )
    pairs = zip(lines, baseline, strict=True)
    mean, error = _compute_mean([b - a for line, base_line in pairs for a, b in zip(line, base_line, strict=True)])
    return Ratio(mean, error, exp(mean))


def _compute_mean(values: list[float]) -> tuple[float, float]:
    n = len(values)
    mean = sum(values) / n
    return mean, sqrt(sum((value - mean) ** 2 for value in values) / n / (n - 1))
