"""Defaults of the options: from the environment, else from quanterr.toml or pyproject.toml.

The file is the quanterr.toml of the current folder or of the nearest folder above it, or the
``[tool.quanterr]`` of the nearest pyproject.toml, whichever is nearer. A table for each command holds options
by their long names (``[compare] device = "cpu"``); the environment calls the same QUANTERR_COMPARE_DEVICE.
What is misspelt or of a wrong type is an error: a gate that is not asked for would hold.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, cast

import typer
from typer.core import TyperGroup, TyperOption

from quanterr.errors import UsageError
from quanterr.util.strict_json import JsonFields, JsonObject
from quanterr.util.text import display, listed
from quanterr.util.toml_file import read_toml

FILE, PROJECT = "quanterr.toml", "pyproject.toml"
PREFIX = "QUANTERR"
WEIGHTS = (".safetensors", ".sft", ".gguf")
FILES = ("FILE", "FOLDER")  # what such options take, relative to the file that names them
INPUTS = ("original", "quantized")  # what is compared is said on the command line


class _Settings(NamedTuple):
    path: Path
    tables: JsonObject  # by command


def defaults(context: typer.Context) -> dict[str, JsonObject]:
    """Defaults for the command that is called, as typer's ``default_map``. Says on stderr where they come from.

    Raises:
        UsageError: a file that cannot be read or is not TOML; a command, an option or a value that does not exist.
    """
    commands = cast(TyperGroup, context.command).commands
    command = str(context.invoked_subcommand)
    options_of = {
        name: {
            _long(option): option
            for option in known.params
            if isinstance(option, TyperOption) and _long(option) not in INPUTS
        }
        for name, known in commands.items()
    }
    options = options_of[command]
    values: JsonObject = {}
    sources: list[str] = []
    settings = _found()
    if settings is not None:
        _check_names(settings.tables, commands, settings.path, "command")
        table = settings.tables.get(command, {})
        _check_names(table, options, settings.path, "option")
        for key, value in table.items():
            place = f"{display(str(settings.path))}: {key}"
            values[str(options[key].name)] = _beside(settings.path, options[key], _value(options[key], value, place))
        if table:
            sources.append(str(settings.path))
    for variable, option, value in _of_environment(command, options_of):
        values[option] = value
        sources.append(variable)
    if sources:
        print(f"quanterr: settings from {listed(sources, len(sources))}", file=sys.stderr)
    return {command: values}


def _long(option: TyperOption) -> str:
    return next(name for name in option.opts if name.startswith("--"))[2:]


def _found() -> _Settings | None:
    """The nearest settings, unless they are stored with weights: whoever made those made them too."""
    try:
        here = Path.cwd()
    except OSError:  # a folder that is gone
        return None
    for folder in (here, *here.parents):
        for path in (folder / FILE, folder / PROJECT):
            if not os.path.isfile(path):  # also where we may not look
                if path.name == FILE and os.path.lexists(path) and not _holds_weights(folder):
                    raise UsageError(f"{display(str(path))}: is not a file, so it holds no settings; rename it")
                continue
            tables = _tables(path)
            if tables is None:
                continue
            if not _holds_weights(folder):
                return _Settings(path, tables)
            print(
                f"quanterr: warning: {display(str(path))} is not read: it is stored with weights, and may have "
                "come with "
                "them; put it into the folder above",
                file=sys.stderr,
            )
    return None


def _tables(path: Path) -> JsonObject | None:
    """What a file says of quanterr, by command; None of a pyproject.toml that says nothing."""
    where, table = display(str(path)), "[compare]"
    tables: Any = read_toml(path, where)[1]
    if path.name == PROJECT:
        tool = tables.get("tool")
        if not isinstance(tool, dict) or "quanterr" not in tool:
            return None
        tables, table = tool["quanterr"], "[tool.quanterr.compare]"
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise UsageError(f'{where}: options belong in the table of their command: {table}, then device = "cpu"')
    return tables


def _holds_weights(folder: Path) -> bool:
    try:
        return any(name.endswith(WEIGHTS) for name in os.listdir(folder))
    except OSError:
        return True


def _check_names(given: JsonFields, known: JsonFields, path: Path, kind: str) -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"{display(str(path))}: {_unknown(name, known, kind)}")


def _unknown(name: str, known: JsonFields, kind: str) -> str:
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {listed(sorted(known), 40)}"
    return f"no {kind} named {display(name)}; {hint}"


def _value(option: TyperOption, value: object, where: str) -> object:
    """The value as typer wants it."""
    if option.multiple:
        values = value if isinstance(value, list) else [value]
        right, wanted = all(isinstance(item, str) for item in values), "a string or a list of strings"
        value = values
    elif option.is_flag:
        right, wanted = isinstance(value, bool), "true or false"
    else:
        right, wanted = isinstance(value, str | int | float) and not isinstance(value, bool), "a string or a number"
    if not right:
        raise UsageError(f"{where}: must be {wanted}")
    return value


def _beside(path: Path, option: TyperOption, value: Any) -> object:
    """Names of files as seen from the file that holds them; not ``-``, an address, nor the name of a preset."""
    if option.metavar not in FILES or path.parent == Path.cwd():
        return value
    if isinstance(value, list):
        return [_beside(path, option, item) for item in value]
    is_preset = option.name == "thresholds" and not Path(value).suffix
    return value if value == "-" or "://" in value or is_preset else str(path.parent / value)


def _of_environment(
    command: str, options_of: Mapping[str, Mapping[str, TyperOption]]
) -> Iterator[tuple[str, str, object]]:
    """Variable, option and value of each QUANTERR_COMPARE_…; of what may be given several times a line each.

    Those of other commands have to be right as well: of a misspelt command nobody would ever hear.
    """
    from quanterr.native import VARIABLE as KERNEL  # ctypes, which --help does not need

    known = {
        f"{PREFIX}_{name}_{key}".upper().replace("-", "_"): (name, option)
        for name, options in options_of.items()
        for key, option in options.items()
    }
    for variable in sorted(name for name in os.environ if name.startswith(f"{PREFIX}_")):
        if variable == KERNEL:
            continue
        if variable not in known:
            raise UsageError(f"in the environment {_unknown(variable, {**known, KERNEL: None}, 'setting')}")
        name, option = known[variable]
        value = os.environ[variable]
        if not value.strip():  # as of a variable of CI that is not set: a gate would be off
            raise UsageError(f"in the environment {variable} is empty; give it a value, or unset it")
        if name == command:
            yield variable, str(option.name), value.splitlines() if option.multiple else value
