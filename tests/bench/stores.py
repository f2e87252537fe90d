"""hf:// from a hub on this machine that limits how often it is asked where files are, as the real one does.

    python tests/bench/stores.py [--folder .bench] [--layers 8] [--limit 100] [--window 10] [--lifetime 3600]

The hub allows 3,000 such requests in 300 seconds: 100 in 10 are the same rate. Its addresses lead to another server,
and expire. Beside it: the same files from that server alone, and without any limit.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import COLS, ROWS, make

HUB = """
import sys
from pathlib import Path
from support.serving import serving_hub
folder, limit, window, lifetime = sys.argv[1:]
with serving_hub(Path(folder), int(limit), float(window), int(lifetime)) as hub:
    print(hub.url, flush=True)
    while sys.stdin.readline():
        paths = [path for path, _, _ in hub.requests]
        print(sum("/resolve/" in path for path in paths), hub.connections, hub.files.connections, flush=True)
"""


@contextmanager
def hub(folder: Path, *settings: object) -> Iterator["subprocess.Popen[str]"]:
    """Start a hub in another process. It answers each line with its numbers of requests and connections."""
    command = [sys.executable, "-c", HUB, str(folder), *map(str, settings)]
    tests = Path(__file__).resolve().parent.parent
    with subprocess.Popen(command, cwd=tests, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def answer(process: "subprocess.Popen[str]") -> str:
    """Return the next line that the process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def compare(name: str, folder: Path, files: list[str], *settings: object) -> None:
    """Compare both files of the hub, and print what it took."""
    with hub(folder, *settings) as process:
        environment = {"HF_ENDPOINT": answer(process), "HF_HUB_CACHE": os.devnull, "HF_HUB_OFFLINE": "0"}
        pair = [f"hf://org/model/{file}" for file in files]
        command = [sys.executable, "-m", "quanterr", "compare", *pair, "--device", "cpu", "-q"]
        started = time.monotonic()
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
        seconds = time.monotonic() - started
        assert process.stdin is not None
        print("how often?", file=process.stdin, flush=True)
        resolved, *connections = answer(process).split()
        size = sum((folder / file).stat().st_size for file in files)
    ended = f"{size / seconds / 1e6:.0f} MB/s" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
    asked = f"asked {resolved} times where files are, {' + '.join(connections)} connections"
    print(f"{name}: {size / 1e9:.2f} GB in {seconds:.1f} s, status {done.returncode}, {asked}: {ended}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--window", type=float, default=10)
    parser.add_argument("--lifetime", type=int, default=3600)
    given = parser.parse_args()
    folder = given.folder.resolve()
    paths = make(folder, given.layers, ROWS, COLS)
    files = [paths["original"].name, paths["fp8_tensor"].name]
    compare("without limits", folder, files, 0, 0, 3600)
    compare("addresses for a second", folder, files, 0, 0, 1)
    compare(f"{given.limit} in {given.window:.0f} s", folder, files, given.limit, given.window, given.lifetime)


if __name__ == "__main__":
    main()
