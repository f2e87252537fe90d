"""Errors of recipes on synthetic weights, which are seeded and hard to quantize in different ways."""

import json

import pytest
import torch
from support.forked import call

from quanterr.errors import Status
from quanterr.recipes import parse_recipes
from quanterr.recipes.synthetic import WEIGHTS, bench_formats


@pytest.mark.parametrize("name", WEIGHTS)
def test_seed_gives_the_same_weights(name):
    first, again, other = (WEIGHTS[name](64, 200, torch.Generator().manual_seed(n)) for n in (3, 3, 4))

    assert (64, 200) == first.shape
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_weights_match_their_names():
    made = {name: make(400, 1000, torch.Generator().manual_seed(1)) for name, make in WEIGHTS.items()}
    kurtosis = {name: float(x.pow(4).mean() / x.square().mean().square()) for name, x in made.items()}

    assert pytest.approx(3, abs=0.05) == kurtosis["gaussian"]
    assert pytest.approx(1.8, abs=0.02) == kurtosis["uniform"]
    assert kurtosis["heavy tails"] > 6
    assert 10 == int((made["outlier columns"].std(0) > 10).sum())
    assert float(made["channels"].std(1).log().std()) == pytest.approx(1, abs=0.1)


def test_row_scales_help_rows_and_not_columns():
    rows = bench_formats(parse_recipes(["int8_tensor,int8_row"]), 256, 512)
    snr = {(row.recipe, row.weights): row.snr_db for row in rows}

    assert snr["int8_row", "channels"] > snr["int8_tensor", "channels"] + 10
    assert snr["int8_row", "outlier columns"] < snr["int8_row", "gaussian"] - 10
    assert {8 + 32 / 512} == {row.bits_per_weight for row in rows if row.recipe == "int8_row"}
    # by the textbook, 6.02 dB per bit and 1.76, with the largest of 512 at 3.2 sigma
    assert pytest.approx(41.6, abs=1.5) == snr["int8_row", "gaussian"]


def test_command_prints_a_table_or_json():
    words = ("bench-formats", "--to", "fp8_row,nf4", "--rows", 16, "--columns", 64)
    table, document = call(*words), json.loads(call(*words, "--json").stdout)

    assert Status.OK == table.returncode
    assert all(word in table.stdout for word in ("fp8_row", "nf4", *WEIGHTS))
    assert ("quanterr.bench_formats", 10) == (document["schema"], len(document["rows"]))
    assert Status.USAGE == call("bench-formats", "--to", "int4_g128", "--columns", 64).returncode


@pytest.mark.parametrize(("option", "minimum"), [("--rows", 1), ("--columns", 1), ("--seed", 0)])
def test_number_out_of_range_gives_the_usual_message(option, minimum):
    done = call("bench-formats", option, minimum - 1)

    assert Status.USAGE == done.returncode
    assert f"{option} {minimum - 1}: must be at least {minimum}" in done.stderr
