"""The statement of origin: an in-toto Statement, and its verification."""

import json
import re
import shutil
import subprocess

import jsonschema
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from support.forked import call

import quanterr
from quanterr.comparison.statement_check import check_files, compare_again
from quanterr.documents.statement import make_schema, make_statement, read_statement
from quanterr.errors import CheckpointError, ReportError, UsageError
from quanterr.guide import read_page
from quanterr.options import CompareOptions
from quanterr.recipes.tensors import quantize_tensor

NAMES = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj")
OPTIONS = CompareOptions(device="cpu")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """An original, a folder with its quantized checkpoint, and the report of both."""
    place, generator = tmp_path_factory.mktemp("origin"), torch.Generator().manual_seed(0)
    weights = {f"{name}.weight": torch.randn(48, 64, generator=generator).bfloat16() for name in NAMES}
    (place / "quantized").mkdir()
    (place / "quantized" / "config.json").write_text('{"a": 1}')
    save_file(weights, place / "original.safetensors")
    save_file(quantize(weights), place / "quantized" / "model.safetensors")
    report = quanterr.compare(place / "original.safetensors", place / "quantized", every_code=True, device="cpu")
    return place / "original.safetensors", place / "quantized", report


def quantize(weights):
    tensors = {}
    for name, weight in weights.items():
        stored = quantize_tensor(weight, "fp8_row")
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in stored.items()}
    return tensors


@pytest.fixture
def path(pair, tmp_path):
    """The file of the statement."""
    path = tmp_path / "origin.intoto.json"
    path.write_text(make_statement(pair[2]).to_json())
    return path


class TestStatement:
    def test_statement_follows_its_schema(self, path):
        schema, document = make_schema(), json.loads(path.read_text())

        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(document, schema)

        assert ["model.safetensors", "config.json"] == [subject["name"] for subject in document["subject"]]
        assert {"exact": 2} == {
            origin_class: size["tensors"] for origin_class, size in document["predicate"]["classes"].items()
        }
        assert document["predicate"]["verdict"] == "shown"

    def test_statement_is_the_same_each_time(self, pair, path):
        assert path.read_text() == make_statement(pair[2]).to_json()

    def test_tensor_that_is_not_shown_decides_the_verdict(self, pair):
        lost = replace(pair[2].origin[0], kind="not_shown")

        predicate = make_statement(replace(pair[2], origin=[lost, *pair[2].origin[1:]])).predicate

        assert (predicate.verdict, predicate.reasons) == ("not shown", [f"1 tensor not shown: {lost.layer_name}"])

    def test_tensors_that_were_not_selected_decide_the_verdict(self, pair):
        report = quanterr.compare(*pair[:2], layers="up_proj", every_code=True, device="cpu")

        assert make_statement(report).predicate.reasons == ["2 tensors not selected"]

    @pytest.mark.parametrize("change", [{"complete": False}, {"settings": {"every_code": False}}])
    def test_reports_without_origin_give_no_statement(self, pair, change):
        report = pair[2]
        more = change if "complete" in change else {"settings": replace(report.settings, every_code=False)}

        with pytest.raises(UsageError, match="complete comparison with --every-code"):
            make_statement(replace(report, **more))


class TestReading:
    def test_statement_can_be_read_back(self, pair, path):
        assert read_statement(path).predicate.tensors == pair[2].origin

    @pytest.mark.parametrize(
        ("old", "new", "expected_message"),
        [
            ('"exact"', '"nearest"', "was edited"),
            ('"verdict": "shown"', '"verdict": "not shown"', "was edited"),
            ("origin/v1", "origin/v2", "this version reads"),
            ('"schema_version": "1.0"', '"schema_version": "2.0"', r"reads quanterr.origin 1\.x"),
            ("in-toto.io/Statement/v1", "in-toto.io/Statement/v2", "no in-toto statement"),
        ],
    )
    def test_changed_statement_is_refused(self, old, new, expected_message, path):
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

        with pytest.raises(ReportError, match=expected_message):
            read_statement(path)


class TestVerification:
    def test_files_are_those_of_the_statement(self, pair, path):
        statement = read_statement(path)

        assert check_files(pair[1], statement.subject, "quantized", OPTIONS) == 2
        assert check_files(pair[0], statement.predicate.materials, "original", OPTIONS) == 1

    def test_each_changed_byte_is_found(self, pair, path, tmp_path):
        statement = read_statement(path)
        for name in ("model.safetensors", "config.json"):
            copy = tmp_path / name.partition(".")[0]
            copy.mkdir()
            for file in pair[1].iterdir():
                (copy / file.name).write_bytes(file.read_bytes())
            raw = bytearray((copy / name).read_bytes())
            raw[-1 if name.endswith("safetensors") else 2] ^= 3  # the a of config.json becomes a b
            (copy / name).write_bytes(raw)

            with pytest.raises(CheckpointError, match=f"{name} was changed"):
                check_files(copy, statement.subject, "quantized", OPTIONS)

    def test_each_of_several_files_with_one_name_counts(self, pair, path):
        subject = read_statement(path).subject
        other = replace(subject[0], digest={"sha256": 64 * "0"})

        with pytest.raises(CheckpointError, match=f"{subject[0].name} was changed"):
            check_files(pair[1], [other, *subject], "quantized", OPTIONS)

    def test_missing_and_additional_files_are_named(self, pair, path):
        statement = read_statement(path)

        with pytest.raises(CheckpointError, match="other is missing"):
            check_files(
                pair[1], [*statement.subject, replace(statement.subject[0], name="other")], "quantized", OPTIONS
            )
        with pytest.raises(CheckpointError, match=r"config\.json is not in the statement"):
            check_files(pair[1], statement.subject[:1], "quantized", OPTIONS)

    def test_comparison_is_repeated(self, pair, path):
        statement = read_statement(path)
        compare_again(statement, *pair[:2], OPTIONS)
        statement.predicate.tensors[1].kind = "identical"

        with pytest.raises(CheckpointError, match=r"up_proj\.weight is identical in the statement, and exact now"):
            compare_again(statement, *pair[:2], OPTIONS)


@pytest.mark.session
def test_commands_write_and_verify_a_statement(pair, tmp_path):
    path = tmp_path / "origin.intoto.json"
    made = call("compare", *pair[:2], "--every-code", "-q", "-o", path)
    good = call("verify", path, pair[1], "--original", pair[0], "--again")
    path.write_text(path.read_text().replace('"exact"', '"nearest"', 1))
    edited = call("verify", path, pair[1])
    refused = call("compare", *pair[:2], "-o", path)

    assert (made.returncode, good.returncode, edited.returncode, refused.returncode) == (0, 0, 3, 2)
    assert good.stdout == (
        "verified: 2 files of the quantized side and 1 of the original as stated; compared again, with the same "
        "result; shown: 2 exact\n"
    )


@pytest.mark.session
@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_signature_by_the_commands_of_the_guide_holds_until_a_byte_changes(path):
    home = path.parent
    key = home / ".ssh" / "id_ed25519"
    key.parent.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    (home / "allowed_signers").write_text(f"you@example.org {key.with_suffix('.pub').read_text()}")
    sign, verify = re.findall(r"^ssh-keygen .*$", read_page("origin"), re.MULTILINE)

    def run(command):
        return subprocess.run(
            command, shell=True, cwd=home, env={"HOME": str(home), "PATH": "/usr/bin:/bin"}, capture_output=True
        )

    assert (run(sign).returncode, run(verify).returncode) == (0, 0)
    path.write_text(path.read_text().replace("exact", "equal", 1))
    assert run(verify).returncode != 0
