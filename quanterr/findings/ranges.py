"""Sizes of the inputs of a weight, and of its keys and values, derived from norms and weights.

The elements that a norm without bias returns are x = w · u, where the squares of u have a mean of 1. So no element
exceeds max|w| · √n, and most are about as large as w. A row r of the weight behind it gives a product of about ‖r · w‖,
and of ‖r · w‖ · √n at most. Softmax averages values, so the input of o_proj is not larger than they are; the input of
down_proj is about the product of what gate_proj and up_proj give. At least half of the size of both is left.

On SmolLM2-135M (30 layers, 4,608 tokens of English), the largest inputs, keys and values are at most 0.99 times these
bounds, and at least 2.4 times as large as most are by this estimate.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import sqrt
from statistics import median
from typing import NamedTuple

from quanterr.findings.limits import NEGLIGIBLE_SHARE
from quanterr.formats import Weight
from quanterr.formats.reading import Reader
from quanterr.lazy_torch import Tensor, torch
from quanterr.pairing.model import Pair
from quanterr.pairing.names import FED_BY_NORM, canonicalize
from quanterr.tensors.chunks import CPU_CHUNK, Chunk, Cut

SAMPLED = 128  # most rows of a weight to read
NORM = "input_layernorm"  # the norm of each block that bounds the inputs
ROTATED = sqrt(2)  # the most by which rotary positions lengthen an element of a pair
# In a block with one of these, the norm's output does not go to the block's weights.
NOT_BEFORE = {"post_attention_layernorm": ("pre_feedforward_layernorm", "post_feedforward_layernorm")}
LARGEST = {"F8_E4M3": 448.0, "F8_E5M2": 448.0, "I8": 127.0}  # dtype of codes → largest code of inputs
LARGEST_NVFP4 = 2688.0  # of inputs in NVFP4: 448 · 6
SCALED = "pre_quant_scale"  # the end of the name of factors of inputs, which change their range
OF_KEYS, OF_VALUES = ("k_scale", "k_cache_scale"), ("v_scale", "v_cache_scale")


class Range(NamedTuple):
    """Sizes of numbers that a scale is for."""

    usual: float  # most are about as large as this
    most: float  # none is larger


class _Normed(NamedTuple):
    """The output of a norm, by element: bounds of the size of its weight."""

    low: Tensor
    high: Tensor

    @property
    def range(self) -> Range:
        return Range(float(self.low.median()), float(self.high.max()) * sqrt(len(self.high)))


class Ranges:
    """The ranges that the weights of one side allow."""

    def __init__(self, pairs: Sequence[Pair], side: int, reader: Reader) -> None:
        """Take the weights of a side; they are looked up, and read, when they are asked for."""
        self._pairs, self._side, self._reader = pairs, side, reader

    @cached_property
    def _weights(self) -> Mapping[tuple[str, str], Weight]:
        return {canonicalize(pair.name): (pair.original, pair.quantized)[self._side] for pair in self._pairs}

    @cached_property
    def _scaled(self) -> set[str]:
        """The paths of modules with factors of inputs."""
        return {
            canonicalize(pair.name)[0]
            for pair in self._pairs
            if any(entry.name.endswith(SCALED) for entry in pair.consumed[self._side])
        }

    def of_scale(self, name: str) -> Range | None:
        """Return the range of what a scale is for; None if unknown."""
        module, _, ending = name.rpartition(".")
        path = canonicalize(module)[0]
        block = path.removesuffix(".k_proj").removesuffix(".v_proj").removesuffix(".attn")
        if ending in OF_KEYS:
            return self._of_keys(block)
        if ending in OF_VALUES:
            return self._of_products(f"{block}.v_proj")
        block, _, word = path.rpartition(".")
        if word == "o_proj":
            values = self._of_products(f"{block}.v_proj")
            return None if values is None else Range(values.usual / 2, values.most)
        if word == "down_proj":
            return self._of_gated(block)
        normed = self._find_norm(path)
        return None if normed is None else normed.range

    def reach_of(self, name: str, scale: float) -> float | None:
        """Return the largest number that a scale represents; None if unknown."""
        module, _, ending = name.rpartition(".")
        if ending in (*OF_KEYS, *OF_VALUES):
            return LARGEST["F8_E4M3"] * scale
        place = canonicalize(f"{module}.weight")
        weight = self._weights.get(place)
        if weight is None or place[0] in self._scaled or ending not in ("input_scale", "input_global_scale"):
            return None
        if "nvfp4" in weight.format:
            return LARGEST_NVFP4 * scale if ending == "input_scale" else LARGEST_NVFP4 / scale
        largest = LARGEST.get(weight.codes.dtype)
        return None if largest is None or ending != "input_scale" else largest * scale

    def _find_norm(self, path: str) -> _Normed | None:
        """Return the output of the norm that feeds a module."""
        for norms, fed in FED_BY_NORM:
            if found := re.search(rf"\.(?:{fed})$", path):
                block = path[: found.start()]
                names = [name for name in norms.split("|") if self._is_before(block, name)]
                return self._read_norm(f"{block}.{names[0]}") if names else None
        return None

    def _is_before(self, block: str, norm: str) -> bool:
        others = NOT_BEFORE.get(norm, ())
        return (f"{block}.{norm}", "") in self._weights and not any(
            (f"{block}.{other}", "") in self._weights for other in others
        )

    def _read_norm(self, path: str) -> _Normed | None:
        norm = self._weights.get((path, ""))
        if norm is None or (path, ".bias") in self._weights or not norm.n or norm.matrix[0] != 1:
            return None
        w = _read_vector(norm, self._reader)
        if not self._may_be_minus_one:
            return _Normed(w.abs(), w.abs())
        return _Normed(torch.minimum(w.abs(), (w + 1).abs()), torch.maximum(w.abs(), (w + 1).abs()))

    @cached_property
    def _may_be_minus_one(self) -> bool:
        """True if the model may multiply by one plus the norms: without that, few elements of most are negative."""
        norms = [norm for (path, kind), norm in self._weights.items() if path.endswith(NORM) and norm.n and not kind]
        shares = [float((_read_vector(norm, self._reader) < 0).double().mean()) for norm in norms]
        return bool(shares) and median(shares) > NEGLIGIBLE_SHARE

    def _of_keys(self, block: str) -> Range | None:
        if (f"{block}.k_norm", "") in self._weights:
            normed = self._read_norm(f"{block}.k_norm")
            found = None if normed is None else normed.range
        else:
            found = self._of_products(f"{block}.k_proj")
        return None if found is None else Range(found.usual, ROTATED * found.most)

    def _of_products(self, path: str) -> Range | None:
        """Return the range of a weight's products."""
        if (lengths := self._measure_rows(path)) is None:
            return None
        low, high, n = lengths
        return Range(float(low.median()), float(high.max()) * sqrt(n) + self._read_bias(path))

    def _of_gated(self, block: str) -> Range | None:
        """Return the range of products of gate_proj and up_proj; all rows are read, as one may be far above others."""
        gate, up = (self._measure_rows(f"{block}.{word}", whole=True) for word in ("gate_proj", "up_proj"))
        if gate is None or up is None or len(gate[0]) != len(up[0]):
            return None
        return Range(float((gate[0] * up[0]).median()) / 2, float((gate[1] * up[1]).max()) * gate[2])

    def _measure_rows(self, path: str, whole: bool = False) -> tuple[Tensor, Tensor, int] | None:
        """Return bounds of ‖r · w‖ for sampled rows of a weight after a norm, and the number of columns."""
        weight, normed = self._weights.get((path, "")), self._find_norm(path)
        if weight is None or normed is None or weight.matrix[1] != len(normed.low):
            return None
        rows, cols = weight.matrix
        places: list[int] | slice = slice(None)
        chunks: Iterable[Chunk] = Cut(rows, cols, CPU_CHUNK)
        if not whole and rows > SAMPLED:
            places = torch.linspace(0, rows - 1, SAMPLED, dtype=torch.float64).round().long().tolist()
            chunks = [Chunk(at, at + 1, 0, cols) for at in places]
        squares = torch.zeros(2, rows, dtype=torch.float64)
        for chunk in chunks:
            x = self._reader.read(weight, chunk)
            for side, bound in zip(squares, normed, strict=True):
                factors = bound[chunk.col : chunk.stop_col].to(x.dtype)
                side[chunk.row : chunk.stop_row] += (x * factors).square().sum(1).double()
        low, high = squares[:, places].sqrt()
        return low, high, cols

    def _read_bias(self, path: str) -> float:
        bias = self._weights.get((path, ".bias"))
        if bias is None or not bias.n:
            return 0.0
        return float(_read_vector(bias, self._reader).abs().max())


def _read_vector(weight: Weight, reader: Reader) -> Tensor:
    return reader.read(weight, Chunk(0, 1, 0, weight.n))[0].double()
