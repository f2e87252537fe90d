"""Docstring roles for mkdocstrings: references such as ``:func:`quanterr.compare``` become links."""

import re
from typing import Any

import griffe

import quanterr

ROLE = re.compile(r":[a-z]+:`(?:quanterr\.)?([\w.]+)`")


def make_link(role: re.Match[str]) -> str:
    """Return a link for a public name, and code otherwise."""
    name = role[1]
    return f"[`{name}`][quanterr.{name}]" if name in quanterr.__all__ else f"`{name}`"


class Roles(griffe.Extension):
    """Extension of griffe that rewrites docstrings as they are read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, a class, a function or an attribute."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(make_link, obj.docstring.value)
