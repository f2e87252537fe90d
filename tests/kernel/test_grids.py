"""Numbers of blocks: their places in a matrix, in tiles and in packed containers, against indices written out."""

import pytest
import torch
from support.making import numbers, store

from quanterr.checkpoints import open_checkpoint
from quanterr.kernel.grid import Grid
from quanterr.kernel.packing import CodePacking
from quanterr.kernel.tiles import Tiles
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

DOWN, ACROSS = 3, 5  # tiles of 4 × 2


def read(folder, tensor, make, chunk):
    """Return the numbers of a chunk of a grid, which ``make`` makes of a stored tensor."""
    with open_checkpoint(store(folder / "x.safetensors", {"x": tensor})) as checkpoint:
        return make(checkpoint.entries["x"])(chunk, Workspace()).clone()


def in_tiles(matrix, rows_first):
    """Store row 4 R + b and column 2 C + a of a matrix at [R, C, a, b], or at [C, R, a, b]."""
    stored = torch.empty(DOWN, ACROSS, 2, 4, dtype=matrix.dtype)
    for row in range(4 * DOWN):
        for col in range(2 * ACROSS):
            stored[row // 4, col // 2, col % 2, row % 4] = matrix[row, col]
    return stored if rows_first else stored.transpose(0, 1).contiguous()


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("rows", [(0, 12), (1, 2), (3, 5), (5, 11)])
class TestTiles:
    def test_numbers_in_tiles_are_found(self, tmp_path, rows_first, rows):
        matrix = numbers(4 * DOWN, 2 * ACROSS)
        tiles = Tiles("R C a2 b4" if rows_first else "C R a2 b4", "Rb", "Ca")
        stored = in_tiles(matrix, rows_first)
        read_numbers = read(tmp_path, stored, lambda entry: Grid(entry, 9, 1, tiles=tiles), Chunk(*rows, 2, 9))

        assert torch.equal(matrix[rows[0] : rows[1], 2:9].float(), read_numbers)

    @pytest.mark.parametrize("high_first", [True, False])
    def test_codes_in_tiles_are_found(self, tmp_path, rows_first, rows, high_first):
        matrix = torch.randint(0, 16, (4 * DOWN, 2 * ACROSS), dtype=torch.uint8)
        pairs = in_tiles(matrix, rows_first).view(-1, 2)
        stored = (pairs[:, 0] << (4 if high_first else 0)) | (pairs[:, 1] << (0 if high_first else 4))
        tiles = Tiles("R C a2 b4" if rows_first else "C R a2 b4", "Rb", "Ca", 4, high_first)
        levels = tuple(float(code * code) for code in range(16))
        read_numbers = read(
            tmp_path, stored, lambda entry: Grid(entry, 10, 1, tiles=tiles, levels=levels), Chunk(*rows, 0, 10)
        )

        assert torch.equal(matrix[rows[0] : rows[1]].float().square(), read_numbers)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_code_less_one_of_zero_borrows_from_the_next(tmp_path, bits):
    codes = torch.randint(0, 1 << bits, (3, 64 // bits))
    codes[:, ::3] = 0
    places = torch.arange(0, 32, bits)
    words = ((codes.view(3, 2, -1) << places).sum(2) - (1 << places).sum()) & 0xFFFFFFFF
    stored = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    packing = CodePacking("dense", bits, less_one=True)
    read_numbers = read(
        tmp_path, stored, lambda entry: Grid(entry, 64 // bits, 1, packing=packing), Chunk(0, 3, 0, 64 // bits)
    )

    assert torch.equal(codes, read_numbers.long())


def test_numbers_of_wider_blocks_change_those_of_blocks(tmp_path):
    scales, factors = numbers(4, 6), torch.tensor([[2.0, 4.0]] * 4)
    with open_checkpoint(store(tmp_path / "x.safetensors", {"scales": scales, "factors": factors})) as checkpoint:
        factor = Grid(checkpoint.entries["factors"], 2, 24, key="factor")
        grid = Grid(checkpoint.entries["scales"], 6, 8, steps=(("mul", factor), ("neg", None), ("add", 1.0)))
        block_numbers = grid(Chunk(1, 3, 16, 48), Workspace())

    assert torch.equal(1 - (scales.float() * factors.repeat_interleave(3, 1))[1:3, 2:], block_numbers)
