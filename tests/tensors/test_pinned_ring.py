"""The pinned ring on the simulated device, which refuses a slot that is filled before the last copy from it is done."""

import threading
import time

import pytest
import torch
from support.simulated_device import NAME, UNKNOWN, is_pinned, simulate
from support.stored import write

from quanterr.checkpoints import open_checkpoint
from quanterr.errors import CheckpointError
from quanterr.tensors import pinned_ring, workspace
from quanterr.tensors.devices import own_stream
from quanterr.tensors.in_memory import TensorsFile
from quanterr.tensors.workspace import FilledWorkspace, Workspace

pytestmark = UNKNOWN
N = 1000  # several rounds of the ring


@pytest.fixture(autouse=True)
def small_ring(monkeypatch):
    """A ring of two slots of 64 bytes, read in pieces of 16."""
    monkeypatch.setattr(pinned_ring, "SLOTS", 2)
    for name, n in (("SLOT", 64), ("PIECE", 16)):
        monkeypatch.setattr(pinned_ring, name, n)
        monkeypatch.setattr(workspace, name, n)
    with simulate():
        yield


@pytest.fixture
def there(small_ring):
    return torch.device(NAME, 0)


@pytest.fixture
def entry(tmp_path):
    """A stored tensor of N bytes."""
    values = torch.arange(N).to(torch.uint8)
    with open_checkpoint(write(tmp_path / "x.safetensors", {"x": values})) as checkpoint:
        yield checkpoint.entries["x"]


def compute_expected(first=0, stop=N):
    return torch.arange(first, stop).to(torch.uint8).tolist()


@pytest.mark.parametrize(("first", "stop"), [(0, N), (3, 4), (5, 69), (7, 72), (N, N)])
def test_bytes_reach_the_device_in_order(there, entry, first, stop):
    with own_stream(there):
        assert compute_expected(first, stop) == Workspace(there).read("x", entry, first, (stop - first,)).tolist()


def test_pinned_memory_is_limited_to_the_slots(there, entry):
    reader = Workspace(there)
    reader.read("x", entry, 0, (N,)).tolist()
    slots = [reader._ring[0]._free.get() for _ in range(2)]

    assert [64, 64] == [slot._host.numel() for slot in slots]
    assert all(is_pinned(slot._host) for slot in slots)


def test_buffer_in_use_is_not_overwritten(there, entry):
    with own_stream(there):
        reader = Workspace(there)
        sums = [reader.read("x", entry, first, (200,)).long().sum() for first in range(0, N, 200)]
        total = sum(map(int, sums))

    assert sum(compute_expected()) == total


def test_threads_share_the_ring(there, entry):
    read_bytes, together = {}, threading.Barrier(4)

    def read(number):
        with torch.inference_mode(), own_stream(there):
            reader = Workspace(there)
            together.wait()
            read_bytes[number] = [reader.read("x", entry, first, (100,)).tolist() for first in range(0, N, 100)]

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(
        read_bytes[number] == [compute_expected(first, first + 100) for first in range(0, N, 100)]
        for number in range(4)
    )


def test_slots_are_free_again_after_an_error(there, entry, monkeypatch):
    reader, read_into = Workspace(there), type(entry.file).read_into

    def fail(file, view, offset):
        if offset == entry.offset + 48:
            raise CheckpointError("read failed")
        read_into(file, view, offset)

    with monkeypatch.context() as patched:
        patched.setattr(type(entry.file), "read_into", fail)
        for _ in range(3):
            with pytest.raises(CheckpointError, match="read failed"):
                reader.read("x", entry, 0, (N,))

    assert compute_expected() == reader.read("x", entry, 0, (N,)).tolist()


def test_error_is_raised_after_the_other_pieces_are_read(there, entry, monkeypatch):
    read = []

    def fail(file, view, offset):
        if offset == entry.offset:
            raise CheckpointError("read failed")
        time.sleep(0.02)  # until the error would have ended the load
        read.append(offset)

    monkeypatch.setattr(type(entry.file), "read_into", fail)
    with pytest.raises(CheckpointError, match="read failed"):
        Workspace(there).read("x", entry, 0, (64,))

    assert 3 == len(read)


def test_only_local_files_are_read_in_pieces(there, entry, monkeypatch):
    lengths = []
    for file in (entry.file, TensorsFile("x", {"x": torch.arange(64).to(torch.uint8)})):
        read_into = type(file).read_into
        monkeypatch.setattr(
            type(file),
            "read_into",
            lambda file, view, offset, go=read_into: (lengths.append(len(view)), go(file, view, offset)),
        )
        stored = entry if file is entry.file else file.entries["x"]
        assert compute_expected(0, 64) == Workspace(there).read("x", stored, 0, (64,)).tolist()

    assert [16, 16, 16, 16, 64] == lengths


def test_replaced_codes_do_not_depend_on_pieces(there, entry):
    """Bytes 2 and 3 of each block of 7 are replaced; pieces are whole blocks."""
    reader = FilledWorkspace(there)
    reader.fill((entry,), 255, 7, (2, 4))
    read_bytes = reader.read("x", entry, 0, (994,)).tolist()

    assert [255 if n % 7 in (2, 3) else n % 256 for n in range(994)] == read_bytes
