"""Progress in notebooks is shown by a bar, unless the caller has a callback; elsewhere, there is none."""

import sys
from types import SimpleNamespace

import pytest
import tqdm.auto
from support.stored import pair

import quanterr
from quanterr.util.notebook import NotebookBar


class Bar:
    def __init__(self, total, **_):
        self.total, self.n, self.closed = total, 0, False
        self.made.append(self)

    def update(self, by):
        self.n += by

    def close(self):
        self.closed = True


@pytest.fixture
def bars(monkeypatch):
    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    monkeypatch.setattr(Bar, "made", [], raising=False)
    return Bar.made


def run_in(monkeypatch, kernel):
    shell = SimpleNamespace(kernel=kernel) if kernel else SimpleNamespace()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


def test_notebook_shows_a_bar_over_all_bytes(bars, monkeypatch, tmp_path):
    run_in(monkeypatch, kernel="a kernel")
    report = quanterr.compare(*pair(tmp_path))

    (bar,) = bars
    assert (True, report.run.read_bytes) == (bar.closed, bar.total)
    assert bar.n == bar.total


def test_callback_and_a_terminal_replace_the_bar(bars, monkeypatch, tmp_path):
    sides, seen = pair(tmp_path), []
    run_in(monkeypatch, kernel="a kernel")
    quanterr.compare(*sides, on_progress=seen.append)
    run_in(monkeypatch, kernel=None)
    quanterr.compare(*sides)

    assert seen
    assert [] == bars


def test_evaluation_counts_micro_batches(bars):
    show = NotebookBar()
    show(2, 10, 3, 4)

    assert (11, 40) == (bars[0].n, bars[0].total)
