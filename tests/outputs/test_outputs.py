"""The outputs of reports: good, bad and hostile ones."""

import csv
import io
import json
import re
import struct
import sys
from html.parser import HTMLParser
from math import inf, isnan, nan
from xml.etree import ElementTree

import make_snapshots
import msgspec
import pytest
import torch
from markdown_it import MarkdownIt
from msgspec.structs import replace
from support import sample_documents
from support.sample_reports import HOSTILE_NAMES, hostile, report_of, tiny

import quanterr
from quanterr.documents.base import Finding, dumps, dumps_each
from quanterr.documents.comparison.model import Report
from quanterr.errors import UsageError
from quanterr.metrics.scores import Score
from quanterr.outputs import OUTPUTS, card, markdown
from quanterr.outputs import csv as as_csv
from quanterr.outputs.formatting import format_cosine
from quanterr.outputs.sections import Column, Table
from quanterr.outputs.terminal import make_console, print_table, show
from quanterr.util.text import display, format_decisive
from quanterr.views.comparison import items
from quanterr.views.parts import format_score

pytestmark = pytest.mark.session

NAMES = [output.name for output in OUTPUTS]


def render(report, name):
    file = io.StringIO()
    next(output for output in OUTPUTS if output.name == name).write(report, file)
    return file.getvalue()


@pytest.fixture(scope="module")
def report():
    """An inconclusive report in which one tensor was not compared."""
    return report_of(tiny())


@pytest.fixture(scope="module")
def evil():
    return hostile()


def flawless():
    model = tiny()
    model.missing, model.floor = [], None
    return report_of(model)


# Content


@pytest.mark.parametrize("name", make_snapshots.SNAPSHOTS)
def test_outputs_equal_the_accepted_snapshots(name):
    assert (make_snapshots.FOLDER / name).read_text(encoding="utf-8") == make_snapshots.SNAPSHOTS[name]()


def test_snapshots_and_files_correspond():
    assert {path.name for path in make_snapshots.FOLDER.iterdir()} == set(make_snapshots.SNAPSHOTS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("verdict", ["inconclusive", "fail", "pass"])
def test_verdict_comes_before_any_layer(report, name, verdict):
    text = render(replace(report, verdict=verdict), name)
    first = min(text.find(layer.layer_name) for layer in report.layers if layer.layer_name in text)

    assert -1 < text.find(verdict) < first or name == "junit"


@pytest.mark.parametrize("name", NAMES)
def test_uncompared_tensor_is_named_with_the_reason(report, name):
    text = render(report, name)

    assert "its scale is missing" in text
    assert "model.layers.1.mlp.down_proj.weight" in text


@pytest.mark.parametrize("name", NAMES)
def test_report_gives_the_same_bytes_when_new_and_when_read_back(report, name):
    assert render(report, name) == render(msgspec.json.decode(report.to_json(), type=Report), name)


@pytest.mark.parametrize("name", NAMES)
def test_empty_report_can_be_written(report, name):
    empty = {key: [] for key in ("layers", "other_changes", "lossless", "not_compared", "findings", "gates", "reasons")}
    nothing = replace(report, **empty, groups={}, formats={})

    assert "inconclusive" in render(nothing, name)


@pytest.mark.parametrize("name", NAMES)
def test_undefined_numbers_can_be_written(report, name):
    spoilt = msgspec.json.decode(report.to_json(), type=Report)
    for layer in spoilt.layers:
        layer.nonfinite = {"snr_db": "nan", "relative_error": "+inf", "mean_error": "-inf"}
        layer.snr_db = layer.relative_error = layer.mean_error = None
    for aggregate in (spoilt.aggregate, *spoilt.groups["format"].values()):
        aggregate.overall_snr_db = aggregate.worst_layer_snr_db = aggregate.cosine_similarity = None

    assert render(spoilt, name)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "json"])
@pytest.mark.slow
def test_output_holds_only_printable_text(evil, name):
    text = render(evil, name)

    assert [] == [c for c in set(text) if not c.isprintable() and c != "\n"]  # escaped characters stay data


# JSON Lines


class TestJsonLines:
    def test_first_json_line_counts_the_others(self, report):
        head, *lines = map(json.loads, render(report, "jsonl").splitlines())
        counts = {record: sum(line["record"] == record for line in lines) for record in Report.ITEMS.values()}

        assert ("report", "inconclusive") == (head["record"], head["verdict"])
        assert counts == head["records"]

    def test_json_lines_are_the_items_in_the_json_report(self, report):
        stored = json.loads(report.to_json())
        _, *lines = map(json.loads, render(report, "jsonl").splitlines())

        for key, record in Report.ITEMS.items():
            assert [{"record": record} | item for item in stored[key]] == [x for x in lines if x["record"] == record]


# CSV


class TestCsv:
    def rows(self, report):
        return list(csv.DictReader(io.StringIO(render(report, "csv"))))

    def test_csv_numbers_are_written_in_full(self, report):
        rows = {row["layer_name"]: row for row in self.rows(report)}
        for layer in report.layers:
            row = rows[layer.layer_name]

            assert layer.snr_db == float(row["snr_db"])
            assert layer.absolute_error_percentiles.p99_9 == float(row["absolute_error_percentiles_p99_9"])
            assert layer.worst_element.y == float(row["worst_element_y"])

    def test_csv_has_a_line_per_tensor_with_the_verdict(self, report):
        lists = [(key, item.layer_name) for key in items.LISTS for item in getattr(report, key)]
        rows = self.rows(report)

        assert [("report", ""), *lists] == [(row["list"], row["layer_name"]) for row in rows]
        assert {"inconclusive"} == {row["quanterr_verdict"] for row in rows}

    def test_csv_has_the_same_columns_for_every_report(self, report, evil):
        heads = {render(x, "csv").splitlines()[0] for x in (report, evil, flawless())}

        assert 1 == len(heads)

    def test_csv_has_a_column_for_every_field(self, report):
        entries = [item for key in items.LISTS for item in getattr(report, key)]

        assert {name for entry in entries for name in items.values(entry)} <= set(items.CSV_COLUMNS)

    def test_value_without_a_column_is_an_error(self, report, monkeypatch):
        *columns, last = items.CSV_COLUMNS
        monkeypatch.setattr(items, "CSV_COLUMNS", columns)

        with pytest.raises(KeyError, match=last):
            render(report, "csv")

    def test_undefined_number_is_not_an_empty_cell(self, report):
        spoilt = msgspec.json.decode(report.to_json(), type=Report)
        spoilt.layers[0].snr_db = spoilt.layers[0].mean_error = None
        spoilt.layers[0].nonfinite = {"snr_db": "nan", "mean_error": "-inf"}
        row = next(row for row in self.rows(spoilt) if row["layer_name"] == spoilt.layers[0].layer_name)

        assert isnan(float(row["snr_db"]))
        assert -float("inf") == float(row["mean_error"])

    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            ("=1+1", "'=1+1"),
            ("+1", "'+1"),
            ("-1", "'-1"),
            ("@SUM(A1)", "'@SUM(A1)"),
            ("\t=1", r"\x09=1"),
            ("\r=1", r"\x0d=1"),
            ("a;=1", "a;'=1"),
            ("＝1", "'＝1"),
            ("a=b", "a=b"),
            (-1.5, -1.5),
            (0, 0),
            (None, None),
            (True, "true"),
            ([2, 3], "2x3"),
            ("+inf", "'+inf"),
            ("-inf", "'-inf"),
        ],
    )
    def test_csv_text_is_never_a_formula(self, value, shown):
        assert shown == as_csv.format_cell(value)

    @pytest.mark.parametrize(
        ("value", "shown"),
        [(1.0, "1.00000000"), (1 - 2.5e-12, "1 - 2.5e-12"), (-1.0, "-1.00000000"), (None, "undefined")],
    )
    def test_cosine_shows_how_far_it_is_from_one(self, value, shown):
        assert shown == format_cosine(value)

    def test_infinite_error_is_not_shown_as_exact(self):
        [layer] = quanterr.compare({"a.weight": torch.zeros(4, 4)}, {"a.weight": torch.eye(4)}, device="cpu").layers

        assert "+inf" == layer.nonfinite["relative_error"]
        assert "infinite" == format_score(layer, Score("relative", "lower", "", name="relative_error"))

    def test_hostile_report_has_no_formula_in_a_cell(self, evil):
        cells = [cell for row in self.rows(evil) for cell in row.values()]
        formulas = [cell for cell in cells if cell[:1] in tuple("=+-@\t\r") and not is_number(cell)]

        assert [] == formulas


def is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


# Markdown


def ascii_id(text):
    return ascii(text[:12])


class Document(HTMLParser):
    """Elements of a page, its comments, and the text in its code."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.comments, self.code, self.attributes = set(), [], [], []
        self.depth = 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag == "code":
            self.depth, self.code = 1, [*self.code, ""]

    def handle_endtag(self, tag):
        if tag == "code":
            self.depth = 0

    def handle_data(self, data):
        if self.depth:
            self.code[-1] += data

    def handle_comment(self, data):
        self.comments.append(data.strip())


class TestMarkdown:
    def html(self, text):
        return Document(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text))

    def test_markdown_for_a_hostile_report_is_text_and_tables(self, evil):
        document = self.html(render(evil, "md"))

        known = {"h2", "p", "strong", "ul", "li", "table", "thead", "tbody", "tr", "th", "td", "code"}
        assert document.tags == known
        assert [] == document.attributes
        assert ["quanterr:begin", "quanterr:end"] == document.comments

    @pytest.mark.parametrize("name", [name for name in HOSTILE_NAMES if name.strip()], ids=ascii_id)
    def test_markdown_name_stays_unchanged_and_in_its_cell(self, name):
        table = f"| a | b |\n|---|---|\n| {markdown.format_code(name)} | `x` |\n"

        assert [display(name), "x"] == self.html(table).code

    @pytest.mark.parametrize("text", [text for text in HOSTILE_NAMES if text.strip()], ids=ascii_id)
    def test_sentence_is_not_markup(self, text):
        document = self.html(f"- {markdown.format_prose(text)}\n")

        assert {"ul", "li"} == document.tags

    def test_card_is_a_sentence_a_table_and_its_findings(self, report):
        """A plan has four tables and an evaluation twelve; no card has excerpts or local paths."""
        for document in (report, *(make() for make in (sample_documents.plan, sample_documents.evaluation))):
            section = card.make_section(document)
            assert 1 == section.count("|---|\n")
            assert not re.search("&#(?!124;)", section)  # except for |, which would end a cell
        assert all(
            finding.message in section for finding in document.candidates[0].findings if finding.severity != "info"
        )

    def test_damaged_layer_is_described_once(self, report):
        damage = "blk.0: off by a factor of 4"
        finding = Finding("scale_factor", "error", "blk.0", damage, "mend it", {})
        gate = f"gate min(snr_db) >= 20 does not hold: 1 of 3 layers, the worst {damage}"
        damaged = replace(report, verdict="inconclusive", reasons=[damage, gate], findings=[finding])

        for text in (card.make_section(damaged), damaged.brief()):
            assert text.count("off by a factor of 4") == 1
            assert "the worst as above" in text

    @pytest.mark.parametrize(
        ("path", "shown"),
        [
            ("../llm/smol", "smol"),
            ("./a/b", "b"),
            ("~/a/b", "b"),
            ("/a/b/", "b"),
            ("org/a", "org/a"),
            ("hf://a/b",) * 2,
        ],
    )
    def test_local_paths_are_not_published(self, path, shown):
        assert shown == markdown.shorten_path(path)

    def test_mentions_issues_and_links_are_defused(self):
        prose = markdown.format_prose("@everyone #1 https://evil.example www.evil.example a@b.example")

        for mention in ("@e", "#1", "://", "www.", "@b"):
            assert mention not in prose

    def test_gates_show_five_digits_or_as_many_as_decide(self, report):
        gate = report.gates[0]

        assert f"{gate.margin:.5g}" in render(report, "html")
        assert ("31.545", "29.999999", "30.000001") == (
            format_decisive(31.545435637647685),
            format_decisive(29.999999, 30),
            format_decisive(30.000001, 30),
        )


class TestUpdating:
    def update(self, text):
        return markdown.replace_section(text, card.make_section(flawless()), "README.md")

    def test_only_text_between_the_comments_changes(self):
        made = self.update(f"# Model\n\n{markdown.BEGIN}\nold\n{markdown.END}\nafter\n")

        assert made == f"# Model\n\n{card.make_section(flawless())}after\n"

    def test_updating_again_changes_nothing(self):
        once = self.update(f"{markdown.BEGIN}\n{markdown.END}\n")

        assert once == self.update(once)

    def test_section_with_hostile_names_can_be_updated_again(self, evil):
        text = markdown.replace_section(f"{markdown.BEGIN}\n{markdown.END}\n", card.make_section(evil), "README.md")

        assert card.make_section(flawless()) == self.update(text)

    def test_line_endings_byte_order_mark_and_missing_last_newline_stay(self):
        made = self.update(f"\ufeff{markdown.BEGIN}\r\n{markdown.END}")

        assert made.startswith(f"\ufeff{markdown.BEGIN}\r\n")
        assert made.endswith(markdown.END)
        assert made.count("\n") == made.count("\r\n")

    @pytest.mark.parametrize(
        "marks",
        [
            [],
            [markdown.BEGIN],
            [markdown.END],
            [markdown.END, markdown.BEGIN],
            [markdown.BEGIN, markdown.BEGIN, markdown.END],
            [markdown.BEGIN, markdown.END, markdown.END, markdown.BEGIN],
        ],
    )
    def test_document_needs_comments_in_pairs(self, marks):
        with pytest.raises(UsageError, match=r"README\.md: .*quanterr:begin"):
            self.update("\n".join(["# Model", *marks, "after"]))

    @pytest.mark.parametrize(
        ("text", "before"),
        [
            ("", ""),
            ("# Model\n", "# Model\n\n"),
            ("# Model", "# Model\n\n"),
            ("\ufeff# M\r\nx\r\n", "\ufeff# M\r\nx\r\n\r\n"),
        ],
    )
    def test_missing_comments_are_appended_on_request(self, text, before):
        once = markdown.replace_section(text, card.make_section(flawless()), "README.md", append=True)

        assert once.startswith(before + markdown.BEGIN)
        assert once == markdown.replace_section(once, card.make_section(flawless()), "README.md", append=True)
        assert ("\r\n" in text) == (once.count("\r\n") == once.count("\n"))

    def test_appending_does_not_repair_broken_comments(self):
        with pytest.raises(UsageError, match=r"README\.md: needs .*quanterr:begin"):
            markdown.replace_section(f"{markdown.BEGIN}\n", card.make_section(flawless()), "README.md", append=True)

    def test_comments_within_a_line_are_text(self):
        with pytest.raises(UsageError, match="no comments mark the place of the report"):
            self.update(f"put {markdown.BEGIN} and {markdown.END} here")


# JUnit


class TestJunit:
    def suites(self, report):
        root = ElementTree.fromstring(render(report, "junit"))
        return root, {suite.get("name"): suite for suite in root}

    def test_uncompared_tensor_is_a_junit_error_and_a_failed_gate_a_failure(self, report):
        root, suites = self.suites(report)
        errors = [case.get("name") for case in suites["comparison"] if case.find("error") is not None]
        failures = [case.get("name") for case in suites["gates"] if case.find("failure") is not None]

        assert "quanterr: inconclusive" == root.get("name")
        assert "model.layers.1.mlp.down_proj.weight" in errors
        assert ["snr"] == failures

    def test_counts_equal_the_cases(self, report, evil):
        for x in (report, evil, flawless()):
            root, suites = self.suites(x)
            for counted, element in (("tests", None), ("errors", "error"), ("failures", "failure")):
                cases = [s.findall("testcase" if element is None else f"testcase/{element}") for s in suites.values()]

                assert list(map(len, cases)) == [int(suite.get(counted)) for suite in suites.values()]
                assert int(root.get(counted)) == sum(map(len, cases))

    def test_faultless_report_passes_a_single_test(self):
        root, _ = self.suites(flawless())

        assert ("1", "0", "0") == (root.get("tests"), root.get("errors"), root.get("failures"))

    @pytest.mark.parametrize(("verdict", "attribute"), [("inconclusive", "errors"), ("fail", "failures")])
    def test_bad_verdict_is_never_hidden_in_junit(self, verdict, attribute):
        root, _ = self.suites(replace(flawless(), verdict=verdict, reasons=[], gates=[]))

        assert "1" == root.get(attribute)

    def test_warning_fails_no_junit_test(self, report):
        spoilt = msgspec.json.decode(report.to_json(), type=Report)
        spoilt.gates[0].severity = "warn"
        _, suites = self.suites(spoilt)

        assert "0" == suites["gates"].get("failures")
        assert "does not hold, a warning" in suites["gates"][0].find("system-err").text

    def test_test_of_a_gate_keeps_its_name_when_the_limit_changes(self, report):
        (gate,) = report.gates[:1]
        rules = ["snr_db >= 31", "snr_db >= 10", "share(snr_db >= 30) >= 0.9", "global(nmse) <= 1e-3"]
        gates = [replace(gate, id=text, require=text) for text in rules]
        _, suites = self.suites(replace(report, gates=gates))

        names = [case.get("name") for case in suites["gates"]]
        assert ["snr_db", "snr_db (2)", "share(snr_db >= 30)", "global(nmse)"] == names

    def test_thousands_of_problems_are_cut_and_counted(self, report):
        lost = [replace(report.not_compared[0], layer_name=f"layers.{n}") for n in range(3000)]
        _, suites = self.suites(replace(report, not_compared=lost))

        assert "and 2,000 more tensors were not compared" == suites["comparison"][-1].get("name")

    def test_junit_holds_only_valid_xml_characters(self):
        whole = "".join(map(chr, range(sys.maxunicode + 1)))
        element = ElementTree.Element("x", a=display(whole, len(whole) * 10))

        ElementTree.fromstring(ElementTree.tostring(element, encoding="unicode"))

    def test_hostile_names_stay_text_in_junit(self, evil):
        _, suites = self.suites(evil)
        names = [case.get("name") for case in suites["comparison"]]

        assert {display(name) for name in HOSTILE_NAMES} <= set(names)
        assert {"testcase"} == {element.tag for suite in suites.values() for element in suite}
        assert items.MAX_CASES > len(names)


def test_terminal_shows_hostile_names_as_text(evil):
    file = make_snapshots.Terminal()
    show(evil.view(30), make_console(file, "never"), verbose=True)

    assert not [c for c in file.getvalue() if not c.isprintable() and c != "\n"]


def test_headings_are_folded_before_a_candidate_is_dropped(monkeypatch):
    names = ["q4-with-imatrix", "q5_k_medium_x", "int8-rowwise-v2", "fp8_tensorwise", "nvfp4-mixed-1", "other format 2"]
    columns = [Column(name, n) for n, name in enumerate(names)]
    file = io.StringIO()
    monkeypatch.setenv("COLUMNS", "100")
    print_table(Table("", "layer", columns, [["x" * 24, *("30.25",) * 6]]), make_console(file, "never"))

    assert "too narrow" not in file.getvalue()
    headings = [line.split("|")[2].strip() for line in file.getvalue().splitlines() if "|" in line]
    assert ["q4-", "with-", "imatrix", "30.25"] == headings


NOT_A_NUMBER = [
    struct.unpack("<d", bits)[0] for bits in (b"\1" + b"\0" * 5 + b"\xf0\x7f", b"\1" + b"\0" * 5 + b"\xf8\xff")
]


@pytest.mark.parametrize("number", [nan, inf, -inf, *NOT_A_NUMBER])
@pytest.mark.parametrize(
    "place", [list, lambda n: {"é": (n,)}, lambda n: Finding("", "info", None, "", None, {"n": n})]
)
def test_number_missing_in_json_is_refused_anywhere(number, place):
    with pytest.raises(ValueError, match="is not JSON"):
        dumps_each([0.5, place([number])], ",\n")


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, 2**70, None, True, "é", "\ud800", "a\n\x7f"])
def test_values_are_encoded_the_same_together_and_separately(value):
    assert dumps_each([value, [value], 0.1], ",\n ") == ",\n ".join(map(dumps, [value, [value], 0.1]))
    assert value == json.loads(dumps(value))
