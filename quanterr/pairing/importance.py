"""Importance matrices: the mean square of each input (activation) of a weight, and the errors that it weights.

    weighted error    Σ_j a_j Σ_i e_ij²,   a_j = E[activation_j²]        over the columns j of a weight

This is the expected squared error of the outputs if the inputs are uncorrelated and have zero mean. llama-imatrix
writes two kinds of files:

    GGUF       general.type "imatrix"; X.in_sum2 (matrices, columns), X.counts (matrices, 1); a = in_sum2 / counts
    legacy     i32 entries; each: i32 length, name, i32 calls, i32 values, f32 values; a = value / calls

A stack of experts has one matrix per expert. If a count is 0, a is unknown: it is set to 1, and a finding reports it.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) tools/imatrix/imatrix.cpp, src/llama-quant.cpp (load_imatrix).
"""

import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path

from msgspec.structs import replace

from quanterr.checkpoints import Checkpoint, open_checkpoint
from quanterr.checkpoints.base import CheckpointFile
from quanterr.errors import CheckpointError
from quanterr.lazy_torch import Tensor, torch
from quanterr.pairing.conversion import to_llama_name
from quanterr.pairing.converters.gguf_names import architectures
from quanterr.pairing.model import ImportanceCoverage, Pairing
from quanterr.pairing.names import EXPERTS, atoms_of, canonicalize
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import read_entry
from quanterr.util.text import display

Means = Mapping[str, tuple[Tensor, Tensor]]  # the result of read_importance()

SUMS, COUNTS = ".in_sum2", ".counts"
GGUF_MAGIC = b"GGUF"
MAX_ENTRIES = 1 << 20
MAX_NAME_BYTES = 1 << 12
MAX_VALUES = 1 << 30
_SINGLE_EXPERT = re.compile(rf"(?:^|\.){EXPERTS}\.(\d{{1,9}})\.")  # a single expert in a path


@dataclass(frozen=True, slots=True)
class Importance:
    """The importance of one weight's columns, (matrices, columns) float32; each matrix covers ``rows`` rows."""

    columns: Tensor
    rows: int
    uncovered: int  # number of matrices whose count is 0

    def of(self, chunk: Chunk) -> Tensor:
        """Return the importance of a chunk's elements, (1 or r, c) float32."""
        first, last = chunk.row // self.rows, (chunk.stop_row - 1) // self.rows
        columns = self.columns[:, chunk.col : chunk.stop_col]
        if first == last:
            return columns[first : first + 1]
        return columns[torch.arange(chunk.row, chunk.stop_row) // self.rows]


def read_importance(path: str | os.PathLike[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Read an importance matrix of a model.

    Maps llama.cpp's name of each weight to mean squares, (matrices, columns) float32, and counts, (matrices,) float32.
    A legacy file does not separate the matrices of a stack: all values are one matrix, (1, values).

    Raises:
        CheckpointError: the file is not an importance matrix, or is damaged.
    """
    file = CheckpointFile(Path(path))
    try:
        if file.read(0, min(4, file.size)) != GGUF_MAGIC:
            return _read_legacy(file)
    finally:
        file.close()
    with open_checkpoint(path) as checkpoint:
        return _read_gguf(checkpoint)


def _read_gguf(checkpoint: Checkpoint) -> dict[str, tuple[Tensor, Tensor]]:
    file_type = checkpoint.gguf.values.get("general.type") if checkpoint.gguf else None
    if file_type != "imatrix":
        raise CheckpointError(f"{display(checkpoint.path)}: not an importance matrix: general.type is {file_type!r}")
    importance = {}
    for name, entry in checkpoint.entries.items():
        if not name.endswith(SUMS):
            continue
        weight = name.removesuffix(SUMS)
        counts = checkpoint.entries.get(weight + COUNTS)
        if entry.dtype != "F32" or counts is None or counts.dtype != "F32":
            raise CheckpointError(f"{display(checkpoint.path)}: {entry}: expected F32, with {display(weight + COUNTS)}")
        sums, calls = read_entry(entry).flatten(), read_entry(counts).flatten()
        if not calls.numel() or sums.numel() % calls.numel():
            raise CheckpointError(f"{display(checkpoint.path)}: {entry} does not divide into {calls.numel()} matrices")
        sums = sums.view(calls.numel(), -1)
        means = torch.where(calls[:, None] > 0, sums / calls[:, None].clamp(min=1), torch.ones(()))
        importance[weight] = _check_means(checkpoint.path, weight, means), calls
    return importance


def _read_legacy(file: CheckpointFile) -> dict[str, tuple[Tensor, Tensor]]:
    at = 0

    def read_int(what: str, limit: int, minimum: int = 0) -> int:
        nonlocal at
        if at + 4 > file.size:
            raise CheckpointError(f"{file}: not an importance matrix, or truncated: {what} is missing at byte {at}")
        (number,) = struct.unpack("<i", file.read(at, 4))
        at += 4
        if not minimum <= number <= limit:
            raise CheckpointError(f"{file}: not an importance matrix: {what} is {number} at byte {at - 4}")
        return int(number)

    def read_bytes(n: int, what: str) -> bytes:
        nonlocal at
        if at + n > file.size:
            raise CheckpointError(f"{file}: truncated: {what} of {n} bytes does not fit at byte {at}")
        at += n
        return file.read(at - n, n)

    importance = {}
    for _ in range(read_int("the number of entries", MAX_ENTRIES, 1)):
        name = read_bytes(read_int("the length of a name", MAX_NAME_BYTES, 1), "a name").decode(errors="replace")
        calls = read_int(f"the count of {display(name)}", (1 << 31) - 1)
        n = read_int(f"the number of values of {display(name)}", MAX_VALUES, 1)
        values = torch.frombuffer(bytearray(read_bytes(4 * n, f"{display(name)}")), dtype=torch.float32)
        means = values / calls if calls else torch.ones(n)
        importance[name] = _check_means(str(file.path), name, means[None]), torch.tensor([float(calls)])
    return importance


def _check_means(path: str, name: str, means: Tensor) -> Tensor:
    if not means.numel():
        raise CheckpointError(f"{display(path)}: {display(name)}: no mean squares")
    if not isfinite(float(means.sum())) or float(means.min()) < 0:
        raise CheckpointError(f"{display(path)}: {display(name)}: mean squares that are negative or not finite")
    return means


def attach_importance(pairing: Pairing, means: Means, architecture: str) -> Pairing:
    """Return the pairing with the importance of each matrix's columns, and a record of how far the file covers them."""
    pairs, covered = [], []
    for pair in pairing.pairs:
        x, importance = pair.original, None
        if len(x.shape) > 1:
            others = [pair.quantized_codes[0].name, pair.original_codes[0].name]
            importance = _find_importance(pair.name, x.shape, x.matrix, others, means, architecture)
            covered.append(ImportanceCoverage(pair.name, importance.uncovered if importance else None))
        pairs.append(replace(pair, importance=importance.of) if importance else pair)
    return replace(pairing, pairs=pairs, covered=covered)


def find_column_importance(name: str, shape: tuple[int, ...], means: Means, architecture: str) -> Tensor | None:
    """Find the importance of a matrix's columns, (cols,) float32; None if the file has none."""
    importance = _find_importance(name, shape, (shape[0], shape[1]), [], means, architecture)
    return None if importance is None or len(importance.columns) > 1 else importance.columns[0]


def make_importance_lookup(
    original: Checkpoint, means: Means | None
) -> Callable[[str, tuple[int, ...]], Tensor | None] | None:
    """Return a function that maps a weight's name and shape to its column importance; None without ``means``."""
    return (
        None if means is None else partial(find_column_importance, means=means, architecture=architecture_of(original))
    )


def _find_importance(
    name_of_weight: str,
    shape: tuple[int, ...],
    matrix: tuple[int, int],
    others: list[str],
    listed_means: Means,
    architecture: str,
) -> Importance | None:
    """Find the importance of a weight, which the file may list under its name or one of ``others``."""
    rows, cols = matrix
    path = atoms_of(name_of_weight, shape).names[0]
    atom = to_llama_name(architecture, path)
    names = [*others, name_of_weight, f"{atom}.weight"]
    if (first := _parse_expert(path)) is not None:
        names.append(f"{atom.removesuffix(f'.{first}')}.weight")
    name = next((name for name in names if name in listed_means), None)
    if name is None:
        return None
    means, counts = listed_means[name]
    if means.numel() % cols or len(counts) not in (1, means.numel() // cols):
        return None
    means, counts = (
        means.view(-1, cols),
        counts.expand(means.numel() // cols),
    )  # a legacy file does not separate matrices
    if (expert := _parse_expert(name_of_weight)) is not None and len(means) > 1:
        means, counts = means[expert : expert + 1], counts[expert : expert + 1]
    if not len(means) or rows % len(means):
        return None
    return Importance(means.contiguous(), rows // len(means), int((counts == 0).sum()))


def _parse_expert(name: str) -> int | None:
    """Return the number of a single expert in a weight's name; None if there is none."""
    match = _SINGLE_EXPERT.search(canonicalize(name)[0])
    return int(match[1]) if match else None


def architecture_of(*checkpoints: Checkpoint) -> str:
    """Return llama.cpp's name of the architecture: from a GGUF file, else model_type in config.json, else ``llama``."""
    for checkpoint in (each.source or each for each in checkpoints):
        if checkpoint.gguf and checkpoint.gguf.architecture in architectures():
            return checkpoint.gguf.architecture
    for checkpoint in checkpoints:
        config = checkpoint.config.get("config.json")
        model = config.get("model_type") if isinstance(config, dict) else None
        if model in architectures():
            return str(model)
    return "llama"
