"""Keys and values as the runtimes' own code stores and reads them: caches.safetensors.

    python tests/golden_inputs/make_caches.py LLAMA_CPP VLLM KIVI       folders of their sources; needs triton, gcc

LLAMA_CPP is vendor/llama.cpp in the sources of llama-cpp-python 0.3.36: ggml's quantizers are compiled as by its build
(ggml-quants.c for any x86, the kernels of inputs with AVX2), and its matrices are made by ggml_gen_hadamard. VLLM is
vllm 0.33.0, whose Triton kernels run in Triton's interpreter, and KIVI is jy-yuan/KIVI at 876b4d2d.

``x`` and ``y`` are float32 (1, heads, tokens, size), multiples of 1/64, so that products with a matrix of signs are
exact. ``y`` is longer, for KIVI's groups of 32 tokens. A result has the type's name, and "rotated" if that is how it is
stored; "k" and "v" where the types of keys and values differ.
"""

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from safetensors.torch import save_file
from torch import Tensor

SIZES = {"q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18, "iq4_nl": 18}  # bytes of a block
TABLES = "".join(f"float ggml_table_f32_{name}[65536];" for name in ("f16", "e8m0_half", "ue4m3"))
SCALE = 0.03
Rounded = Iterator[tuple[str, Tensor]]


def inputs(*shape: int) -> Tensor:
    """Return Laplacian inputs in multiples of 1/64: one channel is 20 times as large, one block has zeros."""
    torch.manual_seed(0)
    x = torch.distributions.Laplace(0.0, 1.0).sample(shape)
    x[..., 7] *= 20
    x[:, :, 1, :32] = 0
    return (x * 64).round() / 64


def compile_library(out: Path, *given: object) -> ctypes.CDLL:
    """Compile a shared library and load it."""
    words = ["gcc", "-shared", "-fPIC", "-Wl,--unresolved-symbols=ignore-all", "-o", out, *given, "-lm"]
    subprocess.run([str(word) for word in words], check=True)
    return ctypes.CDLL(str(out), mode=os.RTLD_LAZY)


def ggml(x: Tensor, sources: Path, folder: Path) -> Rounded:
    """Round with the functions of the CPU backend that set_rows calls, and with the rotations made for the cache."""
    (folder / "tables.c").write_text(TABLES)
    base, include = sources / "ggml/src", ["-I", sources / "ggml/include", "-I", sources / "ggml/src"]
    plain = compile_library(folder / "base.so", "-O2", *include, base / "ggml-quants.c", folder / "tables.c")
    kernels = [base / "ggml-cpu/arch/x86/quants.c", base / "ggml-cpu/quants.c", folder / "tables.c"]
    include_of_cpu = [*include, "-I", base / "ggml-cpu"]
    fast = compile_library(folder / "cpu.so", "-O2", "-mavx2", "-mfma", "-mf16c", *include_of_cpu, *kernels)

    def round_rows(rows: Tensor, name: str) -> Tensor:
        rows = rows.contiguous()
        stored = (ctypes.c_uint8 * (rows.numel() // 32 * SIZES[name]))()
        out, count = torch.empty_like(rows), ctypes.c_int64(rows.numel())
        quantize = fast["quantize_row_q8_0"] if name == "q8_0" else plain[f"quantize_row_{name}_ref"]
        quantize(ctypes.c_void_p(rows.data_ptr()), stored, count)
        plain[f"dequantize_row_{name}"](stored, ctypes.c_void_p(out.data_ptr()), count)
        return out

    for name in SIZES:
        yield name, round_rows(x, name)
        matrix = hadamard(64, sources, folder)
        yield f"{name} rotated v", (round_rows(x.view(-1, 64) @ matrix, name) @ matrix).view(x.shape)
    for size in (128, 256):
        matrix, rows = hadamard(size, sources, folder), x.view(1, -1, 2, size)
        yield f"q4_0 rotated k {size}", (round_rows(rows.view(-1, size) @ matrix, "q4_0") @ matrix).view(rows.shape)


def hadamard(size: int, sources: Path, folder: Path) -> Tensor:
    """Return the matrix of ggml_gen_hadamard, which is compiled alone."""
    text = (sources / "src/llama-kv-cache.cpp").read_text()
    match = re.search(r"static bool ggml_is_power_of_2.*?static void ggml_gen_hadamard.*?\n}\n", text, re.DOTALL)
    assert match is not None
    code = f"""#include "ggml.h"\n#include <cassert>\n#include <cmath>\n#include <vector>
    {match[0]}
    extern "C" void make(float * data, long n) {{
        ggml_tensor t = {{}}; t.type = GGML_TYPE_F32; t.data = data; t.ne[0] = t.ne[1] = n; t.ne[2] = t.ne[3] = 1;
        ggml_gen_hadamard(&t);
    }}"""
    (folder / "hadamard.cpp").write_text(code)
    library = compile_library(
        folder / "hadamard.so", "-O2", "-I", sources / "ggml/include", folder / "hadamard.cpp", "-lstdc++"
    )
    matrix = torch.empty(size, size)
    library["make"](ctypes.c_void_p(matrix.data_ptr()), ctypes.c_long(size))
    return matrix


def module(path: Path, name: str, **stubs: dict[str, Any]) -> ModuleType:
    """Load a Python file of a checkout, with stubs for modules that it imports."""
    for key, fields in stubs.items():
        sys.modules[key.replace("__", ".")] = made = ModuleType(key)
        vars(made).update(fields)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def vllm(x: Tensor, sources: Path) -> Rounded:
    """Round one page of tokens with vLLM's Triton kernels, keys and values alike.

    Casts to E4M3 saturate on hardware, but not in the interpreter: it stores float32, and torch casts.
    """
    import triton
    import triton.language as tl

    platform = SimpleNamespace(
        is_rocm=lambda: False, is_xpu=lambda: False, fp8_dtype=lambda: torch.float32
    )  # fmt: skip
    kernels = module(
        sources / "vllm/v1/attention/ops/triton_reshape_and_cache_flash.py",
        "kernels",
        vllm__model_executor__layers__quantization__utils__quant_utils={
            "FP8_DTYPE": torch.float32, "get_fp8_min_max": lambda: (-448.0, 448.0)
        },
        vllm__platforms={"current_platform": platform},
        vllm__triton_utils={"tl": tl, "triton": triton},
        vllm__v1__kv_cache_interface={
            "KVQuantMode": SimpleNamespace(INT4_PER_TOKEN_HEAD="int4"),
            "is_quantized_kv_cache": lambda name: name.startswith("fp8"),
        },
    )  # fmt: skip
    rows = x[0].transpose(0, 1).contiguous()  # (tokens, heads, size)
    tokens, heads, size = rows.shape
    slots = torch.arange(tokens)

    def empty(dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(1, tokens, heads, size, dtype=dtype) for _ in range(2)]

    def cast(codes: Tensor) -> Tensor:
        return codes.clamp(-448, 448).to(torch.float8_e4m3fn).float()

    for name, dtype, decode in (("fp8_token", torch.float32, cast), ("int8_token", torch.int8, Tensor.float)):
        caches, scales = empty(dtype), [torch.zeros(1, tokens, heads) for _ in range(2)]
        kernels.triton_reshape_and_cache_flash_per_token_head_quant(rows, rows, *caches, *scales, slots, "other")
        yield name, (decode(caches[0]) * scales[0][..., None]).transpose(1, 2)
    caches, scale = empty(torch.float32), torch.tensor(SCALE)
    n = heads * size
    strides = n, n, tokens * n, size, 0, 0, n  # of tokens, of blocks, heads, dims of keys and values, slots
    kernels.reshape_and_cache_kernel_flash[(tokens, 1)](
        rows, rows, *caches, slots, scale, scale, *strides, heads, size, tokens, 1, False, 0, True, n
    )
    yield "fp8", (cast(caches[0]) * scale).transpose(1, 2)


def kivi(y: Tensor, sources: Path) -> Rounded:
    """Round with KIVI's functions in torch, in groups of 32."""
    packing = module(sources / "quant/new_pack.py", "new_pack")
    yield "int4 k", packing.unpack_and_dequant_kcache(*packing.quant_and_pack_kcache(y.clone(), 32, 4), 32, 4)
    yield "int4 v", packing.unpack_and_dequant_vcache(*packing.quant_and_pack_vcache(y.clone(), 32, 4), 32, 4)


def main() -> None:
    """Write the file next to this one."""
    import tempfile

    llama_cpp, of_vllm, of_kivi = map(Path, sys.argv[1:])
    x, y = inputs(1, 2, 4, 64), inputs(1, 1, 32, 64)
    with tempfile.TemporaryDirectory() as folder:
        tensors = {"x": x, "y": y, **dict(ggml(x, llama_cpp, Path(folder))), **dict(vllm(x, of_vllm))}
    tensors |= dict(kivi(y, of_kivi))
    origin = {
        "producer": "llama-cpp-python, vllm, KIVI",
        "version": "0.3.36, 0.33.0, 876b4d2d",
        "how": __doc__,
    }
    kept = {name: value.float().contiguous().clone() for name, value in tensors.items()}
    save_file(kept, Path(__file__).parent / "caches.safetensors", {"origin": json.dumps(origin)})
    print(*kept)


if __name__ == "__main__":
    main()
