"""What all outputs show alike: numbers as people read them, and what gates say."""

from collections.abc import Iterable, Sequence

from quanterr.report.base import Finding, Score
from quanterr.report.gate_results import Gate, Violation
from quanterr.util.text import display, format_decisive, format_exact, size

UNDEFINED = "undefined"
LONG = 2000  # characters of a sentence


def db(value: float | None, unit: str = "") -> str:
    """``27.04``."""
    return UNDEFINED if value is None else f"{value:.2f}{unit}"


def number(value: float | None) -> str:
    """Four digits; 0 only for exactly 0."""
    return UNDEFINED if value is None else f"{value:.4g}"


def percent(value: float | None) -> str:
    """A share as ``4.56 %``."""
    return UNDEFINED if value is None else f"{100 * value:.3g} %"


def percent_of(value: float) -> str:
    """A change in per cent: two digits, of more than 100 all."""
    return f"{value:.2g}" if value < 100 else f"{value:,.0f}"


def cosine(value: float | None) -> str:
    """Enough digits to distinguish it from 1."""
    if value is None:
        return UNDEFINED
    text = f"{value:.8f}"
    return f"1 - {1 - value:.1e}" if abs(float(text)) == 1 and value < 1 else text


def in_units(score: Score, value: float, error: float | None = None, digits: int = 5, sign: str = "") -> str:
    """``0.01234 ± 0.0005``; shares in per cent, bytes in those of 1024."""
    if score.unit == "B":
        return signed_size(value, sign)
    scale, unit = (100, " %") if score.unit == "%" else (1, " dB" if score.unit == "dB" else "")
    margin = "" if error is None else f" ± {scale * error:.2g}"
    return f"{scale * value:{sign}.{digits}g}{margin}{unit}"


def signed_size(n_bytes: float, plus: str = "+") -> str:
    """``-64.50 KiB``: a change of a size."""
    return ("-" if n_bytes < 0 else plus) + size(abs(n_bytes))


def judged(value: float | None, limit: float | None = None) -> str:
    """Five digits, or as many as show on which side of the limit it is."""
    return UNDEFINED if value is None else format_decisive(value, limit)


DOUBTS = ("identical", "swapped_sides", "lossless_codes", "another_source", "config_mismatch", "left_unquantized")


def doubts(verdict: str, findings: Iterable[Finding]) -> list[str]:
    """What questions a comparison that a verdict does not already call inconclusive."""
    if verdict == "inconclusive":
        return []
    questions = (found.message for found in findings if found.code in DOUBTS and found.severity != "info")
    return list(dict.fromkeys(questions))


def but(found: Sequence[str]) -> str:
    """``, but: the arguments may be swapped``, behind a verdict."""
    return f", but: {'; '.join(map(sentence, found))}" if found else ""


def stated(word: str, found: Sequence[str], words: str) -> str:
    """``compared: …``, with what questions that."""
    return f"{word}{but(found)}{'; ' if found else ': '}{words}"


def gate_words(gate: Gate) -> tuple[str, str]:
    """What is said of a gate, and how bad that is: pass, warning or fail."""
    if gate.status == "pass":
        return "holds", "pass"
    return ("does not hold", "fail") if gate.severity == "error" else ("does not hold, a warning", "warning")


def violation_line(violation: Violation, limit: float | None = None) -> str:
    """Where a gate does not hold, and by how much; with its ``limit`` where that does not stand above it."""
    where = "the whole" if violation.layer is None else display(violation.layer)
    if violation.observed is None:
        return f"{where}: {sentence(violation.reason or UNDEFINED)}"
    description = "" if limit is None else f", limit {format_exact(limit)}"
    description += "" if violation.margin is None else f", margin {format_decisive(violation.margin, 0)}"
    return f"{where}: {format_decisive(violation.observed, limit)}{description}"


def sentence(text: str) -> str:
    """A sentence of the report, made harmless."""
    return display(text, LONG)
