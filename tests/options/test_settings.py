"""Defaults from quanterr.toml, pyproject.toml and the environment; the command line outranks them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.forked import call
from support.stored import pair

from quanterr.cli import settings
from quanterr.errors import Status
from quanterr.guide import read_page

pytestmark = pytest.mark.session


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return pair(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def project(tmp_path):
    """A function that writes settings in TOML to a folder, and returns the folder to run commands in."""

    def make(text, name="quanterr.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path

    return make


def compare(checkpoints, *words, cwd, env=None):
    return call("compare", *checkpoints, "-o", "-", *words, cwd=cwd, env=env)


def limits(finished):
    """Return the rules that were judged."""
    return [gate["id"] for gate in json.loads(finished.stdout)["gates"]]


class TestFile:
    def test_command_options_have_defaults_and_their_file_is_named(self, checkpoints, project):
        folder = project(
            '[compare]\nrequire = ["snr_db >= 200", "lossless >= 0"]\nquiet = true\n[gate]\nthresholds = "fp8"\n'
        )
        finished = compare(checkpoints, cwd=folder)

        assert Status.GATE_FAILED == finished.returncode
        assert ["snr_db >= 200", "lossless >= 0"] == limits(finished)
        assert f"settings from {folder / 'quanterr.toml'}\n" in finished.stderr

    def test_command_line_outranks_the_environment_which_outranks_the_file(self, checkpoints, project):
        folder = project('[compare]\nrequire = "snr_db >= 1"\ndevice = "abacus"\n')
        env = {"QUANTERR_COMPARE_DEVICE": "cpu", "QUANTERR_COMPARE_REQUIRE": "snr_db >= 2\nsnr_db >= 3"}

        assert ["snr_db >= 2", "snr_db >= 3"] == limits(compare(checkpoints, cwd=folder, env=env))
        assert ["snr_db >= 4"] == limits(compare(checkpoints, "--require", "snr_db >= 4", cwd=folder, env=env))

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("quanterr.toml", '[compare]\nthresholds = "rules.toml"'),
            ("pyproject.toml", '[tool.quanterr.compare]\nthresholds = "rules.toml"'),
        ],
    )
    def test_nearest_file_above_is_read_and_its_paths_start_there(self, checkpoints, project, name, text):
        folder = project(text, name)
        (folder / "rules.toml").write_text('schema = 1\n[[rule]]\nid = "mine"\nrequire = "snr_db >= 1"\n')
        below = folder / "a" / "b"
        below.mkdir(parents=True)

        assert ["mine"] == limits(compare(checkpoints, cwd=below))

    @pytest.mark.parametrize(("given", "name"), [('"nothing"', "nothing"), ("2026", "2026")])
    def test_every_file_option_is_resolved_from_the_settings_file(self, checkpoints, project, given, name):
        folder = project(f"[compare]\nplan = {given}\n")
        below = folder / "below"
        below.mkdir()

        assert f"{folder / name}: no such file" in compare(checkpoints, cwd=below).stderr

    @pytest.mark.parametrize(("given", "expected"), [("gaussian:8", "gaussian:8"), ("calls.st", "/project/calls.st")])
    def test_made_up_calls_are_not_taken_for_a_file(self, given, expected):
        inputs = SimpleNamespace(name="inputs", metavar="FILE")

        assert expected == settings._resolve_paths(Path("/project/quanterr.toml"), inputs, given)

    def test_preset_is_not_taken_for_a_file(self, checkpoints, project):
        folder = project('[compare]\nthresholds = "fp8"\n')
        (folder / "below").mkdir()

        assert limits(compare(checkpoints, cwd=folder / "below"))

    def test_project_without_quanterr_settings_hides_no_settings_above(self, checkpoints, project):
        folder = project('[compare]\nrequire = "snr_db >= 1"')
        below = folder / "below"
        below.mkdir()
        (below / "pyproject.toml").write_text('[project]\nname = "x"\n')

        assert ["snr_db >= 1"] == limits(compare(checkpoints, cwd=below))

    def test_settings_next_to_weights_are_ignored_with_a_note(self, checkpoints, project):
        folder = project("[compare]\nallow-partial = true\n")
        (folder / "model.gguf").touch()
        finished = compare(checkpoints, cwd=folder)

        assert "is ignored: it is stored next to weights" in finished.stderr
        assert "settings from" not in finished.stderr

    def test_settings_must_be_a_regular_file(self, checkpoints, tmp_path):
        (tmp_path / "quanterr.toml").symlink_to("gone.toml")
        finished = compare(checkpoints, cwd=tmp_path)

        assert (Status.USAGE, "") == (finished.returncode, finished.stdout)
        assert f"{tmp_path / 'quanterr.toml'}: not a regular file; rename it" in finished.stderr

    def test_misplaced_project_setting_names_the_right_table(self, checkpoints, project):
        finished = compare(checkpoints, cwd=project("[tool.quanterr]\nrequire = 'snr_db >= 1'", "pyproject.toml"))

        assert Status.USAGE == finished.returncode
        assert "belong in the table of their command: [tool.quanterr.compare], then" in finished.stderr

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('device = "cpu"', "options belong in the table of their command"),
            ("[compar]", "no command named compar; did you mean compare?"),
            ("[compare]\nreqire = 'snr_db >= 1'", "no option named reqire; did you mean require?"),
            ("[compare]\noriginal = 'x'", "no option named original"),
            ("[compare]\nquiet = 'yes'", "quiet: must be true or false"),
            ("[compare]\nrequire = [1]", "require: must be a string or a list of strings"),
            ("[compare]\ntop-layers = true", "top-layers: must be a string or a number"),
            ("[compare]\ntop-layers = 'ten'", "Invalid value for '--top-layers'"),
            ("[compare]\ncolor = 'blue'", "Invalid value for '--color'"),
            ("[compare", "is not TOML"),
        ],
    )
    def test_mistake_in_the_settings_is_wrong_usage_and_named(self, checkpoints, project, text, message):
        finished = compare(checkpoints, cwd=project(text))

        assert Status.USAGE == finished.returncode
        assert message in finished.stderr
        assert "quanterr.toml" in finished.stderr


@pytest.mark.parametrize("name", ["measure", "verify"])
def test_former_name_of_an_option_sets_it(project, name):
    done = call("plan", "original", "--bits", "5", cwd=project(f"[plan]\n{name} = true\n"))

    assert "--measure measures a plan on a text" in done.stderr


class TestEnvironment:
    @pytest.mark.parametrize(
        ("variable", "meant"),
        [
            ("QUANTERR_COMPARE_REQIRE", "QUANTERR_COMPARE_REQUIRE"),
            ("QUANTERR_COMPAR_REQUIRE", "QUANTERR_COMPARE_REQUIRE"),
            ("QUANTERR_REQUIRE", "QUANTERR_RANK_REQUIRE"),
            ("QUANTERR_GATE_THRESHOLD", "QUANTERR_GATE_THRESHOLDS"),
        ],
    )
    def test_misspelt_variable_is_wrong_usage(self, checkpoints, tmp_path, variable, meant):
        finished = compare(checkpoints, cwd=tmp_path, env={variable: "snr_db >= 1"})

        assert Status.USAGE == finished.returncode
        assert f"no setting named {variable}; did you mean {meant}?" in finished.stderr

    def test_variable_for_another_command_is_ignored(self, checkpoints, tmp_path):
        finished = compare(checkpoints, cwd=tmp_path, env={"QUANTERR_GATE_REQUIRE": "snr_db >= 999"})

        assert Status.OK == finished.returncode

    @pytest.mark.parametrize("name", ["COMPARE_THRESHOLDS", "COMPARE_REQUIRE", "GATE_THRESHOLDS"])
    def test_empty_variable_switches_off_no_gate(self, checkpoints, tmp_path, name):
        finished = compare(checkpoints, cwd=tmp_path, env={f"QUANTERR_{name}": " "})

        assert Status.USAGE == finished.returncode
        assert f"environment: QUANTERR_{name} is empty; give it a value, or unset it" in finished.stderr

    @pytest.mark.parametrize(("value", "quiet"), [("1", True), ("false", False)])
    def test_switch_is_given_as_a_word(self, checkpoints, tmp_path, value, quiet):
        finished = compare(checkpoints, cwd=tmp_path, env={"QUANTERR_COMPARE_QUIET": value})

        assert quiet == ("worst: " not in finished.stderr)


def test_guide_example_is_right(checkpoints, project):
    (example,) = re.findall(r"```toml\n(.*?)```", read_page("settings"), re.S)
    finished = call("compare", "--help", cwd=project(example))

    assert Status.OK == finished.returncode
    assert "settings from" in finished.stderr
