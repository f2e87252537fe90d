"""Differences between two configurations of one model."""

import json

import pytest
import torch
from support.making import numbers, store

import quanterr
from quanterr.checkpoints import Checkpoint, GgufMetadata
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
    return Checkpoint("", "folder", (), dict.fromkeys(entries), config={"config.json": config})


def of_gguf(values, entries=ROPE):
    return Checkpoint("", "file", (), dict(entries), gguf=GgufMetadata(values))


def find(original, quantized):
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
    (finding,) = find(of_config(LLAMA), of_config(LLAMA | {key: value}))
    name = {"hidden_act": "hidden_activation"}.get(key, key)

    assert ("config_mismatch", "warning", name) == (finding.code, finding.severity, finding.evidence["key"])
    assert f"config.json of the quantized checkpoint declares {name} " in finding.message


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
    assert [] == find(of_config(LLAMA), of_config(quantized))
    assert [] == find(of_config(quantized), of_config(LLAMA))


def test_names_from_other_families_mean_the_same_keys():
    gpt2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
    alike = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "hidden_act": "gelu_pytorch_tanh"}

    assert [] == find(of_config(gpt2), of_config(alike))
    (finding,) = find(of_config(gpt2), of_config(alike | {"layer_norm_eps": 1e-12}))
    assert "rms_norm_eps" == finding.evidence["key"]


def test_separate_output_layer_may_be_declared_where_it_is_stored():
    assert [] == find(of_config(LLAMA), of_config(LLAMA | {"tie_word_embeddings": False}, ["lm_head.weight"]))
    assert 1 == len(find(of_config(LLAMA | {"tie_word_embeddings": False}), of_config(LLAMA, ["lm_head.weight"])))


class TestGguf:
    def test_matching_metadata_is_silent(self):
        assert [] == find(of_config(LLAMA), of_gguf(METADATA))
        assert [] == find(of_gguf(METADATA), of_gguf(METADATA))

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
        (finding,) = find(of_config(LLAMA), of_gguf(METADATA | {f"llama.{name}": value}))

        assert ("config_mismatch", "warning", key) == (finding.code, finding.severity, finding.evidence["key"])
        assert finding.message.startswith("the GGUF metadata of the quantized checkpoint declares ")

    def test_frequency_factors_must_be_stored_where_they_are_needed(self):
        (finding,) = find(of_config(LLAMA), of_gguf(METADATA, {}))
        assert "stores no rope_freqs.weight" in finding.message
        assert [] == find(of_config(LLAMA | {"rope_scaling": None}), of_gguf(METADATA, {}))
        (finding,) = find(of_config(LLAMA | {"rope_scaling": None}), of_gguf(METADATA))
        assert "declares no rope_scaling, but the quantized checkpoint stores rope_freqs.weight" in finding.message

    def test_converter_conventions_are_not_differences(self):
        latent = LLAMA | {"kv_lora_rank": 512, "num_key_value_heads": 4, "num_experts": 8, "intermediate_size": 999}
        latent |= {"num_nextn_predict_layers": 1, "num_hidden_layers": 1}

        assert [] == find(of_config(latent), of_gguf(METADATA))


class TestAbsentKeys:
    """What llama.cpp and transformers assume for an absent key counts."""

    def of_architecture(self, name, values=(), without=()):
        model = {key.replace("llama.", f"{name}."): value for key, value in METADATA.items()}
        model |= {"general.architecture": name} | {f"{name}.{key}": value for key, value in dict(values).items()}
        return of_gguf({key: value for key, value in model.items() if key not in {f"{name}.{k}" for k in without}})

    @pytest.mark.parametrize(
        ("absent", "config", "key", "says"),
        [
            ("rope.freq_base", {}, "rope_theta", "lacks llama.rope.freq_base, so that llama.cpp takes 10000"),
            ("attention.head_count_kv", {}, "num_key_value_heads", "llama.cpp takes 4 for num_key_value_heads"),
            ("attention.key_length", {"head_dim": 32}, "head_dim", "llama.cpp takes 16 for head_dim"),
            ("x", {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "lacks llama.rope.dimension_count"),
        ],
    )
    def test_default_of_any_architecture_is_compared(self, absent, config, key, says):
        (finding,) = find(
            of_config(LLAMA | config), self.of_architecture("llama", without=[absent, "attention.key_length"])
        )

        assert ("config_mismatch", "warning", key) == (finding.code, finding.severity, finding.evidence["key"])
        assert says in finding.message
        assert f"config.json of the original declares {key}" in finding.message

    @pytest.mark.parametrize(
        ("architecture", "key", "default", "other"),
        [
            ("gemma2", "sliding_window", 4096, 512),
            ("gemma2", "attn_logit_softcapping", 50.0, 30.0),
            ("gemma2", "final_logit_softcapping", 30.0, 50.0),
            ("gemma3", "rope_local_base_freq", 10000.0, 20000.0),
            ("granite", "residual_multiplier", 1.0, 0.22),
            ("granitemoe", "embedding_multiplier", 1.0, 12.0),
            ("granitehybrid", "attention_multiplier", 0.25, 0.0078125),
            ("deepseek2", "routed_scaling_factor", 1.0, 2.5),
            ("deepseek2", "norm_topk_prob", False, True),
            ("deepseek2", "scoring_func", "softmax", "sigmoid"),
            ("glm4moe", "routed_scaling_factor", 1, 2.5),
        ],
    )
    def test_default_of_an_architecture_is_compared(self, architecture, key, default, other):
        config = {name: value for name, value in LLAMA.items() if name != "sliding_window"}

        assert [] == find(of_config(config | {key: default}), self.of_architecture(architecture))
        (finding,) = find(of_config(config | {key: other}), self.of_architecture(architecture))
        assert key == finding.evidence["key"]
        assert [] == find(of_config(config | {key: other}), self.of_architecture("llama"))

    @pytest.mark.parametrize(
        ("name", "value", "config"),
        [
            ("expert_gating_func", 2, {"scoring_func": "sigmoid"}),
            ("expert_weights_norm", True, {"norm_topk_prob": True}),
            ("expert_weights_norm", False, {"norm_topk_prob": False}),
            ("expert_weights_scale", 2.5, {"routed_scaling_factor": 2.5}),
        ],
    )
    def test_declared_keys_of_experts_are_compared(self, name, value, config):
        y = self.of_architecture("deepseek2", {name: value})
        ((key, declared),) = config.items()
        other = {"sigmoid": "softmax", True: False, False: True, 2.5: 1.0}[declared]

        assert [] == find(of_config(LLAMA | config), y)
        assert [key] == [finding.evidence["key"] for finding in find(of_config(LLAMA | {key: other}), y)]

    def test_gemma3_without_a_window_attends_to_all_tokens(self):
        (finding,) = find(of_config(LLAMA | {"sliding_window": 512}), self.of_architecture("gemma3"))

        assert (
            "lacks gemma3.attention.sliding_window, so that llama.cpp takes none for sliding_window" in finding.message
        )

    @pytest.mark.parametrize(("model", "keys"), [("llama", []), ("gemma3_text", ["rope_theta"]), ("unknown", [])])
    def test_config_without_rope_theta_has_the_default_of_transformers(self, model, keys):
        config = {key: value for key, value in LLAMA.items() if key != "rope_theta"} | {"model_type": model}
        y = self.of_architecture("llama", without=["rope.freq_base"])

        assert keys == [finding.evidence["key"] for finding in find(of_config(config), y)]
        assert [] == find(of_config(config), of_config(LLAMA))

    def test_two_gguf_files_may_declare_defaults_or_not(self):
        declared = of_gguf(METADATA | {"llama.rope.freq_base": 10000.0})
        absent = self.of_architecture("llama", without=["rope.freq_base"])

        assert [] == find(declared, absent) + find(absent, declared) + find(absent, absent)
        assert ["rope_theta"] == [finding.evidence["key"] for finding in find(of_gguf(METADATA), absent)]
        assert ["rope_theta"] == [finding.evidence["key"] for finding in find(absent, of_gguf(METADATA))]

    def test_projectors_and_denoisers_have_no_defaults(self):
        y = {"general.architecture": "clip", "clip.vocab_size": 256, "clip.attention.head_count": 4}

        assert [] == find(of_config(LLAMA), of_gguf(y | {"clip.embedding_length": 64}))

    @pytest.mark.parametrize(
        ("scaling", "values", "entries", "lacks"),
        [
            ({"type": "linear", "factor": 4.0}, {}, {}, "llama.rope.scaling.factor"),
            ({"rope_type": "yarn", "factor": 4.0}, {}, {}, "llama.rope.scaling.factor"),
            ({"rope_type": "yarn", "factor": 4.0}, {"rope.scaling.factor": 4.0}, {}, "llama.rope.scaling.type"),
            ({"rope_type": "longrope", "short_factor": [1.0]}, {}, {}, "rope_factors_short.weight"),
            ({"type": "linear", "factor": 4.0}, {"rope.scaling.factor": 4.0}, {}, None),
            ({"type": "linear", "factor": 1.0}, {}, {}, None),
            ({"type": "dynamic", "factor": 4.0}, {}, {}, None),
            ({"type": "su"}, {}, {"rope_factors_short.weight": None}, None),
        ],
    )
    def test_absent_scaling_of_rotations_is_reported(self, scaling, values, entries, lacks):
        y = of_gguf(METADATA | {f"llama.{key}": value for key, value in values.items()}, entries)
        messages = [finding.message for finding in find(of_config(LLAMA | {"rope_scaling": scaling}), y)]

        assert [lacks] * (lacks is not None) == [lacks for message in messages if f" {lacks}" in message]
        assert len(messages) == (lacks is not None)

    def test_base_computed_from_alpha_is_no_difference(self):
        config = LLAMA | {"rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}

        assert [] == find(of_config(config), of_gguf(METADATA, {}))


def test_compare_reports_the_mismatch(tmp_path):
    x = {"model.layers.0.mlp.up_proj.weight": numbers(16, 64)}
    report = quanterr.compare(
        store(tmp_path / "x", x, config=LLAMA), store(tmp_path / "y", x, config=LLAMA | {"rope_theta": 1e4})
    )

    assert "declares rope_theta 10000, config.json of the original 500000" in json.dumps(
        [finding.message for finding in report.findings]
    )


@pytest.mark.parametrize(("is_own", "n"), [(True, 1), (False, 0)])
def test_head_tied_by_the_quantized_configuration_alone_must_be_the_embedding(tmp_path, is_own, n):
    config = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    embedding, path = numbers(256, 64), "model.embed_tokens.weight"
    tensors = {path: embedding, "lm_head.weight": numbers(256, 64, seed=1) if is_own else embedding}
    original = store(tmp_path / "original", tensors, config=config)
    quantized = store(tmp_path / "quantized", tensors, config=config | {"tie_word_embeddings": True})
    findings = quanterr.compare(original, quantized, device="cpu").findings

    assert [("warning", "tie_word_embeddings")] * n == [
        (finding.severity, finding.evidence["key"]) for finding in findings if finding.code == "config_mismatch"
    ]


def test_declared_rows_of_a_padded_vocabulary_are_reported_with_the_weight(tmp_path):
    name, x = "model.embed_tokens.weight", numbers(256, 64)
    y = torch.cat([x, torch.zeros(16, 64, dtype=x.dtype)])
    sides = [
        store(tmp_path / side, {name: weight}, config=LLAMA | {"vocab_size": len(weight), "num_hidden_layers": 0})
        for side, weight in (("x", x), ("y", y))
    ]
    report = quanterr.compare(*sides, device="cpu")

    assert [("info", name)] == [
        (finding.severity, finding.layer) for finding in report.findings if "more rows" in finding.message
    ]
    assert [] == [finding.message for finding in report.findings if finding.evidence.get("key") == "vocab_size"]
    assert not [finding.message for finding in report.findings if "declares vocab_size" in finding.message]
