"""AQLM: each group of weights is a sum of vectors from codebooks, times a scale.

    codes        i8, i16, i32      (rows / out, cols / in, n): indices into n codebooks; the low bits count, unsigned
    codebooks    f16, bf16, f32    (n, 2^bits, out, in): vectors for groups of out rows and in columns
    scales       f16, bf16, f32    (rows / out, 1, 1, 1), or one per group, or one per weight of a group

    weight[group] = (codebooks[0, code[0]] + codebooks[1, code[1]] + …) * scale       each sum and product rounded

Reference: Vahe1994/AQLM@e79a896e inference_lib/src/aqlm/utils.py _dequantize_weight.
"""

from functools import partial

from quanterr.formats.base import Chunk, Format, FormatMismatch, Parts, PartSpec, Values, Weight, Workspace
from quanterr.formats.shared import element_types
from quanterr.formats.shared.config_checks import check_quant_method
from quanterr.formats.shared.padding import crop
from quanterr.lazy_torch import torch
from quanterr.util.text import count

FLOATS = frozenset({"F16", "BF16", "F32"})
CODE_BITS = {"I8": 8, "I16": 16, "I32": 32}
SETTINGS = ("num_codebooks", "nbits_per_codebook", "out_group_size", "in_group_size")  # in config.json
NEEDS = {
    "codes": PartSpec(("{module}.codes",), frozenset(CODE_BITS)),
    "codebooks": PartSpec(("{module}.codebooks",), FLOATS),
    "scales": PartSpec(("{module}.scales",), FLOATS),
}


def fit(parts: Parts) -> Weight:
    """Return the weight, whose shape follows from the groups of codes."""
    codes, books, scales = parts["codes"], parts["codebooks"], parts["scales"]
    if len(codes.shape) != 3 or len(books.shape) != 4 or codes.shape[2] != books.shape[0]:
        raise FormatMismatch(
            f"AQLM has codes (rows, cols, n) and codebooks (n, 2^bits, out, in), not {codes} and {books}"
        )
    n, size, out, into = books.shape
    if size & (size - 1) or not 2 <= size <= 1 << CODE_BITS[codes.dtype]:
        raise FormatMismatch(f"{books} should hold a power of two of vectors, no more than {codes} can index")
    groups = (*codes.shape[:2], out, into)
    if len(scales.shape) != 4 or any(have not in (1, full) for have, full in zip(scales.shape, groups, strict=True)):
        raise FormatMismatch(f"its scale {scales} should be {[codes.shape[0], 1, 1, 1]}, or up to {list(groups)}")
    bits = size.bit_length() - 1
    found = dict(zip(SETTINGS, (n, bits, out, into), strict=True))
    declared = {name: parts.hints.config[name] for name in SETTINGS if name in parts.hints.config}
    other = [f"{name} {declared[name]} for {found[name]}" for name in declared if declared[name] != found[name]]
    warnings = (f"config.json declares {', '.join(other)}, but the shapes decide",) if other else ()
    return parts.weight(
        (codes.shape[0] * out, codes.shape[1] * into),
        partial(dequantize, parts),
        evidence=(f"AQLM, {count(n, 'codebook')} of {bits} bits for groups of {out} × {into}",),
        warnings=(*check_quant_method(parts, "aqlm"), *warnings),
    )


def dequantize(parts: Parts, chunk: Chunk, workspace: Workspace) -> Values:
    """Return (sum of vectors) · scale, (r, c)."""
    (_, across, n), (_, size, out, into) = parts["codes"].shape, parts["codebooks"].shape
    first, stop = chunk.row // out, -(-chunk.stop_row // out)
    codes = workspace.read("codes", parts["codes"], first * across * n, ((stop - first) * across, n))
    table = workspace.read_whole("codebooks", parts["codebooks"]).view(n, size, out * into)
    total = workspace.buffer("total", (codes.shape[0], out * into), torch.float32)
    for number in range(n):
        index = workspace.buffer("index", (codes.shape[0], 1), torch.int32).copy_(codes[:, number : number + 1])
        vectors = element_types.look_up(index.bitwise_and_(size - 1), table[number])
        total.add_(vectors) if number else total.copy_(vectors)
    entry = parts["scales"]
    if entry.shape[0] == 1:
        scales = workspace.read_whole("scales", entry)
    else:
        each = entry.n // entry.shape[0]
        scales = workspace.read("scales", entry, first * each, (stop - first, *entry.shape[1:]))
    groups = total.view(stop - first, across, out, into).mul_(scales.float())
    if out > 1:
        values = workspace.output((stop - first, out, across, into))
        groups = values.copy_(groups.transpose(1, 2))
    rows = groups.view((stop - first) * out, across * into)
    return Values(crop(rows[chunk.row - first * out : chunk.stop_row - first * out], chunk, workspace))


FORMATS = (Format("aqlm", NEEDS, fit),)
