"""Parts of a view that all diffs share: the answer, sizes, and lists of names."""

from collections.abc import Iterable, Iterator, Sequence

from quanterr.outputs.sections import Maps, Name, Section, Table, View
from quanterr.util.text import count, size
from quanterr.version import __version__


def format_answer(difference: str | None, changed: str) -> str:
    """Return the changes, after the reason why the results are not comparable, if the diff was forced."""
    return changed if difference is None else f"not comparable: {difference}; {changed}"


def format_sizes(old: int, new: int) -> str:
    """Format a change of size, such as "2.50 MiB -> 2.75 MiB (+10.00 %)"."""
    if old == new or not old:
        return size(new)
    share = round(100 * (new - old) / old, 2) + 0.0  # no minus before zero
    return f"{size(old)} -> {size(new)} ({share:+.2f} %)"


def join_counts(numbers: Iterable[tuple[int, str]]) -> str:
    """Join counts, such as "4 worse, 2 better"; zeros are shown only for the first two."""
    return ", ".join(f"{n:,} {word}" for place, (n, word) in enumerate(numbers) if n or place < 2)


def make_view(
    names: tuple[str, str],
    answer: str,
    sections: Iterable[Section],
    about: str,
    maps: Maps | None = None,
    summary: Sequence[str] = (),
) -> View:
    """Return the view of a diff."""
    facts = [(title, [Name(name)]) for title, name in zip(("old", "new"), names, strict=True)]
    made_by = f"quanterr {__version__}"
    return View("What changed", None, answer, [], facts, list(sections), about, made_by, maps, summary=summary)


def list_names(
    item: str, lists: Iterable[tuple[str, str, Sequence[str]]], top: int, name_type: type[Name] = Name
) -> Iterator[Section]:
    """Yield a section, such as "3 layers new", for each (key, word, names) whose list of names is not empty."""
    for key, word, names in lists:
        if names:
            rows = [[name_type(name)] for name in names[:top]]
            title = f"{count(len(names), item)} {word}"
            yield Section(key, title, [Table(title, item, (), rows, len(names) - len(rows))])
