"""Documents in the terminal: what a view holds, the answer last.

Without a terminal (a pipe, a CI log) tables are as wide as their widest row, in ASCII. In a narrow
terminal columns are left out, the least telling first; a name or a number is never cut short.
"""

import os
from collections.abc import Iterator, Sequence
from typing import IO, NoReturn

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from quanterr.report.base import Finding
from quanterr.report.formatting import LONG, sentence, stated
from quanterr.report.sections import Column, Findings, Gates, Lines, Part, Table, View
from quanterr.util.colors import wanted
from quanterr.util.text import count, display

NO_LIMIT = 1 << 16  # columns
NARROWEST = 48  # in which no table has to cut anything
STYLES = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow", None: "bold"}
SEVERITIES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
MAX_FINDINGS = 10
NAME_WIDTH = 24  # that a name has at least, folded


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Leave it to the caller: rich would exit with 1, which says that a gate failed."""
        raise BrokenPipeError


def console(file: IO[str], color: str = "auto") -> Console:
    """A console for a stream. ``color`` is auto, always or never."""
    colored = wanted(file, color)
    columns = os.environ.get("COLUMNS", "")
    asked = int(columns) if columns.isdecimal() else 0
    width = None if file.isatty() else max(asked, NARROWEST) if asked else NO_LIMIT
    return _Console(
        file=file, force_terminal=colored, no_color=not colored, width=width, highlight=False, markup=False, emoji=False
    )


def show(view: View, to: Console, status: int | None = None, wrote: Sequence[str] = (), next_step: str = "") -> None:
    """Print it; the last line is the answer, with the exit ``status`` and the files that were written.

    ``next_step`` is the command that is proposed.
    """
    wrap = not to.is_terminal
    to.print(Text("; ".join(_facts(view))), soft_wrap=wrap)
    for section in view.sections:
        before = None
        for part in () if section.is_detail else section.parts:
            if not (isinstance(before, Table) and isinstance(part, Lines)):  # a table has an empty line below it
                to.print()
            _print_part(part, to)
            before = part
    to.print()
    to.print(Text(view.about, style="dim"), soft_wrap=wrap)
    for reason in _reasons(view):
        to.print(Text(display(reason, LONG), style=STYLES[view.verdict]), soft_wrap=wrap)
    print_next(next_step, to)
    words = view.conclusion + written(wrote)
    answer = words if view.word is None else ended(view.word, status, words, view.doubts)
    to.print(Text(answer, style=style_of(view.word, view.doubts)), soft_wrap=wrap)


def print_next(command: str, to: Console) -> None:
    """The proposed command, on a line that a shell takes as it is."""
    if command:
        to.print(Text(f"next: {display(command, LONG)}", style="dim"), soft_wrap=True)


def _reasons(view: View) -> Iterator[str]:
    """Those that no gate has given."""
    parts = [part for section in view.sections for part in section.parts if not section.is_detail]
    gates = [gate.message for part in parts if isinstance(part, Gates) for _, gate in part.judged]
    for reason in view.reasons if view.verdict not in ("pass", None) else ():
        if not any(reason.endswith(message) for message in gates):
            yield reason


def _facts(view: View) -> Iterator[str]:
    for title, texts in view.facts:
        yield f"{title}: {''.join(display(text, LONG) for text in texts)}"


def _print_part(part: Part, to: Console) -> None:
    wrap = not to.is_terminal
    if isinstance(part, Table):
        rows = [(name, cells) for name, *cells in part.rows]
        to.print(Text(part.title, style="bold"), soft_wrap=wrap)  # rich would wrap it to the width of the table
        table = fitted("", part.first, part.columns, rows, is_plain(to), to)
        to.print(table)
        for line in hidden(table, part.columns):
            to.print(Text(line, style="dim"), soft_wrap=wrap)
        if part.more:
            to.print(Text(f"and {part.more:,} more, in the JSON"), soft_wrap=wrap)
    elif isinstance(part, Findings):
        for name, item in part.found:
            to.print(_finding(item, _of(name, item.message)), soft_wrap=wrap)
    elif isinstance(part, Gates):
        for name, gate in part.judged:
            to.print(Text(_of(name, sentence(gate.message))), soft_wrap=wrap)
    else:
        for line in part.lines:
            to.print(Text(display(line, LONG), style="yellow" if part.warn else ""), soft_wrap=wrap)


def _of(name: str, text: str) -> str:
    return f"{display(name)}: {text}" if name else text


def is_plain(to: Console) -> bool:
    """Whether tables are drawn in ASCII there."""
    return not to.file.isatty() or "utf" not in (to.encoding or "").lower()


def written(paths: Sequence[str]) -> str:
    """``. Wrote a.json, b.html``, behind an answer."""
    return f". Wrote {', '.join(display(_from_here(path)) for path in paths)}" if paths else ""


def ended(word: str, status: int | None, words: str, found: Sequence[str] = ()) -> str:
    """``PASS (exit 0): …``, the last line of a table; with what questions the comparison itself."""
    return stated(f"{word.upper()}{'' if status is None else f' (exit {int(status)})'}", found, words)


def style_of(word: str | None, found: Sequence[str] = ()) -> str:
    """The style of a last line; none of what was compared without limits, which is no approval."""
    return STYLES["inconclusive"] if found and word != "fail" else STYLES.get(word, "bold")


def _from_here(path: str) -> str:
    """A path as seen from the current folder, where it is in there."""
    try:
        relative = os.path.relpath(path)
    except ValueError:  # on another drive
        return path
    return path if relative.startswith(os.pardir) else relative


def bare_table(title: str, plain: bool) -> RichTable:
    """A table without columns."""
    style = box.ASCII2 if plain else box.SIMPLE_HEAD
    return RichTable(title=title, title_justify="left", title_style="bold", box=style, pad_edge=plain)


def fitted(
    title: str,
    first: str,
    columns: Sequence[Column],
    rows: Sequence[tuple[str, Sequence[str | Text]]],
    plain: bool,
    to: Console,
) -> RichTable:
    """A table whose first column holds names, with as many of the others as the console is wide enough for."""
    widths = [max([len(c.header), *(len(row[n]) for _, row in rows)]) + 3 for n, c in enumerate(columns)]
    name = min(max((len(display(name)) for name, _ in rows), default=0), NAME_WIDTH)
    kept = list(range(len(columns)))
    while len(kept) > 1 and name + 4 + sum(widths[n] for n in kept) > to.width:
        kept.remove(max(kept, key=lambda n: columns[n].rank))
    table = bare_table(title, plain)
    table.add_column(first, overflow="fold", min_width=name)
    for n in kept:
        table.add_column(
            columns[n].header,
            justify="right" if columns[n].right else "left",
            no_wrap=len(kept) > 1,
            overflow="fold",
        )
    for shown, row in rows:
        table.add_row(Text(display(shown)), *(row[n] for n in kept))
    return table


def hidden(table: RichTable, columns: Sequence[Column]) -> list[str]:
    """What is said of the columns that a console is too narrow for."""
    shown = {column.header for column in table.columns}
    names = [column.header for column in columns if column.header not in shown]
    return [f"too narrow for: {', '.join(names)}"] if names else []


def print_findings(findings: Sequence[Finding], to: Console, verbose: bool) -> None:
    """The first few findings, or all: each layer once, with all that is found of it."""
    groups = _by_layer(findings)
    shown = groups if verbose else groups[:MAX_FINDINGS]
    if shown:
        to.print()
    for first, *others in shown:
        to.print(_finding(first, first.message), soft_wrap=not to.is_terminal)
        for item in others:
            message = item.message.removeprefix(f"{display(item.layer or '')}: ")
            to.print(Text("  and ") + _finding(item, message), soft_wrap=not to.is_terminal)
    left = sum(map(len, groups[len(shown) :]))
    if left:
        to.print(Text(f"and {count(left, 'more finding')} (-v shows all)"))
    if shown:
        codes = ", ".join(dict.fromkeys(display(item.code) for group in shown for item in group))
        to.print(Text(f"quanterr explain NAME says more: {codes}", style="dim"), soft_wrap=not to.is_terminal)


def _by_layer(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Those of one layer together, the worst first; groups by the worst that is in them."""
    severities = list(SEVERITIES)
    groups: dict[object, list[Finding]] = {}
    for n, item in enumerate(findings):
        groups.setdefault(n if item.layer is None else item.layer, []).append(item)
    for group in groups.values():
        group.sort(key=lambda item: severities.index(item.severity))
    return sorted(groups.values(), key=lambda group: severities.index(group[0].severity))


def _finding(item: Finding, message: str) -> Text:
    text = Text(f"{item.severity}: ", style=SEVERITIES[item.severity])
    text.append(sentence(message), style="default not bold")
    if item.remedy:
        remedy = sentence(item.remedy)
        end = "" if item.message.endswith("?") else "."
        text.append(f"{end} {remedy[0].upper()}{remedy[1:]}", style="default not bold")
    return text
