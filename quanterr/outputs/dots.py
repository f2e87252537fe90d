"""The plot of candidates by size and one number: places of points and names on pages and in SVG and PNG files."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import ceil, floor, hypot, log10
from typing import NamedTuple

from quanterr.outputs.sections import Dot, Dots
from quanterr.util.text import cut_prefix, display, size

WIDTH, HEIGHT = 600, 380  # pixels
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 14, 46  # margins
LONGEST = 32  # characters of a name
LETTER, LINE, RADIUS = 8.0, 14, 5  # width of a letter, height of a line, radius of a point
STEP = 10  # between two places that are tried for a name
MARGIN = 0.08  # on each side, relative to the range
LEVELS = 5  # about as many lines across
STEPS = (1, 2, 2.5, 5, 10)


class Place(NamedTuple):
    """The place of a name: its base line, and the side of the point on which it is."""

    x: float
    y: float
    is_left: bool


class Point(NamedTuple):
    """A candidate in pixels, with the ends of its error bar."""

    x: float
    y: float
    low: float
    high: float
    is_best: bool
    name: str
    place: Place


class Drawing(NamedTuple):
    """A plot in pixels."""

    across: list[tuple[str, float]]  # sizes along the axis
    levels: list[tuple[str, float]]  # numbers, and the heights of their lines
    line: str  # path through the Pareto-optimal points
    points: list[Point]
    prefix: str  # that all names have and the plot leaves out


def draw_dots(dots: Dots) -> Drawing:
    """Return the places of all points, names and grid lines."""
    scale = log10 if dots.log else float
    ends = [scale(end) for dot in dots.shown for end in _list_ends(dot, dots.log)]
    across, up = _widen([dot.bytes for dot in dots.shown]), _widen(ends)

    def x(n_bytes: float) -> float:
        return LEFT + (n_bytes - across[0]) / (across[1] - across[0]) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (scale(value) - up[0]) / (up[1] - up[0]) * (HEIGHT - TOP - BOTTOM)

    names, prefix = cut_prefix([dot.name for dot in dots.shown])
    names = [display(name, LONGEST) for name in names]
    found = [(x(dot.bytes), y(dot.value)) for dot in dots.shown]
    best = sorted(where for where, dot in zip(found, dots.shown, strict=True) if dot.is_best)
    falls = bool(best) and best[-1][1] >= best[0][1]
    places = place_names(found, names, falls, list(_list_between(best)))
    points = [
        Point(*where, y(_list_ends(dot, dots.log)[0]), y(dot.value + dot.error), dot.is_best, name, place)
        for where, dot, name, place in zip(found, dots.shown, names, places, strict=True)
    ]
    line = "L".join(f"{a:.1f} {b:.1f}" for a, b in best)
    levels = [(f"{level:.3g}", y(level)) for level in (_list_decades(*up) if dots.log else _list_steps(*up))]
    return Drawing([(size(n), x(n)) for n in _list_sizes(*across)], levels, f"M{line}" if best else "", points, prefix)


def _list_between(corners: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield points along a line, a few pixels apart."""
    for (x, y), (to_x, to_y) in pairwise(corners):
        n = int(hypot(to_x - x, to_y - y) / (2 * RADIUS)) + 1
        yield from ((x + k / n * (to_x - x), y + k / n * (to_y - y)) for k in range(1, n))


def place_names(
    points: Sequence[tuple[float, float]], names: Sequence[str], falls: bool, line: Sequence[tuple[float, float]] = ()
) -> list[Place]:
    """Return a place for each name near its point, clear of other points, names and the line, if there is one.

    ``falls`` means that the line through the best points falls to the right: then names above it are clear of it.
    """
    steps = [-step if falls else step for step in (1, 0, -1, 2, -2, 3, -3)]
    taken = [(x - RADIUS - 1, y - RADIUS - 1, x + RADIUS + 1, y + RADIUS + 1) for x, y in points]
    taken += [(x - 1, y - 1, x + 1, y + 1) for x, y in line]
    places = []
    for (x, y), name in zip(points, names, strict=True):
        width = LETTER * len(name)
        every = [_place(x, y, down, is_left) for down, is_left in product(steps, (False, True))]
        lefts = [place.x - width if place.is_left else place.x for place in every]
        boxes = [(left, p.y - LINE + 3, left + width, p.y + 3) for left, p in zip(lefts, every, strict=True)]
        n = next((n for n, box in enumerate(boxes) if _is_inside(box) and not any(_overlap(box, b) for b in taken)), 0)
        taken.append(boxes[n])
        places.append(every[n])
    return places


def _place(x: float, y: float, down: int, is_left: bool) -> Place:
    """Return a place beside a point, so many steps below it (negative: above)."""
    aside = (RADIUS + 3 if abs(down) < 2 else 2) * (-1 if is_left else 1)
    return Place(x + aside, y + 4 + down * STEP, is_left)


Box = tuple[float, float, float, float]  # left, top, right, bottom


def _is_inside(box: Box) -> bool:
    return box[0] >= LEFT and box[2] <= WIDTH - RIGHT and box[1] >= 0 and box[3] <= HEIGHT - BOTTOM


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _list_ends(dot: Dot, log: bool) -> tuple[float, float]:
    """Return the ends of the error bar; on a logarithmic scale, it does not reach below half of the value."""
    low = dot.value - dot.error
    return (max(low, dot.value / 2) if log else low), dot.value + dot.error


def _widen(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    by = (high - low) * MARGIN or abs(low) * MARGIN or 1.0
    return low - by, high + by


def _list_steps(low: float, high: float) -> Iterator[float]:
    """Yield about ``LEVELS`` round numbers in a range."""
    rough = (high - low) / LEVELS
    decade = 10.0 ** floor(log10(rough))
    step = next(step * decade for step in STEPS if step * decade >= rough)
    yield from (n * step for n in range(ceil(low / step), floor(high / step) + 1))


def _list_decades(low: float, high: float) -> Iterator[float]:
    """Yield round numbers from 10^low to 10^high: powers of ten if there are several, otherwise also 2 and 5."""
    firsts = (1,) if high - low > 2 else (1, 2, 5) if high - low > 0.5 else range(1, 10)
    every = (first * 10.0**decade for decade in range(floor(low), ceil(high) + 1) for first in firsts)
    yield from (level for level in every if low <= log10(level) <= high)


def _list_sizes(low: float, high: float) -> Iterator[float]:
    """Yield round sizes in a range, in the unit that the largest one is shown in."""
    unit = 1024.0 ** floor(log10(max(high, 1)) / log10(1024))
    yield from (n * unit for n in _list_steps(max(low, 0) / unit, high / unit))
