"""TOML files of the user."""

import tomllib
from pathlib import Path
from typing import Any

from quanterr.errors import UsageError
from quanterr.util.text import display


def read_toml(path: Path, where: str) -> tuple[str, dict[str, Any]]:
    """The text of a file, which messages call ``where``, and what it says.

    Raises:
        FileNotFoundError: it is not there.
        UsageError: it cannot be read, or is not TOML.
    """
    try:
        text = path.read_bytes().decode()
        return text, tomllib.loads(text)
    except FileNotFoundError:
        raise
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{where}: is not TOML: {display(str(error))}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{where}: {getattr(error, 'strerror', None) or error}") from error
