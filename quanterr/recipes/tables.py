"""Codes of a table with a scale for each few elements: ``nf4``, ``fp4``, ``nf4_g128``, ``nf4:double``.

    X.weight                                 U8     (⌈elements / 2⌉, 1): the first element in the high bits
    X.weight.absmax                          F32    (blocks,); with :double U8, codes of nested_quant_map
    X.weight.quant_map                       F32    (16,)
    X.weight.nested_absmax                   F32    (⌈blocks / 256⌉,), of :double
    X.weight.nested_quant_map                F32    (256,), of :double
    X.weight.quant_state.bitsandbytes__nf4   U8     JSON, filled up with spaces

    code = the nearest of the table to x · (1 / max |x|); at a tie the lower one
    :double takes the mean of all absmax off them and rounds the rest to a table of 256, times the largest of 256 blocks

Blocks run row by row. A last block that is not whole is divided by its absmax instead.

Reference: bitsandbytes-foundation/bitsandbytes@0.50.2 backends/default/ops.py quantize_4bit, quantize_blockwise;
functional.py quantize_4bit, create_dynamic_map, QuantState.as_dict.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import gcd, lcm

import torch
from torch import Tensor

from quanterr.formats.bnb_4bit import TABLES
from quanterr.recipes.base import Scheme, Source, Stored
from quanterr.recipes.lookup import Lookup

NESTED = 256  # blocks that share a scale of scales
STATE = 256  # bytes
LEAST = 1e-38  # that takes the place of zero


@dataclass(frozen=True)
class Table(Scheme):
    """``kind`` is nf4 or fp4; ``block`` elements share a scale."""

    kind: str
    block: int
    double: bool

    def _blocks(self, source: Source) -> int:
        return -(-source.rows * source.cols // self.block)

    @property
    def is_local(self) -> bool:
        """Not with scales that are quantized with those of other rows."""
        return not self.double

    def stored(self, source: Source) -> tuple[Stored, ...]:
        """Codes, scales, tables, state."""
        blocks = self._blocks(source)
        found = [
            Stored("{weight}", "U8", (-(-source.rows * source.cols // 2), 1)),
            Stored("{weight}.absmax", "U8" if self.double else "F32", (blocks,)),
        ]
        if self.double:
            found.append(Stored("{weight}.nested_absmax", "F32", (-(-blocks // NESTED),)))
        found.append(Stored(self._state, "U8", (STATE,)))
        found.append(Stored("{weight}.quant_map", "F32", (16,)))
        return *found, *([Stored("{weight}.nested_quant_map", "F32", (256,))] if self.double else [])

    @property
    def _state(self) -> str:
        return f"{{weight}}.quant_state.bitsandbytes__{self.kind}"

    def together(self, source: Source) -> int:
        """As many as make whole blocks, and whole bytes."""
        whole = lcm(self.block, 2)
        return whole // gcd(whole, source.cols)

    def known(self, source: Source) -> Mapping[str, Tensor]:
        """The tables; the state, but of :double, which has the mean of all absmax."""
        tables = {"{weight}.quant_map": torch.tensor(TABLES[self.kind])}
        if self.double:
            return tables | {"{weight}.nested_quant_map": dynamic_map()}
        return tables | {self._state: self._described(source, {})}

    def _described(self, source: Source, nested: Mapping[str, object]) -> Tensor:
        dtype = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[source.dtype]
        fields = {"quant_type": self.kind, "blocksize": self.block, "dtype": dtype}
        text = json.dumps(fields | {"shape": [source.rows, source.cols]} | dict(nested))
        return torch.frombuffer(bytearray(text.encode().ljust(STATE)), dtype=torch.uint8)

    def measure(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        """The largest |x| of each block."""
        return _largest(x.reshape(-1), self.block)

    def settle(self, measured: Tensor, source: Source) -> tuple[Tensor, ...]:
        """absmax, or what it is rounded to and its state; at last absmax as measured, which codes are made with."""
        if not self.double:
            return (measured,)
        offset = measured.mean()
        rest = measured - offset
        scales = _largest(rest, NESTED)
        table = dynamic_map()
        scaled = _scaled(rest, scales, NESTED)
        codes = torch.bucketize(scaled, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)
        nested = {
            "nested_blocksize": NESTED,
            "nested_dtype": "float32",
            "nested_offset": float(offset),
        }
        return codes, scales, self._described(source, nested), measured

    def encode(self, x: Tensor, first: int, settled: tuple[Tensor, ...], importance: Tensor | None = None) -> Tensor:
        """The nearest of the table, two per byte."""
        flat = x.reshape(-1)
        block = first * x.shape[1] // self.block
        scaled = _scaled(flat, settled[-1][block : block + -(-len(flat) // self.block)], self.block)
        if len(scaled) % 2:
            scaled = torch.nn.functional.pad(scaled, (0, 1))
        codes = _lookup(self.kind)(scaled)
        return (codes[::2] << 4 | codes[1::2]).view(1, -1)


@cache
def _lookup(kind: str) -> Lookup:
    table = torch.tensor(TABLES[kind])
    order = torch.argsort(table)
    bounds = (table[order[:-1]] + table[order[1:]]) / 2
    return Lookup(table[order].tolist(), order.tolist(), bounds.tolist())


@cache
def dynamic_map() -> Tensor:
    """The 256 numbers to which absmax is rounded: float32, ascending, from -0.99 to 1."""
    found = [0.0, 1.0]
    for exponent in range(7):
        ends = torch.linspace(0.1, 1, 2**exponent + 1)
        means = (ends[:-1] + ends[1:]) / 2.0
        for sign in (1, -1):
            found += (sign * 10 ** (exponent - 6) * means).tolist()
    return torch.tensor(sorted(found))


def _largest(values: Tensor, block: int) -> Tensor:
    """The largest magnitude of each block; that of a last one that is not whole is not zero."""
    whole = len(values) // block * block
    found = values[:whole].view(-1, block).abs().amax(1)
    rest = values[whole:]
    return torch.cat([found, rest.abs().amax().clamp(min=LEAST).view(1)]) if len(rest) else found


def _scaled(values: Tensor, largest: Tensor, block: int) -> Tensor:
    """Each block over its largest magnitude."""
    whole = len(values) // block * block
    inverse = 1.0 / largest[: whole // block].clamp(min=LEAST)
    found = (values[:whole].view(-1, block) * inverse[:, None]).view(-1)
    rest = values[whole:]
    return (torch.cat([found, rest / largest[-1]]) if len(rest) else found).clamp_(-1, 1)
