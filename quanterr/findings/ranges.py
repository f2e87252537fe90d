"""Bounds of the inputs of a weight, and of keys and values, derived from norms and weights.

A norm without bias returns x = w · u, where the squares of u have a mean of 1. So no element exceeds max|w| · √n, and
most are about as large as w. The product of x with a row r of the next weight is about ‖r · w‖, and at most
‖r · w‖ · √n. Softmax averages values, so the input of o_proj is not larger than the values. The input of down_proj is
about the product of the outputs of gate_proj and up_proj. At least half of these sizes remains, so both are halved.

On SmolLM2-135M (30 layers, 4,608 tokens of English), the largest inputs, keys and values are at most 0.99 times these
bounds, and at least 2.4 times the usual size by this estimate.
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

MAX_SAMPLED_ROWS = 128  # maximum number of rows of a weight to read
INPUT_NORM = "input_layernorm"  # the norm of each block that bounds the inputs
ROTATION_GAIN = sqrt(2)  # maximum factor by which rotary positions lengthen an element of a pair
# Norm → norms whose presence in the block shows that its output does not go to the block's weights.
OUTPUT_NORM_SIGNS = {"post_attention_layernorm": ("pre_feedforward_layernorm", "post_feedforward_layernorm")}
LARGEST_CODES = {"F8_E4M3": 448.0, "F8_E5M2": 448.0, "I8": 127.0}  # dtype of codes → largest code of inputs
LARGEST_NVFP4 = 2688.0  # largest input in NVFP4: 448 · 6
FACTORS_SUFFIX = "pre_quant_scale"  # the end of the name of factors of inputs, which change their range
KEY_SCALES, VALUE_SCALES = ("k_scale", "k_cache_scale"), ("v_scale", "v_cache_scale")


class Range(NamedTuple):
    """Sizes of the numbers that a scale has to represent."""

    usual: float  # most numbers are about as large as this
    limit: float  # no number is larger


class _Normed(NamedTuple):
    """The output of a norm: lower and upper bounds of |w| for each element, as w may be stored minus one."""

    low: Tensor
    high: Tensor

    @property
    def range(self) -> Range:
        return Range(float(self.low.median()), float(self.high.max()) * sqrt(len(self.high)))


class Ranges:
    """The ranges that the weights of one side allow."""

    def __init__(self, pairs: Sequence[Pair], side: int, reader: Reader) -> None:
        """Keep the weights of a side, which are read only when a range is needed."""
        self._pairs, self._side, self._reader = pairs, side, reader

    @cached_property
    def _weights(self) -> Mapping[tuple[str, str], Weight]:
        return {canonicalize(pair.name): (pair.original, pair.quantized)[self._side] for pair in self._pairs}

    @cached_property
    def _scaled_modules(self) -> set[str]:
        """The names of modules that store factors for their inputs."""
        return {
            canonicalize(pair.name)[0]
            for pair in self._pairs
            if any(entry.name.endswith(FACTORS_SUFFIX) for entry in pair.other_entries[self._side])
        }

    def find_range(self, name: str) -> Range | None:
        """Return the range of the numbers that a scale has to represent; None if unknown."""
        module, _, ending = name.rpartition(".")
        path = canonicalize(module)[0]
        block = path.removesuffix(".k_proj").removesuffix(".v_proj").removesuffix(".attn")
        if ending in KEY_SCALES:
            return self._find_key_range(block)
        if ending in VALUE_SCALES:
            return self._find_product_range(f"{block}.v_proj")
        block, _, word = path.rpartition(".")
        if word == "o_proj":
            values = self._find_product_range(f"{block}.v_proj")
            return None if values is None else Range(values.usual / 2, values.limit)
        if word == "down_proj":
            return self._find_gated_range(block)
        normed = self._find_norm(path)
        return None if normed is None else normed.range

    def find_reach(self, name: str, scale: float) -> float | None:
        """Return the largest number that a scale represents; None if unknown."""
        module, _, ending = name.rpartition(".")
        if ending in (*KEY_SCALES, *VALUE_SCALES):
            return LARGEST_CODES["F8_E4M3"] * scale
        place = canonicalize(f"{module}.weight")
        weight = self._weights.get(place)
        if weight is None or place[0] in self._scaled_modules or ending not in ("input_scale", "input_global_scale"):
            return None
        if "nvfp4" in weight.format:
            return LARGEST_NVFP4 * scale if ending == "input_scale" else LARGEST_NVFP4 / scale
        largest = LARGEST_CODES.get(weight.codes.dtype)
        return None if largest is None or ending != "input_scale" else largest * scale

    def _find_norm(self, path: str) -> _Normed | None:
        """Return the output of the norm that feeds a module."""
        for norms, fed in FED_BY_NORM:
            if match := re.search(rf"\.(?:{fed})$", path):
                block = path[: match.start()]
                names = [name for name in norms.split("|") if self._is_before(block, name)]
                return self._read_norm(f"{block}.{names[0]}") if names else None
        return None

    def _is_before(self, block: str, norm: str) -> bool:
        others = OUTPUT_NORM_SIGNS.get(norm, ())
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
        """True if the model may multiply by one plus the norm; otherwise few elements of its norms are negative."""
        norms = [
            norm
            for (path, suffix), norm in self._weights.items()
            if path.endswith(INPUT_NORM) and norm.n and not suffix
        ]
        shares = [float((_read_vector(norm, self._reader) < 0).double().mean()) for norm in norms]
        return bool(shares) and median(shares) > NEGLIGIBLE_SHARE

    def _find_key_range(self, block: str) -> Range | None:
        if (f"{block}.k_norm", "") in self._weights:
            normed = self._read_norm(f"{block}.k_norm")
            products = None if normed is None else normed.range
        else:
            products = self._find_product_range(f"{block}.k_proj")
        return None if products is None else Range(products.usual, ROTATION_GAIN * products.limit)

    def _find_product_range(self, path: str) -> Range | None:
        """Return the range of a weight's products."""
        if (lengths := self._measure_rows(path)) is None:
            return None
        low, high, n = lengths
        return Range(float(low.median()), float(high.max()) * sqrt(n) + self._read_bias(path))

    def _find_gated_range(self, block: str) -> Range | None:
        """Return the range of products of gate_proj and up_proj; all rows are read, as one may exceed all others."""
        gate, up = (self._measure_rows(f"{block}.{word}", reads_all=True) for word in ("gate_proj", "up_proj"))
        if gate is None or up is None or len(gate[0]) != len(up[0]):
            return None
        return Range(float((gate[0] * up[0]).median()) / 2, float((gate[1] * up[1]).max()) * gate[2])

    def _measure_rows(self, path: str, reads_all: bool = False) -> tuple[Tensor, Tensor, int] | None:
        """Return bounds of ‖r · w‖ for sampled rows of a weight after a norm, and the number of columns."""
        weight, normed = self._weights.get((path, "")), self._find_norm(path)
        if weight is None or normed is None or weight.matrix[1] != len(normed.low):
            return None
        rows, cols = weight.matrix
        places: list[int] | slice = slice(None)
        chunks: Iterable[Chunk] = Cut(rows, cols, CPU_CHUNK)
        if not reads_all and rows > MAX_SAMPLED_ROWS:
            places = torch.linspace(0, rows - 1, MAX_SAMPLED_ROWS, dtype=torch.float64).round().long().tolist()
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
