"""Charts of pages: the places of lines and texts in an SVG, which needs no script."""

from math import floor, log10
from typing import NamedTuple

from quanterr.outputs.sections import Chart
from quanterr.util.text import display

WIDTH, HEIGHT = 720, 264
LEFT, TOP, BOTTOM = 84, 16, 54  # margins; curves are named on the right
NAME, LETTER = 20, 16  # maximum letters of a name, and the width of a letter on narrow screens
LINE = 24  # height of a name
STYLES = 4  # line styles in the style sheet
NARROW = 0.05  # minimum decades of an axis


class Line(NamedTuple):
    """A curve: its line style, its path, its name and the name's place."""

    style: int
    path: str
    name: str
    x: str
    y: str


class Drawing(NamedTuple):
    """A chart in units of the view box, as texts with the digits that are drawn."""

    end: int  # right end of the axis
    levels: list[tuple[str, str, str]]  # grid lines: text, height of the line, base line of the text
    first: str  # numbers at the ends of the axis
    last: str
    curves: list[Line]


def draw_chart(chart: Chart) -> Drawing | None:
    """Return the places of all curves with several positive points, the highest end first; None without one."""
    curves = [(curve.name, [(x, y) for x, y in curve.points if y > 0]) for curve in chart.curves]
    curves = [(name, points) for name, points in curves if len(points) > 1]
    if not curves:
        return None
    every = [point for _, points in curves for point in points]
    end = WIDTH - 14 - LETTER * max(len(display(name, NAME)) for name, _ in curves)
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    low, high = (log10(pick(y for _, y in every)) for pick in (min, max))
    low, high = low - max(NARROW - (high - low), 0) / 2, high + max(NARROW - (high - low), 0) / 2

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / ((right - left) or 1)
        up = (log10(y) - low) / (high - low)
        return LEFT + across * (end - LEFT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    levels = []
    for level in _levels(low, high):
        y = place(left, level)[1]
        levels.append((f"{level:.3g}", f"{y:.1f}", f"{y + 4:.1f}"))
    drawn, taken = [], -LINE
    for n, (name, points) in sorted(enumerate(curves), key=lambda one: -one[1][1][-1][1]):
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in points))
        x, y = place(*points[-1])
        taken = max(taken + LINE, round(y) + 4)
        drawn.append(Line(n % STYLES, f"M{path}", display(name, NAME), f"{x + 8:.1f}", f"{taken}"))
    first, last = (f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in (left, right))
    return Drawing(end, levels, first, last, drawn)


def _levels(low: float, high: float) -> list[float]:
    """Return grid levels from 10^low to 10^high: over many decades powers of ten, otherwise 1, 2, 5 or finer steps."""
    for firsts in ((1,), (1, 2, 5), range(1, 10)) if high - low >= 3 else ((1, 2, 5), range(1, 10)):
        every = (first * 10.0**decade for decade in range(floor(low), floor(high) + 1) for first in firsts)
        found = [level for level in every if low <= log10(level) <= high]
        if len(found) > 1:
            return found
    return [10.0**low, 10.0**high]
