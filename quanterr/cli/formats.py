"""``quanterr formats`` lists the formats that quanterr reads, ``quanterr schema`` prints the schemas that it writes."""

import json
import sys
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quanterr.cli import completion
from quanterr.cli.display import TABLE_OPTIONS, Display
from quanterr.cli.options import with_options
from quanterr.errors import UsageError
from quanterr.options import Option
from quanterr.util import strict_json
from quanterr.util.colors import paint, use_color
from quanterr.util.memory import require_memory_for_torch
from quanterr.util.text import display

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quanterr.formats.base import Format


@with_options
def formats(
    show: Annotated[Display, TABLE_OPTIONS],
    name: Annotated[
        str | None,
        typer.Argument(
            help="The format whose specification to print.", show_default=False, autocompletion=completion.formats
        ),
    ] = None,
    recipes: Annotated[bool, Option("List the recipes of sweep, plan and --against.")] = False,
) -> None:
    """List the supported formats, or print the specification of one."""
    require_memory_for_torch()
    if recipes:
        _list_recipes(show.as_json)
        return
    from quanterr.formats import FORMATS

    colored = use_color(sys.stdout, show.colors)
    if name is None:
        _list_formats(FORMATS, show.as_json, colored)
        return
    chosen = next((row for row in FORMATS if row.name == name), None)
    if chosen is None:
        names = [row.name for row in FORMATS]
        held = sorted((known for known in names if name in known), key=lambda known: not known.startswith(name))
        near = list(dict.fromkeys([*held, *get_close_matches(name, names)]))
        description = f"did you mean {', '.join(near)}?" if name and near else f"formats are {', '.join(names)}"
        raise UsageError(f"no format named {display(name)}; {description}")
    if show.as_json:
        print(strict_json.dumps({**_format_fields(chosen), "specification": chosen.specification.strip()}, indent=1))
        return
    title = paint(chosen.name, "strong", colored)
    print(f"{title}: {chosen.summary}\nneeds {chosen.stated_needs}\n\n{chosen.specification.strip()}")


def _list_recipes(as_json: bool) -> None:
    from quanterr.recipes import list_recipes

    summaries = list_recipes()
    if as_json:
        print(strict_json.dumps(summaries, indent=1))
        return
    for name, summary in summaries.items():
        print(f"{name:<16}{summary}")
    print("\nOther numbers in names work, too. Options: :scales=absmax|mse|p99.9|ema, :asym, :double.")


def _list_formats(formats: "Sequence[Format]", as_json: bool, colored: bool) -> None:
    if as_json:
        print(strict_json.dumps([_format_fields(row) for row in formats], indent=1))
        return
    width = max(len(row.name) for row in formats)
    for row in formats:
        needs = paint(row.stated_needs, "faint", colored)
        print(f"{paint(f'{row.name:{width}}', 'strong', colored)}  {row.summary}\n{'':{width}}    {needs}")


def _format_fields(row: "Format") -> dict[str, str]:
    return {"name": row.name, "summary": row.summary, "needs": row.stated_needs}


def schema(
    kind: Annotated[
        Literal["report", "ranking", "evaluation", "plan", "inspection", "images", "origin"],
        typer.Argument(help="The kind of document."),
    ] = "report",
) -> None:
    """Print the JSON Schema of a kind of document."""
    from quanterr.documents.kinds import KINDS
    from quanterr.documents.statement import make_schema

    if kind == "origin":
        print(json.dumps(make_schema(), indent=2))
        return
    print(json.dumps(KINDS[f"quanterr.{kind}"].model.json_schema(), indent=2))
