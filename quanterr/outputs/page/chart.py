"""Charts of pages: SVG without scripts."""

from math import floor, log10

from quanterr.outputs.page.markup import Markup, tag
from quanterr.outputs.sections import Chart
from quanterr.util.text import display

WIDTH, HEIGHT = 720, 264
LEFT, TOP, BOTTOM = 84, 16, 54  # margins; curves are named on the right
NAME, LETTER = 20, 16  # maximum letters of a name, and the width of a letter on narrow screens
LINE = 24  # height of a name
STYLES = 4  # line styles in the style sheet
NARROW = 0.05  # minimum decades of an axis


def draw_chart(chart: Chart) -> Markup:
    """Return a figure with a named line for each curve; points that are not positive are left out."""
    curves = [(curve.name, [(x, y) for x, y in curve.points if y > 0]) for curve in chart.curves]
    curves = [(name, points) for name, points in curves if len(points) > 1]
    if not curves:
        return tag("p", "There is nothing to draw.", class_="about")
    every = [point for _, points in curves for point in points]
    end = WIDTH - 14 - LETTER * max(len(display(name, NAME)) for name, _ in curves)  # right end of the axis
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    low, high = (log10(pick(y for _, y in every)) for pick in (min, max))
    low, high = low - max(NARROW - (high - low), 0) / 2, high + max(NARROW - (high - low), 0) / 2

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / ((right - left) or 1)
        up = (log10(y) - low) / (high - low)
        return LEFT + across * (end - LEFT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    drawn = []
    for level in _levels(low, high):
        _, y = place(left, level)
        drawn.append(tag("line", class_="grid", x1=f"{LEFT}", x2=f"{end:.1f}", y1=f"{y:.1f}", y2=f"{y:.1f}"))
        drawn.append(tag("text", f"{level:.3g}", class_="tick end", x=f"{LEFT - 8}", y=f"{y + 4:.1f}"))
    for x, kind, at in ((left, "tick", LEFT), (right, "tick end", end)):
        text = f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
        drawn.append(tag("text", text, class_=kind, x=f"{at}", y=f"{HEIGHT - 30}"))
    middle = (LEFT + end) / 2
    drawn.append(tag("text", chart.across, class_="tick middle", x=f"{middle:.0f}", y=f"{HEIGHT - 6}"))
    taken = -LINE
    for n, (name, points) in sorted(enumerate(curves), key=lambda one: -one[1][1][-1][1]):
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in points))
        drawn.append(tag("path", class_=f"curve c{n % STYLES}", d=f"M{path}"))
        x, y = place(*points[-1])
        taken = max(taken + LINE, round(y) + 4)
        drawn.append(tag("text", display(name, NAME), x=f"{x + 8:.1f}", y=f"{taken}"))
    title = tag("figcaption", chart.title)
    return tag("figure", title, tag("svg", *drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img"), class_="chart")


def _levels(low: float, high: float) -> list[float]:
    """Return grid levels from 10^low to 10^high: over many decades powers of ten, otherwise 1, 2, 5 or finer steps."""
    for firsts in ((1,), (1, 2, 5), range(1, 10)) if high - low >= 3 else ((1, 2, 5), range(1, 10)):
        every = (first * 10.0**decade for decade in range(floor(low), floor(high) + 1) for first in firsts)
        found = [level for level in every if low <= log10(level) <= high]
        if len(found) > 1:
            return found
    return [10.0**low, 10.0**high]
