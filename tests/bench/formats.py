"""The weights per second that each format dequantizes and compares with a BF16 original, with a warm cache.

Scales are such that both sides are of one size: of others, the kernel adds up in float64.

python tests/bench/formats.py [--rows 4096] [--cols 4096] [--only nvfp4]
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from quanterr.checkpoints import open_checkpoint
from quanterr.checkpoints.ggml_types import OF_NAME
from quanterr.comparison.scheduler import CHUNKS_AT_ONCE
from quanterr.comparison.worker import Worker
from quanterr.formats import Weight
from quanterr.formats.spqr import RECORD_AT
from quanterr.kernel.library import Kernel, find_best
from quanterr.metrics import OUTLIER
from quanterr.pairing.model import Pair
from quanterr.pairing.side import CheckpointSide
from quanterr.tensors.chunks import CPU_CHUNK, Cut
from quanterr.tensors.workspace import Workspace
from quanterr.util.platform import usable_cores

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.gguf_stored import Stored, write_gguf

Tensors = dict[str, Tensor]
FP8, E8M0 = torch.float8_e4m3fn, torch.uint8
ROUNDS = 3
CPU = torch.device("cpu")


def codes(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return codes of random bits."""
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (n_bytes,), dtype=torch.uint8).view(dtype).view(shape)


def fp8(*shape: int) -> Tensor:
    """Return finite FP8 codes."""
    return torch.randint(0, 0x7F, shape, dtype=torch.uint8).view(FP8)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (0.001 + 0.01 * torch.rand(shape)).to(dtype)


def exponents(*shape: int) -> Tensor:
    return torch.randint(110, 125, shape, dtype=torch.uint8)


def label(**fields: object) -> Tensor:
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


def make_tensors(m: int, k: int) -> Iterator[Tensors]:
    """Yield the tensors that each format stores for a weight X.weight of m × k; quanterr infers the format."""
    half = {"dtype": torch.float16}
    yield {"X.weight": scales(m, k, dtype=torch.bfloat16)}
    yield {"X.weight": fp8(m, k), "X.weight_scale": scales()}
    yield {"X.weight": fp8(m, k), "X.weight_scale": scales(m, 1)}
    yield {"X.weight": fp8(m, k), "X.weight_scale_inv": scales(m // 128, k // 128)}
    yield {"X.weight": codes(m, k, dtype=torch.int8), "X.weight_scale": scales()}
    yield {"X.weight": codes(m, k, dtype=torch.int8), "X.weight_scale": scales(m, 1)}
    yield {"X.weight": codes(m, k, dtype=torch.int8), "X.weight_scale": scales(m // 128, k // 128)}
    rotated = label(format="int8_tensorwise", convrot=True, convrot_groupsize=256)
    yield {"X.weight": codes(m, k, dtype=torch.int8), "X.weight_scale": scales(m, 1), "X.comfy_quant": rotated}
    yield {"X.weight": fp8(m, k), "X.weight_scale": exponents(m, k // 32), "X.comfy_quant": label(format="mxfp8")}
    fp4 = {"X.weight": codes(m, k // 2), "X.weight_scale": fp8(m, k // 16), "X.weight_scale_2": scales()}
    yield fp4 | {"X.comfy_quant": label(format="nvfp4")}
    w4a4 = {"X.weight": codes(m, k // 2, dtype=torch.int8), "X.weight_scale": scales(m)}
    yield w4a4 | {"X.comfy_quant": label(format="convrot_w4a4", convrot_groupsize=256)}
    w4a8 = {"X.weight": codes(m, k // 2, dtype=torch.int8), "X.weight_s_rel": fp8(m, k // 16)}
    w4a8 |= {"X.weight_s_channel": scales(m)}
    yield w4a8 | {"X.comfy_quant": label(format="asym_w4a8_int8", group_size=16, convrot_groupsize=256)}
    svd = {"X.weight": codes(m, k // 2, dtype=torch.int8), "X.weight_scale": scales(k // 64, m, dtype=torch.bfloat16)}
    svd |= {
        "X.weight_smooth_factor": 1 + scales(k),
        "X.weight_proj_down": scales(k, 32),
        "X.weight_proj_up": scales(m, 32),
    }
    yield svd | {"X.comfy_quant": label(format="svdquant_w4a4")}
    yield {"X.weight_packed": codes(m, k // 2), "X.weight_scale": exponents(m, k // 32)}
    gptq = {"X.qweight": codes(k // 8, m, dtype=torch.int32), "X.scales": scales(k // 128, m, **half)}
    yield gptq | {"X.qzeros": torch.full((k // 128, m // 8), 0x77777777, dtype=torch.int32)}
    awq = {"X.qweight": codes(k, m // 8, dtype=torch.int32), "X.scales": scales(k // 128, m, **half)}
    yield awq | {"X.qzeros": codes(k // 128, m // 8, dtype=torch.int32)}
    ct = {"X.weight_packed": codes(m, k // 8, dtype=torch.int32), "X.weight_scale": scales(m, k // 128, **half)}
    yield ct | {"X.weight_shape": torch.tensor([m, k])}
    mlx = {"X.weight": codes(m, k // 8, dtype=torch.uint32), "X.scales": scales(m, k // 64, **half)}
    yield mlx | {"X.biases": scales(m, k // 64, **half)}
    state = label(quant_type="nf4", blocksize=64, dtype="bfloat16", shape=[m, k])
    bnb = {"X.weight": codes(m * k // 2, 1), "X.weight.absmax": scales(m * k // 64)}
    bnb |= {"X.weight.quant_map": torch.linspace(-1, 1, 16), "X.weight.quant_state.bitsandbytes__nf4": state}
    yield bnb
    yield {"X.weight": codes(m, k, dtype=torch.int8), "X.SCB": scales(m), "X.weight_format": torch.tensor(0).byte()}
    nvfp4 = {"X.weight_packed": codes(m, k // 2), "X.weight_scale": fp8(m, k // 16)}
    yield nvfp4 | {"X.weight_global_scale": 100 * scales(1)}
    yield {"X.weight_packed": codes(m, 3 * k // 4), "X.weight_scale": exponents(m, k // 32)}
    yield {"X.weight": codes(m, k // 8, dtype=torch.uint32), "X.scales": exponents(m, k // 32)}
    yield {"X.weight": fp8(m, k).view(torch.uint32), "X.scales": exponents(m, k // 32)}
    yield {"X.weight._data": codes(m, k, dtype=torch.int8), "X.weight._scale": scales(m, 1, **half)}
    quanto = {"X.weight._data._data": codes(m * k // 256, 128), "X.weight._scale": scales(m * k // 128, 1, **half)}
    yield quanto | {"X.weight._shift": scales(m * k // 128, 1, **half)}
    yield {"X.weight": codes(k, m, dtype=torch.int8), "X.weight_scales": scales(m, **half)}
    gemv = {"X.qweight": codes(m, k // 8, dtype=torch.int32), "X.qzeros": codes(m, k // 1024, dtype=torch.int32)}
    yield gemv | {"X.scales": scales(m, k // 128, **half)}
    fast = {"X.qweight": codes(m // 4, k, dtype=torch.int16), "X.scales": scales(k // 128, m, **half)}
    yield fast | {"X.qzeros": scales(k // 128, m, **half)}
    yield {"X.weight": codes(m // 2, k), "X.weight_scale": scales(m, k // 128)}
    integers = {"X.weight": codes(m, k, dtype=torch.int8), "X.weight_scale": scales(m, k // 128, **half)}
    yield integers | {"X.weight_zero_point": codes(m, k // 128, dtype=torch.int8)}
    nunchaku = {"X.qweight": codes(m // 4, k // 2, dtype=torch.int32), "X.wscales": scales(k // 64, m, **half)}
    yield nunchaku | {"X.wzeros": scales(k // 64, m, **half)}
    yield {"X.weight": fp8(m, k)}
    int4 = {"X.weight": codes(m, k // 2, dtype=torch.int8), "X.weight_scale": scales(m)}
    yield int4 | {"X.comfy_quant": label(format="int4_tensorwise")}
    w4a16 = {"X.weight": codes(m, k // 2, dtype=torch.int8), "X.weight_scale": scales(k // 64, m, **half)}
    yield w4a16 | {"X.weight_zero": scales(k // 64, m, **half), "X.comfy_quant": label(format="awq_w4a16")}
    yield {"X.weight": codes(m * k // 2), "X.absmax": scales(m * k // 64), "X.comfy_quant": label(format="bnb_nf4")}
    yield {"X.weight": codes(m, k // 2), "X.weight_scale": exponents(m, k // 32)}
    yield {"X.weight": codes(m, k // 8, dtype=torch.uint32), "X.scales": torch.randint(1, 0x7F, (m, k // 16)).byte()}
    yield {"X.weight._data": fp8(m, k), "X.weight._scale": scales(m, 1, **half)}
    quanto = {"X.weight._data._data": codes(m * k // 512, 128), "X.weight._scale": scales(m * k // 128, 1, **half)}
    yield quanto | {"X.weight._shift": scales(m * k // 128, 1, **half)}
    yield {"X.weight": codes(m, k // 2), "X.weight_scale": scales(m, 1)}
    hqq = {"X.W_q": codes(m * k // 256, 128), "X.scale": scales(m * k // 128, 1, **half)}
    hqq |= {"X.zero": scales(m * k // 128, 1, **half), "X.shape": torch.tensor([m, k]), "X.axis": torch.tensor(1)}
    hqq |= {"X.group_size": torch.tensor(128), "X.nbits": torch.tensor(4)}
    yield hqq | {"X.packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8)}
    yield {"X.weight": codes(m // 4, k), "X.weight_scale": scales(1)}
    aqlm = {"X.codes": codes(m, k // 8, 2, dtype=torch.int8), "X.codebooks": scales(2, 256, 1, 8, **half)}
    yield aqlm | {"X.scales": 1 + scales(m, 1, 1, 1, **half)}
    exl2 = {"X.q_weight": codes(k // 8, m, dtype=torch.int32), "X.q_scale": codes(k // 128, m // 8, dtype=torch.int32)}
    places = torch.tensor([n for group in range(k // 128) for n in (4, 16 * group)], dtype=torch.int16)
    exl2 |= {"X.q_groups": places, "X.q_scale_max": scales(k // 128, **half)}
    yield exl2 | {"X.q_invperm": torch.randperm(k, dtype=torch.int32)}
    exl3 = {"X.trellis": codes(k // 16, m // 16, 64, dtype=torch.int16)}
    yield exl3 | {"X.suh": 1 + scales(k, **half), "X.svh": scales(m, **half)}
    quip = {
        "X.Qidxs": codes(m, k // 32, dtype=torch.int64),
        "X.SU": 1 + scales(k, **half),
        "X.SV": 1 + scales(m, **half),
    }
    yield quip | {"X.Wscale": scales(), "X.codebook_id": torch.tensor(7)}
    words = codes(m * k // 16, dtype=torch.int64) & (1 << RECORD_AT) - 1 | 0x28 << RECORD_AT
    spqr = {"X.dense_weights": words, "X.in_perm": torch.zeros(0, dtype=torch.int32)}
    yield spqr | {
        "X.row_offsets": torch.arange(m + 1, dtype=torch.int32),
        "X.col_vals": codes(m, dtype=torch.int32) & 31,
    }
    vptq = {"X.indices": codes(1, m // 8, k * 16 // 32, dtype=torch.int32)}
    yield vptq | {"X.centroids.weight": scales(1, 65536 * 8, **half)}
    ascend = {"X.weight_scale": scales(m, 1), "X.weight_offset": torch.zeros(m, 1)}
    yield {"X.weight": codes(m, k, dtype=torch.int8), **ascend}
    yield {"X.weight": codes(m // 2, k, dtype=torch.int8), **ascend}
    yield {"X.weight": fp8(m, k), **ascend}
    second = {"X.weight_scale": exponents(m, k // 32), "X.weight_dual_scale": scales(m, k // 512, 1)}
    yield {"X.weight": codes(m, k // 2), **second}
    yield {"X.weight": codes(m, k // 2, dtype=torch.int8), "X.weight_scale_inv": scales(m, k // 128)}
    yield {"X.weight": codes(m * k // 2), "X.scale": scales(m, 16)}
    turned = {"X.qweight": codes(k, m // 8, dtype=torch.int32), "X.qzeros": codes(k // 128, m // 8, dtype=torch.int32)}
    turned |= {"X.scales": scales(k // 128, m, **half), "X.channel_scales": scales(1, k, **half)}
    turned |= {"X.theta": scales(8, k // 2, **half), "X.pairs": torch.arange(128).repeat(8, k // 128).short()}
    yield turned
    of_kernel = {"X.B": codes(k // 16, 2 * m, dtype=torch.int32), "X.s_channel": scales(1, m)}
    yield of_kernel | {"X.s_group": scales(k // 128, m, **half)}


def describe_subclasses(m: int, k: int) -> Iterator[tuple[Tensors, dict[str, object]]]:
    """Yield parts of torchao's tensor subclasses, and the header's description of them."""

    def kind(name: str, **data: object) -> dict[str, object]:
        return {"_type": name, "_data": data}

    def dtype(name: str) -> dict[str, object]:
        return {"_type": "torch.dtype", "_data": name}

    groups = {"X._weight_scale": scales(m, k // 128), "X._weight_zero_point": codes(m, k // 128, dtype=torch.int8)}
    int8 = {"X._weight_qdata": codes(m, k, dtype=torch.int8)}
    yield int8 | groups, kind("Int8Tensor", block_size=[1, 128])
    few = {"X._weight_qdata": codes(m, k, dtype=torch.int8) // 16}
    yield few | groups, kind("IntxUnpackedToInt8Tensor", block_size=[1, 128], target_dtype=dtype("int4"))
    yield {"X._weight_qdata": fp8(m, k), "X._weight_scale": scales(m, 1)}, kind("Float8Tensor", block_size=[1, k])
    mx = {"X._weight_qdata": fp8(m, k), "X._weight_scale": exponents(m, k // 32).view(torch.float8_e8m0fnu)}
    yield mx, kind("MXTensor", block_size=32, is_swizzled_scales=False, elem_dtype=dtype("float8_e4m3fn"))
    nvfp4 = {"X._weight_qdata": codes(m, k // 2), "X._weight_scale": fp8(m, k // 16)}
    nvfp4 |= {"X._weight_per_tensor_scale": scales()}
    yield nvfp4, kind("NVFP4Tensor", block_size=16, is_swizzled_scales=False)
    int4 = {"X._weight_qdata": codes(m, k // 2, dtype=torch.int8), "X._weight_scale": scales(k // 128, m)}
    yield int4 | {"X._weight_zero_point": scales(k // 128, m)}, kind("Int4Tensor", block_size=[1, 128], shape=[m, k])


def make_bytes(name: str, n: int) -> bytes:
    """Return random bytes whose pairs are float16 numbers between 0.03 and 0.12; in MXFP4, exponents near -6."""
    low = 0x78 if name == "MXFP4" else 0x28
    return torch.randint(low, low + 8, (n,), dtype=torch.uint8).numpy().tobytes()


def in_gguf(m: int, k: int) -> Iterator[Stored]:
    for name, ggml_type in OF_NAME.items():
        raw = torch.frombuffer(bytearray(make_bytes(name, ggml_type.count_bytes((m, k)))), dtype=torch.uint8)
        if ggml_type.head == 4:
            heads = raw.view(m // ggml_type.rows, -1)[:, : 4 * ggml_type.rows]
            heads.copy_(scales(*heads.shape[:1], ggml_type.rows).view(torch.uint8))
        yield Stored("X.weight", name, (m, k), raw.numpy().tobytes())


def best_of(work: Callable[[], None], threads: int) -> float:
    """Return the seconds until each of so many threads has done the work, the best of a few rounds."""

    def alone() -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            work()

    taken = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        workers = [threading.Thread(target=alone) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        taken.append(time.perf_counter() - started)
    return min(taken)


def rates(original: Weight, weight: Weight) -> list[float]:
    """Return G weights/s: dequantized on one thread, compared on all threads by torch and by the compiled kernel."""
    chunks, cores = list(Cut(*weight.matrix, CPU_CHUNK)), usable_cores()
    pair = Pair("X.weight", original, weight, (), (), (), ())

    def dequantize() -> None:
        workspace = Workspace()
        for chunk in chunks:
            weight.dequantize(chunk, workspace)

    def compare(kernel: Kernel | None) -> None:
        worker = Worker(CPU, CPU_CHUNK, OUTLIER, kernel=kernel)
        for first in range(0, len(chunks), CHUNKS_AT_ONCE):
            worker.sum_chunks([pair], chunks[first : first + CHUNKS_AT_ONCE])

    kernels = [None, find_best().kernel] if find_best().kernel else [None]
    compared = [cores * weight.n / best_of(partial(compare, kernel), cores) / 1e9 for kernel in kernels]
    return [weight.n / best_of(dequantize, 1) / 1e9, *compared]


def show(path: Path, shape: tuple[int, int], only: str, original: Weight) -> None:
    with open_checkpoint(path) as checkpoint:
        side = CheckpointSide("bench", checkpoint)
        side.attach_siblings()
        weight = side.recognize("X.weight", shape)
        if only in weight.format:
            name = weight.codes.dtype if path.suffix == ".gguf" else weight.format  # some formats have several dtypes
            print(f"{name:20}", *(f"{rate:6.2f}" for rate in rates(original, weight)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--only", default="", help="a part of a format's name")
    options = parser.parse_args()
    shape = options.rows, options.cols
    print(f"G weights/s of {shape[0]} x {shape[1]}: dequantized on one thread; compared on {usable_cores()} by torch,")
    print(f"then by the compiled kernel ({find_best()})")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_file({"X.weight": scales(*shape, dtype=torch.bfloat16)}, Path(folder) / "original.safetensors")
        checkpoint = stack.enter_context(open_checkpoint(Path(folder) / "original.safetensors"))
        original = CheckpointSide("original", checkpoint).recognize("X.weight", shape)
        for tensors in make_tensors(*shape):
            save_file(tensors, Path(folder) / "x.safetensors")
            show(Path(folder) / "x.safetensors", shape, options.only, original)
        for tensors, header in describe_subclasses(*shape):
            names = sorted(name.removeprefix("X._weight_") for name in tensors)
            metadata = {"X.weight": json.dumps(header | {"_tensor_data_names": names}), "tensor_names": '["X.weight"]'}
            save_file(tensors, Path(folder) / "x.safetensors", metadata)
            show(Path(folder) / "x.safetensors", shape, options.only, original)
        for stored in in_gguf(*shape):
            show(write_gguf(Path(folder) / "x.gguf", [stored]), shape, options.only, original)


if __name__ == "__main__":
    main()
