"""Check of a built site: every link leads to an existing file and anchor, and nothing is loaded from elsewhere."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

LOADED = {("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """Links, loaded resources and anchors of a page."""

    def __init__(self, text: str) -> None:
        """Parse the page."""
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record what an element refers to.

        A link to another form of the page, such as the canonical one, loads nothing.
        """
        found = {name: value for name, value in attrs if value is not None}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "link" and found.get("rel") in ("canonical", "prev", "next", "alternate"):
            self.links.append(found["href"])
        else:
            self.loaded += [value for name, value in found.items() if (tag, name) in LOADED]


def find_problems(site: Path) -> tuple[list[str], set[str]]:
    """Return the broken links of a site, and the external addresses, which are not fetched."""
    pages = {path: Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    wrong, outside = [], set()
    for path, page in pages.items():
        where = path.relative_to(site)
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if not parts.scheme and not parts.netloc:
                wrong += [f"{where}: {missing} for {link}" for missing in find_missing(parts, path, pages)]
            elif link in page.loaded and parts.scheme != "data":
                wrong.append(f"{where}: loads {link}")
            elif parts.scheme in ("http", "https"):
                outside.add(link)
    return wrong, outside


def find_missing(link: SplitResult, path: Path, pages: dict[Path, Page]) -> list[str]:
    """Return what the target of a link lacks; a fragment such as ``#layer=…`` is a view of a report."""
    target = (path.parent / unquote(link.path)).resolve() if link.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return ["no file"]
    anchors = pages[target].anchors if target in pages else set()
    return ["no anchor"] if link.fragment and "=" not in link.fragment and unquote(link.fragment) not in anchors else []


def check(site: Path) -> None:
    """Print the external addresses; exit with status 1 if a link within the site is broken."""
    wrong, outside = find_problems(site.resolve())
    print(f"{len(outside)} external addresses, not checked:", *sorted(outside), sep="\n  ")
    if wrong:
        sys.exit("\n".join(sorted(wrong)))
