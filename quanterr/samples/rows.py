"""The choice of the rows of a sample.

It depends only on the shape and on the size of blocks, so results are reproducible to the last digit.
"""

from collections.abc import Iterable, Sequence

from quanterr.tensors.chunks import Chunk, as_matrix

MAX_COMPLETE_ELEMENTS = 1 << 14  # weights up to this size are sampled completely
RUNS, RUN = 6, 8  # number of runs of rows, which are spread over the weight, and number of rows of a run
MAX_ROW_COLUMNS = 1 << 15  # maximum number of columns of a sampled row
MAX_COMPLETE_BLOCK_ELEMENTS = 1 << 18  # in weights up to this size, every row of blocks is sampled
BLOCK_ROW_ELEMENTS = 1 << 16  # number of elements that are sampled in a row of blocks


def sample_chunks(shape: tuple[int, ...]) -> list[Chunk]:
    """Return the chunks of a sample: all of a small weight, otherwise runs of rows, spread over the weight."""
    rows, cols = as_matrix(shape)
    if not rows * cols:
        return []
    few = rows * cols <= MAX_COMPLETE_ELEMENTS or rows <= RUNS * RUN
    starts = [0] if few else [number * (rows - RUN) // (RUNS - 1) for number in range(RUNS)]
    height = rows if few else RUN
    if cols <= MAX_ROW_COLUMNS:
        return [Chunk(start, start + height, 0, cols) for start in starts]
    pieces = -(-cols // MAX_ROW_COLUMNS)  # each wide row is sampled in the next range of columns
    numbers = [start + row for start in starts for row in range(height)]
    return [
        Chunk(number, number + 1, n % pieces * MAX_ROW_COLUMNS, min((n % pieces + 1) * MAX_ROW_COLUMNS, cols))
        for n, number in enumerate(numbers)
    ]


def sample_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> list[Chunk]:
    """Return chunks of :data:`BLOCK_ROW_ELEMENTS` elements at the start of rows of blocks, which span several rows.

    A small weight is sampled in every row of blocks, others in the middle one.
    """
    rows, cols = as_matrix(shape)
    down = rows // block[0]
    if not down or cols > MAX_ROW_COLUMNS:
        return []
    numbers = range(down) if rows * cols <= MAX_COMPLETE_BLOCK_ELEMENTS else [down // 2]
    width = max(BLOCK_ROW_ELEMENTS // block[0], block[1])
    return [Chunk(number * block[0], (number + 1) * block[0], 0, min(width, cols)) for number in numbers]


def count_rows(chunks: Iterable[Chunk]) -> int:
    """Return the number of rows of all chunks."""
    return sum(chunk.stop_row - chunk.row for chunk in chunks)


def list_rows(chunks: Sequence[Chunk]) -> list[int]:
    """Return the row numbers of chunks in order."""
    return [row for chunk in chunks for row in range(chunk.row, chunk.stop_row)]
