"""Default values of options from the environment, quanterr.toml or pyproject.toml, in this order.

The file is the quanterr.toml of the current folder or of the nearest folder above it, or the
``[tool.quanterr]`` of the nearest pyproject.toml, whichever is nearer. A table for each command holds options
by their long names (``[compare] device = "cpu"``); the environment variable is QUANTERR_COMPARE_DEVICE.
A misspelt name or a wrong type is an error: an ignored gate would look like a gate that holds.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import typer
from typer.core import TyperGroup, TyperOption

from quanterr.errors import UsageError
from quanterr.options import MADE_UP_CALLS
from quanterr.util.strict_json import JsonFields, JsonObject, as_object
from quanterr.util.text import display, itemize
from quanterr.util.toml_file import read_toml

FILE, PROJECT = "quanterr.toml", "pyproject.toml"
PREFIX = "QUANTERR"
WEIGHT_SUFFIXES = (".safetensors", ".sft", ".gguf", ".onnx", ".bin", ".pt", ".pth", ".ckpt")
FILE_METAVARS = ("FILE", "FOLDER")  # metavars of options whose paths are relative to the settings file
NAME_PREFIX = "[NAME=]"  # the metavar of an option for files that may have a name begins with it
INPUT_OPTIONS = ("original", "quantized")  # options that must be on the command line


def read_defaults(context: typer.Context) -> dict[str, JsonObject]:
    """Return defaults for the invoked command as typer's ``default_map``, and print their sources on stderr.

    Raises:
        UsageError: a file is unreadable or not TOML, or a command, option or value is unknown.
    """
    commands = cast(TyperGroup, context.command).commands
    command = str(context.invoked_subcommand)
    values: JsonObject = {}
    sources: list[str] = []
    if (settings := _find_settings()) is not None:
        path, tables = settings
        _check_names(tables, commands, path, "command")
        table, options = tables.get(command, {}), _list_options(commands[command])
        _check_names(table, options, path, "option")
        for key, value in table.items():
            checked = _check_value(options[key], value, f"{display(str(path))}: {key}")
            values[str(options[key].name)] = _resolve_paths(path, options[key], checked)
        if table:
            sources.append(str(path))
    for variable, option, value in _read_environment(command, commands):
        values[option] = value
        sources.append(variable)
    if sources:
        print(f"quanterr: settings from {itemize(sources, len(sources))}", file=sys.stderr)
    return {command: values}


def _list_options(command: Any) -> dict[str, TyperOption]:
    """Return the options of a command that settings may have, by their long names."""
    options = (param for param in command.params if isinstance(param, TyperOption) and param.expose_value)
    by_name = {name[2:]: option for option in options for name in option.opts if name.startswith("--")}
    return {name: option for name, option in by_name.items() if name not in INPUT_OPTIONS}


def _find_settings() -> tuple[Path, JsonObject] | None:
    """Return the nearest settings file and its options by command.

    Files stored next to weights are left out: they may come from the weights' author.
    """
    try:
        here = Path.cwd()
    except OSError:  # the current folder was deleted
        return None
    for folder in (here, *here.parents):
        for path in (folder / FILE, folder / PROJECT):
            if not os.path.isfile(path):  # also False if the folder may not be read
                if path.name == FILE and os.path.lexists(path) and not _holds_weights(folder):
                    raise UsageError(f"{display(str(path))}: not a regular file; rename it")
                continue
            tables = _read_tables(path)
            if tables is None:
                continue
            if not _holds_weights(folder):
                return path, tables
            print(
                f"quanterr: warning: {display(str(path))} is ignored: it is stored next to weights, and may have "
                "come with them; move it to the parent folder",
                file=sys.stderr,
            )
    return None


def _read_tables(path: Path) -> JsonObject | None:
    """Return the options of a settings file by command; None if a pyproject.toml has no ``[tool.quanterr]``."""
    where, table = display(str(path)), "[compare]"
    tables: object = read_toml(path, where)[1]
    if path.name == PROJECT:
        tool = as_object(tables).get("tool")
        if not isinstance(tool, dict) or "quanterr" not in tool:
            return None
        tables, table = tool["quanterr"], "[tool.quanterr.compare]"
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise UsageError(f'{where}: options belong in the table of their command: {table}, then device = "cpu"')
    return tables


def _holds_weights(folder: Path) -> bool:
    try:
        return any(name.endswith(WEIGHT_SUFFIXES) for name in os.listdir(folder))
    except OSError:
        return True


def _check_names(fields: JsonFields, known: JsonFields, path: Path, noun: str) -> None:
    for name in fields:
        if name not in known:
            raise UsageError(f"{display(str(path))}: {_describe_unknown(name, known, noun)}")


def _describe_unknown(name: str, known: JsonFields, noun: str) -> str:
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {itemize(sorted(known), 40)}"
    return f"no {noun} named {display(name)}; {hint}"


def _check_value(option: TyperOption, value: object, where: str) -> object:
    """Return the value, for repeatable options as a list.

    Raises:
        UsageError: the value has the wrong type.
    """
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


def _resolve_paths(path: Path, option: TyperOption, value: object) -> object:
    """Make file names relative to the settings file; leave ``-``, addresses and names as they are."""
    metavar = option.metavar or ""
    if metavar.removeprefix(NAME_PREFIX) not in FILE_METAVARS or path.parent == Path.cwd():
        return value
    if isinstance(value, list):
        return [_resolve_paths(path, option, item) for item in value]
    text = str(value)  # a name may be a number
    name, named, file = text.partition("=") if metavar.startswith(NAME_PREFIX) and "=" in text else ("", "", text)
    is_name = file.startswith(MADE_UP_CALLS) or (option.name == "thresholds" and not Path(text).suffix)
    return text if file == "-" or "://" in file or is_name else f"{name}{named}{path.parent / file}"


def _read_environment(command: str, commands: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """Yield the variable, option and value of each setting of this command; repeatable options have a value per line.

    Variables of other commands are checked, too: a misspelt command name would go unnoticed.

    Raises:
        UsageError: a variable is unknown or empty.
    """
    variables = sorted(name for name in os.environ if name.startswith(f"{PREFIX}_"))
    if not variables:
        return
    from quanterr.kernel.library import VARIABLE as KERNEL

    settings = {
        f"{PREFIX}_{name}_{key}".upper().replace("-", "_"): (name, option)
        for name, known in commands.items()
        for key, option in _list_options(known).items()
    }
    for variable in variables:
        if variable == KERNEL:
            continue
        if variable not in settings:
            raise UsageError(f"environment: {_describe_unknown(variable, {**settings, KERNEL: None}, 'setting')}")
        name, option = settings[variable]
        value = os.environ[variable]
        if not value.strip():  # such as from an undefined CI variable, which would switch a gate off
            raise UsageError(f"environment: {variable} is empty; give it a value, or unset it")
        if name == command:
            yield variable, str(option.name), value.splitlines() if option.multiple else value
