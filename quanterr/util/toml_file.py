"""Reading of TOML files that users write."""

from pathlib import Path

from quanterr.errors import UsageError
from quanterr.util.small_file import read_small
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display

MAX_TOML_BYTES = 2**20


def read_toml(path: Path, where: str) -> tuple[str, JsonObject]:
    """Return the text of a TOML file and its parsed content; errors call the file ``where``.

    Raises:
        FileNotFoundError: the file does not exist.
        UsageError: the file is unreadable, not a regular file of at most 1 MiB, or not TOML.
    """
    import tomllib  # imported here, as most runs read no such file

    try:
        text = read_small(path, MAX_TOML_BYTES).decode()
        return text, tomllib.loads(text)
    except FileNotFoundError:
        raise
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{where}: is not TOML: {display(str(error))}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{where}: {getattr(error, 'strerror', None) or error}") from error
