"""Stored weights as the matrices (outputs, inputs) that recipes quantize; a stack of experts is many matrices.

Each expert of a stack is quantized separately, so that a scale per tensor is a scale per expert, as in runtimes.
A stack is stored as [experts, outputs, inputs] or, in gpt-oss, Llama 4 and Qwen3-VL-MoE, as [experts, inputs, outputs].
These models fuse gate and up, so the shapes of both stacks of a layer show the order: gate_up has twice as many outputs
as down has inputs.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from math import prod
from typing import NamedTuple

from quanterr.checkpoints import Entry
from quanterr.lazy_torch import Tensor, torch
from quanterr.recipes.base import QUANTIZED_AS, Rows
from quanterr.tensors.workspace import Workspace

MAX_KEPT_PIECES = 4  # number of pieces that each thread keeps
TRANSPOSED_KEY = "turned"

# Names of stacks and of their experts; {n} stands for a number.
STACKS = (
    (re.compile(r"(?P<head>(?:.*\.)?experts)\.(?P<last>\w+?)(?:\.weight)?"), "{head}.{n}.{last}.weight"),
    (re.compile(r"(?P<head>.*\.block_sparse_moe)\.input_linear\.weight"), "{head}.experts.{n}.gate_up_proj.weight"),
    (re.compile(r"(?P<head>.*\.block_sparse_moe)\.output_linear\.weight"), "{head}.experts.{n}.down_proj.weight"),
)
GATE_UP, DOWN = "gate_up_proj", "down_proj"


class Matrix(NamedTuple):
    """A matrix that a recipe quantizes, and how its rows are read."""

    name: str  # X.weight
    shape: tuple[int, int]  # (outputs, inputs)
    dtype: str  # one of FLOATS
    nbytes: int  # size of the stored matrix
    read: Rows


def is_stack(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is a stack of matrices, one for each expert."""
    return len(shape) == 3 and any(pattern.fullmatch(name) for pattern, _ in STACKS)


def matrices_of(name: str, entries: Mapping[str, Entry]) -> list[Matrix]:
    """Return the matrices of a weight that is stored as floats; ``entries`` are all tensors of its checkpoint."""
    entry = entries[name]
    if len(entry.shape) == 2:
        rows, cols = entry.shape
        return [Matrix(name, (rows, cols), QUANTIZED_AS[entry.dtype], entry.nbytes, open_rows(entry))]
    experts, rows, cols = entry.shape
    is_transposed = _is_transposed(name, entries)
    shape = (cols, rows) if is_transposed else (rows, cols)
    name_match, form = next((match, form) for pattern, form in STACKS if (match := pattern.fullmatch(name)))
    return [
        Matrix(
            form.format(**name_match.groupdict(), n=n),
            shape,
            QUANTIZED_AS[entry.dtype],
            entry.nbytes // experts,
            partial(_read_transposed_rows, entry, n) if is_transposed else partial(_read_rows, entry, n * rows),
        )
        for n in range(experts)
    ]


def _is_transposed(name: str, entries: Mapping[str, Entry]) -> bool:
    """Return whether a stack is stored as [experts, inputs, outputs]; False if only one of both stacks is stored."""
    names = [name.replace(*words) for words in ((DOWN, GATE_UP), (GATE_UP, DOWN))]
    gate_up, down = (entries[each].shape[1:] if each in entries else () for each in names)
    if len(gate_up) != 2 or len(down) != 2 or names[0] == names[1]:
        return False
    return gate_up[1] == 2 * down[0] and gate_up[0] == down[1]


def open_rows(entry: Entry) -> Rows:
    """Return a reader of a stored float matrix; a thread may use, not change, the last few pieces that it read."""
    return partial(_read_rows, entry, 0)


class _RowReader(threading.local):
    """The buffers of a thread: the pieces of rows that it read last, as several recipes read the same piece in turn."""

    def __init__(self) -> None:
        self.workspace = Workspace(torch.device("cpu"))
        self.kept: OrderedDict[tuple[int, int, int], tuple[Entry, str]] = OrderedDict()

    @torch.inference_mode()
    def read_rows(self, entry: Entry, first: int, stop: int) -> Tensor:
        """Return rows of a matrix, or of a stack of matrices one above the other, float32."""
        cols = entry.shape[-1]
        shape, key = (stop - first, cols), (id(entry), first, stop)
        if key in self.kept:
            return self.workspace.buffer(self.kept[key][1], shape, torch.float32)
        stored = self.workspace.read("stored", entry, first * cols, shape)
        name = self.kept.popitem(last=False)[1][1] if len(self.kept) == MAX_KEPT_PIECES else f"x{len(self.kept)}"
        rows = self.workspace.buffer(name, shape, torch.float32).copy_(stored)
        self.kept[key] = entry, name  # keeping the entry prevents reuse of its id
        return rows

    @torch.inference_mode()
    def read_transposed_rows(self, entry: Entry, expert: int, first: int, stop: int) -> Tensor:
        """Return columns of an expert's matrix as rows, float32; the matrix is kept for further columns."""
        shape = entry.shape[1:]
        matrix = self.workspace.read_cached(TRANSPOSED_KEY, entry, expert * prod(shape), shape)
        return matrix[:, first:stop].t().to(torch.float32, memory_format=torch.contiguous_format, copy=True)


_reader = _RowReader()


def _read_rows(entry: Entry, above: int, first: int, stop: int) -> Tensor:
    return _reader.read_rows(entry, above + first, above + stop)


def _read_transposed_rows(entry: Entry, expert: int, first: int, stop: int) -> Tensor:
    return _reader.read_transposed_rows(entry, expert, first, stop)
