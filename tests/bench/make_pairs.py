"""Makes the checkpoints of the benchmark, a layer at a time: a BF16 original, FP8 with one scale, and INT8.

INT8 has a scale for each block; for each row of small weights, which have no whole block.
"""

import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

BLOCK = 128
NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3"}
Tensors = dict[str, torch.Tensor]


def original(weight: torch.Tensor) -> Tensors:
    return {"weight": weight}


def fp8_tensor(weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax() / 448
    return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def int8_block(weight: torch.Tensor) -> Tensors:
    rows, cols = weight.shape
    blocks = weight.float().view(rows // BLOCK, BLOCK, cols // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 127
    codes = (blocks / scale).round().to(torch.int8).view(rows, cols)
    return {"weight": codes, "weight_scale": scale[:, 0, :, 0].contiguous()}


def int8_row(weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return {"weight": (weight.float() / scale).round().to(torch.int8), "weight_scale": scale}


VERSIONS: dict[str, Callable[[torch.Tensor], Tensors]] = {
    "original": original,
    "fp8_tensor": fp8_tensor,
    "int8_block": int8_block,
    "int8_row": int8_row,
}


def make(folder: Path, layers: int, rows: int, cols: int, name: str = "model.layers.{}.mlp.up_proj") -> dict[str, Path]:
    """Write a file for each version, unless it is there already; the paths by version."""
    paths = {version: folder / f"{version}-{layers}x{rows}x{cols}.safetensors" for version in VERSIONS}
    folder.mkdir(parents=True, exist_ok=True)
    for version, quantize in VERSIONS.items():
        if not paths[version].exists() and version != ("int8_block" if rows < BLOCK else "int8_row"):
            parts = ((name.format(n), quantize(_weight(n, rows, cols))) for n in range(layers))
            shapes = quantize(_weight(0, rows, cols))
            _write(paths[version], shapes, [name.format(n) for n in range(layers)], parts)
    return paths


def _weight(seed: int, rows: int, cols: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, cols, generator=generator) * 0.02).bfloat16()


def _write(path: Path, like: Tensors, names: list[str], layers: Iterable[tuple[str, Tensors]]) -> None:
    header, end = {}, 0
    for name in names:
        for part, tensor in like.items():
            begin, end = end, end + tensor.nbytes
            entry = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
            header[f"{name}.{part}"] = entry
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for _, tensors in layers:
            for tensor in tensors.values():
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    temporary.replace(path)
