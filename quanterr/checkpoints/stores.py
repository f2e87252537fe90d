"""The store that an address is in: ``https://``, ``hf://``, and ``s3://``, ``gs://`` and others of fsspec."""

import os
import re
import urllib.parse

from quanterr.checkpoints.block_cache import Cached
from quanterr.checkpoints.fsspec_store import Filesystem
from quanterr.checkpoints.http_client import basic
from quanterr.checkpoints.http_store import Http
from quanterr.checkpoints.hub_store import Hub
from quanterr.checkpoints.store import RemotePath, Store
from quanterr.errors import CheckpointError
from quanterr.util.text import display

HUB = re.compile(r"hf://(?P<model>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w.-]+))?(?:/(?P<inside>.+))?")


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
            headers["Authorization"] = basic(parts)
        return Http(base, headers, parts.query), urllib.parse.unquote(name), None
    store = Filesystem(given)
    return store, store.root, None
