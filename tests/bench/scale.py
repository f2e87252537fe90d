"""The cost of several processes, journals and stores, compared with one process and local files.

    python tests/bench/scale.py [--folder .bench] [--layers 16]

Each run is a whole process, on a warm cache; the median of three. CPU time is that of all processes together.
"""

import argparse
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import torch
from bench import COLS, ROWS, make
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

RUNS = 3
RANGE = 8 << 20  # bytes, of the plain download
SMALL_TENSORS = 50_000  # tensors
RATES = (0.0, 500e6, 200e6)  # bytes a second of the network; 0: as fast as two processes on these cores are


def cpu() -> float:
    """Return seconds of all children so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def processes(world: int, *words: str) -> tuple[float, float]:
    """Return seconds and CPU seconds of a run of so many ranks."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    before, started = cpu(), time.monotonic()
    running = []
    for rank in range(world):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        environment = os.environ | {key: str(value) for key, value in variables.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-m", "quanterr", *words]
        running.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
    if any(process.wait() for process in running):
        sys.exit(f"{' '.join(words)}: a rank failed")
    return time.monotonic() - started, cpu() - before


def median(runs: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the median of each of the two numbers."""
    return statistics.median(run[0] for run in runs), statistics.median(run[1] for run in runs)


@contextmanager
def server(folder: Path, rate: float) -> Iterator[str]:
    """Start a server of ranges in another process, limited to so many bytes a second."""
    code = (
        "import sys, threading\nfrom pathlib import Path\nfrom serving import serving\n"
        "with serving(Path(sys.argv[1]), float(sys.argv[2])) as server:\n"
        "    print(server.url, flush=True)\n    sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder), str(rate)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parent.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def download(urls: list[tuple[str, int]]) -> float:
    """Return seconds to read files by ranges, eight at a time, and drop them."""

    def read(job: tuple[str, int, int]) -> int:
        url, begin, end = job
        with urlopen(Request(url, headers={"Range": f"bytes={begin}-{end - 1}"})) as answer:
            return len(answer.read())

    jobs = [(url, begin, min(begin + RANGE, size)) for url, size in urls for begin in range(0, size, RANGE)]
    started = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, jobs))
    return time.monotonic() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    parser.add_argument("--layers", type=int, default=16)
    given = parser.parse_args()
    given.folder = given.folder.resolve()
    paths = make(given.folder, given.layers, ROWS, COLS)
    pair = [str(paths["original"].resolve()), str(paths["fp8_tensor"].resolve())]
    words = ("compare", *pair, "-q", "--device", "cpu")
    alone = median([processes(1, *words) for _ in range(RUNS)])
    small = make(given.folder, 1, 64, 64)
    only_start = ("compare", str(small["original"]), str(small["fp8_tensor"]), "-q", "--device", "cpu")
    work = alone[1]
    for world in (1, 2, 4):
        times = alone if world == 1 else median([processes(world, *words) for _ in range(RUNS)])
        start = median([processes(world, *only_start) for _ in range(RUNS)])[1]
        if world == 1:
            work -= start
        line = f"{times[0]:.2f} s, {times[1]:.2f} s CPU ({100 * (times[1] / alone[1] - 1):+.0f} %)"
        without = f"without the start, of a pair of 4,096 weights, {times[1] - start:.2f} s"
        print(f"{world} processes: {line}; {without} ({100 * ((times[1] - start) / work - 1):+.0f} %)")
    journal = given.folder / "journal"

    def with_journal() -> tuple[float, float]:
        journal.unlink(missing_ok=True)
        return processes(1, *words, "--resume", str(journal))

    times = median([with_journal() for _ in range(RUNS)])
    share = 100 * (times[1] / alone[1] - 1)
    print(f"--resume: {times[0]:.2f} s, {times[1]:.2f} s CPU ({share:+.1f} %), {journal.stat().st_size / 1e6:.2f} MB")
    print(f"--resume of a finished run: {processes(1, *words, '--resume', str(journal))[0]:.2f} s")
    for rate in RATES:
        from_server(given.folder, pair, rate)
    many = given.folder / "many.safetensors"
    if not many.exists():
        save_file({f"model.layers.{n}.weight": torch.zeros(2, 2) for n in range(SMALL_TENSORS)}, many)
    count_requests(many)


def from_server(folder: Path, pair: list[str], rate: float) -> None:
    """Time reading from a server on this machine."""
    sizes = [Path(path).stat().st_size for path in pair]
    with server(folder, rate) as url:
        remote = [f"{url}/{Path(path).name}" for path in pair]
        plain = download(list(zip(remote, sizes, strict=True)))
        command = [sys.executable, "-m", "quanterr", "compare", *remote, "-q", "--device", "cpu", "-o"]
        started = time.monotonic()
        report = folder / "remote.json"
        process = subprocess.Popen([*command, str(report)], stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit("the comparison of the store failed")
        seconds = time.monotonic() - started
        loop = float(subprocess.check_output(["jq", ".run.seconds", report]))
        network = f" of {rate / 1e6:.0f} MB/s" if rate else ""
        print(
            f"{sum(sizes) / 1e9:.2f} GB from a server here{network}: {seconds:.2f} s, {loop:.2f} s of it in the loop, "
            f"{usage.ru_maxrss / 1024:.0f} MB; a plain parallel download {plain:.2f} s ({100 * plain / loop:.0f} %)"
        )


def count_requests(path: Path) -> None:
    """Count the requests that opening a checkpoint of many tensors takes."""
    from support.serving import serving

    from quanterr.checkpoints import open_checkpoint

    with serving(path.parent) as server, open_checkpoint(f"{server.url}/{path.name}") as checkpoint:
        requests = [request for request in server.requests if path.name in request[0]]
        print(
            f"{len(checkpoint.entries):,} tensors open with {len(requests)} requests of the file and "
            f"{len(server.requests) - len(requests)} of configurations, {server.sent / 1e6:.1f} MB"
        )


if __name__ == "__main__":
    main()
