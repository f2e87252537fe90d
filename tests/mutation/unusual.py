"""Sound but unusual weights in many formats: none of them may be called an error.

Each is rounded as its format's own writer rounds; GGUF types by the quantizers of gguf.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from support.gguf_stored import Stored, architecture, write_gguf
from torch import Tensor

import quanterr
from mutation.judging import Outcome, as_unsound, of_sound
from mutation.pairs import Bench
from quanterr.documents.comparison.model import Report

NAME = "model.layers.0.mlp.experts.0.up_proj.weight"
ROWS, COLS = 48, 256
Tensors = dict[str, Tensor]


def draw(*shape: int, seed: int = 5) -> Tensor:
    """Return normal numbers of the size of weights."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def few(share: float) -> Tensor:
    """Return ones at this share of places."""
    return (torch.rand(ROWS, COLS, generator=torch.Generator().manual_seed(6)) < share).float()


def with_rows(x: Tensor, factor: float, every: int) -> Tensor:
    """Enlarge or clear some rows."""
    x[::every] *= factor
    return x


KINDS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: draw(ROWS, COLS),
    "heavy tails": lambda: draw(ROWS, COLS) ** 3 * 1e3,
    "zero rows": lambda: with_rows(draw(ROWS, COLS), 0.0, 3),
    "one row": lambda: with_rows(draw(ROWS, COLS), 1e3, ROWS),
    "ternary": lambda: draw(ROWS, COLS).sign() * few(0.6) * 0.03,
    "signs": lambda: draw(ROWS, COLS).sign() * 0.03,
    "constant": lambda: torch.full((ROWS, COLS), 0.3),
    "tiny": lambda: draw(ROWS, COLS) * 5e-6,
    "very tiny": lambda: draw(ROWS, COLS) * 1e-12,
    "large": lambda: draw(ROWS, COLS) * 1e4,
    "sparse": lambda: draw(ROWS, COLS) * few(0.05),
    "very sparse": lambda: draw(ROWS, COLS) * few(0.002),
    "uniform": lambda: torch.linspace(-0.1, 0.1, ROWS * COLS).view(ROWS, COLS),
    "positive": lambda: draw(ROWS, COLS).abs() + 0.01,
    "outlier column": lambda: draw(ROWS, COLS) * torch.where(torch.arange(COLS) == 17, 300.0, 1.0),
    "sizes of rows": lambda: draw(ROWS, COLS) * torch.logspace(-4, 2, ROWS)[:, None],
    "sizes of columns": lambda: draw(ROWS, COLS) * torch.logspace(-3, 1, COLS),
    "dead expert": lambda: torch.zeros(ROWS, COLS),
    "identity": lambda: torch.eye(ROWS, COLS),
    "low rank": lambda: draw(ROWS, 2) @ draw(2, COLS, seed=8) * 50,
}


def int8(x: Tensor, bits: int = 8, axis: int | None = 1) -> Tensors:
    """Store integers in bytes with a scale for each row, or one."""
    largest = x.abs().amax(1, keepdim=True) if axis else x.abs().amax().view(1)
    unit = (largest / (2 ** (bits - 1) - 1)).clamp(min=1e-30)
    return {NAME: (x / unit).round().clamp(-128, 127).to(torch.int8), f"{NAME}_scale": unit}


def fp8(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, axis: int | None = 1) -> Tensors:
    """Store FP8 with a scale for each row, or one."""
    largest = x.abs().amax(1, keepdim=True) if axis else x.abs().amax().view(1)
    unit = (largest / torch.finfo(dtype).max).clamp(min=1e-30)
    return {NAME: (x / unit).to(dtype), f"{NAME}_scale": unit}


def ct_int4(x: Tensor, group: int) -> Tensors:
    """Store signed 4-bit codes as compressed-tensors does: eight in a word, a scale for each group."""
    blocks = x.view(ROWS, -1, group)
    unit = (blocks.abs().amax(2, keepdim=True) / 7.5).clamp(min=1e-30)
    codes = ((blocks / unit).round().clamp(-8, 7) + 8).view(ROWS, -1, 8).long()
    words = sum(codes[:, :, n] << 4 * n for n in range(8))
    return {
        f"{NAME}_packed": torch.as_tensor(words).to(torch.int32),
        f"{NAME}_scale": unit.squeeze(2),
        f"{NAME}_shape": torch.tensor([ROWS, COLS]),
    }


def mxfp8(x: Tensor) -> Tensors:
    """Store E4M3 codes with a power of two for each 32 columns."""
    blocks = x.view(ROWS, -1, 32)
    largest = blocks.abs().amax(2, keepdim=True).clamp(min=2.0**-120)
    exponent = (largest.log2().floor() - 8).clamp(-127, 127)
    codes = (blocks / 2**exponent).clamp(-448, 448).to(torch.float8_e4m3fn).view(ROWS, COLS)
    return {NAME: codes, f"{NAME}_scale": (exponent + 127).to(torch.uint8).squeeze(2)}


FORMATS: dict[str, Callable[[Tensor], Tensors]] = {
    "INT8 row": int8,
    "INT8 tensor": lambda x: int8(x, axis=None),
    "INT4 in bytes": lambda x: int8(x, bits=4),
    "INT2 in bytes": lambda x: int8(x, bits=2),
    "FP8 row": fp8,
    "FP8 tensor": lambda x: fp8(x, axis=None),
    "FP8 E5M2": lambda x: fp8(x, torch.float8_e5m2),
    "CT INT4 32": lambda x: ct_int4(x, 32),
    "CT INT4 128": lambda x: ct_int4(x, 128),
    "MXFP8": mxfp8,
}
TOO_SMALL = ("tiny", "very tiny")  # too small for scales in float16, as in GGUF
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ2_0")


def compare(x: Tensor, folder: Path, codes: Tensors | None, ggml_type: str) -> Report:
    """Compare one weight with its codes, or with GGUF blocks of a type."""
    if codes is not None:
        save_file({NAME: x}, folder / "x.safetensors")
        save_file(codes, folder / "y.safetensors")
        return quanterr.compare(folder / "x.safetensors", folder / "y.safetensors", device="cpu")
    name = "blk.0.ffn_up.weight"
    blocks = gguf.quantize(x.numpy().astype(np.float32), gguf.GGMLQuantizationType[ggml_type])
    save_file({name: x}, folder / "x.safetensors")
    path = write_gguf(
        folder / "y.gguf", [Stored(name, ggml_type, tuple(x.shape), blocks.tobytes())], architecture("llama")
    )
    return quanterr.compare(folder / "x.safetensors", path, device="cpu")


def small() -> Iterator[tuple[str, Tensor]]:
    """Yield weights that are too small to judge."""
    for shape in ((4, 4), (4, 8), (1, 64), (8, 1)):
        yield f"{shape[0]} × {shape[1]}", draw(*shape)


def outcomes(bench: Bench) -> Iterator[Outcome]:
    """Write every kind of weight in every format."""
    for label, make in KINDS.items():
        for format_name, write in FORMATS.items():
            report = compare(make(), bench.folder, write(make()), "")
            yield of_sound("unusual", f"{label} as {format_name}", report)
        for type_name in TYPES:
            report = compare(make(), bench.folder, None, type_name)
            outcome = of_sound("unusual", f"{label} as {type_name}", report)
            yield as_unsound(outcome) if label in TOO_SMALL else outcome
    for label, x in small():
        for format_name in ("INT8 row", "INT4 in bytes", "FP8 row", "FP8 tensor"):
            report = compare(x, bench.folder, FORMATS[format_name](x), "")
            yield of_sound("unusual", f"{label} as {format_name}", report)
