"""What is wrong with inputs, and what is said of it: exit status and message."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from typing import NamedTuple

import pytest
import torch
from stored import (
    as_header,
    as_nobody,
    entry,
    original,
    pair,
    quantized,
    raw_header,
    shards,
    write,
    write_index,
)

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.errors import CheckpointError, Status, UsageError
from quanterr.gates.judging import exit_status

UNREADABLE = 3
INCONCLUSIVE = 4
MAX_INDEX = 256 * 2**20


def refused(path):
    """The message with which a checkpoint is refused, as unreadable; it must be fit to be printed."""
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(path)
    assert UNREADABLE == raised.value.status
    assert str(raised.value).isprintable()
    return str(raised.value)


# Paths


@pytest.fixture(autouse=True)
def nothing_is_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_missing_file_is_named_with_the_nearest_names(tmp_path):
    pair(tmp_path)

    message = refused(tmp_path / "orginal.safetensors")

    assert f"{tmp_path}/orginal.safetensors: no such file; did you mean original.safetensors" in message


def test_a_missing_file_without_any_like_it_is_named_alone(tmp_path):
    assert refused(tmp_path / "x.safetensors").endswith("x.safetensors: no such file")


def test_a_file_in_a_file_is_missing(tmp_path):
    x, _ = pair(tmp_path)

    assert "no such file" in refused(x / "model.safetensors")


def test_a_file_that_may_not_be_read_is_not_called_missing():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = os.path.join(folder, "model.safetensors")
        with open(path, "wb"):
            os.chmod(path, 0)
        with as_nobody():
            message = refused(path)

    assert f"{path}: permission denied" == message


def test_a_loop_of_links_is_not_called_missing(tmp_path):
    (tmp_path / "a.safetensors").symlink_to("b.safetensors")
    (tmp_path / "b.safetensors").symlink_to("a.safetensors")

    assert "a.safetensors: too many levels of symbolic links" in refused(tmp_path / "a.safetensors")


def test_a_link_to_nothing_is_a_missing_file(tmp_path):
    (tmp_path / "a.safetensors").symlink_to("gone.safetensors")

    assert "a.safetensors: no such file" in refused(tmp_path / "a.safetensors")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")

    assert "pipe.safetensors: not a regular file" in refused(tmp_path / "pipe.safetensors")


def test_a_device_is_refused():
    assert f"{os.devnull}: not a regular file" == refused(os.devnull)


def test_a_socket_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")

        assert "socket: not a regular file" == refused("socket")


def test_a_folder_in_place_of_a_shard_is_refused(tmp_path):
    (tmp_path / "w.safetensors").mkdir()

    assert "w.safetensors: not a regular file" in refused(write_index(tmp_path, {"a": "w.safetensors"}))


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path):
    (tmp_path / "pytorch_model.bin").write_text("")

    assert re.search(r"no checkpoint found \(looked for .*it holds pytorch_model\.bin", refused(tmp_path))


def test_a_folder_with_several_checkpoints_is_wrong_usage(tmp_path):
    pair(tmp_path)

    with pytest.raises(UsageError) as raised:
        open_checkpoint(tmp_path)

    assert Status.USAGE == raised.value.status
    assert "choose one of original.safetensors, quantized.safetensors" in str(raised.value)


# Other files with the name of weights


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty file (0 bytes)"),
        (b"\x08", "too short for a safetensors header (1 bytes)"),
        (b"\x08" * 7, "too short for a safetensors header (7 bytes)"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4932307\n",
            "is a Git LFS pointer, not the weights (real size 4932307 bytes); run `git lfs pull`",
        ),
        (b"<!DOCTYPE html>\n<html><head><title>Log in</title>", "looks like HTML"),
        (b"<html>", "looks like HTML"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied', "looks like HTML or XML, not weights"),
        (b'{"error":"Access to model org/name is restricted"}', "looks like a JSON document, not weights"),
        (b"PK\x03\x04\x00\x00\x08\x08archive/data.pkl", "never unpickles. Convert to safetensors"),
        (b"\x80\x02}q\x00(X\x05\x00\x00\x00stateq\x01", "is a Python pickle; quanterr never unpickles"),
        (b"\x93NUMPY\x01\x00v\x00{'descr': '<f4'", "is a NumPy file"),
        (b"Repository not found", "exceeds the format limit of 100000000; not a safetensors file"),
    ],
)
def test_another_file_is_told_from_its_first_bytes(tmp_path, content, says):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)

    message = refused(path)

    assert message.startswith(f"{path}: ")
    assert says in message


# Headers


class Bad(NamedTuple):
    """A row of the table: a header, the bytes behind it, what is said of it."""

    what: str
    header: bytes
    says: str
    data: bytes = b"1234"
    length: int | None = None  # that the file claims


def header_of(**fields):
    """A header with one tensor of four bytes, with these fields instead of the right ones."""
    return as_header({"w": entry() | fields})


def header_with(field, value):
    """The same, the field's value as it is written here."""
    return header_of(**{field: "HERE"}).replace(b'"HERE"', value.encode())


def header_without(field):
    """The same without the field."""
    return as_header({"w": {key: value for key, value in entry().items() if key != field}})


TWO = as_header({"a": entry(), "b": entry(offsets=(4, 8))})
WRAPPED = [4, 5, 5_581, 8_681, 49_477, 384_773]  # 2^64 + 4 elements
OFFSETS = "w: data_offsets must be two integers in 0…2^63"
SHAPE = "w: shape must be a list of integers in 0…2^63"

BAD_HEADERS = [
    # the length
    Bad("length beyond the file", b"{}", "header claims 1000 bytes, file has 14: truncated or", length=1_000),
    Bad("length of a cut file", TWO[:50], f"header claims {len(TWO)} bytes, file has 58", b"", len(TWO)),
    Bad("length above the limit", b"{}", "length 100000001 exceeds the format limit", length=10**8 + 1),
    Bad("length of 2^63", b"{}", "header length 9223372036854775808 exceeds the format limit", length=2**63),
    Bad("length of 2^64 - 1", b"{}", "header length 18446744073709551615 exceeds", length=2**64 - 1),
    Bad("no header", b"", "header is not a JSON object", b""),
    # the JSON
    Bad("a list", b"[]", "header is not a JSON object"),
    Bad("a number", b"17", "header is not a JSON object"),
    Bad("not UTF-8", b'{"\xff": 1}', "header is not valid UTF-8 JSON at byte 2"),
    Bad("cut off", b'{"w": {"dtype"', "header is not valid UTF-8 JSON at byte 14"),
    Bad("two documents", b"{}{}", "header is not valid UTF-8 JSON at byte 2"),
    Bad("not JSON behind letters of two bytes", '{"ü": x}'.encode(), "not valid UTF-8 JSON at byte 7"),
    Bad("a space in front", b" " + header_of(), "it must start with '{'"),
    Bad("padded with a tab", header_of() + b" \t ", "header padded with 0x09; expected spaces"),
    Bad("padded with a line feed", header_of() + b"\n", "header padded with 0x0a; expected spaces"),
    Bad("a recursion bomb of lists", b'{"w": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "nested too deeply"),
    Bad("a recursion bomb of objects", b'{"w":' * 10**5 + b"1" + b"}" * 10**5, "nested too deeply"),
    Bad("nested 200 deep", b'{"w": ' + b"[" * 200 + b"]" * 200 + b"}", "w: entry is not an object"),
    Bad("NaN", header_with("data_offsets", "[0, NaN]"), "NaN is not JSON"),
    # numbers
    Bad("a number of 5,000 digits", header_with("data_offsets", f"[0, {'1' * 5_000}]"), "5000 digits"),
    Bad("an infinite offset", header_with("data_offsets", "[0, 1e999]"), OFFSETS),
    Bad("an offset with a point", header_with("data_offsets", "[0, 4.0]"), OFFSETS),
    Bad("a negative offset", header_of(data_offsets=[-4, 0]), OFFSETS),
    Bad("true as an offset", header_of(data_offsets=[True, 4]), OFFSETS),
    Bad("a string as an offset", header_of(data_offsets=["0", "4"]), OFFSETS),
    Bad("an offset of 2^63", header_of(data_offsets=[0, 2**63]), OFFSETS),
    Bad("three offsets", header_of(data_offsets=[0, 2, 4]), OFFSETS),
    Bad("no list of offsets", header_of(data_offsets=None), OFFSETS),
    Bad("a size with a point", header_with("shape", "[4.0]"), SHAPE),
    Bad("a negative size", header_of(shape=[-4]), SHAPE),
    Bad("true as a size", header_of(shape=[True, 4]), SHAPE),
    Bad("a size of 2^63", header_of(shape=[2**63]), SHAPE),
    Bad("a shape that is a number", header_of(shape=4), SHAPE),
    # names and keys
    Bad("half a character", as_header({"\ud800": entry()}), r"tensor name \ud800 is not valid Unicode"),
    Bad("a very long name", as_header({"n" * 5_000: entry()}), "name of 5000 characters; the limit is 4096"),
    Bad("a name twice", TWO.replace(b'"b"', b'"a"'), '"a" appears twice'),
    Bad("a name twice, once escaped", TWO.replace(b'"b"', rb'"\u0061"'), '"a" appears twice'),
    Bad("a dtype twice", header_with("dtype", '"U8", "dtype": "I8"'), 'duplicate key "dtype"'),
    Bad("a shape twice", header_with("shape", '[4], "shape": [2, 2]'), 'duplicate key "shape"'),
    Bad("metadata twice", b'{"__metadata__": {"k": "1", "k": "2"}}', '"k" appears twice'),
    Bad("a number in the metadata", b'{"__metadata__": {"k": 1}}', 'metadata value for "k" must be a string'),
    Bad("a map in the metadata", b'{"__metadata__": {"k": {}}}', 'metadata value for "k" must be a string'),
    Bad("a list as metadata", b'{"__metadata__": []}', "__metadata__ must be an object of strings"),
    Bad("an escape in a key", b'{"__metadata__": {"\\u001b": 1}}', r'metadata value for "\x1b" must be a'),
    # entries
    Bad("no entry", b'{"w": 1}', "w: entry is not an object"),
    *(Bad(f"no {key}", header_without(key), f'w: missing "{key}"') for key in entry()),
    Bad("an unknown dtype", header_of(dtype="F128"), "w: unknown dtype F128 (the file may be newer"),
    Bad("a dtype in small letters", header_of(dtype="bf16"), "w: unknown dtype bf16 (did you mean BF16?)"),
    Bad("no dtype", header_of(dtype=None), "w: unknown dtype None"),
    Bad("a dtype that blinks", header_of(dtype="\x1b[5m"), r"w: unknown dtype \x1b[5m"),
    Bad("too few bytes", header_of(dtype="F32", shape=[2]), "w: shape [2] of F32 needs 8 bytes, range has 4"),
    Bad("too many bytes", header_of(shape=[2]), "w: shape [2] of U8 needs 2 bytes, range has 4"),
    Bad("no size, but bytes", header_of(shape=[0]), "w: shape [0] of U8 needs 0 bytes, range has 4"),
    Bad("a product beyond 64 bits", header_of(shape=[2**40, 2**40]), f"needs {2**80} bytes, range has 4"),
    Bad("a product of 2^64 + 4", header_of(shape=WRAPPED), f"needs {2**64 + 4} bytes, range has 4"),
    Bad("a huge size", header_of(shape=[0, 2**62, 2**62], data_offsets=[0, 0]), "dimension exceeds 2^40"),
    Bad("10,000 dimensions", header_of(shape=[1] * 10_000), "w: 10000 dimensions; the limit is 32"),
    Bad("33 dimensions", header_of(shape=[1] * 33), "w: 33 dimensions; the limit is 32"),
    Bad("half a byte", header_of(dtype="F4", shape=[3]), "w: 12 bits is not a whole number of bytes"),
    # where the data lies
    Bad("end before begin", header_of(data_offsets=[4, 0]), "w: end before begin"),
    Bad("a hole", as_header({"a": entry(), "b": entry(offsets=(6, 10))}), "bytes 4–6 belong to no tensor"),
    Bad("a hole at the start", header_of(data_offsets=[2, 6]), "bytes 0–2 belong to no tensor"),
    Bad("an overlap", as_header({"a": entry(), "b": entry(offsets=(2, 6))}), "a and b overlap at 2–4"),
    Bad("the same place twice", as_header({"a": entry(), "b": entry()}), "a and b overlap at 0–4"),
    Bad("bytes behind the last", header_of(), "2 trailing bytes after the last tensor", b"123456"),
    Bad("bytes behind nothing", b"{}", "4 trailing bytes after the last tensor"),
    Bad("data cut off", TWO, f"truncated: 3 bytes missing (have {len(TWO) + 13}, need {len(TWO) + 16})", b"12345"),
    Bad("data cut off, where", TWO, "first affected: b", b"12345"),
    Bad("no data", TWO, "first affected: a", b""),
]


@pytest.mark.parametrize("bad", BAD_HEADERS, ids=lambda bad: bad.what)
def test_a_damaged_header_is_refused_with_the_reason(tmp_path, bad):
    path = raw_header(tmp_path / "model.safetensors", bad.header, bad.data, bad.length)

    message = refused(path)

    assert message.startswith(f"{path}: ")
    assert bad.says in message


def test_a_million_tensors_are_the_limit(tmp_path):
    empty = '"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    header = "{%s}" % ",".join(empty % n for n in range(1_000_001))  # noqa: UP031 - braces
    path = raw_header(tmp_path / "model.safetensors", header.encode())

    assert "1000001 tensors exceed the limit of 1000000" in refused(path)


# Indexes


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "sub/model.safetensors",
        "C:\\model.safetensors",
        "C:model.safetensors",
        "..\\model.safetensors",
        "model.safetensors\0.txt",
        "..",
        ".",
        "",
        7,
        None,
        ["model.safetensors"],
    ],
)
def test_an_index_names_files_beside_it_and_nothing_else(tmp_path, name):
    write(tmp_path / "model.safetensors", original())
    index = write_index(tmp_path, {"a": "model.safetensors", "b": name})

    message = refused(index)

    assert message.startswith(f"{index}: index: shard name ")
    assert message.endswith(" is not a plain file name")


def test_an_index_lists_all_the_shards_that_are_missing(tmp_path):
    index = write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"})

    assert refused(index).endswith("2 of 2 shards missing: 1.safetensors, 2.safetensors")


def test_a_tensor_that_is_not_where_the_index_says_is_named(tmp_path):
    write(tmp_path / "1.safetensors", {"a": torch.zeros(1)})
    write(tmp_path / "2.safetensors", {"b": torch.zeros(1)})

    stale = {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}

    assert "index: b is not in 1.safetensors" in refused(write_index(tmp_path, stale))


def test_a_tensor_in_two_shards_is_named_with_both(tmp_path):
    shards(tmp_path, {"a": torch.zeros(1)}, {"a": torch.ones(1)}, index=False)

    one, two = sorted(tmp_path.iterdir())

    assert f"a is in {one} and in {two}" == refused(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}', 'duplicate key "a"'),
        (b'{"weight_map": {}, "weight_map": {}}', 'duplicate key "weight_map"'),
        (b"[]", 'index has no "weight_map"'),
        (b"{}", 'index has no "weight_map"'),
        (b'{"weight_map": {}}', 'index has no "weight_map"'),
        (b'{"weight_map": ["1.safetensors"]}', 'index has no "weight_map"'),
        (b"", "not valid UTF-8 JSON at byte 0"),
        (b'{"weight_map": {"\xff', "not valid UTF-8 JSON at byte 17"),
        (b"\xef\xbb\xbf{}", "not valid UTF-8 JSON at byte 0"),
        (b"[" * 10**5, "nested too deeply"),
        (b'{"metadata": {"total_size": %s}}' % (b"1" * 5_000), "5000 digits"),
    ],
)
def test_an_index_that_is_no_index_is_refused_with_the_reason(tmp_path, text, says):
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(text)

    assert says in refused(path)


def test_a_huge_index_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.touch()
    os.truncate(path, MAX_INDEX + 1)

    assert f"index of {MAX_INDEX + 1} bytes; the limit is {MAX_INDEX}" in refused(path)


# What happens while it is read


def cut_off(path):
    os.truncate(path, path.stat().st_size - 1)


def append(path):
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize(
    ("change", "says"),
    [(cut_off, "while it is being read: truncated"), (append, "changed while being read (size ")],
)
@pytest.mark.parametrize("side", [0, 1])
def test_a_file_that_changes_while_it_is_read_gives_no_result(tmp_path, change, says, side):
    paths = pair(tmp_path)
    with open_checkpoint(paths[0]) as x, open_checkpoint(paths[1]) as y:
        change(paths[side])

        with pytest.raises(CheckpointError) as raised:
            quanterr.compare(x, y, device="cpu")

    assert UNREADABLE == raised.value.status
    assert f"{paths[side]}: " in str(raised.value)
    assert says in str(raised.value)


# What is odd and yet compared


def compared(tmp_path, x, y):
    """The report of two checkpoints made of these tensors."""
    paths = write(tmp_path / "x.safetensors", x), write(tmp_path / "y.safetensors", y)
    return quanterr.compare(*paths, device="cpu")


def test_a_tensor_without_dimensions_is_one_element(tmp_path):
    report = compared(tmp_path, {"w": torch.tensor(2.0)}, {"w": torch.tensor(1.5)})

    layer = report.other_changes[0]
    assert (Status.OK, 1, [], 0.5) == (
        exit_status(report),
        layer.tensor_elements,
        layer.tensor_shape,
        layer.mean_absolute_error,
    )


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
def test_a_tensor_without_elements_is_listed_and_changes_nothing(tmp_path, shape):
    x = {"w": torch.zeros(4, 4), "empty": torch.zeros(shape)}
    report = compared(tmp_path, x, x | {"w": torch.ones(4, 4)})

    assert Status.OK == exit_status(report)
    assert [("empty", 0)] == [(layer.layer_name, layer.tensor_elements) for layer in report.lossless]
    assert 16 == report.aggregate.total_elements


def test_a_tensor_may_start_at_an_odd_byte(tmp_path):
    values = torch.tensor([1.5, -2.0], dtype=torch.float64).numpy().tobytes()
    header = as_header({"odd": entry("U8", (3,), (0, 3)), "w": entry("F64", (1, 2), (3, 19))})
    paths = [tmp_path / "x.safetensors", tmp_path / "y.safetensors"]
    raw_header(paths[0], header, b"123" + values)
    raw_header(paths[1], header, b"123" + torch.tensor([1.5, -1.0], dtype=torch.float64).numpy().tobytes())

    report = quanterr.compare(*paths, device="cpu")

    assert Status.OK == exit_status(report)
    assert [("w", 1.0)] == [(layer.layer_name, layer.max_absolute_error) for layer in report.layers]


def test_an_original_of_zeros_has_no_ratios_but_errors(tmp_path):
    x, y = torch.zeros(4, 4), torch.full((4, 4), 0.5)
    report = compared(tmp_path, {"w": x}, {"w": y})

    layer = report.layers[0]
    assert Status.OK == exit_status(report)
    assert (None, None, 0.5, 0.5) == (
        layer.snr_db,
        layer.relative_error,
        layer.mean_absolute_error,
        layer.max_absolute_error,
    )
    assert {"snr_db", "relative_error"} <= set(layer.nonfinite)
    assert ["zero_original"] == [finding.code for finding in report.findings]


@pytest.mark.parametrize("huge", [1e200, -1e300], ids=str)
def test_values_beyond_any_ratio_are_an_error_and_no_bug(tmp_path, huge):
    x, y = torch.ones(2, 2, dtype=torch.float64) * 1e-100, torch.full((2, 2), huge, dtype=torch.float64)
    report = compared(tmp_path, {"w": x}, {"w": y})

    assert INCONCLUSIVE == exit_status(report)
    assert ["far_off"] == [finding.code for finding in report.findings if finding.severity == "error"]
    assert "too large for any ratio to tell" in report.reasons[0]


@pytest.mark.parametrize("digits", ["²", "1" * 5000], ids=["a superscript", "5000 digits"])
@pytest.mark.parametrize("told", [{"weight_block_size": "{}x{}"}, {"version": "{}.{}", "quant_method": "fp8"}], ids=str)
def test_numbers_of_a_configuration_that_are_none_are_no_bug(tmp_path, digits, told):
    told = {key: text.format(digits, digits) for key, text in told.items()}
    folder = tmp_path / "y"
    write(folder / "model.safetensors", quantized(original()))
    packed = {"a.weight_packed": torch.zeros(8, 4, dtype=torch.int32), "a.weight_scale": torch.ones(8, 1)}
    write(folder / "packed" / "model.safetensors", packed | {"a.weight_shape": torch.tensor([8, 32])})
    for place in (folder, folder / "packed"):
        (place / "config.json").write_text(json.dumps({"quantization_config": told}))

    report = quanterr.compare(write(tmp_path / "x.safetensors", original()), folder, device="cpu")

    assert Status.OK == exit_status(report)
    assert ["ct_pack"] == list(quanterr.inspect(folder / "packed").formats)


def test_a_block_whose_number_is_a_superscript_is_no_bug(tmp_path):
    x = {"².0.a.weight": torch.ones(4, 4), "b.layers.².a.weight": torch.ones(4, 4), "².weight": torch.ones(4, 4)}
    report = compared(tmp_path, x, {name: 1.01 * weight for name, weight in x.items()})

    assert Status.OK == exit_status(report)
    assert 3 == len(report.layers)


def test_a_tensor_that_no_index_lists_is_compared_all_the_same(tmp_path):
    x = {"a": torch.ones(2, 2), "b": torch.ones(2, 2)}
    folder = shards(tmp_path / "x", x)
    write_index(folder, {"a": "model-00001-of-00001.safetensors"})

    report = quanterr.compare(folder, write(tmp_path / "y.safetensors", x), device="cpu")

    assert Status.OK == exit_status(report)
    assert 1 == len(report.original.notes)
    assert report.original.notes[0].endswith(": index does not list b; compared all the same")
    assert ["a", "b"] == [layer.layer_name for layer in report.lossless]


@pytest.mark.parametrize(
    ("shape", "hint"), [((8, 4), "transposed?"), ((5, 8), "fused or padded rows?"), ((4, 2), "packed codes")]
)
def test_a_weight_of_another_shape_is_told_and_the_others_are_compared(tmp_path, shape, hint):
    x = {"w": torch.ones(4, 8), "v": torch.ones(4, 4)}
    report = compared(tmp_path, x, {"w": torch.ones(shape), "v": torch.zeros(4, 4)})

    assert INCONCLUSIVE == exit_status(report)
    assert Status.OK == exit_status(report, allow_partial=True)
    assert ["v"] == [layer.layer_name for layer in report.layers]
    assert f"shape [4, 8] in the original, {list(shape)} (F32) in the quantized; {hint}" in report.reasons[0]


# The command as it is called


def run(*arguments):
    """The command in a process of its own."""
    command = [sys.executable, "-m", "quanterr", "compare", *map(str, arguments), "--device", "cpu"]
    environment = os.environ | {"NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


STRANGE = {  # what does something to a terminal, to markup or to the log of a CI, and how it is shown
    "\x1b[2J.weight": r"\x1b[2J.weight",
    "a\0b": r"a\x00b",
    "\u202egnp.weight": r"\u202egnp.weight",
    "line\n::error::x": r"line\x0a::error::x",
    "[bold]x[/bold]": "[bold]x[/bold]",
    "": '""',
}


def test_strange_names_are_compared_and_shown_without_harm(tmp_path):
    x = {name: torch.linspace(-1, 1, 12).reshape(4, 3) for name in STRANGE}
    y = {name: weight.bfloat16() for name, weight in x.items()}
    paths = write(tmp_path / "x.safetensors", x), write(tmp_path / "y.safetensors", y)

    done = run(*paths, "-v", "-o", tmp_path / "report.json")

    layers = json.loads((tmp_path / "report.json").read_text(encoding="ascii"))["layers"]
    assert 0 == done.returncode, done.stderr
    assert all(f"| {shown} " in done.stdout for shown in STRANGE.values())
    assert all(line.isprintable() for line in done.stdout.splitlines())
    assert STRANGE == {layer["layer_name"]: layer["display_name"] for layer in layers}


def same_twice(folder):
    return (pair(folder)[0],) * 2


def nothing_in_common(folder):
    x, _ = pair(folder)
    return x, write(folder / "y.safetensors", {"unet.conv_in.weight": torch.ones(2, 2)})


def misspelt_selection(folder):
    return *pair(folder), "-l", "attn2"


def output_is_an_input(folder):
    x, y = pair(folder)
    (folder / "quantized.json").symlink_to(y)
    return x, y, "-o", folder / "quantized.json"


def output_in_a_missing_folder(folder):
    return *pair(folder), "-o", folder / "reports" / "report.json"


COMMANDS = [
    (same_twice, 0, "all compared tensors are identical"),
    (misspelt_selection, 2, 'no layer matches "attn2"; did you mean attn'),
    (output_is_an_input, 2, "is an input, or one of its files"),
    (nothing_in_common, 4, "nothing matches: the original has model.layers.0."),
    (output_in_a_missing_folder, 5, "no such folder: "),
]


@pytest.mark.parametrize(("arguments", "status", "says"), COMMANDS, ids=[row[0].__name__ for row in COMMANDS])
def test_the_command_ends_with_the_status_and_says_why(tmp_path, arguments, status, says):
    done = run(*arguments(tmp_path))

    assert status == done.returncode
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_the_table_is_seen_even_if_the_report_cannot_be_written(tmp_path):
    done = run(*pair(tmp_path), "-o", "/dev/full")

    assert 5 == done.returncode
    assert "verdict: pass" in done.stdout
    assert "quanterr: --output-report /dev/full: No space left on device\n" == done.stderr


def test_an_unreadable_input_leaves_the_earlier_report_untouched(tmp_path):
    x, _ = pair(tmp_path)
    report = tmp_path / "report.json"
    report.write_text("old")

    done = run(x, raw_header(tmp_path / "y.safetensors", b"[]"), "-o", report)

    assert (UNREADABLE, "old") == (done.returncode, report.read_text())
    assert done.stderr.startswith(f"quanterr: {tmp_path}/y.safetensors: header is not a JSON object")
