"""Checkpoints on other machines: real servers on the loopback, with the faults that networks have.

CUTS=200 python -m pytest tests/checkpoints/test_remote.py     as many runs with connections that are cut; 5 otherwise
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from hashlib import sha256

import pytest
from support.forked import call
from support.making import numbers, quantized_fp8, store
from support.serving import serving, serving_hub
from support.small_models import load_tensors, quantized_by, save_model, with_words
from support.stored import write, write_index

import quanterr
from quanterr.checkpoints import open_checkpoint, remote
from quanterr.errors import CheckpointError, ResourceError, Status, UsageError
from quanterr.util import waiting

NAMES = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(4)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Small blocks, short waits: many requests in little time."""
    monkeypatch.setattr(remote, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(waiting, "WAIT", 0.001)
    monkeypatch.setattr(waiting, "LONGEST_WAIT", 0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An original in two shards with an index, and one file of FP8."""
    path = tmp_path_factory.mktemp("stored")
    x = {name: numbers(96, 512, seed=n) for n, name in enumerate(NAMES)}
    y = {}
    for name, weight in x.items():
        y[name], y[f"{name}_scale"] = quantized_fp8(weight)
    store(path / "model-00001-of-00002.safetensors", {name: x[name] for name in NAMES[:2]})
    store(path / "model-00002-of-00002.safetensors", {name: x[name] for name in NAMES[2:]})
    shards = {name: f"model-0000{1 + n // 2}-of-00002.safetensors" for n, name in enumerate(NAMES)}
    write_index(path, shards)
    (path / "config.json").write_text('{"model_type": "llama"}')
    store(path / "fp8.safetensors", y)
    return path


@pytest.fixture
def server(folder):
    with serving(folder) as server:
        yield server


def plain(report):
    """Return the parts of a report that do not depend on where the files are."""
    fields = json.loads(report.to_json())
    return [fields[key] for key in ("verdict", "layers", "aggregate", "coverage", "lossless", "findings")]


@pytest.fixture(scope="module")
def expected_report(folder):
    index = folder / "model.safetensors.index.json"
    return plain(quanterr.compare(index, folder / "fp8.safetensors", device="cpu"))


def compare(server):
    return quanterr.compare(f"{server.url}/model.safetensors.index.json", f"{server.url}/fp8.safetensors", device="cpu")


class TestHttp:
    def test_remote_report_equals_the_local_one(self, server, expected_report):
        assert expected_report == plain(compare(server))

    def test_headers_take_few_requests_and_only_necessary_bytes_are_read(self, server, folder):
        with open_checkpoint(f"{server.url}/fp8.safetensors") as checkpoint:
            assert 8 == len(checkpoint.entries)
            assert len(server.requests) <= 11  # eight of the requests ask for configurations
        server.sent = 0
        size = (folder / "fp8.safetensors").stat().st_size
        report = quanterr.compare(folder, f"{server.url}/fp8.safetensors", layers=["layers.0"], device="cpu")
        assert 1 == len(report.layers)
        assert server.sent < size * 0.8

    def test_remote_files_mix_with_local_ones(self, server, folder, expected_report):
        assert expected_report == plain(
            quanterr.compare(folder / "model.safetensors.index.json", f"{server.url}/fp8.safetensors", device="cpu")
        )

    @pytest.mark.parametrize(
        ("fault", "expected_message"),
        [
            (lambda handler, first, last: handler.refuse(404) or True, "no such file"),
            (lambda handler, first, last: handler.refuse(403) or True, "HTTP 403, not permitted"),
            (lambda handler, first, last: handler.refuse(418) or True, "HTTP 418"),
        ],
    )
    def test_refusals_are_immediate_errors(self, server, fault, expected_message):
        server.faults.append(fault)
        with pytest.raises(CheckpointError, match=expected_message):
            open_checkpoint(f"{server.url}/fp8.safetensors")
        assert 1 == len(server.requests)

    def test_forbidden_configuration_is_noted(self, server):
        def forbidden(handler, first, last):
            return "config.json" in handler.path and (handler.refuse(403) or True)

        server.faults.append(forbidden)
        with open_checkpoint(f"{server.url}/fp8.safetensors") as checkpoint:
            assert {} == checkpoint.config
            (note,) = checkpoint.notes
        assert "/config.json: ignored: " in note
        assert "HTTP 403, not permitted" in note

    def test_server_without_ranges_is_an_error(self, server, folder):
        path = folder / "fp8.safetensors"
        server.faults.append(lambda h, a, b: h.send(path, 0, path.stat().st_size - 1, 0, '"x"', 200) or True)
        with pytest.raises(CheckpointError, match="the server does not serve ranges"):
            open_checkpoint(f"{server.url}/fp8.safetensors")

    def test_repeated_failure_is_an_error(self, server):
        server.faults.append(lambda handler, first, last: handler.refuse(503, Retry_After="0") or True)
        with pytest.raises(ResourceError, match=r"6 attempts failed, the last: HTTP 503"):
            open_checkpoint(f"{server.url}/fp8.safetensors")

    def test_unreachable_server_is_an_error(self):
        with pytest.raises(ResourceError, match="attempts failed, the last: "):
            open_checkpoint("http://127.0.0.1:9/x.safetensors")


class TestCache:
    """With --cache, the next run uses what was read."""

    @pytest.fixture
    def own_server(self, folder, tmp_path):
        """A server with copies that a test may change."""
        shutil.copytree(folder, tmp_path / "served")
        with serving(tmp_path / "served") as server:
            yield server

    def compare(self, server, cache):
        """Return the report and the byte ranges of all answers longer than one byte."""
        server.requests.clear()
        index, fp8 = f"{server.url}/model.safetensors.index.json", f"{server.url}/fp8.safetensors"
        report = quanterr.compare(index, fp8, device="cpu", cache=cache)
        return plain(report), {span for _, span, _ in server.requests if span != "bytes=0-0"}

    def test_second_run_asks_only_for_versions(self, own_server, expected_report, tmp_path):
        first, asked = self.compare(own_server, tmp_path / "cache")
        second, again = self.compare(own_server, tmp_path / "cache")
        assert expected_report == first == second
        assert len(asked) > 5
        assert set() == again

    def test_damaged_or_short_pieces_are_fetched_again(self, own_server, expected_report, tmp_path):
        self.compare(own_server, tmp_path / "cache")
        damaged, short, empty, *_ = sorted(path for path in (tmp_path / "cache").rglob("*-*") if path.is_file())
        damaged.write_bytes(bytes([damaged.read_bytes()[0] ^ 1]) + damaged.read_bytes()[1:])
        short.write_bytes(short.read_bytes()[:-1])
        empty.write_bytes(b"")
        report, asked = self.compare(own_server, tmp_path / "cache")
        assert expected_report == report
        assert {
            f"bytes={a}-{int(b) - 1}" for a, b in (path.name.split("-") for path in (damaged, short, empty))
        } == asked

    def test_replaced_file_is_fetched_again(self, own_server, expected_report, tmp_path):
        self.compare(own_server, tmp_path / "cache")
        stored = own_server.folder / "fp8.safetensors"
        before = stored.stat()
        content = bytearray(stored.read_bytes())
        content[-1] ^= 1
        stored.write_bytes(content)
        os.utime(stored, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        report, _ = self.compare(own_server, tmp_path / "cache")
        assert expected_report != report

    def test_unwritable_cache_folder_is_an_error(self, own_server, tmp_path):
        (tmp_path / "cache").write_text("a file")
        with pytest.raises(ResourceError, match=r"cache: .*; the cache cannot be written: free space, choose"):
            self.compare(own_server, tmp_path / "cache")


class TestResume:
    def test_journal_names_the_version_for_each_file(self, server, folder, tmp_path):
        url, journal = f"{server.url}/fp8.safetensors", tmp_path / "journal"
        quanterr.compare(folder, url, device="cpu", resume=journal)
        head = json.loads(journal.read_text().partition("\n")[0])["run"]

        written = (folder / "fp8.safetensors").stat().st_mtime_ns
        assert [["fp8.safetensors", (folder / "fp8.safetensors").stat().st_size, f'"{written:x}"']] == (
            head["inputs"][1]["files"]
        )
        assert [] == head["written"][-1]  # remote files have neither inodes nor local times

    def test_journal_for_another_version_is_refused(self, server, folder, tmp_path):
        path = folder / "fp8.safetensors"
        url, journal, before = f"{server.url}/{path.name}", tmp_path / "journal", path.stat().st_mtime_ns
        quanterr.compare(folder, url, device="cpu", resume=journal)
        os.utime(path, ns=(before + 1, before + 1))
        try:
            with pytest.raises(UsageError, match="of another run"):
                quanterr.compare(folder, url, device="cpu", resume=journal)
        finally:
            os.utime(path, ns=(before, before))


class TestFaults:
    @pytest.mark.parametrize("seed", range(int(os.environ.get("CUTS", "5"))))
    def test_connection_cut_anywhere_changes_no_digit(self, server, expected_report, folder, seed):
        chosen = random.Random(seed)

        def cut(handler, first, last):
            if chosen.random() > 0.2:
                return False
            path = folder / handler.path.lstrip("/")
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {first}-{last}/{path.stat().st_size}")
            handler.send_header("Content-Length", str(last - first + 1))
            handler.send_header("ETag", f'"{path.stat().st_mtime_ns:x}"')
            handler.end_headers()
            with path.open("rb") as file:
                file.seek(first)
                handler.wfile.write(file.read(chosen.randrange(last - first + 1)))
            handler.close_connection = True
            handler.connection.close()
            return True

        server.faults.append(cut)
        try:
            assert expected_report == plain(compare(server))
        except ResourceError as error:
            assert "attempts failed" in str(error)  # noqa: PT017 - either is right, a wrong number never is

    def test_bytes_from_another_place_are_requested_again(self, server, expected_report, folder):
        answers = []

        def elsewhere(handler, first, last):
            answers.append(first)
            if len(answers) % 3 or first == last or not first:
                return False
            path = folder / handler.path.lstrip("/")
            tag = f'"{path.stat().st_mtime_ns:x}"'
            handler.send(path, first - 1, last - 1, path.stat().st_size, tag)
            return True

        server.faults.append(elsewhere)
        assert expected_report == plain(compare(server))

    def test_busy_servers_are_asked_again(self, server, expected_report):
        answers = []

        def busy(handler, first, last):
            answers.append(first)
            if len(answers) % 2:
                return False
            handler.refuse(429 if len(answers) % 4 else 500)
            return True

        server.faults.append(busy)
        assert expected_report == plain(compare(server))

    def test_file_replaced_during_reading_is_an_error(self, server, folder):
        path = folder / "fp8.safetensors"
        before = path.stat().st_mtime_ns
        seen = []

        def replace(handler, first, last):
            seen.append(first)
            if first and handler.path == "/fp8.safetensors":  # the header has been read by then
                os.utime(path, ns=(before + 1, before + 1))
            return False

        server.faults.append(replace)
        try:
            with pytest.raises(CheckpointError, match="changed while being read"):
                compare(server)
        finally:
            os.utime(path, ns=(before, before))


class TestEvaluate:
    def test_evaluation_reads_weights_config_and_tokenizer_remotely(self, tmp_path):
        pytest.importorskip("transformers", reason='pip install "quanterr[evaluate]"')
        original = save_model("llama", tmp_path / "x")
        with_words(original)
        write(tmp_path / "y/model.safetensors", quantized_by(quantized_fp8, load_tensors(original))[0])
        (tmp_path / "text.txt").write_text(" ".join(f"w{n % 90}" for n in range(200)))
        options = {"text": tmp_path / "text.txt", "context": 32, "chunks": 2}
        before = os.listdir(tempfile.gettempdir())
        here = quanterr.evaluate(original, [tmp_path / "y/model.safetensors"], **options)
        with serving(tmp_path) as server:
            files = [f"{server.url}/{side}/model.safetensors" for side in "xy"]
            evaluation = quanterr.evaluate(files[0], files[1:], **options)
            (original / "config.json").unlink()
            with pytest.raises(CheckpointError, match=r"/x/config\.json: No such file .*; the folder of a model"):
                quanterr.evaluate(files[0], files[1:], **options)

        assert here.tokens == evaluation.tokens
        assert here.candidates[0].scores == evaluation.candidates[0].scores
        assert not [name for name in set(os.listdir(tempfile.gettempdir())) - set(before) if "quanterr" in name]


class TestCredentials:
    @pytest.mark.session
    def test_credentials_are_sent_and_never_shown(self, server, folder, tmp_path):
        server.token = "c2VjcmV0OnRva2Vu"
        url = server.url.replace("://", "://secret:token@") + "/fp8.safetensors?X-Signature=sssh"
        done = call("compare", folder, url, "-o", tmp_path / "r.json", "--resume", tmp_path / "j")
        written = (tmp_path / "r.json").read_text() + (tmp_path / "j").read_text() + done.stdout + done.stderr

        assert Status.OK == done.returncode, done.stderr
        assert not any(word in written for word in ("secret", "token", "sssh", "c2Vj"))
        assert done.stderr.startswith("quanterr: reading from 127.0.0.1:")
        assert any("X-Signature=sssh" in path for path, _, _ in server.requests)

    def test_credentials_are_not_sent_to_another_host(self, server, folder):
        with serving(folder) as other:
            target = other.url.replace("127.0.0.1", "localhost")

            def away(handler, first, last):
                if "fp8" not in handler.path:
                    return False
                handler.refuse(302, Location=f"{target}/fp8.safetensors")
                return True

            server.faults.append(away)
            url = server.url.replace("://", "://secret:token@")
            with open_checkpoint(f"{url}/fp8.safetensors") as checkpoint:
                assert checkpoint.entries
            assert {None} == {authorization for _, _, authorization in other.requests}
            assert all(authorization for _, _, authorization in server.requests)


class TestWaits:
    """A server asks to wait; patches apply in the child process that runs the command."""

    @pytest.mark.session
    @pytest.mark.parametrize("quiet", [False, True])
    def test_waits_are_reported_unless_quiet(self, server, folder, quiet):
        refused = iter([True])
        server.faults.append(lambda h, *_: next(refused, False) and (h.refuse(429, Retry_After="0") or True))
        before = "from quanterr.util import waiting; waiting.MIN_REPORTED_WAIT, waiting.WAIT = 0, 0.001"
        words = ["compare", folder, f"{server.url}/fp8.safetensors", "--device", "cpu", *(["-q"] if quiet else [])]
        done = call(*words, before=before)

        assert Status.OK == done.returncode, done.stderr
        lines = [line for line in done.stderr.splitlines() if "HTTP 429" in line]
        assert bool(lines) is not quiet
        assert all(line.startswith(f"quanterr: {server.url[7:]}: HTTP 429: waits 0 s, until ") for line in lines)

    @pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
    @pytest.mark.parametrize("opened", [False, True])
    def test_waits_end_when_the_run_is_interrupted(self, server, folder, tmp_path, number, opened):
        def busy(handler, first, last):
            return (
                first >= (opened << 16) and "fp8" in handler.path and (handler.refuse(429, Retry_After="300") or True)
            )

        server.faults.append(busy)
        before = (
            "import os, signal\nfrom quanterr.checkpoints import remote\nfrom quanterr.util import waiting\n"
            "remote.BLOCK_BYTES, busy = 1 << 16, waiting.handle_busy_host\n"
            f"once = iter([signal.{number}])\n"
            "def interrupted(*words):\n"
            "    found = busy(*words)\n"
            "    [os.kill(os.getpid(), number) for number in once]\n"
            "    return found\n"
            "from quanterr.checkpoints import http_client\n"
            "http_client.handle_busy_host = interrupted"
        )
        report = tmp_path / "r.json"
        done = call("compare", folder, f"{server.url}/fp8.safetensors", "--device", "cpu", "-o", report, before=before)

        assert 128 + getattr(signal, number) == done.returncode, done.stderr
        assert "HTTP 429: waits 300 s, until " in done.stderr
        if opened:
            assert not quanterr.read_report(report).complete
        else:
            assert "interrupted while waiting for 127.0.0.1" in done.stderr


@pytest.mark.slow
class TestHub:
    """huggingface_hub itself talks to a stand-in for the hub."""

    def test_model_is_read_at_the_commit_found_at_the_start(self, folder, expected_report, tmp_path):
        pytest.importorskip("huggingface_hub", reason='pip install "quanterr[remote]"')
        with serving_hub(folder) as server:
            environment = {
                "HF_ENDPOINT": server.url,
                "HF_HUB_CACHE": str(tmp_path),
                "HF_TOKEN": "hf_secret",
                "HF_HUB_OFFLINE": "0",
            }
            done = subprocess.run(  # a new process: huggingface_hub reads its settings when it is imported
                [sys.executable, "-m", "quanterr", "compare", "hf://org/model/model.safetensors.index.json",
                 "hf://org/model@main/fp8.safetensors", "-o", tmp_path / "r.json", "--device", "cpu"],
                cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True,
            )  # fmt: skip
            requests = [path for path, _, _ in server.requests if "/resolve/" in path]
            private = {authorization for _, _, authorization in server.files.requests}

        assert Status.OK == done.returncode, done.stderr
        report = quanterr.read_report(tmp_path / "r.json")
        assert expected_report == plain(report)
        assert [server.commit] * 2 == [report.original.revision, report.quantized.revision]
        assert 4 == sum(path.endswith((".safetensors", ".index.json")) for path in requests)  # each file once
        assert {None} == private
        assert all(f"/org/model/resolve/{server.commit}/" in path for path in requests)
        assert "hf_secret" not in (tmp_path / "r.json").read_text() + done.stdout + done.stderr

    def test_hub_checksums_are_verified(self, folder, tmp_path):
        pytest.importorskip("huggingface_hub", reason='pip install "quanterr[remote]"')
        with serving_hub(folder) as server:
            environment = {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
            command = [sys.executable, "-m", "quanterr", "inspect", "hf://org/model/fp8.safetensors", "--verify"]
            ends = []
            for stated in ({}, {"fp8.safetensors": {"sha256": "0" * 64}}):
                server.stated = stated
                ends.append(subprocess.run(command, env=os.environ | environment, capture_output=True, text=True))

        assert [Status.OK, Status.INCONCLUSIVE] == [done.returncode for done in ends], ends
        assert "SHA-256 of 1 file" in ends[0].stdout
        actual = sha256((folder / "fp8.safetensors").read_bytes()).hexdigest()
        assert f"its SHA-256 is {actual}, and the hub states {'0' * 64}" in " ".join(ends[1].stdout.split())


@pytest.mark.slow
class TestS3:
    @pytest.fixture(scope="class")
    @classmethod
    def bucket(cls, folder):
        moto = pytest.importorskip("moto.server", reason="moto is not installed (pip install -e '.[dev]')")
        pytest.importorskip("s3fs", reason='pip install "quanterr[remote]"')
        import boto3

        server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}
        keys["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
        before = {key: os.environ.get(key) for key in keys}
        os.environ.update(keys)
        client = boto3.client("s3")
        client.create_bucket(Bucket="models")
        for path in folder.iterdir():
            prefix = "quantized/" if path.name.startswith("fp8") else "original/"
            client.upload_file(str(path), "models", prefix + path.name)
        yield client
        server.stop()
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})

    def test_s3_folders_and_files_are_read(self, bucket, expected_report):
        report = quanterr.compare("s3://models/original", "s3://models/quantized/fp8.safetensors", device="cpu")
        assert expected_report == plain(report)

    def test_missing_s3_file_proposes_existing_ones(self, bucket):
        with pytest.raises(CheckpointError, match=r"no such file; did you mean fp8\.safetensors"):
            open_checkpoint("s3://models/quantized/fp9.safetensors")

    def test_replaced_s3_object_is_an_error(self, bucket, folder):
        with open_checkpoint("s3://models/quantized/fp8.safetensors") as checkpoint:
            bucket.put_object(Bucket="models", Key="quantized/fp8.safetensors", Body=b"0" * checkpoint.files[0].size)
            entry = checkpoint.entries[NAMES[3]]
            with pytest.raises(CheckpointError, match="changed while being read"):
                entry.read()
        bucket.upload_file(str(folder / "fp8.safetensors"), "models", "quantized/fp8.safetensors")


def test_missing_extra_is_named():
    before = "import sys; sys.modules['fsspec'] = sys.modules['fsspec.core'] = None"
    done = call("inspect", "s3://models/x.safetensors", before=before)

    assert Status.USAGE == done.returncode
    assert 'pip install "quanterr[remote]"' in done.stderr
