"""Which layers are compared, the words of ``--layers-to-compare``.

    attn            a role (see roles.py) or one of its aliases; any other word: a part of the name
    *.mlp.*         with * ? or [ : a glob on the full name
    re:blocks\\.1    a regular expression, searched in the full name
    !norm           any of these with ! in front: leaves out

Without a word that takes in, all layers are taken in.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches

from quanterr.errors import UsageError
from quanterr.roles import ALIASES, OTHER, ROLES, role_of
from quanterr.util.text import display, listed

NAMED = {role for role, _ in ROLES} | {OTHER}


class Selection:
    """The layers that patterns take in."""

    def __init__(self, patterns: Iterable[str] = (), exclude: Iterable[str] = ()) -> None:
        """Compile the patterns, and those in ``exclude`` as if ``!`` stood before each.

        A string may hold several, separated by commas (a ``re:`` may not).

        Raises:
            UsageError: an empty pattern or a regular expression that does not compile; ``!`` in ``exclude``.
        """
        excluded = _split(exclude)
        if twice := [word for word in excluded if word.startswith("!")]:
            raise UsageError(f'"{display(twice[0])}" in --exclude: leave out the !, or use --layers-to-compare')
        self.patterns = (*_split(patterns), *(f"!{word}" for word in excluded))
        self._taken = [(word, _matcher(word)) for word in self.patterns if not word.startswith("!")]
        self._left = [(word, _matcher(word[1:])) for word in self.patterns if word.startswith("!")]

    def takes(self, name: str) -> bool:
        """Whether the weight of this name is compared."""
        taken = not self._taken or any(matches(name) for _, matches in self._taken)
        return taken and not any(matches(name) for _, matches in self._left)

    def names(self, name: str) -> bool:
        """Whether a pattern takes in the weight of this name, so that it was asked for: without patterns none was."""
        return bool(self._taken) and self.takes(name)

    def check(self, names: Iterable[str]) -> None:
        """Refuse what would compare nothing.

        Raises:
            UsageError: a pattern that takes in no name, as a misspelt one: the nearest are reported; patterns that
                leave no name.
        """
        names = list(names)
        for word, matches in self._taken:
            if not any(matches(name) for name in names):
                raise UsageError(_matches_none(word, names))
        if self.patterns and not any(map(self.takes, names)):
            shown = display(",".join(self.patterns))
            raise UsageError(f'"{shown}" selects no layer: it excludes everything it includes')

    def check_all(self, names: Iterable[str]) -> None:
        """The same, and refuse patterns that leave out nothing.

        Raises:
            UsageError: as :meth:`check`, and such a pattern.
        """
        names = list(names)
        if idle := self.idle(names):
            raise UsageError(idle[0])
        self.check(names)

    def idle(self, names: Iterable[str]) -> list[str]:
        """What to say of patterns that leave out none of these names."""
        names = list(names)
        return [_matches_none(word, names) for word, matches in self._left if not any(map(matches, names))]


def _split(patterns: Iterable[str]) -> list[str]:
    given = (patterns,) if isinstance(patterns, str) else patterns
    return [word for pattern in given for word in _words(pattern)]


def _words(pattern: str) -> list[str]:
    if pattern.removeprefix("!").startswith("re:"):
        return [pattern]
    return [word.strip() for word in pattern.split(",")]


def _matcher(word: str) -> Callable[[str], bool]:
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
    if role in NAMED:
        return lambda name: role_of(name) == role
    return lambda name: word in name


def _matches_none(word: str, names: list[str]) -> str:
    return f'no layer matches "{display(word)}"{_nearest(word, names)}'


def _nearest(word: str, names: list[str]) -> str:
    components = {part for name in names for part in name.split(".") if not part.isdigit()}
    near = get_close_matches(word.lstrip("!"), sorted(NAMED | ALIASES.keys() | components), n=9, cutoff=0.5)
    near = [other for other in near if any(map(_matcher(other), names))][:3]
    if near:
        return f"; did you mean {', '.join(display(name) for name in near)}?"
    return f"; the layers are called {listed(names, 3)}"
