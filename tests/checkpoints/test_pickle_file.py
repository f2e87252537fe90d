"""Files of torch.save are read without executing anything in them."""

import collections
import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from support.stored import write

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.errors import CheckpointError

GOLDEN = Path(__file__).parent.parent / "golden_pickles"
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)
# torch has no class of typed storage for these.
NEW_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32)


def state(dtypes=DTYPES):
    torch.manual_seed(0)
    tensors = {str(dtype): torch.randn(6, 8).to(torch.float32).to(dtype) for dtype in dtypes}
    tensors["part"] = tensors["torch.float32"][2:4]
    tensors["tied"] = tensors["torch.float32"]
    tensors["number"] = torch.tensor(3.0)
    tensors["empty"] = torch.zeros(0, 4)
    return tensors


def save(path, content, **options):
    torch.save(content, path, **options)
    return path


def read(path):
    """Return the bytes, dtype and shape of all tensors."""
    with open_checkpoint(path) as checkpoint:
        return {name: (entry.read(), entry.dtype, entry.shape) for name, entry in checkpoint.entries.items()}


def as_safetensors(folder, tensors):
    """Return the same as read from a file of the safetensors library."""
    return read(write(folder / "plain.safetensors", {name: tensor.clone() for name, tensor in tensors.items()}))


@pytest.mark.parametrize("case", ["zip", "legacy", "new dtypes", "OrderedDict", "parameters", "wrapped", "protocol 4"])
def test_tensors_are_those_of_the_file(case, tmp_path):
    tensors = state((torch.float32, *NEW_DTYPES)) if case == "new dtypes" else state()
    content, options = tensors, {}
    if case == "legacy":
        options = {"_use_new_zipfile_serialization": False}
    elif case == "OrderedDict":
        content = collections.OrderedDict(tensors)
        content._metadata = {"": {"version": 1}}
    elif case == "parameters":
        content = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
    elif case == "wrapped":
        content = {"epoch": 3, "state_dict": tensors, "optimizer": {"state": {0: {"m": torch.zeros(3)}}}}
    elif case == "protocol 4":
        options = {"pickle_protocol": 4}

    assert as_safetensors(tmp_path, tensors) == read(save(tmp_path / "model.bin", content, **options))


def test_comparison_with_a_pickled_original(tmp_path):
    original = save(tmp_path / "pytorch_model.bin", {"a.weight": torch.randn(16, 64)})
    quantized = write(tmp_path / "y.safetensors", {"a.weight": torch.load(original)["a.weight"].bfloat16()})
    layer = quanterr.compare(original, quantized, device="cpu").layers[0]
    x = torch.load(original)["a.weight"].double()

    expected = 10 * torch.log10((x**2).sum() / ((x - x.bfloat16().double()) ** 2).sum())
    assert layer.snr_db == pytest.approx(float(expected), rel=1e-6)


def test_folder_with_an_index_is_read(tmp_path):
    tensors, files = state(), {}
    for n, names in enumerate((["torch.float32", "part"], ["torch.int8"]), 1):
        path = save(tmp_path / f"pytorch_model-0000{n}-of-00002.bin", {name: tensors[name] for name in names})
        files |= dict.fromkeys(names, path.name)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    save(tmp_path / "optimizer.pt", {"state": torch.zeros(3)})

    assert files.keys() == read(tmp_path).keys()


def test_safetensors_are_read_before_pickles_beside_them(tmp_path):
    save(tmp_path / "pytorch_model.bin", {"pickled": torch.zeros(3)})
    write(tmp_path / "model.safetensors", {"plain": torch.zeros(3)})

    assert {"plain"} == read(tmp_path).keys()


def test_moving_average_is_noted_and_not_mixed_in(tmp_path):
    path = save(tmp_path / "y.pth", {"params": {"a": torch.zeros(3)}, "params_ema": {"a": torch.ones(3)}})
    with open_checkpoint(path) as checkpoint:
        assert bytes(12) == checkpoint.entries["a"].read()
        assert any("not those under params_ema" in note for note in checkpoint.notes)


def test_tensor_that_is_not_stored_row_by_row_is_refused(tmp_path):
    x = torch.randn(4, 6)
    original = write(tmp_path / "x.safetensors", {"a.weight": x, "b.weight": x.clone()})
    quantized = save(tmp_path / "y.bin", {"a.weight": x.t().contiguous().t(), "b.weight": x})

    with pytest.raises(CheckpointError, match=r"a\.weight: stored with strides \[1, 4\], not row by row"):
        quanterr.compare(original, quantized, device="cpu")
    assert quanterr.compare(original, quantized, device="cpu", layers="b").verdict == "pass"


def test_member_at_the_place_of_another_is_refused(tmp_path):
    """The central directory of the archive would make the pickle itself a weight."""
    path = archive(tmp_path / "y.bin", tensor(), {"0": bytes(16)})
    raw = path.read_bytes()
    at = raw.rindex(b"PK\x01\x02") + 42  # where the central directory says that the last member begins
    path.write_bytes(raw[:at] + bytes(4) + raw[at + 4 :])

    with pytest.raises(CheckpointError, match="its local header is not at byte 0"):
        open_checkpoint(path)


def test_tensors_of_torchao_are_read(tmp_path):
    original, expected = (load_file(GOLDEN / f"torchao{ending}.safetensors") for ending in ("", ".expected"))
    report = quanterr.compare(GOLDEN / "torchao.safetensors", GOLDEN / "torchao.bin", device="cpu")

    assert {"torchao_int8", "torchao_fp8"} == {layer.format for layer in report.layers}
    for layer in report.layers:
        x, y = original[layer.layer_name].double(), expected[layer.layer_name].double()
        snr_db = 10 * float(torch.log10((x**2).sum() / ((x - y) ** 2).sum()))
        assert layer.snr_db == pytest.approx(snr_db, abs=1e-3)  # y is rounded to float32, 2^-24 of errors of 2^-9


# What is refused


class Called:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def archive(path, program, data=None):
    """Write a zip archive as torch.save does, with any pickle."""
    with zipfile.ZipFile(path, "w") as target:
        target.writestr("archive/data.pkl", program)
        for key, raw in (data or {}).items():
            target.writestr(f"archive/data/{key}", raw)
    return path


OF_TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n("
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"


def tensor(offset=0, shape=b"K\x04\x85", strides=b"K\x01\x85", storage=STORAGE):
    """Return the pickle of {"a": a tensor of four numbers}."""
    number = b"J" + struct.pack("<i", offset)
    return b"\x80\x02}X\x01\x00\x00\x00a" + OF_TENSOR + storage + number + shape + strides + b"\x89NtRs."


def test_handwritten_archive_is_read(tmp_path):
    assert (bytes(16), "F32", (4,)) == read(archive(tmp_path / "y.bin", tensor(), {"0": bytes(16)}))["a"]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (pickle.dumps({"a": Called(os.system, "touch owned")}, 2), "names (posix|nt).system"),
        (pickle.dumps({"a": Called(eval, "1")}, 4), "names builtins.eval"),
        (pickle.dumps({"a": Called(getattr, Called(__import__, "os"), "system")}, 2), "names __builtin__.getattr"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R)R.", "damaged at byte"),
        (b"\x80\x02}ctorch\nFloatStorage\n)R.", "calls torch.FloatStorage"),
        (b"\x80\x02}r\xff\xff\xff\xff.", "no tensors"),  # a huge index of the memo takes no memory
        (b"\x80\x02" + b"(" * 100_000 + b".", "a value of type object"),
        (b"\x80\x02" + b"}" + b"\x85" * 100_000 + b".", "a value of type tuple"),
        (b"\x80\x02\x8e\xff\xff\xff\xff\xff\xff\xff\x7fab.", "damaged at byte"),
        (b"\x80\x02(i__main__\nA\n.", "opcode INST"),
        (b"\x80\x02}\x82\x01.", "opcode EXT1"),
        (b"\x80\x02h\x07.", "damaged at byte"),
        (b"\x80\x02}", "damaged at byte"),
        (b"", "damaged at byte"),
        (b"\xff\xfe", "damaged at byte"),
        (tensor(offset=1), "ends after its storage"),
        (tensor(offset=-1), "damaged at byte"),
        (tensor(shape=b"J\xff\xff\xff\x7f\x85"), "ends after its storage"),
        (tensor(shape=b"K\x04K\x04\x86"), "damaged at byte"),
        (tensor(shape=b"X\x01\x00\x00\x004\x85"), "damaged at byte"),
        (tensor(storage=b"N"), "damaged at byte"),
        (tensor(storage=STORAGE.replace(b"X\x01\x00\x00\x000", b"K\x00")), "damaged at byte"),
        (tensor(storage=STORAGE.replace(b"\x000X", b"\x001X")), "its storage 1 is not in the file"),
        (b"\x80\x02}.", "no tensors"),
        (b"\x80\x02K\x07.", "a value of type int"),
    ],
)  # fmt: skip
def test_hostile_pickle_is_refused_with_its_place(program, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=rf"y\.bin: .*{says}"):
        open_checkpoint(archive(tmp_path / "y.bin", program, {"0": bytes(16)}))

    assert ["y.bin"] == os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw[: len(raw) // 2], "damaged or truncated"),
        (lambda raw: raw[:-30], "damaged or truncated"),
        (lambda raw: raw.replace(b"archive/data.pkl", b"archive/date.pkl"), "without a data.pkl"),
        (lambda raw: raw[:4] + bytes(60) + raw[64:], "damaged|no tensors|no local header"),
    ],
)
def test_damaged_archive_is_refused(change, says, tmp_path):
    path = archive(tmp_path / "y.bin", tensor(), {"0": bytes(16)})
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(path)


def test_compressed_storage_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "y.bin", "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("archive/data.pkl", tensor())
        target.writestr("archive/data/0", bytes(16))
    with pytest.raises(CheckpointError, match="is compressed, which"):
        open_checkpoint(tmp_path / "y.bin")


def test_big_endian_file_is_refused(tmp_path):
    path = archive(tmp_path / "y.bin", tensor(), {"0": bytes(16)})
    with zipfile.ZipFile(path, "a") as target:
        target.writestr("archive/byteorder", "big")
    with pytest.raises(CheckpointError, match="byte order big"):
        open_checkpoint(path)


def test_program_of_torchscript_is_refused(tmp_path):
    path = archive(tmp_path / "y.pt", tensor(), {"0": bytes(16)})
    with zipfile.ZipFile(path, "a") as target:
        target.writestr("archive/code/__torch__.py", "def forward(self): pass")
    with pytest.raises(CheckpointError, match="a TorchScript archive"):
        open_checkpoint(path)


def test_whole_model_is_refused_by_its_class(tmp_path):
    with pytest.raises(CheckpointError, match=r"names torch\.nn\.modules\.linear\.Linear"):
        open_checkpoint(save(tmp_path / "y.pt", torch.nn.Linear(2, 2)))


@pytest.mark.parametrize("is_zip", [True, False])
def test_changed_bytes_never_end_in_another_error(is_zip, tmp_path):
    """The fuzzer changes many more bytes than this."""
    buffer = io.BytesIO()
    torch.save(state((torch.float32, torch.int8)), buffer, _use_new_zipfile_serialization=is_zip)
    random, path = Random(5), tmp_path / "y.bin"
    for _ in range(150):
        raw = bytearray(buffer.getvalue())
        for _ in range(random.randint(1, 3)):
            raw[random.randrange(len(raw))] = random.randrange(256)
        path.write_bytes(raw[: random.choice([len(raw), random.randrange(len(raw))])])
        try:
            for content, _, _ in read(path).values():
                assert len(content) <= len(raw)
        except CheckpointError:
            pass
