"""The evaluate and ppl commands as users call them, and the outputs of an evaluation."""

import base64
import csv
import json
import math
import re
import shutil
import subprocess
import sys
import zlib
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace
from safetensors.torch import save_file
from support.forked import call
from support.making import quantized_fp8
from support.small_models import ids, load_tensors, quantized_by, save_model

import quanterr
from quanterr.documents.evaluation.logprobs import compute_perplexity, compute_ratio, read_logprobs
from quanterr.errors import ReportError, Status, UsageError

pytestmark = pytest.mark.session

pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')
SUFFIXES = ("json", "jsonl", "csv", "html", "md", "xml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model, its quantized copy and tokens, with the outputs of an evaluation."""
    path = tmp_path_factory.mktemp("evaluate")
    save_model("llama", path / "original")
    written, _ = quantized_by(quantized_fp8, load_tensors(path / "original"))
    (path / "quantized").mkdir()
    save_file(written, path / "quantized/model.safetensors")
    ids(path)
    return path


def evaluate(folder, *words, **more):
    return call("evaluate", "original", *words, "--tokens", "ids.safetensors", "--context", 32, cwd=folder, **more)


@pytest.fixture(scope="module")
def done(folder):
    words = [word for suffix in SUFFIXES for word in ("-o", f"e.{suffix}")]
    return evaluate(folder, "quantized", "--require", "kld_mean <= 1", "-v", *words)


class TestCommand:
    def test_command_shows_numbers_blocks_weights_and_the_answer_last(self, done):
        lines = done.stdout.splitlines()

        assert Status.OK == done.returncode, done.stderr
        assert "model: LlamaForCausalLM in float32: 3 chunks of 32 tokens, 45 predictions scored; PPL " in lines[0]
        assert "Against the original" in done.stdout
        assert "Hidden states, quantized" in done.stdout
        assert "The 10 largest output errors of 16 weights, quantized" in done.stdout
        assert "activations are not quantized" in done.stdout
        assert any(line.startswith("PASS (exit 0): quantized: KLD ") for line in lines)
        assert "wrote e.json, e.jsonl, e.csv, e.html, e.md, e.xml" in lines

    def test_failed_gate_exits_with_1(self, folder):
        done = evaluate(folder, "quantized", "--require", "kld_mean <= 1e-9", "-q")

        assert Status.GATE_FAILED == done.returncode
        assert "" == done.stdout

    def test_json_equals_the_library_result(self, folder):
        document = json.loads(evaluate(folder, "quantized", "--json").stdout)
        same = quanterr.evaluate(
            folder / "original", [folder / "quantized"], tokens=folder / "ids.safetensors", context=32
        )

        assert ("quanterr.evaluation", "1.5") == (document["schema"], document["schema_version"])
        assert json.loads(same.to_json())["candidates"][0]["scores"] == document["candidates"][0]["scores"]

    def test_missing_tokens_and_text_are_wrong_usage(self, folder):
        done = call("evaluate", "original", "quantized", cwd=folder)

        assert Status.USAGE == done.returncode
        assert "give a text with --text FILE or --chat FILE, or token ids" in done.stderr

    def test_unwritable_output_costs_no_run(self, folder, tmp_path):
        for words, status, message in (
            (("--sensitivity-out", "missing/s.json"), Status.ENVIRONMENT, "-out missing/s.json: no such folder"),
            (
                ("--importance-out", "ids.safetensors"),
                Status.USAGE,
                "ids.safetensors: this is an input",
            ),
            (("-o", "original/e.json"), Status.USAGE, "--output-report original/e.json: is in the folder"),
        ):
            refused = evaluate(folder, "quantized", *words)
            assert (status, "") == (refused.returncode, refused.stdout)
            assert message in refused.stderr

    def test_evaluation_without_a_candidate_is_an_error(self, folder):
        with pytest.raises(UsageError, match="no candidate is given"):
            quanterr.evaluate(folder / "original", [], tokens=folder / "ids.safetensors", context=32)

    def test_missing_tensor_exits_with_4_and_partial_is_allowed(self, folder, tmp_path):
        shutil.copytree(folder / "quantized", tmp_path / "less")
        tensors = load_tensors(tmp_path / "less")
        del tensors["model.norm.weight"]
        save_file(tensors, tmp_path / "less/model.safetensors")

        assert Status.INCONCLUSIVE == evaluate(folder, tmp_path / "less", "-q").returncode
        assert Status.OK == evaluate(folder, tmp_path / "less", "-q", "--allow-partial").returncode

    def test_missing_transformers_extra_is_named(self, folder):
        before = "import sys; sys.modules['transformers'] = None"
        done = evaluate(folder, "quantized", before=before)

        assert Status.USAGE == done.returncode
        assert 'quanterr: evaluate needs transformers and greenlet: pip install "quanterr[evaluate]"\n' == done.stderr

    def test_ctrl_c_ends_the_command_without_a_result(self, folder):
        before = (
            "import os, signal\nfrom quanterr.evaluation.running.stream import Stream\nrun = Stream.run\n"
            "def interrupted(*a):\n    os.kill(os.getpid(), signal.SIGTERM)\n    return run(*a)\n"
            "Stream.run = interrupted"
        )
        done = evaluate(folder, "quantized", "--batch", 1, before=before)

        assert (Status.TERMINATED, "") == (done.returncode, done.stdout)
        assert "quanterr: interrupted; stopping (interrupt again to quit at once)" in done.stderr

    def test_help_loads_neither_torch_nor_transformers(self):
        code = (
            "import sys\nfrom quanterr.cli import app\n"
            "for words in (['--help'], ['evaluate', '--help'], ['ppl', '--help']):\n"
            "    app(words, standalone_mode=False)\n"
            "assert not {'torch', 'transformers'} & set(sys.modules)"
        )

        assert 0 == subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode


class TestDiff:
    @pytest.fixture
    def newer(self, folder, done, tmp_path):
        """The same evaluation with half the divergence, a little less agreement, and another error of one weight."""
        document = quanterr.read_document(str(folder / "e.json"))
        candidate = document.candidates[0]
        candidate.scores.kld_mean *= 0.3
        candidate.scores.top1 -= candidate.scores.top1_se / 2
        candidate.weights[0].output_error *= 2
        candidate.weights[1].layer_name = "renamed.weight"
        document.save(tmp_path / "newer.json")
        return tmp_path / "newer.json"

    def test_diff_names_changes_beyond_chance(self, folder, newer):
        output = call("diff", "-v", folder / "e.json", newer)
        first = quanterr.read_document(str(newer)).candidates[0].weights[0]

        assert (Status.OK, "") == (output.returncode, output.stderr)
        assert re.search(r"\n\| KLD +\| +\S+ \| +\S+ \| +-\S+ ± \S+ \| better +\|\n", output.stdout), output.stdout
        assert re.search(r"\n\| same top .* worse, within chance +\|\n", output.stdout), output.stdout
        assert re.search(r"\n\| PPL ratio .* unchanged +\|\n", output.stdout), output.stdout
        assert "\n1 weight with worse output\n" in output.stdout
        assert re.search(rf"\n\| {re.escape(first.layer_name)} .* × 2 \|\n", output.stdout), output.stdout
        assert "\n1 weight new\n" in output.stdout

    def test_diff_is_written_as_json(self, folder, newer, tmp_path):
        output = call("diff", folder / "e.json", newer, "--json", "-o", tmp_path / "d.json")
        document = json.loads(output.stdout)
        metrics = {change["metric"]: change for change in document["candidates"][0]["metrics"]}

        assert document == json.loads((tmp_path / "d.json").read_text())
        assert ("quanterr.evaluation_diff", None) == (document["schema"], document["difference"])
        assert (False, "better") == (metrics["kld_mean"]["chance"], metrics["kld_mean"]["word"])
        assert (True, "worse") == (metrics["top1"]["chance"], metrics["top1"]["word"])
        assert ["renamed.weight"] == document["candidates"][0]["added"]

    def test_diff_with_other_tokens_is_refused_or_forced(self, folder, newer, tmp_path):
        document = quanterr.read_document(str(newer))
        document.tokens.sha256 = "0" * 64
        document.save(tmp_path / "other.json")
        refused = call("diff", folder / "e.json", tmp_path / "other.json")
        forced = call("diff", folder / "e.json", tmp_path / "other.json", "--force", "-q")

        assert (Status.USAGE, Status.OK) == (refused.returncode, forced.returncode)
        assert "another text: only evaluations of the same text" in refused.stderr
        assert forced.stderr.startswith("quanterr: not comparable: another text")
        missing = call("diff", folder / "e.json", "missing.json")
        text = json.dumps({"schema": "quanterr.plan"})
        (tmp_path / "plan.json").write_text(text)
        other = call("diff", folder / "e.json", tmp_path / "plan.json")
        assert (Status.UNREADABLE, True) == (missing.returncode, "missing.json: no such file" in missing.stderr.lower())
        assert Status.USAGE == other.returncode
        assert Status.USAGE == call("diff", folder / "e.json", newer, "-o", tmp_path / "d.xml").returncode


class TestGate:
    def test_gate_judges_a_stored_evaluation(self, folder, done, tmp_path):
        good = call("gate", folder / "e.json", "--require", "top1 >= 0.1", "-o", tmp_path / "judged.json")
        bad = call("gate", folder / "e.json", "--require", "kld_mean <= 1e-9")

        assert (Status.OK, Status.GATE_FAILED) == (good.returncode, bad.returncode)
        assert "verdict: pass" in good.stderr
        assert "FAIL: gate kld_mean <= 1e-9 does not hold: " in bad.stderr
        assert ["top1 >= 0.1"] == [
            g.require for g in quanterr.read_document(str(tmp_path / "judged.json")).candidates[0].gates
        ]

    def test_gate_compares_with_an_earlier_evaluation(self, folder, done, tmp_path):
        document = quanterr.read_document(str(folder / "e.json"))
        document.candidates[0].scores.kld_mean *= 0.8
        better = tmp_path / "better.json"
        document.save(better)

        # A document cannot be its own baseline.
        assert Status.USAGE == call("gate", folder / "e.json", "--baseline", folder / "e.json").returncode
        assert Status.OK == call("gate", better, "--baseline", folder / "e.json").returncode
        worse = call("gate", folder / "e.json", "--baseline", better)
        assert Status.GATE_FAILED == worse.returncode
        assert "FAIL: gate baseline: ratio(kld_mean) <= 1.1 does not hold: 1.25 " in worse.stderr
        delta = call("gate", folder / "e.json", "--baseline", better, "--require", "delta(top1) >= 0")
        assert Status.OK == delta.returncode

    def test_evaluation_with_other_tokens_cannot_be_a_baseline(self, folder, done, tmp_path):
        document = quanterr.read_document(str(folder / "e.json"))
        document.tokens.sha256 = "0" * 64
        other = tmp_path / "other.json"
        document.save(other)
        refused = call("gate", folder / "e.json", "--baseline", other)

        assert Status.USAGE == refused.returncode
        assert "--baseline: another text: only evaluations of the same text" in refused.stderr
        assert Status.USAGE == call("gate", folder / "e.json", "--require", "delta(top1) >= 0").returncode

    def test_rules_from_a_file_have_names_severities_and_reasons(self, folder, done, tmp_path):
        path = tmp_path / "thresholds.toml"
        rules = 'id = "small"\nrequire = "kld_mean <= 1e-9"\nseverity = "warn"\nreason = "as it was"\n'
        path.write_text(f'schema = 1\n[[rule]]\n{rules}[[rule]]\nid = "same"\nrequire = "top1 >= 0.1"\n')
        warned = call("gate", folder / "e.json", "--thresholds", path)
        strict = call("gate", folder / "e.json", "--thresholds", path, "--strict-warnings")

        assert (Status.OK, Status.GATE_FAILED) == (warned.returncode, strict.returncode)
        assert "warn: gate small: kld_mean <= 1e-9 does not hold: " in warned.stderr
        assert "because: as it was" in warned.stderr
        path.write_text(path.read_text().replace("warn", "error"))
        assert Status.GATE_FAILED == evaluate(folder, "quantized", "-q", "--thresholds", path).returncode

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("schema = 1\n", "has no [[rule]]"),
            ('schema = 1\n[[rule]]\nid = "a"\nrequire = "snr_db >= 3"\n', 't.toml:2: rule "a": require: '),
            ('schema = 1\n[[rule]]\nid = "a"\nrequire = "top1 >= 0"\nlayer = []\n', "unknown key layer"),
        ],
    )
    def test_thresholds_file_with_unknown_content_is_refused(self, folder, done, tmp_path, text, message):
        (tmp_path / "t.toml").write_text(text)
        refused = call("gate", folder / "e.json", "--thresholds", tmp_path / "t.toml")

        assert Status.USAGE == refused.returncode
        assert message in refused.stderr

    def test_gate_writes_json_and_keeps_quiet(self, folder, done):
        judged = call("gate", folder / "e.json", "--require", "kld_mean <= 1e-9", "--json", "-q", "--color", "always")

        document = json.loads(judged.stdout)
        assert "verdict: \x1b[1;31mfail\x1b[0m\n" == judged.stderr
        assert ("quanterr.gate", "fail") == (document["schema"], document["verdict"])
        assert ["kld_mean <= 1e-9"] == [gate["require"] for gate in document["candidates"][0]["gates"]]

    def test_partial_evaluation_is_allowed_on_request(self, folder, done, tmp_path):
        document = quanterr.read_document(str(folder / "e.json"))
        document.candidates[0].verdict = "inconclusive"
        replace(document, verdict="inconclusive").save(tmp_path / "partial.json")
        words = ("gate", tmp_path / "partial.json", "--require", "kld_mean <= 1")

        assert Status.INCONCLUSIVE == call(*words).returncode
        assert Status.OK == call(*words, "--allow-partial").returncode

    def test_rules_for_reports_are_refused(self, folder, done):
        for words in ((), ("--thresholds", "fp8"), ("--require", "snr_db >= 30")):
            assert Status.USAGE == call("gate", folder / "e.json", *words).returncode

    def test_edited_evaluation_is_reported(self, folder, done, tmp_path):
        text, rule = (folder / "e.json").read_text(), ("--require", "kld_mean <= 1")
        assert "warning" not in call("gate", folder / "e.json", *rule).stderr
        for name, edited, message in (
            (
                "edited",
                re.sub('"kld_mean":[^,]+', '"kld_mean":1e-9', text),
                "its checksum does not match: it was edited",
            ),
            ("old", re.sub(r'"checksum": "\w+",', "", text), "has no checksum: an earlier version wrote it, or it was"),
        ):
            (tmp_path / f"{name}.json").write_text(edited)
            judged = call("gate", tmp_path / f"{name}.json", *rule)
            assert (Status.OK, True) == (judged.returncode, f"{name}.json: {message}" in judged.stderr), judged.stderr

    def test_damaged_evaluation_is_unreadable(self, folder, done, tmp_path):
        text = (folder / "e.json").read_text()
        for n, damaged in enumerate((text[:-200], text.replace('"kld_mean":', '"kld_mean":"x","y":', 1))):
            path = tmp_path / f"{n}.json"
            path.write_text(damaged)
            assert Status.UNREADABLE == call("gate", path, "--require", "kld_mean <= 1").returncode


class TestMerge:
    def test_merged_page_has_scores_and_output_errors(self, folder, done, tmp_path):
        report, page = tmp_path / "report.json", tmp_path / "page.html"
        call("compare", folder / "original", folder / "quantized", "-o", report, "-q")
        made = call("render", report, "--evaluation", folder / "e.json", "-o", page, "-o", tmp_path / "report.csv")
        text = page.read_text()
        packed = re.search(r'<script type="application/json" id="data">"(.+)"</script>', text)[1]
        data = json.loads(zlib.decompress(base64.b64decode(packed)))
        known = [value for value in data["columns"]["output_error"] if value is not None]

        assert Status.OK == made.returncode, made.stderr
        assert '<details id="scores"' in text
        assert ["output_error"] == data["evaluated"]
        assert 16 == len(known)

    def test_merging_another_pair_or_into_another_output_is_refused(self, folder, done, tmp_path):
        report = tmp_path / "report.json"
        call("compare", folder / "original", folder / "original", "-o", report, "-q")
        other = call("render", report, "--evaluation", folder / "e.json", "-o", tmp_path / "page.html")
        nothing = call("render", report, "--evaluation", folder / "e.json", "-o", tmp_path / "report.csv")

        assert (Status.USAGE, Status.USAGE) == (other.returncode, nothing.returncode)
        assert "--evaluation: not of " in other.stderr
        assert "--evaluation: only a page can include one; give -o report.html" in nothing.stderr
        assert not (tmp_path / "page.html").exists()


def test_schema_accepts_written_evaluations(folder, done):
    import jsonschema

    schema = json.loads(call("schema", "evaluation").stdout)
    document = json.loads((folder / "e.json").read_text())

    jsonschema.validate(document, schema)
    document["candidates"][0]["scores"]["kld_mean"] = "x"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)


class TestOutputs:
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _files(cls, done):
        """Make sure that the outputs exist."""

    def text(self, folder, suffix):
        return (folder / f"e.{suffix}").read_text()

    def test_json_can_be_read_back(self, folder):
        document = quanterr.read_document(str(folder / "e.json"))

        assert document.to_json() == self.text(folder, "json")

    def test_jsonl_starts_with_the_number_of_weights(self, folder):
        first, *weights = map(json.loads, self.text(folder, "jsonl").splitlines())

        assert first["records"]["weight"] == len(weights) == 16
        assert {"quantized"} == {weight["candidate"] for weight in weights}

    def test_csv_has_every_number_with_the_verdict(self, folder):
        rows = list(csv.DictReader(self.text(folder, "csv").splitlines()))

        assert {"pass"} == {row["quanterr_verdict"] for row in rows}
        assert {"evaluation", "candidates", "scores", "positions", "blocks", "weights"} == {row["list"] for row in rows}

    def test_markdown_and_junit_name_verdict_and_gate(self, folder):
        root = ElementTree.fromstring(self.text(folder, "xml"))

        assert "**Verdict: pass**" in self.text(folder, "md")
        assert "| `quantized` |" in self.text(folder, "md")
        assert ("quantized", "2") == (root[0].get("name"), root.get("tests"))

    def test_page_has_the_caveat_and_a_link_to_the_worst(self, folder):
        text = self.text(folder, "html")

        assert text.startswith("<!DOCTYPE html>\n<!-- quanterr.evaluation -->")
        assert "activations are not quantized" in text
        assert 'class="layer"' in text

    def test_notebook_shows_a_line_and_a_table(self, folder):
        document = quanterr.read_document(str(folder / "e.json"))

        assert repr(document).startswith("<quanterr.Evaluation pass: ")
        assert "<th>candidate</th>" in document._repr_html_()
        assert ">KLD</th>" in document._repr_html_()


class TestFindings:
    """Every output shows findings about a candidate and its model."""

    TOLD = "nothing differs from the original; is this the quantized checkpoint?"

    @pytest.fixture(scope="class")
    @classmethod
    def done(cls, folder):
        words = [word for suffix in SUFFIXES for word in ("-o", f"f.{suffix}")]
        return evaluate(folder, "original", *words)

    def test_terminal_shows_the_finding_before_the_answer(self, done):
        assert any(line.startswith(f"warning: {self.TOLD}") for line in done.stdout.splitlines()[:-1])

    @pytest.mark.parametrize("suffix", SUFFIXES)
    def test_each_file_shows_the_finding(self, folder, done, suffix):
        assert Status.OK == done.returncode
        assert self.TOLD in (folder / f"f.{suffix}").read_text()

    def test_csv_has_a_line_for_the_finding(self, folder, done):
        rows = list(csv.DictReader((folder / "f.csv").read_text().splitlines()))

        assert [("original", "identical", self.TOLD)] == [
            (row["candidate"], row["name"], row["reason"]) for row in rows if row["list"] == "findings"
        ]

    def test_finding_makes_gates_inconclusive(self, folder, done):
        assert Status.INCONCLUSIVE == evaluate(folder, "original", "--require", "kld_mean <= 1", "-q").returncode
        assert Status.INCONCLUSIVE == call("gate", "f.json", "--require", "kld_mean <= 1", cwd=folder).returncode
        assert (
            Status.OK == call("gate", "f.json", "--require", "kld_mean <= 1", "--allow-partial", cwd=folder).returncode
        )


class TestPpl:
    FORMS = (
        [-1.0, -2.0],
        {"logprobs": [-1.0, -2.0]},
        {"token_logprobs": [None, -1.0, -2.0]},
        {"choices": [{"logprobs": {"token_logprobs": [None, -1.0, -2.0]}}]},
        {"choices": [{"logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}}]},
    )

    def write(self, path, *lines):
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return str(path)

    def test_every_form_of_log_probabilities_is_read(self, tmp_path):
        assert [[-1.0, -2.0]] * 5 == read_logprobs(self.write(tmp_path / "a.jsonl", *self.FORMS))

    def test_perplexity_is_the_exponential_mean_with_its_error(self, tmp_path):
        perplexity = compute_perplexity("x", [[-1.0, -2.0], [-3.0]])

        assert pytest.approx(math.exp(2)) == perplexity.ppl
        assert pytest.approx(math.exp(2) * math.sqrt(2 / 3 / 2)) == perplexity.ppl_se
        assert (3, 2) == (perplexity.tokens, perplexity.chunks)

    def test_ratio_uses_the_same_tokens(self):
        ratio = compute_ratio([[-1.5, -2.5], [-3.5]], [[-1.0, -2.0], [-3.0]])

        assert pytest.approx((0.5, 0.0, math.exp(0.5))) == tuple(ratio)
        with pytest.raises(UsageError, match="both must be about the same tokens"):
            compute_ratio([[-1.0]], [[-1.0, -2.0]])

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "line 1: not JSON"),
            ('{"a": 1}', "no list of log-probabilities"),
            ("[0.5]", "0.5 is not a natural logarithm"),
            ('["x"]', "is not a log-probability"),
            ("[-1]", "at least 2 are needed"),
            ('{"choices": [{"text": "x"}]}', "ask the server for logprobs"),
        ],
    )
    def test_invalid_log_probabilities_are_an_error(self, tmp_path, line, message):
        (tmp_path / "x.jsonl").write_text(line)
        with pytest.raises(ReportError, match=message):
            read_logprobs(str(tmp_path / "x.jsonl"))

    def test_ppl_command_shows_both_and_the_ratio(self, tmp_path):
        paths = [self.write(tmp_path / f"{n}.jsonl", [-1.0, -2.0 - n]) for n in range(2)]
        done = call("ppl", paths[1], "--baseline", paths[0])
        document = json.loads(call("ppl", paths[1], "--baseline", paths[0], "--json").stdout)

        assert ["PPL 7.3891" in line for line in done.stdout.splitlines()] == [True, False, False]
        assert pytest.approx(0.5) == document["ln_ratio"]
        assert Status.UNREADABLE == call("ppl", tmp_path / "none.jsonl").returncode
