"""The specification of the values of a :class:`Decoder`.

    value = ((level of the code - zero) · scale + shift) · factor        each operation rounds to float32

then a low-rank product is added, and the columns are rotated last. The compiled kernel follows the same data.
"""

from collections.abc import Callable, Iterator
from math import lcm
from typing import Any, NamedTuple

from msgspec import Struct

from quanterr.kernel.decoder import Decoder, ElementType, Order
from quanterr.kernel.packing import CodePacking
from quanterr.kernel.rotation import rotate
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

# Element type → name of torch's dtype, for elements that are numbers.
DTYPES = {
    ElementType.F32: "float32",
    ElementType.BF16: "bfloat16",
    ElementType.F16: "float16",
    ElementType.I8: "int8",
    ElementType.E4M3: "float8_e4m3fn",
}
AWQ_WORDS = CodePacking("interleaved", 4)


class Values(NamedTuple):
    """A dequantized chunk."""

    weight: Tensor  # (r, c) float32, or float64 where float32 would lose precision
    saturated: Tensor | None = None  # 0-d: number of codes at either end of their range


class Native(Struct, frozen=True, gc=False):
    """A ``dequantize`` function that also has its decoder as data; a function that wraps it has none."""

    decoder: Decoder

    def __call__(self, chunk: Chunk, workspace: Workspace) -> Values:
        """Return the values of a chunk."""
        return interpret(self.decoder, chunk, workspace)


class Nested(Struct, frozen=True, gc=False):
    """The values of a decoder, (r, c) float32, as codes of another; with ``within``, rounded and clamped to a range."""

    decoder: Decoder
    within: tuple[int, int] | None = None

    def __call__(self, chunk: Chunk, workspace: Workspace) -> Tensor:
        """Return the values of a chunk."""
        values = interpret(self.decoder, chunk, workspace).weight
        return values if self.within is None else values.round().clamp(*self.within)


def decoder_of(dequantize: Callable[[Chunk, Workspace], Any]) -> Decoder | None:
    """Return the decoder of a dequantize function; None if the compiled kernel cannot read its codes."""
    decoder = dequantize.decoder if isinstance(dequantize, Native) else None
    return decoder if decoder is not None and decoder.native is not None else None


def interpret(decoder: Decoder, chunk: Chunk, workspace: Workspace) -> Values:
    """Return the values of a chunk, (r, c) float32, and the number of its saturated codes, if the decoder has ends."""
    if decoder.rows == decoder.stored_rows:
        return _interpret_rows(decoder, chunk, workspace)
    parts = [_interpret_rows(decoder, rows, workspace) for rows in _skip_padding(decoder, chunk)]
    counts = [part.saturated for part in parts if part.saturated is not None]
    return Values(torch.cat([part.weight for part in parts]), torch.stack(counts).sum() if counts else None)


def _skip_padding(decoder: Decoder, chunk: Chunk) -> Iterator[Chunk]:
    """Yield the rows of a chunk that are stored together, with row numbers that count padding."""
    for matrix in range(chunk.row // decoder.rows, (chunk.stop_row - 1) // decoder.rows + 1):
        first, stop = max(chunk.row, matrix * decoder.rows), min(chunk.stop_row, (matrix + 1) * decoder.rows)
        padding = matrix * (decoder.stored_rows - decoder.rows)
        yield chunk._replace(row=first + padding, stop_row=stop + padding)


def _interpret_rows(decoder: Decoder, chunk: Chunk, workspace: Workspace) -> Values:
    outer = widen(decoder, chunk)
    inside = slice(chunk.col - outer.col, chunk.stop_col - outer.col)
    if decoder.read is not None:
        stored = decoder.read(outer, workspace)
        values = _look_up_levels(decoder, stored) if decoder.levels else stored
        values = values.float() if values.dtype == torch.uint8 else values
    else:
        stored = read_codes(decoder, outer, workspace)
        values = look_up(decoder, stored)
    saturated = count_ends(stored[:, inside], decoder.ends) if decoder.ends else None
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
    if not decoder.rotation:
        values, outer = values[:, inside], chunk
    if decoder.factor is not None:
        values = values * (decoder.factor if isinstance(decoder.factor, float) else decoder.factor(outer, workspace))
    if decoder.low_rank is not None:
        values = decoder.low_rank.add_to(values, outer, workspace)
    if decoder.rotation:
        values = rotate(values.contiguous(), decoder.rotation)[:, inside]
    return Values(values.contiguous(), saturated)


def widen(decoder: Decoder, chunk: Chunk) -> Chunk:
    """Return a chunk of whole units of storage and groups, or of whole rows if columns are not stored in order."""
    if decoder.order != Order.ROWS or decoder.columns is not None:
        return chunk._replace(col=0, stop_col=decoder.cols)
    unit = lcm(decoder.storage_unit[0], decoder.group or 1, decoder.rotation or 1)
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
            words = workspace.read_whole("columns", decoder.codes)
            return AWQ_WORDS.unpack(words, chunk.row, chunk.stop_row).t()
        case Order.SHARED_BYTES:
            return _read_shared_bytes(decoder, chunk, workspace)


def _read_shared_bytes(decoder: Decoder, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read codes of which several rows share bytes; return each code in a byte of its own, uint8 (r, cols)."""
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
        return _look_up_levels(
            decoder, CodePacking("dense", decoder.bits).unpack(stored, 0, 8 * stored.shape[1] // decoder.bits)
        )
    if (table := decoder.make_table()) is not None:
        return table.to(stored.device).index_select(0, stored.reshape(-1).int()).view(len(stored), -1)
    if decoder.element is None:
        raise AssertionError(f"{decoder.codes}: nothing says what its codes stand for")
    return stored.contiguous().view(getattr(torch, DTYPES[decoder.element])).float()


def _look_up_levels(decoder: Decoder, codes: Tensor) -> Tensor:
    """Return the levels of codes, whole numbers of any dtype, as float32."""
    levels = torch.tensor(decoder.levels, dtype=torch.float32, device=codes.device)
    return levels.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def spread(decoder: Decoder, numbers: Tensor, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return a number for each column of a chunk, (1 or r, 1 or c), given the numbers of blocks or of elements."""
    if decoder.columns is not None:
        return numbers.index_select(1, workspace.read_whole("order", decoder.columns))
    if numbers.shape[1] == 1 or not decoder.group:
        return numbers
    of_columns = numbers.unsqueeze(2).expand(-1, -1, decoder.group).flatten(1)
    missing = chunk.shape[1] - of_columns.shape[1]  # the last columns may be padding
    return torch.nn.functional.pad(of_columns, (0, missing))


def count_ends(stored: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Count the bytes of saturated codes, which ``ends`` lists; 0-d."""
    return torch.isin(stored.to(torch.uint8), torch.tensor(ends, dtype=torch.uint8, device=stored.device)).sum()
