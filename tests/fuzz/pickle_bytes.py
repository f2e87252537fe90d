"""A file of torch.save: what is taken, torch reads the same of it."""

import io
import warnings
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

import torch

from fuzz.finding import Target, folder, refusal, require
from fuzz.mutating import changed_seed
from quanterr.checkpoints import open_checkpoint
from quanterr.errors import QuanterrError


@cache
def _seeds() -> tuple[bytes, ...]:
    tensors = {"a.weight": torch.arange(12.0).view(3, 4), "b.weight": torch.arange(6, dtype=torch.int8)}
    seeds_found = []
    for content in (tensors, {"state_dict": tensors, "epoch": 3}, {"a": torch.nn.Parameter(tensors["a.weight"])}):
        for is_zip in (True, False):
            buffer = io.BytesIO()
            torch.save(content, buffer, _use_new_zipfile_serialization=is_zip)
            seeds_found.append(buffer.getvalue())
    return tuple(seeds_found)


def make(random: Random) -> bytes:
    """Return a file with changed bytes."""
    return changed_seed(random, _seeds())


def check(raw: bytes) -> str:
    """Check that a file is refused as unreadable, or read as torch reads it."""
    path = folder() / "model.bin"
    path.write_bytes(raw)
    try:
        with open_checkpoint(path) as checkpoint:
            tensors = {name: (e.shape, e.unknown, e.read()) for name, e in checkpoint.entries.items()}
    except QuanterrError as error:
        return refusal(error)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = torch.load(io.BytesIO(raw), weights_only=True)
    except Exception:
        return "taken; torch refuses it"  # torch also checks sums of bytes that quanterr reads only later
    expected = dict(_flatten(expected, ""))
    for name, (shape, unknown, content) in tensors.items():
        other = expected[name if name in expected else f"state_dict.{name}"].detach()
        plain = other.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        require(unknown or (tuple(other.shape), plain) == (shape, content), f"{name!a} differs from what torch reads")
    return "taken"


def _flatten(tree: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        yield from _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]


TARGET = Target("pickle", make, check)
