"""Models in their authors' names are paired with Hugging Face's names for them."""

import pytest
import torch
from support.making import compare, numbers, open_pairing, quantized_fp8, store

import quanterr
from quanterr.pairing.converters.authors import AUTHORS
from quanterr.pairing.names import canonicalize

BLOCK = "encoder.block.1.layer."
WAN_TO_HUGGING_FACE = {
    "token_embedding.weight": "shared.weight",
    "norm.weight": "encoder.final_layer_norm.weight",
    "blocks.1.norm1.weight": f"{BLOCK}0.layer_norm.weight",
    "blocks.1.attn.q.weight": f"{BLOCK}0.SelfAttention.q.weight",
    "blocks.1.attn.k.weight": f"{BLOCK}0.SelfAttention.k.weight",
    "blocks.1.attn.v.weight": f"{BLOCK}0.SelfAttention.v.weight",
    "blocks.1.attn.o.weight": f"{BLOCK}0.SelfAttention.o.weight",
    "blocks.1.pos_embedding.embedding.weight": f"{BLOCK}0.SelfAttention.relative_attention_bias.weight",
    "blocks.1.norm2.weight": f"{BLOCK}1.layer_norm.weight",
    "blocks.1.ffn.gate.0.weight": f"{BLOCK}1.DenseReluDense.wi_0.weight",
    "blocks.1.ffn.fc1.weight": f"{BLOCK}1.DenseReluDense.wi_1.weight",
    "blocks.1.ffn.fc2.weight": f"{BLOCK}1.DenseReluDense.wo.weight",
}
LLAMA = "model.layers.1."
TENSORRT_LLM = {
    "vocab_embedding": ("model.embed_tokens",),
    "ln_f": ("model.norm",),
    "layers.1.input_layernorm": (f"{LLAMA}input_layernorm",),
    "layers.1.post_layernorm": (f"{LLAMA}post_attention_layernorm",),
    "layers.1.attention.qkv": tuple(f"{LLAMA}self_attn.{letter}_proj" for letter in "qkv"),
    "layers.1.attention.dense": (f"{LLAMA}self_attn.o_proj",),
    "layers.1.mlp.fc": (f"{LLAMA}mlp.gate_proj",),
    "layers.1.mlp.gate": (f"{LLAMA}mlp.up_proj",),
    "layers.1.mlp.proj": (f"{LLAMA}mlp.down_proj",),
}


def test_umt5_of_wan_is_paired_with_hugging_face_names_both_ways(tmp_path):
    wan = {name: numbers(32, 32, seed=n) for n, name in enumerate(WAN_TO_HUGGING_FACE)}
    other = {WAN_TO_HUGGING_FACE[name]: value for name, value in wan.items()}
    for number, (x, y) in enumerate(((wan, other), (other, wan))):
        (folder := tmp_path / str(number)).mkdir()
        report = compare(folder, x, y)

        assert ("pass", [], []) == (report.verdict, report.not_compared, report.layers)
        assert x.keys() == {layer.layer_name for layer in report.lossless}


def tensorrt_llm():
    """Return weights in Hugging Face's names, and the same in TensorRT-LLM's with FP8 codes."""
    original, stored = {"lm_head.weight": numbers(64, 32, seed=99)}, {"lm_head.weight": numbers(64, 32, seed=99)}
    for number, (name, parts) in enumerate(TENSORRT_LLM.items()):
        is_vector = "ln_f" in name or "layernorm" in name
        shape = (32,) if is_vector else (32, 32)
        values = [numbers(*shape, seed=10 * number + n) for n in range(len(parts))]
        original |= {f"{part}.weight": value for part, value in zip(parts, values, strict=True)}
        joined = torch.cat(values)
        stored[f"transformer.{name}.weight"] = joined
        if not is_vector and "." in name:
            codes, scale = quantized_fp8(joined)
            stored |= {
                f"transformer.{name}.weight": codes,
                f"transformer.{name}.weights_scaling_factor": scale.reshape(1),
                f"transformer.{name}.activation_scaling_factor": torch.ones(1),
            }
    return original, stored


def test_tensorrt_llm_scales_multiply_the_codes(tmp_path):
    original, stored = tensorrt_llm()
    report = compare(tmp_path, original, stored)

    assert [] == report.not_compared
    assert {"fp8_tensor"} == {layer.format for layer in report.layers}
    assert 7 == len(report.layers)
    assert min(layer.snr_db for layer in report.layers) > 25  # E4M3 has an error of about 2^-5
    assert {"unloadable"} == {finding.code for finding in report.findings}


def test_tensorrt_llm_codes_of_packed_integers_are_refused_by_name(tmp_path):
    name = "transformer.layers.0.mlp.fc"
    stored = {
        f"{name}.weight": torch.zeros(32, 16, dtype=torch.int8),
        f"{name}.weights_scaling_factor": torch.ones(32, 1, dtype=torch.float16),
        f"{name}.prequant_scaling_factor": torch.ones(32, dtype=torch.float16),
    }
    (finding,) = quanterr.inspect(store(tmp_path / "m.safetensors", stored)).findings

    assert "error" == finding.severity
    assert "stored as TensorRT-LLM's own checkpoint, which is not supported" in finding.message


def test_other_layers_named_dense_stay_as_they_are(tmp_path):
    names = ("gpt_neox.layers.0.attention.dense.weight", "gpt_neox.layers.0.mlp.gate.weight")
    weights = {name: numbers(8, 8, seed=n) for n, name in enumerate(names)}
    x = store(tmp_path / "x.safetensors", weights)
    y = store(tmp_path / "y.safetensors", {name.removeprefix("gpt_neox."): value for name, value in weights.items()})
    with open_pairing(x, y) as plan:
        assert {pair.name: pair.quantized.name for pair in plan.pairs} == {
            name: name.removeprefix("gpt_neox.") for name in names
        }


# Family → key of transformers' table of conversions, and the path in front of its authors' names.
OF_TRANSFORMERS = {
    "DeepSeek-V4": ("deepseek_v4", ""),
    "GLM-5": ("glm5_next", "model."),
    "HY-V4": ("hy_v4", "model."),
    "EXAONE": ("exaone", "transformer."),
    "PhiMoE": ("phimoe", "model."),
    "Granite": ("granitemoe", "model."),
    "OLMo Hybrid": ("olmo_hybrid", "model."),
    "Nomic": ("nomic_bert", ""),
    "GPT-NeoX": ("GPTNeoXForCausalLM", ""),
}


@pytest.mark.session  # imports transformers
@pytest.mark.parametrize("family", OF_TRANSFORMERS)
def test_rows_agree_with_the_renames_of_transformers(family):
    conversions = pytest.importorskip("transformers.conversion_mapping")
    core = pytest.importorskip("transformers.core_model_loading")
    key, before = OF_TRANSFORMERS[family]
    rows = conversions.get_checkpoint_conversion_mapping(key)
    if rows is None:
        pytest.skip(f"this transformers has no {key}")
    renames = [row for row in rows if isinstance(row, core.WeightRenaming)]
    for author_name, pieces in AUTHORS[family]["tensors"].items():
        renamed = set()
        for name in (author_name, f"{author_name}.weight"):
            name = before + name.replace("*", "3")
            for row in renames:
                name, _ = row.rename_source_key(name)
            renamed.add(canonicalize(name)[0])
        assert len(pieces) > 1 or canonicalize(pieces[0].replace("*", "3"))[0] in renamed, author_name


def test_hyper_connections_of_transformers_have_their_names_in_deepseek_v4(tmp_path):
    names = {
        "layers.0.hc_attn_fn": "model.layers.0.attn_hc.fn",
        "layers.0.ffn.gate.weight": "model.layers.0.mlp.gate.weight",
        "layers.0.ffn.gate.bias": "model.layers.0.mlp.gate.e_score_correction_bias",
        "layers.0.ffn.experts.1.w2.weight": "model.layers.0.mlp.experts.1.down_proj.weight",
        "layers.0.attn.q_norm.weight": "model.layers.0.self_attn.q_a_norm.weight",
    }
    original = {name: numbers(*(8,) * (2 - name.endswith("bias")), seed=n) for n, name in enumerate(names)}
    report = compare(tmp_path, original, {names[name]: value for name, value in original.items()})

    assert ([], []) == (report.not_compared, report.layers)
    assert names.keys() == {layer.layer_name for layer in report.lossless}
