"""How fast is `quanterr compare`, compared with a script that people write and with plain reading?

    python tests/bench/bench.py [--folder .bench] [--runs 3] [--layers 16] [--small 50000] [--device cpu]

Each figure is that of a whole process, start-up included, on a warm cache, run in turn; the median counts.
`in the loop` leaves out start-up: it is what report.run.seconds says.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from quanterr.kernel.library import VARIABLE

HERE = Path(__file__).parent
ROWS, COLS = 4096, 8192
SMALL_SHAPE = 64, 128
BUFFER = 1 << 20


class Taken(NamedTuple):
    """The seconds and memory that a process took."""

    seconds: float
    cpu: float
    peak_mb: float


def make(folder: Path, layers: int, rows: int, cols: int, name: str = "model.layers.{}.mlp.up_proj") -> dict[str, Path]:
    """Make the checkpoints of make_pairs.py in another process: a child's peak includes the memory of its parent."""
    code = (
        f"from make_pairs import make; from pathlib import Path; make(Path({str(folder)!r}), {layers}, {rows}, "
        f"{cols}, {name!r})"
    )
    subprocess.run([sys.executable, "-c", code], cwd=HERE, check=True)
    versions = ("original", "fp8_tensor", "int8_block", "int8_row")
    return {version: folder / f"{version}-{layers}x{rows}x{cols}.safetensors" for version in versions}


def run(*command: str) -> Taken:
    """Run a command; what it took, from the operating system's own account."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read() if process.stderr else b""
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        sys.exit(f"{' '.join(command)}: status {os.waitstatus_to_exitcode(status)}\n{errors.decode()}")
    return Taken(time.monotonic() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def median(taken: list[Taken]) -> Taken:
    seconds, cpu = (statistics.median(times) for times in zip(*(t[:2] for t in taken), strict=True))
    return Taken(seconds, cpu, max(t.peak_mb for t in taken))


def spread(taken: list[Taken]) -> str:
    return f"{min(t.seconds for t in taken):.2f}-{max(t.seconds for t in taken):.2f}"


def read_plainly(*paths: Path) -> float:
    """Return the seconds to read the files into one small buffer, on one thread."""
    buffer, started = memoryview(bytearray(BUFFER)), time.monotonic()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.monotonic() - started


def compare_large(options: argparse.Namespace, paths: dict[str, Path], version: str) -> None:
    """Compare FP8 or INT8 with the original, by quanterr and by the script in turn."""
    report = options.folder / "report.json"
    pair = str(paths["original"]), str(paths[version])
    ours = [sys.executable, "-m", "quanterr", "compare", *pair, "-q", "--device", options.device, "-o", str(report)]
    of_torch = ["env", f"{VARIABLE}=torch", *ours]
    script = [sys.executable, str(HERE / "naive.py"), *pair]
    taken: dict[str, list[Taken]] = {"quanterr": [], "torch": [], "script": [], "basic": []}
    loops, torch_loops, reading, kernel = [], [], [], ""
    read_plainly(paths["original"], paths[version])  # so that the cache of files is warm
    for _ in range(options.runs):
        taken["quanterr"].append(run(*ours))
        loops.append(json.loads(report.read_text())["run"]["seconds"])
        kernel = json.loads(report.read_text())["run"]["kernel"]
        taken["torch"].append(run(*of_torch))
        torch_loops.append(json.loads(report.read_text())["run"]["seconds"])
        taken["basic"].append(run(*script, "--basic"))
        reading.append(read_plainly(paths["original"], paths[version]))
    for _ in range(min(options.runs, 2)):  # at most twice, because the script takes long
        taken["script"].append(run(*script))
    n = options.layers * ROWS * COLS
    loop = statistics.median(loops)
    n_bytes = paths["original"].stat().st_size + paths[version].stat().st_size
    mine, theirs = median(taken["quanterr"]), median(taken["torch"])
    print(f"\n{version}: {n / 1e6:.0f} M weights, {n_bytes / 1e9:.2f} GB")
    print(f"  {kernel:18} {mine.seconds:6.2f} s ({spread(taken['quanterr'])}), peak {mine.peak_mb:.0f} MB")
    print(
        f"    in the loop      {loop:6.2f} s, {n / loop / 1e9:.2f} G weights/s, {n_bytes / loop / 1e9:.2f} GB/s",
        end=" ",
    )
    print(f"      each run       {' '.join(f'{seconds:.2f}' for seconds in loops)} s")
    print(f"  torch              {theirs.seconds:6.2f} s ({spread(taken['torch'])}), peak {theirs.peak_mb:.0f} MB")
    of_torch_loop = statistics.median(torch_loops)
    print(f"    in the loop      {of_torch_loop:6.2f} s, {of_torch_loop / loop:.1f} times as long", end=" ")
    print(f"({' '.join(f'{seconds:.2f}' for seconds in torch_loops)})")
    for name, heading in (("script", "script, same metrics"), ("basic", "script, few metrics ")):
        theirs = median(taken[name])
        ratio = theirs.seconds / mine.seconds
        print(f"  {heading} {theirs.seconds:4.1f} s ({spread(taken[name])}), peak {theirs.peak_mb:.0f} MB:", end=" ")
        print(f"{ratio:.1f} times as long")
    print(f"  plain reading      {min(reading):6.2f} s, {n_bytes / min(reading) / 1e9:.2f} GB/s on one thread")


def write_back(options: argparse.Namespace, paths: dict[str, Path], version: str) -> None:
    """Write a quantized file back as BF16, and as many bytes plainly, both to the disk."""
    output, taken, plain = options.folder / "floats.safetensors", [], []
    command = [sys.executable, "-m", "quanterr", "dequantize", str(paths[version]), "-o", str(output), "-q"]
    for _ in range(options.runs):
        taken.append(run(*command))
        n_bytes = output.stat().st_size
        output.unlink()
        plain.append(write_plainly(output, n_bytes))
        output.unlink()
    middle, n = median(taken), options.layers * ROWS * COLS
    print(f"\ndequantize {version} to BF16: {n / 1e6:.0f} M weights, {n_bytes / 1e9:.2f} GB written")
    print(
        f"  quanterr           {middle.seconds:6.2f} s ({spread(taken)}), {middle.cpu:.2f} s CPU,",
        end=" ",
    )
    print(f"{n / middle.seconds / 1e9:.2f} G weights/s, peak {middle.peak_mb:.0f} MB")
    print(f"  plain writing      {min(plain):6.2f} s, {n_bytes / min(plain) / 1e9:.2f} GB/s")


def write_plainly(path: Path, n_bytes: int) -> float:
    """Return the seconds to write so many bytes to the disk, from one small buffer."""
    buffer, started = os.urandom(BUFFER), time.monotonic()
    with path.open("wb", buffering=0) as file:
        for _ in range(n_bytes // BUFFER):
            file.write(buffer)
        os.fsync(file.fileno())
    return time.monotonic() - started


def compare_small(options: argparse.Namespace) -> None:
    """Compare very many small matrices."""
    paths = make(options.folder, options.small, *SMALL_SHAPE, "model.layers.0.mlp.experts.{}.up_proj")
    quanterr, report = [sys.executable, "-m", "quanterr"], options.folder / "small.json"
    for version in ("int8_row", "fp8_tensor"):  # the last report of fp8_tensor is rendered below
        command = [*quanterr, "compare", str(paths["original"]), str(paths[version]), "-q", "-o", str(report)]
        taken = [run(*command, "--device", options.device) for _ in range(options.runs)]
        middle = median(taken)
        print(f"\n{options.small} matrices of {SMALL_SHAPE[0]} x {SMALL_SHAPE[1]}, {version}")
        print(f"  quanterr           {middle.seconds:6.2f} s ({spread(taken)}), {middle.cpu:.2f} s CPU,", end=" ")
        print(f"{1000 * middle.seconds / options.small:.2f} ms each, peak {middle.peak_mb:.0f} MB")
    print(f"  its report         {report.stat().st_size / 1e6:6.0f} MB")
    for words in (["gate", "--require", "snr_db >= 20"], ["render", "--to", "html"], ["render", "--to", "csv"]):
        taken = [run(*quanterr, words[0], str(report), *words[1:]) for _ in range(options.runs)]
        middle = median(taken)
        print(f"  {' '.join(words[:3]):18} {middle.seconds:6.2f} s ({spread(taken)}), {middle.cpu:.2f} s CPU,", end=" ")
        print(f"peak {middle.peak_mb:.0f} MB")


def start_up(options: argparse.Namespace) -> None:
    """Time commands that must answer at once."""
    print("\nstart-up")
    for words in (["--help"], ["--version"], ["schema"], ["compare", "--help"]):
        taken = [run(sys.executable, "-m", "quanterr", *words) for _ in range(max(options.runs, 5))]
        print(f"  {' '.join(words):15} {median(taken).seconds:6.2f} s ({spread(taken)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(".bench").resolve())
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--small", type=int, default=50_000)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(
        f"{os.cpu_count()} cores, load {load:.2f}, {resource.getpagesize()} byte pages, Python {sys.version.split()[0]}"
    )
    start_up(options)
    paths = make(options.folder, options.layers, ROWS, COLS)
    for version in ("fp8_tensor", "int8_block"):
        compare_large(options, paths, version)
    write_back(options, paths, "fp8_tensor")
    compare_small(options)


if __name__ == "__main__":
    main()
