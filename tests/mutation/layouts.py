"""Layouts of checkpoints: how scales are rounded, and codes and scales as tensors or blocks of GGUF."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support import packing
from torch import Tensor

from mutation.coding import E4M3, SIGNED_E2M1, Coded, Grid, Layout, Stored, integers, of_table

GOLDEN = Path(__file__).parents[1] / "golden"
E4M3_DTYPE = torch.float8_e4m3fn
FOUR = "bnb_nf4/bnb_nf4_double_quant.safetensors"
TABLES = {name.split("weight.")[1]: tensor for name, tensor in load_file(GOLDEN / FOUR).items() if "quant_map" in name}
NF4, DYNAMIC = TABLES["quant_map"], TABLES["nested_quant_map"]  # as bitsandbytes stores them
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
OUTER = 256  # columns of a superblock
MODULE = ".weight"


# How scales are rounded


def as_dtype(dtype: torch.dtype, scale: Tensor, shift: Tensor | None, shared: float) -> Stored:
    """Store each scale and each shift as a float of this dtype."""
    return Stored((scale * shared).to(dtype).float(), None if shift is None else (shift * shared).to(dtype).float())


def with_zero_points(
    dtype: torch.dtype, low: int, high: int, scale: Tensor, shift: Tensor | None, shared: float
) -> Stored:
    """Store scales in a dtype, and integer zero points."""
    assert shift is not None
    scale = (scale * shared).to(dtype).float()
    zero = (-shift / torch.where(scale == 0, 1.0, scale)).round().clamp(low, high)
    return Stored(scale, -zero.double() * scale.double(), {"zero": zero})


def powers_of_two(scale: Tensor, shift: Tensor | None, shared: float) -> Stored:
    """Store the next larger power of two, as E8M0."""
    exponent = (scale * shared).log2().ceil().clamp(-127, 127)
    return Stored(torch.exp2(exponent), None, {"e8m0": (exponent + 127).to(torch.uint8)})


def below_global(scale: Tensor, shift: Tensor | None, shared: float) -> Stored:
    """Store E4M3 scales and one float32 scale of all, ``shared`` times what the largest needs."""
    global_scale = float(scale.max()) / 448 * shared
    inner = (scale / global_scale).clamp(max=448).to(E4M3_DTYPE)
    return Stored(inner.double() * global_scale, None, {"inner": inner, "global": torch.tensor([global_scale])})


def nest(scale: Tensor, shift: Tensor | None, shared: float) -> Stored:
    """Store scales as bytes of bitsandbytes' table, with a maximum for each 256 scales and a mean of all."""
    flat = scale.reshape(-1)
    offset = float(flat.mean())
    parts = torch.nn.functional.pad(flat - offset, (0, -len(flat) % 256)).view(-1, 256)
    largest = parts.abs().amax(1, keepdim=True).clamp(min=1e-12) * shared
    middles = (DYNAMIC[1:] + DYNAMIC[:-1]) / 2
    codes = torch.bucketize((parts / largest).contiguous(), middles)
    values = ((DYNAMIC[codes] * largest) + torch.tensor(offset)).view(-1)[: len(flat)].view(scale.shape)
    codes = codes.view(-1)[: len(flat)].to(torch.uint8)
    return Stored(values, None, {"codes": codes, "most": largest.view(-1), "offset": torch.tensor(offset)})


def under_superblocks(
    low: int, high: int, scale: Tensor, shift: Tensor | None, shared: float, group: int = 32
) -> Stored:
    """Store integer scales and minima under F16 scales of 256 columns, ``shared`` times what the largest needs."""
    groups_per_superblock = OUTER // group
    rows = scale.shape[0]
    outer = scale.view(rows, -1, groups_per_superblock)
    largest = outer.gather(2, outer.abs().argmax(2, keepdim=True))
    d = (largest * shared / (low if low < 0 else high)).half().float()
    inner = (outer / _fill(d)).round().clamp(low, high) * (d != 0)
    values = (inner.double() * d.double()).view(scale.shape)
    parts = {"d": d.view(rows, -1), "scales": inner.view(scale.shape)}
    if shift is None:
        return Stored(values, None, parts)
    outer = (-shift).clamp(min=0).view(rows, -1, groups_per_superblock)
    dmin = (outer.amax(2, keepdim=True) * shared / high).half().float()
    minima = (outer / _fill(dmin)).round().clamp(0, high) * (dmin != 0)
    parts |= {"dmin": dmin.view(rows, -1), "minima": minima.view(scale.shape)}
    return Stored(values, -(minima.double() * dmin.double()).view(scale.shape), parts)


def _fill(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


# Codes in files


def module(name: str) -> str:
    """Return the name of a weight's module."""
    return name.removesuffix(MODULE)


def _numbers(of: Any) -> Tensor:
    return torch.from_numpy(of)


def nibbles(codes: Tensor) -> Tensor:
    """Return codes packed two to a byte along the last axis, the first in the low bits."""
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def e2m1(values: Tensor) -> Tensor:
    """Return E2M1 values as codes of 4 bits."""
    places = torch.bucketize(values.abs(), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
    return places + 8 * values.signbit()


def scales_by_row(coded: Coded) -> Tensor:
    """Return the scales as (rows, blocks), or a single one."""
    scale = coded.stored.scale.float()
    return scale.view(()) if scale.numel() == 1 else scale


def plain_int8(name: str, coded: Coded) -> dict[str, Tensor]:
    """Store bytes, and a scale of each row or of the tensor."""
    return {name: coded.matrix.to(torch.int8), f"{name}_scale": scales_by_row(coded)}


def labelled_int8(name: str, coded: Coded, said: str = "int8_blockwise") -> dict[str, Tensor]:
    """Store ComfyUI's labelled INT8, in blocks of 128 × 128 or with one scale."""
    fields = {"format": said} | ({"group_size": 128} if "block" in said else {})
    label = torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)
    return plain_int8(name, coded) | {f"{module(name)}.comfy_quant": label}


def ct_int8(name: str, coded: Coded) -> dict[str, Tensor]:
    """Store bytes with zero points as compressed-tensors does."""
    zero = coded.stored.parts["zero"]
    return plain_int8(name, coded) | {f"{name}_zero_point": zero.to(torch.int8)}


def pack_ct(name: str, coded: Coded) -> dict[str, Tensor]:
    """Store 4-bit codes as compressed-tensors does: the lowest code is subtracted, then they are packed."""
    tensors = {
        f"{name}_packed": _numbers(packing.dense((coded.matrix + 8).numpy(), 4)),
        f"{name}_scale": coded.stored.scale.bfloat16(),
        f"{name}_shape": torch.tensor(coded.shape),
    }
    if "zero" in coded.stored.parts:
        zero = (coded.stored.parts["zero"] + 8).T.contiguous()
        tensors[f"{name}_zero_point"] = _numbers(packing.dense(zero.numpy(), 4)).T.contiguous()
    return tensors


def ct_packed_stack(name: str, coded: Coded, experts: int = 8) -> dict[str, Tensor]:
    """Store the experts of one tensor as compressed-tensors packs them."""
    tensors = {key: value.view(experts, -1, value.shape[1]) for key, value in pack_ct(name, coded).items()
             if "_shape" not in key}  # fmt: skip
    return tensors | {f"{name}_shape": torch.tensor([experts, coded.shape[0] // experts, coded.shape[1]])}


def gptq(name: str, coded: Coded, bits: int, order: Tensor | None = None) -> dict[str, Tensor]:
    """Store GPTQ as GPTQModel does, zero points less one; ``order`` is the order of columns in the codes."""
    blocks = torch.arange(coded.shape[1]) // coded.layout.group[1]
    matrix = coded.matrix
    if order is not None:
        matrix, blocks = matrix[:, order.argsort()], blocks[order.argsort()]
    zero = coded.stored.parts.get("zero", torch.full_like(coded.stored.scale, 2 ** (bits - 1)))
    lowest = 0 if "zero" in coded.stored.parts else 2 ** (bits - 1)
    return {
        f"{module(name)}.qweight": _numbers(packing.dense((matrix + lowest).numpy(), bits)).T.contiguous(),
        f"{module(name)}.qzeros": _numbers(packing.less_one(zero.T.contiguous().numpy().astype("uint32"), bits)),
        f"{module(name)}.scales": coded.stored.scale.T.half().contiguous(),
        f"{module(name)}.g_idx": blocks.int(),
    }


def awq(name: str, coded: Coded) -> dict[str, Tensor]:
    """Store AutoAWQ's gemm layout."""
    return {
        f"{module(name)}.qweight": _numbers(packing.interleave(coded.matrix.T.contiguous().numpy())),
        f"{module(name)}.qzeros": _numbers(packing.interleave(coded.stored.parts["zero"].T.contiguous().numpy())),
        f"{module(name)}.scales": coded.stored.scale.T.half().contiguous(),
    }


def fp8(name: str, coded: Coded, scale: str = "_scale") -> dict[str, Tensor]:
    """Store FP8 with scales of the tensor, rows or tiles."""
    return {name: coded.matrix.to(E4M3_DTYPE), f"{name}{scale}": scales_by_row(coded)}


def fp8_stack(name: str, coded: Coded, experts: int = 8) -> dict[str, Tensor]:
    """Store FP8 of the experts in one tensor, with a scale each."""
    return {
        name: coded.matrix.to(E4M3_DTYPE).view(experts, -1, coded.shape[1]),
        f"{name}_scale": coded.stored.scale.float().view(experts),
    }


def mxfp8(name: str, coded: Coded) -> dict[str, Tensor]:
    """Store MXFP8 in rows."""
    return {name: coded.matrix.to(E4M3_DTYPE), f"{name}_scale": coded.stored.parts["e8m0"]}


def ct_mxfp4(name: str, coded: Coded) -> dict[str, Tensor]:
    """Store MXFP4 as compressed-tensors does."""
    return {f"{name}_packed": nibbles(e2m1(coded.matrix)), f"{name}_scale": coded.stored.parts["e8m0"]}


def gpt_oss(name: str, coded: Coded, experts: int = 8) -> dict[str, Tensor]:
    """Store MXFP4 of experts as gpt-oss does."""
    blocks = nibbles(e2m1(coded.matrix)).view(experts, -1, coded.shape[1] // 32, 16)
    return {f"{name}_blocks": blocks, f"{name}_scales": coded.stored.parts["e8m0"].view(experts, -1, blocks.shape[2])}


LARGEST_INPUT = 20.0  # the same for all weights


def ct_nvfp4(name: str, coded: Coded) -> dict[str, Tensor]:
    """Store NVFP4 as compressed-tensors does: values are divided by its global scale."""
    return {
        f"{name}_packed": nibbles(e2m1(coded.matrix)),
        f"{name}_scale": coded.stored.parts["inner"],
        f"{name}_global_scale": 1 / coded.stored.parts["global"],
    }


def nvfp4(name: str, coded: Coded, largest_input: float | None = LARGEST_INPUT) -> dict[str, Tensor]:
    """Store NVFP4 as ModelOpt does, which always calibrates a scale of the inputs."""
    tensors = {
        name: nibbles(e2m1(coded.matrix)),
        f"{name}_scale": coded.stored.parts["inner"],
        f"{name}_scale_2": coded.stored.parts["global"].view(()),
    }
    if largest_input:
        tensors[f"{module(name)}.input_scale"] = torch.tensor(largest_input / (448 * 6))
    return tensors


def bnb(name: str, coded: Coded, said: str = "nf4") -> dict[str, Tensor]:
    """Store bitsandbytes' NF4 with plain or nested scales; the state declares the type ``said``."""
    places = torch.bucketize(coded.matrix.contiguous(), (NF4[1:] + NF4[:-1]) / 2).view(-1, 2).to(torch.uint8)
    state: dict[str, Any] = {"quant_type": said, "blocksize": 64, "dtype": "bfloat16", "shape": list(coded.shape)}
    tensors = {name: (places[:, :1] << 4 | places[:, 1:]), f"{name}.quant_map": NF4}
    parts = coded.stored.parts
    if "codes" in parts:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(parts["offset"])}
        tensors |= {f"{name}.absmax": parts["codes"], f"{name}.nested_absmax": parts["most"]}
        tensors |= {f"{name}.nested_quant_map": DYNAMIC}
    else:
        tensors[f"{name}.absmax"] = coded.stored.scale.float().view(-1)
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors


def mlx(name: str, coded: Coded, bits: int) -> dict[str, Tensor]:
    """Store MLX's scales and biases."""
    assert coded.stored.shift is not None
    return {
        name: _numbers(packing.dense(coded.matrix.numpy(), bits)).view(torch.uint32),
        f"{module(name)}.scales": coded.stored.scale.bfloat16(),
        f"{module(name)}.biases": coded.stored.shift.bfloat16(),
    }


def hqq(name: str, coded: Coded) -> dict[str, Tensor]:
    """Store 4-bit HQQ in groups of 64 in rows: weight = (code - zero) · scale."""
    base, size = module(name), coded.layout.group[1]
    codes = coded.matrix.reshape(-1, size).to(torch.uint8)
    half = len(codes) // 2
    return {
        f"{base}.W_q": codes[:half] << 4 | codes[half:],
        f"{base}.scale": coded.stored.scale.view(-1, 1).float(),
        f"{base}.zero": coded.stored.parts["zero"].view(-1, 1).float(),
        f"{base}.shape": torch.tensor(coded.shape),
        f"{base}.axis": torch.tensor(1, dtype=torch.int32),
        f"{base}.group_size": torch.tensor(size, dtype=torch.int32),
        f"{base}.nbits": torch.tensor(4, dtype=torch.int32),
        f"{base}.packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
        f"{base}.view_as_float": torch.tensor(0, dtype=torch.uint8),
    }


def floating_zeros(scale: Tensor, shift: Tensor | None, shared: float) -> Stored:
    """Store HQQ's zero points in units of codes, float32."""
    assert shift is not None
    scale = scale * shared
    zero = -shift / _fill(scale)
    return Stored(scale, -zero.double() * scale.double(), {"zero": zero})


def quanto8(name: str, coded: Coded) -> dict[str, Tensor]:
    """Store 8-bit codes as quanto does."""
    return {f"{name}._data": coded.matrix.to(torch.int8), f"{name}._scale": coded.stored.scale.float()}


def quanto(name: str, coded: Coded, bits: int) -> dict[str, Tensor]:
    """Store 4-bit or 2-bit codes as quanto does: weight = scale · code - shift."""
    assert coded.stored.shift is not None
    codes = coded.matrix.reshape(-1, coded.layout.group[1]).to(torch.uint8)
    parts = codes.chunk(8 // bits)
    data = torch.zeros_like(parts[0])
    for n, part in enumerate(parts):
        data |= part << bits * n
    return {
        f"{name}._data._data": data,
        f"{name}._scale": coded.stored.scale.view(-1, 1).float(),
        f"{name}._shift": -coded.stored.shift.view(-1, 1).float(),
    }


# Blocks of GGUF


def _f16(values: Tensor) -> Tensor:
    return values.half().contiguous().view(-1, 1).view(torch.uint8)


def _halves(codes: Tensor, size: int) -> Tensor:
    """Pack runs of nibbles: element n in the low half of a byte, n + size / 2 in the high half."""
    runs = codes.reshape(-1, size).to(torch.uint8)
    return runs[:, : size // 2] | runs[:, size // 2 :] << 4


def _bits(codes: Tensor) -> Tensor:
    """Pack bits into little-endian u32, bit n of element n: (runs, 32) → (runs, 4)."""
    return (codes.view(-1, 4, 8).to(torch.int32) << torch.arange(8)).sum(2).to(torch.uint8)


def _join(ggml_type: str, parts: list[Tensor]) -> tuple[str, bytes]:
    n = len(parts[0])
    return ggml_type, torch.cat([part.reshape(n, -1) for part in parts], 1).numpy().tobytes()


def ggml_basic(_name: str, coded: Coded, ggml_type: str) -> tuple[str, bytes]:
    """Store Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 or IQ4_NL: a scale, perhaps a minimum, and 32 codes."""
    scale = _f16(coded.stored.scale)
    codes = coded.matrix.reshape(-1, 32)
    if ggml_type == "Q8_0":
        return _join(ggml_type, [scale, codes.to(torch.int8).view(torch.uint8)])
    if ggml_type == "IQ4_NL":
        return _join(ggml_type, [scale, _halves(_places(codes), 32)])
    codes = (codes - coded.layout.grid.low).to(torch.uint8)
    minimum = [_f16(coded.stored.shift)] if coded.stored.shift is not None else []
    high = [_bits(codes >> 4)] if ggml_type.startswith("Q5") else []
    return _join(ggml_type, [scale, *minimum, *high, _halves(codes & 15, 32)])


def _places(codes: Tensor) -> Tensor:
    table = torch.tensor(IQ4, dtype=torch.float32)
    return torch.bucketize(codes.contiguous(), (table[1:] + table[:-1]) / 2)


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Pack eight scales and minima of 6 bits into 12 bytes, as in Q4_K and Q5_K."""
    sc, m = scales.view(-1, 8).to(torch.uint8), minima.view(-1, 8).to(torch.uint8)
    low = sc[:, :4] | (sc[:, 4:] >> 4) << 6
    mid = m[:, :4] | (m[:, 4:] >> 4) << 6
    return torch.cat([low, mid, (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4], 1)


def ggml_k45(_name: str, coded: Coded, ggml_type: str) -> tuple[str, bytes]:
    """Store Q4_K or Q5_K."""
    parts = coded.stored.parts
    codes = coded.matrix.reshape(-1, 8, 32).to(torch.uint8)
    block_parts = [_f16(parts["d"]), _f16(parts["dmin"]), _six_bits(parts["scales"], parts["minima"])]
    if ggml_type == "Q5_K":
        block_parts.append(((codes >> 4).to(torch.int32) << torch.arange(8)[:, None]).sum(1).to(torch.uint8))
    low = codes & 15
    return _join(ggml_type, [*block_parts, low[:, 0::2] | low[:, 1::2] << 4])


def _crumbs(codes: Tensor) -> Tensor:
    """Pack 2-bit codes: of each 128 elements, n, n + 32, n + 64 and n + 96 share a byte."""
    runs = codes.reshape(-1, 2, 4, 32)
    return runs[:, :, 0] | runs[:, :, 1] << 2 | runs[:, :, 2] << 4 | runs[:, :, 3] << 6


def ggml_q2(_name: str, coded: Coded) -> tuple[str, bytes]:
    """Store Q2_K."""
    parts = coded.stored.parts
    scales = parts["scales"].to(torch.uint8) | parts["minima"].to(torch.uint8) << 4
    codes = coded.matrix.reshape(-1, OUTER).to(torch.uint8)
    of_blocks = _f16(parts["d"]), _f16(parts["dmin"])
    return _join("Q2_K", [scales.view(-1, 16).contiguous(), _crumbs(codes).reshape(len(codes), -1), *of_blocks])


def ggml_q3(_name: str, coded: Coded) -> tuple[str, bytes]:
    """Store Q3_K."""
    codes = (coded.matrix.reshape(-1, 8, 32) + 4).to(torch.uint8)
    mask = ((codes >> 2).to(torch.int32) << torch.arange(8)[:, None]).sum(1).to(torch.uint8)
    scales = (coded.stored.parts["scales"] + 32).to(torch.uint8).view(-1, 16)
    low = scales[:, :8] & 15 | (scales[:, 8:] & 15) << 4
    high = (scales >> 4).view(-1, 4, 4)
    high = high[:, 0] | high[:, 1] << 2 | high[:, 2] << 4 | high[:, 3] << 6
    return _join("Q3_K", [mask, _crumbs(codes & 3), low, high, _f16(coded.stored.parts["d"])])


def ggml_q6(_name: str, coded: Coded) -> tuple[str, bytes]:
    """Store Q6_K."""
    codes = (coded.matrix.reshape(-1, 2, 4, 32) + 32).to(torch.uint8)
    low = codes & 15
    low = torch.cat([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], 2)
    high = codes >> 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    scales = coded.stored.parts["scales"].to(torch.int8).view(torch.uint8).view(-1, 16)
    return _join("Q6_K", [low, high, scales, _f16(coded.stored.parts["d"])])


def ggml_iq4_xs(_name: str, coded: Coded) -> tuple[str, bytes]:
    """Store IQ4_XS."""
    scales = (coded.stored.parts["scales"] + 32).to(torch.int32).view(-1, 8)
    high = ((scales >> 4) << 2 * torch.arange(8)).sum(1).to(torch.int16).view(-1, 1).view(torch.uint8)
    low = nibbles(scales & 15)
    codes = _halves(_places(coded.matrix), 32).view(len(scales), -1)
    return _join("IQ4_XS", [_f16(coded.stored.parts["d"]), high, low, codes])


# The layouts


def scheme(bits: int, group: int, symmetric: bool, form: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    """Return the configuration that compressed-tensors writes; ``more`` describes the weights."""
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group} | more
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


def whole(bits: int, form: str, strategy: str, **more: Any) -> dict[str, Any]:
    """Return the configuration of codes without groups of columns."""
    return scheme(bits, 0, True, form, strategy=strategy, **({"group_size": None} | more))


def _gptq_config(bits: int, group: int, sym: bool) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": False,
            "checkpoint_format": "gptq"}  # fmt: skip


F32, F16, BF16 = (partial(as_dtype, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
QUANTO = {"quant_method": "quanto"}
U4 = integers(0, 15)
Store = Callable[[str, Coded], Any]


def _mlx(bits: int) -> Layout:
    grid = integers(0, 2**bits - 1)
    return Layout(f"MLX {bits} bits", "MLX", grid, (1, 64), BF16, partial(mlx, bits=bits), shifted=True,
                  config={"group_size": 64, "bits": bits})  # fmt: skip


def _gptq(bits: int, group: int, shifted: bool = False) -> Layout:
    half = 2 ** (bits - 1)
    grid = integers(0, 2 * half - 1) if shifted else integers(-half, half - 1)
    keep = partial(with_zero_points, torch.float16, 0, 2 * half - 1) if shifted else F16
    return Layout(f"GPTQ {bits} bits{' asym' if shifted else ''}", "GPTQ", grid, (1, group), keep,
                  partial(gptq, bits=bits), shifted=shifted, config=_gptq_config(bits, group, not shifted))  # fmt: skip


def _ggml(ggml_type: str, grid: Grid, **more: Any) -> Layout:
    return Layout(ggml_type, "GGUF", grid, (1, 32), F16, partial(ggml_basic, ggml_type=ggml_type), **more)


def _k(ggml_type: str, grid: Grid, group: int, low: int, high: int, store: Store, **more: Any) -> Layout:
    keep = partial(under_superblocks, low, high, group=group)
    return Layout(ggml_type, "GGUF", grid, (1, group), keep, store, two_levels=True, **more)


LAYOUTS = (
    Layout("INT8 row", "INT8", integers(-128, 127), (1, 0), F32, plain_int8,
           config=whole(8, "int-quantized", "channel")),
    Layout("INT8 tensor", "INT8", integers(-128, 127), (0, 0), F32,
           partial(labelled_int8, said="int8_tensorwise")),
    Layout("INT8 128 × 128", "INT8", integers(-128, 127), (128, 128), F32, labelled_int8),
    Layout("INT8 asym g128", "INT8", integers(-128, 127), (1, 128), partial(with_zero_points, torch.float32, -128, 127),
           ct_int8, shifted=True, config=scheme(8, 128, False, "int-quantized")),
    Layout("CT INT4 g128", "INT4", integers(-8, 7), (1, 128), BF16, pack_ct, config=scheme(4, 128, True)),
    Layout("CT INT4 g32", "INT4", integers(-8, 7), (1, 32), BF16, pack_ct, config=scheme(4, 32, True)),
    Layout("CT INT4 asym g128", "INT4", integers(-8, 7), (1, 128),
           partial(with_zero_points, torch.bfloat16, -8, 7), pack_ct, shifted=True, config=scheme(4, 128, False)),
    _gptq(4, 128), _gptq(8, 128), _gptq(4, 128, True), _gptq(2, 64, True),
    Layout("AWQ", "AWQ", U4, (1, 128), partial(with_zero_points, torch.float16, 0, 15), awq, shifted=True, config=AWQ),
    Layout("FP8 tensor", "FP8", E4M3, (0, 0), F32, fp8, config=whole(8, "float-quantized", "tensor", type="float")),
    Layout("FP8 row", "FP8", E4M3, (1, 0), F32, fp8, config=whole(8, "float-quantized", "channel", type="float")),
    Layout("FP8 128 × 128", "FP8", E4M3, (128, 128), F32, partial(fp8, scale="_scale_inv"), config=BLOCK_FP8),
    Layout("MXFP8", "MX", E4M3, (1, 32), powers_of_two, mxfp8,
           config=scheme(8, 32, True, "mxfp8-quantized", type="float")),
    Layout("MXFP4", "MX", SIGNED_E2M1, (1, 32), powers_of_two, ct_mxfp4,
           config=scheme(4, 32, True, "mxfp4-pack-quantized", type="float")),
    Layout("NVFP4", "NVFP4", SIGNED_E2M1, (1, 16), below_global, nvfp4, two_levels=True, config=NVFP4),
    Layout("CT NVFP4", "NVFP4", SIGNED_E2M1, (1, 16), below_global, ct_nvfp4, two_levels=True,
           config=scheme(4, 16, True, "nvfp4-pack-quantized", type="float", strategy="tensor_group")),
    Layout("NF4", "NF4", of_table(NF4.tolist()), (1, 64), F32, bnb, config=BNB),
    Layout("NF4 double", "NF4", of_table(NF4.tolist()), (1, 64), nest, bnb, two_levels=True, config=BNB),
    _mlx(4), _mlx(8),
    Layout("HQQ", "HQQ", U4, (1, 64), floating_zeros, hqq, shifted=True, config={"quant_method": "hqq"}),
    Layout("quanto INT8", "quanto", integers(-128, 127), (1, 0), F32, quanto8, config=QUANTO),
    Layout("quanto INT4", "quanto", U4, (1, 128), F32, partial(quanto, bits=4), shifted=True,
           config=QUANTO),
    Layout("quanto INT2", "quanto", integers(0, 3), (1, 128), F32, partial(quanto, bits=2), shifted=True,
           config=QUANTO),
    _ggml("Q4_0", integers(-8, 7), signed=True), _ggml("Q5_0", integers(-16, 15), signed=True),
    _ggml("Q4_1", U4, shifted=True), _ggml("Q5_1", integers(0, 31), shifted=True),
    _ggml("Q8_0", integers(-127, 127)), _ggml("IQ4_NL", of_table(IQ4), signed=True),
    _k("Q2_K", integers(0, 3), 16, 0, 15, ggml_q2, shifted=True),
    _k("Q3_K", integers(-4, 3), 16, -32, 31, ggml_q3, signed=True),
    _k("Q4_K", U4, 32, 0, 63, partial(ggml_k45, ggml_type="Q4_K"), shifted=True),
    _k("Q5_K", integers(0, 31), 32, 0, 63, partial(ggml_k45, ggml_type="Q5_K"), shifted=True),
    _k("Q6_K", integers(-32, 31), 16, -128, 127, ggml_q6, signed=True),
    _k("IQ4_XS", of_table(IQ4), 32, -32, 31, ggml_iq4_xs, signed=True),
)  # fmt: skip

# Of experts in one tensor, as a matrix of their rows.
STACKS = (
    Layout("FP8 expert", "experts", E4M3, (128, 0), F32, fp8_stack,
           config=whole(8, "float-quantized", "tensor", type="float")),
    Layout("gpt-oss MXFP4", "experts", SIGNED_E2M1, (1, 32), powers_of_two, gpt_oss, config={"quant_method": "mxfp4"}),
    Layout("CT INT4 experts", "experts", integers(-8, 7), (1, 128), BF16, ct_packed_stack,
           config=scheme(4, 128, True)),
)  # fmt: skip


def find_layout(name: str) -> Layout:
    """Return the layout of that name."""
    return next(layout for layout in (*LAYOUTS, *STACKS) if layout.name == name)
