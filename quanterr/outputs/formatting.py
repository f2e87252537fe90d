"""Functions that format numbers, findings and the results of gates for all outputs."""

from collections.abc import Iterable, Sequence
from math import floor, log10
from typing import TYPE_CHECKING

from quanterr.documents.gate_results import BECAUSE, Gate, Violation
from quanterr.util.text import display, format_decisive, format_exact, size

if TYPE_CHECKING:
    from quanterr.documents.base import Finding
    from quanterr.metrics.scores import Score

UNDEFINED = "undefined"
MAX_PLACES = 7  # maximum number of decimals; smaller numbers have an exponent
MAX_SENTENCE_LENGTH = 2000  # maximum length of a sentence, in characters


def format_db(value: float | None, unit: str = "") -> str:
    """Format a level in dB with two decimals, such as "27.04"."""
    return UNDEFINED if value is None else f"{value:.2f}{unit}"


def format_number(value: float | None) -> str:
    """Format with four significant digits; only exactly 0 becomes "0"."""
    return UNDEFINED if value is None else f"{value:.4g}"


def format_if_known(value: float | None, digits: str = ".2f", otherwise: str = "-") -> str:
    """Format a number of a table; ``otherwise`` stands for None."""
    return otherwise if value is None else f"{value:{digits}}"


def format_percent(value: float | None) -> str:
    """Format a share as a percentage, such as "4.56 %"."""
    return UNDEFINED if value is None else f"{100 * value:.3g} %"


def format_change(value: float) -> str:
    """Format a change in per cent with two significant digits, from 100 on as a whole number."""
    return f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"


def format_cosine(value: float | None) -> str:
    """Format with eight decimals, or as "1 - 1.2e-12" where these would show 1."""
    if value is None:
        return UNDEFINED
    text = f"{value:.8f}"
    return f"1 - {1 - value:.1e}" if float(text) == 1 and value < 1 else text


def format_in_units(score: "Score", value: float, error: float | None = None, digits: int = 5, sign: str = "") -> str:
    """Format a value in the unit of its score, such as "0.01234 ± 0.0005"; shares in per cent, bytes in KiB or MiB."""
    if score.unit == "B":
        return format_size_change(value, sign)
    scale, unit = (100, " %") if score.unit == "share" else (1, " dB" if score.unit == "dB" else "")
    if not error:
        return f"{scale * value:{sign}.{digits}g}{'' if error is None else ' ± 0'}{unit}"
    return f"{format_measured(scale * value, scale * error, sign)}{unit}"


def format_measured(value: float, error: float, sign: str = "") -> str:
    """Format a value with its standard error, both to the second digit of the error, such as "0.0123 ± 0.0012"."""
    places = 1 - floor(log10(error))
    if 0 <= places <= MAX_PLACES:
        return f"{value:{sign}.{places}f} ± {error:.{places}f}"
    known = max(places + 1 + floor(log10(abs(value))), 1) if value else 1
    return f"{value:{sign}.{known}g} ± {error:.2g}"


def format_size_change(n_bytes: float, plus: str = "+") -> str:
    """Format a change of size, such as "-64.50 KiB"."""
    return ("-" if n_bytes < 0 else plus) + size(abs(n_bytes))


def format_observed(value: float | None, limit: float | None = None) -> str:
    """Format with five digits, or with as many as it takes to show on which side of the limit the value is."""
    return UNDEFINED if value is None else format_decisive(value, limit)


DOUBT_CODES = (
    "identical",
    "swapped_sides",
    "lossless_codes",
    "quantized_original",
    "another_source",
    "config_mismatch",
    "left_unquantized",
)


def list_doubts(verdict: str, findings: Iterable["Finding"]) -> list[str]:
    """Return messages of findings that question the comparison, unless the verdict is already inconclusive."""
    if verdict == "inconclusive":
        return []
    questions = (finding.message for finding in findings if finding.code in DOUBT_CODES and finding.severity != "info")
    return list(dict.fromkeys(questions))


def format_doubts(doubts: Sequence[str]) -> str:
    """Return the doubts as a suffix of a verdict, such as ", but: the arguments may be swapped"."""
    return f", but: {'; '.join(map(sentence, doubts))}" if doubts else ""


def format_answer(word: str, doubts: Sequence[str], conclusion: str) -> str:
    """Return a verdict with its doubts and conclusion, such as "compared: …"."""
    return f"{word}{format_doubts(doubts)}{'; ' if doubts else ': '}{conclusion}"


def describe_gate(gate: Gate) -> tuple[str, str]:
    """Return whether a gate holds as a text, and the tone of the text: pass, warning or fail."""
    if gate.status == "pass":
        return "holds", "pass"
    if gate.is_unjudged:
        return "not judged", "warning"
    return ("does not hold", "fail") if gate.severity == "error" else ("does not hold, a warning", "warning")


def has_only_numbers(gate: Gate) -> bool:
    """Return True if a gate's observed value and margin are its whole result, without layers or a reason."""
    return (
        gate.observed is not None and not gate.reason and all(violation.layer is None for violation in gate.violations)
    )


def describe_violation(violation: Violation, limit: float | None = None) -> str:
    """Describe where a gate does not hold and by how much, with ``limit`` if it is given."""
    where = "the whole" if violation.layer is None else display(violation.layer)
    if violation.observed is None:
        return f"{where}: {sentence(violation.reason or UNDEFINED)}"
    description = "" if limit is None else f", limit {format_exact(limit)}"
    description += "" if violation.margin is None else f", margin {format_decisive(violation.margin, 0)}"
    description += f"{BECAUSE}{sentence(violation.reason)}" if violation.reason else ""
    return f"{where}: {format_decisive(violation.observed, limit)}{description}"


def sentence(text: str) -> str:
    """Return a text of a document, escaped and cut to ``MAX_SENTENCE_LENGTH`` characters."""
    return display(text, MAX_SENTENCE_LENGTH)


def say_once(reasons: Sequence[str]) -> list[str]:
    """Return the reasons of a verdict; if a reason ends with an earlier reason, "as above" replaces that ending."""
    return [
        next(
            (f"{reason.removesuffix(old)}as above" for old in reasons[:n] if reason.endswith(f" {old}")),
            reason,
        )
        for n, reason in enumerate(reasons)
    ]
