"""Reports, rankings and diffs as a notebook shows them."""

import re
import sys
from types import SimpleNamespace

import pytest
from support import sample_documents
from support.sample_reports import hostile, report_of, tiny
from support.stored import original, pair, to_fp8, write

import quanterr
from quanterr.errors import UsageError


@pytest.fixture(scope="module")
def report():
    return report_of(tiny())


@pytest.fixture(scope="module")
def ranking(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranking")
    x, y = pair(folder)
    return quanterr.rank(x, [y, write(folder / "again.safetensors", to_fp8(original()))], device="cpu")


def test_report_is_shown_in_one_line(report):
    assert "<quanterr.Report inconclusive: 1 not compared>" == repr(report) == str(report)
    assert "\n" not in repr(report)
    assert len(repr(report)) < 200


def test_ranking_is_shown_in_one_line(ranking):
    assert repr(ranking).startswith("<quanterr.Ranking compared: ")
    assert "\n" not in repr(ranking)
    assert len(repr(ranking)) < 200


def test_report_is_a_table_with_its_worst_layers(report):
    shown = report._repr_html_()
    worst = min(report.layers, key=lambda layer: layer.snr_db)

    assert shown.startswith(f"<p><b>{report.verdict}</b>: ")
    *groups, layers = shown.split("<table>")[1:]
    assert ["By format", "By role"] == re.findall("<caption>(.*?)</caption>", "".join(groups))
    assert f"<td>{worst.layer_name}</td>" == re.search("<tbody>.*?(<td>.*?</td>)", layers, re.DOTALL)[1]
    assert len(report.layers) + 1 == layers.count("<tr>")


def test_no_name_is_markup():
    shown = hostile()._repr_html_()

    assert "<script" not in shown.lower()
    assert "<img" not in shown.lower()


def test_ranking_is_a_table_with_its_candidates(ranking):
    candidates = ranking._repr_html_().split("<table>")[1]

    assert candidates.lstrip().startswith("<caption>Candidates")
    assert len(ranking.candidates) + 1 == candidates.count("<tr>")


def test_missing_pandas_is_named(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match=r"to_pandas\(\) needs pandas: pip install pandas"):
        report.to_pandas()


def test_data_frame_has_a_row_per_tensor(report, ranking, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    rows = report.to_pandas()
    tensors = report.not_compared + report.layers + report.other_changes + report.lossless

    assert [entry.layer_name for entry in tensors] == [row["layer_name"] for row in rows]
    assert report.layers[0].snr_db == rows[len(report.not_compared)]["snr_db"]
    assert [c.name for c in ranking.candidates] == [row["name"] for row in ranking.to_pandas()]
    assert {c.name for c in ranking.candidates} == {
        row["candidate"] for row in quanterr.diff(ranking, ranking).to_pandas()
    }


@pytest.mark.parametrize(
    ("suffix", "begins"), [("html", "<!doctype html>"), ("csv", "quanterr_verdict,"), ("json", "{")]
)
def test_report_is_saved_by_its_suffix(report, tmp_path, suffix, begins):
    report.save(tmp_path / f"report.{suffix}")

    assert (tmp_path / f"report.{suffix}").read_text().lower().startswith(begins)


def test_unknown_suffix_is_an_error(report, tmp_path):
    with pytest.raises(UsageError, match=r"report\.xyz"):
        report.save(tmp_path / "report.xyz")


def test_dir_lists_exactly_the_public_names():
    assert quanterr.__all__ == sorted(quanterr.__all__, key=lambda n: (not n.isupper(), n[0].islower(), n))
    assert set(quanterr.__all__) == {name for name in dir(quanterr) if not name.startswith("_")}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("both")
    report = quanterr.compare(*pair(folder), device="cpu")
    report.save(folder / "report.json")
    return report, folder / "report.json"


def test_diff_is_one_line_and_takes_reports_and_paths(both):
    diff = quanterr.diff(*both)

    assert repr(diff).startswith("<quanterr.Diff 0 layers worse, 0 better, ")
    assert "\n" not in repr(diff)
    assert diff.unchanged == len(diff.layers) == quanterr.diff(both[1], both[0]).unchanged


def test_diff_is_a_table_with_its_changes(both):
    report, path = both
    worse = quanterr.read_report(path)
    worse.layers[0].snr_db -= 3
    diff = quanterr.diff(report, worse)

    assert "<caption>1 layer worse</caption>" in diff._repr_html_()
    assert f"<td>{report.layers[0].layer_name}</td>" in diff._repr_html_()


@pytest.mark.parametrize("suffix", [".json", ".html"])
def test_diff_and_a_ranking_are_saved(both, ranking, tmp_path, suffix):
    for name, document in (("diff", quanterr.diff(*both)), ("ranking", ranking)):
        document.save(tmp_path / f"{name}{suffix}")
        assert f"quanterr.{name}" in (tmp_path / f"{name}{suffix}").read_text()[:200]


def test_unknown_suffix_is_refused(both, ranking, tmp_path):
    for document in (quanterr.diff(*both), ranking):
        with pytest.raises(UsageError, match=r"unknown suffix; choose one of \.json, "):
            document.save(tmp_path / "x.txt")


def test_any_list_of_a_result_is_a_data_frame(ranking, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    evaluation = sample_documents.evaluation()
    first = evaluation.to_pandas("candidates")[0]

    assert evaluation.candidates[0].scores.kld_mean == first["scores.kld_mean"]
    assert [layer.layer_name for layer in ranking.layers] == [row["layer_name"] for row in ranking.to_pandas("layers")]
    assert [{"item": name} for name in ranking.front] == ranking.to_pandas("front")
    with pytest.raises(UsageError, match="items: weights is no list of a ranking; choose reasons, reasons_by, candid"):
        ranking.to_pandas("weights")
