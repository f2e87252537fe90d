"""Tensors that are not read as numbers: integers, masks, codes of an unknown layout.

    weight    any dtype of whole bytes    any shape, the same dtype and shape on both sides

Such tensors are compared bit by bit for equality. Tensors that differ are not compared further: a distance between
packed codes, taken as numbers, means nothing.
"""

from functools import partial

from quanterr.checkpoints import Entry
from quanterr.formats.base import (
    WEIGHT_SUFFIX,
    Chunk,
    Format,
    FormatMismatch,
    Parts,
    PartSpec,
    Values,
    Weight,
    Workspace,
)
from quanterr.lazy_torch import torch

CODES = frozenset({"BOOL", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
STATE = ".quant_state.bitsandbytes__"  # part of the name of a tensor that bitsandbytes stores with each 4-bit weight


def fit(parts: Parts) -> Weight:
    """Return a weight of any shape; refuse a weight that has a label."""
    codes = parts["codes"]
    if parts.hints.labels:
        raise FormatMismatch(f"{parts.hints.labels[0]}, but the codes are {codes.dtype}")
    if _lacks_state(parts):
        raise FormatMismatch(
            f"{codes} are 4-bit codes of bitsandbytes, of which absmax (their scales), quant_map and quant_state are "
            "missing: bitsandbytes cannot load this layer; save the quantized model again, with all tensors of its "
            "state_dict"
        )
    return verbatim(parts.name, codes, f"{codes.dtype} that differ: integers, or codes of an unknown layout")


def _lacks_state(parts: Parts) -> bool:
    """Return whether this is a column of bytes in a checkpoint of bitsandbytes' 4-bit codes, without their scales."""
    codes, config = parts["codes"], parts.hints.config
    if codes.dtype != "U8" or len(codes.shape) != 2 or codes.shape[1] != 1 or not codes.name.endswith(WEIGHT_SUFFIX):
        return False
    declared = any(config.get(key) is True for key in ("load_in_4bit", "_load_in_4bit"))
    return declared or any(STATE in name for name in parts.checkpoint)


def verbatim(name: str, codes: Entry, refusal: str) -> Weight:
    """Return an entry of whole bytes as a weight; ``refusal`` explains why it is not compared where it differs."""
    parts = Parts(name, {"codes": codes}, format="verbatim")
    return parts.weight(codes.shape, partial(dequantize, parts), encoding="bits", needs_float64=True, refusal=refusal)


def dequantize(parts: Parts, chunk: Chunk, workspace: Workspace) -> Values:
    """Return the stored bits as float64 integers, (r, c), or (r, 2c) for elements of 64 bits."""
    entry = parts["codes"]
    first = chunk.row * parts.matrix[1] + chunk.col
    stored = workspace.read("stored", entry, first, chunk.shape)
    integers = stored.view(
        getattr(torch, f"int{8 * min(stored.dtype.itemsize, 4)}")
    )  # float64 represents these integers exactly
    return Values(integers.double())


FORMATS = (Format("verbatim", {"codes": PartSpec(("{weight}",), CODES)}, fit),)
