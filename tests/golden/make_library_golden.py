"""Makes golden files of shapes and settings that the fixtures of make_golden.py have not, by the libraries themselves.

    python tests/golden/make_library_golden.py

Needs bitsandbytes, hqq, mlx, optimum-quanto and torchao besides torch; each is asked to quantize a small
weight and to read it again, in float32 as far as it can. No number comes from quanterr.
"""

import ast
import importlib.metadata
import inspect
import json
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import torch
from make_golden import Tensors, save
from torch import Tensor

Case = tuple[str, str, Tensors, Tensors, dict[str, str], str]  # case, library, stored, values, header, how


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return Gaussian weights with a few outliers and a stretch of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = 0.02 * torch.randn(shape, generator=generator)
    flat = x.view(-1)
    flat[:: max(flat.numel() // 5, 1)] *= 20
    flat[-70:-3] = 0
    return x.to(dtype)


def bitsandbytes() -> Iterator[Case]:
    from bitsandbytes import functional
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    def four_bits(quant_type: str, shapes: dict[str, tuple[int, ...]], **settings: object) -> tuple[Tensors, Tensors]:
        stored, values = {}, {}
        for layer, shape in shapes.items():
            x = numbers(*shape, dtype=torch.float16)
            codes, state = functional.quantize_4bit(x, quant_type=quant_type, **settings)
            parts = state.as_dict(packed=True)
            stored[f"{layer}.weight"] = codes
            stored |= {f"{layer}.weight.{name}": part for name, part in parts.items()}
            absmax = state.absmax
            if state.nested:
                absmax = functional.dequantize_blockwise(absmax, state.state2).float() + state.offset
            flat = codes.view(torch.uint8).view(-1)  # the CPU kernel takes the wrong absmax for some shapes
            values[f"{layer}.weight"] = _dequantize_4bit_compute(
                flat, absmax, state.code, state.blocksize, shape, torch.float32
            )
        return stored, values

    how = "quantize_4bit of {}; read by backends/default/ops.py to float32"
    ragged = {"a": (7, 33), "b": (1, 65), "c": (3, 2, 40)}
    for quant_type in ("nf4", "fp4"):
        yield (
            f"bnb_{quant_type}/bnb_ragged",
            "bitsandbytes",
            *four_bits(quant_type, ragged, blocksize=64),
            {},
            how.format(f"{ragged}: blocks of 64 that cross the ends of rows"),
        )
    nested = {"a": (129, 133)}
    yield (
        "bnb_nf4/bnb_nested_ragged",
        "bitsandbytes",
        *four_bits("nf4", nested, blocksize=64, compress_statistics=True),
        {},
        how.format(f"{nested}: more than one block of nested absmax"),
    )
    for storage in (torch.float16, torch.float32):
        yield (
            f"bnb_nf4/bnb_stored_as_{str(storage).removeprefix('torch.')}",
            "bitsandbytes",
            *four_bits("nf4", {"a": (5, 48)}, blocksize=128, quant_storage=storage),
            {},
            how.format(f"[5, 48] with quant_storage={storage}"),
        )


def hqq() -> Iterator[Case]:
    from hqq.core.quantize import HQQLinear, Quantizer, hqq_base_quant_config

    def layer(name: str, shape: tuple[int, int], dtype: torch.dtype, **settings: object) -> tuple[Tensors, Tensors]:
        linear = torch.nn.Linear(shape[1], shape[0], bias=False)
        linear.weight.data = numbers(*shape, dtype=torch.float32)
        config = hqq_base_quant_config(**settings)
        made = HQQLinear(linear, config, compute_dtype=dtype, device="cpu")
        stored = {f"{name}.{key}": tensor.clone() for key, tensor in made.state_dict().items() if tensor is not None}
        wide = {key: t.float() if torch.is_tensor(t) and t.is_floating_point() else t for key, t in made.meta.items()}
        values = Quantizer.dequantize(made.W_q, wide | {"compute_dtype": torch.float32})
        return stored, {f"{name}.weight": values}

    for bits in (8, 6, 5, 4, 3, 2, 1.58, 1):
        stored, values = {}, {}
        for axis in (0, 1):
            for group, dtype in ((8, torch.float16), (48, torch.bfloat16), (None, torch.float16)):
                settings = {"nbits": bits, "group_size": group, "axis": axis}
                more = layer(f"axis{axis}_group{group}", (16, 48), dtype, **settings)
                stored, values = stored | more[0], values | more[1]
        more = layer("viewed", (16, 48), torch.bfloat16, nbits=bits, group_size=24, axis=1, view_as_float=True)
        stored, values = stored | more[0], values | more[1]
        how = f"HQQLinear of [16, 48] in {bits} bits; read by Quantizer.dequantize with everything in float32"
        yield f"hqq/hqq_{bits}_bits", "hqq", stored, values, {}, how


def mlx() -> Iterator[Case]:
    import mlx.core as mx
    import numpy as np

    def as_torch(array: object) -> Tensor:
        if array.dtype == mx.bfloat16:
            return torch.from_numpy(np.array(array.view(mx.uint16)).view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.array(array))

    def quantize_mlx(x: Tensor, dtype: object, **settings: object) -> tuple[Tensors, Tensor]:
        array = mx.array(x.float().numpy()).astype(dtype)
        parts = mx.quantize(array, **settings)
        wide = [part.astype(mx.float32) if part.dtype in (mx.float16, mx.bfloat16) else part for part in parts]
        values = mx.dequantize(*wide, **settings, dtype=mx.float32)
        return dict(zip(("weight", "scales", "biases"), map(as_torch, parts), strict=False)), as_torch(values)

    for bits in (1, 2, 3, 4, 5, 6, 8):
        stored, values = {}, {}
        for group in (32, 64, 128):
            for shape in ((2, 256), (2, 2, 128)):
                name = f"group{group}_{len(shape)}d"
                dtype = mx.float16 if group == 64 else mx.bfloat16
                parts, value = quantize_mlx(
                    numbers(*shape, seed=bits), dtype, bits=bits, group_size=group, mode="affine"
                )
                stored |= {f"{name}.{key}": part for key, part in parts.items()}
                values[f"{name}.weight"] = value
        how = f"mx.quantize in {bits} bits, groups of 32, 64 and 128; read by mx.dequantize with scales in float32"
        yield f"mlx_affine/mlx_{bits}_bits", "mlx", stored, values, {}, how
    for mode in ("mxfp4", "nvfp4", "mxfp8"):
        stored, values = {}, {}
        for shape in ((3, 96), (2, 3, 64)):
            parts, value = quantize_mlx(numbers(*shape), mx.bfloat16, mode=mode)
            stored |= {f"{len(shape)}d.{key}": part for key, part in parts.items()}
            values[f"{len(shape)}d.weight"] = value
        yield f"mlx_{mode}/mlx_shapes", "mlx", stored, values, {}, f"mx.quantize, mode {mode}; read by mx.dequantize"


def quanto() -> Iterator[Case]:
    from optimum.quanto import freeze, qfloat8_e4m3fn, qfloat8_e5m2, qint2, qint4, qint8, quantize

    def layer(name: str, shape: tuple[int, int], dtype: torch.dtype, weights: object) -> tuple[Tensors, Tensors]:
        linear = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
        linear.weight.data = numbers(*shape, dtype=dtype)
        model = torch.nn.ModuleDict({name: linear})
        quantize(model, weights=weights)
        freeze(model)
        stored = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        weight = model[name].weight
        weight._scale = weight._scale.float()
        if hasattr(weight, "_shift"):
            weight._shift = weight._shift.float()
        return stored, {f"{name}.weight": weight.dequantize().float()}

    kinds = {"int8": [qint8], "float8": [qfloat8_e4m3fn, qfloat8_e5m2], "int4": [qint4], "int2": [qint2]}
    for weight_type, weights in kinds.items():
        stored, values = {}, {}
        shapes = ((3, 40),) if weight_type in ("int8", "float8") else ((3, 40), (7, 160), (5, 192), (6, 256), (3, 136))
        for number, qtype in enumerate(weights):
            for shape in shapes:
                name = f"layer{number}_{shape[0]}x{shape[1]}"
                more = layer(name, shape, torch.float16 if weight_type == "int4" else torch.bfloat16, qtype)
                stored, values = stored | more[0], values | more[1]
        how = f"quantize and freeze of {shapes}; read by QTensor.dequantize with scale and shift in float32"
        yield f"quanto_{weight_type}/quanto_shapes", "optimum-quanto", stored, values, {}, how


def torchao() -> Iterator[Case]:
    from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, MappingType
    from torchao.quantization.granularity import PerGroup, PerRow, PerTensor
    from torchao.quantization.quant_primitives import dequantize_affine

    def flat(made: dict[str, Tensor], read: Callable[[Tensor], Tensor]) -> tuple[Tensors, Tensors, dict[str, str]]:
        stored, header = flatten_tensor_state_dict({f"{name}.weight": tensor for name, tensor in made.items()})
        return stored, {f"{name}.weight": read(tensor).clone() for name, tensor in made.items()}, header

    def widen(tensor: Tensor) -> Tensor:
        return tensor.dequantize(output_dtype=torch.float32)

    from torchao.quantization.quantize_.workflows.int4 import int4_plain_int32_tensor as words

    def pack_words(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Return an Int4PlainInt32Tensor for XPUs, whose kernel copies four bytes into a word, and its values."""
        tree = ast.parse(inspect.getsource(words._from_hp_xpu))
        tree.body[0].body = [node for node in tree.body[0].body if not isinstance(node, ast.Assert)]
        exec(compile(tree, words.__file__, "exec"), names := dict(vars(words)))
        with patch.object(torch.ops.aten, "_convert_weight_to_int4pack", lambda codes, _: codes.view(torch.int32)):
            made = names["_from_hp_xpu"](words.Int4PlainInt32Tensor, x, [1, group])
        scale, zero = (part.t().contiguous() for part in (made.scale, made.zero_point.int()))
        codes = words.quantize_affine(x, [1, group], scale, zero, torch.int32, 0, 15)
        read = partial(dequantize_affine, codes, [1, group], scale.float(), zero, torch.int32, 0, 15)
        return made, read(output_dtype=torch.float32)

    x, stack = numbers(3, 192), numbers(3, 5, 96)
    pairs = {f"group{group}": pack_words(numbers(6, 192, seed=group), group) for group in (32, 64)}
    stored, header = flatten_tensor_state_dict({f"{name}.weight": made for name, (made, _) in pairs.items()})
    values = {f"{name}.weight": read for name, (_, read) in pairs.items()}
    how = "_from_hp_xpu of Int4PlainInt32Tensor, its words as of torch-xpu-ops; dequantize_affine with float32 scales"
    yield "torchao_int4/plain_int32", "torchao", stored, values, header, how

    made = {
        "row": Int8Tensor.from_hp(x, granularity=PerRow()),
        "tensor": Int8Tensor.from_hp(x, granularity=PerTensor()),
        "group": Int8Tensor.from_hp(x, granularity=PerGroup(64)),
        "asymmetric": Int8Tensor.from_hp(x + 0.03, granularity=PerRow(), mapping_type=MappingType.ASYMMETRIC),
    }
    yield "torchao_int8/torchao_granularities", "torchao", *flat(made, widen), "Int8Tensor.from_hp and dequantize"

    def read_intx(tensor: Tensor) -> Tensor:
        tensor.dtype_before = tensor.dtype
        wide = IntxUnpackedToInt8Tensor(
            tensor.qdata, tensor.scale.float(), tensor.zero_point, tensor.target_dtype, tensor.block_size,
            torch.float32, tensor.activation_quantization,
        )  # fmt: skip
        return wide.dequantize()

    made = {
        f"{symmetry}{bits}": IntxUnpackedToInt8Tensor.from_hp(
            x + 0.03, (1, 32 if bits % 2 else 192), getattr(torch, f"int{bits}"), mapping_type=mapping
        )
        for bits in range(1, 8)
        for symmetry, mapping in (("symmetric", MappingType.SYMMETRIC), ("asymmetric", MappingType.ASYMMETRIC))
        if (symmetry, bits) != ("symmetric", 1)
    }
    how = "IntxUnpackedToInt8Tensor.from_hp of 1 to 7 bits, and dequantize with the scale in float32"
    yield "torchao_intx/torchao_bits", "torchao", *flat(made, read_intx), how

    made = {
        "row": Float8Tensor.from_hp(x, granularity=PerRow()),
        "tensor": Float8Tensor.from_hp(x, granularity=PerTensor()),
        "e5m2": Float8Tensor.from_hp(x, float8_dtype=torch.float8_e5m2, granularity=PerRow()),
        "experts": Float8Tensor.from_hp(stack, granularity=PerRow()),
    }
    yield "torchao_fp8/torchao_granularities", "torchao", *flat(made, widen), "Float8Tensor.from_hp and dequantize"

    made = {
        f"{str(element)[6:]}_{len(shape)}d{'_tiles' if tiled else ''}": mx_tensor.MXTensor.to_mx(
            numbers(*shape), element, is_swizzled_scales=tiled
        )
        for element in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2)
        for shape, tiled in (((5, 192), False), ((3, 5, 96), False), ((5, 192), True))
    }
    made["rows"] = mx_tensor.MXTensor.to_mx(numbers(130, 96), torch.float4_e2m1fn_x2, is_swizzled_scales=True)
    yield "torchao_mx/torchao_elements", "torchao", *flat(made, widen), "MXTensor.to_mx and dequantize"
    made = {element: mx_tensor.MXTensor.to_mx(numbers(5, 192), element) for element in ("fp6_e2m3", "fp6_e3m2")}
    yield "torchao_mx/torchao_fp6", "torchao", *flat(made, widen), "MXTensor.to_mx and dequantize"

    made = {}
    for shape, tiled in (((5, 176), False), ((3, 5, 96), False), ((130, 80), True), ((2, 128, 32), True)):
        y = numbers(*shape)
        scale = nvfp4_tensor.per_tensor_amax_to_scale(y.abs().max())
        global_scale = (
            nvfp4_tensor.per_tensor_amax_to_scale(y.abs().amax((-2, -1), keepdim=True)) if len(shape) == 3 else scale
        )
        for name, per_tensor in (("none", None), ("one", scale), ("each", global_scale)):
            if not tiled or (name, len(shape)) in (("one", 2), ("each", 3)):
                made[f"{name}_{len(shape)}d{'_tiles' if tiled else ''}"] = nvfp4_tensor.NVFP4Tensor.to_nvfp4(
                    y, per_tensor_scale=per_tensor, is_swizzled_scales=tiled
                )
    yield "torchao_nvfp4/torchao_shapes", "torchao", *flat(made, widen), "NVFP4Tensor.to_nvfp4 and dequantize"


def main() -> None:
    for library in (bitsandbytes, hqq, mlx, quanto, torchao):
        for case, name, stored, values, header, how in library():
            made = f"{name} {importlib.metadata.version(name)}"
            origin = {"producer": made, "how": how}
            stored = {key: tensor.contiguous() for key, tensor in stored.items()}
            save(case, stored, {key: t.contiguous() for key, t in values.items()}, header, origin)
            print(case, json.dumps({key: list(t.shape) for key, t in values.items()})[:100])


if __name__ == "__main__":
    main()
