"""What changed as JSON: see model.py."""

from typing import IO

from quanterr.report.diff.model import Diff
from quanterr.util import strict_json


def write(diff: Diff, file: IO[str]) -> None:
    """Write it."""
    file.write(strict_json.dumps(diff.to_dict(), indent=1) + "\n")
