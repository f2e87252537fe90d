"""How much each input of a weight matters: the mean squares of activations that an importance matrix holds.

    weighted error    Σ_j a_j Σ_i e_ij²,   a_j = E[activation_j²]        over the columns j of a weight

which is the expected squared error of the outputs, were the inputs uncorrelated and without mean. Two kinds of
files, both written by llama-imatrix:

    GGUF       general.type "imatrix"; X.in_sum2 (matrices, columns), X.counts (matrices, 1); a = in_sum2 / counts
    legacy     i32 entries; each: i32 length, name, i32 calls, i32 values, f32 values; a = value / calls

A stack of experts has a matrix for each. Where counts are 0 nothing is known: a is 1, and a finding says so.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) tools/imatrix/imatrix.cpp, src/llama-quant.cpp (load_imatrix).
"""

import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from quanterr.checkpoints import Checkpoint, open_checkpoint
from quanterr.checkpoints.base import StoredFile
from quanterr.errors import CheckpointError
from quanterr.pairing.gguf import llama_name
from quanterr.pairing.gguf_names import architectures
from quanterr.pairing.names import EXPERTS, atoms_of, canonical
from quanterr.pairing.plan import Covered, Pair, Plan
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace
from quanterr.util.text import display

Means = Mapping[str, tuple[Tensor, Tensor]]  # what read_importance() returns

SUMS, COUNTS = ".in_sum2", ".counts"
GGUF_MAGIC = b"GGUF"
MAX_ENTRIES = 1 << 20
MAX_NAME = 1 << 12
MAX_VALUES = 1 << 30
_SINGLE_EXPERT = re.compile(rf"(?:^|\.){EXPERTS}\.(\d{{1,9}})\.")  # in a path


@dataclass(frozen=True, slots=True)
class Importance:
    """Of the columns of one weight: (matrices, columns) float32; ``rows`` of the weight share a matrix."""

    columns: Tensor
    rows: int
    uncovered: int  # matrices without a count

    def of(self, chunk: Chunk) -> Tensor:
        """For the elements of a chunk: (1 or r, c)."""
        first, last = chunk.row // self.rows, (chunk.stop_row - 1) // self.rows
        columns = self.columns[:, chunk.col : chunk.stop_col]
        if first == last:
            return columns[first : first + 1]
        return columns[torch.arange(chunk.row, chunk.stop_row) // self.rows]


def read_importance(path: str | os.PathLike[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """By llama.cpp's name of the weight: mean squares, (matrices, columns) float32, and counts, (matrices,).

    A legacy file does not separate the matrices of a stack: it gives one matrix, (1, values).

    Raises:
        CheckpointError: no importance matrix, or a damaged one.
    """
    file = StoredFile(Path(path))
    try:
        if file.read(0, min(4, file.size)) != GGUF_MAGIC:
            return _legacy(file)
    finally:
        file.close()
    with open_checkpoint(path) as checkpoint:
        return _of_gguf(checkpoint)


def _of_gguf(checkpoint: Checkpoint) -> dict[str, tuple[Tensor, Tensor]]:
    kind = checkpoint.gguf.values.get("general.type") if checkpoint.gguf else None
    if kind != "imatrix":
        raise CheckpointError(f"{display(checkpoint.path)}: not an importance matrix: general.type is {kind!r}")
    found, workspace = {}, Workspace(torch.device("cpu"))
    for name, entry in checkpoint.entries.items():
        if not name.endswith(SUMS):
            continue
        weight = name.removesuffix(SUMS)
        counts = checkpoint.entries.get(weight + COUNTS)
        if entry.dtype != "F32" or counts is None or counts.dtype != "F32":
            raise CheckpointError(f"{display(checkpoint.path)}: {entry}: expected F32, with {display(weight + COUNTS)}")
        sums = workspace.read("sums", entry, 0, (entry.n,)).clone()
        calls = workspace.read("counts", counts, 0, (counts.n,)).clone()
        if not calls.numel() or sums.numel() % calls.numel():
            raise CheckpointError(f"{display(checkpoint.path)}: {entry} does not divide into {calls.numel()} matrices")
        sums = sums.view(calls.numel(), -1)
        means = torch.where(calls[:, None] > 0, sums / calls[:, None].clamp(min=1), torch.ones(()))
        found[weight] = _checked(checkpoint.path, weight, means), calls
    return found


def _legacy(file: StoredFile) -> dict[str, tuple[Tensor, Tensor]]:
    at = 0

    def whole(what: str, limit: int, least: int = 0) -> int:
        nonlocal at
        if at + 4 > file.size:
            raise CheckpointError(f"{file}: not an importance matrix, or truncated: {what} is missing at byte {at}")
        (number,) = struct.unpack("<i", file.read(at, 4))
        at += 4
        if not least <= number <= limit:
            raise CheckpointError(f"{file}: not an importance matrix: {what} is {number} at byte {at - 4}")
        return int(number)

    def raw(n: int, what: str) -> bytes:
        nonlocal at
        if at + n > file.size:
            raise CheckpointError(f"{file}: truncated: {what} of {n} bytes does not fit at byte {at}")
        at += n
        return file.read(at - n, n)

    found = {}
    for _ in range(whole("the number of entries", MAX_ENTRIES, 1)):
        name = raw(whole("the length of a name", MAX_NAME, 1), "a name").decode(errors="replace")
        calls = whole(f"the count of {display(name)}", (1 << 31) - 1)
        n = whole(f"the number of values of {display(name)}", MAX_VALUES, 1)
        values = torch.frombuffer(bytearray(raw(4 * n, f"{display(name)}")), dtype=torch.float32)
        means = values / calls if calls else torch.ones(n)
        found[name] = _checked(str(file.path), name, means[None]), torch.tensor([float(calls)])
    return found


def _checked(path: str, name: str, means: Tensor) -> Tensor:
    if not means.numel():
        raise CheckpointError(f"{display(path)}: {display(name)}: mean squares of no column")
    if not isfinite(float(means.sum())) or float(means.min()) < 0:
        raise CheckpointError(f"{display(path)}: {display(name)}: mean squares that are negative or not finite")
    return means


def with_importance(plan: Plan, found: Means, architecture: str) -> Plan:
    """The plan, each matrix with the importance of its columns, and which weights the file covers."""
    pairs, covered = [], []
    for pair in plan.pairs:
        importance = _importance_of(pair, found, architecture) if len(pair.original.shape) > 1 else None
        pairs.append(replace(pair, importance=importance.of) if importance else pair)
        if len(pair.original.shape) > 1:
            covered.append(Covered(pair.name, importance.uncovered if importance else None))
    return replace(plan, pairs=pairs, covered=covered)


def _importance_of(pair: Pair, found: Means, architecture: str) -> Importance | None:
    """That of the weight's columns; of a single expert's its own matrix out of those of the stack."""
    others = [pair.codes[1][0].name, pair.codes[0][0].name]
    return _of_weight(pair.name, pair.original.shape, pair.original.matrix, others, found, architecture)


def importance_of_columns(name: str, shape: tuple[int, ...], found: Means, architecture: str) -> Tensor | None:
    """That of the columns of a matrix, (cols,) float32; None where the file does not say."""
    importance = _of_weight(name, shape, (shape[0], shape[1]), [], found, architecture)
    return None if importance is None or len(importance.columns) > 1 else importance.columns[0]


def weighing(original: Checkpoint, means: Means | None) -> Callable[[str, tuple[int, ...]], Tensor | None] | None:
    """The importance of the columns of each weight of an original, where a file says it."""
    return (
        None if means is None else partial(importance_of_columns, found=means, architecture=architecture_of(original))
    )


def _of_weight(
    own: str,
    shape: tuple[int, ...],
    matrix: tuple[int, int],
    others: list[str],
    found: Means,
    architecture: str,
) -> Importance | None:
    """Of the weight ``own``, which has ``others`` as names too."""
    rows, cols = matrix
    path = atoms_of(own, shape).names[0]
    atom = llama_name(architecture, path)
    names = [*others, own, f"{atom}.weight"]
    if (first := _expert_of(path)) is not None:
        names.append(f"{atom.removesuffix(f'.{first}')}.weight")
    name = next((name for name in names if name in found), None)
    if name is None:
        return None
    means, counts = found[name]
    if means.numel() % cols:
        return None
    means, counts = (
        means.view(-1, cols),
        counts.expand(means.numel() // cols),
    )  # a legacy file does not separate matrices
    if (expert := _expert_of(own)) is not None and len(means) > 1:
        means, counts = means[expert : expert + 1], counts[expert : expert + 1]
    if not len(means) or rows % len(means):
        return None
    return Importance(means.contiguous(), rows // len(means), int((counts == 0).sum()))


def _expert_of(name: str) -> int | None:
    """The number of a single expert."""
    found = _SINGLE_EXPERT.search(canonical(name)[0])
    return int(found[1]) if found else None


def architecture_of(*checkpoints: Checkpoint) -> str:
    """llama.cpp's name for the architecture: a GGUF file says it, or the model_type of config.json; else llama."""
    for checkpoint in checkpoints:
        if checkpoint.gguf and checkpoint.gguf.architecture in architectures():
            return checkpoint.gguf.architecture
    for checkpoint in checkpoints:
        config = checkpoint.config.get("config.json")
        model = config.get("model_type") if isinstance(config, dict) else None
        if model in architectures():
            return str(model)
    return "llama"
