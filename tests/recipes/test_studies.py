"""The cost of outliers and of other scales, compared with quantizing the same weights by hand."""

import json
from math import log10

import pytest
import torch
from support.forked import call
from support.importance_files import gguf as importance_file
from support.making import numbers, store

import quanterr
from quanterr.errors import Status

NAME = "model.layers.0.mlp.up_proj.weight"
RECIPES = ["int8_row", "int4_g32", "nf4", "gguf_q4_0"]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Return a file with a norm and a weight that has a few large elements, and this weight."""
    x = numbers(48, 256, seed=1).float()
    x.view(-1)[:: 12288 // 6] *= 20
    tensors = {NAME: x, "model.norm.weight": numbers(256)}
    return store(tmp_path_factory.mktemp("studied") / "x.safetensors", tensors), x


@pytest.fixture(scope="module")
def studies(original):
    return {study.candidate: study for study in quanterr.sweep(original[0], RECIPES, study=True, device="cpu").studies}


def noise(x, recipe):
    return float((quanterr.fake_quantize(x, recipe) - x).double().square().sum())


@pytest.mark.parametrize("recipe", RECIPES)
def test_outlier_study_equals_removing_the_outliers(original, studies, recipe):
    _, x = original
    for changed in studies[recipe].outliers:
        kept = x.clone()
        kept.view(-1)[x.abs().view(-1).topk(max(round(x.numel() * changed.percent / 100), 1)).indices] = 0
        assert pytest.approx(10 * log10(noise(x, recipe) / noise(kept, recipe)), abs=1e-6) == changed.gain_db
    assert [0.01, 0.1, 1.0] == [changed.percent for changed in studies[recipe].outliers]
    assert studies[recipe].outliers[1].gain_db > 0


def test_scale_study_equals_stretched_and_shrunk_scales(original, studies):
    _, x = original
    scale = x.abs().amax(1, keepdim=True) / 127
    for changed in studies["int8_row"].scales:
        changed_scale = scale * (1 + changed.percent / 100)
        error = (x / changed_scale).round().clamp(-127, 127) * changed_scale - x
        expected = 10 * log10(noise(x, "int8_row") / float(error.double().square().sum()))
        assert pytest.approx(expected, abs=1e-3) == changed.gain_db
    assert {None} == {changed.gain_db for changed in studies["gguf_q4_0"].scales}


def test_sweep_has_no_studies_without_the_option(original):
    assert [] == quanterr.sweep(original[0], ["int8_row"], device="cpu").studies


def test_command_shows_and_stores_studies(original, tmp_path):
    done = call("sweep", "-v", original[0], "--to", "int8_row,gguf_q4_0", "--study", "-o", tmp_path / "s.json")
    document = json.loads((tmp_path / "s.json").read_text())

    assert Status.OK == done.returncode, done.stderr
    assert "dB gained by keeping outliers unquantized and by other scales" in done.stdout
    assert "scale -10 %" in done.stdout
    assert ["int8_row", "gguf_q4_0"] == [study["candidate"] for study in document["studies"]]
    assert torch.tensor([c["gain_db"] for c in document["studies"][0]["scales"]]).isfinite().all()


def test_bandwidth_bounds_tokens_per_second_for_each_recipe(original, tmp_path):
    words = ("sweep", "-v", original[0], "--to", "int8_row,int4_g32", "--hardware", "900GB/s")
    done = call(*words, "-o", tmp_path / "s.json")
    candidates = {
        candidate["name"]: candidate for candidate in json.loads((tmp_path / "s.json").read_text())["candidates"]
    }
    sizes = {name: quanterr_bytes(name) for name in candidates}

    assert "max. tokens/s" in done.stdout
    for name, candidate in candidates.items():
        assert (
            pytest.approx(9e11 / (sizes[name] + 512), rel=1e-9) == candidate["tokens_per_second"]
        )  # 512 bytes for the norm
    ranking = quanterr.sweep(original[0], ["int8_row", "int4_g32"], hardware="900GB/s", device="cpu")
    assert {c.name: c.tokens_per_second for c in ranking.candidates} == {
        name: candidate["tokens_per_second"] for name, candidate in candidates.items()
    }
    refused = call("sweep", original[0], "--hardware", "H1000")
    assert (Status.USAGE, True) == (refused.returncode, "did you mean H100?" in refused.stderr)


def quanterr_bytes(recipe):
    """Return the size of codes and scales for 48 x 256 elements."""
    return {"int8_row": 48 * 256 + 48 * 4, "int4_g32": 48 * 256 // 2 + 48 * 8 * 4 + 16}[recipe]


def test_most_important_columns_may_stay(tmp_path):
    """The two most important of 200 columns are also the largest."""
    x = torch.randn(64, 200, generator=torch.Generator().manual_seed(2))
    x[:, [7, 150]] *= 20
    path = store(tmp_path / "x.safetensors", {"model.layers.0.mlp.up_proj.weight": x})
    means = torch.ones(1, 200).index_fill_(1, torch.tensor([7, 150]), 9.0)
    matrix = importance_file(tmp_path / "i.gguf", {"blk.0.ffn_up.weight": (means, [1.0])})
    plain, known = (
        quanterr.sweep(path, ["int8_row"], study=True, device="cpu", **more).studies[0]
        for more in ({}, {"importance": matrix})
    )
    rest = x.index_fill(1, torch.tensor([7, 150]), 0)
    noises = [float(((quanterr.fake_quantize(y, "int8_row") - y) ** 2).sum()) for y in (x, rest)]

    assert [] == plain.columns
    assert 1.0 == known.columns[0].percent
    assert pytest.approx(10 * log10(noises[0] / noises[1]), abs=1e-6) == known.columns[0].gain_db
    assert plain.scales == known.scales
