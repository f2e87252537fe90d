"""An HTTP client for reading ranges of files, on top of urllib3.

urllib3 keeps connections open and reuses them; one that the server has closed is silently replaced. Redirects are
followed here, and private headers are sent only to their own host. Proxies come from the environment (HTTPS_PROXY,
HTTP_PROXY, NO_PROXY), certificates from the system or SSL_CERT_FILE. A server that sends almost nothing for TIMEOUT
seconds counts as failed.
"""

import re
import ssl
import string
import time
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache, partial
from io import BytesIO
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urljoin, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from urllib3 import BaseHTTPResponse, PoolManager, ProxyManager
from urllib3.exceptions import HTTPError, LocationValueError, ProtocolError

from quanterr.errors import CheckpointError, ResourceError
from quanterr.util.addresses import strip_credentials
from quanterr.util.text import display
from quanterr.util.waiting import RetryableError, handle_busy_host, wait_for
from quanterr.version import __version__

TIMEOUT = 30.0  # seconds to connect, and to wait for an answer to begin or continue
MIN_BYTES_PER_TIMEOUT = 1 << 16  # minimum number of bytes that a server must send within TIMEOUT seconds
MAX_IDLE_CONNECTIONS = 32  # maximum number of idle connections to a host that are kept open
MAX_REDIRECTIONS = 10
REDIRECT_STATUSES = (301, 302, 303, 307, 308)
BUSY_STATUSES = (429, 503)
READ_BYTES = 1 << 20  # bytes read at a time
MAX_DRAINED_BYTES = 1 << 16  # an unwanted answer up to this size is read, so that its connection can be reused
MIN_EPOCH = 10**9  # a larger reset value is a time, not a number of seconds
DATE_FORMAT = "%Y%m%dT%H%M%SZ"  # date format of signed addresses


class Answer:
    """A server's answer, as a context manager that frees the connection when it exits."""

    def __init__(self, url: str, response: BaseHTTPResponse) -> None:
        """Wrap a response to a request for ``url``."""
        self.url, self.status, self.headers = url, response.status, response.headers
        self._response, self._is_reusable = response, True

    def read_body(self, n: int) -> bytes:
        """Read the body of the answer, which must have ``n`` bytes.

        Raises:
            RetryableError: the length differs, or the connection fails or is too slow.
        """
        self._is_reusable = False
        stated = self.headers.get("Content-Length", str(n))
        if stated != str(n):
            raise RetryableError(f"Content-Length is {display(stated)}, of a range of {n:,} bytes")
        body, seen, since = BytesIO(), 0, time.monotonic()  # BytesIO returns its bytes without a copy
        while (done := body.tell()) < n:
            try:
                part = self._response.read1(min(n - done, READ_BYTES))
            except HTTPError as error:
                raise RetryableError(_describe_error(error)) from error
            if not part:
                raise RetryableError(f"received {done:,} of {n:,} bytes")
            done += body.write(part)
            if done < n and (now := time.monotonic()) > since + TIMEOUT:
                if done - seen < MIN_BYTES_PER_TIMEOUT:
                    raise RetryableError(f"{done - seen:,} bytes in {now - since:.0f} s")
                seen, since = done, now
        self._is_reusable = True
        return body.getvalue()

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_reusable and (self._response.length_remaining or 0) <= MAX_DRAINED_BYTES:
            with suppress(HTTPError):
                self._response.read(MAX_DRAINED_BYTES)
        self._response.close()  # closes the connection, unless the answer has been read to its end


class Client:
    """An HTTP client that sends its ``private`` headers only to the host of ``trusted_url``."""

    def __init__(self, trusted_url: str, private: Mapping[str, str]) -> None:
        """Keep the address and the headers; send no request yet."""
        self._trusted_url, self._private = trusted_url, {name.title(): value for name, value in private.items()}

    def get(self, url: str, headers: Mapping[str, str], where: str) -> Answer:
        """Request an address and follow redirects; return the final answer, whatever its status.

        Error messages call the file ``where``.

        Raises:
            RetryableError: the server does not answer, or limits the rate of requests.
            CheckpointError: an address is invalid, or there are too many redirects.
            ResourceError: the server's certificate is not trusted, or the server asks for too long a wait.
        """
        for _ in range(MAX_REDIRECTIONS + 1):
            asked = {"User-Agent": f"quanterr/{__version__}", "Accept-Encoding": "identity", **headers}
            answer = _request(url, asked | (self._private if may_know(self._trusted_url, url) else {}), where)
            target = answer.headers.get("Location")
            if answer.status not in REDIRECT_STATUSES or not target:
                return answer
            with answer:
                url = _resolve_redirect(url, target, where)
        raise CheckpointError(f"{where}: more than {MAX_REDIRECTIONS} redirects")


def may_know(trusted_url: str, url: str) -> bool:
    """Return whether private headers for ``trusted_url`` may go to ``url``: same host and port, or https for http."""
    first, second = _split_origin(urlsplit(trusted_url)), _split_origin(urlsplit(url))
    return first == second or (first == ("http", first[1], 80) and second == ("https", first[1], 443))


def host_and_port(url: str) -> str:
    """Return the host and port of an address, without user and password."""
    return urlsplit(url).netloc.rpartition("@")[2]


def seconds_to_wait(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a rate-limiting server asks to wait, from Retry-After or the reset of its limits.

    References: RFC 9110 10.2.3; draft-ietf-httpapi-ratelimit-headers, which Hugging Face follows (``RateLimit:
    "api";r=0;t=55``); its earlier versions, with RateLimit-Reset; other servers' X-RateLimit-Reset, in seconds or as a
    time.
    """
    if after := headers.get("Retry-After", "").strip():
        if after.isdecimal():
            return float(after)
        if (then := _parse_date(after)) is not None:
            return max(then - _find_server_time(headers), 0.0)
    limits = [
        (re.search(r";\s*r\s*=\s*(\d+)", limit), re.search(r";\s*t\s*=\s*(\d+)", limit))
        for limit in headers.get("RateLimit", "").split(",")
    ]
    if resets := [int(t[1]) for r, t in limits if t and (r is None or r[1] == "0")]:
        return max(resets) + 1.0  # whole seconds: add the fraction that is cut off
    for name in ("RateLimit-Reset", "X-RateLimit-Reset", "X-Rate-Limit-Reset"):
        if (reset := headers.get(name, "").strip()).isdecimal():
            seconds = int(reset) - (_find_server_time(headers) if int(reset) > MIN_EPOCH else 0)
            return max(seconds, 0.0) + 1.0
    return None


def seconds_left(url: str, headers: Mapping[str, str]) -> float:
    """Return the seconds for which a signed address stays valid, by the server's clock; inf for other addresses."""
    query = {name.lower(): value for name, value in parse_qsl(urlsplit(url).query)}
    try:
        if "expires" in query:
            return float(int(query["expires"])) - _find_server_time(headers)
        for signer in ("x-amz-", "x-goog-"):
            if f"{signer}expires" in query:
                signed = datetime.strptime(query[f"{signer}date"], DATE_FORMAT).replace(tzinfo=UTC)
                return signed.timestamp() + int(query[f"{signer}expires"]) - _find_server_time(headers)
    except (KeyError, ValueError):
        pass  # the parameters mean something else
    return float("inf")


def seconds_between(earlier: str, headers: Mapping[str, str]) -> float:
    """Return the seconds from a date in a header until the answer was sent; inf without a valid date."""
    then = _parse_date(earlier)
    return float("inf") if then is None else _find_server_time(headers) - then


def _parse_date(stated: str) -> float | None:
    try:
        return parsedate_to_datetime(stated).timestamp()
    except ValueError:
        return None


def _find_server_time(headers: Mapping[str, str]) -> float:
    """Return the time at which the answer was sent, by the server's clock, as the local clock may be wrong."""
    sent = _parse_date(headers.get("Date", ""))
    return time.time() if sent is None else sent


def _request(url: str, headers: Mapping[str, str], where: str) -> Answer:
    """Request one address, without following redirects."""
    host = host_and_port(url)
    wait_for(host)
    read_later = {"preload_content": False, "decode_content": False, "enforce_content_length": False}
    try:
        ask = partial(
            _make_pool(_find_proxy(urlsplit(url).scheme, host)).urlopen, "GET", url, redirect=False, retries=False
        )
        try:
            response = ask(headers=headers, timeout=TIMEOUT, **read_later)
        except ProtocolError:  # the server was just closing this connection
            response = ask(headers=headers, timeout=TIMEOUT, **read_later)
    except LocationValueError as error:
        raise CheckpointError(f"{where}: the address of {display(host)} or of its proxy is invalid") from error
    except HTTPError as error:
        if error.args and isinstance(untrusted := error.args[0], ssl.SSLCertVerificationError):
            raise ResourceError(
                f"{where}: the certificate of {display(host)} is not trusted: {display(untrusted.verify_message)}; "
                "set SSL_CERT_FILE to a file with trusted certificates"
            ) from error
        raise RetryableError(_describe_error(error)) from error
    answer = Answer(url, response)
    if answer.status in BUSY_STATUSES:
        with answer:
            raise handle_busy_host(host, seconds_to_wait(answer.headers), f"HTTP {answer.status}")
    return answer


@cache
def _make_pool(proxy: str | None) -> PoolManager:
    """Return the connections that are kept open, directly or through a proxy."""
    trusted = ssl.create_default_context()
    if proxy is None:
        return PoolManager(maxsize=MAX_IDLE_CONNECTIONS, ssl_context=trusted)
    parts = urlsplit(proxy)
    headers = {"Proxy-Authorization": make_basic_header(parts)} if parts.username else {}
    return ProxyManager(proxy, maxsize=MAX_IDLE_CONNECTIONS, ssl_context=trusted, proxy_headers=headers)


def _resolve_redirect(url: str, target: str, where: str) -> str:
    """Return the target of a redirect as an absolute address.

    Raises:
        CheckpointError: the target is not an HTTP address.
    """
    try:
        url = urljoin(url, quote(target, string.punctuation, "iso-8859-1"))
        scheme, host, _ = _split_origin(urlsplit(url))
    except ValueError:
        scheme = host = ""
    if scheme not in ("http", "https") or not host:
        shown = display(strip_credentials(target).partition("?")[0])
        raise CheckpointError(f"{where}: redirects to {shown}, which is not an HTTP address")
    return urlunsplit(urlsplit(url)._replace(netloc=host_and_port(url), fragment=""))


def _split_origin(parts: SplitResult) -> tuple[str, str, int]:
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _find_proxy(scheme: str, host: str) -> str | None:
    proxy = getproxies().get(scheme)
    if proxy is None or proxy_bypass(host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def make_basic_header(parts: SplitResult) -> str:
    """Return the Basic authorization header for the user and password of an address."""
    pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    return "Basic " + b64encode(pair.encode()).decode()


def _describe_error(error: BaseException) -> str:
    """Return the message of the error that urllib3 wraps."""
    while isinstance(error, HTTPError) and error.__context__ is not None:
        error = error.__context__
    return display(str(error) or type(error).__name__, 200)
