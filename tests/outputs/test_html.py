"""The HTML page as a file: its permissions, content and size. test_html_in_browser.py covers its behaviour."""

import base64
import hashlib
import io
import json
import re
import zlib
from html.parser import HTMLParser

import msgspec
import pytest
from msgspec.structs import replace
from support.sample_reports import hostile, large_page, make_mixed, report_of, small, tiny

from quanterr.documents.comparison.model import Report
from quanterr.outputs.page import rendering as pages
from quanterr.outputs.page.columns import DIFFERS, DIGITS, round_digits
from quanterr.outputs.sections import Column, Section, Table
from quanterr.util.text import display
from quanterr.views.comparison import page_data as layers_of_page
from quanterr.views.comparison import view

LIMIT = 2_000_000  # bytes
SCRIPTS = pages.FOLDER / "scripts"
SOURCES = "\n".join(path.read_text() for path in sorted(SCRIPTS.glob("*.js")))


def page(report):
    file = io.StringIO()
    pages.write(report, file)
    return file.getvalue()


def section_of(part):
    """Return a page's section with one part."""
    report = report_of(tiny())
    file = io.StringIO()
    pages.write(report, file, report.view(0)._replace(sections=[Section("only", "Only", [part])], maps=None))
    return file.getvalue().partition('<details id="only"')[2].rpartition("</details>")[0]


def test_faultless_file_needs_no_action_and_no_kept_layers():
    report = report_of(small(bad=False))
    low = replace(report, formats={name: replace(row, usual_snr_db=[40, 42]) for name, row in report.formats.items()})

    assert "Nothing needs to be done" in page(report)
    assert 'id="keep"' not in page(report)
    for doubted in (low, replace(report, verdict="fail"), report_of(small())):
        assert "Nothing needs to be done" not in page(doubted)
        assert 'id="keep"' in page(doubted)


def test_title_names_the_file_and_its_snr_and_no_page_names_its_folder():
    report = report_of(small())
    side = replace(report.quantized, path="/home/me/models/model-fp8.safetensors")
    run = replace(report.run, command=["quanterr", "compare", "original.safetensors", side.path])
    made = page(replace(report, quantized=side, run=run))
    snr = f"{report.aggregate.overall_snr_db:.2f}"

    assert f"<title>model-fp8.safetensors: {snr} dB, " in made
    assert "quanterr compare original.safetensors model-fp8.safetensors" in made
    assert "/home/me" not in made


class Page(HTMLParser):
    """Elements with their attributes, and the content of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.content, self.policy = [], {}, ""
        self.text, self.open = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if "http-equiv" in attributes:
            self.policy = attributes["content"]
        self.open = f"{tag} {attributes.get('type', '')}".strip() if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self.open = ""

    def handle_data(self, data):
        if self.open:
            self.content[self.open] = self.content.get(self.open, "") + data
        else:
            self.text.append(data)


def unpack(text):
    packed = json.loads(Page(text).content["script application/json"])
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def names(data):
    """Return names as the page's script assembles them."""
    numbers = iter(data["numbers"])
    return [re.sub("\0", lambda _: str(next(numbers)), data["patterns"][n]) for n in data["columns"]["pattern"]]


@pytest.fixture(scope="module")
def report():
    return report_of(make_mixed())


@pytest.fixture(scope="module")
def evil():
    return page(hostile())


class TestPermissions:
    def test_only_the_page_script_and_style_may_run(self, report):
        parsed = Page(page(report))
        allowed = dict(part.split(" ", 1) for part in parsed.policy.split("; "))

        assert "'none'" == allowed["default-src"] == allowed["base-uri"] == allowed["form-action"]
        assert {"default-src", "base-uri", "form-action", "style-src", "script-src", "img-src"} == allowed.keys()
        for element, policy in (("style", "style-src"), ("script module", "script-src")):
            digest = hashlib.sha256(parsed.content[element].encode()).digest()
            assert f"'sha256-{base64.b64encode(digest).decode()}'" == allowed[policy]

    def test_policy_comes_before_everything_it_governs(self, report):
        names = [name for name, _ in Page(page(report)).elements]

        assert ["html", "head", "meta", "meta"] == names[:4]

    def test_page_fetches_no_resource(self, report):
        text = page(report)
        addresses = [value for _, attributes in Page(text).elements for key, value in attributes.items()
                     if key in ("src", "href", "action", "srcset", "poster", "data")]  # fmt: skip

        assert ["data:,", "#layers"] == addresses[:2]
        assert all(address.startswith("#") for address in addresses[2:])
        assert "http" not in text.replace("http-equiv", "")
        assert not re.search(r"@import|url\(", text)

    def test_page_has_neither_inline_styles_nor_handlers(self, report):
        keys = {key for _, attributes in Page(page(report)).elements for key in attributes}

        assert not [key for key in keys if key == "style" or key.startswith("on")]

    @pytest.mark.parametrize(
        "word", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "setTimeout(",
                 "createContextualFragment", "DOMParser", "fetch(", "import(", "srcdoc", 'setAttribute("style'],
    )  # fmt: skip
    def test_script_makes_text_and_no_markup(self, word):
        assert word not in SOURCES

    def test_every_script_is_part_of_a_page(self):
        used = {*pages.LAYER_SCRIPTS, *pages.MAP_SCRIPTS, *view.SCRIPTS}

        assert used == {path.stem for path in SCRIPTS.glob("*.js")}


class TestHostileNames:
    def test_hostile_names_make_no_element(self, evil):
        plain = {name for name, _ in Page(page(report_of(make_mixed()))).elements}
        elements = Page(evil).elements

        assert {name for name, _ in elements} <= plain | {"code"}
        assert 2 == sum(name == "script" for name, _ in elements)
        assert not [key for _, attributes in elements for key in attributes if key.startswith("on") or key == "src"]

    def test_hostile_names_are_only_text(self, evil):
        text = "".join(Page(evil).text)

        assert "<img src=x onerror=\"document.title='pwned'\">" in text
        assert "</script><script>document.title='pwned'</script>" in text
        assert r"\u202eesrever\u2066" in text

    def test_hostile_names_leave_the_page_and_its_policy_whole(self, evil):
        parsed = Page(evil)

        assert parsed.policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "document.title='pwned'" not in "".join(parsed.content.values())

    def test_overlong_names_are_cut(self, evil):
        assert len(evil) < 400_000
        assert max(map(len, names(unpack(evil)))) <= 200


class TestData:
    @pytest.mark.parametrize("make", [lambda: report_of(make_mixed()), hostile], ids=["mixed", "hostile"])
    def test_names_are_reassembled_unchanged(self, make):
        report = make()
        entries = [*report.layers, *report.other_changes, *report.lossless, *report.not_compared]

        assert [display(entry.layer_name) for entry in entries] == names(layers_of_page.page_data(report))

    def test_columns_are_equally_long(self, report):
        data = layers_of_page.page_data(report)
        total = sum(len(x) for x in (report.layers, report.other_changes, report.lossless, report.not_compared))

        assert {total} == {len(column) for column in data["columns"].values()}

    @pytest.mark.parametrize(
        ("value", "shown"),
        [(0.0, 0.0), (1e-300, 1e-300), (0.123456, 0.1235), (-123456.0, -123500.0), (None, None)],
    )
    def test_numbers_are_rounded_and_0_is_only_0(self, value, shown):
        assert shown == round_digits(value, DIGITS)

    def test_worst_layers_and_those_with_findings_have_all_details(self, report, monkeypatch):
        monkeypatch.setattr(layers_of_page, "MAX_DETAILED", 2)
        named = replace(report.findings[0], layer=report.layers[-1].layer_name, severity="error")
        changed = replace(report, findings=[named], other_changes=[])
        data = layers_of_page.page_data(changed)
        worst = sorted(range(len(report.layers)), key=lambda n: report.layers[n].snr_db)[:2]

        assert sorted({*worst, len(report.layers) - 1}) == sorted(data["details"]["rows"])
        assert len(report.layers) - 1 == data["findings"][0]["row"]

    def test_undefined_numbers_are_null(self, report):
        spoilt = msgspec.json.decode(report.to_json(), type=Report)
        spoilt.layers[3].snr_db = None
        data = unpack(page(spoilt))

        assert data["columns"]["snr_db"][3] is None
        assert 3 in data["details"]["rows"]

    def test_errors_come_before_all_other_findings(self, report):
        info, error = (replace(report.findings[0], severity=s) for s in ("info", "error"))
        many = replace(report, findings=[info] * 600 + [error])

        assert "error" == layers_of_page.pick_findings(many)[0].severity
        assert "and 401 more findings, in the JSON" in page(many)


@pytest.mark.slow
def test_page_with_47000_layers_is_small():
    """The page grows with the number of layers, so a quarter of them is enough to compute its size."""
    text = large_page()
    bare = len(page(report_of(tiny())).encode())
    layers = unpack(text)["columns"]["status"].count(DIFFERS)

    assert layers > 10_000
    assert bare + (len(text.encode()) - bare) * 47_000 / layers < LIMIT


def test_page_without_layers_explains_itself():
    model = tiny()
    model.weights, model.floor = [], None

    assert "No layer differs, so there is no error to show." in page(report_of(model))


@pytest.mark.parametrize(
    ("rows", "minor", "folded"),
    [(20, 0, None), (21, 0, "11 more rows"), (20, 4, "4 rows below 1 %"), (25, 4, "15 more rows")],
)
def test_long_table_shows_its_first_rows_and_folds_the_others(rows, minor, folded):
    table = Table("", "layer", (Column("bytes", 0),), [[f"row-{n}", "1"] for n in range(rows)], 0, minor, "below 1 %")
    shown = section_of(table)

    assert ([folded] if folded else []) == re.findall("<summary>([^<]*)</summary>", shown)
    assert [f"row-{n}" for n in range(rows)] == re.findall(r"row-\d+", shown)
