"""Tiny checkpoints for tests, and what quanterr makes of them."""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from safetensors import torch as safetensors_torch
from safetensors.torch import save_file
from torch import Tensor

import quanterr
from quanterr.checkpoints import Entry, open_checkpoint
from quanterr.comparison.worker import Worker
from quanterr.documents.comparison.model import Report
from quanterr.formats import Values, Weight
from quanterr.kernel.library import Kernel
from quanterr.metrics import OUTLIER
from quanterr.metrics.sums import Sums
from quanterr.pairing import pair
from quanterr.pairing.alternatives import choose_alternatives
from quanterr.pairing.model import Pair, Pairing
from quanterr.recipes import parse_recipe
from quanterr.selection import LayerSelection
from quanterr.tensors.chunks import CPU_CHUNK, Chunk, Cut, as_matrix
from quanterr.tensors.workspace import Workspace

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
ALL_ROWS = 1 << 18


def store(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a .safetensors file, or with a configuration a folder that holds both."""
    if config is None:
        save_file(
            {name: tensor.clone() for name, tensor in tensors.items()}, path, dict(metadata) if metadata else None
        )
        return path
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    store(path / "model.safetensors", tensors, metadata)
    return path


def config_of(recipe: str) -> dict[str, Any]:
    """Return the configuration of a checkpoint that the recipe makes."""
    declared = parse_recipe(recipe).encoder.config
    return {"quantization_config": dict(declared)} if declared else {}


def label(**fields: Any) -> Tensor:
    """Return a .comfy_quant tensor."""
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


def header(layers: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata that labels layers."""
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


def fp8_codes(*shape: int, seed: int = 0, dtype: torch.dtype = FP8) -> Tensor:
    """Return finite FP8 codes of many magnitudes, both signs."""
    top = 0x7F if dtype == FP8 else 0x7C
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.randint(0, top, shape, generator=generator, dtype=torch.uint8)
    signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) << 7
    return (magnitudes | signs).view(dtype)


def int8_codes(*shape: int, seed: int = 0) -> Tensor:
    """Return INT8 codes of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return weights like those of a model."""
    generator = torch.Generator().manual_seed(seed)
    return (0.05 * torch.randn(shape, generator=generator)).to(dtype)


def quantized_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 codes with the best single scale of a weight."""
    scale = x.float().abs().amax() / 448
    return (x.float() / scale).to(FP8), scale


def quantized_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return INT8 codes with the best single scale of a weight."""
    scale = x.float().abs().amax() / 127
    return (x.float() / scale).round().to(torch.int8), scale


@contextmanager
def open_pairing(original: Path, quantized: Path, layers: Iterable[str] = ()) -> Iterator[Pairing]:
    """Yield the pairing of a comparison while its files are open."""
    with open_checkpoint(original) as x, open_checkpoint(quantized) as y:
        yield choose_alternatives(pair(x, y, LayerSelection(layers)))


def compare(
    folder: Path,
    original: Mapping[str, Tensor],
    quantized: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Return the report of two checkpoints made from these tensors."""
    x = store(folder / "original.safetensors", original)
    y = store(folder / ("quantized" if config is not None else "quantized.safetensors"), quantized, metadata, config)
    return quanterr.compare(x, y, device="cpu", **options)


def chunk_of(weight: Weight, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return a dequantized chunk that later chunks do not overwrite."""
    with torch.inference_mode():
        return weight.dequantize(chunk, workspace).weight.clone()


def read_whole(weight: Weight, size: int = ALL_ROWS) -> Tensor:
    """Return the whole weight as a matrix, assembled from chunks of that number of elements."""
    rows, cols = weight.matrix
    whole: Tensor | None = None
    workspace = Workspace()
    for chunk in Cut(rows, cols, size):
        values = chunk_of(weight, chunk, workspace)
        if whole is None:
            whole = torch.empty(rows, cols, dtype=values.dtype)
        whole[chunk.row : chunk.stop_row, chunk.col : chunk.stop_col] = values
    assert whole is not None
    return whole


def same_bits(expected: Tensor, actual: Tensor) -> bool:
    """Return True if all bits are the same, the sign of zero included; any NaN equals any other."""
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return False
    integers = {4: torch.int32, 8: torch.int64}[expected.element_size()]
    bits = [tensor.contiguous().view(integers).masked_fill(tensor.isnan(), 0) for tensor in (expected, actual)]
    return torch.equal(expected.isnan(), actual.isnan()) and torch.equal(*bits)


def in_memory(values: Tensor, wide: bool = False) -> Weight:
    """Return a weight that is in memory, not in a file."""
    matrix = values.reshape(as_matrix(tuple(values.shape)))

    def dequantize(chunk: Chunk, _workspace: Workspace) -> Values:
        piece = matrix[chunk.row : chunk.stop_row, chunk.col : chunk.stop_col]
        return Values(piece.to(torch.float64 if wide else torch.float32, copy=True).contiguous())

    shape = tuple(values.shape)
    nowhere = Entry("weight", "F32", shape, None, 0, 4 * values.numel())  # no test reads the file of this entry
    return Weight("weight", "dense", shape, {"weight": nowhere}, dequantize, needs_float64=wide)


def pair_of(x: Tensor, y: Tensor, wide: bool = False) -> Pair:
    """Return two tensors as a pair of weights."""
    return Pair("weight", in_memory(x, wide), in_memory(y, wide), (), (), (), ())


def summed_by_chunk(
    x: Tensor, y: Tensor, size: int = CPU_CHUNK, wide: bool = False, outlier: float = OUTLIER
) -> list[Sums]:
    """Return the sums of the chunks of two tensors, as in a run; with ``wide``, only the exact way counts."""
    pair, worker = pair_of(x, y, wide), Worker(CPU, size, outlier)
    with torch.inference_mode():
        return [worker.sum_chunks([pair], [chunk])[0] for chunk in Cut(*pair.original.matrix, size)]


# safetensors before 0.8 neither writes nor reads some dtypes, F8_E4M3FNUZ among them.
NEW_LIBRARY = torch.float8_e4m3fnuz in safetensors_torch._SIZE


def sum_up(
    x: Tensor,
    y: Tensor,
    size: int = CPU_CHUNK,
    wide: bool = False,
    outlier: float = OUTLIER,
    kernel: Kernel | None = None,
    importance: Callable[[Chunk], Tensor] | None = None,
) -> Sums:
    """Return the sums of all chunks at once, by torch's kernel or the compiled one."""
    pair, worker = replace(pair_of(x, y, wide), importance=importance), Worker(CPU, size, outlier, kernel=kernel)
    with torch.inference_mode():
        return worker.sum_chunks([pair], list(Cut(*pair.original.matrix, size)))[0]


def legacy(entries: Mapping[str, Any], calls: int = 7) -> bytes:
    """Return an importance matrix as a .dat file: name → means; the stored values are means times calls."""
    raw = struct.pack("<i", len(entries))
    for name, means in entries.items():
        values = (np.asarray(means, np.float32) * calls).ravel()
        raw += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, values.size) + values.tobytes()
    return raw + struct.pack("<ii", 3, 4) + b"text"


def finish(writer):
    """Write the file of a GGUFWriter of the gguf package, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
