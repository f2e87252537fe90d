"""Small floats with a scale of one byte for each few columns: what MXFP4, MXFP6, MXFP8 and NVFP4 have in common.

    codes    (rows, cols) of E2M1, two per byte, the first in the low bits; of E2M3 or E3M2, four in three bytes,
             the first in the lowest bits; or of E4M3 or E5M2; stored as bytes or words of any dtype
    scale    (rows, cols / block) bytes, in rows or in tiles (shared/swizzled_scales.py): E8M0 exponents, E4M3, E5M3

    weight[r, c] = code[r, c] * scale[r, c // block]                                  one rounding

A global scale multiplies or divides the block's scale first, which is rounded. Codes of a multiple of 32
columns may be longer than the weight: shared/padding.py.

Reference: OCP Microscaling Formats (MX) 1.0, 5.2 and 5.3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from quanterr.checkpoints import Entry
from quanterr.formats.base import Decoder, Dequantize, Element, Native, Part, Values
from quanterr.formats.shared import bit_stream, element_types, pre_quant_scale
from quanterr.formats.shared.element_types import Codes
from quanterr.formats.shared.padding import Padded
from quanterr.formats.shared.scale_grid import multiply
from quanterr.formats.shared.swizzled_scales import BlockScales
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.levels import E2M1, E2M3, E3M2, E4M3, E5M2, Levels
from quanterr.tensors.workspace import Workspace

SmallFloat = Literal["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"]
CODE_BITS: dict[SmallFloat, int] = {"e2m1": 4, "e2m3": 6, "e3m2": 6, "e4m3": 8, "e5m2": 8}
LEVELS: dict[SmallFloat, Levels] = {
    "e2m1": E2M1.scaled,
    "e2m3": E2M3,
    "e3m2": E3M2,
    "e4m3": E4M3.scaled,
    "e5m2": E5M2.scaled,
}
SIX_BITS: dict[SmallFloat, tuple[float, ...]] = {"e2m3": element_types.E2M3, "e3m2": element_types.E3M2}
ELEMENTS: dict[str, SmallFloat] = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2", "U8": "e2m1", "I8": "e2m1", "F4": "e2m1"}

ScaleOf = Callable[[Tensor, Chunk, Workspace], Tensor]  # float32 of the bytes of a chunk's scales, (r, blocks)


NVFP4_PARTS = {  # of ModelOpt and ComfyUI
    "codes": Part(("{weight}",), frozenset({"U8", "F4"})),
    "scale": Part(("{weight}_scale", "{weight}_weight_scale"), frozenset({"F8_E4M3", "U8"})),
    "global_scale": Part(("{weight}_scale_2", "{weight}_weight_scale_2"), frozenset({"F32"})),
    "pre_quant_scale": pre_quant_scale.PART,
}


@dataclass(frozen=True, slots=True)
class Microscaled:
    """Where codes and scales of a weight are, and what the scales' bytes mean."""

    codes: Entry
    element: SmallFloat
    padded: Padded
    scales: BlockScales
    scale_of: ScaleOf
    unpacked: bool = False  # codes of 6 bits have a byte each
    high_first: bool = False  # of two codes in a byte

    def dequantize(self, chunk: Chunk, workspace: Workspace) -> Values:
        """code · scale, (r, c)."""
        return self.padded.dequantize(chunk, workspace, self._block)

    @property
    def native(self) -> Dequantize:
        """:meth:`dequantize`, with the same as data where bytes hold whole codes and no rows are padding."""
        padded = self.padded
        if self.element in SIX_BITS or padded.rows != padded.stored_rows:
            return self.dequantize
        kind: Element
        table: Tensor | None
        ends: tuple[int, ...]
        if self.element == "e4m3":
            (kind, ends), table = element_types.ELEMENTS["F8_E4M3"], None
        elif self.element == "e5m2":
            (kind, ends), table = element_types.ELEMENTS["F8_E5M2"], element_types.e5m2_table()
        else:
            kind, ends, table = Element.TABLE, (), self._pairs(torch.device("cpu"))
        scale = self._scales
        decoder = Decoder(self.codes, padded.stored_cols, kind, table, scale, group=padded.step, ends=ends)
        return Native(self.dequantize, decoder)

    def _pairs(self, device: torch.device) -> Tensor:
        return element_types.e2m1_pairs(self.high_first, device)

    def _block(self, chunk: Chunk, workspace: Workspace) -> Values:
        values, unit, saturated = self._codes(chunk, workspace)
        if unit != 1:
            values.mul_(unit)
        scales = self._scales(chunk, workspace)
        return Values(multiply(values, scales, chunk.col, self.padded.step), saturated)

    def _scales(self, chunk: Chunk, workspace: Workspace) -> Tensor:
        """Of a chunk's blocks, (r, blocks) float32."""
        block = self.padded.step
        stored = self.scales.read(chunk.row, chunk.stop_row, workspace)
        return self.scale_of(stored[:, chunk.col // block : -(-chunk.stop_col // block)].contiguous(), chunk, workspace)

    def _codes(self, chunk: Chunk, workspace: Workspace) -> tuple[Tensor, float, Tensor | None]:
        """The codes' values, (r, c), a power of two to multiply them with, and how many are at the end."""
        code_bits = 8 if self.unpacked else CODE_BITS[self.element]
        first = (chunk.row * self.padded.stored_cols + chunk.col) * code_bits // 8
        shape = (chunk.shape[0], chunk.shape[1] * code_bits // 8)
        stored = workspace.read_bytes("codes", self.codes, first, shape)
        if self.element == "e2m1":
            return element_types.unpack(stored, self._pairs(workspace.device), workspace), 1.0, None
        if self.unpacked:
            return element_types.unpack(stored, _byte_table(self.element, workspace.device), workspace), 1.0, None
        if self.element in SIX_BITS:
            table = bit_stream.unit_table(SIX_BITS[self.element], workspace.device)
            return bit_stream.unpack(stored, table, workspace), 1.0, None
        cast = element_types.e4m3 if self.element == "e4m3" else element_types.e5m2
        codes: Codes = cast(stored.view(torch.int8), workspace)
        return codes.values, codes.unit, codes.saturated


@cache
def _byte_table(element: SmallFloat, device: torch.device) -> Tensor:
    """What the low six bits of each byte stand for, (256, 1) float32."""
    return torch.tensor(4 * SIX_BITS[element], device=device)[:, None]


def exponents(stored: Tensor, _chunk: Chunk, _workspace: Workspace) -> Tensor:
    """The scales that E8M0 bytes are."""
    return element_types.e8m0(stored)


def e4m3(stored: Tensor, _chunk: Chunk, _workspace: Workspace) -> Tensor:
    """The scales that E4M3 bytes are."""
    return element_types.e4m3_scales(stored)


def e5m3(stored: Tensor, _chunk: Chunk, _workspace: Workspace) -> Tensor:
    """The scales that E5M3 bytes are."""
    return element_types.e5m3(stored)


def times(global_scale: Entry, rows: int, of_blocks: ScaleOf = e4m3) -> ScaleOf:
    """Scales of blocks times a global one, or one for each expert of ``rows`` rows: rounded."""

    def scale_of(stored: Tensor, chunk: Chunk, workspace: Workspace) -> Tensor:
        return of_blocks(stored, chunk, workspace).mul_(of_rows(global_scale, rows, chunk, workspace))

    return scale_of


def divided_by(global_scale: Entry, rows: int) -> ScaleOf:
    """E4M3 scales divided by a global one, or by one for each expert of ``rows`` rows: rounded."""

    def scale_of(stored: Tensor, chunk: Chunk, workspace: Workspace) -> Tensor:
        return element_types.e4m3_scales(stored).div_(of_rows(global_scale, rows, chunk, workspace))

    return scale_of


def of_rows(global_scale: Entry, rows: int, chunk: Chunk, workspace: Workspace) -> Tensor:
    """The global scale of a chunk, (1,), or that of each row's expert, (r, 1); experts have ``rows`` rows."""
    scale = workspace.whole("global_scale", global_scale).view(-1).float()
    if len(scale) == 1:
        return scale
    return scale[torch.arange(chunk.row, chunk.stop_row, device=workspace.device) // rows, None]
