"""The command as its users call it: two tiny real checkpoints, a real process, no mock."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from support.forked import call, in_terminal
from support.stored import original, pair, to_fp8, write

import quanterr
from quanterr.cli import completion
from quanterr.errors import Status, UsageError
from quanterr.kernel import library
from quanterr.outputs.terminal import MIN_WIDTH
from quanterr.planning.exports import CONSUMERS
from quanterr.recipes import list_recipes

pytestmark = pytest.mark.session

FULL = "/dev/full"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return pair(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="module")
def table(checkpoints):
    return call("compare", "-v", *checkpoints)


class TestTable:
    def test_comparison_is_complete(self, table):
        assert (Status.OK, "") == (table.returncode, table.stderr)

    def test_tables_come_before_the_answer(self, table):
        lines = table.stdout.splitlines()
        answer = next(
            n for n, line in enumerate(lines) if line.startswith("COMPARED (exit 0): SNR 31.39 dB; no limits set")
        )

        assert lines[0].startswith("coverage: 3 of 3 original tensors compared (100 % of bytes)")
        assert max(n for n, line in enumerate(lines) if line.startswith("+")) < answer

    def test_answer_without_tables_has_ten_lines_at_most(self, checkpoints):
        lines = call("compare", *checkpoints).stdout.splitlines()

        assert lines[0].startswith("COMPARED (exit 0): SNR 31.39 dB; no limits set")
        assert lines[1].startswith("3 of 3 original tensors compared (100 % of bytes)")
        assert any(line.startswith("fp8_tensor: ") and ", usual 31 to 32 dB" in line for line in lines)
        assert any(line.startswith("worst: ") for line in lines)
        assert len(lines) <= 10

    def test_table_shows_names_levels_and_bars_and_the_shared_prefix_once(self, table):
        row = next(line for line in table.stdout.splitlines() if "q_proj" in line)

        assert "| 0.self_attn.q_proj " in row
        assert "names without model.layers. and .weight" in table.stdout
        assert "#" in row
        assert "fp8_tensor" in row

    def test_pipe_gets_neither_colours_nor_drawn_lines(self, table):
        assert table.stdout.isascii()

    def test_colour_can_be_forced_and_is_switched_off_by_no_color(self, checkpoints):
        assert "\x1b[" in call("compare", *checkpoints, env={"FORCE_COLOR": "1"}).stdout
        assert "\x1b" not in call("compare", *checkpoints, env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).stdout
        assert "\x1b" not in call("compare", *checkpoints, env={"FORCE_COLOR": "0"}).stdout

    @pytest.mark.parametrize("columns", ["1", "40", "60", "80", "abc", "0"])
    def test_narrow_table_drops_columns_and_truncates_nothing(self, checkpoints, columns):
        out = call("compare", "-v", *checkpoints, env={"COLUMNS": columns}).stdout

        assert "…" not in out
        assert "SNR" in out
        if columns.isdecimal() and int(columns):
            tables = [line for line in out.splitlines() if line.startswith(("|", "+"))]
            assert max(map(len, tables)) <= max(int(columns), MIN_WIDTH)
        assert all(line.endswith(("|", "+")) for line in out.splitlines() if line.startswith(("|", "+")))
        assert "| Max |e| " in out

    def test_top_layers_and_sort_by_choose_the_listed_layers(self, checkpoints):
        out = call("compare", *checkpoints, "--top-layers", "1", "--sort-by", "max").stdout

        assert "The worst layer, by max |e|" in out

    def test_quiet_prints_the_verdict_on_stderr_only(self, checkpoints):
        done = call("compare", *checkpoints, "-q")

        assert "" == done.stdout
        assert done.stderr.startswith("quanterr: compared: 2 layers; SNR ")

    def test_single_layer_is_counted_in_the_singular(self, checkpoints):
        assert call("compare", *checkpoints, "-q", "-l", "attn").stderr.startswith("quanterr: compared: 1 layer; ")

    def test_verbose_prints_the_deciding_tensors(self, checkpoints):
        assert "codes F8_E4M3, scale model.layers.0" in call("compare", *checkpoints, "-v").stdout

    def test_terminal_shows_drawn_bars(self, checkpoints):
        out = in_terminal("compare", "-v", *checkpoints)

        assert "█" in out
        assert "\x1b[" in out

    def test_map_is_drawn_only_in_a_terminal(self, tmp_path):
        x = {f"layers.{n}.mlp.weight": torch.randn(8, 8) for n in range(4)}
        words = [write(tmp_path / "x.safetensors", x), write(tmp_path / "y.safetensors", to_fp8(x))]

        assert "SNR by block of layers" in in_terminal("compare", "-v", *words)
        assert "SNR by block" not in in_terminal("compare", "-v", *words, "--no-plot")
        assert "SNR by block" not in in_terminal("compare", "-v", *words, columns=59)
        assert "SNR by block" not in call("compare", "-v", *words).stdout


class TestInputs:
    def test_inputs_may_be_given_as_options(self, checkpoints):
        x, y = checkpoints

        assert Status.OK == call("compare", "-q", "--original", x, "--quantized", y).returncode
        assert Status.OK == call("compare", "-q", y, "--original", x).returncode

    @pytest.mark.parametrize("words", [(), ("one",), ("one", "two", "--original", "three")])
    def test_two_inputs_are_required(self, words):
        assert Status.USAGE == call("compare", *words).returncode

    def test_unselected_layers_are_left_out(self, checkpoints, tmp_path):
        path = tmp_path / "report.json"
        done = call("compare", *checkpoints, "-q", "-l", "attn", "-o", path)
        report = json.loads(path.read_text())

        assert Status.OK == done.returncode
        assert ["model.layers.0.self_attn.q_proj.weight"] == [layer["layer_name"] for layer in report["layers"]]
        assert 2 == report["coverage"]["original"]["filtered_out"]["tensors"]

    def test_misspelt_pattern_is_wrong_usage_with_the_nearest_name(self, checkpoints):
        done = call("compare", *checkpoints, "-l", "atn")

        assert Status.USAGE == done.returncode
        assert "attn" in done.stderr

    @pytest.mark.parametrize("layers", ["mlp,!mlp", "!*"])
    def test_empty_selection_is_wrong_usage(self, checkpoints, layers):
        x, y = checkpoints

        assert Status.USAGE == call("compare", x, y, "-l", layers).returncode
        assert Status.USAGE == call("rank", x, y, x, "-l", layers).returncode
        with pytest.raises(UsageError, match="selects no layer"):
            quanterr.compare(x, y, layers=[layers])

    def test_missing_device_is_an_error(self, checkpoints):
        assert Status.USAGE == call("compare", *checkpoints, "--device", "tpu").returncode
        assert Status.ENVIRONMENT == call("compare", *checkpoints, "--device", "cuda:99").returncode

    @pytest.mark.parametrize("value", ["inf", "nan", "-1"])
    def test_invalid_threshold_is_wrong_usage(self, checkpoints, value):
        assert Status.USAGE == call("compare", *checkpoints, "--outlier-threshold", value).returncode


class TestOutputs:
    def test_dash_prints_json_on_stdout_and_the_table_on_stderr(self, checkpoints):
        done = call("compare", *checkpoints, "-o", "-")

        assert "pass" == json.loads(done.stdout)["verdict"]
        assert "COMPARED (exit 0): " in done.stderr

    def test_last_line_names_the_written_files(self, checkpoints, tmp_path):
        done = call("compare", *checkpoints, "-o", tmp_path / "a.json", "-o", "b.html", cwd=tmp_path)

        assert "\nwrote a.json, b.html\n" in done.stdout

    def test_several_outputs_are_written(self, checkpoints, tmp_path):
        call("compare", *checkpoints, "-q", "-o", tmp_path / "a.json", "-o", tmp_path / "b.json")

        assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()

    def test_only_the_run_section_changes_between_runs(self, checkpoints, tmp_path):
        reports = []
        for name in ("a.json", "b.json"):
            call("compare", *checkpoints, "-q", "-o", tmp_path / name)
            lines = (tmp_path / name).read_text().splitlines()
            reports.append([line for line in lines if not line.startswith('"run"')])

        assert reports[0] == reports[1]

    def test_bad_suffix_is_an_error_before_anything_is_read(self, tmp_path):
        done = call("compare", "no", "such", "-o", tmp_path / "report.docx")

        assert Status.USAGE == done.returncode
        assert "unknown suffix" in done.stderr

    @pytest.mark.parametrize("command", ["compare", "rank"])
    def test_closed_pipe_ends_quietly_and_costs_no_report(self, checkpoints, tmp_path, command):
        copy = [shutil.copy(checkpoints[1], tmp_path / "copy.safetensors")] if command == "rank" else []
        done = call(command, *checkpoints, *copy, "-o", tmp_path / "r.json", redirected={1: ""})

        assert Status.BROKEN_PIPE == done.returncode
        assert "" == done.stderr
        assert (tmp_path / "r.json").stat().st_size > 1000

    @pytest.mark.slow
    # KiB; each limit once ended the command in another way.
    @pytest.mark.parametrize("limit", [100_000, 400_000, 500_000, 600_000])
    def test_too_little_address_space_never_looks_like_a_failed_gate(self, checkpoints, limit):
        words = " ".join(map(str, checkpoints))
        done = subprocess.run(
            ["bash", "-c", f"ulimit -v {limit}; {sys.executable} -m quanterr compare {words}"],
            capture_output=True,
            text=True,
        )

        assert Status.ENVIRONMENT == done.returncode
        assert "(ulimit -v) is too low to load torch; raise it" in done.stderr
        assert 1 == len(done.stderr.splitlines())

    def test_full_disk_is_an_error_and_costs_no_report(self, checkpoints, tmp_path):
        done = call("compare", *checkpoints, "-o", tmp_path / "r.json", redirected={1: FULL})

        assert Status.ENVIRONMENT == done.returncode
        assert "No space left" in done.stderr
        assert (tmp_path / "r.json").stat().st_size > 1000

    def test_unwritable_report_costs_no_table(self, checkpoints):
        done = call("compare", *checkpoints, "-o", "/dev/full")

        assert Status.ENVIRONMENT == done.returncode
        assert "--output-report /dev/full: No space left" in done.stderr
        assert "COMPARED (exit 0): " in done.stdout
        assert "Wrote" not in done.stdout

    @pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252"])
    def test_unencodable_characters_are_escaped(self, tmp_path, encoding):
        x = {"層.weight": torch.ones(2, 2)}
        words = [
            write(tmp_path / "x.safetensors", x),
            write(tmp_path / "y.safetensors", {"層.weight": x["層.weight"] + 1}),
        ]
        done = call("compare", *words, env={"PYTHONIOENCODING": encoding}, encoding=encoding)

        assert r"\u5c64.weight" in done.stdout, done.stderr
        assert Status.OK == call("compare", "--help", env={"PYTHONIOENCODING": encoding}, encoding=encoding).returncode


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
class TestStreams:
    @pytest.mark.parametrize("words", ["formats", "schema", "--help", "compare --help", "--version"])
    def test_closed_or_full_streams_never_look_like_a_failed_gate(self, words):
        assert Status.BROKEN_PIPE == call(*words.split(), redirected={1: "", 2: ""}).returncode
        assert Status.ENVIRONMENT == call(*words.split(), redirected={1: FULL}).returncode

    @pytest.mark.parametrize("errors", [FULL, ""])
    def test_status_does_not_depend_on_readers_of_stderr(self, checkpoints, tmp_path, errors):
        more, path = {"redirected": {2: errors}}, tmp_path / "report.json"

        assert Status.OK == call("compare", *checkpoints, "-o", path, **more).returncode
        assert Status.GATE_FAILED == call("gate", path, "--require", "snr_db >= 999", **more).returncode
        assert Status.USAGE == call("formats", "fp9", **more).returncode
        assert Status.USAGE == call("compare", "--no-such-option", **more).returncode
        assert Status.UNREADABLE == call("compare", "no", "such", **more).returncode

    # Python decides at its start what closed streams are, so these are new processes.
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("words", "status"),
        [("compare {} -q", Status.OK), ("formats fp9", Status.USAGE), ("compare no such", Status.UNREADABLE)],
    )
    def test_status_is_the_same_with_a_closed_stderr(self, checkpoints, words, status):
        assert status == self.status(words.format(" ".join(map(str, checkpoints))), "2>&-")

    @pytest.mark.slow
    def test_document_lost_to_a_closed_stdout_is_an_error(self, checkpoints):
        words = " ".join(map(str, checkpoints))

        assert Status.ENVIRONMENT == self.status(f"compare {words} -q -o -", ">&-")
        assert Status.OK == self.status(f"compare {words}", ">&-")

    def status(self, words, redirected):
        command = f"{sys.executable} -m quanterr {words} {redirected}"
        return subprocess.run(["bash", "-c", command], capture_output=True, timeout=60).returncode


class TestStatus:
    def test_uncompared_tensor_exits_with_4_or_with_0_if_allowed(self, tmp_path):
        x = write(tmp_path / "x.safetensors", original())
        less = {name: t for name, t in to_fp8(original()).items() if "norm" not in name}
        y = write(tmp_path / "y.safetensors", less)

        assert Status.INCONCLUSIVE == call("compare", x, y, "-q").returncode
        assert Status.OK == call("compare", x, y, "-q", "--allow-partial").returncode

    @pytest.mark.parametrize(
        ("x", "y", "expected_message"),
        [
            ({}, {"w": torch.ones(2, 2)}, "the original has no tensors; the quantized checkpoint w"),
            ({}, {}, "the original has no tensors; the quantized checkpoint no tensors"),
            (
                {"v": torch.ones(2, 2)},
                {"w": torch.ones(2, 2)},
                "the original has v; the quantized checkpoint w. Do the names differ by a prefix?",
            ),
        ],
    )
    def test_pair_without_any_match_exits_with_4(self, tmp_path, x, y, expected_message):
        done = call("compare", write(tmp_path / "x.safetensors", x), write(tmp_path / "y.safetensors", y), "-q")

        assert Status.INCONCLUSIVE == done.returncode
        assert f"nothing matches: {expected_message}" in done.stderr

    def test_nan_exits_with_4(self, tmp_path):
        x = write(tmp_path / "x.safetensors", original())
        spoilt = to_fp8(original())
        name = "model.layers.0.mlp.up_proj.weight"
        spoilt[name].view(torch.uint8)[0, 0] = 0x7F
        done = call("compare", x, write(tmp_path / "y.safetensors", spoilt))

        assert Status.INCONCLUSIVE == done.returncode
        assert "1 of 512 elements of the quantized weight are NaN or infinite" in done.stdout

    def test_wrong_scale_exits_with_4_and_names_the_factor(self, tmp_path):
        x = write(tmp_path / "x.safetensors", original())
        spoilt = to_fp8(original())
        spoilt["model.layers.0.mlp.up_proj.weight_scale"] *= 3
        done = call("compare", x, write(tmp_path / "y.safetensors", spoilt))

        assert Status.INCONCLUSIVE == done.returncode
        assert "the scale is off by a factor of 3" in done.stdout

    def test_reason_names_the_layer_with_a_slightly_wrong_scale(self, tmp_path):
        x = write(tmp_path / "x.safetensors", original())
        spoilt = to_fp8(original())
        spoilt["model.layers.0.mlp.up_proj.weight_scale"] *= 1.6
        done = call("compare", "-v", x, write(tmp_path / "y.safetensors", spoilt))
        reason = next(line for line in done.stdout.splitlines() if line.startswith("error: "))

        assert Status.INCONCLUSIVE == done.returncode
        name = "model.layers.0.mlp.up_proj.weight"
        assert f"\nINCONCLUSIVE (exit 4): 1 layer damaged ({name})\n" in done.stdout
        assert "model.layers.0.mlp.up_proj.weight: 4." in reason
        assert "the scale is off by a factor of 1.6" in reason

    def test_unforeseen_error_is_a_bug_and_not_a_failed_gate(self, checkpoints, tmp_path):
        before = (
            "import quanterr.comparison.run\n"
            "def broken(*a, **k): raise RuntimeError('surprise')\n"
            "quanterr.comparison.run.pair = broken\n"
        )
        done = call("compare", *checkpoints, before=before)

        assert Status.BUG == done.returncode
        assert "surprise" in done.stderr


def test_version_names_the_kernel_on_request():
    for words in (("--version", "-v"), ("-v", "--version")):
        version, kernel, *_ = call(*words).stdout.splitlines()

        assert version == f"quanterr {quanterr.__version__}"
        assert kernel.startswith(f"kernel: {library.choose_kernel()}")


def test_version_and_schema_are_printed():
    assert f"quanterr {quanterr.__version__}\n" == call("--version").stdout
    assert "2020-12" in json.loads(call("schema").stdout)["$schema"]


def test_formats_lists_every_row_and_prints_a_specification():
    from quanterr.formats import FORMATS

    listed = call("formats").stdout.splitlines()[::2]  # one line with the name and one with the requirements

    assert [row.name for row in FORMATS] == [line.split()[0] for line in listed]
    assert "Reference:" in call("formats", "fp8_block").stdout


@pytest.mark.parametrize(
    ("name", "expected_message"),
    [
        ("int8", "int8; did you mean int8_convrot, int8_tensor, int8_row, int8_block, bnb_int8, "),
        ("fp8_blok", "fp8_blok; did you mean fp8_block"),
        ("zzz", "zzz; formats are "),
        ("", '""; formats are '),
    ],
)
def test_unknown_format_is_wrong_usage_and_similar_names_are_listed(name, expected_message):
    done = call("formats", name)

    assert Status.USAGE == done.returncode
    assert f"no format named {expected_message}" in done.stderr
    assert ("nvfp4" in done.stderr) == ("formats are" in expected_message)


class TestCompletion:
    """The shell's offers after Tab need no torch."""

    @pytest.mark.parametrize(
        ("words", "offered"),
        [
            (["gate", "r.json", "--thresholds", "fp"], {"fp8"}),
            (["explain", "excess_r"], {"excess_rows"}),
            (["explain", "atten"], {"attention"}),
            (["explain", "awq_gemm"], {"awq_gemm"}),
            (["formats", "gguf_q5"], {"gguf_q5_0", "gguf_q5_1", "gguf_q5_k"}),
            (["sweep", "x", "--to", "nf4,fp8_r"], {"nf4,fp8_row"}),
            (["plan", "x", "--export", "ll"], {"llama-quantize", "llmcompressor"}),
            (["guide", "met"], {"metrics"}),
            (["compare", "--len"], {"--lenient"}),  # --lenient is only in --help-all
        ],
    )
    def test_completion_offers_matching_words(self, words, offered):
        env = {
            "_QUANTERR_COMPLETE": "complete_bash",
            "COMP_WORDS": f"quanterr {' '.join(words)}",
            "COMP_CWORD": str(len(words)),
        }

        assert offered == set(call(env=env).stdout.split())

    def test_completion_offers_thresholds_files_too(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "fine.toml").touch()

        assert "fine.toml" in completion.presets("fi")

    def test_completion_offers_every_format_recipe_and_program(self):
        assert {row.name for row in quanterr.FORMATS} == set(completion.formats())
        assert list(list_recipes()) == completion.recipes("")
        assert (*CONSUMERS,) == completion.PROGRAMS


class TestUsage:
    @pytest.mark.parametrize(
        ("words", "expected_message"),
        [
            (["compare", "--bad", "x", "y"], "No such option: --bad (see quanterr compare --help)"),
            (["nonsense"], "No such command 'nonsense' (see quanterr --help)"),
            (
                ["compare", "--color", "red", "x", "y"],
                "Invalid value for '--color': 'red' is not one of 'auto', 'always', 'never' "
                "(see quanterr compare --help)",
            ),
        ],
    )
    def test_wrong_command_line_gives_a_single_line(self, words, expected_message):
        done = call(*words)

        assert (Status.USAGE, "") == (done.returncode, done.stdout)
        # Versions of click word this error differently.
        assert f"quanterr: {expected_message}\n" == done.stderr.replace("option '--bad'", "option: --bad")

    @pytest.mark.parametrize("command", ["compare", "rank", "gate", "diff", "formats", "inspect", "render"])
    def test_help_names_no_types_for_switches_and_lists(self, command):
        options = [line for line in call(command, "--help").stdout.splitlines() if "--" in line]

        assert options
        assert not re.findall("<(?:bool|str|int|float|list)", "".join(options))

    def test_help_leaves_rare_options_to_help_all(self):
        usual, everything = (call("compare", option).stdout for option in ("--help", "--help-all"))

        assert "--lenient" not in usual
        assert "--help-all" in usual
        assert all(option in everything for option in ("--lenient", "--no-clobber", "--require"))

    def test_no_color_decides_about_colours(self, tmp_path):
        from support.making import numbers, store

        x = store(tmp_path / "x.safetensors", {"a": numbers(8, 8)})
        done = call("inspect", x, "--color", "always", "--no-color")

        assert "\x1b[" not in done.stdout

    def test_formats_can_be_printed_as_json(self):
        every = json.loads(call("formats", "--json").stdout)
        document = json.loads(call("formats", "nvfp4", "--json").stdout)

        assert {"name", "summary", "needs"} == every[0].keys()
        assert document["specification"].strip()
        assert {key: document[key] for key in ("name", "summary", "needs")} in every
