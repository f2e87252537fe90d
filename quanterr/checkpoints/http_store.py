"""Files on web servers (``https://``), read by ranges.

fsspec does not show whether a server sent the requested range, and from which version of the file. Here, each answer
must state the same version as the first answer, and requests ask servers to refuse any other version:

    strong ETag      If-Match
    weak ETag        no condition, as servers must not compare it (RFC 9110 13.1.1)
    Last-Modified    If-Unmodified-Since, if the date is at least a second old (RFC 9110 8.8.2.2)
    neither          only the size is compared

An address that redirects is requested once per file. Its target is used from then on, until it expires or is refused.
"""

import re
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import NamedTuple

from quanterr.checkpoints.http_client import Answer, Client, host_and_port, seconds_between, seconds_left
from quanterr.checkpoints.store import NotThereError, TagKind, Version, make_changed_error
from quanterr.errors import CheckpointError
from quanterr.util.text import display
from quanterr.util.waiting import RetryableError

CONDITION_HEADERS = {TagKind.STRONG: "If-Match", TagKind.DATE: "If-Unmodified-Since"}
FIRST_BYTE = {"Range": "bytes=0-0"}
EXPIRED_STATUSES = (400, 401, 403, 404, 410)  # statuses of expired signed addresses
USED_SHARE = 0.9  # share of a signed address's validity for which it is used
SPAN = re.compile(r"bytes (?P<first>\d+)-(?P<last>\d+)/(?P<size>\d+|\*)")


class _FinalAddress(NamedTuple):
    """The final address after redirects."""

    url: str
    until: float  # time.monotonic() at which it expires


class Http:
    """A store of the files below an address, which cannot be listed."""

    def __init__(self, base: str, headers: Mapping[str, str] | None = None, query: str = "") -> None:
        """Set up the store; private ``headers`` go only to its host, and ``query`` is added to every address."""
        self._base, self._query = base.rstrip("/") + "/", query
        self._client = Client(self._base, headers or {})
        self._addresses: dict[str, _FinalAddress] = {}
        self._finding = threading.Lock()

    def list_names(self, folder: str) -> list[str] | None:
        """Return None, as a web server lists no files."""
        return None

    def sha256(self, path: str) -> str | None:
        """Return None, as a web server states no checksum."""
        return None

    def show_address(self, path: str) -> str:
        """Return the address without user, password and query."""
        parts = urllib.parse.urlsplit(self._base + path)
        port = f":{parts.port}" if parts.port else ""
        return urllib.parse.urlunsplit((parts.scheme, f"{parts.hostname}{port}", parts.path, "", ""))

    def version(self, path: str) -> Version:
        """Return the file's version, by requesting a range of one byte."""
        where = display(self.show_address(path))
        with self._client.get(self._make_address(path), FIRST_BYTE, where) as answer:
            if _is_empty(answer):
                return Version(0, None)
            self._check_status(answer, where, None)
            size = _parse_size(answer)
            if size is None:
                raise CheckpointError(f"{where}: the server does not serve ranges")
            left = seconds_left(answer.url, answer.headers)
            self._addresses[path] = _FinalAddress(answer.url, time.monotonic() + USED_SHARE * left)
            return _parse_version(size, answer)

    def fetch(self, path: str, begin: int, end: int, version: Version) -> bytes:
        """Fetch a range if the file still has this version."""
        if begin == end:
            return b""
        where, headers = display(self.show_address(path)), {"Range": f"bytes={begin}-{end - 1}"}
        if version.tag is not None and version.tag_kind in CONDITION_HEADERS:
            headers[CONDITION_HEADERS[version.tag_kind]] = version.tag
        address = self._locate(path)
        with self._client.get(address.url, headers, where) as answer:
            if address.url == self._make_address(path) or answer.status not in EXPIRED_STATUSES:
                return self._read_range(answer, where, begin, end, version)
        with self._client.get(self._locate(path, address).url, headers, where) as answer:
            return self._read_range(answer, where, begin, end, version)

    def _make_address(self, path: str) -> str:
        return self._base + urllib.parse.quote(path) + (f"?{self._query}" if self._query else "")

    def _locate(self, path: str, refused: _FinalAddress | None = None) -> _FinalAddress:
        """Return the final address of a file; if it has expired or was ``refused``, one thread requests it again."""
        original = _FinalAddress(self._make_address(path), float("inf"))
        with self._finding:
            address = self._addresses.get(path, original)
            if address.url != original.url and (address is refused or address.until < time.monotonic()):
                self.version(path)
                address = self._addresses[path]
        return address

    def _read_range(self, answer: Answer, where: str, begin: int, end: int, version: Version) -> bytes:
        self._check_status(answer, where, version)
        now = _parse_version(_parse_size(answer) or version.size, answer)
        if now[:2] != version[:2]:
            raise make_changed_error(where, version, now)
        stated = answer.headers.get("Content-Range", "")
        span = SPAN.fullmatch(stated)
        if answer.status != 206 or span is None or (int(span["first"]), int(span["last"])) != (begin, end - 1):
            sent = display(stated) if stated else f"status {answer.status}"
            raise RetryableError(f"asked for bytes {begin}-{end - 1}, was sent {sent}")
        return answer.read_body(end - begin)

    def _check_status(self, answer: Answer, where: str, version: Version | None) -> None:
        status = answer.status
        host = host_and_port(answer.url)
        away = f" by {display(host)}" if host != host_and_port(self._base) else ""
        match status:
            case 200 | 206:
                encoding = answer.headers.get("Content-Encoding", "identity")
                if encoding.lower() != "identity":
                    raise CheckpointError(
                        f"{where}: the server encodes the file ({display(encoding)}), although asked not to: its "
                        "ranges are not ranges of the file"
                    )
            case 401 | 403:
                hint = (
                    "log in with `hf auth login`, or set HF_TOKEN"
                    if "/resolve/" in self._base
                    else "do you have access to the file?"
                )
                raise CheckpointError(f"{where}: HTTP {status}{away}, not permitted; {hint}")
            case 404 | 410:
                raise NotThereError(f"{where}: no such file")
            case 412 if version is not None:
                raise make_changed_error(where, version)
            case 408 | 425 | 500 | 502 | 504:
                raise RetryableError(f"HTTP {status}{away}")
            case _:
                raise CheckpointError(f"{where}: HTTP {status}{away}")


def _is_empty(answer: Answer) -> bool:
    """Return whether the file is empty, which some servers report as status 416 (RFC 9110 14.4)."""
    if answer.status == 416:
        return answer.headers.get("Content-Range", "").replace(" ", "") == "bytes*/0"
    return answer.status == 200 and answer.headers.get("Content-Length") == "0"


def _parse_size(answer: Answer) -> int | None:
    """Return the size of the whole file from Content-Range; None if it is not stated."""
    span = SPAN.fullmatch(answer.headers.get("Content-Range", ""))
    return int(span["size"]) if span is not None and span["size"] != "*" else None


def _parse_version(size: int, answer: Answer) -> Version:
    """Return the version of the file from the headers of an answer.

    Raises:
        RetryableError: the file was modified less than a second before the answer, so its date may not identify it.
    """
    etag, date = answer.headers.get("ETag"), answer.headers.get("Last-Modified")
    if etag is not None:
        return Version(size, etag, TagKind.STRONG if etag.startswith('"') else TagKind.WEAK)
    if date is None:
        return Version(size, None)
    if seconds_between(date, answer.headers) < 1:
        raise RetryableError("the file may still be changing: it is as recent as the answer")
    return Version(size, date, TagKind.DATE)
