"""Checkpoints for tests: complete ones, ones written byte by byte, a quantized pair; and a way to give up root."""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

FP8_MAX = 448.0
NOBODY = 65534


def write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    """Write a safetensors file with its own library, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path, metadata)
    return path


def raw_header(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    """Write a file with this header, followed by these bytes; ``length`` is the declared length of the header."""
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def as_header(fields: Mapping[str, Any]) -> bytes:
    """Return the fields as the JSON of a header; names may be anything that JSON can hold."""
    return json.dumps(fields).encode()


def entry(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4), **more: Any) -> dict[str, Any]:
    """Return the header of one tensor, by default of four whole bytes."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def write_index(folder: Path, weight_map: Any, name: str = "model.safetensors.index.json") -> Path:
    """Write an index with that map; the files that it names may be missing."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return path


def shards(folder: Path, *tensors: Mapping[str, Tensor], index: bool = True) -> Path:
    """Write a folder with one shard for each mapping, and their index; return the folder."""
    names = [f"model-{n:05}-of-{len(tensors):05}.safetensors" for n in range(1, len(tensors) + 1)]
    for name, shard in zip(names, tensors, strict=True):
        write(folder / name, shard)
    if index:
        write_index(folder, {key: name for name, shard in zip(names, tensors, strict=True) for key in shard})
    return folder


def original() -> dict[str, Tensor]:
    """Return the weights of a very small model, BF16."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.layers.0.self_attn.q_proj.weight": (16, 16),
        "model.layers.0.mlp.up_proj.weight": (32, 16),
        "model.layers.0.input_layernorm.weight": (16,),
    }
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def to_fp8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return matrices as FP8 codes with one F32 scale per tensor, ``<name>_scale``; leave the rest as it is."""
    stored_tensors = {}
    for name, weight in tensors.items():
        stored_tensors[name] = weight
        if weight.ndim == 2:
            scale = weight.float().abs().max() / FP8_MAX
            stored_tensors[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
            stored_tensors[f"{name}_scale"] = scale
    return stored_tensors


def pair(folder: Path) -> tuple[Path, Path]:
    """Write files of the very small model and of its FP8 version."""
    x, y = folder / "original.safetensors", folder / "quantized.safetensors"
    return write(x, original()), write(y, to_fp8(original()))


@contextmanager
def as_nobody() -> Iterator[None]:
    """Drop all rights in the body of ``with`` if the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.setresuid(NOBODY, NOBODY, 0)
    except (AttributeError, OSError) as error:
        pytest.skip(f"root, and cannot become another user: {error}")
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def write_pair(folder, **shapes):
    """Write a BF16 original and FP8 with a scale per row, of these shapes."""
    random = torch.Generator().manual_seed(0)
    x = {f"{name}.weight": torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}
    y = {}
    for name, weight in x.items():
        scale = weight.float().abs().amax(1, keepdim=True) / 448
        y |= {name: (weight.float() / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    return write(folder / "x.safetensors", x), write(folder / "y.safetensors", y)
