"""The declaration of a number of a document: its title, which direction is better, its formula, and a function for it.

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
Unit = Literal[
    "", "nat", "dB", "bit", "B", "%", "share"
]  # "%": the number is in per cent; "share": only its display is
Setting = Literal["", "importance", "sensitivity"]


class Score(NamedTuple):
    """A number of a document, as tables, rules, diffs and the JSON Schema describe it."""

    title: str
    better: Better
    formula: str
    unit: Unit = ""
    # Rank in tables, where narrow terminals drop the highest ranks first; None: not in tables.
    column: int | None = None
    # Computes it from a :class:`Measurement`; None if the code that makes the row does.
    of: Callable[[Any], Any] | None = None
    equal: float | None = None  # its value for identical sides; None if that depends on the values or is unknown
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
def collect_scores(fields_of: type[Struct]) -> dict[str, Score]:
    """Return the scores among the fields of a class, by field name."""
    hints = get_type_hints(fields_of, include_extras=True)
    annotated = ((name, metadata) for name, hint in hints.items() for metadata in getattr(hint, "__metadata__", ()))
    return {
        name: metadata.extra["score"]._replace(name=name)
        for name, metadata in annotated
        if isinstance(metadata, Meta) and metadata.extra
    }


@cache
def list_numbers(fields_of: type[Struct]) -> dict[str, Score]:
    """Return the scores that are numbers, such as "snr_db"; several percentiles have a score each, "….p99"."""
    numbers: dict[str, Score] = {}
    for name, declared in collect_scores(fields_of).items():
        field_type = get_type_hints(fields_of)[name]
        if isinstance(field_type, type) and issubclass(field_type, Struct):
            numbers |= {f"{name}.{part}": declared for part in field_type.__struct_fields__}
        elif getattr(field_type, "__origin__", None) is not tuple:
            numbers[name] = declared
    return numbers


@cache
def list_columns(fields_of: type[Struct]) -> list[Score]:
    """Return the scores of a class that tables show, from left to right."""
    shown = [declared for declared in collect_scores(fields_of).values() if declared.column is not None]
    return sorted(shown, key=lambda declared: declared.column or 0)


def compute_scores(fields_of: type[Struct], measured: object) -> tuple[dict[str, Any], dict[str, str]]:
    """Compute the fields of a class that declare a function for it, from a :class:`Measurement`.

    Returns:
        The values by name, and ``+inf``, ``-inf`` or ``nan`` for each that is None because it is not finite.
    """
    values = {name: of(measured) for name, of in _list_formulas(fields_of)}
    nonfinite = {
        name: "nan" if value != value else "+inf" if value > 0 else "-inf"
        for name, value in values.items()
        if isinstance(value, float) and not isfinite(value)
    }
    return values | dict.fromkeys(nonfinite), nonfinite


@cache
def _list_formulas(fields_of: type[Struct]) -> list[tuple[str, Callable[[Any], Any]]]:
    return [(name, declared.of) for name, declared in collect_scores(fields_of).items() if declared.of]
