"""A server of files on the loopback that understands ranges, and makes the faults that it is told to make."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Fault = Callable[["Handler", int, int], bool]  # the answer to a range was given


class Handler(BaseHTTPRequestHandler):
    """Files of a folder; and what huggingface_hub asks of the hub."""

    protocol_version = "HTTP/1.1"
    server: "Server"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """A range of a file, or what the hub says of a model."""
        server = self.server
        server.requests.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        if server.token and server.token not in (self.headers.get("Authorization") or ""):
            return self.refuse(401)
        if match := re.fullmatch(r"/api/models/(.+?)(?:/revision/(\w+))?(?:\?.*)?", self.path):
            return self.model(match[1])
        path = server.folder / re.sub(r"^/[^/]+/[^/]+/resolve/\w+/|^/", "", self.path.partition("?")[0])
        if not path.is_file():
            return self.refuse(404)
        size = path.stat().st_size
        tag = f'"{path.stat().st_mtime_ns:x}"'
        if self.headers.get("If-Match", tag) != tag:
            return self.refuse(412)
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(span[1]), min(int(span[2]), size - 1)) if span else (0, size - 1)
        if any(fault(self, first, last) for fault in server.faults):
            return None
        return self.send(path, first, last, size, tag, 206 if span else 200)

    do_HEAD = do_GET  # noqa: N815 - as the base class calls it

    def send(self, path: Path, first: int, last: int, size: int, tag: str, status: int = 206) -> None:
        """A range."""
        with path.open("rb") as file:
            file.seek(first)
            body = file.read(last - first + 1)
        self.server.sent += len(body)
        self.server.pace(len(body))
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, **headers: str) -> None:
        """An answer without a body."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def model(self, name: str) -> None:
        """What the hub says of a model."""
        files = [{"rfilename": str(path.relative_to(self.server.folder))} for path in self.server.folder.rglob("*.*")]
        body = json.dumps({"id": name, "modelId": name, "sha": self.server.commit, "siblings": files}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """The server of a folder."""

    daemon_threads = True

    def __init__(self, folder: Path, rate: float = 0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.faults, self.token = folder, [], ""
        self.requests: list[tuple[str, str | None, str | None]] = []
        self.sent, self.commit = 0, "c0ffee" * 6 + "abcd"
        self.rate, self.free_at, self.lock = rate, 0.0, threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def pace(self, n_bytes: int) -> None:
        """Wait, as if all clients shared a network of ``rate`` bytes a second."""
        if not self.rate:
            return
        with self.lock:
            self.free_at = max(self.free_at, time.monotonic()) + n_bytes / self.rate
            wait = self.free_at - time.monotonic()
        time.sleep(max(wait, 0))

    def handle_error(self, *_: Any) -> None:
        """Clients that left are no error."""


@contextmanager
def serving(folder: Path, rate: float = 0) -> Iterator[Server]:
    """A server, while it is needed; ``rate`` in bytes a second, 0 is without limit."""
    server = Server(folder, rate)
    thread = threading.Thread(target=server.serve_forever, args=[0.02], daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
