"""Commands whose options are made from the fields of dataclasses."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from functools import wraps
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo, OptionInfo

from quanterr.cli import completion
from quanterr.options import PANELS, Option, list_flags, list_options, read_annotations


class _PlainSwitches:
    """Clears the metavar of switches, for which typer's help would print <bool>."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc] # of TyperCommand or TyperGroup
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


BRIEF_HELP_KEY = "quanterr.brief"  # key of a context's meta: its help leaves out rare options


class Command(_PlainSwitches, TyperCommand):
    """A command whose help shows switches without a metavar, and rare options only with ``--help-all``."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, without rare options unless the context asks for all."""
        ctx.meta.setdefault(BRIEF_HELP_KEY, True)
        super().format_help(ctx, formatter)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters; in a brief help those that are not rare."""
        params = super().get_params(ctx)
        rare = getattr(self.callback, "rare", ()) if ctx.meta.get(BRIEF_HELP_KEY) else ()
        return [param for param in params if param.name not in rare]


def _show_all(context: typer.Context, wanted: bool) -> None:
    """Print the help with all options, and exit."""
    if wanted and not context.resilient_parsing:  # which completion does
        context.meta[BRIEF_HELP_KEY] = False
        typer.echo(context.get_help())
        raise typer.Exit


HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(
            "--help-all", is_eager=True, expose_value=False, callback=_show_all, help="Show all options and exit."
        ),
    ],
)


class ProgramGroup(_PlainSwitches, TyperGroup):
    """The whole program, whose help shows switches without a metavar."""


class AllBut(NamedTuple):
    """Annotation of a command's parameter: the fields of its dataclass that are not options of this command."""

    names: tuple[str, ...]


class Only(NamedTuple):
    """Annotation of a command's parameter: the only fields of its dataclass that are options of this command."""

    names: tuple[str, ...]


class Reworded(NamedTuple):
    """Annotation of a command's parameter: another help text for a field of its dataclass."""

    name: str
    help: str


def argument(metavar: str, help_text: str) -> ArgumentInfo:
    """Return a positional argument of a command, whose help shows no default."""
    info: ArgumentInfo = typer.Argument(metavar=metavar, help=help_text, show_default=False)
    return info


Original = Annotated[str, argument("ORIGINAL", "The checkpoint before quantization.")]


def wrap_help(text: str) -> str:
    """Join the lines of each paragraph, for typer to wrap; paragraphs that begin with ``\\b`` keep their lines."""
    return "\n\n".join(p if p.startswith("\b") else " ".join(p.split()) for p in text.strip().split("\n\n"))


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with its dataclass parameters replaced by one option for each of their fields.

    Its docstring is its help. ``options: Annotated[CompareOptions, AllBut(("resume",))]`` becomes an option for each
    field of CompareOptions that has an :class:`quanterr.options.Option`, except ``resume``. A parameter
    that is no dataclass becomes an option, too, if its annotation has an Option.
    """
    parameters: list[inspect.Parameter] = []
    rare: set[str] = set()
    groups: dict[str, tuple[Callable[..., object], list[str]]] = {}  # dataclass and names of its options
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        annotation = parameter.annotation
        type_, *notes = get_args(annotation) if get_origin(annotation) is Annotated else [annotation]
        option_note = next((note for note in notes if isinstance(note, Option)), None)
        if option_note is not None:
            rare |= {name} if option_note.rare else set()
            parameters.append(_make_parameter(name, type_, option_note, parameter.default))
            continue
        if not hasattr(type_, "__dataclass_fields__"):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints, options = read_annotations(type_), list_options(type_)
        for note in notes:
            if isinstance(note, AllBut | Only):
                is_only = isinstance(note, Only)
                options = {key: option for key, option in options.items() if (key in note.names) == is_only}
            elif isinstance(note, Reworded):
                options[note.name] = options[note.name]._replace(help=note.help)
        added = [
            _make_parameter(field.name, get_args(hints[field.name])[0], options[field.name], field.default)
            for field in fields(type_)
            if field.name in options
        ]
        rare |= {name for name, option in options.items() if option.rare}
        groups[name] = type_, [option.name for option in added]
        parameters += added

    @wraps(command)
    def wrapper(**values: object) -> None:
        values.pop(HELP_ALL.name, None)  # typer passes options that expose no value as well
        for name, (type_, names) in groups.items():
            field_values = {field: values.pop(field) for field in names}
            values[name] = type_(**{field: value for field, value in field_values.items() if value is not None})
        command(**values)

    if rare:
        parameters.append(HELP_ALL)
    wrapper.rare = rare  # type: ignore[attr-defined]
    wrapper.__doc__ = wrap_help(inspect.getdoc(command) or "")
    parameters.sort(key=_make_sort_key)
    del wrapper.__wrapped__  # typer would read the signature of the wrapped function
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _make_sort_key(parameter: inspect.Parameter) -> int:
    """Return a sort key: arguments first, then options in the order of their panels."""
    notes = getattr(parameter.annotation, "__metadata__", ())
    panel = next((note.rich_help_panel for note in notes if isinstance(note, OptionInfo)), "")
    return PANELS.index(panel) if panel in PANELS else -1


def _make_parameter(name: str, type_: object, option: Option, default: object) -> inspect.Parameter:
    """Return typer's parameter for a field or parameter that is an option."""
    repeatable = " Repeatable." if get_origin(type_) is Iterable else ""
    type_, default = _convert_type(type_), None if default in ((), MISSING) else default
    info = typer.Option(
        *list_flags(name, option),
        metavar=option.metavar,
        help=option.help + repeatable,
        rich_help_panel=option.panel,
        show_default=default is not None and not isinstance(default, bool),
        autocompletion=getattr(completion, option.words) if option.words else None,
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[type_, info])


def _convert_type(type_: object) -> object:
    """Return the type for typer: str for paths, a list for iterables."""
    if get_origin(type_) is Iterable:
        return list[str] | None
    if get_origin(type_) is UnionType or isinstance(type_, UnionType):
        members = get_args(type_)
        return str | None if str in members else members[0] | None
    return type_
