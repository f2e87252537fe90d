"""Views in the terminal: the answer in about ten lines, with ``-v`` after all tables.

Without a terminal (a pipe, a CI log) tables are ASCII and as wide as their widest row. Narrow terminals leave out the
least important columns; names and numbers are never cut.
"""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import IO, Literal, NamedTuple, NoReturn

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from quanterr.documents.base import Finding
from quanterr.errors import Status
from quanterr.outputs.block_map import draw_block_maps
from quanterr.outputs.formatting import MAX_SENTENCE_LENGTH, format_answer, sentence
from quanterr.outputs.sections import (
    TERMINAL,
    VERBOSE,
    BarCell,
    BlockMap,
    Chart,
    Dots,
    FigureGroup,
    Findings,
    Gates,
    LayerName,
    Lines,
    Name,
    Part,
    Table,
    View,
)
from quanterr.util.colors import use_color
from quanterr.util.text import count, cut_prefix, display

UNLIMITED_WIDTH = 1 << 16  # columns
MIN_WIDTH = 48  # columns; no table needs to cut cells at this width
STYLES = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow", None: "bold"}
TONES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
MAX_SHOWN = 12  # candidates in an answer
MAX_FINDINGS = 3  # findings, or layers with findings, in an answer
NAME_WIDTH = 24  # minimum width of a name before it is folded
RED_SHARE, YELLOW_SHARE = 5 / 6, 1 / 2  # shares above which bars have these colours: SNR below 10 and 30 dB
WEIGHT_SUFFIX = ".weight"


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Leave the error to the caller: rich would exit with 1, which means that a gate failed."""
        raise BrokenPipeError


def make_console(file: IO[str], color: str = "auto") -> Console:
    """Return a console for a stream. ``color`` is auto, always or never."""
    colored = use_color(file, color)
    columns = os.environ.get("COLUMNS", "")
    asked = int(columns) if columns.isdecimal() else 0
    width = None if file.isatty() else max(asked, MIN_WIDTH) if asked else UNLIMITED_WIDTH
    return _Console(
        file=file, force_terminal=colored, no_color=not colored, width=width, highlight=False, markup=False, emoji=False
    )


class Outcome(NamedTuple):
    """The outcome of a command: its exit status, the files it wrote and the command it proposes."""

    status: int | None = None
    wrote: Sequence[str] = ()
    next_step: str = ""


NO_OUTCOME = Outcome()


def show(view: View, to: Console, answer: Outcome = NO_OUTCOME, verbose: bool = False, plot: bool = True) -> None:
    """Print the answer of a view: verdict, summary, the worst findings, what was written, the next command.

    ``verbose`` prints all sections and findings before it; ``plot`` draws maps in a terminal.
    """
    parts = (part for section in view.sections if TERMINAL in section.media for part in section.parts)
    findings = [
        named for part in parts if isinstance(part, Findings) for named in part.listed
    ]  # with candidates' names
    if verbose:
        _print_sections(view, to, plot)
        if findings:
            to.print()
        _print_findings(findings, to, None)
        to.print()
        to.print(Text(view.about, style="dim"), soft_wrap=not to.is_terminal)
    _print_answer(view, findings, to, answer, verbose)


def _print_sections(view: View, to: Console, plot: bool) -> None:
    facts = (f"{title}: {''.join(display(text, MAX_SENTENCE_LENGTH) for text in texts)}" for title, texts in view.facts)
    to.print(Text("; ".join(facts)), soft_wrap=not to.is_terminal)
    for section in view.sections:
        before = None
        for part in section.parts if {TERMINAL, VERBOSE} & set(section.media) else ():
            if isinstance(part, BlockMap) and not (plot and to.file.isatty()):
                continue
            if isinstance(part, Findings | Gates | Chart | Dots):
                continue
            if not (isinstance(before, Table) and isinstance(part, Lines)):  # tables end with an empty line
                to.print()
            _print_part(part, to)
            before = part


def _print_answer(
    view: View, findings: Sequence[tuple[str, Finding]], to: Console, answer: Outcome, verbose: bool
) -> None:
    wrap = not to.is_terminal
    # A pass without gates is not an approval and gets no colour.
    style = STYLES["inconclusive"] if view.doubts and view.word != "fail" else STYLES.get(view.word, "bold")
    headline = format_conclusion(view, answer)
    to.print(Text(headline, style=style), soft_wrap=wrap)
    # Commands print the reasons by gates, and findings follow.
    causes = ("result", "rules") if findings else ("result", "rules", "finding")
    for reason in view.reasons if view.verdict not in ("pass", None) else ():
        if reason.by in causes and sentence(reason.text) not in headline:
            to.print(Text(display(reason.text, MAX_SENTENCE_LENGTH), style=STYLES[view.verdict]), soft_wrap=wrap)
    if view.overview is not None and not verbose:
        _print_overview(view.overview, to)
    for line in view.summary:
        to.print(Text(display(line, MAX_SENTENCE_LENGTH)), soft_wrap=wrap)
    if not verbose:
        new = [
            (name, finding)
            for name, finding in findings
            if (finding.severity != "info" or finding.waived) and finding not in view.stated
        ]
        _print_findings(new, to, MAX_FINDINGS)
    if answer.wrote:
        to.print(
            Text(f"wrote {', '.join(display(_find_relative_path(path)) for path in answer.wrote)}"), soft_wrap=wrap
        )
    if answer.next_step:  # unwrapped, so that it can be pasted
        to.print(Text(f"next: {display(answer.next_step, MAX_SENTENCE_LENGTH)}", style="dim"), soft_wrap=True)
    shown = (finding for _, finding in findings if verbose or finding.severity != "info")
    codes = ", ".join(dict.fromkeys(display(finding.code) for finding in shown))
    hints = [] if verbose else [f"-v shows tables, maps and {count(len(findings), 'finding') if findings else 'more'}"]
    hints += [f"quanterr explain NAME explains {codes}"] if codes else []
    if hints:
        to.print(Text("; ".join(hints), style="dim"), soft_wrap=wrap)


def _print_overview(part: Table, to: Console) -> None:
    """Print the first rows of a table without its title."""
    rows, left_out = _shorten_names(part, to.width - _is_plain(to))
    rows_shown = rows[:MAX_SHOWN]
    to.print(_draw_table(part, rows_shown, _fit_columns(part, rows_shown, to.width), _is_plain(to)))
    notes = [f"names without {left_out}"] if left_out else []
    notes += [f"and {count(len(rows) - MAX_SHOWN, 'more candidate')}"] if len(rows) > MAX_SHOWN else []
    if notes:
        to.print(Text("; ".join(notes), style="dim"), soft_wrap=not to.is_terminal)


def format_conclusion(view: View, answer: Outcome) -> str:
    """Return the first line of the answer, such as "PASS (exit 0): …", with doubts about the comparison."""
    if view.word is None:
        return view.conclusion
    status = "" if answer.status is None else f" (exit {int(answer.status)})"
    word = "fail" if answer.status == Status.GATE_FAILED else view.word  # even if --fail-fast stopped the run
    return format_answer(f"{word.upper()}{status}", view.doubts, view.conclusion)


def _print_part(part: Part, to: Console) -> None:
    wrap = not to.is_terminal
    if isinstance(part, Table):
        print_table(part, to)
    elif isinstance(part, FigureGroup):
        _print_figures(part, to)
    elif isinstance(part, BlockMap):
        for picture in draw_block_maps(part.weights(), to.width, unicode="utf" in (to.encoding or "").lower()):
            to.print(picture)
    elif isinstance(part, Lines):
        for line in part.lines:
            to.print(Text(display(line, MAX_SENTENCE_LENGTH), style="yellow" if part.warn else ""), soft_wrap=wrap)


def print_table(part: Table, to: Console) -> None:
    """Print a table with its title, and a note about what was left out."""
    wrap = not to.is_terminal
    rows, left_out = _shorten_names(part, to.width - _is_plain(to))
    to.print(Text(part.title, style="bold"), soft_wrap=wrap)  # rich would wrap the title to the width of the table
    kept = _fit_columns(part, rows, to.width)
    to.print(_draw_table(part, rows, kept, _is_plain(to)))
    notes = [f"names without {left_out}"] if left_out else []
    notes += [column.legend for n, column in enumerate(part.columns) if column.legend and n in kept]
    narrow = ", ".join(column.header for n, column in enumerate(part.columns) if n not in kept)
    notes += [f"too narrow for: {narrow}"] if narrow else []
    if notes:
        to.print(Text("; ".join(notes), style="dim"), soft_wrap=wrap)
    if part.more:
        to.print(Text(f"and {part.more:,} more, in the JSON"), soft_wrap=wrap)


def _shorten_names(part: Table, width: int) -> tuple[list[tuple[str, Sequence[str]]], str]:
    """Remove the common prefix and suffix from the names; return the rows, and what was removed as text.

    Candidates keep their whole names if the table, without its outer borders, is not wider than ``width``.
    """
    names = [row[0] for row in part.rows if isinstance(row[0], LayerName)]
    prefix, suffix = _find_common_ends(names) if len(names) == len(part.rows) else ("", "")
    if not names and part.rows and all(isinstance(row[0], Name) for row in part.rows):
        widths = (max(len(cell) for cell in cells) + 3 for cells in zip(_list_heads(part), *part.rows, strict=True))
        prefix = cut_prefix([row[0] for row in part.rows])[1] if sum(widths) > width else ""
    rows: list[tuple[str, Sequence[str]]] = [
        (row[0].removeprefix(prefix).removesuffix(suffix), row[1:]) for row in part.rows
    ]
    return rows, " and ".join(display(end) for end in (prefix, suffix) if end)


def _list_heads(part: Table) -> list[str]:
    return [part.first, *(column.header for column in part.columns)]


def _find_common_ends(names: Sequence[str]) -> tuple[str, str]:
    """Return the common prefix of whole words without numbers, and ".weight" if all end in it; names keep a word."""
    suffix = WEIGHT_SUFFIX if len(names) > 1 and all(name.endswith(WEIGHT_SUFFIX) for name in names) else ""
    words = [name.removesuffix(suffix).split(".")[:-1] for name in names]
    if len(names) < 2:
        return "", ""
    common = takewhile(lambda parts: len(set(parts)) == 1 and not parts[0].isdecimal(), zip(*words, strict=False))
    return "".join(f"{parts[0]}." for parts in common), suffix


def _print_figures(part: FigureGroup, to: Console) -> None:
    to.print(Text(part.title, style="bold"), soft_wrap=not to.is_terminal)
    table = _make_bare_table(_is_plain(to))
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for title, value, unit, note in part.shown:
        table.add_row(Text(title), Text(f"{value}{f' {unit}' if unit else ''}{f'; {display(note)}' if note else ''}"))
    if part.shown:
        to.print(table)


def _is_plain(to: Console) -> bool:
    """Return True if tables must be drawn in ASCII."""
    return not to.file.isatty() or "utf" not in (to.encoding or "").lower()


def _find_relative_path(path: str) -> str:
    """Return the path relative to the current folder if it is inside."""
    try:
        relative = os.path.relpath(path)
    except ValueError:  # on another drive
        return path
    return path if relative.startswith(os.pardir) else relative


def _make_bare_table(plain: bool) -> RichTable:
    """Return a table without columns."""
    return RichTable(box=box.ASCII2 if plain else box.SIMPLE_HEAD, pad_edge=plain)


def _fit_columns(part: Table, rows: Sequence[tuple[str, Sequence[str]]], width: int) -> dict[int, str]:
    """Return the columns after the first that fit into ``width``, by place, with their headings.

    Headings are folded if a column would not fit otherwise.
    """
    cells = [max((len(row[n]) for _, row in rows), default=0) for n in range(len(part.columns))]
    unfolded = {n: column.header for n, column in enumerate(part.columns)}
    folded = {n: _fold_heading(head, cells[n]) for n, head in unfolded.items()}
    for headings in (unfolded, folded):  # the least important columns are removed until the others fit
        widths = {n: max(cells[n], *map(len, head.split("\n"))) + 3 for n, head in headings.items()}
        while len(headings) > 1 and _measure_names(part, rows) + 4 + sum(widths[n] for n in headings) > width:
            del headings[max(headings, key=lambda n: part.columns[n].rank)]
    return folded if len(folded) > len(unfolded) else unfolded


def _measure_names(part: Table, rows: Sequence[tuple[str, Sequence[str]]]) -> int:
    return min(max(len(display(name)) for name in (part.first, *(name for name, _ in rows))), NAME_WIDTH)


def _draw_table(
    part: Table, rows: Sequence[tuple[str, Sequence[str]]], kept: Mapping[int, str], plain: bool
) -> RichTable:
    """Return a table with a column of names, and the columns ``kept``, which maps indices to headings."""
    table = _make_bare_table(plain)
    table.add_column(part.first, overflow="fold", min_width=_measure_names(part, rows))
    for n, head in kept.items():
        justify: Literal["left", "right"] = "right" if part.columns[n].right else "left"
        table.add_column(head, justify=justify, no_wrap=len(kept) > 1, overflow="fold")
    for shown, row in rows:
        table.add_row(Text(display(shown)), *(_draw_cell(row[n], plain) for n in kept))
    return table


def _fold_heading(heading: str, width: int) -> str:
    """Return a heading in lines that are at most as wide as the cells below it, or as its longest word."""
    words = re.findall(r"[^\s._-]*[\s._-]*", heading)
    width, lines = max(width, *(len(word.rstrip()) for word in words)), [""]
    for word in words:
        if len((lines[-1] + word).rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)


def _draw_cell(cell: str, plain: bool) -> Text:
    """Return a cell as text; bars are drawn in eighths of a character, red where long."""
    if plain or not isinstance(cell, BarCell):
        return Text(display(cell, MAX_SENTENCE_LENGTH))
    eighths = round(cell.share * BarCell.WIDTH * 8)
    bar = "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
    style = "red" if cell.share > RED_SHARE else "yellow" if cell.share > YELLOW_SHARE else "green"
    return Text(bar.ljust(BarCell.WIDTH), style=style)


def _print_findings(findings: Sequence[tuple[str, Finding]], to: Console, max_groups: int | None) -> None:
    """Print findings grouped by layer, the most severe first, up to ``max_groups`` groups, and count the others."""
    wrap, groups = not to.is_terminal, _group_by_layer(findings)
    shown = groups[:max_groups]
    for (name, first), *others in shown:
        message = f"{display(name)}: {first.message}" if name else first.message
        to.print(_format_finding(first, message), soft_wrap=wrap)
        for _, finding in others:
            to.print(Text("  and ") + _format_finding(finding, finding.statement), soft_wrap=wrap)
    left = sum(map(len, groups[len(shown) :]))
    if left:
        to.print(Text(f"and {count(left, 'more finding')}"))


def _group_by_layer(findings: Sequence[tuple[str, Finding]]) -> list[list[tuple[str, Finding]]]:
    """Group findings by candidate and layer; the most severe come first, among groups and within each."""
    groups: dict[object, list[tuple[str, Finding]]] = {}
    for n, (name, finding) in enumerate(findings):
        groups.setdefault(n if finding.layer is None else (name, finding.layer), []).append((name, finding))
    for group in groups.values():
        group.sort(key=lambda named: named[1].rank)
    return sorted(groups.values(), key=lambda group: group[0][1].rank)


def _format_finding(item: Finding, message: str) -> Text:
    text = Text(f"{item.severity}: ", style=TONES[item.severity])
    text.append(sentence(message), style="default not bold")
    if item.remedy:
        remedy = sentence(item.remedy)
        end = "" if item.message.endswith("?") else "."
        text.append(f"{end} {remedy[0].upper()}{remedy[1:]}", style="default not bold")
    return text
