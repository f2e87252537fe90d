"""Links between the repository's documents lead to existing files and headings."""

import importlib
import re
from itertools import pairwise

import make_guide
import pytest
from markdown_it import MarkdownIt

import quanterr
from quanterr import guide
from quanterr.documents.kinds import KINDS
from quanterr.documents.statement import make_schema

ROOT = make_guide.ROOT
DOCUMENTS = [*make_guide.PAGES, ROOT / "CHANGELOG.md", ROOT / ".github/SECURITY.md"]
SITE = re.compile(r"guide/([a-z-]+)\.md")


def tokens_of(path):
    return MarkdownIt("commonmark").enable("table").parse(path.read_text())


def links_of(path):
    """Return relative targets of links and pictures, fragments included."""
    inline = [child for token in tokens_of(path) for child in token.children or ()]
    targets = [
        token.attrGet("href") or token.attrGet("src") for token in inline if token.type in ("link_open", "image")
    ]
    return [link for link in targets if not re.match(r"[a-z]+:", link)]


def anchors_of(path):
    """Return the anchors that GitHub gives the headings."""
    tokens = tokens_of(path)
    titles = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_existing_files_and_headings(path):
    broken = []
    for link in links_of(path):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)

    assert [] == broken


def test_broken_link_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title, and more\n\n[a](other.md#x) ![b](c.png) [d](https://e.example) `[f](g)`\n")

    assert ["other.md#x", "c.png"] == links_of(page)
    assert {"a-title-and-more"} == anchors_of(page)


def test_every_guide_page_is_in_the_site_navigation():
    topics = SITE.findall((ROOT / "docs/zensical.toml").read_text())

    assert ["index", *guide.TOPICS] == topics


def test_every_file_linked_from_the_site_has_a_page(monkeypatch):
    """Otherwise ``make docs`` ends with an error; it takes too long for a test."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    places = importlib.import_module("make_site").PLACES
    linked = {f"{ROOT / name}" for source in places if source.endswith(".md") for name in linked_files(ROOT / source)}

    assert set() == linked - {str(ROOT / place) for place in places}


def test_site_has_a_page_for_each_schema(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    make_page = importlib.import_module("schemas").make_page
    schemas = {document_kind.name: document_kind.model.json_schema() for document_kind in KINDS.values()} | {
        "Origin": make_schema()
    }
    pages = {name: make_page(name, schema) for name, schema in schemas.items()}

    assert "| `places` | list of (integer, integer) |" in pages["Report"]
    assert all("| field | type | meaning |" in page for page in pages.values())


def linked_files(path):
    names = [link.partition("#")[0] for link in links_of(path)]
    return [(path.parent / name).resolve().relative_to(ROOT) for name in names if name]


def test_every_public_name_is_in_the_reference():
    named = re.findall(r"^::: quanterr\.(\w+)$", (ROOT / "docs/library.md").read_text(), re.MULTILINE)

    assert sorted(quanterr.__all__) == sorted(named)
