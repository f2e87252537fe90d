"""Selection of the layers to compare, by the patterns of ``--layers-to-compare``.

    attn            a role (see roles.py) or its alias; any other word matches names that contain it
    *.mlp.*         with * ? or [ : a glob on the full name
    re:blocks\\.1    a regular expression, searched in the full name
    !norm           any of these with ! in front: excludes what it matches

If no pattern includes layers, all are included.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import lru_cache

from quanterr.errors import UsageError
from quanterr.selection.roles import ALIASES, OTHER, ROLES, role_of
from quanterr.util.text import display, itemize

NAMED_ROLES = {role for role, _ in ROLES} | {OTHER}


class LayerSelection:
    """A set of patterns that include or exclude layers by name."""

    def __init__(self, patterns: Iterable[str] = (), exclude: Iterable[str] = ()) -> None:
        """Compile the patterns; those in ``exclude`` count as if ``!`` stood before each.

        A string may hold several patterns, separated by commas, unless it begins with ``re:``.

        Raises:
            UsageError: a pattern is empty or an invalid regular expression, or one in ``exclude`` begins with ``!``.
        """
        excluded = _split(exclude)
        if twice := [word for word in excluded if word.startswith("!")]:
            raise UsageError(f'"{display(twice[0])}" in --exclude: leave out the !, which --exclude implies')
        self.patterns = (*_split(patterns), *(f"!{word}" for word in excluded))
        self._taken = [(word, _make_matcher(word)) for word in self.patterns if not word.startswith("!")]
        self._left = [(word, _make_matcher(word[1:])) for word in self.patterns if word.startswith("!")]

    def takes(self, name: str) -> bool:
        """Return whether the weight of this name is to be compared."""
        taken = not self._taken or any(matches(name) for _, matches in self._taken)
        return taken and not any(matches(name) for _, matches in self._left)

    def names(self, name: str) -> bool:
        """Return whether a pattern includes the weight of this name; False if there are only excluding patterns."""
        return bool(self._taken) and self.takes(name)

    def check(self, names: Iterable[str]) -> None:
        """Check that each including pattern matches a name, and that at least one name is selected.

        Raises:
            UsageError: a pattern matches no name (the message suggests the nearest), or no name is left.
        """
        names = list(names)
        for word, matches in self._taken:
            if not any(matches(name) for name in names):
                raise UsageError(_describe_no_match(word, names))
        if self.patterns and not any(map(self.takes, names)):
            shown = display(",".join(self.patterns))
            raise UsageError(f'"{shown}" selects no layer: it excludes everything it includes')

    def check_all(self, names: Iterable[str]) -> None:
        """Check as :meth:`check` does, and also that each excluding pattern matches a name.

        Raises:
            UsageError: as :meth:`check`, or an excluding pattern matches no name.
        """
        names = list(names)
        if idle := self._list_idle(names):
            raise UsageError(_describe_no_match(idle[0], names))
        self.check(names)

    def describe_idle(self, names: Iterable[str]) -> list[str]:
        """Return a message for each excluding pattern that matches none of these names."""
        names, messages = list(names), []
        for word in self._list_idle(names):
            group = ALIASES.get(word.removeprefix("!"), word.removeprefix("!"))
            near = "" if group in NAMED_ROLES else _suggest(word, names)  # a file may lack a role, such as vae
            messages.append(f'"{display(word)}" excludes nothing: no layer matches it{near}')
        return messages

    def _list_idle(self, names: list[str]) -> list[str]:
        return [word for word, matches in self._left if not any(map(matches, names))]


@lru_cache(maxsize=64)  # options are copied, so the same patterns occur several times
def select(patterns: tuple[str, ...], exclude: tuple[str, ...] = ()) -> LayerSelection:
    """Return the selection of these patterns, as :class:`LayerSelection` makes it."""
    return LayerSelection(patterns, exclude)


def _split(patterns: Iterable[str]) -> list[str]:
    words = []
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        is_regex = pattern.removeprefix("!").startswith("re:")  # commas belong to the expression
        words += [pattern] if is_regex else [word.strip() for word in pattern.split(",")]
    return words


def _make_matcher(word: str) -> Callable[[str], bool]:
    if not word:
        raise UsageError("an empty pattern: one comma too many?")
    if word.startswith("re:"):
        try:
            return lambda name, expression=re.compile(word[3:]): expression.search(name) is not None  # type: ignore[misc]
        except re.error as error:
            raise UsageError(f'"{display(word)}" is not a regular expression: {error}') from error
    if any(character in word for character in "*?["):
        return lambda name: fnmatch.fnmatchcase(name, word)
    role = ALIASES.get(word, word)
    if role in NAMED_ROLES:
        return lambda name: role_of(name) == role
    return lambda name: word in name


def _describe_no_match(word: str, names: list[str]) -> str:
    return f'no layer matches "{display(word)}"{_suggest(word, names)}'


def _suggest(word: str, names: list[str]) -> str:
    components = {part for name in names for part in name.split(".") if not part.isdigit()}
    near = get_close_matches(word.lstrip("!"), sorted(NAMED_ROLES | ALIASES.keys() | components), n=9, cutoff=0.5)
    near = [other for other in near if any(map(_make_matcher(other), names))][:3]
    if near:
        return f"; did you mean {', '.join(display(name) for name in near)}?"
    return f"; the layers are called {itemize(names, 3)}"
