"""HTML that works from a file, offline, and runs nothing but its own script: elements, tables, whole pages.

Names are hostile. Here :func:`tag` escapes every text, the scripts only make text nodes, and the policy in a page's
head lets a browser run no other script and fetch nothing.
"""

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from urllib.parse import quote

from quanterr.util.text import display

FOLDER = Path(__file__).parent / "html"
SIGNS = {"pass": "✓", "fail": "✕", "inconclusive": "?", "info": "›"}
LAYER_SCRIPTS = ("data", "dom", "address", "scale", "map", "table", "filters", "drawer")  # of any page with layers
LISTED_NAME = 80  # characters of a file's name in a title


class Markup(str):
    """HTML; a plain string is text."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str) -> Markup:
    """An element. Strings are text and get escaped; ``class_`` is the attribute class, ``aria_hidden`` aria-hidden."""
    description = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items()
    )
    return Markup(f"<{name}{description}>{joined(*children)}</{name}>")


def joined(*children: str) -> Markup:
    """Elements and texts one after the other."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children))


def breakable(name: str) -> Markup:
    """A name that lines may break after its dots and underscores."""
    return Markup(re.sub(r"([._])", r"\1<wbr>", escape(name)))


def layer_link(name: str, shown: str | None = None) -> Markup:
    """The name of a layer that leads to everything that is known of it."""
    text = display(name)
    return tag("a", breakable(shown or text), class_="layer", href=f"#layer={quote(text, safe='')}")


def with_links(text: str, names: Iterable[str]) -> Markup:
    """A sentence in which every one of some layers' names is a link."""
    shown = sorted({display(name) for name in names}, key=len, reverse=True)
    if not shown:
        return joined(text)
    pieces = re.split(f"({'|'.join(map(re.escape, shown))})", text)
    return joined(*(layer_link(piece) if n % 2 else piece for n, piece in enumerate(pieces)))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str, numbers: int = 0) -> Markup:
    """A table whose first cells are row heads and whose last columns, that many, are numbers: see cells_table."""
    return cells_table(heads, rows, kind, [n >= len(heads) - numbers for n in range(len(heads))])


def cells_table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str, are_numbers: Sequence[bool]) -> Markup:
    """A table whose first cells are row heads; ``are_numbers`` says of each column whether it holds numbers.

    ``kind``: "short" names are never broken. Where the page is narrow the rows of a "stack" become lines, and the
    cells of "rows" lines with the head before each.
    """
    right = [{"class_": "number"} if is_number else {} for is_number in are_numbers]
    head = tag("tr", *(tag("th", text, scope="col", **right[n]) for n, text in enumerate(heads)))
    body = [
        tag(
            "tr",
            tag("th", tag("span", row[0], class_="name"), scope="row"),
            *(tag("td", text, data_head=heads[n], **right[n]) for n, text in enumerate(row[1:], 1)),
        )
        for row in rows
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_=f"plain {kind}"), class_="scroll")


def folding(section: str, title: str, *content: str, is_open: bool = True) -> Markup:
    """A section that its heading folds; it is found by the id ``section``."""
    opened = {"open": ""} if is_open else {}
    return tag("details", tag("summary", tag("h2", title)), *content, id=section, class_="section", **opened)


def figures(found: Iterable[tuple[str, str, str, str]]) -> Markup:
    """Large numbers: each a title, a value, its unit and a note."""
    return joined(
        *(
            tag(
                "div",
                tag("p", title, class_="label"),
                tag("p", value, " ", tag("small", unit), class_="value"),
                tag("p", note, class_="note"),
            )
            for title, value, unit, note in found
        )
    )


def navigation(sections: Iterable[tuple[str, str]]) -> Markup:
    """Links to sections by their ids."""
    return tag("nav", *(tag("a", title, href=f"#{name}") for name, title in sections), aria_label="Sections")


def page(kind: str, title: str, scripts: Iterable[str], body: Markup, data: object) -> str:
    """A whole page of the same look.

    ``data`` is what the scripts show, as JSON; ``body`` what is there without them.
    """
    style, script = _read("style.css"), "\n".join(_read(f"{name}.js") for name in scripts)
    return Template(_read("page.html")).substitute(
        policy=_policy(style, script),
        style=style,
        script=script,
        kind=kind,
        title=escape(f"{title} – quanterr"),
        body=body,
        data=packed(data),
    )


def headed(verdict: str, reasons: Iterable[str], sides: Markup, word: str | None = None) -> Markup:
    """What a page begins with: the verdict, its reasons and what it is about."""
    sign = tag("span", SIGNS[verdict], class_="sign", aria_hidden="true")
    title = tag("h1", sign, word or verdict.capitalize())
    listed = tag("ul", *(tag("li", reason) for reason in reasons), class_="reasons")
    return tag("section", title, listed, sides, class_=f"verdict {verdict}")


def part(file: str, **values: str) -> Markup:
    """A part of a page that is filled by its script: ``html/<file>.html``."""
    return Markup(Template(_read(f"{file}.html")).substitute(values))


def packed(data: object) -> str:
    """Data for a script: JSON, deflated, in base64, as a JSON string."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return json.dumps(base64.b64encode(zlib.compress(text.encode(), 6)).decode())


def short(path: str) -> str:
    """The last part of a path."""
    return display(path.rstrip("/").rsplit("/", 1)[-1], LISTED_NAME)


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """A browser may use this style and this script, an empty icon, and nothing else."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
