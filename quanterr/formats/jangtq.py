"""JANGTQ: the codes of rotated rows for a codebook that follows from the number of columns, and a norm for each row.

    tq_packed    u32         (rows, words) or (experts, rows, words): 32 // b codes of b bits in a word, low bits first
    tq_norms     f16, f32    (rows,) or (experts, rows)
    tq_bits      u8, i32     b: 1 to 8

    rotated = codebook[code] * norm
    weight  = rotated @ H / sqrt(n) * sign, for blocks of n columns: Sylvester's H    float64, rounded once

Columns are cut into blocks of powers of two, the largest first: 192 = 128 + 64. Signs are those of NumPy's generator,
default_rng(seed).choice, with mxtq_seed of jang_config.json, or 42. The codebook has the centroids of Lloyd's algorithm
for the distribution of a coordinate on the unit sphere, (1 - x^2)^((cols - 3) / 2), on a grid of 10,000 points:
at most 200 steps from 2^b numbers evenly between -3 / sqrt(cols) and 3 / sqrt(cols).

Reference: jjang-ai/jangq@44a3c554 jang-tools/jang_tools/turboquant/linear.py, codebook.py, rotation.py, pipeline.py.
"""

from functools import cache, partial
from importlib.util import find_spec
from math import prod, sqrt

from quanterr.checkpoints import Entry
from quanterr.formats.base import Chunk, Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared.custom import Custom, Stored
from quanterr.formats.shared.hadamard import multiply
from quanterr.formats.shared.padding import check_width
from quanterr.kernel.packing import WORD_BITS, CodePacking
from quanterr.lazy_torch import Tensor, torch

SEED = 42
GRID, STEPS = 10_000, 200
TOLERANCES = (1e-10, 1e-5)  # absolute and relative change of centroids with which the algorithm ends
NEEDS = {
    "codes": PartSpec(("{module}.tq_packed",), frozenset({"U32"})),
    "norms": PartSpec(("{module}.tq_norms",), frozenset({"F16", "F32"})),
    "bits": PartSpec(("{module}.tq_bits",), frozenset({"U8", "I32"})),
}


def fit(parts: Parts) -> Weight:
    """Return the weight; if its last word is not full, the original gives the number of columns."""
    codes, norms, bits = parts.codes, parts["norms"], _read_bits(parts["bits"])
    if len(codes.shape) not in (2, 3) or norms.shape != codes.shape[:-1] or not codes.n:
        raise FormatMismatch(f"{norms} should have a number for each row of {codes}")
    codes_per_word, original_cols = WORD_BITS // bits, (parts.hints.shape or (0,))[-1]
    cols = original_cols if -(-original_cols // codes_per_word) == codes.shape[-1] else codes.shape[-1] * codes_per_word
    shape = (*codes.shape[:-1], cols)
    check_width(parts, shape)
    seed = parts.hints.config.get("mxtq_seed")
    decode = partial(_decode, bits, cols, seed if isinstance(seed, int) and seed >= 0 else SEED)
    if find_spec("numpy") is None:
        raise FormatMismatch("its signs are those of NumPy's generator: pip install numpy")
    height = shape[1] if len(shape) == 3 else 1
    entries = {"codes": codes, "norms": norms}
    values = Custom(entries, decode, height, prod(shape[:-1]) // height, frozenset(entries))
    return parts.weight(shape, values, code_bits=bits, evidence=(f"{bits} bits, {cols} columns rotated",))


def _read_bits(entry: Entry) -> int:
    bits = int.from_bytes(entry.read(), "little") if entry.n == 1 else 0
    if not 1 <= bits <= 8:
        raise FormatMismatch(f"its {entry} should be one number of bits from 1 to 8")
    return bits


def _decode(bits: int, cols: int, seed: int, stored: Stored, chunk: Chunk) -> Tensor:
    """Return the values of whole rows, (r, cols) float32."""
    packed = stored["codes"].reshape(-1, stored["codes"].shape[-1])
    codes = CodePacking("floor", bits).unpack(packed, 0, cols)
    norms, signs = stored["norms"].reshape(-1).double(), _make_signs(cols, seed).to(packed.device)
    rotated = _make_codebook(cols, bits).to(packed.device)[codes.int()]
    values = torch.empty(rotated.shape, dtype=torch.float32, device=packed.device)
    start = 0
    for place in reversed(range(cols.bit_length())):
        if size := cols & 1 << place:
            block = slice(start, start + size)
            values[:, block] = multiply(
                rotated[:, block].contiguous(), size, 1, (norms / sqrt(size), signs[block].clone())
            )
            start += size
    return values


@cache
def _make_signs(cols: int, seed: int) -> Tensor:
    """Return the signs of columns, (cols,) float64."""
    from numpy.random import default_rng

    return torch.tensor(default_rng(seed).choice([-1.0, 1.0], size=cols).tolist(), dtype=torch.float64)


@cache
def _make_codebook(cols: int, bits: int) -> Tensor:
    """Return the centroids, (2^bits,) float32."""
    grid = torch.linspace(-1, 1, GRID, dtype=torch.float64)
    density = ((1 - grid.square()).clamp(min=1e-30).log() * ((cols - 3) / 2)).exp() if cols > 2 else grid * 0 + 0.5
    density /= torch.trapezoid(density, grid)
    centroids = torch.linspace(-1, 1, 1 << bits, dtype=torch.float64) * (3 / sqrt(cols))
    for _ in range(STEPS):
        inner = torch.searchsorted(grid, (centroids[:-1] + centroids[1:]) / 2).tolist()
        moved = centroids.clone()
        for n, (first, stop) in enumerate(zip([0, *inner], [*inner, GRID], strict=True)):
            if stop - first > 1:
                x, y = grid[first:stop], density[first:stop]
                moved[n] = torch.trapezoid(x * y, x) / torch.trapezoid(y, x).clamp(min=1e-10)
        if torch.allclose(centroids, moved, atol=TOLERANCES[0], rtol=TOLERANCES[1]):
            break
        centroids = moved
    return centroids.sort().values.float()


FORMATS = (
    Format(
        "jangtq",
        NEEDS,
        fit,
        summary="JANGTQ: codes of rotated rows for a computed codebook, a norm for each row",
        usual_db=(9, 21),
    ),
)
