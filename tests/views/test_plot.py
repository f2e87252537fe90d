"""Figures by plot(): the document's numbers, and names as text."""

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


@pytest.mark.session
def test_report_plot_has_a_block_map_and_a_histogram_over_all_layers():
    report = report_of(small())
    figure = report.plot()
    where, how_many, *_ = figure.axes
    shown = where.images[0].get_array()
    levels = [layer.snr_db for layer in report.layers if layer.snr_db is not None]

    assert len(levels) == sum(patch.get_height() for patch in how_many.patches)
    assert min(levels) == pytest.approx(min(float(shown.min()), min(levels)))
    assert set(shown.compressed().tolist()) <= set(levels)
    assert figure._repr_png_().startswith(PNG)


def test_ranking_plot_has_a_dot_for_each_candidate():
    document = ranking()
    (axes,) = document.plot().axes
    ranked = [candidate for candidate in document.candidates if candidate.snr_db is not None]

    assert sorted(candidate.snr_db for candidate in ranked) == heights(axes)
    assert [candidate.name for candidate in ranked] == texts(axes)


def test_evaluation_plot_shows_divergence_against_size():
    document = evaluation()
    (axes,) = document.plot().axes
    ranked = [candidate for candidate in document.candidates if candidate.scores is not None]

    assert sorted(candidate.scores.kld_mean for candidate in ranked) == heights(axes)
    assert "KLD [nat]" == axes.get_ylabel()
    assert "log" == axes.get_yscale()


def test_encoder_plot_shows_the_embedding_loss():
    (axes,) = encoder().plot().axes

    assert "1 - cosine of the embeddings" == axes.get_ylabel()
    assert heights(axes)


def test_plan_plot_has_its_curve_and_uniform_plans():
    new_plan = plan()
    (axes,) = new_plan.plot().axes
    curve, line, *_ = axes.lines

    assert [(point.bytes / MIB, point.cost) for point in sorted(new_plan.curve, key=lambda p: p.bytes)] == list(
        zip(curve.get_xdata().tolist(), curve.get_ydata().tolist(), strict=True)
    )
    assert (new_plan.bytes / MIB, new_plan.cost) == (line.get_xdata()[0], line.get_ydata()[0])
    assert [uniform_plan.recipe for uniform_plan in new_plan.uniform] == texts(axes)


def test_hostile_names_are_drawn_as_text():
    assert hostile().plot()._repr_png_().startswith(PNG)


def test_empty_plot_is_refused_with_a_reason():
    report = report_of(tiny())
    with pytest.raises(UsageError, match="no layer differs"):
        replace(report, layers=[]).plot()


@pytest.mark.parametrize("document", [images, inspection])
def test_kind_without_a_figure_is_refused_with_a_reason(document):
    with pytest.raises(UsageError, match=r"nothing to draw: this kind of result, \w+, has no figure$"):
        document().plot()


def test_error_names_the_extra_for_a_missing_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"quanterr\[plot\]"):
        ranking().plot()
