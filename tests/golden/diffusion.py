"""Weights of diffusion models that no fixture has, made by hand with numpy alone: see make_golden.py.

Packers here go the way of the writers (numbers to bytes), quanterr's readers the other way. Nunchaku's order is
that of deepcompressor's NunchakuWeightPacker, which gives the same bytes.
"""

import json
from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

RNG = np.random.default_rng(20250815)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E4M3, BF16, F16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.float16
Arrays = dict[str, np.ndarray]


class Made(NamedTuple):
    """The stored tensors of one golden file and their values."""

    case: str
    how: str
    stored: Arrays
    values: Arrays
    tolerance: str | None = None
    also: dict[str, str] | None = None  # weights in another format


def every() -> Iterator[Made]:
    """Yield all cases."""
    yield from convrot()
    yield from asym()
    yield from awq()
    yield from svdquant()
    yield from flat()
    yield from nunchaku()


# ---- what they share


def codes_of(low: int, high: int, *shape: int) -> np.ndarray:
    return RNG.integers(low, high, shape)


def factors(dtype: type, *shape: int) -> np.ndarray:
    return (0.5 + RNG.random(shape)).astype(dtype)


def branch(dtype: type, *shape: int) -> np.ndarray:
    return RNG.normal(0, 0.1, shape).astype(dtype)


def low_first(codes: np.ndarray) -> np.ndarray:
    """Return codes packed two to a byte, the first in the low bits."""
    return ((codes[..., 0::2] & 15) | (codes[..., 1::2] & 15) << 4).astype(np.uint8)


def label(**fields: object) -> np.ndarray:
    return np.frombuffer(json.dumps(fields).encode(), np.uint8)


def f32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32)


def of_groups(scale: np.ndarray, group: int) -> np.ndarray:
    return f32(scale).repeat(group, 1)


def rotation(size: int) -> np.ndarray:
    small = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float64)
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(matrix, small)
    return matrix / np.sqrt(size)


def turned_back(values: np.ndarray, size: int) -> np.ndarray:
    rows, cols = values.shape
    return f32((values.astype(np.float64).reshape(rows, cols // size, size) @ rotation(size)).reshape(rows, cols))


# ---- ComfyUI


def convrot() -> Iterator[Made]:
    stored, plain, rotated = {}, {}, {}
    for name, shape, dtype, scale_shape in (("a", (5, 48), np.float32, (5,)), ("b", (7, 34), BF16, (7, 1))):
        codes, scale = codes_of(-8, 8, *shape), factors(dtype, *scale_shape)
        stored |= {f"{name}.weight": low_first(codes).view(np.int8), f"{name}.weight_scale": scale}
        stored[f"{name}.comfy_quant"] = label(format="int4_tensorwise")
        plain[f"{name}.weight"] = f32(codes) * f32(scale).reshape(-1, 1)
    yield Made("int4_tensorwise/handmade", "code * scale of the row; codes from -8 to 7", stored, plain)
    stored = {}
    for name, config, size in (
        ("a", {"format": "int4_tensorwise", "convrot": True, "convrot_groupsize": 64}, 64),
        ("b", {"format": "int4_convrot_w4a4", "convrot_groupsize": 16}, 16),
        ("c", {"format": "convrot_w4a4", "params": {"convrot_groupsize": 4}}, 4),
        ("d", {"format": "convrot_w4a4"}, 256),
    ):
        codes, scale = codes_of(-8, 8, 3, 2 * max(size, 32)), factors(F16, 3, 1)
        stored |= {f"{name}.weight": low_first(codes).view(np.int8), f"{name}.weight_scale": scale}
        stored[f"{name}.comfy_quant"] = label(**config)
        rotated[f"{name}.weight"] = turned_back(f32(codes) * f32(scale), size)
    yield Made(
        "convrot_w4a4/handmade_groups", "code * scale of the row, turned back in float64", stored, rotated, "1e-6"
    )


def asym() -> Iterator[Made]:
    stored, values = {}, {}
    for name, bits, cols, group, size, dtype, codebook, correction in (
        ("a", 4, 128, 32, 64, np.float32, False, None),
        ("b", 4, 192, 16, 64, np.uint8, True, BF16),
        ("c", 4, 64, 4, 16, E4M3, True, np.float32),
        ("d", 6, 96, 48, 16, E4M3, False, None),
        ("e", 6, 512, 16, 256, np.uint8, False, None),
    ):
        codes = codes_of(0, 1 << bits, 3, cols)
        s_rel = (8 + 8 * RNG.random((3, cols // group))).astype(E4M3 if dtype is np.uint8 else dtype)
        s_channel = (0.001 * (1 + RNG.random(3))).astype(np.float32)
        table = np.sort(RNG.normal(0, 5, 16)).astype(np.float32) if codebook else None
        packed = low_first(codes & 15)
        if bits == 6:
            upper = (codes >> 4).reshape(3, -1, 4)
            packed = np.hstack([packed, (upper << np.arange(0, 8, 2)).sum(2).astype(np.uint8)])
        stored |= {
            f"{name}.weight": packed.view(np.int8),
            f"{name}.weight_s_rel": s_rel.view(np.uint8) if dtype is np.uint8 else s_rel,
            f"{name}.weight_s_channel": s_channel,
            f"{name}.comfy_quant": label(format="asym_w4a8_int8", group_size=group, convrot_groupsize=size),
        }
        levels = f32(codes - (1 << bits - 1)) if table is None else table[codes]
        rotated = np.clip(np.rint(levels * of_groups(s_rel, group)), -127, 127) * s_channel[:, None]
        if table is not None:
            stored[f"{name}.weight_codebook"] = table
        if correction:
            stored[f"{name}.weight_correction"] = more = RNG.normal(0, 0.01, (cols // group, 3)).astype(correction)
            rotated = rotated + of_groups(more.T, group)
        values[f"{name}.weight"] = turned_back(rotated, size)
    how = "round(level * s_rel) * s_channel + correction, turned back in float64"
    yield Made("asym_w4a8_int8/handmade", how, stored, values, "1e-6")


def awq() -> Iterator[Made]:
    stored, values = {}, {}
    for name, group, dtype, ending in (("a", 64, F16, "zeros"), ("b", 32, np.float32, "zero"), ("c", 64, BF16, "zero")):
        codes = codes_of(0, 16, 5, 128)
        scale, zero = factors(dtype, 128 // group, 5), branch(dtype, 128 // group, 5)
        stored |= {
            f"{name}.weight": low_first(codes).view(np.int8),
            f"{name}.weight_scale": scale,
            f"{name}.weight_{ending}": zero,
            f"{name}.comfy_quant": label(format="awq_w4a16", group_size=group),
        }
        values[f"{name}.weight"] = f32(codes - 8) * of_groups(scale.T, group) + of_groups(zero.T, group)
    yield Made("awq_w4a16/handmade", "(code - 8) * scale + zero", stored, values)


def svdquant() -> Iterator[Made]:
    stored, values = {}, {}
    for name, shape, tiled, prefix, dtype, basis in (
        ("a", (5, 128), False, "", F16, "post_smoothing"),
        ("b", (6, 64), False, "weight_", np.float32, None),
        ("c", (128, 64), True, "weight_", BF16, "post_smoothing"),
    ):
        rows, cols = shape
        codes, rank = codes_of(-8, 8, *shape), 3
        scale, smooth = factors(dtype, cols // 64, rows), factors(dtype, cols)
        down, up = branch(dtype, cols, rank), branch(dtype, rows, rank)
        packed, stored_scale, stored_up = low_first(codes), scale, up
        fields = {"format": "svdquant_w4a4"} | ({"lowrank_branch_input_basis": basis} if basis else {})
        if tiled:
            tiles = packed.reshape(rows // 128, 32, 4, cols // 64, 32).transpose(0, 3, 1, 2, 4)
            packed = tiles.reshape(rows // 128, cols // 64, 32, 128)
            stored_scale = scale.reshape(cols // 64, rows // 128, 128).transpose(1, 0, 2)
            stored_up = up.reshape(rows // 128, 128, rank).transpose(0, 2, 1)
            fields["layout"] = "kitchen_tile_packed_w4a4"
        stored |= {
            f"{name}.weight": packed.view(np.int8),
            f"{name}.weight_scale": stored_scale,
            f"{name}.{prefix}smooth_factor": smooth,
            f"{name}.{prefix}proj_down": down,
            f"{name}.{prefix}proj_up": stored_up,
            f"{name}.comfy_quant": label(**fields),
        }
        residual = (f32(codes) * of_groups(scale.T, 64)).astype(np.float64)
        product = up.astype(np.float64) @ down.astype(np.float64).T
        wide = smooth.astype(np.float64)
        values[f"{name}.weight"] = f32((residual + product) / wide if basis else residual / wide + product)
    yield Made("svdquant_w4a4/handmade", "code * scale, smoothed, and the product in float64", stored, values, "1e-6")


def flat() -> Iterator[Made]:
    """Yield the three tables of convert_to_quant, with rows that begin within a byte and within a block."""
    fp4 = (0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3)
    af4 = (1, 0.72424863, 0.55496234, 0.42563882, 0.31675666, 0.21961274, 0.12934483, 0.04273164)
    af4 += (0, -0.04934812, -0.14982478, -0.25607552, -0.3736951, -0.51243739, -0.69441008, -1)
    tables = {"fp4": np.array(fp4, np.float32) / np.float32(12), "af4": np.array(af4, np.float32)}
    for table, numbers in tables.items():
        stored, values = {}, {}
        for name, shape, block in (("a", (7, 27), 64), ("b", (4, 64), 64), ("c", (3, 50), 32)):
            n = shape[0] * shape[1]
            codes, absmax = codes_of(0, 16, n), factors(np.float32, -(-n // block))
            stored |= {
                f"{name}.weight": low_first(np.pad(codes, (0, n % 2))),
                f"{name}.absmax": absmax,
                f"{name}.comfy_quant": label(format=f"bnb_{table}", params={"group_size": block}),
            }
            values[f"{name}.weight"] = (numbers[codes] * absmax.repeat(block)[:n]).reshape(shape)
        yield Made(f"ctq_{table}/handmade", f"{table} of the code * absmax of its block", stored, values)


# ---- Nunchaku


def up_to(n: int, step: int = 128) -> int:
    return -(-n // step) * step


def pad(array: np.ndarray, *shape: int, fill: float = 0) -> np.ndarray:
    whole = np.full(shape, fill, array.dtype)
    whole[tuple(slice(n) for n in array.shape)] = array
    return whole


def fragment_codes(codes: np.ndarray) -> np.ndarray:
    rows, cols = codes.shape
    digits = codes.reshape(rows // 128, 8, 2, 8, cols // 64, 2, 4, 8)  # t, a, d, b | k, e, c, code
    words = ((digits & 15).astype(np.uint32) << np.arange(0, 32, 4, dtype=np.uint32)).sum(7, dtype=np.uint32)
    return np.ascontiguousarray(words.transpose(0, 4, 1, 3, 6, 2, 5)).view(np.int8).reshape(rows, cols // 2)


def fragment_scales(scale: np.ndarray) -> np.ndarray:
    """Return scales of 16 bits, (rows, groups), in the order of the kernel's fragments."""
    rows, groups = scale.shape
    return scale.reshape(rows // 128, 8, 2, 4, 2, groups).transpose(0, 5, 1, 3, 2, 4).reshape(groups, rows)


def fragment_small(scale: np.ndarray) -> np.ndarray:
    """Return scales of 8 bits, (rows, groups), in the order of the kernel's fragments."""
    rows, groups = scale.shape
    return scale.reshape(rows // 128, 4, 4, 8, groups // 4, 4).transpose(0, 4, 3, 2, 1, 5).reshape(groups, rows)


def fragment_branch(matrix: np.ndarray, down: bool) -> np.ndarray:
    """Return a low-rank matrix, (rank, columns) if ``down`` or (rows, rank), in the order of the fragments."""
    first, second = matrix.shape
    digits = matrix.reshape(first // 16, 2, 8, second // 16, 2, 4, 2)
    order = (3, 0, 2, 5, 1, 4, 6) if down else (0, 3, 2, 5, 1, 4, 6)
    return digits.transpose(order).reshape((second, first) if down else (first, second))


OLD = ("smooth", "smooth_orig", "lora_down", "lora_up")
NEW = ("smooth_factor", "smooth_factor_orig", "proj_down", "proj_up")


class Layer(NamedTuple):
    """One linear layer in Nunchaku's order."""

    stored: Arrays
    weight: np.ndarray
    bias: np.ndarray


def layer(
    module: str,
    rows: int,
    cols: int,
    fp4: bool = False,
    dtype: type = BF16,
    names: tuple[str, ...] = OLD,
    scales: tuple[str, ...] = (),
    folded: np.ndarray | None = None,
) -> Layer:
    """Return a layer of that shape; ``folded`` is a smoothing that the runtime leaves to the layer before."""
    group, rank = (16 if fp4 else 64), 16
    high, wide = up_to(rows), up_to(cols)
    codes = codes_of(0, 16, rows, cols)
    groups = up_to(-(-cols // group), 4 if fp4 else 2)
    scale = factors(E4M3 if fp4 else dtype, rows, cols // group)
    smooth = factors(dtype, cols) if folded is None else folded
    down, up = branch(dtype, rank, cols), branch(dtype, rows, rank)
    stored_smooth = smooth if folded is None else np.ones_like(smooth)
    pack = fragment_small if fp4 else fragment_scales
    bias = branch(dtype, rows)
    stored = {
        "qweight": fragment_codes(pad(codes, high, wide)),
        "wscales": pack(pad(scale, high, groups, fill=1)),
        "bias": fragment_scales(pad(bias[:, None], high, 1, fill=1))[0],
        names[0]: fragment_scales(pad(stored_smooth[:, None], wide, 1, fill=1))[0],
        names[1]: fragment_scales(pad(smooth[:, None], wide, 1, fill=1))[0],
        names[2]: fragment_branch(pad(down, rank, wide), True),
        names[3]: fragment_branch(pad(up, high, rank), False),
    }
    residual = (E2M1[codes] if fp4 else f32((codes ^ 8) - 8)) * of_groups(scale, group)
    if "wtscale" in scales:
        stored["wtscale"] = factors(np.float32, 1)
        residual = residual * stored["wtscale"]
    if "wcscales" in scales:
        of_rows = factors(dtype, rows)
        stored["wcscales"] = fragment_scales(pad(of_rows[:, None], high, 1, fill=1))[0]
        residual = residual * f32(of_rows)[:, None]
    product, divisor = up.astype(np.float64) @ down.astype(np.float64), smooth.astype(np.float64)
    wide_residual = residual.astype(np.float64)
    weight = wide_residual / divisor + product if folded is None else (wide_residual + product) / divisor
    return Layer({f"{module}.{name}": array for name, array in stored.items()}, f32(weight), f32(bias))


def modulation(module: str, rows: int, cols: int, parts: int, more_groups: int = 0) -> Layer:
    """Return a layer whose rows are interleaved, with 1 added to the bias of its scales."""
    codes, scale, zero = codes_of(0, 16, rows, cols), factors(BF16, rows, cols // 64), branch(BF16, rows, cols // 64)
    bias = branch(BF16, rows)
    order = np.arange(rows).reshape(parts, -1).T.reshape(-1)  # stored row: row
    digits = codes[order].reshape(rows // 4, 4, cols // 64, 2, 4, 8)  # t, d | k, b, code, c
    words = (digits.astype(np.uint32) << np.arange(0, 16, 4, dtype=np.uint32)[:, None]).sum(4).astype(np.uint16)
    added = np.zeros((parts, rows // parts), np.float32)
    if parts > 1:
        added[[1, parts - 2]] = 1
    shifted = f32(bias) + added.reshape(-1)
    kept = shifted.astype(BF16)
    stored = {
        "qweight": np.ascontiguousarray(words.transpose(0, 2, 1, 3, 4)).view(np.int32).reshape(rows // 4, cols // 2),
        "wscales": pad(scale[order].T, cols // 64 + more_groups, rows),
        "wzeros": pad(zero[order].T, cols // 64 + more_groups, rows),
        "bias": kept[order],
    }
    weight = f32(codes) * of_groups(scale, 64) + of_groups(zero, 64)
    return Layer({f"{module}.{name}": array for name, array in stored.items()}, weight, f32(kept) - added.reshape(-1))


def without_biases(stored: Arrays) -> Arrays:
    return {name: array for name, array in stored.items() if not name.endswith(".bias")}


def nunchaku() -> Iterator[Made]:
    block = "transformer_blocks.0"
    how = "code * scale, smoothed, and the product in float64; rows and columns padded to 128"
    for fp4, name, scales in ((False, "nunchaku_int4", ()), (True, "nunchaku_nvfp4", ("wtscale", "wcscales"))):
        linear = layer("transformer_blocks.0.attn.to_out.0", 72, 192, fp4, F16, NEW, scales)
        two = layer("transformer_blocks.0.mlp_fc2", 136, 64 if fp4 else 128, fp4, BF16, OLD, scales[:1])
        stored = {n: a for n, a in (linear.stored | two.stored).items() if not n.endswith(".bias")}
        values = {
            "transformer_blocks.0.attn.to_out.0.weight": linear.weight,
            "transformer_blocks.0.ff.net.2.weight": two.weight,
        }
        yield Made(f"{name}/handmade_padded", how, stored, values, "1e-6")

    smooth = factors(BF16, 64)
    fused = layer(f"{block}.qkv_proj", 192, 64)
    after = layer(f"{block}.out_proj", 16, 64, folded=smooth)
    attn = f"{block}.attn"
    q, k, v = np.split(fused.weight, 3)
    values = {
        f"{attn}.to_q.weight": q,
        f"{attn}.to_k.weight": k[:],
        f"{attn}.to_v.weight": v * f32(smooth)[:, None],
        f"{attn}.to_out.0.weight": after.weight,
    }
    stored = {n: a for n, a in (fused.stored | after.stored).items() if not n.endswith(".bias")}
    yield Made(
        "nunchaku_int4/handmade_folded", how + "; the smoothing of out_proj is in the rows of V", stored, values, "1e-6"
    )

    layers = {
        "single_transformer_blocks.0.norm.linear": modulation("single_transformer_blocks.0.norm.linear", 24, 64, 3, 15),
        f"{block}.img_mod.1": modulation(f"{block}.img_mod.1", 24, 192, 6),
        "time.linear": modulation("time.linear", 8, 64, 1, 1),
    }
    stored = {n: a for made in layers.values() for n, a in made.stored.items()}
    weights = {f"{name}.weight": made.weight for name, made in layers.items()}
    biases = {f"{name}.bias": made.bias for name, made in layers.items()}
    how = "code * scale + zero; rows interleaved by 3, 6 and not at all"
    yield Made("nunchaku_awq/handmade", how, without_biases(stored), weights)

    plain = layer(f"{block}.attn.to_out.0", 72, 128)
    also = dict.fromkeys(weights, "nunchaku_awq") | {f"{block}.attn.to_out.0.weight": "nunchaku_int4"}
    weights[f"{block}.attn.to_out.0.weight"] = plain.weight
    biases[f"{block}.attn.to_out.0.bias"] = plain.bias
    how = "biases in order, those of scales less 1, beside their layers"
    yield Made("nunchaku_bias/handmade", how, stored | plain.stored, weights | biases, "1e-6", also)
