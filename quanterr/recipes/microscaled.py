"""Small floats with a scale for each group of columns: ``mxfp8``, ``mxfp4``, ``nvfp4``.

    mxfp8    X.weight                 F8_E4M3    (rows, cols)
             X.weight_scale           U8         (rows, cols / 32): biased exponents
    mxfp4    X.weight_packed          U8         (rows, cols / 2): the first column in the low bits
             X.weight_scale           U8         (rows, cols / 32)
    nvfp4    X.weight_packed          U8         (rows, cols / 2)
             X.weight_scale           F8_E4M3    (rows, cols / 16)
             X.weight_global_scale    F32        (1,): 448 · 6 / max |x|, which divides the other scales

    exponent = ⌊log2(max |x|, rounded up from 1.75)⌋ - 8 for E4M3, - 2 for E2M1
    nvfp4: scale = e4m3(max |x| / 6 · global scale)

These are compressed-tensors' mxfp8-quantized, mxfp4-pack-quantized and nvfp4-pack-quantized.

Reference: vllm-project/compressed-tensors@0.20.0 quantization/utils/mxfp_utils.py generate_mx_scales,
quantization/utils/helpers.py calculate_qparams, generate_gparam.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from quanterr.formats.shared.element_types import decode_e4m3_scales
from quanterr.kernel.enums import Packing
from quanterr.kernel.levels import E2M1, make_float_codes
from quanterr.kernel.rounding import Codes, find_codes
from quanterr.lazy_torch import Tensor, torch
from quanterr.recipes.base import Encoder, Piece, Source, StoredTensor, explain_partial_groups
from quanterr.recipes.lookup import Lookup, next_below
from quanterr.recipes.scaled import FP8

MX, NV = 32, 16  # columns that share a scale
EXPONENTS = {4: 2, 8: 8}  # bits of a code → exponent of the largest number of E2M1 or E4M3
ROUND_UP = 1 << 21  # added to the bits of a float32, this rounds up mantissas of 1.75 and more
MANTISSA = 23  # bits of a float32 below the exponent
INFINITE = 255  # biased exponent of infinity, to which the largest float32 numbers are rounded
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 magnitudes by code; codes of negative numbers are 8 higher
MIN_SCALE_CODE = 0x20  # code of the E4M3 scale that replaces zero, 0.125


@dataclass(frozen=True)
class MicroscaledEncoder(Encoder):
    """An encoder with 4-bit (E2M1) or 8-bit (E4M3) codes; ``nv``: E4M3 and global scales, otherwise powers of two."""

    bits: int
    nv: bool = False

    @property
    def _group(self) -> int:
        return NV if self.nv else MX

    def explain_refusal(self, source: Source) -> str | None:
        """Explain why columns do not fill whole groups; None if they do."""
        return explain_partial_groups(source, self._group)

    @property
    def is_local(self) -> bool:
        """False with a global scale, which depends on all rows."""
        return not self.nv

    def list_tensors(self, source: Source) -> tuple[StoredTensor, ...]:
        """List codes and scales."""
        scales = (source.rows, source.cols // self._group)
        if self.bits == 8:
            return StoredTensor("{weight}", "F8_E4M3", (source.rows, source.cols)), StoredTensor(
                "{weight}_scale", "U8", scales
            )
        codes = StoredTensor("{weight}_packed", "U8", (source.rows, source.cols // 2))
        if not self.nv:
            return codes, StoredTensor("{weight}_scale", "U8", scales)
        return (
            codes,
            StoredTensor("{weight}_scale", "F8_E4M3", scales),
            StoredTensor("{weight}_global_scale", "F32", (1,)),
        )

    def measure(self, piece: Piece, importance: Tensor | None = None) -> Tensor:
        """Return the largest |x| of each group."""
        return piece.find_magnitudes(self._group).view(len(piece.rows), -1)

    def settle(self, measured: Tensor, source: Source) -> tuple[Tensor, ...]:
        """Return the scales."""
        if not self.nv:
            exponents = (measured.view(torch.int32) + ROUND_UP) >> MANTISSA  # biased by 127
            shifted = (exponents - EXPONENTS[self.bits]).clamp_(min=0)
            return (shifted.masked_fill_(exponents == INFINITE, INFINITE).to(torch.uint8),)
        largest = measured.amax().clamp(min=torch.finfo(torch.float32).tiny)
        global_scale = (FP8.highest * E2M1.highest / largest).nan_to_num(nan=1.0, posinf=1.0, neginf=1.0)
        codes = find_codes(
            measured / E2M1.highest, global_scale.view(1, 1), FP8.codes, measured.shape[1], multiply=True
        )
        return codes.masked_fill_(codes == 0, MIN_SCALE_CODE).view(FP8.dtype), global_scale.view(1)

    def encode(
        self, x: Tensor, first: int, settled: tuple[Tensor, ...], out: Tensor, importance: Tensor | None = None
    ) -> None:
        """Write x / scale, rounded to codes."""
        scales = settled[0][first : first + len(x)]
        if self.nv:
            units = decode_e4m3_scales(scales) / settled[1]
        else:
            units = torch.where(scales == 0, 2.0**-127, (scales.int() << 23).view(torch.float32))
        to, packing = (FP8.codes, Packing.BYTES) if self.bits == 8 else (_make_e2m1(), Packing.LOW_FIRST)
        find_codes(x, units, to, self._group, packing=packing, out=out.view(len(x), -1))


@cache
def _make_e2m1() -> Codes:
    """Return E2M1 codes, ties to the even code as in a cast, with a single zero."""
    values = [-size for size in SIZES[:0:-1]] + list(SIZES)
    codes = [8 + code for code in range(7, 0, -1)] + list(range(8))
    halves = [(low + high) / 2 for low, high in pairwise(values)]
    evens = [codes[n] % 2 == 0 for n in range(len(halves))]  # a tie goes to the lower neighbour if its code is even
    bounds = [half if even else next_below(half) for half, even in zip(halves, evens, strict=True)]
    by_torch = Lookup(values, codes, bounds)
    return make_float_codes(E2M1, by_torch, sign=3, one_zero=True)
