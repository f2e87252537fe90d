"""Searches for scales that weigh errors by the importance of columns."""

import pytest
import torch
from support.importance_files import gguf as importance_file
from support.making import store

import quanterr
from quanterr.recipes.calibration import RATIOS

RECIPES = ("int4_g32:scales=mse", "int4_g32:asym:scales=mse", "fp8_row:scales=mse", "int8_block128:scales=mse")
RECIPES += ("gguf_q4_k", "gguf_q3_k")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A weight and the importance of its columns, which differs widely and is partly zero."""
    folder, random = tmp_path_factory.mktemp("importance"), torch.Generator().manual_seed(3)
    x = torch.randn(96, 256, generator=random) * torch.randn(96, 1, generator=random).exp()
    means = (3 * torch.randn(1, 256, generator=random)).exp()
    means[:, 32:40] = 0
    path = store(folder / "x.safetensors", {"model.layers.0.mlp.up_proj.weight": x})
    return x, means[0], path, importance_file(folder / "i.gguf", {"blk.0.ffn_up.weight": (means, [1.0])})


def swept(files, recipe, **more):
    (candidate,) = quanterr.sweep(files[2], [recipe], device="cpu", **more).candidates
    return candidate


@pytest.mark.parametrize("recipe", RECIPES)
def test_search_minimizes_the_weighted_error(files, recipe):
    plain, weighed = swept(files, recipe), swept(files, recipe, importance=files[3])

    assert weighed.snr_db < plain.snr_db  # over all columns equally
    assert weighed.weighted_snr_db > plain.snr_db


def test_best_among_twenty_scales_has_the_smallest_weighted_error(files):
    x, means, *_ = files
    groups, weights, errors = x.view(96, 8, 32), means.view(8, 32), torch.full((96, 8), torch.inf)
    for ratio in RATIOS:
        scale = groups.abs().amax(2, keepdim=True) * ratio / 7.5
        error = ((groups / scale).round().clamp(-8, 7) * scale - groups).square()
        errors = torch.minimum(errors, (error * weights).sum(2))
    best = 10 * torch.log10((x.square() * means).sum() / errors.sum())

    assert (
        pytest.approx(float(best), abs=1e-4) == swept(files, "int4_g32:scales=mse", importance=files[3]).weighted_snr_db
    )


@pytest.mark.parametrize("recipe", ["int4_g32", "nf4", "int4_g32:scales=p99", "gguf_q8_0"])
def test_importance_changes_no_other_calibrator(files, recipe):
    assert swept(files, recipe).snr_db == swept(files, recipe, importance=files[3]).snr_db
