"""A .safetensors file: what is taken, the safetensors library takes too and reads the same of it."""

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import safetensors

from fuzz.finding import Target, folder, refusal, require
from fuzz.mutating import STRANGE, Pairs, change, changed_bytes, dump, few, number, other_text, seed
from quanterr.checkpoints import open_checkpoint
from quanterr.checkpoints.base import DTYPE_BITS
from quanterr.errors import QuanterrError

GOLDEN = Path(__file__).parents[1] / "golden"
LARGEST_SEED = 2000  # bytes
WORDS = (*DTYPE_BITS, "f32", "F128", "dtype", "shape", "data_offsets", "__metadata__", [0, 0], [], [2, 3])
SIZES = (0, 1, 2, 3, 4, 7, 8, 16, 2**20, 2**40, 2**40 + 1, 2**62)

Tensors = list[tuple[str, str, list[int]]]


@cache
def seeds() -> list[tuple[Any, bytes]]:
    """Return headers, as trees, and data of small files."""
    seeds_found = [(Pairs([("__metadata__", Pairs([("format", "pt")]))]), b"")]
    for path in sorted(GOLDEN.glob("**/*.safetensors")):
        raw = path.read_bytes()
        if len(raw) <= LARGEST_SEED:
            end = 8 + int.from_bytes(raw[:8], "little")
            seeds_found.append((seed(raw[8:end]), raw[end:]))
    return seeds_found


def make(random: Random) -> bytes:
    """Make a file: mostly one whose tensors still tile its data, with other damage."""
    header, data = random.choice(seeds())
    if random.random() < 0.5:
        header, data = laid_out(random, rearrange(random, tensors_of(header)), metadata_of(header))
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        header = change(random, header, WORDS)
    text = dump(header).encode()
    if random.random() < 0.1:
        text = random.choice((b" ", b"\xef\xbb\xbf", b"\n", b"[", b"")) + text
    if random.random() < 0.2:
        text += random.choice((b" ", b"\t", b"\0", b"\r\n", b"x", b" \0 ", b"\xff")) * random.randint(1, 9)
    length = len(text) if random.random() < 0.95 else number(random, 64)
    if random.random() < 0.1:
        data = changed_bytes(random, data)
    raw = length.to_bytes(8, "little") + text + data
    return changed_bytes(random, raw, length + 8) if random.random() < 0.15 else raw


def tensors_of(header: Any) -> Tensors:
    """Return name, dtype and shape of each tensor."""
    fields = [(name, dict(value)) for name, value in header if name != "__metadata__"]
    return [(name, value["dtype"], list(value["shape"])) for name, value in fields]


def metadata_of(header: Any) -> Any:
    """Return the ``__metadata__``."""
    return next((value for name, value in header if name == "__metadata__"), Pairs())


def rearrange(random: Random, tensors: Tensors) -> Tensors:
    """Change names, dtypes and shapes; add and remove tensors."""
    changed_tensors = list(tensors) or [("w", "F32", [2, 3])]
    for _ in range(few(random, 4)):
        n = random.randrange(len(changed_tensors))
        name, dtype, shape = changed_tensors[n]
        match random.randrange(8):
            case 0:
                changed_tensors[n] = other_text(random, name), dtype, shape
            case 1:
                changed_tensors[n] = random.choice((*STRANGE, random.choice(changed_tensors)[0])), dtype, shape
            case 2:
                changed_tensors[n] = name, random.choice(tuple(DTYPE_BITS)), shape
            case 3:
                changed_tensors[n] = name, dtype, [*shape, random.choice(SIZES)]
            case 4 if shape:
                changed_tensors[n] = name, dtype, [*shape[:-1], random.choice(SIZES)]
            case 5:
                changed_tensors.insert(
                    random.randrange(len(changed_tensors) + 1), (name + random.choice(("_scale", "2")), dtype, shape)
                )
            case 6 if len(changed_tensors) > 1:
                del changed_tensors[n]
            case _:
                changed_tensors[n] = name, dtype, shape[::-1]
    return changed_tensors


def laid_out(random: Random, tensors: Tensors, metadata: Any) -> tuple[Any, bytes]:
    """Return a header and the data that it describes. Data that would be too large are only declared."""
    header, at = Pairs([("__metadata__", metadata)]) if metadata else Pairs(), 0
    for name, dtype, shape in tensors:
        bits = DTYPE_BITS.get(dtype, 8)
        for size in shape:
            bits *= size
        n = bits // 8
        fields = [("dtype", dtype), ("shape", shape), ("data_offsets", [at, at + n])]
        header.append((name, Pairs(fields)))
        at += n
    return header, random.randbytes(at) if at < 1 << 12 else b""


def check(raw: bytes) -> str:
    """Check that a file is refused as unreadable, or read as the library reads it."""
    path = folder() / "model.safetensors"
    path.write_bytes(raw)
    try:
        with open_checkpoint(path) as checkpoint:
            tensors = {name: (e.dtype, list(e.shape), e.read()) for name, e in checkpoint.entries.items()}
            strange = any(entry.unknown for entry in checkpoint.entries.values())
            metadata = checkpoint.metadata[0]
    except QuanterrError as error:
        return refusal(error)
    if strange:  # an error only if they are compared; the library does not read such a file
        return "taken, with unknown dtypes"
    expected = {
        name: (held["dtype"], held["shape"], bytes(held["data"])) for name, held in safetensors.deserialize(raw)
    }
    require(tensors == expected, f"read {tensors!a:.2000}, the library {expected!a:.2000}")
    require(all(isinstance(text, str) for text in metadata.values()), "metadata that is not text")
    length = int.from_bytes(raw[:8], "little")
    require(metadata == (json.loads(raw[8 : 8 + length]).get("__metadata__") or {}), f"metadata {metadata!a}")
    return "taken"


TARGET = Target("safetensors", make, check)
