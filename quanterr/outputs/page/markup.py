"""HTML elements and pages that work offline from a file and run only their own scripts.

Names may be hostile: :func:`tag` escapes every text, scripts create text nodes only, and the page's policy lets a
browser run no other script and fetch nothing.
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
LAYER_SCRIPTS = (
    "data",
    "dom",
    "address",
    "metrics",
    "scale",
    "map",
    "table",
    "filters",
    "drawer",
)  # for every page with layers
NOTHING = ("-", "–")  # cells without a value


class Markup(str):
    """HTML; any other string is text."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str) -> Markup:
    """Return an element; plain strings get escaped. ``class_`` is the attribute class, ``aria_hidden`` aria-hidden."""
    description = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items()
    )
    return Markup(f"<{name}{description}>{join_markup(*children)}</{name}>")


def image(uri: str, alt: str) -> Markup:
    """Return an image from a data: URI, the only kind that the page's policy lets a browser load."""
    return Markup(tag("img", src=uri, alt=alt).removesuffix("</img>"))


def join_markup(*children: str) -> Markup:
    """Join elements and texts."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children))


def link_layer(name: str) -> Markup:
    """Return a link from a layer's name, which may break after dots and underscores, to its details."""
    text = display(name)
    breakable = Markup(re.sub(r"([._])", r"\1<wbr>", escape(text)))
    return tag("a", breakable, class_="layer", href=f"#layer={quote(text, safe='')}")


def link_names(text: str, names: Iterable[str]) -> Markup:
    """Return a sentence with links for all occurrences of the given layer names."""
    shown = sorted({display(name) for name in names}, key=len, reverse=True)
    if not shown:
        return join_markup(text)
    pieces = re.split(f"({'|'.join(map(re.escape, shown))})", text)
    return join_markup(*(link_layer(piece) if n % 2 else piece for n, piece in enumerate(pieces)))


def cells_table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str, are_numbers: Sequence[bool]) -> Markup:
    """Return a table whose first cells are row heads; ``are_numbers`` marks the columns of numbers.

    With the ``kind`` "short", names never break. On narrow screens, "stack" turns rows into lines, and "rows" shows
    each cell that is not empty as the column's head and the text.
    """
    right = [{"class_": "number"} if is_number else {} for is_number in are_numbers]

    def cell(text: str, n: int) -> Markup:
        kinds = " ".join((*right[n].values(), *(["none"] if text in NOTHING else [])))
        return tag("td", text, data_head=heads[n], **({"class_": kinds} if kinds else {}))

    head = tag("tr", *(tag("th", text, scope="col", **right[n]) for n, text in enumerate(heads)))
    body = [
        tag(
            "tr",
            tag("th", tag("span", row[0], class_="name"), scope="row"),
            *(cell(text, n) for n, text in enumerate(row[1:], 1)),
        )
        for row in rows
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_=f"plain {kind}"), class_="scroll")


def page(kind: str, title: str, scripts: Iterable[str], body: Markup, data: object) -> str:
    """Return a complete page.

    ``body`` is the static content; ``data`` is JSON for the scripts.
    """
    style, script = _read("style.css"), "\n".join(_read(f"{name}.js") for name in scripts)
    return Template(_read("page.html")).substitute(
        policy=_policy(style, script),
        style=style,
        script=script,
        kind=kind,
        title=escape(f"{title} – quanterr"),
        body=body,
        data=pack_data(data),
    )


def part(file: str) -> Markup:
    """Return a part of a page, ``html/<file>.html``, for scripts to fill."""
    return Markup(_read(f"{file}.html"))


def pack_data(data: object) -> str:
    """Return data for a script: JSON, deflated, in base64, as a JSON string."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return json.dumps(base64.b64encode(zlib.compress(text.encode(), 6)).decode())


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Return a content security policy that allows only this style, this script and inline images."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
