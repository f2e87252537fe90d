"""Addresses of stores, as users write them: ``https://…``, ``hf://…``, ``s3://…``."""

import os
import re
from collections.abc import Iterable
from urllib.parse import urlsplit, urlunsplit

from quanterr.util.text import escape_surrogates

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://.+", re.DOTALL)


def is_address(given: str) -> bool:
    """Return whether ``given`` is a URL and not a file path."""
    return bool(_ADDRESS.fullmatch(given))


def strip_credentials(given: str) -> str:
    """Return an address without its user, password and query, safe for reports and messages; paths are unchanged."""
    if not is_address(given):
        return given
    try:
        parts = urlsplit(given)
    except ValueError:
        return given.partition("?")[0]
    host = parts.netloc if parts.scheme == "hf" else parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def clean_words(words: Iterable[str]) -> list[str]:
    """Return the words of a command line for reports: addresses without credentials, all without lone surrogates."""
    return [escape_surrogates(strip_credentials(word)) for word in words]


def host_of(given: str) -> str | None:
    """Return the host (HTTP, hub) or the bucket (``s3://bucket``) that serves an address; None for a path."""
    if given.startswith("hf://"):
        return urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).netloc
    if not is_address(given):
        return None
    parts = urlsplit(given)
    host = parts.netloc.rpartition("@")[2]
    return host if parts.scheme in ("http", "https") else f"{parts.scheme}://{host}"
