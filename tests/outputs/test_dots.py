"""Plots of candidates: places of points and names, and the SVG file."""

import io
from math import log10
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace
from support.sample_documents import evaluation, inspection, ranking

from quanterr.errors import UsageError
from quanterr.outputs import PICTURE_OUTPUTS
from quanterr.outputs.dots import BOTTOM, HEIGHT, LEFT, LETTER_WIDTH, LINE_HEIGHT, RIGHT, TOP, WIDTH, draw_dots
from quanterr.outputs.sections import Dot, Dots

MIB = 1 << 20
SVG = "{http://www.w3.org/2000/svg}"


def twelve(log=True):
    """Return a dozen candidates that lie close together, as quantized files of one model do."""
    values = [0.0006 * 2**n for n in range(12)]
    return Dots(
        "KLD [nat]", [Dot(f"Qwen3-Q{n}_K", (8000 - 400 * n) * MIB, v, v / 20, True) for n, v in enumerate(values)], log
    )


def svg_of(document):
    file = io.StringIO()
    PICTURE_OUTPUTS[0].write(document, file)
    return ElementTree.fromstring(file.getvalue())


def texts(svg):
    return [element.text for element in svg.iter(f"{SVG}text")]


@pytest.mark.parametrize("log", [True, False])
def test_points_lie_at_their_numbers(log):
    drawing, dots = draw_dots(twelve(log)), twelve(log).shown
    scale = log10 if log else float
    (first, *_, last), (a, *_, b) = drawing.points, dots
    middle = drawing.points[5]

    assert all(LEFT <= p.x <= WIDTH - RIGHT and TOP <= p.y <= HEIGHT - BOTTOM for p in drawing.points)
    share = (scale(dots[5].value) - scale(a.value)) / (scale(b.value) - scale(a.value))
    assert (middle.y - first.y) / (last.y - first.y) == pytest.approx(share)
    assert (middle.x - first.x) / (last.x - first.x) == pytest.approx(5 / 11)


def test_names_cover_neither_each_other_nor_points():
    boxes = []
    for p in draw_dots(twelve()).points:
        width = LETTER_WIDTH * len(p.name)
        left = p.place.x - width if p.place.is_left else p.place.x
        boxes += [
            (left, p.place.y - LINE_HEIGHT + 3, left + width, p.place.y + 3),
            (p.x - 5, p.y - 5, p.x + 5, p.y + 5),
        ]

    assert all(LEFT <= left and right <= WIDTH for left, _, right, _ in boxes[::2])
    for n, (left, top, right, bottom) in enumerate(boxes):
        assert not [b for b in boxes[n + 1 :] if left < b[2] and b[0] < right and top < b[3] and b[1] < bottom]


def test_names_are_shown_without_what_all_begin_with():
    drawing = draw_dots(twelve())

    assert ("Qwen3-", [f"Q{n}_K" for n in range(12)]) == (drawing.prefix, [p.name for p in drawing.points])


def test_line_joins_the_best_candidates_only():
    dots = [Dot("a", MIB, 3.0, is_best=True), Dot("b", 2 * MIB, 4.0), Dot("c", 3 * MIB, 1.0, is_best=True)]
    drawing = draw_dots(Dots("x", dots))
    a, _, c = drawing.points

    assert f"M{a.x:.1f} {a.y:.1f}L{c.x:.1f} {c.y:.1f}" == drawing.line


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0], [0.5, 0.5000001], [1e-9, 3.0]])
@pytest.mark.parametrize("log", [True, False])
def test_axes_have_round_numbers_in_their_range(values, log):
    drawing = draw_dots(Dots("x", [Dot("a", n * MIB, value) for n, value in enumerate(values, 1)], log))

    assert len(drawing.levels) <= 12
    assert all(TOP <= y <= HEIGHT - BOTTOM for _, y in drawing.levels)
    assert all(LEFT <= x <= WIDTH for _, x in drawing.across)


def test_svg_shows_each_candidate_by_name():
    """Without an evaluation, a ranking has its SNR."""
    labels = texts(svg_of(ranking()))

    assert "SNR [dB] over size" == labels[0]
    assert {"fp8", "int8"} <= set(labels)
    assert {"fp8", "int4"} <= set(texts(svg_of(evaluation())))


def test_svg_escapes_hostile_names():
    candidates = evaluation().candidates
    candidates[0].name = "<script>alert(1)</script>&\x1b]"

    assert r"<script>alert(1)</script>&\x1b]" in texts(svg_of(replace(evaluation(), candidates=candidates)))


def test_svg_follows_the_theme_of_its_reader():
    file = io.StringIO()
    PICTURE_OUTPUTS[0].write(ranking(), file)

    assert "@media (prefers-color-scheme: dark)" in file.getvalue()
    assert '<rect class="ground"' in file.getvalue()


def test_document_without_candidates_has_no_svg():
    with pytest.raises(UsageError, match="plots the candidates of a ranking or an evaluation"):
        svg_of(inspection())
