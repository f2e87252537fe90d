"""Selection of the store for an address: ``https://``, ``hf://``, and ``s3://``, ``gs://`` and others by fsspec."""

import os
import re
import urllib.parse
from contextlib import suppress

from quanterr.checkpoints.block_cache import CachedStore
from quanterr.checkpoints.fsspec_store import Filesystem
from quanterr.checkpoints.http_client import make_basic_header
from quanterr.checkpoints.http_store import Http
from quanterr.checkpoints.hub_store import Hub
from quanterr.checkpoints.store import RemotePath, Store
from quanterr.errors import CheckpointError
from quanterr.util.text import display

HUB = re.compile(r"hf://(?P<model>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w.-]+))?(?:/(?P<inside>.+))?")


def remote_path(given: str, cache: str | os.PathLike[str] | None = None) -> tuple[RemotePath, str | None]:
    """Return the path for an address, and its commit if it is on the hub; ``cache`` is a folder that keeps ranges.

    Raises:
        UsageError: the library that reads the address is not installed.
        CheckpointError: the address is invalid, or the model does not exist.
    """
    store, inner, commit = _open_store(given)
    return RemotePath(store if cache is None else CachedStore(store, cache), inner), commit


def _open_store(given: str) -> tuple[Store, str, str | None]:
    """Return the store of an address, the path inside the store, and the commit if there is one."""
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
        host = parts.netloc.rpartition("@")[2]
        with suppress(UnicodeError):  # an invalid host stays as it is: urllib3 refuses it
            host = host.encode("idna").decode()
        base = urllib.parse.urlunsplit((parts.scheme, host, folder, "", ""))
        headers = {}
        if parts.username:
            headers["Authorization"] = make_basic_header(parts)
        return Http(base, headers, parts.query), urllib.parse.unquote(name), None
    store = Filesystem(given)
    return store, store.root, None
