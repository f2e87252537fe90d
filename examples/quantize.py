"""Write a quantized version of a safetensors file: FP8 or INT8 codes, rounded to nearest, with F32 scales.

    python examples/quantize.py model.safetensors model-fp8.safetensors --to fp8_row

    X.weight          BF16, F16 or F32    (M, K)    before

    X.weight          F8_E4M3 or I8       (M, K)    after
    X.weight_scale    F32                 () for tensor, (M, 1) for row, (⌈M/b⌉, ⌈K/b⌉) for block

    scale = max |x| / 448 for FP8, / 127 for INT8; 1 where every x is zero
    x     ≈ code · scale

This is the plainest of all recipes: no calibration, no search for a better scale. It is what a cleverer
one has to beat. All other tensors are copied.

The header of the output follows from the shapes in the input's, so it is written first, and then one
tensor at a time: a model may be larger than the memory.
"""

import argparse
import json
import struct
import sys
from collections.abc import Iterable, Iterator
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import pad

# Parts of names that stay as they are. Norms and biases are small and sensitive; embeddings (also T5's
# relative_attention_bias) are looked up and not multiplied; the head and the routers of experts choose
# among alternatives, where a small error changes the choice.
SKIP = ("norm", "bias", "embed", "wte", "wpe", "lm_head", "router", ".gate.")

FLOATS = ("BF16", "F16", "F32")

# Bytes of one element, by the dtype's name in a safetensors header.
SIZES = (
    dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1)
    | dict.fromkeys(("I16", "U16", "F16", "BF16"), 2)
    | dict.fromkeys(("I32", "U32", "F32"), 4)
    | dict.fromkeys(("I64", "U64", "F64", "C64"), 8)
)


class Codes(NamedTuple):
    """The numbers that a weight is rounded to."""

    dtype: torch.dtype
    stored: str  # the dtype's name in a safetensors header
    largest: float


CODES = {"fp8": Codes(torch.float8_e4m3fn, "F8_E4M3", 448.0), "int8": Codes(torch.int8, "I8", 127.0)}
GRANULARITIES = ("tensor", "row", "block")
RECIPES = tuple(f"{codes}_{granularity}" for codes in CODES for granularity in GRANULARITIES)


class Recipe(NamedTuple):
    """How a weight is quantized."""

    codes: Codes
    granularity: str
    block: int

    @classmethod
    def named(cls, name: str, block: int = 128) -> "Recipe":
        """The recipe of that name, one of RECIPES."""
        codes, granularity = name.split("_")
        return cls(CODES[codes], granularity, block)

    def edges(self, rows: int, cols: int) -> tuple[int, int]:
        """How many rows and columns share a scale."""
        return {"tensor": (rows, cols), "row": (1, cols), "block": (self.block, self.block)}[self.granularity]

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """The shape in which the scales are stored."""
        high, wide = self.edges(rows, cols)
        return () if self.granularity == "tensor" else (ceil(rows / high), ceil(cols / wide))


def quantize(weight: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight, (M, K).

    Raises:
        ValueError: the weight holds NaN or infinity.
    """
    rows, cols = weight.shape
    high, wide = recipe.edges(rows, cols)
    a, b = ceil(rows / high), ceil(cols / wide)
    whole = pad(weight.float(), (0, b * wide - cols, 0, a * high - rows))  # zeros do not change a maximum
    x = whole.view(a, high, b, wide)
    scale = x.abs().amax((1, 3), keepdim=True) / recipe.codes.largest  # (a, 1, b, 1)
    if not scale.isfinite().all():
        raise ValueError("holds NaN or infinity")
    scale.masked_fill_(scale == 0, 1)
    codes = (x / scale).clamp_(-recipe.codes.largest, recipe.codes.largest)
    if not recipe.codes.dtype.is_floating_point:
        codes.round_()  # to even at a tie, as the cast to FP8 does
    codes = codes.to(recipe.codes.dtype).flatten(2).flatten(0, 1)[:rows, :cols]
    return codes, scale.reshape(recipe.scale_shape(rows, cols))


class _Header(Protocol):
    def get_dtype(self) -> str: ...
    def get_shape(self) -> list[int]: ...


class _Opened(Protocol):
    """What is used of safe_open, which has no types of its own."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Header: ...
    def get_tensor(self, name: str) -> Tensor: ...


class Entry(NamedTuple):
    """A stored tensor, as a safetensors header declares it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return prod(self.shape) * SIZES[self.dtype]


def read_entries(source: _Opened) -> dict[str, Entry]:
    """The tensors of an open file, without their values.

    Raises:
        ValueError: a dtype that this program cannot copy.
    """
    entries = {}
    for name in sorted(source.keys()):
        header = source.get_slice(name)
        entries[name] = Entry(header.get_dtype(), tuple(header.get_shape()))
        if entries[name].dtype not in SIZES:
            raise ValueError(f"{name}: {entries[name].dtype} cannot be copied")
    return entries


def choose(entries: dict[str, Entry], skip: Iterable[str] = SKIP) -> list[str]:
    """Names of the weights to quantize: matrices of floats without any of ``skip`` in their names."""
    parts = [part.lower() for part in skip]
    return [
        name
        for name, (dtype, shape) in entries.items()
        if name.endswith(".weight") and dtype in FLOATS and len(shape) == 2 and all(shape)
        if not any(part in name.lower() for part in parts)
    ]


def plan(entries: dict[str, Entry], chosen: Iterable[str], recipe: Recipe) -> dict[str, Entry]:
    """The tensors of the output.

    Raises:
        ValueError: the input has a tensor of the name that a scale is to get.
    """
    planned = dict(entries)
    for name in chosen:
        if f"{name}_scale" in entries:
            raise ValueError(f"{name}_scale: is there already; is the input quantized?")
        rows, cols = entries[name].shape
        planned[name] = Entry(recipe.codes.stored, (rows, cols))
        planned[f"{name}_scale"] = Entry("F32", recipe.scale_shape(rows, cols))
    return planned


def layout(planned: dict[str, Entry]) -> tuple[bytes, dict[str, int]]:
    """The head of a safetensors file, and where in the file each tensor begins.

    The widest elements come first: so each of them is aligned to its own size.
    """
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for name, entry in sorted(planned.items(), key=lambda item: -SIZES[item[1].dtype]):
        begins[name], end = end, end + entry.nbytes
        fields[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (begins[name], end)}
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    head = struct.pack("<Q", len(header)) + header
    return head, {name: len(head) + begin for name, begin in begins.items()}


def raw(tensor: Tensor) -> bytearray:
    """The bytes of a tensor, also where torch has no numpy."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    copy = bytearray(len(flat))
    if copy:
        torch.frombuffer(copy, dtype=torch.uint8).copy_(flat)
    return copy


def _tensors(source: _Opened, chosen: set[str], recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the output with their names, one at a time."""
    for name in sorted(source.keys()):
        tensor = source.get_tensor(name)
        if name not in chosen:
            yield name, tensor
            continue
        try:
            codes, scale = quantize(tensor, recipe)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        yield name, codes
        yield f"{name}_scale", scale


def write_quantized(source: Path, target: Path, recipe: Recipe, skip: Iterable[str] = SKIP) -> list[str]:
    """Write the quantized version of a file, whole or not at all; returns which weights were quantized.

    Raises:
        ValueError: an input with nothing to quantize or that cannot be quantized, or that is the output.
        SafetensorError: an input that is not a safetensors file.
        OSError: a file that cannot be read or written.
    """
    if target.exists() and target.samefile(source):
        raise ValueError(f"{target}: is the input")
    temporary = target.with_name(f".{target.name}.tmp")
    with safe_open(source, framework="pt") as opened:
        entries = read_entries(opened)
        chosen = choose(entries, skip)
        if not chosen:
            raise ValueError(f"{source}: nothing to quantize (2-D {', '.join(FLOATS)} called *.weight)")
        head, begins = layout(plan(entries, chosen, recipe))
        try:
            with temporary.open("wb") as file:
                file.write(head)
                for name, tensor in _tensors(opened, set(chosen), recipe):
                    file.seek(begins[name])
                    file.write(raw(tensor))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    return chosen


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Quantize a safetensors file by rounding to nearest.")
    parser.add_argument("source", type=Path, metavar="IN.safetensors")
    parser.add_argument("target", type=Path, metavar="OUT.safetensors")
    parser.add_argument("--to", required=True, choices=RECIPES, help="codes, and what has a scale of its own")
    parser.add_argument("--block", type=int, default=128, help="edge of a block (default: %(default)s)")
    parser.add_argument(
        "--skip",
        nargs="*",
        default=SKIP,
        metavar="PATTERN",
        help=f"copy weights with any of these in their names (default: {' '.join(SKIP)})",
    )
    arguments = parser.parse_args()
    if arguments.block < 1:
        parser.error("--block: at least 1")
    return arguments


def main() -> None:
    """Quantize the file that the command line names."""
    given = _arguments()
    try:
        chosen = write_quantized(given.source, given.target, Recipe.named(given.to, given.block), given.skip)
    except (OSError, ValueError, SafetensorError) as error:
        sys.exit(f"quantize.py: {error}")
    before, after = (path.stat().st_size / 2**20 for path in (given.source, given.target))
    print(f"{given.target}: {given.to}, {len(chosen)} quantized, {before:.1f} MiB -> {after:.1f} MiB")
    if given.to.endswith("_block") and given.block.bit_count() > 1:
        edges = [given.block, given.block]
        print(
            f"note: shapes do not tell a block of {given.block}; call the file model.safetensors and put "
            f'beside it a config.json with {{"quantization_config": {{"weight_block_size": {edges}}}}}',
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
