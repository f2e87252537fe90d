"""Types in which runtimes store keys and values, by name: how the values that attention reads back are rounded.

    f16, bf16       the float
    q8_0            ggml's: for 32 numbers of a head d = amax / 127; code = round(x · 127 / amax)
    q4_0, q5_0      d = (x of the largest magnitude) / -8 or -16;       code = ⌊x / d + 8.5⌋ or ⌊x / d + 16.5⌋
    q4_1, q5_1      d = (max - min) / 15 or 31, m = min;                code = ⌊(x - m) / d + 0.5⌋
    iq4_nl          codes of a table, of d = (x of the largest magnitude) / -127; then d = Σ x² c x / Σ x² c²
    fp8             E4M3 of clamp(x / s, ±448); s is stored for the tensor or each head, otherwise 1
    fp8_tensor      the same with s = amax / 448 over a chunk of the text, as if scales were calibrated on that chunk
    fp8_head        the same for each head
    fp8_token       s = max(amax / 448, 1e-6) for a token of a head; E4M3 of x · (1 / s)
    int8_token      s = max(amax / 127, 1e-6); code = round(x · (1 / s)), away from zero at a tie
    int4            s = (max - min) / 15; code = round((x - min) / s): keys for 32 tokens of a channel, values for
                    32 numbers of a token. Keys of a last group that is not full are not rounded
    nvfp4           for 16 numbers c = E4M3 of amax / 6 / s, with s as for fp8; code = E2M1 of x / c / s
    mxfp4           a power of two for 32 numbers: floor(log2(amax)) - 2; E2M1

ggml's d and m are stored as float16. Codes are computed with 1 / d of the unrounded d, as in ggml.

llama.cpp rotates queries, keys and values before it stores them in a quantized type, if heads are multiples of 64: by
Sylvester's matrix / √n, keys with the largest n = 64 · 2^i that divides the head, values with n = 64, and rotates the
output back. Here keys and values are rotated back, which gives the same result. With ``:unrotated``, they are not
rotated, as in older versions of llama.cpp and with LLAMA_ATTN_ROT_DISABLE; ik_llama.cpp rotates only with -khad and
-vhad.

Only keys and values are rounded, although kernels may also round queries and probabilities. KIVI stores the most recent
tokens exactly; int4 rounds them, too.

Reference: ggml-org/llama.cpp (as of llama-cpp-python 0.3.36) src/llama-kv-cache.cpp, ggml/src/ggml-quants.c
quantize_row_q…_ref, quantize_row_iq4_nl_ref, ggml/src/ggml-cpu/arch/x86/quants.c quantize_row_q8_0; vllm-project/vllm
0.33.0 vllm/v1/attention/ops/triton_reshape_and_cache_flash.py (fp8, fp8_per_token_head, int8_per_token_head),
csrc/nvfp4_kv_cache_kernels.cu; jy-yuan/KIVI@876b4d2d quant/new_pack.py.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from quanterr.errors import UsageError
from quanterr.formats.shared.ggml_blocks import IQ4
from quanterr.formats.shared.hadamard import make_sylvester
from quanterr.lazy_torch import Tensor, torch
from quanterr.recipes.inputs import FP8_MAX, INPUT_SCHEMES, INT8_MAX, StoredInputScale
from quanterr.util.text import display

KEYS, VALUES = "k", "v"
ROTATION_BLOCK = 64  # elements; heads whose size is a multiple of it are rotated
UNROTATED = ":unrotated"
MIN_SCALE = 1e-6  # minimum scale of a token in vLLM
GROUP = 32  # tokens of a channel, or numbers of a token, that share a scale in KIVI

Round = Callable[[Tensor, Tensor], Tensor]  # (chunks, heads, tokens, size) float32, a stored scale → the same shape


class CacheType(NamedTuple):
    """A type: how it rounds keys and values, and the number of elements of a head that share a scale."""

    keys: Round
    values: Round
    block: int = 1
    rotates: bool = False


class Kept(NamedTuple):
    """The rounding of keys or of values to a type, with or without the type's rotation."""

    name: str
    of: str  # KEYS or VALUES
    type: CacheType
    rotates: bool

    def __call__(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return keys or values, (chunks, heads, tokens, size), as attention reads them, in their own dtype.

        ``scale``, () or (1, heads, 1, 1), is the stored scale, or 1 if none is stored.

        Raises:
            UsageError: heads do not fill whole blocks of the type.
        """
        size = x.shape[-1]
        if size % self.type.block:
            raise UsageError(
                f"--kv {self.name}: heads of {size} numbers do not fill blocks of {self.type.block}, so no runtime can "
                "store them in this type: choose another type"
            )
        rounded = self.type.keys if self.of == KEYS else self.type.values
        if not self.rotates or size % ROTATION_BLOCK:
            return rounded(x.float(), scale).to(x.dtype)
        # Keys are rotated by the largest n = 64 · 2^i that divides the size of a head.
        rotation = _make_rotation(size & -size if self.of == KEYS else ROTATION_BLOCK, x.device)
        return _rotate(rounded(_rotate(x.float(), rotation), scale), rotation).to(x.dtype)


class Cache(NamedTuple):
    """The types of keys and of values; None if they are not rounded."""

    name: str
    keys: Kept | None
    values: Kept | None


def parse_cache(text: str) -> Cache:
    """Return the types that ``--kv`` names: one type for keys and values, or ``k=…``, ``v=…`` or both.

    Raises:
        UsageError: a type is unknown, or keys or values are given twice.
    """
    parts = [part.strip().rpartition("=") for part in text.lower().split(",")]
    named = {of: name for of, _, name in parts}
    if len(named) < len(parts) or not (named.keys() <= {KEYS, VALUES} or named.keys() == {""}):
        raise UsageError(f"--kv {display(text)}: give one type, or one for keys and one for values: k=q8_0,v=q4_0")
    keys, values = (_parse_kept(text, named.get(of, named.get("")), of) for of in (KEYS, VALUES))
    return Cache(text.lower(), keys, values)


def _parse_kept(text: str, name: str | None, of: str) -> Kept | None:
    if name is None:
        return None
    cache_type = CACHE_TYPES.get(name.removesuffix(UNROTATED))
    if cache_type is None or (name.endswith(UNROTATED) and not cache_type.rotates):
        what = (
            f"{display(name.removesuffix(UNROTATED))} is not rotated" if cache_type else f"{display(name)} is unknown"
        )
        known = ", ".join(CACHE_TYPES)
        whole = "" if "=" in text else "declared, none or "
        raise UsageError(f"--kv {display(text)}: {what}; choose {whole}one of {known}")
    return Kept(name, of, cache_type, cache_type.rotates and not name.endswith(UNROTATED))


@cache
def _make_rotation(n: int, device: torch.device) -> Tensor:
    matrix: Tensor = (make_sylvester(n) / n**0.5).float()
    return matrix.to(device)


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Multiply each run of n numbers of a head by a symmetric matrix (n, n)."""
    return (x.reshape(-1, len(rotation)) @ rotation).view(x.shape)


def _round_to_float(x: Tensor, _: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


def _round_as_inputs(x: Tensor, _: Tensor, name: str) -> Tensor:
    """Round as inputs of weights are rounded, with a scale for each block of a row."""
    return INPUT_SCHEMES[name](x, StoredInputScale())


def _round_blocks(x: Tensor, _: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    """Round the blocks of 32 numbers that share a scale in ggml; ``of`` rounds (n, 32)."""
    return of(x.reshape(-1, 32)).view(x.shape)


def _round_by_largest(x: Tensor, half: int) -> Tensor:
    """Round to Q4_0 (``half`` is 8) or Q5_0 (16)."""
    d = x.gather(1, x.abs().argmax(1, keepdim=True)) / -half
    codes = (x * _invert(d)).add_(half + 0.5).floor_().clamp_(max=2 * half - 1)
    return codes.sub_(half).mul_(d.half().float())


def _round_by_minimum(x: Tensor, highest: int) -> Tensor:
    """Round to Q4_1 or Q5_1: ``highest`` is 15 or 31."""
    lowest, largest = x.aminmax(dim=1, keepdim=True)
    d = (largest - lowest) / highest
    codes = ((x - lowest) * _invert(d)).add_(0.5).floor_().clamp_(max=highest)
    return codes.mul_(d.half().float()).add_(lowest.half().float())


def _round_iq4_nl(x: Tensor) -> Tensor:
    """Round to IQ4_NL; sums are added up element by element, as in ggml's C code."""
    table = torch.tensor(IQ4, dtype=torch.float32, device=x.device)
    largest = x.gather(1, x.abs().argmax(1, keepdim=True))
    between = (table[1:] + table[:-1]) / 2
    scaled = x * _invert(largest / table[0])
    codes = table[torch.bucketize(scaled, between, right=True)]
    weight = x * x
    above, below = torch.zeros_like(largest), torch.zeros_like(largest)
    for n in range(x.shape[1]):
        product = weight[:, n : n + 1] * codes[:, n : n + 1]
        above, below = above + product * x[:, n : n + 1], below + product * codes[:, n : n + 1]
    d = torch.where(below > 0, above / below, 0.0)
    return codes * d.half().float()


def _invert(d: Tensor) -> Tensor:
    return torch.where(d == 0, 0.0, 1 / d)


def _round_fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float().mul_(scale)


def _round_fp8_over(x: Tensor, _: Tensor, axes: tuple[int, ...]) -> Tensor:
    scale = x.abs().amax(axes, keepdim=True) / FP8_MAX
    return _round_fp8(x, torch.where(scale == 0, 1.0, scale))


def _round_fp8_token(x: Tensor, _: Tensor) -> Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=MIN_SCALE)
    return (x * (1 / scale)).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float().mul_(scale)


def _round_int8_token(x: Tensor, _: Tensor) -> Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / INT8_MAX).clamp(min=MIN_SCALE)
    codes = x * (1 / scale)
    return (codes + torch.where(codes >= 0, 0.5, -0.5)).clamp_(-128, INT8_MAX).trunc_().mul_(scale)


def _round_int4_channel(x: Tensor, _: Tensor) -> Tensor:
    tokens = x.shape[2] // GROUP * GROUP
    groups = x[:, :, :tokens].reshape(*x.shape[:2], -1, GROUP, x.shape[3])
    return torch.cat([_round_int4(groups, -2).flatten(2, 3), x[:, :, tokens:]], 2)


def _round_int4_token(x: Tensor, _: Tensor) -> Tensor:
    return _round_int4(x.reshape(*x.shape[:-1], -1, GROUP), -1).flatten(-2)


def _round_int4(x: Tensor, axis: int) -> Tensor:
    """Round numbers that share a scale along an axis, as KIVI does."""
    if not x.numel():
        return x
    smallest, largest = x.aminmax(dim=axis, keepdim=True)
    scale = (largest - smallest) / 15
    codes = ((x - smallest) / torch.where(scale == 0, 1.0, scale)).clamp_(0, 15).round_()
    return codes.mul_(scale).add_(smallest)


def _round_nvfp4(x: Tensor, scale: Tensor) -> Tensor:
    return INPUT_SCHEMES["nvfp4"](x, StoredInputScale(1 / scale))


def _make_uniform_type(of: Round, block: int = 1, rotates: bool = False) -> CacheType:
    return CacheType(of, of, block, rotates)


def _make_ggml_type(of: Round) -> CacheType:
    return _make_uniform_type(of, 32, rotates=True)


CACHE_TYPES: dict[str, CacheType] = {
    "f16": _make_uniform_type(partial(_round_to_float, dtype=torch.float16)),
    "bf16": _make_uniform_type(partial(_round_to_float, dtype=torch.bfloat16)),
    "q8_0": _make_ggml_type(partial(_round_as_inputs, name="q8_0")),
    "q5_1": _make_ggml_type(partial(_round_blocks, of=partial(_round_by_minimum, highest=31))),
    "q5_0": _make_ggml_type(partial(_round_blocks, of=partial(_round_by_largest, half=16))),
    "q4_1": _make_ggml_type(partial(_round_blocks, of=partial(_round_by_minimum, highest=15))),
    "q4_0": _make_ggml_type(partial(_round_blocks, of=partial(_round_by_largest, half=8))),
    "iq4_nl": _make_ggml_type(partial(_round_blocks, of=_round_iq4_nl)),
    "fp8": _make_uniform_type(_round_fp8),
    "fp8_tensor": _make_uniform_type(partial(_round_fp8_over, axes=(1, 2, 3))),
    "fp8_head": _make_uniform_type(partial(_round_fp8_over, axes=(2, 3))),
    "fp8_token": _make_uniform_type(_round_fp8_token),
    "int8_token": _make_uniform_type(_round_int8_token),
    "int4": CacheType(_round_int4_channel, _round_int4_token, GROUP),
    "nvfp4": _make_uniform_type(_round_nvfp4, 16),
    "mxfp4": _make_uniform_type(partial(_round_as_inputs, name="mxfp4"), 32),
}
