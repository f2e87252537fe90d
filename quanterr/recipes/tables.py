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
from dataclasses import dataclass, field
from functools import cache
from math import gcd, lcm

import torch
from torch import Tensor

from quanterr.formats.bnb_4bit import TABLES
from quanterr.recipes.base import Source, Stored
from quanterr.recipes.lookup import Lookup

NESTED = 256  # blocks that share a scale of scales
STATE = 256  # bytes
LEAST = 1e-38  # that takes the place of zero


@dataclass(frozen=True)
class Table:
    """``kind`` is nf4 or fp4; ``block`` elements share a scale."""

    kind: str
    block: int
    double: bool
    config: Mapping[str, object] = field(default_factory=dict)

    def refusal(self, source: Source) -> str | None:
        """None: any matrix can be stored like this."""
        return None

    def _blocks(self, source: Source) -> int:
        return -(-source.rows * source.cols // self.block)

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

    def measure(self, x: Tensor) -> Tensor:
        """The largest |x| of each block."""
        flat = x.reshape(-1)
        whole = len(flat) // self.block * self.block
        found = flat[:whole].view(-1, self.block).abs().amax(1)
        return found if whole == len(flat) else torch.cat([found, flat[whole:].abs().amax().clamp(min=LEAST).view(1)])

    def settle(self, measured: Tensor, source: Source) -> tuple[Tensor, ...]:
        """absmax, or what it is rounded to and its state."""
        if not self.double:
            return (measured,)
        offset = measured.mean()
        codes, scales = _rounded_to(dynamic_map(), measured - offset)
        nested = {
            "nested_blocksize": NESTED,
            "nested_dtype": "float32",
            "nested_offset": float(offset),
        }
        return codes, scales, self._described(source, nested)

    def encode(self, x: Tensor, first: int, settled: tuple[Tensor, ...]) -> Tensor:
        """The nearest of the table, two per byte. Codes are those of absmax before it is rounded."""
        flat = x.reshape(-1)
        whole = len(flat) // self.block * self.block
        blocks = flat[:whole].view(-1, self.block)
        scaled = blocks * (1.0 / blocks.abs().amax(1, keepdim=True).clamp_(min=LEAST))
        rest = flat[whole:]
        if len(rest):
            scaled = torch.cat([scaled.view(-1), rest / rest.abs().amax().clamp(min=LEAST)])
        scaled = scaled.view(-1).clamp_(-1, 1)
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


def _rounded_to(table: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of the nearest in a table, times the largest of each 256."""
    whole = len(values) // NESTED * NESTED
    blocks = values[:whole].view(-1, NESTED)
    scales = blocks.abs().amax(1)
    scaled = (blocks * (1.0 / scales.clamp(min=LEAST)[:, None])).clamp_(-1, 1).view(-1)
    rest = values[whole:]
    if len(rest):
        last = rest.abs().amax().clamp(min=LEAST)
        scales, scaled = torch.cat([scales, last.view(1)]), torch.cat([scaled, (rest / last).clamp_(-1, 1)])
    return torch.bucketize(scaled, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8), scales
