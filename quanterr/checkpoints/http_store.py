"""Files of web servers (``https://``), read by ranges.

fsspec would hide whether a server sent the range that it was asked for, and of which version of the file. Here each
answer has to state the version that the first one stated, and servers that can are told to refuse any other:

    strong ETag      If-Match
    weak ETag        nothing that a server could compare: RFC 9110 13.1.1
    Last-Modified    If-Unmodified-Since; a date within the last second is not taken yet: RFC 9110 8.8.2.2
    neither          nothing but the size

An address that leads elsewhere is asked once for each file. Where it led to is asked from then on, until that expires
or is refused.
"""

import re
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import NamedTuple

from quanterr.checkpoints.http_client import Answer, Client, host_and_port, lasts, seconds_between
from quanterr.checkpoints.store import Kind, NotThereError, Version, changed
from quanterr.errors import CheckpointError
from quanterr.util.text import display
from quanterr.util.waiting import Again

CONDITIONS = {Kind.STRONG: "If-Match", Kind.DATE: "If-Unmodified-Since"}
FIRST_BYTE = {"Range": "bytes=0-0"}
EXPIRED = (400, 401, 403, 404, 410)  # said of signed addresses whose time is over
USED = 0.9  # of the time for which an address is taken
SPAN = re.compile(r"bytes (?P<first>\d+)-(?P<last>\d+)/(?P<size>\d+|\*)")


class _Found(NamedTuple):
    """Where an address leads to."""

    url: str
    until: float  # as time.monotonic() counts


class Http:
    """Files below an address; nothing can be listed."""

    def __init__(self, base: str, headers: Mapping[str, str] | None = None, query: str = "") -> None:
        """``headers`` are private: for that host alone; ``query`` is added to every address: of signed ones."""
        self._base, self._query = base.rstrip("/") + "/", query
        self._client = Client(self._base, headers or {})
        self._found: dict[str, _Found] = {}
        self._finding = threading.Lock()

    def names(self, folder: str) -> list[str] | None:
        """None: there is no listing."""
        return None

    def shown(self, path: str) -> str:
        """Without user, password and query."""
        parts = urllib.parse.urlsplit(self._base + path)
        port = f":{parts.port}" if parts.port else ""
        return urllib.parse.urlunsplit((parts.scheme, f"{parts.hostname}{port}", parts.path, "", ""))

    def version(self, path: str) -> Version:
        """From the answer to a range of one byte."""
        where = display(self.shown(path))
        with self._client.get(self._address(path), FIRST_BYTE, where) as answer:
            if _is_empty(answer):
                return Version(0, None)
            self._check_status(answer, where, None)
            size = _size(answer)
            if size is None:
                raise CheckpointError(f"{where}: the server does not serve ranges")
            left = lasts(answer.url, answer.headers)
            self._found[path] = _Found(answer.url, time.monotonic() + USED * left)
            return _version(size, answer)

    def fetch(self, path: str, begin: int, end: int, version: Version) -> bytes:
        """A range, if the file is still of that version."""
        if begin == end:
            return b""
        where, headers = display(self.shown(path)), {"Range": f"bytes={begin}-{end - 1}"}
        if version.tag is not None and version.kind in CONDITIONS:
            headers[CONDITIONS[version.kind]] = version.tag
        found = self._place(path)
        with self._client.get(found.url, headers, where) as answer:
            if found.url == self._address(path) or answer.status not in EXPIRED:
                return self._range(answer, where, begin, end, version)
        with self._client.get(self._place(path, found).url, headers, where) as answer:
            return self._range(answer, where, begin, end, version)

    def _address(self, path: str) -> str:
        return self._base + urllib.parse.quote(path) + (f"?{self._query}" if self._query else "")

    def _place(self, path: str, refused: _Found | None = None) -> _Found:
        """Where the file is; asked again if that is no longer so, by one of all who want to know."""
        own = _Found(self._address(path), float("inf"))
        with self._finding:
            found = self._found.get(path, own)
            if found.url != own.url and (found is refused or found.until < time.monotonic()):
                self.version(path)
                found = self._found[path]
        return found

    def _range(self, answer: Answer, where: str, begin: int, end: int, version: Version) -> bytes:
        self._check_status(answer, where, version)
        now = _version(_size(answer) or version.size, answer)
        if now[:2] != version[:2]:
            raise changed(where, version, now)
        stated = answer.headers.get("Content-Range", "")
        span = SPAN.fullmatch(stated)
        if answer.status != 206 or span is None or (int(span["first"]), int(span["last"])) != (begin, end - 1):
            sent = display(stated) if stated else f"status {answer.status}"
            raise Again(f"asked for bytes {begin}-{end - 1}, was sent {sent}")
        return answer.content(end - begin)

    def _check_status(self, answer: Answer, where: str, version: Version | None) -> None:
        status = answer.status
        host = host_and_port(answer.url)
        away = f" by {display(host)}" if host != host_and_port(self._base) else ""
        match status:
            case 200 | 206:
                encoding = answer.headers.get("Content-Encoding", "identity")
                if encoding.lower() != "identity":
                    raise CheckpointError(
                        f"{where}: the server sends it encoded ({display(encoding)}), though asked not to: no range of "
                        "that is one of the file"
                    )
            case 401 | 403:
                hint = (
                    "log in with `hf auth login`, or set HF_TOKEN" if "/resolve/" in self._base else "give access to it"
                )
                raise CheckpointError(f"{where}: HTTP {status}{away}, not permitted; {hint}")
            case 404 | 410:
                raise NotThereError(f"{where}: no such file")
            case 412 if version is not None:
                raise changed(where, version)
            case 408 | 425 | 500 | 502 | 504:
                raise Again(f"HTTP {status}{away}")
            case _:
                raise CheckpointError(f"{where}: HTTP {status}{away}")


def _is_empty(answer: Answer) -> bool:
    """Whether there is no first byte: some servers say so with 416, as RFC 9110 14.4 has it."""
    if answer.status == 416:
        return answer.headers.get("Content-Range", "").replace(" ", "") == "bytes*/0"
    return answer.status == 200 and answer.headers.get("Content-Length") == "0"


def _size(answer: Answer) -> int | None:
    """The size of the whole file, from Content-Range."""
    span = SPAN.fullmatch(answer.headers.get("Content-Range", ""))
    return int(span["size"]) if span is not None and span["size"] != "*" else None


def _version(size: int, answer: Answer) -> Version:
    """What the answer says of it.

    Raises:
        Again: it was written within the second in which it was sent, and its date would be the same if it is again.
    """
    etag, date = answer.headers.get("ETag"), answer.headers.get("Last-Modified")
    if etag is not None:
        return Version(size, etag, Kind.STRONG if etag.startswith('"') else Kind.WEAK)
    if date is None:
        return Version(size, None)
    if seconds_between(date, answer.headers) < 1:
        raise Again("it is being written to: its date is that of the answer")
    return Version(size, date, Kind.DATE)
