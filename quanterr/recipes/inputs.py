"""How runtimes round the inputs of quantized weights before they multiply: schemes by name, in float32.

    fp8_token       s = max(min(amax, bound) / 448, 1 / (448 · 512)) of each token; E4M3 of clamp(x / s, ±448)
    fp8_tensor      the same per chunk
    fp8_static      a stored s: E4M3 of clamp(x · (1 / s), ±448)
    fp8_g128        s = max(amax, 1e-10) / 448 of 128 numbers of a token; fp8_g128_ue8m0: the next power of two
    int8_token      s = amax / 127, code = round(x · 127 / amax); int8_tensor: per chunk
    int8_token_asym s = (max - min) / 255 with 0 in the range, z = round(-128 - min / s), code = round(x / s) + z
    int8_static     stored s and z: code = round(x / s) + z
    int4_token      s = amax / 7.5, codes from -8 to 7
    nvfp4           G = 448 · 6 / amax, stored or per chunk; per 16 numbers E4M3 of min(G · amax / 6, 448)
    mxfp4, mxfp8    a power of two per 32 numbers: ⌊log2(amax, rounded up from 1.75)⌋ - 2 (E2M1), - 8 (E4M3)
    q8_0, q8_k      ggml's: amax / 127 of 32 numbers, float16; of 256, float32

All round to nearest, ties to even. Results are the values of the codes, in the dtype of the input.

Reference: vllm-project/vllm vllm/model_executor/layers/quantization/input_quant_fp8.py, utils/nvfp4_emulation_utils.py,
csrc/quantization/w8a8/int8; vllm-project/compressed-tensors quantization/utils/helpers.py, mxfp4_utils.py;
ggml-org/llama.cpp ggml/src/ggml-quants.c quantize_row_q8_0_ref, quantize_row_q8_K_ref.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

FP8_MOST, FP4_MOST, INT8_MOST = 448.0, 6.0, 127.0
FP8_LEAST_SCALE = 1 / (FP8_MOST * 512)
GROUP_LEAST = 1e-10  # smallest amax of a group
TINY = 2.0**-126


class StoredInputScale(NamedTuple):
    """The tensors that a file stores for the inputs of a weight."""

    scale: Tensor | None = None  # for nvfp4 the factor G, which is a divisor
    zero_point: Tensor | None = None
    bound: float | None = None  # larger magnitudes do not enlarge the scale


Round = Callable[[Tensor, StoredInputScale], Tensor]  # (…, k) float32 to the same shape


class InputScheme(NamedTuple):
    """A named way to round inputs."""

    name: str
    round: Round
    is_static: bool = False  # needs a stored scale

    def __call__(self, x: Tensor, stored: StoredInputScale) -> Tensor:
        """Return inputs, (…, k), as the runtime's product sees them."""
        return self.round(x.float(), stored).to(x.dtype)


def _largest_in_token(x: Tensor) -> Tensor:
    """Return the largest magnitude of each token, (…, 1)."""
    return x.abs().amax(-1, keepdim=True)


def _largest_in_chunk(x: Tensor) -> Tensor:
    """Return the largest magnitude of each chunk of a micro-batch, (n, tokens, k); for other shapes, of all."""
    return x.abs().amax((-2, -1), keepdim=True) if x.dim() == 3 else x.abs().amax()


def _round_fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp_(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn).float().mul_(scale)


def _round_fp8_dynamic(x: Tensor, stored: StoredInputScale, of: Callable[[Tensor], Tensor]) -> Tensor:
    most = of(x) if stored.bound is None else of(x).clamp(max=stored.bound)
    return _round_fp8(x, (most / FP8_MOST).clamp(min=FP8_LEAST_SCALE))


def _round_fp8_static(x: Tensor, stored: StoredInputScale) -> Tensor:
    scale = _read_scale(stored)
    codes = (x * (1 / scale)).clamp_(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn)
    return codes.float().mul_(scale)


def _round_fp8_groups(x: Tensor, _: StoredInputScale, power_of_two: bool) -> Tensor:
    grouped = _group(x, 128)
    scale = _largest_in_token(grouped).clamp(min=GROUP_LEAST) / FP8_MOST
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return _ungroup(_round_fp8(grouped, scale), x)


def _round_int8(x: Tensor, _: StoredInputScale, of: Callable[[Tensor], Tensor]) -> Tensor:
    most = of(x)
    codes = (x * _divide_by(most, INT8_MOST)).round_().clamp_(-128, 127)
    return codes.mul_(most / INT8_MOST)


def _round_int8_asymmetric(x: Tensor, _: StoredInputScale) -> Tensor:
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).tiny)
    zero = (-128 - low / scale).round()
    return ((x / scale).round_() + zero).clamp_(-128, 127).sub_(zero).mul_(scale)


def _round_int8_static(x: Tensor, stored: StoredInputScale) -> Tensor:
    scale = _read_scale(stored)
    zero = torch.zeros_like(scale) if stored.zero_point is None else stored.zero_point.float()
    return ((x / scale).round_() + zero).clamp_(-128, 127).sub_(zero).mul_(scale)


def _round_int4(x: Tensor, _: StoredInputScale) -> Tensor:
    scale = (_largest_in_token(x) / 7.5).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scale).round_().clamp_(-8, 7).mul_(scale)


def _round_nvfp4(x: Tensor, stored: StoredInputScale) -> Tensor:
    factor = stored.scale if stored.scale is not None else _divide_by(_largest_in_chunk(x), FP8_MOST * FP4_MOST)
    if factor.dim() == x.dim():
        factor = factor[..., None]
    grouped = _group(x, 16)
    scale = (factor * (_largest_in_token(grouped) / FP4_MOST)).clamp_(max=FP8_MOST).to(torch.float8_e4m3fn).float()
    codes = round_e2m1((grouped * torch.where(scale == 0, 0.0, factor / scale)).clamp_(-FP4_MOST, FP4_MOST))
    return _ungroup(codes.mul_(torch.where(scale == 0, 0.0, scale / factor)), x)


def _round_mx(x: Tensor, _: StoredInputScale, exponent: int, code: Callable[[Tensor], Tensor]) -> Tensor:
    grouped = _group(x, 32)
    mantissa, power = torch.frexp(_largest_in_token(grouped).clamp(min=TINY))  # mantissa from 0.5 to 1
    power = power - 1 + (mantissa >= 0.875) - exponent
    scale = torch.ldexp(torch.ones_like(mantissa), power.clamp(-127, 127))
    return _ungroup(code(grouped / scale).mul_(scale), x)


def round_e2m1(x: Tensor) -> Tensor:
    """Round to the nearest number of E2M1, up to ±6; ties to even."""
    x = x.clamp(-FP4_MOST, FP4_MOST)
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (x / step).round_().mul_(step)


def _round_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn).float()


def _round_ggml(x: Tensor, _: StoredInputScale, size: int, dtype: torch.dtype) -> Tensor:
    grouped = _group(x, size)
    most = _largest_in_token(grouped)
    codes = (grouped * _divide_by(most, INT8_MOST)).round_()
    return _ungroup(codes.mul_((most / INT8_MOST).to(dtype).float()), x)


def _read_scale(stored: StoredInputScale) -> Tensor:
    assert stored.scale is not None  # noqa: S101 - static schemes are made with one
    return stored.scale.float()


def _divide_by(most: Tensor, of: float) -> Tensor:
    return torch.where(most == 0, 0.0, of / most)


def _group(x: Tensor, size: int) -> Tensor:
    """Group the numbers of each token, (…, groups, size); the last group is padded with zeros."""
    padding = -x.shape[-1] % size
    padded = torch.nn.functional.pad(x, (0, padding))
    return padded.reshape(*x.shape[:-1], -1, size)


def _ungroup(grouped: Tensor, like: Tensor) -> Tensor:
    return grouped.flatten(-2)[..., : like.shape[-1]]


_ROWS: tuple[tuple[str, Round, bool], ...] = (
    ("fp8_token", partial(_round_fp8_dynamic, of=_largest_in_token), False),
    ("fp8_tensor", partial(_round_fp8_dynamic, of=_largest_in_chunk), False),
    ("fp8_static", _round_fp8_static, True),
    ("fp8_g128", partial(_round_fp8_groups, power_of_two=False), False),
    ("fp8_g128_ue8m0", partial(_round_fp8_groups, power_of_two=True), False),
    ("int8_token", partial(_round_int8, of=_largest_in_token), False),
    ("int8_tensor", partial(_round_int8, of=_largest_in_chunk), False),
    ("int8_token_asym", _round_int8_asymmetric, False),
    ("int8_static", _round_int8_static, True),
    ("int4_token", _round_int4, False),
    ("nvfp4", _round_nvfp4, False),
    ("mxfp4", partial(_round_mx, exponent=2, code=round_e2m1), False),
    ("mxfp8", partial(_round_mx, exponent=8, code=_round_e4m3), False),
    ("q8_0", partial(_round_ggml, size=32, dtype=torch.float16), False),
    ("q8_k", partial(_round_ggml, size=256, dtype=torch.float32), False),
)
INPUT_SCHEMES = {name: InputScheme(name, round, is_static) for name, round, is_static in _ROWS}
