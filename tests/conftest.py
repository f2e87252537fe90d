"""Tests see no CI around them: what the command says there, and where, is set by the tests of it."""

import gc
import logging
import os
from collections import Counter

import pytest
from hypothesis import settings

for variable in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "COLUMNS"):  # COLUMNS is set by pytest-xdist
    os.environ.pop(variable, None)
if "PYTEST_XDIST_WORKER" in os.environ:  # as many workers as cores: more threads would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("untimed", deadline=None)  # the time of an example depends on the machine
settings.load_profile("untimed")
os.environ["HF_HUB_OFFLINE"] = "1"  # Tests never use the network: those of stores start their own servers.


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Do not look for garbage in what is imported and collected, now or later: that takes seconds of each process."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_runtest_teardown():
    """Restore log levels, so that quiet commands do not silence the next test."""
    logging.getLogger("quanterr").setLevel(logging.NOTSET)


@pytest.fixture
def log():
    """What quanterr logs, as a list of records."""
    records, handler = [], logging.Handler()
    handler.emit = records.append
    logging.getLogger("quanterr").addHandler(handler)
    yield records
    logging.getLogger("quanterr").removeHandler(handler)


@pytest.fixture
def compiled_kernel(monkeypatch):
    """Use the compiled kernel, even if the environment asks for torch's; skip if none was built."""
    from quanterr.kernel import library

    choice = library.find_best()
    if choice.kernel is None:
        pytest.skip(f"no compiled kernel here: {choice.reason}")
    monkeypatch.delenv(library.VARIABLE, raising=False)


def pytest_terminal_summary(terminalreporter):
    """Print the reasons for skips in one line; ``-rs`` lists the tests."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
    if reasons:
        terminalreporter.write_line("skipped: " + "; ".join(f"{n} x {reason}" for reason, n in reasons.most_common()))
