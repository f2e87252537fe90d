"""Tests see no CI around them: what the command says there, and where, is set by the tests of it."""

import os
from collections import Counter

for variable in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "COLUMNS"):  # COLUMNS is set by pytest-xdist
    os.environ.pop(variable, None)
os.environ["HF_HUB_OFFLINE"] = "1"  # nor the network: tests of stores bring their own servers


def pytest_terminal_summary(terminalreporter):
    """Skips in one line, by their reasons; ``-rs`` lists them."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
    if reasons:
        terminalreporter.write_line("skipped: " + "; ".join(f"{n} x {reason}" for reason, n in reasons.most_common()))
