"""Round the same inputs by each producer's own library: run where that library is installed, and name the producer.

    python tests/golden_inputs/make.py PRODUCER ...      writes tests/golden_inputs/PRODUCER.safetensors

Producers: compressed_tensors (compressed-tensors 0.20), torchao (0.18), comfy_kitchen (comfy-kitchen 0.2.40), modelopt
(nvidia-modelopt 0.47; its NVFP4 and MX simulations need CUDA), quark (amd-quark 0.13), gguf (0.19), ggml (the C sources
in llama-cpp-python 0.3.36, compiled as GGML below says).

Each file holds the inputs ``x``, float32 (1, 8, 256): Laplace, one column 40 times and one token 100 times as large,
32 zeros in a row; and the rounded inputs under the name of the scheme; in files of branches, whole outputs of layers
with a branch of low rank. All libraries get the same stored scales.
"""

import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FACTOR = 448 * 6 / 300.0  # the global scale of NVFP4: a divisor
STATIC, ZERO_POINT = 0.05, 3
GOLDEN = Path(__file__).parents[1] / "golden"
Rounded = Iterator[tuple[str, Tensor]]
GGML = """
    cd vendor/llama.cpp/ggml        in the sources of llama-cpp-python
    for table in f16 e8m0_half ue4m3; do echo "float ggml_table_f32_$table[65536];"; done > /tmp/tables.c
    gcc -O2 -mavx2 -mfma -mf16c -shared -fPIC -Wl,--unresolved-symbols=ignore-all -o /tmp/ggml.so -I include -I src
        -I src/ggml-cpu src/ggml-quants.c src/ggml-cpu/arch/x86/quants.c src/ggml-cpu/quants.c /tmp/tables.c -lm
"""
GGML_LIBRARY = "/tmp/ggml.so"


def inputs() -> Tensor:
    """Return the inputs, (1, 8, 256)."""
    torch.manual_seed(0)
    x = torch.distributions.Laplace(0, 1).sample((1, 8, 256))
    x[..., 7] *= 40
    x[:, 3] *= 100
    x[:, 5, :32] = 0
    return x


def compressed_tensors(x: Tensor) -> Rounded:
    """Round with ``fake_quantize``, which the forward pass of a compressed module calls."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    module = torch.nn.Linear(256, 1)
    group = {"strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": torch.uint8}
    token = {"strategy": "token", "dynamic": True}
    for name, args in {
        "fp8_token": QuantizationArgs(num_bits=8, type="float", **token),
        "int8_token": QuantizationArgs(num_bits=8, type="int", **token),
        "int8_token_asym": QuantizationArgs(num_bits=8, type="int", symmetric=False, **token),
        "int4_token": QuantizationArgs(num_bits=4, type="int", **token),
        "mxfp4": QuantizationArgs(num_bits=4, type="float", **group),
        "mxfp8": QuantizationArgs(num_bits=8, type="float", **group),
    }.items():
        scale, point = compute_dynamic_scales_and_zp(x, args, module)
        yield name, fake_quantize(x, scale, point, args)
    local = {"strategy": "tensor_group", "group_size": 16, "dynamic": "local", "scale_dtype": torch.float8_e4m3fn}
    args, factor = QuantizationArgs(num_bits=4, type="float", **local), torch.tensor([FACTOR])
    scale, point = compute_dynamic_scales_and_zp(x, args, module, global_scale=factor)
    yield "nvfp4", fake_quantize(x, scale, point, args, global_scale=factor)
    args = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False)
    yield "fp8_static", fake_quantize(x, torch.tensor([STATIC]), torch.zeros(1), args)
    args = QuantizationArgs(num_bits=8, type="int", strategy="tensor", dynamic=False, symmetric=False)
    zero = torch.tensor([ZERO_POINT], dtype=torch.int8)
    yield "int8_static", fake_quantize(x, torch.tensor([STATIC]), zero, args)


def comfy_kitchen_branches(x: Tensor) -> Rounded:
    """Yield outputs of layers of SVDQuant in tests/golden/svdquant_w4a4, by its eager backend in float32."""
    from comfy_kitchen.backends.eager import svdquant

    for name in ("svdquant_w4a4_kitchen", "svdquant_w4a4_kitchen_smooth_defect", "svdquant_w4a4_tilepacked_awq_w4a16"):
        stored = load_file(GOLDEN / "svdquant_w4a4" / f"{name}.safetensors")
        part = {key.rpartition(".")[2].removeprefix("weight_"): value for key, value in stored.items()}
        scale, smooth, down, up = (part[key].float() for key in ("scale", "smooth_factor", "proj_down", "proj_up"))
        flat = x[0, :, : len(smooth)]
        codes, scales, branch = svdquant.quantize_svdquant_w4a4(flat, smooth, down, pad_size=1)
        yield name, svdquant.scaled_mm_svdquant_w4a4(codes, part["weight"], scales, scale, branch, up)[None]


def sdnq_branches(x: Tensor) -> Rounded:
    """Yield outputs of the layer mm_svd_int8 in tests/golden/sdnq/products.

    On CPUs, SDNQ multiplies FP8 in half precision.
    """
    from sdnq.layers.linear.linear_int8 import int8_matmul

    stored = load_file(GOLDEN / "sdnq/products/model.safetensors")
    part = {key: stored[f"mm_svd_int8.{key}"] for key in ("weight", "scale", "svd_up", "svd_down")}
    given = {"svd_up": part["svd_up"].t(), "svd_down": part["svd_down"].t()}
    flat = x[..., : part["weight"].shape[1]]
    yield "mm_svd_int8", int8_matmul(flat, part["weight"].t(), part["scale"].t(), **given)


def torchao(x: Tensor) -> Rounded:
    """Round with the tensors that torchao's linear layers make of their inputs."""
    from torchao.quantization import PerRow, PerTensor
    from torchao.quantization.quant_primitives import MappingType
    from torchao.quantization.quantize_.workflows import Float8Tensor, Int8Tensor

    flat, static = x[0], torch.tensor([[STATIC]])
    yield "fp8_token", Float8Tensor.from_hp(flat, granularity=PerRow()).dequantize()[None]
    yield "fp8_tensor", Float8Tensor.from_hp(flat, granularity=PerTensor()).dequantize()[None]
    bounded = Float8Tensor.from_hp(flat, granularity=PerRow(), hp_value_ub=20.0)
    yield "fp8_token_bounded", bounded.dequantize()[None]
    yield "int8_token", Int8Tensor.from_hp(flat, PerRow()).dequantize()[None]
    yield "int8_tensor", Int8Tensor.from_hp(flat, PerTensor()).dequantize()[None]
    asymmetric = Int8Tensor.from_hp(flat, PerRow(), mapping_type=MappingType.ASYMMETRIC)
    yield "int8_token_asym", asymmetric.dequantize()[None]
    yield "int8_static_symmetric", Int8Tensor.from_hp(flat, PerTensor(), scale=static).dequantize()[None]


def comfy_kitchen(x: Tensor) -> Rounded:
    """Round with comfy-kitchen's eager backend. Rotated and smoothed inputs stay as the product sees them."""
    from comfy_kitchen.backends.eager import convrot_w4a4, quantization, svdquant

    flat, static = x[0], torch.tensor(STATIC)
    codes = quantization.quantize_per_tensor_fp8(flat, static)
    yield "fp8_static", quantization.dequantize_per_tensor_fp8(codes, static, torch.float32)[None]
    codes, scale = quantization.quantize_int8_rowwise(flat)
    yield "int8_token", (codes.float() * scale)[None]
    codes, scale = quantization.quantize_mxfp8(flat)
    yield "mxfp8_ceil", quantization.dequantize_mxfp8(codes, scale, torch.float32)[None]
    factor = torch.tensor(1 / FACTOR)
    codes, scale = quantization.quantize_nvfp4(flat, factor)
    yield "nvfp4", quantization.dequantize_nvfp4(codes, factor, scale, torch.float32)[None]
    for size in (64, 256):
        h = quantization._build_hadamard(size)
        rotated = quantization._rotate_activation(flat, h, size)
        yield f"rotated_{size}", rotated[None]
        codes, scale = quantization.quantize_int8_rowwise(rotated)
        yield f"int8_token_rotated_{size}", (codes.float() * scale)[None]
        codes, scale = convrot_w4a4._quantize_signed_int4_rowwise_unpacked(rotated)
        yield f"int4_token_narrow_rotated_{size}", (codes.float() * scale[:, None])[None]
    generator = torch.Generator().manual_seed(1)
    smooth = torch.rand(256, generator=generator) + 0.5
    down, up = (torch.randn(size, 4, generator=generator) for size in (256, 16))
    weight = torch.randint(-7, 8, (16, 256), generator=generator)
    scales = torch.rand(4, 16, generator=generator) / 10
    yield from (("smooth", smooth), ("down", down), ("up", up))
    yield "residual", (weight.view(16, 4, 64) * scales.t()[:, :, None]).view(16, 256)
    codes, of_x, low = svdquant.quantize_svdquant_w4a4(flat, smooth, down, pad_size=1)
    packed = svdquant._pack_int4_row_major(weight)
    yield "svdquant_output", svdquant.scaled_mm_svdquant_w4a4(codes, packed, of_x, scales, low, up)[None]


def modelopt(x: Tensor) -> Rounded:
    """Round with the quantizers that ``mtq.quantize`` puts before a layer's inputs, where they run without CUDA."""
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

    def round_scales(amax: float | None = None, **attributes: object) -> Tensor:
        quantizer = TensorQuantizer(QuantizerAttributeConfig(**attributes))
        if amax is not None:
            quantizer.amax = torch.tensor(amax)
        return quantizer(x)

    yield "fp8_static", round_scales(STATIC * 448, num_bits=(4, 3))
    yield "int8_static_symmetric", round_scales(STATIC * 127, num_bits=8)
    yield "fp8_token", round_scales(num_bits=(4, 3), type="dynamic", block_sizes={-1: None})
    yield "int8_token", round_scales(num_bits=8, type="dynamic", block_sizes={-1: None})


def quark(x: Tensor) -> Rounded:
    """Round with Quark's fake quantizers of dynamic inputs, and with the kernel that its static ones call."""
    from quark.torch.quantization.config import config
    from quark.torch.quantization.tensor_quantize import FakeQuantizeBase

    flat = x[0]
    for name, spec in {
        "fp8_token": config.FP8E4M3PerChannelSpec(ch_axis=0, is_dynamic=True),
        "fp8_tensor": config.FP8E4M3PerTensorSpec(is_dynamic=True),
        "int8_tensor": config.Int8PerTensorSpec(is_dynamic=True),
        "int8_token": config.Int8PerChannelSpec(ch_axis=0, symmetric=True, is_dynamic=True),
        "int8_token_asym": config.Int8PerChannelSpec(ch_axis=0, symmetric=False, is_dynamic=True),
        "mxfp4": config.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=True),
        "mxfp8_even": config.OCP_MXFP8E4M3Spec(ch_axis=-1, is_dynamic=True),
    }.items():
        yield name, FakeQuantizeBase.get_fake_quantize(spec.to_quantization_spec())(flat)[None]


def gguf(x: Tensor) -> Rounded:
    """Round with the quantizer of the gguf package."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    codes = quantize(x.numpy(), GGMLQuantizationType.Q8_0)
    yield "q8_0", torch.from_numpy(dequantize(codes, GGMLQuantizationType.Q8_0))


def ggml(x: Tensor) -> Rounded:
    """Round with the functions for x86 that llama.cpp calls."""
    library = ctypes.CDLL(GGML_LIBRARY, mode=ctypes.RTLD_LOCAL | 1)
    rows = x.view(-1)
    for name, quantize, dequantize, size in (
        ("q8_0", "quantize_row_q8_0", "dequantize_row_q8_0", 34 / 32),
        ("q8_k", "quantize_row_q8_K", "dequantize_row_q8_K", 292 / 256),
    ):
        stored = (ctypes.c_uint8 * int(rows.numel() * size))()
        out = torch.empty_like(rows)
        count = ctypes.c_int64(rows.numel())
        library[quantize](ctypes.c_void_p(rows.data_ptr()), stored, count)
        library[dequantize](stored, ctypes.c_void_p(out.data_ptr()), count)
        yield name, out.view_as(x)


PRODUCERS: dict[str, tuple[str, Callable[[Tensor], Rounded]]] = {
    "compressed_tensors": ("compressed-tensors", compressed_tensors),
    "torchao": ("torchao", torchao),
    "comfy_kitchen": ("comfy-kitchen", comfy_kitchen),
    "comfy_kitchen_branches": ("comfy-kitchen", comfy_kitchen_branches),
    "sdnq_branches": ("sdnq", sdnq_branches),
    "modelopt": ("nvidia-modelopt", modelopt),
    "quark": ("amd-quark", quark),
    "gguf": ("gguf", gguf),
    "ggml": ("llama-cpp-python", ggml),
}


def main() -> None:
    """Write the file of each producer that is named."""
    for name in sys.argv[1:]:
        package, make = PRODUCERS[name]
        x = inputs()
        tensors = {"x": x} | {key: value.float().contiguous().clone() for key, value in make(x.clone())}
        number = "0.3.36, its sources" if name == "ggml" else version(package)
        origin = {
            "producer": package,
            "version": number,
            "how": (make.__doc__ or "") + (GGML if name == "ggml" else ""),
        }
        metadata = {"origin": json.dumps(origin)}
        save_file(tensors, Path(__file__).parent / f"{name}.safetensors", metadata)
        print(name, *tensors)


if __name__ == "__main__":
    main()
