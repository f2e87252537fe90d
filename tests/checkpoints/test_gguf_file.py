"""The reader of GGUF files: what it finds, what it refuses, and what no bytes can make it do."""

import struct
import tempfile
import tracemalloc
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gguf_stored import (
    BOOL,
    F32,
    I32,
    LLAMA,
    U8,
    U16,
    U32,
    U64,
    Stored,
    array,
    gguf,
    key,
    pad,
    text,
    write_gguf,
)
from support.making import finish
from support.stored import write

from quanterr.checkpoints import open_checkpoint
from quanterr.checkpoints.base import DTYPE_BITS
from quanterr.checkpoints.ggml_types import OF_NAME, REFUSED, TYPES, GgmlType
from quanterr.checkpoints.gguf_file import ARRAY, TEXT
from quanterr.errors import CheckpointError, UsageError

GOLDEN = Path(__file__).parents[1] / "golden"
UNREADABLE = 3

A, B = Stored("a", "F32", (2, 3), bytes(range(24))), Stored("b", "Q8_0", (3, 64))


def open_and_close(path):
    """Open a checkpoint, close it again and return it."""
    with open_checkpoint(path) as checkpoint:
        return checkpoint


def read_refusal(path):
    """Return the message with which a checkpoint is refused as unreadable; it must be printable."""
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(path)
    assert UNREADABLE == raised.value.status
    assert str(raised.value).isprintable()
    return str(raised.value)


# Contents


@pytest.mark.parametrize("name", ["model.gguf", "no_suffix", "größe.gguf"])
@pytest.mark.parametrize("version", [2, 3])
def test_file_name_and_version_do_not_matter(tmp_path, name, version):
    checkpoint = open_and_close(write_gguf(tmp_path / name, [A, B], LLAMA, version=version))

    assert ("file", ["a", "b"], ()) == (checkpoint.kind, list(checkpoint.entries), checkpoint.notes)
    assert ({},) == checkpoint.metadata


def test_entry_lists_its_outermost_dimension_first(tmp_path):
    with open_checkpoint(write_gguf(tmp_path / "model.gguf", [A, B, Stored("c", "Q4_K", (2, 3, 512))])) as checkpoint:
        described = {name: (e.dtype, e.shape, e.n, e.nbytes) for name, e in checkpoint.entries.items()}

        assert bytes(range(24)) == checkpoint.entries["a"].read()
    assert ("F32", (2, 3), 6, 24) == described["a"]
    assert ("Q8_0", (3, 64), 192, 204) == described["b"]
    assert ("Q4_K", (2, 3, 512), 3072, 12 * 144) == described["c"]


@pytest.mark.parametrize("name", TYPES.values())
def test_every_type_has_its_size(tmp_path, name):
    ggml_type = OF_NAME.get(name) or GgmlType(0, name, 1, DTYPE_BITS[name] // 8)
    shape = 2 * ggml_type.rows, ggml_type.elements
    stored = Stored(
        "x", name, shape, b"x" * (2 * ggml_type.rows * (ggml_type.head + ggml_type.n_bytes) + ggml_type.tail)
    )
    with open_checkpoint(write_gguf(tmp_path / "model.gguf", [stored, A])) as checkpoint:
        assert (name, stored.raw) == (checkpoint.entries["x"].dtype, checkpoint.entries["x"].read())
        assert A.raw == checkpoint.entries["a"].read()


@pytest.mark.parametrize("shape", [(), (5,), (0,), (3, 0), (1, 2, 3, 4)])
def test_tensor_may_have_up_to_four_dimensions_and_be_empty(tmp_path, shape):
    assert (
        shape == open_and_close(write_gguf(tmp_path / "model.gguf", [Stored("a", "F32", shape), B])).entries["a"].shape
    )


@pytest.mark.parametrize("alignment", [1, 8, 32, 64, 4096])
def test_alignment_comes_from_the_file(tmp_path, alignment):
    keys = [key("general.alignment", U32, alignment)]
    with open_checkpoint(write_gguf(tmp_path / "model.gguf", [A, B], keys, alignment=alignment)) as checkpoint:
        assert A.raw == checkpoint.entries["a"].read()
        assert 0 == checkpoint.entries["b"].offset % alignment


def test_last_tensor_needs_no_padding(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", [A])
    path.write_bytes(path.read_bytes()[:-8])

    assert ["a"] == list(open_and_close(path).entries)


def test_file_may_hold_no_tensor(tmp_path):
    assert {} == open_and_close(write_gguf(tmp_path / "vocabulary.gguf", [], LLAMA)).entries


def test_tensors_may_lie_in_another_order_than_they_are_listed(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", [A._replace(offset=224), B._replace(offset=0)])
    raw = path.read_bytes()
    path.write_bytes(raw[: -224 - 32] + pad(B.raw, 32) + pad(A.raw, 32))

    with open_checkpoint(path) as checkpoint:
        assert {"a": A.raw, "b": B.raw} == {name: entry.read() for name, entry in checkpoint.entries.items()}


class TestMetadata:
    def of(self, folder, *keys):
        return open_and_close(write_gguf(folder / "model.gguf", [A], keys)).gguf

    def test_metadata_gives_the_architecture_and_its_heads(self, tmp_path):
        metadata = self.of(tmp_path, *LLAMA)

        assert ("llama", 4, 2) == (metadata.architecture, metadata.heads(0), metadata.kv_heads(7))
        assert 4 == metadata.get_model_int("attention.head_count")
        assert 4 == metadata.get_int("llama.attention.head_count")

    def test_metadata_gives_the_heads_per_block_where_they_differ(self, tmp_path):
        heads = array("x.attention.head_count", I32, [8, 4, 16])
        metadata = self.of(tmp_path, key("general.architecture", TEXT, "x"), heads)

        assert [8, 4, 16, None] == [metadata.heads(block) for block in range(4)]
        assert [8, 4, 16, None] == [metadata.kv_heads(block) for block in range(4)]
        assert metadata.get_model_int("attention.head_count") is None

    def test_empty_metadata_gives_none(self, tmp_path):
        metadata = self.of(tmp_path)

        assert (None, None, None, None) == (
            metadata.architecture,
            metadata.heads(0),
            metadata.kv_heads(0),
            metadata.get_int("general.file_type"),
        )

    def test_metadata_with_another_type_is_not_taken_for_a_number(self, tmp_path):
        metadata = self.of(
            tmp_path,
            key("general.architecture", U32, 1),
            key("general.file_type", TEXT, "7"),
            key("None.attention.head_count", BOOL, True),
        )

        assert (None, None, None) == (metadata.architecture, metadata.get_int("general.file_type"), metadata.heads(0))

    def test_metadata_holds_values_with_every_type(self, tmp_path):
        kinds = {0: 200, 1: -3, 2: 60_000, 3: -300, 4: 2**31, 5: -(2**31), 6: 0.5, 7: True, 10: 2**63, 11: -1, 12: 0.1}
        metadata = self.of(tmp_path, *(key(f"k{value_type}", value_type, value) for value_type, value in kinds.items()))

        assert {f"k{value_type}": value for value_type, value in kinds.items()} == metadata.values

    def test_metadata_leaves_out_the_tokenizer_and_long_values(self, tmp_path):
        metadata = self.of(
            tmp_path,
            array("tokenizer.ggml.tokens", TEXT, ["token"] * 3_000),
            array("tokenizer.ggml.scores", F32, [0.0] * 3),
            array("long", U8, [1] * 1_025),
            array("texts", TEXT, ["a"]),
            array("short", U16, [1, 2]),
            key("template", TEXT, "x" * 5_000),
            key("name", TEXT, "Größe"),
            key("tokenizer.ggml.eos", U32, 2),
        )

        assert {"short": (1, 2), "name": "Größe"} == metadata.values

    def test_metadata_may_be_larger_than_one_read(self, tmp_path):
        texts = ["x" * n for n in (0, 7, 700_000, 1, 1 << 20, 400_000, 3)]
        metadata = self.of(tmp_path, array("tokenizer.ggml.tokens", TEXT, texts), *LLAMA[:3])

        assert "llama" == metadata.architecture

    def test_metadata_may_hold_invalid_utf8(self, tmp_path):
        metadata = self.of(tmp_path, text("general.name") + struct.pack("<I", TEXT) + text(b"\xff"))

        assert {"general.name": "\ufffd"} == metadata.values


def test_configuration_next_to_a_gguf_file_is_ignored(tmp_path):
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')

    assert {} == open_and_close(write_gguf(tmp_path / "model.gguf", [A])).config


# Shapes of tensors that ComfyUI-GGUF stores in another shape


def original_shape(name, *sizes):
    return array(f"comfy.gguf.orig_shape.{name}", I32, sizes)


@pytest.mark.parametrize("shape", [(64,), (8, 8), (4, 2, 8), (2, 2, 2, 2, 2, 2)])
def test_weight_has_its_original_shape(tmp_path, shape):
    stored = Stored("a.weight", "Q4_0", (2, 32))
    checkpoint = open_and_close(write_gguf(tmp_path / "model.gguf", [stored], [original_shape("a.weight", *shape)]))

    assert (shape, 36) == (checkpoint.entries["a.weight"].shape, checkpoint.entries["a.weight"].nbytes)


def test_video_kernel_has_five_dimensions(tmp_path):
    package = pytest.importorskip("gguf", reason="gguf is not installed")
    kernel = torch.ones(2, 3, 1, 2, 2).numpy()
    writer = package.GGUFWriter(tmp_path / "wan.gguf", "wan")
    writer.add_tensor("patch_embedding.weight", kernel)
    finish(writer)
    entry = open_and_close(tmp_path / "wan.gguf").entries["patch_embedding.weight"]

    assert (kernel.shape, kernel.nbytes) == (entry.shape, entry.nbytes)


def test_original_shape_without_its_tensor_is_noted(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", [A], [original_shape("gone", 1)])

    assert (f"{path}: comfy.gguf.orig_shape.… names gone, which is not stored",) == open_and_close(path).notes


# Split files


def split(folder, shards, counts=None, numbers=None, totals=None):
    """Write the shards of a model, each with its tensors, and return their paths."""
    n, total = len(shards), sum(map(len, shards))
    paths = []
    for number, tensors in enumerate(shards):
        keys = [
            key("split.no", U16, numbers[number] if numbers else number),
            key("split.count", U16, counts[number] if counts else n),
            key("split.tensors.count", I32, totals[number] if totals else total),
        ]
        path = folder / f"model-{number + 1:05}-of-{n:05}.gguf"
        paths.append(write_gguf(path, tensors, [*keys, *(LLAMA if number == 0 else ())]))
    return paths


class TestSplitFiles:
    def test_split_file_is_opened_by_any_part_or_its_folder(self, tmp_path):
        paths = split(tmp_path, [[A], [], [B]])

        for path in (*paths, tmp_path):
            checkpoint = open_and_close(path)

            assert (["a", "b"], 3) == (list(checkpoint.entries), len(checkpoint.files))
            assert "llama" == checkpoint.gguf.architecture
        assert ("file", "folder") == (open_and_close(paths[1]).kind, open_and_close(tmp_path).kind)

    def test_all_shards_must_be_there(self, tmp_path):
        paths = split(tmp_path, [[A], [B], []])
        paths[0].unlink()
        paths[2].unlink()

        for path in paths:
            assert read_refusal(path).endswith(
                "2 of 3 shards missing: model-00001-of-00003.gguf, model-00003-of-00003.gguf"
            )

    def test_shards_must_agree_on_their_number(self, tmp_path):
        paths = split(tmp_path, [[A], [B]], counts=[2, 3])

        assert f"{paths[1]}: shard 2 of 3 (split.no, split.count), but opened as 2 of 2" in read_refusal(paths[0])

    def test_shards_must_be_in_their_places(self, tmp_path):
        paths = split(tmp_path, [[A], [B]], numbers=[1, 0])

        assert f"{paths[0]}: shard 2 of 2 (split.no, split.count), but opened as 1 of 2" in read_refusal(paths[0])

    def test_shards_must_hold_the_stated_number_of_tensors(self, tmp_path):
        paths = split(tmp_path, [[A], [B]], totals=[3, 3])

        assert f"{paths[0]}: split.tensors.count states 3 tensors, the shards hold 2" == read_refusal(paths[0])

    def test_shards_must_not_hold_a_tensor_twice(self, tmp_path):
        paths = split(tmp_path, [[A], [A]])

        assert f"a is in {paths[0]} and in {paths[1]}" == read_refusal(paths[1])

    def test_shards_must_keep_their_names(self, tmp_path):
        paths = split(tmp_path, [[A], [B]])
        path = paths[1].rename(tmp_path / "second.gguf")

        message = read_refusal(path)
        assert f"{path}: shard 2 of 2 (split.no, split.count), but opened as 1 of 1" in message
        assert message.endswith("its name should end in -00002-of-00002.gguf, in the same folder as the others")

    def test_shards_must_declare_that_they_are_split(self, tmp_path):
        for number in (1, 2):
            write_gguf(tmp_path / f"m-{number:05}-of-00002.gguf", [A] if number == 1 else [B])

        assert "shard 1 of 1 (split.no, split.count), but opened as 1 of 2" in read_refusal(tmp_path)

    def test_shards_must_all_be_gguf(self, tmp_path):
        paths = split(tmp_path, [[A], [B]])
        write(paths[1], {"c": torch.zeros(2)})

        assert "only 1 of 2 shards are GGUF files" in read_refusal(paths[0])

    @pytest.mark.parametrize("name", ["m-00001-of-00001.gguf", "m-00001-of-00000.gguf", "m-00003-of-00002.gguf"])
    def test_split_file_may_have_a_single_shard(self, tmp_path, name):
        assert ["a"] == list(open_and_close(write_gguf(tmp_path / name, [A])).entries)


# Names and contents


def test_first_bytes_decide_the_format_and_not_the_name(tmp_path):
    gguf_path = write_gguf(tmp_path / "a.safetensors", [A])
    other = write(tmp_path / "b.gguf", {"a": torch.zeros(2, 3)})

    assert (f"{gguf_path}: is a GGUF file, despite its name",) == open_and_close(gguf_path).notes
    assert (f"{other}: is a safetensors file, despite its name",) == open_and_close(other).notes
    assert ["a"] == list(open_and_close(gguf_path).entries) == list(open_and_close(other).entries)


def test_file_with_123_tensors_is_not_taken_for_safetensors(tmp_path):
    """Its ninth byte is an opening brace."""
    path = write_gguf(tmp_path / "model", [Stored(f"t{n}") for n in range(123)])

    assert b"{" == path.read_bytes()[8:9]
    assert 123 == len(open_and_close(path).entries)


def test_folder_with_one_gguf_file_opens_that_file(tmp_path):
    write_gguf(tmp_path / "model.gguf", [A])
    (tmp_path / "README.md").write_text("")

    assert ("folder", ["a"]) == (open_and_close(tmp_path).kind, list(open_and_close(tmp_path).entries))


@pytest.mark.parametrize("other", ["model-Q8_0.gguf", "mmproj.gguf", "model.safetensors"])
def test_folder_with_several_checkpoints_is_ambiguous(tmp_path, other):
    write_gguf(tmp_path / "model-Q4_0.gguf", [A])
    write_gguf(tmp_path / other, [A])

    with pytest.raises(UsageError, match=r"ambiguous, choose one of .*model-Q4_0\.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty file (0 bytes)"),
        (b"GG", "too short for a GGUF header (2 bytes)"),
        (b"GGUF", "truncated in the header: the version should have 4 bytes at byte 4, but the file ends at 4"),
        (b"GGML\x03\0\0\0", "not a GGUF file: it begins with b'GGML', expected b'GGUF'"),
        (b"lmgg\x01\0\0\0", "is a GGML file from before GGUF; convert the model again with llama.cpp"),
        (b"tjgg\x03\0\0\0", "is a GGML file from before GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4932\n", "is a Git LFS pointer"),
        (b"<!DOCTYPE html>\n<html>", "looks like HTML"),
        (b"PK\x03\x04\x00\x00\x08\x08archive/data.pkl", "the zip archive is damaged or truncated"),
        (b"\x80\x02}q\x00(X", "is a Python pickle"),
        (bytes(100), r"not a GGUF file: it begins with b'\x00\x00\x00\x00'"),
    ],
)
def test_another_kind_of_file_is_recognized_by_its_first_bytes(tmp_path, content, says):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    message = read_refusal(path)

    assert message.startswith(f"{path}: ")
    assert says in message


# Damage


class Bad(NamedTuple):
    """A damaged file and the message it causes."""

    what: str
    raw: bytes
    says: str


def header(n_tensors=0, n_keys=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)


def field(name, value_type, raw=b""):
    """Return a key with a type and these bytes as its value."""
    return text(name) + struct.pack("<I", value_type) + raw


def tensor_of(n_dimensions=1, sizes=(4,), ggml_type=0, offset=0, name="a"):
    """Return a file with one tensor of four numbers, whose header claims this."""
    info = text(name) + struct.pack("<I", n_dimensions) + b"".join(struct.pack("<Q", size) for size in sizes)
    return pad(header(1) + info + struct.pack("<IQ", ggml_type, offset), 32) + bytes(32)


WRAPPED = (20, 5_581, 8_681 * 49_477, 384_773)  # 2^64 + 4 elements
WHOLE_FILE = gguf([A, B], LLAMA)
BIG_ENDIAN = b"GGUF" + struct.pack(">IQQ", 3, 1, 0) + bytes(40)
ALIGNED = "general.alignment"

BAD = [
    # a version
    Bad("version 1", header(version=1), "GGUF version 1, which llama.cpp no longer reads; convert the model again"),
    Bad("a newer version", header(version=4), "GGUF version 4; quanterr reads 2 and 3"),
    Bad("no version", header(version=0), "GGUF version 0; quanterr reads 2 and 3"),
    Bad("big endian", BIG_ENDIAN, "big endian GGUF, version 3; quanterr reads little endian files. Convert it with gg"),
    # counts of tensors and keys
    Bad("no numbers", header()[:12], "truncated in the header: the number of tensors should have 8 bytes at byte 8"),
    Bad("too many tensors", header(1_000_001), "1000001 tensors exceed the limit of 1000000"),
    Bad("2^64 - 1 tensors", header(2**64 - 1), "18446744073709551615 tensors exceed the limit"),
    Bad("too many keys", header(0, 2**17 + 1), "131073 keys exceed the limit of 131072"),
    Bad("2^64 - 1 keys", header(0, 2**64 - 1), "18446744073709551615 keys exceed the limit"),
    Bad("more tensors than fit", header(1_000) + bytes(100), "no room for 1,000 tensors in 124 bytes"),
    Bad("more keys than fit", header(0, 1_000) + bytes(100), "no room for 1,000 keys in 124 bytes"),
    # damaged keys
    Bad("a long key", gguf([], [key("k" * 70_000, U8, 1)]), "key number 0 has 70000 bytes; the limit is 65535"),
    Bad("a key of 2^63 bytes", header(0, 1) + struct.pack("<Q", 2**63) + bytes(20), f"has {2**63} bytes; the limit"),
    Bad("a key beyond the file", header(0, 1) + struct.pack("<Q", 999) + bytes(20), "key number 0 should have 999 by"),
    Bad("a key without name", gguf([], [key("", U8, 1)]), "key number 0 has no name"),
    Bad("a key that is no UTF-8", gguf([], [key(b"\xff\xfe", U8, 1)]), r"key number 0 is not valid UTF-8: b'\xff\xfe'"),
    Bad("a key twice", gguf([], [key("k", U8, 1), key("k", U8, 2)]), "key k appears twice"),
    Bad("a tokenizer's key twice", gguf([], LLAMA[3:] * 2), "key tokenizer.ggml.tokens appears twice"),
    Bad("a key that blinks", gguf([], [field("\x1b[5m", 13, bytes(20))]), r"key \x1b[5m has the unknown type 13"),
    Bad("an unknown type", gguf([], [field("k", 4_000_000_000, bytes(9))]), "k has the unknown type 4000000000; types"),
    Bad("a cut value", header(0, 1) + field("k", U64, bytes(3)), "key k should have 8 bytes at byte 37, but the file"),
    Bad("a text beyond the file", gguf([], [field("k", TEXT, struct.pack("<Q", 2**62))]), f"k should have {2**62} by"),
    Bad("an array beyond the file", gguf([], [array("k", F32, [], 2**61)]), f"k should have {2**63} bytes"),
    Bad("an array of 2^64 - 1", gguf([], [array("k", U64, [], 2**64 - 1)]), "key k should have 147573952589676412920"),
    Bad("texts beyond the file", gguf([], [array("k", TEXT, [], 2**20)]), "key k should have 8388608 bytes"),
    Bad("too many texts", gguf([], [array("k", TEXT, [], 2**63)]), f"key k has {2**63} elements; the limit is 167"),
    Bad("a text in an array beyond the file", gguf([], [field("k", ARRAY, struct.pack("<IQQQ", TEXT, 1, 2**60, 0))]),
        f"key k should have {2**60} bytes"),
    Bad("an array of arrays", gguf([], [field("k", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "k is an array of arrays"),
    Bad("nested deep", gguf([], [field("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 10_000)]), "is an array of arrays"),
    Bad("an array of an unknown type", gguf([], [field("k", ARRAY, struct.pack("<IQ", 13, 1))]), "unknown type 13"),
    # impossible alignments
    *(Bad(f"alignment {n}", gguf([A], [key(ALIGNED, U32, n)]), f"{ALIGNED} is {n}; it must be a power of two")
      for n in (0, 3, 48, 2**31)),
    *(Bad(f"an alignment of type {code}", gguf([A], [key(ALIGNED, code, of)]), f"{ALIGNED} has type {code}; it must be")
      for code, of in ((U64, 32), (I32, 32), (U16, 32), (BOOL, True), (F32, 32.0), (TEXT, "32"), (TEXT, "x" * 5_000))),
    Bad("an array as alignment", gguf([A], [array(ALIGNED, U32, [32])]), f"{ALIGNED} has type 9; it must be of type"),
    Bad("a count of shards in words", gguf([A], [key("split.count", TEXT, "2")]), "should be a whole number"),
    # damaged tensors
    Bad("no room for a tensor", header(1) + text("a") + struct.pack("<I", 2) + bytes(15), "a should have 8 bytes at"),
    Bad("a long name", gguf([Stored("n" * 5_000)]), "nnn: name of 5000 characters; the limit is 4096"),
    Bad("a name of 2^64 - 1", header(1) + struct.pack("<Q", 2**64 - 1) + bytes(20), "18446744073709551615 bytes"),
    Bad("a name that is no UTF-8", header(1) + text(b"\xff\xff") + bytes(30), "name of tensor number 0 is not valid"),
    Bad("a name twice", gguf([A, A]), "tensor name a appears twice"),
    Bad("six dimensions", tensor_of(6, (1,) * 6), "a: 6 dimensions; the limit is 5"),
    Bad("2^32 - 1 dimensions", tensor_of(2**32 - 1), "a: 4294967295 dimensions; the limit is 5"),
    Bad("a huge dimension", tensor_of(2, (0, 2**41)), "a: dimension exceeds 2^40: [0, 2199023255552]"),
    Bad("a dimension of 2^64 - 1", tensor_of(1, (2**64 - 1,)), "a: dimension exceeds 2^40: [18446744073709551615]"),
    Bad("a product of 2^64 + 4", tensor_of(4, WRAPPED), f"a: shape {list(WRAPPED[::-1])} is too large: 2^63 byte"),
    Bad("a product of 2^160", tensor_of(4, (2**40,) * 4), "is too large: 2^63 bytes or more"),
    Bad("a product of 2^61", tensor_of(2, (2**40, 2**21)), "is too large: 2^63 bytes or more"),
    Bad("a product of 2^61 - 2^21", tensor_of(2, (2**40 - 1, 2**21)), "truncated: 9,223,372,036,846,387,"),
    Bad("no element, but of 2^62 rows", tensor_of(3, (0, 2**40, 2**22)), "[4194304, 1099511627776, 0] is too large"),
    Bad("too large", tensor_of(1, (9,)), "truncated: 4 bytes missing (have 96, need 100); first affected: a"),
    Bad("a row of half a block", tensor_of(1, (48,), 2), "a: rows of 48 elements are not whole blocks of Q4_0, which"),
    Bad("a row of a Q4_K", tensor_of(2, (32, 8), 12), "are not whole blocks of Q4_K, which have 256"),
    Bad("a number of a type of blocks", tensor_of(0, (), 2), "a: rows of 1 elements are not whole blocks of Q4_0"),
    # damaged original shapes
    Bad("another size", gguf([A], [original_shape("a", 5)]), "a: comfy.gguf.orig_shape.… is (5,), but [2, 3] elem"),
    Bad("a negative size", gguf([A], [original_shape("a", -2, -3)]), "orig_shape.… is (-2, -3), but [2, 3]"),
    Bad("no array", gguf([A], [key("comfy.gguf.orig_shape.a", I32, 6)]), "orig_shape.… is 6, but [2, 3]"),
    Bad("numbers with a point", gguf([A], [array("comfy.gguf.orig_shape.a", F32, [6.0])]), "is (6.0,), but [2, 3]"),
    Bad("words", gguf([A], [array("comfy.gguf.orig_shape.a", TEXT, ["6"])]), "should be a whole number or a shape"),
    Bad("many dimensions", gguf([A], [original_shape("a", 6, *[1] * 40)]), "orig_shape.… is (6, 1, 1"),
    Bad("too many dimensions", gguf([A], [original_shape("a", *[1] * 2_000)]), "should be a whole number or a shape"),
    # data that cannot lie where the header says
    Bad("an odd offset", gguf([A, B._replace(offset=40)]), "b: offset 40 is not a multiple of 32"),
    Bad("an overlap", gguf([A, B._replace(offset=0)]), "a and b overlap at 0–24"),
    Bad("a hole", gguf([A, B._replace(offset=64)]) + bytes(32), "bytes 32–64 belong to no tensor (between a and b)"),
    Bad("a hole at the start", gguf([A._replace(offset=32)]) + bytes(32), "bytes 0–32 belong to no tensor (between"),
    Bad("an offset beyond the file", gguf([A, B._replace(offset=2**40)]), f"b: offset {2**40} is past the end"),
    Bad("an offset of 2^64 - 32", gguf([A, B._replace(offset=2**64 - 32)]), "b: offset 18446744073709551584 is past"),
    Bad("bytes behind the last", gguf([A, B]) + b"x", "1 trailing byte after the last tensor"),
    Bad("bytes behind no tensor", gguf([]) + b"x", "1 trailing byte after the last tensor"),
    Bad("data cut off", WHOLE_FILE[:-30], "truncated: 10 bytes missing (have 546, need 556); first affected: b"),
    Bad("no data", WHOLE_FILE[: -len(pad(A.raw, 32) + pad(B.raw, 32))], "first affected: a"),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.what)
def test_damaged_file_is_refused_with_the_reason(tmp_path, bad):
    path = tmp_path / "model.gguf"
    path.write_bytes(bad.raw)

    message = read_refusal(path)

    assert message.startswith(f"{path}: ")
    assert bad.says in message


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.what)
def test_damaged_file_costs_no_memory(tmp_path, bad):
    path = tmp_path / "model.gguf"
    path.write_bytes(bad.raw)
    tracemalloc.start()
    try:
        read_refusal(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 20 * len(bad.raw) + (1 << 20)


UNKNOWN = {90: "unknown type id 90 (the file may be newer than quanterr ", 2**32 - 1: "unknown type id 4294967295 "} | {
    number: f"type {name} (id {number}), " for number, (name, _) in REFUSED.items()
}


@pytest.mark.parametrize(("type_id", "says"), UNKNOWN.items())
@pytest.mark.parametrize("place", [0, 1, 2])
def test_tensor_with_unknown_type_is_named_and_the_others_stay_readable(tmp_path, type_id, says, place):
    known = [A, B._replace(name="\x1b[5m")]
    tensors = [*known[:place], Stored("unknown", type_id, (5,), bytes(40)), *known[place:]]
    with open_checkpoint(write_gguf(tmp_path / "model.gguf", tensors)) as checkpoint:
        read = [checkpoint.entries[tensor.name].read() for tensor in known]

    assert [tensor.name for tensor in tensors] == list(checkpoint.entries)
    assert [tensor.raw for tensor in known] == read
    assert checkpoint.entries["unknown"].unknown.startswith(says)
    assert all(name == "unknown" or entry.unknown is None for name, entry in checkpoint.entries.items())
    assert checkpoint.notes[0].startswith(f"{tmp_path}/model.gguf: unknown: {says}")


@pytest.mark.parametrize(("number", "fork"), [(36, "I2_S"), (37, "I8_S"), (38, "TL1")])
def test_removed_type_ids_name_the_fork_that_reused_them(tmp_path, number, fork):
    with open_checkpoint(
        write_gguf(tmp_path / "model.gguf", [A, Stored("w", number, (64, 64), bytes(1056))])
    ) as checkpoint:
        says = checkpoint.entries["w"].unknown

    assert says.startswith(f"type {fork} or IQ4_NL_")
    assert f"(id {number}), {fork} in microsoft/BitNet's fork of" in says


@pytest.mark.parametrize(("stored", "unknown"), [(64 * 64 // 32 * 17, False), (896, True)])
def test_reused_type_id_is_doubted_where_too_few_bytes_are_stored(tmp_path, stored, unknown):
    tensors = [Stored(name, 39, (64, 64), bytes(stored)) for name in "ab"]
    if unknown:
        tensors.append(A._replace(name="c"))
    with open_checkpoint(write_gguf(tmp_path / "model.gguf", tensors)) as checkpoint:
        unknowns = [checkpoint.entries[name].unknown for name in "ab"]

    assert [unknown] * 2 == [reason is not None for reason in unknowns]
    for reason in unknowns if unknown else ():
        assert reason.startswith("type TL2 (id 39), as microsoft/BitNet's fork of llama.cpp may have it: too few bytes")


def test_file_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    for size in range(len(WHOLE_FILE) - len(pad(B.raw, 32)) + len(B.raw)):
        path.write_bytes(WHOLE_FILE[:size])

        assert read_refusal(path)


# Any file

any_file = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], max_examples=150)


def outcome(raw):
    """Return the tensors of a file with these bytes, or None if it is refused, which must be a CheckpointError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(raw)
        try:
            with open_checkpoint(path) as checkpoint:
                for entry in checkpoint.entries.values():
                    assert 0 <= entry.offset <= entry.offset + entry.nbytes <= len(raw)
                    entry.read()
                return {name: (e.dtype, e.shape, e.offset, e.nbytes) for name, e in checkpoint.entries.items()}
        except CheckpointError:
            return None


@pytest.mark.session
@any_file
@given(st.integers(0, len(WHOLE_FILE)), st.integers(0, 9), st.binary(max_size=9))
def test_file_with_any_damage_is_read_or_refused(at, taken, put):
    damaged = WHOLE_FILE[:at] + put + WHOLE_FILE[at + taken :]

    assert min(peak_of(damaged) for _ in range(2)) < 1 << 20  # other threads, of pytest-xdist, allocate as well


def peak_of(raw):
    """Return the maximum number of bytes that are allocated while a file is read."""
    tracemalloc.start()
    try:
        outcome(raw)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 31, 32, 255, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1])


@any_file
@given(st.integers(4, len(WHOLE_FILE) - 8), NUMBERS, st.sampled_from(["<Q", "<I"]))
def test_file_with_any_number_anywhere_is_read_or_refused(at, number, form):
    put = struct.pack(form, number % 2 ** (8 * struct.calcsize(form)))

    outcome(WHOLE_FILE[:at] + put + WHOLE_FILE[at + len(put) :])


class TestGgufPackage:
    """Quanterr may refuse what the gguf package reads, but not the reverse, and reads the same tensors."""

    @pytest.fixture
    def package(self):
        return pytest.importorskip("gguf", reason="the gguf package is not installed")

    def of_package(self, package, path):
        reader = package.GGUFReader(path)
        return {
            tensor.name: (
                tensor.tensor_type.name,
                tuple(int(size) for size in reversed(tensor.shape)),
                int(tensor.data_offset),
                int(tensor.n_bytes),
            )
            for tensor in reader.tensors
        }

    @pytest.mark.parametrize(
        "path",
        sorted(
            path for path in GOLDEN.glob("*/*.gguf") if not path.stem.startswith("ik_llama_cpp")
        ),  # llama.cpp's own types
        ids=lambda path: f"{path.parent.name}/{path.stem}",
    )
    def test_gguf_package_reads_the_same_from_every_golden_file(self, package, path):
        if path.parent.name in (
            "gguf_q2_0",
            "gguf_pq2_0",
            "gguf_ptq1_0",
            "gguf_q4_0_rocmfp4",
            "gguf_q4_0_rocmfp4_fast",
        ):
            pytest.skip(f"gguf 0.19 does not know {path.parent.name}")
        expected = self.of_package(package, path)
        actual = outcome(path.read_bytes())
        if path.stem == "comfy_shapes":  # the gguf package ignores the original shapes
            expected, actual = (
                {name: (f[0], *f[2:]) for name, f in contents.items()} for contents in (expected, actual)
            )

        assert expected == actual

    @settings(any_file, max_examples=50)
    @given(st.integers(0, len(WHOLE_FILE)), st.integers(0, 3), st.binary(max_size=3))
    def test_gguf_package_accepts_every_file_that_quanterr_accepts(self, at, taken, put):
        package = pytest.importorskip("gguf", reason="the gguf package is not installed")
        raw = WHOLE_FILE[:at] + put + WHOLE_FILE[at + taken :]
        ours = outcome(raw)
        known = {name for number, name in TYPES.items() if number < 100} - {"Q2_0", "I2_S"}
        if ours is None or any(name not in known for name, *_ in ours.values()):
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            path.write_bytes(raw)

            assert ours == self.of_package(package, path)
