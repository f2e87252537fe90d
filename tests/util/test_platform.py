"""Results are the same without functions that some systems lack."""

import ctypes
import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from support.forked import call
from support.making import store
from support.modules import MODULES as FILES

from quanterr.util import platform

# Without code that runs at import, and code that only hatch or Triton runs.
MODULES = sorted(FILES.keys() - {"quanterr.__main__", "quanterr.kernel.build", "quanterr.kernel.triton_sums"})
# A child executes this before the command: it lacks all that Windows lacks, and preadv as old macOS does.
HIDDEN = f"""
import os, sys
for name in ("resource", "fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("preadv", "pread", "fchmod", "posix_fadvise", "sched_getaffinity"):
    if hasattr(os, name):
        delattr(os, name)
import quanterr
imported_before = quanterr
for name in [name for name in sys.modules if name.partition(".")[0] == "quanterr"]:
    del sys.modules[name]
for name in {MODULES}:
    __import__(name)
import quanterr
assert quanterr.util.platform.resource is None
imported_before.cli = quanterr.cli
"""


@pytest.fixture
def pair(tmp_path):
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    stored = {"a.weight": x, "b.weight": x.T.contiguous()}
    original = store(tmp_path / "x.safetensors", stored)
    return original, store(tmp_path / "y.safetensors", {name: w.half() for name, w in stored.items()})


def test_comparison_is_the_same_without_functions_missing_on_windows(pair, tmp_path):
    reports = []
    for name, before in (("plain", ""), ("hidden", HIDDEN)):
        path = tmp_path / f"{name}.json"
        done = call("compare", *pair, "-o", path, before=before)
        assert (0, "") == (done.returncode, done.stderr)
        report = json.loads(path.read_text())
        reports.append({key: report[key] for key in ("layers", "aggregate", "findings", "verdict")})

    assert reports[0] == reports[1]


@pytest.mark.slow
def test_commands_are_the_same_without_functions_missing_on_windows(pair, tmp_path):
    report = tmp_path / "report.json"
    call("compare", *pair, "-o", report)
    gated = ("gate", report, "--require", "snr_db >= 20"), ("gate", report, "--require", "snr_db >= 200")
    for words in (("--help",), ("--version",), *gated, ("render", report, "--to", "md")):
        plain, hidden = call(*words), call(*words, before=HIDDEN)

        assert (plain.returncode, plain.stdout) == (hidden.returncode, hidden.stdout)
        assert words[0] == "gate" or plain.returncode == 0


def test_path_has_slashes_in_a_report():
    assert "C:/models/a.gguf" == platform.with_slashes(r"C:\models\a.gguf", "\\")
    assert r"a\b.gguf" == platform.with_slashes(r"a\b.gguf", "/")


@pytest.mark.parametrize(("vendor", "is_amd"), [("AuthenticAMD", True), ("GenuineIntel", False), (None, False)])
def test_cpu_vendor_is_read_from_the_system(vendor, is_amd, monkeypatch, tmp_path):
    path = tmp_path / "cpuinfo"
    if vendor is not None:
        path.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: 26\n")
    monkeypatch.setattr(platform, "CPUS", path)

    assert is_amd is platform.has_amd_cpu()


class Windows:
    """Imitate ReadFile of the Windows API, as documented, for a descriptor of this system."""

    error = 0

    def __init__(self, size):
        self.size = size

    def ReadFile(self, handle, room, length, n, place):  # noqa: N802 - its name
        at = place._obj.low + (place._obj.high << 32)
        data = os.pread(handle.value, length.value, at)
        if at >= self.size:
            Windows.error = 38
            return 0
        if handle.value < 0:
            Windows.error = 6
            return 0
        ctypes.memmove(room, data, len(data))
        n._obj.value = len(data)
        return 1


@pytest.fixture
def windows(monkeypatch):
    """The code for Windows, on a system without its libraries."""
    monkeypatch.setattr(platform, "WINDOWS", True)
    monkeypatch.delattr(os, "preadv")
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(get_osfhandle=lambda descriptor: descriptor))
    monkeypatch.setattr(ctypes, "get_last_error", lambda: Windows.error, raising=False)
    monkeypatch.setattr(ctypes, "WinError", lambda code: OSError(code, "of Windows"), raising=False)


def test_windows_reads_beyond_32_bit_offsets_and_knows_the_end(windows, monkeypatch, tmp_path):
    at, path = (1 << 32) + 5, tmp_path / "sparse"
    with path.open("wb") as file:
        file.seek(at)
        file.write(b"0123456789")
    monkeypatch.setattr(ctypes, "WinDLL", lambda *_, **__: Windows(at + 10), raising=False)
    room = bytearray(8)
    with path.open("rb") as file:
        assert 8 == platform.read_at(file.fileno(), memoryview(room), at)
        assert b"01234567" == room
        assert 2 == platform.read_at(file.fileno(), memoryview(room), at + 8)
        assert 0 == platform.read_at(file.fileno(), memoryview(room), at + 10)
        assert 0 == file.tell()


def test_windows_syncs_no_folder_and_has_no_descriptor_path(windows, tmp_path):
    platform.sync_folder(tmp_path / "none")

    assert platform.path_of_descriptor(3) is None
    assert platform.is_closed_pipe(OSError(22, "Invalid argument"))
    assert -1 == platform.kernel_file(-1)


@pytest.mark.parametrize("cold", [None, 0, 5_000, 9_999])
def test_bytes_in_memory_are_not_requested(cold, monkeypatch):
    def read(descriptor, views, offset, flags):
        if offset == cold:
            raise BlockingIOError
        return 1

    requested = []
    system = SimpleNamespace(RWF_NOWAIT=8, POSIX_FADV_WILLNEED=3, preadv=read)
    system.posix_fadvise = lambda *given: requested.append(given)
    monkeypatch.setattr(platform, "os", system)

    platform.will_need(-5, 0, 10_000)

    assert (cold is not None) == ((-5, 0, 10_000, 3) in requested)
