"""Schemes by which runtimes round the inputs of quantized weights before they multiply, by name, in float32.

    fp8_token          s = max(min(amax, bound) / 448, 1 / (448 · 512)) for a token; E4M3 of clamp(x / s, ±448)
    fp8_tensor         the same for all tokens of a chunk
    fp8_static         a stored s: E4M3 of clamp(x · (1 / s), ±448)
    fp8_g128           s = max(amax, 1e-10) / 448 for 128 numbers of a token
    fp8_g128_ue8m0     the same s, rounded up to a power of two
    int8_token         s = amax / 127, code = round(x · 127 / amax); int8_tensor: for all tokens of a chunk
    int8_token_asym    s = (max - min) / 255 with 0 within, z = round(-128 - min / s), code = round(x / s) + z
    int8_static        stored s and z: code = round(x / s) + z
    int4_token         s = amax / 7.5, codes from -8 to 7
    int4_token_narrow  s = max(amax, 1e-10) / 7, codes from -7 to 7; int4_g64_narrow: for 64 numbers of a token
    nvfp4              G = 448 · 6 / amax as stored, or of each chunk; for 16 numbers E4M3 of min(G · amax / 6, 448)
    mxfp4, mxfp8       a power of two for 32 numbers: floor(log2(amax)), plus 1 where the mantissa is 1.75 or more,
                       minus 2 (E2M1) or 8 (E4M3)
    mxfp8_even         the same, plus 1 only where the mantissa is 1.9375 or more, which E4M3 rounds up to 2
    mxfp8_ceil         2^ceil(log2(amax / 448)): no number is clamped
    q8_0               ggml's: amax / 127 for 32 numbers, stored as float16; code = round(x · 127 / amax)
    q8_k               ggml's: 1 / (127 / amax) for 256 numbers, float32; the same codes

All round to nearest, ties to even. A scheme returns the values of the codes, in the dtype of its input.
int8_token follows vLLM. torchao, compressed-tensors and Quark divide by 127.5, which makes steps 0.4 % smaller.

Reference: vllm-project/vllm vllm/model_executor/layers/quantization/input_quant_fp8.py, utils/nvfp4_emulation_utils.py,
csrc/quantization/w8a8/int8; vllm-project/compressed-tensors quantization/utils/helpers.py, mxfp4_utils.py;
Comfy-Org/comfy-kitchen 0.2.40 backends/eager (int4_*_narrow, mxfp8_ceil); amd-quark 0.13 (mxfp8_even);
ggml-org/llama.cpp ggml/src/ggml-cpu/arch/x86/quants.c quantize_row_q8_0, ggml/src/ggml-quants.c quantize_row_q8_K_ref.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from quanterr.lazy_torch import Tensor, torch

FP8_MAX, FP4_MAX, INT8_MAX, NARROW_INT4_MAX = 448.0, 6.0, 127.0, 7.0
MIN_FP8_SCALE = 1 / (FP8_MAX * 512)
MIN_AMAX = 1e-10  # the smallest amax that a scale is computed from, if a scheme has a floor
MIN_NORMAL = torch.finfo(torch.float32).tiny  # 2^-126
# Minimum mantissas, as frexp returns them, for which an exponent is rounded up: 1.9375 and 1.75.
EVEN, ROUND_UP = 31 / 32, 7 / 8


class StoredInputScale(NamedTuple):
    """The numbers that a file stores for the inputs of a weight."""

    scale: Tensor | None = None  # in nvfp4 it holds the factor G, a divisor
    zero_point: Tensor | None = None
    bound: float | None = None  # the largest amax that a scale is computed from


Round = Callable[[Tensor, StoredInputScale], Tensor]  # (…, k) float32 → the same shape


class InputScheme(NamedTuple):
    """A scheme and its name."""

    name: str
    round: Round
    is_static: bool = False  # whether it needs a stored scale

    def __call__(self, x: Tensor, stored: StoredInputScale) -> Tensor:
        """Return inputs, (…, k), as the runtime multiplies them by the weight, in their own dtype."""
        return self.round(x.float(), stored).to(x.dtype)


def _amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row, (…, 1)."""
    return x.abs().amax(-1, keepdim=True)


def _amax_of_chunk(x: Tensor) -> Tensor:
    """Return the largest magnitude of each chunk of a micro-batch (n, tokens, k), or of all numbers in other shapes."""
    return x.abs().amax((-2, -1), keepdim=True) if x.dim() == 3 else x.abs().amax()


def _round_fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float().mul_(scale)


def _round_fp8_dynamic(x: Tensor, stored: StoredInputScale, amax: Callable[[Tensor], Tensor]) -> Tensor:
    largest = amax(x) if stored.bound is None else amax(x).clamp(max=stored.bound)
    return _round_fp8(x, (largest / FP8_MAX).clamp(min=MIN_FP8_SCALE))


def _round_fp8_static(x: Tensor, stored: StoredInputScale) -> Tensor:
    scale = _get_stored_scale(stored)
    codes = (x * (1 / scale)).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.float().mul_(scale)


def _round_fp8_groups(x: Tensor, _: StoredInputScale, power_of_two: bool) -> Tensor:
    groups = _split(x, 128)
    scale = _amax(groups).clamp(min=MIN_AMAX) / FP8_MAX
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return _join(_round_fp8(groups, scale), x)


def _round_int8(x: Tensor, _: StoredInputScale, amax: Callable[[Tensor], Tensor]) -> Tensor:
    largest = amax(x)
    codes = (x * _divide(INT8_MAX, largest)).round_().clamp_(-128, 127)
    return codes.mul_(largest / INT8_MAX)


def _round_int8_asymmetric(x: Tensor, _: StoredInputScale) -> Tensor:
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=MIN_NORMAL)
    zero = (-128 - low / scale).round()
    return ((x / scale).round_() + zero).clamp_(-128, 127).sub_(zero).mul_(scale)


def _round_int8_static(x: Tensor, stored: StoredInputScale) -> Tensor:
    scale = _get_stored_scale(stored)
    zero = torch.zeros_like(scale) if stored.zero_point is None else stored.zero_point.float()
    return ((x / scale).round_() + zero).clamp_(-128, 127).sub_(zero).mul_(scale)


def _round_int4(x: Tensor, _: StoredInputScale) -> Tensor:
    scale = (_amax(x) / 7.5).clamp(min=MIN_NORMAL)
    return (x / scale).round_().clamp_(-8, 7).mul_(scale)


def _round_int4_narrow(x: Tensor, _: StoredInputScale, size: int | None = None) -> Tensor:
    rows = x if size is None else _split(x, size)
    scale = _amax(rows).clamp(min=MIN_AMAX) / NARROW_INT4_MAX
    values = (rows / scale).round_().clamp_(-NARROW_INT4_MAX, NARROW_INT4_MAX).mul_(scale)
    return values if size is None else _join(values, x)


def _round_nvfp4(x: Tensor, stored: StoredInputScale) -> Tensor:
    factor = stored.scale if stored.scale is not None else _divide(FP8_MAX * FP4_MAX, _amax_of_chunk(x))
    if factor.dim() == x.dim():
        factor = factor[..., None]
    groups = _split(x, 16)
    scale = (factor * (_amax(groups) / FP4_MAX)).clamp_(max=FP8_MAX).to(torch.float8_e4m3fn).float()
    codes = round_e2m1(groups * torch.where(scale == 0, 0.0, factor / scale))
    return _join(codes.mul_(torch.where(scale == 0, 0.0, scale / factor)), x)


def _round_mx(
    x: Tensor, _: StoredInputScale, scale: Callable[[Tensor], Tensor], code: Callable[[Tensor], Tensor]
) -> Tensor:
    groups = _split(x, 32)
    power = scale(_amax(groups))
    return _join(code(groups / power).mul_(power), x)


def _power_below(amax: Tensor, exponent: int, up_from: float) -> Tensor:
    """Return 2^(floor(log2(amax)) - exponent), or twice that if the mantissa of amax is ``up_from`` or more."""
    mantissa, power = torch.frexp(amax.clamp(min=MIN_NORMAL))  # mantissa from 0.5 to 1
    power = power - 1 + (mantissa >= up_from) - exponent
    return torch.ldexp(torch.ones_like(mantissa), power.clamp(-127, 127))


def _power_above(amax: Tensor) -> Tensor:
    """Return the smallest power of two that, as a scale, makes no code exceed 448."""
    return torch.exp2(torch.ceil(torch.log2((amax / FP8_MAX).clamp(min=2.0**-127))))


def round_e2m1(x: Tensor) -> Tensor:
    """Return the nearest numbers of E2M1, up to ±6; ties to even."""
    x = x.clamp(-FP4_MAX, FP4_MAX)
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (x / step).round_().mul_(step)


def _round_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


def _round_q8_0(x: Tensor, _: StoredInputScale) -> Tensor:
    groups = _split(x, 32)
    largest = _amax(groups)
    codes = (groups * _divide(INT8_MAX, largest)).round_()
    return _join(codes.mul_((largest / INT8_MAX).half().float()), x)


def _round_q8_k(x: Tensor, _: StoredInputScale) -> Tensor:
    groups = _split(x, 256)
    inverse = _divide(INT8_MAX, _amax(groups))
    return _join((groups * inverse).round_().mul_(_divide(1.0, inverse)), x)


def _get_stored_scale(stored: StoredInputScale) -> Tensor:
    assert stored.scale is not None  # noqa: S101 - static schemes are made with one
    return stored.scale.float()


def _divide(number: float, by: Tensor) -> Tensor:
    """Return the quotient, rounded only once, or 0 if the divisor is 0."""
    return torch.where(by == 0, 0.0, by.new_tensor(number) / by)  # for a Python number, torch rounds twice


def _split(x: Tensor, size: int) -> Tensor:
    """Split the numbers of a token into groups, (…, groups, size); zeros fill up the last one."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % size))
    return padded.reshape(*x.shape[:-1], -1, size)


def _join(groups: Tensor, like: Tensor) -> Tensor:
    """Join groups to the numbers of a token again, without the zeros that filled up the last one."""
    return groups.flatten(-2)[..., : like.shape[-1]]


def _microscaling(exponent: int, code: Callable[[Tensor], Tensor], up_from: float = ROUND_UP) -> Round:
    return partial(_round_mx, scale=partial(_power_below, exponent=exponent, up_from=up_from), code=code)


_DYNAMIC: dict[str, Round] = {
    "fp8_token": partial(_round_fp8_dynamic, amax=_amax),
    "fp8_tensor": partial(_round_fp8_dynamic, amax=_amax_of_chunk),
    "fp8_g128": partial(_round_fp8_groups, power_of_two=False),
    "fp8_g128_ue8m0": partial(_round_fp8_groups, power_of_two=True),
    "int8_token": partial(_round_int8, amax=_amax),
    "int8_tensor": partial(_round_int8, amax=_amax_of_chunk),
    "int8_token_asym": _round_int8_asymmetric,
    "int4_token": _round_int4,
    "int4_token_narrow": _round_int4_narrow,
    "int4_g64_narrow": partial(_round_int4_narrow, size=64),
    "nvfp4": _round_nvfp4,
    "mxfp4": _microscaling(2, round_e2m1),
    "mxfp8": _microscaling(8, _round_e4m3),
    "mxfp8_even": _microscaling(8, _round_e4m3, EVEN),
    "mxfp8_ceil": partial(_round_mx, scale=_power_above, code=_round_e4m3),
    "q8_0": _round_q8_0,
    "q8_k": _round_q8_k,
}
_STATIC: dict[str, Round] = {"fp8_static": _round_fp8_static, "int8_static": _round_int8_static}
INPUT_SCHEMES = {
    name: InputScheme(name, round, is_static)
    for is_static, rows in ((False, _DYNAMIC), (True, _STATIC))
    for name, round in rows.items()
}
