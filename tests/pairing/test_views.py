"""For each view through which the original is read, a quantized weight can be read through its inverse."""

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from support.making import numbers

from quanterr.checkpoints import open_checkpoint
from quanterr.errors import FormatMismatch
from quanterr.pairing import views
from quanterr.pairing.converters.numbers import Added, NegatedExponential, SoftPlus
from quanterr.pairing.converters.orders import Order, grid
from quanterr.pairing.side import CheckpointSide
from quanterr.tensors.chunks import Cut
from quanterr.tensors.workspace import Workspace

# Views that join quantized weights or hold one in memory, through which the original is not read.
OF_QUANTIZED = {"_dequantize_stack", "_dequantize_joined", "_dequantize_sum", "_dequantize_held"}
SHAPES = {
    "matrix": (48, 64),
    "stack": (3, 48, 64),
    "kernels": (64, 3, 5),
    "long kernels": (6, 4, 48),
    "short stack": (6, 48, 4),
    "vector": (64,),
}
# Name → the shape that it is tried on, and the view.
VIEWS = {
    "transposed matrix": ("matrix", views.transpose_weight),
    "transposed stack": ("stack", views.transpose_weight),
    "transposed kernels": ("kernels", views.transpose_weight),
    "kernels to a stack": ("short stack", views.transpose_weight),
    "a stack to kernels": ("long kernels", views.transpose_weight),
    "order of rows": ("matrix", lambda x: views.reorder(x, grid(2, 12))),
    "order of columns": ("matrix", lambda x: views.reorder(x, grid(4, 2, 8, columns=True))),
    "order of a vector": ("vector", lambda x: views.reorder(x, Order((2, 0, 3, 1), 16))),
    "first rows": ("matrix", lambda x: views.take_rows(x, 0, (40, 64))),
    "last rows": ("matrix", lambda x: views.take_rows(x, 2, (46, 64))),
    "rows between": ("matrix", lambda x: views.take_rows(x, 2, (40, 64))),
    "elements": ("vector", lambda x: views.take_rows(x, 5, (50,))),
    "another shape": ("kernels", lambda x: views.reshape_weight(x, (192, 5))),
    "plus one": ("vector", lambda x: views.map_elements(x, Added(1.0))),
    "-exp": ("vector", lambda x: views.map_elements(x, NegatedExponential())),
    "softplus": ("vector", lambda x: views.map_elements(x, SoftPlus())),
    "factors of rows": ("matrix", lambda x: views.scale_weight(x, torch.linspace(0.5, 2, 48), 0)),
    "factors of columns": ("matrix", lambda x: views.scale_weight(x, torch.linspace(0.5, 2, 64), 1)),
    "inputs of kernels last": ("kernels", lambda x: views.move_inputs(x, (64, 5, 3))),
    "outputs of kernels first": ("kernels", lambda x: views.move_outputs(x, (5, 64, 3))),
    "nested": (
        "stack",
        lambda x: views.map_elements(views.reorder(views.transpose_weight(x), grid(2, 16)), Added(1.0)),
    ),
}
# Numbers of up to 4 standard deviations, changed and changed back in float32 with a few roundings.
CHANGED = 2.0**-19


@pytest.fixture
def weight(tmp_path):
    """Return a function that makes a weight of a shape, stored as plain floats."""

    def make(name, shape, seed):
        save_file({"x": numbers(*shape, seed=seed).float()}, tmp_path / f"{name}.safetensors")
        side = CheckpointSide("original", open_checkpoint(tmp_path / f"{name}.safetensors"))
        side.attach_siblings()
        return side.recognize("x")

    return make


def read(weight):
    workspace = Workspace(torch.device("cpu"))
    whole = torch.empty(weight.matrix)
    for chunk in Cut(*weight.matrix, 500):  # several chunks, some of which are pieces of a row
        values = weight.dequantize(chunk, workspace).weight
        whole[chunk.row : chunk.stop_row, chunk.col : chunk.stop_col] = values
    return whole.view(weight.shape)


@pytest.mark.parametrize("is_plain", [True, False], ids=["stored floats", "computed values"])
@pytest.mark.parametrize("name", VIEWS)
def test_view_is_undone(weight, name, is_plain):
    shape, view = VIEWS[name]
    x, other = (replace(weight(side, SHAPES[shape], n), computed=not is_plain) for n, side in enumerate("xy"))
    y, wanted = view(other), read(other)
    back = views.undo_views(view(x), y)
    kept = read(x) if "rows" in name or name == "elements" else wanted  # rows that were cut off are those of x
    values = read(back)

    assert wanted.shape == back.shape
    assert bool((torch.minimum((values - wanted).abs(), (values - kept).abs()) <= CHANGED).all())


def test_cut_rows_are_put_between_the_original_ones(weight):
    x, y = (weight(name, (8, 4), n) for n, name in enumerate("xy"))
    values = read(views.undo_views(views.take_rows(x, 2, (5, 4)), views.take_rows(y, 2, (5, 4))))

    assert torch.equal(torch.cat([read(x)[:2], read(y)[2:7], read(x)[7:]]), values)


def test_zero_factors_cannot_be_undone(weight):
    x = weight("x", (4, 4), 0)

    with pytest.raises(FormatMismatch, match="factors of which some are zero"):
        views.undo_views(views.scale_weight(x, torch.tensor([1.0, 0, 1, 1]), 0), x)


def test_assembled_weight_cannot_be_undone(weight):
    x = weight("x", (4, 4), 0)

    with pytest.raises(FormatMismatch, match="the original's cannot be restored"):
        views.undo_views(views.stack_weights([x, x], (8, 4)), x)


def test_each_view_of_an_original_has_an_inverse():
    made = {name for name in vars(views) if name.startswith("_dequantize_")}

    assert made == OF_QUANTIZED | {function.__name__ for function in views._INVERSES}
