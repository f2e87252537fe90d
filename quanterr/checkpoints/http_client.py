"""HTTP for those who read ranges of files: what Python's http.client leaves out.

Connections are kept open and used again; one that the server closed meanwhile is replaced without a word. Redirections
are followed, and private headers go to the host alone that they are for. Proxies are those of the environment
(HTTPS_PROXY, HTTP_PROXY, NO_PROXY), certificates those of the system or of SSL_CERT_FILE. A server that sends nothing,
or next to nothing, is given up after TIMEOUT.
"""

import atexit
import http.client
import re
import ssl
import string
import threading
import time
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from functools import cache
from io import BytesIO
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from quanterr.errors import CheckpointError, ResourceError
from quanterr.util.addresses import without_credentials
from quanterr.util.text import display
from quanterr.util.waiting import Again, busy, wait_for
from quanterr.version import __version__

TIMEOUT = 30.0  # seconds: to connect, for an answer to begin or go on
SLOWEST = 1 << 16  # bytes that have to come in so many seconds
MOST_IDLE = 32  # connections that are kept
MOST_REDIRECTIONS = 10
REDIRECTIONS = (301, 302, 303, 307, 308)
TOO_MANY = (429, 503)
PIECE = 1 << 20  # bytes that are read at a time
DRAINED = 1 << 16  # bytes of an answer that nobody wants: with more of them the connection is closed
EPOCH = 10**9  # a time to wait until, and not seconds to wait
STAMP = "%Y%m%dT%H%M%SZ"  # of signed addresses

Headers = Message | Mapping[str, str]


class _Place(NamedTuple):
    """Where connections lead to."""

    scheme: str
    host: str
    port: int
    proxy: str | None


class _Idle:
    """Connections that nobody uses at the moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[tuple[_Place, http.client.HTTPConnection]] = []

    def take(self, place: _Place) -> http.client.HTTPConnection | None:
        """The one to that place that was used last."""
        with self._lock:
            for n in reversed(range(len(self._known))):
                if self._known[n][0] == place:
                    return self._known.pop(n)[1]
        return None

    def keep(self, place: _Place, connection: http.client.HTTPConnection) -> None:
        """For whoever comes next."""
        with self._lock:
            self._known.append((place, connection))
            oldest = self._known.pop(0)[1] if len(self._known) > MOST_IDLE else None
        if oldest is not None:
            oldest.close()

    def close(self) -> None:
        """End them all."""
        with self._lock:
            while self._known:
                self._known.pop()[1].close()


@cache
def _idle() -> _Idle:
    made = _Idle()
    atexit.register(made.close)
    return made


@cache
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class Answer:
    """What a server sent; the connection is free for others when it is left as a context manager."""

    def __init__(
        self, url: str, place: _Place, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        """Of that address."""
        self.url, self.status, self.headers = url, response.status, response.headers
        self._place, self._connection, self._response = place, connection, response
        self._is_sound = True

    def content(self, n: int) -> bytes:
        """Its body, which has ``n`` bytes.

        Raises:
            Again: it has not, or hardly anything comes.
        """
        self._is_sound = False
        stated = self.headers.get("Content-Length", str(n))
        if stated != str(n):
            raise Again(f"Content-Length is {display(stated)}, of a range of {n:,} bytes")
        found, seen, since = BytesIO(), 0, time.monotonic()  # which hands out its bytes without another copy
        while (done := found.tell()) < n:
            try:
                piece = self._response.read1(min(n - done, PIECE))
            except (http.client.HTTPException, OSError) as error:
                raise Again(_reason(error)) from error
            if not piece:
                raise Again(f"{done:,} of {n:,} bytes came")
            done += found.write(piece)
            if done < n and (now := time.monotonic()) > since + TIMEOUT:
                if done - seen < SLOWEST:
                    raise Again(f"{done - seen:,} bytes in {now - since:.0f} s")
                seen, since = done, now
        self._is_sound = True
        return found.getvalue()

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._whole():
            _idle().keep(self._place, self._connection)
        else:
            self._response.close()
            self._connection.close()

    def _whole(self) -> bool:
        """Whether all of it is read, and the server goes on listening."""
        response = self._response
        if not self._is_sound or response.will_close or (response.length or 0) > DRAINED:
            return False
        try:
            response.read(DRAINED)
        except (http.client.HTTPException, OSError):
            return False
        return response.isclosed()


class Client:
    """Asks for addresses; ``private`` headers are sent to the host of ``own`` alone."""

    def __init__(self, own: str, private: Mapping[str, str]) -> None:
        """Asks nothing yet."""
        self._own, self._private = own, {name.title(): value for name, value in private.items()}

    def get(self, url: str, headers: Mapping[str, str], where: str) -> Answer:
        """The answer, whatever its status, from where it leads to; ``where`` is what errors name.

        Raises:
            Again: nobody answers, or not now.
            CheckpointError: it leads nowhere.
            ResourceError: the server is not to be trusted, or wants a long time.
        """
        for _ in range(MOST_REDIRECTIONS + 1):
            asked = {"User-Agent": f"quanterr/{__version__}", "Accept-Encoding": "identity", **headers}
            answer = _asked(url, asked | (self._private if may_know(self._own, url) else {}), where)
            target = answer.headers.get("Location")
            if answer.status not in REDIRECTIONS or not target:
                return answer
            with answer:
                url = _joined(url, target, where)
        raise CheckpointError(f"{where}: leads from one address to the next, more than {MOST_REDIRECTIONS} times")


def may_know(own: str, url: str) -> bool:
    """Whether headers for one address may go to the other: of the same host and port, or to https in place of http."""
    first, second = _origin(urlsplit(own)), _origin(urlsplit(url))
    return first == second or (first == ("http", first[1], 80) and second == ("https", first[1], 443))


def host_and_port(url: str) -> str:
    """Without user and password."""
    return urlsplit(url).netloc.rpartition("@")[2]


def seconds_to_wait(headers: Headers) -> float | None:
    """What a server asks for that was asked too often: by Retry-After, or by when its limits are reset.

    References: RFC 9110 10.2.3; draft-ietf-httpapi-ratelimit-headers (``RateLimit: "api";r=0;t=55``, of the hub), whose
    earlier versions have RateLimit-Reset; X-RateLimit-Reset of others, in seconds or as a time.
    """
    if after := headers.get("Retry-After", "").strip():
        if after.isdecimal():
            return float(after)
        if (then := _date(after)) is not None:
            return max(then - _now(headers), 0.0)
    limits = [
        (re.search(r";\s*r\s*=\s*(\d+)", one), re.search(r";\s*t\s*=\s*(\d+)", one))
        for one in headers.get("RateLimit", "").split(",")
    ]
    if resets := [int(t[1]) for r, t in limits if t and (r is None or r[1] == "0")]:
        return max(resets) + 1.0  # a whole number: the rest of the last second is missing
    for name in ("RateLimit-Reset", "X-RateLimit-Reset", "X-Rate-Limit-Reset"):
        if (reset := headers.get(name, "").strip()).isdecimal():
            seconds = int(reset) - (_now(headers) if int(reset) > EPOCH else 0)
            return max(seconds, 0.0) + 1.0
    return None


def lasts(url: str, headers: Headers) -> float:
    """Seconds for which a signed address is taken, by the clock of who sent the headers; inf of others."""
    query = {name.lower(): value for name, value in parse_qsl(urlsplit(url).query)}
    try:
        if "expires" in query:
            return float(int(query["expires"])) - _now(headers)
        for signer in ("x-amz-", "x-goog-"):
            if f"{signer}expires" in query:
                signed = datetime.strptime(query[f"{signer}date"], STAMP).replace(tzinfo=UTC)
                return signed.timestamp() + int(query[f"{signer}expires"]) - _now(headers)
    except (KeyError, ValueError):
        pass  # of another meaning
    return float("inf")


def seconds_between(earlier: str, headers: Headers) -> float:
    """From a date in a header to when the answer was sent; inf where there is none."""
    then = _date(earlier)
    return float("inf") if then is None else _now(headers) - then


def _date(stated: str) -> float | None:
    try:
        return parsedate_to_datetime(stated).timestamp()
    except ValueError:
        return None


def _now(headers: Headers) -> float:
    """When it was sent, by the sender's own clock: ours may be wrong."""
    sent = _date(headers.get("Date", ""))
    return time.time() if sent is None else sent


def _asked(url: str, headers: Mapping[str, str], where: str) -> Answer:
    """The answer of that address itself."""
    parts, host = urlsplit(url), host_and_port(url)
    place = _Place(*_origin(parts), _proxy(parts.scheme, host))
    wait_for(host)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if place.proxy is not None and place.scheme == "http":
        target = f"http://{host}{target}"
        headers = {**headers, **_proxy_headers(place.proxy)}
    try:
        connection, response = _exchange(place, target, headers)
    except ssl.SSLCertVerificationError as error:
        raise ResourceError(
            f"{where}: the certificate of {display(place.host)} is not trusted: {display(error.verify_message)}; "
            "SSL_CERT_FILE names a file of certificates that are"
        ) from error
    except (http.client.HTTPException, OSError) as error:
        raise Again(_reason(error)) from error
    answer = Answer(url, place, connection, response)
    if answer.status in TOO_MANY:
        with answer:
            raise busy(host, seconds_to_wait(answer.headers), f"HTTP {answer.status}")
    return answer


def _exchange(
    place: _Place, target: str, headers: Mapping[str, str]
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A request and the beginning of its answer, on a connection that is there, or else on a new one."""
    kept = _idle().take(place)
    if kept is not None:
        try:
            kept.request("GET", target, headers=headers)
            return kept, kept.getresponse()
        except TimeoutError:
            kept.close()
            raise
        except (http.client.HTTPException, OSError):  # it was closed meanwhile, or left with what nobody asked for
            kept.close()
    made = _connection(place)
    try:
        made.request("GET", target, headers=headers)
        return made, made.getresponse()
    except BaseException:
        made.close()
        raise


def _joined(url: str, target: str, where: str) -> str:
    """Where a redirection leads to.

    Raises:
        CheckpointError: to nothing that can be read.
    """
    try:
        url = urljoin(url, quote(target, string.punctuation, "iso-8859-1"))
        scheme, host, _ = _origin(urlsplit(url))
    except ValueError:
        scheme = host = ""
    if scheme not in ("http", "https") or not host:
        shown = display(without_credentials(target).partition("?")[0])
        raise CheckpointError(f"{where}: leads to {shown}, which is no address of http")
    return url


def _origin(parts: SplitResult) -> tuple[str, str, int]:
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _proxy(scheme: str, host: str) -> str | None:
    found = getproxies().get(scheme)
    if found is None or proxy_bypass(host):
        return None
    return found if "://" in found else f"http://{found}"


def _connection(place: _Place) -> http.client.HTTPConnection:
    via = urlsplit(place.proxy) if place.proxy is not None else None
    host, port = (place.host, place.port) if via is None else (via.hostname or "", via.port or 80)
    if place.scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT)
    made = http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=_tls())
    if place.proxy is not None:
        made.set_tunnel(place.host, place.port, headers=_proxy_headers(place.proxy))
    return made


def _proxy_headers(proxy: str) -> dict[str, str]:
    parts = urlsplit(proxy)
    return {"Proxy-Authorization": basic(parts)} if parts.username else {}


def basic(parts: SplitResult) -> str:
    """The header for user and password of an address."""
    pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    return "Basic " + b64encode(pair.encode()).decode()


def _reason(error: Exception) -> str:
    return display(str(error) or type(error).__name__, 200)
