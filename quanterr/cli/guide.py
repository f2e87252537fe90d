"""``quanterr guide`` and ``quanterr explain``: documentation in the terminal."""

import os
import sys
from contextlib import nullcontext
from typing import Annotated

import typer

from quanterr.cli.completion import names, topics
from quanterr.cli.display import guard_stdout


def guide(
    topic: Annotated[
        str | None, typer.Argument(help="The page. Default: list all pages.", show_default=False, autocompletion=topics)
    ] = None,
) -> None:
    """Show a page of the guide: formats, findings, metrics, gates, outputs, settings, …"""
    from quanterr import guide as pages

    if topic is None:
        _print(pages.list_pages())
    else:
        _show(pages.read_page(topic), paged=True)


def explain(
    name: Annotated[
        list[str],
        typer.Argument(
            help="A finding, metric, heading of a table, kind of layers, format, recipe, preset, verdict, function of "
            "rules or exit status.",
            autocompletion=names,
        ),
    ],
) -> None:
    """Explain a word of an output: a finding, metric, heading, verdict, format, recipe, preset or exit status."""
    from quanterr import guide as pages

    _show(pages.explain(" ".join(name)), paged=False)


def _show(text: str, paged: bool) -> None:
    """Print Markdown: drawn by rich in a terminal, unchanged in a pipe."""
    if not sys.stdout.isatty():
        _print(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    if paged:
        os.environ.setdefault("LESS", "FRX")  # R: less shows colours, not escape sequences
    console = Console()
    with guard_stdout(), console.pager(styles=True) if paged else nullcontext():
        console.print(Markdown(text))


def _print(text: str) -> None:
    with guard_stdout():
        print(text.rstrip(), flush=True)
