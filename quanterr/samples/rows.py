"""The choice of a sample's rows.

The shape and the size of blocks alone decide what is sampled, so the result is reproducible to the last digit.
"""

from collections.abc import Iterable, Sequence

from quanterr.tensors.chunks import Chunk, as_matrix

SMALL = 1 << 14  # a weight with up to this many elements is sampled completely
RUNS, RUN = 6, 8  # number of runs of rows, spread over the weight, and rows per run
WIDEST = 1 << 15  # most columns of a sampled row
SMALL_BLOCKS = 1 << 18  # in a weight with up to this many elements, every row of blocks is sampled
IN_BLOCKS = 1 << 16  # elements that are sampled in a row of blocks


def sample_chunks(shape: tuple[int, ...]) -> list[Chunk]:
    """Return the chunks of a sample: all of a small weight, else runs of rows spread over the weight."""
    rows, cols = as_matrix(shape)
    if not rows * cols:
        return []
    few = rows * cols <= SMALL or rows <= RUNS * RUN
    starts = [0] if few else [number * (rows - RUN) // (RUNS - 1) for number in range(RUNS)]
    height = rows if few else RUN
    if cols <= WIDEST:
        return [Chunk(start, start + height, 0, cols) for start in starts]
    pieces = -(-cols // WIDEST)  # each wide row contributes the next stretch of columns
    numbers = [start + row for start in starts for row in range(height)]
    return [
        Chunk(number, number + 1, n % pieces * WIDEST, min((n % pieces + 1) * WIDEST, cols))
        for n, number in enumerate(numbers)
    ]


def sample_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> list[Chunk]:
    """Return chunks of :data:`IN_BLOCKS` elements at the start of rows of blocks, which span several rows of elements.

    A small weight is sampled in every row of blocks, others in the middle one.
    """
    rows, cols = as_matrix(shape)
    down = rows // block[0]
    if not down or cols > WIDEST:
        return []
    numbers = range(down) if rows * cols <= SMALL_BLOCKS else [down // 2]
    width = max(IN_BLOCKS // block[0], block[1])
    return [Chunk(number * block[0], (number + 1) * block[0], 0, min(width, cols)) for number in numbers]


def count_rows(chunks: Iterable[Chunk]) -> int:
    """Return the number of rows of all chunks."""
    return sum(chunk.stop_row - chunk.row for chunk in chunks)


def list_rows(chunks: Sequence[Chunk]) -> list[int]:
    """Return the row numbers of chunks in order."""
    return [row for chunk in chunks for row in range(chunk.row, chunk.stop_row)]
