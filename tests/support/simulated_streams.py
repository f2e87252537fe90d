"""Streams of a simulated device: the known order of work, and errors where work lacks a necessary order.

Work is computed at once, but counts as done only when a stream or event is waited for. What is merely likely to be in
time is an error, so a test does not depend on luck:

    a host buffer that is filled again before a copy from it is known to be done
    memory that one stream reads or writes while another may still write it, or writes while it may still be read
    memory that is freed on its own stream while another may still use it
"""

import threading
from collections import deque

import torch

LOCK = threading.RLock()
hazards: list[str] = []  # hazards that a destructor found, which cannot raise them


class HazardError(AssertionError):
    """On a real device, the result would depend on timing."""


class Stream:
    """A stream of work in order: ``issued`` operations, of which ``done`` are known to be done."""

    def __init__(self, device):
        self.device, self.issued, self.done = torch.device(device), 0, 0
        self.known = {}  # stream → how much of its work comes before what is issued here from now on
        self._waits = deque()  # (number of the last work before a wait, what is awaited: stream → how much of its work)
        self._copies = deque()  # (number, host memory, its contents when the copy was issued)

    def issue(self):
        """Return the number of another piece of work."""
        with LOCK:
            self.issued += 1
            return self.issued

    def copy_later(self, number, source):
        """Note that work ``number`` reads host memory, which must not change until it is known to be done."""
        memory = source.reshape(-1).view(torch.uint8)
        with LOCK:
            self._copies.append((number, memory, memory.clone()))

    def complete(self, number):
        """Mark all work up to ``number`` as done, and what it waited for on other streams."""
        with LOCK:
            self.done = max(self.done, number)
            while self._waits and self._waits[0][0] < number:
                for stream, awaited in self._waits.popleft()[1].items():
                    stream.complete(awaited)
            while self._copies and self._copies[0][0] <= self.done:
                _, memory, contents = self._copies.popleft()
                if not torch.equal(memory, contents):
                    raise HazardError("a host buffer was filled again before the copy from it had taken place")

    def synchronize(self):
        self.complete(self.issued)

    def wait_event(self, event):
        self._waits.append((self.issued, event.known))
        self.known |= {stream: max(number, self.known.get(stream, 0)) for stream, number in event.known.items()}

    def is_after(self, other, number):
        """Return True if new work here is ordered after work ``number`` of another stream."""
        return other is self or other.done >= number or self.known.get(other, 0) >= number


class Event:
    """A point in a stream."""

    def __init__(self, device=None):
        self.device, self.known = device, {}

    def record(self, stream=None):
        stream = stream or current(0)
        self.known = stream.known | {stream: stream.issued}

    def synchronize(self):
        for stream, number in self.known.items():
            stream.complete(number)


class Memory:
    """An allocation on a device, which has counted it: who uses which bytes."""

    def __init__(self, address, stream, free):
        self.address, self._free = address, free
        self._home, self._kept, self._uses = stream, set(), {}  # (first byte, end, writes, stream) → number

    def use(self, first, end, writes, stream, number):
        """Use bytes for a piece of work; an error if another stream's work on them may not be done."""
        with LOCK:
            for (begin, stop, wrote, other), last in self._uses.items():
                if (writes or wrote) and begin < end and first < stop and not stream.is_after(other, last):
                    raise HazardError("memory is used on one stream while another may still write or read it")
            self._uses[first, end, writes, stream] = number

    def is_done(self):
        """Return True if all writes are known to be done, so that any stream may read the memory."""
        return all(number <= stream.done for (_, _, writes, stream), number in self._uses.items() if writes)

    def keep_for(self, stream):
        """Act as ``Tensor.record_stream``."""
        self._kept.add(stream)

    def __del__(self, lock=LOCK, hazards=hazards):  # globals are gone when Python ends
        with lock:
            self._free()
            for (*_, stream), number in self._uses.items():
                if stream not in self._kept and not self._home.is_after(stream, number):
                    hazards.append("memory was freed while another stream may still use it: record_stream")


_default = {}  # the default stream of each device, by the device's index
_own = threading.local()


def current(index):
    """Return the stream of a device that this thread uses."""
    stream = getattr(_own, "streams", {}).get(index)
    return stream or _default.setdefault(index, Stream(f"cpu:{index}"))


def choose(stream):
    """Act as ``torch.accelerator.set_stream``, for this thread."""
    _own.streams = getattr(_own, "streams", {}) | {stream.device.index or 0: stream}
