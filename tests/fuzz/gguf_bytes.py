"""A .gguf file, and an importance matrix: what is taken, the gguf library takes too and reads the same of it.

The library is not needed to run quanterr, nor these: without it what is taken is only checked against the file.
"""

import struct
import warnings
from functools import cache
from importlib.util import find_spec
from math import prod
from random import Random
from types import ModuleType
from typing import Any

from support.gguf_stored import ARRAY, BOOL, F32, I32, IDS, TEXT, U8, U16, U32, U64, pad, text

from fuzz.finding import Target, folder, refusal, require
from fuzz.mutating import STRANGE, changed_bytes, few, number, other_text
from quanterr.checkpoints import open_checkpoint
from quanterr.checkpoints.ggml_types import OF_NAME, GgmlType
from quanterr.checkpoints.gguf_file import SCALARS
from quanterr.errors import QuanterrError
from quanterr.pairing.importance import read_importance

Key = tuple[str, int, Any]  # name, type, value; of an array the type of its elements and a list
Tensor = tuple[str, int, tuple[int, ...]]  # name, type id, dimensions, the innermost first

BASE: tuple[Key, ...] = (
    ("general.architecture", TEXT, "llama"),
    ("llama.attention.head_count", U32, 4),
    ("llama.attention.head_count_kv", U32, [2, 2, 1]),
    ("llama.rope.freq_base", F32, 10000.0),
    ("tokenizer.ggml.tokens", TEXT, ["a", "bc", "", "x" * 300]),
    ("tokenizer.ggml.scores", F32, [0.5, -1.0]),
)
SPECIAL: tuple[Key, ...] = (
    ("general.alignment", U32, 64),
    ("general.alignment", U64, 32),
    ("general.type", TEXT, "imatrix"),
    ("split.no", U16, 0),
    ("split.count", U16, 1),
    ("split.tensors.count", I32, 2),
    ("comfy.gguf.orig_shape.blk.0.attn_q.weight", I32, [64, 3]),
    ("comfy.gguf.orig_shape.gone", I32, [1]),
    ("general.quantized_by", TEXT, "\x1b[2J\n::error::"),
    ("a.bool", BOOL, True),
    ("a.byte", U8, 7),
    ("b.empty", I32, []),
)
TENSORS: tuple[Tensor, ...] = (
    ("blk.0.attn_q.weight", IDS["Q8_0"], (64, 3)),
    ("blk.0.attn_norm.weight", IDS["F32"], (5,)),
    ("blk.0.ffn_up.weight", IDS["Q4_K"], (256, 2)),
    ("output.weight", IDS["BF16"], (3, 2)),
    ("scalar", IDS["F32"], ()),
    ("experts", IDS["IQ4_NL"], (32, 2, 3)),
    ("empty", IDS["F16"], (0,)),
)
NATIVE = ("F64", "F32", "F16", "I64", "I32", "I16", "I8")
IMATRIX: tuple[Tensor, ...] = (
    ("blk.0.attn_q.weight.in_sum2", IDS["F32"], (4, 2)),
    ("blk.0.attn_q.weight.counts", IDS["F32"], (1, 2)),
    ("blk.0.ffn_up.weight.in_sum2", IDS["F32"], (4,)),
    ("blk.0.ffn_up.weight.counts", IDS["F32"], (1,)),
)


def make(random: Random) -> bytes:
    """Make a file: mostly a consistent one with some damage."""
    keys = [key for key in (*BASE, *random.sample(SPECIAL, random.choice((0, 0, 1, 2)))) if random.random() < 0.9]
    tensors = random.sample(TENSORS, random.randint(0, len(TENSORS)))
    return _file(random, keys, tensors)


def make_importance(random: Random) -> bytes:
    """Make an importance matrix of either kind."""
    if random.random() < 0.5:
        return _file(random, [("general.type", TEXT, "imatrix"), *BASE[:1]], list(IMATRIX))
    entries = [(b"blk.0.attn_q.weight", 3, 4), (b"x\x1b", 0, 2), (b"", 1, 1)]
    raw = struct.pack("<i", len(entries))
    for name, calls, n in entries[: random.randint(1, 3)]:
        raw += struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, n)
        raw += struct.pack(f"<{n}f", *(random.choice((0.0, 1.5, 1e30, float("nan"), -1.0, float("inf"))),) * n)
    for _ in range(few(random) - 1):
        raw = changed_bytes(random, raw)
    return raw


def _file(random: Random, keys: list[Key], tensors: list[Tensor]) -> bytes:
    for _ in range(random.choice((0, 1, 1, 2))):
        _change_keys(random, keys)
    for _ in range(random.choice((0, 1, 1, 2))):
        _change_tensors(random, tensors)
    alignment = next((value for name, _, value in reversed(keys) if name == "general.alignment"), 32)
    alignment = alignment if isinstance(alignment, int) and 0 < alignment <= 4096 else 32
    version = 3 if random.random() < 0.95 else number(random, 32)
    counts = [len(tensors), len(keys)]
    if random.random() < 0.05:
        counts[random.randrange(2)] = number(random, 64)
    infos, data = b"", b""
    for name, type_id, dimensions in tensors:
        infos += (
            text(_raw(name)) + struct.pack("<I", len(dimensions)) + struct.pack(f"<{len(dimensions)}Q", *dimensions)
        )
        offset = len(data) if random.random() < 0.97 else random.choice((number(random, 64), len(data) + alignment, 0))
        infos += struct.pack("<IQ", type_id, offset)
        data += pad(bytes(_size(type_id, dimensions)), alignment)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join([_key(random, key) for key in keys]) + infos
    if random.random() < 0.4:
        for _ in range(few(random)):
            head = changed_bytes(random, head)
    raw = pad(head, alignment) + data
    return changed_bytes(random, raw) if random.random() < 0.1 else raw


def _raw(name: str) -> bytes:
    return name.encode(errors="surrogatepass")


def _size(type_id: int, dimensions: tuple[int, ...]) -> int:
    """Return the bytes of a tensor's data; 0 if they are too many to write."""
    name = next((name for name, number in IDS.items() if number == type_id), "F32")
    plain = {"F64": 8, "I64": 8, "F16": 2, "BF16": 2, "I16": 2, "I8": 1}
    ggml_type = OF_NAME.get(name) or GgmlType(0, name, 1, plain.get(name, 4))
    n_bytes = ggml_type.count_bytes(dimensions[::-1])
    return n_bytes if n_bytes < 1 << 14 else 0


def _change_keys(random: Random, keys: list[Key]) -> None:
    if not keys:
        keys.append(random.choice(SPECIAL))
    n = random.randrange(len(keys))
    name, value_type, value = keys[n]
    match random.randrange(7):
        case 0:
            keys[n] = other_text(random, name), value_type, value
        case 1:
            keys[n] = random.choice((*STRANGE, random.choice(keys)[0])), value_type, value
        case 2:
            value_type = random.choice((*SCALARS, TEXT))
            keys[n] = name, value_type, "a" if value_type == TEXT else number(random, 64)
        case 3:
            keys.insert(random.randrange(len(keys) + 1), keys[n])
        case 4:
            keys[n] = name, value_type, [value] if not isinstance(value, list) else value * random.choice((0, 2, 2, 30))
        case 5:
            keys[n] = random.choice(SPECIAL)
        case _:
            del keys[n]


def _change_tensors(random: Random, tensors: list[Tensor]) -> None:
    if not tensors:
        tensors.append(random.choice(TENSORS))
    n = random.randrange(len(tensors))
    name, type_id, dimensions = tensors[n]
    match random.randrange(7):
        case 0:
            tensors[n] = other_text(random, name), type_id, dimensions
        case 1:
            tensors[n] = random.choice((*STRANGE, random.choice(tensors)[0])), type_id, dimensions
        case 2:
            tensors[n] = name, random.choice((*range(44), number(random, 32))), dimensions
        case 3:
            tensors[n] = name, type_id, (*dimensions, number(random, 64))
        case 4:
            tensors[n] = name, type_id, dimensions[::-1]
        case 5:
            tensors.insert(random.randrange(len(tensors) + 1), tensors[n])
        case _:
            del tensors[n]


def _key(random: Random, key: Key) -> bytes:
    name, value_type, value = key
    if not isinstance(value, list):
        return text(_raw(name)) + struct.pack("<I", value_type) + _value(value_type, value)
    n = len(value) if random.random() < 0.97 else number(random, 64)
    head = struct.pack("<IIQ", ARRAY, value_type if random.random() < 0.98 else ARRAY, n)
    return text(_raw(name)) + head + b"".join([_value(value_type, item) for item in value])


def _value(value_type: int, value: Any) -> bytes:
    if value_type == TEXT:
        return text(_raw(str(value)))
    code, size = SCALARS[value_type].format[-1:], SCALARS[value_type].size
    if code in "fd":
        return SCALARS[value_type].pack(float(value) if isinstance(value, int | float) and abs(value) < 1e38 else 0.0)
    whole = int(value) if isinstance(value, int | float) else len(value)
    return (whole % 256**size).to_bytes(size, "little")


@cache
def library() -> ModuleType | None:
    """Return the gguf package; None if it is not installed."""
    if find_spec("gguf") is None:
        return None
    import gguf

    return gguf


def check(raw: bytes) -> str:
    """Check that a file is refused as unreadable, or read as the library reads it."""
    path = folder() / "model.gguf"
    path.write_bytes(raw)
    try:
        with open_checkpoint(path) as checkpoint:
            tensors = {
                name: (entry.dtype, entry.shape, entry.offset, entry.read())
                for name, entry in checkpoint.entries.items()
            }
            values = checkpoint.gguf.values if checkpoint.gguf else {}
    except QuanterrError as error:
        return refusal(error)
    require(raw.startswith(b"GGUF"), "taken although it is no GGUF file")
    if library() is None:
        return "taken; nothing to hold it against: the gguf package is not installed"
    if reason := _beyond_library(tensors):
        return f"taken; {reason}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = library().GGUFReader(path)
    expected = {
        tensor.name: (tensor.tensor_type.name, int(tensor.n_elements), int(tensor.data_offset), tensor.data.tobytes())
        for tensor in reader.tensors
    }
    same = {name: (dtype, prod(shape), at, data) for name, (dtype, shape, at, data) in tensors.items()}
    require(same == expected, f"read {same!a:.2000}, the library {expected!a:.2000}")
    for key, value in values.items():
        field = reader.fields[key]
        contents = bytes(field.parts[-1]).decode(errors="replace") if isinstance(value, str) else field.contents()
        same = list(value) == contents if isinstance(value, tuple) else value == contents or value != value
        require(same, f"{key!a} is {value!a}, the library reads {contents!a}")
    return "taken"


def _beyond_library(document: dict[str, Any]) -> str | None:
    """Return why the gguf package cannot read a valid file; None if it must read it."""
    known = {row.name for row in library().GGMLQuantizationType}
    for dtype, shape, *_ in document.values():
        if dtype not in known:
            return "a type that is newer than the gguf package"
        if dtype not in OF_NAME and dtype not in NATIVE:
            return "a type whose tensors quanterr refuses one by one, and the gguf package with the whole file"
        if not shape and dtype not in NATIVE:
            return "a number alone of a type that the gguf package takes apart by rows"
    return None


def check_importance(raw: bytes) -> str:
    """Check that an importance matrix is refused, or that its mean squares are finite and not negative."""
    path = folder() / "imatrix"
    path.write_bytes(raw)
    try:
        matrix = read_importance(path)
    except QuanterrError as error:
        return refusal(error)
    for name, (means, counts) in matrix.items():
        require(means.dim() == 2 and counts.dim() == 1, f"{name!a}: {means.shape}, {counts.shape}")
        require(bool(means.isfinite().all()) and bool((means >= 0).all()), f"{name!a}: {means}")
    return f"taken, {'a weight or more' if matrix else 'nothing in it'}"


TARGET = Target("gguf", make, check)
IMPORTANCE = Target("imatrix", make_importance, check_importance)
