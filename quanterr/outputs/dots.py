"""The layout of the plot of candidates by size and one number, on pages and in SVG and PNG files."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import ceil, floor, hypot, log10
from typing import NamedTuple

from quanterr.outputs.sections import Dot, Dots
from quanterr.util.text import cut_prefix, display, size

WIDTH, HEIGHT = 600, 380  # pixels
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 14, 46  # margins
MAX_NAME_LENGTH = 32  # characters
LETTER_WIDTH, LINE_HEIGHT, RADIUS = 8.0, 14, 5  # pixels; the radius is that of a point
PLACE_STEP = 10  # pixels between two places that are tried for a name
RANGE_MARGIN = 0.08  # margin on each side, as a share of the range
GRID_LINES = 5  # approximate number of horizontal lines
STEPS = (1, 2, 2.5, 5, 10)


class Place(NamedTuple):
    """The place of a name: its x and base line, and whether it ends there, on the left of its point."""

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

    across: list[tuple[str, float]]  # sizes, and their places along the axis
    levels: list[tuple[str, float]]  # numbers, and the heights of their lines
    line: str  # path through the Pareto-optimal points
    points: list[Point]
    prefix: str  # common prefix of all names, which the plot leaves out


def draw_dots(dots: Dots) -> Drawing:
    """Return the places of all points, names and grid lines."""
    scale = log10 if dots.log else float
    ends = [scale(end) for dot in dots.shown for end in _list_ends(dot, dots.log)]
    across, up = _widen_range([dot.bytes for dot in dots.shown]), _widen_range(ends)

    def x(n_bytes: float) -> float:
        return LEFT + (n_bytes - across[0]) / (across[1] - across[0]) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (scale(value) - up[0]) / (up[1] - up[0]) * (HEIGHT - TOP - BOTTOM)

    names, prefix = cut_prefix([dot.name for dot in dots.shown])
    names = [display(name, MAX_NAME_LENGTH) for name in names]
    positions = [(x(dot.bytes), y(dot.value)) for dot in dots.shown]
    best = sorted(position for position, dot in zip(positions, dots.shown, strict=True) if dot.is_best)
    falls = bool(best) and best[-1][1] >= best[0][1]
    places = place_names(positions, names, falls, list(_list_between(best)))
    points = [
        Point(*position, y(_list_ends(dot, dots.log)[0]), y(dot.value + dot.error), dot.is_best, name, place)
        for position, dot, name, place in zip(positions, dots.shown, names, places, strict=True)
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

    ``falls`` means that the line through the best points falls to the right, so that names above it are clear of it.
    """
    steps = [-step if falls else step for step in (1, 0, -1, 2, -2, 3, -3)]
    taken = [(x - RADIUS - 1, y - RADIUS - 1, x + RADIUS + 1, y + RADIUS + 1) for x, y in points]
    taken += [(x - 1, y - 1, x + 1, y + 1) for x, y in line]
    places = []
    for (x, y), name in zip(points, names, strict=True):
        width = LETTER_WIDTH * len(name)
        candidates = [_make_place(x, y, down, is_left) for down, is_left in product(steps, (False, True))]
        lefts = [place.x - width if place.is_left else place.x for place in candidates]
        boxes = [
            (left, p.y - LINE_HEIGHT + 3, left + width, p.y + 3) for left, p in zip(lefts, candidates, strict=True)
        ]
        n = next(
            (n for n, box in enumerate(boxes) if _is_inside(box) and not any(_do_overlap(box, b) for b in taken)), 0
        )
        taken.append(boxes[n])
        places.append(candidates[n])
    return places


def _make_place(x: float, y: float, down: int, is_left: bool) -> Place:
    """Return the place beside a point that is ``down`` steps below it, or above it if negative."""
    aside = (RADIUS + 3 if abs(down) < 2 else 2) * (-1 if is_left else 1)
    return Place(x + aside, y + 4 + down * PLACE_STEP, is_left)


Box = tuple[float, float, float, float]  # left, top, right, bottom


def _is_inside(box: Box) -> bool:
    return box[0] >= LEFT and box[2] <= WIDTH - RIGHT and box[1] >= 0 and box[3] <= HEIGHT - BOTTOM


def _do_overlap(box: Box, other: Box) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


def _list_ends(dot: Dot, log: bool) -> tuple[float, float]:
    """Return the ends of the error bar; on a logarithmic scale, it does not reach below half of the value."""
    low = dot.value - dot.error
    return (max(low, dot.value / 2) if log else low), dot.value + dot.error


def _widen_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    by = (high - low) * RANGE_MARGIN or abs(low) * RANGE_MARGIN or 1.0
    return low - by, high + by


def _list_steps(low: float, high: float) -> Iterator[float]:
    """Yield about ``GRID_LINES`` round numbers in a range."""
    min_step = (high - low) / GRID_LINES
    decade = 10.0 ** floor(log10(min_step))
    step = next(step * decade for step in STEPS if step * decade >= min_step)
    yield from (n * step for n in range(ceil(low / step), floor(high / step) + 1))


def _list_decades(low: float, high: float) -> Iterator[float]:
    """Yield round numbers from 10^low to 10^high: powers of ten if there are several, otherwise also 2 and 5."""
    firsts = (1,) if high - low > 2 else (1, 2, 5) if high - low > 0.5 else range(1, 10)
    levels = (first * 10.0**decade for decade in range(floor(low), ceil(high) + 1) for first in firsts)
    yield from (level for level in levels if low <= log10(level) <= high)


def _list_sizes(low: float, high: float) -> Iterator[float]:
    """Yield round sizes in a range, in the unit that the largest one is shown in."""
    unit = 1024.0 ** floor(log10(max(high, 1)) / log10(1024))
    yield from (n * unit for n in _list_steps(max(low, 0) / unit, high / unit))
