"""How fast this machine compares, on its cores and on its accelerator: what `--device auto` should know about it.

    python tests/bench/device.py [--folder .bench] [--runs 3] [--layers 16] [--small 50000]

Rates are those of a comparison in this process, from opening the files to its report, with files in memory: the best
of a few runs after one that loads and compiles everything. For an accelerator, a profile follows: the rate at which the
same chunks are only read, read and decoded by torch, read and summed without decoding, and compared.
"""

import argparse
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from formats import codes, fp8, make_bytes, scales
from safetensors.torch import save_file
from support.gguf_stored import Stored, write_gguf
from torch import Tensor

import quanterr
from quanterr.checkpoints import open_checkpoint
from quanterr.checkpoints.ggml_types import OF_NAME
from quanterr.comparison.devices import choose_device, count_own_cores
from quanterr.comparison.scheduler import DEVICE_THREADS
from quanterr.errors import ResourceError
from quanterr.formats import Weight
from quanterr.kernel.fused_sums import Codes, can_fuse, sum_codes
from quanterr.kernel.library import choose_kernel
from quanterr.kernel.native_sums import Operand
from quanterr.kernel.specification import SUMS_ALONE, exact_sums
from quanterr.kernel.summing import Summer
from quanterr.metrics import OUTLIER
from quanterr.pairing import pair
from quanterr.pairing.model import Pair
from quanterr.pairing.side import CheckpointSide
from quanterr.selection import LayerSelection
from quanterr.tensors.chunks import DEVICE_CHUNK, Chunk, Cut
from quanterr.tensors.devices import describe_device, own_stream, pick_device
from quanterr.tensors.pinned_ring import PIECE, READERS, SLOT
from quanterr.tensors.workspace import Workspace

ROWS, COLS = 4096, 8192
SMALL_SHAPE = 64, 128
Step = Callable[[Pair, Chunk], object]


def make_layouts(small: int) -> Iterator[tuple[str, tuple[int, int], dict[str, Tensor] | None]]:
    """Yield the name, the shape and the tensors of a weight X in each layout; None for Q4_K."""
    m, k = ROWS, COLS
    yield "FP8", (m, k), {"X.weight": fp8(m, k), "X.weight_scale": scales()}
    int8 = {"X.weight": codes(m, k, dtype=torch.int8), "X.weight_scale": scales(m // 128, k // 128)}
    yield "INT8 blocks", (m, k), int8
    nvfp4 = {"X.weight_packed": codes(m, k // 2), "X.weight_scale": fp8(m, k // 16)}
    yield "NVFP4", (m, k), nvfp4 | {"X.weight_global_scale": 100 * scales(1)}
    yield "Q4_K", (m, k), None
    yield f"{small:,} small weights", SMALL_SHAPE, {"X.weight": fp8(*SMALL_SHAPE), "X.weight_scale": scales()}


def write(folder: Path, shape: tuple[int, int], tensors: dict[str, Tensor] | None, n: int) -> tuple[Path, Path]:
    """Write a quantized checkpoint of ``n`` equal weights, and its values in BF16; return the paths, BF16 first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if tensors is None:
        raw = make_bytes("Q4_K", OF_NAME["Q4_K"].count_bytes(shape))
        quantized = write_gguf(
            folder / "quantized.gguf", [Stored(f"X{number}.weight", "Q4_K", shape, raw) for number in range(n)]
        )
    else:
        quantized = folder / "quantized.safetensors"
        named = {name.replace("X", f"X{number}"): part.clone() for number in range(n) for name, part in tensors.items()}
        save_file(named, quantized)
    original = folder / "original.safetensors"
    values = dequantize(quantized, shape).bfloat16()
    save_file({f"X{number}.weight": values.clone() for number in range(n)}, original)
    return original, quantized


def dequantize(quantized: Path, shape: tuple[int, int]) -> Tensor:
    """Return the values of the first weight of a checkpoint."""
    with open_checkpoint(quantized) as checkpoint:
        side = CheckpointSide("bench", checkpoint)
        side.attach_siblings()
        return side.recognize("X0.weight", shape).dequantize(Chunk(0, shape[0], 0, shape[1]), Workspace()).weight


def time_comparison(paths: tuple[Path, Path], device: str, runs: int) -> float:
    """Return the seconds of a comparison, the best of so many runs."""
    return min([quanterr.compare(*paths, device=device).run.seconds for _ in range(runs + 1)][1:])


def time_chunks(step: Step, pairs: Sequence[Pair], device: torch.device, runs: int) -> float:
    """Return the seconds until as many threads as a comparison has have carried out a step for all chunks."""
    chunks = [(pair, chunk) for pair in pairs for chunk in Cut(*pair.original.matrix, DEVICE_CHUNK)]

    def work(first: int) -> None:
        with torch.inference_mode(), own_stream(device):
            for pair, chunk in chunks[first::DEVICE_THREADS]:
                step(pair, chunk)
            torch.accelerator.current_stream(device).synchronize()

    taken = []
    for _ in range(runs + 1):
        threads = [threading.Thread(target=work, args=(first,)) for first in range(DEVICE_THREADS)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


class Steps:
    """The steps of a comparison on an accelerator, with the buffers of each thread."""

    def __init__(self, device: torch.device) -> None:
        """Start without buffers."""
        self.device, self._own = device, threading.local()

    def _buffers(self) -> tuple[Workspace, Workspace, Summer]:
        if not hasattr(self._own, "buffers"):
            x, y, computed = (Workspace(self.device) for _ in range(3))
            self._own.buffers = x, y, Summer(None, computed, OUTLIER)
            self._own.values = torch.rand((2, DEVICE_CHUNK), device=self.device)
        buffers: tuple[Workspace, Workspace, Summer] = self._own.buffers
        return buffers

    def read(self, each: Pair, chunk: Chunk) -> None:
        """Read the codes of both sides."""
        for weight, workspace in zip((each.original, each.quantized), self._buffers()[:2], strict=True):
            begin, end = (find_byte(weight, row) for row in (chunk.row, chunk.stop_row))
            workspace.read_bytes("codes", weight.codes, begin, (end - begin,))

    def decode(self, each: Pair, chunk: Chunk) -> None:
        """Read and decode both sides, by torch."""
        x, y, _ = self._buffers()
        each.original.dequantize(chunk, x)
        each.quantized.dequantize(chunk, y)

    def add_up(self, each: Pair, chunk: Chunk) -> None:
        """Read both sides, and compute the sums of other values."""
        self.read(each, chunk)
        x, y = self._own.values[:, : chunk.n].view(2, *chunk.shape)
        if can_fuse(self.device):
            sum_codes(Codes(x), Codes(y), chunk, chunk.shape[1], OUTLIER)
        else:
            exact_sums(lambda _: (x, y), [chunk], chunk.shape[1], OUTLIER)

    def compare(self, each: Pair, chunk: Chunk) -> None:
        """Compute the sums of a chunk, as a comparison does."""
        x, y, summer = self._buffers()
        summer.sum_pair((Operand(each.original, x), Operand(each.quantized, y)), [chunk], SUMS_ALONE)


def find_byte(weight: Weight, row: int) -> int:
    """Return the byte of a weight's codes at which a row begins."""
    return weight.codes.nbytes * row // weight.matrix[0]


def copy_pinned(device: torch.device) -> float:
    """Return the bytes per second of copies from pinned memory."""
    host = torch.empty(SLOT, dtype=torch.uint8, pin_memory=True)
    target, times = torch.empty(SLOT, dtype=torch.uint8, device=device), 64
    started = time.perf_counter()
    for _ in range(times):
        target.copy_(host, non_blocking=True)
    torch.accelerator.current_stream(device).synchronize()
    return times * SLOT / (time.perf_counter() - started)


def profile(paths: tuple[Path, Path], device: torch.device, runs: int) -> list[float]:
    """Return the seconds of each step, for all weights of two checkpoints."""
    with open_checkpoint(paths[0]) as original, open_checkpoint(paths[1]) as quantized:
        pairs, steps = pair(original, quantized, LayerSelection()).pairs, Steps(device)
        step_functions = steps.read, steps.decode, steps.add_up, steps.compare
        return [time_chunks(step, pairs, device, runs) for step in step_functions]


def show(name: str, n: int, paths: tuple[Path, Path], devices: list[torch.device], options: argparse.Namespace) -> None:
    n_bytes = sum(path.stat().st_size for path in paths)
    seconds = [time_comparison(paths, str(device), options.runs) for device in devices]
    cells = [f"{n / each / 1e9:6.2f} G/s {n_bytes / each / 1e9:6.2f} GB/s" for each in seconds]
    print(f"{name:22}", *cells, sep="  ", flush=True)
    for device in devices:
        if device.type != "cpu":
            rates = [n_bytes / step_seconds / 1e9 for step_seconds in profile(paths, device, options.runs)]
            steps = zip(("read", "decoded", "summed", "compared"), rates, strict=True)
            print(" " * 22, "  GB/s", *(f"{step} {rate:.1f}" for step, rate in steps))


def find_devices() -> list[torch.device]:
    """Return the CPU, and the accelerator if there is one that can be used."""
    try:
        return list(dict.fromkeys([torch.device("cpu"), pick_device("auto")]))
    except ResourceError as error:
        print(error)
        return [torch.device("cpu")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(".bench").resolve())
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--small", type=int, default=50_000)
    options = parser.parse_args()
    devices = find_devices()
    print(f"{count_own_cores()} cores, kernel {choose_kernel()}, torch {torch.__version__}")
    for device in devices[1:]:
        sums = "Triton's kernel" if can_fuse(device) else "torch"
        print(f"{describe_device(device)}: sums by {sums}, pinned copies {copy_pinned(device) / 1e9:.1f} GB/s")
        print(f"{DEVICE_THREADS} workers; {READERS} readers of pieces of {PIECE >> 20} MiB")
        print(f"--device auto takes {choose_device('auto', choose_kernel().kernel)}")
    if len(devices) == 1:
        print("no accelerator that torch can use: only the CPU is measured")
    print(f"{'BF16 against':22}", *(f"{device!s:23}" for device in devices), sep="  ")
    for name, shape, tensors in make_layouts(options.small):
        n = options.small if shape == SMALL_SHAPE else options.layers
        folder = options.folder / "device"
        show(name, n * shape[0] * shape[1], write(folder, shape, tensors, n), devices, options)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
