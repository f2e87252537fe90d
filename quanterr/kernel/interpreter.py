"""The values of a :class:`Decoder`, which this module specifies.

    value = ((level of the code - zero) · scale + shift) · factor        each operation rounds to float32

and the columns are rotated last. The compiled kernel carries out the same data.
"""

from collections.abc import Callable
from math import gcd, lcm
from typing import Any, NamedTuple

from msgspec import Struct

from quanterr.kernel.decoder import Decoder, ElementType, Order
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

# torch's dtypes, by name, of elements that are numbers.
DTYPES = {
    ElementType.F32: "float32",
    ElementType.BF16: "bfloat16",
    ElementType.F16: "float16",
    ElementType.I8: "int8",
    ElementType.E4M3: "float8_e4m3fn",
}
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of each of eight rows


class Values(NamedTuple):
    """A dequantized chunk."""

    weight: Tensor  # (r, c) float32, or float64 where float32 would lose precision
    saturated: Tensor | None = None  # 0-d: number of codes at either end of their range


class Native(Struct, frozen=True, gc=False):
    """A ``dequantize`` function that is data. Wrapping it drops the data, which would no longer fit.

    ``specify`` returns the values of decoders with blocks or a rotation, which :func:`interpret` does not know.
    """

    decoder: Decoder
    specify: Callable[[Chunk, Workspace], Any] | None = None

    def __call__(self, chunk: Chunk, workspace: Workspace) -> Any:
        """Return the values of a chunk."""
        return self.specify(chunk, workspace) if self.specify else interpret(self.decoder, chunk, workspace)


def decoder_of(dequantize: Callable[[Chunk, Workspace], Any]) -> Decoder | None:
    """Return the decoder of a dequantize function; None if the compiled kernel cannot read its codes."""
    decoder = dequantize.decoder if isinstance(dequantize, Native) else None
    return decoder if decoder is not None and decoder.native is not None else None


def interpret(decoder: Decoder, chunk: Chunk, workspace: Workspace) -> Values:
    """Return the values of a chunk, (r, c) float32, and the number of its saturated codes, if the decoder has ends."""
    outer = _widen(decoder, chunk)
    inside = slice(chunk.col - outer.col, chunk.stop_col - outer.col)
    saturated = None
    if decoder.read is not None:
        values = decoder.read(outer, workspace)
        if decoder.levels:
            values = _tell_levels(decoder, values)
    else:
        stored = read_codes(decoder, outer, workspace)
        values = look_up(decoder, stored)
        if decoder.ends:
            saturated = count_ends(stored[:, inside], decoder.ends)
    if decoder.columns is not None:
        values = values[:, : decoder.columns.n]
    for operation, of_blocks in (
        (torch.Tensor.sub, decoder.zero),
        (torch.Tensor.mul, decoder.scale),
        (torch.Tensor.add, decoder.shift),
    ):
        if of_blocks is not None:
            numbers = of_blocks(outer, workspace).to(values.dtype)
            values = operation(values, spread(decoder, numbers, outer, workspace))
    values = values[:, inside]
    if decoder.factor is not None:
        values = values * (decoder.factor if isinstance(decoder.factor, float) else decoder.factor(chunk, workspace))
    return Values(values.contiguous(), saturated)


def _widen(decoder: Decoder, chunk: Chunk) -> Chunk:
    """Return a chunk of whole units of storage and groups, or of whole rows if columns are not stored in order."""
    if decoder.order != Order.ROWS or decoder.columns is not None:
        return chunk._replace(col=0, stop_col=decoder.cols)
    unit = lcm(decoder.storage_unit[0], decoder.group or 1)
    stop = min(-(-chunk.stop_col // unit) * unit, decoder.cols)
    return chunk._replace(col=chunk.col // unit * unit, stop_col=stop)


def read_codes(decoder: Decoder, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read the codes of a chunk of whole units of storage as they are stored, uint8 (r, bytes)."""
    match decoder.order:
        case Order.ROWS:
            together, n_bytes = decoder.storage_unit
            first, stop = (-(-col * n_bytes // together) for col in (chunk.col, chunk.stop_col))
            width = -(-decoder.cols * n_bytes // together)
            begin = chunk.row * width
            if chunk.shape[0] == 1:
                return workspace.read_bytes("codes", decoder.codes, begin + first, (1, stop - first))
            return workspace.read_bytes("codes", decoder.codes, begin, (chunk.shape[0], width))[:, first:stop]
        case Order.WORDS_DOWN:
            words = workspace.read_whole("columns", decoder.codes)[:, chunk.row : chunk.stop_row]
            return words.t().contiguous().view(torch.uint8)
        case Order.AWQ_WORDS:
            return _read_awq_words(decoder, chunk, workspace)
        case Order.SHARED_BYTES:
            return _read_shared_bytes(decoder, chunk, workspace)


def _read_awq_words(decoder: Decoder, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read codes of 4 bits of words, (cols, rows / 8), one in each byte: uint8 (r, cols)."""
    rows = torch.arange(chunk.row, chunk.stop_row, device=workspace.device)
    place = 4 * torch.tensor(AWQ_ORDER, device=workspace.device, dtype=torch.int32)[rows % 8]
    words = workspace.read_whole("columns", decoder.codes)[:, rows // 8]
    return (words >> place & 15).to(torch.uint8).t()


def _read_shared_bytes(decoder: Decoder, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read codes of which a byte holds those of several rows, one in each byte: uint8 (r, cols)."""
    shared = decoder.shared
    if shared is None:
        raise AssertionError(f"{decoder.codes}: nothing says which rows share bytes")
    rows = torch.arange(chunk.row, chunk.stop_row, device=workspace.device)
    run, within = rows // shared.step, rows % shared.step
    at = run // len(shared.shifts) * shared.step + within
    first, stop = int(at[0]), int(at.amax()) + 1
    first = min(first, int(at.amin()))
    shape = stop - first, decoder.cols
    stored = workspace.read_bytes("codes", decoder.codes, first * decoder.cols, shape)
    shifts = torch.tensor(shared.shifts, dtype=torch.uint8, device=workspace.device)[run % len(shared.shifts)]
    return stored[at - first] >> shifts[:, None] & (1 << shared.bits) - 1


def look_up(decoder: Decoder, stored: Tensor) -> Tensor:
    """Return the levels of stored codes, float32 (r, c)."""
    if decoder.levels and 8 % decoder.bits:
        return _tell_levels(decoder, unpack_bits(stored, decoder.bits))
    if (table := decoder.make_table()) is not None:
        return table.to(stored.device).index_select(0, stored.reshape(-1).int()).view(len(stored), -1)
    if decoder.element is None:
        raise AssertionError(f"{decoder.codes}: nothing says what its codes stand for")
    return stored.contiguous().view(getattr(torch, DTYPES[decoder.element])).float()


def _tell_levels(decoder: Decoder, codes: Tensor) -> Tensor:
    """Return the levels of codes, whole numbers of any dtype, as float32."""
    levels = torch.tensor(decoder.levels, dtype=torch.float32, device=codes.device)
    return levels.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def unpack_bits(stored: Tensor, bits: int) -> Tensor:
    """Return the codes of a stream of bits, low bits first: (r, bytes) uint8 to (r, whole codes) int32."""
    period, each = bits // gcd(bits, 8), 8 // gcd(bits, 8)  # bytes after which codes are placed alike, and their codes
    wide = torch.nn.functional.pad(stored, (0, 1)).short()
    pairs = wide[:, :-1] | wide[:, 1:] << 8
    codes = stored.new_empty((len(stored), 8 * stored.shape[1] // bits), dtype=torch.int32)
    for k in range(each):
        of_place = codes[:, k::each]
        found = pairs[:, k * bits // 8 :: period][:, : of_place.shape[1]]
        of_place.copy_(found >> k * bits % 8 & (1 << bits) - 1)
    return codes


def spread(decoder: Decoder, numbers: Tensor, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return a number for each column of a chunk, (1 or r, 1 or c), from one for each block of columns or element."""
    if decoder.columns is not None:
        return numbers[:, workspace.read_whole("order", decoder.columns)]
    if numbers.shape[1] == 1 or not decoder.group:
        return numbers
    columns = torch.arange(chunk.col, chunk.stop_col, device=numbers.device) // decoder.group
    of_column = columns - chunk.col // decoder.group
    return numbers[:, of_column.clamp_(max=numbers.shape[1] - 1)]  # stored columns may be padding


def count_ends(stored: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Count the bytes, uint8, that are ``ends``: those of saturated codes; 0-d."""
    return torch.isin(stored, torch.tensor(ends, dtype=torch.uint8, device=stored.device)).sum()
