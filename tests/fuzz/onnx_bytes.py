"""An ONNX model: an accepted one reads only its own files, and each of its weights is read or unsupported."""

from functools import cache
from pathlib import Path
from random import Random

from support.onnx_bytes import FLOAT, INT32, external, field, graph, model, node, tensor

from fuzz.finding import Target, folder, refusal, require
from fuzz.mutating import changed_seed
from quanterr.checkpoints import open_checkpoint
from quanterr.errors import FormatMismatch, QuanterrError
from quanterr.formats.reading import Reader
from quanterr.pairing.side import CheckpointSide

GOLDEN = Path(__file__).parents[1] / "golden"
MAX_READ = 1 << 16  # elements of a weight


@cache
def _seeds() -> tuple[bytes, ...]:
    """Return the golden models, and one with external data, numbers stored one by one and a graph in a node."""
    inner = field(5, field(1, "then_branch") + field(6, graph([node("MatMul", ["x", "onnx::MatMul_1"], name="/a/M")])))
    beside = external(location="beside.bin", offset=4, length=24)
    tensors = [
        tensor("onnx::MatMul_1", FLOAT, [2, 3], None, *beside),
        tensor("b.weight", INT32, [2], None, field(5, b"\x01\x02")),
    ]
    golden = (path.read_bytes() for path in sorted(GOLDEN.glob("onnx_*/*.onnx")))
    return *golden, model([field(4, "If") + inner], tensors)


def make(random: Random) -> bytes:
    """Return a file with changed bytes."""
    return changed_seed(random, _seeds())


def check(raw: bytes) -> str:
    """Check that a file is refused as unreadable, or that its weights are read, or refused one by one."""
    path = folder() / "model.onnx"
    path.write_bytes(raw)
    (folder() / "beside.bin").write_bytes(bytes(32))
    try:
        with open_checkpoint(path) as checkpoint:
            for entry in checkpoint.entries.values():
                within = entry.offset >= 0 and entry.offset + entry.nbytes <= entry.file.size
                require(within or entry.unknown, f"{entry.name!a} is outside of its file")
            side = CheckpointSide("checkpoint", checkpoint)
            side.attach_siblings()
            return f"taken, {sum(_is_read(side, name) for name in side.codes)} weights"
    except QuanterrError as error:
        return refusal(error)


def _is_read(side: CheckpointSide, name: str) -> bool:
    try:
        weight = side.recognize(name)
    except FormatMismatch:
        return False
    if 0 < weight.n <= MAX_READ and weight.encoding != "bits":
        require(Reader().read_whole(weight).shape == weight.matrix, f"{name!a} is not read whole")
    return True


TARGET = Target("onnx", make, check)
