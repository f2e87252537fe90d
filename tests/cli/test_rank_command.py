"""The rank command as its users call it."""

import json

import pytest
import torch
from support.forked import call, in_terminal
from support.making import legacy, numbers, quantized_fp8, quantized_int8, store

from quanterr.errors import Status

pytestmark = pytest.mark.session

NAME = "model.layers.{}.mlp.up_proj.weight"


def original():
    return {NAME.format(n): numbers(32, 64, seed=n) for n in range(3)}


def store_by(recipe):
    tensors = {}
    for name, weight in original().items():
        tensors[name], tensors[f"{name}_scale"] = recipe(weight)
    return tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An original, an FP8 and an INT8 candidate, and one that lacks a layer."""
    path = tmp_path_factory.mktemp("rank")
    store(path / "x.safetensors", original())
    store(path / "fp8.safetensors", store_by(quantized_fp8))
    store(path / "int8.safetensors", store_by(quantized_int8))
    less = store_by(quantized_fp8)
    del less[NAME.format(1)], less[NAME.format(1) + "_scale"]
    store(path / "less.safetensors", less)
    return path


def rank(folder, *words, **more):
    """Run rank on files of the folder, given by their stems; other words are passed unchanged."""
    words = [f"{word}.safetensors" if word in ("fp8", "int8", "less", "no-such") else word for word in words]
    return call("rank", "x.safetensors", *words, cwd=folder, **more)


@pytest.fixture(scope="module")
def table(folder):
    return rank(folder, "-v", "fp8", "less", "int8")


class TestTable:
    def test_answer_names_unranked_candidates_once(self, table):
        lines = table.stdout.splitlines()

        assert Status.INCONCLUSIVE == table.returncode
        assert "ranked: 2 of 3 candidates" in lines[0]
        assert 1 == sum(line.startswith("less: inconclusive; 1 tensor only in the original: ") for line in lines)

    def test_table_ranks_the_others_and_gives_no_numbers_for_the_unranked(self, table):
        rows = [line.split("|") for line in table.stdout.splitlines() if line.startswith("|")]
        cells = {row[1].strip(): [cell.strip() for cell in row[2:]] for row in rows[:4]}

        assert ["candidate", "int8", "fp8", "less"] == list(cells)
        assert ["1", "2", "inconclusive"] == [cells[name][0] for name in ("int8", "fp8", "less")]
        assert "-" == cells["less"][cells["candidate"].index("SNR dB")]

    def test_answer_comes_after_the_tables(self, table):
        lines = table.stdout.splitlines()
        answer = next(n for n, line in enumerate(lines) if line.startswith("INCONCLUSIVE (exit 4): "))

        assert max(n for n, line in enumerate(lines) if line.startswith("+")) < answer

    def test_answer_alone_is_the_whole_output(self, folder):
        lines = rank(folder, "fp8", "less", "int8").stdout.splitlines()

        assert lines[0].startswith("INCONCLUSIVE (exit 4): int8 is best by its weights: ")
        assert ["int8", "fp8", "less"] == [line.split()[1] for line in lines if line.startswith("| ")][1:]
        assert len(lines) <= 12

    def test_table_in_a_pipe_is_ascii(self, table):
        assert table.stdout.isascii()
        assert "" == table.stderr

    @pytest.mark.parametrize("columns", ["60", "80"])
    def test_table_is_narrow_enough_and_truncates_nothing(self, folder, tmp_path, columns):
        name = "a-candidate-with-a-rather-long-name-for-such-a-terminal"
        store(tmp_path / f"{name}.safetensors", store_by(quantized_fp8))
        out = rank(folder, "-v", tmp_path / f"{name}.safetensors", "int8", env={"COLUMNS": columns}).stdout
        tables = [line for line in out.splitlines() if line.startswith(("|", "+"))]

        assert "…" not in out
        assert max(map(len, tables)) <= int(columns)
        assert "SNR" in out

    def test_table_in_a_terminal_is_drawn(self, folder):
        words = (folder / f"{name}.safetensors" for name in ("x", "fp8", "int8"))

        assert "─" in in_terminal("rank", "-v", *words)

    def test_answer_names_the_candidate_that_may_be_the_original(self, folder):
        out = call("rank", folder / "fp8.safetensors", folder / "x.safetensors", folder / "int8.safetensors").stdout

        assert "\nx: the original stores " in out
        assert "quantized, the quantized checkpoint none: are the arguments swapped?" in out

    def test_table_shows_as_many_layers_as_asked_for(self, folder):
        assert "2 layers that differ most, of 3 layers" in rank(folder, "fp8", "int8", "--top-layers", "2").stdout
        assert "of 3 layers" not in rank(folder, "fp8", "int8", "--top-layers", "0").stdout

    def test_table_shows_noise_for_zeros_as_undefined_and_not_as_identical(self, folder, tmp_path):
        zeros = original() | {NAME.format(0): torch.zeros(32, 64)}
        for name, weight in (("x", 0), ("good", 0), ("bad", 1)):
            store(tmp_path / f"{name}.safetensors", zeros | {NAME.format(0): torch.full((32, 64), float(weight))})
        lines = rank(tmp_path, "-v", "good.safetensors", "bad.safetensors").stdout.splitlines()
        (row,) = [line.split() for line in lines if line.startswith(f"| {NAME.format(0)}")]

        assert ["good", "identical", "undefined"] == [word for word in row if word != "|"][1:]

    def test_table_escapes_hostile_names(self, tmp_path):
        weight = {"a\x1b[31m\u202e.weight": numbers(8, 64)}
        x = store(tmp_path / "x.safetensors", weight)
        paths = [tmp_path / f"{n}\x1b[31m[bold]\n.safetensors" for n in range(2)]
        for n, path in enumerate(paths):
            store(path, {name: tensor * (1.01 + n) for name, tensor in weight.items()})
        done = call("rank", x, *paths, "--allow-partial")
        quiet = call("rank", x, *paths, "-q", "--allow-partial")

        assert "\x1b" not in done.stdout + done.stderr + quiet.stderr
        assert "\u202e" not in done.stdout
        assert "0\\x1b[31m[bold]\\x0a" in done.stdout
        assert "0\\x1b[31m[bold]\\x0a" in quiet.stderr


class TestOutputs:
    def test_stdout_gets_nothing_but_json(self, folder):
        done = rank(folder, "fp8", "int8", "--json")
        document = json.loads(done.stdout, parse_constant=pytest.fail)

        assert Status.OK == done.returncode
        assert ["int8", "fp8"] == [candidate["name"] for candidate in document["candidates"]]
        assert ["int8"] == document["front"]  # both have the same size
        assert "quanterr.ranking" == document["schema"]
        assert "" == done.stderr

    def test_dash_prints_json_on_stdout_and_the_table_on_stderr(self, folder):
        done = rank(folder, "fp8", "int8", "-o", "-")

        assert "pass" == json.loads(done.stdout)["verdict"]
        assert "COMPARED (exit 0): " in done.stderr

    def test_json_requested_twice_is_one_document(self, folder):
        assert "pass" == json.loads(rank(folder, "fp8", "int8", "--json", "-o", "-").stdout)["verdict"]

    def test_output_file_may_be_written_again(self, folder):
        for _ in range(2):
            assert Status.OK == rank(folder, "fp8", "int8", "-q", "-o", folder / "ranking.json").returncode

        assert 3 == len(json.loads((folder / "ranking.json").read_text())["layers"])

    def test_quiet_prints_the_result_on_stderr_only(self, folder):
        done = rank(folder, "less", "fp8", "int8", "-q")
        first, last = done.stderr.splitlines()

        assert "" == done.stdout
        assert first.startswith("quanterr: not ranked: less: inconclusive; ")
        assert last.startswith("quanterr: inconclusive: Pareto-optimal in size and error: ")

    def test_ranking_is_not_written_into_a_candidate_folder(self, folder, tmp_path):
        recipe = store(tmp_path / "recipe", store_by(quantized_int8), config={})

        assert Status.USAGE == rank(folder, "fp8", recipe, "-q", "-o", recipe / "ranking.json").returncode

    def test_candidate_is_never_overwritten(self, folder):
        done = rank(folder, "fp8", "int8", "-o", folder / "int8.safetensors")

        assert Status.USAGE == done.returncode


class TestGates:
    def test_gates_judge_each_candidate_and_failing_ones_are_still_ranked(self, folder):
        done = rank(folder, "fp8", "int8", "--require", "snr_db >= 35", "--json")
        document = json.loads(done.stdout)

        assert Status.GATE_FAILED == done.returncode
        assert ("fail", ["int8", "fp8"]) == (document["verdict"], [c["name"] for c in document["candidates"]])
        assert ["pass", "fail"] == [c["verdict"] for c in document["candidates"]]
        assert [1, 2] == [c["rank"] for c in document["candidates"]]
        assert ["pass", "fail"] == [c["gates"][0]["status"] for c in document["candidates"]]
        assert document["reasons"][0].startswith("fp8: gate snr_db >= 35 does not hold: 3 of 3 layers")
        assert ["int8:", "fp8:"] == [line for line in done.stderr.splitlines() if line in ("fp8:", "int8:")]

    def test_satisfied_gates_exit_with_0_and_misspelt_gates_cost_no_run(self, folder):
        assert Status.OK == rank(folder, "fp8", "int8", "--require", "snr_db >= 20").returncode
        assert Status.USAGE == rank(folder, "fp8", "int8", "--require", "snr >= 20").returncode

    def test_table_counts_the_satisfied_gates(self, folder):
        done = rank(folder, "-v", "fp8", "int8", "--require", "snr_db >= 35")

        assert "gates held" in done.stdout
        (answer,) = [line for line in done.stdout.splitlines() if line.startswith("FAIL (exit 1): int8 is best by ")]
        assert answer.endswith("; gates do not hold for fp8")

    def test_github_annotations_name_the_candidate(self, folder, tmp_path):
        env = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
        done = rank(folder, "fp8", "int8", "--require", "snr_db >= 35", env=env)
        summary = (tmp_path / "summary.md").read_text()

        assert "::error title=quanterr::fp8: gate snr_db >= 35 does not hold" in done.stderr
        assert "### quanterr `fp8`: fail" in summary
        assert "### quanterr `int8`: pass" in summary


class TestKeepOriginal:
    def test_keep_original_names_the_layer_and_its_gain(self, folder):
        done = rank(folder, "-v", "fp8", "int8", "--keep-original", "2100")

        assert "fp8 with 1 layer kept in BF16: " in done.stdout
        assert "; 1 layer of int8 kept in BF16 gives " in done.stdout

    def test_invalid_budget_is_wrong_usage(self, folder):
        done = rank(folder, "fp8", "int8", "--keep-original", "much")

        assert Status.USAGE == done.returncode
        assert "quanterr: --keep-original much: give bytes, such as 500MiB, or a gain, such as 3dB\n" == done.stderr


class TestImportance:
    def test_table_adds_the_weighted_snr(self, folder, tmp_path):
        path = tmp_path / "i.dat"
        path.write_bytes(legacy({f"blk.{n}.ffn_up.weight": [1.0] * 64 for n in range(3)}))
        document = json.loads(rank(folder, "-v", "fp8", "int8", "--importance", path, "--json").stdout)

        assert all(abs(c["weighted_snr_db"] - c["snr_db"]) < 1e-6 for c in document["candidates"])
        assert "weighted SNR dB" in rank(folder, "-v", "fp8", "int8", "--importance", path).stdout


@pytest.fixture(scope="module")
def files(folder, tmp_path_factory):
    to = tmp_path_factory.mktemp("out")
    suffixes = ("json", "jsonl", "csv", "html", "md", "xml")
    words = [word for suffix in suffixes for word in ("-o", to / f"r.{suffix}")]
    done = rank(folder, "fp8", "less", "int8", "--keep-original", "2100", *words)
    assert Status.INCONCLUSIVE == done.returncode
    return {suffix: (to / f"r.{suffix}").read_text() for suffix in suffixes}


class TestEveryOutput:
    def test_every_output_names_verdict_best_and_unranked_candidates(self, files):
        for suffix, text in files.items():
            assert "inconclusive" in text, suffix
            assert "only in the original" in text, suffix
            assert "int8" in text, suffix

    def test_csv_has_a_line_per_layer_and_candidate(self, files):
        import csv

        rows = list(csv.DictReader(files["csv"].splitlines()))

        assert {"inconclusive"} == {row["quanterr_verdict"] for row in rows}
        assert 1 + 3 + 3 * 2 == len(rows)
        assert {"int8"} == {row["best"] for row in rows if row["list"] == "layers"}

    def test_json_follows_its_schema(self, files):
        import jsonschema

        jsonschema.validate(json.loads(files["json"]), json.loads(call("schema", "ranking").stdout))

    def test_jsonl_starts_with_the_number_of_lines(self, files):
        first, *layers = map(json.loads, files["jsonl"].splitlines())

        assert ("ranking", "quanterr.ranking", 3) == (first["record"], first["schema"], first["records"]["layer"])
        assert ["layer"] * 3 == [layer["record"] for layer in layers]

    def test_junit_has_a_suite_for_each_candidate(self, files):
        from xml.etree import ElementTree

        root = ElementTree.fromstring(files["xml"])

        assert ["int8", "fp8", "less"] == [suite.get("name") for suite in root]
        assert "1" == root.get("errors")

    def test_markdown_is_a_replaceable_section(self, files):
        assert files["md"].startswith("<!-- quanterr:begin -->\n## Quantized candidates")
        assert files["md"].endswith("<!-- quanterr:end -->\n")

    def test_foreign_document_is_not_replaced(self, folder, tmp_path):
        """Every output recognizes its own kind and leaves foreign documents alone."""
        (tmp_path / "r.md").write_text("mine")

        assert Status.USAGE == rank(folder, "fp8", "int8", "-o", tmp_path / "r.md").returncode


class TestStatus:
    def test_ranking_exits_with_0_if_all_are_compared_or_partial_is_allowed(self, folder):
        assert Status.OK == rank(folder, "fp8", "int8", "-q").returncode
        assert Status.OK == rank(folder, "fp8", "less", "-q", "--allow-partial").returncode
        assert Status.INCONCLUSIVE == rank(folder, "fp8", "less", "-q").returncode

    def test_allowed_partial_candidate_is_still_not_ranked(self, folder):
        document = json.loads(rank(folder, "fp8", "less", "--json", "--allow-partial").stdout)

        assert ["fp8"] == [c["name"] for c in document["candidates"] if c["rank"]]
        assert "inconclusive" == document["verdict"]

    def test_nan_exits_with_4(self, folder, tmp_path):
        spoilt = store_by(quantized_fp8)
        spoilt[NAME.format(0)].view(torch.uint8)[0, 0] = 0x7F
        done = rank(folder, "fp8", store(tmp_path / "nan.safetensors", spoilt))

        assert Status.INCONCLUSIVE == done.returncode
        assert "\nnan: inconclusive; " in done.stdout

    @pytest.mark.parametrize(
        "words", [("fp8",), ("fp8", "fp8"), ("fp8", "int8", "-l", "atn"), ("fp8", "int8", "-o", "/tmp/r.txt"), ()]
    )
    def test_wrong_usage_exits_with_2(self, folder, words):
        assert Status.USAGE == rank(folder, *words).returncode

    def test_unreadable_candidate_is_named_and_exits_with_3(self, folder):
        done = rank(folder, "fp8", "no-such")

        assert Status.UNREADABLE == done.returncode
        assert "no-such.safetensors" in done.stderr

    def test_damaged_candidate_among_others_is_a_row_and_exits_with_3(self, folder, tmp_path):
        damaged = tmp_path / "damaged.safetensors"
        damaged.write_bytes((folder / "int8.safetensors").read_bytes()[:-100])
        done = rank(folder, "fp8", "int8", damaged, "-o", tmp_path / "r.json", "--allow-partial")
        rows = json.loads((tmp_path / "r.json").read_text())["candidates"]

        assert Status.UNREADABLE == done.returncode
        assert [(1, False), (2, False), (None, True)] == [(row["rank"], row["unreadable"]) for row in rows]
        assert "cannot be read: " in rows[-1]["not_ranked"]
        assert any("damaged" in line and "unreadable" in line for line in done.stdout.splitlines())

    def test_damaged_candidate_beside_one_other_ends_the_run(self, folder, tmp_path):
        (tmp_path / "damaged.safetensors").write_bytes(b"\xff" * 64)
        done = rank(folder, "fp8", tmp_path / "damaged.safetensors")

        assert (Status.UNREADABLE, "") == (done.returncode, done.stdout)
        assert "damaged.safetensors" in done.stderr

    def test_selection_applies_to_all_candidates(self, folder):
        document = json.loads(rank(folder, "fp8", "less", "-l", "!layers.1", "--json").stdout)

        assert ("pass", 2, ["!layers.1"]) == (
            document["verdict"],
            len(document["layers"]),
            document["selection"]["patterns"],
        )
