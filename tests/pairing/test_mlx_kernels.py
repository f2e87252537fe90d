"""Kernels of convolutions in MLX's order of axes, [out, …, in], against torch's [out, in, …] and [in, out, …]."""

import pytest
import torch
from support.making import chunk_of, in_memory, numbers, read_whole, store

import quanterr
from quanterr.documents.gate_results import exit_status
from quanterr.errors import Status
from quanterr.pairing.views import move_inputs, move_outputs
from quanterr.tensors.chunks import Chunk, as_matrix
from quanterr.tensors.workspace import Workspace

MLX = {"format": "mlx"}
LINEAR = {"proj.weight": numbers(8, 32, seed=9)}
# Name, shape in torch, and axes of torch in the order in which mlx-vlm and mlx-audio store them.
KERNELS = {
    "1-D": ("encoder.conv1.weight", (24, 16, 3), (0, 2, 1)),
    "1-D, long rows": ("encoder.conv1.weight", (24, 40, 3), (0, 2, 1)),
    "1-D, long kernel": ("encoder.pos_conv.weight", (24, 3, 40), (0, 2, 1)),
    "1-D, one position": ("encoder.conv1.weight", (24, 40, 1), (0, 2, 1)),
    "depthwise": ("layers.0.linear_attn.conv1d.weight", (24, 1, 4), (0, 2, 1)),
    "2-D": ("vision_tower.embeddings.patch_embedding.weight", (24, 3, 14, 14), (0, 2, 3, 1)),
    "3-D": ("visual.patch_embed.proj.weight", (24, 3, 2, 14, 14), (0, 2, 3, 4, 1)),
    "transposed 1-D": ("decoder.conv_t1.weight", (24, 16, 5), (1, 2, 0)),
    "transposed 1-D, long kernel": ("decoder.conv_t1.weight", (24, 16, 40), (1, 2, 0)),
    "transposed 2-D": ("decoder.upscale.weight", (24, 16, 5, 4), (1, 2, 3, 0)),
    "depthwise transposed": ("pool.weight", (24, 1, 4), (1, 2, 0)),
    "normalized": ("encoder.conv1.weight_v", (24, 16, 3), (0, 2, 1)),
    "gains of transposed": ("decoder.conv_t1.weight_g", (24, 1, 1), (1, 2, 0)),
    "slopes": ("encoder.snake.alpha", (1, 24, 1), (0, 2, 1)),
}


def permute(x, axes):
    return x.permute(axes).contiguous()


def store_in_mlx(tensors, changes):
    return {name: permute(x, changes[name]) if name in changes else x for name, x in tensors.items()}


def report_of(folder, original, quantized, mlx_side=1):
    """Return the report of two checkpoints, of which one is MLX's."""
    sides = (original, quantized)
    paths = [
        store(folder / f"{side}.safetensors", tensors, MLX if side == mlx_side else None)
        for side, tensors in enumerate(sides)
    ]
    return quanterr.compare(*paths, device="cpu")


def names_of_identical(report):
    """Return the names of tensors without any difference, if nothing else is reported."""
    assert [] == report.not_compared
    assert not [finding for finding in report.findings if finding.severity != "info" and finding.code != "identical"]
    return {layer.layer_name for layer in report.lossless}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("backwards", [False, True])
def test_kernel_in_mlx_order_equals_the_original(tmp_path, kernel, backwards):
    name, shape, axes = KERNELS[kernel]
    torchs = LINEAR | {name: numbers(*shape)}
    sides = torchs, store_in_mlx(torchs, {name: axes})
    report = report_of(tmp_path, *(sides[::-1] if backwards else sides), mlx_side=0 if backwards else 1)

    assert torchs.keys() == names_of_identical(report)


@pytest.mark.parametrize("parametrized", [False, True])
def test_normalized_kernels_match_under_both_names_of_torch(tmp_path, parametrized):
    old = {"conv.weight_g": numbers(24, 1, 1), "conv.weight_v": numbers(24, 16, 3, seed=1)}
    new = {f"conv.parametrizations.weight.original{n}": x for n, x in enumerate(old.values())}
    mlxs = store_in_mlx(old, {"conv.weight_v": (0, 2, 1)})
    original = LINEAR | (new if parametrized else old)

    assert original.keys() == names_of_identical(report_of(tmp_path, original, LINEAR | mlxs))


def test_patch_embedding_as_a_linear_layer_is_compared(tmp_path):
    name, x = "vision_tower.embeddings.patch_embedding.weight", numbers(24, 3, 14, 14)
    for number, flat in enumerate((permute(x, (0, 2, 3, 1)).flatten(1), x.flatten(1))):
        (tmp_path / str(number)).mkdir()
        report = report_of(tmp_path / str(number), LINEAR | {name: x}, LINEAR | {name: flat.contiguous()})

        assert {name, "proj.weight"} == names_of_identical(report)


PATCHES = {"patches.weight": numbers(24, 3, 14, 14, seed=4)}
CUBES = {"stem.weight": numbers(24, 3, 3, 3, seed=5)}
MOVED_PATCHES = {"patches.weight": (0, 2, 3, 1)}


class TestShapesThatDoNotShowTheOrder:
    """Shapes do not show the order: there are as many inputs as positions along each axis, or as outputs."""

    def test_kernel_in_mlx_order_equals_the_original(self, tmp_path):
        x = LINEAR | PATCHES | CUBES
        y = store_in_mlx(x, MOVED_PATCHES | {"stem.weight": (0, 2, 3, 1)})

        assert x.keys() == names_of_identical(report_of(tmp_path, x, y))

    @pytest.mark.parametrize("others", [{}, PATCHES], ids=["alone", "among others"])
    def test_kernel_in_torch_order_is_an_error(self, tmp_path, others):
        x = LINEAR | others | CUBES
        report = report_of(tmp_path, x, store_in_mlx(x, MOVED_PATCHES))
        (finding,) = (finding for finding in report.findings if finding.severity == "error")

        assert "stem.weight" == finding.layer
        assert "as MLX expects" in finding.message
        assert "torch's order" in finding.message
        assert Status.INCONCLUSIVE == exit_status(report)

    def test_kernels_that_all_have_torch_order_are_read_in_that_order(self, tmp_path):
        """Some models of mlx-audio transpose kernels when they compute, so files hold torch's order."""
        x = LINEAR | PATCHES | CUBES

        assert x.keys() == names_of_identical(report_of(tmp_path, x, x))

    @pytest.mark.parametrize("axes", [(0, 2, 1), (1, 2, 0)])
    def test_values_tell_transposed_convolutions_from_others(self, tmp_path, axes):
        x = LINEAR | {"ups.0.weight": numbers(24, 24, 5)}

        assert x.keys() == names_of_identical(report_of(tmp_path, x, store_in_mlx(x, {"ups.0.weight": axes})))

    def test_stacks_of_square_experts_keep_their_order(self, tmp_path):
        x = LINEAR | {"layers.0.mlp.experts.down_proj": numbers(4, 32, 32)}

        assert x.keys() == names_of_identical(report_of(tmp_path, x, x))


def test_other_programs_must_have_torch_order(tmp_path):
    name, shape, axes = KERNELS["2-D"]
    x = LINEAR | {name: numbers(*shape)}
    report = report_of(tmp_path, x, store_in_mlx(x, {name: axes}), mlx_side=None)

    assert {(name, "shape_mismatch")} == {(left.layer_name, left.bucket) for left in report.not_compared}


@pytest.mark.parametrize("move", [move_inputs, move_outputs])
@pytest.mark.parametrize("positions", [(3,), (40,), (2, 3)])
def test_kernels_are_read_alike_in_any_pieces(move, positions):
    x = torch.randn(6, 5, *positions)
    axes = (0, *range(2, x.dim()), 1) if move is move_inputs else (1, *range(2, x.dim()), 0)
    moved, expected = move(in_memory(permute(x, axes)), tuple(x.shape)), x.reshape(as_matrix(x.shape))
    rows, cols = moved.matrix

    assert torch.equal(expected, read_whole(moved))
    for size in (1, 7, cols, 2 * cols + 1):
        assert torch.equal(expected, read_whole(moved, size))
    workspace = Workspace(torch.device("cpu"))
    assert torch.equal(expected[2 : rows - 1, 1:3], chunk_of(moved, Chunk(2, rows - 1, 1, 3), workspace))
