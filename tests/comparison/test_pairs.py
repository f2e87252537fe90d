"""Pairs of tensors for metrics of one's own: names and values as a comparison has them."""

import pytest
import torch
from support.golden_files import CASES
from support.making import numbers, quantized_int8
from support.stored import pair

import quanterr
from quanterr.errors import CheckpointError, UsageError


def test_pairs_have_the_numbers_of_a_comparison(tmp_path):
    x, y = pair(tmp_path)
    report = quanterr.compare(x, y)
    snr_db = {name: quanterr.measure(a, b)["snr_db"] for name, a, b in quanterr.iterate_pairs(x, y)}

    assert {layer.layer_name: layer.snr_db for layer in report.layers} == pytest.approx(
        {name: snr for name, snr in snr_db.items() if snr != float("inf")}, abs=1e-9
    )


def test_pairs_have_the_shape_and_values_of_the_original():
    stored = {"a.weight": numbers(6, 8), "b.weight": torch.rand(2, 3, 4, dtype=torch.float64)}
    codes, scale = quantized_int8(stored["a.weight"])
    quantized = {"a.weight": codes, "a.weight_scale": scale, "b.weight": stored["b.weight"]}
    values = {name: (x, y) for name, x, y in quanterr.iterate_pairs(stored, quantized)}

    assert stored.keys() == values.keys()
    assert torch.equal(values["a.weight"][0], stored["a.weight"].float())
    assert torch.equal(values["a.weight"][1], codes.float() * scale)
    assert all(torch.equal(side, stored["b.weight"]) for side in values["b.weight"])


def test_layers_are_chosen_as_in_a_comparison(tmp_path):
    x, y = pair(tmp_path)
    report = quanterr.compare(x, y, layers="attn")

    names = {layer.layer_name for layer in (*report.layers, *report.lossless)}
    assert names == {pair.name for pair in quanterr.iterate_pairs(x, y, layers_to_compare="attn")}
    with pytest.raises(UsageError, match='no layer matches "atn"'):
        quanterr.iterate_pairs(x, y, layers="atn")


def test_tensors_left_out_are_counted_in_the_log(log):
    stored = {"a.weight": numbers(4, 4), "b.weight": numbers(4, 4), "ids": torch.arange(4)}
    names = [pair.name for pair in quanterr.iterate_pairs(stored, {"a.weight": numbers(4, 4), "ids": torch.arange(4)})]

    assert ["a.weight"] == names
    assert ["2 tensors left out; compare lists them"] == [record.getMessage() for record in log]


def test_tensor_that_changes_between_two_pairs_is_noticed():
    stored = {"a.weight": numbers(4, 4), "b.weight": numbers(4, 4)}
    pairs = quanterr.iterate_pairs(stored, {name: x.clone() for name, x in stored.items()})
    next(pairs)
    stored["a.weight"].add_(1)

    with pytest.raises(CheckpointError, match="changed while it was read"):
        list(pairs)


def test_missing_checkpoint_is_an_error_of_the_call():
    with pytest.raises(CheckpointError, match=r"^nowhere: no such file$"):
        quanterr.iterate_pairs("nowhere", CASES[0])
