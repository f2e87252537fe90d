"""Keyword arguments of the library's functions, made from the fields of the dataclasses of options."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from keyword import iskeyword
from textwrap import TextWrapper, indent
from typing import Any, ParamSpec, TypeVar, get_origin, get_type_hints

from quanterr.options import PANELS, Array, Option, list_flags, list_notes, list_options
from quanterr.util.arguments import name_arguments, public
from quanterr.util.notebook import NotebookBar, is_in_notebook

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
MAX_DOCSTRING_LINE = 106  # characters


def accept_fields_of(options_class: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function whose keywords, after its own parameters, are the fields of a dataclass.

    ``help()`` and notebooks then show each keyword with its type, its default and the text of its option. The long name
    of the option is accepted, too. An unknown keyword raises a TypeError that names the nearest one. Errors name
    arguments instead of the command line's options, and their traceback is that of the call.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        keywords = _Keywords.of(function, options_class)
        checked = public(function, keywords.accepted)

        @wraps(function)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            chosen: dict[str, Any] = keywords.resolve(named)
            if "on_progress" not in keywords.notes or chosen.get("on_progress") is not None or not is_in_notebook():
                return checked(*arguments, **chosen)
            with closing(NotebookBar()) as bar:
                return checked(*arguments, **chosen | {"on_progress": bar})

        call.__signature__ = keywords.signature  # type: ignore[attr-defined]
        call.options = options_class  # type: ignore[attr-defined]
        call.__doc__ = keywords.describe(inspect.getdoc(function) or "")
        return call

    return decorate


def list_given(values: T | Iterable[T] | Mapping[str, T]) -> tuple[list[T], list[str]]:
    """Return the values of an argument as a list, and their names if it has any; a single value is a list of one.

    A string, a path, a state dict and a model are single values, though some can be iterated over. Other mappings than
    state dicts, whose values are tensors or arrays, give names.
    """
    if isinstance(values, Mapping) and values and not any(isinstance(value, Array) for value in values.values()):
        return list(values.values()), list(values)
    whole = isinstance(values, str | os.PathLike | Mapping) or hasattr(values, "state_dict")
    single = whole or not isinstance(values, Iterable)
    return [values] if single else list(values), []  # type: ignore[list-item, arg-type] # of T and Iterable[T]


@dataclass(frozen=True)
class _Keywords:
    """The keywords of a function.

    Attributes:
        function: the name of the function.
        signature: its signature, with the keywords that have a text.
        notes: the options and texts of keywords.
        accepted: all names that may be given, with the parameter that each means.
    """

    function: str
    signature: inspect.Signature
    notes: Mapping[str, Option | str]
    accepted: Mapping[str, str]

    @classmethod
    def of(cls, function: Callable[..., object], options_class: type) -> "_Keywords":
        """Return the keywords of a function that takes the fields of a dataclass besides its own parameters."""
        signature = _make_signature(function, options_class)
        accepted = {name: name for name in (*signature.parameters, *(field.name for field in fields(options_class)))}
        for name, option in list_options(options_class).items():
            accepted[long_name(name, option)] = name
        return cls(function.__name__, signature, list_notes(options_class), accepted)

    def resolve(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keywords under the names of the function's parameters.

        Raises:
            TypeError: a keyword is unknown, or given under both of its names.
        """
        resolved: dict[str, Any] = {}
        for name, value in keywords.items():
            if name not in self.accepted:
                near = get_close_matches(name, self.accepted, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(self.signature.parameters)}"
                raise TypeError(f"{self.function}() got an unexpected keyword argument {name!r}; {hint}")
            if self.accepted[name] in resolved:
                raise TypeError(f"{self.function}() got {self.accepted[name]!r} twice, once as {name!r}")
            resolved[self.accepted[name]] = value
        return resolved

    def describe(self, docstring: str) -> str:
        """Return the docstring with a section about the keywords, inserted before the section about errors."""
        texts = [self._describe_keyword(name) for name in self.signature.parameters if name in self.notes]
        summary, raises, errors = docstring.partition("\n\nRaises:")
        return "\n".join([f"{summary}\n\nKeyword Args:", *texts]) + f"{raises}{errors}"

    def _describe_keyword(self, name: str) -> str:
        note, default = self.notes[name], self.signature.parameters[name].default
        facts, text = [], note if isinstance(note, str) else note.help
        if isinstance(note, Option):
            facts += [note.metavar] if note.metavar else []
            facts += ["one or several"] if get_origin(self.signature.parameters[name].annotation) is Iterable else []
            if (long := long_name(name, note)) != name and not iskeyword(long):
                text += f" {long} is the same."
        if default not in (None, (), False):
            facts.append(f"default {default}")
        head = f"{name} ({', '.join(facts)})" if facts else name
        lines = TextWrapper(
            MAX_DOCSTRING_LINE, break_long_words=False, break_on_hyphens=False, subsequent_indent=" " * 4
        )
        return indent(lines.fill(f"{head}: {name_arguments(text, self.accepted)}"), " " * 4)


def long_name(name: str, option: Option) -> str:
    """Return the long name of an option as a keyword."""
    return list_flags(name, option)[0].removeprefix("--").replace("-", "_")


def _make_signature(function: Callable[..., object], options_class: type) -> inspect.Signature:
    """Return the signature with each field that has a text as a keyword, in the order of the command's help."""
    signature = inspect.signature(function)
    parameters = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    hints, notes = get_type_hints(options_class), list_notes(options_class)
    for field in sorted(
        (field for field in fields(options_class) if field.name in notes), key=lambda field: _rank(notes[field.name])
    ):
        if field.name not in parameters:
            parameters[field.name] = inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
            )
    return signature.replace(parameters=list(parameters.values()))


def _rank(note: Option | str) -> tuple[bool, int]:
    """Return a sort key of a keyword: by the panel of its option, rare options and callbacks last."""
    if isinstance(note, str):
        return True, len(PANELS)
    return note.rare, PANELS.index(note.panel) if note.panel in PANELS else -1
