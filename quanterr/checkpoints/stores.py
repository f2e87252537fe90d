"""Stores that checkpoints are read from: ``https://``, ``hf://``, and ``s3://``, ``gs://`` and others of fsspec.

HTTP is read with Python's own client: only there can be seen whether a server sent the range that it was asked for, and
of which version of the file. fsspec hides both.
"""

import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import PurePosixPath
from typing import Any

from quanterr.checkpoints.block_cache import Cached
from quanterr.checkpoints.remote import Again, NotThereError, RemotePath, Store, Version, changed, retried
from quanterr.errors import CheckpointError, UsageError
from quanterr.util.text import display, listed

HUB = re.compile(r"hf://(?P<model>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w.-]+))?(?:/(?P<inside>.+))?")
TIMEOUT = 30.0  # seconds
TAGS = ("ETag", "etag", "md5Hash", "generation", "mtime")  # by which stores tell versions apart


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows redirections, and tells other hosts no credentials."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made is not None and urllib.parse.urlsplit(newurl).netloc != urllib.parse.urlsplit(req.full_url).netloc:
            made.remove_header("Authorization")
        return made


class Http:
    """Files below an address; nothing can be listed."""

    def __init__(self, base: str, headers: Mapping[str, str] | None = None, query: str = "") -> None:
        """``query`` is added to every address: of signed ones."""
        self._base, self._headers, self._query = base.rstrip("/") + "/", dict(headers or {}), query
        self._opener = urllib.request.build_opener(_SameHost())

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
        answer = self._ask(path, {"Range": "bytes=0-0"})
        with answer:
            if answer.status == 200 and answer.headers.get("Content-Length") == "0":
                return Version(0, None)
            size = _total(answer)
            if size is None:
                raise CheckpointError(f"{display(self.shown(path))}: the server does not serve ranges")
            return Version(size, _tag(answer))

    def fetch(self, path: str, begin: int, end: int, version: Version) -> bytes:
        """A range, if the file is still of that version."""
        if begin == end:
            return b""
        headers = {"Range": f"bytes={begin}-{end - 1}"}
        if version.tag is not None and not version.tag.startswith("W/"):
            headers["If-Match"] = version.tag
        where = self.shown(path)
        try:
            with self._ask(path, headers, version) as answer:
                expected = f"bytes {begin}-{end - 1}/{version.size}"
                stated = answer.headers.get("Content-Range", "")
                if _tag(answer) != version.tag or _total(answer) not in (None, version.size):
                    raise changed(where, version, Version(_total(answer) or version.size, None))
                if answer.status != 206 or stated != expected:
                    raise Again(f"asked for {expected}, was sent {display(stated) or f'status {answer.status}'}")
                found: bytes = answer.read()
        except (http.client.HTTPException, OSError) as error:
            raise Again(_reason(error)) from error
        if len(found) != end - begin:
            raise Again(f"{len(found):,} of {end - begin:,} bytes came")
        return found

    def _ask(self, path: str, headers: Mapping[str, str], version: Version | None = None) -> Any:
        url = self._base + urllib.parse.quote(path) + (f"?{self._query}" if self._query else "")
        asked = {**self._headers, **headers, "Accept-Encoding": "identity"}
        request = urllib.request.Request(url, headers=asked)  # noqa: S310 - of http and https alone: see remote_path
        where = display(self.shown(path))
        try:
            return self._opener.open(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error, where, version) from error
        except (http.client.HTTPException, OSError) as error:
            raise Again(_reason(error)) from error


def _refusal(error: urllib.error.HTTPError, where: str, version: Version | None) -> Exception:
    match error.code:
        case 401 | 403:
            hint = "log in with `hf auth login`, or set HF_TOKEN" if "/resolve/" in where else "give access to it"
            return CheckpointError(f"{where}: HTTP {error.code}, not permitted; {hint}")
        case 404 | 410:
            return NotThereError(f"{where}: no such file")
        case 412 if version is not None:
            return changed(where, version)
        case 408 | 425 | 429 | 500 | 502 | 503 | 504:
            after = error.headers.get("Retry-After", "")
            return Again(f"HTTP {error.code}", float(after) if after.isdecimal() else None)
    return CheckpointError(f"{where}: HTTP {error.code}")


def _total(answer: Any) -> int | None:
    """The size of the whole file, from Content-Range."""
    total = answer.headers.get("Content-Range", "").rpartition("/")[2]
    return int(total) if total.isdecimal() else None


def _tag(answer: Any) -> str | None:
    found: str | None = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
    return found


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", None)
    return display(str(inner or error) or type(error).__name__, 200)


class Hub(Http):
    """A model of the hub at one commit."""

    def __init__(self, model: str, revision: str | None) -> None:
        """Find the commit.

        Raises:
            CheckpointError: there is no such model, or it may not be read.
            UsageError: huggingface_hub is not installed.
        """
        try:
            from huggingface_hub import HfApi, hf_hub_url
            from huggingface_hub.errors import HfHubHTTPError
            from huggingface_hub.utils._headers import build_hf_headers
        except ImportError as error:
            raise UsageError('hf:// needs huggingface_hub: pip install "quanterr[remote]"') from error
        where = f"hf://{model}" + (f"@{revision}" if revision else "")

        def ask() -> Any:
            try:
                return HfApi().model_info(model, revision=revision, timeout=TIMEOUT)
            except HfHubHTTPError as error:
                status = getattr(error.response, "status_code", 0)
                if status in (401, 403, 404):
                    raise CheckpointError(
                        f"{display(where)}: not on the hub, or not permitted; if it is private or gated, log in with "
                        "`hf auth login`, or set HF_TOKEN"
                    ) from error
                raise Again(f"HTTP {status}") from error
            except ValueError as error:
                raise CheckpointError(f"{display(where)}: {display(str(error), 200)}") from error
            except Exception as error:  # its client has errors of its own
                raise Again(_reason(error)) from error

        info = retried(where, ask)
        self.commit: str = info.sha
        self._files = sorted(sibling.rfilename for sibling in info.siblings)
        self._model = model
        base = hf_hub_url(model, "x", revision=info.sha).removesuffix("/x")
        super().__init__(base, {k: v for k, v in build_hf_headers().items() if isinstance(v, str)})

    def names(self, folder: str) -> list[str] | None:
        """Of the files at the commit."""
        prefix = f"{folder}/" if folder else ""
        inside = (name.removeprefix(prefix) for name in self._files if name.startswith(prefix))
        return [name for name in inside if "/" not in name]

    def shown(self, path: str) -> str:
        """``hf://org/model@commit/path``."""
        return f"hf://{self._model}@{self.commit}" + (f"/{path}" if path else "")


class Filesystem:
    """A store of fsspec: s3, gs, abfs …"""

    def __init__(self, url: str) -> None:
        """Find the program that reads it.

        Raises:
            UsageError: it is not installed, or there is none.
        """
        scheme = url.partition("://")[0]
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            self._fs, self.root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            reason = display(str(error).partition("\n")[0], 200)
            raise UsageError(f'{scheme}://: {reason}; pip install "quanterr[remote]" brings s3 and hf') from error
        self._scheme = scheme

    def shown(self, path: str) -> str:
        """The scheme and the path."""
        return f"{self._scheme}://{path}"

    def names(self, folder: str) -> list[str] | None:
        """Names in a folder."""
        found = self._told(folder, lambda: self._fs.ls(folder, detail=False))
        names = {PurePosixPath(one).name for one in found if PurePosixPath(one) != PurePosixPath(folder)}
        return sorted(names)

    def version(self, path: str) -> Version:
        """Size and ETag, or what else changes with the content."""
        info = self._told(path, lambda: self._fs.info(path))
        if info.get("type") == "directory" or info.get("size") is None:
            raise CheckpointError(f"{display(self.shown(path))}: no such file")
        tag = next((str(info[key]) for key in TAGS if info.get(key)), None)
        return Version(int(info["size"]), tag)

    def fetch(self, path: str, begin: int, end: int, version: Version) -> bytes:
        """A range; of S3 only if the file still has that ETag."""
        if begin == end:
            return b""

        def ask() -> bytes:
            if self._scheme == "s3" and version.tag:
                return self._s3_range(path, begin, end, version.tag)
            found: bytes = self._fs.cat_file(path, start=begin, end=end)
            return found

        found: bytes = self._told(path, ask, version)
        if len(found) != end - begin:
            raise Again(f"{len(found):,} of {end - begin:,} bytes came")
        return found

    def _s3_range(self, path: str, begin: int, end: int, tag: str) -> bytes:
        from fsspec.asyn import sync  # type: ignore[import-untyped]

        bucket, _, key = path.partition("/")

        async def get() -> bytes:
            span = f"bytes={begin}-{end - 1}"
            answer = await self._fs._call_s3("get_object", Bucket=bucket, Key=key, Range=span, IfMatch=tag)
            found: bytes = await answer["Body"].read()
            return found

        found: bytes = sync(self._fs.loop, get)
        return found

    def _told(self, path: str, ask: Callable[[], Any], version: Version | None = None) -> Any:
        where = display(self.shown(path))
        try:
            return ask()
        except FileNotFoundError as error:
            raise NotThereError(f"{where}: no such file{_near(self, path)}") from error
        except PermissionError as error:
            raise CheckpointError(f"{where}: not permitted; are the credentials of {self._scheme} set?") from error
        except CheckpointError:
            raise
        except Exception as error:  # each store has its own
            text = display(str(error), 300)
            if version is not None and ("PreconditionFailed" in text or "pre-conditions" in text or "412" in text):
                raise changed(where, version) from error
            if "NoCredentials" in type(error).__name__ or "credentials" in text.lower():
                raise CheckpointError(f"{where}: {text}; are the credentials of {self._scheme} set?") from error
            raise Again(f"{type(error).__name__}: {text}") from error


def _near(store: Filesystem, path: str) -> str:
    """The nearest names in the same folder, as the end of a sentence."""
    own = PurePosixPath(path)
    with suppress(Exception):
        near = get_close_matches(own.name, store.names(str(own.parent)) or [], n=3, cutoff=0.6)
        return f"; did you mean {listed(near)}?" if near else ""
    return ""


def remote_path(given: str, cache: str | os.PathLike[str] | None = None) -> tuple[RemotePath, str | None]:
    """The path of an address, and its commit; ``cache``: the folder in which its ranges are kept.

    Raises:
        UsageError: what reads it is not installed.
        CheckpointError: it is not there.
    """
    store, inner, commit = _store_of(given)
    return RemotePath(store if cache is None else Cached(store, cache), inner), commit


def _store_of(given: str) -> tuple[Store, str, str | None]:
    """The store of an address, what is meant in it, and its commit."""
    scheme = given.partition("://")[0]
    if scheme == "hf":
        match = HUB.fullmatch(given)
        if match is None:
            raise CheckpointError(f"{display(given)}: not like hf://org/model or hf://org/model@revision/file")
        hub = Hub(match["model"], match["revision"])
        return hub, match["inside"] or "", hub.commit
    if scheme in ("http", "https"):
        parts = urllib.parse.urlsplit(given)
        folder, _, name = parts.path.rpartition("/")
        base = urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], folder, "", ""))
        headers = {}
        if parts.username:
            pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            headers["Authorization"] = "Basic " + b64encode(pair.encode()).decode()
        return Http(base, headers, parts.query), urllib.parse.unquote(name), None
    store = Filesystem(given)
    return store, store.root, None
