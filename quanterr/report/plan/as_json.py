"""The plan as JSON: see model.py."""

from typing import IO

from quanterr.report.plan.model import Plan


def write(plan: Plan, file: IO[str]) -> None:
    """Write it."""
    file.write(plan.to_json())
