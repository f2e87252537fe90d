"""Journals: a resumed run reuses finished work digit by digit, but neither damaged records nor other runs' journals.

MOMENTS=50 python -m pytest tests/comparison/test_resume.py -m slow   as many moments at which it is killed; 5 otherwise
"""

import json
import os
import random
import shutil
import signal
import time
from itertools import count
from pathlib import Path

import pytest
import torch
from support.forked import call, signal_after
from support.making import numbers, quantized_fp8, store

import quanterr
from quanterr.checkpoints.base import CheckpointFile
from quanterr.comparison import compare_each, sharing
from quanterr.comparison.journal import Journal
from quanterr.comparison.records import pack, unpack
from quanterr.errors import ResourceError, Status, UsageError
from quanterr.options import CompareOptions

NAMES = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(6)]
STACK = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Weights of many kinds: plain, with NaN, a stack, one equal on both sides, a bias, and one that is refused."""
    folder = tmp_path_factory.mktemp("pair")
    x = {name: numbers(64, 256, seed=n) for n, name in enumerate(NAMES)}
    x[STACK] = numbers(3, 32, 64, seed=9)
    x["model.norm.weight"], x["model.layers.0.bias"] = numbers(256, seed=10), numbers(64, seed=11)
    x["model.odd.weight"] = numbers(16, 64, seed=12)
    y = dict(x)
    for name in NAMES[:5]:
        y[name], y[f"{name}_scale"] = quantized_fp8(x[name])
    y[NAMES[5]] = (x[NAMES[5]].float() * 1.01).bfloat16()
    y[NAMES[5]][3, 4] = torch.nan
    y["model.layers.0.mlp.experts.gate_up_proj"] = (
        x["model.layers.0.mlp.experts.gate_up_proj"].float() * 1.02
    ).bfloat16()
    y["model.layers.0.bias"] = x["model.layers.0.bias"] + 0.25
    y["model.odd.weight"] = torch.randint(0, 9, (16, 64), dtype=torch.int8)
    return store(folder / "x.safetensors", x), store(folder / "y.safetensors", y)


def plain(report):
    """Return the JSON of a report without its run."""
    fields = json.loads(report.to_json())
    fields.pop("run")
    return fields


def journal_of(pair, path, **options):
    return quanterr.compare(*pair, device="cpu", resume=path, **options)


def test_record_restores_the_weight(pair, monkeypatch):
    kept = []

    class Seen(Journal):
        def add(self, candidate, done):
            kept.append(done)

    monkeypatch.setattr(sharing, "Journal", Seen)
    journal_of(pair, os.devnull)

    assert 9 == len(kept)
    for done in kept:
        again = unpack(done.number, pack(done))
        assert done.sums == again.sums
        assert repr(done._replace(sums=None)) == repr(again._replace(sums=None))


@pytest.mark.parametrize("text", ["{}", "[]", "1", '{"sums": {"x": "zz"}}', '{"sums": 1, "floats": []}'])
def test_invalid_record_is_a_value_error(text):
    with pytest.raises(ValueError, match="not a record of a weight"):
        unpack(0, text)


class TestReport:
    def test_report_equals_an_undisturbed_run_after_any_number_of_records(self, pair, tmp_path):
        expected = plain(quanterr.compare(*pair, device="cpu"))
        whole = tmp_path / "whole"
        assert expected == plain(journal_of(pair, whole))
        lines = whole.read_bytes().splitlines(keepends=True)
        assert 10 == len(lines)
        for n in range(1, len(lines) + 1):
            part = tmp_path / f"part{n}"
            part.write_bytes(b"".join(lines[:n]))
            report = journal_of(pair, part)
            assert expected == plain(report)
            assert sorted(lines) == sorted(part.read_bytes().splitlines(keepends=True))
        assert 0 == report.run.read_bytes

    @pytest.mark.session
    def test_torn_or_damaged_record_and_all_after_it_are_forgotten(self, pair, tmp_path):
        expected = plain(quanterr.compare(*pair, device="cpu"))
        whole = tmp_path / "whole"
        journal_of(pair, whole)
        raw = whole.read_bytes()
        head = raw.index(b"\n") + 1
        random_places = random.Random(3)
        for n in range(20):
            at = random_places.randrange(head, len(raw))
            damaged = raw[:at] if n % 2 else raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]
            path = tmp_path / f"damaged{n}"
            path.write_bytes(damaged)
            assert expected == plain(journal_of(pair, path))

    def test_several_candidates_are_resumed(self, pair, tmp_path):
        options = CompareOptions(device="cpu", resume=tmp_path / "j")
        candidates = [pair[1], pair[0]]
        first = [plain(report) for report in compare_each(pair[0], candidates, options)]
        lines = (tmp_path / "j").read_bytes().splitlines(keepends=True)
        (tmp_path / "j").write_bytes(b"".join(lines[:7]))

        assert first == [plain(report) for report in compare_each(pair[0], candidates, options)]


def replace_file(path):
    """Replace a file by one of the same size and times, in which one scale is different."""
    raw, status = bytearray(path.read_bytes()), path.stat()
    raw[-1] ^= 1
    other = path.with_suffix(".other")
    other.write_bytes(raw)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(other, path)


class TestRefused:
    def test_journal_is_refused_for_changed_content_whatever_the_times(self, pair, tmp_path, monkeypatch):
        monkeypatch.setattr(CheckpointFile, "timestamps", ())
        copies = [Path(shutil.copy(path, tmp_path)) for path in pair]
        journal_of(copies, tmp_path / "j")
        replace_file(copies[1])
        with pytest.raises(UsageError, match=r"of another run.*files that have changed"):
            journal_of(copies, tmp_path / "j")

    @pytest.mark.parametrize(
        ("change", "expected_message"),
        [
            (lambda x, y: os.utime(y, ns=(1, 1)), "files that have changed"),
            (lambda x, y: replace_file(y), "files that have changed"),
            (lambda x, y: shutil.copy2(shutil.move(y, y.with_suffix(".moved")), y) and None, "files that have changed"),
            (lambda x, y: {"layers": ["mlp"]}, "layers"),
            (lambda x, y: {"outlier_threshold": 0.5}, "outlier_threshold"),
        ],
    )
    def test_journal_from_another_run_is_refused(self, pair, tmp_path, change, expected_message):
        copies = [Path(shutil.copy(path, tmp_path)) for path in pair]
        journal_of(copies, tmp_path / "j")
        options = change(*copies) or {}
        with pytest.raises(UsageError, match=f"of another run.*{expected_message}"):
            journal_of(copies, tmp_path / "j", **options)

    @pytest.mark.parametrize("content", [b"\x00\xff\n", b"{}\n", b'{"schema": "quanterr.report"}\n', b"[1]\n"])
    def test_file_without_a_journal_is_refused_and_kept(self, pair, tmp_path, content):
        (tmp_path / "j").write_bytes(content)
        with pytest.raises(UsageError, match="not a journal"):
            journal_of(pair, tmp_path / "j")
        assert content == (tmp_path / "j").read_bytes()

    def test_sweep_refuses_a_journal_from_a_plan(self, pair, tmp_path):
        options = {"resume": tmp_path / "j", "device": "cpu", "layers": ["odd"]}
        quanterr.plan(pair[0], bits=9, to=["int8_row"], **options)
        with pytest.raises(UsageError, match=r"of another run.*plan estimates nothing from samples"):
            quanterr.sweep(pair[0], ["int8_row"], **options)

    def test_unreadable_journal_from_another_process_is_named(self, pair, tmp_path):
        (tmp_path / "j.1").mkdir()
        with pytest.raises(ResourceError, match=r"/j\.1: Is a directory"):
            journal_of(pair, tmp_path / "j")

    def test_missing_folder_is_an_error_in_one_line(self, pair):
        done = call("compare", *pair, "--resume", "missing/j")

        assert Status.ENVIRONMENT == done.returncode
        assert "quanterr: --resume missing/j: No such file or directory\n" == done.stderr


@pytest.mark.slow
def test_run_killed_at_random_moments_ends_with_the_same_report(tmp_path):
    """A run of about half a second is killed again and again; the final report is that of an undisturbed run."""
    x = {f"model.layers.{n}.mlp.up_proj.weight": numbers(512, 1024, seed=n) for n in range(12)}
    words = ("sweep", store(tmp_path / "x.safetensors", x), "--to", "fp8_row,int4_g128,nf4", "--device", "cpu", "-q")
    call("--version")  # the server of commands may have to start, which does not count as time of a run
    started = time.monotonic()
    assert 0 == call(*words, "-o", tmp_path / "peace.json").returncode
    seconds = time.monotonic() - started
    expected = json.loads((tmp_path / "peace.json").read_text())
    moments, kills = random.Random(5), 0
    for attempt in count():
        if kills >= int(os.environ.get("MOMENTS", "3")):
            break
        more, started = ("--resume", tmp_path / f"journal{attempt}", "-o", tmp_path / "killed.json"), time.monotonic()
        while status := call(*words, *more, before=signal_after(moments.uniform(0.3, 1) * seconds)).returncode:
            assert -signal.SIGKILL == status
            kills, started = kills + 1, time.monotonic()
        seconds = min(seconds, time.monotonic() - started)  # on a less busy machine, a run may end earlier
        document = json.loads((tmp_path / "killed.json").read_text())
        assert expected | {"run": None} == document | {"run": None}
