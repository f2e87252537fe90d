"""Hostile names, paths, configurations, labels and rules have no effect, and JSON keeps them exactly."""

import io
import json
import os
import re

import msgspec
import pytest
import torch
from support.forked import call
from support.hostile_names import HOSTILE_NAMES, SHORT_NAMES
from support.markup_checks import CHECKS, STORABLE, check_lines, check_markdown, check_text, make_named, render
from support.stored import raw_header, to_fp8, write

from quanterr.cli import progress
from quanterr.cli.progress import Bar, Heartbeat
from quanterr.comparison.scheduler import Progress
from quanterr.documents.base import dumps
from quanterr.documents.comparison.model import Report
from quanterr.documents.gate_results import Gate, Violation
from quanterr.gates.as_text import format_gates
from quanterr.gates.github import OMISSION, format_summary, make_annotations
from quanterr.gates.rules import read_rules
from quanterr.gates.verdicts import Verdict
from quanterr.outputs import OUTPUTS
from quanterr.outputs.files import check_targets
from quanterr.outputs.terminal import make_console, show
from quanterr.util import strict_json
from quanterr.util.text import display, escape_text

pytestmark = pytest.mark.session


# Names that a file or a tensor can have.
FILE_NAMES = [name.replace("/", "_").replace("\0", "_") for name in SHORT_NAMES if name.strip(". ")]

every_name = pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: ascii(name[:16]))


# Each output separately


def test_every_output_has_its_check():
    assert {output.name for output in OUTPUTS} == set(CHECKS)


@every_name
def test_name_is_only_text_in_every_output(name):
    report = make_named(name)
    for output, check in CHECKS.items():
        check(render(report, output))
    file = io.StringIO()
    show(report.view(30), make_console(file, "never"), verbose=True)

    check_lines(file.getvalue() + report.brief())


@every_name
def test_name_can_be_read_back_exactly_from_json(name):
    report = make_named(name)
    text = render(report, "json")

    assert name == json.loads(text)["layers"][0]["layer_name"] == json.loads(dumps({name: name}))[name]
    assert name == json.loads(render(report, "jsonl").splitlines()[1])["layer_name"]
    if name.encode(errors="ignore").decode() == name:  # a lone surrogate is not text and cannot be a tensor's name
        assert name == msgspec.json.decode(text, type=Report).layers[0].layer_name


def gate_of(name):
    violations = [Violation(name, None, None, name), Violation(name, 1.0, -1.0, None)]
    return Gate(name, name, [name], "error", name, "fail", 2, 0, 0, 1.0, 2.0, -1.0, name, name, violations)


@every_name
def test_gate_is_only_text(name):
    judged = Verdict("inconclusive", [name], [gate_of(name)])

    check_lines("\n".join(format_gates(judged.gates)))
    check_lines("\n".join(make_annotations(judged)), ["::error title=quanterr::"])
    check_markdown(format_summary(judged))


@every_name
def test_name_in_the_progress_is_only_text(name, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    beat = Heartbeat()
    now[0] = 100
    beat(Progress(100, 50, name))
    check_lines(capsys.readouterr().err)


@every_name
def test_name_in_the_bar_is_only_text(name, monkeypatch, capsys):
    monkeypatch.setattr(progress, "BAR_DELAY", 0)
    bar = Bar()
    bar(Progress(100, 1, name))
    bar(Progress(100, 50, name))
    bar.close()

    check_lines(capsys.readouterr().err.replace("\r", "\n").replace("\x1b[A", ""))


@every_name
def test_name_in_an_error_is_only_text(name):
    check_lines(escape_text(f"quanterr: {display(name)}: x\nTraceback: {name}"))


def toml(text):
    """Return a basic string in TOML, which cannot hold a lone surrogate."""
    return json.dumps(re.sub("[\ud800-\udfff]", "", text), ensure_ascii=False).replace("\x7f", "\\u007f")


@pytest.mark.parametrize("key", ["id", "require", "severity", "layers", "reason", "unknown"])
def test_rule_is_only_text(tmp_path, key):
    path = tmp_path / "t.toml"
    for name in filter(str.strip, SHORT_NAMES):
        rule = {"id": '"x"', "require": '"snr_db >= 30"'} | {key: f"[{toml(name)}]" if key == "layers" else toml(name)}
        path.write_text("schema = 1\n[[rule]]\n" + "\n".join(f"{k} = {v}" for k, v in rule.items()), encoding="utf-8")
        try:
            rules = read_rules(path)
        except Exception as error:
            check_lines(f"quanterr: {error}")
        else:
            assert key in ("id", "layers", "reason")
            assert rules


@pytest.mark.parametrize("name", FILE_NAMES, ids=lambda name: ascii(name[:16]))
def test_path_in_an_error_is_only_text(tmp_path, name):
    from quanterr.checkpoints import open_checkpoint
    from quanterr.errors import QuanterrError

    path = os.fsencode(tmp_path) + b"/" + name.encode(errors="backslashreplace") + b"\xff.safetensors"
    path = os.fsdecode(path)
    with pytest.raises(QuanterrError) as missing:
        open_checkpoint(path)
    raw_header(tmp_path / os.path.basename(path), b"{]")
    with pytest.raises(QuanterrError) as broken:
        open_checkpoint(path)
    with pytest.raises(QuanterrError) as near:
        open_checkpoint(path.replace(".safetensors", ".safetensor"))
    with pytest.raises(QuanterrError) as written:
        check_targets([path], [])

    for error in (missing, broken, near, written):
        check_lines(f"quanterr: {error.value}")
        assert str(error.value).isprintable()


def test_json_holds_no_command_and_keeps_the_text():
    text = strict_json.dumps({"##[a]": "###vso[##", "n": 1})

    assert "##" not in text
    assert {"##[a]": "###vso[##", "n": 1} == json.loads(text)


# The whole command


PLACE = "d\x1b[31m\n::error::x ##[error] =1+1 `|` <b>\u202e"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Return two checkpoints and thresholds that are hostile throughout."""
    folder = tmp_path_factory.mktemp("hostile") / PLACE
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    x = {f"{name}.weight": torch.randn(16, 16, generator=generator).bfloat16() for name in STORABLE}
    y = to_fp8(x)
    gone = y.popitem()[0]
    y.pop(gone.removesuffix("_scale"), None)
    labels = {"_quantization_metadata": json.dumps({"layers": {name: {"format": name} for name in STORABLE[:20]}})}
    write(folder / "x.safetensors", x)
    write(folder / "=y\n.safetensors", y)
    write(folder / "labelled" / "model.safetensors", y, labels | {name or "k": name for name in STORABLE})
    config = {"quant_method": STORABLE[10], "config_groups": {name: {"weights": name} for name in STORABLE}}
    config_json = {"architectures": [STORABLE[11]], "model_type": STORABLE[12], "quantization_config": config}
    (folder / "labelled" / "config.json").write_text(json.dumps(config_json))
    rules = [
        f"[[rule]]\nid = {toml(name)}\nrequire = 'snr_db >= 99'\nreason = {toml(name)}"
        for name in SHORT_NAMES
        if name.strip()
    ]
    (folder / "t.toml").write_text("\n".join(["schema = 1", *dict.fromkeys(rules)]), encoding="utf-8")
    return folder


ON_GITHUB = {"GITHUB_ACTIONS": "true", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def outputs(hostile):
    outputs = [
        word for suffix in ("json", "jsonl", "csv", "md", "html", "xml") for word in ("-o", hostile / f"r.{suffix}")
    ]
    env = ON_GITHUB | {"GITHUB_STEP_SUMMARY": str(hostile / "summary.md")}
    rules = ["--thresholds", hostile / "t.toml"]
    return call("compare", hostile / "x.safetensors", hostile / "=y\n.safetensors", "-v", *rules, *outputs, env=env)


def test_compare_escapes_everything_hostile(hostile, outputs):
    assert 4 == outputs.returncode
    check_lines(outputs.stdout)
    check_lines(outputs.stderr, ["::error title=quanterr::"])
    check_markdown((hostile / "summary.md").read_text().removesuffix(OMISSION))
    for output in OUTPUTS:
        if output.name != "html":
            CHECKS[output.name]((hostile / f"r{output.suffix}").read_text())
    check_text((hostile / "r.html").read_text())
    stored = json.loads((hostile / "r.json").read_text())
    names = {row["layer_name"] for key in ("layers", "not_compared") for row in stored[key]}
    assert {f"{name}.weight" for name in STORABLE} <= names


@pytest.mark.parametrize(
    "words",
    [
        ("gate", "r.json", "--thresholds", "t.toml", "--explain", f"{STORABLE[3]}.weight"),
        ("gate", "r.json", "--thresholds", "t.toml", "--explain", STORABLE[0]),
        ("diff", "r.json", "r.json"),
        ("diff", "r.json", "r.json", "--json"),
        ("render", "r.json", "--to", "csv"),
        ("inspect", "labelled", "-v"),
        ("inspect", "labelled", "--json"),
        ("compare", "x.safetensors", "labelled"),
        ("compare", "x.safetensors", "=y\n.safetensor"),
        ("rank", "x.safetensors", "=y\n.safetensors", "labelled"),
        ("gate", "gone\n::error::.json", "--require", "snr_db >= 1"),
        ("gate", "r.json", "--thresholds", "##[error]\n.toml"),
        ("compare", "x.safetensors", "=y\n.safetensors", "-l", "##[error]\n::x"),
    ],
    ids=lambda words: ascii(" ".join(words))[:50],
)
def test_every_command_escapes_everything_hostile(hostile, outputs, words):
    arguments = [
        str(hostile / word) if re.search(r"json$|toml$|tensors?$|labelled", word) and word[0] != "-" else word
        for word in words
    ]
    done = call(*arguments, env=ON_GITHUB)

    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1, 2, 3, 4)
    check_lines(done.stderr, ["::error title=quanterr::"])
    check_lines(done.stdout)


def test_traceback_of_a_bug_is_only_text(hostile):
    before = (
        "import quanterr.comparison.run\n"
        "def broken(x, *a, **k): raise RuntimeError('\\n'.join(x.entries))\n"
        "quanterr.comparison.run.pair = broken\n"
    )
    done = call("compare", *[hostile / "x.safetensors"] * 2, before=before)

    assert 70 == done.returncode
    assert "RuntimeError" in done.stderr
    check_lines(done.stderr)
