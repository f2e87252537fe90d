"""Experts in another order: with reordered rows of the router, the model is the same; with other rows, it is not."""

import pytest
import torch
from support.making import compare, numbers

PARTS = ("gate_proj", "up_proj", "down_proj")
ORDER = [3, 0, 2, 1]
ROUTER, BIAS = "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.e_score_correction_bias"


def name(expert, part):
    return f"model.layers.0.mlp.experts.{expert}.{part}.weight"


@pytest.fixture(scope="module")
def original():
    experts = {name(n, part): numbers(64, 64, seed=10 * n + k) for n in range(4) for k, part in enumerate(PARTS)}
    return experts | {ROUTER: numbers(4, 64, seed=90), BIAS: numbers(1, 4, seed=91)[0].float()}


def move(original, parts=PARTS, of_router=ORDER, of_bias=ORDER):
    reordered = {name(n, part): original[name(other, part)] for n, other in enumerate(ORDER) for part in parts}
    return original | reordered | {ROUTER: original[ROUTER][of_router], BIAS: original[BIAS][of_bias]}


def as_int8(weights):
    stored = {}
    for key, weight in weights.items():
        if "_proj" not in key:
            stored[key] = weight
            continue
        scale = weight.float().abs().amax(-1, keepdim=True) / 127
        stored |= {key: (weight.float() / scale).round().to(torch.int8), f"{key}_scale": scale}
    return stored


def list_codes(report):
    return {(finding.severity, finding.code) for finding in report.findings}


def test_experts_in_the_order_of_their_router_are_compared_with_their_own(tmp_path, original):
    report = compare(tmp_path, original, as_int8(move(original)))

    assert {("info", "permuted")} == list_codes(report)
    assert 12 == len(report.layers)
    assert all(layer.snr_db > 35 for layer in report.layers)
    assert [ROUTER] == report.findings[0].evidence["layers"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"of_router": [0, 1, 2, 3], "of_bias": [0, 1, 2, 3]},
        {"of_router": [3, 2, 1, 0]},
        {"of_bias": [0, 1, 2, 3]},
        {"parts": ("up_proj",)},
        {"parts": ()},
    ],
    ids=["router", "other order of router", "bias", "one part alone", "router alone"],
)
def test_experts_in_an_order_that_the_router_does_not_have_are_an_error(tmp_path, original, wrong):
    report = compare(tmp_path, original, as_int8(move(original, **wrong)))

    assert "error" in {severity for severity, _ in list_codes(report)}
    assert ("info", "permuted") not in list_codes(report)


def stack(weights):
    stacks = {
        f"model.layers.0.mlp.experts.{part}": torch.stack([weights[name(n, part)] for n in range(4)]) for part in PARTS
    }
    return stacks | {ROUTER: weights[ROUTER]}


def test_stacked_experts_in_the_order_of_their_router_are_in_order_again(tmp_path, original):
    report = compare(tmp_path, stack(original), stack(move(original)))

    assert {("info", "permuted"), ("warning", "identical")} >= list_codes(report) > set()
    assert ("info", "permuted") in list_codes(report)
