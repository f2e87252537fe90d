"""Keyword arguments of the library's functions, made from the fields of the dataclasses of options."""

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import partial, wraps
from typing import ParamSpec, TypeVar, get_type_hints

from quanterr.errors import UsageError
from quanterr.options import list_flags, list_options

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
# Options in an error message; the first group matches a proposed command, whose options stay as they are.
_FLAG = re.compile(r"(quanterr [a-z]+ )?--([a-z][a-z-]*[a-z])(?: FILE(?:\.[a-z]+)?)?")


def accept_fields_of(kind: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function whose keywords, after its own parameters, are the fields of a dataclass.

    ``help()`` and notebooks then show each keyword with its type and default. An unknown keyword raises a TypeError
    that names the nearest one. A UsageError names arguments instead of the command line's options.
    """
    arguments = {field.name.replace("_", "-"): field.name for field in fields(kind)}
    for name, option in list_options(kind).items():
        arguments[list_flags(name, option)[0].removeprefix("--")] = name

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = _signature(function, kind)
        arguments.update({name.replace("_", "-"): name for name in signature.parameters})

        @wraps(function)
        def call(*given: P.args, **keywords: P.kwargs) -> R:
            for name in keywords:
                if name not in signature.parameters:
                    near = get_close_matches(name, signature.parameters, n=1)
                    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(signature.parameters)}"
                    raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}; {hint}")
            try:
                return function(*given, **keywords)
            except UsageError as error:
                error.args = (_FLAG.sub(partial(_name_argument, arguments), str(error)),)
                raise error.with_traceback(None) from None  # show only the traceback of the call

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def list_given(values: T | Iterable[T]) -> list[T]:
    """Return the values of an argument as a list; a single value becomes a list of one.

    A string, a path, a state dict and a model are single values, though some can be iterated over.
    """
    whole = isinstance(values, str | os.PathLike | Mapping) or hasattr(values, "state_dict")
    single = whole or not isinstance(values, Iterable)
    return [values] if single else list(values)  # type: ignore[list-item, arg-type] # of T and Iterable[T]


def _name_argument(arguments: Mapping[str, str], flag: re.Match[str]) -> str:
    return flag[0] if flag[1] else arguments.get(flag[2], flag[0])


def _signature(function: Callable[..., object], kind: type) -> inspect.Signature:
    """Return the signature with each field of the dataclass as a keyword."""
    own = inspect.signature(function)
    parameters = {name: one for name, one in own.parameters.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}
    hints = get_type_hints(kind)
    for field in fields(kind):
        if field.name not in parameters:
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            parameters[field.name] = inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
            )
    return own.replace(parameters=list(parameters.values()))
