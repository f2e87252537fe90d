"""The declaration of a number: a field of a document with its title, direction, formula, and how it is computed.

JSON Schema, CSV, tables, pages, rules, diffs and ``quanterr explain`` follow from it.
"""

from collections.abc import Callable
from functools import cache
from math import isfinite
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from msgspec import Meta, Struct

Number = float | None
Count = Annotated[int, Meta(ge=0)]
Better = Literal["lower", "higher", ""]  # "": neither
Unit = Literal["", "nat", "dB", "bit", "B", "%", "share"]  # "%": the number is in per cent; "share": only shown so
Setting = Literal["", "importance", "sensitivity"]


class Score(NamedTuple):
    """A number of a document, as tables, rules, diffs and the JSON Schema describe it."""

    title: str
    better: Better
    formula: str
    unit: Unit = ""
    column: int | None = None  # rank in tables: narrow terminals drop the highest first; None: not shown there
    of: Callable[[Any], Any] | None = None  # computes it from a :class:`Measurement`; None: the code that makes the row
    equal: float | None = None  # its value for identical sides; None: depends on the values, or unknown
    needs: Setting = ""  # the setting without which it does not exist
    name: str = ""  # the field

    @property
    def heading(self) -> str:
        """The title with its unit, as tables show it."""
        return f"{self.title} dB" if self.unit == "dB" else self.title


def doc(text: str) -> Meta:
    """Return the annotation of a field that describes it in the JSON Schema."""
    return Meta(description=text)


def score(
    title: str,
    better: Better,
    formula: str,
    unit: Unit = "",
    column: int | None = None,
    of: Callable[[Any], Any] | None = None,
    equal: float | None = None,
    needs: Setting = "",
) -> Meta:
    """Return the annotation of a field that is a number; the JSON Schema describes it by its formula."""
    return note(Score(title, better, formula, unit, column, of, equal, needs))


def note(declared: Score) -> Meta:
    """Return the annotation of a field with a score."""
    named = f" [{declared.unit}]" if declared.of and declared.unit not in ("", "share") else ""
    return Meta(description=f"{declared.formula}{named}", extra={"score": declared})


@cache
def collect_scores(kind: type[Struct]) -> dict[str, Score]:
    """Return the scores among the fields of a class, by field name."""
    hints = get_type_hints(kind, include_extras=True)
    annotated = ((name, own) for name, hint in hints.items() for own in getattr(hint, "__metadata__", ()))
    return {
        name: own.extra["score"]._replace(name=name) for name, own in annotated if isinstance(own, Meta) and own.extra
    }


@cache
def list_numbers(kind: type[Struct]) -> dict[str, Score]:
    """Return the scores that are numbers, such as "snr_db"; of several percentiles, one each: "….p99"."""
    found: dict[str, Score] = {}
    for name, declared in collect_scores(kind).items():
        own = get_type_hints(kind)[name]
        if isinstance(own, type) and issubclass(own, Struct):
            found |= {f"{name}.{part}": declared for part in own.__struct_fields__}
        elif getattr(own, "__origin__", None) is not tuple:
            found[name] = declared
    return found


@cache
def list_columns(kind: type[Struct]) -> list[Score]:
    """Return the scores of a class that tables show, from left to right."""
    shown = [one for one in collect_scores(kind).values() if one.column is not None]
    return sorted(shown, key=lambda one: one.column or 0)


def compute_scores(kind: type[Struct], measured: object) -> tuple[dict[str, Any], dict[str, str]]:
    """Compute the fields of a class that declare how, from a :class:`Measurement`.

    Returns:
        The values by name, and ``+inf``, ``-inf`` or ``nan`` for each that is None because it is not finite.
    """
    values = {name: of(measured) for name, of in _list_formulas(kind)}
    nonfinite = {
        name: "nan" if value != value else "+inf" if value > 0 else "-inf"
        for name, value in values.items()
        if isinstance(value, float) and not isfinite(value)
    }
    return values | dict.fromkeys(nonfinite), nonfinite


@cache
def _list_formulas(kind: type[Struct]) -> list[tuple[str, Callable[[Any], Any]]]:
    return [(name, declared.of) for name, declared in collect_scores(kind).items() if declared.of]
