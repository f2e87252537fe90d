"""Tests see no CI around them: what the command says there, and where, is set by the tests of it."""

import os

for variable in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "COLUMNS"):  # COLUMNS is set by pytest-xdist
    os.environ.pop(variable, None)
os.environ["HF_HUB_OFFLINE"] = "1"  # nor the network: tests of stores bring their own servers
