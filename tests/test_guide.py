"""What the README shows is what the program prints."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import make_guide
import pytest
from stored import pair

import quanterr

README = make_guide.README.read_text()
RECIPES = re.findall(r"^jq ((?:-es )?'[^']+') report\.json$", README, re.MULTILINE)
ISSUED = [
    "'.layers | sort_by(.snr_db) | .[0:5]'",
    "'.layers | map({name: .layer_name, mae: .mean_absolute_error})'",
    "'.aggregate | {mae: .mean_absolute_error, snr: .overall_snr_db}'",
]
PACKAGE = Path(quanterr.__file__).parent

needs_jq = pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")


@pytest.mark.parametrize("part", make_guide.PARTS)
def test_what_the_program_makes_is_up_to_date(part):
    assert make_guide.PARTS[part]() == make_guide.between(README, part)


def test_the_make_targets_exist():
    targets = set(re.findall(r"^make ([a-z]+)", README, re.MULTILINE))
    makefile = (make_guide.ROOT / "Makefile").read_text()

    assert targets
    assert set() == {target for target in targets if f"\n{target}:" not in makefile}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jq")
    original, quantized = pair(folder)
    path = folder / "report.json"
    path.write_text(quanterr.compare(original, quantized).to_json())
    return path


@needs_jq
class TestRecipes:
    def jq(self, recipe, report):
        words = recipe.split(" ", 1) if recipe.startswith("-es") else [recipe]
        return subprocess.run(
            ["jq", *words[:-1], words[-1].strip("'"), str(report)], capture_output=True, text=True, check=False
        )

    def test_are_those_that_users_have_in_their_scripts(self):
        assert set(ISSUED) <= set(RECIPES)

    def test_the_five_worst_layers_come_worst_first(self, report):
        layers = json.loads(self.jq(RECIPES[0], report).stdout)

        assert layers
        assert sorted(layer["snr_db"] for layer in layers) == [layer["snr_db"] for layer in layers]

    def test_names_and_errors_of_all_layers(self, report):
        found = json.loads(self.jq(RECIPES[1], report).stdout)
        layers = json.loads(report.read_text())["layers"]

        assert [{"name": x["layer_name"], "mae": x["mean_absolute_error"]} for x in layers] == found

    def test_the_whole_model(self, report):
        aggregate = json.loads(report.read_text())["aggregate"]
        expected = {"mae": aggregate["mean_absolute_error"], "snr": aggregate["overall_snr_db"]}

        assert expected == json.loads(self.jq(RECIPES[2], report).stdout)

    def test_the_gate_passes_a_good_report(self, report):
        assert 0 == self.jq(RECIPES[3], report).returncode

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda r: r.update(verdict="inconclusive"),
            lambda r: r.update(complete=False),
            lambda r: r.update(layers=[]),
            lambda r: r["layers"][0].update(snr_db=None),
            lambda r: r["layers"][0].update(snr_db="Infinity"),
            lambda r: r["layers"][0].update(snr_db=27.9),
            lambda r: r["layers"][0].pop("snr_db"),
            lambda r: r.pop("layers"),
            lambda r: r.clear(),
        ],
    )
    def test_the_gate_fails_closed(self, report, tmp_path, spoil):
        spoilt = json.loads(report.read_text())
        spoil(spoilt)
        path = tmp_path / "report.json"
        path.write_text(json.dumps(spoilt))

        assert 0 != self.jq(RECIPES[3], path).returncode

    @pytest.mark.parametrize("times", [0, 2])
    def test_the_gate_fails_closed_on_a_file_without_a_report_or_with_several(self, report, tmp_path, times):
        path = tmp_path / "report.json"
        path.write_text(times * report.read_text())

        assert 0 != self.jq(RECIPES[3], path).returncode

    def test_the_gate_of_the_examples_passes_and_fails_closed(self, report, tmp_path):
        gate = ["jq", "-e", "-s", "-f", str(make_guide.ROOT / "examples/ci/gate.jq")]
        empty = tmp_path / "empty.json"
        empty.write_text("")

        assert 0 == subprocess.run([*gate, str(report)], capture_output=True).returncode
        assert 0 != subprocess.run([*gate, str(empty)], capture_output=True).returncode


def test_the_library_session_of_the_readme_runs(tmp_path, monkeypatch):
    original, quantized = pair(tmp_path)
    Path(original).rename(tmp_path / "original.safetensors")
    Path(quantized).rename(tmp_path / "quantized.safetensors")
    monkeypatch.chdir(tmp_path)
    session = README.split("```python\n", 1)[1].split("```", 1)[0]

    done = subprocess.run(
        [sys.executable, "-c", f"import torch\nx = torch.randn(8, 8); y = x.half()\n{session}\nprint(report.verdict)"],
        capture_output=True,
        text=True,
    )

    assert "pass\n" == done.stdout, done.stderr
