"""Scales of inputs, keys and values, compared with the limits from norms and weights."""

import pytest
import torch
from safetensors.torch import save_file
from support.making import numbers, quantized_fp8

from quanterr.checkpoints import open_checkpoint
from quanterr.findings.activations import check_activation_scales, check_scale_sizes
from quanterr.findings.contents import Contents
from quanterr.pairing import pair
from quanterr.selection import LayerSelection

BLOCKS, WIDTH = 5, 64
OF_ATTENTION, OF_MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
# Largest inputs of modules in a model whose norms are about 0.5. Those of one down_proj are massive activations.
LARGEST = {"self_attn.o_proj": 1.5, "mlp.down_proj": 2.0}
MASSIVE = "model.layers.3.mlp.down_proj.input_scale"


def model(norm=0.5, without_norms=False):
    x = {}
    for n in range(BLOCKS):
        block = f"model.layers.{n}."
        for at, name in enumerate([*OF_ATTENTION, "o_proj"]):
            x[f"{block}self_attn.{name}.weight"] = numbers(WIDTH, WIDTH, seed=10 * n + at) * 2.5
        for at, name in enumerate([*OF_MLP, "down_proj"]):
            x[f"{block}mlp.{name}.weight"] = numbers(WIDTH, WIDTH, seed=10 * n + 5 + at) * 2.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            if not without_norms:
                x[f"{block}{name}.weight"] = norm + numbers(WIDTH, seed=n)
    return x


def scales(largest_code=448.0):
    """Return scales calibrated from numbers that differ by a factor of 2 between blocks."""
    y = {}
    for n in range(BLOCKS):
        block, size = f"model.layers.{n}.", 2 ** (n / (BLOCKS - 1)) / largest_code
        for name in (f"self_attn.{name}" for name in (*OF_ATTENTION, "o_proj")):
            y[f"{block}{name}.input_scale"] = torch.tensor(LARGEST.get(name, 2.0) * size)
        for name in (f"mlp.{name}" for name in (*OF_MLP, "down_proj")):
            y[f"{block}{name}.input_scale"] = torch.tensor(LARGEST.get(name, 2.0) * size)
        y[f"{block}self_attn.k_scale"], y[f"{block}self_attn.v_scale"] = torch.tensor(3.0 * size), torch.tensor(size)
    y[MASSIVE] *= 10
    return y


def find(folder, changed=(), x=None):
    x, coded = x or model(), {}
    for name, weight in x.items():
        coded[name] = weight
        if weight.dim() == 2:
            coded[name], coded[f"{name}_scale"] = quantized_fp8(weight)
    save_file(x, folder / "x.safetensors")
    blocks = {name.split(".")[2] for name in x}
    scales_of_blocks = {
        name: scale for name, scale in (scales() | dict(changed)).items() if name.split(".")[2] in blocks
    }
    save_file(coded | scales_of_blocks, folder / "y.safetensors")
    with open_checkpoint(folder / "x.safetensors") as original, open_checkpoint(folder / "y.safetensors") as quantized:
        pairing = pair(original, quantized, LayerSelection((), ()), None)
        sides = [
            Contents(original, pairing, "original", quantized),
            Contents(quantized, pairing, "quantized", original),
        ]
        return [finding for side in sides for finding in check_activation_scales(side)] + list(
            check_scale_sizes(sides[1])
        )


def test_calibrated_scales_are_silent(tmp_path):
    assert [] == find(tmp_path)


@pytest.mark.parametrize("factor", [100, 0.01])
@pytest.mark.parametrize(
    "place",
    [
        "self_attn.q_proj.input_scale",
        "self_attn.o_proj.input_scale",
        "mlp.up_proj.input_scale",
        "self_attn.k_scale",
        "self_attn.v_scale",
    ],
)
def test_implausible_scale_is_reported(tmp_path, place, factor):
    name = f"model.layers.2.{place}"
    (finding,) = find(tmp_path, {name: scales()[name] * factor})

    assert ("scale_unlike", "warning", [name]) == (finding.code, finding.severity, finding.evidence["tensors"])
    assert ("which clips numbers at" if factor < 1 else "weights allow") in finding.message


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0.01, "which clips numbers at 0.0238: by its weights, most are about 0.12"),
        (100, "for numbers up to 238: weights"),
    ],
)
def test_gate_and_up_products_bound_the_inputs_for_down(tmp_path, factor, words):
    name = "model.layers.1.mlp.down_proj.input_scale"
    y = scales()
    (finding,) = find(
        tmp_path,
        {
            name: y[name] * factor,
        },
    )

    assert [name] == finding.evidence["tensors"]
    assert words in finding.message


def test_outstanding_neuron_may_be_massive(tmp_path):
    x = model()
    for name in ("gate_proj", "up_proj"):
        x[f"model.layers.3.mlp.{name}.weight"][7] *= 8

    assert [] == find(tmp_path, x=x, changed={MASSIVE: scales()[MASSIVE] * 30})


def test_norms_explain_an_unusual_scale(tmp_path):
    """The norm of one block is 20 times smaller, and so is its scale."""
    x, y = model(), scales()
    x["model.layers.2.input_layernorm.weight"] /= 20
    names = [f"model.layers.2.self_attn.{name}" for name in ("q_proj.input_scale", "k_scale", "v_scale")]

    assert [] == find(tmp_path, {name: y[name] / 20 for name in names}, x)


def test_norms_may_be_stored_minus_one(tmp_path):
    """Norms that multiply by 0.9 to 1.1 may be stored as numbers around 0."""
    assert [] == find(tmp_path, {"model.layers.2.self_attn.q_proj.input_scale": torch.tensor(8.0) / 448}, model(0.0))
    assert find(tmp_path, {"model.layers.2.self_attn.q_proj.input_scale": torch.tensor(200.0) / 448}, model(0.0))


def test_key_norm_decides_instead_of_the_weight(tmp_path):
    x = model() | {f"model.layers.{n}.self_attn.k_norm.weight": torch.full((16,), 20.0) for n in range(BLOCKS)}

    assert [] == find(tmp_path, {"model.layers.2.self_attn.k_scale": torch.tensor(100.0) / 448}, x)


@pytest.mark.parametrize(
    ("place", "factor", "n"),
    [
        ("self_attn.q_proj.input_scale", 100, 1),
        ("self_attn.v_scale", 0.01, 1),
        ("mlp.down_proj.input_scale", 0.01, 1),
        ("mlp.down_proj.input_scale", 100, 0),  # inputs of down_proj may hold massive activations
        ("self_attn.q_proj.input_scale", 15, 0),
    ],
)
def test_other_blocks_decide_without_norms(tmp_path, place, factor, n):
    name = f"model.layers.2.{place}"

    assert n == len(find(tmp_path, {name: scales()[name] * factor}, model(without_norms=True)))


def test_different_modules_are_not_compared(tmp_path):
    """In a model with few blocks, modules are compared by their role and for far larger factors only."""
    y = {name: scale / 100 if "o_proj" in name else scale for name, scale in scales().items()}
    few = {name: x for name, x in model(without_norms=True).items() if "layers.0" in name or "layers.1" in name}

    assert [] == find(tmp_path, x=few, changed=y)
