"""TOML files of the user."""

import tomllib
from pathlib import Path

from quanterr.errors import UsageError
from quanterr.util.small_file import read_small
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display

MAX_TOML = 2**20


def read_toml(path: Path, where: str) -> tuple[str, JsonObject]:
    """The text of a file, which messages call ``where``, and what it says.

    Raises:
        FileNotFoundError: it is not there.
        UsageError: it cannot be read, is not a regular file of at most 1 MiB, or is not TOML.
    """
    try:
        text = read_small(path, MAX_TOML).decode()
        return text, tomllib.loads(text)
    except FileNotFoundError:
        raise
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{where}: is not TOML: {display(str(error))}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{where}: {getattr(error, 'strerror', None) or error}") from error
