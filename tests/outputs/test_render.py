"""``quanterr render`` writes other outputs of a stored report, as users call it."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace
from support import sample_documents
from support.forked import call, call_anew
from support.sample_reports import hostile, report_of, tiny
from support.stored import pair

from quanterr.errors import Status
from quanterr.outputs import OUTPUTS

pytestmark = pytest.mark.session

MARKS = "<!-- quanterr:begin -->\n<!-- quanterr:end -->\n"


@pytest.fixture(scope="module")
def report_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("render") / "report.json"
    path.write_text(report_of(tiny()).to_json())
    return path


class TestOutputs:
    @pytest.mark.parametrize("name", [output.name for output in OUTPUTS])
    def test_to_writes_to_stdout_and_the_verdict_to_stderr(self, report_path, name):
        done = call("render", report_path, "--to", name)

        assert Status.OK == done.returncode
        assert "inconclusive" in done.stdout
        assert done.stderr.startswith("quanterr: inconclusive: 6 layers, ")

    def test_quiet_is_accepted(self, report_path, tmp_path):
        assert Status.OK == call("render", report_path, "-q", "-o", tmp_path / "report.csv").returncode

    def test_page_proposes_the_same_command_as_the_run(self, tmp_path):
        plan = sample_documents.plan()
        run = replace(plan.run, command=["quanterr", "plan", "original.safetensors"])
        replace(plan, run=run).save(tmp_path / "plan.json")
        plan.save(tmp_path / "library.json")
        for name in ("plan", "library"):
            assert Status.OK == call("render", tmp_path / f"{name}.json", "-o", tmp_path / f"{name}.html").returncode

        proposed = "quanterr plan original.safetensors --export llmcompressor"
        assert proposed in (tmp_path / "plan.html").read_text()
        assert "Next command" not in (tmp_path / "library.html").read_text()

    def test_suffixes_choose_the_outputs(self, report_path, tmp_path):
        paths = [tmp_path / f"report{output.suffix}" for output in OUTPUTS]
        done = call("render", report_path, *(word for path in paths for word in ("-o", path)))

        assert (Status.OK, "") == (done.returncode, done.stdout)
        assert report_path.read_text() == (tmp_path / "report.json").read_text()
        assert "testsuites" == ElementTree.parse(tmp_path / "report.xml").getroot().tag
        assert 1 + 9 == len(list(csv.DictReader((tmp_path / "report.csv").read_text().splitlines())))
        assert all(json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines())

    def test_to_outranks_the_suffix(self, report_path, tmp_path):
        call("render", report_path, "--to", "csv", "-o", tmp_path / "report.txt")

        assert (tmp_path / "report.txt").read_text().startswith("quanterr_verdict,")

    def test_rendered_outputs_equal_those_from_compare(self, tmp_path):
        paths = [tmp_path / f"compared{output.suffix}" for output in OUTPUTS]
        call("compare", *pair(tmp_path), "-q", *(word for path in paths for word in ("-o", path)))

        for output, path in zip(OUTPUTS, paths, strict=True):
            call("render", tmp_path / "compared.json", "-o", tmp_path / f"rendered{output.suffix}")

            assert path.read_bytes() == (tmp_path / f"rendered{output.suffix}").read_bytes()

    def test_section_is_appended_on_request(self, report_path, tmp_path):
        document = tmp_path / "card.md"
        document.write_text("# Model\n")
        refused = call("render", report_path, "--update", document)

        assert Status.USAGE == refused.returncode
        assert "use --append to add it at the end" in refused.stderr
        assert Status.OK == call("render", report_path, "--update", document, "--append").returncode
        assert document.read_text().startswith("# Model\n\n<!-- quanterr:begin -->\n")
        assert Status.USAGE == call("render", report_path, "--append", "-o", tmp_path / "r.html").returncode

    def test_document_is_updated_and_an_output_written_together(self, report_path, tmp_path):
        document = tmp_path / "README.md"
        document.write_text(f"# Model\n{MARKS}more\n")
        done = call("render", report_path, "--update", document, "-o", tmp_path / "report.html")

        assert Status.OK == done.returncode
        assert "**Verdict: inconclusive**" in document.read_text()
        assert (tmp_path / "report.html").exists()

    def test_document_keeps_a_section_for_each_kind(self, report_path, tmp_path):
        sample_documents.evaluation().save(tmp_path / "e.json")
        document = tmp_path / "README.md"
        document.write_text(f"# Model\n{MARKS}more\n")
        for path in (report_path, tmp_path / "e.json", report_path, tmp_path / "e.json"):
            assert Status.OK == call("render", path, "--update", document).returncode
        text = document.read_text()

        assert 2 == text.count("<!-- quanterr:begin -->") == text.count("<!-- quanterr:end -->")
        assert 1 == text.count("\n## Quality\n")
        assert text.endswith("<!-- quanterr:end -->\nmore\n")

    def test_ranking_is_rendered_with_an_evaluation_as_a_picture(self, tmp_path):
        document, ranked = sample_documents.evaluation(), sample_documents.ranking()
        of = {candidate.name: candidate for candidate in ranked.candidates}
        evaluated = [
            replace(candidate, path=of["fp8"].path, bytes=of["fp8"].checkpoint_bytes)
            for candidate in document.candidates[:1]
        ]
        replace(document, candidates=evaluated, original_bytes=ranked.original_bytes).save(tmp_path / "e.json")
        ranked.save(tmp_path / "r.json")
        words = ("--evaluation", tmp_path / "e.json", "-o", tmp_path / "r.svg", "-o", tmp_path / "r.md")
        done = call("render", tmp_path / "r.json", *words)

        assert Status.OK == done.returncode, done.stderr
        assert "KLD [nat] over size" in (tmp_path / "r.svg").read_text()
        assert "0.01250 ± 0.00060" in (tmp_path / "r.md").read_text()

    def test_png_is_drawn_by_matplotlib(self, tmp_path):
        pytest.importorskip("matplotlib", reason='pip install "quanterr[plot]"')
        sample_documents.ranking().save(tmp_path / "r.json")
        done = call("render", tmp_path / "r.json", "-o", tmp_path / "r.png")

        assert Status.OK == done.returncode, done.stderr
        assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG\r\n")

    @pytest.mark.slow
    def test_hostile_report_can_be_rendered_in_a_poor_locale(self, tmp_path):
        path = tmp_path / "report.json"
        path.write_text(re.sub(r"\\ud[89a-f]..", "?", hostile().to_json()))  # a lone surrogate cannot be read
        poor = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

        for output in OUTPUTS:
            done = call_anew("render", path, "--to", output.name, env=poor)

            assert (Status.OK, True) == (done.returncode, bool(done.stdout)), done.stderr
            assert "\x1b" not in done.stderr


class TestErrors:
    @pytest.mark.parametrize(
        ("words", "expected_message"),
        [
            ((), "nothing to write"),
            (("--to", "pdf"), "'pdf' is not one of 'json', 'jsonl', 'csv', 'html', 'md', 'junit', 'svg', 'png'"),
            (("-o", "report.pdf"), "unknown suffix"),
            (("--to", "md", "-o", "a", "-o", "b"), "--to is for one output"),
        ],
    )
    def test_wrong_usage_exits_with_2(self, report_path, words, expected_message):
        done = call("render", report_path, *words)

        assert Status.USAGE == done.returncode
        assert expected_message in done.stderr

    def test_report_itself_is_never_replaced(self, report_path):
        before = report_path.read_text()

        assert Status.USAGE == call("render", report_path, "-o", report_path).returncode
        assert before == report_path.read_text()

    @pytest.mark.parametrize(
        "text",
        [
            "# Model\n",
            "<!-- quanterr:end -->\n<!-- quanterr:begin -->\n",
            "<!-- quanterr:begin -->\n" * 2 + "<!-- quanterr:end -->\n" * 2,
        ],
    )
    def test_document_without_a_pair_of_comments_is_refused(self, report_path, tmp_path, text):
        document = tmp_path / "README.md"
        document.write_text(text)
        done = call("render", report_path, "--update", document)

        assert Status.USAGE == done.returncode
        assert "<!-- quanterr:begin -->" in done.stderr
        assert text == document.read_text()

    @pytest.mark.parametrize(
        ("spoil", "expected_message"),
        [
            (lambda text: re.sub(r'("schema_version": )"1\.\d+"', r'\1"2.0"', text), "report schema 2.0"),
            (lambda text: text[: len(text) // 2], "truncated"),
            (lambda text: text.replace('"snr_db":3', '"snr_db":NaN,"x":3', 1), "NaN"),
            (lambda text: text.replace('"verdict":', '"verdict": "pass", "verdict":', 1), "duplicate key"),
            (lambda text: text.replace('"total_layers":6', '"total_layers":5', 1), "was edited"),
            (lambda text: text.replace('"verdict": "inconclusive"', '"verdict": "pass"', 1), "its verdict is pass"),
            (lambda text: "{}", "not a report"),
            (lambda text: "", "empty file"),
        ],
    )
    def test_damaged_report_exits_with_3_and_writes_no_output(self, report_path, tmp_path, spoil, expected_message):
        path = tmp_path / "spoilt.json"
        path.write_text(spoil(report_path.read_text()))
        done = call("render", path, "-o", tmp_path / "report.html")

        assert Status.UNREADABLE == done.returncode
        assert expected_message in done.stderr
        assert not (tmp_path / "report.html").exists()

    def test_missing_report_exits_with_3(self, tmp_path):
        assert Status.UNREADABLE == call("render", tmp_path / "none.json", "--to", "md").returncode

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
    def test_full_disk_exits_with_5(self, report_path):
        assert Status.ENVIRONMENT == call("render", report_path, "--to", "html", "-o", "/dev/full").returncode

    def test_closed_pipe_ends_quietly(self, report_path):
        command = f"{sys.executable} -m quanterr render {report_path} --to html | head -c 10; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)

        assert done.returncode in (Status.OK, Status.BROKEN_PIPE)
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("document_kind", sample_documents.KINDS_WITH_SAMPLES)
def test_every_document_can_be_rendered(document_kind, tmp_path):
    document = getattr(sample_documents, document_kind)()
    document.save(tmp_path / "x.json")
    suffixes = ("json", "jsonl", "csv", "html", "md", "xml")
    done = call("render", tmp_path / "x.json", *(word for s in suffixes for word in ("-o", tmp_path / f"y.{s}")))

    assert (0, document.brief() + "\n") == (done.returncode, done.stderr)
    for suffix in suffixes:
        document.save(tmp_path / f"z.{suffix}")
        assert (tmp_path / f"z.{suffix}").read_bytes() == (tmp_path / f"y.{suffix}").read_bytes()
    call("render", tmp_path / "x.json", "--update", tmp_path / "y.md")
    made = (tmp_path / "y.md").read_text()
    assert made.endswith((tmp_path / "z.md").read_text())
    assert made.startswith("---\n") == (document_kind == "evaluation")


def test_unsupported_document_kind_is_named(tmp_path):
    (tmp_path / "d.json").write_text('{"schema": "quanterr.diff", "schema_version": "1.1"}')
    done = call("render", tmp_path / "d.json", "-o", tmp_path / "x.html")

    assert Status.UNREADABLE == done.returncode
    assert "d.json: is a quanterr.diff, which is not read again; give one of quanterr.report, " in done.stderr
