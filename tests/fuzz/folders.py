"""Folders: an index next to its shards, a checkpoint's declarations about its layers, and whole comparisons.

An input of more than one file is an uncompressed zip of them, so that a saved one can be unpacked and looked at.
"""

import io
import json
import zipfile
from functools import cache
from pathlib import Path
from random import Random
from shutil import rmtree
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

import quanterr
from fuzz.finding import Target, folder, refusal, require
from fuzz.mutating import STRANGE, Pairs, change, changed_bytes, dump, few, other_text, parse, seed
from quanterr.checkpoints import Checkpoint, open_checkpoint
from quanterr.checkpoints.base import DTYPE_BITS
from quanterr.checkpoints.labels import COMFY_SUFFIX, HEADER_KEY
from quanterr.documents.comparison.model import Report
from quanterr.documents.gate_results import exit_status
from quanterr.errors import QuanterrError
from quanterr.inspection import inspect

GOLDEN = Path(__file__).parents[1] / "golden"
LARGEST_SEED = 40_000  # bytes of the weights
LONGEST_HEADER = 1500  # bytes
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
CONFIGS = ("config.json", "config.json", "config.json", "hf_quant_config.json", "quantize_config.json")
EXPECTED = "original.safetensors"
COMPARED = ("compared", "lossless", "consumed", "filtered_out")

# Indexes


@cache
def write_shards(process: object = None) -> Path:
    """Write two shards, and next to their folder a file that no index may reach."""
    place = folder() / "sharded"
    place.mkdir()
    for name, tensors in zip(SHARDS, (("a", "b"), ("c",)), strict=True):
        save_file({tensor: torch.ones(2, 3) for tensor in tensors}, place / name)
    save_file({"secret": torch.ones(2)}, folder() / "outside.safetensors")
    return place


INDEX_WORDS = (*SHARDS, "a", "b", "c", "outside.safetensors", "../outside.safetensors", "weight_map", "metadata", INDEX)


def make_index(random: Random) -> bytes:
    """Make a map from tensors to shards."""
    entries = [(name, SHARDS[name == "c"]) for name in "abc"]
    tree = Pairs([("metadata", Pairs([("total_size", 72)])), ("weight_map", Pairs(entries))])
    for _ in range(random.choice((0, 1, 1, 2, 3))):
        tree = change(random, tree, INDEX_WORDS)
    raw = dump(tree).encode()
    return changed_bytes(random, raw) if random.random() < 0.15 else raw


def check_index(raw: bytes) -> str:
    """Check that an index is refused, or that its tensors are there and no file outside the folder was opened."""
    place = write_shards()
    (place / INDEX).write_bytes(raw)
    try:
        with open_checkpoint(place) as checkpoint:
            paths = {name: entry.file.path for name, entry in checkpoint.entries.items()}
    except QuanterrError as error:
        return refusal(error)
    weight_map = json.loads(raw)["weight_map"]
    require(all(path.parent == place for path in paths.values()), f"opened {paths!a}")
    require({name: paths[name].name for name in weight_map} == weight_map, f"index {weight_map!a}, found {paths!a}")
    return f"taken, {'lists all' if len(weight_map) == len(paths) else 'leaves some out'}"


# Configurations and labels


@cache
def seeds() -> list[dict[str, bytes]]:
    """Return files of small checkpoints of all formats, each with the weights that it holds."""
    seeds_found = []
    for expected in sorted(GOLDEN.glob("*/*.expected.safetensors")):
        name = expected.name.removesuffix(".expected.safetensors")
        files = {EXPECTED: expected.read_bytes()}
        for place in (
            expected.with_name(name),
            *(expected.with_name(name + suffix) for suffix in (".safetensors", ".gguf")),
        ):
            paths = sorted(place.iterdir()) if place.is_dir() else [place] if place.is_file() else []
            files |= {path.name if place.is_dir() else "model" + path.suffix: path.read_bytes() for path in paths}
        if len(files) > 1 and sum(map(len, files.values())) <= LARGEST_SEED:
            seeds_found.append(files)
    return seeds_found


@cache
def small_seeds() -> list[dict[str, bytes]]:
    """Return the seeds without an original and with a short header, which are mostly metadata."""
    without_original = [{name: raw for name, raw in files.items() if name != EXPECTED} for files in seeds()]
    return [
        files
        for files in without_original
        if len(_header(files.get("model.safetensors", b""))) in range(1, LONGEST_HEADER)
    ]


def _header(raw: bytes) -> bytes:
    return raw[8 : 8 + int.from_bytes(raw[:8], "little")]


def make(random: Random) -> bytes:
    """Make a checkpoint with changed metadata or contents, and its original."""
    return _change_folder(random, random.choice(seeds()))


def make_small(random: Random) -> bytes:
    """Make a small checkpoint with changed metadata or contents, without an original."""
    return _change_folder(random, random.choice(small_seeds()))


def _change_folder(random: Random, unchanged: dict[str, bytes]) -> bytes:
    files = dict(unchanged)
    for _ in range(few(random)):
        _change(random, files)
    return zip_files(files)


def _change(random: Random, files: dict[str, bytes]) -> None:
    weights = next(name for name in files if name.startswith("model."))
    if weights.endswith(".gguf"):
        files[weights] = changed_bytes(random, files[weights], 2000)
        return
    configs = [name for name in files if name.endswith(".json")]
    choice = random.random()
    if choice < 0.45 and configs:
        name = random.choice(configs)
        try:
            tree = parse(files[name])
        except (ValueError, RecursionError):  # an earlier change broke this JSON
            return
        files[name] = dump(change(random, tree, WORDS, stop=0.05)).encode()
    elif choice < 0.5:
        files[random.choice(CONFIGS)] = dump(change(random, ODD_CONFIG, WORDS, stop=0.03)).encode()
    else:
        files[weights] = _changed_weights(random, files[weights])


WORDS = (
    *DTYPE_BITS,
    "int",
    "float",
    "sym",
    "asym",
    "group",
    "channel",
    "block",
    "tensor",
    "fp8",
    "awq",
    "gptq",
    "128x128",
)
WORDS += (
    "²x2",
    [128, 128],
    [1, 32],
    "mxfp4",
    "nvfp4",
    "W4A16",
    "re:.*",
    "weight",
    "0.7.1",
    "1.0",
    8,
    4,
    2,
    3,
    5,
    6,
    16,
    32,
)
ODD_CONFIG = seed(
    json.dumps(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "bits": 4,
                "group_size": 16,
                "format": "pack-quantized",
                "version": "0.9.0",
                "weight_block_size": [128, 128],
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {
                            "num_bits": 4,
                            "type": "int",
                            "symmetric": True,
                            "strategy": "group",
                            "group_size": 16,
                        },
                    }
                },
                "modules_to_not_convert": ["lm_head"],
            },
        }
    )
)


def _changed_weights(random: Random, raw: bytes) -> bytes:
    """Change names, dtypes, shapes, labels or data of the weights; the data still tile the file."""
    end = 8 + int.from_bytes(raw[:8], "little")
    try:
        header = parse(raw[8:end])
    except (ValueError, RecursionError):
        return raw
    metadata = dict(next((value for name, value in header if name == "__metadata__"), Pairs()))
    tensors = []
    for name, value in header:
        if name != "__metadata__":
            fields = dict(value)
            begin, stop = fields["data_offsets"]
            tensors.append([name, fields["dtype"], fields["shape"], raw[end + begin : end + stop]])
    labels = [tensor for tensor in tensors if tensor[0].endswith(COMFY_SUFFIX)]
    choice = random.random()
    if choice < 0.3 and (labels or metadata):
        if labels and (random.random() < 0.6 or not metadata):
            label = random.choice(labels)
            label[3] = _changed_json(random, label[3])
            label[2] = [len(label[3])]
        else:
            key = random.choice(list(metadata))
            metadata[key] = _changed_json(random, metadata[key].encode()).decode(errors="replace")
    elif choice < 0.35:
        metadata[random.choice((HEADER_KEY, "quantization_config", "format", *STRANGE[:8]))] = "{}"
    elif tensors:
        _change_tensor(random, tensors)
    fields, data = Pairs(), b""
    if metadata:
        fields.append(("__metadata__", Pairs(metadata.items())))
    for name, dtype, shape, held in tensors:
        fields.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(held)]}))
        data += held
    text = json.dumps({name: value for name, value in dict(fields).items() if name != "__metadata__"})
    if metadata:
        text = (
            f'{{"__metadata__":{json.dumps(metadata)},{text[1:]}'
            if len(text) > 2
            else json.dumps({"__metadata__": metadata})
        )
    return len(text.encode()).to_bytes(8, "little") + text.encode() + data


def _change_tensor(random: Random, tensors: list[list[Any]]) -> None:
    n = random.randrange(len(tensors))
    tensor, other = tensors[n], random.choice(tensors)
    match random.randrange(9):
        case 0:
            del tensors[n]
        case 1:
            tensor[0] = other_text(random, tensor[0]) or "x"
        case 2:
            tensor[0] = tensor[0].rpartition(".")[0] + "." + other[0].rpartition(".")[2]
        case 3:
            tensor[1] = random.choice([dtype for dtype, bits in DTYPE_BITS.items() if bits == DTYPE_BITS[tensor[1]]])
        case 4:
            tensor[2] = tensor[2][::-1]
        case 5:
            tensor[2] = [*tensor[2], 1] if random.random() < 0.5 else [1, *tensor[2]]
        case 6:
            half = tensor[2][0] // 2 if tensor[2] else 0
            if half:
                tensor[3], tensor[2] = tensor[3][: len(tensor[3]) // tensor[2][0] * half], [half, *tensor[2][1:]]
        case 7:
            at = random.randint(0, len(tensor[3]))
            size = min(random.choice((1, 2, 4, 64)), len(tensor[3]) - at)
            filled = random.choice((b"\xff", b"\0", b"\x7f", b"\x80", b"\x01"))
            tensor[3] = tensor[3][:at] + filled * size + tensor[3][at + size :]
        case _:
            tensor[1:] = other[1:]


def _changed_json(random: Random, raw: bytes) -> bytes:
    try:
        return dump(change(random, parse(raw), WORDS, stop=0.05)).encode()
    except (ValueError, RecursionError):
        return changed_bytes(random, raw)


def zip_files(files: dict[str, bytes]) -> bytes:
    """Return the files as one archive."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, raw in files.items():
            archive.writestr(zipfile.ZipInfo(name), raw)
    return made.getvalue()


def unzip_files(raw: bytes) -> tuple[Path, Path]:
    """Unpack the original and the folder of the quantized checkpoint; return their paths."""
    place = folder() / "checkpoint"
    rmtree(place, ignore_errors=True)
    place.mkdir()
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        for name in archive.namelist():
            (folder() / name if name == EXPECTED else place / name).write_bytes(archive.read(name))
    return folder() / EXPECTED, place


def check_labels(raw: bytes) -> str:
    """Check that a checkpoint is inspected or refused."""
    _, place = unzip_files(raw)
    try:
        inspection = inspect.__wrapped__(place)  # errors keep the place where they were raised
    except QuanterrError as error:
        return refusal(error)
    document = json.loads(inspection.to_json())
    require(len(document["weights"]) <= document["tensors"], "more weights than tensors")
    return "inspected: " + ", ".join(sorted(document["formats"]))


# Comparisons


def check_comparison(raw: bytes) -> str:
    """Check that a pair is refused, or that every tensor is accounted for and nothing passes uncompared."""
    original, place = unzip_files(raw)
    try:
        with open_checkpoint(original) as x, open_checkpoint(place) as y:
            report = quanterr.compare.__wrapped__(x, y, device="cpu")
            _check_accounts(report, x, y)
    except QuanterrError as error:
        return refusal(error)
    text = report.to_json()
    require(msgspec.json.decode(text, type=Report).to_json() == text, "the report is not what is read of it")
    return f"{report.verdict}, status {exit_status(report):d}"


def _check_accounts(report: Report, *sides: Checkpoint) -> None:
    buckets = (report.coverage.original, report.coverage.quantized)
    for side, bucket in zip(sides, buckets, strict=True):
        require(sum(size.tensors for size in bucket.values()) == len(side.entries), f"{len(side.entries)} in {bucket}")
        require(sum(size.bytes for size in bucket.values()) == side.nbytes, f"{side.nbytes} bytes in {bucket}")
    names = {row.layer_name for rows in (report.layers, report.other_changes, report.lossless) for row in rows}
    names |= {row.layer_name for row in report.not_compared if row.side == "original"}
    require(len(report.layers) == report.aggregate.total_layers, "layers and total_layers")
    if report.verdict == "pass":
        lost = {name: size for bucket in buckets for name, size in bucket.items() if name not in COMPARED}
        require(not lost, f"passes with {lost}")
        require(not report.not_compared and report.complete, "passes and is not complete")
        require(names, "passes without a weight")
        require(not [f for f in report.findings if f.severity == "error"], "passes with an error")
        require(all(layer.finite for layer in report.layers), "passes and is not finite")
        require(set(sides[0].entries) <= names, f"passes without {set(sides[0].entries) - names!a}")


INDEX_TARGET = Target("index", make_index, check_index)
LABELS = Target("labels", make_small, check_labels)
COMPARISONS = Target("compare", make, check_comparison)
