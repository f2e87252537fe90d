"""Charts on pages: ticks and names."""

from math import log10

import pytest

from quanterr.outputs.page.chart import HEIGHT, WIDTH, Drawing, draw_chart
from quanterr.outputs.sections import Chart, Curve, Name


def draw(low: float, high: float, name: str = "fp8") -> Drawing:
    return draw_chart(Chart("KLD", "position", [Curve(Name(name), [(1.0, low), (2.0, high)])]))


@pytest.mark.parametrize(("low", "high"), [(0.011, 0.045), (0.0101, 0.0102), (1e-9, 1.0), (0.5, 0.5), (3.0, 9.0)])
def test_axis_has_at_least_two_ticks_in_its_range(low, high):
    places = [float(y) for _, y, _ in draw(low, high).levels]

    assert 2 <= len(places) <= 12
    assert len(set(places)) == len(places)
    assert all(0 <= y <= HEIGHT for y in places)


def test_ticks_are_at_their_numbers():
    place = {float(text): float(y) for text, y, _ in draw(0.01, 0.1).levels}
    span = place[0.01] - place[0.1]

    assert {0.01, 0.02, 0.05, 0.1} == place.keys()
    assert place[0.01] - place[0.02] == pytest.approx(span * log10(2), abs=0.11)  # places have one decimal


@pytest.mark.parametrize("name", ["fp8", "a-name-of-20-letters", "a" * 200])
def test_name_fits_next_to_its_curve(name):
    """A wide letter takes 13.5 units at the size for narrow screens."""
    (line,) = draw(0.01, 0.1, name).curves

    assert float(line.x) + 13.5 * len(line.name) <= WIDTH
