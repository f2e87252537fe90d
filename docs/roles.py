"""What mkdocstrings does with docstrings first: references such as ``:func:`quanterr.compare``` become links."""

import re
from typing import Any

import griffe

import quanterr

ROLE = re.compile(r":[a-z]+:`(?:quanterr\.)?([\w.]+)`")


def link(role: re.Match[str]) -> str:
    """A link to what is public, code otherwise."""
    name = role[1]
    return f"[`{name}`][quanterr.{name}]" if name in quanterr.__all__ else f"`{name}`"


class Roles(griffe.Extension):
    """Rewrites the docstrings as they are read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, a class, a function or an attribute."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(link, obj.docstring.value)
