"""The examples run, and their files are read to the bit."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from types import ModuleType

import make_guide
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.forked import PLAIN_ENVIRONMENT, call
from support.stored import original, to_fp8, write

import quanterr
from quanterr.errors import Status

pytestmark = pytest.mark.session

EXAMPLES = make_guide.ROOT / "examples"
RECIPES = ["fp8_tensor", "fp8_row", "fp8_block", "int8_tensor", "int8_row", "int8_block"]


def run(name, *words, cwd="."):
    return call(*words, program=str(EXAMPLES / name), cwd=cwd)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "model.safetensors"
    random = torch.Generator().manual_seed(0)
    shapes = {"layers.0.a.weight": (140, 136), "layers.0.b.weight": (96, 300), "layers.0.norm.weight": (64,)}
    save_file({name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}, path)
    return path


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantize_example_writes_readable_files(model, tmp_path, recipe):
    path = tmp_path / "quantized.safetensors"
    done = run("quantize.py", model, path, "--to", recipe)
    assert 0 == done.returncode, done.stderr

    report = quanterr.compare(model, path)
    layer = report.layers[0]
    before, after = load_file(model)[layer.layer_name].double(), load_file(path)
    scale = after[f"{layer.layer_name}_scale"].float()
    if recipe.endswith("block"):
        scale = scale.repeat_interleave(128, 0)[:140].repeat_interleave(128, 1)[:, :136]
    values = after[layer.layer_name].float() * scale
    e = values.double() - before

    assert "pass" == report.verdict, report.reasons
    assert {recipe} == {x.format for x in report.layers}
    assert abs(layer.snr_db - 10 * float(torch.log10(before.square().sum() / e.square().sum()))) < 1e-6
    assert layer.max_absolute_error == float((values - before.float()).abs().max())


@pytest.mark.slow
def test_synthetic_example_agrees_with_its_known_errors(tmp_path):
    done = run("synthetic.py", tmp_path)

    assert 0 == done.returncode, done.stdout + done.stderr


def test_library_session_runs(model, tmp_path):
    run("quantize.py", model, tmp_path / "q.safetensors", "--to", "int8_row")
    done = run("library.py", model, tmp_path / "q.safetensors", cwd=tmp_path)

    assert 0 == done.returncode, done.stderr
    assert "verdict: pass" in done.stdout
    assert (tmp_path / "report.json").exists()


def test_user_metric_runs_over_the_pairs(model, tmp_path):
    run("quantize.py", model, tmp_path / "q.safetensors", "--to", "int8_row")
    done = run("own_metric.py", model, tmp_path / "q.safetensors")

    assert 0 == done.returncode, done.stderr
    (first, name), (second, _) = (line.split() for line in done.stdout.splitlines())
    assert 0.9 < float(first) <= float(second) < 1
    assert name.startswith("layers.0.")


class TestOwnFormat:
    """A format of another package is found while quanterr's formats are imported, and so needs a process of its own."""

    @pytest.fixture
    def run_installed(self, tmp_path):
        """A function that runs a command where a package has an entry point of this text."""

        def run_with(entry, *words):
            metadata = tmp_path / "site/quanterr_mulaw-1.0.dist-info"
            metadata.mkdir(parents=True)
            (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: quanterr-mulaw\nVersion: 1.0\n")
            (metadata / "entry_points.txt").write_text(f"[quanterr.formats]\n{entry}\n")
            shutil.copy(EXAMPLES / "own_format/quanterr_mulaw.py", tmp_path / "site")
            path = os.pathsep.join([str(tmp_path / "site"), str(make_guide.ROOT)])
            words = [sys.executable, "-m", "quanterr", *words]
            return subprocess.run(words, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)

        return run_with

    def test_format_of_another_package_is_compared(self, model, tmp_path, run_installed):
        project = tomllib.loads((EXAMPLES / "own_format/pyproject.toml").read_text())["project"]
        name, value = next(iter(project["entry-points"]["quanterr.formats"].items()))
        x = load_file(model)
        stored, expected = {"layers.0.norm.weight": x["layers.0.norm.weight"]}, {}
        for weight in ("layers.0.a.weight", "layers.0.b.weight"):
            scale = x[weight].float().abs().amax(1)
            share = x[weight].float() / scale[:, None]
            codes = (share.sign() * torch.log2(1 + 255 * share.abs()) / 8 * 127.5 + 127.5).round()
            stored |= {weight: codes.to(torch.uint8), f"{weight}_row_scale": scale}
            u = codes.double() / 127.5 - 1
            expected[weight] = (u.sign() * (256 ** u.abs() - 1) / 255).float() * scale[:, None]
        save_file(stored, tmp_path / "q.safetensors")
        done = run_installed(f"{name} = {value}", "compare", str(model), str(tmp_path / "q.safetensors"), "--json")
        layers = {layer["layer_name"]: layer for layer in json.loads(done.stdout)["layers"]}

        assert 0 == done.returncode, done.stderr
        for weight, values in expected.items():
            e = (values - x[weight].float()).double()
            snr = 10 * float(torch.log10(x[weight].double().square().sum() / e.square().sum()))
            assert ("mulaw", pytest.approx(snr, abs=1e-6)) == (layers[weight]["format"], layers[weight]["snr_db"])

    @pytest.mark.parametrize(
        ("entry", "message"),
        [
            ("x = no_such_module", "the format x of a package, no_such_module, is not importable: ModuleNot"),
            ("x = quanterr.formats.eetq", "quanterr.formats.eetq: a format named eetq exists already"),
        ],
    )
    def test_broken_format_of_another_package_is_named(self, model, run_installed, entry, message):
        done = run_installed(entry, "inspect", str(model))

        assert Status.USAGE == done.returncode
        assert message in done.stderr


def test_example_actions_have_the_same_versions_as_our_workflows():
    ours = dict(re.findall(r"uses: (actions/[\w-]+)@\w+ # v(\d+)", read_all(make_guide.ROOT / ".github/workflows")))
    theirs = re.findall(r"uses: (actions/[\w-]+)@v(\d+)", read_all(EXAMPLES / "ci"))
    both = [(name, version, ours[name]) for name, version in theirs if name in ours]

    assert both
    assert [] == [triple for triple in both if triple[1] != triple[2]]


def read_all(folder):
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.yml")))


@pytest.mark.parametrize("tracker", ["mlflow", "wandb", "trackio"])
def test_numbers_are_logged_under_names_every_tracker_accepts(tracker, model, tmp_path, monkeypatch):
    """The trackers are not installed here; a stand-in takes the calls that all three have."""
    logged = {}

    class Tracker(ModuleType):
        def __getattr__(self, name):
            return self

        def __call__(self, *values, **_):
            if values and isinstance(values[0], dict):
                logged.update(values[0])
            return self

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setitem(sys.modules, tracker, Tracker(tracker))
    quanterr.sweep(model, "int8_row,fp8_row", layers="layers").save(tmp_path / "ranking.json")
    monkeypatch.setattr(sys, "argv", ["track.py", str(tmp_path / "ranking.json"), "--to", tracker])
    runpy.run_path(str(EXAMPLES / "track.py"), run_name="__main__")

    expected = quanterr.read_document(tmp_path / "ranking.json").metrics()
    assert logged == expected
    assert logged["int8_row/rank"] == 1.0
    assert [] == [name for name in logged if not re.fullmatch(r"[\w./ -]+", name)]  # what MLflow allows


class TestJobs:
    """The jobs in examples/ci run in their order on a small model."""

    def model(self):
        return original() | {name.replace("layers.0", "layers.1"): weight for name, weight in original().items()}

    @pytest.fixture
    def folder(self, tmp_path):
        write(tmp_path / "original/model.safetensors", self.model())
        write(tmp_path / "quantized/model.safetensors", to_fp8(self.model()))
        (tmp_path / "ci").mkdir()
        shutil.copy(EXAMPLES / "ci/thresholds.toml", tmp_path / "ci")
        report = quanterr.compare(tmp_path / "original", tmp_path / "quantized")
        (tmp_path / "ci/baseline.json").write_text(report.to_json())
        return tmp_path

    def statuses(self, job, folder):
        lines = re.findall(r"^ +(?:run:|-) (quanterr .+)$", (EXAMPLES / "ci" / job).read_text(), re.MULTILINE)
        runs = [call(*shlex.split(line)[1:], cwd=folder) for line in lines]
        return {line.split()[1]: done.returncode for line, done in zip(lines, runs, strict=True)}

    @pytest.mark.parametrize("job", ["github-actions.yml", "gitlab-ci.yml"])
    def test_jobs_pass_results_as_good_as_the_baseline(self, job, folder):
        assert {"compare": Status.OK, "gate": Status.OK, "diff": Status.OK} == self.statuses(job, folder)

    @pytest.mark.parametrize("job", ["github-actions.yml", "gitlab-ci.yml"])
    def test_jobs_stop_worse_results(self, job, folder):
        noise = torch.Generator().manual_seed(1)
        worse = {name: x + 0.02 * x.std() * torch.randn(x.shape, generator=noise) for name, x in self.model().items()}
        write(folder / "quantized/model.safetensors", to_fp8(worse))

        assert {"compare": Status.OK, "gate": Status.GATE_FAILED, "diff": Status.OK} == self.statuses(job, folder)

    def action(self, folder, **inputs):
        """Run the comparing step as a runner would: its script under bash, with its inputs in the environment."""
        steps = yaml.safe_load((EXAMPLES / "ci/action.yml").read_text())
        step = next(step for step in steps["runs"]["steps"] if step.get("id") == "compare")
        known = {name: field.get("default", "") for name, field in steps["inputs"].items()} | inputs
        variables = {
            key: known[re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", value)[1]] for key, value in step["env"].items()
        }
        variables |= {name: str(folder / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin/quanterr").write_text(f'#!/bin/sh\nexec {sys.executable} -m quanterr "$@"\n')
        (folder / "bin/quanterr").chmod(0o755)
        path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        env = PLAIN_ENVIRONMENT | variables | {"GITHUB_ACTIONS": "true", "PATH": path}
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", step["run"]], cwd=folder, env=env, capture_output=True, text=True
        )

    def test_action_writes_status_summary_report_and_page(self, folder):
        done = self.action(folder, original="original", quantized="quantized", thresholds="fp8", layers="layers.0")

        assert Status.OK == done.returncode, done.stderr
        assert "status=0\n" == (folder / "GITHUB_OUTPUT").read_text()
        assert "### quanterr: pass" in (folder / "GITHUB_STEP_SUMMARY").read_text()
        assert ["layers.0"] == quanterr.read_report(folder / "report.json").selection.patterns
        assert "quanterr.report" in (folder / "report.html").read_text()[:100]

    def test_action_fails_with_the_status_and_takes_no_input_for_a_command(self, folder):
        name = '"; touch harmed; echo "'
        (folder / "quantized").rename(folder / name)
        done = self.action(
            folder, original="original", quantized=name, thresholds="no-such", baseline="ci/baseline.json"
        )

        assert f"status={done.returncode}\n" == (folder / "GITHUB_OUTPUT").read_text()
        assert Status.OK != done.returncode
        assert not (folder / "harmed").exists()

    def comment(self, folder, old):
        """Run the commenting step, with a gh that lists ``old`` comments and records its calls."""
        steps = yaml.safe_load((EXAMPLES / "ci/action.yml").read_text())["runs"]["steps"]
        step = next(step for step in steps if step.get("id") == "comment")
        assert "inputs.comment == 'true' && github.event_name == 'pull_request'" in step["if"]
        (folder / "old.json").write_text(json.dumps(old))
        gh = folder / "bin/gh"
        gh.write_text(
            '#!/bin/sh\necho "$@" >> asked\n'
            'case "$*" in *--jq*) for word; do filter=$word; done; jq -r "$filter" old.json;; esac\n'
        )
        gh.chmod(0o755)
        path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        env = PLAIN_ENVIRONMENT | {
            "PATH": path,
            "COMMENTS": "repos/o/r/issues/7/comments",
            "EDITED": "repos/o/r/issues/comments",
        }
        env["BASELINE"] = "ci/baseline.json"
        script = ["bash", "-e", "-o", "pipefail", "-c", step["run"]]
        done = subprocess.run(script, cwd=folder, env=env, capture_output=True, text=True)
        assert Status.OK == done.returncode, done.stderr
        return (folder / "asked").read_text().splitlines()[-1]

    @pytest.mark.skipif(shutil.which("jq") is None, reason="the filter of the step is one of jq")
    def test_action_keeps_one_comment_up_to_date(self, folder):
        self.action(folder, original="original", quantized="quantized")
        others = [
            {"id": 1, "body": "<!-- quanterr:begin -->\nnot mine", "user": {"type": "User"}},
            {"id": 2, "body": "LGTM", "user": {"type": "Bot"}},
        ]
        mine = {"id": 3, "body": "<!-- quanterr:begin -->\nold", "user": {"type": "Bot"}}

        new = "api --method POST repos/o/r/issues/7/comments --field body=@comment.md"
        assert new == self.comment(folder, others)
        edited = "api --method PATCH repos/o/r/issues/comments/3 --field body=@comment.md"
        assert edited == self.comment(folder, [*others, mine])
        headings = [
            line for line in (folder / "comment.md").read_text().splitlines() if line.startswith(("<!--", "## "))
        ]
        assert ["<!-- quanterr:begin -->", "## Weight fidelity"] == headings[:2]
        assert "## What changed" in headings

    def test_pre_commit_hook_judges_the_committed_report(self, folder):
        text = (make_guide.ROOT / ".pre-commit-hooks.yaml").read_text()
        (hook,) = yaml.safe_load(text)
        shown = yaml.safe_load(re.search(r"args: (\[.*\])", text)[1])
        words = [*shlex.split(hook["entry"])[1:], "ci/baseline.json", "--thresholds", "ci/thresholds.toml"]
        shutil.copy(folder / "ci/baseline.json", folder / "report.json")

        assert "system" == hook["language"]  # its own environment would install torch to judge a JSON file
        assert Status.OK == call(words[0], *shown, cwd=folder).returncode
        assert not hook["pass_filenames"]
        assert [True, False] == [bool(re.search(hook["files"], name)) for name in ("ci/report.json", "src/main.py")]
        assert Status.USAGE == call(*words, cwd=folder).returncode  # the rules ask for a baseline
        assert Status.OK == call(*words[:2], "--thresholds", "fp8", cwd=folder).returncode

    def test_container_runs_the_command_as_an_unprivileged_user(self):
        lines = [
            line.split(None, 1) for line in (EXAMPLES / "Dockerfile").read_text().splitlines() if line[:1].isupper()
        ]
        words = {word: json.loads(rest) for word, rest in lines if word in ("ENTRYPOINT", "CMD")}

        assert ["quanterr"] == words["ENTRYPOINT"]
        assert "quanterr" == dict(lines)["USER"]
        assert Status.OK == call(*words["CMD"]).returncode
