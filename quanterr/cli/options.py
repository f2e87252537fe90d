"""Makes options of the command line from the fields of dataclasses."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from enum import Enum
from functools import wraps
from types import UnionType
from typing import Annotated, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from quanterr.cli import completion
from quanterr.options import PANELS, Option


class But(NamedTuple):
    """Beside a parameter of a command: fields of its dataclass that are no options there."""

    names: tuple[str, ...]


class Only(NamedTuple):
    """Beside a parameter of a command: the fields of its dataclass that are options there."""

    names: tuple[str, ...]


class _Choice(str, Enum):  # noqa: UP042 - without members: one is made for each Literal
    """The words of a ``Literal``."""


class _Group(NamedTuple):
    """A parameter of a command that is a dataclass, and its fields that are options."""

    kind: Callable[..., object]
    names: tuple[str, ...]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command, called with an option for each field of its parameters that are dataclasses.

    ``options: Annotated[CompareOptions, But(("resume",))]`` gives it all fields of CompareOptions that have an
    :class:`quanterr.options.Option`, except ``resume``.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, _Group] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        annotation = parameter.annotation
        kind, *notes = get_args(annotation) if get_origin(annotation) is Annotated else [annotation]
        if not hasattr(kind, "__dataclass_fields__"):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        made = [option for option in _options(kind) if _is_wanted(option.name, notes)]
        groups[name] = _Group(kind, tuple(option.name for option in made))
        parameters += made

    @wraps(command)
    def called(**given: object) -> None:
        for name, group in groups.items():
            own = {field: given.pop(field) for field in group.names}
            given[name] = group.kind(**{field: _plain(value) for field, value in own.items() if value is not None})
        command(**given)

    parameters.sort(key=_place)
    del called.__wrapped__  # typer would look through it
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _place(parameter: inspect.Parameter) -> int:
    """Arguments first, then options by their panels."""
    notes = getattr(parameter.annotation, "__metadata__", ())
    panel = next((note.rich_help_panel for note in notes if isinstance(note, OptionInfo)), "")
    return PANELS.index(panel) if panel in PANELS else -1


class _Row(NamedTuple):
    """A field that is an option."""

    name: str
    kind: object  # its type
    option: Option
    default: object


def _rows(kind: type) -> list[_Row]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        _Row(field.name, get_args(hints[field.name])[0], note, field.default)
        for field in fields(kind)
        for note in getattr(hints[field.name], "__metadata__", ())
        if isinstance(note, Option)
    ]


def _options(kind: type) -> list[inspect.Parameter]:
    return [_parameter(row) for row in _rows(kind)]


def _is_wanted(name: str, notes: Iterable[object]) -> bool:
    for note in notes:
        if (isinstance(note, But) and name in note.names) or (isinstance(note, Only) and name not in note.names):
            return False
    return True


def _parameter(row: _Row) -> inspect.Parameter:
    kind, default = _kind(row.kind), None if row.default in ((), MISSING) else row.default
    info = typer.Option(
        *_flags(row),
        metavar=row.option.metavar,
        help=row.option.help,
        min=row.option.least,
        rich_help_panel=row.option.panel,
        show_default=default is not None and not isinstance(default, bool),
        autocompletion=getattr(completion, row.option.words) if row.option.words else None,
    )
    return inspect.Parameter(
        row.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _flags(row: _Row) -> list[str]:
    return row.option.flags.split() or [f"--{row.name.replace('_', '-')}"]


def _kind(kind: object) -> object:
    """The type as typer takes it: paths are strings, any number of words a list, a literal an enumeration."""
    if get_origin(kind) is Iterable:
        return list[str] | None
    if get_origin(kind) is Literal:
        return _Choice("Choice", {word: word for word in get_args(kind)})  # type: ignore[call-overload]
    if get_origin(kind) is UnionType or isinstance(kind, UnionType):
        kinds = get_args(kind)
        return str | None if str in kinds else kinds[0] | None
    return kind


def _plain(value: object) -> object:
    return value.value if isinstance(value, _Choice) else value
