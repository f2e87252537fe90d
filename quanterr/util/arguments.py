"""Checks of the types of arguments of the library's functions, and errors that name arguments instead of options."""

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from quanterr.errors import QuanterrError, UsageError
from quanterr.util.text import display, with_article

P = ParamSpec("P")
R = TypeVar("R")
# Options in an error message; the first group matches a proposed command, whose options are not changed.
_FLAG = re.compile(r"(quanterr [a-z]+ )?--([a-z][a-z-]*[a-z])(?: (?:FILE(?:\.[a-z]+)?|FOLDER))?")
WORDS: Mapping[Any, str] = {
    str: "a string",
    os.PathLike: "a path",
    bool: "True or False",
    int: "an integer",
    float: "a number",
    Mapping: "a state dict",
    Callable: "a function",
}
NUMBERS: Mapping[Any, type] = {
    int: Integral,
    float: Real,
}  # abstract classes, as numpy's numbers are not subclasses of Python's
MAX_VALUE_LENGTH = 60  # characters that are shown


def public(function: Callable[P, R], names: Mapping[str, str] | None = None) -> Callable[P, R]:
    """Return a function of the library that refuses arguments of a wrong type with an error of one line.

    Errors that the user can correct name arguments instead of options of the command line, and their traceback ends at
    the call. ``names`` maps long names of options, with ``_`` for ``-``, to arguments; by default, both are equal.
    """
    signature = inspect.signature(function)
    words = names or {name: name for name in signature.parameters}
    hints = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # raises an error that names the function
        try:
            check_types(given, hints)
            return function(*args, **kwargs)
        except QuanterrError as error:
            error.args = (name_arguments(str(error), words),)
            raise error.with_traceback(None) from None

    return call


def name_arguments(text: str, names: Mapping[str, str]) -> str:
    """Return a text in which options of the command line are replaced by the arguments in ``names``."""

    def name(flag: re.Match[str]) -> str:
        return flag[0] if flag[1] else names.get(flag[2].replace("-", "_"), flag[0])

    return _FLAG.sub(name, text)


def check_types(given: Mapping[str, object], hints: Mapping[str, Any]) -> None:
    """Check values against the annotations of their names, if there are any; each of several values is checked.

    An annotation that is a string, such as the name of a type in quotes, allows any value.

    Raises:
        UsageError: a value has another type.
    """
    for name, value in given.items():
        if name in hints and not _fits(value, hints[name]):
            raise _make_type_error(name, value, hints[name])


def _make_type_error(name: str, value: object, hint: Any) -> UsageError:
    wanted = _join(_list_words(hint))
    several = ", or several" if any(get_origin(choice) is Iterable for choice in _list_choices(hint)) else ""
    instead = "; for two tensors: quanterr.measure" if hasattr(value, "shape") and WORDS[Mapping] in wanted else ""
    return UsageError(f"{name}: expected {wanted}{several}; got {_describe(value, hint)}{instead}")


def _fits(value: object, hint: Any) -> bool:
    origin = get_origin(hint) or hint
    if origin in (Union, UnionType):
        return any(_fits(value, choice) for choice in get_args(hint))
    if origin is Annotated:
        return _fits(value, get_args(hint)[0])
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if origin is Iterable:
        items = value if isinstance(value, list | tuple) else ()
        several = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) and not _is_array(value)
        return _fits(value, get_args(hint)[0]) or (several and all(_fits(item, get_args(hint)[0]) for item in items))
    if origin in NUMBERS:
        return isinstance(value, NUMBERS[origin]) and not isinstance(value, bool)
    if origin is Callable:
        return callable(value)
    is_open = origin in (Any, inspect.Parameter.empty) or not isinstance(origin, type)
    return is_open or isinstance(value, origin)


def _is_array(value: object) -> bool:
    return hasattr(value, "shape")


def _list_choices(hint: Any) -> list[Any]:
    """Return the types that a value may have."""
    if get_origin(hint) is Annotated:
        return _list_choices(get_args(hint)[0])
    return list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]


def _list_words(hint: Any) -> list[str]:
    """Return the types of an annotation in words; strings are omitted beside paths, and None is always omitted."""
    words: dict[str, None] = {}
    for choice in _list_choices(hint):
        origin = get_origin(choice) or choice
        if origin is Iterable:
            words |= dict.fromkeys(_list_words(get_args(choice)[0]))
        elif origin is Literal:
            words |= dict.fromkeys(map(repr, get_args(choice)))
        elif origin is not NoneType:
            words[WORDS.get(origin) or with_article(origin.__name__)] = None
    if WORDS[os.PathLike] in words:
        words.pop(WORDS[str], None)
    return list(words)


def _join(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _describe(value: object, hint: Any) -> str:
    """Return a value with its type; of several values, the first that does not fit."""
    if isinstance(value, list | tuple):
        items = next((get_args(choice)[0] for choice in _list_choices(hint) if get_origin(choice) is Iterable), None)
        wrong = [item for item in value if items is not None and not _fits(item, items)]
        if wrong:
            return _describe(wrong[0], None)
    if value is None:
        return "None"
    type_name = type(value).__name__
    if isinstance(value, Mapping):
        return with_article(type_name)
    if _is_array(value):
        return f"{with_article(type_name)} of shape {list(value.shape)}"  # type: ignore[attr-defined]
    return f"{display(repr(value), MAX_VALUE_LENGTH)}, {with_article(type_name)}"
