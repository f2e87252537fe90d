"""The links of a built site: every page, file and anchor that they name is there, and nothing is loaded from elsewhere."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """The links, the loaded resources and the anchors of a page."""

    def __init__(self, text: str) -> None:
        """Read the page."""
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element names. A link to another form of the page, such as its canonical one, loads nothing."""
        found = {name: value for name, value in attrs if value is not None}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "link" and found.get("rel") in ("canonical", "prev", "next", "alternate"):
            self.links.append(found["href"])
        else:
            self.loaded += [value for name, value in found.items() if (tag, name) in LOADED]


def problems(site: Path) -> tuple[list[str], set[str]]:
    """What is wrong with the links of a site, and the addresses outside it, which are not looked up."""
    pages = {path: Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    wrong, outside = [], set()
    for path, page in pages.items():
        where = path.relative_to(site)
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    wrong.append(f"{where}: loads {link}")
                elif parts.scheme in ("http", "https"):
                    outside.add(link)
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if parts.path.startswith("/") or not target.is_file() or site.resolve() not in target.resolve().parents:
                wrong.append(f"{where}: no file for {link}")
            elif "=" not in parts.fragment and parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                wrong.append(f"{where}: no anchor for {link}")
    return wrong, outside


def check(site: Path) -> None:
    """Print the addresses outside the site; end with status 1 if a link of the site leads nowhere."""
    wrong, outside = problems(site.resolve())
    print(f"{len(outside)} addresses outside the site, not looked up:", *sorted(outside), sep="\n  ")
    if wrong:
        sys.exit("\n".join(sorted(wrong)))
