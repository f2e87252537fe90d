"""Progress is a bar in a terminal and an occasional line elsewhere."""

import sys

import pytest

from quanterr.cli import progress
from quanterr.cli.progress import Bar, Heartbeat, Steps
from quanterr.comparison.scheduler import Progress

GIB = 1 << 30


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests set by hand."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_short_run_is_silent(clock, capsys):
    beat = Heartbeat()
    clock[0] = 9
    beat(Progress(4 * GIB, 3 * GIB, "a"))

    assert "" == capsys.readouterr().err


def test_lines_come_every_five_percent_and_ten_seconds_apart(clock, capsys):
    beat = Heartbeat()
    for second in range(1, 41):
        clock[0] = second
        beat(Progress(100 * GIB, second * GIB, "a"))

    assert 4 == len(capsys.readouterr().err.splitlines())


def test_line_comes_every_half_minute_even_without_progress(clock, capsys):
    beat = Heartbeat()
    for second in range(1, 91):
        clock[0] = second
        beat(Progress(100 * GIB, 0, "a"))

    assert 3 == len(capsys.readouterr().err.splitlines())


def test_line_shows_share_rate_remaining_time_and_layer(clock, capsys):
    beat = Heartbeat()
    clock[0] = 10
    beat(Progress(4 * GIB, GIB, "evil\x1b[2J\n::error::"))

    expected = "progress 25% 1.00 GiB/4.00 GiB 102.40 MiB/s eta 30 s layer=evil\\x1b[2J\\x0a::error::\n"
    assert expected == capsys.readouterr().err


def test_bar_shows_bytes_rate_and_layer(monkeypatch, capsys):
    monkeypatch.setattr(progress, "BAR_DELAY", 0)
    monkeypatch.setenv("COLUMNS", "120")
    bar = Bar()
    bar(Progress(4 * GIB, GIB, "layers.0.weight", total_weights=40, done_weights=11))
    bar(Progress(4 * GIB, 2 * GIB, "evil\x1b[2J"))
    bar.close()
    shown = capsys.readouterr().err

    assert shown.startswith("loading torch\r")
    assert "GiB" in shown
    assert "12/40 layers.0.weight" in shown
    assert "layers.0.weight" in shown
    assert "evil\x1b" not in shown
    assert sys.stderr is not None


def test_undrawn_bar_can_be_closed():
    Bar().close()


def test_narrow_bar_shows_share_count_and_both_name_ends(monkeypatch, capsys):
    monkeypatch.setattr(progress, "BAR_DELAY", 0)
    monkeypatch.setenv("COLUMNS", "50")
    bar = Bar()
    bar(Progress(4 * GIB, GIB, "model.layers.17.mlp.down_proj.weight", total_weights=40, done_weights=11))
    shown = capsys.readouterr().err

    assert "GiB" not in shown
    assert " 25% " in shown
    assert "12/40 model…weight" in shown


@pytest.mark.parametrize(("room", "shown"), [(9, "abcdefghi"), (8, "abc…fghi"), (3, "a…i")])
def test_long_name_is_cut_in_the_middle(room, shown):
    assert shown == progress.shorten("abcdefghi", room)


def test_evaluation_draws_a_bar_in_a_terminal(capsys):
    steps = Steps(terminal=True)
    steps(1, 4, 1, 2)
    steps.close()

    assert "% " in capsys.readouterr().err


def test_evaluation_shows_a_line_every_half_minute(clock, capsys):
    steps = Steps(terminal=False)
    for second in range(1, 61):
        clock[0] = second
        steps(0, 2, second, 60)

    assert "progress 25% unit 1/2 eta 90 s" == capsys.readouterr().err.splitlines()[0]
