"""Small floats with a one-byte scale per block of columns: the common part of MXFP4, MXFP6, MXFP8 and NVFP4.

    codes    (rows, cols) of E2M1, two per byte, the first in the low bits; of E2M3 or E3M2, four in three bytes,
             the first in the lowest bits; or of E4M3 or E5M2; stored as bytes or words of any dtype
    scale    (rows, cols / block) bytes, in rows or in tiles (shared/swizzled_scales.py): E8M0 exponents, E4M3, E5M3

    weight[r, c] = code[r, c] * scale[r, c // block]                                  one rounding

A global scale first multiplies or divides the block's scale, and the result is rounded. Codes that are padded to a
multiple of 32 columns may be longer than the weight: shared/padding.py.

Reference: OCP Microscaling Formats (MX) 1.0, 5.2 and 5.3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal

from quanterr.checkpoints import Entry
from quanterr.formats.base import Decoder, Dequantize, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared import element_types, pre_quant_scale
from quanterr.formats.shared.padding import Padded, fit_unpadded, read_padded
from quanterr.formats.shared.swizzled_scales import BlockScales
from quanterr.kernel.decoder import StoredScales
from quanterr.kernel.grid import decode_e8m0
from quanterr.kernel.levels import E2M1, E2M3, E3M2, E4M3, E5M2, Levels
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace, find_dtype

SmallFloat = Literal["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"]
CODE_BITS: dict[SmallFloat, int] = {"e2m1": 4, "e2m3": 6, "e3m2": 6, "e4m3": 8, "e5m2": 8}
LEVELS: dict[SmallFloat, Levels] = {
    "e2m1": E2M1.scaled,
    "e2m3": E2M3,
    "e3m2": E3M2,
    "e4m3": E4M3.scaled,
    "e5m2": E5M2.scaled,
}
# The levels of codes that are no elements of their own for the kernel, and the dtypes of codes in whole bytes.
CODES: dict[SmallFloat, tuple[float, ...]] = {
    "e2m1": element_types.E2M1,
    "e2m3": element_types.E2M3,
    "e3m2": element_types.E3M2,
    "e5m2": element_types.E5M2,
}
DTYPES: dict[SmallFloat, str] = {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2"}
ELEMENTS: dict[str, SmallFloat] = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2", "U8": "e2m1", "I8": "e2m1", "F4": "e2m1"}

ScaleOf = Callable[[Tensor, Chunk, Workspace], Tensor]  # scale bytes of a chunk, (r, blocks), to float32


NVFP4_PARTS = {  # in files of ModelOpt and ComfyUI
    "codes": PartSpec(("{weight}",), frozenset({"U8", "F4"})),
    "scale": PartSpec(("{weight}_scale", "{weight}_weight_scale"), frozenset({"F8_E4M3", "U8"})),
    "global_scale": PartSpec(("{weight}_scale_2", "{weight}_weight_scale_2"), frozenset({"F32"})),
    "pre_quant_scale": pre_quant_scale.PART,
}


@dataclass(frozen=True, slots=True)
class Microscaled:
    """The codes and scales of a weight, and the meaning of the scales' bytes."""

    codes: Entry
    element: SmallFloat
    padded: Padded
    scales: BlockScales
    scale_of: ScaleOf
    unpacked: bool = False  # each 6-bit code has a byte of its own, whose high bits mean nothing
    high_first: bool = False  # the first of two codes in a byte is in the high bits
    tabled: bool = True  # a byte of the scales stands for the same number in all blocks

    @property
    def dequantize(self) -> Dequantize:
        """The function that decodes the weight: code · scale."""
        element, ends = element_types.ELEMENTS.get(DTYPES.get(self.element, ""), (None, ()))
        stored = None
        is_stack = self.scales.experts > 1 or len(self.padded.shape) > 2
        if self.tabled and not self.scales.tiled and not is_stack:  # experts may have global scales of their own
            stored = StoredScales(self.scales.entry, 1, self.scales.cols, table=self._make_scale_table)
        decoder = Decoder(
            self.codes,
            self.padded.stored_cols,
            element,
            (4 if self.unpacked else 1) * CODES.get(self.element, ()),
            self._read_scales,
            group=self.padded.step,
            ends=ends,
            stored=stored,
            high_first=self.high_first,
        )
        return read_padded(self.padded, decoder)

    def _make_scale_table(self, workspace: Workspace) -> Tensor:
        """Return the scale that each byte stands for, (256,) float32."""
        every = torch.arange(256, dtype=torch.uint8).view(find_dtype(self.scales.entry.dtype))
        return self.scale_of(every.view(1, -1), Chunk(0, 1, 0, 1), workspace).view(-1)

    def _read_scales(self, chunk: Chunk, workspace: Workspace) -> Tensor:
        """Return the scales of a chunk's blocks, (r, blocks) float32."""
        block = self.padded.step
        stored = self.scales.read(chunk.row, chunk.stop_row, workspace)
        return self.scale_of(stored[:, chunk.col // block : -(-chunk.stop_col // block)].contiguous(), chunk, workspace)


def make_e5m3_weight(parts: Parts, shape: tuple[int, ...], block: int, scale_of: ScaleOf) -> Weight:
    """Return the weight of E2M1 codes with an E5M3 scale for ``block`` columns, which ``scale_of`` may multiply."""
    codes, scale = parts.codes, parts["scale"]
    scales = BlockScales(scale, prod(shape[:-1]), scale.shape[-1], 1, tiled=False)
    return parts.weight(
        shape,
        Microscaled(codes, "e2m1", fit_unpadded(parts, shape, block), scales, scale_of).dequantize,
        code_bits=4,
        levels=LEVELS["e2m1"],
        block_size=(1, block),
        evidence=(f"codes {codes}, E5M3 scales {scale}",),
    )


def decode_exponents(stored: Tensor, _chunk: Chunk, _workspace: Workspace) -> Tensor:
    """Decode E8M0 scale bytes to float32."""
    return decode_e8m0(stored)


def decode_e4m3(stored: Tensor, _chunk: Chunk, _workspace: Workspace) -> Tensor:
    """Decode E4M3 scale bytes to float32."""
    return element_types.decode_e4m3_scales(stored)


def decode_e5m3(stored: Tensor, _chunk: Chunk, _workspace: Workspace) -> Tensor:
    """Decode E5M3 scale bytes to float32."""
    return element_types.decode_e5m3(stored)


def multiply_scales(global_scale: Entry, rows: int, of_blocks: ScaleOf = decode_e4m3) -> ScaleOf:
    """Return a :data:`ScaleOf` that multiplies scales by a global scale, or by one per expert of ``rows`` rows."""

    def scale_of(stored: Tensor, chunk: Chunk, workspace: Workspace) -> Tensor:
        return of_blocks(stored, chunk, workspace).mul_(read_global_scale(global_scale, rows, chunk, workspace))

    return scale_of


def divide_scales(global_scale: Entry, rows: int) -> ScaleOf:
    """Return a :data:`ScaleOf` that divides E4M3 scales by a global scale, or by one per expert of ``rows`` rows."""

    def scale_of(stored: Tensor, chunk: Chunk, workspace: Workspace) -> Tensor:
        return element_types.decode_e4m3_scales(stored).div_(read_global_scale(global_scale, rows, chunk, workspace))

    return scale_of


def check_global_scale(global_scale: Entry, experts: int) -> None:
    """Check that there is one global scale, or one for each expert.

    Raises:
        FormatMismatch: there is another number of scales.
    """
    if global_scale.n not in (1, experts):
        of_experts = f", or one for each of {experts} experts" if experts > 1 else ""
        raise FormatMismatch(f"its global scale {global_scale} should be one{of_experts}")


def read_global_scale(global_scale: Entry, rows: int, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return the global scale of a chunk, (1,), or the scale of each row's expert, (r, 1)."""
    scale = workspace.read_whole("global_scale", global_scale).view(-1).float()
    if len(scale) == 1:
        return scale
    return scale[torch.arange(chunk.row, chunk.stop_row, device=workspace.device) // rows, None]
