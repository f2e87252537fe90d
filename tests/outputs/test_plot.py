"""What plot() draws: the numbers of the document, and names as they are."""

import sys

import pytest
from msgspec.structs import replace
from support.sample_documents import encoder, evaluation, images, inspection, plan, ranking
from support.sample_reports import hostile, report_of, small, tiny

from quanterr.errors import UsageError
from quanterr.outputs.figures import MIB

pytest.importorskip("matplotlib", reason='pip install "quanterr[plot]"')
PNG = b"\x89PNG\r\n"


def heights(axes):
    return sorted(
        float(line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())
    )


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_a_report_has_a_map_of_its_blocks_and_a_histogram_of_all_layers():
    report = report_of(small())
    figure = report.plot()
    where, how_many, *_ = figure.axes
    shown = where.images[0].get_array()
    levels = [layer.snr_db for layer in report.layers if layer.snr_db is not None]

    assert len(levels) == sum(patch.get_height() for patch in how_many.patches)
    assert min(levels) == pytest.approx(min(float(shown.min()), min(levels)))
    assert set(shown.compressed().tolist()) <= set(levels)
    assert figure._repr_png_().startswith(PNG)


def test_a_ranking_has_a_dot_for_each_candidate_where_it_is():
    found = ranking()
    (axes,) = found.plot().axes
    ranked = [one for one in found.candidates if one.snr_db is not None]

    assert sorted(one.snr_db for one in ranked) == heights(axes)
    assert [one.name for one in ranked] == texts(axes)


def test_an_evaluation_has_its_divergence_against_size():
    found = evaluation()
    (axes,) = found.plot().axes
    ranked = [one for one in found.candidates if one.scores is not None]

    assert sorted(one.scores.kld_mean for one in ranked) == heights(axes)
    assert "KLD [nat]" == axes.get_ylabel()
    assert "log" == axes.get_yscale()


def test_an_encoder_has_what_its_vectors_lose():
    (axes,) = encoder().plot().axes

    assert "1 - cosine of the embeddings" == axes.get_ylabel()
    assert heights(axes)


def test_a_plan_has_the_curve_itself_and_one_recipe_for_all():
    found = plan()
    (axes,) = found.plot().axes
    curve, own, *_ = axes.lines

    assert [(point.bytes / MIB, point.cost) for point in sorted(found.curve, key=lambda p: p.bytes)] == list(
        zip(curve.get_xdata().tolist(), curve.get_ydata().tolist(), strict=True)
    )
    assert (found.bytes / MIB, found.cost) == (own.get_xdata()[0], own.get_ydata()[0])
    assert [one.recipe for one in found.uniform] == texts(axes)


def test_names_of_any_kind_are_drawn_as_text():
    assert hostile().plot()._repr_png_().startswith(PNG)


def test_what_has_nothing_to_draw_says_so():
    report = report_of(tiny())
    with pytest.raises(UsageError, match="no layer differs"):
        replace(report, layers=[]).plot()


@pytest.mark.parametrize("document", [images, inspection])
def test_a_kind_without_a_figure_is_an_error_in_words(document):
    with pytest.raises(UsageError, match=r"nothing to draw: this kind of result, i\w+, has no figure$"):
        document().plot()


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"quanterr\[plot\]"):
        ranking().plot()
