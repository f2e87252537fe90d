"""Biases in Nunchaku files, in the order of their layer's rows.

    X.bias    bf16, f16    (rows,), of a layer with X.qweight and X.wscales

    qweight i8     in the order of shared/nunchaku_order.py, padded to a multiple of 128
    qweight i32    interleaved like the rows of a modulation layer, shared/adanorm_rows.py; the second part and the last
                   but one, which are scales, have 1 added: it is subtracted in float32

After a GELU the runtime shifts activations, and a term of the low-rank branch was added to the bias: this difference
remains.

Reference: mit-han-lab/deepcompressor@69f3473 backend/nunchaku/utils.py; nunchaku-tech/nunchaku@3a3cc3d
nunchaku/models/normalization.py.
"""

from functools import partial

from quanterr.formats.base import Chunk, Format, Parts, PartSpec, Values, Weight, Workspace
from quanterr.formats.shared import element_types
from quanterr.formats.shared.adanorm_rows import count_parts_by_name, find_stored_rows
from quanterr.formats.shared.nunchaku_order import NUMBER_TILES, TILE
from quanterr.kernel.grid import Grid

HALVES = frozenset({"BF16", "F16"})
NEEDS = {"codes": PartSpec(("{weight}",), HALVES)}
BIAS = ".bias"


def fit(parts: Parts) -> Weight | None:
    """Return the bias if a layer in Nunchaku's order is stored with it; refuse a bias of the wrong length."""
    module = parts.name.removesuffix(BIAS)
    qweight = parts.checkpoint.get(f"{module}.qweight")
    if module == parts.name or qweight is None or f"{module}.wscales" not in parts.checkpoint:
        return None
    bias, interleaved = parts.codes, count_parts_by_name(module)
    in_fragments = qweight.dtype == "I8"
    if len(bias.shape) != 1 or bias.n % (TILE if in_fragments else interleaved):
        refusal = f"a bias of {qweight} should have one element per row, not {bias}"
        as_stored = element_types.read_one_by_one(parts)
        return parts.weight(bias.shape, as_stored, encoding="floats", refusal=refusal, format="dense")
    if in_fragments:
        shape = parts.hints.shape or bias.shape
        if len(shape) != 1 or -(-shape[0] // TILE) * TILE != bias.n:
            shape = bias.shape
        return _make_weight(parts, shape, None, "in fragments")
    if qweight.dtype != "I32":
        return None
    return _make_weight(parts, bias.shape, interleaved, f"interleaved by {interleaved}")


def _make_weight(parts: Parts, shape: tuple[int, ...], interleaved: int | None, declared: str) -> Weight:
    return parts.weight(shape, partial(dequantize, parts, interleaved), evidence=(f"a bias {declared}",))


def dequantize(parts: Parts, interleaved: int | None, chunk: Chunk, workspace: Workspace) -> Values:
    """Return the stored numbers in order, (1, c)."""
    bias = parts.codes
    if interleaved is None:
        values = Grid(bias, key="bias", tiles=NUMBER_TILES)(Chunk(0, bias.n, 0, 1), workspace).view(-1)
    else:
        stored = workspace.read_whole("bias", bias)
        values = stored[find_stored_rows(0, bias.n, bias.n, interleaved, stored.device)].float()
        if interleaved > 1:  # these parts are scales, to which 1 was added
            values.view(interleaved, -1)[[1, interleaved - 2] if interleaved > 3 else [1]] -= 1
    return Values(values[chunk.col : chunk.stop_col].view(1, -1))


FORMATS = (Format("nunchaku_bias", NEEDS, fit),)
