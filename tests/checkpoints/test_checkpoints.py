import errno
import os
import tempfile
import time
from math import prod
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.making import NEW_LIBRARY
from support.stored import as_header, entry, original, raw_header, shards, write, write_index

from quanterr.checkpoints import open_checkpoint
from quanterr.checkpoints.base import DTYPE_BITS, CheckpointFile
from quanterr.checkpoints.hub_cache import cache_folder
from quanterr.errors import CheckpointError, UsageError

A, B, C = ({name: torch.full((2, 3), value)} for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0)))
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch):
    """A cache for these tests, and a current folder that holds no file named like a model."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def folder(tmp_path):
    model_folder = tmp_path / "model"
    model_folder.mkdir()
    return model_folder


@pytest.fixture
def file(tmp_path):
    """An open file of ten bytes."""
    path = tmp_path / "digits"
    path.write_bytes(b"0123456789")
    file = CheckpointFile(path)
    yield file
    file.close()


def open_and_close(path):
    """Open a checkpoint, close it again and return it."""
    with open_checkpoint(path) as checkpoint:
        return checkpoint


def names_of(path):
    return list(open_and_close(path).entries)


def refusal(error, path):
    """Return the message with which a checkpoint is refused."""
    with pytest.raises(error) as raised:
        open_checkpoint(path)
    return str(raised.value)


def cache_model(hub, name="models--org--name", revision="main", inside="model.safetensors"):
    """Store a model as the Hub's own library caches it, with links to blobs, and return its snapshot."""
    snapshot = hub / name / "snapshots" / COMMIT
    blob = write(hub / name / "blobs" / f"{len(inside):064}", A)
    (snapshot / inside).parent.mkdir(parents=True)
    (snapshot / inside).symlink_to(os.path.relpath(blob, (snapshot / inside).parent))
    (hub / name / "refs").mkdir()
    (hub / name / "refs" / revision).write_text(f"{COMMIT}\n")
    return snapshot


# One file


@pytest.mark.parametrize("name", ["model.safetensors", "flux1-dev.sft", "no_suffix", "größe.safetensors", "a b"])
def test_file_name_does_not_matter(tmp_path, name):
    path = write(tmp_path / name, original(), {"format": "pt"})

    checkpoint = open_and_close(path)

    assert (str(path), "file", None) == (checkpoint.path, checkpoint.kind, checkpoint.revision)
    assert set(original()) == set(checkpoint.entries)
    assert ({"format": "pt"},) == checkpoint.metadata
    assert () == checkpoint.notes


def test_path_may_be_a_string_or_a_path(tmp_path):
    path = write(tmp_path / "model.safetensors", A)

    assert names_of(path) == names_of(str(path))


@pytest.mark.parametrize("name", [b"\xff.safetensors", b"\xe9/model.safetensors"])
def test_name_need_not_be_unicode(tmp_path, name):
    path = tmp_path / os.fsdecode(name)
    path.parent.mkdir(exist_ok=True)

    assert ["a"] == names_of(write(path, A))


def test_symbolic_link_is_followed(tmp_path):
    write(tmp_path / "blob", A)
    (tmp_path / "model.safetensors").symlink_to("blob")

    assert ["a"] == names_of(tmp_path / "model.safetensors")


def test_entry_describes_the_stored_tensor(tmp_path):
    with open_checkpoint(write(tmp_path / "model.safetensors", original())) as checkpoint:
        stored_entry = checkpoint.entries["model.layers.0.mlp.up_proj.weight"]

        assert ("BF16", (32, 16)) == (stored_entry.dtype, stored_entry.shape)
        assert (512, 16, 1_024) == (stored_entry.n, stored_entry.bits, stored_entry.nbytes)
        assert "model.layers.0.mlp.up_proj.weight (BF16 [32, 16])" == str(stored_entry)
        assert (16 * 16 + 32 * 16 + 16) * 2 == checkpoint.nbytes


def test_entries_come_as_the_header_lists_them(tmp_path):
    fields = {name: entry(offsets=(4 * n, 4 * n + 4)) for name, n in (("z", 1), ("a", 2), ("m", 0))}
    path = raw_header(tmp_path / "model.safetensors", as_header(fields), b"mmmmzzzzaaaa")

    with open_checkpoint(path) as checkpoint:
        read = {name: stored_entry.read() for name, stored_entry in checkpoint.entries.items()}

    assert ["z", "a", "m"] == list(read)
    assert {"z": b"zzzz", "a": b"aaaa", "m": b"mmmm"} == read


def test_header_may_be_padded_with_spaces(tmp_path):
    path = raw_header(tmp_path / "model.safetensors", as_header({"w": entry()}) + b"   ", b"1234")

    assert ["w"] == names_of(path)


@pytest.mark.skipif(not NEW_LIBRARY, reason="this safetensors knows fewer dtypes")
def test_every_dtype_the_library_knows_is_known(tmp_path):
    for dtype, bits in DTYPE_BITS.items():
        path = tmp_path / dtype
        raw_header(path, as_header({"w": entry(dtype, (8,), (0, bits))}), bytes(bits))

        assert bits == open_and_close(path).entries["w"].bits


def test_checkpoint_is_closed_after_its_block(tmp_path):
    with open_checkpoint(write(tmp_path / "model.safetensors", A)) as checkpoint:
        pass
    checkpoint.close()

    with pytest.raises(CheckpointError, match=r"read failed at byte .*: EBADF"):
        checkpoint.entries["a"].read()


def test_no_file_stays_open_when_opening_fails(folder):
    write(folder / "model-00001-of-00002.safetensors", A)
    raw_header(folder / "model-00002-of-00002.safetensors", b"[]")
    before = os.listdir("/dev/fd")

    refusal(CheckpointError, folder)

    assert len(before) == len(os.listdir("/dev/fd"))


# Folders and indexes


@pytest.mark.parametrize("name", ["model.safetensors", "flux1-dev.sft", "diffusion_pytorch_model.safetensors"])
def test_folder_with_a_single_file_opens_that_file(folder, name):
    write(folder / name, A)
    (folder / "README.md").write_text("")

    checkpoint = open_and_close(folder)

    assert (str(folder), "folder", ["a"]) == (checkpoint.path, checkpoint.kind, list(checkpoint.entries))


def test_folder_with_an_index_has_all_its_shards(folder):
    checkpoint = open_and_close(shards(folder, A, B, C))

    assert ("folder", ["a", "b", "c"]) == (checkpoint.kind, list(checkpoint.entries))
    assert 3 == len(checkpoint.files)
    assert "model-00002-of-00003.safetensors" == checkpoint.entries["b"].file.path.name


def test_index_may_be_named_itself(folder):
    shards(folder, A, B)

    checkpoint = open_and_close(folder / "model.safetensors.index.json")

    assert ("index", ["a", "b"]) == (checkpoint.kind, list(checkpoint.entries))


@pytest.mark.parametrize("suffix", ["safetensors", "sft"])
def test_shards_need_no_index(folder, suffix):
    shards(folder, A, B, index=False)
    for path in folder.iterdir():
        path.rename(path.with_suffix(f".{suffix}"))

    assert ["a", "b"] == names_of(folder)


def test_index_with_another_name_is_found(folder):
    write(folder / "weights.safetensors", A)
    write_index(folder, {"a": "weights.safetensors"}, "diffusion_pytorch_model.safetensors.index.json")

    assert ["a"] == names_of(folder)


def test_model_index_is_preferred_to_others(folder):
    shards(folder, A, B)
    write(folder / "adapter.safetensors", C)
    write_index(folder, {"c": "adapter.safetensors"}, "adapter.safetensors.index.json")

    assert ["a", "b"] == names_of(folder)


def test_shard_alone_is_opened_when_it_is_named(folder):
    shards(folder, A, B)

    assert ["b"] == names_of(folder / "model-00002-of-00002.safetensors")


def test_second_copy_shipped_by_mistral_is_ignored(folder):
    shards(folder, A, B, index=False)
    write(folder / "consolidated.safetensors", C)

    assert ["a", "b"] == names_of(folder)


@pytest.mark.parametrize(
    "names",
    [
        ["model.safetensors", "model.fp16.safetensors"],
        ["model.safetensors", "model.sft"],
        ["a-00001-of-00001.safetensors", "b-00001-of-00001.safetensors"],
        ["a-00001-of-00001.safetensors", "a-00001-of-00002.safetensors"],
        ["a-00001-of-00001.safetensors", "extra.safetensors"],
    ],
)
def test_folder_with_several_checkpoints_is_ambiguous(folder, names):
    for name in names:
        write(folder / name, A)

    with pytest.raises(UsageError) as raised:
        open_checkpoint(folder)

    assert 2 == raised.value.status
    assert f"ambiguous, choose one of {', '.join(sorted(names))}" in str(raised.value)


@pytest.mark.parametrize("index", [True, False])
def test_all_missing_shards_are_listed_together(folder, index):
    shards(folder, A, B, C, index=index)
    for number in (1, 3):
        (folder / f"model-{number:05}-of-00003.safetensors").unlink()

    message = refusal(CheckpointError, folder)

    assert f"{folder}: 2 of 3 shards missing: " in message
    assert message.endswith("model-00001-of-00003.safetensors, model-00003-of-00003.safetensors")


@pytest.mark.parametrize("denoiser", ["transformer", "unet"])
def test_pipeline_folder_opens_its_denoiser(folder, denoiser):
    for name in (denoiser, "vae", "text_encoder"):
        (folder / name).mkdir()
        write(folder / name / "diffusion_pytorch_model.safetensors", A)
    (folder / denoiser / "config.json").write_text('{"_class_name": "X"}')
    (folder / "model_index.json").write_text("{}")

    checkpoint = open_and_close(folder)

    assert (f"{folder}/{denoiser}", "folder", []) == (checkpoint.path, checkpoint.kind, list(checkpoint.notes))
    assert {"config.json": {"_class_name": "X"}} == checkpoint.config


def test_pipeline_with_two_denoisers_is_ambiguous(folder):
    for name in ("transformer", "transformer_2"):
        (folder / name).mkdir()
    (folder / "model_index.json").write_text("{}")

    message = f"a pipeline with several denoisers, choose one of {folder}/transformer, {folder}/transformer_2"
    assert message in refusal(UsageError, folder)


def test_pipeline_with_its_own_weights_opens_them(folder):
    (folder / "transformer").mkdir()
    (folder / "model_index.json").write_text("{}")
    write(folder / "model.safetensors", A)

    assert str(folder) == open_and_close(folder).path

    write(folder / "ae.safetensors", A)

    assert "choose one of ae.safetensors, model.safetensors, transformer/" in refusal(UsageError, folder)


@pytest.mark.parametrize(
    ("held", "expected_message"),
    [((), "it is empty"), (("b.md", "a.txt"), "it holds a.txt, b.md"), (("x\x1b",), "x\\x1b")],
)
def test_folder_without_weights_is_an_error_that_lists_its_content(folder, held, expected_message):
    for name in held:
        (folder / name).write_text("")

    message = refusal(CheckpointError, folder)

    assert "no checkpoint found (looked for *.safetensors.index.json, *.safetensors, *.sft, *.gguf, " in message
    assert expected_message in message


def test_tensors_missing_from_the_index_are_noted(folder):
    write(folder / "weights.safetensors", A | B)

    checkpoint = open_and_close(write_index(folder, {"a": "weights.safetensors"}))

    assert ["a", "b"] == list(checkpoint.entries)
    assert 1 == len(checkpoint.notes)
    assert checkpoint.notes[0].endswith(": index does not list b; compared anyway")


def test_shard_missing_from_the_index_is_noted(folder):
    shards(folder, A, B)
    assert () == open_and_close(folder).notes
    write_index(folder, dict.fromkeys(A, "model-00001-of-00002.safetensors"))
    write(folder / "model-00003-of-00009.safetensors", B)  # a shard of a series of another length
    checkpoint = open_and_close(folder)

    assert list(A) == list(checkpoint.entries)
    assert (
        f"{folder}: index does not name model-00002-of-00002.safetensors, which is in the same folder; ignored",
    ) == checkpoint.notes


def test_unknown_field_in_an_entry_is_noted(tmp_path):
    path = raw_header(tmp_path / "w.safetensors", as_header({"w": entry(strides=[1])}), b"1234")

    assert (f'{path}: w: ignoring unknown field "strides"',) == open_and_close(path).notes


# Files stored with the weights


def test_configuration_in_the_folder_is_read(folder):
    shards(folder, A, B)
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    expected = {
        "config.json": {"quantization_config": {"quant_method": "fp8"}},
        "hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}},
    }

    assert expected == open_and_close(folder).config
    assert expected == open_and_close(folder / "model.safetensors.index.json").config


@pytest.mark.parametrize("name", ["model.safetensors", "flux1-dev.safetensors"])
def test_configuration_next_to_a_single_file_is_read(folder, name):
    write(folder / name, A)
    (folder / "config.json").write_text('{"a": 1}')

    assert {"config.json": {"a": 1}} == open_and_close(folder / name).config


@pytest.mark.parametrize(
    ("text", "config"),
    [
        (b'{"a": NaN, "b": -Infinity}', ["a", "b"]),
        (b'{"a": 1, "a": 2}', ["a"]),
        (b'{"a": ', None),
        (b"\xff", None),
        (b"[" * 200_000, None),
        (b'{"a": ' + b"1" * 5_000 + b"}", None),
    ],
)
def test_configuration_is_a_hint_and_never_stops_the_comparison(folder, text, config):
    write(folder / "model.safetensors", A)
    (folder / "config.json").write_bytes(text)

    declared = open_and_close(folder).config.get("config.json")

    assert config == (declared and list(declared))


@pytest.mark.parametrize("text", ["[1]", "null", '"text"'])
def test_configuration_that_is_no_object_declares_nothing(folder, text):
    write(folder / "model.safetensors", A)
    (folder / "config.json").write_text(text)
    checkpoint = open_and_close(folder)

    assert {"config.json": {}} == checkpoint.config
    assert {} == checkpoint.model_config


def test_keys_of_the_language_model_replace_those_at_the_top(folder):
    write(folder / "model.safetensors", A)
    (folder / "config.json").write_text(
        '{"hidden_size": 1, "tie_word_embeddings": true, "text_config": {"hidden_size": 2}}'
    )
    model_config = open_and_close(folder).model_config

    assert (model_config["hidden_size"], model_config["tie_word_embeddings"]) == (2, True)


def test_huge_configuration_is_not_read(folder):
    write(folder / "model.safetensors", A)
    (folder / "config.json").write_text("{}")
    os.truncate(folder / "config.json", 16 * 2**20 + 1)

    assert {} == open_and_close(folder).config


@pytest.mark.parametrize(
    "made",
    [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path), lambda path: os.symlink("/dev/null", path)],
    ids=["FIFO", "folder", "/dev/zero", "/dev/null"],
)
def test_configuration_must_be_a_regular_file(folder, made):
    write(folder / "model.safetensors", A)
    made(folder / "config.json")

    with open_checkpoint(folder) as checkpoint:
        assert {} == checkpoint.config
        assert (f"{folder}/config.json: ignored: not a regular file",) == checkpoint.notes


def test_revision_must_be_a_regular_file(hub):
    cache_model(hub)
    revision = hub / "models--org--name" / "refs" / "main"
    revision.unlink()
    os.mkfifo(revision)

    with pytest.raises(CheckpointError, match="nor in the Hugging Face cache"):
        open_checkpoint("org/name")


# The cache of the Hub


@pytest.mark.parametrize("given", ["org/name", "hf://org/name", "hf://org/name@main", f"org/name@{COMMIT}"])
def test_cached_model_is_opened_by_its_name(hub, given):
    cache_model(hub)

    checkpoint = open_and_close(given)

    assert (given, COMMIT, ["a"]) == (checkpoint.path, checkpoint.revision, list(checkpoint.entries))


def test_part_inside_a_cached_model_is_opened_by_its_path(hub):
    cache_model(hub, revision="v1.0", inside="transformer/diffusion_model.safetensors")

    for inside in ("transformer", "transformer/diffusion_model.safetensors"):
        checkpoint = open_and_close(f"hf://org/name@v1.0/{inside}")

        assert (COMMIT, ["a"]) == (checkpoint.revision, list(checkpoint.entries))


def test_denoiser_in_a_cached_pipeline_is_opened(hub):
    snapshot = cache_model(hub, inside="transformer/diffusion_model.safetensors")
    (snapshot / "model_index.json").write_text("{}")

    for name in ("org/name", "hf://org/name"):
        checkpoint = open_and_close(name)

        assert ("hf://org/name/transformer", ["a"]) == (checkpoint.path, list(checkpoint.entries))
        assert ["a"] == list(open_and_close(checkpoint.path).entries)


def test_links_from_index_and_shards_to_blobs_are_followed(hub):
    snapshot = cache_model(hub, inside="model-00001-of-00001.safetensors")
    blob = write_index(hub / "models--org--name" / "blobs", {"a": "model-00001-of-00001.safetensors"}, "e0f1")
    (snapshot / "model.safetensors.index.json").symlink_to(os.path.relpath(blob, snapshot))

    assert ["a"] == names_of("org/name")


def test_local_folder_takes_precedence_over_the_cache(hub):
    cache_model(hub)
    write(Path("org/name/model.safetensors"), B)

    checkpoint = open_and_close("org/name")

    assert (None, ["b"]) == (checkpoint.revision, list(checkpoint.entries))


def test_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert tmp_path / "hub" == cache_folder()

    monkeypatch.delenv("HF_HUB_CACHE")
    assert tmp_path / "home" / "hub" == cache_folder()

    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tmp_path / "xdg" / "huggingface" / "hub" == cache_folder()

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmp_path / ".cache" / "huggingface" / "hub" == cache_folder()


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ("org/name", "hf download org/name"),
        ("hf://org/name", "hf download org/name"),
        ("org/name@v2", "hf download org/name --revision v2"),
        ("hf://org/name@v2/unet", "hf download org/name --revision v2"),
    ],
)
def test_error_for_an_uncached_model_names_the_download_command(hub, given, command):
    message = refusal(CheckpointError, given)

    assert f"nor in the Hugging Face cache ({hub}); get it with `{command}`" in message


def test_uncached_revision_is_not_replaced_by_another(hub):
    cache_model(hub)

    assert "--revision v2" in refusal(CheckpointError, "org/name@v2")


@pytest.mark.parametrize(
    "given",
    ["hf://org", "hf://", "hf://../name", "hf://org/..", "hf://org/name/../../x", "hf://org/name@a b"],
)
def test_invalid_model_id_is_refused(given):
    assert "no such file, and not a model id like org/name" in refusal(CheckpointError, given)


# Reading


@pytest.mark.parametrize(("offset", "n", "read"), [(0, 10, b"0123456789"), (3, 4, b"3456"), (10, 0, b"")])
def test_any_range_is_read(file, offset, n, read):
    assert read == file.read(offset, n)


@pytest.mark.parametrize(("offset", "n"), [(0, 11), (9, 2), (10, 1), (100, 1)])
def test_range_past_the_end_is_an_error_with_the_file_size(file, offset, n):
    with pytest.raises(CheckpointError, match=rf"ends at byte {max(offset, 10)}, .*truncated"):
        file.read(offset, n)


def test_shrinking_file_is_an_error_and_not_a_signal(tmp_path):
    with open_checkpoint(write(tmp_path / "model.safetensors", A)) as checkpoint:
        os.truncate(tmp_path / "model.safetensors", checkpoint.files[0].size - 1)

        with pytest.raises(CheckpointError, match=r"model\.safetensors: changed while being read \(size"):
            checkpoint.entries["a"].read()


def test_short_read_is_continued(file, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:3]], offset))

    assert b"123456789" == file.read(1, 9)


def failing(monkeypatch, code, times):
    """Let reading fail this many times, as on a network, and return the pauses made between the attempts."""
    preadv, pauses, calls = os.preadv, [], []

    def read(*arguments):
        calls.append(arguments)
        if len(calls) <= times:
            raise OSError(code, os.strerror(code))
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(time, "sleep", pauses.append)
    return pauses


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_read_that_fails_briefly_is_repeated(file, monkeypatch, code):
    pauses = failing(monkeypatch, code, times=3)

    assert b"456" == file.read(4, 3)
    assert 3 == len(pauses)
    assert pauses[0] < pauses[1] < pauses[2]


def test_persistent_read_failure_is_an_error_with_its_position(file, monkeypatch):
    failing(monkeypatch, errno.EIO, times=100)

    with pytest.raises(CheckpointError, match=r"digits: read failed at byte 4: EIO") as raised:
        file.read(4, 3)

    assert 3 == raised.value.status


def test_other_read_errors_are_not_repeated(file, monkeypatch):
    pauses = failing(monkeypatch, errno.EINVAL, times=1)

    with pytest.raises(CheckpointError, match="read failed at byte 0: EINVAL"):
        file.read(0, 1)

    assert [] == pauses


# Changes during reading


def test_untouched_file_counts_as_unchanged(file):
    file.read(0, 10)

    file.check_unchanged()


def grow(path):
    with path.open("ab") as file:
        file.write(b"x")


def touch(path):
    os.utime(path, ns=(0, 0))


@pytest.mark.parametrize(
    ("change", "sizes"),
    [(grow, r" \(size 10 → 11\)"), (touch, ""), (lambda path: os.truncate(path, 3), r" \(size 10 → 3\)")],
)
def test_modified_file_is_noticed(file, change, sizes):
    change(file.path)

    with pytest.raises(CheckpointError, match=rf"changed while being read{sizes}; results disc"):
        file.check_unchanged()


def test_one_changed_shard_is_noticed(folder):
    with open_checkpoint(shards(folder, A, B)) as checkpoint:
        checkpoint.check_unchanged()
        touch(folder / "model-00002-of-00002.safetensors")

        with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: changed"):
            checkpoint.check_unchanged()


def test_file_replaced_under_the_same_name_does_not_matter(tmp_path):
    path = write(tmp_path / "model.safetensors", A)
    with open_checkpoint(path) as checkpoint:
        before = checkpoint.entries["a"].read()
        os.replace(write(tmp_path / "other", B), path)

        assert before == checkpoint.entries["a"].read()
        checkpoint.check_unchanged()


# Any file


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter("__metadata__".__ne__)
SHAPES = st.lists(st.integers(0, 5), max_size=4)
any_file = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


def tensor(dtype, shape):
    """Return a tensor with any bits, except for booleans, which have only two values."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    raw = torch.randint(0, 256, (prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@any_file
@given(st.dictionaries(NAMES, st.builds(tensor, st.sampled_from(DTYPES), SHAPES), max_size=5))
def test_reading_agrees_with_the_library(tensors):
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "model.safetensors", tensors)
        expected = {
            name: (held["dtype"], tuple(held["shape"]), bytes(held["data"]))
            for name, held in safetensors.deserialize(path.read_bytes())
        }
        with open_checkpoint(path) as checkpoint:
            actual = {name: (e.dtype, e.shape, e.read()) for name, e in checkpoint.entries.items()}

    assert expected == actual


def outcome(raw):
    """Return whether a file with these bytes is accepted and every dtype known; a refusal must be a CheckpointError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(raw)
        try:
            with open_checkpoint(path) as checkpoint:
                for stored_entry in checkpoint.entries.values():
                    stored_entry.read()
                return not any(stored_entry.unknown for stored_entry in checkpoint.entries.values())
        except CheckpointError:
            return False


VALID = (64).to_bytes(8, "little") + as_header({"w": entry()}).ljust(64) + b"1234"


@any_file
@given(st.integers(0, len(VALID)), st.integers(0, 3), st.binary(max_size=3))
def test_damaged_file_is_accepted_only_if_the_library_accepts_it(at, taken, put):
    raw = VALID[:at] + put + VALID[at + taken :]

    if outcome(raw):
        assert safetensors.deserialize(raw)


@any_file
@given(st.integers(0, len(VALID)), st.integers(0, 3), st.binary(max_size=3))
def test_lenient_reading_of_damage_equals_strict_reading_or_leaves_a_note(at, taken, put):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(VALID[:at] + put + VALID[at + taken :])
        outcomes = []
        for lenient in (False, True):
            try:
                with open_checkpoint(path, lenient) as checkpoint:
                    entries = [(e.name, e.dtype, e.shape, e.offset, e.nbytes) for e in checkpoint.entries.values()]
                    outcomes.append((entries, checkpoint.notes, [e.read() for e in checkpoint.entries.values()]))
            except CheckpointError:
                outcomes.append(None)

    strict, lenient = outcomes
    assert strict == lenient or (strict is None and lenient[1])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@any_file
@given(
    st.sampled_from(["shape", "data_offsets", "extra"]) | st.none(),
    st.sampled_from(["w", "__metadata__"]),
    JSON,
)
@pytest.mark.slow
def test_header_with_any_value_anywhere_is_read_or_refused(field, name, value):
    changed = {name: value} if field is None else {"w": entry() | {field: value}}
    header = as_header({"w": entry()} | changed)
    raw = len(header).to_bytes(8, "little") + header + b"1234"

    if outcome(raw):
        assert safetensors.deserialize(raw)
