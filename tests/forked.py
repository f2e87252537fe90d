"""The command in a process of its own, without the seconds that torch takes to be imported, within limits.

``python tests/forked.py`` imports everything once and then forks one child for each request: a line of JSON on
standard input, answered by a line with the child's exit status. A child has a limit of memory and one of time.
"""

import atexit
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

MEMORY = 1 << 30  # bytes more than what is there when the child begins
SECONDS = 30
OUTPUTS = ((1, "stdout"), (2, "stderr"))
USED = ("cli", "comparison", "gates.github", "gates.explaining", "progress", "report.as_table", "report.reading")


class Done(NamedTuple):
    """How the command ended; a negative status is the signal that ended it."""

    status: int
    stdout: str
    stderr: str


def command(
    *words: Any, memory: int | None = MEMORY, files: int | None = None, before: str = "", hub: str = os.devnull
) -> Done:
    """Run ``quanterr`` with these words.

    ``memory`` is how many bytes more it may use, ``files`` how many it may have open, ``before`` Python that is
    executed first, ``hub`` the cache of Hugging Face.
    """
    with tempfile.TemporaryDirectory() as folder:
        request = {"words": [*map(str, words)], "memory": memory, "files": files, "before": before, "hub": hub}
        server = _server()
        server.stdin.write(json.dumps(request | {"folder": folder}) + "\n")
        server.stdin.flush()
        status = json.loads(server.stdout.readline())
        out, err = (Path(folder, name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    return Done(status, out, err)


@cache
def _server() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="ascii"
    )
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.stdin.close()
    process.wait()
    process.stdout.close()


def _serve() -> None:
    for name in USED:
        import_module(f"quanterr.{name}")
    gc.freeze()  # or a child would copy what its collector looks at
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _become(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(words: list[str], memory: int | None, files: int | None, before: str, hub: str, folder: str) -> None:
    """Be the command, and end."""
    import quanterr.cli

    streams = (0, os.devnull, os.O_RDONLY), *((n, f"{folder}/{name}", os.O_WRONLY | os.O_CREAT) for n, name in OUTPUTS)
    for number, path, flags in streams:
        os.dup2(os.open(path, flags), number)
    os.environ |= {"NO_COLOR": "1", "COLUMNS": "500", "HF_HUB_CACHE": hub}
    sys.argv = ["quanterr", *words]
    signal.alarm(SECONDS)
    if memory is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)
    if files is not None:
        _limit(resource.RLIMIT_NOFILE, files)
    exec(before, {})
    quanterr.cli.main()


def _limit(what: int, value: int) -> None:
    resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


if __name__ == "__main__":
    _serve()
