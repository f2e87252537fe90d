"""Stores that fsspec reads, such as ``s3://``, ``gs://`` and ``abfs://``."""

import re
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import PurePosixPath
from typing import Any

from quanterr.checkpoints.store import NotThereError, Version, make_changed_error
from quanterr.errors import CheckpointError, UsageError
from quanterr.util.text import display, itemize
from quanterr.util.waiting import RetryableError

TAGS = ("ETag", "etag", "md5Hash", "generation", "mtime")  # fields that identify a version, the preferred ones first


class Filesystem:
    """A store that fsspec reads: s3, gs, abfs …"""

    def __init__(self, url: str) -> None:
        """Find the fsspec library for the address's scheme.

        Raises:
            UsageError: the library is not installed, or the scheme is unknown.
        """
        scheme = url.partition("://")[0]
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            self._fs, self.root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            reason = display(str(error).partition("\n")[0], 200)
            raise UsageError(f'{scheme}://: {reason}; pip install "quanterr[remote]" brings s3 and hf') from error
        self._scheme = scheme

    def sha256(self, path: str) -> str | None:
        """Return None: quanterr does not ask these stores for checksums."""
        return None

    def show_address(self, path: str) -> str:
        """Return the address: scheme and path."""
        return f"{self._scheme}://{path}"

    def list_names(self, folder: str) -> list[str] | None:
        """Return the names in a folder, sorted."""
        paths = self._translate_errors(folder, lambda: self._fs.ls(folder, detail=False))
        names = {PurePosixPath(path).name for path in paths if PurePosixPath(path) != PurePosixPath(folder)}
        return sorted(names)

    def version(self, path: str) -> Version:
        """Return the file's size and ETag, or another tag that changes with the content."""
        info = self._translate_errors(path, lambda: self._fs.info(path))
        if info.get("type") == "directory" or info.get("size") is None:
            raise CheckpointError(f"{display(self.show_address(path))}: no such file")
        tag = next((str(info[key]) for key in TAGS if info.get(key)), None)
        return Version(int(info["size"]), tag)

    def fetch(self, path: str, begin: int, end: int, version: Version) -> bytes:
        """Fetch a range; on S3 only if the file still has the version's ETag."""
        if begin == end:
            return b""

        def ask() -> bytes:
            if self._scheme == "s3" and version.tag:
                return self._s3_range(path, begin, end, version.tag)
            content: bytes = self._fs.cat_file(path, start=begin, end=end)
            return content

        content: bytes = self._translate_errors(path, ask, version)
        if len(content) != end - begin:
            raise RetryableError(f"received {len(content):,} of {end - begin:,} bytes")
        return content

    def _s3_range(self, path: str, begin: int, end: int, tag: str) -> bytes:
        from fsspec.asyn import sync  # type: ignore[import-untyped]

        bucket, _, key = path.partition("/")

        async def get() -> bytes:
            span = f"bytes={begin}-{end - 1}"
            answer = await self._fs._call_s3("get_object", Bucket=bucket, Key=key, Range=span, IfMatch=tag)
            content: bytes = await answer["Body"].read()
            return content

        content: bytes = sync(self._fs.loop, get)
        return content

    def _translate_errors(self, path: str, ask: Callable[[], Any], version: Version | None = None) -> Any:
        where = display(self.show_address(path))
        try:
            return ask()
        except FileNotFoundError as error:
            raise NotThereError(f"{where}: no such file{_suggest_names(self, path)}") from error
        except PermissionError as error:
            raise CheckpointError(f"{where}: not permitted; are the credentials of {self._scheme} set?") from error
        except CheckpointError:
            raise
        except Exception as error:  # each store raises its own errors
            text = display(str(error), 300)
            if version is not None and re.search(r"PreconditionFailed|pre-conditions|\b412\b", text):
                raise make_changed_error(where, version) from error
            if "NoCredentials" in type(error).__name__ or "credentials" in text.lower():
                raise CheckpointError(f"{where}: {text}; are the credentials of {self._scheme} set?") from error
            raise RetryableError(f"{type(error).__name__}: {text}") from error


def _suggest_names(store: Filesystem, path: str) -> str:
    """Return the end of an error message that suggests similar names in the folder; empty if there are none."""
    wanted = PurePosixPath(path)
    with suppress(Exception):
        near = get_close_matches(wanted.name, store.list_names(str(wanted.parent)) or [], n=3, cutoff=0.6)
        return f"; did you mean {itemize(near)}?" if near else ""
    return ""
