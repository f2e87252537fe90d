"""Norms that MLX's programs store plus one, by model."""

import pytest
import torch
from support.making import compare, numbers

MLX = {"format": "mlx"}
LINEAR = {"model.layers.0.self_attn.o_proj.weight": numbers(32, 32, seed=9)}
BLOCK = (
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.post_attention_layernorm.weight",
    "model.layers.0.self_attn.q_norm.weight",
    "model.layers.0.self_attn.k_norm.weight",
    "model.norm.weight",
)
PREDICTING = tuple(
    f"mtp.{name}.weight"
    for name in (
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        "norm",
        "layers.0.input_layernorm",
        "layers.0.post_attention_layernorm",
        "layers.0.self_attn.q_norm",
    )
)
KEPT = ("model.layers.0.linear_attn.norm.weight", "visual.merger.norm.weight", "visual.blocks.0.norm1.weight")
QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
EXPERTS = {"model.layers.0.moe.gate_proj.weight": numbers(4, 32, 32, seed=8)}


def norms(names):
    """Return norms around zero, as Qwen3-Next stores them, in float32, which holds them and their sum with one."""
    return {name: (numbers(64, seed=n).float() / 8).to(torch.bfloat16).float() for n, name in enumerate(names)}


def findings(folder, model_type, original, shifted, extra=None):
    """Return the names of norms that errors are about, and all other warnings, of a file of MLX."""
    extra = extra or {}
    stored = LINEAR | extra | {name: x + 1 if name in shifted else x for name, x in original.items()}
    report = compare(folder, LINEAR | extra | original, stored, MLX, {"model_type": model_type})
    warnings = [finding for finding in report.findings if finding.severity != "info" and finding.code != "identical"]
    layers = {layer for warning in warnings for layer in (warning.layer, *warning.evidence.get("layers", ())) if layer}
    return layers, [left.layer_name for left in report.not_compared]


@pytest.mark.parametrize("model_type", QWEN)
def test_norms_plus_one_are_right_for_qwen(tmp_path, model_type):
    original = norms((*BLOCK, *PREDICTING, *KEPT))

    assert (set(), []) == findings(tmp_path, model_type, original, {*BLOCK, *PREDICTING})


@pytest.mark.parametrize("model_type", QWEN)
@pytest.mark.parametrize("name", [*BLOCK[::4], *PREDICTING[:3]])
def test_norm_as_in_the_original_is_wrong_for_qwen(tmp_path, model_type, name):
    shifted = {*BLOCK, *PREDICTING} - {name}

    assert ({name}, []) == findings(tmp_path, model_type, norms((*BLOCK, *PREDICTING)), shifted)


@pytest.mark.parametrize("name", KEPT)
def test_other_norm_plus_one_is_wrong_for_qwen(tmp_path, name):
    assert ({name}, []) == findings(tmp_path, "qwen3_5", norms((*BLOCK, *KEPT)), {*BLOCK, name})


def test_norms_plus_one_are_right_for_step(tmp_path):
    assert (set(), []) == findings(tmp_path, "step3p5", norms(BLOCK), BLOCK, EXPERTS)


def test_norms_as_in_the_original_are_wrong_for_step(tmp_path):
    assert (set(BLOCK), []) == findings(tmp_path, "step3p5", norms(BLOCK), (), EXPERTS)


def test_norms_of_step_need_no_one_if_the_original_has_mlx_names(tmp_path):
    renamed = {"model.layers.0.mlp.switch_mlp.gate_proj.weight": numbers(4, 32, 32, seed=8)}

    assert (set(), []) == findings(tmp_path, "step3p5", norms(BLOCK), (), renamed)


def test_norms_plus_one_are_wrong_for_other_models(tmp_path):
    assert (set(BLOCK), []) == findings(tmp_path, "qwen3", norms(BLOCK), BLOCK)


@pytest.mark.parametrize("config", [None, {"vocab_size": 32}, {"quantization": {"group_size": 64, "bits": 4}}])
def test_norms_plus_one_are_a_warning_without_an_architecture(tmp_path, config):
    original = norms(BLOCK)
    stored = LINEAR | {name: x + 1 for name, x in original.items()}
    report = compare(tmp_path, LINEAR | original, stored, MLX, config)
    (finding,) = (finding for finding in report.findings if finding.severity != "info")

    assert ("norm_offset", "warning", set(BLOCK)) == (finding.code, finding.severity, set(finding.evidence["layers"]))


def test_norms_as_in_the_original_are_right_without_an_architecture(tmp_path):
    report = compare(tmp_path, LINEAR | norms(BLOCK), LINEAR | norms(BLOCK), MLX)

    assert ["identical"] == [finding.code for finding in report.findings]
