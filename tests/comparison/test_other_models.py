"""Checkpoints of other models, and originals that are another training step of the same model."""

import pytest
import torch
from support.making import compare, numbers, quantized_fp8, store

import quanterr

HIDDEN, BLOCKS = 64, 4


def llama(seed=0, width=HIDDEN):
    """Return the tensors of a language model."""
    tensors = {
        "model.embed_tokens.weight": numbers(96, width, seed=seed),
        "model.norm.weight": 1 + numbers(width, seed=seed),
    }
    for block in range(BLOCKS):
        prefix, seed_of_block = f"model.layers.{block}.", 100 * seed + 10 * block
        tensors[f"{prefix}input_layernorm.weight"] = 1 + numbers(width, seed=seed_of_block)
        for n, name in enumerate(("self_attn.q_proj", "mlp.up_proj", "mlp.gate_proj")):
            tensors[f"{prefix}{name}.weight"] = numbers(width, width, seed=seed_of_block + n + 1)
    return tensors


def flux():
    names = ["img_in", "txt_in", "vector_in.in_layer", "vector_in.out_layer", "time_in.in_layer", "time_in.out_layer"]
    names += [f"double_blocks.{n}.{part}" for n in range(2) for part in ("img_attn.qkv", "img_attn.proj", "img_mlp.0")]
    return {f"{name}.weight": numbers(48, 48, seed=n) for n, name in enumerate(names)}


def in_fp8(x):
    y = {}
    for name, w in x.items():
        if "_proj" in name:
            y[name], y[f"{name}_scale"] = quantized_fp8(w)
        else:
            y[name] = w
    return y


def test_models_of_other_kinds_are_named(tmp_path):
    report = compare(tmp_path, flux(), llama())

    assert report.reasons[0].startswith("different models: FLUX.1, Chroma and a language model like llama")
    assert "prefix" not in report.reasons[0]


def test_declared_model_types_are_named(tmp_path):
    sides = {"qwen2": llama(), "phi": {f"m.{name}": w for name, w in flux().items()}}
    folders = [store(tmp_path / name, x, config={"model_type": name}) for name, x in sides.items()]
    report = quanterr.compare(*folders, device="cpu")

    assert report.reasons[0].startswith("different models: qwen2 and phi")


def test_models_of_unknown_kinds_are_told_apart_by_their_widths(tmp_path):
    other = {f"own.stage_{number}": w for number, w in enumerate(llama(width=80).values())}
    report = compare(tmp_path, llama(), other)

    assert "norms and biases of the original have 64 elements, in 4 blocks; those of" in report.reasons[0]


def test_prefixed_names_of_the_same_widths_are_not_another_model(tmp_path):
    report = compare(tmp_path, llama(), {name.replace("model.", "own.x_"): w for name, w in llama().items()})

    assert "different models" not in " ".join(report.reasons)


@pytest.mark.parametrize("share", [None, 0.35, 0.1])
def test_another_original_is_the_only_error(tmp_path, share):
    """The weights are unrelated (None), or those of a finetune at 9 or 20 dB."""
    x, other = llama(), llama(seed=1)
    if share is not None:
        other = {name: w.float() + share * other[name].float().sub(other[name].float().mean()) for name, w in x.items()}
    report = compare(tmp_path, x, in_fp8({name: w.bfloat16() for name, w in other.items()}))
    findings = [finding for finding in report.findings if finding.severity != "info"]

    assert [("unquantized_changed", "error")] == [(finding.code, finding.severity) for finding in findings]
    assert findings[0].message.startswith("another original? 6 of 6 tensors")
    assert "12 of 12 quantized weights differ by more than rounding explains, too" in findings[0].message
    assert "another original?" in repr(report)


def test_damaged_weights_of_the_right_original_are_not_another_original(tmp_path):
    x = llama()
    y = in_fp8(x)
    y |= {name: w.view(torch.uint8).flip(1).view(w.dtype) for name, w in y.items() if name.endswith("_proj.weight")}
    report = compare(tmp_path, x, y)

    assert "another original" not in " ".join(finding.message for finding in report.findings)
