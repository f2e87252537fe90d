"""Codes that index a table, with a scale per block of elements: ``nf4``, ``fp4``, ``nf4_g128``, ``nf4:double``.

    X.weight                                 U8     (⌈elements / 2⌉, 1): the first element in the high bits
    X.weight.absmax                          F32    (blocks,); with :double U8, codes into nested_quant_map
    X.weight.quant_map                       F32    (16,)
    X.weight.nested_absmax                   F32    (⌈blocks / 256⌉,), with :double
    X.weight.nested_quant_map                F32    (256,), with :double
    X.weight.quant_state.bitsandbytes__nf4   U8     JSON, padded with spaces

    code = the table's nearest number to x · (1 / max |x|); at a tie the lower one
    :double subtracts the mean of all absmax and rounds the differences to 256 numbers, scaled by the largest of 256
    blocks

Blocks follow the elements row by row. A partial last block is divided by its absmax, not multiplied by the inverse.

Reference: bitsandbytes-foundation/bitsandbytes@0.50.2 backends/default/ops.py quantize_4bit, quantize_blockwise;
functional.py quantize_4bit, create_dynamic_map, QuantState.as_dict.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import gcd, lcm

from quanterr.formats.bnb_4bit import TABLES
from quanterr.kernel.enums import Packing
from quanterr.kernel.rounding import Codes, find_codes, make_counts, make_table
from quanterr.lazy_torch import Tensor, torch
from quanterr.recipes.base import Encoder, Piece, Source, StoredTensor
from quanterr.recipes.lookup import Lookup
from quanterr.tensors.packing import pack_pairs

NESTED_BLOCKS = 256  # number of blocks whose scales share a scale
STATE_BYTES = 256
MIN_MAGNITUDE = 1e-38  # replaces zero, as blocks are divided by it


@dataclass(frozen=True)
class TableEncoder(Encoder):
    """An encoder with the table ``quant_type``, nf4 or fp4; ``block`` elements share a scale."""

    quant_type: str
    block: int
    double: bool

    @property
    def is_local(self) -> bool:
        """False if the scales of several rows are quantized together."""
        return not self.double

    def list_tensors(self, source: Source) -> tuple[StoredTensor, ...]:
        """List codes, scales, tables and state."""
        blocks = -(-source.rows * source.cols // self.block)
        tensors = [
            StoredTensor("{weight}", "U8", (-(-source.rows * source.cols // 2), 1)),
            StoredTensor("{weight}.absmax", "U8" if self.double else "F32", (blocks,)),
        ]
        if self.double:
            tensors.append(StoredTensor("{weight}.nested_absmax", "F32", (-(-blocks // NESTED_BLOCKS),)))
        tensors.append(StoredTensor(self._state, "U8", (STATE_BYTES,)))
        tensors.append(StoredTensor("{weight}.quant_map", "F32", (16,)))
        return *tensors, *([StoredTensor("{weight}.nested_quant_map", "F32", (256,))] if self.double else [])

    @property
    def _state(self) -> str:
        return f"{{weight}}.quant_state.bitsandbytes__{self.quant_type}"

    def joint_rows(self, source: Source) -> int:
        """Return the smallest number of rows that fill whole blocks and whole bytes."""
        whole = lcm(self.block, 2)
        return whole // gcd(whole, source.cols)

    def constant_tensors(self, source: Source) -> Mapping[str, Tensor]:
        """Return the tables, and also the state, except with :double, as it then holds the mean of all absmax."""
        tables = {"{weight}.quant_map": torch.tensor(TABLES[self.quant_type])}
        if self.double:
            return tables | {"{weight}.nested_quant_map": make_dynamic_map()}
        return tables | {self._state: self._encode_state(source, {})}

    def _encode_state(self, source: Source, nested: Mapping[str, object]) -> Tensor:
        dtype = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[source.dtype]
        fields = {"quant_type": self.quant_type, "blocksize": self.block, "dtype": dtype}
        text = json.dumps(fields | {"shape": [source.rows, source.cols]} | dict(nested))
        return torch.frombuffer(bytearray(text.encode().ljust(STATE_BYTES)), dtype=torch.uint8)

    def measure(self, piece: Piece, importance: Tensor | None = None) -> Tensor:
        """Return the largest |x| of each block."""
        return _find_largest(piece, self.block)

    def settle(self, measured: Tensor, source: Source) -> tuple[Tensor, ...]:
        """Return absmax, or with :double its codes, scales and state; then absmax as measured, for ``encode``."""
        if not self.double:
            return (measured,)
        offset = measured.mean()
        rest = measured - offset
        scales = _find_largest(Piece(rest), NESTED_BLOCKS)
        codes = _find_codes_of_blocks(rest, scales, NESTED_BLOCKS, _make_nested_codes()).view(-1)
        nested = {
            "nested_blocksize": NESTED_BLOCKS,
            "nested_dtype": "float32",
            "nested_offset": float(offset),
        }
        return codes, scales, self._encode_state(source, nested), measured

    def encode(
        self, x: Tensor, first: int, settled: tuple[Tensor, ...], out: Tensor, importance: Tensor | None = None
    ) -> None:
        """Write the codes of the table's nearest numbers, two per byte."""
        flat, to = x.reshape(-1), _make_codes(self.quant_type)
        block = first * x.shape[1] // self.block
        largest = settled[-1][block : block + -(-len(flat) // self.block)]
        if len(flat) % self.block == 0:
            _find_codes_of_blocks(flat, largest, self.block, to, Packing.HIGH_FIRST, out[None])
            return
        codes = _find_codes_of_blocks(flat, largest, self.block, to)
        if codes.shape[1] % 2:
            codes = torch.cat([codes, to.round(torch.zeros(1, 1))], 1)
        out[None].copy_(pack_pairs(codes, low_first=False))


@cache
def _make_codes(table_name: str) -> Codes:
    table = torch.tensor(TABLES[table_name])
    order = torch.argsort(table)
    bounds = (table[order[:-1]] + table[order[1:]]) / 2
    return make_table(order.tolist(), bounds, Lookup(table[order].tolist(), order.tolist(), bounds.tolist()))


@cache
def _make_nested_codes() -> Codes:
    table = make_dynamic_map()
    return make_counts((table[:-1] + table[1:]) / 2)


@cache
def make_dynamic_map() -> Tensor:
    """Return the 256 numbers to which absmax is rounded: float32, ascending, from -0.99 to 1."""
    numbers = [0.0, 1.0]
    for exponent in range(7):
        ends = torch.linspace(0.1, 1, 2**exponent + 1)
        means = (ends[:-1] + ends[1:]) / 2.0
        for sign in (1, -1):
            numbers += (sign * 10 ** (exponent - 6) * means).tolist()
    return torch.tensor(sorted(numbers))


def _find_largest(values: Piece, block: int) -> Tensor:
    """Return the largest magnitude of each block; zero is replaced in a partial last block."""
    magnitudes = values.find_magnitudes(block)
    return (
        torch.cat([magnitudes[:-1], magnitudes[-1:].clamp(min=MIN_MAGNITUDE)])
        if values.rows.numel() % block
        else magnitudes
    )


def _find_codes_of_blocks(
    values: Tensor,
    largest: Tensor,
    block: int,
    to: Codes,
    packing: Packing = Packing.BYTES,
    out: Tensor | None = None,
) -> Tensor:
    """Return the codes of values relative to the largest magnitudes of their blocks, (1, n).

    Whole blocks are multiplied by the inverse, and a partial last block is divided. ``packing`` and ``out`` are as in
    find_codes, for whole blocks only.
    """
    whole = len(values) // block * block
    inverse = 1.0 / largest[: whole // block].clamp(min=MIN_MAGNITUDE)
    codes = find_codes(values[None, :whole], inverse[None], to, block, multiply=True, packing=packing, out=out)
    rest = values[None, whole:]
    return torch.cat([codes, find_codes(rest, largest[None, -1:], to, rest.shape[1])], 1) if rest.numel() else codes
