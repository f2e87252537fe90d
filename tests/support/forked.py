"""The command in a process of its own, without the seconds that torch takes to be imported, within limits.

``python tests/support/forked.py`` is a server for all processes of a test run. It imports what commands need once,
forks itself for each connection and then forks children: a line of JSON lists what each is to be, a line with their
exit statuses answers when all have ended. A child has a limit of memory and of time. A second server has what an
evaluation needs, too: the larger a process, the slower its fork.
"""

import atexit
import contextlib
import fcntl
import gc
import json
import os
import pty
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

MEMORY = 1 << 30  # bytes more than what is there when the child begins
SECONDS = 30
OUTPUTS = ((1, "stdout"), (2, "stderr"))
TELLING = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "TERM")
PLAIN_ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in TELLING}
# Also what is imported while a command is parsed, or runs.
USED = (
    "tomllib",
    "typer._adapters",
    "quanterr.cli",
    "quanterr.comparison",
    "quanterr.gates.github",
    "quanterr.gates.explanation",
    "quanterr.cli.progress",
    "quanterr.views.comparison.view",
    "quanterr.outputs.terminal",
    "quanterr.documents.reading",
)
EVALUATING = (
    "quanterr.evaluation.run",
    "transformers.conversion_mapping",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)


class Done(NamedTuple):
    """The result of a command; a negative status is the signal that ended it."""

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
    env = os.environ | {"NO_COLOR": "1", "COLUMNS": "500", "HF_HUB_CACHE": hub}
    return _run_forked([_request(words, env, os.getcwd(), memory=memory, files=files, before=before)])[0]


def call(
    *words: Any,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = ".",
    encoding: str = "utf-8",
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """Run ``quanterr`` as a shell would, in an environment without a terminal: :data:`PLAIN_ENVIRONMENT` and ``env``.

    ``merged=True`` sends what is written to stderr to stdout, ``redirected=`` streams of these numbers to files, or to
    a pipe that nobody reads where the name is empty. ``program=`` runs a script instead, ``before=`` is Python that is
    executed first.
    """
    [(status, out, err)] = _run_forked([_request(words, PLAIN_ENVIRONMENT | (env or {}), cwd, **more)], encoding)
    return subprocess.CompletedProcess(["quanterr", *map(str, words)], status, out, err)


def call_anew(*words: Any, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process, for what Python decides while it starts, such as the locale."""
    line = [sys.executable, "-m", "quanterr", *map(str, words)]
    return subprocess.run(line, capture_output=True, env=PLAIN_ENVIRONMENT | env, encoding="utf-8", timeout=SECONDS)


def in_terminal(*words: Any, columns: int = 100) -> str:
    """Run ``quanterr`` in a terminal and return what it shows."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    server = _send(_request(words, PLAIN_ENVIRONMENT | {"TERM": "xterm"}, os.getcwd(), terminal=os.ttyname(follower)))
    out = b""
    while select.select([leader, server], [], [])[0] != [server]:
        out += os.read(leader, 1 << 16)
    [status] = _statuses(server)
    os.close(follower)
    with contextlib.suppress(OSError):  # all of it is read
        while piece := os.read(leader, 1 << 16):
            out += piece
    os.close(leader)
    assert 0 == status, out
    return out.decode()


def together(runs: Iterable[tuple[Iterable[Any], Mapping[str, str], str, str]]) -> list[Done]:
    """Run ``quanterr`` several times at once.

    Each command has words, additions to its environment, a folder, and Python that is executed first.
    """
    return _run_forked(
        [
            _request(words, PLAIN_ENVIRONMENT | env, cwd, before=before, seconds=4 * SECONDS)
            for words, env, cwd, before in runs
        ]
    )


def signal_after(seconds: float, number: int = signal.SIGKILL) -> str:
    """Return Python for ``before=`` that sends the signal after so many seconds, unless the command has ended."""
    return (
        f"import os, threading; _timer = threading.Timer({seconds}, os.kill, (os.getpid(), {number:d})); "
        "_timer.daemon = True; _timer.start()\n"
    )


def signalled_before(method: str, n: int, number: int = signal.SIGKILL) -> str:
    """Return Python for ``before=`` that sends the signal before call ``n``, from 0, of a method."""
    module, owner, name = method.rsplit(".", 2)
    return (
        f"import os, itertools\nfrom {module} import {owner}\n"
        f"called, count = {owner}.{name}, itertools.count()\n"
        f"def counting(*a):\n    if next(count) == {n}:\n        os.kill(os.getpid(), {number:d})\n"
        f"    return called(*a)\n{owner}.{name} = counting\n"
    )


def _request(words: Iterable[Any], env: Mapping[str, str], cwd: str | os.PathLike[str], **more: Any) -> dict[str, Any]:
    """Return the request to a child: the parameters of :func:`_become`."""
    return {"words": [*map(str, words)], "env": dict(env), "cwd": os.path.abspath(cwd)} | more


def _run_forked(requests: list[dict[str, Any]], encoding: str = "utf-8") -> list[Done]:
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, str(number)) for number in range(len(requests))]
        for folder_ in folders:
            folder_.mkdir()
        server = _send(*(request | {"folder": str(folder)} for request, folder in zip(requests, folders, strict=True)))
        texts = [[folder / name for name in ("stdout", "stderr")] for folder in folders]
        return [
            Done(status, *(path.read_text(encoding=encoding) for path in paths))
            for status, paths in zip(_statuses(server), texts, strict=True)
        ]


def _send(*requests: dict[str, Any]) -> socket.socket:
    """Send requests to a server, and return it. Scripts are sent to the one for evaluations, as some evaluate."""
    evaluating = any("program" in request or request["words"][:1] == ["evaluate"] for request in requests)
    server = _connect(*(USED + EVALUATING if evaluating else USED))
    server.sendall(json.dumps(requests).encode() + b"\n")
    return server


def _statuses(server: socket.socket) -> list[int]:
    """Wait for all children of a request."""
    with server.makefile() as answers:
        return json.loads(answers.readline())


@cache
def _connect(*modules: str) -> socket.socket:
    """Return a connection to the server with these modules; start it if no process of this test run has done so."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    place = os.path.join(tempfile.gettempdir(), f"quanterr-{run}-{len(modules)}")
    connection = socket.socket(socket.AF_UNIX)
    atexit.register(connection.close)
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(place)
        except OSError:  # nobody has started it, or it has ended
            _start(place, modules)
            connection.connect(place)
    return connection


def _start(place: str, modules: Iterable[str]) -> None:
    """Start a server, which this process ends; those that others are connected to then stay until they have closed."""
    Path(place).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen()
        number = listening.fileno()
        process = subprocess.Popen(
            [sys.executable, __file__, str(number), *modules], stdin=subprocess.PIPE, pass_fds=[number]
        )
    atexit.register(_end, process, place)


def _end(process: subprocess.Popen[bytes], place: str) -> None:
    process.stdin.close()
    process.wait()
    for path in (place, f"{place}.lock"):
        Path(path).unlink(missing_ok=True)


def _serve(listening: socket.socket, modules: Iterable[str]) -> None:
    for name in modules:
        package = name.partition(".")[0]
        if package == "quanterr" or (find_spec(package) and find_spec(name)):  # other versions lack some of theirs
            import_module(name)
    _prepare_commands()
    gc.freeze()  # otherwise the collector of each child would copy all pages that it looks at
    while 0 not in select.select([0, listening], [], [])[0]:  # which is closed in the end
        connection, _ = listening.accept()
        if not os.fork():
            for number in (0, 1):
                os.dup2(connection.fileno(), number)
            connection.close()
            listening.close()
            _answer()
            os._exit(0)
        connection.close()


def _answer() -> None:
    """Fork the children that a connection asks for."""
    for line in sys.stdin:
        children = [_fork(request) for request in json.loads(line)]
        print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], flush=True)


def _prepare_commands() -> None:
    """Let typer derive the commands from their signatures once, with what checks the value of each option."""
    import typer.main

    from quanterr.cli import app

    typer.main.get_command = cache(typer.main.get_command)
    group = typer.main.get_command(app)
    for command in group.commands.values():
        for parameter in command.params:
            getattr(parameter, "get_runtime_param", int)()  # earlier versions of typer have no such checks


def _fork(request: dict[str, Any]) -> int:
    """Start a child and return its process ID."""
    child = os.fork()
    if not child:
        _become(**request)
    return child


def _become(
    words: list[str],
    env: dict[str, str],
    cwd: str,
    folder: str = "",
    terminal: str = "",
    memory: int | None = None,
    files: int | None = None,
    before: str = "",
    merged: bool = False,
    redirected: Mapping[str, str] = MappingProxyType({}),
    program: str = "quanterr",
    seconds: int = SECONDS,
) -> None:
    """Run the command in this process, and end."""
    import quanterr.cli

    streams = (0, os.devnull, os.O_RDONLY), *((n, f"{folder}/{name}", os.O_WRONLY | os.O_CREAT) for n, name in OUTPUTS)
    if terminal:
        os.setsid()
        streams = tuple((n, terminal, os.O_RDWR) for n in range(3))
    for number, path, flags in streams:
        os.dup2(os.open(path, flags), number)
    if merged:
        os.dup2(1, 2)
    for number, path in redirected.items():
        os.dup2(os.open(path, os.O_WRONLY) if path else _open_unread_pipe(), int(number))
    os.environ.clear()
    os.environ |= env
    os.chdir(cwd)
    sys.argv = [program, *words]
    encoding = env.get("PYTHONIOENCODING", "utf-8")  # the server's own streams have read, or are no terminal
    sys.stdin = sys.__stdin__ = open(0, encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", encoding=encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
    signal.alarm(seconds)
    exec(before, {})
    if memory is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)
    if files is not None:
        _limit(resource.RLIMIT_NOFILE, files)
    if program == "quanterr":
        quanterr.cli.main()
    sys.path.insert(0, os.path.dirname(program))
    runpy.run_path(program, run_name="__main__")
    sys.stdout.flush()
    os._exit(0)  # at once, as the command does


def _open_unread_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def _limit(what: int, value: int) -> None:
    resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # the folder that holds the package support
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
