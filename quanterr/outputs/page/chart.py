"""The layout of the charts of pages, which are SVG and need no script."""

from math import floor, log10
from typing import NamedTuple

from quanterr.outputs.sections import Chart
from quanterr.util.text import display

WIDTH, HEIGHT = 720, 264
LEFT, TOP, BOTTOM = 84, 16, 54  # margins; curves are named on the right
MAX_NAME_LETTERS, LETTER_WIDTH = 20, 16  # the width is that of a letter on narrow screens
LINE_HEIGHT = 24  # height of a name
LINE_STYLES = 4  # number of line styles in the style sheet
MIN_DECADES = 0.05  # minimum range of an axis


class Line(NamedTuple):
    """A curve: its line style, its path, its name and the name's place."""

    style: int
    path: str
    name: str
    x: str
    y: str


class Drawing(NamedTuple):
    """A chart in units of the view box; numbers are texts with the digits that are drawn."""

    end: int  # right end of the axis
    levels: list[tuple[str, str, str]]  # grid lines: text, height of the line, base line of the text
    first: str  # numbers at the ends of the axis
    last: str
    curves: list[Line]


def draw_chart(chart: Chart) -> Drawing | None:
    """Return the layout of all curves with several positive points, the highest end first; None if there are none."""
    curves = [(curve.name, [(x, y) for x, y in curve.points if y > 0]) for curve in chart.curves]
    curves = [(name, points) for name, points in curves if len(points) > 1]
    if not curves:
        return None
    all_points = [point for _, points in curves for point in points]
    end = WIDTH - 14 - LETTER_WIDTH * max(len(display(name, MAX_NAME_LETTERS)) for name, _ in curves)
    left, right = min(x for x, _ in all_points), max(x for x, _ in all_points)
    low, high = (log10(pick(y for _, y in all_points)) for pick in (min, max))
    low, high = low - max(MIN_DECADES - (high - low), 0) / 2, high + max(MIN_DECADES - (high - low), 0) / 2

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / ((right - left) or 1)
        up = (log10(y) - low) / (high - low)
        return LEFT + across * (end - LEFT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    levels = []
    for level in _list_levels(low, high):
        y = place(left, level)[1]
        levels.append((f"{level:.3g}", f"{y:.1f}", f"{y + 4:.1f}"))
    drawn, taken = [], -LINE_HEIGHT
    for n, (name, points) in sorted(enumerate(curves), key=lambda item: -item[1][1][-1][1]):
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in points))
        x, y = place(*points[-1])
        taken = max(taken + LINE_HEIGHT, round(y) + 4)
        drawn.append(Line(n % LINE_STYLES, f"M{path}", display(name, MAX_NAME_LETTERS), f"{x + 8:.1f}", f"{taken}"))
    first, last = (f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in (left, right))
    return Drawing(end, levels, first, last, drawn)


def _list_levels(low: float, high: float) -> list[float]:
    """Return grid levels from 10^low to 10^high: powers of ten over many decades, otherwise 1, 2, 5 or finer steps."""
    for firsts in ((1,), (1, 2, 5), range(1, 10)) if high - low >= 3 else ((1, 2, 5), range(1, 10)):
        candidates = (first * 10.0**decade for decade in range(floor(low), floor(high) + 1) for first in firsts)
        levels = [level for level in candidates if low <= log10(level) <= high]
        if len(levels) > 1:
            return levels
    return [10.0**low, 10.0**high]
