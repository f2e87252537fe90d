"""A server of files on the loopback that understands ranges, and makes the faults that tests ask for.

It states versions and holds conditions as RFC 9110 has them. ``serving_hub`` is a hub: its addresses of files lead to
another server, for a while, and it counts who asks for them.
"""

import hashlib
import hmac
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from email.utils import formatdate, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Fault = Callable[["Handler", int, int], bool]  # the answer to a range was given
STAMP = "%Y%m%dT%H%M%SZ"


class Handler(BaseHTTPRequestHandler):
    """Serve files of a folder, and the hub's answers to huggingface_hub."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "Server"

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def setup(self) -> None:
        """Count connections."""
        super().setup()
        self.server.connections += 1

    def do_GET(self) -> None:
        """Send a range of a file, or the hub's description of a model."""
        server = self.server
        server.requests.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        if server.token and server.token not in (self.headers.get("Authorization") or ""):
            return self.refuse(401)
        if match := re.fullmatch(r"/api/models/(.+?)(?:/revision/(\w+))?(?:\?.*)?", self.path):
            return self.model(match[1])
        path = server.folder / re.sub(r"^/[^/]+/[^/]+/resolve/\w+/|^/", "", urlsplit(self.path).path)
        if server.files is not None:
            return self.lead(path)
        if not path.is_file():
            return self.refuse(404)
        if server.secret is not None and not server.is_signed(self.path):
            return self.refuse(403)
        if not server.holds(path, self.headers):
            return self.refuse(412)
        size = path.stat().st_size
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(span[1]), min(int(span[2]), size - 1)) if span else (0, size - 1)
        if span and first >= size:
            return self.refuse(416, Content_Range=f"bytes */{size}")
        if any(fault(self, first, last) for fault in server.faults):
            return None
        return self.send(path, first, last, size, None, 206 if span else 200)

    def do_CONNECT(self) -> None:
        """Act as a proxy in front of a TLS server, which is this server itself."""
        assert self.server.tunnelled is not None
        self.server.tunnels.append(f"CONNECT {self.path} {self.headers.get('Proxy-Authorization')}")
        self.begin(200)
        try:
            self.connection = self.request = self.server.tunnelled.wrap_socket(self.connection, server_side=True)
        except OSError:  # who does not trust it leaves
            self.close_connection = True
            return
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb", 0)
        self.close_connection = False  # whatever HTTP the client spoke to the proxy

    def finish(self) -> None:
        """Close what do_CONNECT put in the place of the connection."""
        super().finish()
        if isinstance(self.connection, ssl.SSLSocket):
            self.connection.close()

    do_HEAD = do_GET  # noqa: N815 - as the base class calls it

    def send(
        self, path: Path, first: int, last: int, size: int, tag: str | None = None, status: int = 206, **stated: str
    ) -> None:
        """Send a range; ``stated`` has headers other than the true ones."""
        with path.open("rb") as file:
            file.seek(first)
            body = file.read(last - first + 1)
        self.server.sent += len(body)
        self.server.pace(len(body))
        headers = {"Content_Length": str(len(body))} | self.server.version(path)
        if status == 206:
            headers["Content_Range"] = f"bytes {first}-{last}/{size}"
        if tag is not None:
            headers["ETag"] = tag
        self.begin(status, **headers | stated)
        self.wfile.write(body)

    def begin(self, status: int, **headers: str) -> None:
        """Send an answer up to its body."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def refuse(self, status: int, **headers: str) -> None:
        """Send an answer without a body."""
        self.begin(status, **{"Content_Length": "0"} | headers)

    def lead(self, path: Path) -> None:
        """Redirect to the file; refuse if it does not exist or the requests are too many."""
        seconds = self.server.refused_for()
        if seconds is not None:
            return self.refuse(429, RateLimit=f'"resolvers";r=0;t={seconds}')
        if not path.is_file():
            return self.refuse(404)
        assert self.server.files is not None
        return self.refuse(302, Location=self.server.files.sign(f"/{path.relative_to(self.server.folder)}"))

    def describe(self, path: Path) -> dict[str, Any]:
        """Return the hub's entry for a file; with ``blobs``, weights are in LFS."""
        listed: dict[str, Any] = {"rfilename": str(path.relative_to(self.server.folder))}
        if "blobs=" in self.path and path.suffix == ".safetensors":
            lfs = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "size": path.stat().st_size}
            listed["lfs"] = lfs | {"pointerSize": 134} | self.server.stated.get(path.name, {})
        return listed

    def model(self, name: str) -> None:
        """Send the hub's description of a model."""
        files = [self.describe(path) for path in self.server.folder.rglob("*.*")]
        body = json.dumps({"id": name, "modelId": name, "sha": self.server.commit, "siblings": files}).encode()
        self.begin(200, Content_Type="application/json", Content_Length=str(len(body)))
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """The server of a folder."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path, rate: float = 0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.token = folder, ""
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str | None, str | None]] = []
        self.connections, self.sent, self.commit = 0, 0, "c0ffee" * 6 + "abcd"
        self.rate, self.free_at, self.lock = rate, 0.0, threading.Lock()
        self.versions: tuple[str, ...] = ("ETag",)  # headers to send: ETag, weak ETag, Last-Modified
        self.files: Server | None = None  # the server to which a hub leads
        self.limit, self.window, self.led, self.resets = 0, 0.0, 0, 0.0  # requests in so many seconds; 0: any number
        self.tunnelled: ssl.SSLContext | None = None  # the context of the https server behind this proxy
        self.tunnels: list[str] = []
        self.stated: dict[str, dict[str, str]] = {}  # false entries for files in the hub's list
        self.secret: bytes | None = None  # the key of signed addresses
        self.lifetime = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def version(self, path: Path) -> dict[str, str]:
        """Return the headers that identify the version of a file."""
        written = path.stat().st_mtime_ns
        known = {
            "ETag": ("ETag", f'"{written:x}"'),
            "weak ETag": ("ETag", f'W/"{written:x}"'),
            "Last-Modified": ("Last_Modified", formatdate(written // 10**9, usegmt=True)),
        }
        return dict(known[name] for name in self.versions)

    def holds(self, path: Path, asked: Any) -> bool:
        """Return True if the conditions of a request hold by RFC 9110 13.2.2: weak ETags match nothing."""
        stated = self.version(path)
        if (wanted := asked.get("If-Match")) is not None:
            return wanted == stated.get("ETag") and not wanted.startswith("W/")
        if (since := asked.get("If-Unmodified-Since")) is not None and "Last_Modified" in stated:
            return parsedate_to_datetime(stated["Last_Modified"]) <= parsedate_to_datetime(since)
        return True

    def refused_for(self) -> int | None:
        """Count a request for an address; return the seconds for which the hub refuses it, or None."""
        with self.lock:
            now = time.monotonic()
            if now >= self.resets:
                self.resets, self.led = now + self.window, 0
            self.led += 1
            return None if not self.limit or self.led <= self.limit else int(self.resets - now)

    def sign(self, path: str) -> str:
        """Return an address of a file that is valid for a while."""
        assert self.secret is not None
        query = f"X-Amz-Date={datetime.now(UTC).strftime(STAMP)}&X-Amz-Expires={self.lifetime}"
        return f"{self.url}{path}?{query}&X-Amz-Signature={self.signature(path, query)}"

    def signature(self, path: str, query: str) -> str:
        """Return a signature that only this server can make."""
        assert self.secret is not None
        return hmac.new(self.secret, f"{path}?{query}".encode(), "sha256").hexdigest()

    def is_signed(self, address: str) -> bool:
        """Return True if this server signed the address and the signature has not expired."""
        parts, (query, _, signature) = urlsplit(address), urlsplit(address).query.partition("&X-Amz-Signature=")
        if not hmac.compare_digest(signature, self.signature(parts.path, query)):
            return False
        given = parse_qs(query)
        since = datetime.now(UTC) - datetime.strptime(given["X-Amz-Date"][0], STAMP).replace(tzinfo=UTC)
        return since.total_seconds() <= int(given["X-Amz-Expires"][0])

    def pace(self, n_bytes: int) -> None:
        """Wait, as if all clients shared a network of ``rate`` bytes a second."""
        if not self.rate:
            return
        with self.lock:
            self.free_at = max(self.free_at, time.monotonic()) + n_bytes / self.rate
            wait = self.free_at - time.monotonic()
        time.sleep(max(wait, 0))

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that have left."""


@contextmanager
def serving(folder: Path, rate: float = 0) -> Iterator[Server]:
    """Start a server for the body of ``with``; ``rate`` is in bytes a second, 0 without limit."""
    server = Server(folder, rate)
    thread = threading.Thread(target=server.serve_forever, args=[0.02], daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving_hub(
    folder: Path, limit: int = 0, window: float = 0.0, lifetime: int = 3600, rate: float = 0
) -> Iterator[Server]:
    """Start a hub that gives addresses ``limit`` times in ``window`` seconds, each valid for ``lifetime`` seconds.

    Its ``files`` is the server to which they lead.
    """
    with ExitStack() as stack:
        hub, files = stack.enter_context(serving(folder)), stack.enter_context(serving(folder, rate))
        files.secret, files.lifetime = b"of the hub", lifetime
        hub.files, hub.limit, hub.window = files, limit, window
        yield hub
