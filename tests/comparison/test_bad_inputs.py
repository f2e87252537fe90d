"""Bad inputs and their messages: one table with a row for each, its exit status and its message.

Each row runs the whole command in its own process, with limits on memory and time, so that a run fails if it hangs,
dies from a signal or asks for gigabytes. ``--lenient`` accepts the inputs that LENIENT numbers with a dagger.
"""

import json
import os
import socket
import struct
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.forked import command
from support.gguf_stored import U8, U32, Stored, array, gguf, key, write_gguf
from support.making import NEW_LIBRARY
from support.stored import NOBODY, as_header, entry, original, pair, raw_header, shards, to_fp8, write, write_index

import quanterr
from quanterr.checkpoints.gguf_file import ARRAY, TEXT
from quanterr.errors import Status

pytestmark = pytest.mark.session

OK, FAILED, USAGE, UNREADABLE, INCONCLUSIVE, ENVIRONMENT = (Status(n) for n in range(6))
LENIENT = {17, 18, 33, 46}  # Row 24 has a dagger, too, but is only a warning.

Make = Callable[[Path], Iterable[Any]]


class Row(NamedTuple):
    """A row: how to make the input and how the command ends."""

    number: int
    what: str
    make: Make  # writes files into an empty folder and returns the words of the command
    status: Status
    says: str | tuple[str, ...]
    before: str = ""  # Python that is executed first: faults outside of the files


# Functions that make inputs


def st(header: bytes, data: bytes = b"1234", length: int | None = None, *words: str) -> Make:
    """Write a safetensors file with this header and data; the original has one tensor w of four bytes."""

    def make(folder: Path) -> Iterable[Any]:
        x = raw_header(folder / "x.safetensors", as_header({"w": entry()}), b"1234")
        return "compare", x, raw_header(folder / "y.safetensors", header, data, length), *words

    return make


def raw(content: bytes, name: str = "y.safetensors") -> Make:
    """Write a file with this content, which need not be a safetensors file."""

    def make(folder: Path) -> Iterable[Any]:
        (folder / name).write_bytes(content)
        return "compare", raw_header(folder / "x.safetensors", as_header({"w": entry()}), b"1234"), folder / name

    return make


A, B = Stored("a", "F32", (2, 3), bytes(range(24))), Stored("b", "Q8_0", (3, 64))


def gg(content: bytes, *words: str, name: str = "y.gguf") -> Make:
    """Write a GGUF file with this content; the original holds a and b."""

    def make(folder: Path) -> Iterable[Any]:
        (folder / name).write_bytes(content)
        return "compare", write_gguf(folder / "x.gguf", [A, B]), folder / name, *words

    return make


def tensors(x: dict[str, torch.Tensor], y: dict[str, torch.Tensor], *words: str) -> Make:
    """Write two safetensors files with these tensors."""

    def make(folder: Path) -> Iterable[Any]:
        return "compare", write(folder / "x.safetensors", x), write(folder / "y.safetensors", y), *words

    return make


def make_changed(change: Callable[[dict[str, torch.Tensor]], Any], *words: str) -> Make:
    """Write a very small model and its FP8 version with this change."""

    def make(folder: Path) -> Iterable[Any]:
        y = to_fp8(original())
        change(y)
        return tensors(original(), y, *words)(folder)

    return make


def path(make: Callable[[Path], Any]) -> Make:
    """Make a file or folder with this function; the original is intact."""
    return lambda folder: ("compare", pair(folder)[0], make(folder))


def index(text: bytes) -> Make:
    """Write an index with this content."""

    def write_files(folder: Path) -> Path:
        (folder / "model.safetensors.index.json").write_bytes(text)
        return folder / "model.safetensors.index.json"

    return path(write_files)


def map_to(weight_map: Any) -> Make:
    """Write an index with this map, next to one shard with the tensor a."""

    def write_files(folder: Path) -> Path:
        write(folder / "1.safetensors", {"a": torch.ones(2, 2)})
        return write_index(folder, weight_map)

    return path(write_files)


def configure(config: bytes, size: int | None = None) -> Make:
    """Write a quantized model next to this config.json."""

    def write_files(folder: Path) -> Path:
        (folder / "y").mkdir()
        os.rename(folder / "quantized.safetensors", folder / "y" / "model.safetensors")
        (folder / "y" / "config.json").write_bytes(config)
        if size is not None:
            os.truncate(folder / "y" / "config.json", size)
        return folder / "y"

    return path(write_files)


def whole(*words: str) -> Make:
    """Write intact files; {folder} in the words is their folder."""
    return lambda folder: ("compare", *pair(folder), *(word.format(folder=folder) for word in words))


# Paths


def missing(folder: Path) -> Path:
    return folder / "quantised.safetensors"


def unreadable(folder: Path) -> Iterable[Any]:
    pair(folder)[0].chmod(0o644)
    folder.chmod(0o755)
    (folder / "secret.safetensors").touch(0)
    return "compare", "original.safetensors", "secret.safetensors"


def looping(folder: Path) -> Path:
    (folder / "a.safetensors").symlink_to("b.safetensors")
    (folder / "b.safetensors").symlink_to("a.safetensors")
    return folder / "a.safetensors"


def dangling(folder: Path) -> Path:
    (folder / "a.safetensors").symlink_to("gone.safetensors")
    return folder / "a.safetensors"


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.safetensors")
    return folder / "pipe.safetensors"


def listening(folder: Path) -> Path:
    here = os.getcwd()
    os.chdir(folder)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.safetensors")
    os.chdir(here)
    return folder / "socket.safetensors"


def other_weights(folder: Path, name: str) -> Path:
    (folder / "y").mkdir()
    (folder / "y" / name).touch()
    return folder / "y"


def shard_is_a_folder(folder: Path) -> Path:
    (folder / "w.safetensors").mkdir()
    return write_index(folder, {"a": "w.safetensors"})


def huge_index(folder: Path) -> Path:
    path = folder / "model.safetensors.index.json"
    path.touch()
    os.truncate(path, 256 * 2**20 + 1)
    return path


def stale_index(folder: Path) -> Path:
    write(folder / "1.safetensors", {"a": torch.zeros(1)})
    write(folder / "2.safetensors", {"b": torch.zeros(1)})
    return write_index(folder, {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"})


def in_two_shards(folder: Path) -> Path:
    return shards(folder / "y", {"a": torch.zeros(1)}, {"a": torch.ones(1)}, index=False)


def write_unlisted(folder: Path) -> Iterable[Any]:
    x = {"a": torch.ones(2, 2), "b": torch.ones(2, 2)}
    y = shards(folder / "y", x)
    write_index(y, {"a": "model-00001-of-00001.safetensors"})
    return "compare", write(folder / "x.safetensors", x), y


def in_the_cache(folder: Path) -> Path:
    """Write an index and a shard as links to a folder of blobs, as in the Hugging Face cache."""
    blobs, snapshot = folder / "blobs", folder / "snapshots"
    shards(blobs, to_fp8(original()))
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    return snapshot


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4932307\n"
LFS_SAYS = "is a Git LFS pointer, not the weights (real size 4932307 bytes); run `git lfs pull`"
PAGE, PICKLE, ZIP = (
    b"<!DOCTYPE html>\n<html>",
    b"\x80\x02}q\x00(X\x05\x00",
    b"PK\x03\x04\x00\x00\x08\x08archive/data.pkl",
)
DENIED = f"import os; os.chdir({{folder!r}}); os.geteuid() or os.seteuid({NOBODY})"

PATHS = [
    Row(1, "missing", path(missing), UNREADABLE,
        "quantised.safetensors: no such file; did you mean quantized.safetensors"),
    Row(1, "missing, with nothing like it", path(lambda folder: folder / "zzz"), UNREADABLE, "zzz: no such file\n"),
    Row(1, "in a file", path(lambda folder: folder / "original.safetensors" / "y"), UNREADABLE, "y: no such file"),
    Row(1, "a link to nothing", path(dangling), UNREADABLE, "a.safetensors: no such file"),
    Row(2, "no permission", unreadable, UNREADABLE, "secret.safetensors: permission denied\n", DENIED),
    Row(3, "a folder without weights", path(partial(other_weights, name="optimizer.bin")), UNREADABLE,
        "no checkpoint found (looked for *.safetensors.index.json, *.safetensors, *.sft, *.gguf, *.bin.index.json, "),
    Row(3, "a folder of hqq", path(partial(other_weights, name="qmodel.pt")), UNREADABLE,
        "AutoHQQHFModel.save_to_safetensors(model, folder) of hqq writes safetensors"),
    *(
        Row(3, f"a folder with {name}", path(partial(other_weights, name=name)), UNREADABLE, says)
        for name, says in (
            ("openvino_model.xml", "holds an OpenVINO model, which is not read; compare the checkpoint"),
            ("tensor-cache.json", "holds a model of MLC-LLM, which is not read; compare the checkpoint"),
        )
    ),
    Row(4, "a folder with several", path(lambda folder: folder), USAGE,
        "ambiguous, choose one of original.safetensors, quantized.safetensors"),
    Row(5, "a loop of links", path(looping), UNREADABLE, "a.safetensors: too many levels of symbolic links"),
    Row(6, "a FIFO", path(fifo), UNREADABLE, "pipe.safetensors: not a regular file"),
    Row(6, "a device", path(lambda _: os.devnull), UNREADABLE, "/dev/null: not a regular file"),
    Row(6, "a socket", path(listening), UNREADABLE, "socket.safetensors: not a regular file"),
    Row(6, "a folder for a shard", path(shard_is_a_folder), UNREADABLE, "w.safetensors: not a regular file"),
]  # fmt: skip

# Other files with the name of weights

IMPOSTORS = [
    row
    for name in ("y.safetensors", "y.gguf")
    for row in (
        Row(7, f"empty {name}", raw(b"", name), UNREADABLE, f"{name}: empty file (0 bytes)"),
        Row(9, f"LFS pointer {name}", raw(LFS, name), UNREADABLE, LFS_SAYS),
        Row(10, f"HTML {name}", raw(PAGE, name), UNREADABLE, "looks like HTML or XML, not weights; download it again"),
        Row(10, f"XML {name}", raw(b'<?xml version="1.0"?><Error><Code>AccessDenied', name), UNREADABLE, "looks like"),
        Row(11, f"pickle {name}", raw(PICKLE, name), UNREADABLE, "is a Python pickle, not a file of torch.save; save "),
        Row(11, f"zip {name}", raw(ZIP, name), UNREADABLE, "the zip archive is damaged or truncated: "),
        Row(11, f"LiteRT {name}", raw(b"\x1c\0\0\0TFL3\0\0", name), UNREADABLE, "is a LiteRT (TensorFlow Lite) model"),
        Row(11, f"ONNX {name}", raw(b"\x08\x07\x12\x07torch", name), UNREADABLE, "truncated or damaged: a field of"),
        Row(11, f"NumPy {name}", raw(b"\x93NUMPY\x01\x00v\x00{'descr': '<f4'", name), UNREADABLE, "is a NumPy file"),
        Row(11, f"GGML {name}", raw(b"tjgg\x03\0\0\0", name), UNREADABLE, "is a GGML file from before GGUF; convert"),
    )
] + [
    Row(8, "one byte", raw(b"\x08"), UNREADABLE, "too short for a safetensors header (1 bytes)"),
    Row(8, "seven bytes", raw(b"\x08" * 7), UNREADABLE, "too short for a safetensors header (7 bytes)"),
    Row(8, "two bytes of GGUF", gg(b"GG"), UNREADABLE, "too short for a GGUF header (2 bytes)"),
    Row(8, "the magic alone", gg(b"GGUF"), UNREADABLE, "truncated in the header: the version should have 4 bytes"),
    Row(10, "JSON", raw(b'{"error":"Access to model org/name is restricted"}'), UNREADABLE, "looks like a JSON docume"),
    Row(12, "GGUF under another name", gg(gguf([A, B]), name="y.safetensors"), OK,
        ("quanterr: warning: ", "y.safetensors: is a GGUF file, despite its name")),
    Row(12, "safetensors under another name",
        lambda folder: ("compare", pair(folder)[0], (folder / "quantized.safetensors").rename(folder / "y.gguf")), OK,
        ("quanterr: warning: ", "y.gguf: is a safetensors file, despite its name")),
    Row(13, "text", raw(b"Repository not found"), UNREADABLE, "exceeds the format limit of 100000000; not a safetens"),
]  # fmt: skip


# Headers of safetensors


def one(**fields: Any) -> bytes:
    """Return a header with one tensor of four bytes and these fields instead of the right ones."""
    return as_header({"w": entry() | fields})


def spell(field: str, value: str) -> bytes:
    """Return the same header with the field's value written literally."""
    return one(**{field: "HERE"}).replace(b'"HERE"', value.encode())


def without(field: str) -> bytes:
    """Return the same header without the field."""
    return as_header({"w": {key: value for key, value in entry().items() if key != field}})


TWO = as_header({"a": entry(), "b": entry(offsets=(4, 8))})
WITH_UNKNOWN = as_header({"w": entry(), "v": entry("F128", (1,), (4, 20))})
WRAPPED = [4, 5, 5_581, 8_681, 49_477, 384_773]  # 2^64 + 4 elements
OFFSETS = "w: data_offsets must be two integers in 0…2^63"
SHAPE = "w: shape must be a list of integers in 0…2^63"
DEEP = "nested too deep"
MILLION_TENSORS = (
    b"{%s}" % (b',"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' * 1_000_001 % (*range(1_000_001),))[1:]
)

HEADERS = [
    Row(13, "length beyond the file", st(b"{}", length=1_000), UNREADABLE,
        "header claims 1000 bytes, file has 14: truncated or not safetensors"),
    Row(13, "cut in the header", st(TWO[:50], b"", len(TWO)), UNREADABLE, f"claims {len(TWO)} bytes, file has 58"),
    Row(14, "length above the limit", st(b"{}", length=10**8 + 1), UNREADABLE, "100000001 exceeds the format limit"),
    Row(14, "length of 2^63", st(b"{}", length=2**63), UNREADABLE, "header length 9223372036854775808 exceeds"),
    Row(14, "length of 2^64 - 1", st(b"{}", length=2**64 - 1), UNREADABLE, "header length 18446744073709551615 exc"),
    Row(15, "no header", st(b"", b""), UNREADABLE, "header is not a JSON object"),
    Row(15, "a list", st(b"[]"), UNREADABLE, "header is not a JSON object"),
    Row(15, "a number", st(b"17"), UNREADABLE, "header is not a JSON object"),
    Row(16, "not UTF-8", st(b'{"\xff": 1}'), UNREADABLE, "header is not valid UTF-8 JSON at byte 2"),
    Row(16, "a byte order mark", st(b"\xef\xbb\xbf{}"), UNREADABLE, "header is not a JSON object; it must start with"),
    Row(16, "padded with NUL", st(one() + b"\0\0"), UNREADABLE, f"not valid UTF-8 JSON at byte {len(one())}"),
    Row(16, "truncated", st(b'{"w": {"dtype"'), UNREADABLE, "header is not valid UTF-8 JSON at byte 14"),
    Row(16, "two documents", st(b"{}{}"), UNREADABLE, "header is not valid UTF-8 JSON at byte 2"),
    Row(16, "behind letters of two bytes", st('{"ü": x}'.encode()), UNREADABLE, "not valid UTF-8 JSON at byte 7"),
    Row(17, "a space in front", st(b" " + one()), UNREADABLE, "header starts with 0x20; it must start with '{'"),
    Row(18, "padded with a tab", st(one() + b" \t "), UNREADABLE, "header padded with 0x09; expected spaces"),
    Row(18, "padded with a line feed", st(one() + b"\n"), UNREADABLE, "header padded with 0x0a; expected spaces"),
    Row(19, "a bomb of lists", st(b'{"w": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"), UNREADABLE, DEEP),
    Row(19, "a bomb of objects", st(b'{"w":' * 10**5 + b"1" + b"}" * 10**5), UNREADABLE, DEEP),
    Row(19, "nested 200 deep", st(b'{"w": ' + b"[" * 200 + b"]" * 200 + b"}"), UNREADABLE, "w: entry is not an obj"),
    Row(20, "5,000 digits", st(spell("data_offsets", f"[0, {'1' * 5_000}]")), UNREADABLE, "5000 digits; offsets an"),
    Row(20, "an infinite offset", st(spell("data_offsets", "[0, 1e999]")), UNREADABLE, OFFSETS),
    Row(20, "an offset with a point", st(spell("data_offsets", "[0, 4.0]")), UNREADABLE, OFFSETS),
    Row(20, "NaN", st(spell("data_offsets", "[0, NaN]")), UNREADABLE, "NaN is not JSON"),
    Row(20, "a negative offset", st(one(data_offsets=[-4, 0])), UNREADABLE, OFFSETS),
    Row(20, "true as an offset", st(one(data_offsets=[True, 4])), UNREADABLE, OFFSETS),
    Row(20, "a text as an offset", st(one(data_offsets=["0", "4"])), UNREADABLE, OFFSETS),
    Row(20, "an offset of 2^63", st(one(data_offsets=[0, 2**63])), UNREADABLE, OFFSETS),
    Row(20, "three offsets", st(one(data_offsets=[0, 2, 4])), UNREADABLE, OFFSETS),
    Row(20, "no list of offsets", st(one(data_offsets=None)), UNREADABLE, OFFSETS),
    Row(20, "a size with a point", st(spell("shape", "[4.0]")), UNREADABLE, SHAPE),
    Row(20, "a negative size", st(one(shape=[-4])), UNREADABLE, SHAPE),
    Row(20, "true as a size", st(one(shape=[True, 4])), UNREADABLE, SHAPE),
    Row(20, "a size of 2^63", st(one(shape=[2**63])), UNREADABLE, SHAPE),
    Row(20, "a shape that is a number", st(one(shape=4)), UNREADABLE, SHAPE),
    Row(21, "half a character", st(as_header({"\ud800": entry()})), UNREADABLE, r"name \ud800 is not valid Unicode"),
    Row(22, "a name twice", st(TWO.replace(b'"b"', b'"a"')), UNREADABLE, '"a" appears twice'),
    Row(22, "a name twice, once escaped", st(TWO.replace(b'"b"', rb'"\u0061"')), UNREADABLE, '"a" appears twice'),
    Row(23, "a dtype twice", st(spell("dtype", '"U8", "dtype": "I8"')), UNREADABLE, 'duplicate key "dtype"'),
    Row(23, "a shape twice", st(spell("shape", '[4], "shape": [2, 2]')), UNREADABLE, 'duplicate key "shape"'),
    Row(23, "metadata twice", st(b'{"__metadata__": {"k": "1", "k": "2"}}'), UNREADABLE, '"k" appears twice'),
    Row(24, "an unknown field", st(one(strides=[1])), OK,
        ("quanterr: warning: ", 'y.safetensors: w: ignoring unknown field "strides"')),
    *(Row(25, f"no {name}", st(without(name)), UNREADABLE, f'w: missing "{name}"') for name in entry()),
    Row(25, "no entry", st(b'{"w": 1}'), UNREADABLE, "w: entry is not an object"),
    Row(26, "an unknown dtype", st(one(dtype="F128")), UNREADABLE,
        "y.safetensors: w: unknown dtype F128 (the file may be newer than quanterr"),
    Row(26, "an unknown dtype, not selected", st(WITH_UNKNOWN, b"1234" + bytes(16), None, "-l", "w"), OK,
        ("quanterr: warning: ", "v: unknown dtype F128 (the file may be newer than quanterr")),
    Row(26, "an unknown dtype of a tensor that is not compared", st(WITH_UNKNOWN, b"1234" + bytes(16)), UNREADABLE,
        "v: unknown dtype F128"),
    Row(26, "an unknown dtype that overlaps", st(WITH_UNKNOWN.replace(b"[4, 20]", b"[2, 20]"), bytes(20)), UNREADABLE,
        "w and v overlap at 2–4"),
    Row(26, "no dtype", st(one(dtype=None)), UNREADABLE, "w: dtype must be a string, found None"),
    Row(26, "a dtype that blinks", st(one(dtype="\x1b[5m")), UNREADABLE, r"w: unknown dtype \x1b[5m"),
    Row(27, "a dtype in small letters", st(one(dtype="bf16")), UNREADABLE, "dtype bf16 (did you mean BF16?)"),
    Row(28, "a number in the metadata", st(b'{"__metadata__": {"k": 1}}'), UNREADABLE, '"k" must be a string'),
    Row(28, "a map in the metadata", st(b'{"__metadata__": {"k": {}}}'), UNREADABLE, '"k" must be a string'),
    Row(28, "a list as metadata", st(b'{"__metadata__": []}'), UNREADABLE, "__metadata__ must be an object of strings"),
    Row(28, "an escape in a key", st(b'{"__metadata__": {"\\u001b": 1}}'), UNREADABLE, r'value for "\x1b" must be a'),
    Row(29, "end before begin", st(one(data_offsets=[4, 0])), UNREADABLE, "w: end before begin"),
    Row(30, "a hole", st(as_header({"a": entry(), "b": entry(offsets=(6, 10))})), UNREADABLE,
        "bytes 4–6 belong to no tensor (between a and b)"),
    Row(31, "an overlap", st(as_header({"a": entry(), "b": entry(offsets=(2, 6))})), UNREADABLE,
        "a and b overlap at 2–4"),
    Row(31, "the same place twice", st(as_header({"a": entry(), "b": entry()})), UNREADABLE, "a and b overlap at 0–4"),
    Row(32, "a hole at the start", st(one(data_offsets=[2, 6])), UNREADABLE, "bytes 0–2 belong to no tensor"),
    Row(33, "bytes behind the last", st(one(), b"123456"), UNREADABLE,
        "2 trailing bytes after the last tensor; some loaders ignore them, others refuse"),
    Row(34, "a second file", st(one(), b"1234" + len(TWO).to_bytes(8, "little") + TWO + b"12345678"), UNREADABLE,
        (f"another file begins at byte {len(one()) + 12}, after the last tensor: shards were joined", "head -c")),
    Row(34, "data cut off", st(TWO, b"12345"), UNREADABLE,
        f"truncated: 3 bytes missing (have {len(TWO) + 13}, need {len(TWO) + 16}); first affected: b"),
    Row(34, "no data", st(TWO, b""), UNREADABLE, "first affected: a"),
    Row(35, "too few bytes", st(one(dtype="F32", shape=[2])), UNREADABLE, "w: shape [2] of F32 needs 8 bytes, range "),
    Row(35, "too many bytes", st(one(shape=[2])), UNREADABLE, "w: shape [2] of U8 needs 2 bytes, range has 4"),
    Row(35, "no size, but bytes", st(one(shape=[0])), UNREADABLE, "w: shape [0] of U8 needs 0 bytes, range has 4"),
    Row(36, "a product beyond 64 bits", st(one(shape=[2**40, 2**40])), UNREADABLE, f"{2**80} bytes, range has 4"),
    Row(36, "a product of 2^64 + 4", st(one(shape=WRAPPED)), UNREADABLE, f"needs {2**64 + 4} bytes, range has 4"),
    Row(37, "a huge size", st(one(shape=[0, 2**62, 2**62], data_offsets=[0, 0])), UNREADABLE, "exceeds 2^40"),
    Row(38, "10,000 dimensions", st(one(shape=[1] * 10_000)), UNREADABLE, "w: 10000 dimensions; the limit is 32"),
    Row(38, "33 dimensions", st(one(shape=[1] * 33)), UNREADABLE, "w: 33 dimensions; the limit is 32"),
    Row(39, "over a million tensors", st(MILLION_TENSORS), UNREADABLE, "1000001 tensors exceed the limit of 1000000"),
    Row(40, "half a byte", st(one(dtype="F4", shape=[3])), UNREADABLE, "w: 12 bits is not a whole number of bytes"),
    Row(46, "a very long name",
        st(as_header({"w": entry(), "n" * 5_000: entry(shape=[0], offsets=(4, 4))}), b"1234", None, "-l", "w"),
        UNREADABLE,
        "nnn: name of 5000 characters; the limit is 4096"),
]  # fmt: skip


# Headers of GGUF


def field(name: str, value_type: int, value: bytes = b"") -> bytes:
    """Return a key with a type and these bytes as its value."""
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", value_type) + value


def counts(n_tensors: int, n_keys: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    """Return a header with these counts, followed by ``rest``."""
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + rest


def shape_of(n: int, *sizes: int, dtype: int = 0) -> bytes:
    """Return a file with one tensor of four numbers, whose header claims this."""
    info = field("a", n, b"".join(struct.pack("<Q", size) for size in sizes)) + struct.pack("<IQ", dtype, 0)
    return counts(1, 0, info + bytes(-(24 + len(info)) % 32) + bytes(32))


def unknown_type(ggml_type: int, *words: str) -> Make:
    """Write intact tensors a and b, and c with a type unknown on both sides."""
    return gg(gguf([A, Stored("c", ggml_type, (8,), bytes(40)), B]), *words)


def split(folder: Path) -> Path:
    write_gguf(folder / "y-00001-of-00002.gguf", [A], [key("split.count", U32, 2)])
    return folder / "y-00001-of-00002.gguf"


def split_otherwise(folder: Path) -> Path:
    for n in (1, 2):
        write_gguf(folder / f"y-0000{n}-of-00002.gguf", [(A, B)[n - 1]], [key("split.count", U32, 3)])
    return folder / "y-00001-of-00002.gguf"


FILE = gguf([A, B])
ALIGNED = "general.alignment"

GGUF = [
    Row(13, "no numbers", gg(counts(0)[:12]), UNREADABLE, "truncated in the header: the number of tensors should ha"),
    Row(13, "a key beyond the file", gg(counts(0, 1, struct.pack("<Q", 999) + bytes(20))), UNREADABLE,
        "truncated in the header: key number 0 should have 999 bytes"),
    Row(13, "a text beyond the file", gg(gguf([], [field("k", TEXT, struct.pack("<Q", 2**62))])), UNREADABLE,
        f"k should have {2**62} bytes"),
    Row(13, "an array beyond the file", gg(gguf([], [array("k", 6, [], 2**61)])), UNREADABLE, f"{2**63} bytes"),
    Row(14, "version 1", gg(counts(0, version=1)), UNREADABLE, "GGUF version 1, which llama.cpp no longer reads"),
    Row(14, "a newer version", gg(counts(0, version=4)), UNREADABLE, "GGUF version 4; quanterr reads 2 and 3"),
    Row(14, "big endian", gg(b"GGUF" + struct.pack(">IQQ", 3, 1, 0) + bytes(40)), UNREADABLE,
        "big endian GGUF, version 3; quanterr reads little endian files"),
    Row(16, "a key that is no UTF-8", gg(counts(0, 1, struct.pack("<Q", 2) + b"\xff\xfe" + bytes(9))), UNREADABLE,
        r"key number 0 is not valid UTF-8: b'\xff\xfe'"),
    Row(20, "an alignment of 48", gg(gguf([A], [key(ALIGNED, U32, 48)])), UNREADABLE, "48; it must be a power of two"),
    Row(19, "nested arrays", gg(gguf([], [field("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 10**4)])), UNREADABLE,
        "key k is an array of arrays"),
    Row(20, "an unknown type of a key", gg(gguf([], [field("k", 13, bytes(9))])), UNREADABLE, "the unknown type 13"),
    Row(21, "a name that is no UTF-8", gg(counts(1, 0, struct.pack("<Q", 2) + b"\xff\xff" + bytes(30))), UNREADABLE,
        "name of tensor number 0 is not valid UTF-8"),
    Row(22, "a name twice", gg(gguf([A, A])), UNREADABLE, "tensor name a appears twice"),
    Row(23, "a key twice", gg(gguf([], [key("k", U8, 1), key("k", U8, 2)])), UNREADABLE, "key k appears twice"),
    Row(29, "an odd offset", gg(gguf([A, B._replace(offset=40)])), UNREADABLE, "b: offset 40 is not a multiple of 32"),
    Row(30, "a hole", gg(gguf([A, B._replace(offset=64)]) + bytes(32)), UNREADABLE, "bytes 32–64 belong to no tensor"),
    Row(31, "an overlap", gg(gguf([A, B._replace(offset=0)])), UNREADABLE, "a and b overlap at 0–24"),
    Row(32, "a hole at the start", gg(gguf([A._replace(offset=32)]) + bytes(32)), UNREADABLE, "bytes 0–32 belong to"),
    Row(33, "bytes behind the last", gg(FILE + b"x"), UNREADABLE, "1 trailing byte after the last tensor"),
    Row(34, "a second file", gg(FILE + FILE), UNREADABLE,
        (f"another file begins at byte {len(FILE)}, after the last tensor", "llama-gguf-split --merge")),
    Row(34, "data cut off", gg(FILE[:-30]), UNREADABLE, ("truncated: 10 bytes missing", "first affected: b")),
    Row(34, "an offset beyond the file", gg(gguf([A, B._replace(offset=2**40)])), UNREADABLE, "is past the end"),
    Row(35, "half a block", gg(shape_of(1, 48, dtype=2)), UNREADABLE, "a: rows of 48 elements are not whole blocks of"),
    Row(36, "a product of 2^64 + 4", gg(shape_of(4, 20, 5_581, 8_681 * 49_477, 384_773)), UNREADABLE, "is too large"),
    Row(37, "a huge size", gg(shape_of(2, 0, 2**41)), UNREADABLE, "a: dimension exceeds 2^40"),
    Row(38, "six dimensions", gg(shape_of(6, 1, 1, 1, 1, 1, 1)), UNREADABLE, "a: 6 dimensions; the limit is 5"),
    Row(39, "2^64 - 1 tensors", gg(counts(2**64 - 1)), UNREADABLE, "tensors exceed the limit of 1000000"),
    Row(39, "more tensors than fit", gg(counts(10**6, 0, bytes(100))), UNREADABLE, "no room for 1,000,000 tensors in"),
    Row(39, "too many keys", gg(counts(0, 2**17 + 1)), UNREADABLE, "131073 keys exceed the limit of 131072"),
    Row(46, "a very long name", gg(gguf([A, B, Stored("n" * 5_000)]), "-l", "a,b"), UNREADABLE,
        "nnn: name of 5000 characters; the limit is 4096"),
    Row(52, "a shard missing", path(split), UNREADABLE, "1 of 2 shards missing: y-00002-of-00002.gguf"),
    Row(53, "split otherwise", path(split_otherwise), UNREADABLE, "y-00001-of-00002.gguf: shard 1 of 3 (split.no, spl"),
    Row(71, "an unknown type", unknown_type(190), INCONCLUSIVE,
        ("2 of 2 original tensors compared", "c: unknown type id 190 (the file may be newer than quanterr")),
    Row(71, "a removed type", unknown_type(4), INCONCLUSIVE,
        ("2 of 2 original tensors compared", "c: type Q4_2 (id 4), which llama.cpp has removed")),
    Row(71, "an unknown type, not selected", unknown_type(190, "-l", "a,b"), OK,
        ("quanterr: warning: ", "c: unknown type id 190")),
]  # fmt: skip


# Odd inputs that are still compared


STRANGE = {  # names that affect a terminal, markup or a CI log, and their harmless form
    "\x1b[2J.weight": r"\x1b[2J.weight",
    "a\0b": r"a\x00b",
    "\u202egnp.weight": r"\u202egnp.weight",
    "line\n::error::x": r"line\x0a::error::x",
    "[bold]x[/bold]": "[bold]x[/bold]",
    "": '""',
}
NAMED = {name: torch.linspace(-1, 1, 12).reshape(4, 3) for name in STRANGE}
HALVED = {name: weight.bfloat16() for name, weight in NAMED.items()}
SQUARE, ONES = torch.linspace(-1, 1, 16).view(4, 4), torch.ones(4, 4)
ODD = as_header({"odd": entry("U8", (3,), (0, 3)), "w": entry("F64", (1, 2), (3, 19))})
MASK = as_header({"w": entry("BOOL")})


def write_misaligned(folder: Path) -> Iterable[Any]:
    files = folder / "x.safetensors", folder / "y.safetensors"
    for file, last in zip(files, (-2.0, -1.0), strict=True):
        raw_header(file, ODD, b"123" + struct.pack("<2d", 1.5, last))
    return "compare", *files


def masks(x: bytes, y: bytes) -> Make:
    return lambda folder: (
        "compare", raw_header(folder / "x.safetensors", MASK, x), raw_header(folder / "y.safetensors", MASK, y)
    )  # fmt: skip


def twins(*names: str) -> Make:
    return tensors({name: SQUARE.clone() for name in names}, {name: SQUARE.bfloat16() for name in names})


ACCEPTED = [
    Row(41, "a tensor at an odd byte", write_misaligned, OK, "COMPARED (exit 0): "),
    Row(42, "masks of odd bytes, the same", masks(b"\0\1\2\xff", b"\0\1\2\xff"), OK, "identical"),
    Row(42, "masks of odd bytes that differ", masks(b"\0\1\1\xff", b"\0\1\2\xff"), INCONCLUSIVE, "integers, or codes"),
    Row(43, "no dimension", tensors({"w": torch.tensor(2.0)}, {"w": torch.tensor(1.5)}), OK,
        "1 of 1 original tensor compared"),
    *(Row(44, f"no element, {shape}",
          tensors({"w": SQUARE, "empty": torch.zeros(shape)}, {"w": SQUARE.half(), "empty": torch.zeros(shape)}),
          OK, "2 of 2 original tensors compared (100 % of bytes)")
      for shape in ((0,), (0, 4), (4, 0), (2, 0, 3))),
    Row(45, "strange names", tensors(NAMED, HALVED, "-v"), OK, (*STRANGE.values(),)),
    Row(47, "an empty name", tensors({"": SQUARE}, {"": SQUARE.half()}), OK, '""'),
    Row(48, "names in two cases", twins("W", "w"), OK,
        ("2 of 2 original tensors", "quanterr: warning: ", "names that differ only by case or in how accents are")),
    Row(48, "names with accents in two ways", twins("\u00e9", "e\u0301"), OK,
        ("2 of 2 original tensors", "quanterr: warning: ", r"differ only by case or in how accents are stored: ")),
]  # fmt: skip


# Changes while files are read


def meanwhile(statement: str) -> str:
    """Return Python that does this to the files x and y once all headers are read and the run begins."""
    return (
        "import os\nfrom quanterr.comparison.scheduler import Scheduler\nrun = Scheduler.run\n"
        "import glob\nx, y = sorted(glob.glob({folder!r} + '/*.safetensors') or glob.glob({folder!r} + '/*.gguf'))\n"
        f"def changing(self, watch):\n    {statement}\n    return run(self, watch)\nScheduler.run = changing\n"
    )


def failing(times: int) -> str:
    """Return Python that lets reading fail this many times, below the buffers, once the run begins."""
    return (
        "import os, time\nfrom quanterr.comparison.scheduler import Scheduler\n"
        "from quanterr.kernel.native_sums import NativeSums\n"
        "NativeSums._carry_out = lambda *_: False\n"  # so that the compiled kernel cannot read the file either
        "run, preadv, failed = Scheduler.run, os.preadv, []\n"
        f"def reading(*a):\n    if len(failed) < {times}:\n        failed.append(a)\n        raise OSError(5, 'I/O')\n"
        "    return preadv(*a)\n"
        "def failing(self, watch):\n    os.preadv, time.sleep = reading, lambda _: None\n    return run(self, watch)\n"
        "Scheduler.run = failing\n"
    )


MEANWHILE = [
    Row(49, "truncated", whole(), UNREADABLE, ("quantized.safetensors: changed while being read (size ", "→ 100"),
        meanwhile("os.truncate(y, 100)")),
    Row(49, "the original cut off", whole(), UNREADABLE, "original.safetensors: changed while being read (size ",
        meanwhile("os.truncate(x, 800)")),
    Row(49, "appended to", whole(), UNREADABLE, "quantized.safetensors: changed while being read (size ",
        meanwhile("open(y, 'ab').write(b'x')")),
    Row(49, "overwritten", whole(), UNREADABLE, "; results discarded. Compare again when nothing writes to it",
        meanwhile("f = open(y, 'r+b', 0); f.seek(600); f.write(bytes(100)); os.utime(y)")),
    Row(49, "GGUF, cut off", gg(FILE), UNREADABLE, "y.gguf: changed while being read (size ",
        meanwhile("os.truncate(y, 200)")),
    Row(49, "GGUF, overwritten", gg(FILE), UNREADABLE, "; results discarded. Compare again when nothing writes to it",
        meanwhile("f = open(y, 'r+b', 0); f.seek(-10, 2); f.write(bytes(9)); os.utime(y)")),
    Row(50, "GGUF, keeps failing", gg(FILE), UNREADABLE, ("gguf: read failed at byte ", ": EIO"), failing(10**6)),
    Row(50, "fails three times", whole(), OK, "3 of 3 original tensors compared", failing(3)),
    Row(50, "keeps failing", whole(), UNREADABLE, ("safetensors: read failed at byte ", ": EIO"), failing(10**6)),
]  # fmt: skip


# Indexes, and config.json

NO_FILE_NAME = " is not a plain file name"
NOT_PLAIN = ["../../etc/passwd", "/etc/passwd", "sub/model.safetensors", "C:\\model.safetensors", "C:model.safetensors",
             "..\\model.safetensors", "1.safetensors\0.txt", "..", ".", "", 7, None, ["1.safetensors"]]  # fmt: skip
FP8_CONFIG = b'{"quantization_config": {"quant_method": "fp8"}, "architectures": ["X"]}'
CODE = (
    b'{"auto_map": {"AutoModel": "evil.py--Evil"}, "_attn_implementation_internal": "evil/kernel", "vocab_size": NaN}'
)

BESIDE = [
    *(Row(51, repr(name), map_to({"a": "1.safetensors", "b": name}), UNREADABLE, ("index: shard name ", NO_FILE_NAME))
      for name in NOT_PLAIN),
    Row(52, "shards missing", path(lambda folder: write_index(folder, {"a": "1.st", "b": "2.st", "c": "1.st"})),
        UNREADABLE, "2 of 2 shards missing: 1.st, 2.st"),
    Row(53, "not where the index says", path(stale_index), UNREADABLE, "index: b is not in 1.safetensors"),
    Row(54, "in two shards", path(in_two_shards), UNREADABLE, ("a is in ", " and in ")),
    Row(54, "unlisted", write_unlisted, OK, ("quanterr: warning: ", "index does not list b; compared anyway")),
    Row(55, "a tensor twice", index(b'{"weight_map": {"a": "1.st", "a": "2.st"}}'), UNREADABLE, 'duplicate key "a"'),
    Row(55, "two maps", index(b'{"weight_map": {}, "weight_map": {}}'), UNREADABLE, 'duplicate key "weight_map"'),
    *(Row(55, text.decode(), index(text), UNREADABLE, 'index has no "weight_map"')
      for text in (b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": ["1.safetensors"]}')),
    Row(55, "nothing", index(b""), UNREADABLE, "not valid UTF-8 JSON at byte 0"),
    Row(55, "not UTF-8", index(b'{"weight_map": {"\xff'), UNREADABLE, "not valid UTF-8 JSON at byte 17"),
    Row(55, "a byte order mark", index(b"\xef\xbb\xbf{}"), UNREADABLE, "not valid UTF-8 JSON at byte 0"),
    Row(55, "a bomb", index(b"[" * 10**5), UNREADABLE, DEEP),
    Row(55, "digits", index(b'{"metadata": {"total_size": %s}}' % (b"1" * 5_000)), UNREADABLE, "5000 digits"),
    Row(55, "huge", path(huge_index), UNREADABLE, f"index of {256 * 2**20 + 1} bytes; the limit is {256 * 2**20}"),
    Row(56, "links into blobs", path(in_the_cache), OK, "3 of 3 original tensors compared"),
    Row(57, "no config.json", whole(), OK, "3 of 3 original tensors compared"),
    Row(58, "config.json is cut off", configure(b'{"quantization_config": {'), OK,
        ("quanterr: warning: ", "config.json: ignored: is not valid UTF-8 JSON at byte 25", "3 of 3 original")),
    Row(58, "config.json is huge", configure(b"", 2**24 + 1), OK,
        ("quanterr: warning: ", "config.json: ignored: 16777217 bytes; the limit is 16777216")),
    Row(58, "config.json holds NaN", configure(b'{"rope_theta": NaN, "x": Infinity}'), OK, "3 of 3 original"),
    Row(59, "config.json declares fp8, nothing is scaled",
        lambda folder: (*configure(FP8_CONFIG)(folder)[:2],
                        write(folder / "y" / "model.safetensors",
                              {name: w.to(torch.float8_e4m3fn) if w.ndim == 2 else w for name, w in original().items()})
                        .parent),
        INCONCLUSIVE, "config.json declares quant_method fp8"),
    Row(59, "config.json declares 4 bits, the codes have 8", configure(b'{"quantization_config": {"bits": 4}}'), OK,
        "config.json declares codes of 4 bits, but codes of 8 bits are stored for 2 weights: "),
    Row(60, "code names in config.json", configure(CODE), OK, "3 of 3 original"),
]  # fmt: skip


# Weights

UP = "model.layers.0.mlp.up_proj.weight"
SCALE = f"{UP}_scale"
ALL_CODES = torch.arange(512).to(torch.uint8).view(32, 16)  # each code twice


def put(name: str, value: torch.Tensor) -> Make:
    return make_changed(lambda y: y.update({name: value}))


def spoilt_original(folder: Path) -> Iterable[Any]:
    x = original()
    x[UP][3, 5] = float("inf")
    return tensors(x, to_fp8(original()))(folder)


HIGGS = {name: ONES.clone() for name in ("w.scales", "w.tables", "w.tables2")}
HIGGS |= {"w.weight": torch.zeros(4, 4, dtype=torch.int8)}


def scale_of_unknown_dtype(folder: Path) -> Iterable[Any]:
    x, y = pair(folder)
    y.write_bytes(y.read_bytes().replace(f'"{SCALE}":{{"dtype":"F32"'.encode(), f'"{SCALE}":{{"dtype":"F33"'.encode()))
    return "compare", x, y, "-l", "*.weight"


WEIGHTS = [
    Row(26, "an unknown dtype of a scale, not selected", scale_of_unknown_dtype, INCONCLUSIVE,
        ("2 of 3 original tensors compared", "quanterr: warning: ", f"{SCALE}: unknown dtype F33")),
    Row(61, "no scale", make_changed(lambda y: y.pop(SCALE)), INCONCLUSIVE,
        (UP, "another weight of this checkpoint has one (model.layers.0.self_attn.q_proj.weight_scale)")),
    Row(62, "a scale of another shape", put(SCALE, torch.ones(7)), INCONCLUSIVE, (SCALE, "[7]")),
    Row(63, "a scale that is NaN", put(SCALE, torch.tensor(float("nan"))), INCONCLUSIVE, "scales in"),
    Row(63, "a scale that is infinite", put(SCALE, torch.tensor(float("inf"))), INCONCLUSIVE, "are NaN or infinite"),
    Row(63, "a scale of zero", put(SCALE, torch.tensor(0.0)), INCONCLUSIVE, "1 of 1 scales in"),
    Row(64, "infinity in the original", spoilt_original, INCONCLUSIVE,
        "1 of 512 elements of the original weight are NaN or infinite"),
    Row(65, "all codes of E4M3", put(UP, ALL_CODES.view(torch.float8_e4m3fn)), INCONCLUSIVE,
        "4 of 512 elements of the quantized weight are NaN or infinite"),  # 0x7F and 0xFF
    Row(65, "all codes of E5M2", put(UP, ALL_CODES.view(torch.float8_e5m2)), INCONCLUSIVE,
        "16 of 512 elements of the quantized weight are NaN or infinite"),  # 0x7C to 0x7F and 0xFC to 0xFF
    *(Row(65, "all codes of E4M3FNUZ", put(UP, ALL_CODES.view(torch.float8_e4m3fnuz)), INCONCLUSIVE,
          "F8_E4M3FNUZ [32, 16]) is in a layout that this version does not support")
      for _ in range(NEW_LIBRARY)),
    Row(66, "an original of zeros", tensors({"w": torch.zeros(4, 4)}, {"w": ONES}), OK,
        "w: the original is all zeros, the quantized weight is not"),
    Row(67, "the same file twice", lambda folder: ("compare", *(pair(folder)[0],) * 2), OK, "tensors are identical"),
    Row(68, "nothing in common", tensors(original(), {"unet.conv_in.weight": ONES}), INCONCLUSIVE,
        ("different models: a language model like llama and Stable Diffusion: the original has model.layers.0.",
         "unet.conv_in.weight")),
    Row(69, "a misspelt selection", whole("-l", "attn2"), USAGE, 'no layer matches "attn2"; did you mean attn'),
    *(Row(70, f"another shape, {list(shape)}",
          tensors({"w": torch.ones(4, 8), "v": ONES}, {"w": torch.ones(shape), "v": SQUARE}),
          INCONCLUSIVE, (f"shape [4, 8] in the original, {list(shape)} (F32) in the quantized; {hint}", "1 of 2 orig"))
      for shape, hint in (((8, 4), "transposed?"), ((5, 8), "fused or padded rows?"), ((4, 2), "packed codes"))),
    Row(71, "a layout that is known and not read", tensors({"w.weight": SQUARE, "v": ONES}, HIGGS | {"v": SQUARE}),
        INCONCLUSIVE, "its codes are ordered for one GPU model"),
]  # fmt: skip


# The machine

NO_GPU_MEMORY = (
    "import torch\nfrom quanterr.comparison.worker import Worker\n"
    "def fail(*_): raise torch.OutOfMemoryError('CUDA out of memory')\nWorker.sum_chunks = fail\n"
)
NO_MEMORY = (
    "import torch\nfrom quanterr.comparison.worker import Worker\n"
    "def fail(*_): return torch.empty(1 << 60, dtype=torch.uint8)\nWorker.sum_chunks = fail\n"
)
NO_MEMORY_FOR_HEADERS = (
    "from quanterr.comparison import inputs\ndef fail(*_): raise MemoryError\ninputs.open_checkpoints = fail\n"
)
FULL = "/dev/full: No space left on device"


def output_is_there(folder: Path) -> Iterable[Any]:
    (folder / "r.json").touch()
    return *whole()(folder), "-o", folder / "r.json", "--no-clobber"


def output_is_an_input(folder: Path) -> Iterable[Any]:
    words = whole()(folder)
    (folder / "quantized.json").symlink_to(folder / "quantized.safetensors")
    return *words, "-o", folder / "quantized.json"


def thresholds(text: str) -> Make:
    """Write a thresholds file."""

    def make(folder: Path) -> Iterable[Any]:
        (folder / "t.toml").write_text(text)
        return *whole()(folder), "--thresholds", folder / "t.toml"

    return make


def other_baseline(folder: Path) -> Iterable[Any]:
    """Write a report of another original."""
    x = {name: weight * 2 for name, weight in original().items()}
    files = write(folder / "2x.safetensors", x), write(folder / "2y.safetensors", to_fp8(x))
    (folder / "old.json").write_text(quanterr.compare(*files, device="cpu").to_json())
    return *whole()(folder), "--baseline", folder / "old.json", "--require", "delta(snr_db) >= -1"


def edited_report(folder: Path) -> Iterable[Any]:
    text = quanterr.compare(*pair(folder), device="cpu").to_json()
    return gate_report(text.replace('"verdict": "pass"', '"verdict": "good"'))(folder)


def gate_report(text: str, *words: str) -> Make:
    """Run ``quanterr gate`` on a report with this content."""

    def make(folder: Path) -> Iterable[Any]:
        (folder / "report.json").write_text(text)
        return "gate", folder / "report.json", "--require", "snr_db >= 0", *words

    return make


RULE = 'schema = 1\n[[rule]]\nid = "x"\nrequire = "snr_db >= 1"\n'
HEAD = '{"schema": "quanterr.report",\n"schema_version": '

MACHINE = [
    Row(72, "a device that is not there", whole("--device", "cuda:99"), ENVIRONMENT, "CUDA devices here; try --device"),
    Row(72, "no memory on the device", whole(), ENVIRONMENT, "out of GPU memory at model.layers.0.", NO_GPU_MEMORY),
    Row(73, "no memory for a buffer", whole(), ENVIRONMENT, "out of memory at model.layers.0.", NO_MEMORY),
    Row(73, "no memory for the headers", whole(), ENVIRONMENT, "quanterr: out of memory", NO_MEMORY_FOR_HEADERS),
    Row(74, "a folder that is missing", whole("-o", "{folder}/reports/r.json"), ENVIRONMENT, "no such folder: "),
    Row(74, "a full disk", whole("-o", "/dev/full"), ENVIRONMENT, ("COMPARED (exit 0): ", FULL)),
    Row(74, "an output that is an input", output_is_an_input, USAGE, "quantized.json: this is an input"),
    Row(74, "an output that is there", output_is_there, ENVIRONMENT, "r.json: already exists (--no-clobber)"),
    Row(74, "an unknown suffix", whole("-o", "{folder}/r.pdf"), USAGE, "unknown suffix; choose one of .json"),
    Row(75, "an unknown metric", whole("--require", "snr >= 30"), USAGE, "named snr; did you mean snr_db?"),
    Row(75, "a bad operator", whole("--require", "snr_db => 30"), USAGE, "column 8: expected one of"),
    Row(75, "a unit", whole("--require", "snr_db >= 30 dB"), USAGE, "column 14: expected the end of the rule"),
    Row(75, "no file of thresholds", whole("--thresholds", "{folder}/t.toml"), USAGE, "t.toml"),
    Row(75, "thresholds that are no TOML", thresholds("schema = 1\n[[rule]\n"), USAGE,
        ("t.toml: is not TOML: ", "line 2")),
    Row(75, "a misspelt metric in thresholds", thresholds(RULE.replace("snr_db", "snr")), USAGE,
        ('t.toml:2: rule "x"', "did you mean snr_db?")),
    Row(75, "a rule twice", thresholds(RULE + RULE.removeprefix("schema = 1\n")), USAGE, "later rule selects all"),
    Row(75, "a rule of no layer", thresholds(RULE + 'layers = ["x9"]\n'), USAGE,
        't.toml:2: rule "x": no layer matches "x9"'),
    Row(76, "a baseline of another original", other_baseline, USAGE, "it has a different original"),
    Row(76, "an edited report", edited_report, UNREADABLE, "report.json: "),
    Row(76, "a newer report", gate_report(HEAD + '"2.0"}'), UNREADABLE, "report schema 2.0, this version reads 1.x"),
    Row(76, "a cut report", gate_report(HEAD), UNREADABLE, "report.json: is not valid UTF-8 JSON at byte"),
    Row(76, "no report", gate_report("[]"), UNREADABLE, "not a report of quanterr"),
]  # fmt: skip

TABLE = [*PATHS, *IMPOSTORS, *HEADERS, *GGUF, *ACCEPTED, *MEANWHILE, *BESIDE, *WEIGHTS, *MACHINE]


def done(row: Row, folder: Path, *more: str) -> Any:
    """Run the command of a row."""
    name, *words = row.make(folder)
    device = () if name != "compare" or "--device" in words else ("--device", "cpu")
    return command(name, *words, *device, *more, before=row.before.replace("{folder!r}", repr(str(folder))))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.number}: {row.what[:60]}")
def test_bad_input_gives_its_status_and_message(tmp_path: Path, row: Row) -> None:
    ended = done(row, tmp_path)
    output = ended.stdout + ended.stderr

    assert row.status == ended.status, output
    for says in (row.says,) if isinstance(row.says, str) else row.says:
        assert says in output
    assert "Traceback" not in ended.stderr
    assert all(line.isprintable() for line in output.splitlines())
    assert row.status != UNREADABLE or "" == ended.stdout


@pytest.mark.parametrize(
    "row", [row for row in TABLE if row.number in LENIENT], ids=lambda row: f"{row.number}: {row.what}"
)
def test_bad_input_is_accepted_on_demand_with_a_note(tmp_path: Path, row: Row) -> None:
    refused = done(row, tmp_path)
    accepted = done(row, tmp_path, "--lenient", "-o", str(tmp_path / "report.json"))

    report = json.loads((tmp_path / "report.json").read_text())
    notes = [finding["message"] for finding in report["findings"] if finding["code"] == "nonstandard_file"]
    assert refused.stderr.endswith(". --lenient accepts it\n")
    assert (OK, 1, []) == (accepted.status, len(notes), report["not_compared"])
    assert f"quanterr: warning: {notes[0]}\n" == accepted.stderr
    assert f"quanterr: {notes[0]}. --lenient accepts it\n" == refused.stderr


def test_strange_names_are_complete_in_the_report(tmp_path: Path) -> None:
    row = next(row for row in TABLE if row.what == "strange names")
    ended = done(row, tmp_path, "-v", "-o", str(tmp_path / "report.json"))

    layers = json.loads((tmp_path / "report.json").read_text(encoding="ascii"))["layers"]
    assert all(f"| {shown} " in ended.stdout for shown in STRANGE.values())
    assert STRANGE == {layer["layer_name"]: layer["display_name"] for layer in layers}


@pytest.mark.parametrize("number", [15, 49, 72])
def test_bad_input_replaces_the_earlier_report_by_its_error(tmp_path: Path, number: int) -> None:
    (tmp_path / "report.json").write_text('{"schema": "quanterr.report"} old')
    row = next(row for row in TABLE if row.number == number)

    ended = done(row, tmp_path, "-o", str(tmp_path / "report.json"))
    written = json.loads((tmp_path / "report.json").read_text())
    assert (row.status, "quanterr.failure", row.status) == (ended.status, written["schema"], written["status"])
    assert all(says in written["error"] for says in ([row.says] if isinstance(row.says, str) else row.says))


def test_inspect_and_rank_are_lenient_on_demand_too(tmp_path: Path) -> None:
    x, y = pair(tmp_path)
    y.write_bytes(y.read_bytes() + b"123")
    z = write(tmp_path / "z.safetensors", to_fp8(original()))
    warning = f"quanterr: warning: {y}: 3 trailing bytes after the last tensor"

    for words in (("inspect", y), ("rank", x, y, z, "-q", "--device", "cpu")):
        refused, accepted = command(*words), command(*words, "--lenient")
        assert (UNREADABLE, OK) == (refused.status, accepted.status)
        assert accepted.stderr.startswith(warning)
