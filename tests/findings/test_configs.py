"""Differences between two configurations of one model."""

import json
from types import SimpleNamespace

import pytest
from support.making import numbers, store

import quanterr
from quanterr.checkpoints import GgufMetadata
from quanterr.findings.configs import compare_configs

LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
}
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 16,
    "llama.feed_forward_length": 128,
    "llama.vocab_size": 256,
    "llama.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,  # the float32 next to 1e-6
    "llama.rope.freq_base": 500000.0,
}
ROPE = {"rope_freqs.weight": None}


def of_config(config, entries=()):
    return SimpleNamespace(gguf=None, config={"config.json": config}, entries=dict.fromkeys(entries))


def of_gguf(values, entries=ROPE):
    return SimpleNamespace(gguf=GgufMetadata(values), config={}, entries=entries)


def found(original, quantized):
    return list(compare_configs(original, quantized))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", 10000.0),
        ("rope_scaling", None),
        ("rope_scaling", {"type": "linear", "factor": 8.0}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0}),
        ("rms_norm_eps", 1e-5),
        ("hidden_act", "gelu"),
        ("head_dim", 32),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("num_hidden_layers", 3),
        ("intermediate_size", 96),
        ("vocab_size", 512),
        ("sliding_window", 1024),
        ("tie_word_embeddings", False),
        ("attention_bias", True),
    ],
)
def test_changed_key_is_reported_with_both_values(key, value):
    (one,) = found(of_config(LLAMA), of_config(LLAMA | {key: value}))
    name = {"hidden_act": "hidden_activation"}.get(key, key)

    assert ("config_mismatch", "warning", name) == (one.code, one.severity, one.evidence["key"])
    assert f"config.json of the quantized checkpoint declares {name} " in one.message


@pytest.mark.parametrize(
    "quantized",
    [
        LLAMA,
        LLAMA | {"torch_dtype": "float16", "transformers_version": "5.0", "use_cache": False, "model_type": "other"},
        {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "head_dim", "tie_word_embeddings")},
        LLAMA | {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1.0, "original": None}},
        {"text_config": LLAMA},
        {**LLAMA, "rope_scaling": None, "rope_theta": None}
        | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
        {"quantization_config": {"bits": 4}},
        {},
    ],
    ids=["same", "unrelated", "fewer keys", "former names", "nested", "transformers 5", "no model", "empty"],
)
def test_equal_or_missing_keys_are_silent(quantized):
    assert [] == found(of_config(LLAMA), of_config(quantized))
    assert [] == found(of_config(quantized), of_config(LLAMA))


def test_names_from_other_families_mean_the_same_keys():
    gpt2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
    alike = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "hidden_act": "gelu_pytorch_tanh"}

    assert [] == found(of_config(gpt2), of_config(alike))
    (one,) = found(of_config(gpt2), of_config(alike | {"layer_norm_eps": 1e-12}))
    assert "rms_norm_eps" == one.evidence["key"]


def test_separate_output_layer_may_be_declared_where_it_is_stored():
    assert [] == found(of_config(LLAMA), of_config(LLAMA | {"tie_word_embeddings": False}, ["lm_head.weight"]))
    assert 1 == len(found(of_config(LLAMA | {"tie_word_embeddings": False}), of_config(LLAMA, ["lm_head.weight"])))


class TestGguf:
    def test_matching_metadata_is_silent(self):
        assert [] == found(of_config(LLAMA), of_gguf(METADATA))
        assert [] == found(of_gguf(METADATA), of_gguf(METADATA))

    @pytest.mark.parametrize(
        ("name", "value", "key"),
        [
            ("rope.freq_base", 10000.0, "rope_theta"),
            ("attention.layer_norm_rms_epsilon", 1e-5, "rms_norm_eps"),
            ("attention.head_count", 8, "num_attention_heads"),
            ("attention.head_count_kv", 4, "num_key_value_heads"),
            ("attention.key_length", 32, "head_dim"),
            ("block_count", 3, "num_hidden_layers"),
            ("embedding_length", 32, "hidden_size"),
            ("feed_forward_length", 96, "intermediate_size"),
            ("vocab_size", 255, "vocab_size"),
        ],
    )
    def test_each_different_key_is_reported(self, name, value, key):
        (one,) = found(of_config(LLAMA), of_gguf(METADATA | {f"llama.{name}": value}))

        assert ("config_mismatch", "warning", key) == (one.code, one.severity, one.evidence["key"])
        assert one.message.startswith("the GGUF metadata of the quantized checkpoint declares ")

    def test_frequency_factors_must_be_stored_where_they_are_needed(self):
        (one,) = found(of_config(LLAMA), of_gguf(METADATA, {}))
        assert "stores no rope_freqs.weight" in one.message
        assert [] == found(of_config(LLAMA | {"rope_scaling": None}), of_gguf(METADATA, {}))
        (one,) = found(of_config(LLAMA | {"rope_scaling": None}), of_gguf(METADATA))
        assert "declares no rope_scaling, but the quantized checkpoint stores rope_freqs.weight" in one.message

    def test_converter_conventions_are_not_differences(self):
        latent = LLAMA | {"kv_lora_rank": 512, "num_key_value_heads": 4, "num_experts": 8, "intermediate_size": 999}
        latent |= {"num_nextn_predict_layers": 1, "num_hidden_layers": 1}

        assert [] == found(of_config(latent), of_gguf(METADATA))


def test_compare_reports_the_mismatch(tmp_path):
    x = {"model.layers.0.mlp.up_proj.weight": numbers(16, 64)}
    report = quanterr.compare(
        store(tmp_path / "x", x, config=LLAMA), store(tmp_path / "y", x, config=LLAMA | {"rope_theta": 1e4})
    )

    assert "declares rope_theta 10000, config.json of the original 500000" in json.dumps(
        [finding.message for finding in report.findings]
    )
