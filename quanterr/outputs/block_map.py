"""The block map in the terminal, with a line for each module, a cell for each block and a table for each stack.

A cell is a digit, readable without colours. It counts steps of a fixed size in dB from the worst level to the cell's
worst weight. The curve in the same line shows the SNR along the blocks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import floor
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from quanterr.outputs.formatting import format_db
from quanterr.outputs.page.columns import DIFFERS, IDENTICAL
from quanterr.outputs.sections import MapCell
from quanterr.selection.roles import place_of
from quanterr.util.text import count, display

MIN_WIDTH = 60  # columns of the terminal
MIN_CELLS, MAX_CELLS = 8, 128
MAX_MODULES = 24  # rows of a map
MAX_STACKS = 4
NAME_WIDTH = 32
OTHER_WIDTH = 27  # columns of the terminal needed besides names and cells
STEPS_DB = (1, 2, 3, 5, 10, 20, 50, 100)  # dB that a digit may stand for
MIN_SPAN_DB = 12  # minimum number of dB that the ten digits span
DIGITS = 10
CURVE = "▁▂▃▄▅▆▇█"

# Colours of digits 0 (worst) to 9: cividis, which differs in lightness and works for all kinds of colour vision.
COLOURS = ["#fee838", "#e1cc55", "#c3b369", "#a59c74", "#8a8678", "#707173", "#575d6d", "#3b496c", "#123570", "#00224e"]
DARK_TEXT = 5  # digits below this have bright cells and dark text

NOT_COMPARED_SIGN, UNDEFINED_SIGN, IDENTICAL_SIGN, ABSENT = "?", "!", "=", " "
LEGEND = {NOT_COMPARED_SIGN: "not compared", UNDEFINED_SIGN: "undefined", IDENTICAL_SIGN: "identical"}


class Cell(NamedTuple):
    """The worst weight of a module in a block, or in adjacent blocks that share a cell."""

    rank: int  # 0: not compared, 1: undefined, 2: a number, 3: identical
    snr_db: float
    block: int

    @property
    def sign(self) -> str | None:
        """The character shown in place of a digit, or None if the cell has a number."""
        return (NOT_COMPARED_SIGN, UNDEFINED_SIGN, None, IDENTICAL_SIGN)[self.rank]


Stack = dict[str, dict[int, Cell]]  # cells by module and block


class Scale(NamedTuple):
    """Digit n covers levels from ``low + n * step`` to ``low + (n + 1) * step``."""

    low: float
    step: float

    def digit(self, snr_db: float) -> int:
        """Return the digit of a level, from 0 (worst) to 9."""
        return min(max(floor((snr_db - self.low) / self.step), 0), DIGITS - 1)


def draw_block_maps(weights: Iterable[MapCell], width: int, unicode: bool) -> Iterator[RenderableType]:
    """Yield a map for each stack of blocks, then the legend; nothing without blocks, levels or enough width."""
    stacks = _group_stacks(weights)
    cells = [cell for stack in stacks.values() for row in stack.values() for cell in row.values()]
    levels = [cell.snr_db for cell in cells if not cell.sign]
    if width < MIN_WIDTH or not levels:
        return
    scale = _fit_scale(levels)
    shown: set[str] = set()
    for name, stack in list(stacks.items())[:MAX_STACKS]:
        yield _draw_map(name, stack, scale, width, unicode, shown)
    if len(stacks) > MAX_STACKS:
        yield Text(f"and {count(len(stacks) - MAX_STACKS, 'more stack')} of blocks", style="dim")
    first, last = scale.low + scale.step, scale.low + (DIGITS - 1) * scale.step
    digits = f"0: below {first:g} dB, 9: {last:g} dB or more, in steps of {scale.step:g} dB"
    signs = [f"{sign} {description}" for sign, description in LEGEND.items() if sign in shown]
    yield Text("; ".join([digits, *signs]), style="dim")


def _group_stacks(weights: Iterable[MapCell]) -> dict[str, Stack]:
    """Return the worst weight of each module in each block.

    Modules that are identical in all blocks are left out, then stacks of a single block.
    """
    stacks: dict[str, Stack] = defaultdict(lambda: defaultdict(dict))
    for weight in weights:
        place = place_of(weight.name)
        if place:
            rank = 3 if weight.status == IDENTICAL else 0
            if weight.status == DIFFERS:
                rank = 1 if weight.snr_db is None else 2
            cell = Cell(rank, weight.snr_db or 0.0, place.block)
            row = stacks[place.stack][place.module]
            row[place.block] = min(row.get(place.block, cell), cell)
    kept: dict[str, Stack] = {}
    for name, stack in stacks.items():
        rows = {
            module: row for module, row in stack.items() if any(cell.sign != IDENTICAL_SIGN for cell in row.values())
        }
        if len({block for row in rows.values() for block in row}) > 1:
            kept[name] = rows
    return kept


def _fit_scale(levels: list[float]) -> Scale:
    low, high = min(levels), max(levels)
    wide = [step for step in STEPS_DB if step * DIGITS >= MIN_SPAN_DB]  # smaller steps exaggerate slight differences
    step = next((step for step in wide if floor(low / step) * step + DIGITS * step > high), STEPS_DB[-1])
    return Scale(floor(low / step) * step, step)


def _draw_map(name: str, stack: Stack, scale: Scale, width: int, unicode: bool, shown: set[str]) -> Group:
    blocks = sorted({block for row in stack.values() for block in row})
    modules = sorted(sorted(stack, key=lambda module: min(stack[module].values()))[:MAX_MODULES])
    label = min(max(len(display(module)) for module in modules), NAME_WIDTH)
    room = (width - label - OTHER_WIDTH) // (2 if unicode else 1)
    per_cell = -(-len(blocks) // max(min(room, MAX_CELLS), MIN_CELLS))
    cell_blocks = [blocks[n : n + per_cell] for n in range(0, len(blocks), per_cell)]

    title = f"SNR by block of {display(name)}"
    title += f", {per_cell} blocks per cell" if per_cell > 1 else ""
    title += f", the {len(modules)} worst of {len(stack)} modules" if len(modules) < len(stack) else ""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("module", overflow="fold", min_width=label)
    table.add_column(_draw_ticks(cell_blocks), no_wrap=True)
    if unicode:
        table.add_column("", no_wrap=True)
    table.add_column("worst dB", no_wrap=True, justify="right")
    table.add_column("block", no_wrap=True, justify="right")
    for module in modules:
        cells = [
            min((stack[module][b] for b in numbers if b in stack[module]), default=None) for numbers in cell_blocks
        ]
        signs = [ABSENT if cell is None else cell.sign or str(scale.digit(cell.snr_db)) for cell in cells]
        shown.update(signs)
        worst = min(cell for cell in cells if cell)
        level = worst.sign or format_db(worst.snr_db)
        curve = [Text("".join(_draw_height(cell, scale) for cell in cells))] if unicode else []
        digits = Text.assemble(*((sign, _pick_style(sign, cell)) for sign, cell in zip(signs, cells, strict=True)))
        table.add_row(Text(display(module)), digits, *curve, level, str(worst.block))
    return Group(Text(title, style="bold"), table)


def _draw_ticks(cell_blocks: list[list[int]]) -> Text:
    """Return block numbers to show above every tenth cell."""
    line = ""
    for n, numbers in enumerate(cell_blocks):
        if n % 10 == 0 and len(line) <= n and n + len(str(numbers[0])) <= max(len(cell_blocks), 2):
            line = line.ljust(n) + str(numbers[0])
    return Text(line)


def _pick_style(sign: str, cell: Cell | None) -> Style | str:
    """Return the style of a digit, whose colour is the brighter the worse it is."""
    if cell is None or not sign.isdigit():
        return "bold reverse" if sign in (NOT_COMPARED_SIGN, UNDEFINED_SIGN) else "dim"
    colour = int(sign)
    return Style(color="#000000" if colour < DARK_TEXT else "#ffffff", bgcolor=COLOURS[colour])


def _draw_height(cell: Cell | None, scale: Scale) -> str:
    if cell is None or cell.sign:
        return ABSENT if cell is None or cell.sign == IDENTICAL_SIGN else str(cell.sign)
    share = (cell.snr_db - scale.low) / (scale.step * DIGITS)
    return CURVE[min(max(int(share * len(CURVE)), 0), len(CURVE) - 1)]
