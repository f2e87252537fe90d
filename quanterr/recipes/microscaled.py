"""Small floats with a scale for each few columns: ``mxfp8``, ``mxfp4``, ``nvfp4``.

    mxfp8    X.weight                 F8_E4M3    (rows, cols)
             X.weight_scale           U8         (rows, cols / 32): biased exponents
    mxfp4    X.weight_packed          U8         (rows, cols / 2): the first column in the low bits
             X.weight_scale           U8         (rows, cols / 32)
    nvfp4    X.weight_packed          U8         (rows, cols / 2)
             X.weight_scale           F8_E4M3    (rows, cols / 16)
             X.weight_global_scale    F32        (1,): 448 · 6 / max |x|, by which the other scales are divided

    exponent = ⌊log2(max |x|, rounded up from 1.75)⌋ - 8 for E4M3, - 2 for E2M1
    nvfp4's scale = e4m3(max |x| / 6 · global scale)

compressed-tensors' mxfp8-quantized, mxfp4-pack-quantized and nvfp4-pack-quantized.

Reference: vllm-project/compressed-tensors@0.20.0 quantization/utils/mxfp_utils.py generate_mx_scales,
quantization/utils/helpers.py calculate_qparams, generate_gparam.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from quanterr.recipes.base import Scheme, Source, Stored, bytes_of, not_whole
from quanterr.recipes.lookup import Lookup, below
from quanterr.recipes.scaled import FP8
from quanterr.tensors.levels import E2M1

MX, NV = 32, 16  # columns that share a scale
EXPONENTS = {4: 2, 8: 8}  # of the largest number of E2M1 and E4M3
ROUND_UP = 1 << 21  # in the mantissa of a float32: from 1.75 on
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1, by their codes; negative ones have 8 more
LEAST_SCALE = 0.125  # that takes the place of zero, of E4M3


@dataclass(frozen=True)
class Microscaled(Scheme):
    """``bits`` is 4 (E2M1) or 8 (E4M3); ``nv`` has E4M3 scales and one of the tensor, else they are powers of two."""

    bits: int
    nv: bool = False

    @property
    def _group(self) -> int:
        return NV if self.nv else MX

    def refusal(self, source: Source) -> str | None:
        """Groups are whole."""
        return not_whole(source, self._group)

    @property
    def is_local(self) -> bool:
        """Not with a scale of the tensor."""
        return not self.nv

    def stored(self, source: Source) -> tuple[Stored, ...]:
        """Codes and scales."""
        scales = (source.rows, source.cols // self._group)
        if self.bits == 8:
            return Stored("{weight}", "F8_E4M3", (source.rows, source.cols)), Stored("{weight}_scale", "U8", scales)
        codes = Stored("{weight}_packed", "U8", (source.rows, source.cols // 2))
        if not self.nv:
            return codes, Stored("{weight}_scale", "U8", scales)
        return codes, Stored("{weight}_scale", "F8_E4M3", scales), Stored("{weight}_global_scale", "F32", (1,))

    def measure(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        """The largest |x| of each group."""
        return x.view(len(x), -1, self._group).abs().amax(2)

    def settle(self, measured: Tensor, source: Source) -> tuple[Tensor, ...]:
        """The scales."""
        if not self.nv:
            power = ((measured.view(torch.int32) + ROUND_UP) & (0x1FF << 23)).view(torch.float32)
            exponents = 127 + power.log2().floor() - EXPONENTS[self.bits]
            return (exponents.clamp_(0, 255).round_().to(torch.uint8),)
        most = measured.amax().clamp(min=torch.finfo(torch.float32).tiny)
        global_scale = (FP8.most * E2M1.highest / most).nan_to_num(nan=1.0, posinf=1.0, neginf=1.0)
        scale = FP8.rounded(global_scale * (measured / E2M1.highest))
        zero = scale.view(torch.uint8) & 0x7F == 0
        return torch.where(zero, torch.tensor(LEAST_SCALE), scale.float()).to(FP8.dtype), global_scale.view(1)

    def _unit(self, first: int, rows: int, settled: tuple[Tensor, ...]) -> Tensor:
        """What codes of rows are multiplied by, (rows, groups, 1) float32."""
        own = settled[0][first : first + rows]
        if self.nv:
            return (own.float() / settled[1])[..., None]
        return torch.where(own == 0, 2.0**-127, (own.int() << 23).view(torch.float32))[..., None]

    def encode(self, x: Tensor, first: int, settled: tuple[Tensor, ...], importance: Tensor | None = None) -> Tensor:
        """x / scale, rounded."""
        scaled = (x.view(len(x), -1, self._group) / self._unit(first, len(x), settled)).view(len(x), -1)
        if self.bits == 8:
            return bytes_of(FP8.rounded(scaled))
        codes = _e2m1()(scaled)
        return codes[:, ::2] | codes[:, 1::2] << 4


@cache
def _e2m1() -> Lookup:
    """Rounds to nearest, at a tie to the even code, as a cast does; there is one zero."""
    values = [-size for size in SIZES[:0:-1]] + list(SIZES)
    codes = [8 + code for code in range(7, 0, -1)] + list(range(8))
    halves = [(low + high) / 2 for low, high in pairwise(values)]
    evens = [codes[n] % 2 == 0 for n in range(len(halves))]  # the lower neighbour is even: a tie goes to it
    return Lookup(values, codes, [half if even else below(half) for half, even in zip(halves, evens, strict=True)])
