"""Stored weights as the matrices (outputs, inputs) that recipes quantize; a stack of experts is many matrices.

Each expert of a stack gets the recipe by itself, so that a scale per tensor is a scale per expert, as in runtimes.
A stack is stored as [experts, outputs, inputs] or, in gpt-oss, Llama 4 and Qwen3-VL-MoE, as [experts, inputs, outputs].
If gate and up are fused, as in these models, the shapes of both stacks of a layer show which: gate_up has twice as many
outputs as down has inputs.
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

PIECES_KEPT = 4  # pieces that each thread keeps
TURNED_KEY = "turned"

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
    nbytes: int  # as stored
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
    turned = _is_turned(name, entries)
    shape = (cols, rows) if turned else (rows, cols)
    found, form = next((match, form) for pattern, form in STACKS if (match := pattern.fullmatch(name)))
    return [
        Matrix(
            form.format(**found.groupdict(), n=n),
            shape,
            QUANTIZED_AS[entry.dtype],
            entry.nbytes // experts,
            partial(_read_turned_rows, entry, n) if turned else partial(_read_rows, entry, n * rows),
        )
        for n in range(experts)
    ]


def _is_turned(name: str, entries: Mapping[str, Entry]) -> bool:
    """Return whether a stack is stored as [experts, inputs, outputs]; False for a stack without its partner."""
    names = [name.replace(*words) for words in ((DOWN, GATE_UP), (GATE_UP, DOWN))]
    gate_up, down = (entries[each].shape[1:] if each in entries else () for each in names)
    if len(gate_up) != 2 or len(down) != 2 or names[0] == names[1]:
        return False
    return gate_up[1] == 2 * down[0] and gate_up[0] == down[1]


def open_rows(entry: Entry) -> Rows:
    """Return a reader of a stored float matrix; its read-only buffers are valid until the thread reads a few others."""
    return partial(_read_rows, entry, 0)


class _RowReader(threading.local):
    """A thread's buffers: the rows it read last, which several recipes request in turn."""

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
        name = self.kept.popitem(last=False)[1][1] if len(self.kept) == PIECES_KEPT else f"x{len(self.kept)}"
        found = self.workspace.buffer(name, shape, torch.float32).copy_(stored)
        self.kept[key] = entry, name  # keeping the entry prevents reuse of its id
        return found

    @torch.inference_mode()
    def read_turned_rows(self, entry: Entry, expert: int, first: int, stop: int) -> Tensor:
        """Return columns of an expert's matrix as rows, float32; the matrix is kept for further columns."""
        shape = entry.shape[1:]
        matrix = self.workspace.read_cached(TURNED_KEY, entry, expert * prod(shape), shape)
        return matrix[:, first:stop].t().to(torch.float32, memory_format=torch.contiguous_format, copy=True)


_reader = _RowReader()


def _read_rows(entry: Entry, above: int, first: int, stop: int) -> Tensor:
    return _reader.read_rows(entry, above + first, above + stop)


def _read_turned_rows(entry: Entry, expert: int, first: int, stop: int) -> Tensor:
    return _reader.read_turned_rows(entry, expert, first, stop)
