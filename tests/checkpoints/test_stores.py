"""Whatever web servers do to readers of ranges, the bytes are right or the error is clear."""

import gzip
import logging
import os
import shutil
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from support.serving import serving, serving_hub

from quanterr.checkpoints import http_client, http_store
from quanterr.checkpoints.http_client import may_know, seconds_left, seconds_to_wait
from quanterr.checkpoints.http_store import Http
from quanterr.checkpoints.store import RemotePath, TagKind, Version
from quanterr.errors import CheckpointError, Interrupted, ResourceError
from quanterr.util import waiting

BYTES = bytes(range(256)) * 400
LONG_AGO = 1_700_000_000  # seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Wait only milliseconds between attempts."""
    monkeypatch.setattr(waiting, "WAIT", 0.001)
    monkeypatch.setattr(waiting, "LONGEST_WAIT", 0.005)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "w"
    path.write_bytes(BYTES)
    (tmp_path / "empty").write_bytes(b"")
    os.utime(path, (LONG_AGO, LONG_AGO))
    return tmp_path


@pytest.fixture
def server(folder):
    with serving(folder) as server:
        yield server


@pytest.fixture
def hub(folder):
    with serving_hub(folder) as hub:
        yield hub


@pytest.fixture
def clock(monkeypatch):
    """A clock on which time passes only while somebody waits; it starts at the true time."""
    clock = SimpleNamespace(now=time.monotonic(), slept=0.0)
    lock = threading.Lock()

    def sleep(seconds):
        with lock:
            clock.now += seconds
            clock.slept += seconds

    fake = {"monotonic": lambda: clock.now, "sleep": sleep}
    real = {name: getattr(time, name) for name in ("time", "strftime", "localtime")}
    monkeypatch.setattr(waiting, "time", SimpleNamespace(**fake, **real))
    monkeypatch.setattr(http_store, "time", SimpleNamespace(**fake))
    return clock


def at(server, name="w", **given):
    return RemotePath(Http(server.url, **given), name)


def answer_known(path, n_ranges=1):
    """Return the version and a few ranges of it."""
    version = path.version()
    return version, [path.fetch(1000 * n, 1000 * n + 900, version) for n in range(n_ranges)]


def right(n_ranges=1):
    return [BYTES[1000 * n : 1000 * n + 900] for n in range(n_ranges)]


class TestVersions:
    KINDS = (
        (("ETag",), TagKind.STRONG, "If-Match"),
        (("ETag", "Last-Modified"), TagKind.STRONG, "If-Match"),
        (("weak ETag",), TagKind.WEAK, None),
        (("Last-Modified",), TagKind.DATE, "If-Unmodified-Since"),
        ((), TagKind.OTHER, None),
    )

    @pytest.mark.parametrize(("stated", "tag_kind", "condition"), KINDS)
    def test_servers_get_a_condition_that_they_can_check(self, server, stated, tag_kind, condition):
        server.versions = stated
        conditions = []
        server.faults.append(lambda h, *_: conditions.append({k for k in h.headers if k.startswith("If-")}))
        version, content = answer_known(at(server))

        assert (right(), len(BYTES), tag_kind) == (content, version.size, version.tag_kind)
        assert [set(), {condition} - {None}] == conditions

    @pytest.mark.parametrize("stated", [stated for stated, tag_kind, _ in KINDS if stated])
    @pytest.mark.parametrize("holds", [True, False], ids=["refused", "sent"])
    def test_replaced_file_is_an_error(self, server, folder, stated, holds):
        server.versions = stated
        path = at(server)
        version = path.version()
        os.utime(folder / "w", (LONG_AGO + 1, LONG_AGO + 1))
        if not holds:  # some servers ignore conditional requests
            server.holds = lambda *_: True
        with pytest.raises(CheckpointError, match=r"/w: changed while being read"):
            path.fetch(0, 10, version)

    def test_size_decides_where_no_version_is_given(self, server, folder):
        server.versions = ()
        path = at(server)
        version = path.version()
        (folder / "w").write_bytes(BYTES + b"x")
        with pytest.raises(CheckpointError, match=r"changed while being read \(size 102400 → 102401\)"):
            path.fetch(0, 10, version)

    def test_error_shows_the_new_tag(self, server, folder):
        server.versions = ("weak ETag",)
        path = at(server)
        version = path.version()
        os.utime(folder / "w", ns=(0x123, 0x123))
        with pytest.raises(CheckpointError, match=r'\(W/"[0-9a-f]+" → W/"123"\)'):
            path.fetch(0, 10, version)

    def test_date_within_this_second_is_not_trusted(self, server, folder):
        server.versions = ("Last-Modified",)
        soon = time.time() + 1  # still too recent at the last of the attempts
        os.utime(folder / "w", (soon, soon))
        with pytest.raises(ResourceError, match=r"/w: 6 attempts failed, the last: the file may still be changing"):
            at(server).version()

    def test_etag_without_quotes_is_compared_by_the_reader_only(self, server):
        server.version = lambda path: {"ETag": "abc"}
        assert (Version(len(BYTES), "abc", TagKind.WEAK), right()) == answer_known(at(server))

    @pytest.mark.parametrize("name", ["empty", "w"])
    def test_empty_file_is_read(self, server, name):
        server.faults.append(lambda h, *_: h.refuse(200) or True)  # some servers answer this way; ours answers 416
        path = at(server, name)
        version = path.version()
        assert (Version(0, None), b"") == (version, path.fetch(0, 0, version))


def always(answer):
    """Return a fault for every range except the first byte, by which the version is found."""

    def fault(handler, first, last):
        if (first, last) == (0, 0):
            return False
        answer(handler, handler.server.folder / "w", first, last)
        return True

    return fault


def cut(handler, path, first, last):
    handler.begin(206, Content_Range=f"bytes {first}-{last}/{len(BYTES)}", Content_Length=str(last - first + 1),
                  **handler.server.version(path))  # fmt: skip
    handler.wfile.write(BYTES[first : last - 100])
    handler.close_connection = True


def answer_compressed(handler, path, first, last):
    body = gzip.compress(BYTES[first : last + 1])
    handler.begin(206, Content_Range=f"bytes {first}-{last}/{len(BYTES)}", Content_Encoding="gzip",
                  Content_Length=str(len(body)), **handler.server.version(path))  # fmt: skip
    handler.wfile.write(body)


def lying(by):
    def answer(handler, path, first, last):
        handler.send(path, first, last, len(BYTES), Content_Length=str(last - first + 1 + by))
        handler.close_connection = True

    return answer


def ignoring(handler, path, first, last):
    handler.send(path, 0, len(BYTES) - 1, len(BYTES), status=200)


def elsewhere(handler, path, first, last):
    handler.send(path, first + 1, last + 1, len(BYTES))


def answer_elsewhere(handler, path, first, last):
    handler.send(path, first, last, len(BYTES), Content_Range=f"octets {first}-{last}/{len(BYTES)}")


def nonsense(handler, path, first, last):
    handler.wfile.write(b"220 mail ready\r\n\r\n")
    handler.close_connection = True


class TestWrongAnswers:
    @pytest.mark.parametrize(
        ("answer", "expected_message"),
        [
            (cut, "received 800 of 900 bytes|received 799 of 900 bytes"),
            (lying(5), "Content-Length is 905, of a range of 900 bytes"),
            (lying(-5), "Content-Length is 895, of a range of 900 bytes"),
            (ignoring, "asked for bytes 0-899, was sent status 200"),
            (elsewhere, "asked for bytes 0-899, was sent bytes 1-900/102400"),
            (answer_elsewhere, "asked for bytes 0-899, was sent octets"),
            (nonsense, "220 mail ready"),
        ],
    )
    def test_persistent_wrong_answers_are_an_error(self, server, answer, expected_message):
        server.faults.append(always(answer))
        with pytest.raises(ResourceError, match=rf"/w: 6 attempts failed, the last: .*({expected_message})"):
            answer_known(at(server))

    @pytest.mark.parametrize("answer", [cut, lying(5), lying(-5), ignoring, elsewhere, nonsense])
    def test_single_wrong_answer_changes_nothing(self, server, answer):
        answers = iter([always(answer)])
        server.faults.append(
            lambda h, first, last: (
                first != last and (fault := next(answers, None)) is not None and fault(h, first, last)
            )
        )
        assert right(5) == answer_known(at(server), 5)[1]

    def test_encoded_answers_are_an_immediate_error(self, server):
        server.faults.append(always(answer_compressed))
        with pytest.raises(CheckpointError, match=r"/w: the server encodes the file \(gzip\), although asked not to"):
            answer_known(at(server))
        assert 2 == len(server.requests)

    def test_range_answers_without_a_total_size_are_accepted(self, server):
        server.faults.append(
            always(lambda h, path, a, b: h.send(path, a, b, 0, Content_Range=f"bytes {a}-{b}/*") or True)
        )
        assert right() == answer_known(at(server))[1]

    def test_missing_size_at_the_start_is_an_error(self, server, folder):
        server.faults.append(lambda h, a, b: h.send(folder / "w", a, b, 0, Content_Range="bytes 0-0/*") or True)
        with pytest.raises(CheckpointError, match=r"/w: the server does not serve ranges"):
            at(server).version()

    @pytest.mark.parametrize("with_length", [True, False])
    def test_http_1_0_is_supported(self, server, folder, with_length):
        def old(handler, first, last):
            handler.protocol_version, handler.close_connection = "HTTP/1.0", True
            if with_length:
                return False
            handler.begin(206, Content_Range=f"bytes {first}-{last}/{len(BYTES)}", **server.version(folder / "w"))
            handler.wfile.write(BYTES[first : last + 1])
            return True

        server.faults.append(old)
        assert right(3) == answer_known(at(server), 3)[1]
        assert 4 == server.connections

    def test_chunked_answers_are_assembled(self, server, folder):
        def answer_in_chunks(handler, path, first, last):
            handler.begin(206, Content_Range=f"bytes {first}-{last}/{len(BYTES)}", Transfer_Encoding="chunked",
                          **server.version(path))  # fmt: skip
            for n in range(first, last + 1, 100):
                handler.wfile.write(b"64\r\n" + BYTES[n : n + 100] + b"\r\n")
            handler.wfile.write(b"0\r\n\r\n")

        server.faults.append(always(answer_in_chunks))
        assert right(3) == answer_known(at(server), 3)[1]
        assert 1 == server.connections


class TestSlow:
    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch):
        monkeypatch.setattr(waiting, "ATTEMPTS", 1)
        monkeypatch.setattr(http_client, "TIMEOUT", 0.15)  # seconds; even a busy machine needs less for an answer

    def test_silent_server_is_given_up(self, server):
        over = threading.Event()
        server.faults.append(always(lambda *_: over.wait(5)))
        with pytest.raises(ResourceError, match="the last: timed out"):
            answer_known(at(server))
        over.set()

    def test_trickling_server_is_given_up(self, server):
        over = threading.Event()

        def trickle(handler, path, first, last):
            handler.begin(206, Content_Range=f"bytes {first}-{last}/{len(BYTES)}",
                          Content_Length=str(last - first + 1), **server.version(path))  # fmt: skip
            for n in range(first, last + 1):
                handler.wfile.write(BYTES[n : n + 1])
                if over.wait(0.002):
                    break

        server.faults.append(always(trickle))
        with pytest.raises(ResourceError, match=r"the last: \d+ bytes in 0 s"):
            answer_known(at(server))
        over.set()


class TestConnections:
    def test_connections_are_used_again(self, server):
        assert right(9) == answer_known(at(server), 9)[1]
        assert 1 == server.connections

    def test_connection_closed_by_the_server_does_not_count_as_an_attempt(self, server, monkeypatch):
        monkeypatch.setattr(waiting, "ATTEMPTS", 1)

        def leaving(handler, first, last):
            handler.close_connection = True  # the server closes the connection without announcing it
            return False

        server.faults.append(leaving)
        assert right(5) == answer_known(at(server), 5)[1]
        assert 6 == server.connections

    def test_connections_with_surplus_bytes_are_not_used_again(self, server, monkeypatch):
        monkeypatch.setattr(waiting, "ATTEMPTS", 1)
        server.faults.append(
            always(lambda h, path, a, b: [h.send(path, a, b, len(BYTES)), h.wfile.write(b"and more\r\n")])
        )
        assert right(3) == answer_known(at(server), 3)[1]

    def test_idle_connections_are_limited(self, server, monkeypatch):
        monkeypatch.setattr(http_client, "MAX_IDLE_CONNECTIONS", 1)
        http_client._make_pool.cache_clear()
        path = at(server)
        version = path.version()
        together = threading.Barrier(4)
        server.faults.append(lambda *_: together.wait(5) and False)
        with ThreadPoolExecutor(4) as pool:
            assert [BYTES[:100]] * 4 == list(pool.map(lambda _: path.fetch(0, 100, version), range(4)))
        kept = http_client._make_pool(None).connection_from_url(server.url).pool
        assert 1 == sum(connection is not None for connection in kept.queue)
        http_client._make_pool.cache_clear()


class TestRedirections:
    def redirect(self, server, target):
        server.faults.append(lambda h, *_: "/old" in h.path and (h.refuse(302, Location=target) or True))
        shutil.copy(server.folder / "w", server.folder / "old")
        return at(server, "old", headers={"Authorization": "Bearer secret"})

    @pytest.mark.parametrize("target", ["w", "/w", "./w?X-Signature=ä b", "//127.0.0.1:{port}/w"])
    def test_relative_redirections_are_followed(self, server, target):
        path = self.redirect(server, target.format(port=server.server_address[1]))
        assert right(2) == answer_known(path, 2)[1]
        assert {"Bearer secret"} == {authorization for _, _, authorization in server.requests}

    def test_circular_redirection_is_an_error(self, server):
        with pytest.raises(CheckpointError, match=r"/old: more than 10 redirects"):
            self.redirect(server, "old").version()
        assert 11 == len(server.requests)

    @pytest.mark.parametrize(
        "target", ["file:///etc/passwd", "ftp://host/w", "http://[::1", "http://a:b/", "http://me:secret@a:b/?secret"]
    )
    def test_redirection_to_anything_but_http_is_an_error(self, server, target):
        with pytest.raises(CheckpointError, match=r"/old: redirects to .*, which is not an HTTP address") as error:
            self.redirect(server, target).version()
        assert "secret" not in str(error.value)

    def test_private_headers_are_not_sent_to_another_host(self, server, folder):
        with serving(folder) as other:
            path = self.redirect(server, f"{other.url}/w")
            assert right(2) == answer_known(path, 2)[1]
            assert {None} == {authorization for _, _, authorization in other.requests}
        assert 1 == len(server.requests)

    @pytest.mark.parametrize(
        ("host", "other", "may"),
        [
            ("https://a/x", "https://a/y", True),
            ("https://a/x", "https://a:443/y", True),
            ("http://a/x", "https://a/y", True),
            ("https://a/x", "http://a/y", False),
            ("https://a/x", "https://a:8443/y", False),
            ("https://a/x", "https://b/y", False),
            ("https://a/x", "https://a@b/y", False),
            ("https://a/x", "https://a.b/y", False),
        ],
    )
    def test_private_headers_stay_with_their_host(self, host, other, may):
        assert may == may_know(host, other)


class TestSignedAddresses:
    """A hub redirects to another server, with addresses that expire."""

    def test_signed_address_is_requested_once(self, hub):
        assert right(20) == answer_known(at(hub), 20)[1]
        assert (1, 21) == (len(hub.requests), len(hub.files.requests))
        assert (1, 1) == (hub.connections, hub.files.connections)

    def test_signed_addresses_are_renewed_before_they_expire(self, hub, clock):
        path = at(hub)
        version, _ = answer_known(path)
        clock.now += 0.89 * hub.files.lifetime
        path.fetch(0, 10, version)
        assert 1 == len(hub.requests)
        clock.now += 0.02 * hub.files.lifetime
        assert BYTES[:10] == path.fetch(0, 10, version)
        assert 2 == len(hub.requests)

    def test_refused_signed_address_is_renewed_by_one_thread(self, hub):
        path = at(hub)
        version = path.version()
        hub.files.secret = b"another"
        with ThreadPoolExecutor(8) as pool:
            assert [BYTES[n : n + 100] for n in range(8)] == list(
                pool.map(lambda n: path.fetch(n, n + 100, version), range(8))
            )
        assert 2 == len(hub.requests)

    def test_new_signed_address_that_is_refused_is_an_error(self, hub):
        path = at(hub)
        version = path.version()
        hub.files.faults.append(lambda h, *_: h.refuse(403) or True)
        with pytest.raises(CheckpointError, match=rf"/w: HTTP 403 by {hub.files.url[7:]}, not permitted"):
            path.fetch(0, 10, version)
        assert 2 == len(hub.requests)

    def test_renewed_address_must_lead_to_the_first_version(self, hub, folder):
        path = at(hub)
        version = path.version()
        os.utime(folder / "w", (LONG_AGO + 1, LONG_AGO + 1))
        hub.files.secret = b"another"
        with pytest.raises(CheckpointError, match="changed while being read"):
            path.fetch(0, 10, version)

    @pytest.mark.parametrize(
        ("query", "seconds"),
        [
            ("Expires=1700000060&Signature=x", 60),
            ("X-Amz-Date=20231114T221320Z&X-Amz-Expires=3600", 3600),
            ("X-Amz-Date=20231114T221220Z&X-Amz-Expires=3600", 3540),
            ("X-Goog-Date=20231114T221320Z&X-Goog-Expires=60", 60),
            ("Expires=never", float("inf")),
            ("X-Amz-Expires=60", float("inf")),
            ("", float("inf")),
        ],
    )
    def test_signed_addresses_expire_by_the_server_clock(self, query, seconds):
        assert seconds == seconds_left(f"https://host/w?{query}", {"Date": "Tue, 14 Nov 2023 22:13:20 GMT"})


class TestWaits:
    @pytest.mark.parametrize(
        ("headers", "seconds"),
        [
            ({"Retry-After": "120"}, 120),
            ({"Retry-After": "Tue, 14 Nov 2023 22:13:50 GMT"}, 30),
            ({"Retry-After": "Tue, 14 Nov 2023 22:13:00 GMT"}, 0),
            ({"Retry-After": "7", "RateLimit": '"api";r=0;t=55'}, 7),
            ({"RateLimit": '"api";r=0;t=55'}, 56),
            ({"RateLimit": '"api"; r=10; t=200, "resolvers"; r=0; t=55'}, 56),
            ({"RateLimit-Reset": "55"}, 56),
            ({"X-RateLimit-Reset": "55"}, 56),
            ({"X-RateLimit-Reset": "1700000030"}, 31),
            ({"Retry-After": "soon"}, None),
            ({}, None),
        ],
    )
    def test_waits_are_as_long_as_the_server_asks(self, headers, seconds):
        assert seconds == seconds_to_wait({"Date": "Tue, 14 Nov 2023 22:13:20 GMT"} | headers)

    def test_waits_are_shared_and_reported_once(self, server, clock, log):
        path = at(server)
        version = path.version()
        free_at, refused = clock.now + 300, []
        all_asked, all_wait, waits, sleep = threading.Barrier(8), threading.Barrier(8), set(), waiting.time.sleep

        def busy(handler, first, last):
            left = free_at - clock.now
            if left <= 0:
                return False
            refused.append(first)
            all_asked.wait(30)
            handler.refuse(429, RateLimit=f'"resolvers";r=0;t={int(left)}')
            return True

        def wait_for_all(seconds):
            if threading.get_ident() not in waits:
                waits.add(threading.get_ident())
                all_wait.wait(30)
            sleep(seconds)

        waiting.time.sleep = wait_for_all
        server.faults.append(busy)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda n: path.fetch(n, n + 100, version), range(16)))
        assert [BYTES[n : n + 100] for n in range(16)] == answers
        assert 8 == len(refused)
        (notice,) = log
        assert notice.getMessage().startswith(f"{server.url[7:]}: HTTP 429: waits 30")

    def test_wait_for_another_host_delays_nobody(self, server, clock):
        waiting.handle_busy_host("another:80", 300, "HTTP 429")
        answer_known(at(server))
        assert 0 == clock.slept

    def test_overlong_wait_is_an_immediate_error(self, server):
        server.faults.append(lambda h, *_: h.refuse(429, Retry_After="7200") or True)
        with pytest.raises(ResourceError, match=r"HTTP 429: asks to wait 7200 s, longer than the limit of 600 s"):
            at(server).version()
        assert 1 == len(server.requests)

    def test_wait_goes_on_until_every_run_that_may_need_it_was_stopped(self, clock):
        stopped = threading.Event()
        waiting.handle_busy_host("stopped:80", 300, "HTTP 429")
        with waiting.allow_stop(stopped.is_set):
            with waiting.allow_stop(lambda: True):
                waiting.wait_for("stopped:80")
            assert 300 == pytest.approx(clock.slept)
            stopped.set()
            waiting.handle_busy_host("stopped:80", 300, "HTTP 429")
            with pytest.raises(Interrupted, match="interrupted while waiting for stopped:80"):
                waiting.wait_for("stopped:80")

    def test_waits_are_reported_without_a_log_handler(self, clock):
        assert logging.WARNING == waiting.notices.getEffectiveLevel()


class TestTls:
    """A server with its own certificate, reached through a proxy."""

    @pytest.fixture
    def certificate(self, tmp_path):
        x509 = pytest.importorskip("cryptography.x509", reason="cryptography is not installed (moto brings it)")
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "models.invalid")])
        now = datetime.now(UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("models.invalid")]), critical=False)
            .sign(key, hashes.SHA256())
        )
        encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        path = tmp_path / "certificate.pem"
        path.write_bytes(
            key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain) + made.public_bytes(encoding)
        )
        return path

    @pytest.fixture
    def path(self, server, certificate, monkeypatch):
        """A file on an https server that only the proxy can reach."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.tunnelled = context
        monkeypatch.setenv("https_proxy", server.url.replace("://", "://me:pass@"))
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        http_client._make_pool.cache_clear()
        yield RemotePath(Http("https://models.invalid"), "w")
        http_client._make_pool.cache_clear()

    def test_environment_chooses_the_certificates(self, server, path, certificate, monkeypatch):
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert right(3) == answer_known(path, 3)[1]
        assert ["CONNECT models.invalid:443 Basic bWU6cGFzcw=="] == server.tunnels

    def test_untrusted_certificate_is_refused_immediately(self, server, path):
        with pytest.raises(
            ResourceError, match=r"/w: the certificate of models\.invalid is not trusted: .*SSL_CERT_FILE"
        ):
            path.version()
        assert 1 == len(server.tunnels)


class TestProxies:
    @pytest.fixture(autouse=True)
    def through(self, server, monkeypatch):
        monkeypatch.setenv("http_proxy", server.url.replace("://", "://me:pass@"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)

    def test_proxy_is_asked_for_distant_hosts(self, server):
        seen = []
        server.faults.append(lambda h, *_: seen.append(h.headers["Proxy-Authorization"]))
        path = RemotePath(Http("http://models.invalid"), "w")
        assert right(2) == answer_known(path, 2)[1]
        assert {"http://models.invalid/w"} == {path for path, _, _ in server.requests}
        assert {"Basic bWU6cGFzcw=="} == set(seen)

    def test_proxy_sees_neither_user_nor_fragment_from_a_redirection(self, server):
        moved = {"Location": "http://me:secret@models.invalid/w#part"}
        server.faults.append(lambda h, *_: "/old" in h.path and (h.refuse(302, **moved) or True))
        shutil.copy(server.folder / "w", server.folder / "old")
        assert len(BYTES) == RemotePath(Http("http://models.invalid"), "old").version().size
        assert ["http://models.invalid/old", "http://models.invalid/w"] == [path for path, _, _ in server.requests]

    def test_unsupported_proxy_is_refused_immediately(self, server, monkeypatch):
        monkeypatch.setenv("http_proxy", "socks5://me:secret@127.0.0.1:1")
        with pytest.raises(CheckpointError, match=r"models\.invalid or of its proxy is invalid") as error:
            RemotePath(Http("http://models.invalid"), "w").version()
        assert "secret" not in str(error.value)

    def test_proxy_is_bypassed_where_the_environment_asks(self, server, monkeypatch):
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        answer_known(at(server))
        assert {"/w"} == {path for path, _, _ in server.requests}
