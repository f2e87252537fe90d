"""The reader: values and scales of single weights, in tensors that no later read changes."""

import pytest
import torch
from support.stored import original, pair

from quanterr.checkpoints import open_checkpoint
from quanterr.formats.reading import open_reader
from quanterr.pairing.side import CheckpointSide
from quanterr.tensors.chunks import Chunk

NAME = "model.layers.0.mlp.up_proj.weight"
SHAPE = 32, 16
WHOLE_WEIGHT = Chunk(0, SHAPE[0], 0, SHAPE[1])


@pytest.fixture(name="weights")
def fixture_weights(tmp_path):
    """Open a BF16 weight and its FP8 version with one scale."""
    paths = pair(tmp_path)
    with open_checkpoint(paths[0]) as floats, open_checkpoint(paths[1]) as codes:
        sides = [CheckpointSide("checkpoint", weight) for weight in (floats, codes)]
        for side in sides:
            side.attach_siblings()
        yield tuple(side.recognize(NAME) for side in sides)


def test_later_read_does_not_change_what_was_read(weights):
    with open_reader() as reader:
        x, y = reader.read_both(weights, WHOLE_WEIGHT)
        before = x.clone(), y.clone()
        reader.read_both(weights[::-1], WHOLE_WEIGHT)

        assert torch.equal(x, original()[NAME].float())
        assert [True, True] == list(map(torch.equal, before, (x, y)))


def test_first_rows_are_complete_or_a_piece_of_one_row(weights):
    x = original()[NAME].double()
    with open_reader() as reader:
        assert torch.equal(x[:3], reader.read_first_rows(weights[0], 3 * 16 + 5))
        assert torch.equal(x[:1, :7], reader.read_first_rows(weights[0], 7))
        assert torch.equal(x, reader.read_first_rows(weights[0]))


def test_stored_scales_return_after_others_were_tried(weights):
    codes = weights[1]
    with open_reader() as reader:
        reader.read_filled(codes, WHOLE_WEIGHT, codes.scale, 0x3F)
        scaling = reader.read_scaling(codes, WHOLE_WEIGHT)

        assert scaling.shift is None
        assert torch.equal(scaling.unit, torch.full(SHAPE, reader.read_number(codes.scale)))


def test_values_follow_a_part_that_is_replaced(weights):
    codes = weights[1]
    with open_reader() as reader:
        stored, filled = reader.read(codes, WHOLE_WEIGHT), reader.read_filled(codes, WHOLE_WEIGHT, codes.scale, 0x3F)
        factor = torch.full((4,), 0x3F, dtype=torch.uint8).view(torch.float32) / reader.read_number(codes.scale)

        # The factor, its product, and the values of both sides are rounded to float32: four times 2^-24.
        torch.testing.assert_close(filled, stored * factor, rtol=2**-22, atol=0)


def test_error_equals_the_difference_of_the_values(weights):
    with open_reader() as reader:
        x, y = (side.double() for side in reader.read_both(weights, WHOLE_WEIGHT))
        expected = float(x.square().sum()), float((y - x).square().sum())

        # A difference is rounded to float32 once: its square is off by at most 2^-23 of it.
        assert expected == pytest.approx(reader.measure_error(weights, WHOLE_WEIGHT), rel=2**-22)
