"""Checks that outputs contain only text, whatever names they show."""

import csv
import io
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

from markdown_it import MarkdownIt
from msgspec.structs import replace
from support.hostile_names import SHORT_NAMES
from support.sample_reports import report_of, tiny

from quanterr.documents.gate_results import Violation
from quanterr.outputs import OUTPUTS
from quanterr.util.text import display

COMMAND = re.compile(r"^\s*::|##\w*\[", re.IGNORECASE)

FORMULA = tuple("=+-@\t\r＝＋－＠")

NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?|-?inf|nan", re.IGNORECASE)

STORABLE = [name for name in SHORT_NAMES if not re.search("[\ud800-\udfff]", name)]


def check_lines(text, commands=()):
    """Check text for a terminal or the log of a CI: only lines that begin with one of ``commands`` may be commands."""
    for line in text.split("\n"):
        assert line.isprintable(), ascii(line)
        assert not COMMAND.search(line) or line.startswith(tuple(commands)), line


def check_json(text):
    """Check that JSON is ASCII and that none of its lines is a command."""
    assert text.isascii()
    check_lines(text.replace("\r", ""))


def check_csv(text):
    """Check that no cell is a formula, whichever of these characters ends a cell."""
    for delimiter in ",;\t":
        for row in csv.reader(io.StringIO(text), delimiter=delimiter):
            for cell in row:
                bare = cell.strip(" \"'") if delimiter != "," and not cell.startswith("'") else cell
                assert not bare.startswith(FORMULA) or NUMBER.fullmatch(bare), ascii(cell)
    check_text(text)


def check_text(text):
    """Check that all characters of all lines are printable."""
    assert all(line.isprintable() for line in text.replace("\u200b", "").split("\n")), ascii(text)[:500]


TAGS = {"h2", "h3", "p", "strong", "ul", "li", "table", "thead", "tbody", "tr", "th", "td", "code"}


def check_markdown(text):
    """Check that Markdown has tables, lists and code, no links, and equal numbers of cells in all rows."""
    check_text(text)
    document = Elements(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text))
    assert document.tags <= TAGS
    assert {name for name, _ in document.attributes} <= {"style"}  # how a column is aligned
    for block in re.split(r"\n(?!\|)", text):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in rows}) <= 1, block
        assert not any("\\" in line for line in rows)  # readers of tables disagree about it


class Elements(HTMLParser):
    """Elements of a page and their attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.scripts = set(), [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        self.scripts += tag == "script"


def page_of(text):
    """Return the elements of a page and the kinds of their attributes, which no name may change."""
    page = Elements(text)
    return page.tags, page.scripts, {name for name, _ in page.attributes}


TAME_PAGE = {}


def check_html(text):
    """Check that a page has the elements and attributes of a page with tame names, and no others."""
    check_text(text)
    if not TAME_PAGE:
        TAME_PAGE["page"] = page_of(render(make_named("tame"), "html"))
    assert page_of(text) == TAME_PAGE["page"]


def check_junit(text):
    check_text(text)
    known = {"testsuites", "testsuite", "testcase", "failure", "error", "skipped", "system-out", "system-err"}
    assert {element.tag for element in ElementTree.fromstring(text).iter()} <= known


CHECKS = {
    "json": check_json,
    "jsonl": check_json,
    "csv": check_csv,
    "md": check_markdown,
    "html": check_html,
    "junit": check_junit,
}


def make_named(name):
    """Return a report in which everything that comes from a file has this name."""
    report = report_of(tiny())
    for n, layer in enumerate([*report.layers, *report.other_changes, *report.lossless]):
        layer.layer_name = name + "." * n
        layer.display_name = display(layer.layer_name)
        layer.role = layer.format = layer.original_format = layer.original_dtype = layer.quantized_dtype = name
        layer.block = layer.comfy_format = name
    for layer in report.layers:
        layer.evidence = (name,)
    for gate in report.gates:
        gate.id = gate.require = gate.reason = gate.message = gate.worst_layer = name
        gate.layers = [name]
        gate.violations = [Violation(name, None, None, name), Violation(name, 1.0, -1.0, None)]
    lost = replace(report.not_compared[0], layer_name=name, display_name=display(name), reason=name)
    texts = {"path": name, "prefix": name, "revision": name, "notes": [name]}
    side = replace(report.original, **texts)
    finding = replace(
        report.findings[0], code=name, severity="error", layer=name, message=name, remedy=name, evidence={name: name}
    )
    return replace(
        report,
        reasons=[name],
        original=side,
        quantized=side,
        selection=replace(report.selection, patterns=[name]),
        formats={name: next(iter(report.formats.values()))},
        findings=[finding],
        groups={grouping: {name: next(iter(of.values()))} for grouping, of in report.groups.items()},
        not_compared=[lost],
        tool=replace(report.tool, version=name),
        run=replace(report.run, command=[name], device=name, started=name, torch=name),
    )


def render(report, output):
    file = io.StringIO()
    next(row for row in OUTPUTS if row.name == output).write(report, file)
    return file.getvalue()
