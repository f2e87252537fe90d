"""Whatever is not read as numbers: integers, masks, codes of an unknown layout.

    weight    any dtype of whole bytes    any shape, the same dtype and shape on both sides

Held against each other for equality, bit by bit. Where they differ they are not compared: the distance of
packed codes as numbers means nothing.
"""

from functools import partial

import torch

from quanterr.checkpoints import Entry
from quanterr.formats.base import Chunk, Format, FormatMismatch, Part, Parts, Values, Weight, Workspace

CODES = frozenset({"BOOL", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by bytes; a float64 holds each exactly


def fit(parts: Parts) -> Weight:
    """Any shape fits, without a label."""
    codes = parts["codes"]
    if parts.hints.labels:
        raise FormatMismatch(f"{parts.hints.labels[0]}, but the codes are {codes.dtype}")
    return verbatim(parts.name, codes, f"{codes.dtype} that differ: integers, or codes of an unknown layout")


def verbatim(name: str, codes: Entry, refusal: str) -> Weight:
    """Any entry of whole bytes; ``refusal`` is why it is not compared where it differs."""
    parts = Parts(name, {"codes": codes}, format="verbatim")
    return parts.weight(codes.shape, partial(dequantize, parts), encoding="bits", needs_float64=True, refusal=refusal)


def dequantize(parts: Parts, chunk: Chunk, workspace: Workspace) -> Values:
    """The stored bits as float64 integers, (r, c), or (r, 2c) where an element has 64."""
    entry = parts["codes"]
    first = chunk.row * parts.matrix[1] + chunk.col
    stored = workspace.read("stored", entry, first, chunk.shape)
    integers = stored.view(INTEGERS[min(stored.dtype.itemsize, 4)])
    return Values(workspace.output(tuple(integers.shape), torch.float64).copy_(integers))


FORMATS = (Format("verbatim", {"codes": Part(("{weight}",), CODES)}, fit),)
