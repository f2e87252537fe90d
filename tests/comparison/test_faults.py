"""Faults of the machine during a run: too little memory, too few files, signals at any moment."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from support.forked import command, signal_after, signalled_before
from support.stored import pair, raw_header, write, write_index

from quanterr.documents.reading import read_report
from quanterr.errors import Status

pytestmark = pytest.mark.session

MIB = 1 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A BF16 original of 64 MiB and its FP8 cast, larger than the memory that some tests leave."""
    folder = tmp_path_factory.mktemp("large")
    weight = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = {f"layers.{n}.mlp.weight": weight.clone() for n in range(8)}
    y = {name: weight.to(torch.float8_e4m3fn) for name in x}
    return write(folder / "x.safetensors", x), write(folder / "y.safetensors", y)


class TestMemory:
    @pytest.mark.parametrize("mib", [0, 1, 3, 6, 12, 24, 30, 48])
    def test_too_little_memory_is_an_environment_error(self, large, mib):
        # The command line is parsed within the limit, as in a new process.
        parse = "import typer.main; typer.main.get_command.cache_clear()"
        done = command("compare", *large, "--device", "cpu", "-q", memory=mib * MIB, before=parse)

        # How much memory a run needs depends on the number of cores.
        assert done.status in (Status.ENVIRONMENT, Status.OK), done.stderr
        assert done.status == Status.OK or "quanterr: out of memory" in done.stderr
        assert done.status == Status.ENVIRONMENT or mib > 20
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize("mib", [8, 13, 18, 25])
    def test_too_little_memory_for_a_header_is_an_environment_error(self, tmp_path, mib):
        """The safetensors library would abort the process."""
        names = [f"layers.{n}.weight" for n in range(20_000)]
        header = {name: {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n, name in enumerate(names)}
        path = raw_header(tmp_path / "x.safetensors", json.dumps(header).encode(), bytes(len(names)))

        done = command("inspect", path, memory=mib * MIB)

        assert Status.ENVIRONMENT == done.status, done.stderr
        assert "quanterr: out of memory" in done.stderr

    def test_memory_may_be_smaller_than_the_files(self, tmp_path):
        """Neither the run nor the library that checks the header needs room for a file."""
        header = {"w": {"dtype": "BF16", "shape": [1, 1 << 30], "data_offsets": [0, 2 << 30]}}
        path = raw_header(tmp_path / "x.safetensors", json.dumps(header).encode())
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + (2 << 30))

        done = command("inspect", path, memory=256 * MIB)

        assert (Status.OK, "") == (done.status, done.stderr)


def in_shards(folder, n):
    """Write the same tensors one per shard and in a single file."""
    names = [f"layers.{number}.weight" for number in range(n)]
    header = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    for name in names:
        raw_header(folder / f"{name}.safetensors", json.dumps({name: header}).encode(), bytes(range(16)))
    index = write_index(folder, {name: f"{name}.safetensors" for name in names})
    entries = {name: header | {"data_offsets": [16 * at, 16 * at + 16]} for at, name in enumerate(names)}
    return raw_header(folder / "whole.st", json.dumps(entries).encode(), bytes(range(16)) * n), index


class TestOpenFiles:
    def test_open_files_may_exceed_the_soft_limit(self, tmp_path):
        done = command("compare", *in_shards(tmp_path, 2000), "-q", files=256)

        assert Status.OK == done.status, done.stderr
        assert "2000" not in done.stderr
        assert "compared" in done.stderr

    def test_open_files_beyond_the_hard_limit_are_an_environment_error(self, tmp_path):
        limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
        done = command("compare", *in_shards(tmp_path, 100), "-q", before=limit)

        assert Status.ENVIRONMENT == done.status
        assert "safetensors: too many open files; raise the limit with `ulimit -n`" in done.stderr


OLD = '{"schema": "quanterr.report"}  an earlier report'
SIGNALLED = {signal.SIGINT: Status.INTERRUPTED, signal.SIGTERM: Status.TERMINATED, signal.SIGKILL: -signal.SIGKILL}


def after_goes(n, number):
    """Return Python that sends the signal once this much work has begun."""
    return signalled_before("quanterr.comparison.worker.Worker.sum_chunks", n, number)


@pytest.mark.slow
class TestSignals:
    """The work consists of eight weights, each measured in one go."""

    def run_until_signal(self, files, path, before):
        """Run where an earlier report exists, and return the status and the new report, which must be whole."""
        path.write_text(OLD)
        done = command("compare", *files, "--device", "cpu", "-q", "-o", path, before=before)
        assert "Traceback" not in done.stderr
        report = None if path.read_text() == OLD else read_report(path)
        # A run that was interrupted early may leave the old report.
        assert done.status < 0 or report is not None or done.status == Status.INTERRUPTED
        assert report is None or report.complete or (done.status > 0 and "inconclusive" == report.verdict)
        return done.status, report

    @pytest.mark.parametrize("goes", [0, 3, 5])
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signal_at_work_leaves_an_incomplete_report_that_passes_no_gate(self, large, tmp_path, number, goes):
        path = tmp_path / "report.json"
        status, report = self.run_until_signal(large, path, after_goes(goes, number))
        judged = command("gate", path, "--require", "lossless >= 0", "--require", "snr_db >= -1000")

        assert (SIGNALLED[number], False) == (status, report.complete)
        assert any("interrupted" in reason for reason in report.reasons)
        assert ["report.json"] == [file.name for file in tmp_path.iterdir()]
        assert Status.INCONCLUSIVE == judged.status

    @pytest.mark.parametrize("goes", [0, 6])
    def test_kill_at_work_leaves_the_earlier_report(self, large, tmp_path, goes):
        before = after_goes(goes, signal.SIGKILL)

        assert (-signal.SIGKILL, None) == self.run_until_signal(large, tmp_path / "report.json", before)

    @pytest.mark.parametrize("number", SIGNALLED)
    def test_signal_at_any_moment_leaves_a_whole_report(self, large, tmp_path, number):
        moments = random.Random(0)
        for _ in range(4):
            before = signal_after(moments.uniform(0, 0.8), number)
            status, _ = self.run_until_signal(large, tmp_path / "report.json", before)

            assert status in (Status.OK, SIGNALLED[number], -number)

    @pytest.mark.parametrize("call", ["fsync", "replace"])
    def test_kill_while_writing_leaves_the_earlier_report(self, tmp_path, call):
        path = tmp_path / "report.json"
        path.write_text(OLD)
        done = command(
            "compare",
            *pair(tmp_path),
            "-q",
            "-o",
            path,
            before=f"import os; os.{call} = lambda *_: os.kill(os.getpid(), 9)",
        )

        assert (-signal.SIGKILL, OLD) == (done.status, path.read_text())

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    @pytest.mark.parametrize("seconds", [0.1, 0.4])
    def test_early_signal_ends_the_run_without_looking_like_a_failed_gate(self, tmp_path, number, seconds):
        """Torch is still being imported. A bare except in some library may swallow one signal, but never all.

        The first waits until Python itself has started, which a signal would end with status 1.
        """
        code = "import runpy; print(flush=True); runpy.run_module('quanterr', run_name='__main__', alter_sys=True)"
        words = [sys.executable, "-c", code, "compare", *map(str, pair(tmp_path)), "-q"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            process.stdout.readline()
            while process.poll() is None:
                time.sleep(seconds)
                process.send_signal(number)
            numbers = process.stderr.read()

        assert process.returncode in (-number, SIGNALLED[number]), numbers
